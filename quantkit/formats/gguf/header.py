"""`rewrite`: changes a GGUF file's metadata without touching its tensors.

    changed = Metadata(...)                       # keys to set, with their kinds
    rewrite(path, changed, removed=["general.url"])

Keys that are not named keep their bytes. So data that quantkit itself would not write (text that is not UTF-8, the
payload of a NaN) survive, and so do tensor infos, alignment, gaps and the version. Keys keep their order; new ones come
last.

If the new header ends in the same block of alignment as the old one, tensors do not move. Then the bytes that differ
are written into the file itself, in one synced write, if they span at most `IN_PLACE` bytes. Otherwise a new file is
written beside the old one and replaces it when it is complete.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import numpy as np

from quantkit.errors import QuantkitError
from quantkit.formats.atomic import AtomicFile, os_errors, publish, require_space
from quantkit.formats.gguf.metadata import Metadata
from quantkit.formats.gguf.reader import MAX_HEADER, MAX_KEY_BYTES, Shard
from quantkit.formats.gguf.writer import pair_bytes
from quantkit.formats.mapping import release, require_whole
from quantkit.formats.pipeline import Bar

IN_PLACE = 4096  # bytes that a disk writes at once, so that a power loss leaves the old or the new
_PIECE = 8 << 20


def rewrite(path: Path, changed: Metadata, removed: Iterable[str] = (), *, progress: bool = False) -> bool:
    """Set and remove keys of one file; True if it was changed in place, False if it was replaced.

    QuantkitError for a change of general.alignment, on which the offsets of the tensors depend.
    """
    shard = Shard(path)
    removed = set(removed)
    if "general.alignment" in removed or changed.get("general.alignment", shard.alignment) != shard.alignment:
        raise QuantkitError(
            f"{path}: general.alignment is {shard.alignment}, and the offsets of the tensors depend on it; `quantkit "
            "split` and `quantkit merge` write files of alignment 32"
        )
    header = _header(shard, changed, removed)
    length = -(-len(header) // shard.alignment) * shard.alignment
    header = header.ljust(length, b"\0")
    old = shard.bytes[: shard.data_start].tobytes() if shard.data_start <= shard.bytes.size else None
    if old is not None and length == len(old):
        differ = np.flatnonzero(np.frombuffer(header, np.uint8) != np.frombuffer(old, np.uint8))
        if not len(differ):
            return True
        first, last = int(differ[0]), int(differ[-1]) + 1
        if last - first <= IN_PLACE:
            _patch(path, first, header[first:last])
            return True
    _replace(shard, header, progress)
    return False


def _header(shard: Shard, changed: Metadata, removed: set[str]) -> bytes:
    """The new header without its padding."""
    kept = [key for key in shard.metadata if key not in removed]
    new = [key for key in changed if key not in shard.metadata]
    start = shard.bytes[:24].tobytes()
    parts = [start[:16], struct.pack("<Q", len(kept) + len(new))]
    for key in kept:
        parts.append(pair_bytes(changed, key) if key in changed else shard.bytes[slice(*shard.spans[key])].tobytes())
    parts += [pair_bytes(changed, key) for key in new]
    parts.append(shard.bytes[slice(*shard.infos)].tobytes())
    header = b"".join(parts)
    long = next((key for key in changed if len(key.encode("utf-8", "surrogateescape")) > MAX_KEY_BYTES), None)
    if len(header) > MAX_HEADER or long is not None:
        what = f"header of {len(header)} bytes" if long is None else f"key that begins with {long[:40]!r}"
        raise QuantkitError(
            f"{shard.path}: readers would refuse a {what}; a header has up to {MAX_HEADER} bytes, a key {MAX_KEY_BYTES}"
        )
    return header


def _patch(path: Path, offset: int, data: bytes) -> None:
    with os_errors(path, "change its metadata"):
        file = os.open(path, os.O_RDWR | getattr(os, "O_BINARY", 0))
        try:
            os.lseek(file, offset, os.SEEK_SET)
            if os.write(file, data) != len(data):
                raise OSError("the system wrote only a part")
            os.fsync(file)
        finally:
            os.close(file)


def _replace(shard: Shard, header: bytes, progress: bool) -> None:
    """Write the file with another header; it replaces the old one when it is complete."""
    require_whole(shard.bytes, shard.path)
    data = shard.bytes[shard.data_start :]
    require_space(shard.path.parent, len(header) + data.size)
    file = AtomicFile(shard.path)
    try:
        with os_errors(file.temporary, "write"):
            file.stream.write(header)
            _stream(data, file.stream, progress)
        publish([file])
    finally:
        file.discard()


def _stream(data: np.ndarray, stream: BinaryIO, progress: bool) -> None:
    with Bar(data.size, progress) as bar:
        for start in range(0, data.size, _PIECE):
            piece = data[start : start + _PIECE]
            stream.write(piece.data)
            release(piece)
            bar.update(piece.nbytes)
