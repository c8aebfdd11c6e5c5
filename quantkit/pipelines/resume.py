"""Resume an interrupted `quantize`, and reuse the unchanged tensors of an older file.

    job = ResumableJob(out, sources, expected); job.layouts = […]
    job.find_interrupted(settings)                   partial files and journal of an earlier run
    job.find_unchanged(source, planned, old)         fills `done` and `copied`: these tensors are not encoded
    job.start(writer); job.finish(record); job.close(); job.remove_leftovers()

A run writes `OUT.partial-job` and beside it a journal (`formats/journal.py`): the finished tensors, each with a
`Record` of its source, importance and codec. A run on a cluster also lists finished pieces of tensors, which the same
tests apply to; their sources are always read. The same command resumes from there. A tensor is done when

- the journal belongs to this job: the headers are equal byte for byte, and so are types, recipe, options and metadata;
- its record has the importance and the codec that a new run would use;
- its source is unchanged: each input file has the same path, size and modification time, or else the tensor is read and
  has the same hash;
- its bytes in the partial file have the hash of the record.

If the interrupted run had other options, its files are renamed to `OUT.partial-old` and stay until the output is
complete: they are stale. Their unchanged tensors are reused like those of an older file (`OldFile`), which has its
records in its metadata. In both cases the sources are always read: hashing takes at most a tenth of the time of
encoding.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from quantkit.errors import FormatError
from quantkit.formats import gguf, journal, provenance
from quantkit.formats.atomic import JOURNAL, PARTIAL_JOB, refuse_live, remove_stale
from quantkit.formats.gguf import scales
from quantkit.formats.mapping import map_file, release
from quantkit.formats.pipeline import spread
from quantkit.formats.provenance import Record, Rows, StoredRows
from quantkit.formats.stream import Layout, StreamWriter, partial
from quantkit.inputs.json_input import Json
from quantkit.types import QuantType

if TYPE_CHECKING:
    from quantkit.formats.gguf import Tensor
    from quantkit.recipe import PlannedTensor


STALE = ".partial-old"


@dataclass(frozen=True)
class PartialTensor:
    """A tensor's bytes in a file that may be incomplete."""

    shape: tuple[int, ...]
    type: QuantType
    data: np.ndarray

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Rows in the tensor's type as uint8[stop - start, row_bytes]."""
        return self.type.rows_of(self.data, self.shape[-1], start, stop)


def hash_tensor(tensor: StoredRows) -> str:
    """Read a tensor and return the hash of its type and bytes."""

    return provenance.of_pieces(tensor.type.name, _hashes(tensor, provenance.row_pieces(tensor.shape)))


def hash_source(tensor: Rows) -> str:
    """Read a tensor and return the hash of its type, bytes and scales."""
    return provenance.of_pieces(tensor.type.name, _source_hashes(tensor, provenance.row_pieces(tensor.shape)))


# -------------------------------------------------------------------------------------------------------- an older file


@dataclass(frozen=True)
class OldFile:
    """An older file whose tensors may be reused: the tensors and their provenance records by name."""

    path: Path
    tensors: Mapping[str, Rows]
    records: Mapping[str, Record]


def open_old_file(path: Path) -> OldFile:
    """Open a file, any shard of a set, or the `OUT.partial-job` of an interrupted run."""
    found = journal.read(path.with_name(path.name + JOURNAL))
    file = gguf.open(path)
    return OldFile(path, file.tensors, _records(found) if found else provenance.records(file.metadata))


def open_old_shards(paths: Sequence[Path]) -> OldFile:
    """Open some shards of a set. The records are in the first shard."""
    file = gguf.open_parts(paths)
    return OldFile(paths[0], file.tensors, provenance.records(file.metadata))


def _records(found: journal.StoredJournal) -> dict[str, Record]:
    """The records of a journal."""
    return {name: _record(entry) for name, entry in found.entries.items()}


def _record(entry: Json) -> Record:
    """The record of a journal's entry. A field that it lacks becomes "None", which matches no other record."""
    return Record(**{key: str(entry.get(key)) for key in Record.__dataclass_fields__})


# ---------------------------------------------------------------------------------------------------------------- a job


