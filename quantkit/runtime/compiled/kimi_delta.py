"""Kimi Delta Attention (archs.blocks.KimiDelta) in both plans: kernels/cpu/kimi_delta.py.

Operations, with barriers where | stands:

    one token   norm, q, k, v, f_a, g_a, beta | convolution, f_b, g_b | delta rule, norm of heads, gate |
                out, add to x |
    batch       norm | q, k, v, f_a, g_a, beta | convolution, quantize | f_b | quantize | g_b | delta rule | norm, gate,
                quantize | out, add to x |
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from quantkit.archs.common import blocks
from quantkit.placement.kernel_sizes import BATCH_TOKENS
from quantkit.runtime.compiled.delta_net import add_convolution, gate_batch, gate_token, head_fields
from quantkit.runtime.compiled.plan_base import SPLIT_ROWS, Activations, BatchOps, PlanOps, TokenOps
from quantkit.runtime.kernels.cpu import kimi_delta, prefill_ops


class _Buffers(NamedTuple):
    """Where the outputs of the projections and of the delta rule are, float32[tokens, …]."""

    qkv: int
    rates: int
    gates: int
    beta: int
    low_rates: int  # of f_a
    low_gates: int  # of g_a
    out: int


def add_decode(ops: TokenOps, layer: int, part: blocks.KimiDelta) -> None:
    """Append the block for one token; the result is added to x."""
    sizes, buffers = part.sizes, _buffers(ops, part, 1)
    state = ops.keep(np.array([*prefill_ops.BatchState(1, 0, 1), *prefill_ops.SpanState(0, 1, 0)], np.int64))
    normed, view, multiple = ops.norm(part.norm), ops.states_view(layer), _multiple(part)
    for i, linear in enumerate((part.q, part.k, part.v)):
        ops.matvec(linear, normed, buffers.qkv + 4 * i * sizes.inner, claimed=True)
    ops.matvec(part.f_a, normed, buffers.low_rates, claimed=True)
    ops.matvec(part.g_a, normed, buffers.low_gates, claimed=True)
    ops.matvec(part.beta, normed, buffers.beta, multiple=max(4, ops.tensor(part.beta).type.interleave), barrier=True)
    _add_convolution(ops, part, buffers, state.ctypes.data, view)
    for linear, low, out in (
        (part.f_b, buffers.low_rates, buffers.rates),
        (part.g_b, buffers.low_gates, buffers.gates),
    ):
        low_rank = ops.norm_of(None, Activations(low, 0), sizes.head_dim_k, "low rank")
        ops.matvec(linear, low_rank, out, claimed=True)
    ops.add_barrier()
    update = kimi_delta.UpdateParameters(
        heads=head_fields(ops, sizes), fields=_rule_fields(ops, part, buffers), layer_states=view, multiple=multiple
    )
    ops.add(kimi_delta.update, update)
    ops.add_to_residual(part.out, gate_token(ops, sizes, part.out_norm, "sigmoid", buffers.gates, buffers.out))


def add_prefill(ops: BatchOps, layer: int, part: blocks.KimiDelta) -> None:
    """Append the block for a batch; the result is added to x."""
    sizes, buffers, view = part.sizes, _buffers(ops, part, BATCH_TOKENS), ops.states_view(layer)
    normed = ops.norm(part.norm, (part.q, part.k, part.v, part.f_a, part.g_a, part.beta))
    q, k, v = (ops.floats(f"kda {name}", sizes.inner) for name in "qkv")
    for linear, out in (
        (part.q, q), (part.k, k), (part.v, v), (part.f_a, buffers.low_rates), (part.g_a, buffers.low_gates),
    ):  # fmt: skip
        ops.multiply(linear, normed, out)
    ops.multiply(part.beta, normed, buffers.beta, barrier=True)
    join = kimi_delta.JoinParameters(
        state=ops.state, q=q, k=k, v=v, inner=sizes.inner, multiple=_multiple(part), qkv=buffers.qkv
    )
    ops.add(kimi_delta.join, join)
    next_head = _add_convolution(ops, part, buffers, ops.state, view)
    for linear, low, out in (
        (part.f_b, buffers.low_rates, buffers.rates),
        (part.g_b, buffers.low_gates, buffers.gates),
    ):
        ops.multiply(linear, ops.quantize(low, sizes.head_dim_k, (linear,)), out, barrier=True)
    attend = kimi_delta.AttendParameters(
        state=ops.state,
        heads=head_fields(ops, sizes),
        fields=_rule_fields(ops, part, buffers),
        layer_states=view,
        next_head=next_head,
    )
    ops.add(kimi_delta.attend, attend, barrier=True)
    gate_batch(ops, sizes, part.out_norm, "sigmoid", buffers.gates, buffers.out)
    ops.add_to_residual(part.out, ops.quantize(buffers.out, sizes.inner, (part.out,)))


def _multiple(part: blocks.KimiDelta) -> int:
    """Elements of queries, keys, values or outputs that are not split between threads: whole heads."""
    return math.lcm(SPLIT_ROWS, part.sizes.head_dim_k)


def _buffers(ops: PlanOps, part: blocks.KimiDelta, tokens: int) -> _Buffers:
    """Buffers of the outputs, for `tokens` tokens."""
    sizes = part.sizes
    widths = {
        "qkv": sizes.channels, "kda rates": sizes.inner, "kda gates": sizes.inner, "beta": sizes.value_heads,
        "low rates": sizes.head_dim_k, "low gates": sizes.head_dim_k, "delta": sizes.inner,
    }  # fmt: skip
    return _Buffers(*(ops.buffer(name, 4 * tokens * width) for name, width in widths.items()))


def _add_convolution(ops: PlanOps, part: blocks.KimiDelta, buffers: _Buffers, state: int, view: int) -> int:
    """Append the convolution, without a barrier; returns the address of a counter that it sets to 0."""
    sizes = part.sizes
    none = ops.keep(np.zeros(sizes.channels, np.float32)).ctypes.data
    return add_convolution(ops, sizes, part.convs, none, buffers.qkv, state, view, _multiple(part), keys=sizes.keys)


def _rule_fields(ops: PlanOps, part: blocks.KimiDelta, buffers: _Buffers) -> int:
    """Address of the RuleFields of a layer."""
    fields = kimi_delta.RuleFields(
        qkv=buffers.qkv,
        rates=buffers.rates,
        beta=buffers.beta,
        a=ops.vector(part.a),
        dt=ops.vector(part.dt),
        out=buffers.out,
    )
    return ops.record(fields).address
