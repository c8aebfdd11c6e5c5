"""Operations of Kimi Delta Attention (archs.blocks.KimiDelta): a delta rule whose state decays row by row.

They are plain in `runtime/blocks/kimi_delta.py`; the short convolution before them is `delta_net.convolve`. A batch is
spans of several sequences, as in prefill_ops.py; a single token is a batch of one. The states of a sequence, a
`LayerStates` per layer, are read and written in place.

A head changes its state once per token, also for a prompt: as in `delta_net.update`, a block of columns is read from
memory once, and S of 128 by 128 elements stays in an L2 cache while a thread passes the tokens of a prompt over it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from quantkit.codegen.callbacks import callback
from quantkit.codegen.jit import kernel
from quantkit.codegen.simd import atomic_add, copy_floats, floats, load_float
from quantkit.runtime.kernels.cpu.delta_net import (
    STATES_BYTES,
    HeadFields,
    LayerStates,
    StatesView,
    update_state,
)
from quantkit.runtime.kernels.cpu.gates import dot
from quantkit.runtime.kernels.cpu.operation import OPERATION, load_record, row_share
from quantkit.runtime.kernels.cpu.prefill_ops import SPAN_BYTES, STATE_BYTES, BatchState, SpanState
from quantkit.runtime.kernels.reference import exp, softplus


class RuleFields(NamedTuple):
    """What the delta rule reads, beside dimensions."""

    qkv: int  # float32[tokens, 3 inner]: queries, keys, values
    rates: int  # float32[tokens, inner], overwritten by the decays e^g
    beta: int  # float32[tokens, heads]
    a: int  # float32[heads], below 0
    dt: int  # float32[inner]
    out: int  # float32[tokens, inner]


@kernel
def _fade(rates, dt, a, n):
    """rates = e^g, g = a softplus(rates + dt), float32[n]; a is an address."""
    x, bias, scale = floats(rates, n), floats(dt, n), load_float(a)
    for i in range(n):
        x[i] = exp(scale * softplus(x[i] + bias[i]))


@kernel
def _advance_head(heads, fields, token, head, state):
    """Change the state of a head by one token, and write the head's part of out."""
    dim, inner = heads.dim_k, heads.value_heads * heads.dim_k
    at = (token * inner + head * dim) * 4
    _fade(fields.rates + at, fields.dt + head * dim * 4, fields.a + head * 4, dim)
    beta = np.float32(1) / (np.float32(1) + exp(-load_float(fields.beta + (token * heads.value_heads + head) * 4)))
    q = fields.qkv + (token * 3 * inner + head * dim) * 4
    k, v = q + inner * 4, q + 2 * inner * 4
    product = dot(k, q, dim)
    update_state(1, state, q, k, v, dim, dim, np.float32(1), fields.rates + at, beta, product, fields.out + at)


class UpdateParameters(NamedTuple):
    """Parameters of `update`."""

    heads: int  # address of a HeadFields
    fields: int  # address of a RuleFields
    layer_states: int  # address of a StatesView, of one sequence
    multiple: int  # elements of out in a thread's share; a multiple of the dimension of a head


@callback(OPERATION)
def update(parameters, thread, threads):
    """The delta rule for one token: change the states of the thread's heads, and write their outputs."""
    p = load_record(UpdateParameters, parameters)
    heads, fields = load_record(HeadFields, p.heads), load_record(RuleFields, p.fields)
    state = load_record(LayerStates, load_record(StatesView, p.layer_states).states).heads
    dim, inner = heads.dim_k, heads.value_heads * heads.dim_k
    first, last = row_share(inner, p.multiple, thread, threads)
    for head in range(first // dim, last // dim):
        _advance_head(heads, fields, 0, head, state + head * dim * dim * 4)


class AttendParameters(NamedTuple):
    """Parameters of `attend`."""

    state: int  # BatchState
    heads: int  # address of a HeadFields
    fields: int  # address of a RuleFields
    layer_states: int  # address of a StatesView
    next_head: int  # address of an int64: the next head of a span that a thread takes, 0 at first


@callback(OPERATION)
def attend(parameters, thread, threads):
    """The delta rule for the tokens of all spans. Threads take a head of a span at a time, until none is left."""
    p = load_record(AttendParameters, parameters)
    heads, fields = load_record(HeadFields, p.heads), load_record(RuleFields, p.fields)
    view, spans = load_record(StatesView, p.layer_states), load_record(BatchState, p.state).spans
    while True:
        item = atomic_add(1, p.next_head)
        s, head = item // heads.value_heads, item % heads.value_heads
        if s >= spans:
            break
        span = load_record(SpanState, p.state + STATE_BYTES + s * SPAN_BYTES)
        states = load_record(LayerStates, view.states + s * STATES_BYTES).heads
        for token in range(span.start, span.start + span.tokens):
            _advance_head(heads, fields, token, head, states + head * heads.dim_k * heads.dim_k * 4)


class JoinParameters(NamedTuple):
    """Parameters of `join`."""

    state: int  # BatchState
    q: int  # float32[tokens, inner]
    k: int
    v: int
    inner: int
    multiple: int  # as in `delta_net.convolve`, which may follow without a barrier
    qkv: int  # float32[tokens, 3 inner]


@callback(OPERATION)
def join(parameters, thread, threads):
    """Copy the outputs of three matrices to one buffer, side by side. Threads split the channels."""
    p = load_record(JoinParameters, parameters)
    tokens, inner = load_record(BatchState, p.state).tokens, p.inner
    first, last = row_share(3 * inner, p.multiple, thread, threads)
    for part in range(3):
        source = p.q if part == 0 else p.k if part == 1 else p.v
        begin, end = max(first, part * inner), min(last, (part + 1) * inner)
        if begin < end:
            for t in range(tokens):
                target = p.qkv + (t * 3 * inner + begin) * 4
                copy_floats(target, source + (t * inner + begin - part * inner) * 4, end - begin)
