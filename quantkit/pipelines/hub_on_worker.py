"""A checkpoint on the Hub, as a worker of a cluster reads it: whole files, fetched when a task needs them.

    task  ->  address, commit, hashes of files  ->  the file is there, or is fetched and checked  ->  rows of tensors

A worker has one checkpoint open at a time. Its files lie in dask's directory of the worker, within `disk` bytes
(`hub.files.CheckpointFiles`), until the job ends or the worker does. Access is the worker's own: its token, cache and
HF_ENDPOINT.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from quantkit.cluster.tasks import UnfitWorker
from quantkit.errors import QuantkitError
from quantkit.hub.address import parse
from quantkit.hub.checkpoint import RemoteCheckpoint, open_checkpoint
from quantkit.hub.client import Repository
from quantkit.hub.files import CheckpointFiles

if TYPE_CHECKING:
    from quantkit.pipelines.conversion.tensor import OutputTensor

_LOCK = threading.Lock()
_OPENED: dict[HubInput, _Opened] = {}  # one at most


class HubInput(NamedTuple):
    """A checkpoint on the Hub as plain data.

    address  with its commit
    files    of weights: name, size, hash
    disk     bytes that its files may take on each worker; None: the default of `CheckpointFiles`
    """

    address: str
    files: tuple[tuple[str, int, str], ...]
    disk: int | None

    @classmethod
    def of(cls, remote: RemoteCheckpoint, disk: int | None) -> HubInput:
        """That of an open checkpoint."""
        repository = remote.repository
        address = replace(repository.address, revision=repository.commit, given="")
        return cls(str(address), _identities(repository, [path.name for path in remote.checkpoint.paths]), disk)


class _Opened(NamedTuple):
    files: CheckpointFiles
    tensors: Mapping[str, OutputTensor]


def problems(source: HubInput) -> list[str]:
    """What keeps this process from reading a checkpoint; run on each worker before the job."""
    try:
        _require_same(source, Repository.open(parse(source.address)))
    except QuantkitError as error:
        return [str(error)]
    return []


def tensors(source: HubInput, arguments: tuple[Any, ...]) -> Mapping[str, OutputTensor]:
    """The tensors of the converted checkpoint. `arguments` are those of `plan_conversion`, its directory excluded.

    UnfitWorker if this worker cannot reach the Hub or finds other files there.
    """
    from distributed import get_worker

    from quantkit.pipelines.conversion.plan import plan_conversion

    with _LOCK:
        if source not in _OPENED:
            _close()
            try:
                remote = open_checkpoint(parse(source.address))
                _require_same(source, remote.repository)
            except QuantkitError as error:
                raise UnfitWorker(str(error)) from error
            files = CheckpointFiles(remote, source.disk)
            name = hashlib.sha256(source.address.encode()).hexdigest()[:16]
            files.begin(Path(get_worker().local_directory) / name, {})
            outtype, pre, mtp, *_, fuse = arguments
            conversion = plan_conversion(
                remote.directory, outtype, pre, mtp, opened=remote.checkpoint, arrivals=files, fuse_gate_up=fuse
            )
            _OPENED[source] = _Opened(files, conversion.tensors)
        return _OPENED[source].tensors


def verified(source: HubInput) -> dict[str, str]:
    """The files that this process has fetched and checked, with their hashes."""
    opened = _OPENED.get(source)
    return {} if opened is None else dict(opened.files.verified)


def forget() -> None:
    """Remove what is on the disk; run on each worker after the job."""
    with _LOCK:
        _close()


def _identities(repository: Repository, names: Iterable[str]) -> tuple[tuple[str, int, str], ...]:
    files = (repository.file(name) for name in names)
    return tuple((file.name, file.size, file.sha256 or file.git_id or "") for file in files)


def _require_same(source: HubInput, repository: Repository) -> None:
    """QuantkitError if this process finds other files at the commit than the coordinator."""
    found = _identities(repository, [name for name, *_ in source.files])
    for here, there in zip(found, source.files, strict=True):
        if here != there:
            raise QuantkitError(
                f"{source.address}: {here[0]} has {here[1]} bytes and the hash {here[2]} here, {there[1]} and "
                f"{there[2]} for the coordinator"
            )


def _close() -> None:
    for opened in _OPENED.values():
        opened.files.close()
    _OPENED.clear()
