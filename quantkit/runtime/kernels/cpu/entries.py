"""What compressed attention appends to caches, and the entries that its compressors make of them, in both plans.

They are plain in `runtime/blocks/compressed_attention.py`. A sequence has, in each layer, an EntryCache:

    k         rows of keys, which are values too
    v         rows of what the compressors read of a token: kv(y), gate(y), then those of the indexer's compressor
    entries   float32 rows: those of whole windows of `rate` tokens (runtime/kv/entries.py)
    keys      float32 rows: the keys of the indexer, of the same windows

Rows of a cache are decoded and rotated back before they are used, so that entries and decoded keys are alike. Entries
are made once, from `made` on: one in `rate` tokens makes one, of the rows of its windows alone. It takes an exponential
for each element and token of the windows, in loops over elements.

What depends on a type is a C function of six int64, whose address is a parameter; the rest is compiled once.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np

from quantkit.codegen.callbacks import Callback, callback
from quantkit.codegen.jit import kernel
from quantkit.codegen.simd import call6, copy_floats, floats, load_float, load_int, store_int
from quantkit.runtime.kernels.cpu.decode_ops import rms_norm_into
from quantkit.runtime.kernels.cpu.gemm import token_share
from quantkit.runtime.kernels.cpu.kv_rows import NAMES, LayerView, rotate, store_row
from quantkit.runtime.kernels.cpu.matvec import SIGNATURE
from quantkit.runtime.kernels.cpu.operation import OPERATION, load_record, record_bytes, row_share
from quantkit.runtime.kernels.cpu.prefill_attention import decode_keys
from quantkit.runtime.kernels.cpu.prefill_ops import NEXT_PIECE, SPAN_BYTES, STATE_BYTES, BatchState, SpanState
from quantkit.runtime.kernels.reference import exp
from quantkit.types import layout

_PIECE = 256  # elements of a row that are encoded or decoded by straight code, where a type allows pieces
_PART_BYTES = 16


class EntryCache(NamedTuple):
    """Where a layer with compressed attention has its rows and entries, of one sequence; begins as a LayerCache."""

    k: int
    v: int
    n_ctx: int
    entries: int  # float32[windows, dim]
    keys: int  # float32[windows, dim of the indexer]
    made: int  # address of an int64: entries are there for the whole windows of the first so many tokens


ENTRY_CACHE_BYTES = record_bytes(EntryCache)


class Sizes(NamedTuple):
    """The sizes of a layer with compressed attention, and the functions that write and read its rows."""

    heads: int
    dim: int  # a multiple of 32
    rope: int  # the last elements, of which neighbours are rotated together
    window: int
    rate: int  # tokens of an entry; 0: there are none
    kept: int  # elements of a row of v
    k_bytes: int  # of a row
    v_bytes: int
    write_k: int  # `row_writer`
    read_k: int  # `row_reader`
    write_v: int
    read_v: int


# ----------------------------------------------------------------------------------------------------------------- rows


class Rows(NamedTuple):
    """Rows of a cache that functions are compiled for."""

    dim: int  # a multiple of 32
    ggml_type: int
    rotation: int  # elements rotated together; 0: not rotated

    @property
    def nbytes(self) -> int:
        """Bytes of a row."""
        return layout(NAMES[self.ggml_type]).row_bytes(self.dim)

    @property
    def piece(self) -> tuple[int, int]:
        """Elements and bytes that follow each other alike in a row; the whole row where it has one scale."""
        n = self.dim if NAMES[self.ggml_type] == "q8_KV" else math.gcd(self.dim, _PIECE)
        return n, layout(NAMES[self.ggml_type]).row_bytes(n)


@functools.cache
def row_writer(rows: Rows) -> Callback:
    """Rotate float32[dim] and encode it to a row of a cache: (x, row, -, -, -, -). x is overwritten."""
    dim, ggml_type, rotation = rows
    n, nbytes = rows.piece

    @callback(SIGNATURE)
    def run(x, row, _, __, ___, ____):
        rotate(x, dim, rotation)
        for i in range(dim // n):
            store_row(ggml_type, x + i * n * 4, n, row + i * nbytes)

    return run


@functools.cache
def row_reader(rows: Rows) -> Callback:
    """Decode rows of a cache to out float32[count, dim], rotated back: (first row, count, out, -, -, -)."""
    dim, ggml_type, rotation = rows
    row_bytes, (n, nbytes) = rows.nbytes, rows.piece

    @callback(SIGNATURE)
    def run(first, count, out, _, __, ___):
        for i in range(dim // n):
            decode_keys(ggml_type, first + i * nbytes, row_bytes, count, n, out + i * n * 4, dim * 4)
        rotate(out, count * dim, rotation)

    return run


@kernel
def rotate_tail(x, dim, rope, view, position, back):
    """RoPE of the last `rope` elements of float32[dim], in place; `back` by the negative angle."""
    y, half = floats(x + (dim - rope) * 4, rope), rope // 2
    cos, sin = floats(view.cos + position * half * 4, half), floats(view.sin + position * half * 4, half)
    sign = np.float32(-1) if back != 0 else np.float32(1)
    for j in range(half):
        a, b, s = y[2 * j], y[2 * j + 1], sign * sin[j]
        y[2 * j] = a * cos[j] - b * s
        y[2 * j + 1] = a * s + b * cos[j]


# --------------------------------------------------------------------------------------------------------------- append


class AppendParameters(NamedTuple):
    """Parameters of `append_token` and `append_batch`."""

    sizes: int  # address of a Sizes
    position: int  # address of an int64, or of a BatchState
    layer_view: int  # address of a LayerView
    q: int  # float32[tokens, heads, dim], overwritten
    q_weight: int  # float32[dim]: weight of the norm of each head, times the scale of scores
    q_eps: int  # address of a float32
    k: int  # float32[tokens, dim], overwritten
    k_weight: int  # float32[dim]
    k_eps: int  # address of a float32
    parts: int  # int64[count, 2]: address of float32[tokens, n] and n, of what a row of v holds
    part_count: int
    index_q: int  # float32[tokens, index heads, index dim], overwritten; 0 without an indexer
    index_heads: int
    index_dim: int
    multiple: int  # at which rows of q are split between threads; 0 for a batch
    index_multiple: int
    scratch: int  # float32[kept] per thread
    private_stride: int


@kernel
def _append_rows(p, s, view, cache, token, position, scratch):
    """Norm and RoPE of a key; the key and what compressors read become rows of the cache."""
    k = p.k + token * s.dim * 4
    rms_norm_into(k, p.k_weight, s.dim, load_float(p.k_eps), k)
    rotate_tail(k, s.dim, s.rope, view, position, 0)
    call6(s.write_k, k, cache.k + position * s.k_bytes, 0, 0, 0, 0)
    if s.kept == 0:
        return
    at = scratch
    for i in range(p.part_count):
        part, n = load_int(p.parts + i * _PART_BYTES), load_int(p.parts + i * _PART_BYTES + 8)
        copy_floats(at, part + token * n * 4, n)
        at += n * 4
    call6(s.write_v, scratch, cache.v + position * s.v_bytes, 0, 0, 0, 0)


@kernel
def _prepare_queries(p, s, view, q, first, last, position):
    """Norm, scale and RoPE of queries first … last - 1 of a token."""
    for head in range(first, last):
        x = q + head * s.dim * 4
        rms_norm_into(x, p.q_weight, s.dim, load_float(p.q_eps), x)
        rotate_tail(x, s.dim, s.rope, view, position, 0)


@kernel
def _prepare_index_queries(p, s, view, q, first, last, position):
    """RoPE of an indexer's queries first … last - 1 of a token."""
    for head in range(first, last):
        rotate_tail(q + head * p.index_dim * 4, p.index_dim, s.rope, view, position, 0)


