"""Rounding by second moments for types whose codes stand for groups: fields, neighbours, the error never rises."""

from __future__ import annotations

import numpy as np
import pytest

from quantkit import types
from quantkit.types.families.scale_bits import scale_of, write_numbers
from quantkit.types.refine import feedback, prepare, sub_block_scales
from quantkit.types.refine.moments import PANEL, TILE_ROWS
from quantkit.types.refine.sub_block_scales import NONE
from quantkit.types.refine.vector_codes import NEAR, descend, feed_back, nearest_points, read_fields, write_fields
from tests.types.data import second_moments, tame_bytes
from tests.types.refine.test_feedback import factored
from tests.types.refine.test_scalar_codes import errors

GRIDS = ("iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s")
SHIFTED = ("iq1_s", "iq1_m", "iq2_kl")  # a code's values hold the shift; pairs
TRELLISES = ("iq1_kt", "iq2_kt", "iq3_kt", "iq4_kt")


def fields_of(kind, data: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    codes, rows = kind.vector_codes, len(data)
    points = np.empty((rows, n // codes.values.shape[2]), np.int64)
    signs, tables = np.ones((rows, n), np.float32), np.zeros((rows, n // 32), np.int64)
    read_fields(data, codes, points, signs, tables)
    return points, signs, tables


@pytest.mark.parametrize("rank", [40, 2000])
@pytest.mark.parametrize("name", [*GRIDS, *TRELLISES, *SHIFTED, "iq3_s_r4"])
def test_the_error_falls(name: str, rank: int) -> None:
    t = types.get(name)
    h = second_moments(0, 512, rank)
    x = np.random.default_rng(1).standard_normal((12, 512)).astype(np.float32)
    before = t.quantize(x, np.diagonal(h))
    after = t.quantize(x, second_moments=h)
    assert np.array_equal(after, t.quantize(x, second_moments=h, threads=1))
    a, b = errors(t, x, before, h), errors(t, x, after, h)
    assert (b <= a * (1 + 1e-5)).all()
    assert b.sum() < 0.9 * a.sum()


@pytest.mark.parametrize("name", ["iq3_kt", "iq2_xxs", "iq3_s", "iq2_kl"])
def test_the_best_scale_of_a_sub_block_is_taken(name: str) -> None:
    """Among its own and the two next to it: the one whose choice of points has the least error."""
    t, n, rows = types.get(name), 256, 16
    number, codes = scale_of(t), t.vector_codes
    size = codes.values.shape[2]
    moments = prepare(second_moments(0, n, 400), n)
    factors, (a, d) = feedback.factors(moments, size), factored(moments, size)
    x = np.random.default_rng(8).standard_normal((rows, n)).astype(np.float32)
    data = t.quantize(x, moments.importance)
    x *= np.float32(1.1)  # so that larger scales suit some sub-blocks better
    places = sub_block_scales.read(t, number, data, t.dequantize(data, n)).places
    flips = 0 if not len(codes.sign_bits) else 2 if (codes.sign_bits < 0).any() else 1

    def chosen(numbers: sub_block_scales.Numbers, change: int) -> tuple[np.ndarray, np.ndarray]:
        """Sums of d^T D d of the first sub-block of each row, and the places of its scale."""
        moved, own = data.copy(), places.copy()
        other = np.clip(own[:, 0] + change, 0, len(number.values) - 1)
        own[:, 0] = np.where(number.values[other] * number.values[own[:, 0]] > 0, other, own[:, 0])
        write_numbers(number.codes[own], number, moved)
        y = t.dequantize(moved, n)
        points, signs, tables = fields_of(t, moved, n)
        tables = np.repeat(tables, 32 // size, axis=1)
        values = (codes.values[tables, points].reshape(rows, n) * signs).reshape(rows, -1, size)
        scales = ((y.reshape(values.shape) * values).sum(2) / (values * values).sum(2)).astype(np.float32)
        e = moments.padded_zeros(rows)
        e[:rows, :n] = y - x
        feed_back(e, points, signs, tables, scales, numbers, codes, factors, rows, flips)
        apart = (e[:rows, :n] @ (np.eye(n) + a))[:, : number.size]
        return (apart @ d[: number.size, : number.size] * apart).sum(axis=1), numbers.places[:, :1]

    alone = {change: chosen(sub_block_scales.NONE, change)[0] for change in (-1, 0, 1)}
    numbers = sub_block_scales.read(t, number, data, t.dequantize(data, n))
    found, taken = chosen(numbers, 0)
    least = np.min(list(alone.values()), axis=0)
    np.testing.assert_allclose(found, least, rtol=1e-3)
    assert (taken != places[:, :1]).any()


@pytest.mark.parametrize("name", [*GRIDS, *TRELLISES, *SHIFTED])
def test_fields_are_those_that_the_decoder_reads(name: str) -> None:
    """Random points and signs, written and decoded: a scale times the codebook's values and the signs."""
    t = types.get(name)
    codes, rng = t.vector_codes, np.random.default_rng(2)
    size = codes.values.shape[2]
    data = t.quantize(rng.standard_normal((3, 512)).astype(np.float32), np.ones(512, np.float32))
    points, signs, tables = fields_of(t, data, 512)
    y = t.dequantize(data, 512)
    unchanged = data.copy()
    write_fields(unchanged, codes, points, signs)
    assert np.array_equal(unchanged, data)
    expected = signs * codes.values[np.repeat(tables, 32 // size, 1), points].reshape(3, 512)
    scales = (y.reshape(-1, 32) * expected.reshape(-1, 32)).sum(1) / (expected.reshape(-1, 32) ** 2).sum(1)
    if name not in ("iq2_xs", "iq2_s", "iq1_m"):  # whose sub-blocks have 16 elements
        np.testing.assert_allclose(y.reshape(-1, 32), scales[:, None] * expected.reshape(-1, 32), rtol=1e-4, atol=1e-6)
    wanted = rng.integers(0, codes.values.shape[1], points.shape)
    flipped = signs.copy()
    if len(codes.sign_bits):
        flipped = np.float32(rng.choice([-1, 1], signs.shape))
        if (codes.sign_bits < 0).any():
            flipped.reshape(-1, 8)[:, 7] = flipped.reshape(-1, 8)[:, :7].prod(1)
    write_fields(data, codes, wanted, flipped)
    found = fields_of(t, data, 512)
    assert np.array_equal(found[0], wanted)
    assert np.array_equal(found[1], flipped)
    assert np.array_equal(found[2], tables)


@pytest.mark.parametrize("name", ["iq1_s_r4", "iq1_m_r4"])
def test_fields_of_four_rows_taken_apart(name: str) -> None:
    """Points of rows apart, written at random, put together and decoded: a scale times the codebook's values."""
    t, n, rng = types.get(name), 96, np.random.default_rng(8)
    found = tame_bytes(t, rng, 8, n)
    rows = t.rows_apart(found)
    assert np.array_equal(t.rows_together(rows), found)
    codes = t.vector_codes
    wanted, signs = rng.integers(0, codes.values.shape[1], (8, n // 8)), np.ones((8, n), np.float32)
    before = fields_of(t, rows, n)
    write_fields(rows, codes, wanted, signs)
    after = fields_of(t, rows, n)
    assert np.array_equal(after[0], wanted)
    assert np.array_equal(after[2], before[2])
    y = t.dequantize(t.rows_together(rows), n).reshape(-1, 8).astype(np.float64)
    values = codes.values[np.repeat(after[2], 4, axis=1), wanted].reshape(-1, 8).astype(np.float64)
    scales = (y * values).sum(1) / (values**2).sum(1)
    np.testing.assert_allclose(y, scales[:, None] * values, rtol=1e-4, atol=1e-9)
    assert np.mean(scales != 0) > 0.8


def test_nearest_points_are_those_of_sorting() -> None:
    values = np.random.default_rng(3).integers(-126, 127, (2, 1500, 4)).astype(np.int8)
    near, near_values = nearest_points(values, NEAR)
    for table in range(2):
        wide = values[table].astype(np.int64)
        distances = ((wide[:, None] - wide) ** 2).sum(2)
        np.fill_diagonal(distances, 1 << 40)
        order = np.argsort(distances, axis=1, kind="stable")[:, :NEAR]
        assert np.array_equal(near[table], order)
        assert np.array_equal(near_values[table].transpose(0, 2, 1), values[table][order])


@pytest.mark.parametrize("name", ["iq2_xxs", "iq3_s", "iq2_kt", "iq4_kt", "iq1_s", "iq1_m", "iq2_kl"])
def test_one_sweep_against_the_plain_formula(name: str) -> None:
    """Every move of the first row, with the error computed anew for each of all neighbours and signs in float64."""
    t, n = types.get(name), 256
    codes, h = t.vector_codes, second_moments(0, n, 400)
    prepared = prepare(h, n)
    x = np.random.default_rng(4).standard_normal((1, n)).astype(np.float32)
    data = t.quantize(x, np.diagonal(h))
    points, signs, tables = fields_of(t, data, n)
    size = codes.values.shape[2]
    y = t.dequantize(data, n)
    tables = np.repeat(tables, 32 // size, axis=1)
    values = codes.values[tables, points].reshape(1, n) * signs
    scales = (y * values).reshape(1, -1, size).sum(2) / (values * values).reshape(1, -1, size).sum(2)
    scales = scales.astype(np.float32)
    damped = prepared.panels.transpose(1, 0, 2).reshape(n, -1)[:, :n].astype(np.float64)
    e = np.zeros((TILE_ROWS, n), np.float32)
    e[0] = (y - x)[0]
    flips = 0 if not len(codes.sign_bits) else 2 if (codes.sign_bits < 0).any() else 1
    mine = [np.array(a) for a in (e[0].astype(np.float64), points[0], signs[0])]
    descend(e, points, signs, tables, scales, NONE, codes, prepared.panels, 1, flips, 1)
    plain_sweep(*mine, tables[0], scales[0], codes, damped, flips)
    assert np.mean(mine[1] != points[0]) < 0.02  # a rounding error may decide between two
    assert np.mean(mine[2] != signs[0]) < 0.02
    a, b = (v @ damped @ v for v in (mine[0], e[0].astype(np.float64)))
    assert abs(a - b) < 0.01 * a


def plain_sweep(e, points, signs, tables, scales, codes, h, flips) -> None:
    """What `descend` does with one row in one sweep, in place."""
    size, n = codes.values.shape[2], len(e)

    def change(elements: np.ndarray, step: np.ndarray) -> float:
        moved = e.copy()
        moved[elements] += step
        return moved @ h @ moved - e @ h @ e

    for panel in range(0, n, PANEL):
        for at in range(panel, panel + PANEL, size):
            group, elements = at // size, np.arange(at, at + size)
            own = codes.values[tables[group], points[group]].astype(np.float64)
            near = codes.near_values[tables[group], points[group]].T.astype(np.float64)
            steps = scales[group] * signs[elements] * (near - own)
            gains = [change(elements, step) for step in steps]
            best = int(np.argmin(gains))
            if gains[best] < 0:
                e[elements] += steps[best]
                points[group] = codes.near[tables[group], points[group], best]
        for at in range(panel, panel + PANEL, 8) if flips else ():
            elements = np.arange(at, at + 8)
            own = elements // size
            values = codes.values[tables[own], points[own], elements % size].astype(np.float64)
            steps = -2 * scales[own] * signs[elements] * values
            pairs = [[i] for i in range(8)] if flips == 1 else [[i, k] for i in range(8) for k in range(i)]
            gains = [change(elements[pair], steps[pair]) for pair in pairs]
            best = int(np.argmin(gains))
            if gains[best] < 0:
                e[elements[pairs[best]]] += steps[pairs[best]]
                signs[elements[pairs[best]]] *= -1
