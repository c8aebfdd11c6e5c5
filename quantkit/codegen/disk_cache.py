"""The cache on disk: files of compiled code and of arrays that take long to compute.

    path = root() / "numba-…" / "name-digest.bin"    the name holds a digest of everything the contents depend on
    read(path) -> bytes | None                       None: not there, damaged, or not to be trusted
    write(path, data)                                atomic; a cache that cannot be written is reported once

A file's name identifies its contents, so there is no index, and a file never goes stale. A file begins with the SHA-256
of its contents; a truncated or damaged file counts as missing. Compiled code that is read here is executed. So
directories and files must belong to this user or to root, and nobody else may have write access; others are ignored,
with one notice on stderr. Files unused for 60 days are removed.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import stat
import sys
import time
from pathlib import Path

_DIGEST_BYTES = 32
_DAY = 24 * 3600
_UNUSED_DAYS = 60
_O_BINARY = getattr(os, "O_BINARY", 0)  # Windows translates line ends without it
_O_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)  # Windows has no such flag


def root() -> Path:
    """The cache directory: `$QUANTKIT_CACHE_DIR`, or `quantkit` in the user's cache directory."""
    if directory := os.environ.get("QUANTKIT_CACHE_DIR"):
        return Path(directory)
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "quantkit"


def read(path: Path) -> bytes | None:
    """The contents of a file; None where it is missing, damaged or not trusted."""
    if not (_is_trusted(root()) and _is_trusted(path.parent)):
        return None
    try:
        with open(os.open(path, os.O_RDONLY | _O_BINARY | _O_NOFOLLOW), "rb") as file:
            status = os.fstat(file.fileno())
            if reason := _distrust(status):
                notice(f"{path} is not used: {reason}. Remove it.")
                return None
            data = file.read()
    except OSError:  # missing, or a symbolic link, which this module never creates
        return None
    contents = data[_DIGEST_BYTES:]
    if hashlib.sha256(contents).digest() != data[:_DIGEST_BYTES]:
        return None
    if time.time() - status.st_mtime > _DAY:
        with contextlib.suppress(OSError):  # root may have filled the cache for all users
            os.utime(path)
    return contents


def write(path: Path, data: bytes | bytearray | memoryview) -> None:
    """Write a file of the cache atomically: other processes see all of it or nothing."""
    temporary = path.with_name(f"{path.name}.{os.urandom(8).hex()}.tmp")
    try:
        for directory in (root(), path.parent):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not _is_trusted(directory):
                return
        _remove_unused(path.parent)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _O_BINARY | _O_NOFOLLOW
        with open(os.open(temporary, flags, 0o600), "wb") as file:
            file.write(hashlib.sha256(data).digest())
            file.write(data)
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if os.name == "nt" and path.exists():  # Windows does not replace a file that is open; it has these contents
            return
        notice(
            f"{root()} cannot be written ({error.strerror}); kernels are compiled again in every process. "
            "Set QUANTKIT_CACHE_DIR to a writable directory."
        )


def _is_trusted(directory: Path) -> bool:
    """Whether only this user or root can write files here. If not, print a notice with the reason and the remedy."""
    try:
        reason = _distrust(directory.stat()) or _distrust_link(directory)
    except OSError:
        return True  # nothing to read; `write` reports the error
    if reason:
        notice(
            f"the kernel cache {directory} is not used: {reason}; kernels are compiled again in every process. "
            f"Run chmod 700 {directory}, or set QUANTKIT_CACHE_DIR to a directory of your own."
        )
    return not reason


def _distrust(status: os.stat_result) -> str | None:
    """Why another user may have written a file or directory of this status; None where none can."""
    if os.name == "nt":  # mode bits and owners mean nothing there; the access rules of user profiles keep others out
        return None
    if status.st_uid not in (0, os.geteuid()):
        return f"it belongs to the user with id {status.st_uid}, this process runs as {os.geteuid()}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"other users can write in it (mode {stat.S_IMODE(status.st_mode):o})"
    return None


def _distrust_link(directory: Path) -> str | None:
    """As `_distrust`, for a directory that is a symbolic link: its owner chooses where it leads."""
    status = directory.lstat()
    if os.name == "nt" or not stat.S_ISLNK(status.st_mode) or status.st_uid in (0, os.geteuid()):
        return None
    return f"it is a symbolic link of the user with id {status.st_uid}"


@functools.cache
def notice(text: str) -> None:
    """Print a message on stderr, once in a process."""
    print(f"quantkit: {text}", file=sys.stderr, flush=True)


@functools.cache
def _remove_unused(directory: Path) -> None:
    """Remove the files of a directory that no process has read for 60 days. `read` renews a file's time."""
    oldest = time.time() - _UNUSED_DAYS * _DAY
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):  # another process removes the same
                if entry.is_file(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_mtime < oldest:
                    os.unlink(entry.path)
