"""Reading whole files that strangers named or wrote, within a limit on their size.

A directory of a model may hold a pipe under a name that is read, for which `open` would wait for ever, or a file that
does not fit memory.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from quantkit.errors import FormatError

MAX_TEXT = 16 << 20  # bytes of a text such as a chat template; the longest published ones have some ten thousand


def read_bytes(path: str | os.PathLike[str], limit: int) -> bytes:
    """The bytes of a regular file of up to `limit` bytes; FormatError for any other file. OSError as of `open`."""
    data = read_beginning(path, limit + 1)
    if len(data) > limit:
        raise FormatError(f"{path}: {os.stat(path).st_size} bytes, quantkit reads such files of up to {limit}")
    return data


def read_beginning(path: str | os.PathLike[str], nbytes: int) -> bytes:
    """The first `nbytes` of a regular file, all of a shorter one. FormatError for a pipe, a device or a directory."""
    with open(path, "rb", opener=_open_without_waiting) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise FormatError(f"{path}: not a regular file")
        return file.read(nbytes)


def read_text(path: Path, limit: int = MAX_TEXT) -> str:
    """The text of a regular file in UTF-8, line ends as \\n; FormatError where it is no text."""
    try:
        text = read_bytes(path, limit).decode()
    except UnicodeDecodeError as error:
        raise FormatError(f"{path}: not UTF-8: {error.reason} at byte {error.start}") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _open_without_waiting(path: str, flags: int) -> int:
    """As `os.open`, without waiting for the other end of a pipe."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
