"""Error feedback: the factors of H, and a choice of points against its plain formula."""

from __future__ import annotations

import numpy as np
import pytest

from quantkit import types
from quantkit.types.families.code_bits import codes_of, read_codes, write_codes
from quantkit.types.refine import Moments, feedback, prepare, scalar_codes
from quantkit.types.refine.feedback import keep_lower, row_errors
from quantkit.types.refine.moments import TILE_ROWS
from quantkit.types.refine.sub_block_scales import NONE
from quantkit.types.refine.vector_codes import WALK, feed_back, read_fields
from tests.types.data import second_moments


def dense(panels: np.ndarray, n: int) -> np.ndarray:
    """float64[n, n] of panels."""
    return panels.transpose(1, 0, 2).reshape(panels.shape[1], -1)[:n, :n].astype(np.float64)


def factored(moments: Moments, size: int) -> tuple[np.ndarray, np.ndarray]:
    """A and D, float64[n, n]."""
    n = moments.columns
    found = dense(feedback.factors(moments, size), n)
    blocks = np.kron(np.eye(n // size), np.ones((size, size)))
    return found * (1 - blocks), found * blocks


@pytest.mark.parametrize(
    ("n", "size", "rank"), [(512, 8, 2000), (512, 4, 30), (160, 2, 2000), (96, 8, 40), (768, 8, 1)]
)
def test_the_factors_multiply_to_h(n: int, size: int, rank: int) -> None:
    moments = prepare(second_moments(0, n, rank), n)
    a, d = factored(moments, size)
    unit = np.eye(n) + a
    h = dense(moments.panels, n)
    np.testing.assert_allclose(unit @ d @ unit.T, h, atol=1e-5 * np.abs(h).max())
    assert not np.tril(a).any()
    assert np.linalg.eigvalsh(d).min() > 0
    assert feedback.factors(moments, size) is feedback.factors(moments, size)


def test_zeros_have_finite_factors() -> None:
    moments = prepare(np.zeros((128, 128), np.float32), 128)
    assert np.isfinite(feedback.factors(moments, 8)).all()


@pytest.mark.parametrize("name", ["iq2_kt", "iq3_kt", "iq4_kt", "iq3_s", "iq2_xxs", "iq1_s", "iq2_kl"])
def test_points_against_the_plain_formula(name: str) -> None:
    """Every group of a row in the order of the columns, with neighbours and signs weighed in float64."""
    t, n = types.get(name), 512
    codes, h = t.vector_codes, second_moments(0, n, 400)
    moments = prepare(h, n)
    x = np.random.default_rng(5).standard_normal((1, n)).astype(np.float32)
    data = t.quantize(x, np.diagonal(h))
    size = codes.values.shape[2]
    points, signs, sub_blocks = (
        np.empty((1, n // size), np.int64),
        np.ones((1, n), np.float32),
        np.zeros((1, n // 32), np.int64),
    )
    read_fields(data, codes, points, signs, sub_blocks)
    tables = np.repeat(sub_blocks, 32 // size, axis=1)
    y = t.dequantize(data, n, products=True)
    values = codes.values[tables, points].reshape(1, n) * signs
    scales = ((y * values).reshape(1, -1, size).sum(2) / (values * values).reshape(1, -1, size).sum(2)).astype(
        np.float32
    )
    flips = 0 if not len(codes.sign_bits) else 2 if (codes.sign_bits < 0).any() else 1

    start, start_signs = points[0].copy(), signs[0].copy()
    e = moments.padded_zeros(1)
    e[:1, :n] = y - x
    feed_back(e, points, signs, tables, scales, NONE, codes, feedback.factors(moments, size), 1, flips)
    error = e[0, :n].astype(np.float64)

    a, d = factored(moments, size)
    equal = 0
    for g in range(n // size):
        own, table, scale = slice(g * size, g * size + size), tables[0, g], scales[0, g]
        target = x[0, own] - error[: own.start] @ a[: own.start, own]
        point, sign = start[g], start_signs[own]
        if flips == 1:
            sign = np.where(target * scale * codes.values[table, point] < 0, -1, 1)

        def cost(p: int) -> float:
            apart = scale * sign * codes.values[table, p] - target  # noqa: B023
            return float(apart @ d[own, own] @ apart)  # noqa: B023

        for _ in range(WALK):
            best = min(codes.near[table, point], key=cost)
            if cost(best) >= cost(point):
                break
            point = best
        equal += points[0, g] == point  # float32 may take another way where costs are close
        np.testing.assert_allclose(
            error[own], scale * signs[0, own] * codes.values[table, points[0, g]] - x[0, own], atol=1e-4
        )
    assert equal > 0.95 * n / size
    whole = dense(moments.panels, n)
    assert error @ whole @ error < 0.9 * ((y - x)[0] @ whole @ (y - x)[0])


@pytest.mark.parametrize("size", [1, 4, 8])
def test_row_errors(size: int) -> None:
    moments = prepare(second_moments(0, 160, 100), 160)
    e = np.zeros((TILE_ROWS, moments.panels.shape[1]), np.float32)
    e[:, :160] = np.random.default_rng(6).standard_normal((TILE_ROWS, 160))
    h = dense(moments.panels, 160)
    expected = np.einsum("ri,ij,rj->r", e[:, :160].astype(np.float64), h, e[:, :160].astype(np.float64))
    found = row_errors(e, feedback.factors(moments, size), size, TILE_ROWS)
    np.testing.assert_allclose(found, expected, rtol=1e-4)


@pytest.mark.parametrize("name", ["q4_0", "iq4_k", "iq2_k", "q3_K", "q6_0"])
def test_codes_against_the_plain_formula(name: str) -> None:
    """Every code of a row is the nearest to its target, among all values of its block."""
    t, n = types.get(name), 512
    h = second_moments(0, n, 400)
    moments = prepare(h, n)
    x = np.random.default_rng(7).standard_normal((1, n)).astype(np.float32)
    data = t.quantize(x, np.diagonal(h))
    found = codes_of(t)
    values = []
    for code in range(len(found.ladder.up)):
        moved = data.copy()
        write_codes(np.full((1, n), code, np.uint8), found, moved)
        values.append(t.dequantize(moved, n, products=True)[0] if code != t.unwritten_code else np.full(n, np.inf))
    values = np.array(values)
    before = t.dequantize(data, n, products=True)[0] - x[0]

    scalar_codes.refine(t, found, x, data, moments, ())
    codes = np.empty((1, n), np.uint8)
    read_codes(data, found, codes)
    error = (t.dequantize(data, n, products=True) - x)[0].astype(np.float64)
    a, _ = factored(moments, 1)
    target = x[0] - error @ a
    chosen, nearest = np.abs(values[codes[0], range(n)] - target), np.abs(values - target).min(axis=0)
    np.testing.assert_allclose(chosen, nearest, atol=1e-4)
    whole = dense(moments.panels, n)
    assert error @ whole @ error < 0.9 * (before @ whole @ before)


def test_rows_whose_error_does_not_fall_stay() -> None:
    codes, old = np.array([[5], [5], [5], [5]]), np.array([[4], [4], [4], [4]])
    keep_lower([codes], [old], np.array([4, 1, 9, np.nan]), np.array([1.0, 4, 9, 16]))
    assert codes.ravel().tolist() == [4, 5, 4, 4]
