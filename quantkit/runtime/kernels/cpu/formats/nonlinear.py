"""Formats of iq2_k, iq3_k, iq4_k, iq5_k and iq6_k: blocks of 256, sub-blocks of 16, code values from a table.

The two sub-blocks of a unit are the halves of its vector, so what differs between sub-blocks is laid out once a block
and a unit takes its two by one shuffle. Scales are two vectors of 8: one of 16 would be 512 bits, and while such
instructions are in flight Intel's cores have a vector unit less for all the others.

Codes are values + offset. Where values span less than 128 the offset is minus the smallest.
Flags are put into indices by exclusive-or: of three terms joined by or LLVM makes an instruction more.
"""

from __future__ import annotations

from quantkit.codegen.simd import F32, I8, I16, I32, IrBuilder, Value, vector
from quantkit.runtime.kernels.cpu.formats.base import (
    BYTES16,
    BYTES32,
    FLOATS8,
    INTS8,
    Unit,
    format_of,
    load_half,
    low_then_high,
    pick,
)
from quantkit.types.families.codebooks import K2, K3, K4, K5, K6, Book

WORDS16 = vector(16, I16)


def codes_of(book: Book, offset: int, books: int = 1) -> list[int]:
    """Values of a book, or of both, as codes."""
    return [int(v) + offset for v in book.values[: book.count * books]]


# --------------------------------------------------------------------------- what the families of nonlinear types share


