"""The operation of gated short convolutions (archs.blocks.ShortConv); plain in `runtime/blocks/recurrent.py`.

A batch is spans of several sequences, as in prefill_ops.py; a single token is a batch of one. The product with in_proj
gives b, c and z of each token; the operation writes c * convolution(b * z). Threads split the channels: each passes a
window of the last inputs over all tokens of its channels. It reads 3 and writes 1 number per channel and token, and
keeps the rest in registers, so memory bounds it. The states of a sequence are read and written in place.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from quantkit.codegen.callbacks import Callback, callback
from quantkit.codegen.simd import F32, IrBuilder, Value, simd_intrinsic, vector
from quantkit.runtime.kernels.cpu.activations import quantize_range
from quantkit.runtime.kernels.cpu.delta_net import STATES_BYTES, LayerStates, StatesView
from quantkit.runtime.kernels.cpu.operation import OPERATION, load_record, row_share
from quantkit.runtime.kernels.cpu.prefill_ops import SPAN_BYTES, STATE_BYTES, BatchState, SpanState

COLUMNS = 32  # channels at a time; models have a multiple
_LANES = 16


class GatedConvParameters(NamedTuple):
    """Parameters of `gated_conv`."""

    state: int  # BatchState
    projected: int  # float32[tokens, 3, channels]: b, c, z
    taps: int  # float32[kernel, channels]
    layer_states: int  # address of a StatesView
    channels: int
    multiple: int  # channels of a thread's share; a multiple of COLUMNS
    out: int  # float32[tokens, channels]; of one token, an activation buffer
    quantizes: int  # 1: `out` is an activation buffer


@simd_intrinsic("void")
def _gated_columns(
    ir: IrBuilder, kernel_size: int, past: Value, b: Value, stride: Value, tokens: Value, taps: Value, out: Value
) -> None:
    """c * convolution(b * z) of COLUMNS channels; `past` float32[kernel_size - 1] becomes the last inputs.

    c and z are `stride` and 2 stride bytes after b, and tokens 3 stride apart. Rows of past, taps and out are `stride`
    bytes apart.
    """
    kind = vector(_LANES, F32)
    columns = range(0, 4 * COLUMNS, 4 * _LANES)
    weights = [[ir.load(kind, taps + stride * j + c) for c in columns] for j in range(kernel_size)]
    window = [[ir.variable(ir.load(kind, past + stride * j + c)) for c in columns] for j in range(kernel_size - 1)]
    with ir.loop(0, tokens) as t:
        token, result = b + t * stride * 3, out + t * stride
        for v, c in enumerate(columns):
            entering = ir.load(kind, token + c) * ir.load(kind, token + stride * 2 + c)
            inputs = [row[v].get() for row in window] + [entering]
            total = inputs[0] * weights[0][v]
            for j in range(1, kernel_size):
                total = ir.fma(inputs[j], weights[j][v], total)
            ir.store(total * ir.load(kind, token + stride + c), result + c)
            for row, following in zip(window, inputs[1:]):
                row[v].set(following)
    for j, row in enumerate(window):
        for v, c in enumerate(columns):
            ir.store(row[v].get(), past + stride * j + c)


@functools.cache
def gated_conv(kernel_size: int) -> Callback:
    """The operation that computes what enters the last product of a gated short convolution."""

    @callback(OPERATION)
    def run(parameters, thread, threads):
        p = load_record(GatedConvParameters, parameters)
        view, spans = load_record(StatesView, p.layer_states), load_record(BatchState, p.state).spans
        channels, stride = p.channels, p.channels * 4
        first, last = row_share(channels, p.multiple, thread, threads)
        for s in range(spans):
            span = load_record(SpanState, p.state + STATE_BYTES + s * SPAN_BYTES)
            past = load_record(LayerStates, view.states + s * STATES_BYTES).inputs
            b, out = p.projected + span.start * stride * 3, p.out + span.start * stride
            for c in range(first, last, COLUMNS):
                at = c * 4
                _gated_columns(kernel_size, past + at, b + at, stride, span.tokens, p.taps + at, out + at)
        if p.quantizes:
            quantize_range(p.out, channels, first, last)

    return run
