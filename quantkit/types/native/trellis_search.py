"""The search of the trellis types (`types/families/trellis.py`): row scale, multipliers and indices.

With y = s v the error of a group is sum w x^2 - s (2 B - s A), A = sum w v^2, B = sum w x v; both are sums of products
of small integers when w and w x are rounded to 13 and 15 bits (relative to the group's largest), so `measure` makes
them for 16 points in a few instructions, exactly, on every CPU; a scale is then two products more.

Where the points worth measuring lie tells an index, built once (`build`):
  * groups of 8: clusters of some 64 points (Lloyd's algorithm in integers). A and B of all centroids are made once for
    a group and tell the best clusters under any scale of either sign;
  * groups of 4: boxes of 16 points in 64 boxes of boxes, halved along their widest sides; the weighted distances from
    the boxes, roughly and in integers, tell the nearest. Weights within a group differ a lot; boxes take them as they
    are.
How many clusters or boxes is the `rank`: the 16 lanes each have a best one of a sixteenth of them, and those are taken
that are no worse than the rank-th best of these. So rank r takes about 16 (1/16 + 1/15 + ... of r terms).

1. Every sub-block is matched at `scales` scales, 0.75 to 1.5 times what its largest element suggests, of either sign
   and with either table where these are free; eight at a time share the points measured. That gives its gain (what its
   error loses) as a function of the scale. It is rugged: each scale is another chance for the groups to fit. To
   find the largest, elements of less than average weight count less, by its fourth root. Rank 0 takes a usual profile.
2. Of a grid of d the best `ds` are taken whose multipliers gain most by these functions.
3. Under each, the `finalists`, by these functions, of every sub-block's multipliers are matched again, looking at more
   points; the best are kept, d is refitted to them. The best row wins.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from quantkit.codegen.jit import kernel, subkernel
from quantkit.codegen.simd import load_int, store_int
from quantkit.types.families.superblock import power_below
from quantkit.types.families.trellis_code import Kind, weigh
from quantkit.types.native.trellis_lanes import (
    add_largest,
    at_least,
    fill,
    lowest,
    measure,
    measure_boxes,
    measure_leaves,
    ranked,
    score,
)

_ROW = 64  # bytes of 16 float32
# ----------------------------------------------------------------------------------------------------------- the index

_PASSES = 6  # of Lloyd's algorithm
_NODES, _LEAVES = 64, 32  # boxes of boxes, and boxes of 16 points in each


def _halves(points: np.ndarray, parts: int) -> np.ndarray:
    """Parts of one size of int8 points, int64[parts, size]: halved where they are widest, again and again."""
    members, columns = np.arange(len(points))[None], points.T.astype(np.int32)
    while len(members) < parts:
        of, size = columns[:, members], members.shape[1]
        spread = size * (of * of).sum(axis=2, dtype=np.int64) - of.sum(axis=2, dtype=np.int64) ** 2
        key = of[spread.argmax(axis=0), np.arange(len(members))].astype(np.int8)  # which numpy sorts by counting
        members = np.take_along_axis(members, key.argsort(axis=1, kind="stable"), axis=1).reshape(-1, size // 2)
    return members


def _shuffled(count: int) -> np.ndarray:
    """A permutation that spreads neighbours: lanes are to be samples of all clusters or boxes."""
    return (np.arange(count, dtype=np.uint32) * np.uint32(2654435761)).argsort()


def _laid_out(points: np.ndarray) -> np.ndarray:
    """int8[16 k, G] as `measure` reads them."""
    return np.ascontiguousarray(points.reshape(-1, 16, points.shape[1] // 2, 2).transpose(0, 2, 1, 3))


@kernel(inline="always")
def address(array):
    """Where an array's elements are.

    numba frees an array after its last use, of which this may be one: the array must be the caller's, who holds it.
    """
    return np.int64(array.ctypes.data)


@subkernel
def find(scores, most):
    """The first of float32 scores, a multiple of 64, that is at least `most`; there is one."""
    first = 0
    while True:
        mask = at_least(scores + 4 * first, most)
        if mask != 0:
            return first + lowest(mask)
        first += 64


@kernel
def _assign(points, centroids, u, t, space, nearest):
    """The centroid nearest to each point, the first of several.

    u, t int16[group] are weights and room for a point; space float32[3, centroids].
    """
    count, group = points.shape
    chunks = len(centroids)
    at, a, b, scores = address(centroids), address(space[0]), address(space[1]), address(space[2])
    for i in range(count):
        for j in range(group):
            t[j] = points[i, j]
        measure(4, at, chunks, address(u), address(t), a, b)
        nearest[i] = find(scores, score(a, b, chunks, np.float32(2), np.float32(1), 1, scores))


def _nearest(table: np.ndarray, centroids: np.ndarray) -> np.ndarray:
    """int32[points]: the centroid nearest to each point."""
    group, laid_out, nearest = table.shape[1], _laid_out(centroids), np.empty(len(table), np.int32)
    space = np.empty((3, 16 * len(laid_out)), np.float32)
    _assign(table, laid_out, np.ones(group, np.int16), np.empty(group, np.int16), space, nearest)
    return nearest


def _clusters(table: np.ndarray, count: int) -> tuple[np.ndarray, ...]:
    """Integer centroids, the points' order, and the first chunk of 16 of each cluster.

    Each cluster is filled up to a multiple of 16 with copies of its first point.
    """
    centroids = np.rint(table[_halves(table, count)[_shuffled(count)]].mean(axis=1)).astype(np.int8)
    for _ in range(_PASSES):
        nearest = _nearest(table, centroids)
        sizes = np.bincount(nearest, minlength=count)
        sums = np.stack([np.bincount(nearest, weights=x, minlength=count) for x in table.T], axis=1)
        filled = sizes > 0
        centroids[filled] = np.rint(sums[filled] / sizes[filled, None]).astype(np.int8)
    nearest = _nearest(table, centroids)
    sizes = np.bincount(nearest, minlength=count)
    chunks = -(-sizes // 16)
    place = np.arange(16 * chunks.sum()) - np.repeat(16 * (np.cumsum(chunks) - chunks), 16 * chunks)
    owner = np.repeat(np.arange(count), 16 * chunks)
    begin = np.cumsum(sizes) - sizes
    order = nearest.argsort(kind="stable")[begin[owner] + np.where(place < sizes[owner], place, 0)]
    return _laid_out(centroids), order, np.concatenate([[0], np.cumsum(chunks)])


def _boxes(table: np.ndarray) -> tuple[np.ndarray, ...]:
    """Lower and upper corners of nodes, then of leaves; the points' order, leaf by leaf."""
    members = _halves(table, _NODES * _LEAVES).reshape(_NODES, _LEAVES, 16)
    members = members[_shuffled(_NODES)][:, _shuffled(_LEAVES)]
    corners = []
    for points in (table[members].reshape(_NODES, -1, table.shape[1]), table[members.reshape(-1, 16)]):
        corners += [_laid_out(points.min(axis=1)), _laid_out(points.max(axis=1))]
    return np.concatenate(corners), members.reshape(-1), np.zeros(1, np.int64)


