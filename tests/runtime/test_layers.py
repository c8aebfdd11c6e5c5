"""Layers against their formulas in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest

from quantkit.archs.common.blocks import Attention, HParams, Linear, Norm, Rope, Yarn
from quantkit.codegen.jit import kernel
from quantkit.runtime.blocks import float_attention, float_ops
from quantkit.runtime.blocks.spans import Span
from quantkit.runtime.kernels import reference
from quantkit.runtime.kv.cache import Cache


@kernel
def _exp_all(x, out):
    for i in range(x.shape[0]):
        out[i] = reference.exp(x[i])


def test_exp_is_within_two_ulp() -> None:
    x = np.linspace(-87, 88, 200_001, dtype=np.float32)
    out = np.empty_like(x)
    _exp_all(x, out)
    exact = np.exp(x.astype(np.float64))
    assert (np.abs(out - exact) <= 2 * np.spacing(exact.astype(np.float32))).all()
    edge = np.array([-np.inf, -1000, 1000, np.nan], np.float32)
    out = np.empty_like(edge)
    _exp_all(edge, out)
    assert out[0] == out[1] == 0
    assert np.isfinite(out[2])
    assert np.isnan(out[3])


def test_rms_norm(rng: np.random.Generator) -> None:
    x = rng.standard_normal((70, 600), np.float32) * 30
    weight = rng.standard_normal(600, np.float32)
    exact = x / np.sqrt((x.astype(np.float64) ** 2).mean(1, keepdims=True) + 1e-5) * weight
    np.testing.assert_allclose(float_ops.rms_norm(x, weight, 1e-5, 2), exact, rtol=1e-6, atol=1e-6)


def test_swiglu(rng: np.random.Generator) -> None:
    gate, up = rng.standard_normal((2, 70, 600), np.float32) * 20
    exact = gate / (1 + np.exp(-gate.astype(np.float64))) * up
    np.testing.assert_allclose(float_ops.activate("swiglu", gate.copy(), up, 2), exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("style", ["norm", "neox"])
def test_rope_turns_pairs(style: str, rng: np.random.Generator) -> None:
    """As a product of complex numbers; elements beyond the rope's dimensions stay."""
    heads, dim, turned = 3, 20, 16
    x = rng.standard_normal((5, heads * dim), np.float32)
    positions = np.array([0, 7, 3, 11, 4])
    factors = np.linspace(1, 3, turned // 2).astype(np.float32)
    tables = float_ops.rope_tables(Rope(style, turned, 500.0, 0.5), 12, factors)
    y = x.copy()
    float_ops.apply_rope(y, style, dim, tables, positions, 1)
    split = x.reshape(5, heads, dim).astype(np.float64)
    result = y.reshape(5, heads, dim)
    first = slice(0, turned, 2) if style == "norm" else slice(0, turned // 2)
    second = slice(1, turned, 2) if style == "norm" else slice(turned // 2, turned)
    angle = positions[:, None] * 0.5 * 500.0 ** (-np.arange(0, turned, 2) / turned) / factors
    z = (split[..., first] + 1j * split[..., second]) * np.exp(1j * angle)[:, None]
    np.testing.assert_allclose(result[..., first], z.real, atol=1e-6)
    np.testing.assert_allclose(result[..., second], z.imag, atol=1e-6)
    np.testing.assert_array_equal(result[..., turned:], x.reshape(5, heads, dim)[..., turned:])


def test_yarn_is_that_of_transformers() -> None:
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512, "rope_theta": 10000.0}
    config = transformers.LlamaConfig(
        hidden_size=256, num_attention_heads=4, max_position_embeddings=4096, rope_parameters=parameters
    )
    frequencies, size = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
    angle = np.arange(300)[:, None] * frequencies.numpy().astype(np.float64)
    cos, sin = float_ops.rope_tables(Rope("neox", 64, 10000.0, 1 / 8, yarn=Yarn(512)), 300)
    assert size == pytest.approx(1 + 0.1 * math.log(8))
    np.testing.assert_allclose(cos, np.cos(angle) * size, atol=1e-4)
    np.testing.assert_allclose(sin, np.sin(angle) * size, atol=1e-4)


# ------------------------------------------------------------------------------------------------------------ attention


def hparams(heads: int, kv_heads: int, dim_k: int, dim_v: int) -> HParams:
    numbers = {"n_layer": 2, "n_ctx_train": 4096, "n_embd": 64, "n_ff": 64, "n_vocab": 10, "norm_eps": 1e-5}
    shape = {"n_head": heads, "n_head_kv": kv_heads, "head_dim_k": dim_k, "head_dim_v": dim_v}
    return HParams(arch="x", rope=Rope("norm", dim_k, 1e4), **numbers, **shape)


def attention(hp: HParams, window: int | None) -> Attention:
    shape = {"heads": hp.n_head, "kv_heads": hp.n_head_kv, "head_dim_k": hp.head_dim_k, "head_dim_v": hp.head_dim_v}
    names = dict.fromkeys(("q", "k", "v", "out"), Linear("w"))
    return Attention(norm=Norm("n", 1e-5), **names, **shape, scale=0.3, rope=hp.rope, window=window)


def naive_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, part: Attention) -> np.ndarray:
    """The last len(q) of len(k) positions, in float64."""
    past = len(k) - len(q)
    q = q.reshape(len(q), part.heads, -1).astype(np.float64)
    k = np.repeat(k.reshape(len(k), part.kv_heads, -1).astype(np.float64), part.heads // part.kv_heads, 1)
    v = np.repeat(v.reshape(len(v), part.kv_heads, -1).astype(np.float64), part.heads // part.kv_heads, 1)
    scores = np.einsum("thd,shd->hts", q, k) * part.scale
    ago = past + np.arange(len(q))[:, None] - np.arange(len(k))
    scores[:, (ago < 0) | (ago >= (part.window or len(k)))] = -np.inf
    weights = np.exp(scores - scores.max(2, keepdims=True))
    weights /= weights.sum(2, keepdims=True)
    return np.einsum("hts,shd->thd", weights, v).reshape(len(q), -1)


@pytest.mark.parametrize("cache_type", ["f32", "f16"])
@pytest.mark.parametrize(("past", "tokens"), [(0, 1), (0, 5), (700, 1), (600, 300), (1024, 3)])
@pytest.mark.parametrize("window", [None, 37, 600])
@pytest.mark.parametrize("shape", [(6, 2, 16, 16), (2, 2, 8, 24)])
def test_attention(
    cache_type: str, past: int, tokens: int, window: int | None, shape: tuple[int, ...], rng: np.random.Generator
) -> None:
    hp = hparams(*shape)
    part = attention(hp, window)
    q = rng.standard_normal((tokens, hp.n_head * hp.head_dim_k), np.float32) * 2
    k = rng.standard_normal((past + tokens, hp.n_head_kv * hp.head_dim_k), np.float32) * 2
    v = rng.standard_normal((past + tokens, hp.n_head_kv * hp.head_dim_v), np.float32)
    if cache_type == "f16":  # what the cache keeps
        k, v = (x.astype(np.float16).astype(np.float32) for x in (k, v))
    cache = Cache(hp, past + tokens + 5, cache_type)
    float_attention.append_rows(k, v, cache, 1)
    cache.length = past
    result = float_attention.attend(float_attention.Heads.of(part), 1, q, [Span(0, tokens, cache)], 2)
    np.testing.assert_allclose(result, naive_attention(q, k, v, part), atol=1e-5)


def test_attention_keeps_sequences_apart(rng: np.random.Generator) -> None:
    hp = hparams(4, 2, 16, 16)
    part = attention(hp, None)
    q = rng.standard_normal((70, 64), np.float32)
    k, v = rng.standard_normal((2, 70, 32), np.float32)
    caches = [Cache(hp, 40, "f32"), Cache(hp, 30, "f32")]
    spans = [Span(0, 40, caches[0]), Span(40, 70, caches[1])]
    for span in spans:
        float_attention.append_rows(k[span.start : span.stop], v[span.start : span.stop], span.cache, 0)
    result = float_attention.attend(float_attention.Heads.of(part), 0, q, spans, 2)
    for a, b in ((0, 40), (40, 70)):
        np.testing.assert_allclose(result[a:b], naive_attention(q[a:b], k[a:b], v[a:b], part), atol=2e-6)


def test_the_f16_cache_rounds_as_ieee_does(rng: np.random.Generator) -> None:
    x = (rng.standard_normal((9, 64)) * 10.0 ** rng.integers(-8, 6, (9, 64))).astype(np.float32)
    x[0, :4] = [65519.9, 65520, 2**-25, 1 + 2**-11]
    cache = Cache(hparams(4, 4, 16, 16), 10, "f16")
    cache.length = 1
    float_attention.append_rows(x, x, cache, 0)
    with np.errstate(over="ignore"):
        expected = x.astype(np.float16).view(np.uint16).reshape(9, 4, 16)
    for stored in (cache.k[0], cache.v[0]):
        np.testing.assert_array_equal(stored[:, 1:].view(np.uint16), expected.transpose(1, 0, 2))
