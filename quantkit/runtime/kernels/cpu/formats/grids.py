"""Formats of iq2_xxs, iq2_xs, iq2_s, iq3_xxs and iq3_s: indices of grid points, and a sign per column.

The tables hold magnitude + offset; the code of a negative column is 2 * offset minus that. Indices and signs that have
to be assembled from several fields are computed for the whole block at once and stored (`points.indices_in_memory`).
"""

from __future__ import annotations

from quantkit.codegen.simd import I8, I16, I32, IrBuilder, Value, vector
from quantkit.runtime.kernels.cpu.formats.base import BYTES16, BYTES32, INTS8, SubBlock, format_of, load_half, spread
from quantkit.runtime.kernels.cpu.formats.points import codes_of, grid_table, indices_in_memory

OFFSET, OFFSET_3S = 64, 16  # largest magnitudes are 43, and 62 of iq3_xxs; 15 of iq3_s
IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS = (grid_table(name, OFFSET) for name in ("iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs"))
IQ3_S = grid_table("iq3_s", OFFSET_3S)
_ODD_NIBBLES = [0x80 * (i.bit_count() % 2) for i in range(16)]
_SHORTS16 = vector(16, I16)


def negated(ir: IrBuilder, codes: Value, mask: Value, offset: int) -> Value:
    """Codes of the negated values where `where` holds."""
    return ir.choose(mask, 2 * offset - codes, codes)


def odd_multiples(numbers: Value, d: Value) -> Value:
    """(2 l + 1) * d of integers l. It is exact, so d * ((l + 0.5) / 4) equals this with d / 8."""
    return (numbers + numbers + 1).real() * d


def _with_parity(ir: IrBuilder, signs: Value) -> Value:
    """Bytes of seven sign bits, with a top bit that makes the number of ones even."""
    return signs | ir.lookup(_ODD_NIBBLES, (signs ^ signs >> 4) & 15)


def _signs_of_words(ir: IrBuilder, words: Value) -> Value:
    """Sign bytes of 8 words that each store four times seven sign bits."""
    spread = [words << i & 0x7F << 8 * i for i in range(4)]
    return _with_parity(ir, (spread[0] | spread[1] | (spread[2] | spread[3])).view(BYTES32))


def _nibble_scales(ir: IrBuilder, address: Value, d: Value) -> Value:
    """Scales (2 l + 1) * d of eight groups of columns, whose l are the nibbles of 4 bytes."""
    nibbles = ir.splat(ir.load(I32, address), 8) >> ir.constant(INTS8, [4 * i for i in range(8)]) & 15
    return odd_multiples(nibbles, ir.splat(d, 8))


@format_of("iq2_xxs", columns=256, nbytes=66, offset=OFFSET, largest=107)
def _iq2_xxs(ir, block):
    words = ir.shuffle(ir.load(INTS8, block + 2), ir.load(INTS8, block + 34), range(1, 16, 2))
    scales = odd_multiples(words >> 28, ir.splat(load_half(ir, block) * 0.125, 8))
    signs = ir.in_memory(_signs_of_words(ir, words))
    for s in range(8):
        codes = codes_of(ir, IQ2_XXS, (block + 2 + 8 * s).__add__, range(4), I8)
        negative = ir.bits(ir.load(I32, signs + 4 * s))
        yield SubBlock(negated(ir, codes, negative, OFFSET), spread(ir, scales, s))


@format_of("iq2_xs", columns=256, nbytes=74, offset=OFFSET, largest=107, scale_columns=16)
def _iq2_xs(ir, block):
    d = load_half(ir, block) * 0.125
    scales = [_nibble_scales(ir, block + 66 + 4 * half, d) for half in range(2)]
    words = [ir.load(_SHORTS16, block + 2 + 32 * half) for half in range(2)]
    index_address = indices_in_memory(ir, [part & 511 for part in words])
    high = ir.shuffle(*((part >> 9).view(BYTES32) for part in words), range(0, 64, 2))
    signs = ir.in_memory(_with_parity(ir, high))
    for s in range(8):
        codes = codes_of(ir, IQ2_XS, index_address, range(4 * s, 4 * s + 4))
        negative = ir.bits(ir.load(I32, signs + 4 * s))
        yield SubBlock(negated(ir, codes, negative, OFFSET), spread(ir, scales[s // 4], 2 * s % 8, 2 * s % 8 + 1))


def pairs_as_high_bits(ir: IrBuilder, packed: Value) -> Value:
    """16 words with one bit pair each as bits 8 and 9, from four bytes of four pairs."""
    words = ir.shuffle(packed, None, [g // 4 for g in range(16)]).unsigned(I16)
    return words << ir.constant(_SHORTS16, [8, 6, 4, 2] * 4) & 0x300


@format_of("iq2_s", columns=256, nbytes=82, offset=OFFSET, largest=107, scale_columns=16)
def _iq2_s(ir, block):
    d = load_half(ir, block) * 0.125
    scales = [_nibble_scales(ir, block + 74 + 4 * half, d) for half in range(2)]
    high = [pairs_as_high_bits(ir, ir.load(vector(4, I8), block + 66 + 4 * half)) for half in range(2)]
    index_address = indices_in_memory(
        ir, [ir.load(BYTES16, block + 2 + 16 * half).unsigned(I16) | high[half] for half in range(2)]
    )
    for s in range(8):
        codes = codes_of(ir, IQ2_S, index_address, range(4 * s, 4 * s + 4))
        negative = ir.bits(ir.load(I32, block + 34 + 4 * s))
        yield SubBlock(negated(ir, codes, negative, OFFSET), spread(ir, scales[s // 4], 2 * s % 8, 2 * s % 8 + 1))


@format_of("iq3_xxs", columns=256, nbytes=98, offset=OFFSET, largest=126)
def _iq3_xxs(ir, block):
    words = ir.load(INTS8, block + 66)
    scales = odd_multiples(words >> 28, ir.splat(load_half(ir, block) * 0.25, 8))
    signs = ir.in_memory(_signs_of_words(ir, words))
    for s in range(8):
        codes = codes_of(ir, IQ3_XXS, (block + 2 + 8 * s).__add__, range(8), I8)
        negative = ir.bits(ir.load(I32, signs + 4 * s))
        yield SubBlock(negated(ir, codes, negative, OFFSET), spread(ir, scales, s))


def ninth_bit(ir: IrBuilder, indices: Value, mask: Value) -> Value:
    """16 bytes as words, with bit 8 set where `where` holds."""
    words = indices.unsigned(I16)
    return ir.choose(mask, words | 256, words)


@format_of("iq3_s", columns=256, nbytes=110, offset=OFFSET_3S, largest=31)
def _iq3_s(ir, block):
    scales = _nibble_scales(ir, block + 106, load_half(ir, block))
    high = [ir.bits(ir.load(I16, block + 66 + 2 * part)) for part in range(4)]
    index_address = indices_in_memory(
        ir, [ninth_bit(ir, ir.load(BYTES16, block + 2 + 16 * part), high[part]) for part in range(4)]
    )
    for s in range(8):
        codes = codes_of(ir, IQ3_S, index_address, range(8 * s, 8 * s + 8))
        negative = ir.bits(ir.load(I32, block + 74 + 4 * s))
        yield SubBlock(negated(ir, codes, negative, OFFSET_3S), spread(ir, scales, s))
