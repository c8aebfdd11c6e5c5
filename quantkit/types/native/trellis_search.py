"""The search of the trellis types (`types/families/trellis_type.py`): row scale, multipliers and indices.

    minimise  sum over the row of  w (x - y)^2        y = d * m * v

d is the row's scale, m the multiplier of a sub-block of 32, v the point (an entry of the trellis table) of a group of
4 or 8 elements. The plain search would try every d, every m, and every point for each group. This one goes in steps:

1. **Profiles** (`_profile`). Match every sub-block at `scales` scales, 0.75 to 1.5 times the scale that its largest
   element suggests, with either sign and either table where the type is free to choose. Eight scales share the
   candidates. The result is the gain (by how much the error falls) as a function of the scale. This function is rugged:
   each scale is another chance for the groups to fit. To find the largest element, elements of less than average
   weight count less, by the fourth root of their weight. Rank 0 assumes an average profile instead.
2. **Row scales** (`_choose_ds`). Of a grid of d take the best `ds`: those whose multipliers gain most by the profiles.
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
from quantkit.types.families.trellis_code import Kind, weigh
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

_LOW, _HIGH = np.float32(0.75), np.float32(1.5)  # scales tried, in parts of a sub-block's own
_LOW_BITS = np.int32(_LOW.view(np.int32))  # they are spaced evenly in the bits of float32, nearly as logarithms are
_OCTAVE = np.int32(1 << 23)
_USUAL, _LOSS = np.float32(1.1), np.float32(0.05)  # where an average profile is best, and the error left there
_LEAST_R, _MOST_R = np.float32(1e-3), np.float32(1e3)  # keep what is expected of far multipliers finite
_LESS, _MORE = np.float32(0.8), np.float32(1.5)  # multipliers count this far outside of the range when d is chosen


class Profiles(NamedTuple):
    """Of the sub-blocks of a row."""

    own: np.ndarray  # scale that the largest element suggests; 0 for sub-blocks of zeros
    energies: np.ndarray  # sum w x^2
    gains: np.ndarray  # [ways, scales]: gain by the way, which is the sign (1: negative) plus 2 table
    merged: np.ndarray  # [2, scales]: the best of the ways that multipliers of a sign have


@subkernel
def _trial_scale(k, count):
    """Scale k of `count`, in parts of the own scale: in the middle of its part of the range."""
    return np.int32(_LOW_BITS + (2 * k + 1) * (_OCTAVE // (2 * count))).view(np.float32)


@subkernel
def _profile(kind, space, row, s, own, factors, gains):
    """Fill the gains of sub-block s."""
    each, count = 32 // kind.group, kind.scales
    groups = range(each * s, each * s + each)
    centroid_sums(kind, space, row, groups)
    gains[:] = np.float32(0)
    for way in range(0, 2 * kind.tables, 1 + kind.folded):
        sign = -own if way % 2 else own
        for first in range(0, count, 8):
            middle = sign * (np.float32(0.5) * (_trial_scale(first + 3, count) + _trial_scale(first + 4, count)))
            for g in groups:
                for k in range(8):
                    scale = sign * _trial_scale(first + k, count)
                    factors[0, k], factors[1, k] = scale * row.by[g, 1], scale * scale * row.by[g, 0]
                chunks = candidate_sums(kind, space, row, g, way // 2, middle, kind.rank)
                add_largest(space.a, space.b, chunks, address(factors), address(gains[way, first:]))


@subkernel
def _assume(kind, energy, gains):
    """The profile that sub-blocks have on average, roughly: for efforts that measure none."""
    for k in range(kind.scales):
        r = _trial_scale(k, kind.scales)
        off = r - _USUAL if r > _USUAL else np.float32(2) * (_USUAL / r - np.float32(1))
        gains[:, k] = energy - energy * (_LOSS + _LOSS * (off * off))


@subkernel
def _merge(kind, gains, merged):
    """The best ways of each sign; of either where multipliers have both or values none."""
    for k in range(kind.scales):
        for sign in range(2):
            merged[sign, k] = gains[0 if kind.folded else sign, k]
            for way in range(sign, 2 * kind.tables, 2):
                if not kind.folded:
                    merged[sign, k] = max(merged[sign, k], gains[way, k])
        if kind.both:
            merged[0, k] = merged[1, k] = max(merged[0, k], merged[1, k])


@subkernel
def _profile_row(kind, space, row, largest, factors, profiles):
    """Profiles of all sub-blocks; `largest` is the reciprocal of a largest element in units of the own scale."""
    own, energies = profiles.own, profiles.energies
    for s in range(len(own)):
        own[s] = energies[s] = weights = np.float32(0)
        for i in range(32 * s, 32 * s + 32):
            weights += np.sqrt(row.w[i]) * np.float32(1 / 32)
            energies[s] += row.w[i] * (row.x[i] * row.x[i])
        for i in range(32 * s, 32 * s + 32):
            share = min(np.sqrt(row.w[i]) / weights, np.float32(1)) if weights > np.float32(0) else np.float32(0)
            own[s] = max(own[s], np.sqrt(share) * abs(row.x[i]) * largest)
        if own[s] == np.float32(0):
            profiles.gains[s] = np.float32(0)
        elif kind.rank:
            _profile(kind, space, row, s, own[s], factors, profiles.gains[s])
        else:
            _assume(kind, energies[s], profiles.gains[s])
        _merge(kind, profiles.gains[s], profiles.merged[s])


@kernel(inline="always")
def _place(r, count):
    """Where r times the own scale is in a profile, and by what errors there grow outside of its range on average."""
    place = np.float32(np.float32(r).view(np.int32) - _LOW_BITS) * (np.float32(count) / np.float32(_OCTAVE))
    k = np.int32(min(max(place, np.float32(0)), np.float32(count - 1)))
    over = max(r * (np.float32(1) / _HIGH), np.float32(1))
    under = max(_LOW / r, np.float32(1))
    return k, (over * over) * ((under * under) * (under * under))


# --------------------------------------------------------------------------------------------------------- the choices

_DS = 32  # of the grid of d,
_FROM, _TO = np.float32(0.75), np.float32(1.5)  # whose largest multiplier is this much of the largest own scale
_APART = 1  # grid places between those taken
_MINIMUM = np.float32(2.0**-100)  # rows below become zeros: d would be subnormal
_MAXIMUM = np.float32(3.4e38)
_ROUNDING = np.float32(0.999999)  # keeps d * m * v below that


@subkernel
def _rate(steps, profiles, ds, totals):
    """totals[i]: what the best multipliers under ds[i] gain, by the profiles."""
    best, growth, places = np.empty(_DS, np.float32), np.empty(_DS, np.float32), np.empty(_DS, np.int32)
    totals[:] = np.float32(0)
    count = profiles.merged.shape[2]
    for s in range(len(profiles.own)):
        if profiles.own[s] == np.float32(0):
            continue
        inverse, energy = np.float32(1) / profiles.own[s], profiles.energies[s]
        best[:] = np.float32(0)
        for j in range(len(steps)):
            gains, step = profiles.merged[s, 1 if steps[j] < np.float32(0) else 0], abs(steps[j]) * inverse
            if step * ds[_DS - 1] > _LESS * _LOW and step * ds[0] < _MORE * _HIGH:
                for i in range(_DS):
                    places[i], growth[i] = _place(ds[i] * step, count)
                for i in range(_DS):
                    best[i] = max(best[i], energy - (energy - gains[places[i]]) * growth[i])
        for i in range(_DS):
            totals[i] += best[i]


@subkernel
def _expected_gains(kind, steps, d, profiles, s, expected):
    """expected[way * multipliers + j]: what multiplier j is expected to gain; its sign is fixed unless `both`."""
    own, energy = profiles.own[s], profiles.energies[s]
    for j in range(len(steps)):
        r = min(max(d * abs(steps[j]) / own, _LEAST_R), _MOST_R) if own > np.float32(0) else np.float32(1)
        k, growth = _place(r, kind.scales)
        for way in range(2 * kind.tables):
            exists = kind.both or way % 2 == (steps[j] < np.float32(0))
            gain = energy - (energy - profiles.gains[s, way, k]) * growth
            expected[way * len(steps) + j] = gain if exists else np.float32(-np.inf)


@subkernel
def _match_groups(kind, space, row, s, table, scale, names, found):
    """Find the best points of a sub-block's groups under a scale, looking at more of them; their gain."""
    total, each = np.float32(0), 32 // kind.group
    for g in range(each * s, each * s + each):
        chunks = candidate_sums(kind, space, row, g, table, scale, kind.final_rank)
        fours = (chunks + 3) // 4 * 4  # chunks are scored and looked through four at a time
        for i in range(chunks * 8, fours * 8):
            store_int(load_int(space.a), space.a + 8 * i)
            store_int(load_int(space.b), space.b + 8 * i)
        most = score(space.a, space.b, fours, scale * row.by[g, 1], scale * scale * row.by[g, 0], 1, space.scores)
        total += most
        place, run = find(space.scores, most), space.runs
        while load_int(run + 24) * 16 <= place:
            run += 16
        found[g - each * s] = names[table, place + 16 * (load_int(run) - load_int(run + 8))]
    return total


