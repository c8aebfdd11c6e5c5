"""A piece of a tensor: rows that are read, decoded, encoded and checked together, by one thread.

    source rows -> values, checked to be finite -> encoder -> rows of the planned type, checked for overflow

`provenance.row_pieces` says which rows a piece has. The result depends on nothing but the piece.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from quantkit.errors import DataError
from quantkit.formats import provenance
from quantkit.formats.mapping import release
from quantkit.recipe import PlannedTensor
from quantkit.types import check_finite
from quantkit.types.families.interleave import Interleaved

if TYPE_CHECKING:
    from quantkit.types.refine import Moments

# Scales are f16 and never larger than the largest weight, so below this magnitude no encoding can overflow.
_SAFE_MAGNITUDE = 30000.0


class SourceTensor(provenance.Rows, Protocol):
    """A tensor whose rows are bytes of the source type named in the plan."""

    @property
    def path(self) -> Path:
        """The file that holds the tensor, for messages."""


class Encoded(NamedTuple):
    """A piece in the planned type, uint8[rows, row_bytes], and the SHA-256 of its source rows and of its bytes."""

    data: np.ndarray
    source: bytes
    hash: bytes


@dataclass(frozen=True)
class Piece:
    """Rows `start` to `stop` of a tensor, all of one matrix of it. The values of a `verbatim` piece are not checked."""

    planned: PlannedTensor
    tensor: SourceTensor
    start: int
    stop: int
    importance: np.ndarray | None
    moments: Callable[[], Moments | None] | None
    effort: str
    verbatim: bool

    def encode(self) -> Encoded:
        """The rows in the planned type. The data of copied rows are a view of the source."""
        data = self.tensor.rows(self.start, self.stop)
        source_hash = provenance.of_piece(data)  # hashing first also brings the rows into the CPU cache
        encoded = self._converted(data)
        if encoded is data:  # still needed for writing
            return Encoded(data, source_hash, source_hash)
        release(data)
        return Encoded(encoded, source_hash, provenance.of_piece(encoded))

    def _converted(self, data: np.ndarray) -> np.ndarray:
        if self.verbatim:
            return self._same_bits(data)
        x = self.planned.source.dequantize(data, self.planned.shape[-1], threads=1)
        try:
            check_finite(x, self.start, self.planned.type.overflow, self.planned.type.name)
            if self.planned.copied or self.planned.reordered:
                return self._same_bits(data)
            moments = self.moments() if self.moments is not None else None
            encoded = self.planned.type.quantize(
                x, self.importance, second_moments=moments, effort=self.effort, threads=1
            )
        except DataError as error:
            raise DataError(f"{self._label}: {error}") from None
        self._check_encoded(x, encoded)
        return encoded

    def _same_bits(self, data: np.ndarray) -> np.ndarray:
        """The source's bytes, in the order of the planned type."""
        if self.planned.copied:
            return data
        if isinstance(self.planned.type, Interleaved) and self.planned.type.base == self.planned.source.name:
            return self.planned.type.interleave_rows(data, threads=1)
        assert isinstance(self.planned.source, Interleaved)
        return self.planned.source.deinterleave_rows(data, threads=1)

    @property
    def _label(self) -> str:
        return f"{self.tensor.path}: {self.planned.name}"

    def _check_encoded(self, x: np.ndarray, encoded: np.ndarray) -> None:
        """Raise DataError for a finite weight that is too large for the type's half-precision scales."""
        largest = max(x.max(), -x.min())
        if largest < _SAFE_MAGNITUDE:
            return
        back = self.planned.type.dequantize(encoded, self.planned.shape[-1], threads=1)
        bad = np.argwhere(~(np.abs(back - x) <= largest / 2))  # not finite, or clipped
        if len(bad):
            row, column = (int(v) for v in bad[0])
            raise DataError(
                f"{self._label}: row {self.start + row}, column {column} is {x[row, column]} and would become "
                f"{back[row, column]}: too large for {self.planned.type.name}; keep this tensor in f32 or bf16"
            )
