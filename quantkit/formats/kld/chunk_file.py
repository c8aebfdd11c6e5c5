"""A file of a head and chunks that are appended one by one; a kill may come between, and the next run goes on.

Where a log beside it (evaluate/chunk_log.py) notes the digest of each chunk, the partial file is kept, and what of it
has the digests noted is not made again. So nothing is synced before the end: what a loss of power took does not have
its digest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from quantkit.formats.atomic import AtomicFile, os_errors, publish


class Noted(NamedTuple):
    """What a log says of chunks written before: their digests, and how many are made together."""

    digests: Sequence[str]
    together: int


def digest(data: bytes | memoryview) -> str:
    """BLAKE2b-128, as text."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


class ChunkFile:
    """A file being written. `.places`: (offset, bytes, digest) of each chunk that is in it.

    size_at(read, offset) gives the bytes of the chunk at an offset, by `read(offset, n) -> bytes`; `noted` None: the
    file is new, and nothing of it is kept when it is not finished.
    """

    def __init__(
        self,
        path: Path,
        head: bytes,
        noted: Noted | None,
        size_at: Callable[[Callable[[int, int], bytes], int], int],
    ):
        self._kept = noted is not None
        self.file = AtomicFile(path, kept=self._kept)
        self.places: list[tuple[int, int, str]] = []
        end = len(head)
        with os_errors(self.file.temporary, "write"):
            if noted is not None and self.file.read_at(0, len(head)) == head:
                for expected in noted.digests:
                    size = size_at(self.file.read_at, end)
                    if size <= 0 or digest(self.file.read_at(end, size)) != expected:
                        break
                    self.places.append((end, size, expected))
                    end += size
                del self.places[len(self.places) // noted.together * noted.together :]
                end = sum(self.places[-1][:2]) if self.places else len(head)
            self.file.stream.truncate(end if self.places else 0)
            self.file.stream.seek(end if self.places else 0)
            if not self.places:
                self.file.stream.write(head)

    def append(self, data: bytes | memoryview) -> str:
        """Write a chunk; gives its digest. A log may note it when this returns."""
        made = digest(data)
        with os_errors(self.file.temporary, "write"):
            self.places.append((self.file.stream.tell(), len(data), made))
            self.file.stream.write(data)
            if self._kept:
                self.file.stream.flush()
        return made

    def finish(self) -> None:
        """Give it its name."""
        publish([self.file])

    def leave(self) -> None:
        """After `finish` nothing; without it the partial file stays where it is kept, and goes otherwise."""
        self.file.discard(keep=self._kept and bool(self.places))
