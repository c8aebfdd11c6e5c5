"""Formats of types of few levels, or one scale per row.

These are iq1_bn, iq2_bn, q1_0_g128, q2_0, tq1_0, tq2_0, mxfp4, nvfp4, q8_KV and interleaved iq2_bn_r4.
"""

from __future__ import annotations

from quantkit.codegen.simd import F32, I8, I16, I32, I64, IrBuilder, Value, vector
from quantkit.runtime.kernels.cpu.formats.base import (
    BYTES4,
    BYTES8,
    BYTES16,
    BYTES32,
    FLOATS4,
    INTS8,
    InterleavedSubBlock,
    SubBlock,
    format_of,
    load_half,
    low_then_high,
    spread,
)
from quantkit.types.families.e2m1 import E2M1

_SHORTS16 = vector(16, I16)
E2M1_OFFSET = 12
E2M1_CODES = [int(v) + E2M1_OFFSET for v in E2M1]
_POWERS = [(k - 1) << 23 if k > 1 else 0x200000 << k for k in range(256)]  # bits of 2^(k - 128)


def powers(ir: IrBuilder, exponents: Value) -> Value:
    """2^(k - 128) of eight exponents k in 0 .. 255."""
    small = ir.between(exponents, ir.zero(INTS8), ir.constant(INTS8, 2))
    bits = ir.choose(small, (exponents + 1) << 21, (exponents - 1) << 23)
    return bits.view(vector(8, F32))


