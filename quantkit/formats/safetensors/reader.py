"""Reading safetensors checkpoints: lazy tensors over read-only mappings, exact float32 values without torch.

    u64 N; N bytes of JSON; data

The JSON is one object: "__metadata__" (strings, optional) and for each tensor
`"name": {"dtype": "BF16", "shape": [rows, columns], "data_offsets": [start, stop]}`, offsets from the start of the
data. The tensors fill the data without holes or overlaps. Little-endian, row-major.

A sharded checkpoint has model.safetensors.index.json, whose "weight_map" names the file of each tensor.

The safetensors library opens every file: it checks the header and lists names, dtypes and shapes. The bytes are read
from our own mapping, at the offsets that follow, because the library only gives tensors of numpy or torch. What the
library lets pass and quantkit refuses: a name that is there twice (the library takes the last), an unknown key, dtypes
that cannot be read, and sizes that no published checkpoint has. For the keys the header is read a second time as JSON.
Opening 92,000 tensors in 163 files with their index takes 0.57 s (AMD EPYC, files in the page cache), 40 % of it for
this. The worst header of MAX_HEADER bytes takes 0.5 GiB and two seconds to be refused.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Protocol

import numpy as np

from quantkit.errors import DataError, FormatError, UnsupportedError, printable
from quantkit.formats.atomic import allow_open_files
from quantkit.formats.mapping import map_file, release, require_whole
from quantkit.formats.safetensors.writer import INDEX_NAME, ITEM_BYTES, CheckpointSpec, CheckpointWriter
from quantkit.inputs import json_input

__all__ = ["Checkpoint", "CheckpointSpec", "CheckpointTensor", "CheckpointWriter", "open_checkpoint"]

MAX_HEADER = 16 << 20  # bytes of a file's header; one of MAX_FILE_TENSORS tensors has 10 MiB
MAX_INDEX = 64 << 20  # bytes; the largest published index has 12 MiB
MAX_TENSORS = 1 << 18  # of a checkpoint; 61 layers of 384 experts with their scales are 140544
MAX_FILE_TENSORS = 1 << 16
MAX_NAME = 4096  # characters of a tensor's name
MAX_DIMS = 8
_KEYS = {"dtype": "", "shape": "", "data_offsets": ""}.keys()

# ------------------------------------------------------------------------------------------------------------ the types


@cache
def _e4m3_values() -> np.ndarray:
    """float32[256]: sign, 4 bits of exponent (bias 7), 3 of mantissa; no Inf, and 0x7F and 0xFF are NaN ("fn")."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    value = np.where(exponent > 0, (8 + mantissa) * 2.0 ** (exponent - 10), mantissa * 2.0**-9)
    value[code & 127 == 127] = np.nan
    return np.where(code < 128, value, -value).astype(np.float32)


@cache
def _e8m0_values() -> np.ndarray:
    """float32[256]: 2^(code - 127), the scales of MX blocks; 255 is NaN."""
    return np.append(np.exp2(np.arange(-127.0, 128.0)), np.nan).astype(np.float32)


def _bf16(raw: np.ndarray) -> np.ndarray:
    """The upper half of a float32."""
    bits: np.ndarray = np.left_shift(raw.view("<u2"), 16, dtype=np.uint32)
    return bits.view(np.float32)


def _e5m2(raw: np.ndarray) -> np.ndarray:
    """The upper byte of a float16."""
    return (raw.astype(np.uint16) << 8).view(np.float16).astype(np.float32)


_TO_FLOAT: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "F32": lambda raw: raw.view("<f4").astype(np.float32),
    "F16": lambda raw: raw.view("<f2").astype(np.float32),
    "BF16": _bf16,
    "F8_E4M3": lambda raw: _e4m3_values()[raw],
    "F8_E5M2": _e5m2,
    "F8_E8M0": lambda raw: _e8m0_values()[raw],
    "I8": lambda raw: raw.view("i1").astype(np.float32),
    "U8": lambda raw: raw.astype(np.float32),
    "BOOL": lambda raw: raw.astype(np.float32),
    "I16": lambda raw: raw.view("<i2").astype(np.float32),
    "U16": lambda raw: raw.view("<u2").astype(np.float32),
}
"""uint8 bytes, a whole number of rows, to float32 values: the dtypes that float32 holds exactly."""


@cache
def _code_values(dtype: str) -> np.ndarray:
    found = _TO_FLOAT[dtype](np.arange(256, dtype=np.uint8))
    found.flags.writeable = False
    return found


