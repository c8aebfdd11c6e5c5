"""Operations of the prefill plan, except products, attention and experts: norms, activations, RoPE and the KV cache.

A batch is rows of float32 arrays, one per token. A thread's share is a run of tokens, whole tiles of gemm.py, so that
the next operation on the same tokens needs no barrier. The tokens may continue several sequences, each with its own
cache: a span is one sequence's run of tokens. `state` is a record of the batch:

    int64       tokens of the batch
    int64       next piece of attention that a thread takes
    int64       spans
    SpanState   of each span
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from quantkit.codegen.callbacks import Callback, callback
from quantkit.codegen.jit import kernel
from quantkit.codegen.simd import call6, floats, load_float, store_int
from quantkit.runtime.kernels.cpu.decode_attention import apply_rope
from quantkit.runtime.kernels.cpu.decode_ops import norm_into, rms_norm_into
from quantkit.runtime.kernels.cpu.gemm import token_share
from quantkit.runtime.kernels.cpu.kv_rows import CACHE_BYTES, KernelHeads, LayerCache, LayerView, rotate, store_row
from quantkit.runtime.kernels.cpu.operation import OPERATION, load_record, offset_of, record_bytes


class BatchState(NamedTuple):
    """What changes from batch to batch: its tokens, the next piece of attention to take, its spans."""

    tokens: int
    next_piece: int
    spans: int


class SpanState(NamedTuple):
    """The tokens of one sequence in a batch; a record for each follows the BatchState."""

    start: int  # first token of the span, in the batch
    tokens: int
    position: int  # of the first token, in its sequence


STATE_BYTES, SPAN_BYTES = record_bytes(BatchState), record_bytes(SpanState)
TOKENS, NEXT_PIECE = offset_of(BatchState, "tokens"), offset_of(BatchState, "next_piece")


@kernel
def batch_share(state, thread, threads):
    """First and last + 1 of a thread's tokens of the batch whose BatchState is at `state`: whole tiles."""
    return token_share(load_record(BatchState, state).tokens, thread, threads)


class NormParameters(NamedTuple):
    """Parameters of `norm`."""

    state: int
    x: int  # float32[tokens, n]
    weight: int  # float32[n]
    n: int
    eps: int  # address of a float32
    out: int  # float32[tokens, n]
    centred: int = 0  # 1: x - mean(x) stands for x
    bias: int = 0  # float32[n], or 0


@callback(OPERATION)
def norm(parameters, thread, threads):
    """out = x / sqrt(mean(x^2) + eps) * weight (+ bias), for each token."""
    p = load_record(NormParameters, parameters)
    eps = load_float(p.eps)
    first, last = batch_share(p.state, thread, threads)
    for token in range(first, last):
        x, out = p.x + token * p.n * 4, p.out + token * p.n * 4
        norm_into(x, p.weight, p.n, eps, p.centred, p.bias, out)


class HeadNormParameters(NamedTuple):
    """Parameters of `head_norm`."""

    state: int
    x: int  # float32[tokens, heads, dim]
    weight: int  # float32[dim]
    heads: int
    dim: int
    eps: int  # address of a float32
    out: int  # float32[tokens, heads, dim]; may be x


@callback(OPERATION)
def head_norm(parameters, thread, threads):
    """out = norm(x) of every head."""
    p = load_record(HeadNormParameters, parameters)
    eps = load_float(p.eps)
    first, last = batch_share(p.state, thread, threads)
    for head in range(first * p.heads, last * p.heads):
        rms_norm_into(p.x + head * p.dim * 4, p.weight, p.dim, eps, p.out + head * p.dim * 4)


class GatedParameters(NamedTuple):
    """Parameters of `gated`."""

    state: int
    activation: int  # function of gated_activations.py
    gate: int  # float32[tokens, n]
    up: int  # float32[tokens, n]
    n: int
    out: int  # float32[tokens, n]; may be gate
    numbers: int  # those of the activation, or 0


@callback(OPERATION)
def gated(parameters, thread, threads):
    """out = act(gate) * up."""
    p = load_record(GatedParameters, parameters)
    first, last = batch_share(p.state, thread, threads)
    call6(p.activation, p.gate, p.up, first * p.n, last * p.n, p.out, p.numbers)


class RopeParameters(NamedTuple):
    """Parameters of `rope`."""

    state: int
    q: int  # float32[tokens, heads, dim_k], overwritten
    k: int  # float32[tokens, kv_heads, dim_k], overwritten; 0: the caches have the tokens' keys and values already
    v: int  # float32[tokens, kv_heads, dim_v], overwritten
    rope_dim: int
    pair_step: int  # RoPE pair j is elements j * pair_step and j * pair_step + pair_stride
    pair_stride: int
    kv_heads: int
    scale: int  # address of a float32: q is multiplied by it
    layer_view: int  # address of a LayerView


@functools.cache
def rope(shape: KernelHeads) -> Callback:
    """The operation that applies RoPE, scale and rotation to q in place and appends k and v to the caches."""
    group, dim_k, dim_v, k_type, v_type, rotate_k, rotate_v = shape
    k_bytes, v_bytes = shape.k_bytes, shape.v_bytes

    @callback(OPERATION)
    def run(parameters, thread, threads):
        p = load_record(RopeParameters, parameters)
        view, batch = load_record(LayerView, p.layer_view), load_record(BatchState, p.state)
        rope_dim, pair_step, pair_stride = p.rope_dim, p.pair_step, p.pair_stride
        kv_heads, scale = p.kv_heads, load_float(p.scale)
        heads = kv_heads * group
        first, last = token_share(batch.tokens, thread, threads)
        for s in range(batch.spans):
            span = load_record(SpanState, p.state + STATE_BYTES + s * SPAN_BYTES)
            cache = load_record(LayerCache, view.caches + s * CACHE_BYTES)
            for token in range(max(first, span.start), min(last, span.start + span.tokens)):
                position = span.position + token - span.start
                cos = floats(view.cos + position * rope_dim * 2, rope_dim // 2)
                sin = floats(view.sin + position * rope_dim * 2, rope_dim // 2)
                q, k = p.q + token * heads * dim_k * 4, p.k + token * kv_heads * dim_k * 4
                v = p.v + token * kv_heads * dim_v * 4
                query_scale = scale
                if view.query_factors != 0:
                    query_scale *= load_float(view.query_factors + position * 4)
                for head in range(heads):
                    x = floats(q + head * dim_k * 4, dim_k)
                    apply_rope(x, x, dim_k, cos, sin, rope_dim, pair_step, pair_stride, query_scale)
                rotate(q, heads * dim_k, rotate_k)
                if p.k == 0:
                    continue
                for head in range(kv_heads):
                    x = floats(k + head * dim_k * 4, dim_k)
                    apply_rope(x, x, dim_k, cos, sin, rope_dim, pair_step, pair_stride, np.float32(1))
                rotate(k, kv_heads * dim_k, rotate_k)
                rotate(v, kv_heads * dim_v, rotate_v)
                for head in range(kv_heads):
                    row = head * cache.n_ctx + position
                    store_row(k_type, k + head * dim_k * 4, dim_k, cache.k + row * k_bytes)
                    store_row(v_type, v + head * dim_v * 4, dim_v, cache.v + row * v_bytes)
        if thread == 0:
            store_int(0, p.state + NEXT_PIECE)

    return run