def build(values: np.ndarray, clusters: int) -> tuple[np.ndarray, ...]:
    """The index of tables int8[tables, points, G], of which there is one where G is 8.

    Centroids or boxes, points, their numbers, where clusters begin, the tables themselves.
    """
    parts = [_boxes(table) if table.shape[1] == 4 else _clusters(table, clusters) for table in values]
    coarse, orders, firsts = zip(*parts)
    return (np.stack(coarse), np.stack([_laid_out(table[order]) for table, order in zip(values, orders)]),
            np.stack(orders).astype(np.uint16), np.stack(firsts).astype(np.int64), values)  # fmt: skip


# -------------------------------------------------------------------------------------------------- points worth a look

_LARGEST_U, _LARGEST_T = np.float32(8191), np.float32(32767)  # 8 products of u and v^2 must fit 31 bits
_LARGEST_R = np.float32(90)  # four squares of r times a gap must
_FURTHEST = np.float32(130)  # z beyond is as good as z here
_LEAST = np.float32(1e-30)  # weights below are rounded to nothing: their quotients would overflow
_NODE_RANK = 6


class Space(NamedTuple):
    """Addresses."""

    scores: int
    a: int  # sums of the points measured last
    b: int
    runs: int  # int64[:, 2]: number in the index of a run of their chunks of 16, and number of its first one here
    nodes: int  # of the boxes found
    near: int  # float32[groups of a sub-block, 2, clusters]: A and B of centroids
    coarse: int  # the index
    points: int
    firsts: int


class Row(NamedTuple):
    """A row, in units of a power of two."""

    x: np.ndarray
    w: np.ndarray
    ints: np.ndarray  # int16[groups, 4, 8]: u, t, r as `measure` and `measure_boxes` take them, and z
    by: np.ndarray  # float32[groups, 2]: what makes sum w v^2 of A and 2 sum w x v of B


