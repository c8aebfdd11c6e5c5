"""Sparse attention in both plans: which positions a token attends to (`archs.common.blocks.Indexer`).

The V cache holds the indexer's keys, one row for each position. Selections are those of selection.py.

    one token    append the key, RoPE of q | scores, threads share the positions | selection, by one thread |
    batch        append the keys, RoPE of q | scores and selection, threads share the tokens |

Nothing is scored for tokens with no more than top_k positions before and with them. Scores of a block of positions are
those of `latent_attention.block_scores`; a batch decodes a block once for INDEX_GROUP tokens. The bound is the
multiply-adds, heads * dim for each pair of token and position.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from quantkit.codegen.callbacks import callback
from quantkit.codegen.jit import kernel
from quantkit.codegen.simd import call6, floats, integers, load_float, load_int, store_int
from quantkit.placement.kernel_sizes import INDEX_BLOCK, INDEX_GROUP
from quantkit.runtime.kernels.cpu.decode_attention import apply_rope
from quantkit.runtime.kernels.cpu.gemm import token_share
from quantkit.runtime.kernels.cpu.kv_rows import CACHE_BYTES, LayerCache, LayerView
from quantkit.runtime.kernels.cpu.latent_attention import block_scores, query_scale
from quantkit.runtime.kernels.cpu.operation import OPERATION, load_record, row_share
from quantkit.runtime.kernels.cpu.prefill_ops import SPAN_BYTES, STATE_BYTES, BatchState, SpanState


class IndexSizes(NamedTuple):
    """The sizes of an indexer; dim is a multiple of 32."""

    heads: int
    dim: int
    rope: int
    pair_step: int  # RoPE pair j is elements j * pair_step and j * pair_step + pair_stride
    pair_stride: int
    top_k: int
    row_bytes: int  # of a key in the cache
    score_scale: int  # address of a float32


class KeyParameters(NamedTuple):
    """What makes keys and queries ready, of `index_token` and `index_batch`."""

    sizes: int  # address of an IndexSizes
    position: int  # address of an int64, or of a BatchState
    layer_view: int  # address of a LayerView
    k: int  # float32[tokens, dim], overwritten
    weight: int  # float32[dim], of the LayerNorm
    bias: int  # float32[dim]
    eps: int  # address of a float32
    write: int  # `latent_attention.latent_writer`
    q: int  # float32[tokens, heads, dim], overwritten
    rotate: int  # `latent_attention.rotator`, or 0
    multiple: int  # at which rows of q are split between threads; 0 for a batch
    head_scale: int = 0  # of blocks.HeadScaling
    head_bias: int = 0


@kernel
def _append_key(p, s, view, k, row, position):
    """LayerNorm and RoPE of a key, which is written to a row of the cache."""
    x, weight, bias = floats(k, s.dim), floats(p.weight, s.dim), floats(p.bias, s.dim)
    mean, square = np.float32(0), np.float32(0)
    for i in range(s.dim):
        mean += x[i]
    mean /= np.float32(s.dim)
    for i in range(s.dim):
        x[i] -= mean
        square += x[i] * x[i]
    scale = np.float32(1) / np.sqrt(square / np.float32(s.dim) + load_float(p.eps))
    for i in range(s.dim):
        x[i] = x[i] * scale * weight[i] + bias[i]
    _rotate_pairs(s, view, k, position)
    call6(p.write, k, row, 0, 0, 0, 0)


@kernel
def _rotate_pairs(s, view, x, position):
    """RoPE of a query or key, in place."""
    y, half = floats(x, s.dim), s.rope // 2
    cos, sin = floats(view.cos + position * half * 4, half), floats(view.sin + position * half * 4, half)
    apply_rope(y, y, s.rope, cos, sin, s.rope, s.pair_step, s.pair_stride, np.float32(1))


@kernel
def _prepare_query(p, s, view, x, position, head):
    """Scaling and RoPE of a query, in place."""
    if p.head_scale != 0:
        y, factor = floats(x, s.dim), query_scale(np.float32(1), view, position, head, p.head_scale, p.head_bias)
        for i in range(s.dim):
            y[i] *= factor
    _rotate_pairs(s, view, x, position)


@callback(OPERATION)
def index_token(parameters, thread, threads):
    """Append the token's key to the cache; RoPE of the queries of the thread's heads, rotated like the cache."""
    p = load_record(KeyParameters, parameters)
    s, view, position = load_record(IndexSizes, p.sizes), load_record(LayerView, p.layer_view), load_int(p.position)
    if thread == threads - 1:
        _append_key(p, s, view, p.k, load_record(LayerCache, view.caches).v + position * s.row_bytes, position)
    rows = s.heads * s.dim
    first, last = row_share(rows, p.multiple, thread, threads)
    for head in range(first // s.dim, last // s.dim):
        _prepare_query(p, s, view, p.q + head * s.dim * 4, position, head)
    if p.rotate != 0:
        call6(p.rotate, p.q + first * 4, last - first, 0, 0, 0, 0)


@callback(OPERATION)
def index_batch(parameters, thread, threads):
    """`index_token` for the thread's tokens of a batch."""
    p = load_record(KeyParameters, parameters)
    s, view, batch = (
        load_record(IndexSizes, p.sizes),
        load_record(LayerView, p.layer_view),
        load_record(BatchState, p.position),
    )
    first, last = token_share(batch.tokens, thread, threads)
    for i in range(batch.spans):
        span = load_record(SpanState, p.position + STATE_BYTES + i * SPAN_BYTES)
        rows = load_record(LayerCache, view.caches + i * CACHE_BYTES).v
        for token in range(max(first, span.start), min(last, span.start + span.tokens)):
            position = span.position + token - span.start
            _append_key(p, s, view, p.k + token * s.dim * 4, rows + position * s.row_bytes, position)
            for head in range(s.heads):
                _prepare_query(p, s, view, p.q + (token * s.heads + head) * s.dim * 4, position, head)
    if p.rotate != 0:
        call6(p.rotate, p.q + first * s.heads * s.dim * 4, (last - first) * s.heads * s.dim, 0, 0, 0, 0)


