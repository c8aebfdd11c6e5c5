"""Reading GGUF files: metadata and lazy tensors over a read-only mapping, versions 2 and 3, sets of shards.

    header       "GGUF", u32 version, u64 tensors, u64 keys
    each key     string key; u32 kind; value             kinds: quantkit.formats.gguf.metadata
    each tensor  string name; u32 n_dims; n_dims x u64 dims; u32 type id; u64 offset
    zeros        up to a multiple of the alignment (u32 general.alignment, else 32): the start of the data
    data         each tensor at its offset from the start of the data, a multiple of the alignment

    string       u64 length, UTF-8 bytes          array   u32 kind of the elements, u64 count, elements

All numbers are little-endian. dims are fastest first; shapes here are numpy's, the reverse. A row is one run of the
last axis, `row_meta + blocks`; a tensor's data are its rows in order.

A set of shards is `PREFIX-00001-of-00003.gguf` …: the first holds all metadata, each holds the keys split.no,
split.count and split.tensors.count. The format is llama.cpp's. Ids that mean different types to different programs are
in `dialects`.

Every number of a file is checked against the file's size before it is used. So corrupt and hostile files end in a
FormatError that names file, byte and both numbers, in time and memory bounded by the MAX_* below.
"""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from quantkit import types
from quantkit.errors import DataError, FormatError, UnsupportedError
from quantkit.formats.atomic import allow_open_files
from quantkit.formats.gguf import dialects, scales
from quantkit.formats.gguf.metadata import ARRAY, DTYPES, KINDS, Metadata
from quantkit.formats.gguf.writer import ALIGNMENT, MAX_DIMS, TensorSpec, Writer
from quantkit.formats.mapping import map_file, release, require_whole
from quantkit.types import QuantType

__all__ = ["GGUF", "Metadata", "Shard", "Tensor", "TensorSpec", "Writer", "open"]

PART = "quantkit.part.tensors"  # key of a file that holds some tensors of a model (pipelines/parts.py)
MAX_HEADER = 40 << 20  # bytes; the largest vocabularies of today take 16 MiB
MAX_ELEMENTS = 3 << 20  # of all metadata arrays together
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 17  # 61 layers of 256 separate experts are 46848
MAX_KEY_BYTES = 65535
MAX_NAME_BYTES = 1024
MAX_ALIGNMENT = 1 << 24  # bytes; 32 is usual, and a header is padded to a multiple

_KEY_MIN = 8 + 4 + 1  # bytes that a key takes at least
_TENSOR_MIN = 8 + 4 + 8 + 4 + 8  # bytes that a tensor info takes at least
_SHARD_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)
_u32 = struct.Struct("<I").unpack_from
_u64 = struct.Struct("<Q").unpack_from


# ---------------------------------------------------------------------------------------------------------- the tensors


