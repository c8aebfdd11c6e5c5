"""Operations of recurrent layers (archs.blocks.DeltaNet): a short convolution, linear attention by a delta rule.

All of them are plain in `kernels/reference` and `runtime/blocks/recurrent.py`. A batch is spans of several sequences,
as in prefill_ops.py; a single token is a batch of one. The states of a sequence, a `LayerStates` per layer, are read
and written in place. Products of a layer give

    qkv       float32[tokens, channels]: inputs of the convolution, which `convolve` replaces by queries, keys, values
    beta, alpha   one number per token and value head, see `RateFields`

`convolve` splits channels over threads: a thread passes a window of the last inputs over all tokens of its channels,
then normalizes the heads of queries and keys among them.

For a few tokens `update` changes the state S [head_dim_k, head_dim_v] of a value head once per token. With the decay
e^g, columns of S are independent of each other:

    d = beta (v - e^g S^T k)        o = e^g S^T q + (k . q) d        S = e^g S + k d^T

so a block of columns is read from memory once, for both products; when it is read again and written, it is in a cache.
Generation is bound by the bytes of the states, which are read and written once; `update` reaches 80 % of the speed at
which one thread scales an array of the same size in place (47 of 59 GB/s, heads of 128 by 128, AVX-512).

For more tokens `attend` takes DELTA_CHUNK tokens at a time, by matrix products: the formulas of
`runtime/blocks/recurrent.py`. A thread takes a value head of a span, with its state and all products in scratch memory
that fits an L2 cache. The weights w_ij = e^(G_i - G_j) are products of single decays, row by row: differences of
running sums would lose digits, and each would cost an exponential. Products smaller than MIN_DECAY count as 0. The
bound is multiply-adds: `attend` reaches 56 % of those of `float_tile` in the L1 cache (75 of 133 GMAC/s), the rest is
rates, copies and transposes. Both operations take 4 to 6 % of the time of a model like Qwen3-Next.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from quantkit.codegen.callbacks import Callback, callback
from quantkit.codegen.jit import kernel
from quantkit.codegen.simd import (
    F32,
    IrBuilder,
    Value,
    atomic_add,
    copy_floats,
    floats,
    load_float,
    simd_intrinsic,
    store_int,
    vector,
)
from quantkit.placement.kernel_sizes import (
    DELTA_CHUNK,
    DELTA_FEW_TOKENS,
    DELTA_ROWS,
    FLOAT_TILE_TOKENS,
    float_lanes,
)
from quantkit.runtime.kernels.cpu.decode_ops import sum_of_squares
from quantkit.runtime.kernels.cpu.float_gemm import float_tile, panel_rows, transpose_block
from quantkit.runtime.kernels.cpu.gates import dot
from quantkit.runtime.kernels.cpu.operation import OPERATION, load_record, record_bytes, row_share
from quantkit.runtime.kernels.cpu.prefill_ops import SPAN_BYTES, STATE_BYTES, BatchState, SpanState
from quantkit.runtime.kernels.reference import exp, softplus

MIN_DECAY = 1e-34  # products of decays below this count as 0: with subnormal numbers, products would be slow
_EPS = np.float32(1e-6)  # of the norm of queries and keys


class LayerStates(NamedTuple):
    """Where the state of one recurrent layer of one sequence is (kv/saved_state.py)."""

    inputs: int  # float32[kernel - 1, channels]
    heads: int  # float32[value_heads, head_dim_k, head_dim_v]


class StatesView(NamedTuple):
    """The states of one layer; set when a plan runs with other caches."""

    states: int  # LayerStates of each sequence


STATES_BYTES = record_bytes(LayerStates)


class HeadFields(NamedTuple):
    """Dimensions of heads (archs.blocks.Recurrence). Value head h reads key head h % key_heads if tiled."""

    key_heads: int
    value_heads: int
    dim_k: int
    dim_v: int
    tiled: int


class RateFields(NamedTuple):
    """Where beta and alpha of a token's value head h are: element h // group * stride + h % group of a row."""

    beta: int  # float32[tokens, row], from the first beta on
    alpha: int  # the same for alpha
    row: int
    group: int
    stride: int
    a: int  # float32[value_heads], below 0
    dt: int  # float32[value_heads]


