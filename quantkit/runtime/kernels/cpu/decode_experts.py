"""Mixture of experts for one token: top-k routing, then products with the matrices of the selected experts only.

The matrices of all experts lie one after another: gate and up [experts, ff, n], down [experts, n, ff]. Where gate and
up are fused, an expert's gate is followed by its up.

`select_experts` runs in every thread for itself and writes that thread's record of selected experts:

    offset                bytes       content
    0                     8           int64: number of selected experts
    8                     8 used      int64[used]: their numbers
    8 + 8 used            4 used      float32[used]: their weights
    8 + 12 used           4 experts   float32[experts]: probabilities, scratch; the first one becomes the sum of the
                                      weights of selected experts that give their input, which the record leaves out

`gate_up` treats the gate rows of all selected experts as one matrix, of which threads claim rows, so that each thread
reads long runs of memory. It takes the same rows of up, computes act(gate) * up and quantizes it, as `down` reads it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from quantkit.codegen.callbacks import callback
from quantkit.codegen.jit import kernel
from quantkit.codegen.simd import call6, copy_floats, floats, integers, load_float, load_int, store_int
from quantkit.runtime.kernels.cpu.activations import quantize_range
from quantkit.runtime.kernels.cpu.decode_ops import add_range, scale_range
from quantkit.runtime.kernels.cpu.operation import OPERATION, claim_rows, load_record
from quantkit.runtime.kernels.reference import route, route_softplus

SOFTMAX, SIGMOID, SQRT_SOFTPLUS = range(3)


class Routing(NamedTuple):
    """How experts are selected: the arguments of `reference.route` or `reference.route_softplus`."""

    experts: int
    used: int
    min_used: int
    min_share: int  # address of a float32
    normalize: int  # 0 or 1
    scale: int  # address of a float32
    bias: int  # float32[experts], or 0
    gating: int  # SOFTMAX, SIGMOID or SQRT_SOFTPLUS
    groups: int
    groups_used: int
    identity: int = 0  # the last so many experts give their input
    given: int = 0  # int64[tokens, used]: the experts, with SQRT_SOFTPLUS; 0: they follow from scores


@kernel
def route_token(routing, token, logits, selected, weights):
    """Number of experts selected for a token's logits float32[experts], which are overwritten."""
    bias = floats(routing.bias, routing.experts if routing.bias != 0 else 0)
    if routing.gating == SQRT_SOFTPLUS:
        given = integers(routing.given + token * routing.used * 8, routing.used if routing.given != 0 else 0)
        return route_softplus(
            logits, bias, given, routing.used, routing.min_used, load_float(routing.min_share),
            routing.normalize != 0, load_float(routing.scale), selected, weights,
        )  # fmt: skip
    return route(
        logits, bias, routing.gating == SIGMOID, routing.groups, routing.groups_used, routing.used, routing.min_used,
        load_float(routing.min_share), routing.normalize != 0, load_float(routing.scale), selected, weights,
    )  # fmt: skip


@kernel
def _without_identity(ids, weights, count, stacked, total):
    """How many of `count` experts have matrices; they come first. `total` gets the sum of the others' weights."""
    left, identity = 0, floats(total, 1)
    identity[0] = np.float32(0)
    for i in range(count):
        if ids[i] < stacked:
            ids[left], weights[left] = ids[i], weights[i]
            left += 1
        else:
            identity[0] += weights[i]
    return left


class SelectParameters(NamedTuple):
    """Parameters of `select_experts`."""

    logits: int  # float32[experts], of the router
    routing: int  # address of a Routing
    selected: int
    private_stride: int


@callback(OPERATION)
def select_experts(parameters, thread, threads):
    """Write the token's selected experts and their weights to the thread's record."""
    p = load_record(SelectParameters, parameters)
    routing = load_record(Routing, p.routing)
    experts, used = routing.experts, routing.used
    selected = p.selected + thread * p.private_stride
    weights, probabilities = selected + 8 + 8 * used, selected + 8 + 12 * used
    copy_floats(probabilities, p.logits, experts)
    ids = integers(selected + 8, used)
    count = route_token(routing, 0, floats(probabilities, experts), ids, floats(weights, used))
    if routing.identity != 0:
        count = _without_identity(ids, floats(weights, used), count, experts - routing.identity, probabilities)
    store_int(count, selected)


GATE, UP, ACTIVATE = 1, 2, 4  # the steps of `gate_up`


class GateUpParameters(NamedTuple):
    """Parameters of `gate_up`."""

    steps: int  # sum of GATE, UP and ACTIVATE
    activation: int  # function of gated_activations.py
    gate_product: int  # function of matvec.py for the type of gate
    gate: int
    gate_bytes: int  # from one expert's matrix to the next
    up_product: int
    up: int  # 0: act(gate x) * (gate x)
    up_bytes: int
    n: int  # columns
    ff: int  # rows
    multiple: int
    selected: int
    selected_stride: int
    x: int  # activation buffer
    x_stride: int
    products: int  # float32[used, 2, ff]: results of gate and up
    hidden: int  # an activation buffer per selected expert
    hidden_bytes: int
    claims: int  # `OpList.claims`
    gate_bias: int = 0  # float32[experts, ff], or 0
    up_bias: int = 0
    gate_scales: int = 0  # float32[experts], or 0
    up_scales: int = 0
    weighted: int = 0  # experts that a token may have, where gate and up get w x; 0: they get x


