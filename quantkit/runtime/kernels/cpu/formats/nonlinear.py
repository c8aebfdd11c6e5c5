"""Formats of iq2_k, iq3_k, iq4_k, iq5_k and iq6_k: blocks of 256, one scale per 16 columns, code values from a table.

The halves of a sub-block have their own scale and flag. Flags are spread once per block, and a sub-block gets its two
by one shuffle. Scales are two vectors of 8, in the order of GROUPS: one of 16 would have 512 bits, and while such
instructions are in flight Intel cores have one vector unit less for all others.

Codes are values + offset. Where values span less than 128 the offset is minus the smallest value; products with one
vector take the others as signed values.
Flags are put into indices by exclusive-or: for three terms joined by `or`, LLVM emits one more instruction.
"""

from __future__ import annotations

from collections.abc import Sequence

from quantkit.codegen.simd import I16, I32, IrBuilder, Value, vector
from quantkit.runtime.kernels.cpu.formats.base import (
    BYTES16,
    BYTES32,
    FLOATS8,
    GROUPS,
    INTS8,
    GroupScales,
    format_of,
    group_bytes,
    load_half,
    low_then_high,
)
from quantkit.types.families.codebooks import K2, K3, K4, K5, K6, Book


def codes_of(book: Book, offset: int, books: int = 1) -> list[int]:
    """Values of a codebook, or of both books of a type, as codes."""
    return [int(v) + offset for v in book.values[: book.count * books]]


# --------------------------------------------------------------------------- what the families of nonlinear types share


