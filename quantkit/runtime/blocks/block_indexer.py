"""Which blocks of positions each token attends to, for each KV head (archs.blocks.BlockIndexer), in float32.

The caches hold the indexer's keys after norm and RoPE, one row for each position, in the value type. As long as a
sequence has no more blocks than are selected, it attends to all positions, and only keys are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from quantkit.archs.common import blocks
from quantkit.placement.kernel_sizes import INDEX_ELEMENTS
from quantkit.runtime.blocks.float_ops import ignore_nonfinite
from quantkit.runtime.blocks.indexer import Index, IndexerRun, largest_of_first
from quantkit.runtime.blocks.pooled_indexer import append_keys, cached_keys
from quantkit.runtime.blocks.spans import Span


def select(
    run: IndexerRun, part: blocks.BlockIndexer, rope: blocks.Rope, layer: int, y: Any, spans: list[Span]
) -> list[Span]:
    """The spans with the positions that their tokens attend to; the caches get the keys of the indexer.

    y float32[tokens, n_embd] is the normed input of the attention.
    """
    run.select_positions(part, layer, _index(run, part, rope, y, spans), spans)
    return run.selected(layer, spans)


def _index(run: IndexerRun, part: blocks.BlockIndexer, rope: blocks.Rope, y: Any, spans: list[Span]) -> Index:
    keys = run.norm(part.k_norm, run.linear(part.k, y))
    run.apply_rope(keys, rope, part.dim, spans)
    bound = max(run.position_bound(span.cache, span.stop - span.start) for span in spans)
    if bound <= part.rate * part.top_blocks and not run.observes:
        return Index(keys)
    q = run.norm(part.q_norm, run.linear(part.q, y).reshape(-1, part.dim)).reshape(len(y), -1)
    run.apply_rope(q, rope, part.dim, spans)
    return Index(keys, q)


def selections(
    part: blocks.BlockIndexer, layer: int, index: Index, spans: Sequence[Span], threads: int
) -> list[np.ndarray | None]:
    """For each span bool[tokens, heads, positions], None: all. The caches get the keys."""
    found: list[np.ndarray | None] = []
    for span in spans:
        rows, cache = slice(span.start, span.stop), span.cache
        append_keys(index.keys[rows], cache, layer)
        length = cache.length + span.stop - span.start
        if length <= part.rate * part.top_blocks:
            found.append(None)
            continue
        keys, q = cached_keys(cache, layer, length, part.dim, threads), index.q[rows].reshape(-1, part.heads, part.dim)
        step = max(1, INDEX_ELEMENTS // (part.heads * length))
        parts = [selected(part, q[i : i + step], keys, cache.length + i) for i in range(0, len(q), step)]
        found.append(parts[0] if len(parts) == 1 else np.concatenate(parts))
    return found


def selected(part: blocks.BlockIndexer, q: np.ndarray, keys: np.ndarray, first: int) -> np.ndarray:
    """bool[tokens, heads, positions] of queries float32[tokens, heads, dim] from position `first` on."""
    positions = first + np.arange(len(q))
    scored, own = scores(q, keys, positions, part.rate), positions // part.rate
    for distance in range(part.local_blocks):
        scored[np.arange(len(q)), :, np.maximum(own - distance, 0)] = np.inf
    of_heads = [largest_of_first(scored[:, head], own + 1, part.top_blocks) for head in range(part.heads)]
    chosen = np.repeat(np.stack(of_heads, axis=1), part.rate, axis=2)[:, :, : len(keys)]
    found: np.ndarray = chosen & (np.arange(len(keys)) <= positions[:, None])[:, None]
    return found


def scores(q: np.ndarray, keys: np.ndarray, positions: np.ndarray, rate: int) -> np.ndarray:
    """float32[tokens, heads, blocks]: the largest product of a query and the keys of a block up to its own position.

    q float32[tokens, heads, dim], keys float32[n, dim], positions int64[tokens]. -inf for blocks after a token's own.
    """
    count = -(-len(keys) // rate)
    padded = np.full((len(q), q.shape[1], count * rate), -np.inf, np.float32)
    with ignore_nonfinite():
        padded[:, :, : len(keys)] = np.where(
            (np.arange(len(keys)) <= positions[:, None])[:, None], q @ keys.T, np.float32(-np.inf)
        )
    best: np.ndarray = padded.reshape(len(q), q.shape[1], count, rate).max(3)
    return best
