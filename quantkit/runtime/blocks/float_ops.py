"""Norms, activations, gates and RoPE of activations float32[tokens, n], several threads over the tokens.

The formulas are those of `kernels/reference.py`.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence

import numpy as np

from quantkit.archs.common import blocks
from quantkit.codegen import jit, thread_pool
from quantkit.runtime.blocks.spans import Span
from quantkit.runtime.kernels import reference

SERIAL_ELEMENTS = 1 << 15  # less work than that is not worth waking threads for

_local = threading.local()


def scratch(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """float32 memory of this thread, reused by name: fresh pages for every panel would cost as much as decoding."""
    size = math.prod(shape)
    memory = getattr(_local, name, None)
    if memory is None or memory.size < size:
        memory = np.empty(size, np.float32)
        setattr(_local, name, memory)
    return memory[:size].reshape(shape)


def ignore_nonfinite() -> np.errstate:
    """Context without numpy's warnings about NaN and Inf: the model's non-finite check reports them instead."""
    return np.errstate(over="ignore", invalid="ignore")


def is_finite(x: np.ndarray) -> bool:
    """Whether no element is NaN or Inf: decided by one sum, unless that overflows."""
    with ignore_nonfinite():
        return bool(np.isfinite(x.sum()) or np.isfinite(x).all())


def _over_tokens(task: Callable[[int, int], None], x: np.ndarray, threads: int) -> None:
    thread_pool.over_rows(task, len(x), threads=threads if x.size > SERIAL_ELEMENTS else 1, pieces=1)


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float, threads: int) -> np.ndarray:
    """x / sqrt(mean(x^2) + eps) * weight, of rows float32[rows, n]; weight float32[n]."""
    out = np.empty_like(x)
    _over_tokens(lambda a, b: reference.rms_norm(x[a:b], weight, eps, out[a:b]), x, threads)
    return out


def centre(x: np.ndarray) -> np.ndarray:
    """x minus the mean of each row, of rows float32[rows, n]."""
    with ignore_nonfinite():
        result: np.ndarray = x - x.mean(1, keepdims=True, dtype=np.float64).astype(np.float32)
        return result


def soft_cap(x: np.ndarray, cap: float, threads: int) -> None:
    """cap * tanh(x / cap) of float32[tokens, n], in place."""
    _over_tokens(lambda a, b: reference.soft_cap(x[a:b], np.float32(cap)), x, threads)


ACTIVATIONS = {
    "swiglu": reference.swiglu,
    "geglu": reference.geglu,
    "reglu": reference.reglu,
    "relu2": reference.relu2,
    "swiglu_oai": reference.swiglu_oai,
    "sigmoid": reference.sigmoid,
}


def activate(
    name: blocks.Activation, gate: np.ndarray, up: np.ndarray, threads: int, limit: float | None = None
) -> np.ndarray:
    """act(gate) * up as blocks name it, with their limit; overwrites `gate`, which may be `up`."""
    if isinstance(name, blocks.Xielu):
        p, n, b, e = name.numbers
        _over_tokens(lambda first, last: reference.xielu(gate[first:last], p, n, b, e), gate, threads)
        return gate
    if limit is not None:
        assert name == "swiglu", f"{name} with a limit of {limit:g}"
        _over_tokens(lambda a, b: reference.swiglu_limited(gate[a:b], up[a:b], np.float32(limit)), gate, threads)
        return gate
    kernel = ACTIVATIONS[name]
    _over_tokens(lambda a, b: kernel(gate[a:b], up[a:b]), gate, threads)
    return gate


def without_gates(projected: np.ndarray, heads: int) -> np.ndarray:
    """The queries float32[tokens, heads * dim] of queries and gates of each head, float32[tokens, heads * 2 * dim]."""
    pairs = projected.reshape(len(projected), heads, 2, -1)
    return np.ascontiguousarray(pairs[:, :, 0]).reshape(len(projected), -1)


def apply_gates(x: np.ndarray, projected: np.ndarray, dim: int, threads: int) -> None:
    """Multiply x float32[tokens, heads * dim], in place, by the sigmoids of the gates beside those queries."""
    _over_tokens(lambda a, b: reference.gate(x[a:b], projected[a:b], dim, 2 * dim, dim), x, threads)


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + e^-x) of an array of any shape."""
    with ignore_nonfinite():
        result: np.ndarray = 1 / (1 + np.exp(-x))
        return result


