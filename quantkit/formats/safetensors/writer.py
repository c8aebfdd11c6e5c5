"""`CheckpointWriter`: writes safetensors, one file or a set with its index. They appear when complete (stream.py)."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from quantkit.errors import DataError
from quantkit.formats.gguf.writer import partition
from quantkit.formats.stream import Layout, Slot, StreamWriter

INDEX_NAME = "model.safetensors.index.json"
ITEM_BYTES = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "F16": 2,
              "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8}  # fmt: skip
"""Bytes of an element, by dtype."""


@dataclass(frozen=True)
class CheckpointSpec:
    """Name, shape (numpy order) and dtype ("BF16" …) of a tensor to be written; DataError for others."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(int(n) for n in self.shape))
        if self.dtype not in ITEM_BYTES:
            raise DataError(f"tensor {self.name}: dtype {self.dtype!r} is not one of {', '.join(ITEM_BYTES)}")
        if self.name == "__metadata__" or any(n < 0 for n in self.shape):
            raise DataError(f"tensor {self.name}: name or shape {self.shape} cannot be written")

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's data."""
        size = ITEM_BYTES[self.dtype]
        for n in self.shape:
            size *= n
        return size


class CheckpointWriter(StreamWriter):
    """Writes a checkpoint into a directory: model.safetensors, or model-00001-of-0000N.safetensors and an index.

        with CheckpointWriter(directory, specs, {"format": "pt"}) as w:
            w.write(name, data)     # uint8 bytes; tensors in the order of specs, each in any number of pieces

    max_shard_bytes  limit on the tensor bytes of a file
    paths            final names, the index first

    A directory that holds other safetensors files is refused (DataError): readers would mix the two checkpoints.
    Leaving the block completes the files. An exception in it, or a missing tensor, removes the partial files.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        specs: Iterable[CheckpointSpec],
        metadata: Mapping[str, str] | None = None,
        max_shard_bytes: int = 5 * 10**9,
    ):
        directory = Path(directory)
        self.specs = list(specs)
        counts = partition([spec.nbytes for spec in self.specs], max_shard_bytes)
        names = _file_names(len(counts))
        stops = np.cumsum(counts).tolist()
        files = [self.specs[stop - count : stop] for stop, count in zip(stops, counts)]
        layouts = [_layout(directory / name, file, metadata) for name, file in zip(names, files)]
        if len(names) > 1:
            # The first file appears last, and readers open the index.
            layouts.insert(0, _index(directory / INDEX_NAME, names, files))
        _check_directory(directory, {layout.path.name for layout in layouts})
        super().__init__(directory / names[0], layouts)


def _file_names(count: int) -> list[str]:
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]


def _check_directory(directory: Path, names: set[str]) -> None:
    present = {*directory.glob("*.safetensors"), *directory.glob("*.safetensors.index.json")}
    others = sorted(path.name for path in present if path.name not in names)
    if others:
        raise DataError(
            f"{directory}: holds {len(others)} file(s) of another checkpoint ({others[0]} …); choose an empty "
            "directory or remove them"
        )


def _layout(path: Path, specs: Sequence[CheckpointSpec], metadata: Mapping[str, str] | None) -> Layout:
    """The layout of one file. Wide dtypes come first, so that each tensor is aligned, as torch's loader needs it."""
    offsets: dict[str, int] = {}
    end = 0
    for spec in sorted(specs, key=lambda spec: -ITEM_BYTES[spec.dtype]):
        offsets[spec.name] = end
        end += spec.nbytes
    table: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    for spec in specs:
        start = offsets[spec.name]
        table[spec.name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": [start, start + spec.nbytes]}
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    header = len(text).to_bytes(8, "little") + text
    slots = [
        Slot(spec.name, spec.nbytes, len(header) + offsets[spec.name], f"{spec.dtype} data of shape {spec.shape}")
        for spec in specs
    ]
    return Layout(path, header, slots, len(header) + end)


def _index(path: Path, names: Sequence[str], files: Sequence[Sequence[CheckpointSpec]]) -> Layout:
    weight_map = {spec.name: name for name, specs in zip(names, files) for spec in specs}
    total = sum(spec.nbytes for specs in files for spec in specs)
    table = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    text = (json.dumps(table, indent=2, ensure_ascii=False) + "\n").encode()
    return Layout(path, text, [], len(text))
