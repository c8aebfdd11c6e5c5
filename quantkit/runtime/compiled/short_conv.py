"""Gated short convolutions (archs.blocks.ShortConv) in both plans: kernels/cpu/short_conv.py.

Operations, with barriers where | stands:

    one token   norm, in_proj | convolution, gate, quantize | out, add to x |
    batch       norm | in_proj | convolution, gate | quantize | out, add to x |
"""

from __future__ import annotations

import numpy as np

from quantkit.archs.common import blocks
from quantkit.placement.kernel_sizes import activation_bytes
from quantkit.runtime.blocks import float_linear
from quantkit.runtime.compiled.plan_base import SPLIT_ROWS, Activations, BatchOps, PlanOps, TokenOps
from quantkit.runtime.kernels.cpu import prefill_ops, short_conv


def add_decode(ops: TokenOps, layer: int, part: blocks.ShortConv) -> None:
    """Append a gated short convolution for one token; the result is added to x."""
    channels = part.sizes.channels
    state = ops.keep(np.array([*prefill_ops.BatchState(1, 0, 1), *prefill_ops.SpanState(0, 1, 0)], np.int64))
    projected = ops.buffer("projected", 4 * 3 * channels)
    hidden = ops.buffer("gated", activation_bytes(channels))
    ops.matvec(part.in_proj, ops.norm(part.norm), projected, barrier=True)
    _add_convolution(ops, layer, part, state.ctypes.data, projected, hidden, quantizes=True)
    ops.add_to_residual(part.out, Activations(hidden, 0))


def add_prefill(ops: BatchOps, layer: int, part: blocks.ShortConv) -> None:
    """Append a gated short convolution for a batch; the result is added to x."""
    channels = part.sizes.channels
    projected, hidden = ops.floats("projected", 3 * channels), ops.floats("convolved", channels)
    ops.multiply(part.in_proj, ops.norm(part.norm, (part.in_proj,)), projected, barrier=True)
    _add_convolution(ops, layer, part, ops.state, projected, hidden, quantizes=False)
    ops.add_barrier()
    ops.add_to_residual(part.out, ops.quantize(hidden, channels, (part.out,)))


def _add_convolution(
    ops: PlanOps, layer: int, part: blocks.ShortConv, state: int, projected: int, out: int, *, quantizes: bool
) -> None:
    sizes = part.sizes
    taps = float_linear.vector(ops.model.weights[part.conv]).reshape(sizes.channels, sizes.kernel)
    columns = ops.keep(np.ascontiguousarray(taps.T))
    parameters = short_conv.GatedConvParameters(
        state=state,
        projected=projected,
        taps=columns.ctypes.data,
        layer_states=ops.states_view(layer),
        channels=sizes.channels,
        multiple=SPLIT_ROWS,
        out=out,
        quantizes=int(quantizes),
    )
    ops.add(short_conv.gated_conv(sizes.kernel), parameters, barrier=quantizes)
