"""Compressed attention (`archs.common.blocks.CompressedAttention`), layer by layer in float32.

The caches hold the key of each token and, where values would be, what compressors read of it: kv(y), then gate(y), of
the entries' compressor and then of the indexer's. Entries are computed from them anew in each call, which takes the
time of `kept` elements for each position; compiled plans keep them (runtime/kv/entries.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np

from quantkit import types
from quantkit.archs.common import blocks
from quantkit.runtime.blocks import float_attention, indexer
from quantkit.runtime.blocks.float_ops import ignore_nonfinite
from quantkit.runtime.blocks.spans import Span
from quantkit.runtime.kernels import kv_rounding
from quantkit.runtime.kv.cache import Cache

_QUERIES = 64  # of a span, computed at a time


class Projected(NamedTuple):
    """What attention gets of some tokens, before RoPE.

    q       float32[tokens, heads, dim], normed
    keys    float32[tokens, dim], normed; they are the values too
    read    kv(y) and gate(y) of each compressor, float32[tokens, columns] each
    scored  of an indexer: queries float32[tokens, heads * dim] and the weights of their heads float32[tokens, heads]
    """

    q: np.ndarray
    keys: np.ndarray
    read: tuple[np.ndarray, ...] = ()
    scored: tuple[np.ndarray, ...] = ()

    def moved(self, move: Callable[[np.ndarray], np.ndarray]) -> Projected:
        """The same on another device."""
        return Projected(move(self.q), move(self.keys), tuple(map(move, self.read)), tuple(map(move, self.scored)))


class CompressedRun(Protocol):
    """What this module needs of a BlockRunner."""

    threads: int

    def attend_compressed(
        self, part: blocks.CompressedAttention, layer: int, given: Projected, spans: list[Span]
    ) -> np.ndarray:
        """`attend`, on the device of the layer's cache."""

    def linear(self, linear: blocks.Linear, x: np.ndarray) -> np.ndarray:
        """The product with a weight matrix."""

    def grouped(self, linear: blocks.Linear, x: np.ndarray, groups: int) -> np.ndarray:
        """The products of groups of elements with a matrix each."""

    def norm(self, norm: blocks.Norm, x: np.ndarray) -> np.ndarray:
        """RMS norm."""

    def vector(self, name: str) -> np.ndarray:
        """A tensor by its name, decoded, as one vector."""

    def rotations(self, rope: blocks.Rope, n_ctx: int) -> tuple[np.ndarray, np.ndarray]:
        """cos and sin of positions."""

    def check(self, what: str, y: np.ndarray) -> None:
        """Non-finite check of `what`."""


def attention(
    run: CompressedRun, part: blocks.CompressedAttention, layer: int, x: np.ndarray, spans: list[Span]
) -> np.ndarray:
    """What the attention adds to x float32[tokens, n_embd]; the caches get keys and what compressors read."""
    y = run.norm(part.norm, x)
    u = run.norm(part.q_a_norm, run.linear(part.q_a, y))
    q = run.norm(part.q_norm, run.linear(part.q_b, u).reshape(-1, part.dim)).reshape(len(x), part.heads, part.dim)
    keys = run.norm(part.kv_norm, run.linear(part.kv, y))
    read = tuple(run.linear(linear, y) for each in part.compressors for linear in (each.kv, each.gate))
    index = () if part.indexer is None else (run.linear(part.indexer.q_b, u), run.linear(part.indexer.weights, y))
    out = run.attend_compressed(part, layer, Projected(q, keys, read, index), spans)
    run.check(f"attention of blk.{layer} over a cache of {spans[0].cache.cache_type}", out)
    return run.linear(part.out_b, run.grouped(part.out_a, out, part.groups))


def attend(
    run: CompressedRun, part: blocks.CompressedAttention, layer: int, given: Projected, spans: list[Span]
) -> np.ndarray:
    """float32[tokens, heads * dim]: what heads get, rotated back; the caches get the tokens' rows."""
    q, keys, read, index = given
    kept = np.concatenate(read, axis=1) if read else None
    out = np.empty_like(q)
    for span in spans:
        rows = slice(span.start, span.stop)
        positions = span.cache.length + np.arange(span.stop - span.start)
        rotate(run, part.rope, q[rows], positions)
        rotate(run, part.rope, keys[rows], positions)
        float_attention.append_rows(keys[rows], None if kept is None else kept[rows], span.cache, layer)
        _attend(run, part, layer, q[rows], tuple(x[rows] for x in index), span.cache, positions, out[rows])
        rotate(run, part.rope, out[rows], positions, back=True)
    return out.reshape(len(q), -1)


