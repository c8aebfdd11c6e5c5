"""Rounding by second moments for ternary rows: the scale is the best one, what is written is what was found."""

from __future__ import annotations

import numpy as np
import pytest

from quantkit import types
from quantkit.types.refine import prepare
from quantkit.types.refine.moments import TILE_ROWS
from quantkit.types.refine.ternary_rows import fit_scales, sum_products
from tests.types import data
from tests.types.refine.test_scalar_codes import errors

TERNARY = pytest.mark.parametrize("name", ["iq1_bn", "iq2_bn"])


@TERNARY
def test_packed_codes_are_decoded(name: str) -> None:
    t, n = types.get(name), 192
    codes = np.random.default_rng(1).integers(0, 3, (5, n)).astype(np.uint8)
    found = np.zeros((5, t.row_bytes(n)), np.uint8)
    scales = np.array([1, 0.5, 2, 3, 0.25], t.scale_dtype)
    found[:, : scales.itemsize] = scales[:, None].view(np.uint8)
    t.pack_rows(codes, found)
    assert np.array_equal(t.dequantize(found, n), scales[:, None] * (codes.astype(np.float32) - 1))


@pytest.mark.parametrize("n", [64, 192, 448])
def test_scales_against_the_plain_formula(n: int) -> None:
    rng, rows = np.random.default_rng(2), 5
    prepared = prepare(data.second_moments(3, n, 2 * n), n)
    columns = len(prepared.panels[0])
    damped = prepared.panels.transpose(1, 0, 2).reshape(columns, -1)[:n, :n].astype(np.float64)
    t, e = np.zeros((2, TILE_ROWS, columns), np.float32)
    t[:rows, :n] = rng.integers(-1, 2, (rows, n))
    t[3] = 0
    x = rng.standard_normal((rows, n))
    own = np.array([0.5, 1, 2, 1, 0.1], np.float32)
    e[:rows, :n] = own[:, None] * t[:rows, :n] - x
    products = np.zeros((2, rows))
    sum_products(t, e, prepared.panels, n, products)
    wide_t, wide_e = t[:rows, :n].astype(np.float64), e[:rows, :n].astype(np.float64)
    expected = [np.einsum("ri,ij,rj->r", wide_t, damped, v) for v in (wide_e, wide_t)]
    np.testing.assert_allclose(products, expected, rtol=1e-4, atol=1e-3)
    for dtype in (np.float16, np.float32):
        fitted = fit_scales(own.astype(dtype), t, e, prepared)
        best = own - expected[0] / np.where(expected[1] > 0, expected[1], np.inf)
        best = np.where(best > 0, best, own)  # a scale is positive
        np.testing.assert_allclose(fitted, best, rtol=2e-3 if dtype is np.float16 else 1e-4, atol=1e-5)


@TERNARY
def test_the_scale_of_a_row_is_the_best_for_its_codes(name: str) -> None:
    """No other stored scale has a lower error."""
    t, n = types.get(name), 256
    h, x = data.second_moments(4, n), np.random.default_rng(5).standard_normal((6, n)).astype(np.float32)
    found = t.quantize(x, second_moments=h, effort="best")
    least = errors(t, x, found, h)
    size = np.dtype(t.scale_dtype).itemsize
    own = found[:, :size].copy().view(t.scale_dtype)[:, 0]
    for factor in (0.99, 0.999, 1.001, 1.01):
        found[:, :size] = (own * t.scale_dtype(factor))[:, None].view(np.uint8)
        assert (errors(t, x, found, h) > least * (1 - 1e-5)).all()


@TERNARY
def test_ternary_rows_stay(name: str) -> None:
    t, n = types.get(name), 256
    x = np.float32(0.5) * np.random.default_rng(6).integers(-1, 2, (4, n)).astype(np.float32)
    x[1] = 0
    found = t.quantize(x, second_moments=data.second_moments(7, n))
    assert np.array_equal(t.dequantize(found, n), x)
