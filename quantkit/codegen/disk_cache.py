"""The cache on disk: files of compiled code and of arrays that take long to compute.

    path = root() / "numba-…" / "name-digest.bin"    the name holds a digest of everything the contents depend on
    read(path) -> bytes | None                       None: not there, damaged, or not to be trusted
    write(path, data)                                atomic; a cache that cannot be written is reported once

A file's name says what is in it, so no index exists that could go with the wrong file, and a file never goes stale. It
begins with the SHA-256 of what follows: a truncated or damaged file counts as missing. What is read here is executed,
so directories and files must belong to this user or to root, and nobody else may be able to write in them. Others are
not used, which is said once on stderr. Files that were not used for 60 days are removed.
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
    if given := os.environ.get("QUANTKIT_CACHE_DIR"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "quantkit"


def read(path: Path) -> bytes | None:
    """The contents of a file, or None where there is no such file that is whole and can be trusted."""
    if not (_is_trusted(root()) and _is_trusted(path.parent)):
        return None
    try:
        with open(os.open(path, os.O_RDONLY | _O_BINARY | _O_NOFOLLOW), "rb") as file:
            status = os.fstat(file.fileno())
            if reason := _distrust(status):
                say(f"{path} is not used: {reason}. Remove it.")
                return None
            data = file.read()
    except OSError:  # not there, or a symbolic link, which this module never makes
        return None
    contents = data[_DIGEST_BYTES:]
    if hashlib.sha256(contents).digest() != data[:_DIGEST_BYTES]:
        return None
    if time.time() - status.st_mtime > _DAY:
        with contextlib.suppress(OSError):  # a cache that root filled for everybody keeps its times
            os.utime(path)
    return contents


def write(path: Path, data: bytes | bytearray | memoryview) -> None:
    """Put a file into the cache. Other processes see all of it or nothing."""
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
        if os.name == "nt" and path.exists():  # Windows replaces no file that another process has open: the same file
            return
        say(
            f"{root()} cannot be written ({error.strerror}); kernels are compiled anew in every process. "
            "Set QUANTKIT_CACHE_DIR to a writable directory."
        )


def _is_trusted(directory: Path) -> bool:
    """Whether only this user, or root, can have put files here. If not, it is said why and what helps."""
    try:
        reason = _distrust(directory.stat()) or _distrust_link(directory)
    except OSError:
        return True  # there is nothing to read; writing reports what is wrong
    if reason:
        say(
            f"the kernel cache {directory} is not used: {reason}; kernels are compiled anew in every process. "
            f"Run chmod 700 {directory}, or set QUANTKIT_CACHE_DIR to a directory of your own."
        )
    return not reason


def _distrust(status: os.stat_result) -> str | None:
    """Why something with this status may hold what another user wrote; None where it cannot."""
    if os.name == "nt":  # mode bits and owners say nothing there; a profile's access rules keep other users out
        return None
    if status.st_uid not in (0, os.geteuid()):
        return f"it belongs to the user with id {status.st_uid}, this process runs as {os.geteuid()}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"other users can write in it (mode {stat.S_IMODE(status.st_mode):o})"
    return None


def _distrust_link(directory: Path) -> str | None:
    """As `_distrust`, of the symbolic link that the directory may be: who owns it chooses where it leads."""
    status = directory.lstat()
    if os.name == "nt" or not stat.S_ISLNK(status.st_mode) or status.st_uid in (0, os.geteuid()):
        return None
    return f"it is a symbolic link of the user with id {status.st_uid}"


@functools.cache
def say(text: str) -> None:
    """Print a message on stderr, once in a process."""
    print(f"quantkit: {text}", file=sys.stderr, flush=True)


@functools.cache
def _remove_unused(directory: Path) -> None:
    """Remove the files of a directory that no process has used for long. Reading a file renews its time."""
    oldest = time.time() - _UNUSED_DAYS * _DAY
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):  # another process removes the same
                if entry.is_file(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_mtime < oldest:
                    os.unlink(entry.path)
