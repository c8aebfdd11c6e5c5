"""Parts shared by the encoders of types with blocks of 256 and a half-precision super-scale d.

A block is searched in units of a power of two, `unit`, so that its largest magnitude lies in [1, 2) and nothing over-
or underflows; d is rounded to the half a file can hold *before* anything is chosen under it, because rounding it last
turns into an error of the whole block (badly so where the half is subnormal).

`profile` answers, for one sub-block of 16 and every scale s = d * m at once, how much error the nearest codes of a
codebook remove. With y = s * c and codes c nearest to x / s,

    sum w (x - y)^2 = sum w x^2 - s (2 P - s R)        P = sum w x c,  R = sum w c^2

and the codes change only where some x / s crosses a midpoint of the codebook. So P and R are kept on a grid of 1 / s:
each crossing is entered once, in the first grid place behind it, and running sums do the rest. A grid place gives the
exact gain s (2 P - s R) of codes that are nearest, or next to nearest for elements within a step of a midpoint.
"""

from __future__ import annotations

import numpy as np

from quantkit.half import float_to_half, half_to_float
from quantkit.jit import kernel

PLACES = 48  # grid places of a profile

LEAST_HALF = 2.0**-24
GREATEST_HALF = 65504.0
LEAST_WEIGHT = 2.0**-20  # of the block's largest: a column that the calibration never saw is still encoded sanely


@kernel
def power_below(x):
    """The largest power of two that is not above x (0 for 0 and subnormals)."""
    return np.uint32(np.float32(x).view(np.uint32) & np.uint32(0x7F800000)).view(np.float32)


@kernel
def load_block(x, xs, minimum):
    """Copy a block in units of a power of two: x = xs * unit, largest |xs| in [1, 2). Returns unit, mean of xs^2.

    unit is 0, and xs undefined, when no element reaches `minimum`: then zeros are the best code there is.
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
def relative_importance(importance, first, w):
    """Weights of a block relative to its largest, at least LEAST_WEIGHT; 1 without importance or where it is all zero.

    `importance` is float32[n] (the block starts at `first`) or float32[0]. Returns whether there is any.
    """
    largest = np.float32(0)
    if len(importance):
        for i in range(len(w)):
            largest = max(largest, importance[first + i])
    if largest == np.float32(0):
        w[:] = np.float32(1)
        return False
    for i in range(len(w)):
        w[i] = max(importance[first + i] / largest, np.float32(LEAST_WEIGHT))
    return True


@kernel
def storable(d, unit):
    """The half nearest to |d| * unit that is neither 0 nor Inf, with the sign of d, in units of `unit`."""
    magnitude = min(max(abs(d) * unit, np.float32(LEAST_HALF)), np.float32(GREATEST_HALF))
    value = half_to_float(float_to_half(magnitude)) / unit
    return value if d >= np.float32(0) else -value


@kernel
def put_half(out, at, value):
    """Write a float32 that a half can hold as two bytes."""
    half = float_to_half(value)
    out[at] = np.uint8(half)
    out[at + 1] = np.uint8(half >> np.uint16(8))


# ----------------------------------------------------------------------------------------------------------- codebooks

BINS = (
    512  # of half a unit, from -128: no bin of an integer codebook contains a midpoint, so a bin has one nearest code
)


def nearest_table(levels: np.ndarray) -> np.ndarray:
    """int32[BINS]: the index of the level nearest to each bin of [-128, 128); exact midpoints go to the larger."""
    centre = np.arange(BINS) / 2 - 127.75
    return np.abs(centre[:, None] - levels).argmin(axis=1).astype(np.int32)


@kernel(inline="always")
def bin_of(t):
    """The bin of a code value; values outside go to the outermost bins."""
    return np.int32(min(max(t * np.float32(2) + np.float32(256), np.float32(0)), np.float32(BINS - 1)))


@kernel
def enter_crossings(x, w, sign, levels, table, first, step, p, r):
    """Add to p, r float32[PLACES] what each grid place gains over the one before; running sums then give P and R.

    Grid place b stands for inverse scale first + b * step (both positive); sign -1 looks at negative scales.
    """
    per_step = np.float32(1) / step
    top = len(levels) - 1
    for j in range(len(x)):
        value, weight = x[j] * sign, w[j]
        i = table[bin_of(value * first)]
        level = levels[i]
        weighted = weight * value
        p[0] += weighted * level
        r[0] += weight * level * level
        if abs(value) * step * np.float32(PLACES) < np.float32(1):  # moves less than a unit over the whole grid
            continue
        up = 1 if value > np.float32(0) else -1
        each = per_step / value
        offset = first * per_step
        while 0 <= i + up <= top:
            following = levels[i + up]
            place = np.int64((level + following) * np.float32(0.5) * each - offset) + 1
            if place >= PLACES:
                break
            p[place] += weighted * (following - level)
            r[place] += weight * (following * following - level * level)
            i, level = i + up, following


@kernel
def merge_profile(p, r, first, step, best_p, best_r):
    """Turn gains into running sums and keep, place by place, what is better than best_p, best_r."""
    sum_p = sum_r = np.float32(0)
    for b in range(PLACES):
        sum_p += p[b]
        sum_r += r[b]
        s = np.float32(1) / (first + np.float32(b) * step)
        if sum_p + sum_p - s * sum_r > best_p[b] + best_p[b] - s * best_r[b]:
            best_p[b], best_r[b] = sum_p, sum_r
        p[b] = r[b] = np.float32(0)


@kernel(inline="always")
def profile_gain(p, r, s, first, per_step):
    """The error removed at scale s > 0, read from a profile; outside the grid from its nearest end."""
    place = (np.float32(1) / s - first) * per_step + np.float32(0.5)
    b = np.int64(min(max(place, np.float32(0)), np.float32(PLACES - 1)))
    return s * (p[b] + p[b] - s * r[b])
