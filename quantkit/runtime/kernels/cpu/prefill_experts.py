"""Mixture of experts for a batch: top-k routing, grouping tokens by expert, products of each expert with its tokens.

`group_tokens` writes the assignment of tokens to experts. An entry is one token of one expert; a run is the entries of
one expert, padded to whole tiles:

    field            type                  content
    header           AssignmentHeader      counts, and counters of the work that threads take
    runs             ExpertRun[experts]          one for each expert that has tokens
    tokens           int64[entries]        the entry's token, -1 for padding
    row addresses    int64[entries]        address of the token's float32 row
    weights          float32[entries]      of the expert for this token

A unit of work is EXPERT_ROWS rows of one expert. A thread unpacks them to its scratch and multiplies them by the
expert's tiles (expert_panels.py). In `add_down` a unit is EXPERT_ROWS rows of all experts, so that no two threads add
to the same element and sums have one order. The EXPERT_ROWS rows of gate and up are the 32 columns of one block of what
`down` reads, so `gate_up` writes its result there directly.

Unpacking takes as long as three matrix-vector products. So a run of at most FEW_TOKENS tokens is multiplied token by
token with the functions of matvec.py; its activation buffers are in `vectors`, FEW_TOKENS for each run.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from quantkit.codegen.callbacks import callback
from quantkit.codegen.jit import kernel
from quantkit.codegen.simd import (
    F32,
    IrBuilder,
    Value,
    atomic_add,
    call3,
    call6,
    copy_floats,
    floats,
    integers,
    load_float,
    load_int,
    simd_intrinsic,
    store_int,
    vector,
)
from quantkit.placement.kernel_sizes import ASSIGNMENT_HEADER, EXPERT_ROWS, FEW_TOKENS, RECORD_BYTES, RUN_BYTES
from quantkit.runtime.kernels.cpu.activations import quantize_range
from quantkit.runtime.kernels.cpu.decode_experts import Routing, route_token
from quantkit.runtime.kernels.cpu.decode_ops import scale_range
from quantkit.runtime.kernels.cpu.gemm import quantize_token, token_share
from quantkit.runtime.kernels.cpu.operation import OPERATION, load_record, offset_of, record_bytes

_FLOATS16 = vector(16, F32)


class AssignmentHeader(NamedTuple):
    """The counters at the start of an assignment. Threads take the next unit of work by an atomic addition."""

    entries: int
    runs: int
    next_gate: int  # next unit of work of `gate_up`, or of `multiply` with gate
    next_up: int  # of `multiply` with up
    next_down: int  # of `add_down`


class ExpertRun(NamedTuple):
    """The entries of one expert."""

    expert: int
    first: int
    tokens: int


assert record_bytes(AssignmentHeader) == ASSIGNMENT_HEADER
assert record_bytes(ExpertRun) == RUN_BYTES
ENTRIES, RUNS, NEXT_GATE, NEXT_UP, NEXT_DOWN = (offset_of(AssignmentHeader, f) for f in AssignmentHeader._fields)


@kernel(inline="always")
def _run_count(assignment):
    return load_record(AssignmentHeader, assignment).runs


@kernel(inline="always")
def _run(assignment, i):
    return load_record(ExpertRun, assignment + ASSIGNMENT_HEADER + i * RUN_BYTES)


@kernel(inline="always")
def _tokens_of(assignment, experts, entries):
    return integers(assignment + ASSIGNMENT_HEADER + experts * RUN_BYTES, entries)


@kernel(inline="always")
def _row_addresses(assignment, experts, entries):
    return integers(assignment + ASSIGNMENT_HEADER + experts * RUN_BYTES + entries * 8, entries)


@kernel(inline="always")
def _weights_of(assignment, experts, entries):
    return floats(assignment + ASSIGNMENT_HEADER + experts * RUN_BYTES + entries * 16, entries)


# --------------------------------------------------------------------------------------------- routing and grouping


class RouteParameters(NamedTuple):
    """Parameters of `route_batch`."""

    tokens: int  # address of an int64
    logits: int  # float32[tokens, experts] of the router, overwritten
    routing: int  # address of a Routing
    selected: int  # int64[tokens, used], -1 where fewer are selected
    weights: int  # float32[tokens, used]
    x: int = 0  # float32[tokens, n], which the experts give that have no matrices; 0: there are none
    out: int = 0  # float32[tokens, n], to which it is added
    n: int = 0


@kernel
def _add_identity(p, stacked, token, selected, weights, count):
    """Add what the token's experts without matrices give to its row of `out`, and select them no more."""
    x, out = floats(p.x + token * p.n * 4, p.n), floats(p.out + token * p.n * 4, p.n)
    for i in range(count):
        if selected[i] >= stacked:
            selected[i] = -1
            for c in range(p.n):
                out[c] += weights[i] * x[c]


