"""Which blocks of positions a token attends to, for each KV head (archs.blocks.BlockIndexer), in both plans.

They are plain in `runtime/blocks/block_indexer.py`. The rows of the indexer's keys, after norm and RoPE, are field v of
an EntryCache. A token has a record of selection.py for each KV head, one after another, with the numbers of blocks.

    one token    append the key, queries | scores, threads share the blocks | selections, threads share the heads |
    batch        append the keys, queries | scores and selections, threads share the tokens |

Nothing is scored for tokens with no more than `top_blocks` blocks. A batch decodes keys once for INDEX_GROUP tokens.
The bound is the multiply-adds, heads * dim for each pair of token and position.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from quantkit.codegen.callbacks import callback
from quantkit.codegen.jit import kernel
from quantkit.codegen.simd import call6, floats, load_float, load_int, store_int
from quantkit.placement.kernel_sizes import INDEX_BLOCK, INDEX_GROUP
from quantkit.runtime.kernels.cpu.decode_ops import rms_norm_into
from quantkit.runtime.kernels.cpu.entries import ENTRY_CACHE_BYTES, EntryCache
from quantkit.runtime.kernels.cpu.gemm import token_share
from quantkit.runtime.kernels.cpu.indexer import select
from quantkit.runtime.kernels.cpu.kv_rows import LayerView
from quantkit.runtime.kernels.cpu.latent_attention import block_scores
from quantkit.runtime.kernels.cpu.operation import OPERATION, load_record
from quantkit.runtime.kernels.cpu.pooled_indexer import prepare_queries, rotate_head
from quantkit.runtime.kernels.cpu.prefill_ops import SPAN_BYTES, STATE_BYTES, BatchState, SpanState

_LOWEST, _FIRST = -3e38, 3e38  # below and above any score


class BlockParameters(NamedTuple):
    """Parameters of all operations of this file."""

    position: int  # address of an int64, or of a BatchState
    layer_view: int  # address of a LayerView
    q: int  # float32[tokens, heads, dim], overwritten
    k: int  # float32[tokens, dim], overwritten
    heads: int
    dim: int  # a multiple of 32
    rate: int  # positions of a block
    top_blocks: int
    local_blocks: int
    rope_dim: int
    pair_step: int  # RoPE pair j is elements j * pair_step and j * pair_step + pair_stride
    pair_stride: int
    q_weight: int  # float32[dim]
    k_weight: int  # float32[dim]
    q_eps: int  # address of a float32
    k_eps: int  # address of a float32
    row_bytes: int
    write: int  # `entries.row_writer`
    read: int  # `entries.row_reader`
    keys: int  # float32[INDEX_BLOCK + 4, dim] per thread
    keys_stride: int
    products: int  # float32[heads, INDEX_BLOCK] per thread
    products_stride: int
    room: int  # blocks there is room for
    scores: int  # one token: float32[heads, room]; a batch: float32[INDEX_GROUP, heads, room] per thread
    scores_stride: int
    ranks: int  # float32[room] per thread
    ranks_stride: int
    selection: int  # `heads` records for each token


@kernel
def _append(p, view, token, position, rows):
    """Norm and RoPE of a token's key, which becomes a row of the cache."""
    k = p.k + token * p.dim * 4
    rms_norm_into(k, p.k_weight, p.dim, load_float(p.k_eps), k)
    rotate_head(p, view, k, position)
    call6(p.write, k, rows + position * p.row_bytes, 0, 0, 0, 0)