@dataclass
class ResumableJob:
    """A job: the files to write, and the finished tensors of earlier runs.

    out       the output file, or the prefix of its shards
    sources   the input files
    layouts   the output files
    expected  the record that a new run would write for each tensor; hashes of bytes are not known yet
    whole_source  whether each tensor depends on all of the sources, not only on its own: a changed source leaves none
              as it was, and another file's tensors are not reused
    is_streamed  whether the tensors of the sources arrive one after another, and once: `reuse` compares each with an
              older file's then
    identities  what tells whether the sources have changed; None: path, size and time of each file
    done      tensors that are already in the partial files
    pieces    of other tensors: the pieces that are, by number, with the hashes of their sources and of their bytes
    copied    tensors to copy from another file, each with its record
    resumed   names of the tensors that an earlier run of this job finished
    """

    out: Path
    sources: Sequence[Path]
    expected: Mapping[str, Record]
    layouts: Sequence[Layout] = ()
    whole_source: bool = False
    is_streamed: bool = False
    identities: Sequence[Sequence[object]] | None = None
    done: dict[str, Record] = field(default_factory=dict)
    pieces: dict[str, dict[int, tuple[bytes, bytes]]] = field(default_factory=dict)
    copied: dict[str, tuple[StoredRows, Record]] = field(default_factory=dict)
    resumed: set[str] = field(default_factory=set)
    _old_files: list[OldFile] = field(default_factory=list)
    _settings: Mapping[str, str] = field(default_factory=dict)
    _planned: dict[str, PlannedTensor] = field(default_factory=dict)
    _stale_settings: str = ""  # how the settings of a stale job differ
    _stored_journal: journal.StoredJournal | None = None
    _partial_files: list[tuple[Layout, np.ndarray, bool]] = field(default_factory=list)
    _journal: journal.Journal | None = None

    @property
    def reused(self) -> set[str]:
        """Tensors copied from an older file."""
        return set(self.copied).difference(self.resumed)

    @property
    def journal_path(self) -> Path:
        """The journal beside the partial file."""
        return _journal_path(self.out)

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of the output's headers: all settings that decide its bytes, without source data and importance."""
        digest = hashlib.sha256()
        for layout in self.layouts:
            digest.update(f"{layout.path.name} {layout.size} {len(layout.header)}\n".encode("utf-8", "surrogateescape"))
            digest.update(layout.header)
        return digest.hexdigest()

    def find_interrupted(self, settings: Mapping[str, str], fresh: bool = False) -> None:
        """Look for the files of an interrupted run; with `fresh`, delete them. Rename those of another job as stale.

        `settings` are the job's, by the names that messages use.
        """
        self._settings = settings
        for path in {self.out, *(layout.path for layout in self.layouts)}:
            refuse_live(partial(path))
        if fresh:
            for name in (self.journal_path, _stale(self.journal_path)):
                _discard(name)
            for layout in self.layouts:
                partial(layout.path).unlink(missing_ok=True)
        found = journal.read(self.journal_path)
        if found and found.header.get("job") != self.digest:
            self._stale_settings = self._differences(found)
            _mark_stale(self.journal_path, found)
            found = None
        if not found and (restored := _restore_stale(self.journal_path, self.digest)):
            found, self._stale_settings = restored, ""
        self._stored_journal = found
        self._partial_files = list(self._find_partial_files()) if found else []

    def _differences(self, found: journal.StoredJournal) -> str:
        """How the settings of the journal's job differ from this job's, for a message."""
        theirs = found.header.get("about")
        theirs = theirs if isinstance(theirs, dict) else {}
        differ = [
            f"{name} {theirs[name]!r} instead of {mine!r}" if len(f"{mine}{theirs[name]}") < 80 else f"another {name}"
            for name, mine in self._settings.items()
            if name in theirs and theirs[name] != mine
        ]
        return ", ".join(differ) or "other options or other metadata"

    def find_unchanged(
        self, source: Mapping[str, Rows], planned: Sequence[PlannedTensor], old: OldFile | None, **options: Any
    ) -> Iterator[str]:
        """Find the `planned` tensors that need no encoding; yield messages that say how many there are.

        `options` are those of `pipeline.spread`.
        """
        self._planned = {tensor.name: tensor for tensor in planned}
        stored = self._stored_tensors(planned)
        known = _records(self._stored_journal) if stored and self._stored_journal else {}
        partly = self._stored_journal.pieces if self._stored_journal and not self.whole_source else {}
        unchanged = (
            self._stored_journal is not None and self._stored_journal.header.get("sources") == self._source_identities()
        )
        self._old_files = [file for file in (_open_stale(self.journal_path), old) if file and not self.whole_source]
        arrives_later = self.whole_source or self.is_streamed

        def examine(tensor: PlannedTensor) -> int:
            name, source_hash = tensor.name, functools.cache(lambda: hash_source(source[tensor.name]))
            record = known.get(name)
            if record and name in stored and record.same_encoding(self.expected[name]):
                where, in_place = stored[name]
                same_source = unchanged or (not arrives_later and source_hash() == record.source)
                if same_source and hash_tensor(where) == record.data:
                    self.resumed.add(name)
                    if in_place:
                        self.done[name] = record
                    else:
                        self.copied[name] = where, record
                    return 1
            if not self.is_streamed and self._reuse(tensor, source_hash):
                return 1
            if not arrives_later and name in partly and name in stored and stored[name][1]:
                found = self._finished_pieces(tensor, source[name], stored[name][0], partly[name])
                self.pieces |= {name: found} if found else {}
            return 1

        if known or partly or (self._old_files and not self.is_streamed):
            spread([functools.partial(examine, t) for t in planned], len(planned), unit="tensors", **options)
        return self._summary()

    def reuse(self, planned: PlannedTensor, source: Rows) -> bool:
        """Whether an older file has the tensor as it would come out; it is then in `copied`. For arriving sources."""
        return self._reuse(planned, functools.cache(lambda: hash_source(source)))

    def _reuse(self, tensor: PlannedTensor, source_hash: Callable[[], str]) -> bool:
        """As `reuse`; the source is only read where everything else is the same."""
        for old_file in self._old_files:
            record, stored = old_file.records.get(tensor.name), old_file.tensors.get(tensor.name)
            if record is None or stored is None:
                continue
            same_recipe = record.same_encoding(self.expected[tensor.name]) and _same_layout(stored, tensor)
            same_bytes = same_recipe and source_hash() == record.source
            if same_bytes and hash_tensor(stored) == record.data:
                self.copied[tensor.name] = stored, record
                return True
        return False

    def _finished_pieces(
        self, planned: PlannedTensor, source: Rows, stored: PartialTensor, entries: Sequence[Json]
    ) -> dict[int, tuple[bytes, bytes]]:
        """The pieces of the journal's entries whose source and bytes have the hashes noted there."""
        ranges, found = list(provenance.row_pieces(planned.shape)), dict[int, tuple[bytes, bytes]]()
        for entry in entries:
            record, numbers = _record(entry), range(*_bounds(entry, len(ranges)))
            if not record.same_encoding(self.expected[planned.name]):
                continue
            chosen = [ranges[number] for number in numbers]
            hashes = [_source_hashes(source, chosen), _hashes(stored, chosen)]
            kinds = planned.source.name, planned.type.name
            if [provenance.of_pieces(*each) for each in zip(kinds, hashes)] == [record.source, record.data]:
                found |= dict(zip(numbers, zip(*hashes)))
        return found

    def _source_identities(self) -> list[list[Any]]:
        return file_identities(self.sources) if self.identities is None else [list(one) for one in self.identities]

    def _summary(self) -> Iterator[str]:
        count = len(self.expected)
        if self._stored_journal:
            some = sum(map(len, self.pieces.values()))
            more = f", and {some} pieces of {len(self.pieces)} others" if some else ""
            yield f"resumed: {len(self.resumed)} of {count} tensors were done{more}"
        if self._stale_settings:
            yield f"an interrupted run for {self.out} had {self._stale_settings}; its unchanged tensors are reused"
        if not self.is_streamed:
            yield from self.reuse_summary()

    def reuse_summary(self) -> Iterator[str]:
        """For each older file, how many of its tensors were copied; of a stream, when all have arrived."""
        count = len(self.expected)
        for old in self._old_files:
            n = sum(self.copied[name][0] is old.tensors.get(name) for name in self.reused)
            why = "" if old.records else ", which has no record of what its tensors were made from"
            yield f"reused: {n} of {count} tensors are in {old.path}{why}"

    def _find_partial_files(self) -> Iterator[tuple[Layout, np.ndarray, bool]]:
        """The files that an earlier run of this job wrote, as bytes; True for a partial file, which is resumed.

        A run that was killed while it renamed its files has left some under their final names.
        """
        for layout in self.layouts:
            for path in (partial(layout.path), layout.path):
                if path.is_file() and path.stat().st_size == layout.size:
                    yield layout, map_file(path), path != layout.path
                    break

    def _stored_tensors(self, planned: Iterable[PlannedTensor]) -> dict[str, tuple[PartialTensor, bool]]:
        """Each tensor's bytes in the files of the earlier run, finished or not; True if they are in a partial file."""
        by_name = {t.name: t for t in planned}
        stored: dict[str, tuple[PartialTensor, bool]] = {}
        for layout, data, in_place in self._partial_files:
            for slot in layout.slots:
                tensor, rows = by_name[slot.name], data[slot.offset : slot.offset + slot.nbytes]
                stored[slot.name] = PartialTensor(tensor.shape, tensor.type, rows), in_place
        return stored

    def start(self, writer: StreamWriter) -> None:
        """Start the journal, or continue the one that was found."""
        files = [partial(layout.path).name for layout in self.layouts]
        header = {"job": self.digest, "sources": self._source_identities(), "about": dict(self._settings),
                  "tensors": len(self.expected), "files": files}  # fmt: skip
        found = self._stored_journal
        is_same = found and found.header.get("sources") == header["sources"] and set(found.entries) == set(self.done)
        if not is_same or (found and found.pieces):
            found = None  # the journal is out of date: write a new one
        entries = [asdict(record) for record in self.done.values()]
        for name, pieces in self.pieces.items():
            planned, expected = self._planned[name], self.expected[name]
            entries += [_piece_entry(planned, expected, n, [source], [data]) for n, (source, data) in pieces.items()]
        self._journal = journal.Journal(self.journal_path, header, writer.sync, found, entries)
        writer.skip(self.done)
        for name, pieces in self.pieces.items():
            planned = self._planned[name]
            ranges, row_bytes = list(provenance.row_pieces(planned.shape)), planned.type.row_bytes(planned.shape[-1])
            for number in pieces:
                start, stop = ranges[number]
                writer.count(name, start * row_bytes, (stop - start) * row_bytes)

    def finish(self, record: Record) -> None:
        """Record in the journal that a tensor is complete."""
        assert self._journal is not None
        self._journal.add(asdict(record))

    def finish_pieces(self, planned: PlannedTensor, first: int, source: Sequence[bytes], data: Sequence[bytes]) -> None:
        """Record in the journal that pieces of a tensor, from `first` on, are complete; with hashes of each."""
        assert self._journal is not None
        self._journal.add(_piece_entry(planned, self.expected[planned.name], first, source, data))

    def written(self) -> dict[str, Tensor]:
        """The tensors of the files that are being written; bytes that are not written yet are zero or stale."""
        paths = [path for layout in self.layouts if (path := partial(layout.path)).exists()]
        return gguf.open_parts(paths).tensors

    def close(self) -> None:
        """Write the last entries of the journal and close it."""
        assert self._journal is not None
        self._journal.close()

    def abort(self) -> bool:
        """Close the journal after an error or interrupt. Returns whether a later run can resume; if not, delete it."""
        if self._journal is None:  # the run ended before it started one
            return self._stored_journal is not None
        with suppress(Exception):  # the error that ended the run is the one to report
            self._journal.close()
        if not self._journal.count:
            self.journal_path.unlink(missing_ok=True)
        return self._journal.count > 0

    def remove_leftovers(self) -> None:
        """Delete journal, stale files and temporary files once the output is complete."""
        self.journal_path.unlink(missing_ok=True)
        _discard(_stale(self.journal_path))
        for layout in self.layouts:
            remove_stale(layout.path)


