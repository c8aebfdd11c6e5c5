"""Formats of iq2_k, iq3_k, iq4_k, iq5_k and iq6_k: blocks of 256, one scale per 16 columns, code values from a table.

The halves of a sub-block have their own scale and flag. Flags are spread once per block, and a sub-block gets its two
by one shuffle. Scales are two vectors of 8: one of 16 would have 512 bits, and while such instructions are in flight
Intel cores have one vector unit less for all others.

Codes are values + offset. Where values span less than 128 the offset is minus the smallest value.
Flags are put into indices by exclusive-or: for three terms joined by `or`, LLVM emits one more instruction.
"""

from __future__ import annotations

from quantkit.codegen.simd import F32, I8, I16, I32, IrBuilder, Value, vector
from quantkit.runtime.kernels.cpu.formats.base import (
    BYTES16,
    BYTES32,
    FLOATS8,
    INTS8,
    SubBlock,
    format_of,
    load_half,
    low_then_high,
    spread,
)
from quantkit.types.families.codebooks import K2, K3, K4, K5, K6, Book

WORDS16 = vector(16, I16)


def codes_of(book: Book, offset: int, books: int = 1) -> list[int]:
    """Values of a codebook, or of both books of a type, as codes."""
    return [int(v) + offset for v in book.values[: book.count * books]]


# --------------------------------------------------------------------------- what the families of nonlinear types share


def shift_words(v: Value, left: int) -> Value:
    """Shift bytes left (right if negative) as 16-bit words: the caller masks bits that crossed into a byte."""
    words = v.view(vector(v.lanes // 2, I16))
    return v if left == 0 else (words << left if left > 0 else words >> -left).view(v.type)


def float_minus(bits: Value, zero: int) -> Value:
    """float32 of integers 0 .. 2^23 - 1, minus `zero`: they become the mantissa of 2^23, so one subtraction does it."""
    return (bits | 0x4B000000).view(vector(bits.lanes, F32)) - (8388608.0 + zero)


def nibbles(ir: IrBuilder, address: Value) -> Value:
    """The eight nibbles of 4 bytes, with other bits above them."""
    return ir.splat(ir.load(I32, address), 8) >> ir.constant(INTS8, range(0, 32, 4))


def six_bits(ir: IrBuilder, low: Value, high: Value) -> Value:
    """Eight 6-bit numbers minus 32: low nibbles, and high bit pairs from the 2 bytes at `high`.

    These are loaded with the 2 bytes before them, so that all are shifted right.
    """
    pairs = ir.splat(ir.load(I32, high - 2), 8) >> ir.constant(INTS8, range(12, 28, 2))
    return float_minus(low & 15 | pairs & 0x30, 32)


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


def _scale(ir: IrBuilder, scales: list[Value], j: int) -> Value:
    return spread(ir, scales[j // 4], 2 * j % 8, 2 * j % 8 + 1)


# ---------------------------------------------------------------------------------------------------------- the formats

# The 16 codes of iq2_k are those of both books, twice: the flag is a bit of the index. Other types add a shift.
K2_CODES, K3_CODES = codes_of(K2, 31, 2) * 2, codes_of(K3, 63, 2)
K4_CODES, K5_CODES, K6_CODES = (codes_of(book, 127) for book in (K4, K5, K6))


@format_of("iq2_k", columns=256, nbytes=76, offset=31, largest=53, scale_columns=16)
def _iq2_k(ir, block):
    d = ir.splat(load_half(ir, block), 8)
    scales = [float_minus(nibbles(ir, block + 4 + 4 * half) & 15, 8) * d for half in range(2)]
    flags = _flags(ir, block + 2, 4)
    for part in range(2):
        packed = ir.load(BYTES32, block + 12 + 32 * part)
        for t in range(4):
            j = 4 * part + t
            index = shift_words(packed, -2 * t) & 3 | _of_sub_block(ir, flags, j)
            yield SubBlock(ir.lookup(K2_CODES, index), _scale(ir, scales, j))


@format_of("iq3_k", columns=256, nbytes=110, offset=63, largest=114, scale_columns=16)
def _iq3_k(ir, block):
    d = ir.splat(load_half(ir, block), 8)
    signs = ir.splat(ir.load(I16, block + 4).unsigned(I32), 8)
    scales = []
    for half in range(2):
        size = float_minus((nibbles(ir, block + 6 + 4 * half) & 15) << 1, -1)
        sign = signs << ir.constant(INTS8, range(31 - 8 * half, 23 - 8 * half, -1))
        scales.append((size.view(INTS8) ^ sign & -0x80000000).view(FLOATS8) * d)
    flags, high = _flags(ir, block + 2, 8), ir.load(BYTES32, block + 78)
    for part in range(2):
        packed = ir.load(BYTES32, block + 14 + 32 * part)
        for t in range(4):
            j = 4 * part + t
            index = shift_words(packed, -2 * t) & 3 | shift_words(high, 2 - j) & 4 ^ _of_sub_block(ir, flags, j)
            yield SubBlock(ir.lookup(K3_CODES, index), _scale(ir, scales, j))


def _scales(ir, d, low, high):
    """d * m of the 16 groups of columns, for 6-bit multipliers m."""
    return [six_bits(ir, nibbles(ir, low + 4 * half), high + 2 * half) * d for half in range(2)]


@format_of("iq4_k", columns=256, nbytes=144, offset=127, largest=244, scale_columns=16)
def _iq4_k(ir, block):
    scales = _scales(ir, ir.splat(load_half(ir, block), 8), block + 8, block + 4)
    flags = _flags(ir, block + 2, 4)
    for j in range(8):
        codes = ir.lookup(K4_CODES, low_then_high(ir, ir.load(BYTES16, block + 16 + 16 * j)))
        yield SubBlock(codes + _of_sub_block(ir, flags, j), _scale(ir, scales, j))


@format_of("iq5_k", columns=256, nbytes=176, offset=127, largest=250, scale_columns=16)
def _iq5_k(ir, block):
    scales = _scales(ir, ir.splat(load_half(ir, block), 8), block + 8, block + 4)
    flags, high = _flags(ir, block + 2, 2), ir.load(BYTES32, block + 144)
    for pair in range(4):
        packed = ir.load(BYTES32, block + 16 + 32 * pair)
        for t in range(2):
            j = 2 * pair + t
            code = shift_words(packed, -4 * t) & 15 | shift_words(high, 4 - j) & ~15
            yield SubBlock(ir.lookup(K5_CODES, code) + _of_sub_block(ir, flags, j), _scale(ir, scales, j))


@format_of("iq6_k", columns=256, nbytes=212, offset=127, largest=249, scale_columns=16)
def _iq6_k(ir, block):
    """With the integer code values of matrix products (`product_rows`), not the cubic."""
    d = ir.splat(load_half(ir, block), 8)
    scales = [ir.load(vector(8, I8), block + 4 + 8 * half).signed(I32).real() * d for half in range(2)]
    flags = _flags(ir, block + 2, 1)
    for part in range(2):
        high = ir.load(BYTES32, block + 148 + 32 * part)
        for t in range(4):
            j = 4 * part + t
            if t % 2 == 0:
                packed = ir.load(BYTES32, block + 20 + 32 * (j // 2))
            code = shift_words(packed, -4 * (t % 2)) & 15 | shift_words(high, 4 - 2 * t) & ~15
            yield SubBlock(ir.lookup(K6_CODES, code) + _of_sub_block(ir, flags, j), _scale(ir, scales, j))
