"""The grid types: grids against known checksums; points and signs against an exhaustive search."""

from __future__ import annotations

import numpy as np
import pytest

from quantkit import types
from tests.types import data, on_cpu
from tests.types.naive.grids import points

NAMES = ["iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s"]
by_name = pytest.mark.parametrize("name", NAMES)


@by_name
def test_grid(name):
    np.testing.assert_array_equal(types.get(name).grid.points, points(name))


def best_errors(t: types.QuantType, x: np.ndarray, w: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Smallest error of each 8 elements, float64[k, 8], at a scale each: all points, all positions of a wrong sign."""
    grid = t.grid.points.astype(np.float64)
    length = grid.shape[1]
    y = scale[:, None, None] * grid
    parts = [(np.abs(x[:, a : a + length]), w[:, a : a + length]) for a in range(0, 8, length)]
    right = [(v[:, None] * (u[:, None] - y) ** 2).sum(axis=2) for u, v in parts]
    without = [r.min(axis=1) for r in right]
    if not t.even_signs:
        return sum(without)
    wrong = [(r + (4 * v[:, None] * u[:, None] * y).min(axis=2)).min(axis=1) for r, (u, v) in zip(right, parts)]
    flipped = wrong[0] if length == 8 else np.minimum(wrong[0] + without[1], without[0] + wrong[1])
    return np.where((x < 0).sum(axis=1) % 2, flipped, sum(without))


@by_name
def test_points_and_signs_are_the_best_under_their_scales(name, monkeypatch):
    t = types.get(name)
    fields = []
    monkeypatch.setattr(type(t), "_pack", staticmethod(lambda *result: fields.extend(result)))
    x, q = data.rows("student4", 12, 8, 256), data.importance(12, 256)
    t.quantize(x, q, threads=1)
    scales, multipliers, numbers, signs, _ = fields
    d = scales.view(np.float16).astype(np.float64)[:, None]
    scale = np.repeat(d * (2.0 * multipliers + 1) / t.divisor, t.sub_block // 8, axis=1).reshape(-1)
    negative = np.unpackbits(signs, axis=1, bitorder="little").reshape(-1, 8)
    y = scale[:, None] * t.grid.points[numbers].reshape(-1, 8) * (1 - 2.0 * negative)
    w = np.broadcast_to(q, x.shape).astype(np.float64).reshape(-1, 8)
    x = x.reshape(-1, 8).astype(np.float64)
    best = best_errors(t, x, w, scale)
    assert ((w * (x - y) ** 2).sum(axis=1) <= best + 1e-4 * (w * x**2).sum(axis=1)).all()
    if t.even_signs:
        assert not (negative.sum(axis=1) % 2).any()


@pytest.mark.parametrize("isa", ["generic", "avx2"])
def test_the_same_on_another_cpu(isa):
    assert on_cpu.run(isa, "encode", NAMES) == on_cpu.digests("encode", NAMES)
