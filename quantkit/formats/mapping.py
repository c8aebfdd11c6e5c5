"""Memory-mapped files: read-only uint8 arrays, checks that the file was not truncated, release of pages.

If another program truncates a mapped file, touching the missing pages ends the process with SIGBUS, which Python cannot
catch. `require_whole` checks the size again, with one system call. Readers call it when a tensor's bytes are asked for,
when a chunk is read and when a batch begins. So a file that was truncated before is a FormatError. A file that is
truncated while its bytes are being used still ends the process.
"""

from __future__ import annotations

import mmap
import os
import stat
from pathlib import Path

import numpy as np

from quantkit.errors import FormatError


def map_file(path: Path) -> np.ndarray:
    """Map a regular file: read-only uint8[size]. The mapping lives as long as its views.

    FormatError if the file is missing, unreadable, empty or not regular (opening a pipe would block forever).
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
    """FormatError if the mapped file behind `view` is shorter now than when it was opened."""
    mapped = _mapping(_whole(view))
    if mapped is not None and (size := mapped.size()) < len(mapped):
        raise FormatError(
            f"{path}: the file has {size} bytes, it had {len(mapped)} when it was opened: another program changed it; "
            "restore it and run the command again"
        )


# Touching a page may map up to 2 MiB around it, so also pages that were released before.
_AROUND = 4 << 20


def release(view: np.ndarray) -> None:
    """Remove the pages of a view of a mapped file from this process's memory; touching the view maps them again.

    Touched pages count as memory of the process, however large the file. The pages of the view and of the 4 MiB before
    it are unmapped and stay in the system's page cache. So a reader that goes through a file and releases what it has
    read needs little memory. Arrays that are no views of a mapped file are left alone.
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
    """The mapping that an array is a view of, and the offset in it where the view begins; (None, 0) for others."""
    whole = _whole(view)
    mapped = _mapping(whole)
    return (mapped, view.ctypes.data - whole.ctypes.data) if mapped is not None else (None, 0)


def _whole(view: np.ndarray) -> np.ndarray:
    """The array that a view was made from, through all views between."""
    while isinstance(view.base, np.ndarray):
        view = view.base
    return view


def _mapping(whole: np.ndarray) -> mmap.mmap | None:
    """The mapping that holds an array's bytes; None if the array has its own memory."""
    mapped = whole.base.obj if isinstance(whole.base, memoryview) else None
    return mapped if isinstance(mapped, mmap.mmap) else None
