"""The disk that a checkpoint on the Hub takes beside an output: its size, its room, its directory."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from pathlib import Path

from quantkit.errors import QuantkitError
from quantkit.formats.atomic import os_errors

SUFFIX = ".partial-hub"  # of the directory beside the output
DEFAULT_DISK = 10 * 10**9  # bytes
_BLOCK = 4096  # bytes in which file systems allocate


def rounded(nbytes: int) -> int:
    """The bytes that a file takes on the disk."""
    return -(-nbytes // _BLOCK) * _BLOCK


def allocated(directory: Path) -> int:
    """The bytes that the files of a directory take on the disk, links followed."""
    return sum(path.stat().st_blocks * 512 for path in directory.iterdir())


def _require_space(folder: Path, nbytes: int) -> None:
    """QuantkitError unless the file system of a folder, which need not exist, has so many bytes free."""
    while not folder.exists():
        folder = folder.parent
    if (free := shutil.disk_usage(folder).free) < nbytes:
        raise QuantkitError(f"{folder}: what is fetched takes {nbytes} bytes, the file system has {free} free")


def room(out: Path, address: object, disk: int | None, required: int, why: str, overhead: int, kept: int = 0) -> int:
    """The bytes of fetched data that may lie beside `out` at a time, `required` or more, of `disk` or by default.

    `overhead` bytes are there already, `kept` stay instead. QuantkitError with both numbers if `disk` is too small, or
    the file system; `why` says what requires so many bytes.
    """
    needed = required + (kept or overhead)
    if disk is not None and disk < needed:
        raise QuantkitError(
            f"{address}: --disk is {disk} bytes, {needed} are needed: {required} for {why}, {overhead} for headers and "
            f"tokenizer; give --disk {-(-needed // 10**6)}M or more"
        )
    _require_space(out.parent, needed)
    return disk - overhead if disk is not None else max(required, DEFAULT_DISK)


def own_directory(path: Path) -> Path:
    """A new, empty directory that only this user may use. One that a killed run left is removed before."""
    with os_errors(path, "create"):
        with contextlib.suppress(FileNotFoundError):
            found = os.lstat(path)
            if not stat.S_ISDIR(found.st_mode) or (hasattr(os, "getuid") and found.st_uid != os.getuid()):
                raise QuantkitError(f"{path}: not a directory of this user; remove it, or write OUT elsewhere")
            shutil.rmtree(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700)
    return path
