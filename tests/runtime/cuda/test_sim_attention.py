"""Attention over a cache against the formula in float64, and rows of caches against
`runtime/kernels/kv_rounding.py`."""

from __future__ import annotations

import numpy as np
import pytest

from quantkit import types
from quantkit.errors import UnsupportedError
from quantkit.runtime.kernels import kv_rounding
from quantkit.runtime.kernels.cuda import attention, decode_attention
from tests.runtime.cuda.conftest import Run

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::RuntimeWarning")]


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def cache_of(kind: str, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float32[heads, n_ctx, dim] encoded in a type, and the decoded values."""
    packed = kv_rounding.encode(kind, rows.reshape(-1, rows.shape[-1]))
    return packed, types.get(kind).dequantize(packed, rows.shape[-1], threads=1).reshape(rows.shape)


def formula(q, k, v, positions, window, scale, sinks):
    """float64[tokens, heads, dim_v] of q [tokens, heads, dim_k], k, v [kv heads, n_ctx, dim]."""
    tokens, heads, _ = q.shape
    group = heads // len(k)
    out = np.zeros((tokens, heads, v.shape[-1]))
    for t in range(tokens):
        seen = slice(max(0, positions[t] + 1 - window), positions[t] + 1)
        for h in range(heads):
            scores = k[h // group, seen].astype(np.float64) @ q[t, h].astype(np.float64) * scale
            weights = np.exp(scores - scores.max())
            total = weights.sum() + (np.exp(sinks[h] - scores.max()) if sinks is not None else 0)
            out[t, h] = weights @ v[h // group, seen] / total
    return out


def attended(run: Run, q, k, v, k_kind, v_kind, dims, positions, window, scale, shares, sinks, kv_heads, n_ctx, latent):
    """The same by `attend`, or by `attend_one` where it can, and `merge`."""
    tokens, heads, _ = q.shape
    group, (dim_k, dim_v) = heads // kv_heads, dims
    rows, for_decoding = tokens * group, tokens == 1 and decode_attention.suits(k_kind, v_kind, dims, heads // kv_heads)
    top, total = (np.zeros(shares * kv_heads * rows, np.float32) for _ in range(2))
    acc = np.zeros(shares * kv_heads * rows * dim_v, np.float32)
    k_bytes, v_bytes = k.size // kv_heads // n_ctx, v.size // kv_heads // n_ctx
    cache = k.reshape(-1), v.reshape(-1), k_bytes, v_bytes, n_ctx
    if for_decoding:
        threads = decode_attention.threads_of(group)
        run(decode_attention.attend_one(k_kind, v_kind, dim_k, group), (shares, 1, kv_heads), threads, q.reshape(-1),
            *cache, positions, window, np.float32(scale), shares, top, total, acc)  # fmt: skip
    else:
        blocks = (shares, -(-rows // attention.ROWS), kv_heads)
        run(attention.attend(k_kind, v_kind, dim_k, dim_v, latent), blocks, attention.threads_of(dim_v), q.reshape(-1),
            *cache, heads, group, tokens, positions, window, np.float32(scale), shares, top, total, acc)  # fmt: skip
    out = np.zeros((tokens, heads, dim_v), np.float32)
    sink = np.zeros(1, np.float32) if sinks is None else sinks
    run(attention.merge(sinks is not None), (rows, kv_heads), attention.THREADS, top, total, acc, shares, heads,
        group, tokens, dim_v, sink, out.reshape(-1), np.zeros(1, np.int8), *np.zeros((2, 1), np.float32))  # fmt: skip
    return out


def check(run: Run, kinds, heads, dims, tokens, position, window, shares, sinks) -> None:
    n_ctx = position + tokens + 1
    q = normal(tokens, heads[0], dims[0])
    (k, k_values), (v, v_values) = (
        cache_of(kind, normal(heads[1], n_ctx, dim, seed=i)) for i, (kind, dim) in enumerate(zip(kinds, dims), 1)
    )
    positions = (position + np.arange(tokens)).astype(np.int32)
    sink = normal(heads[0], seed=9) if sinks else None
    right = formula(q, k_values, v_values, positions, window, 0.3, sink)
    out = attended(run, q, k, v, *kinds, dims, positions, window, 0.3, shares, sink, heads[1], n_ctx, False)
    np.testing.assert_allclose(out, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("kinds", "heads", "tokens", "position", "window", "shares", "sinks"),
    [
        (("f32", "f32"), (2, 1), 1, 0, 100, 1, False),
        (("f16", "f16"), (6, 2), 3, 40, 100, 3, False),
        (("q8_0", "q4_0"), (4, 4), 1, 9, 100, 2, True),
        (("bf16", "q8_0"), (3, 1), 5, 30, 7, 1, True),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else str(value),
)
def test_attention(run: Run, kinds, heads, tokens, position, window, shares, sinks) -> None:
    """Decoding and prompts, grouped heads, windows, sinks, shares of the keys that may be empty."""
    check(run, kinds, heads, (32, 64), tokens, position, window, shares, sinks)


@pytest.mark.parametrize(
    ("kinds", "heads", "dim", "position", "window", "shares", "sinks"),
    [
        (("f16", "f16"), (6, 2), 64, 21, 100, 3, False),
        (("q8_0", "bf16"), (4, 4), 128, 0, 100, 2, True),
        (("f32", "q8_0"), (2, 1), 64, 30, 7, 5, False),
        (("bf16", "f32"), (8, 1), 256, 5, 100, 1, False),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else str(value),
)
def test_attention_of_one_token(run: Run, kinds, heads, dim, position, window, shares, sinks) -> None:
    """By the kernels for decoding: keys that fill no whole warp, windows, sinks, shares of the keys that are empty."""
    assert decode_attention.suits(*kinds, (dim, dim), heads[0] // heads[1])
    check(run, kinds, heads, (dim, dim), 1, position, window, shares, sinks)


def test_latent_attention(run: Run) -> None:
    """Values are the first elements of the one key that all heads share."""
    q, n_ctx = normal(2, 9, 96), 6
    k, values = cache_of("q8_0", normal(1, n_ctx, 96, seed=1))
    positions = np.array([3, 4], np.int32)
    right = formula(q, values, values[..., :64], positions, 100, 0.1, None)
    out = attended(run, q, k, k, "q8_0", "q8_0", (96, 64), positions, 100, 0.1, 2, None, 1, n_ctx, True)
    np.testing.assert_allclose(out, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16", "q8_0"])
def test_rows_of_caches(run: Run, kind: str) -> None:
    tokens, heads, dim, n_ctx = 2, 3, 64, 5
    x, positions = 3 * normal(tokens, heads, dim), np.array([1, 4], np.int32)
    x[0, 0, :32] = 0
    row_bytes = types.get(kind).row_bytes(dim)
    cache = np.full((heads, n_ctx, row_bytes), 7, np.uint8)
    blocks = -(-tokens * heads * (dim // 32) // (attention.THREADS // 32))
    run(attention.append(kind), blocks, attention.THREADS, x.reshape(-1), heads, dim, row_bytes, n_ctx, positions,
        tokens, cache.reshape(-1))  # fmt: skip
    right = np.full_like(cache, 7)
    rows = kv_rounding.encode(kind, x.reshape(-1, dim)).reshape(tokens, heads, row_bytes)
    right[:, positions] = rows.transpose(1, 0, 2)
    np.testing.assert_array_equal(cache, right)


def test_attention_without_a_kernel() -> None:
    with pytest.raises(UnsupportedError, match="q4_K; use one of"):
        attention.attend("q4_K", "f16", 256, 128)
    with pytest.raises(UnsupportedError, match="heads of 80 elements in q8_0"):
        attention.attend("q8_0", "f16", 80, 128)
    with pytest.raises(UnsupportedError, match="writes a cache of q4_0"):
        attention.append("q4_0")
