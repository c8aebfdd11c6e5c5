"""Scales chosen with the codes of their sub-blocks: the kernel against plain formulas, and its candidates."""

from __future__ import annotations

import numpy as np
import pytest

from quantkit import types
from quantkit.codegen.jit import kernel
from quantkit.types.families.code_bits import codes_of, write_codes
from quantkit.types.families.scale_bits import minimum_of, read_numbers, scale_of, table_of, write_numbers
from quantkit.types.refine import feedback, prepare, sub_block_scales
from quantkit.types.refine.coded_rows import read_rows
from quantkit.types.refine.moments import PANEL
from quantkit.types.refine.sub_block_search import LANES, Candidates, _weigh, candidates, rungs_of, search
from tests.types.data import second_moments
from tests.types.refine.test_feedback import factored

WITH_TABLES = ["iq2_k", "iq2_ks", "iq3_k", "iq3_ks", "iq4_k", "iq4_ks", "iq5_k", "iq5_ks", "iq6_k"]
WITH_MINIMA = ["q2_K", "q4_K", "q5_K", "q4_1", "q5_1"]
OTHERS = ["q4_0", "q5_0", "q6_0", "q3_K", "q6_K", "iq4_nl", "iq4_xs", "mxfp4"]


@kernel
def run_weigh(x, fed, a, rungs, numbers, errors):
    _weigh(x, fed, a, rungs, Candidates(numbers[0], numbers[1], numbers[2], numbers[3], numbers[4], errors))