def moved(v: Value, left: int) -> Value:
    """Bytes whose bits have moved `left` (or right, where negative) in words of 16: what enters a byte is rubbish."""
    words = v.view(vector(v.lanes // 2, I16))
    return v if left == 0 else (words << left if left > 0 else words >> -left).view(v.type)


def centred(bits: Value, zero: int) -> Value:
    """float32 of integers 0 .. 2^23 - 1 minus `zero`: made the mantissa of 2^23, so it takes one subtraction."""
    return (bits | 0x4B000000).view(vector(bits.lanes, F32)) - (8388608.0 + zero)


def nibbles(ir: IrBuilder, address: Value) -> Value:
    """The eight nibbles of 4 bytes, with rubbish above them."""
    return ir.splat(ir.load(I32, address), 8) >> ir.constant(INTS8, range(0, 32, 4))


def six_bits(ir: IrBuilder, low: Value, high: Value) -> Value:
    """Eight 6-bit numbers minus 32: nibbles, with rubbish above them, under pairs of bits of the 2 bytes at `high`.

    The latter are loaded with the 2 bytes before them, so that all are shifted right.
    """
    pairs = ir.splat(ir.load(I32, high - 2), 8) >> ir.constant(INTS8, range(12, 28, 2))
    return centred(low & 15 | pairs & 0x30, 32)


def _flags(ir: IrBuilder, address: Value, number: int) -> Value:
    """`number` in the bytes whose bit of a 16-bit word is set, 0 in the others: for all sub-blocks, twice.

    The word is loaded with the 2 bytes after it, as `six_bits` loads them: the two would else share a scalar load.
    """
    word = ir.splat(ir.load(I32, address), 8).view(BYTES32)
    spread = ir.shuffle(word, None, [s % 16 // 8 for s in range(32)])
    return ir.where_bits(spread, [1 << s % 8 for s in range(32)], number)


def _of_unit(ir: IrBuilder, flags: Value, unit: int) -> Value:
    """The flags of a unit's two sub-blocks, each in its half."""
    return ir.shuffle(flags, None, [2 * unit] * 16 + [17 + 2 * unit] * 16)


def _scale(ir: IrBuilder, scales: list[Value], unit: int) -> Value:
    return pick(ir, scales[unit // 4], 2 * unit % 8, 2 * unit % 8 + 1)


# ---------------------------------------------------------------------------------------------------------- the formats

# 16 of them, twice those of both books of iq2_k: the flag is a bit of the index. Elsewhere the shift is added.
K2_CODES, K3_CODES = codes_of(K2, 31, 2) * 2, codes_of(K3, 63, 2)
K4_CODES, K5_CODES, K6_CODES = (codes_of(book, 127) for book in (K4, K5, K6))


@format_of("iq2_k", columns=256, nbytes=76, offset=31, largest=53, group=16)
def _iq2_k(ir, block):
    d = ir.splat(load_half(ir, block), 8)
    scales = [centred(nibbles(ir, block + 4 + 4 * half) & 15, 8) * d for half in range(2)]
    flags = _flags(ir, block + 2, 4)
    for part in range(2):
        packed = ir.load(BYTES32, block + 12 + 32 * part)
        for t in range(4):
            j = 4 * part + t
            index = moved(packed, -2 * t) & 3 | _of_unit(ir, flags, j)
            yield Unit(ir.lookup(K2_CODES, index), _scale(ir, scales, j))


@format_of("iq3_k", columns=256, nbytes=110, offset=63, largest=114, group=16)
def _iq3_k(ir, block):
    d = ir.splat(load_half(ir, block), 8)
    signs = ir.splat(ir.load(I16, block + 4).unsigned(I32), 8)
    scales = []
    for half in range(2):
        size = centred((nibbles(ir, block + 6 + 4 * half) & 15) << 1, -1)
        sign = signs << ir.constant(INTS8, range(31 - 8 * half, 23 - 8 * half, -1))
        scales.append((size.view(INTS8) ^ sign & -0x80000000).view(FLOATS8) * d)
    flags, high = _flags(ir, block + 2, 8), ir.load(BYTES32, block + 78)
    for part in range(2):
        packed = ir.load(BYTES32, block + 14 + 32 * part)
        for t in range(4):
            j = 4 * part + t
            index = moved(packed, -2 * t) & 3 | moved(high, 2 - j) & 4 ^ _of_unit(ir, flags, j)
            yield Unit(ir.lookup(K3_CODES, index), _scale(ir, scales, j))


def _scales(ir, d, low, high):
    """d * m of the sixteen sub-blocks for 6-bit multipliers."""
    return [six_bits(ir, nibbles(ir, low + 4 * half), high + 2 * half) * d for half in range(2)]


@format_of("iq4_k", columns=256, nbytes=144, offset=127, largest=244, group=16)
def _iq4_k(ir, block):
    scales = _scales(ir, ir.splat(load_half(ir, block), 8), block + 8, block + 4)
    flags = _flags(ir, block + 2, 4)
    for j in range(8):
        codes = ir.lookup(K4_CODES, low_then_high(ir, ir.load(BYTES16, block + 16 + 16 * j)))
        yield Unit(codes + _of_unit(ir, flags, j), _scale(ir, scales, j))


@format_of("iq5_k", columns=256, nbytes=176, offset=127, largest=250, group=16)
def _iq5_k(ir, block):
    scales = _scales(ir, ir.splat(load_half(ir, block), 8), block + 8, block + 4)
    flags, high = _flags(ir, block + 2, 2), ir.load(BYTES32, block + 144)
    for pair in range(4):
        packed = ir.load(BYTES32, block + 16 + 32 * pair)
        for t in range(2):
            j = 2 * pair + t
            code = moved(packed, -4 * t) & 15 | moved(high, 4 - j) & ~15
            yield Unit(ir.lookup(K5_CODES, code) + _of_unit(ir, flags, j), _scale(ir, scales, j))


@format_of("iq6_k", columns=256, nbytes=212, offset=127, largest=249, group=16)
def _iq6_k(ir, block):
    """With the integers of products, not the cubic."""
    d = ir.splat(load_half(ir, block), 8)
    scales = [ir.load(vector(8, I8), block + 4 + 8 * half).signed(I32).real() * d for half in range(2)]
    flags = _flags(ir, block + 2, 1)
    for part in range(2):
        high = ir.load(BYTES32, block + 148 + 32 * part)
        for t in range(4):
            j = 4 * part + t
            if t % 2 == 0:
                packed = ir.load(BYTES32, block + 20 + 32 * (j // 2))
            code = moved(packed, -4 * (t % 2)) & 15 | moved(high, 4 - 2 * t) & ~15
            yield Unit(ir.lookup(K6_CODES, code) + _of_unit(ir, flags, j), _scale(ir, scales, j))
