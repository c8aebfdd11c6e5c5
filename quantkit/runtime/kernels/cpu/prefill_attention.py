"""Attention of a batch of tokens over KV caches: flash attention in pieces, each one key/value head and some tokens.

A thread decodes KEY_BLOCK keys to float32 and transposes them, multiplies them by all query rows of its piece, updates
the online softmax (see decode_attention.py), then does the same with the values. So the cost of decoding a key is
shared by all query rows of the piece: its tokens times the query heads of the group.
"""

from __future__ import annotations

import functools
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
    vector,
)
from quantkit.placement.kernel_sizes import FLOAT_TILE_TOKENS, KEY_BLOCK, piece_rows
from quantkit.runtime.kernels.cpu.decode_attention import cap_scores
from quantkit.runtime.kernels.cpu.float_gemm import float_tile, panel_rows, transpose_block
from quantkit.runtime.kernels.cpu.kv_rows import CACHE_BYTES, KernelHeads, LayerCache, LayerView, rotate, row_floats
from quantkit.runtime.kernels.cpu.operation import OPERATION, load_record
from quantkit.runtime.kernels.cpu.prefill_ops import NEXT_PIECE, SPAN_BYTES, STATE_BYTES, BatchState, SpanState
from quantkit.runtime.kernels.cpu.selection import hide_blocks, sees_blocks
from quantkit.runtime.kernels.reference import exp

_FLOATS16 = vector(16, F32)


@simd_intrinsic("void")
def decode_keys(
    ir: IrBuilder, kind: int, rows: Value, stride: int, count: Value, dim: int, out: Value, out_stride: Value
) -> None:
    """Decode `count` rows of a cache to float32; strides in bytes."""
    with ir.loop(0, count) as i:
        for c, v in row_floats(ir, kind, rows + i * stride, 0, dim):
            ir.store(v, out + i * out_stride + 4 * c)


@simd_intrinsic("void")
def softmax_update(ir, scores, count, first, last, dim, out, softmax_state):
    """Online-softmax update of one query row: scores first .. last - 1 of `count` become e^(score - maximum), others 0.

    softmax_state is float32[2], the running maximum and the denominator. It and out float32[dim] are rescaled when the
    maximum grows.
    """
    masked = ir.constant(_FLOATS16, -1e30)
    lanes = ir.constant(vector(16, first.type), range(16))

    def scores_at(i):
        position = lanes + ir.splat(i, 16)
        inside = ir.between(position, ir.splat(first, 16), ir.splat(last, 16))
        return ir.choose(inside, ir.load(_FLOATS16, scores + i * 4), masked)

    old = ir.load(F32, softmax_state)
    maximum = ir.variable(ir.splat(old, 16))
    with ir.loop(0, count, 16) as i:
        maximum.set(ir.max(maximum.get(), scores_at(i)))
    new = ir.largest(maximum.get())
    denominator = ir.variable(ir.zero(_FLOATS16))
    with ir.loop(0, count, 16) as i:
        weights = ir.exp(scores_at(i) - ir.splat(new, 16))
        ir.store(weights, scores + i * 4)
        denominator.set(denominator.get() + weights)
    rescale = ir.exp(ir.splat(old - new, 16))
    with ir.loop(0, dim, 16) as i:
        ir.store(ir.load(_FLOATS16, out + i * 4) * rescale, out + i * 4)
    ir.store(new, softmax_state)
    ir.store(ir.load(F32, softmax_state + 4) * rescale.lane(0) + ir.sum(denominator.get()), softmax_state + 4)


@kernel
def matmul(a, a_stride, b, b_stride, n, c, c_stride, rows, columns, add):
    """c float32[rows, columns] (+)= a b; rows and columns are whole tiles, strides in bytes."""
    for column in range(0, columns, panel_rows()):
        for row in range(0, rows, FLOAT_TILE_TOKENS):
            x, y, z = a + row * a_stride, b + column * 4, c + row * c_stride + column * 4
            if add:
                float_tile(x, a_stride, y, b_stride, n, z, c_stride, 1)
            else:
                float_tile(x, a_stride, y, b_stride, n, z, c_stride, 0)