def _piece_entry(
    planned: PlannedTensor, expected: Record, first: int, source: Sequence[bytes], data: Sequence[bytes]
) -> dict[str, Any]:
    """The journal's entry for pieces of a tensor, from `first` on."""
    of_source = provenance.of_pieces(planned.source.name, source)
    record = replace(expected, source=of_source, data=provenance.of_pieces(planned.type.name, data))
    return {**asdict(record), "pieces": [first, first + len(source)]}


def _bounds(entry: Json, count: int) -> tuple[int, int]:
    """The first piece of a journal's entry and the one after its last; (0, 0) for what cannot be."""
    bounds = entry.get("pieces")
    if not isinstance(bounds, list) or len(bounds) != 2 or not all(isinstance(n, int) for n in bounds):
        return 0, 0
    return (bounds[0], bounds[1]) if 0 <= bounds[0] < bounds[1] <= count else (0, 0)


def _hashes(rows: StoredRows, ranges: Iterable[tuple[int, int]]) -> list[bytes]:
    """The hash of the bytes of each range of rows."""
    found = []
    for start, stop in ranges:
        data = rows.rows(start, stop)
        found.append(provenance.of_piece(data))
        release(data)
    return found


def _source_hashes(rows: Rows, ranges: Iterable[tuple[int, int]]) -> list[bytes]:
    """The hash of each range of rows, with its scale."""
    found = []
    for start, stop in ranges:
        data = rows.rows(start, stop)
        found.append(scales.hash_of_piece(rows, data, start))
        release(data)
    return found


