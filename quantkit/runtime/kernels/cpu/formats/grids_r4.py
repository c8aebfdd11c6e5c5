"""Formats of iq2_xxs_r4, iq2_xs_r4, iq2_s_r4, iq3_xxs_r4 and iq3_s_r4: those of grids.py, four rows interleaved.

A step has four columns of each row in the sub-block's first 16 columns, then in its last 16. A grid point of four
columns is one lane of a step; one of eight columns lies in two steps.

Where the base types store seven signs and a parity, these types store a byte v. Bit 0 has another meaning; v >> 1 is
the running exclusive-or of the signs. The signs are v & 0xFE ^ v >> 1.
"""

from __future__ import annotations

from collections.abc import Callable

from quantkit.codegen.simd import I8, I16, I32, IntType, IrBuilder, Value, vector
from quantkit.runtime.kernels.cpu.formats.base import (
    BYTES4,
    BYTES16,
    BYTES32,
    INTS8,
    InterleavedSubBlock,
    format_of,
    load_halves,
)
from quantkit.runtime.kernels.cpu.formats.grids import (
    IQ2_S,
    IQ2_XS,
    IQ2_XXS,
    IQ3_S,
    IQ3_XXS,
    OFFSET,
    OFFSET_3S,
    negated,
    ninth_bit,
    odd_multiples,
    pairs_as_high_bits,
)
from quantkit.runtime.kernels.cpu.formats.points import Table, codes_of, indices_in_memory

Steps = list[tuple[Value, int, int]]  # of an InterleavedSubBlock


def steps_of_eight(
    ir: IrBuilder, table: Table, index_address: Callable[[int], Value], row: int, column: int, kind: IntType = I16
) -> Steps:
    """Steps of grid points of eight columns.

    The index of a point stands at `at(row * r + column * c)` for row r and columns 8 c .. 8 c + 7.
    """
    steps = []
    for g in range(2):
        # Rows 0 and 1, then 2 and 3: the points of columns 8 g .. 8 g + 7, then of columns 16 further; two words each.
        first, last = (
            codes_of(ir, table, index_address, [row * r + column * c for c in (g, g + 2) for r in rows], kind).view(
                INTS8
            )
            for rows in ((0, 1), (2, 3))
        )
        for half in range(2):
            lanes = [half + i for i in (0, 2, 8, 10, 4, 6, 12, 14)]
            first_column = 8 * g + 4 * half
            steps.append((ir.shuffle(first, last, lanes).view(BYTES32), first_column, first_column + 16))
    return steps


