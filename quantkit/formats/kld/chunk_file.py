"""`ChunkFile`: a header and chunks that are appended one by one; an interrupted run can be resumed.

If a log next to the file (evaluate/chunk_log.py) has the digest of each chunk, the partial file stays after an
interrupt, and the next run reuses the chunks whose digests agree with the log. Nothing has to be synced before the end:
data lost in a power failure do not have the right digest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from quantkit.formats.atomic import AtomicFile, os_errors, publish


class LoggedChunks(NamedTuple):
    """Chunks that an earlier run wrote, from its log: their digests, and how many a batch has."""

    digests: Sequence[str]
    chunks_per_batch: int


def digest(data: bytes | memoryview) -> str:
    """BLAKE2b-128 as hexadecimal text."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


class ChunkFile:
    """A file being written. `places`: (offset, bytes, digest) of each chunk in it.

    size_at(read, offset) gives the size of the chunk at an offset, with `read(offset, n) -> bytes`. With `logged` None
    the file is new, and an unfinished one is removed.
    """

    def __init__(
        self,
        path: Path,
        header: bytes,
        logged: LoggedChunks | None,
        size_at: Callable[[Callable[[int, int], bytes], int], int],
    ):
        self._resumable = logged is not None
        self.file = AtomicFile(path, resumable=self._resumable)
        self.places: list[tuple[int, int, str]] = []
        end = len(header)
        with os_errors(self.file.temporary, "write"):
            if logged is not None and self.file.read_at(0, len(header)) == header:
                for expected in logged.digests:
                    size = size_at(self.file.read_at, end)
                    if size <= 0 or digest(self.file.read_at(end, size)) != expected:
                        break
                    self.places.append((end, size, expected))
                    end += size
                del self.places[len(self.places) // logged.chunks_per_batch * logged.chunks_per_batch :]
                end = sum(self.places[-1][:2]) if self.places else len(header)
            self.file.stream.truncate(end if self.places else 0)
            self.file.stream.seek(end if self.places else 0)
            if not self.places:
                self.file.stream.write(header)

    def append(self, data: bytes | memoryview) -> str:
        """Write a chunk and return its digest. A log may record it when this returns."""
        chunk_digest = digest(data)
        with os_errors(self.file.temporary, "write"):
            self.places.append((self.file.stream.tell(), len(data), chunk_digest))
            self.file.stream.write(data)
            if self._resumable:
                self.file.stream.flush()
        return chunk_digest

    def finish(self) -> None:
        """Give the file its final name."""
        publish([self.file])

    def leave(self) -> None:
        """Close the file. After `finish` nothing else happens; otherwise a partial file without a log is removed."""
        self.file.discard(keep=self._resumable and bool(self.places))
