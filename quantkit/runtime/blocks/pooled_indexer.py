"""Which blocks of positions each token attends to (archs.blocks.PooledIndexer), in float32.

The caches hold the indexer's keys before norm and RoPE, one row for each position, in the value type. As long as a
sequence has no more whole blocks than are selected, it attends to all positions, and only keys are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from quantkit import types
from quantkit.archs.common import blocks
from quantkit.runtime.blocks import float_ops
from quantkit.runtime.blocks.indexer import Index, IndexerRun, largest_of_first
from quantkit.runtime.blocks.spans import Span
from quantkit.runtime.kernels import kv_rounding
from quantkit.runtime.kv.cache import Cache


class PooledIndexerRun(Protocol):
    """What selections need of a BlockRunner."""

    threads: int

    def norm(self, norm: blocks.Norm, x: np.ndarray) -> np.ndarray:
        """RMS norm."""

    def rotations(self, rope: blocks.Rope, n_ctx: int) -> tuple[np.ndarray, np.ndarray]:
        """cos and sin of positions."""


def select(run: IndexerRun, part: blocks.PooledIndexer, layer: int, y: Any, spans: list[Span]) -> list[Span]:
    """The spans with the positions that their tokens attend to; the caches get the keys of the indexer.

    y float32[tokens, n_embd] is the normed input of the attention.
    """
    run.select_positions(part, layer, _index(run, part, y, spans), spans)
    return run.selected(layer, spans)


def _index(run: IndexerRun, part: blocks.PooledIndexer, y: Any, spans: list[Span]) -> Index:
    keys = run.linear(part.k, y)
    bounds = (run.position_bound(span.cache, span.stop - span.start) for span in spans)
    if not run.observes and all(bound // part.rate <= part.top_blocks for bound in bounds):
        return Index(keys)
    q = run.norm(part.q_norm, run.linear(part.q, y).reshape(-1, part.dim)).reshape(len(y), -1)
    run.apply_rope(q, part.rope, part.dim, spans)
    return Index(keys, q)


def selections(
    run: PooledIndexerRun, part: blocks.PooledIndexer, layer: int, index: Index, spans: Sequence[Span]
) -> list[np.ndarray | None]:
    """For each span bool[tokens, positions], None: all. The caches get the keys."""
    found = []
    for span in spans:
        rows = slice(span.start, span.stop)
        append_keys(index.keys[rows], span.cache, layer)
        whole = (span.cache.length + span.stop - span.start) // part.rate
        q = None if whole <= part.top_blocks else index.q[rows].reshape(-1, part.heads, part.dim)
        found.append(None if q is None else _selected(run, part, layer, q, span.cache))
    return found


def append_keys(keys: np.ndarray, cache: Cache, layer: int) -> None:
    """Append float32[tokens, dim] to the indexer's keys of a layer, at `cache.length`."""
    cache.index[layer][0, cache.length : cache.length + len(keys)] = kv_rounding.encode(cache.type.v, keys)


def _selected(run: PooledIndexerRun, part: blocks.PooledIndexer, layer: int, q: np.ndarray, cache: Cache) -> np.ndarray:
    """bool[tokens, positions] of queries float32[tokens, heads, dim] from `cache.length` on."""
    positions = cache.length + np.arange(len(q))
    length = int(positions[-1]) + 1
    count = length // part.rate
    keys = block_keys(run, part, cached_keys(cache, layer, count * part.rate, part.dim, run.threads), cache.n_ctx)
    visible = (positions + 1) // part.rate
    chosen = np.repeat(largest_of_first(scores(q, keys), visible, part.top_blocks), part.rate, axis=1)
    place = np.arange(length)
    found: np.ndarray = (place >= (visible * part.rate)[:, None]) & (place <= positions[:, None])
    found[:, : chosen.shape[1]] |= chosen
    return found


def block_keys(run: PooledIndexerRun, part: blocks.PooledIndexer, kept: np.ndarray, n_ctx: int) -> np.ndarray:
    """float32[blocks, dim]: the keys of whole blocks, of k(y) float32[blocks * rate, dim]."""
    means = np.ascontiguousarray(kept.reshape(-1, part.rate, part.dim).mean(1), np.float32)
    keys = run.norm(part.k_norm, means)
    starts = np.arange(len(keys)) * part.rate
    rope = part.rope.of_context(n_ctx)
    float_ops.apply_rope(keys, rope.style, part.dim, run.rotations(rope, int(starts[-1]) + 1), starts, run.threads)
    return keys


def scores(q: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """float32[tokens, blocks]: the scores of `blocks.PooledIndexer`; q float32[tokens, heads, dim]."""
    total = np.zeros((len(q), len(keys)), np.float32)
    with float_ops.ignore_nonfinite():
        for head in range(q.shape[1]):
            total += np.maximum(q[:, head] @ keys.T, 0)
    return total


def cached_keys(cache: Cache, layer: int, length: int, dim: int, threads: int) -> np.ndarray:
    """float32[length, dim]: the indexer's keys that a cache holds."""
    return types.get(cache.type.v).dequantize(cache.index[layer][0, :length], dim, threads=threads)
