"""Streaming into files whose layout is known in full before the first byte: what GGUF and safetensors writers share.

Each file gets its final size and its header when it is begun; tensors are then put at their offsets, in the order of
the layout, in as many pieces as the caller likes. Memory stays at one piece. The disk works meanwhile: what was written
is synced from time to time by a thread, so that the sync at the end, which makes the file durable, finds little to do.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import numpy as np

from quantkit.errors import DataError
from quantkit.files.atomic import AtomicFile, allow_open_files, os_errors, publish, require_space

Self = TypeVar("Self", bound="StreamWriter")

_SYNC_EVERY = 64 << 20  # bytes written between two syncs; smaller files are synced once, at the end
_sync_data = getattr(os, "fdatasync", os.fsync)  # which macOS and Windows lack


@dataclass(frozen=True)
class Slot:
    """Where a tensor goes in its file."""

    name: str
    nbytes: int
    offset: int
    what: str  # "q4_K data of shape (576, 576)", for messages


@dataclass(frozen=True)
class Layout:
    """One file: what stands at its start, the tensors in the order they will come, its size."""

    path: Path
    header: bytes
    slots: Sequence[Slot]
    size: int


class StreamWriter:
    """Writes the files of `layouts`; they appear together when all are complete, the first one last.

    Used as a context manager: leaving the block completes the files; an exception in it, or a tensor that is not
    complete, removes what was written.
    """

    def __init__(self, path: Path, layouts: Sequence[Layout]):
        self.path = path
        self.paths = [layout.path for layout in layouts]
        self._layouts = layouts
        self._slots = [(slot, i) for i, layout in enumerate(layouts) for slot in layout.slots]
        self._files: list[AtomicFile] = []
        self._index = 0  # of the tensor being written
        self._written = 0  # bytes of it
        self._syncer = _Syncer()
        names = [slot.name for slot, _ in self._slots]
        if len(set(names)) < len(names):
            twice = next(name for i, name in enumerate(names) if name in names[:i])
            raise DataError(f"{path}: tensor {twice} is to be written twice")
        require_space(path.parent, sum(layout.size for layout in layouts))
        allow_open_files(len(layouts))
        try:
            self._begin(0)
        except BaseException:
            self.abort()
            raise

    def write(self, name: str, data: Any) -> None:
        """Append bytes, uint8 of any shape, to tensor `name`: the one begun, or the next in order.

        DataError when it is another's turn or when it gets more bytes than it has.
        """
        if isinstance(data, (bytes, bytearray, memoryview)):
            data = np.frombuffer(data, np.uint8)
        if not isinstance(data, np.ndarray) or data.dtype != np.uint8:
            got = getattr(data, "dtype", type(data).__name__)
            raise DataError(f"{self.path}: tensor {name}: expected uint8 data, got {got}")
        if data.nbytes == 0:
            return
        self._skip_empty()
        if self._index == len(self._slots):
            raise DataError(f"{self.path}: tensor {name}: all {len(self._slots)} tensors are written already")
        slot, number = self._slots[self._index]
        total = self._written + data.nbytes
        if name != slot.name:
            raise DataError(
                f"{self.path}: it is the turn of tensor {slot.name} ({self._written} of {slot.nbytes} bytes written), "
                f"not of {name}"
            )
        if total > slot.nbytes:
            raise DataError(f"{self.path}: tensor {name}: {total} bytes, its {slot.what} are {slot.nbytes}")
        file = self._begin(number)
        with os_errors(file.temporary, f"write tensor {name}"):
            if self._written == 0:
                file.stream.seek(slot.offset)
            file.stream.write(np.ascontiguousarray(data).data)
            self._syncer.wrote(file, data.nbytes)
        self._written = total
        if total == slot.nbytes:
            self._index += 1
            self._written = 0

    def close(self) -> None:
        """Check that every tensor is complete and give the files their final names."""
        try:
            self._skip_empty()
            if self._index < len(self._slots):
                slot, _ = self._slots[self._index]
                raise DataError(
                    f"{self.path}: {self._index} of {len(self._slots)} tensors were written; tensor {slot.name} has "
                    f"{self._written} of {slot.nbytes} bytes"
                )
            file = self._begin(len(self._layouts) - 1)
            with os_errors(file.temporary, "write"):
                self._syncer.finish()
            publish(self._files)
        finally:
            self.abort()

    def abort(self) -> None:
        """Remove what was written. Does nothing to files that are complete."""
        self._syncer.abandon()
        for file in self._files:
            file.discard()

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def _skip_empty(self) -> None:
        """Pass over tensors of no bytes, which are complete without being written."""
        while self._index < len(self._slots) and self._slots[self._index][0].nbytes == 0:
            self._index += 1

    def _begin(self, number: int) -> AtomicFile:
        """File `number`, begun together with all before it."""
        while len(self._files) <= number:
            layout = self._layouts[len(self._files)]
            file = AtomicFile(layout.path)
            self._files.append(file)
            with os_errors(file.temporary, "write the header"):
                os.ftruncate(file.stream.fileno(), layout.size)  # so that padding is there without being written
                file.stream.write(layout.header)
        return self._files[number]


class _Syncer:
    """Has a thread make durable what was written to a file, whenever that is much and the thread is idle."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._running: Future[None] | None = None
        self._behind = 0  # bytes written since the last sync was begun

    def wrote(self, file: AtomicFile, nbytes: int) -> None:
        """Note what was written to `file`. Raises the OSError of a sync that failed: the system tells it only once."""
        self._behind += nbytes
        if self._behind < _SYNC_EVERY or not (self._running is None or self._running.done()):
            return
        self._pool = self._pool or ThreadPoolExecutor(1, thread_name_prefix="quantkit-sync")
        if self._running is not None:
            self._running.result()
        self._running = self._pool.submit(_sync_data, file.stream.fileno())
        self._behind = 0

    def finish(self) -> None:
        """Wait for the sync that is running."""
        if self._running is not None:
            self._running.result()
        self.abandon()

    def abandon(self) -> None:
        """Wait without asking how it went: the files are unwanted, but may not be closed under a running sync."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None