@callback(OPERATION)
def append_token(parameters, thread, threads):
    """Append the token's rows to the cache; norm, scale and RoPE of the queries that the thread computed."""
    p = load_record(AppendParameters, parameters)
    s, view, position = load_record(Sizes, p.sizes), load_record(LayerView, p.layer_view), load_int(p.position)
    if thread == threads - 1:
        scratch = p.scratch + thread * p.private_stride
        _append_rows(p, s, view, load_record(EntryCache, view.caches), 0, position, scratch)
    rows = s.heads * s.dim
    first, last = row_share(rows, p.multiple, thread, threads)
    _prepare_queries(p, s, view, p.q, first // s.dim, last // s.dim, position)
    if p.index_q != 0:
        rows = p.index_heads * p.index_dim
        first, last = row_share(rows, p.index_multiple, thread, threads)
        _prepare_index_queries(p, s, view, p.index_q, first // p.index_dim, last // p.index_dim, position)


@callback(OPERATION)
def append_batch(parameters, thread, threads):
    """`append_token` for the thread's tokens of a batch, whose rows other threads have computed."""
    p = load_record(AppendParameters, parameters)
    s, view, batch = (
        load_record(Sizes, p.sizes),
        load_record(LayerView, p.layer_view),
        load_record(BatchState, p.position),
    )
    first, last = token_share(batch.tokens, thread, threads)
    for i in range(batch.spans):
        span = load_record(SpanState, p.position + STATE_BYTES + i * SPAN_BYTES)
        cache = load_record(EntryCache, view.caches + i * ENTRY_CACHE_BYTES)
        for token in range(max(first, span.start), min(last, span.start + span.tokens)):
            position = span.position + token - span.start
            _append_rows(p, s, view, cache, token, position, p.scratch + thread * p.private_stride)
            _prepare_queries(p, s, view, p.q + token * s.heads * s.dim * 4, 0, s.heads, position)
            if p.index_q != 0:
                q = p.index_q + token * p.index_heads * p.index_dim * 4
                _prepare_index_queries(p, s, view, q, 0, p.index_heads, position)
    if thread == 0:
        store_int(0, p.position + NEXT_PIECE)


# -------------------------------------------------------------------------------------------------------------- entries


class CompressorFields(NamedTuple):
    """A compressor: what it makes, and where it reads."""

    dim: int
    overlapping: int  # 1: windows overlap, and kv and gate have 2 dim elements
    offset: int  # elements of a row of v before its kv(y)
    ape: int  # float32[rate, dim or 2 dim]
    weight: int  # float32[dim], of the norm
    eps: int  # address of a float32


class EntriesParameters(NamedTuple):
    """Parameters of `make_entries` and `make_batch_entries`."""

    sizes: int  # address of a Sizes
    position: int  # address of an int64, or of a BatchState
    layer_view: int  # address of a LayerView
    compressor: int  # address of a CompressorFields
    of_index: int  # that of the indexer, or 0
    scratch: int  # kernel_sizes.compressor_bytes per thread
    private_stride: int


@kernel
def _raise_maxima(z, stride, ape, ape_stride, count, n, maxima):
    """z += ape, of `count` rows; maxima float32[n] become at least what is there."""
    largest = floats(maxima, n)
    for t in range(count):
        x, bias = floats(z + t * stride, n), floats(ape + t * ape_stride, n)
        for i in range(n):
            x[i] += bias[i]
            largest[i] = max(largest[i], x[i])


@kernel
def _add_shares(c, z, stride, count, n, maxima, totals, out):
    """totals += e^(z - maxima), out += e^(z - maxima) c, of `count` rows."""
    largest, total, y = floats(maxima, n), floats(totals, n), floats(out, n)
    for t in range(count):
        x, logits = floats(c + t * stride, n), floats(z + t * stride, n)
        for i in range(n):
            share = exp(logits[i] - largest[i])
            total[i] += share
            y[i] += share * x[i]


@kernel
def make_entry(f, s, view, window, rows, out, scratch):
    """out float32[dim]: the entry of a window, of the decoded rows of its tokens, after those of the window before."""
    stride, columns, before = s.kept * 4, f.dim * (1 + f.overlapping), int(f.overlapping != 0 and window > 0)
    c, z, n = rows + f.offset * 4, rows + (f.offset + columns) * 4, f.dim
    own, half = before * s.rate * stride + f.overlapping * n * 4, f.overlapping * n * 4
    maxima, totals = scratch, scratch + n * 4
    floats(maxima, n)[:] = np.float32(-np.inf)
    floats(totals, n)[:] = np.float32(0)
    y, total = floats(out, n), floats(totals, n)
    y[:] = np.float32(0)
    if before:
        _raise_maxima(z, stride, f.ape, columns * 4, s.rate, n, maxima)
    _raise_maxima(z + own, stride, f.ape + half, columns * 4, s.rate, n, maxima)
    if before:
        _add_shares(c, z, stride, s.rate, n, maxima, totals, out)
    _add_shares(c + own, z + own, stride, s.rate, n, maxima, totals, out)
    for i in range(n):
        y[i] /= total[i]
    rms_norm_into(out, f.weight, n, load_float(f.eps), out)
    rotate_tail(out, n, s.rope, view, window * s.rate, 0)


@kernel
def _make_share(p, s, view, cache, tokens, thread, threads):
    """The thread's share of the entries of a sequence that its first `tokens` tokens complete."""
    done = load_int(cache.made) // s.rate
    count, rows = tokens // s.rate - done, p.scratch + thread * p.private_stride
    f = load_record(CompressorFields, p.compressor)
    for window in range(done + count * thread // threads, done + count * (thread + 1) // threads):
        first = max(0, window - f.overlapping) * s.rate
        read = (window + 1) * s.rate - first
        call6(s.read_v, cache.v + first * s.v_bytes, read, rows, 0, 0, 0)
        scratch = rows + read * s.kept * 4
        make_entry(f, s, view, window, rows, cache.entries + window * f.dim * 4, scratch)
        if p.of_index != 0:
            g = load_record(CompressorFields, p.of_index)
            make_entry(g, s, view, window, rows, cache.keys + window * g.dim * 4, scratch)


@callback(OPERATION)
def make_entries(parameters, thread, threads):
    """The entries that a token completes, and those that are missing before them."""
    p = load_record(EntriesParameters, parameters)
    s, view = load_record(Sizes, p.sizes), load_record(LayerView, p.layer_view)
    cache = load_record(EntryCache, view.caches)
    _make_share(p, s, view, cache, load_int(p.position) + 1, thread, threads)


@callback(OPERATION)
def make_batch_entries(parameters, thread, threads):
    """`make_entries` of all sequences of a batch."""
    p = load_record(EntriesParameters, parameters)
    s, view = load_record(Sizes, p.sizes), load_record(LayerView, p.layer_view)
    for i in range(load_record(BatchState, p.position).spans):
        span = load_record(SpanState, p.position + STATE_BYTES + i * SPAN_BYTES)
        cache = load_record(EntryCache, view.caches + i * ENTRY_CACHE_BYTES)
        _make_share(p, s, view, cache, span.position + span.tokens, thread, threads)
