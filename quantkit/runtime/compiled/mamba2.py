"""Mamba-2 mixers (archs.blocks.Mamba2) in both plans: kernels/cpu/mamba2.py.

Operations, with barriers where | stands:

    one token   norm, inputs, convolution, gates, steps | state space | gate, norm of groups | out, add to x |
    batch       norm | inputs, gates, steps | convolution | state space | gate, norm, quantize | out, add to x |
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from quantkit.archs.common import blocks
from quantkit.placement.kernel_sizes import BATCH_TOKENS, activation_bytes
from quantkit.runtime.compiled.delta_net import add_convolution, head_fields
from quantkit.runtime.compiled.plan_base import SPLIT_ROWS, Activations, BatchOps, PlanOps, TokenOps
from quantkit.runtime.kernels.cpu import mamba2, prefill_ops


class _Buffers(NamedTuple):
    """Where the outputs of the projections and of the state space are, float32[tokens, …]."""

    entering: int
    gates: int
    rates: int
    out: int


def add_decode(ops: TokenOps, layer: int, part: blocks.Mamba2) -> None:
    """Append a mixer for one token; the result is added to x."""
    sizes, buffers = part.sizes, _buffers(ops, part, 1)
    state = ops.keep(np.array([*prefill_ops.BatchState(1, 0, 1), *prefill_ops.SpanState(0, 1, 0)], np.int64))
    normed, view = ops.norm(part.norm), ops.states_view(layer)
    ops.matvec(part.entering, normed, buffers.entering, claimed=True)
    ops.matvec(part.gate, normed, buffers.gates, claimed=True)
    ops.matvec(part.rate, normed, buffers.rates, multiple=max(4, ops.tensor(part.rate).type.interleave), barrier=True)
    _add_convolution(ops, part, buffers, state.ctypes.data, view)
    ops.add_barrier()
    heads, fields = head_fields(ops, sizes), _scan_fields(ops, part, buffers)
    ops.add(mamba2.update, mamba2.UpdateParameters(heads=heads, fields=fields, layer_states=view), barrier=True)
    hidden = ops.buffer("mixed", activation_bytes(sizes.inner))
    norm = mamba2.TokenNormParameters(
        fields=_norm_fields(ops, part, buffers), multiple=math.lcm(SPLIT_ROWS, part.group), buffer=hidden
    )
    ops.add(mamba2.norm_token, norm, barrier=True)
    ops.add_to_residual(part.out, Activations(hidden, 0))


def add_prefill(ops: BatchOps, layer: int, part: blocks.Mamba2) -> None:
    """Append a mixer for a batch; the result is added to x."""
    sizes, buffers = part.sizes, _buffers(ops, part, BATCH_TOKENS)
    view = ops.states_view(layer)
    normed = ops.norm(part.norm, (part.entering, part.gate, part.rate))
    ops.multiply(part.entering, normed, buffers.entering)
    ops.multiply(part.gate, normed, buffers.gates)
    ops.multiply(part.rate, normed, buffers.rates, barrier=True)
    next_head = _add_convolution(ops, part, buffers, ops.state, view)
    ops.add_barrier()
    scan = mamba2.ScanParameters(
        state=ops.state,
        heads=head_fields(ops, part.sizes),
        fields=_scan_fields(ops, part, buffers),
        layer_states=view,
        next_head=next_head,
    )
    ops.add(mamba2.scan, scan, barrier=True)
    norm = mamba2.BatchNormParameters(state=ops.state, fields=_norm_fields(ops, part, buffers))
    ops.add(mamba2.norm_batch, norm)
    ops.add_to_residual(part.out, ops.quantize(buffers.out, sizes.inner, (part.out,)))


def _buffers(ops: PlanOps, part: blocks.Mamba2, tokens: int) -> _Buffers:
    """Buffers of the outputs, for `tokens` tokens."""
    sizes = part.sizes
    widths = {
        "mixer inputs": sizes.channels, "mixer gates": sizes.inner, "mixer steps": sizes.value_heads,
        "mixer out": sizes.inner,
    }  # fmt: skip
    return _Buffers(*(ops.buffer(name, 4 * tokens * width) for name, width in widths.items()))


def _add_convolution(ops: PlanOps, part: blocks.Mamba2, buffers: _Buffers, state: int, view: int) -> int:
    """Append the convolution, without a barrier; returns the address of a counter that it sets to 0."""
    bias = ops.vector(part.conv_bias)
    return add_convolution(ops, part.sizes, (part.conv,), bias, buffers.entering, state, view, SPLIT_ROWS, keys=0)


def _scan_fields(ops: PlanOps, part: blocks.Mamba2, buffers: _Buffers) -> int:
    """Address of the ScanFields of a layer."""
    fields = mamba2.ScanFields(
        x=buffers.entering,
        rates=buffers.rates,
        a=ops.vector(part.a),
        dt=ops.vector(part.dt),
        skip=ops.vector(part.skip),
        out=buffers.out,
    )
    return ops.record(fields).address


def _norm_fields(ops: PlanOps, part: blocks.Mamba2, buffers: _Buffers) -> int:
    """Address of the GatedNormFields of a layer."""
    fields = mamba2.GatedNormFields(
        activation=ops.activation("swiglu"),
        gates=buffers.gates,
        x=buffers.out,
        weight=ops.vector(part.out_norm.weight),
        n=part.sizes.inner,
        group=part.group,
        eps=ops.constant(part.out_norm.eps),
    )
    return ops.record(fields).address
