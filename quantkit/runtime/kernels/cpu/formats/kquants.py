"""Formats of q2_K, q3_K, q4_K, q5_K and q6_K."""

from __future__ import annotations

from quantkit.codegen.simd import I32, IrBuilder, Value
from quantkit.runtime.kernels.cpu.formats.base import (
    BYTES4,
    BYTES8,
    BYTES16,
    BYTES32,
    INTS8,
    Picked,
    Small,
    Unit,
    format_of,
    load_half,
    load_halves,
    pick,
)
from quantkit.runtime.kernels.cpu.formats.nonlinear import WORDS16, centred, moved


def _pair(ir: IrBuilder, scales: list[Value], unit: int) -> Picked:
    """The numbers of a unit's two sub-blocks, of two vectors of 8 (one of 16 slows the CPU, see `nonlinear`)."""
    return pick(ir, scales[unit // 4], 2 * unit % 8, 2 * unit % 8 + 1)


@format_of("q2_K", columns=256, nbytes=84, offset=0, largest=3, group=16, floor=True)
def _q2_k(ir, block):
    both = load_halves(ir, block + 80, 2)
    d, least = ir.shuffle(both, None, [0] * 8), ir.shuffle(both, None, [1] * 8) * -1.0
    packed = [ir.load(BYTES8, block + 8 * half).unsigned(I32) for half in range(2)]
    scales, floors = [(v & 15).real() * d for v in packed], [(v >> 4).real() * least for v in packed]
    multipliers = ir.shuffle(ir.load(BYTES16, block), None, [*range(16)] * 2) & 15
    for unit in range(8):
        t = unit % 4
        crumbs = ir.load(BYTES32, block + 16 + 32 * (unit // 4))
        codes = moved(crumbs, -2 * t) & 3
        words = ir.shuffle(multipliers, ir.zero(BYTES32), [2 * unit, 32] * 8 + [17 + 2 * unit, 48] * 8).view(WORDS16)
        small = Small(codes, 0, words, d) if t == 3 else Small(crumbs & (3 << 2 * t), 2 * t, words, d)
        yield Unit(codes, _pair(ir, scales, unit), _pair(ir, floors, unit), small)


@format_of("q3_K", columns=256, nbytes=110, offset=4, largest=7, group=16)
def _q3_k(ir, block):
    d = ir.splat(load_half(ir, block + 108), 8)
    low = ir.load(BYTES8, block + 96).unsigned(I32)
    high = ir.shuffle(ir.load(BYTES4, block + 104), None, [0, 1, 2, 3] * 2).unsigned(I32) << 4
    scales = []
    for half in range(2):  # sub-block s has the pair of bits s // 4 of byte s % 4
        pairs = high >> ir.constant(INTS8, [4 * half] * 4 + [4 * half + 2] * 4)
        scales.append(centred(low >> 4 * half & 15 | pairs & 0x30, 32) * d)
    thirds = ir.load(BYTES32, block)
    for unit in range(8):
        crumbs = ir.load(BYTES32, block + 32 + 32 * (unit // 4))
        codes = moved(crumbs, -2 * (unit % 4)) & 3 | moved(thirds, 2 - unit) & 4
        yield Unit(codes, _pair(ir, scales, unit))


def _scales_and_floors(ir: IrBuilder, block: Value) -> tuple[Value, Value]:
    """The eight scales of a block of q4_K or q5_K, and the eight floors.

    Twelve bytes hold eight 6-bit multipliers of d and eight of dmin: bytes 0..3 and 4..7 the first four of each with,
    in their top two bits, the high bits of the last four, whose low nibbles share bytes 8..11.
    """
    packed = [ir.load(BYTES4, block + at) for at in (4, 8, 12)]
    first = ir.join(packed[0], packed[2] & 15 | (packed[0] >> 2) & 0x30) & 63
    second = ir.join(packed[1], packed[2] >> 4 | (packed[1] >> 2) & 0x30) & 63
    scales = first.unsigned(I32).real() * ir.splat(load_half(ir, block), 8)
    return scales, second.unsigned(I32).real() * ir.splat(load_half(ir, block + 2) * -1.0, 8)


@format_of("q4_K", columns=256, nbytes=144, offset=0, largest=15, floor=True)
def _q4_k(ir, block):
    scales, floors = _scales_and_floors(ir, block)
    for unit in range(8):
        packed = ir.load(BYTES32, block + 16 + 32 * (unit // 2))
        yield Unit(moved(packed, -4 * (unit % 2)) & 15, pick(ir, scales, unit), pick(ir, floors, unit))


@format_of("q5_K", columns=256, nbytes=176, offset=0, largest=31, floor=True)
def _q5_k(ir, block):
    scales, floors = _scales_and_floors(ir, block)
    fifths = ir.load(BYTES32, block + 16)
    for unit in range(8):
        packed = ir.load(BYTES32, block + 48 + 32 * (unit // 2))
        codes = moved(packed, -4 * (unit % 2)) & 15 | moved(fifths, 4 - unit) & 16
        yield Unit(codes, pick(ir, scales, unit), pick(ir, floors, unit))


@format_of("q6_K", columns=256, nbytes=210, offset=32, largest=63, group=16)
def _q6_k(ir, block):
    d = ir.splat(load_half(ir, block + 208), 8)
    scales = [ir.load(BYTES8, block + 192 + 8 * half).signed(I32).real() * d for half in range(2)]
    for unit in range(8):
        part, t = divmod(unit, 4)
        packed = ir.load(BYTES32, block + 64 * part + 32 * (t % 2))
        crumbs = ir.load(BYTES32, block + 128 + 32 * part)
        codes = moved(packed, -4 * (t // 2)) & 15 | moved(crumbs, 4 - 2 * t) & 48
        yield Unit(codes, _pair(ir, scales, unit))