def _digit(column: int) -> tuple[int, int]:
    """Byte, and place in it, of a column's ternary digit in a block of iq1_bn."""
    i, j = divmod(column, 16)
    return (12, i) if j == 15 else (3 * i + j // 5, j % 5)


def _digits(ir: IrBuilder, packed: Value, columns: list[int]) -> Value:
    """Ternary digits of 16 columns, as the bytes of 16-bit words.

    The block's bytes become the upper halves of words, so that a product is modulo 256 there.
    """
    positions = [_digit(c) for c in columns]
    loaded = [(byte if byte < 8 else byte + 3) + i // 8 * 16 for i, (byte, _) in enumerate(positions)]
    words = ir.shuffle(packed, ir.zero(BYTES32), [i for byte in loaded for i in (32, byte)]).view(_SHORTS16)
    words = words * ir.constant(_SHORTS16, [3 ** (4 - k) for _, k in positions])
    return ir.multiply_high(words, ir.constant(_SHORTS16, 3)).view(BYTES32)


@format_of("iq1_bn", columns=64, nbytes=13, offset=1, largest=2, head=2)
def _iq1_bn(ir, block, head):
    # a load of 16 bytes could end beyond the tensor
    packed = ir.join(ir.load(BYTES8, block), ir.load(BYTES8, block + 5))
    packed, scale = ir.join(packed, packed), ir.splat(load_half(ir, head), 8)
    # Words of two vectors become bytes, halves of both in turn: one instruction, without crossing 128-bit lanes.
    order = [16 * half + 32 * part + 2 * i for half in range(2) for part in range(2) for i in range(8)]
    for first in (0, 32):
        columns = [[first + 8 * part + c + c // 8 * 8 for c in range(16)] for part in range(2)]
        yield SubBlock(ir.shuffle(*(_digits(ir, packed, each) for each in columns), order), scale)


@format_of("iq2_bn", columns=64, nbytes=16, offset=1, largest=3, head=4)
def _iq2_bn(ir, block, head):
    packed = ir.load(BYTES16, block)
    scale = ir.splat(ir.load(F32, head), 8)
    for shift in (0, 4):
        yield SubBlock(ir.join(packed >> shift, packed >> shift + 2) & 3, scale)


@format_of("iq2_bn_r4", columns=64, nbytes=64, offset=1, largest=3, rows=4, head=16)
def _iq2_bn_r4(ir, block, head):
    d = ir.load(FLOATS4, head)
    for half in range(2):
        packed = ir.load(BYTES32, block + 32 * half)
        steps = [(packed >> 2 * t & 3, 4 * t, 4 * t + 16) for t in range(4)]
        yield InterleavedSubBlock(steps, ir.join(d, d))


@format_of("q1_0_g128", columns=128, nbytes=18, offset=1, largest=2)
def _q1_0_g128(ir, block):
    scale = ir.splat(load_half(ir, block), 8)
    for i in range(4):
        plus = ir.bits(ir.load(I32, block + 2 + 4 * i))
        yield SubBlock(ir.choose(plus, ir.constant(BYTES32, 2), ir.zero(BYTES32)), scale)


@format_of("q8_KV", columns=32, nbytes=32, offset=128, largest=255, head=8)
def _q8_kv(ir, block, head):
    yield SubBlock(ir.load(BYTES32, block) ^ -128, ir.splat(ir.load(F32, head), 8))


@format_of("mxfp4", columns=32, nbytes=17, offset=E2M1_OFFSET, largest=24)
def _mxfp4(ir, block):
    address = ir.table(_POWERS, I32) + (ir.load(I8, block).unsigned(I64) << 2)
    codes = ir.lookup(E2M1_CODES, low_then_high(ir, ir.load(BYTES16, block + 1)))
    yield SubBlock(codes, ir.splat(ir.load(F32, address), 8))


@format_of("nvfp4", columns=64, nbytes=36, offset=E2M1_OFFSET, largest=24, scale_columns=16)
def _nvfp4(ir, block):
    numbers = ir.load(BYTES4, block).unsigned(I16)
    # A float of four bits of exponent is a half whose exponent lacks 8; 127 is no number but 0.
    halves = ir.choose(ir.any_bits(numbers ^ 127, [255] * 4), (numbers & 127) << 7, numbers ^ numbers)
    scales = ir.half_to_float(halves) * 128.0
    for j in range(2):
        packed = ir.load(BYTES16, block + 4 + 16 * j)
        packed = ir.shuffle(packed, None, [*range(8)] * 2 + [*range(8, 16)] * 2).view(INTS8)
        codes = ir.lookup(E2M1_CODES, (packed >> ir.constant(INTS8, [0, 0, 4, 4] * 2)).view(BYTES32) & 15)
        yield SubBlock(codes, spread(ir, scales, 2 * j, 2 * j + 1))


# Of two vectors of 32 bytes, in turn: one byte of each, two bytes of each.
_TURNS = [i + 32 * (i % 2) for i in range(32)]
_PAIRS = [i + 32 * (i % 4 // 2) for i in range(32)]


@format_of("q2_0", columns=64, nbytes=18, offset=1, largest=3)
def _q2_0(ir, block):
    scale = ir.splat(load_half(ir, block), 8)
    for j in range(2):
        packed = ir.load(BYTES8, block + 2 + 8 * j)
        words = ir.shuffle(packed, None, [i // 4 for i in range(32)]).view(INTS8)
        # lane i has its byte four times; each copy keeps two bits
        shifted = [(words >> 2 * k).view(BYTES32) for k in range(4)]
        low, high = (ir.shuffle(shifted[k], shifted[k + 1], _TURNS) for k in (0, 2))
        yield SubBlock(ir.shuffle(low, high, _PAIRS) & 3, scale)


def _ternary_digit(ir: IrBuilder, u: Value) -> Value:
    """3 u div 256 of the bytes u: 1 from 86 on, 2 from 171 on."""
    one, none, signed = ir.constant(u.type, 1), ir.zero(u.type), u ^ -128
    steps = [ir.choose(ir.less(ir.constant(u.type, limit - 129), signed), one, none) for limit in (86, 171)]
    return steps[0] + steps[1]


def _times_three(u: Value) -> Value:
    """Modulo 256."""
    return u + u + u


@format_of("tq1_0", columns=256, nbytes=54, offset=1, largest=2)
def _tq1_0(ir, block):
    scale = ir.splat(load_half(ir, block + 52), 8)
    u = ir.load(BYTES32, block)
    for _ in range(5):
        yield SubBlock(_ternary_digit(ir, u), scale)
        u = _times_three(u)
    u = ir.load(BYTES16, block + 32)
    for _ in range(2):
        tripled = _times_three(u)
        yield SubBlock(_ternary_digit(ir, ir.join(u, tripled)), scale)
        u = _times_three(tripled)
    fours = [ir.load(BYTES4, block + 48)]
    for _ in range(3):
        fours.append(_times_three(fours[-1]))
    last = ir.join(ir.join(fours[0], fours[1]), ir.join(fours[2], fours[3]))
    yield SubBlock(_ternary_digit(ir, ir.join(u, last)), scale)


@format_of("tq2_0", columns=256, nbytes=66, offset=1, largest=3)
def _tq2_0(ir, block):
    scale = ir.splat(load_half(ir, block + 64), 8)
    for g in range(2):
        packed = ir.load(BYTES32, block + 32 * g)
        for k in range(4):
            yield SubBlock(packed >> 2 * k & 3, scale)
