"""Operations of Mamba-2 mixers (archs.blocks.Mamba2): a selective state space and a gated norm of groups.

Both are plain in `kernels/reference` and `runtime/blocks/mamba2.py`; the short convolution before them is
`delta_net.convolve`. A batch is spans of several sequences, as in prefill_ops.py; a single token is a batch of one. The
states of a sequence, a `LayerStates` per layer, are read and written in place.

`scan` changes the state S [head_dim_k, head_dim_v] of a head once per token, and its columns are independent:

    S = e^(a dt) S + B (dt u)^T        o = S^T C + skip u

so a block of columns has its sums in registers and S is read and written once. A prompt passes its tokens over the
state of one head after another, which an L1 or L2 cache holds (32 KiB of 128 by 64 elements).
"""

from __future__ import annotations

from typing import NamedTuple

from quantkit.codegen.callbacks import callback
from quantkit.codegen.jit import kernel
from quantkit.codegen.simd import F32, IrBuilder, Value, atomic_add, call6, load_float, simd_intrinsic, vector
from quantkit.runtime.kernels.cpu.activations import quantize_range
from quantkit.runtime.kernels.cpu.decode_ops import rms_norm_into
from quantkit.runtime.kernels.cpu.delta_net import (
    STATES_BYTES,
    HeadFields,
    LayerStates,
    StatesView,
    by_columns,
)
from quantkit.runtime.kernels.cpu.operation import OPERATION, load_record, row_share
from quantkit.runtime.kernels.cpu.prefill_ops import SPAN_BYTES, STATE_BYTES, BatchState, SpanState, batch_share
from quantkit.runtime.kernels.reference import exp, softplus


class ScanFields(NamedTuple):
    """What `scan` and `update` read, beside dimensions."""

    x: int  # float32[tokens, channels]: u, B, C
    rates: int  # float32[tokens, value_heads]
    a: int  # float32[value_heads], below 0
    dt: int  # float32[value_heads]
    skip: int  # float32[value_heads]
    out: int  # float32[tokens, inner]


@simd_intrinsic("void")
def _advance(
    ir: IrBuilder, state: Value, u: Value, b: Value, c: Value, dim_k: Value, dim_v: Value, decay: float, step: float,
    skip: float, out: Value,
) -> None:  # fmt: skip
    """Change a head's state by a token, and write out = S^T C + skip u."""
    row_bytes = dim_v * 4

    def columns(first: Value, vectors: int, lanes: int) -> None:
        kind = vector(lanes, F32) if lanes > 1 else F32
        offsets = [first * 4 + 4 * lanes * i for i in range(vectors)]

        def spread(x: Value) -> Value:
            return ir.splat(x, lanes) if lanes > 1 else x

        shrink, rate, through = map(spread, (decay, step, skip))  # type: ignore[arg-type]  # Values in the body
        values = [ir.load(kind, u + offset) for offset in offsets]
        sums = [ir.variable(value * through) for value in values]
        entering = [value * rate for value in values]
        with ir.loop(0, dim_k) as i:
            row, key, query = state + i * row_bytes, *(spread(ir.load(F32, x + i * 4)) for x in (b, c))
            for offset, value, total in zip(offsets, entering, sums):
                s = ir.fma(key, value, ir.load(kind, row + offset) * shrink)
                ir.store(s, row + offset)
                total.set(ir.fma(s, query, total.get()))
        for offset, total in zip(offsets, sums):
            ir.store(total.get(), out + offset)

    # 64 or 32 columns, whose values and sums fit the registers
    by_columns(ir, dim_v, 64 if ir.isa.startswith("avx512") else 32, columns)


