"""Operations of the prefill plan that some architectures need: results added to the residual stream after a norm or a
scale, scaled residual streams, and RoPE before a norm of queries and keys.

A thread's share is a run of tokens, as in prefill_ops.py.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from quantkit.codegen.callbacks import callback
from quantkit.codegen.simd import floats, load_float
from quantkit.runtime.kernels.cpu.decode_attention import apply_rope
from quantkit.runtime.kernels.cpu.decode_ops import add_range, rms_norm_into, scale_range
from quantkit.runtime.kernels.cpu.gemm import token_share
from quantkit.runtime.kernels.cpu.kv_rows import LayerView
from quantkit.runtime.kernels.cpu.operation import OPERATION, load_record
from quantkit.runtime.kernels.cpu.prefill_ops import SPAN_BYTES, STATE_BYTES, BatchState, SpanState, batch_share


class AddParameters(NamedTuple):
    """Parameters of `add`."""

    state: int
    y: int  # float32[tokens, n], overwritten
    weight: int  # of a norm, float32[n], or 0
    n: int
    eps: int  # address of a float32
    x: int  # float32[tokens, n]


@callback(OPERATION)
def add(parameters, thread, threads):
    """x += norm(y), or x += y without a weight."""
    p = load_record(AddParameters, parameters)
    first, last = batch_share(p.state, thread, threads)
    for token in range(first, last):
        y = p.y + token * p.n * 4
        if p.weight != 0:
            rms_norm_into(y, p.weight, p.n, load_float(p.eps), y)
        add_range(y, p.x + token * p.n * 4, 0, p.n)


class ScaleParameters(NamedTuple):
    """Parameters of `scale`."""

    state: int
    x: int  # float32[tokens, n], overwritten
    n: int
    factor: int  # address of a float32


@callback(OPERATION)
def scale(parameters, thread, threads):
    """x *= factor."""
    p = load_record(ScaleParameters, parameters)
    first, last = batch_share(p.state, thread, threads)
    scale_range(p.x, first * p.n, last * p.n, load_float(p.factor))


class ClearParameters(NamedTuple):
    """Parameters of `clear`."""

    state: int
    x: int  # float32[tokens, n]
    n: int


@callback(OPERATION)
def clear(parameters, thread, threads):
    """x = 0."""
    p = load_record(ClearParameters, parameters)
    first, last = batch_share(p.state, thread, threads)
    floats(p.x, last * p.n)[first * p.n :] = np.float32(0)


class RopeHeadsParameters(NamedTuple):
    """Parameters of `rope_heads`."""

    state: int
    x: int  # float32[tokens, heads, dim]
    heads: int
    dim: int
    rope_dim: int
    pair_step: int  # RoPE pair j is elements j * pair_step and j * pair_step + pair_stride
    pair_stride: int
    layer_view: int  # address of a LayerView


@callback(OPERATION)
def rope_heads(parameters, thread, threads):
    """Apply RoPE to all heads of x, in place."""
    p = load_record(RopeHeadsParameters, parameters)
    view, batch = load_record(LayerView, p.layer_view), load_record(BatchState, p.state)
    first, last = token_share(batch.tokens, thread, threads)
    for s in range(batch.spans):
        span = load_record(SpanState, p.state + STATE_BYTES + s * SPAN_BYTES)
        for token in range(max(first, span.start), min(last, span.start + span.tokens)):
            position = span.position + token - span.start
            cos = floats(view.cos + position * p.rope_dim * 2, p.rope_dim // 2)
            sin = floats(view.sin + position * p.rope_dim * 2, p.rope_dim // 2)
            for head in range(token * p.heads, (token + 1) * p.heads):
                x = floats(p.x + head * p.dim * 4, p.dim)
                apply_rope(x, x, p.dim, cos, sin, p.rope_dim, p.pair_step, p.pair_stride, np.float32(1))
