"""Verify a file: its structure, its values, its recorded hashes, and whether a rerun would reproduce it.

    found = verify_gguf(open("model.gguf"), source=open("bf16.gguf"), imatrix=imatrix.read("imatrix.dat"))
    found.damage          defects of the file itself, one sentence each
    found.changes         tensors that a rerun would change, and why

`formats/gguf/reader.py` checks the structure when it opens the file. `verify` compares the model's hyperparameters with
each other and with the tensors (`archs/common/validate.py`), and decodes every tensor: a scale that is NaN or Inf makes
all its values NaN or Inf. It hashes the bytes that it decodes, so it reads the file once.

If a file was repacked after quantization, `verify` hashes the rows in their earlier layout where it can restore that.

A rerun reproduces the file if each tensor has the source, the importance and the codec of its record, and the metadata
are from this version of quantkit. Sources are read and hashed; nothing is encoded. A checkpoint on the Hub is streamed,
and its tensors are compared in the order in which they arrive.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from quantkit import __version__, types
from quantkit.archs.common import validate
from quantkit.errors import DataError, FormatError
from quantkit.formats import provenance
from quantkit.formats.gguf import GGUF, Shard, Tensor, scales
from quantkit.formats.imatrix import Imatrix
from quantkit.formats.mapping import release
from quantkit.formats.pipeline import Progress, spread
from quantkit.formats.provenance import Record, Rows
from quantkit.pipelines.arrivals import Arrivals
from quantkit.pipelines.resume import hash_source
from quantkit.recipe import importance_entry
from quantkit.types import check_finite
from quantkit.types.families.interleave import Interleaved

if TYPE_CHECKING:
    from quantkit.cluster.in_order import WorkerTime


class OriginalModel(Protocol):
    """The input that a file was made from: an open GGUF, or a checkpoint as a `CheckpointView`."""

    @property
    def tensors(self) -> Mapping[str, Rows]:
        """The tensors by their names in GGUF."""


@dataclass
class Verified:
    """The result of `verify`.

    Fields:

        file      the opened file
        decoded   number of tensors whose values were checked
        hashed    number of tensors whose bytes match the recorded hash
        recorded  number of tensors with a record of what they were made from
        damage    one sentence for each defect, with the file that has it; empty if it is sound
        changes   by tensor that a rerun would change: the reasons
        notes     what could not be compared, and why
        rerun     whether a rerun reproduces the file; None if the sources were not compared
        workers   of a cluster, by address: their tasks and seconds
    """

    file: GGUF
    decoded: int = 0
    hashed: int = 0
    recorded: int = 0
    damage: list[str] = field(default_factory=list)
    changes: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    rerun: bool | None = None
    workers: dict[str, WorkerTime] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The fields of `quantkit verify --json`, without its schema."""
        names = ("decoded", "hashed", "recorded", "damage", "changes", "notes", "rerun")
        return {"path": self.file.path, "tensors": len(self.file.tensors)} | {n: getattr(self, n) for n in names}


class Checked(NamedTuple):
    """What was found of a tensor, for the fields of Verified, and why a rerun would change it."""

    name: str
    nbytes: int
    decoded: bool = False
    hashed: bool = False
    damage: str = ""
    note: str = ""
    changes: Sequence[str] = ()


@dataclass(frozen=True)
class Checker:
    """Checks tensors of an open file, one at a time.

    source, imatrix   what the file was made from, where it is known
    threads           number of threads, for several tensors
    """

    file: GGUF
    source: OriginalModel | None = None
    imatrix: Imatrix | None = None
    threads: int | None = None

    @functools.cached_property
    def records(self) -> Mapping[str, Record]:
        """By tensor, what it was made from."""
        return provenance.records(self.file.metadata)

    def check(self, name: str) -> Checked:
        """Check a tensor."""
        tensor, record = self.file.tensors[name], self.records.get(name)
        found = _check_bytes(tensor, record)
        if record is None:
            return found
        return found._replace(changes=_reasons_to_change(record, self.file, self.source, self.imatrix))

    def check_all(self, names: Sequence[str], progress: Progress | bool = False) -> list[Checked]:
        """Check tensors on several threads; in the order of `names`."""
        found: dict[str, Checked] = {}

        def check(name: str) -> int:
            found[name] = self.check(name)
            return found[name].nbytes

        total = sum(self.file.tensors[name].nbytes for name in names)
        arrivals: Arrivals | None = getattr(self.source, "arrivals", None)
        if arrivals is None:
            spread((functools.partial(check, name) for name in names), total, threads=self.threads, progress=progress)
        else:
            try:
                checks = self._as_they_arrive(names, arrivals, check)
                spread(checks, total, threads=self.threads, progress=progress)
                arrivals.finish()
            finally:
                arrivals.close()
        return [found[name] for name in names]

    def _as_they_arrive(
        self, names: Sequence[str], arrivals: Arrivals, check: Callable[[str], int]
    ) -> Iterator[Callable[[], int]]:
        """The checks of tensors, each when the tensors of the checkpoint that it was made from are there."""

        def check_and_release(name: str) -> int:
            try:
                return check(name)
            finally:
                arrivals.release(name)

        tensors: Mapping[str, Any] = self.source.tensors if self.source is not None else {}
        compared = tensors.keys() & self.records.keys()
        inputs = {name: tensors[name].inputs if name in compared else [] for name in names}
        for name in arrivals.begin(self.file.path, inputs):
            arrivals.wait(name, lambda text: None)
            yield functools.partial(check_and_release, name)


