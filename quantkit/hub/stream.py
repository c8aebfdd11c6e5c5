"""Stream a checkpoint from the Hub through a bounded piece of disk, in the order of its files.

    shard:   header | tensor a | tensor b | tensor c | …        read once, from its first byte to its last
    disk:            [   a   ]  [   b   ]                       tensors that an output still needs, each a file
    hash:    ======================================>            SHA-256 of all bytes as they pass

A thread reads the shards one after another and runs ahead of the work as far as `disk` allows. It writes each needed
tensor to a file of its own, which is removed when the last output that is made from it is encoded. What no output needs
is only hashed, and a shard of which no output needs anything is not read at all. So the unit is the tensor and not the
shard: a shard may be larger than `disk`. Outputs are made in the order in which their last tensor arrives, so the disk
need only hold the tensors of outputs that are incomplete, which is known before anything is fetched (`required`).

A shard's hash is known when all of it was read. What was made from it counts as done only then: `when_verified`. With a
wrong hash the run ends, and a later run makes these tensors again. A run that resumes reads again, as a whole, the
shards of which it still needs a tensor.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from quantkit.errors import OptionError, QuantkitError
from quantkit.formats.atomic import os_errors
from quantkit.formats.mapping import map_file
from quantkit.formats.safetensors import CheckpointTensor
from quantkit.hub.checkpoint import RemoteCheckpoint
from quantkit.hub.client import HubError, RemoteFile, file_chunks
from quantkit.hub.disk import SUFFIX, allocated, own_directory, room, rounded
from quantkit.hub.hashes import digest_of, require_hash


class CheckpointStream:
    """The tensors of a remote checkpoint for one run of a job.

    disk      bytes on the disk beyond the output; None: disk.DEFAULT_DISK, or what is needed if that is more
    keep      leave the whole checkpoint in the directory NAME beside the output
    verified  the files that were read, by name: their SHA-256 (git's id where the Hub has none)
    """

    def __init__(self, remote: RemoteCheckpoint, disk: int | None = None, keep: bool = False):
        if disk is not None and keep:
            raise OptionError("--keep-shards leaves the whole checkpoint on the disk, and --disk bounds it; drop one")
        self.remote, self.disk, self.keep = remote, disk, keep
        self.identities = remote.identities()
        self.verified: dict[str, str] = {}
        self._change = threading.Condition()
        self._arrived: set[str] = set()
        self._uses: dict[str, int] = {}  # by tensor: the outputs that still need it
        self._outputs: dict[str, list[CheckpointTensor]] = {}
        self._actions: dict[str, list[tuple[set[str], Callable[[], None]]]] = {}
        self._limit = self._resident = 0
        self._folder = self._kept = Path()
        self._reading = ""
        self._failed: BaseException | None = None
        self._closing = False
        self._thread: threading.Thread | None = None

    # ---------------------------------------------------------------------------------------------------- for the job

    def begin(self, out: Path, outputs: Mapping[str, Sequence[CheckpointTensor]]) -> list[str]:
        """Start to read the tensors of `outputs`; returns their names in the order in which they can be made.

        QuantkitError with both numbers if `disk` is too small for them.
        """
        self._outputs = {name: list(inputs) for name, inputs in outputs.items()}
        for inputs in self._outputs.values():
            for name in {tensor.name for tensor in inputs}:
                self._uses[name] = self._uses.get(name, 0) + 1
        schedule = self._schedule()
        order, required = self._order(schedule)
        why = "tensors that one output tensor is made from or that lie between them"
        kept = sum(self._file(name).size for name, _ in schedule) if self.keep else 0
        overhead = allocated(self.remote.directory)
        self._limit = room(out, self.remote.repository.address, self.disk, required, why, overhead, kept)
        self._folder = own_directory(out.with_name(out.name + SUFFIX))
        self._kept = out.parent / self.remote.repository.address.name
        if self.keep:
            self._keep_texts()
        self._thread = threading.Thread(target=self._work, args=(schedule,), name="quantkit-hub", daemon=True)
        self._thread.start()
        return order

    def wait(self, output: str, on_wait: Callable[[str], None]) -> None:
        """Wait until the tensors of an output are there; `on_wait` is told what is being fetched."""
        needed = {tensor.name for tensor in self._outputs[output]}
        with self._change:
            while not needed <= self._arrived:
                self._raise_failure()
                on_wait(f"fetching {self._reading}")
                self._change.wait(0.5)

    def release(self, output: str) -> None:
        """Say that an output is encoded: its tensors are removed if no other output needs them."""
        with self._change:
            for name in {tensor.name: 0 for tensor in self._outputs[output]}:
                self._uses[name] -= 1
                if self._uses[name] == 0 and self.remote.streamed.pop(name, None) is not None:
                    path = self._path(name)
                    self._resident -= rounded(path.stat().st_size)
                    path.unlink()
            self._change.notify_all()

    def when_verified(self, output: str, action: Callable[[], None]) -> None:
        """Call `action` when the hashes of all files that an output was made from were checked, now or later."""
        with self._change:
            missing = {tensor.path.name for tensor in self._outputs[output]} - self.verified.keys()
            for file in missing:
                self._actions.setdefault(file, []).append((missing, action))
        if not missing:
            action()

    def finish(self) -> None:
        """Wait until all files were read to their end and checked."""
        if self._thread is not None:
            self._thread.join()
        with self._change:
            self._raise_failure()

    def close(self) -> None:
        """Stop reading and remove what is on the disk. Files that `keep` completed stay."""
        with self._change:
            self._closing = True
            self._change.notify_all()
        if self._thread is not None:
            self._thread.join(15)  # a read that waits for the network is given up
            self.remote.streamed.clear()
            shutil.rmtree(self._folder, ignore_errors=True)

    def _raise_failure(self) -> None:
        if self._failed is not None:
            raise self._failed

    # ------------------------------------------------------------------------------------------------------- the order

    def _schedule(self) -> list[tuple[str, list[CheckpointTensor]]]:
        """The files of which a tensor is needed, each with all of its tensors in the order of their bytes."""
        by_file: dict[str, list[CheckpointTensor]] = {}
        for tensor in self.remote.checkpoint.tensors.values():
            by_file.setdefault(tensor.path.name, []).append(tensor)
        return [
            (path.name, sorted(by_file[path.name], key=lambda tensor: (tensor.offset, tensor.nbytes)))
            for path in self.remote.checkpoint.paths
            if any(tensor.name in self._uses for tensor in by_file.get(path.name, ()))
        ]

    def _order(self, schedule: Sequence[tuple[str, list[CheckpointTensor]]]) -> tuple[list[str], int]:
        """The outputs in the order in which they become complete, and the bytes of disk that this takes at least."""
        waiting = {name: {tensor.name for tensor in inputs} for name, inputs in self._outputs.items()}
        users: dict[str, list[str]] = {}
        for output, names in waiting.items():
            for name in names:
                users.setdefault(name, []).append(output)
        order = [name for name, names in waiting.items() if not names]
        uses, sizes, resident, required = dict(self._uses), dict[str, int](), 0, 0
        for tensor in (tensor for _, tensors in schedule for tensor in tensors if tensor.name in self._uses):
            sizes[tensor.name] = rounded(tensor.nbytes)
            resident += sizes[tensor.name]
            required = max(required, resident)
            for output in users[tensor.name]:
                waiting[output].remove(tensor.name)
                if not waiting[output]:
                    order.append(output)
                    for name in {each.name for each in self._outputs[output]}:
                        uses[name] -= 1
                        resident -= sizes[name] if uses[name] == 0 else 0
        return order, required

    # ------------------------------------------------------------------------------------------------------ the thread

    def _work(self, schedule: Sequence[tuple[str, list[CheckpointTensor]]]) -> None:
        try:
            for name, tensors in schedule:
                self._reading = name
                self._read(self._file(name), tensors)
        except _Closed:
            pass
        except BaseException as error:  # raised by the next `wait`, or by `finish`
            with self._change:
                self._failed = error
                self._change.notify_all()

    def _read(self, file: RemoteFile, tensors: Sequence[CheckpointTensor]) -> None:
        """Read a file from its first byte to its last; keep what is needed, check the hash."""
        digest = digest_of(file)
        with contextlib.ExitStack() as stack:
            kept = stack.enter_context(self._keep(file)) if self.keep else None
            pieces = _Pieces(self._chunks(file), digest, kept)
            position = 0
            for tensor in tensors:
                pieces.pass_to(tensor.offset - position, None)
                position = tensor.offset + tensor.nbytes
                if tensor.name in self._uses:
                    self._store(tensor, pieces)
                elif tensor.name in self.remote.early:
                    self._compare(tensor, pieces)
                else:
                    pieces.pass_to(tensor.nbytes, None)
            pieces.pass_to(file.size - position, None)
            require_hash(self.remote.repository.address, file, digest.hexdigest())
        with self._change:
            self.verified[file.name] = digest.hexdigest()
            ready = []
            for missing, action in self._actions.pop(file.name, ()):
                missing.discard(file.name)
                if not missing:
                    ready.append(action)
        for action in ready:
            action()

    def _chunks(self, file: RemoteFile) -> Iterator[bytes]:
        kept = self._kept / file.name
        if self.keep and kept.is_file():
            return file_chunks(kept, 0, file.size)
        return self.remote.repository.chunks(file.name, 0, file.size)

    def _store(self, tensor: CheckpointTensor, pieces: _Pieces) -> None:
        """Write a tensor to its file when there is room for it, and map it."""
        with self._change:
            while self._resident + rounded(tensor.nbytes) > self._limit and not self._closing:
                self._change.wait()
            if self._closing:
                raise _Closed
            self._resident += rounded(tensor.nbytes)
        path = self._path(tensor.name)
        with os_errors(path, "write"), open(path, "xb") as stream:
            pieces.pass_to(tensor.nbytes, stream)
        found = map_file(path) if tensor.nbytes else np.empty(0, np.uint8)
        self._require_same(tensor, found)
        with self._change:
            self.remote.streamed[tensor.name] = found
            self._arrived.add(tensor.name)
            self._change.notify_all()
            if self._closing:
                raise _Closed

    def _compare(self, tensor: CheckpointTensor, pieces: _Pieces) -> None:
        """Pass a tensor that only the plan has read: its bytes are those of the file that is checked."""
        stream = io.BytesIO()
        pieces.pass_to(tensor.nbytes, stream)
        self._require_same(tensor, np.frombuffer(stream.getvalue(), np.uint8))

    def _require_same(self, tensor: CheckpointTensor, found: np.ndarray) -> None:
        """HubError if a tensor that was fetched alone has other bytes now."""
        early = self.remote.early.get(tensor.name)
        if early is not None and not np.array_equal(early, found):
            raise HubError(f"{self._address(tensor.path.name)}: tensor {tensor.name} changed while it was read")

    # ------------------------------------------------------------------------------------------------------- the files

    def _file(self, name: str) -> RemoteFile:
        return self.remote.repository.file(name)

    def _address(self, name: str) -> str:
        return str(self.remote.repository.address.of(name))

    def _path(self, tensor: str) -> Path:
        """The file of a tensor. Names of tensors may be any text, so it is a hash."""
        return self._folder / hashlib.sha256(tensor.encode("utf-8", "surrogatepass")).hexdigest()[:32]

    def _keep_texts(self) -> None:
        """Copy the files beside the weights to the directory that stays."""
        with os_errors(self._kept, "create"):
            self._kept.mkdir(exist_ok=True)
            for path in self.remote.directory.iterdir():
                if path.is_symlink() and not (self._kept / path.name).exists():
                    shutil.copyfile(path, self._kept / path.name)
        for path in self.remote.checkpoint.paths:
            there = self._kept / path.name
            if there.exists() and there.stat().st_size != self._file(path.name).size:
                raise QuantkitError(
                    f"{there}: {there.stat().st_size} bytes, on the Hub it has {self._file(path.name).size}: it is of "
                    "another checkpoint; move it away, or write OUT to another directory"
                )

    @contextlib.contextmanager
    def _keep(self, file: RemoteFile) -> Iterator[IO[bytes] | None]:
        """A stream to a file that gets its name when its hash was checked; None if it is there already."""
        path = self._kept / file.name
        if path.is_file():
            yield None
            return
        partial = path.with_name(path.name + ".partial")
        try:
            with os_errors(partial, "write"), open(partial, "wb") as stream:
                yield stream
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)


class _Closed(Exception):
    """The job has ended: stop reading."""


class _Pieces:
    """Passes the bytes of a file on, in runs of given lengths, and hashes all of them."""

    def __init__(self, chunks: Iterator[bytes], digest: Any, copy: IO[bytes] | None):
        self._chunks, self._digest, self._copy = chunks, digest, copy
        self._left = memoryview(b"")

    def pass_to(self, nbytes: int, stream: IO[bytes] | None) -> None:
        """Pass the next bytes to a stream, or to nothing."""
        while nbytes > 0:
            if not self._left:
                self._left = memoryview(next(self._chunks))
                self._digest.update(self._left)
                if self._copy is not None:
                    self._copy.write(self._left)
            part = self._left[:nbytes]
            if stream is not None:
                stream.write(part)
            self._left = self._left[len(part) :]
            nbytes -= len(part)