# ---------------------------------------------------------------------------------------------------------- the tensors


class CheckpointTensor:
    """A lazy tensor of a checkpoint. Nothing is read before its data are asked for.

    name, dtype ("BF16", "F8_E4M3" …), shape (numpy order, () for a scalar), nbytes, path (of its file), offset (in it)
    """

    __slots__ = ("_file", "dtype", "name", "nbytes", "offset", "path", "shape")

    def __init__(
        self, name: str, dtype: str, shape: tuple[int, ...], offset: int, nbytes: int, path: Path, data: np.ndarray
    ):
        self.name, self.dtype, self.shape = name, dtype, shape
        self.offset, self.nbytes, self.path = offset, nbytes, path
        self._file = data  # uint8: all bytes of the file

    def __repr__(self) -> str:
        return f"<tensor {self.name} {self.dtype} {self.shape}>"

    @property
    def n_rows(self) -> int:
        """Product of all but the last axis; 1 for a vector and a scalar."""
        return math.prod(self.shape[:-1])

    def raw(self) -> np.ndarray:
        """uint8[nbytes]: a read-only view of the mapping. It may be unaligned for the dtype."""
        require_whole(self._file, self.path)
        return self._file[self.offset : self.offset + self.nbytes]

    def rows(self, start: int, stop: int) -> np.ndarray:
        """float32[stop - start, shape[-1]]: the exact values of some rows; all leading axes count as one.

        UnsupportedError for a dtype whose values float32 does not hold exactly (F64 and wide integers: use `raw`).
        """
        convert = _TO_FLOAT.get(self.dtype)
        if convert is None:
            raise UnsupportedError(
                f"{self.path}: tensor {self.name} is {self.dtype}, whose values are not exact in float32; use raw()"
            )
        if not 0 <= start <= stop <= self.n_rows:
            raise DataError(f"{self.path}: tensor {self.name} has rows 0 to {self.n_rows}, not {start} to {stop}")
        columns = self.shape[-1] if self.shape else 1
        width = columns * ITEM_BYTES[self.dtype]
        return convert(self.raw()[start * width : stop * width]).reshape(stop - start, columns)

    def columns(self, start: int, stop: int) -> np.ndarray:
        """float32[shape[0], stop - start]: the exact values of some columns of a matrix; errors as for `rows`."""
        (rows, columns), each = self.shape, ITEM_BYTES[self.dtype]
        if self.dtype not in _TO_FLOAT or not 0 <= start <= stop <= columns:
            raise DataError(f"{self.path}: tensor {self.name} is {self.dtype} {self.shape}, not read by columns")
        part = np.ascontiguousarray(self.raw().reshape(rows, -1)[:, start * each : stop * each])
        return _TO_FLOAT[self.dtype](part.reshape(-1)).reshape(rows, stop - start)

    def values(self) -> np.ndarray:
        """float32[256]: the value of each code of an 8-bit dtype, read-only."""
        return _code_values(self.dtype)

    def dequantize(self) -> np.ndarray:
        """float32[shape]: the exact values."""
        return self.rows(0, self.n_rows).reshape(self.shape)

    def send(self, kind: str, start: int, stop: int, descriptor: int, offset: int) -> bool:
        """Write some rows to a file as f32, f16 or bf16. False where they are not floats, or not all numbers that fit,
        or were not written; what is there then is of no use."""
        from quantkit.types.native import recode

        size = ITEM_BYTES[self.dtype]
        width = self.nbytes // max(1, self.n_rows)
        source = self.dtype.lower()
        if source not in recode.TARGETS or (stop - start) * width // size % recode.LANES:
            return False
        return recode.write_recoded(source, kind, self.raw()[start * width : stop * width], descriptor, offset)

    def forget(self, start: int, stop: int) -> None:
        """Release the mapped pages of some rows; they are read again when they are asked for again."""
        width = self.nbytes // max(1, self.n_rows)
        release(self.raw()[start * width : stop * width])


@dataclass(frozen=True)
class Checkpoint:
    """An open checkpoint: `tensors` by name, in the order of files and of each file's header."""

    path: Path
    paths: list[Path]
    metadata: dict[str, str]
    tensors: dict[str, CheckpointTensor]


# -------------------------------------------------------------------------------------------------------------- opening


