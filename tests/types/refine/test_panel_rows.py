"""Rounding by second moments: loops over a panel, scales and pairs of codes, against their plain formulas."""

from __future__ import annotations

import numpy as np
import pytest

from quantkit import types
from quantkit.codegen import jit
from quantkit.codegen.jit import kernel
from quantkit.types.families.code_bits import codes_of
from quantkit.types.families.scale_bits import minimum_of, scale_of, write_numbers
from quantkit.types.refine import prepare, scalar_codes, sub_block_scales
from quantkit.types.refine.code_pairs import DOWN, UP, best_partner, least_partners
from quantkit.types.refine.moments import PANEL
from quantkit.types.refine.panel_rows import add_scaled, combine, dot, weigh_steps
from tests.types.data import second_moments
from tests.types.refine.test_scalar_codes import errors


@kernel
def run_loops(g, h, steps, u, out, sums, least):
    """Each loop once: `out` float32[2, PANEL], `sums` float32[1], `least` float32[2, PANEL]; steps and g change."""
    combine(u.ctypes.data, h.ctypes.data, len(u), out[0].ctypes.data)
    sums[0] = dot(u.ctypes.data, g.ctypes.data, len(u))
    add_scaled(np.float32(0.25), h[3].ctypes.data, g.ctypes.data)
    weigh_steps(g.ctypes.data, h[5].ctypes.data, steps.ctypes.data)
    least_partners(h.ctypes.data, steps.ctypes.data, 2, 100, least.ctypes.data)


@pytest.mark.parametrize("count", [16, 32, 128])
def test_loops_over_a_panel(count: int) -> None:
    rng = np.random.default_rng(count)
    h = rng.standard_normal((PANEL, PANEL)).astype(np.float32)
    np.fill_diagonal(h, 0)
    g, u = rng.standard_normal(PANEL).astype(np.float32), rng.standard_normal(count).astype(np.float32)
    steps = np.zeros((4, PANEL), np.float32)
    steps[UP], steps[DOWN] = rng.uniform(0.1, 1, PANEL), rng.uniform(-1, -0.1, PANEL)
    steps[UP, 7] = 0  # at the end of its ladder
    moved, out, sums = g.copy(), np.empty((2, PANEL), np.float32), np.empty(1, np.float32)
    least = np.full((2, PANEL), np.nan, np.float32)
    run_loops(moved, jit.readonly(h), steps, u, out, sums, least)
    np.testing.assert_allclose(out[0], u @ h[:count], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(sums[0], u @ g[:count], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(moved, g + 0.25 * h[3], rtol=1e-6)
    alone = steps[:2] * (2 * moved + steps[:2] * h[5])
    np.testing.assert_allclose(steps[2:], alone, rtol=1e-4, atol=1e-5)
    for k in (UP, DOWN):
        for i in range(2, 100):
            both = steps[2:] + 2 * steps[k, i] * h[i] * steps[:2]
            assert np.isclose(least[k, i], steps[2 + k, i] + min(0, both.min()), rtol=1e-4, atol=1e-4)
    assert np.isnan(least[:, 1]).all()
    assert np.isnan(least[:, 100]).all()


@kernel
def run_best_partner(h, steps, a):
    return best_partner(h, steps, a)


def test_best_partner() -> None:
    rng = np.random.default_rng(1)
    h, steps = rng.standard_normal(PANEL).astype(np.float32), rng.standard_normal((4, PANEL)).astype(np.float32)
    changes = steps[2:] + 2 * np.float32(0.5) * h * steps[:2]
    k, j = np.unravel_index(changes.argmin(), changes.shape)
    assert run_best_partner(jit.readonly(h), steps, np.float32(0.5)) == (j, k)


@pytest.mark.parametrize("name", ["q4_0", "q4_1", "q4_K", "iq4_k", "iq4_ks", "q6_K"])
def test_tracked_errors_are_those_of_the_written_rows(name: str) -> None:
    """e that the descent tracks, codes, scales and minima moving, is that of decoding what is written."""
    t, n, rows = types.get(name), 512, 8
    h = second_moments(3, n, 300)
    x = np.random.default_rng(2).standard_normal((rows, n)).astype(np.float32)
    data, codes = t.quantize(x, np.diagonal(h)), codes_of(t)
    before = data.copy()
    seen = []
    descend = scalar_codes.descend

    def observed(e, *rest):
        moves = descend(e, *rest)
        seen.append(e[:rows, :n].copy())
        return moves

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scalar_codes, "descend", observed)
        scalar_codes.refine(t, codes, x, data, prepare(h, n), scalar_codes.ROUNDS[1])
    e = t.dequantize(data, n, products=True) - x
    np.testing.assert_allclose(seen[-1], e, rtol=0, atol=1e-5 * np.abs(x).max())
    assert (errors(t, x, data, h) < errors(t, x, before, h)).all()


@pytest.mark.parametrize(
    ("name", "of"), [("q4_0", scale_of), ("iq4_ks", scale_of), ("q4_1", minimum_of), ("q5_K", minimum_of)]
)
def test_directions_of_numbers(name: str, of) -> None:
    """Another value of every number changes each element by its direction times the difference."""
    t, n = types.get(name), 512
    x = np.random.default_rng(4).standard_normal((4, n)).astype(np.float32)
    x[0, :32] = 0
    data, number = t.quantize(x, np.ones(n, np.float32)), of(t)
    y = t.dequantize(data, n, products=True)
    numbers = sub_block_scales.read(t, number, data, y)
    other = np.where(numbers.places > 2, numbers.places - 2, numbers.places + 2)
    moved = data.copy()
    write_numbers(number.codes[other], number, moved)
    change = np.repeat(number.values[other] - number.values[numbers.places], number.size, axis=1) * numbers.directions
    np.testing.assert_allclose(t.dequantize(moved, n, products=True), y + change, rtol=1e-4, atol=1e-5)
