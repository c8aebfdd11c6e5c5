"""Softmax attention over a KV cache in float32: grouped heads, sliding windows, sinks, values stored in the keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from quantkit import types
from quantkit.archs.common import blocks
from quantkit.codegen import thread_pool
from quantkit.errors import DataError
from quantkit.runtime.blocks.float_ops import SERIAL_ELEMENTS, ignore_nonfinite, scratch
from quantkit.runtime.blocks.spans import Span
from quantkit.runtime.kernels import kv_rounding, reference
from quantkit.runtime.kv.cache import Cache

QUERY_ROWS = 384  # of a head's scores worked on at a time
KEY_ROWS = 512
HIDDEN = np.float32(-1e30)  # the score of a position that is not selected: below any other
QUERIES_TOGETHER, KEYS_TOGETHER = 6, 128  # kernels round queries and positions up to multiples of them


@dataclass(frozen=True)
class AttentionOptions:
    """How attention is computed. The results differ only by rounding.

    flash      with a streaming softmax, KEY_ROWS positions at a time; else plainly, all scores of a query at once
    work_mib   MiB that the scores of plain attention may take, those of all threads together; 0: no bound
    """

    flash: bool = True
    work_mib: int = 256

    def query_rows(self, group: int, n_ctx: int, threads: int) -> int:
        """Rows of queries worked on at a time, over up to `n_ctx` positions; at most QUERY_ROWS.

        DataError where not even the queries that share one key fit the bound.
        """
        if self.flash or not self.work_mib:
            return QUERY_ROWS
        row = 4 * threads * (-(-n_ctx // KEYS_TOGETHER) * KEYS_TOGETHER)
        rows = (self.work_mib << 20) // row // QUERIES_TOGETHER * QUERIES_TOGETHER
        if rows < group:
            min_bytes = -(-group // QUERIES_TOGETHER) * QUERIES_TOGETHER * row
            raise DataError(
                f"-amb {self.work_mib}: plain attention's scores over {n_ctx} positions take {-(-min_bytes >> 20)} MiB "
                f"or more with {threads} threads; allow that, or take fewer positions (-c) or flash attention (-fa 1)"
            )
        return min(QUERY_ROWS, rows)


class Heads(NamedTuple):
    """The heads of attention: those of a blocks.Attention. With `values_in_keys`, a value is its key's first elements.

    sinks     float32[heads]
    softcap   c: scores s become c tanh(s / c)
    chunk     a query sees the keys of its own chunk of so many positions
    """

    heads: int
    kv_heads: int
    head_dim_k: int
    head_dim_v: int
    scale: float
    window: int | None = None
    values_in_keys: bool = False
    sinks: np.ndarray | None = None
    softcap: float | None = None
    chunk: int | None = None

    @classmethod
    def of(cls, part: blocks.Attention, sinks: np.ndarray | None = None) -> Heads:
        """The heads of an attention block; `sinks` float32[heads] where it has them."""
        sizes = (part.heads, part.kv_heads, part.head_dim_k, part.head_dim_v)
        return cls(*sizes, part.scale, part.window, sinks=sinks, softcap=part.softcap, chunk=part.chunk)


def append_rows(k: np.ndarray | None, v: np.ndarray | None, cache: Cache, layer: int) -> None:
    """Append keys and values float32[tokens, heads * dim] to a layer of the KV cache, at `cache.length`.

    They are rotated and rounded to the cache's types. None leaves one of the two out. `length` stays as it is.
    """
    kinds = cache.type.k, cache.type.v
    for x, into, kind, block in zip((k, v), (cache.k[layer], cache.v[layer]), kinds, cache.rotations[layer]):
        if x is None:
            continue
        heads = x.reshape(len(x), len(into), -1).transpose(1, 0, 2)
        rows = np.ascontiguousarray(heads).reshape(-1, heads.shape[2])
        if block:
            rows = kv_rounding.rotate(rows, block)
        into[:, cache.length : cache.length + len(x)] = kv_rounding.encode(kind, rows).reshape(len(into), len(x), -1)


def attend(
    part: Heads,
    layer: int,
    q: np.ndarray,
    spans: Sequence[Span],
    threads: int,
    options: AttentionOptions = AttentionOptions(),
) -> np.ndarray:
    """softmax(q k^T * scale) v for every query head, float32[tokens, heads * head_dim_v]; RoPE is applied to q already.

    The caches hold the keys and values of the batch's own tokens already, from their `length` on.
    """
    out = np.empty((len(q), part.heads * part.head_dim_v), np.float32)
    group = part.heads // part.kv_heads
    max_keys = max(span.cache.length + span.stop - span.start for span in spans)
    step = max(1, options.query_rows(group, max_keys, threads) // group)
    work = [
        (span, head, first, stop)
        for span in spans
        for first, stop in reversed(_pieces(span, step, part.chunk))  # the most keys first, the fewest fill the gaps
        for head in range(part.kv_heads)
    ]

    received: list[np.ndarray | None] = [None] * len(work)

    def task(begin: int, end: int) -> None:
        with ignore_nonfinite():
            for number, item in enumerate(work[begin:end], begin):
                key_rows = KEY_ROWS if options.flash else max_keys
                received[number] = _attend_head(part, layer, q, out, key_rows, *item)

    scores = part.heads * sum((s.stop - s.start) * (s.cache.length + s.stop - s.start) for s in spans)
    thread_pool.over_rows(task, len(work), threads=threads if scores > SERIAL_ELEMENTS else 1)
    for (span, *_), of_item in zip(work, received):  # in this order, whatever the threads
        if span.received is not None and of_item is not None:
            span.received[: len(of_item)] += of_item
    return out


def _pieces(span: Span, step: int, chunk: int | None) -> list[tuple[int, int]]:
    """The tokens of a span in pieces of at most `step` tokens, each in one chunk of positions."""
    found, first = [], span.start
    while first < span.stop:
        position = span.cache.length + first - span.start
        left = step if chunk is None else min(step, chunk - position % chunk)
        found.append((first, min(span.stop, first + left)))
        first += left
    return found


def _attend_head(
    part: Heads,
    layer: int,
    q: np.ndarray,
    out: np.ndarray,
    key_rows: int,
    span: Span,
    head: int,
    first: int,
    stop: int,
) -> np.ndarray | None:
    """`attend` for tokens first … stop and the query heads that share key/value head `head`, `key_rows` at a time.

    Returns the attention that the tokens of the span up to `stop` receive from them, float64, if the span wants it.
    """
    group = part.heads // part.kv_heads
    tokens, group_heads = stop - first, slice(head * group, (head + 1) * group)
    position = span.cache.length + first - span.start
    window = part.window or span.cache.n_ctx
    rotate_k, rotate_v = span.cache.rotations[layer]
    rotate_v = rotate_k if part.values_in_keys else rotate_v
    queries = q.reshape(len(q), part.heads, -1)[first:stop, group_heads].reshape(tokens * group, -1) * np.float32(
        part.scale
    )
    if rotate_k:
        queries = kv_rounding.rotate(queries, rotate_k)
    maximum = np.zeros(tokens * group, np.float32)
    denominator = np.zeros(tokens * group, np.float32)
    acc = np.zeros((tokens * group, part.head_dim_v), np.float32)
    exponentials: list[tuple[int, np.ndarray, np.ndarray]] = []  # first key, of each score, maximum so far
    seen = max(0, position + 1 - window) if part.chunk is None else position // part.chunk * part.chunk
    for key in range(seen, position + tokens, key_rows):
        end = min(key + key_rows, position + tokens)
        keys = _decoded(span.cache.k[layer][head, key:end], span.cache.type.k, part.head_dim_k, "keys")
        scores = np.matmul(queries, keys.T, out=scratch("scores", (tokens * group, end - key)))
        if part.softcap is not None:
            reference.soft_cap(scores, np.float32(part.softcap))
        if span.selected is not None:
            selected = span.selected if span.selected.ndim == 2 else span.selected[:, head]
            hidden = ~selected[first - span.start : stop - span.start, key:end]
            scores.reshape(tokens, group, -1)[np.broadcast_to(hidden[:, None], (tokens, group, end - key))] = HIDDEN
        reference.softmax_step(scores, group, position - key, window, maximum, denominator, acc)
        if part.values_in_keys:
            values = keys[:, : part.head_dim_v]
        else:
            values = _decoded(span.cache.v[layer][head, key:end], span.cache.type.v, part.head_dim_v, "values")
        acc += np.matmul(scores, values, out=scratch("products", acc.shape))
        if span.received is not None:
            exponentials.append((key, scores.copy(), maximum.copy()))
    if part.sinks is not None:
        sinks = np.tile(part.sinks[group_heads], tokens)
        new = np.maximum(maximum, sinks)
        rescale = np.exp(maximum - new)
        acc *= rescale[:, None]
        denominator = denominator * rescale + np.exp(sinks - new)
        maximum = new
    acc /= denominator[:, None]
    if rotate_v:
        acc = kv_rounding.rotate(acc, rotate_v)
    out.reshape(len(out), part.heads, -1)[first:stop, group_heads] = acc.reshape(tokens, group, -1)
    return None if span.received is None else _received(exponentials, maximum, denominator, position, tokens, span)


def _received(
    exponentials: list[tuple[int, np.ndarray, np.ndarray]],
    maximum: np.ndarray,
    denominator: np.ndarray,
    position: int,
    tokens: int,
    span: Span,
) -> np.ndarray:
    """float64[tokens of the span up to the last query]: the sums of softmax weights over queries, by key.

    exponentials   first key, exp(s - m) float32[queries, keys], and m, by block of keys
    """
    found = np.zeros(position + tokens)
    for key, scores, of_block in exponentials:
        share = (np.exp(of_block - maximum) / denominator).astype(np.float64)
        found[key : key + scores.shape[1]] = share @ scores
    return found[span.cache.length :]


def _decoded(rows: np.ndarray, kind: str, dim: int, purpose: str) -> np.ndarray:
    """float32[rows, dim] of some rows of one head of a cache, as the type itself decodes them."""
    if kind == "f32":
        return rows.view(np.float32)
    return types.get(kind).dequantize(rows, dim, out=scratch(purpose, (len(rows), dim)), threads=1)
