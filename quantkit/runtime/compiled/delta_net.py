"""Recurrent layers (archs.blocks.DeltaNet) in both plans: kernels/cpu/delta_net.py.

Operations, with barriers where | stands:

    one token   norm, qkv, convolution, gate, beta, alpha | delta rule, norm of heads, gate | out, add to x |
    batch       norm | qkv, gate, beta, alpha | convolution | delta rule | norm, gate, quantize | out, add to x |

In files where one matrix gives queries, keys, values and gates (no `gate`), its output is sorted first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from quantkit.archs.common import blocks
from quantkit.placement import kernel_sizes
from quantkit.placement.kernel_sizes import BATCH_TOKENS, activation_bytes
from quantkit.runtime.blocks import float_linear
from quantkit.runtime.compiled.plan_base import SPLIT_ROWS, Activations, BatchOps, PlanOps, TokenOps
from quantkit.runtime.kernels.cpu import decode_ops, delta_net, prefill_ops


class _Buffers(NamedTuple):
    """Where the outputs of the projections are, float32[tokens, …]."""

    qkv: int
    gates: int
    rates: dict[str, int]  # per matrix of beta and alpha, "ba" if one has both
    out: int  # of the delta rule
    projected: int  # queries, keys, values and gates, if one matrix gives them; else 0


def add_decode(ops: TokenOps, layer: int, part: blocks.DeltaNet) -> None:
    """Append a recurrent layer for one token; the result is added to x."""
    sizes = part.sizes
    state = ops.keep(np.array([*prefill_ops.BatchState(1, 0, 1), *prefill_ops.SpanState(0, 1, 0)], np.int64))
    buffers = _buffers(ops, part, 1)
    normed, view = ops.norm(part.norm), ops.states_view(layer)
    multiple = math.lcm(SPLIT_ROWS, sizes.head_dim_k)
    ops.matvec(part.qkv, normed, buffers.projected or buffers.qkv, claimed=True)
    if part.gate is not None:
        ops.matvec(part.gate, normed, buffers.gates, claimed=True)
    for name, linear in _rate_matrices(part).items():
        ops.matvec(linear, normed, buffers.rates[name], multiple=max(4, ops.tensor(linear).type.interleave))
    ops.add_barrier()
    _add_convolution(ops, part, buffers, state.ctypes.data, view, multiple)
    ops.add_barrier()
    multiple = math.lcm(SPLIT_ROWS, sizes.head_dim_v)
    update = delta_net.UpdateParameters(
        heads=head_fields(ops, part.sizes, tiled=part.tiled),
        rates=_rates(ops, part, buffers),
        qkv=buffers.qkv,
        layer_states=view,
        multiple=multiple,
        out=buffers.out,
    )
    ops.add(delta_net.update, update)
    hidden = gate_token(ops, sizes, part.out_norm, part.gating, buffers.gates, buffers.out)
    ops.add_to_residual(part.out, hidden)


def add_prefill(ops: BatchOps, layer: int, part: blocks.DeltaNet) -> None:
    """Append a recurrent layer for a batch; the result is added to x."""
    sizes = part.sizes
    buffers, view = _buffers(ops, part, BATCH_TOKENS), ops.states_view(layer)
    matrices = _rate_matrices(part)
    readers = [part.qkv, *([] if part.gate is None else [part.gate]), *matrices.values()]
    normed = ops.norm(part.norm, readers)
    ops.multiply(part.qkv, normed, buffers.projected or buffers.qkv)
    if part.gate is not None:
        ops.multiply(part.gate, normed, buffers.gates)
    for name, linear in matrices.items():
        ops.multiply(linear, normed, buffers.rates[name])
    ops.add_barrier()
    next_head = _add_convolution(ops, part, buffers, ops.state, view, math.lcm(SPLIT_ROWS, sizes.head_dim_k))
    ops.add_barrier()
    widths = kernel_sizes.delta_widths(sizes.head_dim_k, sizes.head_dim_v)
    nbytes = kernel_sizes.delta_chunk_bytes(sizes.head_dim_k, sizes.head_dim_v)
    scratch, stride = ops.private_buffer("chunk", nbytes)
    attend = delta_net.AttendParameters(
        state=ops.state,
        heads=head_fields(ops, part.sizes, tiled=part.tiled),
        sizes=ops.record(delta_net.ChunkSizes(sizes.head_dim_k, sizes.head_dim_v, *widths)).address,
        rates=_rates(ops, part, buffers),
        qkv=buffers.qkv,
        layer_states=view,
        next_head=next_head,
        out=buffers.out,
        scratch=scratch,
        private_stride=stride,
    )
    ops.add(delta_net.attend, attend, barrier=True)
    gate_batch(ops, sizes, part.out_norm, part.gating, buffers.gates, buffers.out)
    ops.add_to_residual(part.out, ops.quantize(buffers.out, sizes.inner, (part.out,)))


def gate_token(
    ops: TokenOps, sizes: blocks.Recurrence, norm: blocks.Norm, activation: str, gates: int, x: int
) -> Activations:
    """Append the norm of each head of x float32[inner], in place, and act(gates) * x, quantized, with a barrier.

    Each thread takes the heads whose x it may have computed.
    """
    multiple = math.lcm(SPLIT_ROWS, sizes.head_dim_v)
    heads = decode_ops.HeadNormParameters(
        x=x,
        weight=ops.vector(norm.weight),
        rows=sizes.inner,
        dim=sizes.head_dim_v,
        eps=ops.constant(norm.eps),
        multiple=multiple,
        out=x,
    )
    ops.add(decode_ops.head_norm, heads)
    hidden = ops.buffer("gated", activation_bytes(sizes.inner))
    gate = decode_ops.GatedParameters(
        activation=ops.activation(activation), gate=gates, up=x, n=sizes.inner, multiple=multiple, buffer=hidden,
        numbers=0,
    )  # fmt: skip
    ops.add(decode_ops.gated, gate, barrier=True)
    return Activations(hidden, 0)


def gate_batch(ops: BatchOps, sizes: blocks.Recurrence, norm: blocks.Norm, activation: str, gates: int, x: int) -> None:
    """Append x = act(gates) * norm(x), the norm of each head, for a batch."""
    heads = prefill_ops.HeadNormParameters(
        state=ops.state,
        x=x,
        weight=ops.vector(norm.weight),
        heads=sizes.value_heads,
        dim=sizes.head_dim_v,
        eps=ops.constant(norm.eps),
        out=x,
    )
    ops.add(prefill_ops.head_norm, heads)
    gate = prefill_ops.GatedParameters(
        state=ops.state, activation=ops.activation(activation), gate=gates, up=x, n=sizes.inner, out=x, numbers=0,
    )  # fmt: skip
    ops.add(prefill_ops.gated, gate)


def matrices(part: blocks.DeltaNet) -> list[blocks.Linear]:
    """The matrices of a recurrent layer."""
    return [part.qkv, *([] if part.gate is None else [part.gate]), *_rate_matrices(part).values(), part.out]


def _rate_matrices(part: blocks.DeltaNet) -> dict[str, blocks.Linear]:
    """The matrices that give beta and alpha."""
    if part.ba is not None:
        return {"ba": part.ba}
    assert part.beta is not None
    assert part.alpha is not None
    return {"beta": part.beta, "alpha": part.alpha}


def _buffers(ops: PlanOps, part: blocks.DeltaNet, tokens: int) -> _Buffers:
    """Buffers of the outputs, for `tokens` tokens."""
    sizes = part.sizes
    return _Buffers(
        qkv=ops.buffer("qkv", 4 * tokens * sizes.channels),
        gates=ops.buffer("delta gates", 4 * tokens * sizes.inner),
        rates={name: ops.buffer(name, 4 * tokens * ops.rows(linear)) for name, linear in _rate_matrices(part).items()},
        out=ops.buffer("delta", 4 * tokens * sizes.inner),
        projected=0 if part.gate is not None else ops.buffer("projected", 4 * tokens * ops.rows(part.qkv)),
    )


def _add_convolution(
    ops: PlanOps, part: blocks.DeltaNet, buffers: _Buffers, state: int, view: int, multiple: int
) -> int:
    """Append the convolution, without a barrier; returns the address of a counter that it sets to 0.

    Threads have shares of `multiple` channels, of which they may have computed the inputs.
    """
    sizes = part.sizes
    if part.gate is None:
        split = delta_net.SplitParameters(
            state=state,
            projected=buffers.projected,
            heads=head_fields(ops, part.sizes, tiled=part.tiled),
            multiple=multiple,
            qkv=buffers.qkv,
            gates=buffers.gates,
        )
        ops.add(delta_net.split_projection, split)
    none = ops.keep(np.zeros(sizes.channels, np.float32)).ctypes.data
    return add_convolution(ops, sizes, (part.conv,), none, buffers.qkv, state, view, multiple, keys=sizes.keys)


def add_convolution(
    ops: PlanOps, sizes: blocks.Recurrence, convs: Sequence[str], bias: int, x: int, state: int, view: int,
    multiple: int, *, keys: int,
) -> int:  # fmt: skip
    """Append the convolution of x float32[tokens, channels]; as `_add_convolution`. The tensors `convs` have the taps.

    `keys` is the number of channels of all queries, and of all keys, which are normalized by heads; 0: none is.
    """
    next_head = ops.buffer("next head", 8)
    taps = np.concatenate([float_linear.vector(ops.model.weights[name]) for name in convs])
    taps = taps.reshape(sizes.channels, sizes.kernel)
    convolve = delta_net.ConvolveParameters(
        state=state,
        qkv=x,
        taps=ops.keep(np.ascontiguousarray(taps.T)).ctypes.data,
        layer_states=view,
        channels=sizes.channels,
        bias=bias,
        keys=keys,
        dim_k=sizes.head_dim_k,
        query_scale=ops.constant(sizes.head_dim_k**-0.5),
        multiple=multiple,
        next_head=next_head,
    )
    ops.add(delta_net.convolve(sizes.kernel), convolve)
    return next_head


def head_fields(ops: PlanOps, sizes: blocks.Recurrence, *, tiled: bool = False) -> int:
    """Address of the HeadFields of a layer."""
    fields = delta_net.HeadFields(
        key_heads=sizes.key_heads,
        value_heads=sizes.value_heads,
        dim_k=sizes.head_dim_k,
        dim_v=sizes.head_dim_v,
        tiled=int(tiled),
    )
    return ops.record(fields).address


def _rates(ops: PlanOps, part: blocks.DeltaNet, buffers: _Buffers) -> int:
    """Address of the RateFields of a layer."""
    count = part.sizes.value_heads
    group = count if part.ba is None else count // part.sizes.key_heads
    together = buffers.rates.get("ba")
    fields = delta_net.RateFields(
        beta=buffers.rates["beta"] if together is None else together,
        alpha=buffers.rates["alpha"] if together is None else together + 4 * group,
        row=count if together is None else 2 * count,
        group=group,
        stride=2 * group,
        a=ops.vector(part.a),
        dt=ops.vector(part.dt),
    )
    return ops.record(fields).address
