"""`Writer`: writes a GGUF file or a set of shards. All shapes and types are given first, then data in pieces of rows.

Files, and sets of shards, appear under their final names only when they are complete (stream.py, atomic.py).
"""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from quantkit import types
from quantkit.errors import DataError, QuantkitError
from quantkit.formats.atomic import os_errors, refuse_inputs
from quantkit.formats.gguf.metadata import ARRAY, DTYPES, IDS, Metadata, Value
from quantkit.formats.stream import Layout, Slot, StreamWriter
from quantkit.types import QuantType

MAGIC = b"GGUF"
VERSION = 3
ALIGNMENT = 32  # the default, which every reader takes; so general.alignment is never written
MAX_DIMS = 4
MAX_NAME_BYTES = 63  # readers truncate longer names silently
MAX_SHARDS = 65535  # split.count is u16

_SHARD_SUFFIX = re.compile(r"(-\d{5}-of-\d{5})?\.gguf$")


@dataclass(frozen=True)
class TensorSpec:
    """Name, shape (numpy order, rows last but one) and type of a tensor to be written.

    DataError if a reader could not take the tensor: the length of the name, the dimensions, rows that are not a
    multiple of the type's block, row counts that are not a multiple of its interleaved group.
    """

    name: str
    shape: tuple[int, ...]
    type: QuantType

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(int(n) for n in self.shape))
        if isinstance(self.type, str):
            object.__setattr__(self, "type", types.layout(self.type))
        size = len(self.name.encode("utf-8", "surrogatepass"))
        if not 1 <= size <= MAX_NAME_BYTES:
            raise DataError(f"tensor {self.name!r}: a name has 1 to {MAX_NAME_BYTES} bytes, this one {size}")
        if not 1 <= len(self.shape) <= MAX_DIMS or min(self.shape) < 1:
            raise DataError(f"tensor {self.name}: shape {self.shape} has not 1 to {MAX_DIMS} dimensions of at least 1")
        if self.type.whole_tensor and self.n_rows > 1:
            raise DataError(
                f"tensor {self.name}: {self.type.name} can only be read; convert it, to iq2_bn without loss"
            )
        group = self.type.interleave
        if group > 1 and (len(self.shape) == 1 or self.shape[-2] % group):
            raise DataError(
                f"tensor {self.name}: {self.type.name} needs a multiple of {group} rows, the shape is {self.shape}"
            )
        if self.shape[-1] % self.type.block_size:
            raise DataError(
                f"tensor {self.name}: rows of {self.shape[-1]} elements are not a multiple of the "
                f"{self.type.block_size} in a block of {self.type.name}"
            )

    @property
    def n_rows(self) -> int:
        """Product of all but the last axis."""
        return math.prod(self.shape[:-1])

    @property
    def row_bytes(self) -> int:
        """Bytes of an encoded row."""
        return self.type.row_bytes(self.shape[-1])

    @property
    def nbytes(self) -> int:
        """Bytes of the encoded tensor, without padding."""
        return self.n_rows * self.row_bytes


class ShardsOfSet(NamedTuple):
    """Some shards of a set: their numbers from 0, the number of all shards, and of the tensors in all of them."""

    numbers: tuple[int, ...]
    shards: int
    tensors: int


def partition(sizes: Sequence[int], max_bytes: int | None = None, max_tensors: int | None = None) -> list[int]:
    """Divide tensors, given by their sizes in bytes, into shards: the number of tensors of each.

    The number of shards is the smallest that the limits allow; with that number, the largest shard is as small as
    possible. A tensor above `max_bytes` gets a shard of its own.
    """
    if not sizes:
        return [0]
    for limit in (max_bytes, max_tensors):
        if limit is not None and limit < 1:
            raise DataError(f"a shard's limit must be at least 1, not {limit}")

    # A tensor above the limit counts as one that fills a shard: no other joins it, and the limit holds for the rest.
    sizes = [min(size, max_bytes or size) for size in sizes]

    def cut(cap: int) -> list[int]:
        counts, filled = [0], 0
        for size in sizes:
            full = counts[-1] == max_tensors or filled + size > cap
            if full and counts[-1]:
                counts.append(0)
                filled = 0
            counts[-1] += 1
            filled += size
        return counts

    # Filling greedily up to a cap needs the fewest shards, and no more with a higher cap: the cap can be bisected.
    low, high = max(sizes), min(sum(sizes), max_bytes or sum(sizes))
    fewest = len(cut(high))
    while low < high:
        middle = (low + high) // 2
        if len(cut(middle)) <= fewest:
            high = middle
        else:
            low = middle + 1
    return cut(high)


