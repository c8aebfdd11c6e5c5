"""Second moments of the inputs of a job's tensors, made ready for rounding when a tensor is encoded.

Those of the last few inputs are kept: consecutive pieces of a tensor, and matrices that share an input, use the same.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from quantkit.formats.imatrix import Imatrix

if TYPE_CHECKING:
    from quantkit.types.refine import Moments

KEPT = 2  # inputs: a piece of the next one may begin before the last piece of the one before ends


class PreparedMoments:
    """`get` gives what `QuantType.quantize` takes as `second_moments`; any thread may call it. `imatrix`: as given."""

    def __init__(self, imatrix: Imatrix):
        self.imatrix = imatrix
        self._lock = threading.Lock()
        self._kept: dict[tuple[int, int], Moments] = {}

    def get(self, entry: str, matrix: int) -> Moments | None:
        """Second moments of the input of a matrix (of several: of an expert); None if the file has none for `entry`."""
        stored = self.imatrix.second_moments.get(entry)
        if stored is None:
            return None
        from quantkit.types import refine  # loads numba

        key = id(stored), matrix
        with self._lock:
            if key not in self._kept:
                while len(self._kept) >= KEPT:
                    del self._kept[next(iter(self._kept))]
                importance = self.imatrix[entry].columns(stored.columns)[matrix]
                self._kept[key] = refine.prepare(stored.dense(importance, matrix), stored.columns)
            self._kept[key] = self._kept.pop(key)  # the last one to go
            return self._kept[key]