@callback(OPERATION)
def route_batch(parameters, thread, threads):
    """Select the experts of every token, and their weights."""
    p = load_record(RouteParameters, parameters)
    routing = load_record(Routing, p.routing)
    experts, used = routing.experts, routing.used
    first, last = token_share(load_int(p.tokens), thread, threads)
    for token in range(first, last):
        selected = integers(p.selected + token * used * 8, used)
        weights = floats(p.weights + token * used * 4, used)
        count = route_token(routing, token, floats(p.logits + token * experts * 4, experts), selected, weights)
        selected[count:] = -1
        if p.x != 0:
            _add_identity(p, experts - routing.identity, token, selected, weights, count)


class GroupParameters(NamedTuple):
    """Parameters of `group_tokens`."""

    tokens: int  # address of an int64
    x: int  # float32[tokens, n]
    n: int
    experts: int
    used: int
    selected: int  # int64[tokens, used]
    weights: int  # float32[tokens, used]
    assignment: int
    max_entries: int
    multiple: int  # runs begin at multiples of it


@callback(OPERATION)
def group_tokens(parameters, thread, threads):
    """Write the assignment of tokens to experts: a counting sort, by thread 0 (some microseconds per batch)."""
    if thread != 0:
        return
    p = load_record(GroupParameters, parameters)
    tokens, experts, used, assignment = load_int(p.tokens), p.experts, p.used, p.assignment
    selected, weights = integers(p.selected, tokens * used), floats(p.weights, tokens * used)
    runs = integers(assignment + ASSIGNMENT_HEADER, experts * 3)  # here of every expert: number, next entry, tokens
    token_of = _tokens_of(assignment, experts, p.max_entries)
    row_of = _row_addresses(assignment, experts, p.max_entries)
    weight_of = _weights_of(assignment, experts, p.max_entries)
    runs[:] = 0
    for i in range(tokens * used):
        if selected[i] >= 0:
            runs[3 * selected[i] + 2] += 1
    entries = 0
    for e in range(experts):
        runs[3 * e + 1] = entries
        entries += -(-runs[3 * e + 2] // p.multiple) * p.multiple
    token_of[:entries] = -1
    row_of[:entries] = p.x  # padding reads some valid row
    for i in range(tokens * used):
        e = selected[i]
        if e >= 0:
            entry = runs[3 * e + 1]
            runs[3 * e + 1] += 1
            token_of[entry], row_of[entry], weight_of[entry] = i // used, p.x + i // used * p.n * 4, weights[i]
    count = 0
    for e in range(experts):
        token_count = runs[3 * e + 2]
        if token_count > 0:
            runs[3 * count], runs[3 * count + 1], runs[3 * count + 2] = e, runs[3 * e + 1] - token_count, token_count
            count += 1
    store_int(entries, assignment + ENTRIES)
    store_int(count, assignment + RUNS)
    store_int(0, assignment + NEXT_GATE)
    store_int(0, assignment + NEXT_UP)
    store_int(0, assignment + NEXT_DOWN)


class GatherParameters(NamedTuple):
    """Parameters of `gather`."""

    assignment: int
    experts: int
    max_entries: int
    n: int
    tiles: int  # tiles of gemm.py, or 0 for none
    tile_tokens: int
    vectors: int  # activation buffers of runs with few tokens
    vector_bytes: int


@callback(OPERATION)
def gather(parameters, thread, threads):
    """Quantize the rows of all entries: to tiles, and to activation buffers for runs with few tokens."""
    p = load_record(GatherParameters, parameters)
    row_of = _row_addresses(p.assignment, p.experts, p.max_entries)
    tile_bytes = RECORD_BYTES * p.tile_tokens * (p.n // 32)
    for i in range(_run_count(p.assignment)):
        run = _run(p.assignment, i)
        if run.tokens > FEW_TOKENS and p.tiles == 0:
            continue
        for entry in range(run.first + thread, run.first + run.tokens, threads):
            if run.tokens <= FEW_TOKENS:
                buffer = p.vectors + (i * FEW_TOKENS + entry - run.first) * p.vector_bytes
                copy_floats(buffer, row_of[entry], p.n)
                quantize_range(buffer, p.n, 0, p.n)
            else:
                quantize_token(row_of[entry], p.n, p.tiles + entry // p.tile_tokens * tile_bytes, entry % p.tile_tokens)


# ----------------------------------------------------------------------------------------------------------- products


class ExpertMatrix(NamedTuple):
    """What a product with one matrix of all experts reads: the kernels of its type, its shape, its input, scratch."""

    assignment: int
    experts: int
    unpack: int  # functions of expert_panels.py
    product: int
    tile_tokens: int
    panel_bytes: int  # of 32 columns
    expert_bytes: int  # from one expert's matrix to the next
    row_bytes: int
    n: int  # columns
    rows: int
    x: int  # tiles of gemm.py, or addresses of float32 rows
    entry_bytes: int  # of x
    scratch: int
    private_stride: int
    matvec: int  # function of matvec.py
    vectors: int  # activation buffers of runs with few tokens
    vector_bytes: int


class HiddenBuffers(NamedTuple):
    """Where act(gate) * up goes, as `add_down` reads it."""

    hidden: int  # tiles of gemm.py, or float32[entries, ff]
    tile_tokens: int  # 0: float32 rows
    vectors: int  # activation buffers of runs with few tokens
    vector_bytes: int


@simd_intrinsic("void")
def _add_scaled(ir: IrBuilder, x: Value, weight: float, out: Value) -> None:
    """out[0 .. 31] += weight * x[0 .. 31]."""
    for i in range(0, EXPERT_ROWS, 16):
        scaled = ir.load(_FLOATS16, x + 4 * i) * ir.splat(weight, 16)  # type: ignore[arg-type]  # a Value in the body
        ir.store(ir.load(_FLOATS16, out + 4 * i) + scaled, out + 4 * i)


@simd_intrinsic("void")
def _copy(ir: IrBuilder, x: Value, out: Value) -> None:
    """Copy EXPERT_ROWS floats."""
    for i in range(0, EXPERT_ROWS, 16):
        ir.store(ir.load(_FLOATS16, x + 4 * i), out + 4 * i)


@simd_intrinsic("void")
def _add_bias(ir: IrBuilder, bias: Value, out: Value, count: Value, stride: Value) -> None:
    """out[t, 0 .. 31] += bias[0 .. 31] for t < count; `stride` in bytes."""
    with ir.loop(0, count) as t:
        for i in range(0, EXPERT_ROWS, 16):
            address = out + t * stride + 4 * i
            ir.store(ir.load(_FLOATS16, address) + ir.load(_FLOATS16, bias + 4 * i), address)


@kernel
def _scale_and_bias(scales, bias, expert, rows, row, out, count, stride):
    """out[t, 0 .. 31] = scale out + bias for t < count: rows row .. row + 31 of an expert; 0 stands for neither."""
    if scales != 0:
        factor = load_float(scales + expert * 4)
        for t in range(count):
            scale_range(out + t * stride, 0, EXPERT_ROWS, factor)
    if bias != 0:
        _add_bias(bias + (expert * rows + row) * 4, out, count, stride)


@kernel
def _store_hidden(x, hidden, ff, entry, column, tile_tokens):
    """Store columns column .. column + 31 of an entry's activation, in its tile or as float32 (`tile_tokens` 0)."""
    if tile_tokens == 0:
        _copy(x, hidden + (entry * ff + column) * 4)
    else:
        record = hidden + (entry // tile_tokens * (ff // 32) + column // 32) * RECORD_BYTES * tile_tokens
        quantize_token(x, EXPERT_ROWS, record, entry % tile_tokens)


@kernel
def _multiply_few(matvec, matrix, n, row, count, vectors, vector_bytes, out, stride):
    """out[t, 0 .. 31] = EXPERT_ROWS rows of an expert's matrix times each of `many` vectors; strides in bytes."""
    for t in range(count):
        call6(matvec, matrix, n, row, row + EXPERT_ROWS, vectors + t * vector_bytes, out + t * stride - row * 4)


class GateUpParameters(NamedTuple):
    """Parameters of `gate_up`."""

    matrix: int  # address of an ExpertMatrix that describes gate and up alike
    gate: int
    up: int  # 0: act(gate x) * (gate x)
    hidden: int  # address of HiddenBuffers
    activation: int  # function of gated_activations.py
    gate_bias: int = 0  # float32[experts, ff], or 0
    up_bias: int = 0
    gate_scales: int = 0  # float32[experts], or 0
    up_scales: int = 0
    weighted: int = 0  # entries of the assignment at most, where gate and up get w x; 0: they get x


@callback(OPERATION)
def gate_up(parameters, thread, threads):
    """hidden = act(gate x) * (up x) for all entries; gate and up are of one type."""
    p = load_record(GateUpParameters, parameters)
    m, target = load_record(ExpertMatrix, p.matrix), load_record(HiddenBuffers, p.hidden)
    n, ff, tokens = m.n, m.rows, m.tile_tokens
    blocks, panel_bytes = ff // EXPERT_ROWS, n // 32 * m.panel_bytes
    panels = m.scratch + thread * m.private_stride
    results, result_bytes = panels + 2 * panel_bytes, tokens * EXPERT_ROWS * 4
    sides = 2 if p.up != 0 else 1
    to_up = result_bytes if p.up != 0 else 0
    weight_of = _weights_of(m.assignment, m.experts, p.weighted)
    units = _run_count(m.assignment) * blocks
    while True:
        unit = atomic_add(1, m.assignment + NEXT_GATE)
        if unit >= units:
            break
        i, row = unit // blocks, unit % blocks * EXPERT_ROWS
        run = _run(m.assignment, i)
        gate, up = p.gate + run.expert * m.expert_bytes, p.up + run.expert * m.expert_bytes
        if run.tokens <= FEW_TOKENS:
            vectors, vector_bytes = m.vectors + i * FEW_TOKENS * m.vector_bytes, m.vector_bytes
            for side in range(sides):
                matrix, out = up if side else gate, results + side * result_bytes
                _multiply_few(m.matvec, matrix, n, row, run.tokens, vectors, vector_bytes, out, EXPERT_ROWS * 4)
                bias, scales = (p.up_bias, p.up_scales) if side else (p.gate_bias, p.gate_scales)
                _scale_and_bias(scales, bias, run.expert, ff, row, out, run.tokens, EXPERT_ROWS * 4)
            for t in range(run.tokens):
                result, buffer = (
                    results + t * EXPERT_ROWS * 4,
                    target.vectors + (i * FEW_TOKENS + t) * target.vector_bytes,
                )
                if p.weighted != 0:
                    scale_range(result, 0, EXPERT_ROWS, weight_of[run.first + t])
                    scale_range(result + to_up, 0, EXPERT_ROWS, weight_of[run.first + t])
                call6(p.activation, result, result + to_up, 0, EXPERT_ROWS, buffer + row * 4, 0)
                quantize_range(buffer, ff, row, row + EXPERT_ROWS)
            continue
        for side in range(sides):
            start = (up if side else gate) + row * m.row_bytes
            call3(m.unpack, start, n, panels + side * panel_bytes)
        for entry in range(run.first, run.first + run.tokens, tokens):
            x = m.x + entry * m.entry_bytes
            for side in range(sides):
                out = results + side * result_bytes
                call6(m.product, panels + side * panel_bytes, n, x, out, EXPERT_ROWS * 4, 0)
                bias, scales = (p.up_bias, p.up_scales) if side else (p.gate_bias, p.gate_scales)
                _scale_and_bias(scales, bias, run.expert, ff, row, out, tokens, EXPERT_ROWS * 4)
            for t in range(min(tokens, run.first + run.tokens - entry)):
                result = results + t * EXPERT_ROWS * 4
                if p.weighted != 0:
                    scale_range(result, 0, EXPERT_ROWS, weight_of[entry + t])
                    scale_range(result + to_up, 0, EXPERT_ROWS, weight_of[entry + t])
                call6(p.activation, result, result + to_up, 0, EXPERT_ROWS, result, 0)
                _store_hidden(result, target.hidden, ff, entry + t, row, target.tile_tokens)


class MultiplyParameters(NamedTuple):
    """Parameters of `multiply`."""

    matrix: int  # address of an ExpertMatrix
    weights: int
    out: int  # float32[entries, rows]
    counter: int  # NEXT_GATE or NEXT_UP
    bias: int = 0  # float32[experts, rows], or 0
    scales: int = 0  # float32[experts], or 0


@callback(OPERATION)
def multiply(parameters, thread, threads):
    """out = (scale) W x (+ bias) for all entries."""
    p = load_record(MultiplyParameters, parameters)
    m = load_record(ExpertMatrix, p.matrix)
    n, rows, tokens = m.n, m.rows, m.tile_tokens
    blocks = rows // EXPERT_ROWS
    panel = m.scratch + thread * m.private_stride
    units = _run_count(m.assignment) * blocks
    while True:
        unit = atomic_add(1, m.assignment + p.counter)
        if unit >= units:
            break
        i, row = unit // blocks, unit % blocks * EXPERT_ROWS
        run = _run(m.assignment, i)
        matrix, out = p.weights + run.expert * m.expert_bytes, p.out + row * 4
        if run.tokens <= FEW_TOKENS:
            vectors, vector_bytes = m.vectors + i * FEW_TOKENS * m.vector_bytes, m.vector_bytes
            first_out = out + run.first * rows * 4
            _multiply_few(m.matvec, matrix, n, row, run.tokens, vectors, vector_bytes, first_out, rows * 4)
            _scale_and_bias(p.scales, p.bias, run.expert, rows, row, first_out, run.tokens, rows * 4)
            continue
        call3(m.unpack, matrix + row * m.row_bytes, n, panel)
        for entry in range(run.first, run.first + run.tokens, tokens):
            call6(m.product, panel, n, m.x + entry * m.entry_bytes, out + entry * rows * 4, rows * 4, 0)
            _scale_and_bias(p.scales, p.bias, run.expert, rows, row, out + entry * rows * 4, tokens, rows * 4)


class ActivateParameters(NamedTuple):
    """Parameters of `activate`."""

    assignment: int
    gate: int  # float32[entries, ff], overwritten
    up: int  # float32[entries, ff]
    ff: int
    hidden: int  # address of HiddenBuffers
    activation: int  # function of gated_activations.py
    experts: int
    weighted: int = 0  # entries of the assignment at most, where gate and up get w x; 0: they get x


@callback(OPERATION)
def activate(parameters, thread, threads):
    """hidden = act(gate) * up for all entries."""
    p = load_record(ActivateParameters, parameters)
    target, ff = load_record(HiddenBuffers, p.hidden), p.ff
    weight_of = _weights_of(p.assignment, p.experts, p.weighted)
    for i in range(_run_count(p.assignment)):
        run = _run(p.assignment, i)
        for entry in range(run.first + thread, run.first + run.tokens, threads):
            gate, up = p.gate + entry * ff * 4, p.up + entry * ff * 4
            if p.weighted != 0:
                scale_range(gate, 0, ff, weight_of[entry])
                scale_range(up, 0, ff, weight_of[entry])
            if run.tokens <= FEW_TOKENS:
                buffer = target.vectors + (i * FEW_TOKENS + entry - run.first) * target.vector_bytes
                call6(p.activation, gate, up, 0, ff, buffer, 0)
                quantize_range(buffer, ff, 0, ff)
                continue
            call6(p.activation, gate, up, 0, ff, gate, 0)
            for column in range(0, ff, EXPERT_ROWS):
                _store_hidden(gate + column * 4, target.hidden, ff, entry, column, target.tile_tokens)


class AddDownParameters(NamedTuple):
    """Parameters of `add_down`."""

    matrix: int  # address of an ExpertMatrix
    weights: int
    out: int  # float32[tokens, rows]
    max_entries: int
    quantized: int  # 1: x of the matrix is tiles of gemm.py; 0: float32 rows one after another
    bias: int = 0  # float32[experts, rows], or 0
    scales: int = 0  # float32[experts], or 0
    weighted: int = 1  # 0: add the outputs as they are


@callback(OPERATION)
def add_down(parameters, thread, threads):
    """out[token] += weight * (scale W x + bias) for all entries, expert by expert."""
    p = load_record(AddDownParameters, parameters)
    m = load_record(ExpertMatrix, p.matrix)
    n, rows, tokens = m.n, m.rows, m.tile_tokens
    token_of = _tokens_of(m.assignment, m.experts, p.max_entries)
    weight_of = _weights_of(m.assignment, m.experts, p.max_entries)
    panel = m.scratch + thread * m.private_stride
    results = panel + n // 32 * m.panel_bytes
    addresses = integers(results + tokens * EXPERT_ROWS * 4, tokens)
    while True:
        row = atomic_add(1, m.assignment + NEXT_DOWN) * EXPERT_ROWS
        if row >= rows // EXPERT_ROWS * EXPERT_ROWS:
            break
        for i in range(_run_count(m.assignment)):
            run = _run(m.assignment, i)
            matrix = p.weights + run.expert * m.expert_bytes
            if run.tokens > FEW_TOKENS:
                call3(m.unpack, matrix + row * m.row_bytes, n, panel)
            for entry in range(run.first, run.first + run.tokens, tokens):
                x = m.x + entry * m.entry_bytes
                if run.tokens <= FEW_TOKENS:
                    vectors, vector_bytes = m.vectors + i * FEW_TOKENS * m.vector_bytes, m.vector_bytes
                    _multiply_few(m.matvec, matrix, n, row, run.tokens, vectors, vector_bytes, results, EXPERT_ROWS * 4)
                else:
                    if p.quantized == 0:
                        for t in range(tokens):
                            addresses[t] = x + t * m.entry_bytes
                        x = results + tokens * EXPERT_ROWS * 4
                    call6(m.product, panel, n, x, results, EXPERT_ROWS * 4, 0)
                _scale_and_bias(p.scales, p.bias, run.expert, rows, row, results, tokens, EXPERT_ROWS * 4)
                for t in range(min(tokens, run.first + run.tokens - entry)):
                    target = p.out + (token_of[entry + t] * rows + row) * 4
                    weight = weight_of[entry + t] if p.weighted != 0 else np.float32(1)
                    _add_scaled(results + t * EXPERT_ROWS * 4, weight, target)
