"""Latent attention of a batch: queries and latents, then attention in either form (formulas: latent_attention.py).

A batch is done in pieces of (sequence, tokens, heads), from the projection of queries to that of the result, so that
no buffer but a thread's scratch grows with the latents. An expanded piece is one head and all tokens, because keys and
values are computed for it once; an absorbed piece has as many heads as fit with its tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from quantkit.codegen.callbacks import callback
from quantkit.codegen.jit import kernel
from quantkit.codegen.simd import atomic_add, call6, copy_floats, floats, load_float, store_int
from quantkit.placement.kernel_sizes import FLOAT_TILE_TOKENS, KEY_BLOCK, LATENT_QUERIES
from quantkit.runtime.kernels.cpu.decode_attention import apply_rope
from quantkit.runtime.kernels.cpu.decode_ops import rms_norm_into
from quantkit.runtime.kernels.cpu.float_gemm import copy_tile, transpose_block
from quantkit.runtime.kernels.cpu.gemm import token_share
from quantkit.runtime.kernels.cpu.kv_rows import CACHE_BYTES, LayerCache, LayerView
from quantkit.runtime.kernels.cpu.latent_attention import angles, query_scale, scale_floats
from quantkit.runtime.kernels.cpu.latent_rows import HeadMatrices, Sizes
from quantkit.runtime.kernels.cpu.operation import OPERATION, load_record, row_share
from quantkit.runtime.kernels.cpu.prefill_attention import divide, matmul, softmax_update
from quantkit.runtime.kernels.cpu.prefill_ops import NEXT_PIECE, SPAN_BYTES, STATE_BYTES, BatchState, SpanState
from quantkit.runtime.kernels.cpu.selection import hide_others

_MASKED = -1e30  # below any score
ABSORBED, FROM_TOKENS, BY_COST = 0, 1, 2  # which form a sequence of a batch takes: `AttentionParameters.form`
EXPAND = 128  # tokens from which on FROM_TOKENS expands


# ------------------------------------------------------------------------------------------------------------ latents


class LatentsParameters(NamedTuple):
    """Parameters of `latents`."""

    state: int
    sizes: int  # address of a Sizes
    q: int  # float32[tokens, heads, nope + rope], overwritten
    kv: int  # float32[tokens, kv_lora + rope], overwritten
    weight: int  # float32[kv_lora], of the norm
    eps: int  # address of a float32
    scale: int  # address of a float32: q is multiplied by it
    layer_view: int  # address of a LayerView
    write: int  # `latent_writer`; 0: latents are not cached, and q is not multiplied by the factors of positions
    row_bytes: int  # of the cache
    head_scale: int = 0  # of blocks.HeadScaling
    head_bias: int = 0


@callback(OPERATION)
def latents(parameters, thread, threads):
    """Norm of c, RoPE of r and of q in place; with `write`, latents are appended to the caches."""
    p = load_record(LatentsParameters, parameters)
    s, view, batch = load_record(Sizes, p.sizes), load_record(LayerView, p.layer_view), load_record(BatchState, p.state)
    scale, eps, one = load_float(p.scale), load_float(p.eps), np.float32(1)
    dim, latent = s.nope + s.rope, s.kv_lora + s.rope
    first, last = token_share(batch.tokens, thread, threads)
    for i in range(batch.spans):
        span = load_record(SpanState, p.state + STATE_BYTES + i * SPAN_BYTES)
        cache = load_record(LayerCache, view.caches + i * CACHE_BYTES)
        for token in range(max(first, span.start), min(last, span.start + span.tokens)):
            position = span.position + token - span.start
            cos, sin = angles(view, position, s.rope)
            for head in range(s.heads):
                q, factor = p.q + (token * s.heads + head) * dim * 4, scale
                if p.write != 0:
                    factor = query_scale(scale, view, position, head, p.head_scale, p.head_bias)
                scale_floats(q, s.nope, factor)
                b = floats(q + s.nope * 4, s.rope)
                apply_rope(b, b, s.rope, cos, sin, s.rope, s.pair_step, s.pair_stride, factor)
            kv = p.kv + token * latent * 4
            rms_norm_into(kv, p.weight, s.kv_lora, eps, kv)
            r = floats(kv + s.kv_lora * 4, s.rope)
            apply_rope(r, r, s.rope, cos, sin, s.rope, s.pair_step, s.pair_stride, one)
            if p.write != 0:
                call6(p.write, kv, cache.k + position * p.row_bytes, 0, 0, 0, 0)
    if thread == 0:
        store_int(0, p.state + NEXT_PIECE)


class BatchHeadsParameters(NamedTuple):
    """Parameters of `full_batch_heads`."""

    state: int
    sizes: int  # address of a Sizes
    matrices: int  # address of a HeadMatrices
    read_keys: int  # `matrix_reader` to [kv_lora, nope]
    read_values: int  # `matrix_reader` to [kv_lora, dim_v]
    kv: int  # float32[tokens, kv_lora + rope], of `latents`; whole tiles
    k: int  # float32[tokens, heads, nope + rope]; whole tiles
    v: int  # float32[tokens, heads, dim_v]; whole tiles
    scratch: int  # two matrices of a head, float32, per thread
    private_stride: int


@callback(OPERATION)
def full_batch_heads(parameters, thread, threads):
    """k[t, h] = [k_h c, r] and v[t, h] = v_h c of all tokens, for the thread's share of the heads."""
    p = load_record(BatchHeadsParameters, parameters)
    s, m, count = (
        load_record(Sizes, p.sizes),
        load_record(HeadMatrices, p.matrices),
        load_record(BatchState, p.state).tokens,
    )
    dim, latent = s.nope + s.rope, (s.kv_lora + s.rope) * 4
    matrix = p.scratch + thread * p.private_stride
    decoded = matrix + max(s.nope, s.dim_v) * s.kv_lora * 4
    rows = -(-count // FLOAT_TILE_TOKENS) * FLOAT_TILE_TOKENS
    first, last = row_share(s.heads, 1, thread, threads)
    for head in range(first, last):
        k, v = p.k + head * dim * 4, p.v + head * s.dim_v * 4
        _read_matrix(p.read_keys, m.keys + head * m.key_bytes, s.nope, s.kv_lora, m.keys_transposed, matrix, decoded)
        matmul(p.kv, latent, matrix, s.nope * 4, s.kv_lora, k, s.heads * dim * 4, rows, s.nope, False)
        _read_matrix(p.read_values, m.values + head * m.value_bytes, s.dim_v, s.kv_lora, 0, matrix, decoded)
        matmul(p.kv, latent, matrix, s.dim_v * 4, s.kv_lora, v, s.heads * s.dim_v * 4, rows, s.dim_v, False)
        for token in range(count):
            r, y = p.kv + token * latent + s.kv_lora * 4, k + (token * s.heads * dim + s.nope) * 4
            copy_floats(y, r, s.rope)


@kernel
def _read_matrix(read, address, rows, n, transposed, out, scratch):
    """Decode a matrix [rows, n], stored as [n, rows] if `transposed`."""
    if transposed != 0:
        call6(read, address, n, rows, out, scratch, 0)
    else:
        call6(read, address, rows, n, out, scratch, 0)


# ---------------------------------------------------------------------------------------------------------- attention


class ReadMatrices(NamedTuple):
    """The matrices of heads for one form, and how they are decoded."""

    matrices: int  # address of a HeadMatrices
    read_keys: int  # `matrix_reader` to [nope, kv_lora]
    read_values: int  # `matrix_reader` to [kv_lora, dim_v]


class BatchAttentionParameters(NamedTuple):
    """Parameters of `batch_attention`."""

    state: int
    sizes: int  # address of a Sizes
    absorbed: int  # address of a ReadMatrices
    expanded: int
    read_latents: int  # `latent_reader`
    rotate: int  # `rotator`, or 0
    row_bytes: int  # of the cache
    q: int  # float32[tokens, heads, nope + rope], of `latents`; whole tiles
    layer_view: int  # address of a LayerView
    form: int  # ABSORBED, FROM_TOKENS or BY_COST
    rows: int  # query rows of an absorbed piece, at most: whole tiles
    step: int  # positions per online-softmax step of an absorbed piece, a multiple of KEY_BLOCK
    out: int  # float32[tokens, heads, dim_v]
    latents_floats: int  # kernel_sizes.latent_prefill_floats
    matrices_floats: int
    scratch: int  # their sum, per thread
    private_stride: int
    selection: int = 0  # a record of selection.py for each token; 0: all positions
    selection_bytes: int = 0


class _Piece(NamedTuple):
    """A thread's unit of work: heads `head` … of some tokens of one sequence."""

    span: int
    is_expanded: int
    head: int
    heads: int
    token: int  # of the batch
    tokens: int
    position: int  # of the first token


@kernel
def _is_expanded(s, form, tokens, position):
    """Which form costs fewer multiply-adds per head, with BY_COST."""
    if form != BY_COST:
        return form == FROM_TOKENS and tokens >= EXPAND
    pairs, project = tokens * (position + (tokens + 1) // 2), s.kv_lora * (s.nope + s.dim_v)
    positions = -(-(position + tokens) // KEY_BLOCK) * KEY_BLOCK
    expanded = positions * project + pairs * (s.nope + s.rope + s.dim_v)
    return expanded < tokens * project + pairs * (2 * s.kv_lora + s.rope)


@kernel
def _find_piece(p, s, number, threads):
    """The piece of a number; after the last one, its `span` is the number of sequences."""
    batch = load_record(BatchState, p.state)
    for i in range(batch.spans):
        span = load_record(SpanState, p.state + STATE_BYTES + i * SPAN_BYTES)
        is_expanded = _is_expanded(s, p.form, span.tokens, span.position)
        if is_expanded:
            chunks = max(1, min(2 * threads // s.heads, span.tokens // KEY_BLOCK))
            tokens, heads = -(-span.tokens // chunks), 1
        else:
            tokens = min(span.tokens, p.rows)
            rows = -(-tokens // FLOAT_TILE_TOKENS) * FLOAT_TILE_TOKENS
            heads = max(1, min(p.rows // rows, -(-s.heads // threads)))
        groups, chunks = -(-s.heads // heads), -(-span.tokens // tokens)
        if number < groups * chunks:
            head, first = number % groups * heads, (chunks - 1 - number // groups) * tokens  # the most keys first
            count = min(tokens, span.tokens - first)
            heads = min(heads, s.heads - head)
            return _Piece(i, int(is_expanded), head, heads, span.start + first, count, span.position + first)
        number -= groups * chunks
    return _Piece(batch.spans, 0, 0, 0, 0, 0, 0)


@callback(OPERATION)
def batch_attention(parameters, thread, threads):
    """out[t, h] = v_h softmax(q k^T) c for all tokens and heads. Threads take pieces until none is left."""
    p = load_record(BatchAttentionParameters, parameters)
    s, view = load_record(Sizes, p.sizes), load_record(LayerView, p.layer_view)
    spans = load_record(BatchState, p.state).spans
    scratch = p.scratch + thread * p.private_stride
    while True:
        piece = _find_piece(p, s, atomic_add(1, p.state + NEXT_PIECE), threads)
        if piece.span == spans:
            break
        rows = load_record(LayerCache, view.caches + piece.span * CACHE_BYTES).k
        if piece.is_expanded != 0:
            _expanded_piece(p, s, piece, rows, scratch)
        else:
            _absorbed_piece(p, s, piece, rows, scratch)


@kernel
def _read_block(p, s, rows, start, count, back, decoded, transposed):
    """Decode `count` latents and transpose them to [kv_lora + rope, KEY_BLOCK]; missing ones are 0."""
    dim = s.kv_lora + s.rope
    call6(p.read_latents, rows + start * p.row_bytes, count, decoded, back, 0, 0)
    floats(decoded, KEY_BLOCK * dim)[count * dim :] = 0
    for i in range(0, KEY_BLOCK, 16):
        for j in range(0, dim, 16):
            transpose_block(decoded + (i * dim + j) * 4, dim * 4, transposed + (j * KEY_BLOCK + i) * 4, KEY_BLOCK * 4)


@kernel
def _start(results, size, softmax_states, rows):
    """Clear results and softmax states."""
    floats(results, size)[:] = 0
    states = floats(softmax_states, rows * 2)
    for row in range(rows):
        states[2 * row], states[2 * row + 1] = _MASKED, 0


@kernel
def _project_queries(p, s, piece, matrices, decoded, queries):
    """queries[token, head] = [k_h^T a, b], rotated; keys of each head are decoded to `matrices`."""
    source, dim, latent = load_record(ReadMatrices, p.absorbed), s.nope + s.rope, s.kv_lora + s.rope
    m = load_record(HeadMatrices, source.matrices)
    stride, rows = piece.heads * latent * 4, -(-piece.tokens // FLOAT_TILE_TOKENS) * FLOAT_TILE_TOKENS
    for head in range(piece.heads):
        q, y = p.q + (piece.token * s.heads + piece.head + head) * dim * 4, queries + head * latent * 4
        keys = m.keys + (piece.head + head) * m.key_bytes
        _read_matrix(source.read_keys, keys, s.nope, s.kv_lora, m.keys_transposed, matrices, decoded)
        matmul(q, s.heads * dim * 4, matrices, s.kv_lora * 4, s.nope, y, stride, rows, s.kv_lora, False)
        for token in range(piece.tokens):
            r = q + (token * s.heads * dim + s.nope) * 4
            copy_floats(y + token * stride + s.kv_lora * 4, r, s.rope)
    if p.rotate != 0:
        call6(p.rotate, queries, piece.tokens * piece.heads * latent, 0, 0, 0, 0)


@kernel
def _project_values(p, s, piece, matrices, decoded, results, projected):
    """out[token, head] = v_h result; `projected` float32[tokens, dim_v], whole tiles."""
    source, rows = load_record(ReadMatrices, p.absorbed), -(-piece.tokens // FLOAT_TILE_TOKENS) * FLOAT_TILE_TOKENS
    m = load_record(HeadMatrices, source.matrices)
    for head in range(piece.heads):
        values = m.values + (piece.head + head) * m.value_bytes
        _read_matrix(source.read_values, values, s.dim_v, s.kv_lora, 0, matrices, decoded)
        x, stride = results + head * s.kv_lora * 4, piece.heads * s.kv_lora * 4
        matmul(x, stride, matrices, s.dim_v * 4, s.kv_lora, projected, s.dim_v * 4, rows, s.dim_v, False)
        out = p.out + (piece.token * s.heads + piece.head + head) * s.dim_v * 4
        copy_tile(projected, s.dim_v, out, s.heads * s.dim_v, piece.tokens, s.dim_v, 0)


@kernel
def _absorbed_piece(p, s, piece, rows, scratch):
    """Attention over latent rows; a query row is a token and a head."""
    latent, heads, step = s.kv_lora + s.rope, piece.heads, p.step
    decoded = scratch
    transposed = decoded + -(-KEY_BLOCK // FLOAT_TILE_TOKENS) * FLOAT_TILE_TOKENS * latent * 4
    matrices = scratch + p.latents_floats * 4
    queries = matrices + p.matrices_floats * 4
    results = queries + p.rows * max(latent, s.dim_v) * 4
    softmax_states = results + p.rows * s.kv_lora * 4
    scores = softmax_states + p.rows * 2 * 4
    count = piece.tokens * heads
    used = -(-count // FLOAT_TILE_TOKENS) * FLOAT_TILE_TOKENS
    _project_queries(p, s, piece, matrices, decoded, queries)
    _start(results, used * s.kv_lora, softmax_states, used)
    end = piece.position + piece.tokens
    for start in range(0, end, step):
        stop = min(start + step, end)
        for block in range(start, stop, KEY_BLOCK):
            keys, block_scores = min(KEY_BLOCK, stop - block), scores + (block - start) * 4
            _read_block(p, s, rows, block, keys, 0, decoded, transposed)
            columns = -(-keys // 32) * 32
            matmul(queries, latent * 4, transposed, KEY_BLOCK * 4, latent, block_scores, step * 4, used, columns, False)
        for row in range(count):
            visible, columns = piece.position + row // heads + 1 - start, -(-(stop - start) // 32) * 32
            if p.selection != 0:
                record = p.selection + (piece.token + row // heads) * p.selection_bytes
                hide_others(record, start, stop, scores + row * step * 4)
            softmax_update(
                scores + row * step * 4, columns, 0, visible, s.kv_lora, results + row * s.kv_lora * 4,
                softmax_states + row * 8,
            )  # fmt: skip
        for block in range(start, stop, KEY_BLOCK):
            keys, weights = min(KEY_BLOCK, stop - block), scores + (block - start) * 4
            if stop - start > KEY_BLOCK:
                _read_block(p, s, rows, block, keys, 0, decoded, transposed)
            columns = -(-keys // 32) * 32
            matmul(weights, step * 4, decoded, latent * 4, columns, results, s.kv_lora * 4, used, s.kv_lora, True)
    for row in range(count):
        result = results + row * s.kv_lora * 4
        divide(result, s.kv_lora, softmax_states + row * 8, 0, 0, result)
    if p.rotate != 0:
        call6(p.rotate, results, count * s.kv_lora, 0, 0, 0, 0)
    _project_values(p, s, piece, matrices, decoded, results, queries)


@kernel
def _expand_block(s, keys_of, values_of, decoded, transposed, keys, values):
    """keys float32[nope + rope, KEY_BLOCK] and values float32[KEY_BLOCK, dim_v] of a block of latents."""
    latent, rows = (s.kv_lora + s.rope) * 4, -(-KEY_BLOCK // FLOAT_TILE_TOKENS) * FLOAT_TILE_TOKENS
    padded = -(-s.nope // FLOAT_TILE_TOKENS) * FLOAT_TILE_TOKENS
    width = KEY_BLOCK * 4
    matmul(keys_of, s.kv_lora * 4, transposed, width, s.kv_lora, keys, width, padded, KEY_BLOCK, False)
    copy_floats(keys + s.nope * width, transposed + s.kv_lora * width, s.rope * KEY_BLOCK)
    matmul(decoded, latent, values_of, s.dim_v * 4, s.kv_lora, values, s.dim_v * 4, rows, s.dim_v, False)


@kernel
def _expanded_piece(p, s, piece, rows, scratch):
    """Attention of one head: keys and values of a block of latents at a time, for all tokens of the piece."""
    source, dim, latent = load_record(ReadMatrices, p.expanded), s.nope + s.rope, s.kv_lora + s.rope
    m = load_record(HeadMatrices, source.matrices)
    block_rows = -(-KEY_BLOCK // FLOAT_TILE_TOKENS) * FLOAT_TILE_TOKENS
    decoded = scratch
    transposed = decoded + block_rows * latent * 4
    keys_of = scratch + p.latents_floats * 4
    values_of = keys_of + s.nope * s.kv_lora * 4
    keys = keys_of + p.matrices_floats * 4
    values = keys + (dim + FLOAT_TILE_TOKENS) * KEY_BLOCK * 4
    scores = values + block_rows * s.dim_v * 4
    softmax_states = scores + LATENT_QUERIES * KEY_BLOCK * 4
    count = -(-piece.tokens // FLOAT_TILE_TOKENS) * FLOAT_TILE_TOKENS
    results = softmax_states + count * 2 * 4
    _read_matrix(
        source.read_keys, m.keys + piece.head * m.key_bytes, s.nope, s.kv_lora, m.keys_transposed, keys_of, decoded
    )
    _read_matrix(source.read_values, m.values + piece.head * m.value_bytes, s.dim_v, s.kv_lora, 0, values_of, decoded)
    _start(results, count * s.dim_v, softmax_states, count)
    q, stride = p.q + (piece.token * s.heads + piece.head) * dim * 4, s.heads * dim * 4
    end = piece.position + piece.tokens
    for start in range(0, end, KEY_BLOCK):
        block_keys = min(KEY_BLOCK, end - start)
        columns = -(-block_keys // 32) * 32
        _read_block(p, s, rows, start, block_keys, p.rotate, decoded, transposed)
        _expand_block(s, keys_of, values_of, decoded, transposed, keys, values)
        unseeing = max(0, start - piece.position) // FLOAT_TILE_TOKENS * FLOAT_TILE_TOKENS  # tokens before all keys
        for first in range(unseeing, piece.tokens, LATENT_QUERIES):
            tokens = min(LATENT_QUERIES, piece.tokens - first)
            used = -(-tokens // FLOAT_TILE_TOKENS) * FLOAT_TILE_TOKENS
            matmul(q + first * stride, stride, keys, KEY_BLOCK * 4, dim, scores, KEY_BLOCK * 4, used, columns, False)
            for row in range(tokens):
                visible, result = piece.position + first + row + 1 - start, results + (first + row) * s.dim_v * 4
                state = softmax_states + (first + row) * 8
                if p.selection != 0:
                    record = p.selection + (piece.token + first + row) * p.selection_bytes
                    hide_others(record, start, start + block_keys, scores + row * KEY_BLOCK * 4)
                softmax_update(scores + row * KEY_BLOCK * 4, columns, 0, visible, s.dim_v, result, state)
            result = results + first * s.dim_v * 4
            matmul(scores, KEY_BLOCK * 4, values, s.dim_v * 4, columns, result, s.dim_v * 4, used, s.dim_v, True)
    for token in range(piece.tokens):
        out = p.out + ((piece.token + token) * s.heads + piece.head) * s.dim_v * 4
        divide(results + token * s.dim_v * 4, s.dim_v, softmax_states + token * 8, 0, 0, out)
