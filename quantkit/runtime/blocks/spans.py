"""Spans: which rows of a batch of tokens belong to which sequence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from quantkit.runtime.kv.cache import Cache


class Span(NamedTuple):
    """Rows start … stop of a batch are the next tokens of the sequence that `cache` holds."""

    start: int
    stop: int
    cache: Cache


def batches(parts: Sequence[tuple[np.ndarray, Cache]], most: int) -> Iterator[tuple[np.ndarray, list[Span], list[int]]]:
    """(tokens, their spans, which parts they are of), up to `most` tokens at a time."""
    taken: list[np.ndarray] = []
    spans: list[Span] = []
    which: list[int] = []
    used = 0
    for i, (ids, cache) in enumerate(parts):
        done = 0
        while done < len(ids):
            some = ids[done : done + most - used]
            taken.append(some)
            spans.append(Span(used, used + len(some), cache))
            which.append(i)
            done, used = done + len(some), used + len(some)
            if used == most:
                yield np.concatenate(taken), spans, which
                taken, spans, which, used = [], [], [], 0
    if used:
        yield np.concatenate(taken), spans, which
