"""Which entries a token attends to in compressed attention, in both plans (`archs.common.blocks.EntryIndexer`).

Scores and selections are those of indexer.py and selection.py, with entries in place of positions: a token at position
p sees (p + 1) // rate of them. The keys are the float32 rows that entries.py has made.

    one token    scores, threads share the entries | selection, by one thread |
    batch        scores and selection, threads share the tokens |
"""

from __future__ import annotations

from typing import NamedTuple

from quantkit.codegen.callbacks import callback
from quantkit.codegen.jit import kernel
from quantkit.codegen.simd import floats, load_int
from quantkit.placement.kernel_sizes import INDEX_BLOCK, INDEX_GROUP
from quantkit.runtime.kernels.cpu.entries import ENTRY_CACHE_BYTES, EntryCache
from quantkit.runtime.kernels.cpu.indexer import IndexSizes, score_block, select
from quantkit.runtime.kernels.cpu.kv_rows import LayerView
from quantkit.runtime.kernels.cpu.operation import OPERATION, load_record, row_share
from quantkit.runtime.kernels.cpu.prefill_ops import SPAN_BYTES, STATE_BYTES, BatchState, SpanState


class ScoreParameters(NamedTuple):
    """Parameters of `score_entries`, `select_entries` and `select_batch_entries`."""

    sizes: int  # address of an IndexSizes
    rate: int  # tokens of an entry
    position: int  # address of an int64, or of a BatchState
    layer_view: int  # address of a LayerView
    q: int  # float32[tokens, heads, dim]
    weights: int  # float32[tokens, heads]
    room: int  # entries there is room for
    scores: int  # one token: float32[room]; a batch: float32[INDEX_GROUP, room] per thread
    scores_stride: int
    selection: int  # a record for each token
    ranks: int  # float32[room] per thread, scratch
    ranks_stride: int
    products: int  # float32[heads, INDEX_BLOCK] per thread
    private_stride: int


@callback(OPERATION)
def score_entries(parameters, thread, threads):
    """The scores of one token and the thread's share of the entries."""
    p = load_record(ScoreParameters, parameters)
    s, view = load_record(IndexSizes, p.sizes), load_record(LayerView, p.layer_view)
    count = (load_int(p.position) + 1) // p.rate
    if count <= s.top_k:
        return
    keys, products = load_record(EntryCache, view.caches).keys, p.products + thread * p.private_stride
    first, last = row_share(count, INDEX_BLOCK, thread, threads)
    for start in range(first, last, INDEX_BLOCK):
        n = min(INDEX_BLOCK, last - start)
        score_block(s, p.q, p.weights, keys + start * s.dim * 4, n, products, p.scores + start * 4)


@callback(OPERATION)
def select_entries(parameters, thread, threads):
    """The selection of one token, by the first thread."""
    p = load_record(ScoreParameters, parameters)
    s, count = load_record(IndexSizes, p.sizes), (load_int(p.position) + 1) // p.rate
    if thread == 0:
        select(floats(p.scores, count), floats(p.ranks, count), s.top_k, p.selection)


@callback(OPERATION)
def select_batch_entries(parameters, thread, threads):
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
        keys = load_record(EntryCache, view.caches + i * ENTRY_CACHE_BYTES).keys
        for first in range(0, span.tokens, INDEX_GROUP):
            number += 1
            if number % threads != thread:
                continue
            tokens = min(INDEX_GROUP, span.tokens - first)
            scores = p.scores + thread * p.scores_stride
            _score_group(p, s, keys, span.start + first, tokens, span.position + first, scores, thread)
            for t in range(tokens):
                count = (span.position + first + t + 1) // p.rate
                record = p.selection + (span.start + first + t) * record_bytes
                ranks = floats(p.ranks + thread * p.ranks_stride, count)
                select(floats(scores + t * p.room * 4, count), ranks, s.top_k, record)


@kernel
def _score_group(p, s, keys, token, tokens, position, scores, thread):
    """scores float32[tokens, room] of some tokens, the first at `position`."""
    end = (position + tokens) // p.rate
    if end <= s.top_k:
        return
    products = p.products + thread * p.private_stride
    for start in range(0, end, INDEX_BLOCK):
        n = min(INDEX_BLOCK, end - start)
        for t in range(tokens):
            q, weights = p.q + (token + t) * s.heads * s.dim * 4, p.weights + (token + t) * s.heads * 4
            score_block(s, q, weights, keys + start * s.dim * 4, n, products, scores + (t * p.room + start) * 4)
