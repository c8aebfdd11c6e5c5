"""The K types: what the tests of all types do not show."""

from __future__ import annotations

import numpy as np
import pytest

from quantkit import types
from quantkit.types import q2_k, q3_k
from quantkit.types.families.kquant import lanes
from tests.types import data, on_cpu

NAMES = ("q2_K", "q3_K", "q4_K", "q5_K", "q6_K")


def error_of(name: str, x: np.ndarray, w: np.ndarray, effort: str) -> np.ndarray:
    """Weighted squared error of each block."""
    t = types.get(name)
    y = t.dequantize(t.quantize(x, effort=effort), x.shape[1])
    return (w * (x.astype(np.float64) - y) ** 2).reshape(-1, 256).sum(axis=1)


def halves(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float16).astype(np.float64)


@pytest.mark.parametrize(("effort", "bound"), [("normal", 1.06), ("best", 1.02)])
def test_search_of_q3_k_comes_close_to_trying_everything(effort, bound):
    """All multipliers with nearest codes, under 300 super-scales of either sign."""
    x = data.rows("student4", 13, 4, 256)
    v = (x.astype(np.float64) ** 2).mean(axis=1, keepdims=True)
    w = float(q3_k.WEIGHTING.mean) * v + x.astype(np.float64) ** 2
    best = []
    for block, weight in zip(x.astype(np.float64).reshape(-1, 16, 16), w.reshape(-1, 16, 16)):
        scales = halves(np.geomspace(0.7, 2, 300) * np.abs(block).max() / (4 * 32))
        totals = []
        for d in np.concatenate([scales, -scales]):
            step = (d * np.r_[-32:0, 1:32])[:, None, None]
            each = (weight * (block - step * np.clip(np.rint(block / step), -4, 3)) ** 2).sum(axis=2).min(axis=0)
            totals.append(np.minimum(each, (weight * block**2).sum(axis=1)).sum())
        best.append(min(totals))
    assert error_of("q3_K", x, w, effort).sum() <= bound * sum(best)


@pytest.mark.parametrize(("effort", "bound"), [("normal", 1.08), ("best", 1.03)])
def test_search_of_q2_k_comes_close_to_trying_everything(effort, bound):
    """All scales and minima with nearest codes, under 24 x 16 super-scales."""
    x = data.rows("gaussian", 14, 3, 256)
    w = float(q2_k.WEIGHTING.magnitude) * np.abs(x.astype(np.float64))
    best = []
    s, m = (a.reshape(-1, 1, 1).astype(np.float64) for a in np.meshgrid(np.arange(1, 16), np.arange(16)))
    for block, weight in zip(x.astype(np.float64).reshape(-1, 16, 16), w.reshape(-1, 16, 16)):
        width, low = np.ptp(block, axis=1).max(), -block.min()
        totals = []
        for d in halves(np.linspace(0.6, 1.2, 24) * width / (3 * 15)):
            for dmin in halves(np.linspace(0.5, 1.2, 16) * low / 15):
                y = d * s * np.clip(np.rint((block + dmin * m) / (d * s)), 0, 3) - dmin * m
                totals.append((weight * (block - y) ** 2).sum(axis=2).min(axis=0).sum())
        best.append(min(totals))
    assert error_of("q2_K", x, w, effort).sum() <= bound * sum(best)


@pytest.mark.parametrize(("name", "offset"), [("q2_K", 80), ("q4_K", 0), ("q5_K", 0)])
def test_only_best_negates_blocks(name, offset):
    """It stores both super-scales negative then, or the one that is not 0."""
    x = data.rows("gaussian", 15, 16, 256)
    for effort in ("normal", "best"):
        stored = types.get(name).quantize(x, effort=effort)
        d, dmin = (np.ascontiguousarray(stored[:, i : i + 2]).view(np.float16)[:, 0] for i in (offset, offset + 2))
        assert (d < 0).any() == (effort == "best")
        assert (d * dmin >= 0).all()


def test_the_grid_of_super_scales_keeps_the_largest_scale():
    """Its S is a whole number at every place."""
    for count in (4, 8, 16):
        for i in range(count):
            factor = lanes.grid_factor.function(i, count, np.float32(63), np.float32(63), 16)
            whole = 63 / factor
            assert abs(whole - round(whole)) < 1e-4
            assert 46 <= whole <= 63


@pytest.mark.parametrize("isa", [pytest.param("generic", marks=pytest.mark.full), "avx2"])
def test_the_same_bytes_on_another_cpu(isa):
    names = ["q2_K", "q3_K", "q5_K"]
    assert on_cpu.run(isa, "encode", names) == on_cpu.digests("encode", names)


@pytest.mark.parametrize("effort", types.EFFORTS)
@pytest.mark.parametrize("name", ["q2_K", "q4_K", "q5_K"])
def test_constant_rows_of_either_sign_stay_what_they_are(name, effort):
    """Below 0 they are a minimum without a scale."""
    t = types.get(name)
    x = np.repeat(np.array([[-0.03], [0.03], [-1.7], [400]], np.float32), 512, axis=1)
    x[2, 256:] = 0
    x[3, 16:] = -400
    for importance in (None, data.importance(6, 512)):
        y = t.dequantize(t.quantize(x, importance, effort=effort), 512)
        np.testing.assert_allclose(y, x, rtol=3e-3)


@pytest.mark.parametrize("kind", ["a few", "ternary"])
def test_zeros_of_q2_k_stay_small_where_few_elements_are_none(kind, rng):
    """Without importance the reference does not weigh them, and comes off no better."""
    from tests.conformance import ggml

    t = types.get("q2_K")
    x = rng.standard_normal((16, 512)) * (rng.random((16, 512)) < 0.05)
    x = (x if kind == "a few" else 0.37 * rng.integers(-1, 2, x.shape)).astype(np.float32)
    ours, reference = t.dequantize(t.quantize(x), 512), ggml.dequantize(t.name, ggml.quantize(t.name, x), 512)
    assert data.squared_error(x, ours) <= data.squared_error(x, reference)
