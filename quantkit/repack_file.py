"""Repacking whole files: rows interleaved for the CPU, and back, every bit kept.

    job = plan_repack(open("model.gguf"), ["ffn_.*_exps"])     what becomes of each tensor, and why; writes nothing
    job = plan_unpack(open("model-r4.gguf"))
    write(job, "out.gguf")

Tensors keep their order, names and shapes; those that are not repacked are copied. Metadata is kept but for
general.file_type, which names the interleaved type when most of the file's main type is interleaved; the number it had
is kept beside it, and unpacking restores it, so that unpacking a repacked file gives the file there was.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from quantkit.errors import QuantkitError, UnknownNameError
from quantkit.files.gguf import GGUF, Metadata, Tensor, TensorSpec, Writer
from quantkit.files.pipeline import Job, pump, row_ranges
from quantkit.recipe.ecmascript import compile_pattern
from quantkit.recipe.presets import file_type
from quantkit.repack import interleaved_form
from quantkit.types import QuantType
from quantkit.types.interleave import Interleaved

FILE_TYPE = "general.file_type"
FILE_TYPE_BEFORE = "quantkit.repack.file_type"  # u32: general.file_type of the file that was repacked

# Embeddings are looked up row by row, which interleaved types cannot serve.
EMBEDDINGS = ("token_embd.weight", "per_layer_token_embd.weight")
_INTERLEAVED_NAMES = ("_r4", "_r8", "_r16")


@dataclass(frozen=True)
class Change:
    """What becomes of a tensor: its new type (the old one where it is copied) and the reason if it is copied."""

    tensor: Tensor
    type: QuantType
    reason: str = ""

    @property
    def changed(self) -> bool:
        return self.type is not self.tensor.type

    def jobs(self) -> Iterator[Job]:
        """The new bytes, in pieces. A group never straddles two experts: each has whole groups of rows."""
        tensor = self.tensor
        ranges = row_ranges(tensor.shape, max(self.type.interleave, tensor.type.interleave))
        for start, stop in ranges if len(tensor.shape) > 1 else [(0, 1)]:
            yield tensor.name, functools.partial(self._rows, start, stop)

    def _rows(self, start: int, stop: int) -> np.ndarray:
        data = self.tensor.rows(start, stop)
        if not self.changed:
            return data
        if isinstance(self.type, Interleaved):
            return self.type.interleave_rows(data, threads=1)
        assert isinstance(self.tensor.type, Interleaved)
        return self.tensor.type.deinterleave_rows(data, threads=1)


@dataclass(frozen=True)
class Repacking:
    """A file, what becomes of each of its tensors, and the metadata of the result."""

    source: GGUF
    changes: list[Change]
    metadata: Metadata

    @property
    def changed(self) -> list[Change]:
        return [change for change in self.changes if change.changed]

    @property
    def nbytes(self) -> int:
        """Bytes of tensor data, before and after."""
        return sum(change.tensor.nbytes for change in self.changes)


def plan_repack(source: GGUF, patterns: Sequence[str] = ()) -> Repacking:
    """Interleave every tensor that can be, or of those the ones in whose name some pattern (ECMAScript) is found.

    Raises QuantkitError for a pattern that is found in no tensor's name.
    """
    regexes = [compile_pattern(pattern) for pattern in patterns]
    for pattern, regex in zip(patterns, regexes):
        if not any(regex.search(name) for name in source.tensors):
            count = len(source.tensors)
            raise QuantkitError(f"{source.path}: --repack-pattern '{pattern}' is found in none of {count} tensor names")
    changes = []
    for tensor in source.tensors.values():
        form, reason = _interleaved(tensor)
        if form and regexes and not any(regex.search(tensor.name) for regex in regexes):
            form, reason = None, "no --repack-pattern matches"
        changes.append(Change(tensor, form or tensor.type, reason))
    return Repacking(source, changes, _repacked_metadata(source, changes))


def plan_unpack(source: GGUF) -> Repacking:
    """Give every interleaved tensor the rows of its base type back."""
    changes = []
    for tensor in source.tensors.values():
        if isinstance(tensor.type, Interleaved):
            changes.append(Change(tensor, tensor.type.base_type))
        else:
            foreign = tensor.type.name.endswith(_INTERLEAVED_NAMES)
            reason = f"quantkit cannot unpack {tensor.type.name}" if foreign else "not interleaved"
            changes.append(Change(tensor, tensor.type, reason))
    return Repacking(source, changes, _unpacked_metadata(source, changes))


def write(
    job: Repacking, out: str | os.PathLike[str], *, threads: int | None = None, progress: bool = False
) -> list[Path]:
    """Write the file that `job` describes; it appears under its name when it is complete. Returns the paths."""
    specs = [TensorSpec(change.tensor.name, change.tensor.shape, change.type) for change in job.changes]
    with Writer(out, job.metadata, specs) as writer:
        for path in writer.paths:
            if path.exists() and any(os.path.samefile(path, other) for other in job.source.paths):
                raise QuantkitError(f"{path}: this is the input; write to another name")
        jobs = (piece for change in job.changes for piece in change.jobs())
        pump(jobs, writer.write, job.nbytes, threads=threads, progress=progress)
        return list(writer.paths)


def _interleaved(tensor: Tensor) -> tuple[Interleaved | None, str]:
    """The interleaved type of a tensor, or None and the reason why it has none."""
    if tensor.name in EMBEDDINGS:
        return None, "embeddings are read row by row"
    if isinstance(tensor.type, Interleaved):
        return None, "interleaved already"
    form = interleaved_form(tensor.type)
    if form is None:
        return None, f"{tensor.type.name} has no interleaved form here"
    rows = tensor.shape[-2] if len(tensor.shape) > 1 else 1
    if rows % form.interleave:
        return None, f"{rows} rows are not a multiple of {form.interleave}"
    return form, ""


# ----------------------------------------------------------------------------------------------------------- file types


def _repacked_metadata(source: GGUF, changes: Sequence[Change]) -> Metadata:
    """The metadata with the file type of the interleaved form of the main type, if that is what most of it became."""
    metadata = Metadata(source.metadata)
    main = _main_type(metadata)
    form = interleaved_form(main) if main else None
    if main and form and form.file_type is not None:
        after = sum(change.tensor.nbytes for change in changes if change.type is form)
        left = sum(change.tensor.nbytes for change in changes if change.type is main)
        if after > left:
            metadata.set(FILE_TYPE_BEFORE, metadata[FILE_TYPE], "u32")
            metadata.set(FILE_TYPE, form.file_type, "u32")
    return metadata


def _unpacked_metadata(source: GGUF, changes: Sequence[Change]) -> Metadata:
    """The metadata with the file type there was before repacking, or that of the base type."""
    metadata = Metadata(source.metadata)
    main = _main_type(metadata)
    if not isinstance(main, Interleaved) or not any(change.changed for change in changes):
        return metadata
    before = metadata.pop(FILE_TYPE_BEFORE, None)
    if not isinstance(before, int) or isinstance(before, bool):
        before = main.base_type.file_type
    if before is not None:
        metadata.set(FILE_TYPE, before, "u32")
    return metadata


def _main_type(metadata: Metadata) -> QuantType | None:
    """The tensor type behind general.file_type, None where that is missing or names none."""
    number = metadata.get(FILE_TYPE)
    if not isinstance(number, int) or isinstance(number, bool):
        return None
    try:
        return file_type(number).default
    except UnknownNameError:
        return None