@kernel
def find_span(state, piece, tokens, kv_heads):
    """(span, piece within it) of a piece of the batch; (number of spans, ...) after the last piece."""
    spans = load_record(BatchState, state).spans
    for s in range(spans):
        span = load_record(SpanState, state + STATE_BYTES + s * SPAN_BYTES)
        pieces = -(-span.tokens // tokens) * kv_heads
        if piece < pieces:
            return s, piece
        piece -= pieces
    return spans, piece


@kernel
def _start_piece(x, stride, count, queries, width, results, size, softmax_states, rows):
    """Copy queries float32[count, width] from rows of x, `stride` bytes apart; clear results and softmax states."""
    for t in range(count):
        copy_floats(queries + t * width * 4, x + t * stride, width)
    floats(results, size)[:] = 0
    states = floats(softmax_states, rows * 2)
    for row in range(rows):
        states[2 * row], states[2 * row + 1] = -1e30, 0


@kernel
def transpose_keys(decoded, count, dim, keys):
    """keys float32[dim, KEY_BLOCK] of `count` decoded keys; missing ones are 0."""
    floats(decoded, KEY_BLOCK * dim)[count * dim :] = 0
    for i in range(0, KEY_BLOCK, 16):
        for j in range(0, dim, 16):
            transpose_block(decoded + (i * dim + j) * 4, dim * 4, keys + (j * KEY_BLOCK + i) * 4, KEY_BLOCK * 4)


@kernel
def divide(result, dim, softmax_state, sinks, head, out):
    """out = result / denominator, float32[dim]; with sinks, the head's is one more score in the softmax."""
    x, y = floats(result, dim), floats(out, dim)
    maximum, denominator, rescale = load_float(softmax_state), load_float(softmax_state + 4), np.float32(1)
    if sinks != 0:
        sink = load_float(sinks + head * 4)
        new = max(maximum, sink)
        rescale = exp(maximum - new)
        denominator = denominator * rescale + exp(sink - new)
    inverse = rescale / denominator
    for i in range(dim):
        y[i] = x[i] * inverse


class AttentionParameters(NamedTuple):
    """Parameters of `attention`."""

    state: int
    q: int  # float32[tokens, heads, dim_k], scaled, with RoPE applied
    kv_heads: int
    layer_view: int  # address of a LayerView
    span: int  # positions per online-softmax step, a multiple of KEY_BLOCK
    out: int  # float32[tokens, heads, dim_v]
    scratch: int  # kernel_sizes.prefill_attention_bytes per thread
    private_stride: int
    sinks: int = 0  # float32[heads]: an extra score of each head, whose value is 0; or 0
    softcap: int = 0  # address of a float32 that scores are capped by, or 0
    selection: int = 0  # address of the records of selected blocks, one of each token, or 0: all positions are seen
    selection_bytes: int = 0  # of a token's records
    rate: int = 1  # positions of a block
    head_bytes: int = 0  # from the record of a KV head to that of the next; 0: one for all
    sees_rest: int = 1  # whether positions after the last whole block are seen always


@kernel
def _in_blocks(p, position):
    """The positions up to a token's own that are in blocks: later ones are seen always."""
    return (position + 1) // p.rate * p.rate if p.sees_rest != 0 else position + 1


@kernel
def _any_sees(p, head, token, tokens, position, start, stop):
    """Whether one of some tokens, the first at `position`, sees one of the positions start … stop - 1."""
    for t in range(tokens):
        record = p.selection + (token + t) * p.selection_bytes + head * p.head_bytes
        if sees_blocks(record, p.rate, _in_blocks(p, position + t), start, stop):
            return True
    return False


@functools.cache
def attention(shape: KernelHeads, tokens: int) -> Callback:
    """The operation out = softmax(q k^T) v for all tokens and heads, in pieces of `tokens` tokens.

    A step of KEY_BLOCK positions is an online softmax; a step of all positions is plain attention. Threads take the
    pieces of a sequence with the most keys first, until none is left.
    """
    group, dim_k, dim_v, k_type, v_type, _, rotate_v = shape
    k_bytes, v_bytes, padded_k = shape.k_bytes, shape.v_bytes, shape.padded_k
    rows, width = piece_rows(group, tokens), -(-dim_v // 32) * 32

    @callback(OPERATION)
    def run(parameters, thread, threads):
        p = load_record(AttentionParameters, parameters)
        view, spans = load_record(LayerView, p.layer_view), load_record(BatchState, p.state).spans
        kv_heads, window, chunk, step = p.kv_heads, view.window, view.chunk, p.span
        decoded = p.scratch + thread * p.private_stride
        keys = decoded + KEY_BLOCK * padded_k * 4
        values = keys + KEY_BLOCK * padded_k * 4
        queries = values + KEY_BLOCK * width * 4
        results = queries + rows * dim_k * 4
        softmax_states = results + rows * width * 4
        scores = softmax_states + rows * 2 * 4
        while True:
            s, piece = find_span(p.state, atomic_add(1, p.state + NEXT_PIECE), tokens, kv_heads)
            if s == spans:
                break
            span = load_record(SpanState, p.state + STATE_BYTES + s * SPAN_BYTES)
            cache = load_record(LayerCache, view.caches + s * CACHE_BYTES)
            head, first = piece % kv_heads, (-(-span.tokens // tokens) - 1 - piece // kv_heads) * tokens
            token_count, position = min(tokens, span.tokens - first), span.position + first
            k_rows, v_rows = cache.k + head * cache.n_ctx * k_bytes, cache.v + head * cache.n_ctx * v_bytes
            first_group = (span.start + first) * kv_heads + head  # of the first query and result, in groups of heads
            x, stride = p.q + first_group * group * dim_k * 4, kv_heads * group * dim_k * 4
            _start_piece(x, stride, token_count, queries, group * dim_k, results, rows * width, softmax_states, rows)
            used = -(-token_count * group // FLOAT_TILE_TOKENS) * FLOAT_TILE_TOKENS
            seen = max(0, position + 1 - window) if chunk == 0 else position // chunk * chunk
            for start in range(seen // KEY_BLOCK * KEY_BLOCK, position + token_count, step):
                stop, token = min(start + step, position + token_count), span.start + first
                if p.selection != 0 and not _any_sees(p, head, token, token_count, position, start, stop):
                    continue
                for block_start in range(start, stop, KEY_BLOCK):
                    block_keys, block_scores = min(KEY_BLOCK, stop - block_start), scores + (block_start - start) * 4
                    decode_keys(
                        k_type, k_rows + block_start * k_bytes, k_bytes, block_keys, dim_k, decoded, padded_k * 4
                    )
                    transpose_keys(decoded, block_keys, padded_k, keys)
                    columns = -(-block_keys // 32) * 32
                    matmul(queries, dim_k * 4, keys, KEY_BLOCK * 4, dim_k, block_scores, step * 4, used, columns, False)
                for row in range(token_count * group):
                    visible_end, columns = position + row // group + 1 - start, -(-(stop - start) // 32) * 32
                    row_scores, result = scores + row * step * 4, results + row * width * 4
                    visible_start = max(0, visible_end - window)
                    if chunk != 0:
                        visible_start = max(0, (position + row // group) // chunk * chunk - start)
                    if p.softcap != 0:
                        cap_scores(row_scores, 0, columns, 1, load_float(p.softcap))
                    if p.selection != 0:
                        record = p.selection + (token + row // group) * p.selection_bytes + head * p.head_bytes
                        whole = _in_blocks(p, position + row // group)
                        hide_blocks(record, p.rate, whole, start, stop, row_scores)
                    softmax_update(
                        row_scores, columns, visible_start, visible_end, dim_v, result, softmax_states + row * 8
                    )
                for block_start in range(start, stop, KEY_BLOCK):
                    block_keys, weights = min(KEY_BLOCK, stop - block_start), scores + (block_start - start) * 4
                    decode_keys(v_type, v_rows + block_start * v_bytes, v_bytes, block_keys, dim_v, values, width * 4)
                    floats(values, KEY_BLOCK * width)[block_keys * width :] = 0
                    columns = -(-block_keys // 32) * 32
                    matmul(weights, step * 4, values, width * 4, columns, results, width * 4, used, width, True)
            for row in range(token_count * group):
                out = p.out + ((first_group + row // group * kv_heads) * group + row % group) * dim_v * 4
                state, query_head = softmax_states + row * 8, head * group + row % group
                divide(results + row * width * 4, dim_v, state, p.sinks, query_head, out)
                rotate(out, dim_v, rotate_v)

    return run
