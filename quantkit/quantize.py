"""Quantizing a file: rows are read, encoded and written in small pieces, as a plan says.

    source tensor -> pieces of rows -> decode -> encode -> check -> writer, in order

Each piece is decoded and encoded by one thread; several are in flight, and what they give is written in order. So
memory is bounded by a constant a thread, tensors of all sizes keep all threads busy, and the bytes do not depend on how
many there are. The output appears under its final name when it is complete.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quantkit import __version__
from quantkit.errors import DataError, QuantkitError
from quantkit.files.atomic import refuse_inputs
from quantkit.files.gguf import GGUF, Metadata, Tensor, TensorSpec, Writer
from quantkit.files.imatrix import Imatrix
from quantkit.files.mapping import release
from quantkit.files.pipeline import pump
from quantkit.recipe import Plan, PlannedTensor
from quantkit.recipe.interleaving import FILE_TYPE_BEFORE, rename_repacked
from quantkit.types import check_finite, effort_level
from quantkit.types.interleave import Interleaved

PIECE_ELEMENTS = 1 << 19  # 2 MiB of float32: stays in a core's cache from decoding to encoding
QUANTIZATION_VERSION = 2
# Scales are f16 and never larger than the largest weight, so below this no encoding can run out of range.
_SAFE_MAGNITUDE = 30000.0
_FLOATS = frozenset(("f32", "f16", "bf16"))
_HIDDEN = "top_secret"  # the reference's word for it
_LONGEST_TEXT = 127  # bytes that the reference's readers take of the imatrix strings


@dataclass(frozen=True)
class Override:
    """A metadata key set by the user: kind is "int", "float", "bool" or "str"."""

    key: str
    kind: str
    value: Any

    @classmethod
    def parse(cls, text: str) -> Override:
        """Read KEY=TYPE:VALUE."""
        key, equals, rest = text.partition("=")
        kind, colon, value = rest.partition(":")
        readers: dict[str, Any] = {"int": int, "float": float, "str": str, "bool": {"true": True, "false": False}.get}
        try:
            parsed = readers[kind](value) if key and equals and colon else None
        except (KeyError, ValueError):
            parsed = None
        if parsed is None:
            raise QuantkitError(
                f"override '{text}' is not KEY=TYPE:VALUE with TYPE int, float, bool (true, false) or str"
            )
        return cls(key, kind, parsed)


@dataclass(frozen=True)
class Written:
    """What a run wrote: the files and their bytes, header and padding included."""

    paths: list[Path]
    size: int


def quantize(
    source: GGUF,
    out: str | os.PathLike[str],
    plan: Plan,
    *,
    imatrix: Imatrix | None = None,
    imatrix_file: str = "",
    hide_imatrix: bool = False,
    overrides: Sequence[Override] = (),
    effort: str = "normal",
    threads: int | None = None,
    split_max_bytes: int | None = None,
    split_max_tensors: int | None = None,
    keep_split: bool = False,
    progress: bool = False,
) -> Written:
    """Write `source` to `out` with every tensor in the type that `plan` gives it.

    `imatrix` is the matrix that the plan was made with, `imatrix_file` its name for the output's metadata, which with
    `hide_imatrix` says only that there was one. `effort`
    ("fast", "normal", "best") is what the encoders' search may cost; a file remembers it where it is not normal.
    `keep_split` makes the shards of the source.
    Raises DataError naming file, tensor, row and column for values that are not finite; then nothing is left of `out`.
    """
    effort_level(effort)
    plan.require_codecs()
    metadata = output_metadata(source.metadata, plan, imatrix, imatrix_file, overrides, effort, hide_imatrix)
    specs = [TensorSpec(t.name, t.shape, t.type) for t in plan.tensors]
    shards = source.shards if keep_split else None
    with Writer(out, metadata, specs, split_max_bytes, split_max_tensors, shards) as writer:
        refuse_inputs(writer.paths, source.paths)
        jobs = ((piece.planned.name, piece.encode) for piece in _pieces(source, plan, imatrix, effort))
        pump(jobs, writer.write, plan.bytes_after, threads=threads, progress=progress)
        paths = writer.paths
    return Written(paths, sum(path.stat().st_size for path in paths))


# ----------------------------------------------------------------------------------------------------------- the pieces


@dataclass(frozen=True)
class _Piece:
    """Rows `start` to `stop` of a tensor, all of one matrix of it; of `verbatim` ones the values are not looked at."""

    planned: PlannedTensor
    tensor: Tensor
    start: int
    stop: int
    importance: np.ndarray | None
    effort: str
    verbatim: bool

    def encode(self) -> np.ndarray:
        """The rows in the planned type: uint8[rows, row_bytes]."""
        data = self.tensor.rows(self.start, self.stop)
        made = self._made(data)
        if made is not data:  # which is still to be written
            release(data)
        return made

    def _made(self, data: np.ndarray) -> np.ndarray:
        if self.verbatim:
            return self._same_bits(data)
        x = self.planned.source.dequantize(data, self.planned.shape[-1], threads=1)
        try:
            check_finite(x, self.start, self.planned.type.overflow, self.planned.type.name)
            if self.planned.copied or self.planned.relaid:
                return self._same_bits(data)
            encoded = self.planned.type.quantize(x, self.importance, effort=self.effort, threads=1)
        except DataError as error:
            raise DataError(f"{self._place}: {error}") from None
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
    def _place(self) -> str:
        return f"{self.tensor.path}: {self.planned.name}"

    def _check_encoded(self, x: np.ndarray, encoded: np.ndarray) -> None:
        """Refuse finite weights that are too large for the half-precision scales of a type."""
        largest = max(x.max(), -x.min())
        if largest < _SAFE_MAGNITUDE:
            return
        back = self.planned.type.dequantize(encoded, self.planned.shape[-1], threads=1)
        bad = np.argwhere(~(np.abs(back - x) <= largest / 2))  # not finite, or cut off
        if len(bad):
            row, column = (int(v) for v in bad[0])
            raise DataError(
                f"{self._place}: row {self.start + row}, column {column} is {x[row, column]} and would become "
                f"{back[row, column]}: too large for {self.planned.type.name}; keep this tensor in f32 or bf16"
            )


def _pieces(source: GGUF, plan: Plan, imatrix: Imatrix | None, effort: str) -> Iterator[_Piece]:
    """All pieces of the output, in its order."""
    for planned in plan.tensors:
        tensor = source.tensors[planned.name]
        rows = planned.shape[-2] if len(planned.shape) > 1 else 1
        columns = planned.shape[-1]
        weights = None
        if imatrix is not None and planned.importance is not None:
            weights = imatrix[planned.importance].columns(columns)
        # Floats that are kept, norms above all, are looked at: a NaN in them spoils the model as surely as any other.
        same_bits = planned.copied or planned.relaid
        verbatim = same_bits and (plan.file_type.default is None or planned.source.name not in _FLOATS)
        group = math.lcm(planned.source.interleave, planned.type.interleave)
        step = max(1, PIECE_ELEMENTS // columns // group) * group
        for matrix in range(math.prod(planned.shape[:-2])):
            importance = None if weights is None else weights[matrix]
            for start in range(matrix * rows, (matrix + 1) * rows, step):
                stop = min(start + step, (matrix + 1) * rows)
                yield _Piece(planned, tensor, start, stop, importance, effort, verbatim)


# ------------------------------------------------------------------------------------------------ metadata and the rest


def output_metadata(
    source: Mapping[str, Any],
    plan: Plan,
    imatrix: Imatrix | None = None,
    imatrix_file: str = "",
    overrides: Sequence[Override] = (),
    effort: str = "normal",
    hide_imatrix: bool = False,
) -> Metadata:
    """The input's keys in their order, then what was done: version, overrides, importance, recipe, file type."""
    made = Metadata(source)
    made.set("general.quantization_version", QUANTIZATION_VERSION, "u32")
    for override in overrides:
        _apply(made, override)
    if imatrix is not None:
        entries, chunks = (0, 0) if hide_imatrix else (len(imatrix), imatrix.chunks)
        for key, text in (("file", imatrix_file), ("dataset", imatrix.described)):
            made.set(f"quantize.imatrix.{key}", _HIDDEN if hide_imatrix else _short(text), "str")
        made.set("quantize.imatrix.entries_count", entries, "i32")
        if imatrix.chunks > 0:
            made.set("quantize.imatrix.chunks_count", chunks, "i32")
    if plan.file_type.number is not None:  # a copy keeps the recipe it was made by
        made.set("quantkit.recipe", plan.text(), "str")
        made.set("quantkit.version", __version__, "str")
        made.pop("quantkit.effort", None)  # the input's
        if effort != "normal":
            made.set("quantkit.effort", effort, "str")
        made.pop(FILE_TYPE_BEFORE, None)  # the input's too
        made.set("general.file_type", plan.file_type.number, "u32")
    rename_repacked(made, plan.became())
    return made


def _apply(metadata: Metadata, override: Override) -> None:
    """Set a key. One that exists keeps its kind, because readers refuse a key of another kind."""
    new = {"int": "i32", "float": "f32", "bool": "bool", "str": "str"}[override.kind]
    kind = metadata.kind(override.key) if override.key in metadata else new
    if isinstance(metadata.get(override.key), list) or (override.kind == "int") != (kind[0] in "ui"):
        found = "a list" if isinstance(metadata.get(override.key), list) else kind
        raise QuantkitError(f"override {override.key}: the file's value is {found}, the override {override.kind}")
    metadata.set(override.key, override.value, kind)


def _short(text: str) -> str:
    """As much of a text as readers of imatrix keys take."""
    return text.encode()[:_LONGEST_TEXT].decode(errors="ignore")