class Writer(StreamWriter):
    """Writes one GGUF file, or a set of shards when a limit asks for more than one.

        with Writer(path, metadata, specs, split_max_bytes=50 * 10**9) as w:
            w.write(name, data)     # uint8 rows; tensors in the order of specs, each in any number of pieces

    metadata         Metadata or a dict; general.alignment and split.* are ignored, the writer sets its own
    split_max_bytes  limit on the tensor bytes of a shard (padded to 32, without the header)
    split_max_tensors  limit on the tensors of a shard
    shards           instead of limits: the number of tensors of each shard, such as `GGUF.shards` of another file
    chosen           with `shards`: these are only some shards of a set
    numbered         name and mark even a single file as shard 1 of 1
    durable          whether the files are synced before they appear (stream.py)
    resumable        whether the partial files stay when the block is left early (stream.py)
    paths            final names: `path`, or PREFIX-00001-of-0000N.gguf for each of N > 1 shards (N >= 1 if numbered)

    Leaving the block completes the files. An exception in it, or a missing tensor, removes the partial files.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        metadata: Mapping[str, object],
        specs: Iterable[TensorSpec],
        split_max_bytes: int | None = None,
        split_max_tensors: int | None = None,
        shards: Sequence[int] | None = None,
        durable: bool = True,
        numbered: bool = False,
        resumable: bool = False,
        chosen: ShardsOfSet | None = None,
    ):
        path = Path(path)
        self.specs, self._numbered, self._chosen = list(specs), numbered, chosen
        found = layouts(path, metadata, self.specs, split_max_bytes, split_max_tensors, shards, numbered, chosen)
        super().__init__(path, found, durable, resumable)

    def rewrite(self, metadata: Mapping[str, object]) -> None:
        """Replace the metadata by others of the same size."""
        counts = [len(layout.slots) for layout in self._layouts]
        self.rewrite_headers(_headers(metadata, self.specs, counts, self._numbered, self._chosen))


def layouts(
    path: Path,
    metadata: Mapping[str, object],
    specs: Sequence[TensorSpec],
    max_bytes: int | None = None,
    max_tensors: int | None = None,
    shards: Sequence[int] | None = None,
    numbered: bool = False,
    chosen: ShardsOfSet | None = None,
) -> list[Layout]:
    """The layout of every file that a Writer with these arguments writes: name, header, offsets of the tensors."""
    counts = _counts(path, specs, max_bytes, max_tensors, shards)
    if chosen is not None:
        names = shard_names(path, chosen.shards)
        paths = [names[number] for number in chosen.numbers]
    else:
        paths = [path] if len(counts) == 1 and not numbered else shard_names(path, len(counts))
    headers = _headers(metadata, specs, counts, numbered, chosen)
    stops = np.cumsum(counts).tolist()
    parts = [specs[stop - count : stop] for stop, count in zip(stops, counts)]
    return [_layout(*part) for part in zip(paths, headers, parts)]


def _counts(
    path: Path,
    specs: Sequence[TensorSpec],
    max_bytes: int | None,
    max_tensors: int | None,
    shards: Sequence[int] | None,
) -> list[int]:
    """The number of tensors of each file."""
    if shards is None:
        return partition([_padded(spec.nbytes) for spec in specs], max_bytes, max_tensors)
    if max_bytes is not None or max_tensors is not None:
        raise DataError(f"{path}: give the tensors of each shard or a limit, not both")
    if sum(shards) != len(specs) or min(shards, default=-1) < 0:
        raise DataError(f"{path}: shards of {sum(shards)} tensors in all for a file of {len(specs)}")
    return list(shards)


def refuse_outputs(outputs: Iterable[Path], inputs: Sequence[Path]) -> None:
    """QuantkitError if an existing output is one of the inputs, or of another format: then its name is a slip."""
    for path in outputs:
        refuse_inputs([path], inputs)
        if not path.is_file():
            continue
        with os_errors(path, "read what would be replaced"), open(path, "rb") as stream:
            magic = stream.read(len(MAGIC))
        if magic not in (MAGIC, b""):
            raise QuantkitError(
                f"{path}: exists and is no GGUF file (it begins with {magic!r}), so it is not replaced; write to "
                "another name, or remove it"
            )


# --------------------------------------------------------------------------------------------------------------- layout


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _layout(path: Path, header: bytes, specs: Sequence[TensorSpec]) -> Layout:
    """The layout of one file: the data follow the header, each tensor padded, the last one too."""
    slots, offset = [], len(header)
    for spec in specs:
        slots.append(Slot(spec.name, spec.nbytes, offset, f"{spec.type.name} data of shape {spec.shape}"))
        offset += _padded(spec.nbytes)
    return Layout(path, header, slots, offset)


def shard_names(path: Path, count: int) -> list[Path]:
    """Names of a set of shards, PREFIX-00001-of-0000N.gguf …; `path` may have such an ending, which is replaced."""
    if count > MAX_SHARDS:
        raise DataError(f"{path}: {count} shards, a set has at most {MAX_SHARDS}; raise the limit of a shard's size")
    if not path.name:
        raise DataError(f"{path}: this is a directory; name the file to write in it")
    prefix = _SHARD_SUFFIX.sub("", path.name)
    return [path.with_name(f"{prefix}-{i + 1:05d}-of-{count:05d}.gguf") for i in range(count)]


def _bare(metadata: Mapping[str, object]) -> Metadata:
    """A copy without the keys that describe the file's layout."""
    common = Metadata(metadata) if not isinstance(metadata, Metadata) else metadata.copy()
    for key in [k for k in common if k == "general.alignment" or k.startswith("split.")]:
        del common[key]
    return common


