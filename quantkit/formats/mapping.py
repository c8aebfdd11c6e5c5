"""A file as read-only memory.

Memory of a mapped file is the file's own. If another program makes the file shorter, touching what is gone ends the
process with SIGBUS, which Python cannot catch. `require_whole` looks at the size again, with one system call; readers
call it when a tensor's bytes are asked for, a chunk is read or a batch begins. So a file that became shorter before
such a moment is a FormatError. One that becomes shorter while its bytes are being used still ends the process.
"""

from __future__ import annotations

import mmap
import os
import stat
from pathlib import Path

import numpy as np

from quantkit.errors import FormatError


def map_file(path: Path) -> np.ndarray:
    """The bytes of a regular file as read-only uint8[size], mapped, not read. The mapping lives as long as its views.

    FormatError for what is missing, unreadable, empty or not a regular file (opening a pipe would wait for ever).
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise FormatError(f"{path}: not a regular file")
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size == 0:  # which mmap refuses with a ValueError
                raise FormatError(f"{path}: the file is empty (0 bytes)")
            return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    except OSError as error:
        raise FormatError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # a NUL in the name; a file that shrank since fstat
        raise FormatError(f"{path}: cannot be read: {error}") from error


def require_whole(view: np.ndarray, path: Path) -> None:
    """FormatError where the mapped file behind `view` is shorter now than when it was opened."""
    mapped = _mapping(_whole(view))
    if mapped is not None and (size := mapped.size()) < len(mapped):
        raise FormatError(
            f"{path}: the file has {size} bytes, it had {len(mapped)} when it was opened: another program changed it; "
            "restore it and run the command again"
        )


# A page that is touched brings up to 2 MiB around it along, so also some that were let go of before.
_AROUND = 4 << 20


def release(view: np.ndarray) -> None:
    """Let go of the memory behind a view of a mapped file, which is read again where it is touched again.

    Pages of a mapping count as a process's memory once they were touched, however large the file. Those of the view,
    and of what lies shortly before it, are taken out of it and stay in the system's cache. So whoever walks over a file
    and releases what is behind needs little. Of other arrays than such views nothing is done.
    """
    mapped, start = _behind(view)
    if mapped is None or not view.nbytes or not hasattr(mmap, "MADV_DONTNEED"):  # Windows
        return
    first = max(0, start - _AROUND) // mmap.PAGESIZE * mmap.PAGESIZE
    mapped.madvise(mmap.MADV_DONTNEED, first, start + view.nbytes - first)


def is_mapped(view: np.ndarray) -> bool:
    """Whether an array is a view of a mapped file."""
    return _behind(view)[0] is not None


def _behind(view: np.ndarray) -> tuple[mmap.mmap | None, int]:
    """The mapping that an array is a view of, and the byte of it where the view begins."""
    whole = _whole(view)
    mapped = _mapping(whole)
    return (mapped, view.ctypes.data - whole.ctypes.data) if mapped is not None else (None, 0)


def _whole(view: np.ndarray) -> np.ndarray:
    """The array that a view is a part of."""
    while isinstance(view.base, np.ndarray):
        view = view.base
    return view


def _mapping(whole: np.ndarray) -> mmap.mmap | None:
    """The mapping whose bytes an array is; None where it has memory of its own."""
    mapped = whole.base.obj if isinstance(whole.base, memoryview) else None
    return mapped if isinstance(mapped, mmap.mmap) else None
