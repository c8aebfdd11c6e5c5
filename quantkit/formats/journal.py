"""A journal of a file that is being written: which parts are complete on the disk, so that a run can be resumed.

    {"journal": 1, "job": "…", …}          the job, by a digest of everything that decides its bytes
    {"name": "blk.0.attn_q.weight", …}     an entry for each complete part
    {"name": …, "pieces": [3, 7], …}       an entry for pieces 3 to 6 of a part

Lines of JSON. An entry is written after its data were synced, then synced itself. A thread does both a few times a
second, so the work does not wait. An incomplete last line, left by a crash, is cut off when the run is resumed. (The
lines of evaluate/chunk_log.py are results, not statements about another file: they need no sync and no thread.)
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from quantkit.errors import FormatError
from quantkit.formats.atomic import os_errors, writing
from quantkit.formats.owned import open_own, read_own
from quantkit.inputs import json_input
from quantkit.inputs.json_input import Json

VERSION = 1
_EVERY = 0.2  # seconds between two syncs


@dataclass(frozen=True)
class StoredJournal:
    """A journal that an earlier run left: its first line, its entries by name, and `size`, the bytes of these lines.

    `pieces` are the entries for pieces of parts, by name; those of parts that are complete are left out.
    """

    header: Json
    entries: Mapping[str, Json]
    size: int
    pieces: Mapping[str, Sequence[Json]] = field(default_factory=dict)


def read(path: Path) -> StoredJournal | None:
    """Read the journal at a path, up to the first incomplete line; None if it is missing, empty or of another version.

    QuantkitError if no earlier run left the file (`owned`).
    """
    try:
        data = read_own(path)
    except FileNotFoundError:
        return None
    lines: list[dict[str, Any]] = []
    size = 0
    for line in data.splitlines(keepends=True):
        entry = _parsed(line)
        if entry is None or ("journal" if not lines else "name") not in entry:
            break
        lines.append(entry)
        size += len(line)
    if not lines or lines[0]["journal"] != VERSION:
        return None
    entries = {str(entry["name"]): entry for entry in lines[1:] if "pieces" not in entry}
    pieces: dict[str, list[Json]] = {}
    for entry in lines[1:]:
        if "pieces" in entry and (name := str(entry["name"])) not in entries:
            pieces.setdefault(name, []).append(entry)
    return StoredJournal(lines[0], entries, size, pieces)


def _parsed(line: bytes) -> dict[str, Any] | None:
    if not line.endswith(b"\n"):
        return None
    try:
        found = json_input.parse(line, "journal")
    except FormatError:
        return None
    return found if isinstance(found, dict) else None


def _lines(entries: Sequence[Json]) -> bytes:
    return "".join(json.dumps(entry) + "\n" for entry in entries).encode()


class Journal:
    """Writes a journal. `sync` syncs all data written so far. Call `close` before the data's files are closed."""

    def __init__(
        self,
        path: Path,
        header: Json,
        sync: Callable[[], None],
        found: StoredJournal | None = None,
        entries: Sequence[Json] = (),
    ):
        """Resume the journal `found`, or start a new one with `entries` for what is done and synced already."""
        self.path = path
        self.count = len(found.entries if found else entries)  # of entries in the file
        self._sync = sync
        self._waiting: list[Json] = []
        self._change = threading.Condition()
        self._closing = False
        self._failed: BaseException | None = None
        with os_errors(path, "write"):
            if not found:
                with writing(path, own=True) as stream:
                    stream.write(_lines([{"journal": VERSION, **header}, *entries]))
            self._file: BinaryIO = os.fdopen(open_own(path, os.O_RDWR), "r+b")  # closed by `close`
            if found:
                self._file.truncate(found.size)
            self._file.seek(0, os.SEEK_END)
        self._thread = threading.Thread(target=self._work, name="quantkit-journal", daemon=True)
        self._thread.start()

    def add(self, entry: Json) -> None:
        """Record a part as done. Raises the exception of the thread, if it had one."""
        with self._change:
            if self._failed is not None:
                raise self._failed
            self._waiting.append(entry)
            self._change.notify()

    def close(self) -> None:
        """Write all recorded entries and end the thread. Raises its exception, if it had one."""
        with self._change:
            self._closing = True
            self._change.notify()
        self._thread.join()
        self._file.close()
        if self._failed is not None:
            raise self._failed

    def _append(self, entries: list[Json]) -> None:
        self._file.write(_lines(entries))
        self._file.flush()
        os.fsync(self._file.fileno())

    def _work(self) -> None:
        try:
            while True:
                with self._change:
                    self._change.wait_for(lambda: self._waiting or self._closing)
                    if not self._waiting:
                        return
                    entries, self._waiting = self._waiting, []
                with os_errors(self.path, "write"):
                    self._sync()
                    self._append(entries)
                with self._change:
                    self.count += len(entries)
                    self._change.wait_for(lambda: self._closing, _EVERY)
        except BaseException as error:  # raised by the next `add`, or by `close`
            with self._change:
                self._failed = error
