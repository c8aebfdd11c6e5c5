"""Formats of iq4_k and, interleaved, iq4_k_r4."""

from __future__ import annotations

from quantkit.runtime.kernels.cpu.formats.base import (
    BYTES8,
    BYTES16,
    BYTES32,
    INTS16,
    LaneUnit,
    Unit,
    format_of,
    load_half,
    load_halves,
    low_then_high,
    pick,
)
from quantkit.simd import I8, I16, I32, vector
from quantkit.types.codebooks import K4

CODES = [int(v) + 128 for v in K4.values[:16]]  # IQ4_NL has the same values


@format_of("iq4_k", columns=256, nbytes=144, offset=128, largest=255, group=16)
def _iq4_k(e, block):
    nibbles = e.load(BYTES8, block + 8)
    nibbles = e.shuffle(nibbles & 15, nibbles >> 4, [s // 2 + 8 * (s % 2) for s in range(16)])
    crumbs = e.shuffle(e.load(vector(4, I8), block + 4), None, [s // 4 for s in range(16)]).unsigned(I32)
    crumbs = crumbs >> e.constant(INTS16, [2 * (s % 4) for s in range(16)]) & 3
    scales = (nibbles.unsigned(I32) | crumbs << 4) - 32
    scales = scales.real() * e.splat(load_half(e, block), 16)
    shifts = e.splat(e.load(I16, block + 2), 16).view(BYTES32)
    for j in range(8):
        codes = e.lookup(CODES, low_then_high(e, e.load(BYTES16, block + 16 + 16 * j)))
        flags = e.shuffle(shifts, None, [2 * j // 8] * 32)  # the byte that holds bits 2j and 2j+1
        shifted = e.where_bits(flags, [1 << (2 * j + c // 16) % 8 for c in range(32)], 4)
        yield Unit(codes + shifted, pick(e, scales, 2 * j, 2 * j + 1))


@format_of("iq4_k_r4", columns=256, nbytes=576, offset=128, largest=255, group=16, rows=4)
def _iq4_k_r4(e, block):
    # Slot 4 s + k is sub-block s of row k. The two sub-blocks of a unit are its lanes 0..3 and 4..7.
    d = load_halves(e, block, 4)
    d = e.join(d, d)
    # Bit j of byte k is the flag of sub-block 2j of row k, bit j of byte 4 + k that of sub-block 2j + 1.
    flags = e.shuffle(e.load(BYTES8, block + 8), None, [c // 4 for c in range(32)])
    for j in range(8):
        low = e.load(BYTES8, block + 32 + 8 * (j % 4))
        low = (low >> 4 if j >= 4 else low & 15).unsigned(I32)
        high = (e.load(BYTES8, block + 16 + 8 * (j % 2)) >> 2 * (j // 2) & 3).unsigned(I32)
        scale = ((low | high << 4) - 32).real() * d
        shifted = e.where_bits(flags, [1 << j] * 32, 4)
        packed = [e.load(BYTES32, block + 64 + 64 * j + 32 * i) for i in range(2)]
        steps = []
        for column, nibbles in ((0, packed[0] & 15), (8, packed[0] >> 4), (4, packed[1] & 15), (12, packed[1] >> 4)):
            steps.append((e.lookup(CODES, nibbles) + shifted, column, column + 16))
        yield LaneUnit(steps, scale)
