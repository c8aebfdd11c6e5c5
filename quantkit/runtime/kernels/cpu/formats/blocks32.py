"""Formats of q4_0, q4_1, q5_0, q5_1, q6_0, q8_0 and iq4_nl: blocks of 32 columns."""

from __future__ import annotations

from quantkit.codegen.simd import I32
from quantkit.runtime.kernels.cpu.formats.base import (
    BYTES8,
    BYTES16,
    BYTES32,
    SubBlock,
    format_of,
    load_half,
    low_then_high,
)
from quantkit.types.families.codebooks import K4

CODES = [int(v) + 128 for v in K4.values[:16]]  # IQ4_NL has the same values


@format_of("q4_0", columns=32, nbytes=18, offset=8, largest=15)
def _q4_0(ir, block):
    yield SubBlock(low_then_high(ir, ir.load(BYTES16, block + 2)), ir.splat(load_half(ir, block), 8))


@format_of("q4_1", columns=32, nbytes=20, offset=0, largest=15, has_minimum=True)
def _q4_1(ir, block):
    codes = low_then_high(ir, ir.load(BYTES16, block + 4))
    yield SubBlock(codes, ir.splat(load_half(ir, block), 8), ir.splat(load_half(ir, block + 2), 8))


def _fifth_bits(ir, address):
    """16 times bit j of the 32-bit word, in byte j."""
    word = ir.splat(ir.load(I32, address), 8).view(BYTES32)
    spread = ir.shuffle(word, None, [j // 8 for j in range(32)])
    return ir.where_bits(spread, [1 << j % 8 for j in range(32)], 16)


@format_of("q5_0", columns=32, nbytes=22, offset=16, largest=31)
def _q5_0(ir, block):
    codes = low_then_high(ir, ir.load(BYTES16, block + 6)) | _fifth_bits(ir, block + 2)
    yield SubBlock(codes, ir.splat(load_half(ir, block), 8))


@format_of("q5_1", columns=32, nbytes=24, offset=0, largest=31, has_minimum=True)
def _q5_1(ir, block):
    codes = low_then_high(ir, ir.load(BYTES16, block + 8)) | _fifth_bits(ir, block + 4)
    yield SubBlock(codes, ir.splat(load_half(ir, block), 8), ir.splat(load_half(ir, block + 2), 8))


@format_of("q6_0", columns=32, nbytes=26, offset=32, largest=63)
def _q6_0(ir, block):
    high = ir.load(BYTES8, block + 2)
    high = ir.join(high, high >> 4)
    high = ir.join((high << 4) & 0x30, (high << 2) & 0x30)
    yield SubBlock(low_then_high(ir, ir.load(BYTES16, block + 10)) | high, ir.splat(load_half(ir, block), 8))


@format_of("q8_0", columns=32, nbytes=34, offset=128, largest=255)
def _q8_0(ir, block):
    yield SubBlock(ir.load(BYTES32, block + 2) ^ -128, ir.splat(load_half(ir, block), 8))


@format_of("iq4_nl", columns=32, nbytes=18, offset=128, largest=255)
def _iq4_nl(ir, block):
    codes = ir.lookup(CODES, low_then_high(ir, ir.load(BYTES16, block + 2)))
    yield SubBlock(codes, ir.splat(load_half(ir, block), 8))
