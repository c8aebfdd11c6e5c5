"""What of a job is done already: by a run of it that ended early, or in an older file.

A run writes OUT.partial-job and beside it a journal (formats/journal.py): which tensors are in there and a `Record` of
what each was made of. The same command goes on from there. A tensor counts as done when

- the journal is of this very job: the same headers to the last byte, so the same types, recipe, options and metadata;
- its record has the importance and the codec that it would be made with now;
- its source is what it was: each file read has the path, the size and the time of change that it had, or else the
  tensor is read and hashes to the same;
- its bytes in the partial file hash to what the record says.

A run of another job that ended early, with other options, is put aside as OUT.partial-old until there is an output:
what stays the same is taken over from it as from an older file (`Old`). There the records stand in the metadata, and
sources are always read: hashing them takes a tenth of the time that encoding them would, or less.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from quantkit.errors import FormatError
from quantkit.formats import gguf, journal, provenance
from quantkit.formats.atomic import JOURNAL, KEPT, refuse_live, remove_stale
from quantkit.formats.mapping import map_file, release
from quantkit.formats.pipeline import spread
from quantkit.formats.provenance import Record, Rows
from quantkit.formats.stream import Layout, StreamWriter, partial
from quantkit.types import QuantType

if TYPE_CHECKING:
    from quantkit.recipe import PlannedTensor


ASIDE = ".partial-old"


@dataclass(frozen=True)
class Stored:
    """A tensor's bytes in a file that may be no whole one yet."""

    shape: tuple[int, ...]
    type: QuantType
    data: np.ndarray

    def rows(self, start: int, stop: int) -> np.ndarray:
        return self.type.rows_of(self.data, self.shape[-1], start, stop)


def hash_of(tensor: Rows) -> str:
    """The hash of a tensor's type and bytes, which are read for it."""

    def pieces() -> Iterable[bytes]:
        for start, stop in provenance.row_pieces(tensor.shape):
            data = tensor.rows(start, stop)
            yield provenance.of_piece(data)
            release(data)

    return provenance.of_pieces(tensor.type.name, pieces())


# -------------------------------------------------------------------------------------------------------- an older file


@dataclass(frozen=True)
class Old:
    """A file made before, of which tensors may be taken over: what it holds and what that was made of."""

    path: Path
    tensors: Mapping[str, Rows]
    records: Mapping[str, Record]


def open_old(path: Path) -> Old:
    """A file, any member of a set, or the OUT.partial-job of a run that ended early."""
    found = journal.read(path.with_name(path.name + JOURNAL))
    file = gguf.open(path)
    return Old(path, file.tensors, _records(found) if found else provenance.records(file.metadata))


def open_parts(paths: Sequence[Path]) -> Old:
    """Members of a set, others of which may be missing. Records are in the first."""
    file = gguf.open_parts(paths)
    return Old(paths[0], file.tensors, provenance.records(file.metadata))


def _records(found: journal.Found) -> dict[str, Record]:
    """The records that a journal's entries are. What one lacks makes it like no other."""
    names = Record.__dataclass_fields__
    return {name: Record(**{key: str(entry.get(key)) for key in names}) for name, entry in found.entries.items()}


# ---------------------------------------------------------------------------------------------------------------- a job


