"""Codes moved so that errors vanish along given directions: which bits they are, and what moving them does."""

from __future__ import annotations

import numpy as np
import pytest

from quantkit import types
from quantkit.errors import DataError
from quantkit.types import nudge
from quantkit.types.codes import codes_of, neighbours, step
from tests.types import data, on_cpu

# Types whose elements have codes of their own; what else has a codec and an importance names several elements at once.
SINGLE = ("q4_0", "q4_1", "q5_0", "q5_1", "q6_0", "q2_K", "q3_K", "q4_K", "q5_K", "q6_K", "iq4_nl", "iq4_xs", "mxfp4",
          "iq2_k", "iq3_k", "iq4_k", "iq5_k", "iq6_k", "iq2_ks", "iq3_ks", "iq4_ks", "iq5_ks")  # fmt: skip
TRELLIS = ("iq1_kt", "iq2_kt", "iq3_kt", "iq4_kt")
OTHERS = ("iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq3_xxs", "iq3_s", "iq2_kl", "iq4_kss", "q8_0", "f16", "bf16",
          "iq1_bn", "iq2_bn", "q8_KV")  # fmt: skip
single = pytest.mark.parametrize("name", SINGLE)


def along(n: int, count: int, seed: int = 0) -> np.ndarray:
    """Orthonormal float32[count, n]."""
    drawn = np.random.default_rng(seed).standard_normal((n, count))
    return np.ascontiguousarray(np.linalg.qr(drawn)[0].T, np.float32)


def losses(x, y, weights, v):
    """sum w e^2 and |V e|^2 of each row."""
    e = y.astype(np.float64) - x
    return (weights * e * e).sum(axis=1), ((e @ v.T.astype(np.float64)) ** 2).sum(axis=1)


def test_which_types_nudge():
    assert all(types.get(name).nudges for name in (*SINGLE, *TRELLIS, "iq4_k_r4", "q4_0_r8"))
    assert not any(types.get(name).nudges for name in OTHERS)


@single
def test_a_code_is_one_element(name):
    """Every element moved alone: no other changes, and the new value is the next one on that side."""
    t = types.get(name)
    codes, n = codes_of(t), 2 * t.block_size
    rows = t.quantize(data.rows("gaussian", 1, 3, n), np.ones(n, np.float32))
    y = t.dequantize(rows, n)
    next_rows, last_rows = rows.copy(), rows.copy()
    neighbours(rows, next_rows, last_rows, n, codes)
    above, below = t.dequantize(next_rows, n), t.dequantize(last_rows, n)
    assert ((above - y) * (below - y) <= 0).all()
    assert np.mean(above != below) > 0.9
    for j in (0, 1, 15, t.block_size - 1, t.block_size, n - 1):
        for move, values in ((1, above), (-1, below)):
            moves = np.zeros((3, n), np.int8)
            moves[1, j] = move
            moved = rows.copy()
            step(moved, moves, codes)
            expected = y.copy()
            expected[1, j] = values[1, j]
            assert np.array_equal(t.dequantize(moved, n), expected)


@single
def test_all_values_are_met_in_their_order(name):
    t = types.get(name)
    codes, n = codes_of(t), t.block_size
    row = t.quantize(data.rows("gaussian", 4, 1, n), np.ones(n, np.float32))
    seen = []
    for _ in range(len(codes.above) + 1):
        step(row, np.full((1, n), -1, np.int8), codes)
    for _ in range(len(codes.above)):
        seen.append(t.dequantize(row, n)[0])
        step(row, np.full((1, n), 1, np.int8), codes)
    rising = np.diff(np.array(seen), axis=0)
    assert ((rising >= 0).all(axis=0) | (rising <= 0).all(axis=0)).all()
    assert len(np.unique(np.array(seen)[:, 0])) >= len(codes.above) - (name == "mxfp4")  # which has two zeros


def plain(x, y, above, below, weights, v, strengths):
    """`settle` by its formula, one toggle after the other, in float64."""
    moves = np.zeros(x.shape, int)
    share = weights.sum(dtype=np.float64) / len(v)
    for row in range(len(x)):
        e = y[row].astype(np.float64) - x[row]
        up, down = (values[row].astype(np.float64) - y[row] for values in (above, below))
        s = np.where(up * e < 0, up, np.where(down * e < 0, down, 0))
        side = np.where(up * e < 0, 1, np.where(down * e < 0, -1, 0))
        taken = np.zeros(len(e), bool)
        for t in strengths:

            def total(e, t=t):
                return (weights * e * e).sum() + t * share * ((v @ e) ** 2).sum()

            lowers = [total(e + np.eye(1, len(e), j)[0] * s[j]) < total(e) for j in range(len(e))]
            for j in np.flatnonzero(lowers):
                changed = e.copy()
                changed[j] += s[j]
                if total(changed) < total(e):
                    e, s[j], taken[j] = changed, -s[j], not taken[j]
        moves[row] = np.where(taken, side, 0)
    return moves


