"""Recurrent layers, layer by layer: linear attention by a gated delta rule (archs.blocks.DeltaNet), and gated short
convolutions (archs.blocks.ShortConv).

For one token the rule is `reference.delta_rule`: two passes over the state of a head. A prompt would read and write the
states once a token, so it is computed in chunks of CHUNK tokens, by matrix products (Yang et al. 2024,
"Parallelizing linear transformers with the delta rule", with the decays of "Gated delta networks"). With G the running
sum of g within a chunk, S the state before it, and w_ij = e^(G_i - G_j):

    A_ij = beta_i w_ij k_i . k_j for j < i        R_i = beta_i (v_i - e^G_i S^T k_i)
    (I + A) D = R                                 D_i is what the rule adds to the state for token i
    o_i = e^G_i S^T q_i + sum over j <= i of w_ij (q_i . k_j) D_j
    S = e^G_n S + sum over j of w_nj k_j D_j^T

Heads are independent of each other, so threads split the heads. The running sums are float64, because their differences
are used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from quantkit.archs.common import blocks
from quantkit.codegen import thread_pool
from quantkit.runtime.blocks import float_ops
from quantkit.runtime.blocks.spans import Span
from quantkit.runtime.kernels import reference
from quantkit.runtime.kv.saved_state import LayerState

CHUNK = 64
MIN_DECAY = 1e-34  # smaller decays count as 0
HEADS = 8  # of a thread, at a time
SERIAL_ELEMENTS = 1024  # outputs of up to this size are not worth waking threads
FEW_TOKENS = 2  # up to this many tokens are computed one by one

Convolution = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], None]  # of before, x, taps, out


class RecurrentRun(Protocol):
    """What this module needs of a BlockRunner."""

    threads: int

    def linear(self, linear: blocks.Linear, x: np.ndarray) -> np.ndarray:
        """The product with a weight matrix."""

    def norm(self, norm: blocks.Norm | None, x: np.ndarray) -> np.ndarray:
        """RMS norm; x itself without one."""

    def vector(self, name: str) -> np.ndarray:
        """A tensor with one dimension, decoded."""

    def check(self, what: str, y: np.ndarray) -> None:
        """Non-finite check of `what`."""


def delta_net(run: RecurrentRun, part: blocks.DeltaNet, layer: int, x: np.ndarray, spans: list[Span]) -> np.ndarray:
    """What a recurrent block adds to x float32[tokens, n_embd]; advances the states of the spans' caches."""
    sizes = part.sizes
    y = run.norm(part.norm, x)
    entering, gates = _projected(run, part, y)
    g, beta = _rates(run, part, y)
    taps = np.ascontiguousarray(run.vector(part.conv).reshape(sizes.channels, sizes.kernel).T)
    out = np.empty((len(x), sizes.inner), np.float32)
    for span in spans:
        rows = slice(span.start, span.stop)
        before, after = span.cache.advance(layer, span.stop - span.start)
        qkv = mixed(sizes, entering[rows], before, after, taps, run.threads)
        attend(part, qkv, g[rows], beta[rows], before.heads, after.heads, out[rows], run.threads)
    run.check(f"delta rule of blk.{layer}", out)
    normed = run.norm(part.out_norm, out.reshape(-1, sizes.head_dim_v)).reshape(out.shape)
    return run.linear(part.out, float_ops.activate(part.gating, gates, normed, run.threads))


def short_conv(run: RecurrentRun, part: blocks.ShortConv, layer: int, x: np.ndarray, spans: list[Span]) -> np.ndarray:
    """What a gated short convolution adds to x float32[tokens, n_embd]; advances the states of the spans' caches."""
    sizes = part.sizes
    b, gates, z = np.split(run.linear(part.in_proj, run.norm(part.norm, x)), 3, axis=1)
    with float_ops.ignore_nonfinite():
        entering = b * z
    taps = np.ascontiguousarray(run.vector(part.conv).reshape(sizes.channels, sizes.kernel).T)
    bias = np.zeros(sizes.channels, np.float32)

    def convolution(past: np.ndarray, x: np.ndarray, taps: np.ndarray, out: np.ndarray) -> None:
        reference.causal_conv(past, x, taps, bias, out)

    out = np.empty_like(x)
    for span in spans:
        rows = slice(span.start, span.stop)
        before, after = span.cache.advance(layer, span.stop - span.start)
        convolve(convolution, entering[rows], before, after, taps, out[rows], run.threads)
    with float_ops.ignore_nonfinite():
        out *= gates
    run.check(f"convolution of blk.{layer}", out)
    return run.linear(part.out, out)


