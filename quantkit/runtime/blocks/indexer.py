"""Sparse attention: which positions each token attends to (`archs.common.blocks.Indexer`), in float32.

The caches hold the indexer's keys where values would be, one row for each position, in the value type. As long as a
sequence has no more than `top_k` positions, all are selected, and only keys are computed. The selection of a block is
kept for the blocks after it that have no indexer.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from quantkit import types
from quantkit.archs.common import blocks
from quantkit.runtime.blocks import float_attention
from quantkit.runtime.blocks.spans import Span
from quantkit.runtime.kernels import kv_rounding
from quantkit.runtime.kv.cache import Cache


class IndexerRun(Protocol):
    """What this module needs of a BlockRunner."""

    threads: int
    selections: list[np.ndarray | None]

    @property
    def observes(self) -> bool:
        """Whether inputs of matrices are observed."""

    def linear(self, linear: blocks.Linear, x: np.ndarray) -> np.ndarray:
        """The product with a weight matrix."""

    def vector(self, name: str) -> np.ndarray:
        """A vector by its name."""

    def apply_rope(self, x: np.ndarray, rope: blocks.Rope, dim: int, spans: list[Span]) -> None:
        """RoPE in place, of heads of `dim` elements."""

    def norm(self, norm: blocks.Norm, x: np.ndarray) -> np.ndarray:
        """RMS norm or LayerNorm."""

    def scale_heads(self, q: np.ndarray, scaling: blocks.HeadScaling, spans: list[Span]) -> None:
        """Scale queries by their position and head, in place."""

    def check(self, what: str, y: np.ndarray) -> None:
        """Non-finite check of `what`."""


def select(
    run: IndexerRun, part: blocks.LatentAttention, layer: int, y: np.ndarray, u: np.ndarray, spans: list[Span]
) -> list[Span]:
    """The spans with the positions that their tokens attend to; the caches get the keys of the indexer.

    y float32[tokens, n_embd] is the normed input of the block, u float32[tokens, q_lora] its queries' latent, or y.
    """
    if part.indexer is not None:
        run.selections = _selections(run, part.indexer, layer, y, u, spans)
    return [span._replace(selected=selected) for span, selected in zip(spans, run.selections, strict=True)]


def _selections(
    run: IndexerRun, part: blocks.Indexer, layer: int, y: np.ndarray, u: np.ndarray, spans: list[Span]
) -> list[np.ndarray | None]:
    keys = layer_norm(run.linear(part.k, y), run.vector(part.k_norm.weight), run.vector(part.bias), part.k_norm.eps)
    run.apply_rope(keys, part.rope, part.dim, spans)
    run.check(part.k_norm.weight, keys)
    for span in spans:
        float_attention.append_rows(None, keys[span.start : span.stop], span.cache, layer)
    if not run.observes and all(span.cache.length + span.stop - span.start <= part.top_k for span in spans):
        return [None] * len(spans)
    entering = u if part.q_norm is None else run.norm(part.q_norm, u)
    q, weights = run.linear(part.q_b, entering), run.linear(part.weights, y)
    if part.scaling is not None:
        run.scale_heads(q, part.scaling, spans)
    run.apply_rope(q, part.rope, part.dim, spans)
    q = q.reshape(len(q), part.heads, part.dim)
    found: list[np.ndarray | None] = []
    for span in spans:
        length, rows = span.cache.length + span.stop - span.start, slice(span.start, span.stop)
        if length <= part.top_k:
            found.append(None)
            continue
        scored = scores(q[rows], weights[rows], _cached_keys(span.cache, layer, length, part.dim, run.threads))
        found.append(largest(scored, span.cache.length, part.top_k))
    return found


def layer_norm(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, eps: float) -> np.ndarray:
    """(x - mean) / sqrt(variance + eps) * weight + bias, by rows of float32[tokens, n]."""
    centered = x - x.mean(1, keepdims=True)
    scale = 1 / np.sqrt(np.square(centered).mean(1, keepdims=True) + np.float32(eps))
    return np.ascontiguousarray(centered * scale * weight + bias, np.float32)


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
    positions = np.arange(scored.shape[1])
    found = positions <= first + np.arange(len(scored))[:, None]
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
