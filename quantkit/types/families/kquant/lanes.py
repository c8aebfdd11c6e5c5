"""What the searches of the K types share: sub-blocks of several blocks side by side, one per SIMD lane.

A block of 256 has `subs` sub-blocks of `size` elements (16 of 16 or 8 of 32). Kernels work on LANES sub-blocks at once,
those of `LANES // subs` blocks: sub-block s of block b is lane s * (LANES // subs) + b. Sums over the elements of a
sub-block are formed element by element and those over a block sub-block by sub-block, so the bytes depend neither on
the width of the CPU's vectors nor on the neighbouring blocks. Flat float32 arrays hold everything:

    data   two, xs and ws: element j of lane l at xs[j * LANES + l], its weight at ws[j * LANES + l]
    state  value k of lane l at state[k * LANES + l]; each search names its rows, the first three are common

Indices are loop variables plus constants, so that numba drops its check for negative indices and LLVM sees plain
vectors.

Blocks are divided by a power of two, so that their largest magnitude lies in [1, 2) and nothing over- or underflows.
Super-scales are rounded to what a half can hold *before* anything is chosen under them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from quantkit.codegen.jit import kernel, subkernel
from quantkit.types.families.block32.scale_search import nearest_half
from quantkit.types.families.superblock import MAX_HALF, MIN_HALF, MIN_WEIGHT, power_below

LANES = 64
Lanes = tuple[np.ndarray, np.ndarray]  # xs and ws

# Rows of `state` that both searches have.
UNIT = 0  # of the lane's block; 1 where that is all zero
PER_UNIT = 1  # 1 / UNIT
SUM_E = 2  # sum of the weights

ROUND = np.float32(3 << 22)  # adding and subtracting it rounds |t| < 2^22 to an integer, ties to even
ZERO, ONE, TWO = np.float32(0), np.float32(1), np.float32(2)
INFINITE = np.float32(np.inf)
_MIN_MAGNITUDE = np.float32(2.0**-25)  # a block whose largest magnitude is below becomes zeros in any type


class Weighting(NamedTuple):
    """How the weight of an element is formed: with importance q it is q sqrt(given * v + x^2), without it

    mean * v + root * r + magnitude * |x| + square * x^2

    where v is the mean of x^2 over the block of 256 and r the root of its mean over the 32 elements around.
    """

    given: np.float32
    mean: np.float32
    root: np.float32
    magnitude: np.float32
    square: np.float32


def make_weighting(
    given: float, mean: float = 0, root: float = 0, magnitude: float = 0, square: float = 0
) -> Weighting:
    """A `Weighting` of float32 numbers."""
    return Weighting(*(np.float32(v) for v in (given, mean, root, magnitude, square)))


@kernel(inline="always")
def storable(v: np.float32, unit: np.float32, per_unit: np.float32) -> np.float32:
    """The half nearest to v * unit >= 0 that is neither 0 nor Inf, in units of `unit`. Branch-free."""
    return nearest_half(min(max(v * unit, np.float32(MIN_HALF)), np.float32(MAX_HALF))) * per_unit


@subkernel
def _largest(values: np.ndarray) -> np.float32:
    """The largest magnitude of float32[n], by its bits: integers are compared in SIMD lanes."""
    bits = values.view(np.uint32)
    max_bits = np.uint32(0)
    for i in range(len(bits)):
        max_bits = max(max_bits, bits[i] & np.uint32(0x7FFFFFFF))
    return np.uint32(max_bits).view(np.float32)


@subkernel
def _set_weights(
    xs: np.ndarray, given: bool | np.bool_, w: np.ndarray, weighting: Weighting, squares: np.ndarray
) -> None:
    """Fill w float32[256] with the weights of the block xs; where `given`, w holds its importance on entry."""
    squares[:] = ZERO
    for j in range(4):
        for p in range(8):
            for i in range(8):
                squares[8 * p + i] += xs[32 * p + 8 * j + i] * xs[32 * p + 8 * j + i]
    for i in range(1, 8):
        for p in range(8):
            squares[8 * p] += squares[8 * p + i]
    total = ZERO
    for p in range(8):
        total += squares[8 * p]
    mean = total / np.float32(256)
    if given:
        mean = mean * weighting.given
        for i in range(256):
            w[i] *= np.sqrt(mean + xs[i] * xs[i])
        return
    for p in range(8):
        base = weighting.mean * mean + weighting.root * np.sqrt(squares[8 * p] / np.float32(32))
        for j in range(32):
            size = abs(xs[32 * p + j])
            w[32 * p + j] = base + size * (weighting.magnitude + weighting.square * size)


@subkernel
def _load_block(
    x: np.ndarray, importance: np.ndarray, weighting: Weighting, xs: np.ndarray, w: np.ndarray, squares: np.ndarray
) -> np.float32:
    """Elements and weights of a block x float32[256] in its own unit, which is returned; importance may be empty."""
    largest = _largest(x)
    if largest < _MIN_MAGNITUDE:
        xs[:], w[:] = ZERO, ZERO
        return ONE
    unit = power_below(largest)
    per_unit = ONE / unit
    for i in range(256):
        xs[i] = x[i] * per_unit
    largest_importance = _largest(importance)
    if largest_importance > ZERO:
        per_unit = ONE / power_below(largest_importance)
        for i in range(256):
            w[i] = max(importance[i] * per_unit, np.float32(MIN_WEIGHT))
    _set_weights(xs, largest_importance > ZERO, w, weighting, squares)
    return unit


@subkernel
def load(
    x: np.ndarray, importance: np.ndarray, first: int, subs: int, weighting: Weighting, data: Lanes, state: np.ndarray
) -> None:
    """Fill `data`, UNIT, PER_UNIT and SUM_E from blocks first, … of float32[rows, n]; zeros past the end."""
    xs, ws = data
    count, size = LANES // subs, 256 // subs
    flat, columns = x.reshape(-1), x.shape[1]
    block, w, squares = np.empty(256, np.float32), np.empty(256, np.float32), np.empty(64, np.float32)
    for b in range(count):
        start = (first + b) * 256
        column = start % columns if importance.size else 0
        unit = _load_block(flat[start : start + 256], importance[column : column + 256], weighting, block, w, squares)
        for s in range(subs):
            lane = s * count + b
            state[UNIT * LANES + lane], state[PER_UNIT * LANES + lane] = unit, ONE / unit
            for j in range(size):
                xs[j * LANES + lane] = block[s * size + j]
                ws[j * LANES + lane] = w[s * size + j]
    for lane in range(LANES):
        state[SUM_E * LANES + lane] = ZERO
    for j in range(size):
        for lane in range(LANES):
            state[SUM_E * LANES + lane] += ws[j * LANES + lane]


@subkernel
def fill_row(state: np.ndarray, row: int, value: np.float32) -> None:
    """Set all lanes of a row of the state."""
    for lane in range(LANES):
        state[row * LANES + lane] = value


@subkernel
def copy_row(state: np.ndarray, row: int, source: int) -> None:
    """Copy all lanes of a row of the state."""
    for lane in range(LANES):
        state[row * LANES + lane] = state[source * LANES + lane]


@subkernel
def block_sums(state: np.ndarray, row: int, subs: int, sums: np.ndarray) -> None:
    """sums[b]: the sum of a row over the sub-blocks of block b."""
    count = LANES // subs
    for b in range(count):
        sums[b] = ZERO
    for s in range(subs):
        for b in range(count):
            sums[b] += state[row * LANES + s * count + b]


@subkernel
def block_maxima(state: np.ndarray, row: int, subs: int, maxima: np.ndarray) -> None:
    """maxima[b]: the largest of a row over the sub-blocks of block b, and not below 0."""
    count = LANES // subs
    for b in range(count):
        maxima[b] = ZERO
    for s in range(subs):
        for b in range(count):
            maxima[b] = max(maxima[b], state[row * LANES + s * count + b])


@subkernel
def broadcast(values: np.ndarray, subs: int, state: np.ndarray, row: int) -> None:
    """Write each block's value to all its lanes of a row of `state`."""
    count = LANES // subs
    for s in range(subs):
        for b in range(count):
            state[row * LANES + s * count + b] = values[b]


@subkernel
def block_codes(lanes: np.ndarray, b: int, subs: int, codes: np.ndarray) -> None:
    """Codes of block b from those of all lanes, uint8 like `data`, in the order of its elements."""
    count, size = LANES // subs, 256 // subs
    for s in range(subs):
        for j in range(size):
            codes[s * size + j] = lanes[j * LANES + s * count + b]


@subkernel
def grid_factor(i: int, count: int, max_scale: np.float32, first: np.float32, span: int) -> np.float32:
    """Super-scale i of a grid of `count`, as a multiple of the one under which the largest scale becomes `max_scale`.

    Under it the largest scale becomes a whole number between `first` - `span` and `first`, so that the best scale of a
    sub-block that dominates its block stays exact. A number above `max_scale` means that the scale is clipped.
    """
    return max_scale / (first - np.float32(i * max(span // count, 1)))
