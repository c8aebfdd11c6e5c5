"""The operations between the matrix products of a forward pass, against `kernels/reference.py` and formulas."""

from __future__ import annotations

import numpy as np
import pytest

from quantkit.archs.common import blocks
from quantkit.runtime.blocks import float_ops
from quantkit.runtime.kernels import reference
from quantkit.runtime.kernels.cuda import delta, elementwise, mamba2, routing
from tests.runtime.cuda.conftest import Run

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::RuntimeWarning")]
THREADS = elementwise.THREADS
CLOSE = {"rtol": 2e-6, "atol": 1e-6}


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize(("rows", "n"), [(3, 40), (1, 300)])
def test_rms_norm(run: Run, rows: int, n: int) -> None:
    x, weight = normal(rows, n), normal(n, seed=1)
    out, right = np.zeros_like(x), np.zeros_like(x)
    run(elementwise.rms_norm(), rows, THREADS, x.reshape(-1), weight, n, np.float32(1e-5), out.reshape(-1))
    reference.rms_norm(x, weight, np.float32(1e-5), right)
    np.testing.assert_allclose(out, right, **CLOSE)


@pytest.mark.parametrize("name", elementwise.ACTIVATIONS)
def test_activations_of_feed_forwards(run: Run, name: str) -> None:
    gate, up = 4 * normal(3, 41), 5 * normal(3, 41, seed=1)
    right = gate.copy()
    float_ops.ACTIVATIONS[name](right, up)
    run(elementwise.activate(name), 1, THREADS, gate.reshape(-1), up.reshape(-1), gate.size)
    np.testing.assert_allclose(gate, right, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("name", elementwise.ACTIVATIONS)
def test_rounded_activations_are_those_of_the_other_kernel(run: Run, name: str) -> None:
    """As bfloat16, two in a word."""
    import torch

    gate, up = normal(5, 40) * 4, normal(5, 40, seed=1)
    out = np.zeros(100, np.uint32)
    run(elementwise.activate_rounded(name), 1, THREADS, gate.reshape(-1), up.reshape(-1), gate.size, out)
    run(elementwise.activate(name), 1, THREADS, gate.reshape(-1), up.reshape(-1), gate.size)
    right = torch.from_numpy(gate).bfloat16().view(torch.int16).numpy()
    np.testing.assert_array_equal(out.view(np.int16), right.reshape(-1))


def test_sums_of_rows(run: Run) -> None:
    x, bias = normal(3, 20), normal(20, seed=1)
    right = x + bias
    run(elementwise.add(), 1, THREADS, x.reshape(-1), bias, 20, x.size)
    np.testing.assert_array_equal(x, right)
    parts, weights, out = normal(2, 3, 20), normal(2, 3, seed=2), np.zeros((2, 20), np.float32)
    run(elementwise.mix(), 1, THREADS, parts.reshape(-1), weights.reshape(-1), 3, 20, 2, out.reshape(-1))
    np.testing.assert_allclose(out, np.einsum("tj,tjn->tn", weights, parts), **CLOSE)


@pytest.mark.parametrize(("style", "dim"), [("norm", 16), ("neox", 16), ("neox", 8)])
def test_rope(run: Run, style: str, dim: int) -> None:
    """Of whole heads, and of their first 8 elements of 16."""
    rope = blocks.Rope(dim=dim, base=10000.0, style=style)
    tables = float_ops.rope_tables(rope, 20)
    x, positions = normal(3, 2 * 16), np.array([7, 8, 19], np.int64)
    right = x.copy()
    float_ops.apply_rope(right, style, 16, tables, positions, 1)
    step, stride = (2, 1) if style == "norm" else (1, dim // 2)
    run(elementwise.rope(), 1, THREADS, x.reshape(-1), 2, 16, dim // 2, tables[0].reshape(-1).copy(),
        tables[1].reshape(-1).copy(), positions.astype(np.int32), step, stride, 3)  # fmt: skip
    np.testing.assert_allclose(x, right, **CLOSE)


def test_best_logit(run: Run) -> None:
    logits = normal(3, 700)
    logits[0, [5, 650]] = 9  # the first of equal ones
    logits[1, 699] = 9
    logits[2, 300] = np.nan
    best = np.zeros(3, np.int32)
    run(elementwise.argmax(), 3, THREADS, logits.reshape(-1), 700, best)
    assert best.tolist() == [5, 699, 300]


def test_sampling(run: Run) -> None:
    """The share of numbers u of [0, 1) that choose an element is its probability."""
    logits, rows = normal(1, 300, seed=3), 12
    u = ((np.arange(rows) + 0.5) / rows).astype(np.float32)
    chosen = np.zeros(rows, np.int32)
    repeated = np.repeat(logits, rows, axis=0)
    run(elementwise.sample(), rows, THREADS, repeated.reshape(-1), 300, np.float32(2), u, chosen)
    weights = np.exp(2 * logits[0].astype(np.float64))
    right = np.searchsorted(np.cumsum(weights) / weights.sum(), u, side="right")
    np.testing.assert_array_equal(chosen, right)


@pytest.mark.parametrize(
    ("sigmoid", "biased", "groups", "groups_used", "normalise"),
    [(False, False, 1, 1, True), (True, True, 4, 2, True), (True, False, 4, 3, False), (False, True, 1, 1, False)],
)
def test_routing(run: Run, sigmoid: bool, biased: bool, groups: int, groups_used: int, normalise: bool) -> None:
    experts, used, tokens = 40, 4, 3
    logits, bias = normal(tokens, experts), normal(experts, seed=1)
    logits[1, [3, 4]] = 5  # of equal ones the first
    bias[[3, 4]] = 0
    chosen, weights = np.zeros((tokens, used), np.int32), np.zeros((tokens, used), np.float32)
    run(routing.route(sigmoid, biased), tokens, routing.WARP, logits.reshape(-1), bias, experts, groups, groups_used,
        used, int(normalise), np.float32(2.5), chosen.reshape(-1), weights.reshape(-1))  # fmt: skip
    for t in range(tokens):
        right, shares = np.zeros(used, np.int64), np.zeros(used, np.float32)
        reference.route(
            logits[t].copy(), bias if biased else bias[:0], sigmoid, groups, groups_used, used, used, np.float32(0),
            normalise, np.float32(2.5), right, shares,
        )  # fmt: skip
        np.testing.assert_array_equal(chosen[t], right)
        np.testing.assert_allclose(weights[t], shares, **CLOSE)


@pytest.mark.parametrize("by_rows", [False, True])
def test_delta_rule(run: Run, by_rows: bool) -> None:
    """Two tokens and then one give what three formulas do, and the state after them."""
    heads, dk, dv, tokens = 2, 6, 9, 3
    q, k, v = normal(tokens, heads, dk), normal(tokens, heads, dk, seed=1), normal(tokens, heads, dv, seed=2)
    g = -np.abs(normal(tokens, heads, dk if by_rows else 1, seed=3))
    beta = np.abs(normal(tokens, heads, seed=4)) % 1
    start = normal(heads, dk, dv, seed=5)
    state, out = start.copy(), np.zeros((tokens, heads, dv), np.float32)
    for a, b in ((0, 2), (2, 3)):
        each = [x[a:b].reshape(-1).copy() for x in (q, k, v, g, beta)]
        part = np.zeros((b - a) * heads * dv, np.float32)
        run(delta.step(by_rows), (1, heads), delta.THREADS, *each, heads, dk, dv, b - a, state.reshape(-1), part)
        out[a:b] = part.reshape(b - a, heads, dv)
    right = start.astype(np.float64)
    for t in range(tokens):
        for h in range(heads):
            right[h] *= np.exp(g[t, h])[:, None]
            right[h] += np.outer(k[t, h], beta[t, h] * (v[t, h] - right[h].T @ k[t, h]))
            np.testing.assert_allclose(out[t, h], right[h].T @ q[t, h], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(state, right, rtol=1e-5, atol=1e-5)


def test_state_space(run: Run) -> None:
    """Two tokens and then one give what the formulas do, and the state after them; three heads share B and C."""
    heads, groups, dk, dv, tokens = 6, 2, 5, 7, 3
    x = normal(tokens, heads * dv + 2 * groups * dk)
    steps, a, skip = np.abs(normal(tokens, heads, seed=1)), -np.abs(normal(heads, seed=2)), normal(heads, seed=3)
    start = normal(heads, dk, dv, seed=4)
    state, out = start.copy(), np.zeros((tokens, heads, dv), np.float32)
    for first, last in ((0, 2), (2, 3)):
        part = np.zeros((last - first) * heads * dv, np.float32)
        each = [rows[first:last].reshape(-1).copy() for rows in (x, steps)]
        sizes = heads, groups, dk, dv, last - first
        run(mamba2.step(), (1, heads), mamba2.THREADS, *each, a, skip, *sizes, state.reshape(-1), part)
        out[first:last] = part.reshape(-1, heads, dv)
    right = start.astype(np.float64)
    for t in range(tokens):
        u, b, c = np.split(x[t].astype(np.float64), [heads * dv, heads * dv + groups * dk])
        u, b, c = u.reshape(heads, dv), b.reshape(groups, dk), c.reshape(groups, dk)
        for h in range(heads):
            right[h] = right[h] * np.exp(a[h] * steps[t, h]) + np.outer(b[h // 3], steps[t, h] * u[h])
            np.testing.assert_allclose(out[t, h], right[h].T @ c[h // 3] + skip[h] * u[h], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(state, right, rtol=1e-5, atol=1e-5)