@callback(OPERATION)
def gate_up(parameters, thread, threads):
    """hidden[i] = act(gate x) * (up x) of the i-th selected expert, quantized; or those steps of it."""
    p = load_record(GateUpParameters, parameters)
    rows = load_int(p.selected + thread * p.selected_stride) * p.ff
    while True:
        first, last = claim_rows(p.claims, rows, p.multiple, thread, threads)
        if first == last:
            return
        _gate_up_rows(p, first, last, thread)


@kernel
def _gate_up_rows(p, first, last, thread):
    """`gate_up` of some rows of the selected experts' matrices, one after another."""
    steps, n, ff = p.steps, p.n, p.ff
    selected = p.selected + thread * p.selected_stride
    x = p.x + thread * p.x_stride
    while first < last:
        i = first // ff
        begin = first - i * ff
        end = min(ff, begin + last - first)
        expert = load_int(selected + 8 + 8 * i)
        gate = p.products + i * 2 * ff * 4
        up = gate + ff * 4 if p.up != 0 else gate
        hidden = p.hidden + i * p.hidden_bytes
        if steps & GATE:
            call6(p.gate_product, p.gate + expert * p.gate_bytes, n, begin, end, x, gate)
            if p.gate_scales != 0:
                scale_range(gate, begin, end, load_float(p.gate_scales + expert * 4))
            if p.gate_bias != 0:
                add_range(p.gate_bias + expert * ff * 4, gate, begin, end)
        if steps & UP and p.up != 0:
            call6(p.up_product, p.up + expert * p.up_bytes, n, begin, end, x, up)
            if p.up_scales != 0:
                scale_range(up, begin, end, load_float(p.up_scales + expert * 4))
            if p.up_bias != 0:
                add_range(p.up_bias + expert * ff * 4, up, begin, end)
        if steps & ACTIVATE:
            if p.weighted != 0:
                weight = load_float(selected + 8 + 8 * p.weighted + 4 * i)
                scale_range(gate, begin, end, weight)
                scale_range(up, begin, end, weight)
            call6(p.activation, gate, up, begin, end, hidden, 0)
            quantize_range(hidden, ff, begin, end)
        first += end - begin


class DownParameters(NamedTuple):
    """Parameters of `down`."""

    product: int  # function of matvec.py for the type of down
    weights: int
    expert_bytes: int  # of one expert's matrix
    n: int  # columns
    rows: int
    multiple: int
    selected: int
    selected_stride: int
    used: int
    hidden: int  # an activation buffer per selected expert
    hidden_bytes: int
    out: int  # float32[rows], scratch
    residual: int  # float32[rows]
    claims: int  # `OpList.claims`
    bias: int = 0  # float32[experts, rows], or 0
    scales: int = 0  # float32[experts], or 0
    weighted: int = 1  # 0: add the outputs as they are
    fresh: int = 0  # 1: residual = the sum, whatever it was
    identity_x: int = 0  # float32[rows], which the experts give that have no matrices; 0: there are none
    identity_stride: int = 0


@callback(OPERATION)
def down(parameters, thread, threads):
    """residual (+)= sum over the selected experts of weight * (scale down hidden + bias); threads claim rows."""
    p = load_record(DownParameters, parameters)
    while True:
        first, last = claim_rows(p.claims, p.rows, p.multiple, thread, threads)
        if first == last:
            return
        _down_rows(p, first, last, thread)


@kernel
def _down_rows(p, first, last, thread):
    """`down` of some rows."""
    selected, used, rows = p.selected + thread * p.selected_stride, p.used, p.rows
    weights = floats(selected + 8 + 8 * used, used)
    out, residual = floats(p.out, rows), floats(p.residual, rows)
    if p.fresh != 0:
        residual[first:last] = np.float32(0)
    if p.identity_x != 0:
        share, x = load_float(selected + 8 + 12 * used), floats(p.identity_x + thread * p.identity_stride, rows)
        for row in range(first, last):
            residual[row] += share * x[row]
    for i in range(load_int(selected)):
        expert = load_int(selected + 8 + 8 * i)
        matrix = p.weights + expert * p.expert_bytes
        call6(p.product, matrix, p.n, first, last, p.hidden + i * p.hidden_bytes, p.out)
        if p.scales != 0:
            scale_range(p.out, first, last, load_float(p.scales + expert * 4))
        if p.bias != 0:
            add_range(p.bias + expert * rows * 4, p.out, first, last)
        weight = weights[i] if p.weighted != 0 else np.float32(1)
        for row in range(first, last):
            residual[row] += weight * out[row]