@pytest.mark.parametrize("size", [16, 32, 128])
@pytest.mark.parametrize("name", ["q4_0", "iq4_k", "iq5_k"])
def test_weighing_against_the_plain_formula(name: str, size: int) -> None:
    rng, rungs = np.random.default_rng(size), rungs_of(codes_of(types.get(name)).ladder)
    x, fed = rng.standard_normal((2, size)).astype(np.float32)
    a = (0.2 * rng.standard_normal((size, PANEL))).astype(np.float32)
    a[range(size), range(size)] = rng.uniform(0.5, 2, size)
    numbers, errors = np.zeros((5, LANES), np.float32), np.empty((LANES // 32, PANEL, 32), np.float32)
    numbers[0], numbers[1] = rng.uniform(-3, -1, LANES), rng.uniform(2, 6, LANES)
    numbers[:2, :5] *= -1  # a scale of the other sign
    run_weigh(x, fed, a, rungs, numbers, errors)
    for lane, (low, unit, total) in enumerate(numbers[:3].T.astype(np.float64)):
        already, expected = fed.astype(np.float64), 0.0
        for j in range(size):
            own = low + unit * rungs.values - x[j]
            e = own[np.abs(own + already[j]).argmin()]
            expected += a[j, j] * (e + already[j]) ** 2
            already[j + 1 :] += e * a[j, j + 1 : size]
        np.testing.assert_allclose(total, expected, rtol=1e-2)  # a code at a midpoint may go either way
        e = errors[lane // 32, :size, lane % 32].astype(np.float64)
        places = (x + e - low) / unit
        np.testing.assert_allclose(np.abs(places[:, None] - rungs.values).min(axis=1), 0, atol=1e-4)
        d = fed + e + e @ np.triu(a[:, :size], 1)
        np.testing.assert_allclose(total, (d**2 * np.diagonal(a)).sum(), rtol=1e-4)


@pytest.mark.parametrize("name", [*WITH_TABLES, *OTHERS, *WITH_MINIMA])
def test_the_best_candidate_is_taken(name: str) -> None:
    """The sum of D d^2 of each sub-block, of decoded rows in float64, is the least of all scales and tables."""
    t, n = types.get(name), 256
    found, scale, minimum, table = codes_of(t), scale_of(t), minimum_of(t), table_of(t)
    assert (table is not None) == (name in WITH_TABLES)
    assert (minimum is not None) == (name in WITH_MINIMA)
    moments = prepare(second_moments(0, n, 400), n)
    x = np.random.default_rng(7).standard_normal((1, n)).astype(np.float32)
    before = t.quantize(x, moments.importance)
    after = before.copy()
    factors = feedback.factors(moments, 1)
    errors = search(t, found, scale, x, after, read_rows(t, found, x, after, moments), factors)
    written = read_rows(t, found, x, after, moments)
    np.testing.assert_allclose(errors, feedback.row_errors(written.e, factors, 1, 1), rtol=1e-4)
    a, d = factored(moments, 1)
    weights, e = np.diagonal(d), (t.dequantize(after, n, products=True)[0] - x[0]).astype(np.float64)

    places, tried = np.empty((1, n // scale.size), np.int64), candidates(scale, minimum is not None, table is not None)
    read_numbers(before, scale, places)
    places = scale.places[places]
    for s in range(n // scale.size):
        own = slice(s * scale.size, (s + 1) * scale.size)
        fed = e[: own.start] @ a[: own.start]
        got = ((e + fed + e[own] @ np.triu(a[own], own.start))[own] ** 2 * weights[own]).sum()
        costs = []
        for k in range(LANES // (2 if table is not None else 1)):
            if len(tried[0]) > 1:
                place = tried[1][places[0, s], k]
            else:
                place = np.abs(scale.values - scale.values[places[0, s]] * tried[0][0, k]).argmin()
            for flip in (0, 1)[: 1 if table is None else 2]:
                costs.append(cost(t, before, x[0], s, place, flip, fed, a, weights))
        best = min(costs)
        assert got <= best * (1 + 1e-3) if minimum is None else got <= costs[0] * (1 + 1e-3)


def cost(t, before, x, s, place, flip, fed, a, weights) -> float:
    """Sum of D d^2 of sub-block s with another scale and table, codes chosen one after the other."""
    found, scale, table, n = codes_of(t), scale_of(t), table_of(t), len(x)
    data = before.copy()
    codes = np.empty((1, n // scale.size), np.int64)
    read_numbers(data, scale, codes)
    codes[0, s] = scale.codes[place]
    write_numbers(codes, scale, data)
    if flip:
        tables = np.empty_like(codes)
        read_numbers(data, table, tables)
        tables[0, s] ^= 1
        write_numbers(tables, table, data)
    values = []
    for code in found.ladder.rungs:
        write_codes(np.full((1, n), code, np.uint8), found, data)
        values.append(t.dequantize(data, n, products=True)[0])
    values, fed, total = np.array(values), fed.copy(), 0.0
    for j in range(s * scale.size, (s + 1) * scale.size):
        own = values[:, j] - x[j]
        e = own[np.abs(own + fed[j]).argmin()]
        total += weights[j] * (e + fed[j]) ** 2
        fed += e * np.triu(a[None, j], 0)[0]
    return total


@pytest.mark.parametrize("name", [*WITH_TABLES, *OTHERS, *WITH_MINIMA])
def test_candidates(name: str) -> None:
    """The scale itself comes first; the others have its order of magnitude."""
    t = types.get(name)
    scale, minima = scale_of(t), minimum_of(t) is not None
    tried, places = candidates(scale, minima, table_of(t) is not None)
    if len(scale.values) > 256:
        assert tried[0, 0] == 1
        ratios = tried
    else:
        assert np.array_equal(places[:, 0], np.arange(len(places)))
        assert np.array_equal(scale.values[places], tried)
        ratios = tried[scale.values != 0] / scale.values[scale.values != 0, None]
    assert np.isfinite(ratios).all()
    assert (ratios != 0).all()
    assert not minima or (ratios > 0).all()


@pytest.mark.parametrize("name", ["iq4_k", "q4_K", "q4_0"])
def test_rows_of_one_value_and_of_zeros(name: str) -> None:
    t = types.get(name)
    h = second_moments(0, 256, 500)
    x = np.zeros((3, 256), np.float32)
    x[1], x[2] = 0.5, -1e-6
    data = t.quantize(x, second_moments=h)
    y = t.dequantize(data, 256, products=True)
    assert np.isfinite(y).all()
    assert not y[0].any()
    np.testing.assert_allclose(y[1], 0.5, atol=0.05)
    assert (np.abs(y[2]) < 1e-4).all()


def test_the_search_is_compiled_once_for_all_types() -> None:
    """Arguments that some types lack are read-only, as those of the others are: numba compiles per kind of array."""
    minimum = minimum_of(types.get("q4_1"))
    scale = scale_of(types.get("q4_0"))
    assert minimum is not None
    assert scale is not None
    arrays = (sub_block_scales.NONE.values, minimum.values, scale.values, *candidates(scale, False, False))
    assert not any(array.flags.writeable for array in arrays)