def _attend(
    run: CompressedRun,
    part: blocks.CompressedAttention,
    layer: int,
    q: np.ndarray,
    index: tuple[np.ndarray, ...],
    cache: Cache,
    positions: np.ndarray,
    out: np.ndarray,
) -> None:
    """out float32[tokens, heads, dim]: what heads get, before it is rotated back."""
    first, stop = max(0, int(positions[0]) - part.window + 1), int(positions[-1]) + 1
    near = _cached(cache, layer, 0, first, stop, part.dim, run.threads)
    place = np.arange(first, stop)
    keys, seen = near, (place <= positions[:, None]) & (place > positions[:, None] - part.window)
    if part.compressor is not None and stop >= part.compressor.rate:
        kept = _cached(cache, layer, 1, 0, stop, part.kept, run.threads)
        made = entries(run, part.compressor, part.rope, kept)
        keys = np.concatenate([near, made])
        visible = np.minimum((positions + 1) // part.compressor.rate, len(made))
        chosen = np.arange(len(made)) < visible[:, None]
        if part.indexer is not None and len(made) > part.indexer.top_k:
            queries = index[0].reshape(len(q), part.indexer.heads, part.indexer.dim)
            rotate(run, part.rope, queries, positions)
            of_index = entries(run, part.indexer.compressor, part.rope, kept[:, 2 * part.compressor.columns :])
            scored = indexer.scores(queries, index[1], of_index)
            chosen = indexer.largest_of_first(scored, visible, part.indexer.top_k)
        seen = np.concatenate([seen, chosen], axis=1)
    for start in range(0, len(q), _QUERIES):
        some = slice(start, start + _QUERIES)
        out[some] = softmax_of_seen(q[some], keys, seen[some], run.vector(part.sinks), part.scale)


def softmax_of_seen(q: np.ndarray, keys: np.ndarray, seen: np.ndarray, sinks: np.ndarray, scale: float) -> np.ndarray:
    """float32[tokens, heads, dim]: softmax of the scores of the keys that a token sees, and the head's sink, by keys.

    q float32[tokens, heads, dim], keys float32[n, dim], which are the values too, seen bool[tokens, n].
    """
    sink = sinks[None, :, None]
    with ignore_nonfinite():
        scores = np.where(seen[:, None], q @ keys.T * np.float32(scale), np.float32(-np.inf))
        largest = np.maximum(scores.max(2, keepdims=True), sink)
        shares = np.exp(scores - largest)
        shares /= shares.sum(2, keepdims=True) + np.exp(sink - largest)
        attended: np.ndarray = shares @ keys
    return attended


def entries(run: CompressedRun, part: blocks.Compressor, rope: blocks.Rope, kept: np.ndarray) -> np.ndarray:
    """float32[windows, dim]: the entries of whole windows of tokens, of their kv(y) and gate(y) float32[tokens, …]."""
    count, n = len(kept) // part.rate, part.columns
    windows = kept[: count * part.rate].reshape(count, part.rate, -1)
    c, z = windows[:, :, :n], windows[:, :, n : 2 * n] + run.vector(part.ape).reshape(part.rate, n)
    if part.overlapping:
        c, z = (_with_window_before(x, part.dim, fill) for x, fill in ((c, 0), (z, -np.inf)))
    with ignore_nonfinite():
        shares = np.exp(z - z.max(1, keepdims=True))
        mean = (c * shares).sum(1) / shares.sum(1)
    found = run.norm(part.norm, np.ascontiguousarray(mean, np.float32))
    rotate(run, rope, found, np.arange(count) * part.rate)
    return found


def _with_window_before(x: np.ndarray, dim: int, fill: float) -> np.ndarray:
    """float32[windows, 2 rate, dim]: the first half of each window before, then the second half of each window."""
    before = np.full_like(x[:, :, :dim], fill)
    before[1:] = x[:-1, :, :dim]
    return np.concatenate([before, x[:, :, dim:]], axis=1)


def rotate(run: CompressedRun, rope: blocks.Rope, x: np.ndarray, positions: np.ndarray, *, back: bool = False) -> None:
    """Rotate neighbouring elements of the last rope.dim ones, in place; `back` by the negative angle.

    x float32[tokens, dim] or float32[tokens, heads, dim], positions int64[tokens].
    """
    if not len(x):
        return
    cos, sin = (table[positions] for table in run.rotations(rope, int(positions.max()) + 1))
    if x.ndim == 3:
        cos, sin = cos[:, None], sin[:, None]
    first, second = x[..., -rope.dim :: 2].copy(), x[..., x.shape[-1] - rope.dim + 1 :: 2].copy()
    sin = -sin if back else sin
    with ignore_nonfinite():
        x[..., -rope.dim :: 2] = first * cos - second * sin
        x[..., x.shape[-1] - rope.dim + 1 :: 2] = first * sin + second * cos


def _cached(cache: Cache, layer: int, side: int, start: int, stop: int, n: int, threads: int) -> np.ndarray:
    """float32[stop - start, n]: rows of a cache, keys (side 0) or what compressors read (1)."""
    kind, rows = ((cache.type.k, cache.k), (cache.type.v, cache.v))[side]
    found = types.get(kind).dequantize(np.ascontiguousarray(rows[layer][0, start:stop]), n, threads=threads)
    block = cache.rotations[layer][side]
    return kv_rounding.rotate(found, block) if block else found  # its own inverse
