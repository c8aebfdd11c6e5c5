"""`StreamWriter`, the base of the GGUF and safetensors writers: files whose layout is known before the first byte.

Each file gets its final size and its header when it is started. `write` appends tensors in the order of the layout, in
as many pieces as the caller likes. With `put`, several threads write pieces at their offsets. Memory stays at one
piece. A thread syncs the written data from time to time, so that the sync at the end has little left to do.

`durable=False` is for files that can be made again from their inputs: nothing is synced, as with `cp`, and the system
writes the data in its own time. In both cases a process that dies leaves no file under a final name. After a power loss
within the next half minute or so, a file that is not durable may exist with data missing.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from quantkit.errors import DataError
from quantkit.formats.atomic import (
    PARTIAL_JOB,
    AtomicFile,
    allow_open_files,
    os_errors,
    publish,
    refuse_directory,
    require_space,
)
from quantkit.formats.owned import followed

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

Bytes = np.ndarray | bytes | bytearray | memoryview
"""What `write` and `put` take: uint8 of any shape."""

Self = TypeVar("Self", bound="StreamWriter")

_SYNC_EVERY = 64 << 20  # bytes written between two syncs; smaller files are synced once, at the end
_sync_data = getattr(os, "fdatasync", os.fsync)  # which macOS and Windows lack


class Slot(NamedTuple):
    """The place of a tensor in its file."""

    name: str
    nbytes: int
    offset: int
    what: str  # "q4_K data of shape (576, 576)", for messages


class Layout(NamedTuple):
    """One file: its header, its tensors in the order in which they are written, its size in bytes."""

    path: Path
    header: bytes
    slots: Sequence[Slot]
    size: int


class StreamWriter:
    """Writes the files of `layouts`; they appear together when all are complete, the first one last.

    Used as a context manager: leaving the block completes the files. An exception in it, or an incomplete tensor,
    removes the partial files.

    With `resumable` the partial files stay instead. Another writer of the same layouts resumes them; `skip` names the
    tensors that are complete.
    """

    def __init__(self, path: Path, layouts: Sequence[Layout], durable: bool = True, resumable: bool = False):
        self.path = path
        self.durable = durable
        self.resumable = resumable
        self.paths = [layout.path for layout in layouts]
        self._layouts = layouts
        self._slots = [(slot, i) for i, layout in enumerate(layouts) for slot in layout.slots]
        self._files: list[AtomicFile] = []
        self._written = [0] * len(self._slots)  # bytes of each tensor
        self._index = 0  # of the first that is not complete
        self._number = {slot.name: i for i, (slot, _) in enumerate(self._slots)}
        self._lock = threading.Lock()
        self._syncer = _Syncer()
        names = [slot.name for slot, _ in self._slots]
        if len(set(names)) < len(names):
            twice = next(name for i, name in enumerate(names) if name in names[:i])
            raise DataError(f"{path}: tensor {twice} is to be written twice")
        allocated = sum(_blocks(partial(layout.path)) for layout in layouts) if resumable else 0
        require_space(path.parent, sum(layout.size for layout in layouts) - allocated)
        allow_open_files(len(layouts))
        try:
            self._begin(0)
        except BaseException:
            self.abort()
            raise

    def skip(self, names: Collection[str]) -> None:
        """Count tensors as written: an interrupted run completed them."""
        for name in names:
            index = self._number[name]
            self._written[index] = self._slots[index][0].nbytes

    def count(self, name: str, start: int, nbytes: int) -> None:
        """Count bytes of tensor `name` as written: another process, or an interrupted run, has written them."""
        self._claim(name, start, nbytes)

    def open_files(self) -> None:
        """Start all files, so that other processes find them with their sizes and headers."""
        for file in [self._begin(number) for number in range(len(self._layouts))]:
            with os_errors(file.temporary, "write the header"):
                file.stream.flush()
                os.fsync(file.stream.fileno())

    def sync(self) -> None:
        """Sync the data written so far. Other threads may write meanwhile."""
        with self._lock:
            files = list(self._files)
        for file in files:
            _sync_data(file.stream.fileno())

    def rewrite_headers(self, headers: Sequence[bytes]) -> None:
        """Replace the header of each file by one of the same size."""
        self._begin(len(self._layouts) - 1)
        for layout, file, header in zip(self._layouts, self._files, headers, strict=True):
            if len(header) != len(layout.header):
                raise DataError(f"{layout.path}: a header of {len(header)} bytes, its place has {len(layout.header)}")
            with os_errors(file.temporary, "write the header"):
                file.stream.flush()
                file.write_at(0, memoryview(header))

    def write(self, name: str, data: Bytes) -> None:
        """Append bytes, uint8 of any shape, to tensor `name`: the incomplete one, or the next in order.

        DataError if another tensor comes next, or if the tensor gets more bytes than it has.
        """
        data = self._bytes(name, data)
        if data.nbytes == 0:
            return
        self._skip_complete()
        if self._index == len(self._slots):
            raise DataError(f"{self.path}: tensor {name}: all {len(self._slots)} tensors are written already")
        slot, _ = self._slots[self._index]
        if name != slot.name:
            raise DataError(
                f"{self.path}: tensor {slot.name} comes next ({self._written[self._index]} of {slot.nbytes} "
                f"bytes written), not {name}"
            )
        self.put(name, self._written[self._index], data)

    def put(self, name: str, start: int, data: Bytes) -> None:
        """Write bytes of tensor `name`, from its byte `start` on. Several threads may, each its own part.

        Write each byte once: a tensor counts as complete when it got as many bytes as it has. DataError for more.
        """
        data = self._bytes(name, data)
        if data.nbytes == 0 and name in self._number:
            return
        file, offset = self._claim(name, start, data.nbytes)
        with os_errors(file.temporary, f"write tensor {name}"):
            file.write_at(offset, np.ascontiguousarray(data).data.cast("B"))
            if self.durable:
                with self._lock:
                    self._syncer.wrote(file, data.nbytes)

    def put_direct(self, name: str, start: int, nbytes: int, send: Callable[[int, int], bool]) -> bool:
        """Let `send(descriptor, offset)` write bytes of tensor `name` to the open file itself.

        False if it did not write all of them, or if the files are durable: then call `put`. DataError as for `put`.
        """
        if self.durable:
            return False
        file, offset = self._claim(name, start, nbytes)
        if send(file.stream.fileno(), offset):
            return True
        with self._lock:
            self._written[self._number[name]] -= nbytes
        return False

    def _claim(self, name: str, start: int, nbytes: int) -> tuple[AtomicFile, int]:
        """Count bytes of a tensor as written; returns their file and the offset in it."""
        if name not in self._number:
            raise DataError(f"{self.path}: there is no tensor {name} to write")
        index = self._number[name]
        slot, number = self._slots[index]
        with self._lock:
            total = max(self._written[index], start) + nbytes
            if total > slot.nbytes:
                raise DataError(f"{self.path}: tensor {name}: {total} bytes, its {slot.what} are {slot.nbytes}")
            self._written[index] += nbytes
            return self._begin(number), slot.offset + start

    def _bytes(self, name: str, data: Bytes) -> np.ndarray:
        if isinstance(data, (bytes, bytearray, memoryview)):
            data = np.frombuffer(data, np.uint8)
        if not isinstance(data, np.ndarray) or data.dtype != np.uint8:
            got = getattr(data, "dtype", type(data).__name__)
            raise DataError(f"{self.path}: tensor {name}: expected uint8 data, got {got}")
        return data

    def close(self) -> None:
        """Check that every tensor is complete and give the files their final names."""
        try:
            self._skip_complete()
            if self._index < len(self._slots):
                slot, _ = self._slots[self._index]
                complete = sum(written == each.nbytes for written, (each, _) in zip(self._written, self._slots))
                raise DataError(
                    f"{self.path}: {complete} of {len(self._slots)} tensors were written; tensor {slot.name} has "
                    f"{self._written[self._index]} of {slot.nbytes} bytes"
                )
            file = self._begin(len(self._layouts) - 1)
            with os_errors(file.temporary, "write"):
                self._syncer.finish()
            publish(self._files, self.durable)
        finally:
            self.abort()

    def abort(self) -> None:
        """Remove the partial files, or leave them if they are resumable. Complete files stay."""
        self._syncer.abandon()
        for file in self._files:
            file.discard(self.resumable)

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def _skip_complete(self) -> None:
        """Move on to the first incomplete tensor. Tensors of no bytes are complete from the start."""
        while self._index < len(self._slots) and self._written[self._index] == self._slots[self._index][0].nbytes:
            self._index += 1

    def _begin(self, number: int) -> AtomicFile:
        """File `number`, started together with all files before it."""
        while len(self._files) <= number:
            layout = self._layouts[len(self._files)]
            file = AtomicFile(layout.path, self.resumable)
            self._files.append(file)
            with os_errors(file.temporary, "write the header"):
                file.reserve(layout.size)  # so padding need not be written
                file.stream.write(layout.header)
                file.stream.flush()  # calibration reads tensors of the partial file
        return self._files[number]


def partial(path: Path) -> Path:
    """The name of the resumable partial file of an output. QuantkitError for a directory."""
    refuse_directory(path)
    path = followed(path)
    return path.with_name(path.name + PARTIAL_JOB)


def _blocks(path: Path) -> int:
    """Bytes that a file occupies on the disk; 0 if there is no such file."""
    try:
        return path.stat().st_blocks * 512
    except (FileNotFoundError, AttributeError):  # Windows has no st_blocks
        return 0


class _Syncer:
    """Syncs a file in a thread, whenever 64 MiB were written since the last sync and the thread is idle."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._running: Future[None] | None = None
        self._behind = 0  # bytes written since the last sync was started

    def wrote(self, file: AtomicFile, nbytes: int) -> None:
        """Count bytes written to `file`. Raises the OSError of a failed sync: the system reports it only once."""
        self._behind += nbytes
        if self._behind < _SYNC_EVERY or not (self._running is None or self._running.done()):
            return
        from concurrent.futures import ThreadPoolExecutor

        self._pool = self._pool or ThreadPoolExecutor(1, thread_name_prefix="quantkit-sync")
        if self._running is not None:
            self._running.result()
        self._running = self._pool.submit(_sync_data, file.stream.fileno())
        self._behind = 0

    def finish(self) -> None:
        """Wait for the running sync; raises its OSError."""
        if self._running is not None:
            self._running.result()
        self.abandon()

    def abandon(self) -> None:
        """Wait for the running sync and ignore its result: no file may be closed while it is being synced."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None
