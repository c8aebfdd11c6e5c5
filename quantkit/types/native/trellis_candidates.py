"""Candidates of the trellis search: the points of the index that may be nearest to a group under a scale.

A group x with weights w and scale s has the error

    sum w (x - s v)^2  =  sum w x^2 - s (2 B - s A)        A = sum w v^2,  B = sum w x v

for a point v. So A and B of a point give its error under every scale. `round_weights` rounds w to 13 bits and w x to
15, relative to the group's largest; then A and B are sums of products of small integers, exact on every CPU, and
`point_sums` computes those of 16 points in a few instructions.

The plain search computes them for all points of the table. `candidate_sums` computes them only for the clusters (groups
of 8) or boxes (groups of 4) that may hold the best point: all whose own score is at least the `rank`-th best. The rank
is taken over 16 lanes, each with the best of a sixteenth of the clusters or boxes; so rank r takes about
16 (1/16 + 1/15 + ... of r terms) of them. Centroids are scored by their A and B, boxes by their weighted distance.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from quantkit.codegen.jit import subkernel
from quantkit.codegen.simd import load_int, store_int
from quantkit.types.families.trellis_code import SearchParameters
from quantkit.types.native.trellis_index import LEAVES, NODES, address
from quantkit.types.native.trellis_simd import (
    at_least,
    box_distances,
    fill,
    leaf_sums,
    lowest,
    point_sums,
    ranked,
    score,
)

_ROW = 64  # bytes of 16 float32

_LARGEST_U, _LARGEST_T = np.float32(8191), np.float32(32767)  # 8 products of u and v^2 must fit 31 bits
_LARGEST_R = np.float32(90)  # four squares of r times a gap must
_FURTHEST = np.float32(130)  # z beyond is as good as z here
_LEAST = np.float32(1e-30)  # weights below are rounded to nothing: their quotients would overflow
_NODE_RANK = 6


class TrellisSpace(NamedTuple):
    """Addresses of the work space and of the index."""

    scores: int
    a: int  # sums of the points measured last
    b: int
    runs: int  # int64[:, 2]: number in the index of a run of their chunks of 16, and number of its first one here
    nodes: int  # of the boxes found
    centroids: int  # float32[groups of a sub-block, 2, clusters]: A and B of centroids
    coarse: int  # the index
    points: int
    firsts: int


class Row(NamedTuple):
    """A row, in units of a power of two."""

    x: np.ndarray
    w: np.ndarray
    ints: np.ndarray  # int16[groups, 4, 8]: u, t, r as `point_sums` and `box_distances` take them, and z
    by: np.ndarray  # float32[groups, 2]: what makes sum w v^2 of A and 2 sum w x v of B


def scratch_for(kind: SearchParameters, index: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
    """The arrays that a `TrellisSpace` points into: scores and sums, those of centroids, runs, nodes."""
    count = index[2].shape[1]
    return (np.empty((3, count + 64), np.float32), np.empty((4, 2, kind.clusters), np.float32),
            np.empty((count // 16 + 1, 2), np.int64), np.empty(NODES, np.int64))  # fmt: skip


@subkernel
def space_of(scratch, index):
    """The addresses of a work space and of an index. The caller holds their arrays."""
    coarse, points, _, firsts, _ = index
    scores, centroids, runs, nodes = scratch
    return TrellisSpace(
        address(scores[0]), address(scores[1]), address(scores[2]), address(runs), address(nodes),
        address(centroids), address(coarse), address(points), address(firsts),
    )  # fmt: skip


@subkernel
def row_of(n, group):
    """Arrays for a row of n elements in groups of `group`."""
    return Row(
        np.empty(n, np.float32), np.empty(n, np.float32),
        np.zeros((n // group, 4, 8), np.int16), np.empty((n // group, 2), np.float32),
    )  # fmt: skip


@subkernel
def round_weights(group, row):
    """Integer weights of all groups."""
    for g in range(len(row.by)):
        x, w, ints = row.x[group * g : group * g + group], row.w[group * g : group * g + group], row.ints[g]
        max_u = max_t = np.float32(0)
        for j in range(group):
            max_u, max_t = max(max_u, w[j]), max(max_t, abs(w[j] * x[j]))
        by_u = np.float32(1) / max_u if max_u > _LEAST else np.float32(0)
        by_t = _LARGEST_T / max_t if max_t > _LEAST else np.float32(0)
        for j in range(group):
            relative = w[j] * by_u
            ints[0, j] = np.int16(relative * _LARGEST_U + np.float32(0.5))
            ints[1, j] = np.int16(np.floor(w[j] * x[j] * by_t + np.float32(0.5)))
            ints[2, j] = max(np.int16(np.sqrt(relative) * _LARGEST_R), np.int16(1))
        row.by[g, 0], row.by[g, 1] = max_u / _LARGEST_U, (max_t + max_t) / _LARGEST_T


@subkernel
def _candidates_in_clusters(space, centroid_addresses, ints, clusters, doubled, square, rank):
    """Compute A and B of the points of the best clusters under a scale; returns the number of chunks of 16."""
    threshold = score(
        centroid_addresses, centroid_addresses + 4 * clusters, clusters // 16, doubled, square, rank, space.scores
    )
    count, run = 0, space.runs
    for first in range(0, clusters, 64):
        mask = at_least(space.scores + 4 * first, threshold)
        while mask != 0:
            entry = space.firsts + 8 * (first + lowest(mask))
            mask &= mask - 1
            begin = load_int(entry)
            chunks = load_int(entry + 8) - begin
            point_sums(
                4, space.points + 128 * begin, chunks, ints, ints + 16, space.a + _ROW * count, space.b + _ROW * count
            )
            store_int(begin, run)
            store_int(count, run + 8)
            run += 16
            count += chunks
    store_int(count, run + 8)
    return count


@subkernel
def _candidates_in_boxes(space, table, ints, rank):
    """`_candidates_in_clusters` for groups of 4: the points in the boxes nearest to z."""
    coarse, scores = space.coarse + table * (8 * (NODES + NODES * LEAVES)), space.scores
    r, z = ints + 32, ints + 48
    box_distances(coarse, coarse + 4 * NODES, NODES // 16, z, r, scores)
    mask = at_least(scores, ranked(scores, NODES // 16, _NODE_RANK))
    low = coarse + 8 * NODES
    high = low + 4 * NODES * LEAVES
    nodes = 0
    while mask != 0:
        first = LEAVES * lowest(mask)
        mask &= mask - 1
        store_int(first, space.nodes + 8 * nodes)
        box_distances(low + 4 * first, high + 4 * first, LEAVES // 16, z, r, scores + 4 * LEAVES * nodes)
        nodes += 1
    threshold = ranked(scores, LEAVES // 16 * nodes, rank)
    fill(scores + 4 * LEAVES * nodes, LEAVES // 16)
    count = 0
    for first in range(0, LEAVES * nodes, 64):
        mask = at_least(scores + 4 * first, threshold)
        while mask != 0:
            i = first + lowest(mask)
            mask &= mask - 1
            store_int(load_int(space.nodes + 8 * (i // LEAVES)) + i % LEAVES, space.runs + 16 * count)
            store_int(count, space.runs + 16 * count + 8)
            count += 1
    store_int(count, space.runs + 16 * count + 8)
    points = space.points + table * (_ROW * NODES * LEAVES)
    leaf_sums(points, space.runs, count, ints, ints + 16, space.a, space.b)
    return count


@subkernel
def candidate_sums(kind, space, row, g, table, s, rank):
    """Compute A and B of the candidates of group g under scale s; returns the number of chunks of 16."""
    group, ints = kind.group, row.ints[g]
    if group == 8:
        centroid_addresses = space.centroids + 8 * kind.clusters * (g % 4)
        doubled, square = s * row.by[g, 1], s * s * row.by[g, 0]
        return _candidates_in_clusters(space, centroid_addresses, address(ints), kind.clusters, doubled, square, rank)
    inverse = np.float32(1) / s
    for j in range(group):
        z = min(max(row.x[group * g + j] * inverse, -_FURTHEST), _FURTHEST)
        ints[3, j] = np.int16(np.floor(z + np.float32(0.5)))
    return _candidates_in_boxes(space, table, address(ints), rank)


@subkernel
def centroid_sums(kind, space, row, groups):
    """A and B of all centroids under the weights of a sub-block's groups."""
    if kind.group == 8:
        for g in groups:
            ints, a = address(row.ints[g]), space.centroids + 8 * kind.clusters * (g % 4)
            point_sums(4, space.coarse, kind.clusters // 16, ints, ints + 16, a, a + 4 * kind.clusters)
