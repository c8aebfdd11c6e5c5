"""Rounding by second moments: the error e^T H e never rises, the kernel does what the formula says."""

from __future__ import annotations

import numpy as np
import pytest

from quantkit import types
from quantkit.errors import DataError
from quantkit.types.base import NORMAL
from quantkit.types.refine import moments as preparing
from quantkit.types.refine.moments import DAMPING, PANEL, TILE_ROWS, gradient, prepare
from tests.types.data import second_moments
from tests.types.test_codes import SINGLE


def errors(kind: types.QuantType, x: np.ndarray, data: np.ndarray, h: np.ndarray) -> np.ndarray:
    """float64[rows]: e^T H e with the damping that `prepare` adds."""
    e = (kind.dequantize(data, x.shape[1], products=True) - x).astype(np.float64)
    damped = h.astype(np.float64) + DAMPING * np.diagonal(h).mean(dtype=np.float64) * np.eye(len(h))
    result: np.ndarray = np.einsum("ri,ij,rj->r", e, damped, e)
    return result


@pytest.mark.parametrize("rank", [40, 2000])
@pytest.mark.parametrize("name", [*SINGLE, "q4_0_r8", "iq4_k_r4"])
def test_the_error_falls(name: str, rank: int) -> None:
    t = types.get(name)
    n = 3 * 128 if t.block_size == 32 else 768
    h = second_moments(0, n, rank)
    x = np.random.default_rng(1).standard_normal((16, n)).astype(np.float32)
    effort = types.EFFORTS[max(t.moments_effort, NORMAL)]
    before = t.quantize(x, np.diagonal(h), effort=effort)
    after = t.quantize(x, np.diagonal(h), second_moments=h, effort=effort)
    assert np.array_equal(after, t.quantize(x, second_moments=h, effort=effort))  # the diagonal is the importance
    a, b = errors(t, x, before, h), errors(t, x, after, h)
    assert (b <= a * (1 + 1e-5)).all()
    assert b.sum() < 0.9 * a.sum()


@pytest.mark.parametrize("n", [32, 96, 160, 416])
def test_gradient_is_the_product(n: int) -> None:
    h = second_moments(0, n, 2 * n)
    prepared = prepare(h, n)
    e = np.zeros((2 * TILE_ROWS, prepared.panels.shape[1]), np.float32)
    e[:, :n] = np.random.default_rng(2).standard_normal((2 * TILE_ROWS, n))
    damped = h.astype(np.float64) / np.abs(h).max()
    damped[range(n), range(n)] += DAMPING * np.diagonal(damped).mean()
    expected = e[:, :n].astype(np.float64) @ damped
    for p, panel in enumerate(prepared.panels):
        out = np.empty((2 * TILE_ROWS, PANEL), np.float32)
        gradient(e, panel, n, out)
        many = min(PANEL, n - p * PANEL)
        assert np.allclose(out[:, :many], expected[:, p * PANEL : p * PANEL + many], rtol=1e-4, atol=1e-4)
        assert not out[:, many:].any()


def test_without_correlations_codes_stay() -> None:
    """Under a diagonal H, every code of q4_0 is the nearest already; effort fast leaves scales as they are."""
    t = types.get("q4_0")
    x = np.random.default_rng(3).standard_normal((8, 256)).astype(np.float32)
    h = np.diag(np.random.default_rng(4).uniform(0.5, 2, 256)).astype(np.float32)
    plain = t.quantize(x, np.diagonal(h), effort="fast")
    assert np.array_equal(t.quantize(x, second_moments=h, effort="fast"), plain)


def test_zeros_huge_and_tiny_rows() -> None:
    t = types.get("iq4_k")
    h = second_moments(0, 256, 500)
    x = np.random.default_rng(6).standard_normal((4, 256)).astype(np.float32)
    x[0], x[1], x[2] = 0, x[1] * np.float32(1e-38), x[2] * np.float32(1000)
    for scale in (1e-30, 1.0, 1e30):
        data = t.quantize(x, second_moments=h * np.float32(scale))
        assert np.isfinite(t.dequantize(data, 256)).all()
        assert np.array_equal(data[3], t.quantize(x[3:], second_moments=h)[0])
    assert np.isfinite(t.dequantize(t.quantize(x, second_moments=np.zeros((256, 256), np.float32)), 256)).all()


def test_bad_second_moments_are_refused() -> None:
    t, x = types.get("q4_0"), np.ones((1, 64), np.float32)
    good = second_moments(0, 64, 100)
    bad = {"have shape": good[:32]}
    for text, place, value in (("is nan", (3, 5), np.nan), ("not symmetric", (3, 5), 9e3), ("negative", (4, 4), -1e-9)):
        bad[text] = good.copy()
        bad[text][place] = value
    for text, h in bad.items():
        with pytest.raises(DataError, match=text):
            t.quantize(x, second_moments=h)
    with pytest.raises(DataError, match="of 64 columns"):
        t.quantize(np.ones((1, 32), np.float32), second_moments=preparing.prepare(good, 64))
