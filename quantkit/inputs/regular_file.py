"""Read whole untrusted files, up to a size limit.

In a model directory, a name that is read may be a pipe, on which `open` would block forever, or a file larger than
memory.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from quantkit.errors import FormatError

MAX_TEXT = 16 << 20  # bytes of a text such as a chat template; the longest published ones have some ten thousand


def read_bytes(path: str | os.PathLike[str], limit: int) -> bytes:
    """The bytes of a regular file of up to `limit` bytes; FormatError for any other file. OSError as from `open`."""
    data = read_beginning(path, limit + 1)
    if len(data) > limit:
        raise FormatError(f"{path}: {os.stat(path).st_size} bytes, the limit for such files is {limit} bytes")
    return data


def read_beginning(path: str | os.PathLike[str], nbytes: int) -> bytes:
    """The first `nbytes` of a regular file, or all of a shorter one. FormatError for other files, such as a pipe."""
    with open(path, "rb", opener=_open_without_waiting) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise FormatError(f"{path}: not a regular file")
        return file.read(nbytes)


def read_text(path: Path, limit: int = MAX_TEXT) -> str:
    """The text of a regular file in UTF-8, line ends as \\n; FormatError if it is not UTF-8."""
    try:
        text = read_bytes(path, limit).decode()
    except UnicodeDecodeError as error:
        raise FormatError(f"{path}: not UTF-8: {error.reason} at byte {error.start}") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _open_without_waiting(path: str, flags: int) -> int:
    """`os.open` that does not block on a pipe without a writer."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
