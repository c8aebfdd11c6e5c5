"""Parts shared by the encoders of the K types: sub-blocks of several blocks side by side, one per SIMD lane.

A block of 256 has `subs` sub-blocks of `size` elements (16 of 16 or 8 of 32). Kernels look at LANES sub-blocks at once,
those of `LANES // subs` blocks: sub-block s of block b is lane s * (LANES // subs) + b. Sums over the elements of a
sub-block are formed element by element and those over a block sub-block by sub-block, so the bytes depend neither on
the width of the CPU's vectors nor on the blocks beside. Flat float32 arrays hold everything:

    data   two, xs and ws: element j of lane l at xs[j * LANES + l], its weight at ws[j * LANES + l]
    state  value k of lane l at state[k * LANES + l]; k is one of the names of the engine, the first three common

Indices are loop variables plus constants, so that numba drops its test for negative ones and LLVM sees plain vectors.

Blocks are in units of a power of two, so that their largest magnitude lies in [1, 2) and nothing over- or underflows.
Super-scales are rounded to what a half can hold, in these units, *before* anything is chosen under them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from quantkit.codegen.jit import kernel, part
from quantkit.types.families.search import nearest_half
from quantkit.types.families.superblock import GREATEST_HALF, LEAST_HALF, LEAST_WEIGHT, power_below

LANES = 64

# Rows of `state` that all engines have.
UNIT = 0  # of the lane's block; 1 where that is all zero
PER_UNIT = 1  # 1 / UNIT
SUM_E = 2  # sum of the weights

ROUND = np.float32(3 << 22)  # adding and subtracting it rounds |t| < 2^22 to an integer, ties to even
ZERO, ONE, TWO = np.float32(0), np.float32(1), np.float32(2)
INFINITE = np.float32(np.inf)
_SMALLEST = np.float32(2.0**-25)  # blocks whose largest magnitude is below are zeros in any type


class Weights(NamedTuple):
    """How an element counts. With importance q its weight is q sqrt(given * v + x^2), without it

    mean * v + root * r + magnitude * |x| + square * x^2

    where v is the mean of x^2 over the block of 256 and r the root of its mean over the 32 elements around.
    """

    given: np.float32
    mean: np.float32
    root: np.float32
    magnitude: np.float32
    square: np.float32


def weights(given: float, mean: float = 0, root: float = 0, magnitude: float = 0, square: float = 0) -> Weights:
    return Weights(*(np.float32(v) for v in (given, mean, root, magnitude, square)))


@kernel(inline="always")
def storable(v, unit, per_unit):
    """The half nearest to v * unit >= 0 that is neither 0 nor Inf, in units of `unit`. Branch-free."""
    return nearest_half(min(max(v * unit, np.float32(LEAST_HALF)), np.float32(GREATEST_HALF))) * per_unit


@part
def _largest(values):
    """The largest magnitude of float32[n], by its bits: integers are compared in SIMD lanes."""
    bits = values.view(np.uint32)
    most = np.uint32(0)
    for i in range(len(bits)):
        most = max(most, bits[i] & np.uint32(0x7FFFFFFF))
    return np.uint32(most).view(np.float32)


@part
def _weigh(xs, given, w, weighing, squares):
    """Weights of the block xs float32[256] to w, which holds its importance where that is `given`."""
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
        mean = mean * weighing.given
        for i in range(256):
            w[i] *= np.sqrt(mean + xs[i] * xs[i])
        return
    for p in range(8):
        floor = weighing.mean * mean + weighing.root * np.sqrt(squares[8 * p] / np.float32(32))
        for j in range(32):
            size = abs(xs[32 * p + j])
            w[32 * p + j] = floor + size * (weighing.magnitude + weighing.square * size)


@part
def _load_block(x, importance, weighing, xs, w, squares):
    """Elements and weights of a block x float32[256] in its own unit, which is returned; importance may be empty."""
    largest = _largest(x)
    if largest < _SMALLEST:
        xs[:], w[:] = ZERO, ZERO
        return ONE
    unit = power_below(largest)
    per_unit = ONE / unit
    for i in range(256):
        xs[i] = x[i] * per_unit
    most = _largest(importance)
    if most > ZERO:
        per_unit = ONE / power_below(most)
        for i in range(256):
            w[i] = max(importance[i] * per_unit, np.float32(LEAST_WEIGHT))
    _weigh(xs, most > ZERO, w, weighing, squares)
    return unit


@part
def load(x, importance, first, subs, weighing, data, state):
    """Fill `data`, UNIT, PER_UNIT and SUM_E from blocks first, … of float32[rows, n]; zeros past the end."""
    xs, ws = data
    count, size = LANES // subs, 256 // subs
    flat, columns = x.reshape(-1), x.shape[1]
    block, w, squares = np.empty(256, np.float32), np.empty(256, np.float32), np.empty(64, np.float32)
    for b in range(count):
        at = (first + b) * 256
        column = at % columns if importance.size else 0
        unit = _load_block(flat[at : at + 256], importance[column : column + 256], weighing, block, w, squares)
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


@part
def fill(state, row, value):
    for lane in range(LANES):
        state[row * LANES + lane] = value


@part
def copy(state, row, source):
    for lane in range(LANES):
        state[row * LANES + lane] = state[source * LANES + lane]


@part
def block_sums(state, row, subs, sums):
    """sums[b]: the sum of a row over the sub-blocks of block b."""
    count = LANES // subs
    for b in range(count):
        sums[b] = ZERO
    for s in range(subs):
        for b in range(count):
            sums[b] += state[row * LANES + s * count + b]


@part
def block_maxima(state, row, subs, maxima):
    """maxima[b]: the largest of a row over the sub-blocks of block b, and not below 0."""
    count = LANES // subs
    for b in range(count):
        maxima[b] = ZERO
    for s in range(subs):
        for b in range(count):
            maxima[b] = max(maxima[b], state[row * LANES + s * count + b])


@part
def spread(values, subs, state, row):
    """Write each block's value to all its lanes."""
    count = LANES // subs
    for s in range(subs):
        for b in range(count):
            state[row * LANES + s * count + b] = values[b]


@part
def codes_of(lanes, b, subs, codes):
    """Codes of block b from those of all lanes, uint8 like `data`, in the order of its elements."""
    count, size = LANES // subs, 256 // subs
    for s in range(subs):
        for j in range(size):
            codes[s * size + j] = lanes[j * LANES + s * count + b]


@part
def factor_of(i, count, most, first, span):
    """Place i of a grid of `count` super-scales, as a multiple of that under which the largest scale becomes `most`.

    Under it the largest scale becomes a whole number, `first` or less by up to `span`: where one sub-block outweighs
    its block, its own best scale stays what it is. A number above `most` means that it is clipped.
    """
    return most / (first - np.float32(i * max(span // count, 1)))