# --------------------------------------------------------------------------------------------------------------- scores


class ScoreParameters(NamedTuple):
    """Parameters of `score_positions`, `select_positions` and `select_batch`."""

    sizes: int  # address of an IndexSizes
    position: int  # address of an int64, or of a BatchState
    layer_view: int  # address of a LayerView
    read: int  # `latent_attention.latent_reader`
    q: int  # float32[tokens, heads, dim]
    weights: int  # float32[tokens, heads]
    scores: int  # one token: float32[positions]; a batch: float32[INDEX_GROUP, positions] per thread
    n_ctx: int  # positions there is room for
    selection: int  # a record for each token
    ranks: int  # float32[positions] per thread, scratch
    ranks_stride: int
    scratch: int  # kernel_sizes.index_block_bytes per thread
    private_stride: int
    scores_stride: int = 0


@kernel
def score_block(s, q, weights, keys, count, products, out):
    """out float32[count]: the scores of a token and a block of decoded keys."""
    block_scores(q, s.heads, keys, count, s.dim, products, INDEX_BLOCK * 4)
    x, w, y, scale = (
        floats(products, s.heads * INDEX_BLOCK),
        floats(weights, s.heads),
        floats(out, count),
        load_float(s.score_scale),
    )
    y[:] = np.float32(0)
    for head in range(s.heads):
        row = x[head * INDEX_BLOCK : head * INDEX_BLOCK + count]
        for i in range(count):
            y[i] += max(row[i], np.float32(0)) * w[head]
    for i in range(count):
        y[i] *= scale