def open_checkpoint(directory: str | os.PathLike[str]) -> Checkpoint:
    """Open the checkpoint of a Hugging Face directory, or one .safetensors file.

    In a directory: the files of model.safetensors.index.json, else model.safetensors, else all *.safetensors. Files are
    read in order of name. FormatError if anything is inconsistent.
    """
    path = Path(directory)
    if path.is_file():
        return join(path, [_File(path)], [path])
    if not path.is_dir():
        raise FormatError(f"{path}: no such directory")
    if (path / INDEX_NAME).exists():
        weight_map = read_index(path / INDEX_NAME)
        files = [path / name for name in sorted(set(weight_map.values()))]
        checkpoint = join(path, map(_File, files), files)
        check_index(path / INDEX_NAME, weight_map, checkpoint)
        return checkpoint
    if (path / "model.safetensors").exists():
        return join(path, [_File(path / "model.safetensors")], [path / "model.safetensors"])
    found = sorted(path.glob("*.safetensors"))
    if not found:
        raise FormatError(f"{path}: no {INDEX_NAME}, no model.safetensors and no other *.safetensors in this directory")
    return join(path, map(_File, found), found)


class File(Protocol):
    """An opened file, as `join` needs it."""

    path: Path
    metadata: dict[str, str]
    tensors: list[CheckpointTensor]


def join(path: Path, files: Iterable[File], paths: list[Path]) -> Checkpoint:
    """Join files, which the iterable opens one by one, to a checkpoint. FormatError if a tensor is in two of them."""
    allow_open_files(len(paths))
    metadata: dict[str, str] = {}
    tensors: dict[str, CheckpointTensor] = {}
    for file in files:
        metadata = {**file.metadata, **metadata}
        for tensor in file.tensors:
            if tensor.name in tensors:
                raise FormatError(f"{file.path}: tensor {tensor.name!r} is also in {tensors[tensor.name].path}")
            tensors[tensor.name] = tensor
        if len(tensors) > MAX_TENSORS:
            raise FormatError(f"{file.path}: {len(tensors)} tensors up to here, quantkit reads up to {MAX_TENSORS}")
    return Checkpoint(path, paths, metadata, tensors)


def read_index(path: Path) -> dict[str, str]:
    """The weight_map of an index: tensor name -> file name. FormatError if one of these files is missing."""
    data = map_file(path)
    if data.size > MAX_INDEX:
        raise FormatError(f"{path}: {data.size} bytes, an index has up to {MAX_INDEX}")
    index = json_input.parse(data.tobytes(), str(path), unique_keys=True)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise FormatError(f"{path}: the index has no weight_map, or an empty one")
    if len(weight_map) > MAX_TENSORS:
        raise FormatError(f"{path}: {len(weight_map)} tensors, quantkit reads up to {MAX_TENSORS}")
    counts = Counter[str]()
    for name, file in weight_map.items():
        if not _is_plain(file):
            raise FormatError(f"{path}: tensor {name!r} is said to be in {file!r:.300}, which is not a plain file name")
        counts[file] += 1
    for file in sorted(counts):
        if not (path.parent / file).exists():
            raise FormatError(f"{path}: {counts[file]} tensors are in {file}, which is missing")
    return weight_map


def _is_plain(file: object) -> bool:
    """Whether a value is the name of a file in the same directory, on every system."""
    return isinstance(file, str) and file not in ("", ".", "..") and not set(file) & set("/\\:\0")


def check_index(path: Path, weight_map: dict[str, str], checkpoint: Checkpoint) -> None:
    """FormatError if an index and the tensors of its files differ."""
    for name, file in weight_map.items():
        tensor = checkpoint.tensors.get(name)
        if tensor is None or tensor.path.name != file:
            where = f"is in {tensor.path.name}" if tensor else "is in none of the files"
            raise FormatError(f"{path}: tensor {name!r} should be in {file}, it {where}")
    if len(checkpoint.tensors) > len(weight_map):
        extra = next(name for name in checkpoint.tensors if name not in weight_map)
        raise FormatError(
            f"{path}: the files hold {len(checkpoint.tensors)} tensors, the index names {len(weight_map)}; "
            f"{extra!r} in {checkpoint.tensors[extra].path.name} is not in it"
        )


# ------------------------------------------------------------------------------------------------------------- one file


