"""A piece of a tensor: rows that are read, decoded, encoded and checked together, by one thread.

    source rows -> values, checked to be finite -> encoder -> rows of the planned type, checked for overflow

`provenance.row_pieces` says which rows a piece has. The result depends on nothing but the piece.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from quantkit.errors import DataError
from quantkit.formats import provenance
from quantkit.formats.gguf import Metadata, scales
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


class QuantizeSource(Protocol):
    """The input of `quantize_with_plan`: an open GGUF, or a checkpoint as a `CheckpointView`."""

    @property
    def metadata(self) -> Metadata:
        """Metadata of the input, from which those of the output are made."""

    @property
    def paths(self) -> Sequence[Path]:
        """The files of the input: no output may replace one."""

    @property
    def tensors(self) -> Mapping[str, SourceTensor]:
        """The tensors by their names in GGUF."""


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
        source_hash = scales.hash_of_piece(self.tensor, data, self.start)  # also brings the rows into the CPU cache
        encoded = self._converted(data)
        if encoded is data:  # still needed for writing
            return Encoded(data, source_hash, source_hash if self.tensor.scales is None else provenance.of_piece(data))
        release(data)
        return Encoded(encoded, source_hash, provenance.of_piece(encoded))

    def _converted(self, data: np.ndarray) -> np.ndarray:
        if self.verbatim:
            return self._same_bits(data)
        x = scales.decode(self.tensor, data, self.start, threads=1)
        try:
            check_finite(x, self.start, self.planned.type.overflow, self.planned.type.name)
            if self.planned.copied or self.planned.reordered:
                return self._same_bits(data)
            if self.planned.scale is not None:
                self._check_range(x, self.planned.scale)
                x /= np.float32(self.planned.scale)
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

    def _check_range(self, x: np.ndarray, scale: float) -> None:
        """DataError for a value that is clipped because it is divided by a number below 1."""
        bad = np.argwhere(np.abs(x) > scales.LARGEST * scale)
        if len(bad):
            row, column = (int(v) for v in bad[0])
            raise DataError(
                f"row {self.start + row}, column {column} is {x[row, column]}; under --scale-nvfp4 "
                f"{self.planned.type.name} ends at {scales.LARGEST * scale:g}: leave the option out, or give this "
                "tensor another type"
            )

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


class TensorProgress:
    """A tensor in progress.

    ranges        rows of each piece
    missing       numbers of the pieces that earlier runs did not finish; `left` of them are not written yet
    source, data  hashes of all source and output pieces
    """

    def __init__(self, planned: PlannedTensor, finished: Mapping[int, tuple[bytes, bytes]]):
        """`finished`: hashes of the source and of the data of each piece that an earlier run has written."""
        self.planned = planned
        self.ranges = list(provenance.row_pieces(planned.shape))
        self.missing = [number for number in range(len(self.ranges)) if number not in finished]
        self.left = len(self.missing)
        self.source, self.data = [b""] * len(self.ranges), [b""] * len(self.ranges)
        for number, (source, data) in finished.items():
            self.source[number], self.data[number] = source, data

    @property
    def done(self) -> int:
        """Bytes that earlier runs have written."""
        return self.planned.bytes_after - sum(self.nbytes(number) for number in self.missing)

    def offset(self, number: int) -> int:
        """The byte of the tensor at which a piece starts."""
        return self.ranges[number][0] * self._row_bytes

    def nbytes(self, number: int) -> int:
        """The bytes of an encoded piece."""
        start, stop = self.ranges[number]
        return (stop - start) * self._row_bytes

    @property
    def _row_bytes(self) -> int:
        return self.planned.type.row_bytes(self.planned.shape[-1])

    def encoded(self, number: int, piece: Piece) -> np.ndarray:
        """Encode a piece and store its hashes."""
        data, self.source[number], self.data[number] = piece.encode()
        return data

    def record(self, expected: provenance.Record) -> provenance.Record:
        """The record of the written tensor: `expected` with the hashes of its source and of its bytes."""
        source = provenance.of_pieces(self.planned.source.name, self.source)
        return replace(expected, source=source, data=provenance.of_pieces(self.planned.type.name, self.data))
