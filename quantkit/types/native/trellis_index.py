"""The index of a trellis type's points: where the candidates for a group of elements lie. Built once, cached on disk.

  * groups of 8: clusters of about 64 points (Lloyd's algorithm, with integer centroids);
  * groups of 4: a tree of boxes. The points are halved along their widest side until there are 64 nodes of 32 leaves
    of 16 points each.

Points are stored in chunks of 16, as `trellis_simd` reads them.
"""

from __future__ import annotations

import numpy as np

from quantkit.codegen.jit import kernel, subkernel
from quantkit.types.native.trellis_simd import at_least, lowest, point_sums, score

_PASSES = 6  # of Lloyd's algorithm
NODES, LEAVES = 64, 32  # boxes of boxes, and boxes of 16 points in each


def _halves(points: np.ndarray, parts: int) -> np.ndarray:
    """Parts of one size of int8 points, int64[parts, size]: halved where they are widest, again and again."""
    members, columns = np.arange(len(points))[None], points.T.astype(np.int32)
    while len(members) < parts:
        coordinates, size = columns[:, members], members.shape[1]
        spread = (
            size * (coordinates * coordinates).sum(axis=2, dtype=np.int64)
            - coordinates.sum(axis=2, dtype=np.int64) ** 2
        )
        key = coordinates[spread.argmax(axis=0), np.arange(len(members))].astype(
            np.int8
        )  # which numpy sorts by counting
        members = np.take_along_axis(members, key.argsort(axis=1, kind="stable"), axis=1).reshape(-1, size // 2)
    return members


def _shuffled(count: int) -> np.ndarray:
    """A permutation that spreads neighbours, so that each SIMD lane gets a sample of all clusters or boxes."""
    return (np.arange(count, dtype=np.uint32) * np.uint32(2654435761)).argsort()


def _interleaved(points: np.ndarray) -> np.ndarray:
    """int8[16 k, G] as `point_sums` reads them."""
    return np.ascontiguousarray(points.reshape(-1, 16, points.shape[1] // 2, 2).transpose(0, 2, 1, 3))


@kernel(inline="always")
def address(array):
    """The address of an array's elements.

    numba frees an array after its last use, which this may be: the caller of the kernel must hold the array.
    """
    return np.int64(array.ctypes.data)


@subkernel
def find(scores, threshold):
    """Index of the first of float32 scores (a multiple of 64) that is at least `threshold`; there must be one."""
    first = 0
    while True:
        mask = at_least(scores + 4 * first, threshold)
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
    centroid_address, a, b, scores = address(centroids), address(space[0]), address(space[1]), address(space[2])
    for i in range(count):
        for j in range(group):
            t[j] = points[i, j]
        point_sums(4, centroid_address, chunks, address(u), address(t), a, b)
        nearest[i] = find(scores, score(a, b, chunks, np.float32(2), np.float32(1), 1, scores))


def _nearest(table: np.ndarray, centroids: np.ndarray) -> np.ndarray:
    """int32[points]: the centroid nearest to each point."""
    group, interleaved, nearest = table.shape[1], _interleaved(centroids), np.empty(len(table), np.int32)
    space = np.empty((3, 16 * len(interleaved)), np.float32)
    _assign(table, interleaved, np.ones(group, np.int16), np.empty(group, np.int16), space, nearest)
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
    position = np.arange(16 * chunks.sum()) - np.repeat(16 * (np.cumsum(chunks) - chunks), 16 * chunks)
    cluster_of = np.repeat(np.arange(count), 16 * chunks)
    begin = np.cumsum(sizes) - sizes
    order = nearest.argsort(kind="stable")[begin[cluster_of] + np.where(position < sizes[cluster_of], position, 0)]
    return _interleaved(centroids), order, np.concatenate([[0], np.cumsum(chunks)])


def _boxes(table: np.ndarray) -> tuple[np.ndarray, ...]:
    """Lower and upper corners of nodes, then of leaves; the points' order, leaf by leaf."""
    members = _halves(table, NODES * LEAVES).reshape(NODES, LEAVES, 16)
    members = members[_shuffled(NODES)][:, _shuffled(LEAVES)]
    corners = []
    for points in (table[members].reshape(NODES, -1, table.shape[1]), table[members.reshape(-1, 16)]):
        corners += [_interleaved(points.min(axis=1)), _interleaved(points.max(axis=1))]
    return np.concatenate(corners), members.reshape(-1), np.zeros(1, np.int64)


def build(values: np.ndarray, clusters: int) -> tuple[np.ndarray, ...]:
    """The index of tables int8[tables, points, G], of which there is one where G is 8.

    Centroids or boxes, points, their numbers, where clusters begin, the tables themselves.
    """
    parts = [_boxes(table) if table.shape[1] == 4 else _clusters(table, clusters) for table in values]
    coarse, orders, firsts = zip(*parts)
    return (np.stack(coarse), np.stack([_interleaved(table[order]) for table, order in zip(values, orders)]),
            np.stack(orders).astype(np.uint16), np.stack(firsts).astype(np.int64), values)  # fmt: skip