def shift_words(v: Value, left: int) -> Value:
    """Shift bytes left (right if negative) as 16-bit words: the caller masks bits that crossed into a byte."""
    words = v.view(vector(v.lanes // 2, I16))
    return v if left == 0 else (words << left if left > 0 else words >> -left).view(v.type)


def nibbles(ir: IrBuilder, address: Value, order: Sequence[int] = range(8)) -> Value:
    """The eight nibbles of 4 bytes, with other bits above them."""
    return ir.splat(ir.load(I32, address), 8) >> ir.constant(INTS8, [4 * i for i in order])


def six_bits(ir: IrBuilder, low: Value, high: Value, order: Sequence[int] = range(8)) -> Value:
    """Eight 6-bit numbers: low nibbles, and high bit pairs from the 2 bytes at `high`.

    These are loaded with the 2 bytes before them, so that all are shifted right.
    """
    pairs = ir.splat(ir.load(I32, high - 2), 8) >> ir.constant(INTS8, [12 + 2 * i for i in order])
    return low & 15 | pairs & 0x30


def _flags(ir: IrBuilder, address: Value, number: int) -> Value:
    """32 bytes: `number` where the bit of a 16-bit word is set, else 0; one bit per 16 columns of the block, twice.

    The word is loaded with the 2 bytes after it, as `six_bits` loads them; otherwise both would share a scalar load.
    """
    word = ir.splat(ir.load(I32, address), 8).view(BYTES32)
    spread = ir.shuffle(word, None, [s % 16 // 8 for s in range(32)])
    return ir.where_bits(spread, [1 << s % 8 for s in range(32)], number)


def _of_sub_block(ir: IrBuilder, flags: Value, j: int) -> Value:
    """The two flags of sub-block j, each in its half of 32 bytes."""
    return ir.shuffle(flags, None, [2 * j] * 16 + [17 + 2 * j] * 16)


def _added(ir: IrBuilder, address: Value, number: int, offset: int = 0) -> list[Value]:
    """`number` for groups whose bit of a 16-bit word is set, else 0, minus an offset; in the order of GROUPS."""
    word = ir.splat(ir.load(I16, address).unsigned(I32), 8)
    masks = [ir.any_bits(word, [1 << 8 * half + g for g in GROUPS]) for half in range(2)]
    set_, clear = ir.constant(FLOATS8, number - offset), ir.constant(FLOATS8, -offset)
    return [ir.choose(mask, set_, clear) for mask in masks]


# ---------------------------------------------------------------------------------------------------------- the formats

# The 16 codes of iq2_k are those of both books, twice: the flag is a bit of the index. Other types add a shift.
K2_CODES, K3_CODES = codes_of(K2, 31, 2) * 2, codes_of(K3, 63, 2)
K4_CODES, K5_CODES, K6_CODES = (codes_of(book, 127) for book in (K4, K5, K6))
K4_VALUES, K5_VALUES, K6_VALUES = (codes_of(book, 0) for book in (K4, K5, K6))


@format_of("iq2_k", columns=256, nbytes=76, offset=31, largest=53, scale_columns=16)
def _iq2_k(ir, block):
    numbers = [nibbles(ir, block + 4 + 4 * half, GROUPS) & 15 for half in range(2)]
    scales = GroupScales(ir, ir.splat(load_half(ir, block), 8), numbers, 8, _added(ir, block + 2, 5, 31))
    flags = _flags(ir, block + 2, 4)
    for part in range(2):
        packed = ir.load(BYTES32, block + 12 + 32 * part)
        for t in range(4):
            index = shift_words(packed, -2 * t) & 3
            codes = ir.lookup(K2_CODES, index | _of_sub_block(ir, flags, 4 * part + t))
            yield scales.sub_block(4 * part + t, codes, ir.lookup(K2_CODES, index))


@format_of("iq3_k", columns=256, nbytes=110, offset=63, largest=114, scale_columns=16)
def _iq3_k(ir, block):
    signs = ir.splat(ir.load(I16, block + 4).unsigned(I32), 8)
    numbers = []
    for half in range(2):
        size = ((nibbles(ir, block + 6 + 4 * half, GROUPS) & 15) << 1) + 1
        sign = (signs << ir.constant(INTS8, [31 - 8 * half - g for g in GROUPS])).signed_shift(31)
        numbers.append((size ^ sign) - sign + 32)
    scales = GroupScales(ir, ir.splat(load_half(ir, block), 8), numbers, 32, _added(ir, block + 2, 4, 63))
    flags, high = _flags(ir, block + 2, 8), ir.load(BYTES32, block + 78)
    for part in range(2):
        packed = ir.load(BYTES32, block + 14 + 32 * part)
        for t in range(4):
            j = 4 * part + t
            index = shift_words(packed, -2 * t) & 3 | shift_words(high, 2 - j) & 4
            codes = ir.lookup(K3_CODES, index ^ _of_sub_block(ir, flags, j))
            yield scales.sub_block(j, codes, ir.lookup(K3_CODES, index))


def _six_bit_scales(ir: IrBuilder, block: Value, flag: int) -> GroupScales:
    """Of iq4_k and iq5_k: nibbles from byte 8 on, high bits from byte 4 on. `flag`: what a flag adds to values."""
    numbers = [
        six_bits(ir, nibbles(ir, block + 8 + 4 * half, GROUPS), block + 4 + 2 * half, GROUPS) for half in range(2)
    ]
    return GroupScales(ir, ir.splat(load_half(ir, block), 8), numbers, 32, _added(ir, block + 2, flag))


@format_of("iq4_k", columns=256, nbytes=144, offset=127, largest=244, scale_columns=16)
def _iq4_k(ir, block):
    scales, flags = _six_bit_scales(ir, block, 4), _flags(ir, block + 2, 4)
    for j in range(8):
        index = low_then_high(ir, ir.load(BYTES16, block + 16 + 16 * j))
        codes = ir.lookup(K4_CODES, index) + _of_sub_block(ir, flags, j)
        yield scales.sub_block(j, codes, ir.lookup(K4_VALUES, index), signed=True)


@format_of("iq5_k", columns=256, nbytes=176, offset=127, largest=250, scale_columns=16)
def _iq5_k(ir, block):
    scales = _six_bit_scales(ir, block, 2)
    flags, high = _flags(ir, block + 2, 2), ir.load(BYTES32, block + 144)
    for pair in range(4):
        packed = ir.load(BYTES32, block + 16 + 32 * pair)
        for t in range(2):
            j = 2 * pair + t
            index = shift_words(packed, -4 * t) & 15 | shift_words(high, 4 - j) & ~15
            codes = ir.lookup(K5_CODES, index) + _of_sub_block(ir, flags, j)
            yield scales.sub_block(j, codes, ir.lookup(K5_VALUES, index), signed=True)


@format_of("iq6_k", columns=256, nbytes=212, offset=127, largest=249, scale_columns=16)
def _iq6_k(ir, block):
    """With the integer code values of matrix products (`product_rows`), not the cubic."""
    numbers = [group_bytes(ir, block + 4 + 8 * half).signed(I32) + 128 for half in range(2)]
    scales = GroupScales(ir, ir.splat(load_half(ir, block), 8), numbers, 128, _added(ir, block + 2, 1))
    flags = _flags(ir, block + 2, 1)
    for part in range(2):
        high = ir.load(BYTES32, block + 148 + 32 * part)
        for t in range(4):
            j = 4 * part + t
            if t % 2 == 0:
                packed = ir.load(BYTES32, block + 20 + 32 * (j // 2))
            index = shift_words(packed, -4 * (t % 2)) & 15 | shift_words(high, 4 - 2 * t) & ~15
            codes = ir.lookup(K6_CODES, index) + _of_sub_block(ir, flags, j)
            yield scales.sub_block(j, codes, ir.lookup(K6_VALUES, index), signed=True)
