"""What indexers of blocks append to caches, and the keys of blocks (archs.blocks.PooledIndexer), in both plans.

They are plain in `runtime/blocks/pooled_indexer.py`. A sequence has, in each layer, an EntryCache of which three fields
are used:

    v        rows of the indexer's keys, before norm and RoPE
    keys     float32 rows: the keys of whole blocks (runtime/kv/entries.py)
    made     keys are there for the whole blocks of the first so many tokens

Scores and selections are those of entry_indexer.py, with weights of 1. The key of a block is made once, of the rows of
its positions as they are in the cache.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from quantkit.codegen.callbacks import callback
from quantkit.codegen.jit import kernel
from quantkit.codegen.simd import call6, floats, load_float, load_int
from quantkit.runtime.kernels.cpu.decode_attention import apply_rope
from quantkit.runtime.kernels.cpu.decode_ops import rms_norm_into
from quantkit.runtime.kernels.cpu.entries import ENTRY_CACHE_BYTES, EntryCache
from quantkit.runtime.kernels.cpu.gemm import token_share
from quantkit.runtime.kernels.cpu.kv_rows import LayerView
from quantkit.runtime.kernels.cpu.operation import OPERATION, load_record
from quantkit.runtime.kernels.cpu.prefill_ops import SPAN_BYTES, STATE_BYTES, BatchState, SpanState


class IndexParameters(NamedTuple):
    """Parameters of all operations of this file."""

    position: int  # address of an int64, or of a BatchState
    layer_view: int  # address of a LayerView
    q: int  # float32[tokens, heads, dim], overwritten
    k: int  # float32[tokens, dim], overwritten
    heads: int
    dim: int  # a multiple of 32
    rate: int  # positions of a block
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
    scratch: int  # float32[rate, dim] per thread
    private_stride: int


@kernel
def rotate_head(p, view, x, position):
    """RoPE of float32[dim]."""
    half = p.rope_dim // 2
    cos, sin = floats(view.cos + position * half * 4, half), floats(view.sin + position * half * 4, half)
    y = floats(x, p.dim)
    apply_rope(y, y, p.dim, cos, sin, p.rope_dim, p.pair_step, p.pair_stride, np.float32(1))


@kernel
def prepare_queries(p, view, token, first, last, position):
    """Norm and RoPE of queries first … last - 1 of a token."""
    for head in range(first, last):
        x = p.q + (token * p.heads + head) * p.dim * 4
        rms_norm_into(x, p.q_weight, p.dim, load_float(p.q_eps), x)
        rotate_head(p, view, x, position)


@callback(OPERATION)
def append_token(parameters, thread, threads):
    """Append the token's key to the cache; norm and RoPE of the thread's share of the queries."""
    p = load_record(IndexParameters, parameters)
    view, position = load_record(LayerView, p.layer_view), load_int(p.position)
    if thread == threads - 1:
        call6(p.write, p.k, load_record(EntryCache, view.caches).v + position * p.row_bytes, 0, 0, 0, 0)
    prepare_queries(p, view, 0, p.heads * thread // threads, p.heads * (thread + 1) // threads, position)


@callback(OPERATION)
def append_batch(parameters, thread, threads):
    """`append_token` for the thread's tokens of a batch."""
    p = load_record(IndexParameters, parameters)
    view, batch = load_record(LayerView, p.layer_view), load_record(BatchState, p.position)
    first, last = token_share(batch.tokens, thread, threads)
    for i in range(batch.spans):
        span = load_record(SpanState, p.position + STATE_BYTES + i * SPAN_BYTES)
        rows = load_record(EntryCache, view.caches + i * ENTRY_CACHE_BYTES).v
        for token in range(max(first, span.start), min(last, span.start + span.tokens)):
            position = span.position + token - span.start
            call6(p.write, p.k + token * p.dim * 4, rows + position * p.row_bytes, 0, 0, 0, 0)
            prepare_queries(p, view, token, 0, p.heads, position)


@kernel
def make_key(p, view, rows, block, out):
    """out float32[dim]: the key of a block, of the decoded rows of its positions."""
    y = floats(out, p.dim)
    y[:] = np.float32(0)
    for t in range(p.rate):
        x = floats(rows + t * p.dim * 4, p.dim)
        for c in range(p.dim):
            y[c] += x[c]
    for c in range(p.dim):
        y[c] /= np.float32(p.rate)
    rms_norm_into(out, p.k_weight, p.dim, load_float(p.k_eps), out)
    rotate_head(p, view, out, block * p.rate)


@kernel
def _make_share(p, view, cache, tokens, thread, threads):
    """The thread's share of the keys of blocks that the first `tokens` tokens of a sequence complete."""
    done = load_int(cache.made) // p.rate
    count, rows = tokens // p.rate - done, p.scratch + thread * p.private_stride
    for block in range(done + count * thread // threads, done + count * (thread + 1) // threads):
        call6(p.read, cache.v + block * p.rate * p.row_bytes, p.rate, rows, 0, 0, 0)
        make_key(p, view, rows, block, cache.keys + block * p.dim * 4)


@callback(OPERATION)
def make_keys(parameters, thread, threads):
    """The keys of the blocks that a token completes, and those that are missing before them."""
    p = load_record(IndexParameters, parameters)
    view = load_record(LayerView, p.layer_view)
    _make_share(p, view, load_record(EntryCache, view.caches), load_int(p.position) + 1, thread, threads)


@callback(OPERATION)
def make_batch_keys(parameters, thread, threads):
    """`make_keys` of all sequences of a batch."""
    p = load_record(IndexParameters, parameters)
    view = load_record(LayerView, p.layer_view)
    for i in range(load_record(BatchState, p.position).spans):
        span = load_record(SpanState, p.position + STATE_BYTES + i * SPAN_BYTES)
        cache = load_record(EntryCache, view.caches + i * ENTRY_CACHE_BYTES)
        _make_share(p, view, cache, span.position + span.tokens, thread, threads)
