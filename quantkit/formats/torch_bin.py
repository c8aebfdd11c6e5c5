"""Checkpoints that torch saved: `pytorch_model.bin`, or several files with `pytorch_model.bin.index.json`.

A .bin is a zip file: a pickle of the tensors' names, dtypes and shapes, and their data, not compressed. torch reads the
pickle with its `weights_only` unpickler, which runs no code from the file, and says where the data are. The data are
then read from a mapping of the file, like those of safetensors, after `torch_zip` has checked the zip directory. So
torch is needed to open a checkpoint, and the data take no memory.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

from quantkit.errors import FormatError, UnsupportedError, printable
from quantkit.formats.mapping import map_file
from quantkit.formats.safetensors.reader import Checkpoint, CheckpointTensor, check_index, join, read_index
from quantkit.formats.torch_zip import records

_INDEX = "pytorch_model.bin.index.json"
_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64", "float8_e4m3fn": "F8_E4M3",
           "float8_e5m2": "F8_E5M2", "uint8": "U8", "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64",
           "bool": "BOOL"}  # fmt: skip


def is_bin(directory: Path) -> bool:
    """Whether a directory has pytorch_model*.bin and no safetensors files."""
    return not any(directory.glob("*.safetensors*")) and any(directory.glob("pytorch_model*.bin"))


def open_bin(directory: Path) -> Checkpoint:
    """Open a directory of torch files: those that the index names, else all pytorch_model*.bin.

    UnsupportedError without torch, for a file from before torch 1.6 and for tensors that are not contiguous arrays;
    FormatError if a file is not a checkpoint.
    """
    if not (directory / _INDEX).exists():
        return join(directory, map(_File, paths := sorted(directory.glob("pytorch_model*.bin"))), paths)
    weight_map = read_index(directory / _INDEX)
    paths = [directory / name for name in sorted(set(weight_map.values()))]
    checkpoint = join(directory, map(_File, paths), paths)
    check_index(directory / _INDEX, weight_map, checkpoint)
    return checkpoint


class _File:
    """The tensors of one .bin."""

    def __init__(self, path: Path):
        self.path = path
        self.metadata: dict[str, str] = {}
        self.bytes = map_file(path)
        _require_zip(path)
        found = records(path, self.bytes)
        self._storages = {at.start: at.nbytes for name, at in found.items() if name.startswith("data/") and at.nbytes}
        self.tensors = [self._tensor(name, tensor) for name, tensor in _described(path).items()]

    def _tensor(self, name: object, tensor: Any) -> CheckpointTensor:
        what = f"{self.path}: entry {repr(name)[:300]}"
        if not isinstance(name, str) or not hasattr(tensor, "untyped_storage"):
            raise FormatError(f"{what} is a {type(tensor).__name__}; a checkpoint is a dict of tensors by name")
        dtype = _DTYPES.get(str(tensor.dtype).removeprefix("torch."))
        if dtype is None or not tensor.is_contiguous() or tensor.is_neg():  # the sign of such a view is a flag
            raise UnsupportedError(
                f"{what} is {tensor.dtype} of shape {tuple(tensor.shape)} and strides {tensor.stride()}"
                f"{', and negated' if tensor.is_neg() else ''}; quantkit reads plain arrays row after row: load the "
                "model with transformers and save it as safetensors"
            )
        first, nbytes = tensor.storage_offset() * tensor.element_size(), tensor.numel() * tensor.element_size()
        start = self._storage(what, tensor.untyped_storage(), first, nbytes) + first if nbytes else 0
        return CheckpointTensor(name, dtype, tuple(tensor.shape), start, nbytes, self.path, self.bytes)

    def _storage(self, what: str, storage: Any, first: int, nbytes: int) -> int:
        """The offset of a storage in the file. FormatError unless a record of its size is there and holds the tensor.

        torch itself does not compare the size of a storage with that of its record. In newer files it computes where
        the record would begin if torch had written the file, and does not look.
        """
        start, size = getattr(storage, "_checkpoint_offset", None), storage.nbytes()
        if start is None:
            raise UnsupportedError(
                f"{what}: this torch does not say where its data are, newer ones do: pip install -U torch"
            )
        if self._storages.get(start) != size:
            there = f"has {self._storages[start]} bytes" if start in self._storages else "is not in the zip directory"
            raise FormatError(
                f"{what}: its storage of {size} bytes should be the record at byte {start}, which {there}: "
                "load and save it with torch"
            )
        if not 0 <= first <= first + nbytes <= size:
            raise FormatError(f"{what} takes bytes {first} to {first + nbytes} of a storage of {size}")
        return int(start)


def _require_zip(path: Path) -> None:
    if not zipfile.is_zipfile(path):
        raise UnsupportedError(
            f"{path}: not a zip file: truncated, or saved by torch before 1.6; load and save it with a newer torch"
        )


def _described(path: Path) -> dict[Any, Any]:
    """The tensors of a file as fake tensors, without their data."""
    try:
        import torch
        from torch._subclasses.fake_tensor import FakeTensorMode
    except ImportError:
        raise UnsupportedError(
            f"{path}: a checkpoint saved by torch, which is needed to read it: install quantkit[torch], or save the "
            "model as safetensors"
        ) from None
    try:
        with FakeTensorMode():
            found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of any kind: the pickle may be anything
        reason = printable(str(error).split("\n")[0][:200])
        raise FormatError(f"{path}: torch cannot read it: {type(error).__name__}: {reason}") from None
    if not isinstance(found, dict):
        raise FormatError(f"{path}: holds a {type(found).__name__}; a checkpoint is a dict of tensors by name")
    return found