def _headers(
    metadata: Mapping[str, object],
    specs: Sequence[TensorSpec],
    counts: Sequence[int],
    numbered: bool,
    chosen: ShardsOfSet | None = None,
) -> list[bytes]:
    """The header of every file: all metadata in the first shard, split keys in each; none in a single file."""
    if len(counts) == 1 and not numbered and chosen is None:
        return [_header(_bare(metadata), specs)]
    headers, first = [], 0
    chosen = chosen or ShardsOfSet(tuple(range(len(counts))), len(counts), len(specs))
    for number, count in zip(chosen.numbers, counts, strict=True):
        own = _bare(metadata) if number == 0 else Metadata()
        own.set("split.no", number, "u16")
        own.set("split.count", chosen.shards, "u16")
        own.set("split.tensors.count", chosen.tensors, "i32")
        headers.append(_header(own, specs[first : first + count]))
        first += count
    return headers


def _header(metadata: Metadata, specs: Sequence[TensorSpec]) -> bytes:
    parts = [MAGIC, struct.pack("<IQQ", VERSION, len(specs), len(metadata))]
    parts += [pair_bytes(metadata, key) for key in metadata]
    offset = 0
    for spec in specs:
        dims = spec.shape[::-1]
        parts.append(_string(spec.name, spec.name))
        parts.append(struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, spec.type.ggml_type, offset))
        offset += _padded(spec.nbytes)
    header = b"".join(parts)
    return header.ljust(_padded(len(header)), b"\0")


def pair_bytes(metadata: Metadata, key: str) -> bytes:
    """A key and its value as bytes of a file."""
    return _string(key, key) + _value(key, metadata[key], metadata.kind(key))


def _value(key: str, value: Value, kind: str) -> bytes:
    """A value as bytes of a file, its kind first."""
    values = value if isinstance(value, list) else [value]
    if kind == "str":
        data = _strings([str(text) for text in values], key)
    else:
        data = np.array(values, DTYPES[kind]).tobytes()
    if isinstance(value, list):
        return struct.pack("<IIQ", ARRAY, IDS[kind], len(values)) + data
    return struct.pack("<I", IDS[kind]) + data


def _string(text: str, key: str) -> bytes:
    return _strings([text], key)


def _strings(texts: Sequence[str], key: str) -> bytes:
    """Texts as bytes of a file, each after its length. Vocabularies have hundreds of thousands."""
    try:  # surrogates stand for bytes that were not UTF-8 when they were read
        encoded = [text.encode("utf-8", "surrogateescape") for text in texts]
    except UnicodeEncodeError as error:
        raise DataError(f"{key}: {error.object[:40]!r} cannot be written as UTF-8: {error.reason}") from None
    lengths = np.array([len(each) for each in encoded], "<u8").tobytes()
    pieces: list[bytes] = [b""] * (2 * len(encoded))
    pieces[0::2] = [lengths[at : at + 8] for at in range(0, len(lengths), 8)]
    pieces[1::2] = encoded
    return b"".join(pieces)
