"""Sparse attention: which positions each token attends to (`archs.common.blocks.Indexer`), in float32.

The caches hold the indexer's keys where values would be, one row for each position, in the value type. As long as a
sequence has no more than `top_k` positions, all are selected, and only keys are computed. The selection of a block is
kept for the blocks after it that have no indexer, on the device of the block's cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from quantkit import types
from quantkit.archs.common import blocks
from quantkit.placement.kernel_sizes import INDEX_ELEMENTS
from quantkit.runtime.blocks import float_attention
from quantkit.runtime.blocks.spans import Span
from quantkit.runtime.kernels import kv_rounding
from quantkit.runtime.kv.cache import Cache

AnyIndexer = blocks.Indexer | blocks.BlockIndexer | blocks.PooledIndexer


class IndexerRun(Protocol):
    """What this module needs of a BlockRunner, or of a GPU's worker, whose arrays are tensors."""

    @property
    def observes(self) -> bool:
        """Whether inputs of matrices are observed."""

    def linear(self, linear: blocks.Linear, x: Any) -> Any:
        """The product with a weight matrix."""

    def apply_rope(self, x: Any, rope: blocks.Rope, dim: int, spans: list[Span]) -> None:
        """RoPE in place, of heads of `dim` elements."""

    def norm(self, norm: blocks.Norm, x: Any) -> Any:
        """RMS norm or LayerNorm."""

    def scale_heads(self, q: Any, scaling: blocks.HeadScaling, spans: list[Span]) -> None:
        """Scale queries by their position and head, in place."""

    def check(self, what: str, y: Any) -> None:
        """Non-finite check of `what`."""

    def position_bound(self, cache: Cache, tokens: int) -> int:
        """All positions of a cache's next tokens are below this."""

    def select_positions(self, part: AnyIndexer, layer: int, index: Index, spans: list[Span]) -> None:
        """Append the keys to the caches and keep what `selections` gives, on the device of the layer's caches."""

    def selected(self, layer: int, spans: list[Span]) -> list[Span]:
        """The spans with what the last indexer has selected, on the device of the layer's caches."""


class Index(NamedTuple):
    """What an indexer makes of a batch, after RoPE.

    keys      float32[tokens, dim]
    q         float32[tokens, heads * dim]; None where all positions are selected
    weights   float32[tokens, heads], of blocks.Indexer where there is q
    """

    keys: Any
    q: Any = None
    weights: Any = None


def select(run: IndexerRun, part: blocks.LatentAttention, layer: int, y: Any, u: Any, spans: list[Span]) -> list[Span]:
    """The spans with the positions that their tokens attend to; the caches get the keys of the indexer.

    y float32[tokens, n_embd] is the normed input of the block, u float32[tokens, q_lora] its queries' latent, or y.
    """
    if part.indexer is not None:
        run.select_positions(part.indexer, layer, _index(run, part.indexer, y, u, spans), spans)
    return run.selected(layer, spans)


def _index(run: IndexerRun, part: blocks.Indexer, y: Any, u: Any, spans: list[Span]) -> Index:
    keys = run.norm(part.k_norm, run.linear(part.k, y))
    run.apply_rope(keys, part.rope, part.dim, spans)
    run.check(part.k_norm.weight, keys)
    bound = max(run.position_bound(span.cache, span.stop - span.start) for span in spans)
    if bound <= part.top_k and not run.observes:
        return Index(keys)
    entering = u if part.q_norm is None else run.norm(part.q_norm, u)
    q, weights = run.linear(part.q_b, entering), run.linear(part.weights, y)
    if part.scaling is not None:
        run.scale_heads(q, part.scaling, spans)
    run.apply_rope(q, part.rope, part.dim, spans)
    return Index(keys, q, weights)


def selections(
    part: blocks.Indexer, layer: int, index: Index, spans: Sequence[Span], threads: int
) -> list[np.ndarray | None]:
    """For each span the positions of `largest`, None: all. The caches get the keys."""
    found: list[np.ndarray | None] = []
    for span in spans:
        length, rows = span.cache.length + span.stop - span.start, slice(span.start, span.stop)
        float_attention.append_rows(None, index.keys[rows], span.cache, layer)
        if length <= part.top_k:
            found.append(None)
            continue
        q, weights = index.q[rows].reshape(-1, part.heads, part.dim), index.weights[rows]
        keys, step = _cached_keys(span.cache, layer, length, part.dim, threads), max(1, INDEX_ELEMENTS // length)
        parts = [
            largest(scores(q[i : i + step], weights[i : i + step], keys), span.cache.length + i, part.top_k)
            for i in range(0, len(q), step)
        ]
        found.append(parts[0] if len(parts) == 1 else np.concatenate(parts))
    return found


def scores(q: np.ndarray, weights: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """float32[tokens, positions]: the scores of `blocks.Indexer`.

    q float32[tokens, heads, dim], weights float32[tokens, heads], keys float32[positions, dim].
    """
    _, heads, dim = q.shape
    total = np.zeros((len(q), len(keys)), np.float32)
    for head in range(heads):
        total += np.maximum(q[:, head] @ keys.T, 0) * weights[:, head, None]
    total *= np.float32((heads * dim) ** -0.5)
    return total


def largest(scored: np.ndarray, first: int, count: int) -> np.ndarray:
    """bool[tokens, positions]: for token i, the `count` positions of 0 … first + i with the largest scores."""
    return largest_of_first(scored, first + 1 + np.arange(len(scored)), count)


def largest_of_first(scored: np.ndarray, visible: np.ndarray, count: int) -> np.ndarray:
    """bool[tokens, positions]: of the first `visible[i]` positions, the `count` ones with the largest scores."""
    found = np.arange(scored.shape[1]) < visible[:, None]
    for row, seen in zip(scored, found):
        n = int(seen.sum())
        if n <= count:
            continue
        threshold = np.partition(row[:n], n - count)[n - count]
        above, equal = row[:n] > threshold, np.flatnonzero(row[:n] == threshold)
        seen[:n] = above
        seen[equal[: count - int(above.sum())]] = True
    return found


def _cached_keys(cache: Cache, layer: int, length: int, dim: int, threads: int) -> np.ndarray:
    """float32[length, dim]: the keys of the indexer that a cache holds."""
    keys = types.get(cache.type.v).dequantize(cache.v[layer][0, :length], dim, threads=threads)
    block = cache.rotations[layer][1]
    return kv_rounding.rotate(keys, block) if block else keys  # its own inverse