def verify_gguf(
    file: GGUF,
    source: OriginalModel | None = None,
    imatrix: Imatrix | None = None,
    *,
    threads: int | None = None,
    progress: Progress | bool = False,
    check: Callable[[Sequence[str]], Iterable[Checked]] | None = None,
) -> Verified:
    """Check an open file. `source`, and `imatrix` if one was used, also tell whether a rerun would reproduce it.

    `check` checks tensors elsewhere; None: here, on `threads` threads.
    """
    found = Verified(file)
    records = provenance.records(file.metadata)
    found.recorded = sum(name in records for name in file.tensors)
    found.damage += [f"{file.path}: {sentence}" for sentence in validate.problems(file.metadata, file.tensors)]
    if name := validate.unknown_architecture(file.metadata):
        found.notes.append(f"quantkit does not know {name}, so the tensors were not compared with the metadata")
    for path in file.paths:
        if count := Shard(path).trailing:
            found.notes.append(f"{path}: {count:,} bytes after the last tensor belong to nothing in the file")
    if absent := [name for name in records if name not in file.tensors]:
        found.damage.append(f"{file.path}: {len(absent)} recorded tensors are missing, for example {absent[0]}")

    checker = Checker(file, source, imatrix, threads)
    for checked in (check or functools.partial(checker.check_all, progress=progress))(list(file.tensors)):
        found.decoded += checked.decoded
        found.hashed += checked.hashed
        found.damage += [checked.damage] if checked.damage else []
        found.notes += [checked.note] if checked.note else []
        if checked.changes:
            found.changes[checked.name] = list(checked.changes)
    found.damage.sort()
    found.notes.sort()
    found.changes = {name: found.changes[name] for name in file.tensors if name in found.changes}
    _conclude(found, records, source, imatrix)
    return found


def _check_bytes(tensor: Tensor, record: Record | None) -> Checked:
    """Decode a tensor and hash it."""
    name, pieces, codec = tensor.name, [], tensor.type.has_codec
    to_recorded = _to_recorded_layout(tensor, record) if record else None
    for start, stop in provenance.row_pieces(tensor.shape):
        data = tensor.rows(start, stop)
        if codec:
            try:
                check_finite(_values(tensor, data, start), start)
            except DataError as error:
                return Checked(name, tensor.nbytes, damage=f"{tensor.path}: {name}: {error}")
            except FormatError as error:  # a scale that names its file and tensor
                return Checked(name, tensor.nbytes, damage=str(error))
        if to_recorded is not None:
            pieces.append(provenance.of_piece(to_recorded(data)))
        release(data)
    found = Checked(name, tensor.nbytes, codec)
    if record is None:
        return found
    if to_recorded is None:
        was = f"{name}: is {tensor.type.name} and was written as {record.type}, so its hash was not compared"
        return found._replace(note=was)
    if provenance.of_pieces(record.type, pieces) == record.data:
        return found._replace(hashed=True)
    return found._replace(
        damage=f"{tensor.path}: {name}: the bytes have changed since they were written: the hash differs"
    )


def _values(tensor: Tensor, data: np.ndarray, start: int) -> np.ndarray:
    """The values of rows from `start` on; of a part of a model without the scales of NVFP4, which are elsewhere."""
    if not tensor.is_complete:
        return tensor.type.dequantize(data, tensor.shape[-1], threads=1)
    return scales.decode(tensor, data, start, threads=1)