@callback(OPERATION)
def append_token(parameters, thread, threads):
    """Append the token's key to the cache; norm and RoPE of the thread's share of the queries."""
    p = load_record(BlockParameters, parameters)
    view, position = load_record(LayerView, p.layer_view), load_int(p.position)
    if thread == threads - 1:
        _append(p, view, 0, position, load_record(EntryCache, view.caches).v)
    prepare_queries(p, view, 0, p.heads * thread // threads, p.heads * (thread + 1) // threads, position)


@callback(OPERATION)
def append_batch(parameters, thread, threads):
    """`append_token` for the thread's tokens of a batch."""
    p = load_record(BlockParameters, parameters)
    view, batch = load_record(LayerView, p.layer_view), load_record(BatchState, p.position)
    first, last = token_share(batch.tokens, thread, threads)
    for i in range(batch.spans):
        span = load_record(SpanState, p.position + STATE_BYTES + i * SPAN_BYTES)
        rows = load_record(EntryCache, view.caches + i * ENTRY_CACHE_BYTES).v
        for token in range(max(first, span.start), min(last, span.start + span.tokens)):
            position = span.position + token - span.start
            _append(p, view, token, position, rows)
            prepare_queries(p, view, token, 0, p.heads, position)


@kernel
def _score_block(p, rows, block, token, tokens, position, scores, thread):
    """The scores of a block for some tokens, the first at `position`: scores float32[tokens, heads, room]."""
    keys, products = p.keys + thread * p.keys_stride, p.products + thread * p.products_stride
    x, y = floats(products, p.heads * INDEX_BLOCK), floats(scores, tokens * p.heads * p.room)
    for row in range(tokens * p.heads):
        y[row * p.room + block] = np.float32(_LOWEST)
    end = min((block + 1) * p.rate, position + tokens)
    for start in range(block * p.rate, end, INDEX_BLOCK):
        count = min(INDEX_BLOCK, end - start)
        call6(p.read, rows + start * p.row_bytes, count, keys, 0, 0, 0)
        for t in range(tokens):
            seen = min(count, position + t + 1 - start)
            if seen <= 0:
                continue
            block_scores(p.q + (token + t) * p.heads * p.dim * 4, p.heads, keys, seen, p.dim, products, INDEX_BLOCK * 4)
            for head in range(p.heads):
                best = y[(t * p.heads + head) * p.room + block]
                for i in range(head * INDEX_BLOCK, head * INDEX_BLOCK + seen):
                    best = max(best, x[i])
                y[(t * p.heads + head) * p.room + block] = best


@kernel
def _select(p, scores, position, head, ranks, record):
    """The record of a KV head, of the token's scores float32[heads, room]."""
    own = position // p.rate
    if own < p.top_blocks:
        store_int(0, record)
        return
    x = floats(scores + head * p.room * 4, own + 1)
    for block in range(max(0, own + 1 - p.local_blocks), own + 1):
        x[block] = np.float32(_FIRST)
    select(x, floats(ranks, own + 1), p.top_blocks, record)


@callback(OPERATION)
def score_blocks(parameters, thread, threads):
    """The scores of one token and the thread's share of the blocks."""
    p = load_record(BlockParameters, parameters)
    position = load_int(p.position)
    count = position // p.rate + 1
    if count <= p.top_blocks:
        return
    rows = load_record(EntryCache, load_record(LayerView, p.layer_view).caches).v
    for block in range(count * thread // threads, count * (thread + 1) // threads):
        _score_block(p, rows, block, 0, 1, position, p.scores, thread)


@callback(OPERATION)
def select_blocks(parameters, thread, threads):
    """The selections of one token for the thread's share of the heads."""
    p = load_record(BlockParameters, parameters)
    position, ranks = load_int(p.position), p.ranks + thread * p.ranks_stride
    for head in range(p.heads * thread // threads, p.heads * (thread + 1) // threads):
        _select(p, p.scores, position, head, ranks, p.selection + head * (8 + 8 * p.top_blocks))


@callback(OPERATION)
def select_batch_blocks(parameters, thread, threads):
    """The selections of a batch. Threads take every `threads`-th group of tokens, because later ones cost more."""
    p = load_record(BlockParameters, parameters)
    view, batch = load_record(LayerView, p.layer_view), load_record(BatchState, p.position)
    number, record_bytes = 0, 8 + 8 * p.top_blocks
    scores, ranks = p.scores + thread * p.scores_stride, p.ranks + thread * p.ranks_stride
    for i in range(batch.spans):
        span = load_record(SpanState, p.position + STATE_BYTES + i * SPAN_BYTES)
        rows = load_record(EntryCache, view.caches + i * ENTRY_CACHE_BYTES).v
        for first in range(0, span.tokens, INDEX_GROUP):
            number += 1
            if number % threads != thread:
                continue
            tokens, position = min(INDEX_GROUP, span.tokens - first), span.position + first
            count = (position + tokens - 1) // p.rate + 1
            for block in range(count if count > p.top_blocks else 0):
                _score_block(p, rows, block, span.start + first, tokens, position, scores, thread)
            for t in range(tokens):
                for head in range(p.heads):
                    record = p.selection + ((span.start + first + t) * p.heads + head) * record_bytes
                    _select(p, scores + t * p.heads * p.room * 4, position + t, head, ranks, record)