@subkernel
def _first_largest(values):
    """np.argmax, which takes seconds to compile."""
    first = 0
    for i in range(len(values)):
        if values[i] > values[first]:
            first = i
    return first


@subkernel
def _choose_multiplier(kind, steps, space, row, s, d, expected, names, found):
    """The multiplier and table of sub-block s under d; found[0] gets its numbers."""
    best = np.float32(0) if kind.zero else np.float32(-np.inf)
    multiplier = table = 0
    found[0] = np.uint16(0)
    for _ in range(kind.finalists):
        candidate = _first_largest(expected)
        expected[candidate] = np.float32(-np.inf)
        way, j = candidate // len(steps), candidate % len(steps)
        m = abs(steps[j]) * np.float32(-1 if way % 2 else 1)
        total = _match_groups(kind, space, row, s, way // 2, d * m, names, found[1])
        if total > best:
            best, multiplier, table = total, int(m), way // 2
            found[0] = found[1]
    return multiplier, table


@subkernel
def _add_sums(kind, row, s, step, values, found, sums):
    """Add what refits d: P = sum w x c and Q = sum w c^2, c = m v; keep the largest |c|."""
    for k in range(32):
        i = 32 * s + k
        c = step * np.float32(values[found[k // kind.group], k % kind.group])
        sums[0] += row.w[i] * (row.x[i] * c)
        sums[1] += row.w[i] * (c * c)
        sums[2] = max(sums[2], abs(c))


@subkernel
def _choose_ds(kind, steps, profiles, chosen):
    """The ds of the grid under which multipliers promise most, the best first."""
    ds, totals = np.empty(_DS, np.float32), np.empty(_DS, np.float32)
    usual = profiles.own[_first_largest(profiles.own)] / abs(steps[len(steps) - 1])
    for i in range(_DS):
        ds[i] = usual * (_FROM + (_TO - _FROM) * (np.float32(i) / np.float32(_DS - 1)))
    _rate(steps, profiles, ds, totals)
    for k in range(len(chosen)):
        i = _first_largest(totals)
        totals[max(i - _APART, 0) : i + _APART + 1] = np.float32(-np.inf)
        chosen[k] = ds[i]


@subkernel
def _search_row(kind, steps, space, row, profiles, names, values, kept):
    """The best d, refitted; its place in `kept`, numbers, multipliers and tables under each d; its largest |m v|."""
    numbers, multipliers, tables = kept
    each, ds = 32 // kind.group, np.empty(kind.ds, np.float32)
    expected, found = np.empty(2 * kind.tables * len(steps), np.float32), np.empty((2, each), np.uint16)
    sums = np.zeros((kind.ds, 3), np.float32)
    _choose_ds(kind, steps, profiles, ds)
    for s in range(len(profiles.own)):
        groups = range(each * s, each * s + each)
        centroid_sums(kind, space, row, groups)
        for k in range(kind.ds):
            _expected_gains(kind, steps, ds[k], profiles, s, expected)
            m, table = _choose_multiplier(kind, steps, space, row, s, ds[k], expected, names, found)
            multipliers[k, s], tables[k, s] = m, table
            for g in groups:
                numbers[k, g] = found[0, g - each * s]
            _add_sums(kind, row, s, np.float32(m), values[table], found[0], sums[k])
    best, choice = np.float32(0), -1
    for k in range(kind.ds):
        if sums[k, 0] > np.float32(0) and sums[k, 0] * sums[k, 0] > best * sums[k, 1]:
            best, choice = sums[k, 0] * sums[k, 0] / sums[k, 1], k
    return (sums[choice, 0] / sums[choice, 1], choice, sums[choice, 2]) if choice >= 0 else (best, choice, best)


@kernel
def _search(x, importance, kind, largest, steps, index, scratch, d, numbers, multipliers, tables):
    """`search`, given scratch memory, which the caller holds while addresses of it are used."""
    names, values = index[2], index[4]
    rows, n = x.shape
    space, row = space_of(scratch, index), row_of(n, kind.group)
    factors = np.empty((2, 8), np.float32)
    profiles = Profiles(
        np.empty(n // 32, np.float32), np.empty(n // 32, np.float32),
        np.zeros((n // 32, 2 * kind.tables, kind.scales), np.float32),
        np.zeros((n // 32, 2, kind.scales), np.float32),
    )  # fmt: skip
    kept = (
        np.empty((kind.ds, n // kind.group), np.uint16),
        np.empty((kind.ds, n // 32), np.int16),
        np.empty((kind.ds, n // 32), np.uint8),
    )
    for i in range(rows):
        numbers[i], multipliers[i], tables[i] = np.uint16(0), np.int16(0), np.uint8(0)
        d[i] = most = np.float32(0)
        for j in range(n):
            most = max(most, abs(x[i, j]))
        if most >= _MINIMUM:
            unit = power_below(most)
            for j in range(n):
                row.x[j] = abs(x[i, j] / unit) if kind.folded else x[i, j] / unit
            given = weigh(row.x, importance, row.w)
            round_weights(kind.group, row)
            _profile_row(kind, space, row, np.float32(1) / largest[1 if given else 0], factors, profiles)
            fitted, k, c = _search_row(kind, steps, space, row, profiles, names, values, kept)
            if k >= 0:
                d[i] = min(fitted, _MAXIMUM / unit / c * _ROUNDING) * unit
                numbers[i], multipliers[i], tables[i] = kept[0][k], kept[1][k], kept[2][k]


def search(
    x: np.ndarray, importance: np.ndarray, kind: Kind, largest: np.ndarray, steps: np.ndarray,
    index: tuple[np.ndarray, ...], d: np.ndarray, numbers: np.ndarray, multipliers: np.ndarray, tables: np.ndarray,
) -> None:  # fmt: skip
    """Encode rows: their d, the number of each group, multiplier and table of each sub-block; d = 0: a row of zeros.

    `largest` is float32[2], the type's without and with importance; `index` is what `build` returned.
    """
    scratch = scratch_for(kind, index)
    _search(x, importance, kind, largest, steps, index, scratch, d, numbers, multipliers, tables)
