"""The search of the trellis types (`types/families/trellis_type.py`): row scale, multipliers and indices.

    minimise  sum over the row of  w (x - y)^2        y = d * m * v

d is the row's scale, m the multiplier of a sub-block of 32, v the point (an entry of the trellis table) of a group of
4 or 8 elements. The plain search would try every d, every m, and every point for each group. This one goes in steps:

1. **Profiles** (`_profile`). Match every sub-block at `scales` scales, 0.75 to 1.5 times the scale that its largest
   element suggests, with either sign and either table where the type is free to choose. Eight scales share the
   candidates. The result is the gain (by how much the error falls) as a function of the scale. This function is rugged:
   each scale is another chance for the groups to fit. To find the largest element, elements of less than average
   weight count less, by the fourth root of their weight. Rank 0 assumes an average profile instead.
2. **Row scales** (`_choose_row_scales`). Of a grid of d take the best `row_scales`: those whose multipliers gain most
   by the profiles.
3. **Multipliers** (`_choose_multiplier`). Under each d, match the `finalists` of every sub-block again, with more
   candidates, and keep the best. Refit d to the result in closed form (`_add_sums`). The best row wins.

`trellis_candidates` has the matching of a group, `trellis_index` the index of points.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from quantkit.codegen.jit import kernel, subkernel
from quantkit.codegen.simd import load_int, store_int
from quantkit.types.families.superblock import power_below
from quantkit.types.families.trellis_code import SearchParameters, weigh
from quantkit.types.native.trellis_candidates import (
    candidate_sums,
    centroid_sums,
    round_weights,
    row_of,
    scratch_for,
    space_of,
)
from quantkit.types.native.trellis_index import address, find
from quantkit.types.native.trellis_simd import add_largest, score

# ----------------------------------------------------------------------------------------------------------- profiles

_LOW, _HIGH = np.float32(0.75), np.float32(1.5)  # scales tried, in units of a sub-block's initial scale
_LOW_BITS = np.int32(_LOW.view(np.int32))  # they are spaced evenly in the bits of float32, nearly as logarithms are
_OCTAVE = np.int32(1 << 23)
# Where an average profile is best, and the error left there.
_AVERAGE_BEST, _AVERAGE_LOSS = np.float32(1.1), np.float32(0.05)
_LEAST_R, _MOST_R = np.float32(1e-3), np.float32(1e3)  # keep what is expected of far multipliers finite
# Multipliers this far outside the range of the profile still count when d is chosen.
_BELOW_RANGE, _ABOVE_RANGE = np.float32(0.8), np.float32(1.5)


class Profiles(NamedTuple):
    """The profiles of the sub-blocks of a row."""

    initial: np.ndarray  # the scale that the largest element suggests; 0 for sub-blocks of zeros
    energies: np.ndarray  # sum w x^2
    gains: np.ndarray  # [variants, scales]: gain; a variant is the sign (1: negative) plus 2 * table
    merged: np.ndarray  # [2, scales]: the best of the variants that multipliers of a sign have


@subkernel
def _trial_scale(k, count):
    """Scale k of `count`, as a fraction of the initial scale: in the middle of its part of the range."""
    return np.int32(_LOW_BITS + (2 * k + 1) * (_OCTAVE // (2 * count))).view(np.float32)


@subkernel
def _profile(kind, space, row, s, initial, factors, gains):
    """Fill the gains of sub-block s."""
    each, count = 32 // kind.group, kind.scales
    groups = range(each * s, each * s + each)
    centroid_sums(kind, space, row, groups)
    gains[:] = np.float32(0)
    for variant in range(0, 2 * kind.tables, 1 + kind.folded):
        sign = -initial if variant % 2 else initial
        for first in range(0, count, 8):
            middle = sign * (np.float32(0.5) * (_trial_scale(first + 3, count) + _trial_scale(first + 4, count)))
            for g in groups:
                for k in range(8):
                    scale = sign * _trial_scale(first + k, count)
                    factors[0, k], factors[1, k] = scale * row.by[g, 1], scale * scale * row.by[g, 0]
                chunks = candidate_sums(kind, space, row, g, variant // 2, middle, kind.rank)
                add_largest(space.a, space.b, chunks, address(factors), address(gains[variant, first:]))


@subkernel
def _fill_average_profile(kind, energy, gains):
    """The average profile of a sub-block, roughly: for efforts that measure none."""
    for k in range(kind.scales):
        r = _trial_scale(k, kind.scales)
        distance = r - _AVERAGE_BEST if r > _AVERAGE_BEST else np.float32(2) * (_AVERAGE_BEST / r - np.float32(1))
        gains[:, k] = energy - energy * (_AVERAGE_LOSS + _AVERAGE_LOSS * (distance * distance))


@subkernel
def _merge(kind, gains, merged):
    """merged[sign, k]: the largest gain of the variants that a multiplier of this sign can use."""
    for k in range(kind.scales):
        for sign in range(2):
            merged[sign, k] = gains[0 if kind.folded else sign, k]
            for variant in range(sign, 2 * kind.tables, 2):
                if not kind.folded:
                    merged[sign, k] = max(merged[sign, k], gains[variant, k])
        if kind.symmetric:
            merged[0, k] = merged[1, k] = max(merged[0, k], merged[1, k])


@subkernel
def _profile_row(kind, space, row, largest, factors, profiles):
    """Profiles of all sub-blocks; 1 / `largest` is the largest element of a sub-block in units of its initial scale."""
    initial, energies = profiles.initial, profiles.energies
    for s in range(len(initial)):
        initial[s] = energies[s] = weights = np.float32(0)
        for i in range(32 * s, 32 * s + 32):
            weights += np.sqrt(row.w[i]) * np.float32(1 / 32)
            energies[s] += row.w[i] * (row.x[i] * row.x[i])
        for i in range(32 * s, 32 * s + 32):
            share = min(np.sqrt(row.w[i]) / weights, np.float32(1)) if weights > np.float32(0) else np.float32(0)
            initial[s] = max(initial[s], np.sqrt(share) * abs(row.x[i]) * largest)
        if initial[s] == np.float32(0):
            profiles.gains[s] = np.float32(0)
        elif kind.rank:
            _profile(kind, space, row, s, initial[s], factors, profiles.gains[s])
        else:
            _fill_average_profile(kind, energies[s], profiles.gains[s])
        _merge(kind, profiles.gains[s], profiles.merged[s])


@kernel(inline="always")
def _profile_entry(r, count):
    """The profile entry of r times the initial scale, and the factor by which errors grow outside its range."""
    entry = np.float32(np.float32(r).view(np.int32) - _LOW_BITS) * (np.float32(count) / np.float32(_OCTAVE))
    k = np.int32(min(max(entry, np.float32(0)), np.float32(count - 1)))
    over = max(r * (np.float32(1) / _HIGH), np.float32(1))
    under = max(_LOW / r, np.float32(1))
    return k, (over * over) * ((under * under) * (under * under))


# --------------------------------------------------------------------------------------------------------- the choices

_GRID_SIZE = 32  # values of d
# The largest scale of the grid, d times the largest multiplier, in units of the largest initial scale.
_MIN_RATIO, _MAX_RATIO = np.float32(0.75), np.float32(1.5)
_EXCLUDED_NEIGHBOURS = 1  # on either side of a d that is taken
_MIN_MAGNITUDE = np.float32(2.0**-100)  # rows below become zeros: d would be subnormal
_MAX_VALUE = np.float32(3.4e38)
_ROUNDING = np.float32(0.999999)  # keeps d * m * v below that


@subkernel
def _rate_row_scales(steps, profiles, row_scales, totals):
    """totals[i]: the gain of the best multipliers under row_scales[i], by the profiles."""
    best, growth, entries = (
        np.empty(_GRID_SIZE, np.float32),
        np.empty(_GRID_SIZE, np.float32),
        np.empty(_GRID_SIZE, np.int32),
    )
    totals[:] = np.float32(0)
    count = profiles.merged.shape[2]
    for s in range(len(profiles.initial)):
        if profiles.initial[s] == np.float32(0):
            continue
        inverse, energy = np.float32(1) / profiles.initial[s], profiles.energies[s]
        best[:] = np.float32(0)
        for j in range(len(steps)):
            gains, step = profiles.merged[s, 1 if steps[j] < np.float32(0) else 0], abs(steps[j]) * inverse
            if step * row_scales[_GRID_SIZE - 1] > _BELOW_RANGE * _LOW and step * row_scales[0] < _ABOVE_RANGE * _HIGH:
                for i in range(_GRID_SIZE):
                    entries[i], growth[i] = _profile_entry(row_scales[i] * step, count)
                for i in range(_GRID_SIZE):
                    best[i] = max(best[i], energy - (energy - gains[entries[i]]) * growth[i])
        for i in range(_GRID_SIZE):
            totals[i] += best[i]


@subkernel
def _expected_gains(kind, steps, d, profiles, s, expected):
    """expected[variant * multipliers + j]: the expected gain of multiplier j; -Inf where it has no such sign."""
    initial, energy = profiles.initial[s], profiles.energies[s]
    for j in range(len(steps)):
        r = min(max(d * abs(steps[j]) / initial, _LEAST_R), _MOST_R) if initial > np.float32(0) else np.float32(1)
        k, growth = _profile_entry(r, kind.scales)
        for variant in range(2 * kind.tables):
            exists = kind.symmetric or variant % 2 == (steps[j] < np.float32(0))
            gain = energy - (energy - profiles.gains[s, variant, k]) * growth
            expected[variant * len(steps) + j] = gain if exists else np.float32(-np.inf)


@subkernel
def _match_groups(kind, space, row, s, table, scale, point_numbers, matched):
    """Find the best points of a sub-block's groups under a scale, looking at more of them; their gain."""
    total, each = np.float32(0), 32 // kind.group
    for g in range(each * s, each * s + each):
        chunks = candidate_sums(kind, space, row, g, table, scale, kind.final_rank)
        fours = (chunks + 3) // 4 * 4  # chunks are scored and looked through four at a time
        for i in range(chunks * 8, fours * 8):
            store_int(load_int(space.a), space.a + 8 * i)
            store_int(load_int(space.b), space.b + 8 * i)
        best = score(space.a, space.b, fours, scale * row.by[g, 1], scale * scale * row.by[g, 0], 1, space.scores)
        total += best
        position, run = find(space.scores, best), space.runs
        while load_int(run + 24) * 16 <= position:
            run += 16
        matched[g - each * s] = point_numbers[table, position + 16 * (load_int(run) - load_int(run + 8))]
    return total