@dataclass
class Job:
    """A run: what it is to write, what is found of earlier ones.

    sources  the files that are read             wanted   a record of each tensor, with hashes that are still unknown
    layouts  the files that are written          done     tensors that are in the partial files of an earlier run
    resumed  what an earlier run did             taken    tensors to be copied from where they are
    """

    out: Path
    sources: Sequence[Path]
    wanted: Mapping[str, Record]
    layouts: Sequence[Layout] = ()
    done: dict[str, Record] = field(default_factory=dict)
    taken: dict[str, tuple[Rows, Record]] = field(default_factory=dict)
    resumed: set[str] = field(default_factory=set)
    _about: Mapping[str, str] = field(default_factory=dict)
    _others: str = ""  # in what a job that was put aside differs
    _found: journal.Found | None = None
    _there: list[tuple[Layout, np.ndarray, bool]] = field(default_factory=list)
    _journal: journal.Journal | None = None

    @property
    def reused(self) -> set[str]:
        """Tensors taken from an older file."""
        return set(self.taken).difference(self.resumed)

    @property
    def journal_path(self) -> Path:
        return journal_of(self.out)

    @functools.cached_property
    def number(self) -> str:
        """A digest of all that decides the bytes of the output, but for those of its source and its importance."""
        digest = hashlib.sha256()
        for layout in self.layouts:
            digest.update(f"{layout.path.name} {layout.size} {len(layout.header)}\n".encode("utf-8", "surrogateescape"))
            digest.update(layout.header)
        return digest.hexdigest()

    def find(self, about: Mapping[str, str], fresh: bool = False) -> None:
        """Look for what an earlier run left; with `fresh` remove it. What is of another job is put aside.

        `about` is what the job is made with, by what a message is to call it.
        """
        self._about = about
        for path in {self.out, *(layout.path for layout in self.layouts)}:
            refuse_live(partial(path))
        if fresh:
            for name in (self.journal_path, _aside(self.journal_path)):
                _discard(name)
            for layout in self.layouts:
                partial(layout.path).unlink(missing_ok=True)
        found = journal.read(self.journal_path)
        if found and found.header.get("job") != self.number:
            self._others = self._differences(found)
            _put_aside(self.journal_path, found)
            found = None
        if not found and (back := _bring_back(self.journal_path, self.number)):
            found, self._others = back, ""
        self._found = found
        self._there = list(self._parts()) if found else []

    def _differences(self, found: journal.Found) -> str:
        """In what a found job differs from this one."""
        theirs = found.header.get("about")
        theirs = theirs if isinstance(theirs, dict) else {}
        differ = [
            f"{name} {theirs[name]!r} instead of {mine!r}" if len(f"{mine}{theirs[name]}") < 80 else f"another {name}"
            for name, mine in self._about.items()
            if name in theirs and theirs[name] != mine
        ]
        return ", ".join(differ) or "other options or other metadata"

    def check(
        self, source: Mapping[str, Rows], wanted: Sequence[PlannedTensor], old: Old | None, **options: Any
    ) -> Iterator[str]:
        """Find out which of the `wanted` tensors need not be made again, and tell it in lines to be printed.

        `options` are those of `pipeline.spread`.
        """
        places = self._places(wanted)
        known = _records(self._found) if places and self._found else {}
        unchanged = self._found is not None and self._found.header.get("sources") == _identities(self.sources)
        olds = [each for each in (_open_aside(self.journal_path), old) if each]

        def look(planned: PlannedTensor) -> int:
            name, actual = planned.name, functools.cache(lambda: hash_of(source[planned.name]))
            record = known.get(name)
            if record and name in places and record.made_like(self.wanted[name]):
                where, in_place = places[name]
                if (unchanged or actual() == record.source) and hash_of(where) == record.data:
                    self.resumed.add(name)
                    if in_place:
                        self.done[name] = record
                    else:
                        self.taken[name] = where, record
                    return 1
            for each in olds:
                record, tensor = each.records.get(name), each.tensors.get(name)
                like = record and tensor and record.made_like(self.wanted[name]) and _alike(tensor, planned)
                if record and tensor and like and actual() == record.source and hash_of(tensor) == record.data:
                    self.taken[name] = tensor, record
                    return 1
            return 1

        if known or any(each.records for each in olds):
            spread([functools.partial(look, t) for t in wanted], len(wanted), unit="tensors", **options)
        return self._summary(olds)

    def _summary(self, olds: Sequence[Old]) -> Iterator[str]:
        count = len(self.wanted)
        if self._found:
            yield f"resumed: {len(self.resumed)} of {count} tensors were done"
        if self._others:
            yield f"an earlier run for {self.out} had {self._others}; what stays the same is taken over"
        for old in olds:
            n = sum(self.taken[name][0] is old.tensors.get(name) for name in self.reused)
            why = "" if old.records else ", which does not say what its tensors were made of"
            yield f"reused: {n} of {count} tensors are in {old.path}{why}"

    def _parts(self) -> Iterator[tuple[Layout, np.ndarray, bool]]:
        """The files that a run of this job wrote, as bytes; True for a partial file, which is gone on with.

        A run that was killed while it gave its files their names left some under those.
        """
        for layout in self.layouts:
            for path in (partial(layout.path), layout.path):
                if path.is_file() and path.stat().st_size == layout.size:
                    yield layout, map_file(path), path != layout.path
                    break

    def _places(self, wanted: Iterable[PlannedTensor]) -> dict[str, tuple[Stored, bool]]:
        """Where each tensor is that such a run may have written."""
        kinds = {t.name: t for t in wanted}
        places: dict[str, tuple[Stored, bool]] = {}
        for layout, data, in_place in self._there:
            for slot in layout.slots:
                kind, stored = kinds[slot.name], data[slot.offset : slot.offset + slot.nbytes]
                places[slot.name] = Stored(kind.shape, kind.type, stored), in_place
        return places

    def start(self, writer: StreamWriter) -> None:
        """Begin the journal, or go on with it."""
        files = [partial(layout.path).name for layout in self.layouts]
        header = {"job": self.number, "sources": _identities(self.sources), "about": dict(self._about),
                  "tensors": len(self.wanted), "files": files}  # fmt: skip
        found = self._found
        if found and (found.header.get("sources") != header["sources"] or set(found.entries) != set(self.done)):
            found = None  # what it says is no longer so
        entries = [asdict(record) for record in self.done.values()]
        self._journal = journal.Journal(self.journal_path, header, writer.sync, found, entries)
        writer.skip(self.done)

    def finish(self, record: Record) -> None:
        """Note that a tensor is complete."""
        assert self._journal is not None
        self._journal.add(asdict(record))

    def close(self) -> None:
        """Have all that is complete noted."""
        assert self._journal is not None
        self._journal.close()

    def give_up(self) -> bool:
        """End a run early; whether there is anything to go on with. If not, nothing is left."""
        if self._journal is None:  # it did not come to that
            return self._found is not None
        with suppress(Exception):  # what ended the run is what is told
            self._journal.close()
        if not self._journal.count:
            self.journal_path.unlink(missing_ok=True)
        return self._journal.count > 0

    def end(self) -> None:
        """Remove what is of no use when the output is there."""
        self.journal_path.unlink(missing_ok=True)
        _discard(_aside(self.journal_path))
        for layout in self.layouts:
            remove_stale(layout.path)


