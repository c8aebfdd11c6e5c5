"""Compressed attention in both plans: a window of cached keys, then entries; every key is its own value.

It is plain in `runtime/blocks/compressed_attention.py`; entries.py appends the keys and makes the entries. All heads
have one key, so a block of keys is multiplied by as many query rows as there are, in float32: cached rows are decoded
and rotated back, entries are there already. A head's sink is the first score of its softmax, with a value of 0. What a
head gets is rotated back by the position of the token.

    one token    threads share the heads, so nothing is merged; with a selection its entries alone are read
    batch        threads take pieces of tokens, with all heads; the entries that any of them selects are multiplied, and
                 the scores of those that a token has not selected are hidden

Results are those of each group of heads, one after another: activation buffers of one token, matrices of a batch. With
the same keys a head's result has the same bits for any number of threads. Both are bound by multiply-adds, 2 dim for
each head and key.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from quantkit.codegen.callbacks import callback
from quantkit.codegen.jit import kernel
from quantkit.codegen.simd import atomic_add, call6, copy_floats, floats, integers, load_float, load_int
from quantkit.placement.kernel_sizes import FLOAT_TILE_TOKENS, KEY_BLOCK, LATENT_BLOCK
from quantkit.runtime.kernels.cpu.activations import quantize_range
from quantkit.runtime.kernels.cpu.decode_ops import add_range
from quantkit.runtime.kernels.cpu.entries import ENTRY_CACHE_BYTES, EntryCache, Sizes, rotate_tail
from quantkit.runtime.kernels.cpu.kv_rows import LayerView
from quantkit.runtime.kernels.cpu.latent_attention import block_scores, block_values
from quantkit.runtime.kernels.cpu.operation import OPERATION, load_record, row_share
from quantkit.runtime.kernels.cpu.prefill_attention import find_span, matmul, softmax_update, transpose_keys
from quantkit.runtime.kernels.cpu.prefill_ops import (
    NEXT_PIECE,
    SPAN_BYTES,
    STATE_BYTES,
    BatchState,
    SpanState,
    batch_share,
)
from quantkit.runtime.kernels.cpu.selection import selected_positions
from quantkit.runtime.kernels.reference import exp

_HIDDEN = -1e30  # below any score
_LEAST = -1e29  # a maximum to start with, above hidden scores


class AttentionParameters(NamedTuple):
    """Parameters of `attend_token` and `attend_batch`."""

    sizes: int  # address of a Sizes
    position: int  # address of an int64, or of a BatchState
    layer_view: int  # address of a LayerView
    q: int  # float32[tokens, heads, dim], scaled and rotated; of a batch with FLOAT_TILE_TOKENS more rows
    sinks: int  # float32[heads]
    selection: int  # a record of selection.py for each token; 0: all entries
    selection_bytes: int
    groups: int  # of heads
    out: int  # of each group: an activation buffer, or float32[tokens, heads / groups * dim]
    group_bytes: int  # from one group to the next
    tokens: int  # of a piece of a batch
    union: int  # with a selection, of a batch: int64[entries] per thread
    union_stride: int
    scratch: int  # kernel_sizes.compressed_decode_bytes or compressed_piece_bytes per thread
    private_stride: int


@kernel
def _start_softmax(sinks, head, dim, result, softmax_state):
    """A softmax that has the head's sink as its only score."""
    floats(result, dim)[:] = np.float32(0)
    sink, state = load_float(sinks + head * 4), floats(softmax_state, 2)
    state[0] = max(sink, np.float32(_LEAST))
    state[1] = exp(sink - state[0])


@kernel
def _finish(s, view, position, result, softmax_state, out):
    """out float32[dim] = result / denominator, rotated back."""
    x, y, factor = floats(result, s.dim), floats(out, s.dim), np.float32(1) / load_float(softmax_state + 4)
    for i in range(s.dim):
        y[i] = x[i] * factor
    rotate_tail(out, s.dim, s.rope, view, position, 1)


