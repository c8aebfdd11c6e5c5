"""Reading safetensors checkpoints: lazy tensors over read-only mappings, exact float32 values without torch.

    u64 N; N bytes of JSON; data

The JSON is one object: "__metadata__" (strings, optional) and for each tensor
`"name": {"dtype": "BF16", "shape": [rows, columns], "data_offsets": [start, stop]}`, offsets from the start of the
data. The tensors fill the data without holes or overlaps. Little-endian, row-major.

A sharded checkpoint has model.safetensors.index.json, whose "weight_map" names the file of each tensor.

Every number is checked against the file before it is used; a wrong one is a FormatError with file, byte and both
numbers.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Protocol

import numpy as np

from quantkit.errors import DataError, FormatError, UnsupportedError
from quantkit.formats.atomic import allow_open_files
from quantkit.formats.mapping import map_file, release, require_whole
from quantkit.formats.safetensors.json_scanner import Scanner
from quantkit.formats.safetensors.writer import INDEX_NAME, ITEM_BYTES, CheckpointSpec, CheckpointWriter

__all__ = ["Checkpoint", "CheckpointSpec", "CheckpointTensor", "CheckpointWriter", "open_checkpoint"]

MAX_HEADER = 64 << 20  # bytes, of a header or an index; the largest published index has 12 MiB
MAX_TENSORS = 1 << 18  # of a checkpoint; 61 layers of 384 experts with their scales are 140544
MAX_FILE_TENSORS = 1 << 16
MAX_NAME_BYTES = 4096
MAX_METADATA_BYTES = 4 << 20  # of one string
MAX_DIMS = 8

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
    if data.size > MAX_HEADER:
        raise FormatError(f"{path}: {data.size} bytes, an index has up to {MAX_HEADER}")
    scan = Scanner(path, data.tobytes(), 0)
    weight_map: dict[str, str] | None = None
    for key in scan.members("the index", MAX_NAME_BYTES):
        if key != "weight_map":
            scan.skip()
            continue
        weight_map = {}
        for name in scan.members("weight_map", MAX_NAME_BYTES):
            at = scan.pos
            file = scan.string(f"file of tensor {name!r}", MAX_NAME_BYTES)
            if file != os.path.basename(file) or file in ("", ".", "..") or set(file) & set("/\\:\0"):
                raise scan.error(f"tensor {name!r} is said to be in {file!r}, which is not a plain file name", at)
            weight_map[name] = file
            if len(weight_map) > MAX_TENSORS:
                raise scan.error(f"{len(weight_map)} tensors up to here, quantkit reads up to {MAX_TENSORS}")
    scan.finish()
    if not weight_map:
        raise FormatError(f"{path}: the index has no weight_map, or an empty one")
    for file in sorted(set(weight_map.values())):
        if not (path.parent / file).exists():
            n = sum(name == file for name in weight_map.values())
            raise FormatError(f"{path}: {n} tensors are in {file}, which is missing")
    return weight_map


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
    """One .safetensors file, parsed and checked."""

    def __init__(self, path: Path):
        self.path = path
        self.bytes = map_file(path)
        size = self.bytes.size
        if size < 8:
            raise FormatError(f"{path}: {size} bytes, a safetensors file has at least 8; it is truncated or corrupt")
        length = int.from_bytes(self.bytes[:8].tobytes(), "little")
        if length > size - 8:
            raise FormatError(f"{path}: at byte 0: the header is {length} bytes long, the file has {size - 8} after it")
        if length > MAX_HEADER:
            raise FormatError(f"{path}: at byte 0: the header is {length} bytes long, up to {MAX_HEADER} are read")
        self.start = 8 + length
        self.metadata: dict[str, str] = {}
        self.tensors: list[CheckpointTensor] = []
        scan = Scanner(path, self.bytes[8 : self.start].tobytes(), 8)
        for key in scan.members("the header", MAX_NAME_BYTES):
            if key == "__metadata__":
                for name in scan.members(key, MAX_NAME_BYTES):
                    self.metadata[name] = scan.string(f"metadata {name!r}", MAX_METADATA_BYTES)
            else:
                self.tensors.append(self._read_tensor(scan, key))
                if len(self.tensors) > MAX_FILE_TENSORS:
                    raise scan.error(f"more than {MAX_FILE_TENSORS} tensors, which is what quantkit reads of one file")
        scan.finish()
        self._check_coverage()

    def _read_tensor(self, scan: Scanner, name: str) -> CheckpointTensor:
        what, at = f"tensor {name!r}", scan.pos
        dtype, shape, offsets = "", None, None
        for key in scan.members(what, MAX_NAME_BYTES):
            if key == "dtype":
                dtype = scan.string(f"dtype of {what}", 64)
            elif key == "shape":
                shape = scan.integers(f"shape of {what}", MAX_DIMS)
            elif key == "data_offsets":
                offsets = scan.integers(f"data_offsets of {what}", 2)
            else:
                raise scan.error(f"{what} has the key {key!r}; known are dtype, shape and data_offsets", at)
        if not dtype or shape is None or offsets is None or len(offsets) != 2:
            raise scan.error(f"{what} lacks dtype, shape or two data_offsets", at)
        if dtype not in ITEM_BYTES:
            raise scan.error(f"{what} has dtype {dtype!r}; known are {', '.join(ITEM_BYTES)}", at)
        expected = ITEM_BYTES[dtype]
        for n in shape:
            expected *= n
        start, stop = offsets
        held = self.bytes.size - self.start
        if start > stop or stop > held:
            raise scan.error(f"{what} takes bytes {start} to {stop} of the data, which are {held} bytes", at)
        if stop - start != expected:
            raise scan.error(
                f"{what} is {dtype} of shape {shape}, {expected} bytes; its offsets span {stop - start}", at
            )
        return CheckpointTensor(name, dtype, tuple(shape), self.start + start, expected, self.path, self.bytes)

    def _check_coverage(self) -> None:
        """FormatError unless the tensors fill the data, one after the other."""
        end, previous = self.start, "the header"
        for tensor in sorted(self.tensors, key=lambda t: (t.offset, t.nbytes)):
            if tensor.offset != end:
                fault = "overlaps" if tensor.offset < end else "leaves a hole behind"
                where = f"tensor {tensor.name!r} at byte {tensor.offset}"
                raise FormatError(f"{self.path}: {where} {fault} {previous}, which ends at {end}")
            end, previous = tensor.offset + tensor.nbytes, repr(tensor.name)
        if end != self.bytes.size:
            raise FormatError(f"{self.path}: the tensors end at byte {end}, the file has {self.bytes.size}")
