"""What an importance matrix says of the inputs of a tensor's matrices; second moments, made ready for rounding.

Prepared second moments of the last few inputs are kept: consecutive pieces of a tensor, and matrices that share an
input, use the same.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from quantkit.formats.imatrix import Imatrix, SecondMoments
from quantkit.recipe.planning.planner import importance_entry

if TYPE_CHECKING:
    from quantkit.types import QuantType
    from quantkit.types.refine import Moments

KEPT = 2  # inputs: a piece of the next one may begin before the last piece of the one before ends


class MatrixInputs(NamedTuple):
    """What was measured of the inputs of a matrix; all None where nothing was.

    entry        the entry of the importance matrix: the tensor's, or that of a tensor with the same input
    importance   float32[columns]
    moments      second moments as stored; None where the entry has none
    """

    entry: str | None = None
    importance: np.ndarray | None = None
    moments: SecondMoments | None = None


def inputs_of(name: str, columns: int, matrix: int, imatrix: Imatrix | None) -> MatrixInputs:
    """The inputs of a matrix (of several: of an expert) of a tensor; DataError if its values do not fit `columns`."""
    entry = importance_entry(name, imatrix) if imatrix is not None else None
    if imatrix is None or entry is None:
        return MatrixInputs()
    return MatrixInputs(entry, imatrix[entry].columns(columns)[matrix], imatrix.second_moments.get(entry))


class PreparedMoments:
    """What `QuantType.quantize` takes as importance and as second moments; any thread may call the methods."""

    def __init__(self, imatrix: Imatrix):
        self.imatrix = imatrix
        self._lock = threading.Lock()
        self._kept: dict[tuple[int, int], Moments] = {}

    def of_matrix(
        self, name: str, columns: int, matrix: int, kind: QuantType, effort: str
    ) -> tuple[np.ndarray | None, Callable[[], Moments | None] | None]:
        """Importance float32[columns] of a matrix, and what gives its second moments if the type's encoder uses them.

        Both are None if no importance was measured.
        """
        inputs = inputs_of(name, columns, matrix, self.imatrix)
        if inputs.entry is None or not kind.uses_second_moments_at(effort):
            return inputs.importance, None
        return inputs.importance, functools.partial(self.get, inputs.entry, matrix)

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
