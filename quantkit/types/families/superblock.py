"""What the encoders of types with blocks of 256 and a half-precision super-scale d share.

A block is divided by a power of two, `unit`, so that its largest magnitude lies in [1, 2) and nothing over- or
underflows. d is rounded to the half that a file can hold *before* anything is chosen under it: rounded last, it would
be an error of the whole block, and a large one where the half is subnormal. (`nonlinear` alone changes d afterwards, by
a few percent at most, and rounds it to a half again.) The `put_…` functions at the end write codes in the layouts of
the types.
"""

from __future__ import annotations

import numpy as np

from quantkit.codegen.half import float_to_half, half_to_float
from quantkit.codegen.jit import kernel, subkernel

MIN_HALF = 2.0**-24
MAX_HALF = 65504.0
MIN_WEIGHT = 2.0**-20  # of the block's largest: a column that the calibration never saw is still encoded sanely


@kernel
def power_below(x: np.float32) -> np.float32:
    """The largest power of two that is not above x (0 for 0 and subnormals)."""
    return np.uint32(np.float32(x).view(np.uint32) & np.uint32(0x7F800000)).view(np.float32)


@kernel
def load_block(x: np.ndarray, xs: np.ndarray, minimum: np.float32) -> tuple[np.float32, np.float32]:
    """Divide a block by a power of two: x = xs * unit, largest |xs| in [1, 2). Returns unit and the mean of xs^2.

    unit is 0, and xs undefined, when no magnitude reaches `minimum`: then the block is stored as zeros.
    """
    largest = np.float32(0)
    for i in range(len(xs)):
        largest = max(largest, abs(x[i]))
    if largest < minimum:
        return np.float32(0), np.float32(0)
    unit = power_below(largest)
    squares = np.float32(0)
    for i in range(len(xs)):
        xs[i] = x[i] / unit
        squares += xs[i] * xs[i]
    return unit, squares / np.float32(len(xs))


@kernel
def relative_importance(importance: np.ndarray, first: int, w: np.ndarray) -> bool:
    """Weights of a block relative to its largest, at least MIN_WEIGHT; 1 without importance or where it is all zero.

    `importance` is float32[n] (the block starts at `first`) or float32[0]. Returns whether it is used. ik_llama.cpp's
    weights are q sqrt(v + x^2); with them, or with weights between them and q, models diverge more from the original
    (docs/notes/2026-11-22-encoder-weights.md).
    """
    largest = np.float32(0)
    if len(importance):
        for i in range(len(w)):
            largest = max(largest, importance[first + i])
    if largest == np.float32(0):
        w[:] = np.float32(1)
        return False
    for i in range(len(w)):
        w[i] = max(importance[first + i] / largest, np.float32(MIN_WEIGHT))
    return True


@kernel
def storable(d: np.float32, unit: np.float32) -> np.float32:
    """The half nearest to |d| * unit that is neither 0 nor Inf, with the sign of d, divided by `unit`."""
    magnitude = min(max(abs(d) * unit, np.float32(MIN_HALF)), np.float32(MAX_HALF))
    value: np.float32 = half_to_float(float_to_half(magnitude)) / unit
    return value if d >= np.float32(0) else -value


@kernel
def put_half(out: np.ndarray, offset: int, value: np.float32) -> None:
    """Write a float32 that a half can hold as two bytes."""
    half = float_to_half(value)
    out[offset] = np.uint8(half)
    out[offset + 1] = np.uint8(half >> np.uint16(8))


@subkernel
def put_flags(flags: np.ndarray, out: np.ndarray) -> None:
    """16 bits as two bytes: bit s from flags[s]."""
    for s in range(16):
        out[s // 8] |= np.uint8(flags[s] << (s % 8))


@subkernel
def put_multipliers(multipliers: np.ndarray, high: np.ndarray, low: np.ndarray) -> None:
    """Multipliers -32 to 31 of 16 sub-blocks, + 32: their high 2 bits in 4 bytes, their low 4 bits in 8."""
    for s in range(16):
        m = multipliers[s] + 32
        high[s // 4] |= np.uint8((m >> 4) << (2 * (s % 4)))
        low[s // 2] |= np.uint8((m & 15) << (4 * (s % 2)))


@subkernel
def put_bits(codes: np.ndarray, shift: int, out: np.ndarray) -> None:
    """Bit `shift` of 256 codes: byte r of 32 holds elements r, 32 + r, …, the first in the lowest bit."""
    for group in range(8):
        for r in range(32):
            out[r] |= ((codes[32 * group + r] >> np.uint8(shift)) & np.uint8(1)) << np.uint8(group)


@subkernel
def put_pairs(codes: np.ndarray, shift: int, out: np.ndarray) -> None:
    """Bits `shift`, + 1 of 256 codes: byte r of a half's 32 holds its elements r, 32 + r, 64 + r, 96 + r."""
    for group in range(8):
        for r in range(32):
            pair = (codes[32 * group + r] >> np.uint8(shift)) & np.uint8(3)
            out[32 * (group // 4) + r] |= pair << np.uint8(2 * (group % 4))


@subkernel
def put_nibbles(codes: np.ndarray, width: int, out: np.ndarray) -> None:
    """The low 4 bits of 256 codes: byte r of `width` holds elements r and width + r of 2 * width."""
    for group in range(128 // width):
        for r in range(width):
            first = 2 * width * group + r
            out[width * group + r] = (codes[first] & np.uint8(15)) | (codes[first + width] << np.uint8(4))