@kernel
def _advance_head(heads, fields, token, head, state):
    """Change the state of a head by one token, and write the head's part of out."""
    dim_k, dim_v = heads.dim_k, heads.dim_v
    keys, inner = heads.key_heads * dim_k, heads.value_heads * dim_v
    row = fields.x + token * (inner + 2 * keys) * 4
    b = row + (inner + head * heads.key_heads // heads.value_heads * dim_k) * 4
    rate = load_float(fields.rates + (token * heads.value_heads + head) * 4)
    step = softplus(rate + load_float(fields.dt + head * 4))
    decay = exp(load_float(fields.a + head * 4) * step)
    out = fields.out + (token * inner + head * dim_v) * 4
    skip = load_float(fields.skip + head * 4)
    _advance(state, row + head * dim_v * 4, b, b + keys * 4, dim_k, dim_v, decay, step, skip, out)


class UpdateParameters(NamedTuple):
    """Parameters of `update`."""

    heads: int  # address of a HeadFields
    fields: int  # address of a ScanFields
    layer_states: int  # address of a StatesView, of one sequence


@callback(OPERATION)
def update(parameters, thread, threads):
    """The state space for one token. Threads split the heads."""
    p = load_record(UpdateParameters, parameters)
    heads, fields = load_record(HeadFields, p.heads), load_record(ScanFields, p.fields)
    state = load_record(LayerStates, load_record(StatesView, p.layer_states).states).heads
    first, last = row_share(heads.value_heads, 1, thread, threads)
    for head in range(first, last):
        _advance_head(heads, fields, 0, head, state + head * heads.dim_k * heads.dim_v * 4)


class ScanParameters(NamedTuple):
    """Parameters of `scan`."""

    state: int  # BatchState
    heads: int  # address of a HeadFields
    fields: int  # address of a ScanFields
    layer_states: int  # address of a StatesView
    next_head: int  # address of an int64: the next head of a span that a thread takes, 0 at first


@callback(OPERATION)
def scan(parameters, thread, threads):
    """The state space for the tokens of all spans. Threads take a head of a span at a time, until none is left."""
    p = load_record(ScanParameters, parameters)
    heads, fields = load_record(HeadFields, p.heads), load_record(ScanFields, p.fields)
    view, spans = load_record(StatesView, p.layer_states), load_record(BatchState, p.state).spans
    while True:
        item = atomic_add(1, p.next_head)
        s, head = item // heads.value_heads, item % heads.value_heads
        if s >= spans:
            break
        span = load_record(SpanState, p.state + STATE_BYTES + s * SPAN_BYTES)
        states = load_record(LayerStates, view.states + s * STATES_BYTES).heads
        for token in range(span.start, span.start + span.tokens):
            _advance_head(heads, fields, token, head, states + head * heads.dim_k * heads.dim_v * 4)


# ----------------------------------------------------------------------------------------------------------- gated norm


class GatedNormFields(NamedTuple):
    """What both operations of the gated norm read."""

    activation: int  # function of gated_activations.py
    gates: int  # float32[tokens, n]
    x: int  # float32[tokens, n]
    weight: int  # float32[n]
    n: int
    group: int  # elements that are normed together
    eps: int  # address of a float32


@kernel
def _gate_and_norm(fields, token, first, last, out):
    """out float32[n] = norm(act(gates) * x) of elements first .. last - 1 of a token, whole groups."""
    row = token * fields.n * 4
    call6(fields.activation, fields.gates + row, fields.x + row, first, last, out, 0)
    eps = load_float(fields.eps)
    for i in range(first, last, fields.group):
        rms_norm_into(out + i * 4, fields.weight + i * 4, fields.group, eps, out + i * 4)


class TokenNormParameters(NamedTuple):
    """Parameters of `norm_token`."""

    fields: int  # address of a GatedNormFields
    multiple: int  # elements of a thread's share: whole groups, and whole sub-blocks of what is quantized
    buffer: int  # activation buffer


@callback(OPERATION)
def norm_token(parameters, thread, threads):
    """Write the gated norm of one token, quantized, to an activation buffer that threads share."""
    p = load_record(TokenNormParameters, parameters)
    fields = load_record(GatedNormFields, p.fields)
    n = fields.n
    first, last = row_share(n, p.multiple, thread, threads)
    if first < last:
        _gate_and_norm(fields, 0, first, last, p.buffer)
        quantize_range(p.buffer, n, first, last)


class BatchNormParameters(NamedTuple):
    """Parameters of `norm_batch`."""

    state: int  # BatchState
    fields: int  # address of a GatedNormFields; its x is overwritten


@callback(OPERATION)
def norm_batch(parameters, thread, threads):
    """x = the gated norm of x, for all tokens."""
    p = load_record(BatchNormParameters, parameters)
    fields = load_record(GatedNormFields, p.fields)
    first, last = batch_share(p.state, thread, threads)
    for token in range(first, last):
        _gate_and_norm(fields, token, 0, fields.n, fields.x + token * fields.n * 4)