def _journal_path(out: Path) -> Path:
    path = partial(out)
    return path.with_name(path.name + JOURNAL)


def unfinished(out: Path) -> tuple[int, int] | None:
    """(finished tensors, all tensors) of an interrupted run for `out`; None if there is no such run.

    A run that was killed right after its output got its name leaves a journal without a partial file: it is complete.
    """
    path = _journal_path(out)
    found = journal.read(path)
    if found is None or not any(file.exists() for file in _files(path, found)):
        return None
    return len(found.entries), int(found.header.get("tensors", 0))


# ----------------------------------------------------------------------------------------------------------- stale jobs


def _stale(path: Path) -> Path:
    """The name that a partial file or a journal gets when it belongs to another job."""
    return path.with_name(path.name.replace(PARTIAL_JOB, STALE))


def _files(journal_path: Path, found: journal.StoredJournal) -> list[Path]:
    """The partial files that a journal describes."""
    names = found.header.get("files")
    listed = [Path(str(name)).name for name in names] if isinstance(names, list) else []
    return [journal_path.with_name(name) for name in listed if name.endswith((PARTIAL_JOB, STALE))]


def _mark_stale(journal_path: Path, found: journal.StoredJournal) -> None:
    """Rename the files of another job. Of two stale jobs, keep the one with more finished tensors."""
    stale = _stale(journal_path)
    before = journal.read(stale)
    if before and len(before.entries) > len(found.entries):
        _discard(journal_path)
        return
    _discard(stale)
    for path in _files(journal_path, found):
        if path.exists():
            os.replace(path, _stale(path))
    os.replace(journal_path, stale)