def _projected(run: RecurrentRun, part: blocks.DeltaNet, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The input of the convolution, float32[tokens, channels], and the gates float32[tokens, inner]."""
    sizes, projected = part.sizes, run.linear(part.qkv, y)
    if part.gate is not None:
        return projected, run.linear(part.gate, y)
    heads = projected.reshape(len(y), sizes.key_heads, -1)
    each = sizes.inner // sizes.key_heads
    ends = np.cumsum([sizes.head_dim_k, sizes.head_dim_k, each])
    *mixed, gates = (np.ascontiguousarray(p).reshape(len(y), -1) for p in np.split(heads, ends, axis=2))
    return np.concatenate(mixed, axis=1), gates


def _rates(run: RecurrentRun, part: blocks.DeltaNet, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """g and beta, float32[tokens, value_heads]."""
    if part.ba is not None:
        rates = run.linear(part.ba, y).reshape(len(y), part.sizes.key_heads, 2, -1)
        b, a = (rates[:, :, i].reshape(len(y), -1) for i in range(2))
    else:
        assert part.beta is not None
        assert part.alpha is not None
        b, a = run.linear(part.beta, y), run.linear(part.alpha, y)
    with float_ops.ignore_nonfinite():
        g = run.vector(part.a) * np.logaddexp(np.float32(0), a + run.vector(part.dt))
    return g, float_ops.sigmoid(b)


def mixed(
    sizes: blocks.Recurrence, x: np.ndarray, before: LayerState, after: LayerState, taps: np.ndarray, threads: int
) -> np.ndarray:
    """The convolution of x float32[tokens, channels]: queries, keys and values, with queries and keys normed."""

    bias = np.zeros(sizes.channels, np.float32)

    def convolution(past: np.ndarray, x: np.ndarray, taps: np.ndarray, out: np.ndarray) -> None:
        reference.short_conv(past, x, taps, bias, out)
        reference.l2_norm_heads(out, 0, sizes.key_heads, sizes.head_dim_k, sizes.head_dim_k**-0.5)
        reference.l2_norm_heads(out, sizes.keys, sizes.key_heads, sizes.head_dim_k, 1.0)

    out = np.empty_like(x)
    convolve(convolution, x, before, after, taps, out, threads)
    return out


def convolved(
    x: np.ndarray, before: LayerState, after: LayerState, taps: np.ndarray, bias: np.ndarray, threads: int
) -> np.ndarray:
    """float32[tokens, channels]: the causal convolution of x, then SiLU; `after` gets the last inputs.

    taps are float32[kernel, channels].
    """

    def convolution(past: np.ndarray, x: np.ndarray, taps: np.ndarray, out: np.ndarray) -> None:
        reference.short_conv(past, x, taps, bias, out)

    out = np.empty_like(x)
    convolve(convolution, x, before, after, taps, out, threads)
    return out


def convolve(
    convolution: Convolution,
    x: np.ndarray,
    before: LayerState,
    after: LayerState,
    taps: np.ndarray,
    out: np.ndarray,
    threads: int,
) -> None:
    """Compute out, a convolution of x float32[tokens, channels], and the last inputs that the state keeps."""
    tokens, past = len(x), len(taps) - 1
    inputs = np.concatenate([before.inputs, x]) if tokens < past else x[tokens - past :]
    after.inputs[:] = inputs[len(inputs) - past :]

    def task(start: int, stop: int) -> None:
        past_inputs = before.inputs[start:] if start < past else before.inputs[:0]
        past_inputs = np.concatenate([past_inputs, x[max(0, start - past) : start]])
        convolution(past_inputs, x[start:stop], taps, out[start:stop])

    thread_pool.over_rows(task, tokens, threads=threads if x.size > float_ops.SERIAL_ELEMENTS else 1, pieces=1)


def attend(
    part: blocks.DeltaNet,
    x: np.ndarray,
    g: np.ndarray,
    beta: np.ndarray,
    before: np.ndarray,
    after: np.ndarray,
    out: np.ndarray,
    threads: int,
    chunk: int | None = None,
) -> None:
    """The delta rule of one sequence: out float32[tokens, inner] of x float32[tokens, channels], queries, keys, values.

    before, after   float32[value_heads, head_dim_k, head_dim_v]: the states, read and written
    chunk           tokens of a chunk; 1: one by one. Default: what is faster.
    """
    sizes = part.sizes
    chunk = chunk or (1 if len(x) <= FEW_TOKENS else CHUNK)
    heads = np.arange(sizes.value_heads)
    key_of = heads % sizes.key_heads if part.tiled else heads * sizes.key_heads // sizes.value_heads
    decay = (_shrinking(g) if chunk == 1 else np.cumsum(g, axis=0, dtype=np.float64)).T.copy()
    betas = beta.T.copy()

    def step_by_step(start: int, stop: int) -> None:
        for head in range(start, stop):
            key, value = key_of[head] * sizes.head_dim_k, head * sizes.head_dim_v
            starts = key, sizes.keys + key, 2 * sizes.keys + value
            reference.delta_rule(x, *starts, decay[head][:, None], betas[head], before[head], after[head], out, value)

    def by_chunks(start: int, stop: int) -> None:
        for first in range(start, stop, HEADS):
            head_range = slice(first, min(stop, first + HEADS))
            after[head_range] = before[head_range]
            with float_ops.ignore_nonfinite():
                _chunks(
                    sizes,
                    x,
                    key_of[head_range],
                    head_range,
                    decay[head_range],
                    betas[head_range],
                    after[head_range],
                    out,
                    chunk,
                )

    busy = len(x) * sizes.inner > SERIAL_ELEMENTS
    thread_pool.over_rows(step_by_step if chunk == 1 else by_chunks, sizes.value_heads, threads=threads if busy else 1)


def _chunks(
    sizes: blocks.Recurrence,
    x: np.ndarray,
    key_of: np.ndarray,
    heads: slice,
    sums: np.ndarray,
    beta: np.ndarray,
    state: np.ndarray,
    out: np.ndarray,
    chunk: int,
) -> None:
    """Some heads, by chunks; `sums` float64[heads, tokens] are the running sums of g, the state is changed in place.

    All products are of several heads at once: threads then rarely wait for each other between them.
    """
    tokens, count = len(x), len(key_of)
    q, k = (x[:, i * sizes.keys : (i + 1) * sizes.keys].reshape(tokens, sizes.key_heads, -1) for i in range(2))
    v = x[:, 2 * sizes.keys :].reshape(tokens, sizes.value_heads, -1)
    result = out.reshape(tokens, sizes.value_heads, -1)
    past = np.zeros((count, 1))
    for start in range(0, tokens, chunk):
        rows = slice(start, start + chunk)
        queries, keys = (y[rows][:, key_of].transpose(1, 0, 2).copy() for y in (q, k))
        values = v[rows, heads].transpose(1, 0, 2)
        decay = sums[:, rows] - past
        past = sums[:, rows][:, -1:]
        keys_t = keys.transpose(0, 2, 1)
        key_products, attention = keys @ keys_t, queries @ keys_t
        reference.chunk_weights(key_products, attention, decay, beta[:, rows].copy())
        decay_before = _shrinking(decay)[:, :, None]
        updates = (values - decay_before * (keys @ state)) * beta[:, rows, None]
        reference.solve_unit_triangular(key_products, updates)
        result[rows, heads] = (decay_before * (queries @ state) + attention @ updates).transpose(1, 0, 2)
        keys *= _shrinking(decay[:, -1:] - decay)[:, :, None]
        state *= decay_before[:, -1:]
        state += keys_t @ updates


def _shrinking(decay: np.ndarray) -> np.ndarray:
    """e^decay, float32; 0 below MIN_DECAY, where products would be subnormal numbers, and slow."""
    result = np.exp(decay)
    return np.where(result < MIN_DECAY, 0, result).astype(np.float32)