# ------------------------------------------------------------------------------------------------------------ one token


@kernel
def _attend_block(s, q, heads, keys, count, scores, results, softmax_states):
    """Online-softmax step of some heads with up to LATENT_BLOCK keys."""
    row = LATENT_BLOCK * 4
    block_scores(q, heads, keys, count, s.dim, scores, row)
    for head in range(heads):
        result, state = results + head * s.dim * 4, softmax_states + head * 8
        softmax_update(scores + head * row, -(-count // 16) * 16, 0, count, s.dim, result, state)
    block_values(scores, row, heads, keys, s.dim * 4, count, s.dim, results, s.dim * 4)


@kernel
def _attend_keys(p, s, cache, position, q, heads, buffer):
    """The softmax steps of some heads with the window and the entries that the token sees; see `attend_token`."""
    scores = buffer + LATENT_BLOCK * s.dim * 4
    results = scores + heads * LATENT_BLOCK * 4
    states = results + heads * s.dim * 4
    for start in range(max(0, position + 1 - s.window), position + 1, LATENT_BLOCK):
        count = min(LATENT_BLOCK, position + 1 - start)
        call6(s.read_k, cache.k + start * s.k_bytes, count, buffer, 0, 0, 0)
        _attend_block(s, q, heads, buffer, count, scores, results, states)
    if s.rate == 0:
        return
    visible, chosen = selected_positions(p.selection, (position + 1) // s.rate)
    for start in range(0, visible, LATENT_BLOCK):
        count, keys = min(LATENT_BLOCK, visible - start), cache.entries + start * s.dim * 4
        if chosen != 0:
            keys = buffer
            for i in range(count):
                entry = cache.entries + load_int(chosen + (start + i) * 8) * s.dim * 4
                copy_floats(buffer + i * s.dim * 4, entry, s.dim)
        _attend_block(s, q, heads, keys, count, scores, results, states)


@callback(OPERATION)
def attend_token(parameters, thread, threads):
    """The results of the thread's heads, in the activation buffers of their groups."""
    p = load_record(AttentionParameters, parameters)
    s, view, position = load_record(Sizes, p.sizes), load_record(LayerView, p.layer_view), load_int(p.position)
    first, last = row_share(s.heads, 1, thread, threads)
    heads, buffer, in_group = last - first, p.scratch + thread * p.private_stride, s.heads // p.groups
    if heads == 0:
        return
    results = buffer + LATENT_BLOCK * (s.dim + heads) * 4
    states, width = results + heads * s.dim * 4, in_group * s.dim
    for i in range(heads):
        _start_softmax(p.sinks, first + i, s.dim, results + i * s.dim * 4, states + i * 8)
    _attend_keys(p, s, load_record(EntryCache, view.caches), position, p.q + first * s.dim * 4, heads, buffer)
    for i in range(heads):
        group, column = (first + i) // in_group, (first + i) % in_group * s.dim
        out = p.out + group * p.group_bytes
        _finish(s, view, position, results + i * s.dim * 4, states + i * 8, out + column * 4)
        quantize_range(out, width, column, column + s.dim)


# -------------------------------------------------------------------------------------------------------------- a batch


class _Buffers(NamedTuple):
    """Addresses of a piece's working memory."""

    decoded: int  # float32[KEY_BLOCK, dim]
    transposed: int  # float32[dim, KEY_BLOCK]
    results: int  # float32[rows, dim]
    states: int  # float32[rows, 2]
    scores: int  # float32[rows, KEY_BLOCK]
    hidden: int  # float32[KEY_BLOCK]: what is added to the scores of a token


@kernel
def _buffers(scratch, dim, rows):
    decoded, block = scratch, KEY_BLOCK * dim * 4
    results = decoded + 2 * block
    states = results + rows * dim * 4
    scores = states + rows * 8
    return _Buffers(decoded, decoded + block, results, states, scores, scores + rows * KEY_BLOCK * 4)


@kernel
def _multiply_keys(s, q, count, rows, b):
    """The scores of all query rows with `count` decoded keys."""
    transpose_keys(b.decoded, count, s.dim, b.transposed)
    columns = -(-count // 32) * 32
    matmul(q, s.dim * 4, b.transposed, KEY_BLOCK * 4, s.dim, b.scores, KEY_BLOCK * 4, rows, columns, False)


@kernel
def _update(s, row, count, first, last, b):
    """Online-softmax step of a query row, which sees keys first … last - 1 of a block."""
    result, state = b.results + row * s.dim * 4, b.states + row * 8
    softmax_update(b.scores + row * KEY_BLOCK * 4, -(-count // 32) * 32, first, last, s.dim, result, state)


@kernel
def _add_values(s, count, rows, b):
    """Add the weighted keys of a block to the results."""
    columns = -(-count // 32) * 32
    matmul(b.scores, KEY_BLOCK * 4, b.decoded, s.dim * 4, columns, b.results, s.dim * 4, rows, s.dim, True)


@kernel
def _attend_window(s, cache, position, tokens, q, rows, b):
    """The softmax steps with cached keys."""
    end = position + tokens
    for start in range(max(0, position + 1 - s.window), end, KEY_BLOCK):
        count = min(KEY_BLOCK, end - start)
        call6(s.read_k, cache.k + start * s.k_bytes, count, b.decoded, 0, 0, 0)
        _multiply_keys(s, q, count, rows, b)
        for row in range(tokens * s.heads):
            last = position + row // s.heads + 1 - start
            _update(s, row, count, max(0, last - s.window), last, b)
        _add_values(s, count, rows, b)


@kernel
def _attend_entries(s, cache, position, tokens, q, rows, b):
    """The softmax steps with all entries that the tokens see."""
    end = (position + tokens) // s.rate
    for start in range(0, end, KEY_BLOCK):
        count = min(KEY_BLOCK, end - start)
        copy_floats(b.decoded, cache.entries + start * s.dim * 4, count * s.dim)
        _multiply_keys(s, q, count, rows, b)
        for row in range(tokens * s.heads):
            _update(s, row, count, 0, (position + row // s.heads + 1) // s.rate - start, b)
        _add_values(s, count, rows, b)


@kernel
def _find_union(p, s, token, position, tokens, union):
    """Write the entries that any of the tokens attends to, ascending; returns their number."""
    end, count = (position + tokens) // s.rate, 0
    x = integers(union, end)
    x[:] = 0
    for t in range(tokens):
        record = p.selection + (token + t) * p.selection_bytes
        selected, chosen = selected_positions(record, (position + t + 1) // s.rate)
        for i in range(selected):
            x[i if chosen == 0 else load_int(chosen + i * 8)] = 1
    for i in range(end):
        if x[i] != 0:
            x[count] = i
            count += 1
    return count


@kernel
def _hide_others(record, visible, union, count, hidden):
    """hidden float32[count]: 0 for the entries of the union that a token attends to, else below any score."""
    y, x, at = floats(hidden, count), integers(union, count), 0
    selected, chosen = selected_positions(record, visible)
    for i in range(count):
        is_seen = x[i] < visible
        if chosen != 0:
            while at < selected and load_int(chosen + at * 8) < x[i]:
                at += 1
            is_seen = at < selected and load_int(chosen + at * 8) == x[i]
        y[i] = np.float32(0) if is_seen else np.float32(_HIDDEN)


@kernel
def _attend_selected(p, s, cache, token, position, tokens, q, rows, b, union):
    """The softmax steps with the entries that any of the tokens has selected."""
    end = _find_union(p, s, token, position, tokens, union)
    for start in range(0, end, KEY_BLOCK):
        count, block = min(KEY_BLOCK, end - start), union + start * 8
        for i in range(count):
            copy_floats(b.decoded + i * s.dim * 4, cache.entries + load_int(block + i * 8) * s.dim * 4, s.dim)
        _multiply_keys(s, q, count, rows, b)
        for t in range(tokens):
            record = p.selection + (token + t) * p.selection_bytes
            _hide_others(record, (position + t + 1) // s.rate, block, count, b.hidden)
            for row in range(t * s.heads, (t + 1) * s.heads):
                add_range(b.hidden, b.scores + row * KEY_BLOCK * 4, 0, count)
                _update(s, row, count, 0, count, b)
        _add_values(s, count, rows, b)


@kernel
def _attend_piece(p, s, view, cache, token, position, tokens, b, union):
    """The results of some tokens of one sequence, the first at `position`."""
    q, count, in_group = p.q + token * s.heads * s.dim * 4, tokens * s.heads, s.heads // p.groups
    rows = -(-count // FLOAT_TILE_TOKENS) * FLOAT_TILE_TOKENS
    for row in range(count):
        _start_softmax(p.sinks, row % s.heads, s.dim, b.results + row * s.dim * 4, b.states + row * 8)
    floats(b.results, rows * s.dim)[count * s.dim :] = np.float32(0)
    _attend_window(s, cache, position, tokens, q, rows, b)
    if s.rate != 0:
        if p.selection != 0:
            _attend_selected(p, s, cache, token, position, tokens, q, rows, b, union)
        else:
            _attend_entries(s, cache, position, tokens, q, rows, b)
    for row in range(count):
        t, head = row // s.heads, row % s.heads
        out = p.out + head // in_group * p.group_bytes + ((token + t) * in_group + head % in_group) * s.dim * 4
        _finish(s, view, position + t, b.results + row * s.dim * 4, b.states + row * 8, out)


@callback(OPERATION)
def attend_batch(parameters, thread, threads):
    """The results of all tokens and heads. Threads take the pieces of a sequence with the most keys first."""
    p = load_record(AttentionParameters, parameters)
    s, view, spans = (
        load_record(Sizes, p.sizes),
        load_record(LayerView, p.layer_view),
        load_record(BatchState, p.position).spans,
    )
    rows = -(-p.tokens * s.heads // FLOAT_TILE_TOKENS) * FLOAT_TILE_TOKENS
    b = _buffers(p.scratch + thread * p.private_stride, s.dim, rows)
    while True:
        i, piece = find_span(p.position, atomic_add(1, p.position + NEXT_PIECE), p.tokens, 1)
        if i == spans:
            break
        span = load_record(SpanState, p.position + STATE_BYTES + i * SPAN_BYTES)
        cache = load_record(EntryCache, view.caches + i * ENTRY_CACHE_BYTES)
        first = (-(-span.tokens // p.tokens) - 1 - piece) * p.tokens
        tokens = min(p.tokens, span.tokens - first)
        union = p.union + thread * p.union_stride
        _attend_piece(p, s, view, cache, span.start + first, span.position + first, tokens, b, union)


# --------------------------------------------------------------------------------------------------------------- groups


class JoinParameters(NamedTuple):
    """Parameters of `join_groups`."""

    state: int  # BatchState
    x: int  # float32[groups, room, n]
    groups: int
    group_bytes: int  # from one group to the next
    n: int
    out: int  # float32[tokens, groups, n]


@callback(OPERATION)
def join_groups(parameters, thread, threads):
    """The rows of all groups of a token one after another, for the thread's tokens."""
    p = load_record(JoinParameters, parameters)
    first, last = batch_share(p.state, thread, threads)
    for token in range(first, last):
        for group in range(p.groups):
            x = p.x + group * p.group_bytes + token * p.n * 4
            copy_floats(p.out + (token * p.groups + group) * p.n * 4, x, p.n)
