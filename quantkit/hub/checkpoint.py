"""A checkpoint on the Hub, of which only headers are read until a tensor is needed.

    remote = open_checkpoint(parse("hf://ORG/NAME"))
    remote.directory      configuration, tokenizer, card, and the headers of the weights
    remote.checkpoint     its tensors; their bytes come from `remote.streamed`, which `hub.stream` fills, or from
                          `remote.fetch`, which `hub.files` sets

A tensor of up to SMALL bytes that is asked for before, such as the shape of a packed matrix, is fetched alone. When its
file is streamed, the bytes have to be the same.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from quantkit.errors import QuantkitError
from quantkit.formats import safetensors
from quantkit.formats.safetensors import Checkpoint, CheckpointTensor
from quantkit.hub import headers
from quantkit.hub.address import Address
from quantkit.hub.client import Repository

SMALL = 1 << 16


class RemoteTensor(CheckpointTensor):
    """A tensor of a checkpoint on the Hub: its bytes are there while `hub.stream` keeps them."""

    __slots__ = ("_checkpoint",)

    def __init__(self, tensor: CheckpointTensor, checkpoint: RemoteCheckpoint):
        nothing = np.empty(0, np.uint8)
        super().__init__(tensor.name, tensor.dtype, tensor.shape, tensor.offset, tensor.nbytes, tensor.path, nothing)
        self._checkpoint = checkpoint

    def raw(self) -> np.ndarray:
        return self._checkpoint.bytes_of(self)


@dataclass
class RemoteCheckpoint:
    """An opened checkpoint.

    directory  a local directory with everything but the weights' data, named as the repository
    streamed   the bytes of the tensors that are on the disk now, uint8[nbytes], by name
    early      bytes of small tensors that were fetched alone
    fetch      gives the bytes of any tensor, at any time; None: only those of `streamed` are there
    """

    repository: Repository
    directory: Path
    checkpoint: Checkpoint = field(init=False)
    streamed: dict[str, np.ndarray] = field(default_factory=dict)
    early: dict[str, np.ndarray] = field(default_factory=dict)
    fetch: Callable[[CheckpointTensor], np.ndarray] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        opened = safetensors.open_checkpoint(self.directory)
        tensors: dict[str, CheckpointTensor] = {
            name: RemoteTensor(tensor, self) for name, tensor in opened.tensors.items()
        }
        self.checkpoint = replace(opened, tensors=tensors)

    def bytes_of(self, tensor: CheckpointTensor) -> np.ndarray:
        """uint8[nbytes], read-only. QuantkitError for a tensor that is not there and too large to be fetched alone."""
        if self.fetch is not None and tensor.nbytes > SMALL:
            return self.fetch(tensor)
        with self._lock:
            found = self.streamed.get(tensor.name, self.early.get(tensor.name))
            if found is not None:
                return found
            if tensor.nbytes > SMALL:
                raise QuantkitError(
                    f"{self.repository.address.of(tensor.path.name)}: tensor {tensor.name} of {tensor.nbytes} bytes is "
                    f"not on the disk now; fetch the checkpoint first: hf download {self.repository.address.repo}"
                )
            stop = tensor.offset + tensor.nbytes
            data = self.repository.read(tensor.path.name, tensor.offset, stop)
            self.early[tensor.name] = np.frombuffer(data, np.uint8)
            return self.early[tensor.name]

    def identities(self) -> list[list[object]]:
        """Address, size and hash of each file of weights. They do not change with the commit."""
        address, found = replace(self.repository.address, revision=None), []
        for path in self.checkpoint.paths:
            file = self.repository.file(path.name)
            found.append([str(address.of(file.name)), file.size, file.sha256 or file.git_id or ""])
        return found


def open_checkpoint(address: Address) -> RemoteCheckpoint:
    """Open the checkpoint of a repository: configuration, tokenizer and headers. Errors as for a local directory."""
    repository = Repository.open(address)
    return RemoteCheckpoint(repository, headers.checkpoint(repository))