# ---------------------------------------------------------------------------------------------------------- projections


class SplitParameters(NamedTuple):
    """Parameters of `split_projection`."""

    state: int  # BatchState
    projected: int  # float32[tokens, key_heads, 2 head_dim_k + 2 each]: query, key, values and gates of a key head
    heads: int  # address of a HeadFields
    multiple: int  # as in `convolve`, which may follow without a barrier
    qkv: int  # float32[tokens, channels]
    gates: int  # float32[tokens, inner]


@callback(OPERATION)
def split_projection(parameters, thread, threads):
    """Sort the outputs of one matrix, by key heads, to queries, keys, values and gates. Threads split the channels."""
    p = load_record(SplitParameters, parameters)
    heads, tokens = load_record(HeadFields, p.heads), load_record(BatchState, p.state).tokens
    dim, each = heads.dim_k, heads.value_heads // heads.key_heads * heads.dim_v
    keys, inner, width = heads.key_heads * dim, heads.key_heads * each, 2 * (dim + each)
    channels = 2 * keys + inner
    first, last = row_share(channels, p.multiple, thread, threads)
    for t in range(tokens):
        x = floats(p.projected + t * heads.key_heads * width * 4, heads.key_heads * width)
        y, z = floats(p.qkv + t * channels * 4, channels), floats(p.gates + t * inner * 4, inner)
        for c in range(first, last):
            if c < 2 * keys:
                y[c] = x[c % keys // dim * width + c // keys * dim + c % dim]
            else:
                value = c - 2 * keys
                source = value // each * width + 2 * dim + value % each
                y[c], z[value] = x[source], x[source + each]


# ---------------------------------------------------------------------------------------------------------- convolution


@simd_intrinsic("void")
def _convolve_columns(
    ir: IrBuilder, kernel_size: int, vectors: int, lanes: int, past: Value, x: Value, stride: Value, tokens: Value,
    taps: Value, bias: Value,
) -> None:  # fmt: skip
    """Convolve vectors * lanes channels of x float32[tokens] plus a bias, in place, then x * sigmoid(x).

    `past` float32[kernel_size - 1] becomes the last inputs. Rows of past, x and taps are `stride` bytes apart.
    """
    kind = vector(lanes, F32) if lanes > 1 else F32
    columns = [4 * lanes * v for v in range(vectors)]
    rows = range(kernel_size)
    weights = [[ir.load(kind, taps + stride * j + c) for c in columns] for j in rows]
    biases = [ir.load(kind, bias + c) for c in columns]
    window = [[ir.variable(ir.load(kind, past + stride * j + c)) for c in columns] for j in range(kernel_size - 1)]
    with ir.loop(0, tokens) as t:
        token = x + t * stride
        for v, c in enumerate(columns):
            inputs = [row[v].get() for row in window] + [ir.load(kind, token + c)]
            total = biases[v]
            for j in rows:
                total = ir.fma(inputs[j], weights[j][v], total)
            sigmoid = ir.constant(kind, 1.0) / (ir.exp(total * -1.0) + 1.0)
            ir.store(total * sigmoid, token + c)
            for row, following in zip(window, inputs[1:]):
                row[v].set(following)
    for j, row in enumerate(window):
        for v, c in enumerate(columns):
            ir.store(row[v].get(), past + stride * j + c)


@kernel
def _normalize(x, dim, scale):
    """x = x / sqrt(sum(x^2) + 1e-6) * scale, float32[dim], in place."""
    y = floats(x, dim)
    factor = scale / np.sqrt(sum_of_squares(x, dim) + _EPS)
    for i in range(dim):
        y[i] *= factor


class ConvolveParameters(NamedTuple):
    """Parameters of `convolve`."""

    state: int  # BatchState
    qkv: int  # float32[tokens, channels], overwritten
    taps: int  # float32[kernel, channels]
    layer_states: int  # address of a StatesView
    channels: int
    bias: int  # float32[channels]
    keys: int  # channels of all queries, and of all keys; 0: none is normalized
    dim_k: int
    query_scale: int  # address of a float32
    multiple: int  # channels of a thread's share; a multiple of dim_k
    next_head: int  # address of an int64 that is set to 0, for `attend`


@functools.cache
def convolve(kernel_size: int) -> Callback:
    """The operation that convolves qkv and normalizes queries and keys by heads, in place."""

    @callback(OPERATION)
    def run(parameters, thread, threads):
        p = load_record(ConvolveParameters, parameters)
        view, spans = load_record(StatesView, p.layer_states), load_record(BatchState, p.state).spans
        channels, stride, scale = p.channels, p.channels * 4, load_float(p.query_scale)
        first, last = row_share(channels, p.multiple, thread, threads)
        for s in range(spans):
            span = load_record(SpanState, p.state + STATE_BYTES + s * SPAN_BYTES)
            past = load_record(LayerStates, view.states + s * STATES_BYTES).inputs
            x = p.qkv + span.start * stride
            pairs, whole = first + (last - first) // 32 * 32, first + (last - first) // 16 * 16
            for c in range(first, pairs, 32):
                _convolve_columns(
                    kernel_size, 2, 16, past + c * 4, x + c * 4, stride, span.tokens, p.taps + c * 4, p.bias + c * 4
                )
            for c in range(pairs, whole, 16):
                _convolve_columns(
                    kernel_size, 1, 16, past + c * 4, x + c * 4, stride, span.tokens, p.taps + c * 4, p.bias + c * 4
                )
            for c in range(whole, last):
                _convolve_columns(
                    kernel_size, 1, 1, past + c * 4, x + c * 4, stride, span.tokens, p.taps + c * 4, p.bias + c * 4
                )
            for t in range(span.tokens):
                for c in range(first, min(last, 2 * p.keys), p.dim_k):
                    _normalize(x + t * stride + c * 4, p.dim_k, scale if c < p.keys else np.float32(1))
        if thread == 0:
            store_int(0, p.next_head)

    return run


# ---------------------------------------------------------------------------------------------------------------- rates


@kernel
def _decay(rates, token, head):
    """e^g of a token's value head: g = a softplus(alpha + dt)."""
    place = token * rates.row + head // rates.group * rates.stride + head % rates.group
    alpha = load_float(rates.alpha + place * 4)
    return exp(load_float(rates.a + head * 4) * softplus(alpha + load_float(rates.dt + head * 4)))


@kernel
def _beta(rates, token, head):
    place = token * rates.row + head // rates.group * rates.stride + head % rates.group
    return np.float32(1) / (np.float32(1) + exp(-load_float(rates.beta + place * 4)))


# ----------------------------------------------------------------------------------------------------------- few tokens


def by_columns(ir: IrBuilder, n: Value, width: int, columns: Callable[[Value, int, int], None]) -> None:
    """Emit `columns(first, vectors, lanes)` for n columns: blocks of `width`, then of 16, then single ones."""
    wide, whole = n & -width, n & -16
    with ir.loop(0, wide, width) as first:
        columns(first, width // 16, 16)
    with ir.loop(wide, whole, 16) as first:
        columns(first, 1, 16)
    with ir.loop(whole, n) as first:
        columns(first, 1, 1)


@simd_intrinsic("void")
def update_state(
    ir: IrBuilder, by_rows: int, state: Value, q: Value, k: Value, v: Value, dim_k: Value, dim_v: Value, decay: float,
    decays: Value, beta: float, key_query: float, out: Value,
) -> None:  # fmt: skip
    """Change a head's state by a token, and write out = S^T q; see the module. key_query is k . q.

    With `by_rows`, row i of the state decays by `decays` float32[dim_k] (archs.blocks.KimiDelta), and `decay` is 1.
    """
    row_bytes = dim_v * 4

    def columns(first: Value, vectors: int, lanes: int) -> None:
        kind = vector(lanes, F32) if lanes > 1 else F32
        offsets = [first * 4 + 4 * lanes * i for i in range(vectors)]

        def spread(x: Value) -> Value:
            return ir.splat(x, lanes) if lanes > 1 else x

        keys, queries = ([ir.variable(ir.zero(kind) if lanes > 1 else ir.constant(F32, 0.0)) for _ in offsets]
                         for _ in range(2))  # fmt: skip
        with ir.loop(0, dim_k) as i:
            row, key, query = state + i * row_bytes, *(spread(ir.load(F32, x + i * 4)) for x in (k, q))
            fade = spread(ir.load(F32, decays + i * 4)) if by_rows else None
            for offset, of_key, of_query in zip(offsets, keys, queries):
                s = ir.load(kind, row + offset)
                s = s if fade is None else s * fade
                of_key.set(ir.fma(s, key, of_key.get()))
                of_query.set(ir.fma(s, query, of_query.get()))
        shrink, rate, product = map(spread, (decay, beta, key_query))  # type: ignore[arg-type]  # as in `exp`
        deltas = []
        for offset, of_key, of_query in zip(offsets, keys, queries):
            delta = (ir.load(kind, v + offset) - of_key.get() * shrink) * rate
            ir.store(ir.fma(delta, product, of_query.get() * shrink), out + offset)
            deltas.append(delta)
        with ir.loop(0, dim_k) as i:
            row, key = state + i * row_bytes, spread(ir.load(F32, k + i * 4))
            fade = spread(ir.load(F32, decays + i * 4)) if by_rows else shrink
            for offset, delta in zip(offsets, deltas):
                ir.store(ir.fma(delta, key, ir.load(kind, row + offset) * fade), row + offset)

    # 128 or 32 columns, whose sums fit the registers
    by_columns(ir, dim_v, 128 if ir.isa.startswith("avx512") else 32, columns)


@kernel
def _key_of(heads, head):
    """The key head that a value head reads."""
    return head % heads.key_heads if heads.tiled != 0 else head * heads.key_heads // heads.value_heads


@kernel
def _update(heads, rates, qkv, token, head, state, out):
    """Change the state of a head by one token, and write the head's part of out float32[tokens, inner]."""
    dim_k, dim_v, keys, inner = heads.dim_k, heads.dim_v, heads.key_heads * heads.dim_k, heads.value_heads * heads.dim_v
    q = qkv + (token * (2 * keys + inner) + _key_of(heads, head) * dim_k) * 4
    k, v = q + keys * 4, qkv + (token * (2 * keys + inner) + 2 * keys + head * dim_v) * 4
    decay, beta = _decay(rates, token, head), _beta(rates, token, head)
    target = out + (token * inner + head * dim_v) * 4
    update_state(0, state, q, k, v, dim_k, dim_v, decay, 0, beta, dot(k, q, dim_k), target)


class UpdateParameters(NamedTuple):
    """Parameters of `update`."""

    heads: int  # address of a HeadFields
    rates: int  # address of a RateFields
    qkv: int  # float32[channels]: queries, keys, values
    layer_states: int  # address of a StatesView, of one sequence
    multiple: int  # elements of out in a thread's share; a multiple of head_dim_v
    out: int  # float32[inner]


@callback(OPERATION)
def update(parameters, thread, threads):
    """The delta rule for one token: change the states of the thread's heads, and write their outputs."""
    p = load_record(UpdateParameters, parameters)
    heads, rates = load_record(HeadFields, p.heads), load_record(RateFields, p.rates)
    state = load_record(LayerStates, load_record(StatesView, p.layer_states).states).heads
    dim, inner = heads.dim_v, heads.value_heads * heads.dim_v
    first, last = row_share(inner, p.multiple, thread, threads)
    for head in range(first // dim, last // dim):
        _update(heads, rates, p.qkv, 0, head, state + head * heads.dim_k * dim * 4, p.out)


# --------------------------------------------------------------------------------------------------------------- chunks


@kernel
def _copy_rows(x, x_stride, rows, n, y, y_stride):
    """Copy rows of n floats; strides in bytes."""
    for i in range(rows):
        copy_floats(y + i * y_stride, x + i * x_stride, n)


@kernel
def _clear_rows(y, y_stride, first, last, n):
    for i in range(first, last):
        floats(y + i * y_stride, n)[:] = 0


@kernel
def _scale_rows(x, stride, rows, columns, factors):
    """x[i] *= factors[i], for rows of `columns` floats `stride` bytes apart."""
    factor = floats(factors, rows)
    for i in range(rows):
        row, f = floats(x + i * stride, columns), factor[i]
        for c in range(columns):
            row[c] *= f


@kernel
def _set_updates(x, stride, rows, columns, values, decays, betas):
    """x[i] = beta_i (values[i] - decay_i x[i]): the right side R of the equations, of x = S^T k."""
    decay, beta = floats(decays, rows), floats(betas, rows)
    for i in range(rows):
        row, value, d, b = floats(x + i * stride, columns), floats(values + i * stride, columns), decay[i], beta[i]
        for c in range(columns):
            row[c] = b * (value[c] - d * row[c])


@simd_intrinsic("void")
def _weigh_row(
    ir: IrBuilder, i: Value, products: Value, attention: Value, weights: Value, decay: Value, beta: Value
) -> None:
    """Multiply row i of a chunk's products by the weights w_ij, which are first advanced from those of row i - 1.

    products float32[DELTA_CHUNK] become -beta w_ij k_i . k_j, attention w_ij q_i . k_j; w_ij is 0 for j > i. decay and
    beta are addresses.
    """
    kind = vector(16, F32)
    smallest, zero, one = ir.constant(kind, MIN_DECAY), ir.zero(kind), ir.constant(kind, 1.0)
    shrink, factor = (ir.splat(ir.load(F32, address), 16) for address in (decay, beta))
    factor = factor * -1.0
    for first in range(0, DELTA_CHUNK, 16):
        lanes = ir.constant(vector(16, i.type), range(first, first + 16))
        w = ir.load(kind, weights + 4 * first) * shrink
        w = Value(ir, ir.builder.select(ir.builder.fcmp_ordered("<", w.ir, smallest.ir), zero.ir, w.ir))
        w = ir.choose(ir.between(lanes, ir.splat(i, 16), ir.splat(i + 1, 16)), one, w)
        ir.store(w, weights + 4 * first)
        for address, f in ((products, w * factor), (attention, w)):
            ir.store(ir.load(kind, address + 4 * first) * f, address + 4 * first)


@simd_intrinsic("void")
def _scale_columns(ir: IrBuilder, x: Value, rows: Value, factors: Value) -> None:
    """x[i, j] *= factors[j], x float32[rows, DELTA_CHUNK]."""
    kind = vector(16, F32)
    columns = range(0, 4 * DELTA_CHUNK, 64)
    scales = [ir.load(kind, factors + c) for c in columns]
    with ir.loop(0, rows) as i:
        for c, scale in zip(columns, scales):
            address = x + i * (4 * DELTA_CHUNK) + c
            ir.store(ir.load(kind, address) * scale, address)


@simd_intrinsic("void")
def _solve_block(ir: IrBuilder, weights: Value, x: Value, x_stride: Value) -> None:
    """x[i] += sum over j < i of weights[i, j] x[j], in order of i < FLOAT_TILE_TOKENS; `float_lanes()` columns.

    Rows of weights have DELTA_CHUNK elements.
    """
    kind = vector(16, F32)
    for v in range(float_lanes() // 16):
        rows: list[Value] = []
        for i in range(FLOAT_TILE_TOKENS):
            address = x + x_stride * i + 64 * v
            row = ir.load(kind, address)
            for j, solved in enumerate(rows):
                row = ir.fma(ir.splat(ir.load(F32, weights + 4 * (DELTA_CHUNK * i + j)), 16), solved, row)
            rows.append(row)
            ir.store(row, address)


@kernel
def _products(a, a_stride, b, n, rows, c):
    """c float32[rows, DELTA_CHUNK] = a b of a float32[rows, n], b float32[n, DELTA_CHUNK]; rows are whole tiles."""
    stride = DELTA_CHUNK * 4
    for column in range(0, stride, panel_rows() * 4):
        for row in range(0, rows, FLOAT_TILE_TOKENS):
            target = c + row * stride + column
            float_tile(a + row * a_stride, a_stride, b + column, stride, n, target, stride, 0)


class ChunkSizes(NamedTuple):
    """Dimensions of a head, and those of its scratch matrices (`kernel_sizes.delta_widths`)."""

    dim_k: int
    dim_v: int
    width_k: int  # elements of a row of queries or keys
    rows_k: int  # rows of the state, and of transposed keys
    width_v: int  # elements of a row of values, updates or the state


class Chunk(NamedTuple):
    """Addresses of the scratch matrices of a chunk."""

    queries: int  # float32[DELTA_ROWS, width_k]
    keys: int
    keys_t: int  # float32[rows_k, DELTA_CHUNK]
    products: int  # float32[DELTA_ROWS, DELTA_CHUNK]: -A
    attention: int
    updates: int  # float32[DELTA_ROWS, width_v]: R, then D
    values: int  # then the outputs
    state: int  # float32[rows_k, width_v]
    weights: int  # float32[DELTA_CHUNK]: w_ij of the last row i
    shrinks: int  # the decay of each token
    decays: int  # that from the beginning of the chunk on
    betas: int


@kernel
def _chunk_at(scratch, sizes):
    """The matrices in a thread's scratch memory."""
    keys = scratch + DELTA_ROWS * sizes.width_k * 4
    keys_t = keys + DELTA_ROWS * sizes.width_k * 4
    products = keys_t + sizes.rows_k * DELTA_CHUNK * 4
    attention = products + DELTA_ROWS * DELTA_CHUNK * 4
    updates = attention + DELTA_ROWS * DELTA_CHUNK * 4
    values = updates + DELTA_ROWS * sizes.width_v * 4
    state = values + DELTA_ROWS * sizes.width_v * 4
    weights = state + sizes.rows_k * sizes.width_v * 4
    size = DELTA_CHUNK * 4
    return Chunk(scratch, keys, keys_t, products, attention, updates, values, state, weights, weights + size,
                 weights + 2 * size, weights + 3 * size)  # fmt: skip


@kernel
def _load_chunk(x, stride, keys, values, n, chunk, sizes):
    """Copy queries at x, keys and values at these offsets of a row, of n tokens; products of all pairs of tokens."""
    tile = FLOAT_TILE_TOKENS
    width = sizes.width_k * 4
    _copy_rows(x, stride, n, sizes.dim_k, chunk.queries, width)
    _copy_rows(x + keys, stride, n, sizes.dim_k, chunk.keys, width)
    _copy_rows(x + values, stride, n, sizes.dim_v, chunk.values, sizes.width_v * 4)
    if n < DELTA_CHUNK:
        _clear_rows(chunk.queries, width, n, DELTA_ROWS, sizes.width_k)
        _clear_rows(chunk.keys, width, n, DELTA_ROWS, sizes.width_k)
    for i in range(0, DELTA_CHUNK, 16):
        for j in range(0, sizes.width_k, 16):
            source, target = chunk.keys + i * width + j * 4, chunk.keys_t + (j * DELTA_CHUNK + i) * 4
            transpose_block(source, width, target, DELTA_CHUNK * 4)
    rows = -(-n // tile) * tile
    _products(chunk.keys, width, chunk.keys_t, sizes.dim_k, rows, chunk.products)
    _products(chunk.queries, width, chunk.keys_t, sizes.dim_k, rows, chunk.attention)


@kernel
def _weigh_chunk(rates, token, head, n, chunk):
    """Decays and betas of n tokens from `token` on; products and keys become those with weights."""
    shrink, decay, beta = floats(chunk.shrinks, n), floats(chunk.decays, n), floats(chunk.betas, n)
    floats(chunk.weights, DELTA_CHUNK)[:] = 0
    total = np.float32(1)
    for i in range(n):
        shrink[i], beta[i] = _decay(rates, token + i, head), _beta(rates, token + i, head)
        total *= shrink[i]
        if total < np.float32(MIN_DECAY):
            total = np.float32(0)
        decay[i] = total
        row, token_decay, token_beta = i * DELTA_CHUNK * 4, chunk.shrinks + i * 4, chunk.betas + i * 4
        _weigh_row(i, chunk.products + row, chunk.attention + row, chunk.weights, token_decay, token_beta)


@kernel
def _attend_columns(chunk, sizes, column, n):
    """Outputs, in place of the values, and the new state, of `panel_rows()` columns from byte `column` of a row on."""
    tile, columns, stride, width = FLOAT_TILE_TOKENS, panel_rows(), sizes.width_v * 4, sizes.width_k * 4
    state, updates, values = chunk.state + column, chunk.updates + column, chunk.values + column
    rows, line = -(-n // tile) * tile, DELTA_CHUNK * 4
    for row in range(0, rows, tile):
        float_tile(chunk.keys + row * width, width, state, stride, sizes.dim_k, updates + row * stride, stride, 0)
    _set_updates(updates, stride, n, columns, values, chunk.decays, chunk.betas)
    _clear_rows(updates, stride, n, rows, columns)
    for row in range(0, rows, tile):
        float_tile(chunk.queries + row * width, width, state, stride, sizes.dim_k, values + row * stride, stride, 0)
    _scale_rows(values, stride, n, columns, chunk.decays)
    for row in range(0, rows, tile):
        target = updates + row * stride
        float_tile(chunk.products + row * line, line, updates, stride, row, target, stride, 1)
        _solve_block(chunk.products + row * line + row * 4, target, stride)
        target = values + row * stride
        float_tile(chunk.attention + row * line, line, updates, stride, min(row + tile, n), target, stride, 1)
    decay = load_float(chunk.decays + (n - 1) * 4)
    for i in range(sizes.dim_k):
        x = floats(state + i * stride, columns)
        for c in range(columns):
            x[c] *= decay
    for row in range(0, sizes.rows_k, tile):
        float_tile(chunk.keys_t + row * line, line, updates, stride, n, state + row * stride, stride, 1)


@kernel
def _attend_head(heads, sizes, rates, qkv, first, tokens, head, state, out, scratch):
    """The delta rule of one head for `tokens` tokens from `first` on, by chunks; `state` is changed."""
    keys, inner, chunk = heads.key_heads * heads.dim_k, heads.value_heads * heads.dim_v, _chunk_at(scratch, sizes)
    stride, key = (2 * keys + inner) * 4, _key_of(heads, head) * heads.dim_k
    floats(scratch, (chunk.weights - scratch) // 4)[:] = 0
    _copy_rows(state, heads.dim_v * 4, heads.dim_k, heads.dim_v, chunk.state, sizes.width_v * 4)
    for token in range(first, first + tokens, DELTA_CHUNK):
        n = min(DELTA_CHUNK, first + tokens - token)
        value = (2 * keys + head * heads.dim_v - key) * 4
        _load_chunk(qkv + token * stride + key * 4, stride, keys * 4, value, n, chunk, sizes)
        _weigh_chunk(rates, token, head, n, chunk)
        _scale_columns(chunk.keys_t, sizes.dim_k, chunk.weights)
        for column in range(0, sizes.width_v * 4, panel_rows() * 4):
            _attend_columns(chunk, sizes, column, n)
        target = out + (token * inner + head * heads.dim_v) * 4
        _copy_rows(chunk.values, sizes.width_v * 4, n, heads.dim_v, target, inner * 4)
    _copy_rows(chunk.state, sizes.width_v * 4, heads.dim_k, heads.dim_v, state, heads.dim_v * 4)


class AttendParameters(NamedTuple):
    """Parameters of `attend`."""

    state: int  # BatchState
    heads: int  # address of a HeadFields
    sizes: int  # address of a ChunkSizes
    rates: int  # address of a RateFields
    qkv: int  # float32[tokens, channels]: queries, keys, values
    layer_states: int  # address of a StatesView
    next_head: int  # address of an int64: the next head of a span that a thread takes, 0 at first
    out: int  # float32[tokens, inner]
    scratch: int  # kernel_sizes.delta_chunk_bytes per thread
    private_stride: int


@callback(OPERATION)
def attend(parameters, thread, threads):
    """The delta rule for the tokens of all spans. Threads take a head of a span at a time, until none is left."""
    p = load_record(AttendParameters, parameters)
    heads, sizes, rates = (
        load_record(HeadFields, p.heads),
        load_record(ChunkSizes, p.sizes),
        load_record(RateFields, p.rates),
    )
    view, spans = load_record(StatesView, p.layer_states), load_record(BatchState, p.state).spans
    scratch = p.scratch + thread * p.private_stride
    while True:
        item = atomic_add(1, p.next_head)
        s, head = item // heads.value_heads, item % heads.value_heads
        if s >= spans:
            break
        span = load_record(SpanState, p.state + STATE_BYTES + s * SPAN_BYTES)
        states = load_record(LayerStates, view.states + s * STATES_BYTES).heads
        state = states + head * heads.dim_k * heads.dim_v * 4
        if span.tokens > DELTA_FEW_TOKENS:
            _attend_head(heads, sizes, rates, p.qkv, span.start, span.tokens, head, state, p.out, scratch)
        else:
            for token in range(span.start, span.start + span.tokens):
                _update(heads, rates, p.qkv, token, head, state, p.out)
