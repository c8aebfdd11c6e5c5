"""Formats of interleaved nonlinear types: iq2_k_r4 to iq5_k_r4, iq4_ks_r4, iq5_ks_r4 and iq4_xs_r8.

With 4 rows, lanes 0..3 of a step are columns c .. c + 3 of the four rows in a sub-block's first 16 columns; lanes 4..7
are 16 columns further. Fields with one number per group of columns and row have slot 4 s + k for group s of row k
(8 s + k with 8 rows), so those of a sub-block are 8 (or 4) neighbouring bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

from quantkit.codegen.simd import I32, IrBuilder, Value
from quantkit.runtime.kernels.cpu.formats.base import (
    BYTES4,
    BYTES8,
    BYTES16,
    BYTES32,
    FLOATS4,
    FLOATS8,
    INTS8,
    InterleavedSubBlock,
    float_minus,
    format_of,
    load_halves,
)
from quantkit.runtime.kernels.cpu.formats.nonlinear import (
    K2_CODES,
    K3_CODES,
    K4_CODES,
    K5_CODES,
    shift_words,
)

PAIR_COLUMNS = (0, 4, 8, 12)  # first columns of the bit pairs of a byte
NIBBLE_COLUMNS = (0, 8, 4, 12)  # of the low and high nibbles of 32 bytes, then of the next 32


def _twice(ir: IrBuilder, v: Value) -> Value:
    return ir.join(v, v)


def _nibble(ir: IrBuilder, fields: Value, j: int) -> Value:
    """The eight nibbles of sub-block j in a field of 32 bytes, as integers."""
    return ir.load(BYTES8, fields + 8 * (j % 4)).unsigned(I32) >> 4 * (j // 4) & 15


def _six_bits(ir: IrBuilder, low: Value, high: Value, j: int) -> Value:
    """Eight 6-bit numbers minus 32: nibbles as above, and high bit pairs from a field of 16 bytes."""
    pairs = ir.load(BYTES8, high + 8 * (j % 2)).unsigned(I32)
    return float_minus(_nibble(ir, low, j) | (pairs << 4 >> 2 * (j // 2)) & 0x30, 32)


def _flags(ir: IrBuilder, address: Value) -> Value:
    """Flag bytes for all lanes: bit j of byte k is for row k in the first half of sub-block j, of 4 + k in its last."""
    return ir.shuffle(ir.load(BYTES8, address), None, [c // 4 for c in range(32)])


def _halves_shifted(ir: IrBuilder, address: Value, right: int) -> Value:
    """16 bytes twice, the second time shifted right; bits from the next byte must be masked by the caller."""
    doubled = ir.shuffle(ir.load(BYTES16, address), None, [*range(16), *range(16)]).view(INTS8)
    return (doubled >> ir.constant(INTS8, [0] * 4 + [right] * 4)).view(BYTES32)


def _nibble_steps(ir: IrBuilder, address: Value) -> Iterator[tuple[Value, int]]:
    """Yield (bytes whose low nibbles are a step's codes, the step's first column)."""
    for i, columns in enumerate((NIBBLE_COLUMNS[:2], NIBBLE_COLUMNS[2:])):
        packed = ir.load(BYTES32, address + 32 * i)
        for shift, column in enumerate(columns):
            yield shift_words(packed, -4 * shift), column


@format_of("iq2_k_r4", columns=256, nbytes=304, offset=31, largest=53, scale_columns=16, rows=4)
def _iq2_k_r4(ir, block):
    d, flags = _twice(ir, load_halves(ir, block, 4)), _flags(ir, block + 8)
    for j in range(8):
        packed, flag = ir.load(BYTES32, block + 48 + 32 * j), ir.where_bits(flags, [1 << j] * 32, 4)
        codes = [ir.lookup(K2_CODES, shift_words(packed, -2 * t) & 3 | flag) for t in range(4)]
        steps = [(code, column, column + 16) for code, column in zip(codes, PAIR_COLUMNS)]
        yield InterleavedSubBlock(steps, float_minus(_nibble(ir, block + 16, j), 8) * d)


@format_of("iq3_k_r4", columns=256, nbytes=440, offset=63, largest=114, scale_columns=16, rows=4)
def _iq3_k_r4(ir, block):
    d, flags = _twice(ir, load_halves(ir, block, 4)), _flags(ir, block + 8)
    signs = ir.load(BYTES8, block + 16).unsigned(I32)  # bit j of a slot is for sub-block j
    for j in range(8):
        size = float_minus(_nibble(ir, block + 24, j) << 1, -1).view(INTS8)
        scale = (size ^ (signs << 31 - j) & -0x80000000).view(FLOATS8) * d
        packed, flag = ir.load(BYTES32, block + 56 + 32 * j), ir.where_bits(flags, [1 << j] * 32, 8)
        high = _halves_shifted(ir, block + 312 + 16 * j, 4)  # bit t of the first half, 4 + t of the second
        steps = []
        for t, column in enumerate(PAIR_COLUMNS):
            index = shift_words(packed, -2 * t) & 3 | shift_words(high, 2 - t) & 4 ^ flag
            steps.append((ir.lookup(K3_CODES, index), column, column + 16))
        yield InterleavedSubBlock(steps, scale)


def _k4_steps(ir, address):
    return [(ir.lookup(K4_CODES, code & 15), column) for code, column in _nibble_steps(ir, address)]


def _k5_steps(ir, low, high):
    # Bits 0, 1, 4, 5 of the high bytes belong to the steps' columns, the bits 2 higher to columns 16 further.
    bits = _halves_shifted(ir, high, 2)
    return [
        (ir.lookup(K5_CODES, code & 15 | shift_words(bits, 4 - bit) & ~15), column)
        for (code, column), bit in zip(_nibble_steps(ir, low), (0, 1, 4, 5))
    ]


@format_of("iq4_k_r4", columns=256, nbytes=576, offset=127, largest=244, scale_columns=16, rows=4)
def _iq4_k_r4(ir, block):
    d, flags = _twice(ir, load_halves(ir, block, 4)), _flags(ir, block + 8)
    for j in range(8):
        shift = ir.where_bits(flags, [1 << j] * 32, 4)
        steps = [(code + shift, column, column + 16) for code, column in _k4_steps(ir, block + 64 + 64 * j)]
        yield InterleavedSubBlock(steps, _six_bits(ir, block + 32, block + 16, j) * d)


@format_of("iq5_k_r4", columns=256, nbytes=704, offset=127, largest=250, scale_columns=16, rows=4)
def _iq5_k_r4(ir, block):
    d, flags = _twice(ir, load_halves(ir, block, 4)), _flags(ir, block + 8)
    for j in range(8):
        shift = ir.where_bits(flags, [1 << j] * 32, 2)
        steps = _k5_steps(ir, block + 64 + 64 * j, block + 576 + 16 * j)
        steps = [(code + shift, column, column + 16) for code, column in steps]
        yield InterleavedSubBlock(steps, _six_bits(ir, block + 32, block + 16, j) * d)


def _odd_multiplier(ir, d, address):
    """(d * m, bytes with the flag as bit 0) of four bytes: bits 1..7 give odd m from -127 on, bit 0 is the flag."""
    numbers = _twice(ir, ir.load(BYTES4, address)).unsigned(I32)
    return float_minus(numbers & 254, 127) * d, numbers


def _shift(ir, numbers, shift):
    """2^shift in all four bytes of lanes whose bit 0 is set, else 0."""
    ones = ir.shuffle(numbers.view(BYTES32), None, [c // 4 * 4 for c in range(32)])
    return shift_words(ones, shift) & 1 << shift


@format_of("iq4_ks_r4", columns=256, nbytes=544, offset=127, largest=244, rows=4, head=16)
def _iq4_ks_r4(ir, block, head):
    d = _twice(ir, ir.load(FLOATS4, head))
    for j in range(8):
        scale, numbers = _odd_multiplier(ir, d, block + 4 * j)
        shift = _shift(ir, numbers, 2)
        steps = [(code + shift, column, column + 16) for code, column in _k4_steps(ir, block + 32 + 64 * j)]
        yield InterleavedSubBlock(steps, scale)


@format_of("iq5_ks_r4", columns=256, nbytes=672, offset=127, largest=250, rows=4, head=16)
def _iq5_ks_r4(ir, block, head):
    d = _twice(ir, ir.load(FLOATS4, head))
    for j in range(8):
        scale, numbers = _odd_multiplier(ir, d, block + 4 * j)
        shift = _shift(ir, numbers, 1)
        steps = _k5_steps(ir, block + 32 + 64 * j, block + 544 + 16 * j)
        yield InterleavedSubBlock([(code + shift, column, column + 16) for code, column in steps], scale)


@format_of("iq4_xs_r8", columns=256, nbytes=1088, offset=127, largest=240, rows=8)
def _iq4_xs_r8(ir, block):
    d = load_halves(ir, block, 8)
    for j in range(8):
        steps = []
        for line in range(4):
            packed = ir.load(BYTES32, block + 64 + 128 * j + 32 * line)
            for shift in range(2):
                column = 8 * line + 4 * shift
                steps.append((ir.lookup(K4_CODES, shift_words(packed, -4 * shift) & 15), column, column))
        yield InterleavedSubBlock(steps, _six_bits(ir, block + 32, block + 16, j) * d)
