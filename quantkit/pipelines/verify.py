"""Checking a file: its structure, its values, the hashes it carries, and whether a rerun would make it again.

    found = verify(open("model.gguf"), source=open("bf16.gguf"), imatrix=imatrix.read("imatrix.dat"))
    found.damage          what is wrong with the file itself, a sentence each
    found.changes         what a rerun would make otherwise, and why

Opening a file has checked that its parts hold together (formats/gguf/reader.py). Here the hyperparameters of a model
are compared with each other and with the tensors (archs/common/validate.py), and every tensor is decoded: a scale that
is NaN or Inf spoils all values that it scales. What is hashed is what is decoded, so the file is read once.

A file that was repacked since it was quantized is hashed as it was before, where its rows tell that.

A rerun gives the same bytes where each tensor has the source, the importance and the codec that its record names, and
this version of quantkit writes the metadata. Sources are read and hashed; nothing is encoded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from quantkit import __version__, types
from quantkit.archs.common import validate
from quantkit.errors import DataError
from quantkit.formats import provenance
from quantkit.formats.gguf import GGUF, Tensor
from quantkit.formats.imatrix import Imatrix
from quantkit.formats.mapping import release
from quantkit.formats.pipeline import spread
from quantkit.formats.provenance import Record, Rows
from quantkit.pipelines.resume import hash_of
from quantkit.recipe import importance_entry
from quantkit.types import check_finite
from quantkit.types.families.interleave import Interleaved


class Source(Protocol):
    """What a file was made of: an open GGUF, or a checkpoint as a `convert.Conversion`."""

    @property
    def tensors(self) -> Mapping[str, Rows]: ...


@dataclass
class Verified:
    """What was found. `rerun` is True or False where sources were compared, None where they were not."""

    file: GGUF
    decoded: int = 0  # tensors whose values were looked at
    hashed: int = 0  # tensors whose bytes are those that were recorded
    recorded: int = 0  # tensors with a record
    damage: list[str] = field(default_factory=list)
    changes: dict[str, list[str]] = field(default_factory=dict)  # tensor -> why a rerun would change it
    notes: list[str] = field(default_factory=list)
    rerun: bool | None = None

    def to_json(self) -> dict[str, Any]:
        names = ("decoded", "hashed", "recorded", "damage", "changes", "notes", "rerun")
        return {"path": self.file.path, "tensors": len(self.file.tensors)} | {n: getattr(self, n) for n in names}


def verify(
    file: GGUF,
    source: Source | None = None,
    imatrix: Imatrix | None = None,
    *,
    threads: int | None = None,
    progress: bool = False,
) -> Verified:
    """Check a file. With `source`, and with the `imatrix` if there was one, also tell whether a rerun would give it."""
    found = Verified(file)
    records = provenance.records(file.metadata)
    found.recorded = sum(name in records for name in file.tensors)
    found.damage += validate.problems(file.metadata, file.tensors)
    if absent := [name for name in records if name not in file.tensors]:
        found.damage.append(f"{len(absent)} tensors that were written are missing, as {absent[0]}")

    def work(tensor: Tensor) -> int:
        record = records.get(tensor.name)
        _check_bytes(found, tensor, record)
        if record and (reasons := _changes(record, file, source, imatrix)):
            found.changes[tensor.name] = reasons
        return tensor.nbytes

    total = sum(tensor.nbytes for tensor in file.tensors.values())
    spread((functools.partial(work, t) for t in file.tensors.values()), total, threads=threads, progress=progress)
    found.damage.sort()
    found.notes.sort()
    found.changes = {name: found.changes[name] for name in file.tensors if name in found.changes}
    _conclude(found, records, source, imatrix)
    return found


def _check_bytes(found: Verified, tensor: Tensor, record: Record | None) -> None:
    """Decode a tensor and hash it."""
    pieces = []
    before = _layout_before(tensor, record) if record else None
    for start, stop in provenance.row_pieces(tensor.shape):
        data = tensor.rows(start, stop)
        if tensor.type.has_codec:
            try:
                check_finite(tensor.type.dequantize(data, tensor.shape[-1], threads=1), start)
            except DataError as error:
                found.damage.append(f"{tensor.name}: {error}")
                return
        if before is not None:
            pieces.append(provenance.of_piece(before(data)))
        release(data)
    found.decoded += tensor.type.has_codec
    if record is None:
        return
    if before is None:
        found.notes.append(
            f"{tensor.name}: {tensor.type.name} now and {record.type} when it was written, so not compared"
        )
    elif provenance.of_pieces(record.type, pieces) == record.data:
        found.hashed += 1
    else:
        found.damage.append(f"{tensor.name}: its bytes are not those that were written: they hash to another value")


def _layout_before(tensor: Tensor, record: Record) -> Callable[[np.ndarray], np.ndarray] | None:
    """What makes rows of the type that was recorded of rows of a file that may have been repacked since."""
    now, then = tensor.type, types.layout(record.type)
    if now is then:
        return lambda data: data
    if isinstance(now, Interleaved) and now.base == then.name:
        return functools.partial(now.deinterleave_rows, threads=1)
    if isinstance(then, Interleaved) and then.base == now.name:
        return functools.partial(then.interleave_rows, threads=1)
    return None


def _changes(record: Record, file: GGUF, source: Source | None, imatrix: Imatrix | None) -> list[str]:
    """Why a rerun would make other bytes of a tensor, or might; nothing where it would not."""
    reasons = []
    if record.codec != provenance.COPY:
        now = provenance.codec(record.type, str(file.metadata.get("quantkit.effort", "normal")))
        if now != record.codec:
            reasons.append(f"{record.type} is encoded in another way now (codec {record.codec}, now {now})")
    if source is not None:
        original = source.tensors.get(record.name)
        if original is None:
            reasons.append("the source lacks it")
        elif hash_of(original) != record.source:
            reasons.append("its source is another")
    if source is not None and record.importance not in (provenance.NONE, provenance.HIDDEN) and imatrix is not None:
        entry = importance_entry(record.name, imatrix)
        if entry is None:
            reasons.append("the importance matrix lacks it")
        elif provenance.of_importance(imatrix[entry].values) != record.importance:
            reasons.append("its importance is another")
    return reasons


def _conclude(found: Verified, records: Mapping[str, Record], source: Source | None, imatrix: Imatrix | None) -> None:
    """Whether a rerun would give the same bytes, and what could not be told."""
    unrecorded = [name for name in found.file.tensors if name not in records]
    if unrecorded:
        found.notes.append(
            f"{len(unrecorded)} of {len(found.file.tensors)} tensors carry no record of what they were made of"
        )
    weighed = [r.importance for r in records.values() if r.importance != provenance.NONE]
    blind = _untold(weighed, source, imatrix) if records else []
    found.notes += blind
    if found.changes:
        found.rerun = False
    elif source is not None and not unrecorded and not blind:
        version = found.file.metadata.get("quantkit.version")
        found.rerun = version == __version__
        if not found.rerun:
            found.notes.append(
                f"all tensors would be the same; the metadata name quantkit {version}, this is {__version__}"
            )


def _untold(weighed: Sequence[str], source: Source | None, imatrix: Imatrix | None) -> list[str]:
    """What keeps a rerun from being told."""
    if source is None:
        return ["sources were not compared: pass --source"]
    if provenance.HIDDEN in weighed:
        return ["the file hides its importance matrix, so it cannot be compared"]
    if weighed and imatrix is None:
        return ["an importance matrix was used and not compared: pass --imatrix"]
    return []
