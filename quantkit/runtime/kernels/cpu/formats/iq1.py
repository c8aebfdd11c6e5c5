"""Formats of iq1_s, iq1_m and interleaved iq1_s_r4, iq1_m_r4: ternary grid points and a shift of one eighth.

Codes count eighths: y = (d * m / 8) * (8 g +- 1), which rounds as (d * m) * (g +- 1/8) does. The table holds 8 g + 8 as
the bytes of one integer. The code is that plus 2, or plus 0 for a negative shift.
"""

from __future__ import annotations

import numpy as np

from quantkit.codegen.simd import I16, I32, I64, IrBuilder, Value, vector
from quantkit.runtime.kernels.cpu.formats.base import (
    BYTES8,
    BYTES16,
    BYTES32,
    INTS8,
    InterleavedSubBlock,
    SubBlock,
    format_of,
    load_half,
    spread,
)
from quantkit.runtime.kernels.cpu.formats.grids import odd_multiples
from quantkit.runtime.kernels.cpu.formats.grids_r4 import row_nibbles, row_scales, steps_of_eight
from quantkit.runtime.kernels.cpu.formats.points import codes_of, indices_in_memory, table
from quantkit.types.families.iq1 import LEVELS

_TABLE = table((8 * LEVELS + 8).astype(np.uint8))
_SHORTS16 = vector(16, I16)
_ALL_TWOS = 0x02020202


def _as_high_bits(ir: IrBuilder, words: Value, groups: list[int]) -> Value:
    """Bits 3 g .. 3 g + 2 of each word, moved to bits 8 .. 10; g is given per lane."""
    return words << ir.constant(words.type, [9 - 3 * g for g in groups]) >> 1 & 0x700


def _shift_bytes(words: Value) -> Value:
    """Per word four bytes of 2 where bit 15 is clear, of 0 where it is set."""
    return (words << 16).signed_shift(31) & _ALL_TWOS ^ _ALL_TWOS


@format_of("iq1_s", columns=256, nbytes=50, offset=9, largest=18)
def _iq1_s(ir, block):
    words = ir.load(vector(8, I16), block + 34)
    numbers = []
    for half in range(2):
        each = ir.shuffle(words, None, [4 * half + g // 4 for g in range(16)])
        numbers.append(
            ir.load(BYTES16, block + 2 + 16 * half).unsigned(I16) | _as_high_bits(ir, each, [0, 1, 2, 3] * 4)
        )
    words, index_address = words.unsigned(I32), indices_in_memory(ir, numbers)
    scales = odd_multiples(words >> 12 & 7, ir.splat(load_half(ir, block) * 0.125, 8))
    shifts = ir.in_memory(_shift_bytes(words))
    for s in range(8):
        shift = ir.splat(ir.load(I32, shifts + 4 * s), 8).view(BYTES32)
        yield SubBlock(codes_of(ir, _TABLE, index_address, range(4 * s, 4 * s + 4)) + shift, spread(ir, scales, s))


@format_of("iq1_m", columns=256, nbytes=56, offset=9, largest=18, scale_columns=16)
def _iq1_m(ir, block):
    words = ir.load(I64, block + 48)
    parts = [words >> 12 * j + 12 & 15 << 4 * j for j in range(4)]
    d = ir.half_to_float((parts[0] | parts[1] | (parts[2] | parts[3])).narrow(I16)) * 0.125
    scales, numbers, shifts = [], [], []
    for half in range(2):
        three_bits = ir.shuffle(ir.load(vector(2, I16), block + 48 + 4 * half), None, [s // 4 for s in range(8)])
        three_bits = three_bits.unsigned(I32) >> ir.constant(INTS8, [0, 3, 6, 9] * 2) & 7
        scales.append(odd_multiples(three_bits, ir.splat(d, 8)))
        nibbles = ir.load(BYTES8, block + 32 + 8 * half).unsigned(I16)
        nibbles = (nibbles | nibbles << 4).view(BYTES16)  # in the low halves of the bytes
        high = nibbles.unsigned(I16) << 8 & 0x700
        numbers.append(ir.load(BYTES16, block + 16 * half).unsigned(I16) | high)
        shifts.append(nibbles >> 2 & 2 ^ 2)
    index_address, shifts_at = indices_in_memory(ir, numbers), ir.in_memory(ir.join(*shifts))
    for s in range(8):
        shift = ir.splat(ir.load(I32, shifts_at + 4 * s), 8).view(BYTES32)
        shift = ir.shuffle(shift, None, [c // 8 for c in range(32)])
        codes = codes_of(ir, _TABLE, index_address, range(4 * s, 4 * s + 4))
        yield SubBlock(codes + shift, spread(ir, scales[s // 4], 2 * s % 8, 2 * s % 8 + 1))


@format_of("iq1_s_r4", columns=32, nbytes=24, offset=9, largest=18, rows=4, head=8)
def _iq1_s_r4(ir, block, head):
    words = ir.load(vector(4, I16), block + 16)
    high = _as_high_bits(ir, ir.shuffle(words, None, [0, 1, 2, 3] * 4), [g for g in range(4) for _ in range(4)])
    index_address = indices_in_memory(ir, [ir.load(BYTES16, block).unsigned(I16) | high])
    words = ir.join(words, words).unsigned(I32)
    shift = _shift_bytes(words).view(BYTES32)
    steps = [(codes + shift, low, high) for codes, low, high in steps_of_eight(ir, _TABLE, index_address, 1, 4)]
    yield InterleavedSubBlock(steps, odd_multiples(words >> 12 & 7, row_scales(ir, head, 0.125)))


@format_of("iq1_m_r4", columns=32, nbytes=28, offset=9, largest=18, scale_columns=16, rows=4, head=8)
def _iq1_m_r4(ir, block, head):
    # Byte 4 h + row holds the nibbles of points 2 h and 2 h + 1 of the row; h is 1 in lanes 4..7.
    nibbles = ir.load(BYTES8, block + 16)
    high = ir.shuffle(nibbles, None, [i // 8 * 4 + i % 4 for i in range(16)]).unsigned(I16)
    high = high << ir.constant(_SHORTS16, [8 - 4 * (i // 4 % 2) for i in range(16)]) & 0x700
    index_address = indices_in_memory(ir, [ir.load(BYTES16, block).unsigned(I16) | high])
    flags = ir.shuffle(nibbles, None, [c // 4 for c in range(32)])
    steps = []
    for codes, low, high_column in steps_of_eight(ir, _TABLE, index_address, 1, 4):
        shift = ir.where_bits(flags, [8 << 4 * (low // 8)] * 32, 2) ^ 2
        steps.append((codes + shift, low, high_column))
    yield InterleavedSubBlock(steps, row_nibbles(ir, block + 24).real() * row_scales(ir, head, 0.125))
