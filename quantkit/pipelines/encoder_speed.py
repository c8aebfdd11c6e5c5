"""How fast a core of this machine encodes a type: measured in a second, for predictions."""

from __future__ import annotations

import time
from collections.abc import Iterable

import numpy as np

from quantkit.types import QuantType

_ROWS, _COLUMNS = 16, 4096
_COPIED = 1e9  # weights a second of a type without an encoder: reading binds


def encoder_speeds(kinds: Iterable[QuantType], effort: str = "normal") -> dict[str, float]:
    """Weights a second that one core encodes in each type, by CPU time of this thread, with an importance matrix."""
    return {kind.name: _speed(kind, effort) for kind in dict.fromkeys(kinds)}


def _speed(kind: QuantType, effort: str) -> float:
    if kind.block_size == 1 or not kind.has_codec:
        return _COPIED
    rows = np.random.default_rng(1).standard_normal((_ROWS * kind.interleave, _COLUMNS)).astype(np.float32)
    importance = np.ones(_COLUMNS, np.float32)
    best = 0.0
    for size in (kind.interleave, len(rows)):  # the first call compiles
        begin = time.thread_time()
        kind.quantize(rows[:size], importance, effort=effort, threads=1)
        best = size * _COLUMNS / max(time.thread_time() - begin, 1e-9)
    return best