def scratch_for(kind: Kind, index: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
    """What a `Space` points into: scores and sums, those of centroids, runs, nodes."""
    count = index[2].shape[1]
    return (np.empty((3, count + 64), np.float32), np.empty((4, 2, kind.clusters), np.float32),
            np.empty((count // 16 + 1, 2), np.int64), np.empty(_NODES, np.int64))  # fmt: skip


@subkernel
def space_of(scratch, index):
    coarse, points, _, firsts, _ = index
    scores, near, runs, nodes = scratch
    return Space(
        address(scores[0]), address(scores[1]), address(scores[2]), address(runs), address(nodes),
        address(near), address(coarse), address(points), address(firsts),
    )  # fmt: skip


@subkernel
def row_of(n, group):
    return Row(
        np.empty(n, np.float32), np.empty(n, np.float32),
        np.zeros((n // group, 4, 8), np.int16), np.empty((n // group, 2), np.float32),
    )  # fmt: skip


@subkernel
def round_weights(group, row):
    """Integer weights of all groups."""
    for g in range(len(row.by)):
        x, w, ints = row.x[group * g : group * g + group], row.w[group * g : group * g + group], row.ints[g]
        most_u = most_t = np.float32(0)
        for j in range(group):
            most_u, most_t = max(most_u, w[j]), max(most_t, abs(w[j] * x[j]))
        by_u = np.float32(1) / most_u if most_u > _LEAST else np.float32(0)
        by_t = _LARGEST_T / most_t if most_t > _LEAST else np.float32(0)
        for j in range(group):
            relative = w[j] * by_u
            ints[0, j] = np.int16(relative * _LARGEST_U + np.float32(0.5))
            ints[1, j] = np.int16(np.floor(w[j] * x[j] * by_t + np.float32(0.5)))
            ints[2, j] = max(np.int16(np.sqrt(relative) * _LARGEST_R), np.int16(1))
        row.by[g, 0], row.by[g, 1] = most_u / _LARGEST_U, (most_t + most_t) / _LARGEST_T


@subkernel
def _look_in_clusters(space, near, ints, clusters, twice, square, rank):
    """Measure the points of the best clusters under a scale; how many chunks of 16."""
    least = score(near, near + 4 * clusters, clusters // 16, twice, square, rank, space.scores)
    count, run = 0, space.runs
    for first in range(0, clusters, 64):
        mask = at_least(space.scores + 4 * first, least)
        while mask != 0:
            entry = space.firsts + 8 * (first + lowest(mask))
            mask &= mask - 1
            begin = load_int(entry)
            chunks = load_int(entry + 8) - begin
            measure(
                4, space.points + 128 * begin, chunks, ints, ints + 16, space.a + _ROW * count, space.b + _ROW * count
            )
            store_int(begin, run)
            store_int(count, run + 8)
            run += 16
            count += chunks
    store_int(count, run + 8)
    return count


@subkernel
def _look_in_boxes(space, table, ints, rank):
    """The same for groups of 4, in the boxes nearest to z."""
    coarse, scores = space.coarse + table * (8 * (_NODES + _NODES * _LEAVES)), space.scores
    r, z = ints + 32, ints + 48
    measure_boxes(coarse, coarse + 4 * _NODES, _NODES // 16, z, r, scores)
    mask = at_least(scores, ranked(scores, _NODES // 16, _NODE_RANK))
    low = coarse + 8 * _NODES
    high = low + 4 * _NODES * _LEAVES
    found = 0
    while mask != 0:
        first = _LEAVES * lowest(mask)
        mask &= mask - 1
        store_int(first, space.nodes + 8 * found)
        measure_boxes(low + 4 * first, high + 4 * first, _LEAVES // 16, z, r, scores + 4 * _LEAVES * found)
        found += 1
    least = ranked(scores, _LEAVES // 16 * found, rank)
    fill(scores + 4 * _LEAVES * found, _LEAVES // 16)
    count = 0
    for first in range(0, _LEAVES * found, 64):
        mask = at_least(scores + 4 * first, least)
        while mask != 0:
            i = first + lowest(mask)
            mask &= mask - 1
            store_int(load_int(space.nodes + 8 * (i // _LEAVES)) + i % _LEAVES, space.runs + 16 * count)
            store_int(count, space.runs + 16 * count + 8)
            count += 1
    store_int(count, space.runs + 16 * count + 8)
    points = space.points + table * (_ROW * _NODES * _LEAVES)
    measure_leaves(points, space.runs, count, ints, ints + 16, space.a, space.b)
    return count


@subkernel
def look(kind, space, row, g, table, s, rank):
    """Measure the points of group g that are worth it under scale s; how many chunks of 16."""
    group, ints = kind.group, row.ints[g]
    if group == 8:
        near = space.near + 8 * kind.clusters * (g % 4)
        twice, square = s * row.by[g, 1], s * s * row.by[g, 0]
        return _look_in_clusters(space, near, address(ints), kind.clusters, twice, square, rank)
    inverse = np.float32(1) / s
    for j in range(group):
        z = min(max(row.x[group * g + j] * inverse, -_FURTHEST), _FURTHEST)
        ints[3, j] = np.int16(np.floor(z + np.float32(0.5)))
    return _look_in_boxes(space, table, address(ints), rank)


@subkernel
def ask_centroids(kind, space, row, groups):
    """A and B of all centroids under the weights of a sub-block's groups."""
    if kind.group == 8:
        for g in groups:
            ints, a = address(row.ints[g]), space.near + 8 * kind.clusters * (g % 4)
            measure(4, space.coarse, kind.clusters // 16, ints, ints + 16, a, a + 4 * kind.clusters)


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
def _tried(k, count):
    """Scale k of `count`, in parts of the own scale: in the middle of its part of the range."""
    return np.int32(_LOW_BITS + (2 * k + 1) * (_OCTAVE // (2 * count))).view(np.float32)


@subkernel
def _profile(kind, space, row, s, own, factors, gains):
    """Fill the gains of sub-block s."""
    each, count = 32 // kind.group, kind.scales
    groups = range(each * s, each * s + each)
    ask_centroids(kind, space, row, groups)
    gains[:] = np.float32(0)
    for way in range(0, 2 * kind.tables, 1 + kind.folded):
        sign = -own if way % 2 else own
        for first in range(0, count, 8):
            middle = sign * (np.float32(0.5) * (_tried(first + 3, count) + _tried(first + 4, count)))
            for g in groups:
                for k in range(8):
                    scale = sign * _tried(first + k, count)
                    factors[0, k], factors[1, k] = scale * row.by[g, 1], scale * scale * row.by[g, 0]
                chunks = look(kind, space, row, g, way // 2, middle, kind.rank)
                add_largest(space.a, space.b, chunks, address(factors), address(gains[way, first:]))


@subkernel
def _assume(kind, energy, gains):
    """The profile that sub-blocks have on average, roughly: for efforts that measure none."""
    for k in range(kind.scales):
        r = _tried(k, kind.scales)
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
def _hope(kind, steps, d, profiles, s, hopes):
    """hopes[way * multipliers + j]: what multiplier j is expected to gain; its sign is fixed unless `both`."""
    own, energy = profiles.own[s], profiles.energies[s]
    for j in range(len(steps)):
        r = min(max(d * abs(steps[j]) / own, _LEAST_R), _MOST_R) if own > np.float32(0) else np.float32(1)
        k, growth = _place(r, kind.scales)
        for way in range(2 * kind.tables):
            exists = kind.both or way % 2 == (steps[j] < np.float32(0))
            gain = energy - (energy - profiles.gains[s, way, k]) * growth
            hopes[way * len(steps) + j] = gain if exists else np.float32(-np.inf)


@subkernel
def _match(kind, space, row, s, table, scale, names, found):
    """Find the best points of a sub-block's groups under a scale, looking at more of them; their gain."""
    total, each = np.float32(0), 32 // kind.group
    for g in range(each * s, each * s + each):
        chunks = look(kind, space, row, g, table, scale, kind.final_rank)
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
def _settle(kind, steps, space, row, s, d, hopes, names, found):
    """The multiplier and table of sub-block s under d; found[0] gets its numbers."""
    best = np.float32(0) if kind.zero else np.float32(-np.inf)
    multiplier = table = 0
    found[0] = np.uint16(0)
    for _ in range(kind.finalists):
        candidate = _first_largest(hopes)
        hopes[candidate] = np.float32(-np.inf)
        way, j = candidate // len(steps), candidate % len(steps)
        m = abs(steps[j]) * np.float32(-1 if way % 2 else 1)
        total = _match(kind, space, row, s, way // 2, d * m, names, found[1])
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
    hopes, found = np.empty(2 * kind.tables * len(steps), np.float32), np.empty((2, each), np.uint16)
    sums = np.zeros((kind.ds, 3), np.float32)
    _choose_ds(kind, steps, profiles, ds)
    for s in range(len(profiles.own)):
        groups = range(each * s, each * s + each)
        ask_centroids(kind, space, row, groups)
        for k in range(kind.ds):
            _hope(kind, steps, ds[k], profiles, s, hopes)
            m, table = _settle(kind, steps, space, row, s, ds[k], hopes, names, found)
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