@kernel
def _partition(x, rank):
    """The element of x that has `rank` larger ones, which reorders x (quickselect)."""
    first, last = 0, len(x) - 1
    while first < last:
        pivot, i, j = x[(first + last) // 2], first, last
        while i <= j:
            while x[i] > pivot:
                i += 1
            while x[j] < pivot:
                j -= 1
            if i <= j:
                x[i], x[j] = x[j], x[i]
                i += 1
                j -= 1
        if rank <= j:
            last = j
        elif rank >= i:
            first = i
        else:
            break
    return x[rank]


@kernel
def select(scores, ranks, top_k, record):
    """Write the selection of `top_k` positions with the largest scores, of equal ones the first; or 0 for all."""
    if len(scores) <= top_k:
        store_int(0, record)
        return
    for i in range(len(scores)):
        ranks[i] = scores[i]
    threshold = _partition(ranks, top_k - 1)
    above = 0
    for i in range(len(scores)):
        above += scores[i] > threshold
    equal, count = top_k - above, 0
    chosen = integers(record + 8, top_k)
    for i in range(len(scores)):
        is_equal = scores[i] == threshold
        if scores[i] > threshold or (is_equal and equal > 0):
            if count < top_k:
                chosen[count] = i
                count += 1
            if is_equal:
                equal -= 1
    store_int(count, record)


@callback(OPERATION)
def score_positions(parameters, thread, threads):
    """The scores of one token and the thread's share of the positions."""
    p = load_record(ScoreParameters, parameters)
    s, view, count = load_record(IndexSizes, p.sizes), load_record(LayerView, p.layer_view), load_int(p.position) + 1
    if count <= s.top_k:
        return
    rows = load_record(LayerCache, view.caches).v
    keys = p.scratch + thread * p.private_stride
    products, last = keys + (INDEX_BLOCK + 4) * s.dim * 4, count * (thread + 1) // threads
    for start in range(count * thread // threads, last, INDEX_BLOCK):
        n = min(INDEX_BLOCK, last - start)
        call6(p.read, rows + start * s.row_bytes, n, keys, 0, 0, 0)
        score_block(s, p.q, p.weights, keys, n, products, p.scores + start * 4)


@callback(OPERATION)
def select_positions(parameters, thread, threads):
    """The selection of one token, by the first thread."""
    p = load_record(ScoreParameters, parameters)
    s, count = load_record(IndexSizes, p.sizes), load_int(p.position) + 1
    if thread == 0:
        select(floats(p.scores, count), floats(p.ranks, count), s.top_k, p.selection)


@callback(OPERATION)
def select_batch(parameters, thread, threads):
    """The selections of a batch. Threads take every `threads`-th group of tokens, because later ones cost more."""
    p = load_record(ScoreParameters, parameters)
    s, view, batch = (
        load_record(IndexSizes, p.sizes),
        load_record(LayerView, p.layer_view),
        load_record(BatchState, p.position),
    )
    number, record_bytes = 0, 8 + 8 * s.top_k
    for i in range(batch.spans):
        span = load_record(SpanState, p.position + STATE_BYTES + i * SPAN_BYTES)
        rows = load_record(LayerCache, view.caches + i * CACHE_BYTES).v
        for first in range(0, span.tokens, INDEX_GROUP):
            number += 1
            if number % threads != thread:
                continue
            tokens = min(INDEX_GROUP, span.tokens - first)
            _score_group(p, s, rows, span.start + first, tokens, span.position + first, thread)
            for t in range(tokens):
                count, record = span.position + first + t + 1, p.selection + (span.start + first + t) * record_bytes
                scores = floats(p.scores + thread * p.scores_stride + t * p.n_ctx * 4, count)
                select(scores, floats(p.ranks + thread * p.ranks_stride, count), s.top_k, record)


@kernel
def _score_group(p, s, rows, token, tokens, position, thread):
    """The scores of some tokens, the first at `position`, in the thread's buffer."""
    end = position + tokens
    if end <= s.top_k:
        return
    keys, scores = p.scratch + thread * p.private_stride, p.scores + thread * p.scores_stride
    products = keys + (INDEX_BLOCK + 4) * s.dim * 4
    for start in range(0, end, INDEX_BLOCK):
        n = min(INDEX_BLOCK, end - start)
        call6(p.read, rows + start * s.row_bytes, n, keys, 0, 0, 0)
        for t in range(tokens):
            if position + t >= start:
                q, weights = p.q + (token + t) * s.heads * s.dim * 4, p.weights + (token + t) * s.heads * 4
                score_block(s, q, weights, keys, n, products, scores + (t * p.n_ctx + start) * 4)
