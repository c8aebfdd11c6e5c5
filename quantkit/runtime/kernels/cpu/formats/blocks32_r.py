"""Formats of q4_0_r8, q8_0_r8, mxfp4_r8, q8_KV_r8, q5_0_r4, q6_0_r4, iq4_nl_r4: interleaved types of blocks of 32.

Also what readers of types with four interleaved rows share: how the fields NIB and PLANE_B of
types/families/interleave.py become steps.
"""

from __future__ import annotations

from collections.abc import Iterable

from quantkit.codegen.simd import I32, IrBuilder, Value
from quantkit.runtime.kernels.cpu.formats.base import (
    BYTES8,
    BYTES16,
    BYTES32,
    FLOATS8,
    INTS8,
    InterleavedSubBlock,
    format_of,
    load_halves,
)
from quantkit.runtime.kernels.cpu.formats.blocks32 import CODES
from quantkit.runtime.kernels.cpu.formats.few_levels import E2M1_CODES, E2M1_OFFSET, powers
from quantkit.runtime.kernels.cpu.formats.nonlinear import shift_words

NIB_COLUMNS = (0, 8, 4, 12)  # of lanes 0..3, in the order of `nibbles`; of lanes 4..7, 16 further


def nibbles(ir: IrBuilder, address: Value) -> list[Value]:
    """Codes of the four steps in the 64 bytes of NIB."""
    lines = [ir.load(BYTES32, address + 32 * i) for i in range(2)]
    return [lines[0] & 15, lines[0] >> 4, lines[1] & 15, lines[1] >> 4]


def bits(ir: IrBuilder, address: Value, distance: int) -> Value:
    """The 16 bytes of a PLANE twice, the second time shifted right, so that a step's bit has one position in all lanes.

    The shift crosses bytes: only the low bits of each byte are valid in both halves.
    """
    plane = ir.load(BYTES16, address)
    shifts = ir.constant(INTS8, [0] * 4 + [distance] * 4)
    return (ir.join(plane, plane).view(INTS8) >> shifts).view(BYTES32)


def steps4(codes: Iterable[Value], columns: Iterable[int] = NIB_COLUMNS) -> list[tuple[Value, int, int]]:
    """Steps of four interleaved rows: lanes 4..7 are 16 columns after lanes 0..3."""
    return [(code, column, column + 16) for code, column in zip(codes, columns)]


def row_scales_twice(ir: IrBuilder, address: Value) -> Value:
    """The four float16 scales at an address, for lanes 0..3 and again for lanes 4..7."""
    scales = load_halves(ir, address, 4)
    return ir.join(scales, scales)


def _nibble_pairs(ir: IrBuilder, address: Value) -> list[tuple[Value, int, int]]:
    """Steps of eight interleaved rows whose bytes hold columns c and c + 16."""
    steps = []
    for s in range(4):
        packed = ir.load(BYTES32, address + 32 * s)
        steps += [(packed & 15, 4 * s, 4 * s), (packed >> 4, 4 * s + 16, 4 * s + 16)]
    return steps


def _bytes(ir: IrBuilder, address: Value) -> list[tuple[Value, int, int]]:
    """Steps of eight interleaved rows of signed bytes."""
    return [(ir.load(BYTES32, address + 32 * s) ^ -128, 4 * s, 4 * s) for s in range(8)]


@format_of("q4_0_r8", columns=32, nbytes=144, offset=8, largest=15, rows=8)
def _q4_0_r8(ir, block):
    yield InterleavedSubBlock(_nibble_pairs(ir, block + 16), load_halves(ir, block, 8))


@format_of("q8_0_r8", columns=32, nbytes=272, offset=128, largest=255, rows=8)
def _q8_0_r8(ir, block):
    yield InterleavedSubBlock(_bytes(ir, block + 16), load_halves(ir, block, 8))


@format_of("q8_KV_r8", columns=32, nbytes=256, offset=128, largest=255, rows=8, head=32)
def _q8_kv_r8(ir, block, head):
    yield InterleavedSubBlock(_bytes(ir, block), ir.load(FLOATS8, head))


@format_of("mxfp4_r8", columns=32, nbytes=136, offset=E2M1_OFFSET, largest=24, rows=8)
def _mxfp4_r8(ir, block):
    steps = [(ir.lookup(E2M1_CODES, packed), *columns) for packed, *columns in _nibble_pairs(ir, block + 8)]
    yield InterleavedSubBlock(steps, powers(ir, ir.load(BYTES8, block).unsigned(I32)))


@format_of("q5_0_r4", columns=32, nbytes=88, offset=16, largest=31, rows=4)
def _q5_0_r4(ir, block):
    fifth_bits = bits(ir, block + 8, distance=1)
    low = nibbles(ir, block + 24)
    codes = [low[t] | shift_words(fifth_bits, 4 - bit) & 16 for t, bit in enumerate((0, 4, 2, 6))]
    yield InterleavedSubBlock(steps4(codes), row_scales_twice(ir, block))


@format_of("q6_0_r4", columns=32, nbytes=104, offset=32, largest=63, rows=4)
def _q6_0_r4(ir, block):
    bit_pairs = ir.load(BYTES32, block + 8)
    low = nibbles(ir, block + 40)
    codes = [low[t] | shift_words(bit_pairs, 4 - bit) & 48 for t, bit in enumerate((0, 4, 2, 6))]
    yield InterleavedSubBlock(steps4(codes), row_scales_twice(ir, block))


@format_of("iq4_nl_r4", columns=32, nbytes=72, offset=128, largest=255, rows=4)
def _iq4_nl_r4(ir, block):
    yield InterleavedSubBlock(steps4(ir.lookup(CODES, n) for n in nibbles(ir, block + 8)), row_scales_twice(ir, block))