def _signed(ir: IrBuilder, steps: Steps, signs: Value) -> Steps:
    """Apply signs to steps. `signs` are 16 bytes, each for eight columns of a row: four rows, then the next columns."""
    signed_steps = []
    for codes, low, high in steps:
        flags = ir.shuffle(signs, None, [4 * (c // 4 % 4) + low // 8 + 2 * (c // 16) for c in range(32)])
        negative = ir.any_bits(flags, [1 << low % 8 + c % 4 for c in range(32)])
        signed_steps.append((negated(ir, codes, negative, OFFSET), low, high))
    return signed_steps


def _from_running(packed: Value) -> Value:
    """Sign bytes from bytes that store the running exclusive-or of seven signs."""
    return packed & 0xFE ^ packed >> 1


def row_scales(ir: IrBuilder, address: Value, factor: float) -> Value:
    """`factor` times each row's float16 scale, for both halves of a sub-block."""
    d = load_halves(ir, address, 4) * factor
    return ir.join(d, d)


def row_nibbles(ir: IrBuilder, address: Value) -> Value:
    """The nibbles of one byte per row: low ones for the sub-block's first half, high ones for its last."""
    packed = ir.splat(ir.load(I32, address), 8)
    return packed >> ir.constant(INTS8, [0, 8, 16, 24, 4, 12, 20, 28]) & 15


def _bit_scales(ir: IrBuilder, signs: Value, d: Value) -> Value:
    """Scales of four rows from the lowest bits of 16 bytes: bit k of a row's number is in its byte k."""
    bits = ir.join(signs, signs) & 1
    return odd_multiples(ir.dot4(ir.zero(INTS8), bits, ir.constant(BYTES32, [1, 2, 4, 8] * 8), 1), d)


@format_of("iq2_xxs_r4", columns=256, nbytes=264, offset=OFFSET, largest=107, rows=4)
def _iq2_xxs_r4(ir, block):
    d = row_scales(ir, block, 0.125)
    for b in range(8):
        packed = ir.load(BYTES16, block + 8 + 16 * b)
        steps = steps_of_eight(ir, IQ2_XXS, (block + 136 + 16 * b).__add__, 4, 1, I8)
        yield InterleavedSubBlock(_signed(ir, steps, _from_running(packed)), _bit_scales(ir, packed, d))


@format_of("iq2_xs_r4", columns=256, nbytes=296, offset=OFFSET, largest=107, scale_columns=16, rows=4)
def _iq2_xs_r4(ir, block):
    d = row_scales(ir, block, 0.125)
    for b in range(8):
        words = ir.load(vector(16, I16), block + 8 + 32 * b)
        steps = steps_of_eight(ir, IQ2_XS, indices_in_memory(ir, [words & 511]), 4, 1)
        steps = _signed(ir, steps, _from_running((words >> 8).narrow(I8)))
        yield InterleavedSubBlock(steps, odd_multiples(row_nibbles(ir, block + 264 + 4 * b), d))


@format_of("iq2_s_r4", columns=256, nbytes=328, offset=OFFSET, largest=107, scale_columns=16, rows=4)
def _iq2_s_r4(ir, block):
    d = row_scales(ir, block, 0.125)
    for b in range(8):
        high = pairs_as_high_bits(ir, ir.load(BYTES4, block + 136 + 4 * b))
        index_address = indices_in_memory(ir, [ir.load(BYTES16, block + 8 + 16 * b).unsigned(I16) | high])
        steps = _signed(ir, steps_of_eight(ir, IQ2_S, index_address, 4, 1), ir.load(BYTES16, block + 168 + 16 * b))
        yield InterleavedSubBlock(steps, odd_multiples(row_nibbles(ir, block + 296 + 4 * b), d))


@format_of("iq3_xxs_r4", columns=256, nbytes=392, offset=OFFSET, largest=126, rows=4)
def _iq3_xxs_r4(ir, block):
    d = row_scales(ir, block, 0.25)
    for b in range(8):
        packed, steps = ir.load(BYTES16, block + 8 + 16 * b), []
        for s in range(4):
            numbers = [8 * row + s + half for half in (0, 4) for row in range(4)]
            codes = codes_of(ir, IQ3_XXS, (block + 136 + 32 * b).__add__, numbers, I8)
            steps.append((codes, 4 * s, 4 * s + 16))
        yield InterleavedSubBlock(_signed(ir, steps, _from_running(packed)), _bit_scales(ir, packed, d))


@format_of("iq3_s_r4", columns=256, nbytes=440, offset=OFFSET_3S, largest=31, rows=4)
def _iq3_s_r4(ir, block):
    packed, d = ir.load(BYTES16, block + 424), load_halves(ir, block, 4)
    slots = [ir.part(nibbles, 8 * half, 8).unsigned(I32) for nibbles in (packed & 15, packed >> 4) for half in range(2)]
    scales = [odd_multiples(part, ir.join(d, d)) for part in slots]
    for b in range(8):
        # Byte 4 p + row is for point (0, 4, 1, 5, 2, 6, 3, 7)[p]: the lanes of a step are side by side.
        flags = ir.splat(ir.load(I32, block + 264 + 4 * b), 4).view(BYTES16)
        numbers = [ir.load(BYTES16, block + 8 + 32 * b + 16 * half) for half in range(2)]
        bits = [[1 << 2 * half + i // 8 + 4 * (i // 4 % 2) for i in range(16)] for half in range(2)]
        index_address = indices_in_memory(
            ir, [ninth_bit(ir, numbers[half], ir.any_bits(flags, bits[half])) for half in range(2)]
        )
        signs = ir.load(BYTES16, block + 296 + 16 * b)
        steps = []
        for s in range(4):
            codes = codes_of(ir, IQ3_S, index_address, range(8 * s, 8 * s + 8))
            negative = ir.any_bits(ir.join(signs, signs), [1 << s + 4 * (c // 16) for c in range(32)])
            steps.append((negated(ir, codes, negative, OFFSET_3S), 4 * s, 4 * s + 16))
        yield InterleavedSubBlock(steps, ir.shuffle(scales[b // 2], None, [4 * (b % 2) + k % 4 for k in range(8)]))