class Tensor:
    """A lazy tensor of a file. Nothing is read before its data are asked for.

    name    as in the file                     type    its QuantType
    shape   numpy order, rows last but one; (n,) for a vector
    nbytes  size of its data                   n_rows  product of all but the last axis
    path    the file that holds it             offset  of its data in that file
    scale   the tensor of an NVFP4 tensor's scales, None without one (`gguf.scales`)
    """

    __slots__ = ("_file", "is_complete", "name", "nbytes", "offset", "path", "scale", "shape", "type")

    def __init__(self, name: str, shape: tuple[int, ...], type: QuantType, nbytes: int, offset: int, path: Path):
        self.name, self.shape, self.type, self.nbytes = name, shape, type, nbytes
        self.offset, self.path = offset, path
        self._file = np.empty(0, np.uint8)
        self.scale: Tensor | None = None
        self.is_complete = True  # False if the scales may be in a file that was not opened

    def __repr__(self) -> str:
        return f"<tensor {self.name} {self.type.name} {self.shape}>"

    @property
    def n_rows(self) -> int:
        """Product of all but the last axis; 1 for a vector."""
        return math.prod(self.shape[:-1])

    @property
    def row_bytes(self) -> int:
        """Bytes of a row as stored."""
        return self.type.row_bytes(self.shape[-1])

    @property
    def scales(self) -> np.ndarray | None:
        """float32[matrices]: what the values of each matrix are multiplied by; None: 1. FormatError for bad numbers."""
        if not self.is_complete:
            raise FormatError(
                f"{self.path}: tensor {self.name}: its values are multiplied by {scales.scale_name(self.name)}, if the "
                "model has such a tensor, and only a part of the model is open; give all of it"
            )
        if self.scale is None:
            return None
        found = scales.checked(self.scale.dequantize(), f"{self.scale.path}: tensor {self.scale.name}")
        return np.broadcast_to(found, scales.matrices(self.shape))

    @property
    def data(self) -> np.ndarray:
        """uint8[n_rows, row_bytes]: a read-only view of the mapping, rows in file order (for i2_s a copy)."""
        return self._rows(0, self.n_rows)

    @property
    def stored(self) -> np.ndarray:
        """uint8[nbytes]: a read-only view of the mapping, for callers that only copy."""
        require_whole(self._file, self.path)
        return self._file[self.offset : self.offset + self.nbytes]

    def release(self) -> None:
        """Remove its data from this process's memory; they are mapped again when they are needed."""
        release(self.data)

    def _rows(self, start: int, stop: int) -> np.ndarray:
        return self.type.rows_of(self.stored, self.shape[-1], start, stop)

    def rows(self, start: int, stop: int) -> np.ndarray:
        """uint8[stop - start, row_bytes]: a view of some rows; of interleaved types only whole groups.

        DataError for rows that the tensor does not have, and for parts of a group.
        """
        group = self.type.interleave
        if not 0 <= start <= stop <= self.n_rows:
            raise DataError(f"{self.path}: tensor {self.name} has rows 0 to {self.n_rows}, not {start} to {stop}")
        if start % group or stop % group:
            raise DataError(
                f"{self.path}: tensor {self.name}: {self.type.name} interleaves {group} rows, so slices begin and end "
                f"at multiples of {group}, not {start} to {stop}"
            )
        return self._rows(start, stop)

    def groups(self, numbers: np.ndarray) -> np.ndarray:
        """uint8[len(numbers), group, row_bytes]: groups of interleaved rows by their ascending int64 numbers; of types
        that do not interleave, single rows."""
        found: np.ndarray = self.data.reshape(-1, self.type.interleave, self.row_bytes)[numbers]
        return found

    def decode_rows(self, start: int, stop: int) -> np.ndarray:
        """float32[stop - start, shape[-1]]: the exact values of some rows. Errors as of `rows`.

        UnsupportedError for a type without a decoder.
        """
        if not self.type.has_codec:
            raise UnsupportedError(f"{self.path}: tensor {self.name}: quantkit cannot decode {self.type.name}")
        return scales.decode(self, self.rows(start, stop), start)

    def dequantize(self) -> np.ndarray:
        """float32[shape]: the exact values of the whole tensor."""
        return self.decode_rows(0, self.n_rows).reshape(self.shape)


# ------------------------------------------------------------------------------------------------------------- the file


class GGUF:
    """An open GGUF file, or all shards of one.

    path      the file that was opened          paths    all files, in order
    metadata  Metadata of the first shard       tensors  dict name -> Tensor, in file order
    version   of the format                     size     bytes of all files
    shards    number of tensors in each file
    """

    def __init__(self, path: Path, shards: list[Shard]):
        self.path = path
        self.paths = [shard.path for shard in shards]
        self.shards = [len(shard.tensors) for shard in shards]
        self.metadata = shards[0].metadata
        self.version = shards[0].version
        self.size = sum(shard.bytes.size for shard in shards)
        self.tensors: dict[str, Tensor] = {}
        for shard in shards:
            for name, tensor in shard.tensors.items():
                if name in self.tensors:
                    raise FormatError(f"{shard.path}: tensor {name} is also in {self.tensors[name].path}")
                self.tensors[name] = tensor
        _attach_scales(self.tensors, self._is_whole(shards))

    def _is_whole(self, shards: list[Shard]) -> bool:
        """Whether all tensors of the model are there: not of a part (`quantize --only`) nor of some shards of a set."""
        count = self.metadata.get("split.count", 0)
        return PART not in self.metadata and (not isinstance(count, int) or len(shards) >= count)

    def __repr__(self) -> str:
        return f"<gguf {self.path}: {len(self.tensors)} tensors, {self.size} bytes in {len(self.paths)} file(s)>"


