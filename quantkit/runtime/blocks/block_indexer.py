"""Which blocks of positions each token attends to, for each KV head (archs.blocks.BlockIndexer), in float32.

The caches hold the indexer's keys after norm and RoPE, one row for each position, in the value type. As long as a
sequence has no more blocks than are selected, it attends to all positions, and only keys are computed.
"""

from __future__ import annotations

import numpy as np

from quantkit.archs.common import blocks
from quantkit.runtime.blocks.float_ops import ignore_nonfinite
from quantkit.runtime.blocks.indexer import largest_of_first
from quantkit.runtime.blocks.pooled_indexer import PooledIndexerRun, append_keys, cached_keys
from quantkit.runtime.blocks.spans import Span
from quantkit.runtime.kv.cache import Cache


def select(
    run: PooledIndexerRun, part: blocks.BlockIndexer, rope: blocks.Rope, layer: int, y: np.ndarray, spans: list[Span]
) -> list[Span]:
    """The spans with the positions that their tokens attend to; the caches get the keys of the indexer.

    y float32[tokens, n_embd] is the normed input of the attention.
    """
    keys = run.norm(part.k_norm, run.linear(part.k, y))
    run.apply_rope(keys, rope, part.dim, spans)
    for span in spans:
        append_keys(keys[span.start : span.stop], span.cache, layer)
    lengths = [span.cache.length + span.stop - span.start for span in spans]
    if not run.observes and all(length <= part.rate * part.top_blocks for length in lengths):
        return spans
    q = run.norm(part.q_norm, run.linear(part.q, y).reshape(-1, part.dim)).reshape(len(y), -1)
    run.apply_rope(q, rope, part.dim, spans)
    heads = q.reshape(len(y), part.heads, part.dim)
    return [
        span._replace(selected=_selected(run, part, layer, heads[span.start : span.stop], span.cache)) for span in spans
    ]


def _selected(
    run: PooledIndexerRun, part: blocks.BlockIndexer, layer: int, q: np.ndarray, cache: Cache
) -> np.ndarray | None:
    """bool[tokens, heads, positions] of queries float32[tokens, heads, dim] from `cache.length` on; None: all."""
    positions = cache.length + np.arange(len(q))
    length = int(positions[-1]) + 1
    if length <= part.rate * part.top_blocks:
        return None
    scored = scores(q, cached_keys(cache, layer, length, part.dim, run.threads), positions, part.rate)
    own = positions // part.rate
    for distance in range(part.local_blocks):
        scored[np.arange(len(q)), :, np.maximum(own - distance, 0)] = np.inf
    of_heads = [largest_of_first(scored[:, head], own + 1, part.top_blocks) for head in range(part.heads)]
    chosen = np.repeat(np.stack(of_heads, axis=1), part.rate, axis=2)[:, :, :length]
    found: np.ndarray = chosen & (np.arange(length) <= positions[:, None])[:, None]
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
