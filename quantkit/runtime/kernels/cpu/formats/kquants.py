"""Formats of q2_K, q3_K, q4_K, q5_K and q6_K."""

from __future__ import annotations

from quantkit.codegen.simd import I32, IrBuilder, Value
from quantkit.runtime.kernels.cpu.formats.base import (
    BYTES4,
    BYTES8,
    BYTES16,
    BYTES32,
    FLOATS8,
    GROUPS,
    INTS8,
    WORDS16,
    GroupScales,
    IntegerScales,
    SpreadLanes,
    SubBlock,
    SubBlockScales,
    format_of,
    group_bytes,
    load_half,
    load_halves,
    spread,
)
from quantkit.runtime.kernels.cpu.formats.nonlinear import shift_words


def _pair(ir: IrBuilder, scales: list[Value], j: int) -> SpreadLanes:
    """The scales of the two halves of sub-block j, from two vectors of 8 (one of 16 slows the CPU, see `nonlinear`)."""
    return spread(ir, scales[j // 4], 2 * j % 8, 2 * j % 8 + 1)


@format_of("q2_K", columns=256, nbytes=84, offset=0, largest=3, scale_columns=16, has_minimum=True)
def _q2_k(ir, block):
    d_and_dmin = load_halves(ir, block + 80, 2)
    d, d_min = ir.shuffle(d_and_dmin, None, [0] * 8), ir.shuffle(d_and_dmin, None, [1] * 8) * -1.0
    packed = [ir.load(BYTES8, block + 8 * half).unsigned(I32) for half in range(2)]
    scales, minimums = [(v & 15).real() * d for v in packed], [(v >> 4).real() * d_min for v in packed]
    multipliers = ir.shuffle(ir.load(BYTES16, block), None, [*range(16)] * 2) & 15
    for j in range(8):
        t = j % 4
        bit_pairs = ir.load(BYTES32, block + 16 + 32 * (j // 4))
        codes = shift_words(bit_pairs, -2 * t) & 3
        words = ir.shuffle(multipliers, ir.zero(BYTES32), [2 * j, 32] * 8 + [17 + 2 * j, 48] * 8).view(WORDS16)
        integer_scales = (
            IntegerScales(codes, words, d) if t == 3 else IntegerScales(bit_pairs & (3 << 2 * t), words, d, shift=2 * t)
        )
        yield SubBlock(codes, _pair(ir, scales, j), _pair(ir, minimums, j), integer_scales)


@format_of("q3_K", columns=256, nbytes=110, offset=4, largest=7, scale_columns=16)
def _q3_k(ir, block):
    low = group_bytes(ir, block + 96).unsigned(I32)
    high = ir.splat(ir.load(I32, block + 104), 8).view(BYTES32)
    high = ir.shuffle(high, None, [g % 4 for g in GROUPS]).unsigned(I32)  # the byte with the bits of group g
    numbers = []
    for half in range(2):  # the scale of columns 16 s .. has bit pair s // 4 of byte s % 4
        pairs = high << 4 >> ir.constant(INTS8, [4 * half + g // 4 * 2 for g in GROUPS])
        numbers.append(low >> 4 * half & 15 | pairs & 0x30)
    scales = GroupScales(ir, ir.splat(load_half(ir, block + 108), 8), numbers, 32, [ir.constant(FLOATS8, -4)] * 2)
    third_bits = ir.load(BYTES32, block)
    for j in range(8):
        bit_pairs = ir.load(BYTES32, block + 32 + 32 * (j // 4))
        codes = shift_words(bit_pairs, -2 * (j % 4)) & 3 | shift_words(third_bits, 2 - j) & 4
        yield scales.sub_block(j, codes, codes)


def _scales_and_minimums(ir: IrBuilder, block: Value) -> tuple[SubBlockScales, Value]:
    """The scales of a block of q4_K or q5_K, and its eight minimums.

    Twelve bytes hold eight 6-bit multipliers of d and eight of dmin: bytes 0..3 and 4..7 the first four of each with,
    in their top two bits, the high bits of the last four, whose low nibbles share bytes 8..11.
    """
    packed = [ir.load(BYTES4, block + offset) for offset in (4, 8, 12)]
    first = ir.join(packed[0], packed[2] & 15 | (packed[0] >> 2) & 0x30) & 63
    second = ir.join(packed[1], packed[2] >> 4 | (packed[1] >> 2) & 0x30) & 63
    scales = SubBlockScales(ir, ir.splat(load_half(ir, block), 8), first.unsigned(I32), 0, None)
    return scales, second.unsigned(I32).real() * ir.splat(load_half(ir, block + 2) * -1.0, 8)


@format_of("q4_K", columns=256, nbytes=144, offset=0, largest=15, has_minimum=True)
def _q4_k(ir, block):
    scales, minimums = _scales_and_minimums(ir, block)
    for j in range(8):
        packed = ir.load(BYTES32, block + 16 + 32 * (j // 2))
        codes = shift_words(packed, -4 * (j % 2)) & 15
        yield scales.sub_block(j, codes, codes, minimum=spread(ir, minimums, j))


@format_of("q5_K", columns=256, nbytes=176, offset=0, largest=31, has_minimum=True)
def _q5_k(ir, block):
    scales, minimums = _scales_and_minimums(ir, block)
    fifth_bits = ir.load(BYTES32, block + 16)
    for j in range(8):
        packed = ir.load(BYTES32, block + 48 + 32 * (j // 2))
        codes = shift_words(packed, -4 * (j % 2)) & 15 | shift_words(fifth_bits, 4 - j) & 16
        yield scales.sub_block(j, codes, codes, minimum=spread(ir, minimums, j))


@format_of("q6_K", columns=256, nbytes=210, offset=32, largest=63, scale_columns=16)
def _q6_k(ir, block):
    numbers = [group_bytes(ir, block + 192 + 8 * half).signed(I32) + 128 for half in range(2)]
    scales = GroupScales(ir, ir.splat(load_half(ir, block + 208), 8), numbers, 128, [ir.constant(FLOATS8, -32)] * 2)
    for j in range(8):
        part, t = divmod(j, 4)
        packed = ir.load(BYTES32, block + 64 * part + 32 * (t % 2))
        bit_pairs = ir.load(BYTES32, block + 128 + 32 * part)
        codes = shift_words(packed, -4 * (t // 2)) & 15 | shift_words(bit_pairs, 4 - 2 * t) & 48
        yield scales.sub_block(j, codes, codes)
