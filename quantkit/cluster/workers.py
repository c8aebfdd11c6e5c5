"""`require_same`: whether the workers of a cluster have the quantkit and the files of this process.

Of a file are compared: its size, its first MiB, which holds its header or a good part of it, and samples of 4 KiB from
all over it, so that another model of the same shape is noticed. Reading all of a file would take as long as a job.

All of quantkit's source files are compared, not only the version: two states between releases have the same one.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from quantkit.errors import QuantkitError

if TYPE_CHECKING:
    from distributed import Client

_HEADER = 1 << 20  # bytes at the start of a file
_SAMPLES, _SAMPLE = 64, 4096  # number and bytes of the samples


class FileIdentity(NamedTuple):
    """A file as a worker must have it: its absolute path, its size in bytes and the digest of its samples."""

    path: str
    size: int
    digest: str

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> FileIdentity:
        """The identity of an existing file; OSError for one that cannot be read."""
        absolute = os.path.abspath(path)
        with open(absolute, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            digest = hashlib.sha256(file.read(_HEADER))
            for i in range(_SAMPLES):
                file.seek(max(0, size - _SAMPLE) * i // max(1, _SAMPLES - 1))
                digest.update(file.read(_SAMPLE))
        return cls(absolute, size, digest.hexdigest()[:32])

    def difference(self) -> str:
        """How the file at this path on this machine differs, as the end of a sentence; "" if it is the same."""
        try:
            here = FileIdentity.of(self.path)
        except OSError as error:
            return f"cannot be read there: {error.strerror or error}"
        if here.size != self.size:
            return f"has {here.size} bytes there and {self.size} here"
        return "" if here.digest == self.digest else f"has other bytes there ({self.size} bytes in both places)"


@functools.cache
def build() -> str:
    """The version of quantkit and a digest of its source files, such as "0.1.0 (2f31a0c9d144)"."""
    import quantkit

    package, digest = Path(quantkit.__file__).parent, hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package).as_posix()}\n".encode() + path.read_bytes())
    return f"{quantkit.__version__} ({digest.hexdigest()[:12]})"


def differences(files: Sequence[FileIdentity]) -> list[str]:
    """What is wrong with each of `files` on this machine: run on a worker."""
    return [f"{file.path} {text}" for file in files if (text := file.difference())]


def require_same(
    client: Client,
    files: Sequence[str | os.PathLike[str]],
    workers: Sequence[str] | None = None,
    more: Callable[[], list[str]] | None = None,
) -> list[FileIdentity]:
    """QuantkitError unless the scheduler and all workers have this quantkit, and the workers have `files`, as here.

    files    paths, which must hold on the workers too: a shared file system, or copies at the same place
    workers  addresses of the workers to check; None: all that are there now
    more     run on each worker: what else is wrong there

    The message names each worker with what is wrong there. Returns the identities of the files, for tasks that workers
    which join later may get.
    """
    identities = [FileIdentity.of(path) for path in files]
    mine, wrong = build(), list[str]()
    remedy = f"install quantkit {mine.partition(' ')[0]} of the same source there"
    try:
        at_scheduler: Any = client.run_on_scheduler(build)
    except Exception as error:  # whatever importing quantkit raises there
        at_scheduler = error
    wrong += _unless_same(f"the scheduler {client.scheduler.address}", at_scheduler, mine, remedy)
    able = []
    for worker, found in _on_workers(client, workers, build).items():
        problems = _unless_same(f"worker {worker}", found, mine, remedy)
        wrong += problems
        able += [] if problems else [worker]
    checks: list[tuple[Any, ...]] = [(differences, identities)] if identities else []
    checks += [(more,)] if more is not None else []
    for check in checks if able else ():
        for worker, found in _on_workers(client, able, *check).items():
            texts = [f"cannot check files: {found}"] if isinstance(found, Exception) else found
            wrong += [f"worker {worker}: {text}" for text in texts]
    if wrong:
        raise QuantkitError("the cluster is not fit for this job:\n  " + "\n  ".join(wrong))
    return identities


def _on_workers(
    client: Client, workers: Sequence[str] | None, function: Callable[..., Any], *arguments: object
) -> dict[str, Any]:
    """The result of a function on each worker, or the exception that it raised there.

    Workers that die meanwhile are left out. Those that come in their place are checked with their first task.
    """
    chosen = None if workers is None else list(workers)
    found: dict[str, Any] = client.run(function, *arguments, workers=chosen, on_error="return")
    return {worker: result for worker, result in sorted(found.items()) if not isinstance(result, OSError)}


def _unless_same(where: str, found: object, mine: str, remedy: str) -> list[str]:
    if found == mine:
        return []
    if isinstance(found, Exception):
        return [f"{where}: cannot run this quantkit: {type(found).__name__}: {found}; {remedy}"]
    return [f"{where}: has quantkit {found}, here it is {mine}; {remedy}"]