@subkernel
def _first_largest(values):
    """As np.argmax, which takes seconds to compile."""
    first = 0
    for i in range(len(values)):
        if values[i] > values[first]:
            first = i
    return first


@subkernel
def _choose_multiplier(kind, steps, space, row, s, d, expected, point_numbers, matched):
    """The multiplier and table of sub-block s under d; found[0] gets its numbers."""
    best = np.float32(0) if kind.has_zero else np.float32(-np.inf)
    multiplier = table = 0
    matched[0] = np.uint16(0)
    for _ in range(kind.finalists):
        candidate = _first_largest(expected)
        expected[candidate] = np.float32(-np.inf)
        variant, j = candidate // len(steps), candidate % len(steps)
        m = abs(steps[j]) * np.float32(-1 if variant % 2 else 1)
        total = _match_groups(kind, space, row, s, variant // 2, d * m, point_numbers, matched[1])
        if total > best:
            best, multiplier, table = total, int(m), variant // 2
            matched[0] = matched[1]
    return multiplier, table


@subkernel
def _add_sums(kind, row, s, step, values, matched, sums):
    """Add what refits d: P = sum w x c and Q = sum w c^2, c = m v; keep the largest |c|."""
    for k in range(32):
        i = 32 * s + k
        c = step * np.float32(values[matched[k // kind.group], k % kind.group])
        sums[0] += row.w[i] * (row.x[i] * c)
        sums[1] += row.w[i] * (c * c)
        sums[2] = max(sums[2], abs(c))


@subkernel
def _choose_row_scales(steps, profiles, chosen):
    """Fill `chosen` with the d of the grid under which multipliers promise the largest gain, the best first."""
    row_scales, totals = np.empty(_GRID_SIZE, np.float32), np.empty(_GRID_SIZE, np.float32)
    typical = profiles.initial[_first_largest(profiles.initial)] / abs(steps[len(steps) - 1])
    for i in range(_GRID_SIZE):
        row_scales[i] = typical * (
            _MIN_RATIO + (_MAX_RATIO - _MIN_RATIO) * (np.float32(i) / np.float32(_GRID_SIZE - 1))
        )
    _rate_row_scales(steps, profiles, row_scales, totals)
    for k in range(len(chosen)):
        i = _first_largest(totals)
        totals[max(i - _EXCLUDED_NEIGHBOURS, 0) : i + _EXCLUDED_NEIGHBOURS + 1] = np.float32(-np.inf)
        chosen[k] = row_scales[i]


@subkernel
def _search_row(kind, steps, space, row, profiles, point_numbers, values, results):
    """The best d, refitted; its index in `results` (numbers, multipliers, tables under each d); its largest |m v|."""
    numbers, multipliers, tables = results
    each, row_scales = 32 // kind.group, np.empty(kind.row_scales, np.float32)
    expected, matched = np.empty(2 * kind.tables * len(steps), np.float32), np.empty((2, each), np.uint16)
    sums = np.zeros((kind.row_scales, 3), np.float32)
    _choose_row_scales(steps, profiles, row_scales)
    for s in range(len(profiles.initial)):
        groups = range(each * s, each * s + each)
        centroid_sums(kind, space, row, groups)
        for k in range(kind.row_scales):
            _expected_gains(kind, steps, row_scales[k], profiles, s, expected)
            m, table = _choose_multiplier(kind, steps, space, row, s, row_scales[k], expected, point_numbers, matched)
            multipliers[k, s], tables[k, s] = m, table
            for g in groups:
                numbers[k, g] = matched[0, g - each * s]
            _add_sums(kind, row, s, np.float32(m), values[table], matched[0], sums[k])
    best, choice = np.float32(0), -1
    for k in range(kind.row_scales):
        if sums[k, 0] > np.float32(0) and sums[k, 0] * sums[k, 0] > best * sums[k, 1]:
            best, choice = sums[k, 0] * sums[k, 0] / sums[k, 1], k
    return (sums[choice, 0] / sums[choice, 1], choice, sums[choice, 2]) if choice >= 0 else (best, choice, best)


@kernel
def _search(x, importance, kind, largest, steps, index, scratch, d, numbers, multipliers, tables):
    """`search`, given scratch memory, which the caller holds while addresses of it are used."""
    point_numbers, values = index[2], index[4]
    rows, n = x.shape
    space, row = space_of(scratch, index), row_of(n, kind.group)
    factors = np.empty((2, 8), np.float32)
    profiles = Profiles(
        np.empty(n // 32, np.float32),
        np.empty(n // 32, np.float32),
        np.zeros((n // 32, 2 * kind.tables, kind.scales), np.float32),
        np.zeros((n // 32, 2, kind.scales), np.float32),
    )
    results = (
        np.empty((kind.row_scales, n // kind.group), np.uint16),
        np.empty((kind.row_scales, n // 32), np.int16),
        np.empty((kind.row_scales, n // 32), np.uint8),
    )
    for i in range(rows):
        numbers[i], multipliers[i], tables[i] = np.uint16(0), np.int16(0), np.uint8(0)
        d[i] = largest_value = np.float32(0)
        for j in range(n):
            largest_value = max(largest_value, abs(x[i, j]))
        if largest_value >= _MIN_MAGNITUDE:
            unit = power_below(largest_value)
            for j in range(n):
                row.x[j] = abs(x[i, j] / unit) if kind.folded else x[i, j] / unit
            has_importance = weigh(row.x, importance, row.w)
            round_weights(kind.group, row)
            _profile_row(kind, space, row, np.float32(1) / largest[1 if has_importance else 0], factors, profiles)
            fitted, k, c = _search_row(kind, steps, space, row, profiles, point_numbers, values, results)
            if k >= 0:
                d[i] = min(fitted, _MAX_VALUE / unit / c * _ROUNDING) * unit
                numbers[i], multipliers[i], tables[i] = results[0][k], results[1][k], results[2][k]


def search(
    x: np.ndarray, importance: np.ndarray, kind: SearchParameters, largest: np.ndarray, steps: np.ndarray,
    index: tuple[np.ndarray, ...], d: np.ndarray, numbers: np.ndarray, multipliers: np.ndarray, tables: np.ndarray,
) -> None:  # fmt: skip
    """Encode rows: their d, the number of each group, multiplier and table of each sub-block; d = 0: a row of zeros.

    `largest` is float32[2], the type's without and with importance; `index` is what `build` returned.
    """
    scratch = scratch_for(kind, index)
    _search(x, importance, kind, largest, steps, index, scratch, d, numbers, multipliers, tables)
