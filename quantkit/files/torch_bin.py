"""Checkpoints that torch saved: pytorch_model.bin, or several with pytorch_model.bin.index.json.

A .bin is a zip file: a pickle of the tensors' names, dtypes and shapes, and their data, not compressed. torch reads the
pickle, by its `weights_only` unpickler, which runs no code of the file, and says where the data lie; they are then read
from a mapping of the file, like those of safetensors. So torch is needed to open a checkpoint, memory for none of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quantkit.errors import FormatError, UnsupportedError
from quantkit.files.mapping import map_file
from quantkit.files.safetensors import Checkpoint, CheckpointTensor, check_index, join, read_index

_INDEX = "pytorch_model.bin.index.json"
_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64", "float8_e4m3fn": "F8_E4M3",
           "float8_e5m2": "F8_E5M2", "uint8": "U8", "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64",
           "bool": "BOOL"}  # fmt: skip


def is_bin(directory: Path) -> bool:
    """Whether a checkpoint is of torch's files and has none of safetensors."""
    return not any(directory.glob("*.safetensors*")) and any(directory.glob("pytorch_model*.bin"))


def open_bin(directory: Path) -> Checkpoint:
    """Open the checkpoint of torch's files in a directory: those of the index, else all pytorch_model*.bin.

    UnsupportedError without torch, for a file from before torch 1.6 and for tensors that are no plain arrays;
    FormatError for what is no checkpoint.
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
        self.tensors = [self._tensor(name, tensor) for name, tensor in _described(path).items()]

    def _tensor(self, name: Any, tensor: Any) -> CheckpointTensor:
        what = f"{self.path}: entry {name!r}"
        if not isinstance(name, str) or not hasattr(tensor, "untyped_storage"):
            raise FormatError(f"{what} is a {type(tensor).__name__}; a checkpoint is a dict of tensors by name")
        dtype = _DTYPES.get(str(tensor.dtype).removeprefix("torch."))
        if dtype is None or not tensor.is_contiguous():
            raise UnsupportedError(
                f"{what} is {tensor.dtype} of shape {tuple(tensor.shape)} and strides {tensor.stride()}; quantkit "
                "reads plain arrays row after row: load the model with transformers and save it as safetensors"
            )
        start = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
        if start is None:
            raise UnsupportedError(
                f"{what}: this torch does not say where its data lie, newer ones do: pip install -U torch"
            )
        start += tensor.storage_offset() * tensor.element_size()
        nbytes = tensor.numel() * tensor.element_size()
        if not 0 <= start <= start + nbytes <= self.bytes.size:
            raise FormatError(
                f"{what} takes bytes {start} to {start + nbytes} of a file of {self.bytes.size}; it is truncated"
            )
        return CheckpointTensor(name, dtype, tuple(tensor.shape), start, nbytes, self.path, self.bytes)


def _described(path: Path) -> dict[Any, Any]:
    """The tensors of a file, without their data."""
    try:
        import torch
        from torch._subclasses.fake_tensor import FakeTensorMode
    except ImportError:
        raise UnsupportedError(
            f"{path}: a checkpoint saved by torch, which is needed to read it: install quantkit[torch], or save the "
            "model as safetensors"
        ) from None
    import zipfile

    if not zipfile.is_zipfile(path):
        raise UnsupportedError(
            f"{path}: not a zip file: truncated, or saved by torch before 1.6; load and save it with a newer torch"
        )
    try:
        with FakeTensorMode():
            found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of any kind, as the pickle is any
        reason = str(error).split("\n")[0][:200]
        raise FormatError(f"{path}: torch cannot read it: {type(error).__name__}: {reason}") from None
    if not isinstance(found, dict):
        raise FormatError(f"{path}: holds a {type(found).__name__}; a checkpoint is a dict of tensors by name")
    return found
