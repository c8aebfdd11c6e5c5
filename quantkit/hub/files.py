"""Read a checkpoint from the Hub in any order, and more than once: whole files, in bounded disk.

    a tensor is read -> its file is there, or is fetched: its hash is checked, then it is mapped
    disk:  [ file 3 ][ file 4 ][ file 5 ]     the file that was used longest ago makes room

A model that runs layer by layer needs a layer twice: to measure its inputs, and to encode it. The files of a layer stay
until those of later layers need their room, so each file is fetched about once. Unlike `stream`, the unit is the file,
because only whole files have a hash: `disk` must hold all files of a layer.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from quantkit.errors import OptionError, QuantkitError
from quantkit.formats.atomic import os_errors
from quantkit.formats.mapping import map_file
from quantkit.formats.safetensors import CheckpointTensor
from quantkit.hub.checkpoint import RemoteCheckpoint
from quantkit.hub.disk import SUFFIX, allocated, own_directory, room, rounded
from quantkit.hub.hashes import digest_of, require_hash


class CheckpointFiles:
    """The files of a remote checkpoint for one run of a job; an `Arrivals` of `pipelines.arrivals`.

    disk      bytes on the disk beyond the output; None: disk.DEFAULT_DISK, or what is needed if that is more
    verified  the files that were read, by name: their SHA-256 (git's id where the Hub has none)
    """

    def __init__(self, remote: RemoteCheckpoint, disk: int | None = None, keep: bool = False):
        if keep:
            raise OptionError(
                "--keep-shards is about a checkpoint that is read once; --calibrate reads it more than once: for a "
                f"copy that stays, run `hf download {remote.repository.address.repo}` and pass the directory"
            )
        self.remote, self.disk = remote, disk
        self.identities = remote.identities()
        self.verified: dict[str, str] = {}
        self._lock = threading.Lock()
        self._mapped: dict[str, np.ndarray] = {}  # the file that was used last is the last one
        self._groups: list[set[str]] = []  # names of files
        self._limit = 0
        self._folder: Path | None = None
        remote.fetch = self.bytes_of

    # ---------------------------------------------------------------------------------------------------- for the job

    def reads_together(self, groups: Iterable[Sequence[CheckpointTensor]]) -> None:
        """Say which tensors are read at a time: those of a layer."""
        self._groups = [{tensor.path.name for tensor in group} for group in groups]

    def begin(self, out: Path, outputs: Mapping[str, Sequence[CheckpointTensor]]) -> list[str]:
        """Make room beside `out`; the outputs can be made in any order.

        QuantkitError with both numbers if `disk` is too small for the files that are read at a time.
        """
        if self._folder is None:
            why, overhead = "the files that a layer is in", allocated(self.remote.directory)
            self._limit = room(out, self.remote.repository.address, self.disk, self._required(), why, overhead)
            self._folder = own_directory(out.with_name(out.name + SUFFIX))
        return list(outputs)

    def wait(self, output: str, on_wait: Callable[[str], None]) -> None:
        """Nothing: a file is fetched when it is read."""

    def release(self, output: str) -> None:
        """Nothing: files make room when others need it."""

    def when_verified(self, output: str, action: Callable[[], None]) -> None:
        """Call `action` now: a file is checked before anything is read from it."""
        action()

    def finish(self) -> None:
        """Nothing: all that was read was checked."""

    def close(self) -> None:
        """Remove what is on the disk."""
        with self._lock:
            self._mapped.clear()
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)

    # ------------------------------------------------------------------------------------------------------- the files

    def bytes_of(self, tensor: CheckpointTensor) -> np.ndarray:
        """The bytes of a tensor, uint8[nbytes]; its file is fetched if it is not there."""
        name = tensor.path.name
        with self._lock:
            data = self._mapped.pop(name, None)
            self._mapped[name] = data = self._fetch(name) if data is None else data
        return data[tensor.offset : tensor.offset + tensor.nbytes]

    def _fetch(self, name: str) -> np.ndarray:
        """Fetch a file, check its hash and map it."""
        repository = self.remote.repository
        file, cached = repository.file(name), repository.cached(name)
        if self._folder is None:
            raise QuantkitError(f"{repository.address.of(name)}: read before there is a place for it")
        digest, path = digest_of(file), cached or self._folder / name
        with contextlib.ExitStack() as stack:
            copy = None
            if cached is None:
                self._make_room(file.size)
                stack.enter_context(os_errors(path, "write"))
                copy = stack.enter_context(open(path, "wb"))
            for chunk in repository.chunks(name, 0, file.size):
                digest.update(chunk)
                if copy is not None:
                    copy.write(chunk)
        require_hash(repository.address, file, digest.hexdigest())
        self.verified[name] = digest.hexdigest()
        return map_file(path)

    def _make_room(self, nbytes: int) -> None:
        """Remove the files that were used longest ago, until `nbytes` more are within the limit."""
        assert self._folder is not None
        while self._mapped and allocated(self._folder) + rounded(nbytes) > self._limit:
            name = next(iter(self._mapped))
            del self._mapped[name]
            (self._folder / name).unlink(missing_ok=True)  # not there: it is read from the cache

    def _required(self) -> int:
        """Bytes of the files that have to be there at a time: those of a layer, and any two."""
        repository, paths = self.remote.repository, self.remote.checkpoint.paths
        sizes = {path.name: rounded(repository.file(path.name).size) for path in paths}
        of_groups = [sum(sizes[name] for name in names) for names in self._groups]
        return max([sum(sorted(sizes.values())[-2:]), *of_groups])
