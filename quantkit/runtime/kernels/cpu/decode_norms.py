"""Operations of the decode plan that some architectures need: norms of whole vectors that threads share, RoPE of heads,
scaled residual streams, soft-capped logits.

`norm_rows` has a norm over elements that several threads computed, so a barrier comes before it. `rope_heads` applies
RoPE where a norm follows (otherwise attention does it); like `decode_ops.head_norm` it takes the heads that the thread
itself computed.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from quantkit.codegen.callbacks import callback
from quantkit.codegen.simd import floats, load_float, load_int
from quantkit.runtime.kernels.cpu.decode_attention import apply_rope
from quantkit.runtime.kernels.cpu.decode_ops import add_range, rms_scale, scale_range
from quantkit.runtime.kernels.cpu.kv_rows import LayerView
from quantkit.runtime.kernels.cpu.operation import OPERATION, load_record, row_share
from quantkit.runtime.kernels.reference import exp


class NormRowsParameters(NamedTuple):
    """Parameters of `norm_rows`."""

    x: int  # float32[n]
    weight: int  # float32[n]
    n: int
    eps: int  # address of a float32
    multiple: int
    out: int  # float32[n], not x
    add: int  # 1: add the norm to out


@callback(OPERATION)
def norm_rows(parameters, thread, threads):
    """out (+)= norm(x): every thread sums the squares of all elements and writes its own share."""
    p = load_record(NormRowsParameters, parameters)
    first, last = row_share(p.n, p.multiple, thread, threads)
    scale = rms_scale(p.x, p.n, load_float(p.eps))
    x, weight, out = floats(p.x, p.n), floats(p.weight, p.n), floats(p.out, p.n)
    if p.add != 0:
        for i in range(first, last):
            out[i] += x[i] * scale * weight[i]
    else:
        for i in range(first, last):
            out[i] = x[i] * scale * weight[i]


class ScaleParameters(NamedTuple):
    """Parameters of `scale`."""

    x: int  # float32[n], overwritten
    n: int
    multiple: int
    factor: int  # address of a float32


@callback(OPERATION)
def scale(parameters, thread, threads):
    """x *= factor; each thread has its own share."""
    p = load_record(ScaleParameters, parameters)
    first, last = row_share(p.n, p.multiple, thread, threads)
    scale_range(p.x, first, last, load_float(p.factor))


class AddParameters(NamedTuple):
    """Parameters of `add`."""

    x: int  # float32[n], overwritten
    y: int  # float32[n]
    n: int
    multiple: int


@callback(OPERATION)
def add(parameters, thread, threads):
    """x += y; each thread has its own share."""
    p = load_record(AddParameters, parameters)
    first, last = row_share(p.n, p.multiple, thread, threads)
    add_range(p.y, p.x, first, last)


class SoftCapParameters(NamedTuple):
    """Parameters of `soft_cap`."""

    x: int  # float32[n], overwritten
    n: int
    multiple: int
    cap: int  # address of a float32


@callback(OPERATION)
def soft_cap(parameters, thread, threads):
    """x = cap * tanh(x / cap), of the elements that the thread computed."""
    p = load_record(SoftCapParameters, parameters)
    first, last = row_share(p.n, p.multiple, thread, threads)
    cap, x = load_float(p.cap), floats(p.x, p.n)
    for i in range(first, last):
        x[i] = cap - np.float32(2) * cap / (exp(x[i] * (np.float32(2) / cap)) + np.float32(1))


class RopeHeadsParameters(NamedTuple):
    """Parameters of `rope_heads`."""

    position: int  # address of an int64: the token's position
    x: int  # float32[rows / dim, dim]
    rows: int
    dim: int
    multiple: int  # whole heads
    rope_dim: int
    pair_step: int  # RoPE pair j is elements j * pair_step and j * pair_step + pair_stride
    pair_stride: int
    layer_view: int  # address of a LayerView


@callback(OPERATION)
def rope_heads(parameters, thread, threads):
    """Apply RoPE to the thread's heads of x, in place."""
    p = load_record(RopeHeadsParameters, parameters)
    view, position = load_record(LayerView, p.layer_view), load_int(p.position)
    cos = floats(view.cos + position * p.rope_dim * 2, p.rope_dim // 2)
    sin = floats(view.sin + position * p.rope_dim * 2, p.rope_dim // 2)
    first, last = row_share(p.rows, p.multiple, thread, threads)
    for row in range(first, last, p.dim):
        x = floats(p.x + row * 4, p.dim)
        apply_rope(x, x, p.dim, cos, sin, p.rope_dim, p.pair_step, p.pair_stride, np.float32(1))
