"""Spans: which rows of a batch of tokens belong to which sequence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from quantkit.runtime.kv.cache import Cache


class Span(NamedTuple):
    """Rows start … stop of a batch are the next tokens of the sequence that `cache` holds.

    selected   bool[stop - start, positions]: the positions that each token attends to, or for each KV head
               bool[stop - start, kv_heads, positions]; None: all up to its own. On a GPU a gpu_context.Selection
    received   float64[stop - start], to which attention adds what each token receives: the sum of its softmax weights
               over queries and heads; None: it is not wanted
    tokens     int64[stop - start], for layers that look up embeddings of their own; None: the model has none
    """

    start: int
    stop: int
    cache: Cache
    selected: np.ndarray | None = None
    received: np.ndarray | None = None
    tokens: np.ndarray | None = None


def batches(
    parts: Sequence[tuple[np.ndarray, Cache]], max_tokens: int
) -> Iterator[tuple[np.ndarray, list[Span], list[int]]]:
    """Split sequences (ids, cache) into batches of up to `max_tokens`: (tokens, spans, the sequence of each span)."""
    pieces: list[np.ndarray] = []
    spans: list[Span] = []
    part_of: list[int] = []
    used = 0
    for i, (ids, cache) in enumerate(parts):
        start = 0
        while start < len(ids):
            piece = ids[start : start + max_tokens - used]
            pieces.append(piece)
            spans.append(Span(used, used + len(piece), cache))
            part_of.append(i)
            start, used = start + len(piece), used + len(piece)
            if used == max_tokens:
                yield np.concatenate(pieces), spans, part_of
                pieces, spans, part_of, used = [], [], [], 0
    if used:
        yield np.concatenate(pieces), spans, part_of