def journal_of(out: Path) -> Path:
    path = partial(out)
    return path.with_name(path.name + JOURNAL)


def unfinished(out: Path) -> tuple[int, int] | None:
    """How many tensors of how many a run that ended early left done for `out`; None where there is no such run."""
    found = journal.read(journal_of(out))
    return (len(found.entries), int(found.header.get("tensors", 0))) if found else None


# ------------------------------------------------------------------------------------------------------------ put aside


def _aside(path: Path) -> Path:
    """Where the partial file or the journal of another job goes."""
    return path.with_name(path.name.replace(KEPT, ASIDE))


def _files(journal_path: Path, found: journal.Found) -> list[Path]:
    """The partial files that a journal is about."""
    names = found.header.get("files")
    listed = [Path(str(name)).name for name in names] if isinstance(names, list) else []
    return [journal_path.with_name(name) for name in listed if name.endswith((KEPT, ASIDE))]


def _put_aside(journal_path: Path, found: journal.Found) -> None:
    """Rename what a run of another job left. Of two such the one that had more done stays."""
    aside = _aside(journal_path)
    before = journal.read(aside)
    if before and len(before.entries) > len(found.entries):
        _discard(journal_path)
        return
    _discard(aside)
    for path in _files(journal_path, found):
        if path.exists():
            os.replace(path, _aside(path))
    os.replace(journal_path, aside)


def _bring_back(journal_path: Path, job: str) -> journal.Found | None:
    """Take a job that was put aside up again, if it is this one."""
    aside = _aside(journal_path)
    found = journal.read(aside)
    if not found or found.header.get("job") != job:
        return None
    for path in _files(journal_path, found):
        if _aside(path).exists():
            os.replace(_aside(path), path)
    os.replace(aside, journal_path)
    return found


def _open_aside(journal_path: Path) -> Old | None:
    aside = _aside(journal_path)
    found = journal.read(aside)
    files = [path for path in map(_aside, _files(aside, found)) if path.exists()] if found else []
    if not found or not files:
        return None
    return Old(files[0], gguf.open_parts(files).tensors, _records(found))


def _discard(journal_path: Path) -> None:
    """Remove a journal and the partial files that it is about."""
    found = journal.read(journal_path)
    for path in _files(journal_path, found) if found else ():
        (path if journal_path.name.endswith(KEPT + JOURNAL) else _aside(path)).unlink(missing_ok=True)
    journal_path.unlink(missing_ok=True)


def _identities(paths: Sequence[Path]) -> list[list[Any]]:
    """What tells cheaply whether a file is still what it was: its place, size and time of change."""
    found = []
    for path in paths:
        try:
            state = path.stat()
        except OSError as error:
            raise FormatError(f"{path}: cannot be read: {error.strerror or error}") from error
        found.append([str(path.resolve()), state.st_size, state.st_mtime_ns])
    return found


def _alike(a: Rows, b: PlannedTensor) -> bool:
    return a.type is b.type and tuple(a.shape) == tuple(b.shape)
