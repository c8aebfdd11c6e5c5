"""A file as read-only memory."""

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