def _attach_scales(tensors: dict[str, Tensor], is_whole: bool) -> None:
    """Give NVFP4 tensors the tensors of their scales. FormatError for one that does not fit."""
    for tensor in [t for t in tensors.values() if t.type.name == scales.SCALED]:
        present = [tensors[name] for name in scales.companions(tensor.name)[::2] if name in tensors]
        if present[1:]:
            raise FormatError(
                f"{tensor.path}: tensor {tensor.name} has two tensors of scales, {present[0].name} and "
                f"{present[1].name}; it is multiplied by one: get the file again"
            )
        tensor.scale = present[0] if present else None
        tensor.is_complete = is_whole or tensor.scale is not None
        found, count = tensor.scale, scales.matrices(tensor.shape)
        if found is not None and (found.type.name != "f32" or found.shape not in ((1,), (count,))):
            raise FormatError(
                f"{found.path}: tensor {found.name} is {found.type.name} of shape {found.shape}; {tensor.name}, "
                f"{tensor.type.name} of shape {tensor.shape}, needs f32 of shape {(count,)}: one number for each "
                "matrix; get the file again"
            )


def open(path: str | os.PathLike[str]) -> GGUF:
    """Open the GGUF file `path`, or all shards of its set. FormatError if anything is inconsistent."""
    path = Path(path)
    opened = Shard(path)
    count = opened.split_key("split.count", default=0)
    if count <= 1:  # merging tools leave 0
        return GGUF(path, [opened])
    paths = _shard_paths(opened, count)
    allow_open_files(count)
    total = opened.split_key("split.tensors.count")
    if total > MAX_TENSORS:
        raise FormatError(f"{path}: split.tensors.count is {total}, quantkit reads up to {MAX_TENSORS}")
    shards: list[Shard] = []
    for number, other in enumerate(paths):
        shard = opened if other == path else Shard(other)
        for key, expected in (("split.no", number), ("split.count", count), ("split.tensors.count", total)):
            if (found := shard.split_key(key)) != expected:
                raise FormatError(
                    f"{shard.path}: {key} is {found}, by name and {path.name} it must be {expected}; these shards are "
                    "not of one file"
                )
        shards.append(shard)
        held = sum(len(shard.tensors) for shard in shards)
        if held > total:
            raise FormatError(
                f"{shard.path}: {held} tensors up to this shard, split.tensors.count is {total} there and in "
                f"{path.name}; these shards are not of one file"
            )
        if number:  # only the first shard's metadata count
            shard.metadata.clear()
    joined = GGUF(path, shards)
    if len(joined.tensors) != total:
        raise FormatError(
            f"{path}: the {count} shards to {paths[-1].name} hold {len(joined.tensors)} tensors, split.tensors.count "
            f"is {total}; one of them is of another file or of another split"
        )
    return joined


def require_model(file: GGUF) -> GGUF:
    """Return the file; FormatError if it is an importance matrix in GGUF form."""
    if file.metadata.get("general.type") == "imatrix":
        raise FormatError(f"{file.path}: an importance matrix (general.type), not a model; it goes with --imatrix")
    return file


def open_parts(paths: Sequence[str | os.PathLike[str]]) -> GGUF:
    """Open some shards of a set; the others may be missing. Metadata are those of the first path."""
    return GGUF(Path(paths[0]), [Shard(Path(path)) for path in paths])