class _File:
    """One .safetensors file, opened and checked by the safetensors library.

    path, bytes (uint8: all of the file), metadata ("__metadata__"), tensors (in the order of the header)
    """

    def __init__(self, path: Path):
        self.path = path
        self.bytes = map_file(path)
        size = self.bytes.size
        length = int.from_bytes(self.bytes[:8].tobytes(), "little")
        if MAX_HEADER < length <= size - 8:
            raise FormatError(f"{path}: the header is {length} bytes long, up to {MAX_HEADER} are read")
        self._start = 8 + length  # of the data
        self.metadata, listed = _listed(path, self.bytes)
        end, found = self._start, {}
        for name, dtype, shape in listed:
            found[name] = tensor = self._tensor(name, dtype, shape, end)
            end += tensor.nbytes
        if end != size:
            raise FormatError(f"{path}: the tensors end at byte {end}, the file has {size}: another program changed it")
        self.tensors = [found[name] for name in self._names()]

    def _tensor(self, name: str, dtype: str, shape: list[int], start: int) -> CheckpointTensor:
        if len(name) > MAX_NAME:
            raise FormatError(f"{self.path}: the name of a tensor is {len(name)} characters long, up to {MAX_NAME}")
        if dtype not in ITEM_BYTES:
            raise FormatError(f"{self.path}: tensor {name!r} is {dtype}; quantkit reads {', '.join(ITEM_BYTES)}")
        if len(shape) > MAX_DIMS:
            raise FormatError(f"{self.path}: tensor {name!r} has {len(shape)} dimensions, up to {MAX_DIMS} are read")
        nbytes = ITEM_BYTES[dtype] * math.prod(shape)
        return CheckpointTensor(name, dtype, tuple(shape), start, nbytes, self.path, self.bytes)

    def _names(self) -> list[str]:
        """The names in the order of the header. FormatError for keys that the library skips in silence."""
        table = json_input.parse(self.bytes[8 : self._start].tobytes(), f"{self.path}: the header", unique_keys=True)
        table.pop("__metadata__", None)
        for name, entry in table.items():
            if not isinstance(entry, dict) or entry.keys() != _KEYS:
                raise FormatError(
                    f"{self.path}: tensor {name!r} is {entry!r:.300}; it should have the keys {', '.join(_KEYS)}"
                )
        return list(table)


def _listed(path: Path, data: np.ndarray) -> tuple[dict[str, str], list[tuple[str, str, list[int]]]]:
    """Metadata, and (name, dtype, shape) of the tensors in the order of their data, as the library reads them."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            names = file.offset_keys()
            if len(names) > MAX_FILE_TENSORS:
                raise FormatError(f"{path}: {len(names)} tensors, quantkit reads up to {MAX_FILE_TENSORS} of one file")
            slices = [(name, file.get_slice(name)) for name in names]
            return file.metadata() or {}, [(name, entry.get_dtype(), entry.get_shape()) for name, entry in slices]
    except (SafetensorError, OSError) as error:
        reason = str(error).removeprefix("Error while deserializing header: ")
    except BaseException as error:
        # A panic of Rust code, which is no Exception, so that nobody catches it by accident.
        if type(error).__name__ != "PanicException":
            raise
        reason = str(error)
    remedy = "it is truncated or corrupt: fetch it again"
    if "unknown variant" in reason:
        remedy = "if this is a new dtype, try pip install -U safetensors"
    reason = printable(reason[:300]) + _details(data)
    raise FormatError(f"{path}: safetensors refuses this file of {data.size} bytes: {reason}; {remedy}")


def _details(data: np.ndarray) -> str:
    """What messages of the library lack: the first tensor whose size is not that of its shape, or the missing bytes."""
    start = 8 + int.from_bytes(data[:8].tobytes(), "little")
    if start > data.size:
        return f"; the header should end at byte {start}" if data.size >= 8 else ""
    try:
        table = json_input.parse(data[8:start].tobytes(), "")
        end = 0
        for name, entry in table.items():
            if name != "__metadata__":
                first, stop = entry["data_offsets"]
                if len(entry["shape"]) > MAX_DIMS:
                    return ""  # their product may have millions of digits
                nbytes = ITEM_BYTES[entry["dtype"]] * math.prod(entry["shape"])
                if nbytes != stop - first:
                    what = f"{name[:300]!r}, {entry['dtype']} of shape {entry['shape']!r:.100}"
                    return f"; tensor {what}, has {nbytes} bytes; its offsets span {stop - first}"
                end = max(end, stop)
    except (FormatError, AttributeError, KeyError, TypeError, ValueError):
        return ""  # the library's reason is all that can be said
    return f"; the tensors end at byte {start + end}" if start + end != data.size else ""