def _restore_stale(journal_path: Path, job: str) -> journal.StoredJournal | None:
    """Rename the files of a stale job back if it is this job."""
    stale = _stale(journal_path)
    found = journal.read(stale)
    if not found or found.header.get("job") != job:
        return None
    for path in _files(journal_path, found):
        if _stale(path).exists():
            os.replace(_stale(path), path)
    os.replace(stale, journal_path)
    return found


def _open_stale(journal_path: Path) -> OldFile | None:
    stale = _stale(journal_path)
    found = journal.read(stale)
    files = [path for path in map(_stale, _files(stale, found)) if path.exists()] if found else []
    if not found or not files:
        return None
    return OldFile(files[0], gguf.open_parts(files).tensors, _records(found))


def _discard(journal_path: Path) -> None:
    """Delete a journal and the partial files that it describes."""
    found = journal.read(journal_path)
    for path in _files(journal_path, found) if found else ():
        (path if journal_path.name.endswith(PARTIAL_JOB + JOURNAL) else _stale(path)).unlink(missing_ok=True)
    journal_path.unlink(missing_ok=True)


def file_identities(paths: Sequence[Path]) -> list[list[Any]]:
    """Path, size and modification time of each file: a cheap test of whether it has changed."""
    found = []
    for path in paths:
        try:
            state = path.stat()
        except OSError as error:
            raise FormatError(f"{path}: cannot be read: {error.strerror or error}") from error
        found.append([str(path.resolve()), state.st_size, state.st_mtime_ns])
    return found


def _same_layout(a: Rows, b: PlannedTensor) -> bool:
    return a.type is b.type and tuple(a.shape) == tuple(b.shape)