def _shard_paths(shard: Shard, count: int) -> list[Path]:
    """Paths of all shards of the set that `shard` belongs to; FormatError if one is missing."""
    match = _SHARD_NAME.fullmatch(shard.path.name)
    if match is None or int(match[3]) != count:
        raise FormatError(
            f"{shard.path}: split.count is {count}, so the name must end in -NNNNN-of-{count:05d}.gguf; "
            "without it the other shards cannot be found"
        )
    paths = [shard.path.with_name(f"{match[1]}-{number:05d}-of-{count:05d}.gguf") for number in range(1, count + 1)]
    missing = [number for number, path in enumerate(paths, 1) if not path.exists()]
    if missing:
        others = f", and so are {len(missing) - 1} more: {_some(missing[1:])}" if missing[1:] else ""
        raise FormatError(
            f"{paths[missing[0] - 1]}: shard {missing[0]} of {count} is missing{others}; {shard.path.name} is of a set "
            f"of {count}"
        )
    return paths


def _some(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (", …" if len(numbers) > 8 else "")


class Shard:
    """One file, parsed and checked.

    spans       place of each key with its value: first byte, and the byte after the last
    infos       place of all tensor infos, in the same form
    data_start  the byte that offsets of tensors count from
    """

    def __init__(self, path: Path):
        self.path = path
        self.bytes = map_file(path)
        cursor = _Cursor(path, self.bytes)
        self.version = _version(cursor)
        n_tensors = cursor.count("number of tensors", _TENSOR_MIN, MAX_TENSORS)
        n_keys = cursor.count("number of metadata keys", _KEY_MIN, MAX_KEYS)
        self.spans: dict[str, tuple[int, int]] = {}
        self.metadata = _read_metadata(cursor, n_keys, self.spans)
        self.alignment = self._alignment()
        infos = cursor.pos
        self.tensors = _read_tensors(cursor, n_tensors, self.alignment, self.metadata)
        self.infos = infos, cursor.pos
        self.data_start = -(-cursor.pos // self.alignment) * self.alignment
        for tensor in self.tensors.values():
            tensor._file = self.bytes

    def _alignment(self) -> int:
        value = self.metadata.get("general.alignment", ALIGNMENT)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0 or value & (value - 1):
            raise FormatError(f"{self.path}: general.alignment is {value!r}; it must be a power of two")
        if value > MAX_ALIGNMENT:
            raise FormatError(f"{self.path}: general.alignment is {value}, quantkit reads up to {MAX_ALIGNMENT}")
        return value

    @property
    def trailing(self) -> int:
        """Bytes after the last tensor and its padding, which no program reads."""
        end = max((tensor.offset + tensor.nbytes for tensor in self.tensors.values()), default=self.data_start)
        return max(0, self.bytes.size - -(-end // self.alignment) * self.alignment)

    def split_key(self, key: str, default: int | None = None) -> int:
        """The number in a `split.*` key; FormatError if it is missing without a default, or not a number."""
        value = self.metadata.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise FormatError(f"{self.path}: metadata key {key} is {value!r}; it must be a number")
        return value


# -------------------------------------------------------------------------------------------------------------- parsing


class _Cursor:
    """A position in the header. Each read checks that the bytes are there and moves on."""

    def __init__(self, path: Path, data: np.ndarray):
        self.path = path
        self.view = data.data
        self.size = data.size
        self.end = min(data.size, MAX_HEADER)
        self.pos = 0
        self.elements = 0

    def error(self, message: str, pos: int | None = None) -> FormatError:
        return FormatError(f"{self.path}: at byte {self.pos if pos is None else pos}: {message}")

    def take(self, nbytes: int, what: str) -> int:
        """Move over `nbytes` and return the position where they begin."""
        pos = self.pos
        if nbytes > self.end - pos:
            if self.end < self.size:
                raise self.error(f"{what} takes {nbytes} bytes, past the {MAX_HEADER} that a header may have")
            raise self.error(
                f"{what} takes {nbytes} bytes, the file has {self.end - pos} left; it is truncated or corrupt"
            )
        self.pos = pos + nbytes
        return pos

    def u32(self, what: str) -> int:
        return int(_u32(self.view, self.take(4, what))[0])

    def u64(self, what: str) -> int:
        return int(_u64(self.view, self.take(8, what))[0])

    def count(self, what: str, item_bytes: int, limit: int) -> int:
        """Read a u64, the number of items that follow; FormatError if they exceed the rest of the file, or `limit`."""
        pos = self.pos
        count = self.u64(what)
        if count * item_bytes > self.size - self.pos:
            raise self.error(
                f"{what} is {count}, at least {count * item_bytes} bytes; {self.size - self.pos} are left", pos
            )
        if count > limit:
            raise self.error(f"{what} is {count}, quantkit reads up to {limit}", pos)
        return count

    def string(self, what: str, limit: int, errors: str = "strict") -> str:
        pos = self.pos
        length = self.u64(f"length of {what}")
        if length > limit:
            raise self.error(f"{what} is {length} bytes long, at most {limit} are allowed", pos)
        start = self.take(length, what)
        try:
            return str(self.view[start : self.pos], "utf-8", errors)
        except UnicodeDecodeError as error:
            raise self.error(f"{what} is not UTF-8: {error.reason}", start + error.start) from None

    def strings(self, count: int, what: str) -> list[str]:
        """Read `count` strings. The loop is inlined: vocabularies have hundreds of thousands."""
        view, pos, end = self.view, self.pos, self.end
        found: list[str] = []
        for _ in range(count):
            start = pos + 8
            pos = start + _u64(view, pos)[0] if start <= end else end + 1
            if pos > end:
                self.pos = start - 8
                self.string(f"element {len(found)} of {what}", MAX_HEADER)  # raises an error that names the number
            found.append(str(view[start:pos], "utf-8", "surrogateescape"))
        self.pos = pos
        return found


def _version(cursor: _Cursor) -> int:
    magic = bytes(cursor.view[:4])
    if magic != b"GGUF":
        raise cursor.error(f"a GGUF file begins with {b'GGUF'!r}, this one with {magic!r}")
    cursor.pos = 4
    version = cursor.u32("version")
    if version in (2, 3):
        return version
    swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
    if swapped in (1, 2, 3):
        raise cursor.error(
            f"version {version:#x} is {swapped} byte-swapped: a big-endian file; convert it to little-endian", 4
        )
    raise cursor.error(f"version {version} is not read, versions 2 and 3 are; convert the model again", 4)


def _read_metadata(cursor: _Cursor, count: int, spans: dict[str, tuple[int, int]]) -> Metadata:
    metadata = Metadata()
    for i in range(count):
        pos = cursor.pos
        key = cursor.string(f"metadata key {i + 1} of {count}", MAX_KEY_BYTES)
        if key in metadata:
            raise cursor.error(f"metadata key {key!r} occurs twice", pos)
        what = f"metadata value {key!r}"
        kind = _read_kind(cursor, what)
        value: Any
        if kind == "array":
            kind, value = _read_array(cursor, what)
        elif kind == "str":
            value = cursor.string(what, MAX_HEADER, "surrogateescape")
        else:
            value = _read_numbers(cursor, kind, 1, what)[0]
        metadata._put(key, value, kind)
        spans[key] = pos, cursor.pos
    return metadata


def _read_kind(cursor: _Cursor, what: str) -> str:
    pos = cursor.pos
    number = cursor.u32(f"kind of {what}")
    if number >= len(KINDS):
        raise cursor.error(f"{what} has kind {number}, known are 0 to {len(KINDS) - 1}", pos)
    return KINDS[number]


def _read_array(cursor: _Cursor, what: str) -> tuple[str, list[Any]]:
    pos = cursor.pos
    kind = _read_kind(cursor, f"elements of {what}")
    if kind == KINDS[ARRAY]:
        raise cursor.error(f"{what} is an array of arrays, which no reader of GGUF takes", pos)
    size = 8 if kind == "str" else DTYPES[kind].itemsize
    count = cursor.count(f"number of elements of {what}", size, MAX_ELEMENTS - cursor.elements)
    cursor.elements += count
    return kind, cursor.strings(count, what) if kind == "str" else _read_numbers(cursor, kind, count, what)


def _read_numbers(cursor: _Cursor, kind: str, count: int, what: str) -> list[Any]:
    dtype = DTYPES[kind]
    start = cursor.take(count * dtype.itemsize, what)
    values = np.frombuffer(cursor.view, dtype, count, start)
    if kind != "bool":
        return list(values.tolist())
    if count and values.max() > 1:
        at = int(np.argmax(values > 1))
        raise cursor.error(f"{what} is a bool of value {values[at]}, not 0 or 1", start + at)
    return list(values.astype(bool).tolist())


# -------------------------------------------------------------------------------------------------------- tensor infos


def _read_tensors(cursor: _Cursor, count: int, alignment: int, metadata: Metadata) -> dict[str, Tensor]:
    """Read all tensor infos. Offsets become those in the file; they are checked for overlaps and the file's size."""
    tensors: dict[str, Tensor] = {}
    for i in range(count):
        pos = cursor.pos
        tensor = _read_tensor(cursor, f"tensor {i + 1} of {count}", alignment)
        if tensor.name in tensors:
            raise cursor.error(f"tensor {tensor.name!r} occurs twice", pos)
        tensors[tensor.name] = tensor
    start = -(-cursor.pos // alignment) * alignment
    placed = sorted(tensors.values(), key=lambda t: t.offset)
    for tensor in placed:
        tensor.offset += start
    dialects.check_blocks(cursor.path, placed, cursor.size, alignment, metadata)
    previous_end, previous = start, None
    for tensor in placed:
        end = tensor.offset + tensor.nbytes
        where = f"{cursor.path}: tensor {tensor.name!r} takes bytes {tensor.offset} to {end}"
        if end > cursor.size:
            raise FormatError(f"{where}, the file has {cursor.size}; it is truncated or corrupt")
        if tensor.offset < previous_end and previous is not None:
            raise FormatError(f"{where}, tensor {previous.name!r} ends only at {previous_end}")
        previous_end, previous = end, tensor
    return tensors


def _read_tensor(cursor: _Cursor, what: str, alignment: int) -> Tensor:
    name = cursor.string(f"name of {what}", MAX_NAME_BYTES)
    what = f"tensor {name!r}"
    pos = cursor.pos
    n_dims = cursor.u32(f"number of dimensions of {what}")
    if not 1 <= n_dims <= MAX_DIMS:
        raise cursor.error(f"{what} has {n_dims} dimensions, 1 to {MAX_DIMS} are allowed", pos)
    pos = cursor.pos
    dims = [cursor.u64(f"dimension {d} of {what}") for d in range(n_dims)]
    elements = 1
    for n in dims:
        elements *= n
    if not 0 < elements < 1 << 63:
        raise cursor.error(f"{what} has dimensions {dims}, {elements} elements; 1 to 2^63-1 are allowed", pos)
    pos = cursor.pos
    quant_type = _type_of(cursor, cursor.u32(f"type of {what}"), what, pos)
    if dims[0] % quant_type.block_size:
        raise cursor.error(
            f"{what} has rows of {dims[0]} elements, not a multiple of the {quant_type.block_size} in a block of "
            f"{quant_type.name}",
            pos,
        )
    nbytes = quant_type.tensor_bytes(dims[::-1])
    pos = cursor.pos
    offset = cursor.u64(f"offset of {what}")
    if offset % alignment:
        raise cursor.error(f"{what} has offset {offset}, not a multiple of the alignment {alignment}", pos)
    return Tensor(name, tuple(reversed(dims)), quant_type, nbytes, offset, cursor.path)


def _type_of(cursor: _Cursor, number: int, what: str, pos: int) -> QuantType:
    try:
        return types.from_id(number)
    except FormatError:
        meaning = dialects.foreign(number)
        raise cursor.error(f"{what} has type id {number}, which is not known{meaning}", pos) from None
