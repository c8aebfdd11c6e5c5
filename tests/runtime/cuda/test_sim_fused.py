"""Kernels that fuse steps of generation give what those of single steps give, and `kernels/reference.py`."""

from __future__ import annotations

import numpy as np
import pytest

from quantkit.archs.common import blocks
from quantkit.runtime.blocks import float_ops
from quantkit.runtime.kernels import kv_rounding, reference
from quantkit.runtime.kernels.cuda import activations, attention, elementwise, fused
from tests.runtime.cuda.conftest import Run

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::RuntimeWarning")]
CLOSE = {"rtol": 2e-6, "atol": 1e-6}


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def empty_bytes(n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return np.full(n, 99, np.int8), np.full(n // 32, np.nan, np.float32), np.full(n // 16, np.nan, np.float32)


def check_bytes(run: Run, x: np.ndarray, result: tuple[np.ndarray, ...]) -> None:
    """They are those of `quantize`."""
    right = empty_bytes(x.size)
    run(activations.quantize(), -(-x.size // activations.THREADS), activations.THREADS, x.reshape(-1), x.size, *right)
    for mine, other in zip(result, right):
        np.testing.assert_array_equal(mine, other)


@pytest.mark.parametrize("adds", [0, 1])
@pytest.mark.parametrize(("n", "threads"), [(32, 32), (288, 96), (288, 32)])
def test_sum_norm_and_bytes(run: Run, n: int, threads: int, adds: int, monkeypatch) -> None:
    """Where the threads have all columns at once, and where they do not; `norm_threads` is the former up to 4096."""
    assert (fused.norm_threads(n), fused.norm_loads(n)) == (-(-n // 128) * 32, 1)
    monkeypatch.setattr(fused, "NORM_THREADS", threads)
    assert fused.norm_threads(n) == threads
    x, added, weight = normal(n), normal(n, seed=1), normal(n, seed=2)
    x[:32] = 0
    added[:32] = 0  # a run whose scale is 0
    total, y = np.zeros(n, np.float32), np.zeros(n, np.float32)
    result = empty_bytes(n)
    words = result[0].view(np.int32)
    run(fused.add_norm(fused.norm_loads(n)), 1, threads, x, added, adds, weight, n, np.float32(1e-5), total, y, words,
        *result[1:])  # fmt: skip
    np.testing.assert_array_equal(total, x + added if adds else x)
    right = np.zeros((1, n), np.float32)
    reference.rms_norm(total[None], weight, np.float32(1e-5), right)
    np.testing.assert_allclose(y, right[0], **CLOSE)
    check_bytes(run, y, result)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_so(run: Run, bad: float) -> None:
    """A run of 32 with such a number has such a scale, wherever the number is; other runs are as without."""
    for place in (0, 37, 63):
        x = normal(96)
        right = empty_bytes(96)
        run(activations.quantize(), 1, activations.THREADS, x, x.size, *right)
        x[place] = bad
        result = empty_bytes(96)
        run(activations.quantize(), 1, activations.THREADS, x, x.size, *result)
        y, of_norm, ones = np.zeros(96, np.float32), empty_bytes(96), np.ones(96, np.float32)
        run(fused.add_norm(1), 1, 32, x, x, 0, ones, 96, np.float32(1e-5), np.zeros(96, np.float32), y,
            of_norm[0].view(np.int32), *of_norm[1:])  # fmt: skip
        its_run, others = place // 32, np.arange(3) != place // 32
        for _, scales, sums in (result, of_norm):
            assert not np.isfinite(scales[its_run])
            assert not np.isfinite(sums.reshape(3, 2)[its_run]).any()
        np.testing.assert_array_equal(result[1][others], right[1][others])
        np.testing.assert_array_equal(result[0].reshape(3, 32)[others], right[0].reshape(3, 32)[others])


@pytest.mark.parametrize("name", elementwise.ACTIVATIONS)
def test_activations_and_bytes(run: Run, name: str) -> None:
    gate, up = 4 * normal(352), 5 * normal(352, seed=1)
    right, result = gate.copy(), empty_bytes(352)
    float_ops.ACTIVATIONS[name](right[None], up[None])
    blocks_of_threads = -(-352 // fused.THREADS)
    run(fused.activate(name), blocks_of_threads, fused.THREADS, gate, up, gate.size, *result)
    np.testing.assert_allclose(gate, right, rtol=2e-6, atol=2e-6)
    check_bytes(run, gate, result)


@pytest.mark.parametrize(
    ("kinds", "heads", "dims", "style", "rotated", "normed"),
    [
        (("f16", "q8_0"), (4, 2), (64, 32), "neox", 64, True),
        (("f32", "bf16"), (3, 1), (40, 64), "norm", 16, False),
        (("q8_0", "f32"), (2, 2), (96, 96), "neox", 0, False),
    ],
)
def test_rope_and_caches(run: Run, kinds, heads, dims, style, rotated, normed) -> None:
    """Queries are rotated, and the caches get row 5 of each head; all others stay as they are."""
    n_ctx, position, (q_heads, kv_heads), (dim_k, dim_v) = 7, 5, heads, dims
    q, k, v = normal(1, q_heads * dim_k), normal(1, kv_heads * dim_k, seed=1), normal(kv_heads, dim_v, seed=2)
    weights = normal(dim_k, seed=3), normal(dim_k, seed=4)
    right_q, right_k = q.copy(), k.copy()
    if normed:
        for x, weight in zip((right_q, right_k), weights):
            rows, before = x.reshape(-1, dim_k), x.reshape(-1, dim_k).copy()
            reference.rms_norm(before, weight, np.float32(1e-6), rows)
    cos = sin = np.zeros(1, np.float32)
    if rotated:
        tables = float_ops.rope_tables(blocks.Rope(dim=rotated, base=10000.0, style=style), 8)
        cos, sin = (table.reshape(-1).copy() for table in tables)
        for x in (right_q, right_k):
            float_ops.apply_rope(x, style, dim_k, tables, np.array([position]), 1)
    rows = [kv_rounding.encode(kind, x.reshape(kv_heads, -1)) for kind, x in zip(kinds, (right_k, v))]
    caches = [np.full((kv_heads, n_ctx, r.shape[1]), 170, np.uint8) for r in rows]
    pairs = rotated // 2
    step, stride = (2, 1) if style == "norm" else (1, pairs)
    run(fused.rope_append(*kinds, *dims, normed), q_heads + 2 * kv_heads, fused.WARP, q.reshape(-1), k.reshape(-1),
        v.reshape(-1), *weights, np.float32(1e-6), q_heads, pairs, cos, sin, np.array([position], np.int32), step,
        stride, n_ctx, *(r.shape[1] for r in rows), *(c.reshape(-1) for c in caches))  # fmt: skip
    np.testing.assert_allclose(q, right_q, **CLOSE)
    for kind, cache, row, dim in zip(kinds, caches, rows, dims):
        assert (np.delete(cache, position, axis=1) == 170).all()
        got, right = (decoded(kind, x, dim) for x in (cache[:, position], row))
        np.testing.assert_allclose(got, right, rtol=1e-2, atol=1e-2 if kind == "q8_0" else 1e-6)


def decoded(kind: str, rows: np.ndarray, dim: int) -> np.ndarray:
    from quantkit import types

    return types.get(kind).dequantize(np.ascontiguousarray(rows), dim, threads=1)


@pytest.mark.parametrize(("dim", "splits"), [(32, 1), (96, 3)])
def test_merged_heads_and_bytes(run: Run, dim: int, splits: int) -> None:
    heads, kv_heads, group = 4, 2, 2
    top, total = normal(splits, heads), np.abs(normal(splits, heads, seed=1)) + 1
    acc = normal(splits, heads, dim, seed=2)
    result, out = empty_bytes(heads * dim), np.zeros(heads * dim, np.float32)
    numbers = splits, heads, group, 1, dim
    run(attention.merge(False, True), (group, kv_heads), attention.THREADS, top.reshape(-1), total.reshape(-1),
        acc.reshape(-1), *numbers, np.zeros(1, np.float32), out, *result)  # fmt: skip
    portions = np.exp(top - top.max(0))
    right = (portions[..., None] * acc).sum(0) / (portions * total).sum(0)[:, None]
    np.testing.assert_allclose(out.reshape(heads, dim), right, rtol=1e-5, atol=1e-6)
    check_bytes(run, out, result)
