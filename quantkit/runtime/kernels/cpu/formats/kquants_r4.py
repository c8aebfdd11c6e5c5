"""Formats of q2_k_r4, q3_k_r4, q4_k_r4, q5_k_r4 and q6_k_r4: four rows interleaved.

Slot 4 s + k of the scales is for group s of columns of row k. In types with groups of 16 columns, the eight slots of a
sub-block are its lanes.
"""

from __future__ import annotations

from quantkit.codegen.simd import I32, IrBuilder, Value
from quantkit.runtime.kernels.cpu.formats.base import BYTES8, BYTES32, InterleavedSubBlock, float_minus, format_of
from quantkit.runtime.kernels.cpu.formats.blocks32_r import bits, nibbles, row_scales_twice, steps4
from quantkit.runtime.kernels.cpu.formats.nonlinear import shift_words

_COLUMNS = (0, 4, 8, 12)  # of the bit_pairs of a line, and of the bits of PLANE_A


@format_of("q2_k_r4", columns=256, nbytes=336, offset=0, largest=3, scale_columns=16, has_minimum=True, rows=4)
def _q2_k_r4(ir, block):
    d, d_min = row_scales_twice(ir, block), row_scales_twice(ir, block + 8) * -1.0
    for j in range(8):
        packed = ir.load(BYTES8, block + 16 + 8 * j).unsigned(I32)
        bit_pairs = ir.load(BYTES32, block + 80 + 32 * j)
        codes = [shift_words(bit_pairs, -2 * t) & 3 for t in range(4)]
        yield InterleavedSubBlock(steps4(codes, _COLUMNS), (packed & 15).real() * d, (packed >> 4).real() * d_min)


@format_of("q3_k_r4", columns=256, nbytes=440, offset=4, largest=7, scale_columns=16, rows=4)
def _q3_k_r4(ir, block):
    d = row_scales_twice(ir, block)
    for j in range(8):
        low = ir.load(BYTES8, block + 24 + 8 * (j % 4)).unsigned(I32) >> 4 * (j // 4)
        high = ir.load(BYTES8, block + 8 + 8 * (j % 2)).unsigned(I32) << 4 >> 2 * (j // 2)
        bit_pairs, third_bits = ir.load(BYTES32, block + 184 + 32 * j), bits(ir, block + 56 + 16 * j, distance=4)
        codes = [shift_words(bit_pairs, -2 * t) & 3 | shift_words(third_bits, 2 - t) & 4 for t in range(4)]
        yield InterleavedSubBlock(steps4(codes, _COLUMNS), float_minus(low & 15 | high & 48, 32) * d)


def _scales_and_minimums(ir: IrBuilder, block: Value) -> list[tuple[Value, Value]]:
    """(scales, minimums) of the eight sub-blocks of q4_k_r4 or q5_k_r4, in eight lanes: the four rows twice."""
    d, d_min = row_scales_twice(ir, block), row_scales_twice(ir, block + 8) * -1.0
    pairs = []
    for pair in range(4):
        low = ir.load(BYTES8, block + 32 + 8 * pair).unsigned(I32)
        high = ir.load(BYTES8, block + 16 + 8 * (pair % 2)).unsigned(I32) >> 4 * (pair // 2)
        scales = (low & 15 | high << 4 & 48).real() * d
        minimums = (low >> 4 | high << 2 & 48).real() * d_min
        for lanes in ([0, 1, 2, 3] * 2, [4, 5, 6, 7] * 2):
            pairs.append((ir.shuffle(scales, None, lanes), ir.shuffle(minimums, None, lanes)))
    return pairs


@format_of("q4_k_r4", columns=256, nbytes=576, offset=0, largest=15, has_minimum=True, rows=4)
def _q4_k_r4(ir, block):
    for j, (scale, minimum) in enumerate(_scales_and_minimums(ir, block)):
        yield InterleavedSubBlock(steps4(nibbles(ir, block + 64 + 64 * j)), scale, minimum)


@format_of("q5_k_r4", columns=256, nbytes=704, offset=0, largest=31, has_minimum=True, rows=4)
def _q5_k_r4(ir, block):
    for j, (scale, minimum) in enumerate(_scales_and_minimums(ir, block)):
        fifth_bits = bits(ir, block + 64 + 16 * j, distance=4)
        low = nibbles(ir, block + 192 + 64 * j)
        yield InterleavedSubBlock(
            steps4(low[t] | shift_words(fifth_bits, 4 - t) & 16 for t in range(4)), scale, minimum
        )


@format_of("q6_k_r4", columns=256, nbytes=840, offset=32, largest=63, scale_columns=16, rows=4)
def _q6_k_r4(ir, block):
    d = row_scales_twice(ir, block)
    for j in range(8):
        scale = ir.load(BYTES8, block + 8 + 8 * j).signed(I32).real() * d
        low, bit_pairs = nibbles(ir, block + 328 + 64 * j), ir.load(BYTES32, block + 72 + 32 * j)
        yield InterleavedSubBlock(steps4(low[t] | shift_words(bit_pairs, 4 - 2 * t) & 48 for t in range(4)), scale)
