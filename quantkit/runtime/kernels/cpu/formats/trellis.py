"""Formats of iq1_kt, iq2_kt, iq3_kt and iq4_kt: a group's values come from a generator, seeded by its index.

Value k of a group is the sum of the bytes of x & 0x3F3F3F3F, minus 126, where x = seed * POWERS[k] modulo 2^32. That
sum is the code. The product is computed in halves of 16 bits, for 32 columns at a time.
"""

from __future__ import annotations

from quantkit.codegen.simd import F32, I8, I16, I32, I64, IrBuilder, Value, vector
from quantkit.runtime.kernels.cpu.formats.base import (
    BYTES4,
    BYTES8,
    BYTES16,
    BYTES32,
    INTS8,
    SubBlock,
    format_of,
    low_then_high,
    spread,
)
from quantkit.types.families.trellis_code import BOOK, OFFSET, POWERS

_BYTES64, _SHORTS32 = vector(64, I8), vector(32, I16)
_BOOK = [int(m) for m in BOOK]


def _sums(ir: IrBuilder, seeds: Value, group: int = 8, wrap: bool = True) -> Value:
    """The codes of 32 columns. `seeds` has the seed of the column's group in every lane, modulo 2^16 if they `wrap`."""
    powers = [int(POWERS[c % group]) for c in range(32)]
    low, high = (ir.constant(_SHORTS32, [p >> shift & 0xFFFF for p in powers]) for shift in (0, 16))
    upper = ir.multiply_high(seeds, low) + seeds * high
    if wrap:  # seeds are at least OFFSET: one below it has wrapped around 2^16
        upper = ir.choose(ir.below(seeds, OFFSET), upper + low, upper)
    sixes = (seeds * low & 0x3F3F) + (upper & 0x3F3F)
    return ir.byte_pairs(sixes.view(_BYTES64), ir.constant(_BYTES64, 1)).narrow(I8)


def _four_seeds(ir: IrBuilder, address: Value) -> Value:
    """Seeds of the four groups of a sub-block, whose indices are at an address."""
    words = ir.splat(ir.load(I64, address), 8).view(_SHORTS32)
    return ir.shuffle(words, None, [c // 8 * 8 + c // 8 for c in range(32)]) + OFFSET


def _row_scale(ir: IrBuilder, head: Value, lanes: int = 8) -> Value:
    return ir.splat(ir.load(F32, head), lanes)


def _book_scales(ir: IrBuilder, codes: Value, head: Value) -> Value:
    """Scales d * BOOK[code] of 8 codes."""
    multipliers = ir.part(ir.lookup(_BOOK, ir.join(codes, codes)), 0, 8)
    return multipliers.signed(I32).real() * _row_scale(ir, head)


@format_of("iq1_kt", columns=256, nbytes=56, offset=126, largest=252, head=4)
def _iq1_kt(ir, block, head):
    subs = ir.load(BYTES8, block)
    scales = _book_scales(ir, subs & 15, head)
    high = low_then_high(ir, ir.load(BYTES16, block + 40)).unsigned(I16) << 8
    flags = ir.shuffle(subs, None, [g // 4 for g in range(32)])
    high_part = ir.any_bits(flags, [16 << g % 4 for g in range(32)])
    high_part = ir.choose(high_part, ir.constant(_SHORTS32, OFFSET + 4096), ir.constant(_SHORTS32, OFFSET))
    seeds = (ir.load(BYTES32, block + 8).unsigned(I16) | high) + high_part
    for s in range(8):
        codes = _sums(ir, ir.shuffle(seeds, None, [4 * s + c // 8 for c in range(32)]), wrap=False)
        yield SubBlock(codes, spread(ir, scales, s))


@format_of("iq2_kt", columns=256, nbytes=68, offset=126, largest=252, head=4)
def _iq2_kt(ir, block, head):
    packed = ir.load(BYTES4, block)
    scales = _book_scales(ir, ir.join(packed & 15, packed >> 4), head)
    for s in range(8):
        yield SubBlock(_sums(ir, _four_seeds(ir, block + 4 + 8 * s)), spread(ir, scales, s))


@format_of("iq3_kt", columns=256, nbytes=100, offset=126, largest=252, head=4)
def _iq3_kt(ir, block, head):
    packed = ir.load(BYTES4, block)
    scales = ir.join(packed & 15, packed >> 4).unsigned(I32).real() * _row_scale(ir, head)
    signs = ir.load(BYTES32, block + 68)
    for s in range(8):
        codes = _sums(ir, _four_seeds(ir, block + 4 + 8 * s))
        wrong = ir.any_bits(signs, [1 << s] * 32) ^ ir.below(codes, 126)  # the value's sign is not the one stored
        yield SubBlock(ir.choose(wrong, 252 - codes, codes), spread(ir, scales, s))


@format_of("iq4_kt", columns=256, nbytes=128, offset=126, largest=252, head=4)
def _iq4_kt(ir, block, head):
    words = ir.load(INTS8, block)
    scales = ((words >> 1 & 127) - 64).real() * _row_scale(ir, head)
    nibbles = ir.load(BYTES32, block + 96).unsigned(I16)
    for part in range(2):
        words = ir.load(BYTES16, block + 16 * part)
        # Lane g of a sub-block gets two bytes, the first of which has the first of its bits 8 + 3 g .. 8 + 3 g + 2.
        lanes = [4 * (g // 8) + min(1 + 3 * (g % 8) // 8 + byte, 3) for g in range(32) for byte in range(2)]
        high_part = ir.shuffle(words, None, lanes).view(_SHORTS32)
        high_part = high_part << ir.constant(_SHORTS32, [12 - 3 * (g % 8) % 8 for g in range(32)]) & 0x7000
        table = ir.shuffle(words, None, [4 * (i // 16) for i in range(64)]).view(_SHORTS32) << 15
        high = nibbles << 8 & 0xF00 if part == 0 else nibbles << 4 & 0xF00
        seeds = (ir.load(BYTES32, block + 32 + 32 * part).unsigned(I16) | high | high_part) + table + OFFSET
        for s in range(4):
            codes = _sums(ir, ir.shuffle(seeds, None, [8 * s + c // 4 for c in range(32)]), group=4)
            yield SubBlock(codes, spread(ir, scales, 4 * part + s))