def _to_recorded_layout(tensor: Tensor, record: Record) -> Callable[[np.ndarray], np.ndarray] | None:
    """A function that converts a tensor's rows to the recorded layout, if the file was repacked; None if it cannot."""
    now, then = tensor.type, types.layout(record.type)
    if now is then:
        return lambda data: data
    if isinstance(now, Interleaved) and now.base == then.name:
        return functools.partial(now.deinterleave_rows, threads=1)
    if isinstance(then, Interleaved) and then.base == now.name:
        return functools.partial(then.interleave_rows, threads=1)
    return None


def _reasons_to_change(record: Record, file: GGUF, source: OriginalModel | None, imatrix: Imatrix | None) -> list[str]:
    """Why a rerun would or might change a tensor's bytes; empty if it would not."""
    reasons = []
    effort = str(file.metadata.get("quantkit.effort", "normal"))
    if record.codec != provenance.COPY:
        scale = scales.ENCODED if _has_new_scale(file.tensors[record.name]) else None
        now = provenance.codec(record.type, effort, provenance.has_moments(record.importance), scale)
        if now != record.codec:
            reasons.append(f"the codec of {record.type} has changed (it was {record.codec}, it is now {now})")
    if source is not None:
        original = source.tensors.get(record.name)
        if original is None and _is_new_scale(file, record.name):
            return reasons
        if original is None:
            reasons.append("it is missing from the source")
        elif hash_source(original) != record.source:
            reasons.append("its source has changed")
    compared = record.importance not in (provenance.NONE, provenance.HIDDEN) and not _is_calibrated(file)
    if source is not None and compared and imatrix is not None:
        entry = importance_entry(record.name, imatrix)
        if entry is None:
            reasons.append("it is missing from the importance matrix")
        else:
            with_moments = types.get(record.type).uses_second_moments_at(effort)
            reasons += _changed_importance(provenance.of_entry(imatrix, entry, with_moments), record.importance)
    return reasons


def _has_new_scale(tensor: Tensor) -> bool:
    """Whether a tensor has the scale of `new_scales.py`."""
    return tensor.scale is not None and bool((tensor.scale.dequantize() == np.float32(scales.ENCODED)).all())


def _is_new_scale(file: GGUF, name: str) -> bool:
    """Whether a tensor is such a scale, of a tensor that was encoded with it."""
    weight = file.tensors.get(name.removesuffix(".scale") + ".weight")
    if weight is None or weight.scale is not file.tensors[name] or not _has_new_scale(weight):
        return False
    record = provenance.records(file.metadata).get(weight.name)
    return record is not None and record.codec != provenance.COPY


def _changed_importance(now: str, recorded: str) -> list[str]:
    """What differs between two hashes of `provenance.of_entry`."""
    if now == recorded:
        return []
    if provenance.has_moments(now) != provenance.has_moments(recorded):
        then, today = ("with", "without") if provenance.has_moments(recorded) else ("without", "with")
        return [f"it was made {then} second moments, a rerun is {today}"]
    return [f"its {'second moments have' if now[:32] == recorded[:32] else 'importance has'} changed"]


def _conclude(
    found: Verified, records: Mapping[str, Record], source: OriginalModel | None, imatrix: Imatrix | None
) -> None:
    """Set `rerun`, and note what could not be compared."""
    unrecorded = [name for name in found.file.tensors if name not in records]
    if unrecorded:
        found.notes.append(
            f"{len(unrecorded)} of {len(found.file.tensors)} tensors have no record of what they were made from"
        )
    weighted = [r.importance for r in records.values() if r.importance != provenance.NONE]
    unchecked = _not_compared(weighted, source, imatrix, _is_calibrated(found.file)) if records else []
    found.notes += unchecked
    if found.changes:
        found.rerun = False
    elif source is not None and not unrecorded and not unchecked:
        version = found.file.metadata.get("quantkit.version")
        found.rerun = version == __version__
        if not found.rerun:
            found.notes.append(
                f"all tensors would be the same; the file was written by quantkit {version}, this is {__version__}"
            )


def _is_calibrated(file: GGUF) -> bool:
    """Whether importance was measured while the file was written."""
    return provenance.CALIBRATION in file.metadata


def _not_compared(
    weighted: Sequence[str], source: OriginalModel | None, imatrix: Imatrix | None, calibrated: bool
) -> list[str]:
    """Inputs that are missing, so that the effect of a rerun is unknown."""
    if source is None:
        return ["sources were not compared: pass --source"]
    if calibrated:
        return ["the importance was measured while the file was written, so it cannot be compared"]
    if provenance.HIDDEN in weighted:
        return ["the file hides its importance matrix, so it cannot be compared"]
    if weighted and imatrix is None:
        return ["an importance matrix was used and not compared: pass --imatrix"]
    return []