def rope_tables(rope: blocks.Rope, n_ctx: int, factors: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin, float32[n_ctx, dim/2], of the angle position * frequency of each pair; computed in float64.

    `factors` float32[dim/2] divide the frequencies. With YaRN, a pair's frequency moves from f * scale to f as its
    number j falls from `high` to `low`, the pairs that turn beta_slow and beta_fast times within the original context.
    """
    pair = np.arange(rope.dim // 2)
    frequency = rope.base ** (-2.0 * pair / rope.dim)
    if factors is not None:
        frequency = frequency / factors
    magnitude = rope.magnitude
    if rope.yarn is None:
        frequency = frequency * rope.scale
    else:
        low, high = (_pair_that_turns(rope, turns) for turns in (rope.yarn.beta_fast, rope.yarn.beta_slow))
        if rope.yarn.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rope.dim - 1)
        extrapolation = 1 - np.clip((pair - low) / max(0.001, high - low), 0, 1)
        extrapolation = extrapolation * rope.yarn.ext_factor
        frequency = frequency * (rope.scale * (1 - extrapolation) + extrapolation)
        magnitude = rope.yarn.attn_factor * (1 + 0.1 * math.log(1 / rope.scale) if rope.yarn.ext_factor else 1)
    angle = np.arange(n_ctx)[:, None] * frequency
    cos, sin = (np.float32(f(angle) * magnitude) for f in (np.cos, np.sin))
    return jit.readonly(cos), jit.readonly(sin)


def _pair_that_turns(rope: blocks.Rope, turns: float) -> float:
    """The (fractional) number of the pair that turns so many times within YaRN's original context."""
    assert rope.yarn is not None
    return rope.dim * math.log(rope.yarn.original_context / (turns * 2 * math.pi)) / (2 * math.log(rope.base))


def apply_rope(
    x: np.ndarray, style: str, head_dim: int, tables: tuple[np.ndarray, np.ndarray], positions: np.ndarray, threads: int
) -> None:
    """Apply RoPE in place: x float32[tokens, heads * head_dim], positions int64[tokens]."""
    cos, sin = tables
    step, stride = (2, 1) if style == "norm" else (1, cos.shape[1])
    _over_tokens(lambda a, b: reference.rope(x[a:b], head_dim, cos, sin, positions[a:b], step, stride), x, threads)


def scale_queries(q: np.ndarray, temperature: blocks.Temperature, spans: Sequence[Span]) -> None:
    """Multiply queries float32[tokens, n] by the factors of their positions, in place; see blocks.Temperature."""
    for span in spans:
        position = np.arange(span.cache.length, span.cache.length + span.stop - span.start)
        q[span.start : span.stop] *= query_factors(temperature, position)[:, None]


def scale_heads(q: np.ndarray, scale: np.ndarray, bias: np.ndarray, spans: Sequence[Span]) -> None:
    """Multiply queries float32[tokens, heads * dim] by position and head, in place; see blocks.HeadScaling."""
    heads = q.reshape(len(q), len(scale), -1)
    for span in spans:
        position = np.arange(span.cache.length, span.cache.length + span.stop - span.start)
        heads[span.start : span.stop] *= (scale * position_logarithms(position)[:, None] + bias)[:, :, None]


def position_logarithms(positions: np.ndarray) -> np.ndarray:
    """float32[n]: ln(p + 1) of int[n] positions, computed in float64."""
    logarithms: np.ndarray = jit.readonly(np.log1p(positions).astype(np.float32))
    return logarithms


def query_factors(temperature: blocks.Temperature, positions: np.ndarray) -> np.ndarray:
    """float32[n]: the factors of queries at int[n] positions, computed in float64."""
    steps = np.floor((positions + temperature.offset) / temperature.length)
    factors: np.ndarray = jit.readonly((1 + temperature.beta * np.log1p(steps)).astype(np.float32))
    return factors