@pytest.mark.parametrize("count", [1, 3, 8])
def test_settle_is_its_formula(count):
    t, n = types.get("iq3_k"), 256
    x, weights, v = data.rows("student4", 2, 5, n), data.importance(2, n), along(n, count)
    rows = t.quantize(x, weights)
    next_rows, last_rows = rows.copy(), rows.copy()
    neighbours(rows, next_rows, last_rows, n, codes_of(t))
    y, above, below = (t.dequantize(r, n) for r in (rows, next_rows, last_rows))
    moves = np.empty(x.shape, np.int8)
    nudge.settle(x, y, above, below, weights, v, nudge.STRENGTHS, moves)
    expected = plain(x, y, above, below, weights, v, nudge.STRENGTHS)
    assert np.mean(moves != expected) < 0.002  # float32 against float64 at a near tie
    assert 0 < np.mean(moves != 0) < 0.1


@single
@pytest.mark.parametrize("weighted", [False, True], ids=["none", "importance"])
def test_errors_along_directions_vanish(name, weighted):
    t, n, v = types.get(name), 768, along(768, 4)
    x = data.rows("gaussian", 3, 19, n)
    importance = data.importance(3, n) if weighted else None
    weights = importance if weighted else np.ones(n, np.float32)
    usual = t.quantize(x, importance)
    moved = t.quantize(x, importance, directions=v)
    before, after = (losses(x, t.dequantize(rows, n), weights, v) for rows in (usual, moved))
    assert after[1].sum() < 0.05 * before[1].sum()
    assert after[0].sum() < 1.05 * before[0].sum()
    assert np.array_equal(moved, t.quantize(x, importance, directions=v, threads=1))
    assert np.array_equal(moved[4:7], t.quantize(x[4:7], importance, directions=v))
    assert np.array_equal(usual, t.quantize(x, importance, directions=v[:0]))


@pytest.mark.parametrize("name", ["iq4_k_r4", "q4_0_r8", "q4_k_r4"])
def test_interleaved_types_are_their_rows(name):
    t, n = types.get(name), 512
    x, v = data.rows("student4", 5, 16, n), along(n, 3)
    rows = types.get(t.base).quantize(x, directions=v)
    assert np.array_equal(t.quantize(x, directions=v), t.interleave_rows(rows))


@pytest.mark.parametrize("name", OTHERS)
def test_types_that_cannot_stay_as_they_are(name):
    t, n = types.get(name), 256
    x, importance = data.rows("gaussian", 6, 4, n), data.importance(6, n)
    assert np.array_equal(t.quantize(x, importance), t.quantize(x, importance, directions=along(n, 2)))


@single
def test_edges_stay_finite_and_no_worse(name):
    t, n, v = types.get(name), 768, along(768, 4)
    x = data.rows("gaussian", 8, 7, n)
    x[0], x[1] = 0, 0.25
    x[2, 1:], x[3] = 0, np.float32(1e-41) * np.arange(n)
    x[4] *= np.float32(1e-20)
    x[5, 100] = 3e4
    weights = data.importance(8, n)
    weights[::3] = 0
    usual, moved = (t.dequantize(t.quantize(x, weights, directions=d), n) for d in (None, v))
    assert np.isfinite(moved).all()
    share = weights.sum(dtype=np.float64) / len(v) * float(nudge.STRENGTHS[-1])
    before, after = (error + share * r for error, r in (losses(x, y, weights, v) for y in (usual, moved)))
    assert (after <= before * (1 + 1e-4)).all()


def test_directions_that_do_not_fit_are_refused():
    t, x = types.get("q4_0"), np.zeros((2, 64), np.float32)
    for wrong in (np.zeros((1, 32)), np.zeros(64)):
        with pytest.raises(DataError, match="directions have shape"):
            t.quantize(x, directions=wrong)
    with pytest.raises(DataError, match="must be finite"):
        t.quantize(x, directions=np.full((1, 64), np.nan))


@pytest.mark.parametrize("cpu", ["generic", "haswell"])
def test_the_same_on_another_cpu(cpu):
    names = ["q4_0", "q3_K", "iq4_k", "iq5_ks", "iq4_kt", "iq2_kt"]
    assert on_cpu.run(cpu, "nudge", names) == on_cpu.digests("nudge", names)
