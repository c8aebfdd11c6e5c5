"""The divergence by position in the sequence and by category: tables of mean KLD and top-1 flips with intervals.

A token's depth is the number of tokens before it in its sequence. Bins of depth are an eighth of the range wide. Where
the range begins near 0, the first eighth is halved down to 32 tokens, since the divergence changes most there.

The unit of errors is the chunk or the conversation, as everywhere (`statistics.Sample`). A bin has one unit for each
sequence that reaches it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from quantkit.evaluate.divergence import Divergence
from quantkit.evaluate.statistics import Interval, Sample

_BINS = 8
_SMALLEST = 32  # tokens of a bin


class Part(NamedTuple):
    """Figures over a part of the scored tokens.

    name        the category; for a bin "LOW-HIGH", the first and the last depth
    low, high   a bin's depths are low … high - 1; 0 for a category
    sequences   chunks or conversations that have such tokens
    tokens      number of scored tokens
    kld         mean KLD, in nats
    flips       share of tokens where the most probable token changes
    """

    name: str
    low: int
    high: int
    sequences: int
    tokens: int
    kld: Interval
    flips: Interval


def position_edges(depths: np.ndarray) -> list[int]:
    """The ends of the bins for int[tokens] depths: increasing, from the smallest to one more than the largest."""
    low, end = int(depths.min()), int(depths.max()) + 1
    width = max(_SMALLEST, -(-(end - low) // _BINS))
    edges = [low]
    if low < width:
        near, narrow = [], width // 2
        while narrow >= _SMALLEST:
            near.append(narrow)
            narrow //= 2
        edges += [edge for edge in reversed(near) if edge > low]
        edges += range(width, end, width)
    else:
        edges += range(low + width, end, width)
    return [*edges, end]


def by_position(divergence: Divergence, depths: np.ndarray, counts: np.ndarray) -> list[Part]:
    """The divergence by depth.

    depths   int[tokens], of each scored token
    counts   int[chunks], the number of scored tokens of each chunk
    """
    chunk = np.repeat(np.arange(len(counts)), counts)
    edges = position_edges(depths)
    return [
        _part(f"{a}-{b - 1}", a, b, divergence, chunk, (depths >= a) & (depths < b))
        for a, b in itertools.pairwise(edges)
        if ((depths >= a) & (depths < b)).any()
    ]


def by_category(divergence: Divergence, labels: Sequence[str], counts: np.ndarray) -> list[Part]:
    """The divergence by category, in the order of the text. `labels`: the category of each chunk."""
    chunk = np.repeat(np.arange(len(counts)), counts)
    of_token = np.repeat(np.array(labels), counts)
    return [_part(label, 0, 0, divergence, chunk, of_token == label) for label in dict.fromkeys(labels)]


def _part(name: str, low: int, high: int, d: Divergence, chunk: np.ndarray, chosen: np.ndarray) -> Part:
    counts = np.bincount(chunk[chosen])
    sample = Sample.of(counts[counts > 0])
    kld, flips = sample.mean(d.kld[chosen]), sample.mean(~d.same_top[chosen])
    return Part(name, low, high, sample.chunks, int(chosen.sum()), kld, flips)
