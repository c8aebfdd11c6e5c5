"""Writing GGUF: all shapes and types are known first, so the header is written once and data follow in row chunks.

Memory stays at one chunk. Files and whole sets of shards appear under their final names only when complete (atomic.py).
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from quantkit import types
from quantkit.errors import DataError
from quantkit.files.atomic import AtomicFile, allow_open_files, os_errors, publish, require_space
from quantkit.files.metadata import ARRAY, DTYPES, IDS, Metadata
from quantkit.types import QuantType

VERSION = 3
ALIGNMENT = 32  # the only one that every reader takes, so general.alignment is never written
MAX_DIMS = 4
MAX_NAME_BYTES = 63  # readers cut longer names without a word
MAX_SHARDS = 65535  # split.count is u16

_SHARD_SUFFIX = re.compile(r"(-\d{5}-of-\d{5})?\.gguf$")


@dataclass(frozen=True)
class TensorSpec:
    """Name, shape (numpy order, rows last but one) and type of a tensor to be written."""

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
        group = self.type.interleave
        if group > 1 and (len(self.shape) == 1 or self.shape[-2] % group):
            raise DataError(
                f"tensor {self.name}: {self.type.name} needs rows by the {group}, the shape is {self.shape}"
            )
        if self.shape[-1] % self.type.block_size:
            raise DataError(
                f"tensor {self.name}: rows of {self.shape[-1]} elements are not a multiple of the "
                f"{self.type.block_size} in a block of {self.type.name}"
            )

    @property
    def n_rows(self) -> int:
        rows = 1
        for n in self.shape[:-1]:
            rows *= n
        return rows

    @property
    def row_bytes(self) -> int:
        return self.type.row_bytes(self.shape[-1])

    @property
    def nbytes(self) -> int:
        return self.n_rows * self.row_bytes


def partition(sizes: Sequence[int], max_bytes: int | None = None, max_tensors: int | None = None) -> list[int]:
    """Cut a list of tensor sizes into runs: the number of tensors of each shard.

    As few shards as the limits allow and, with that many, the largest as small as can be. A tensor above `max_bytes`
    gets a shard of its own.
    """
    if not sizes:
        return [0]
    for limit in (max_bytes, max_tensors):
        if limit is not None and limit < 1:
            raise DataError(f"a shard's limit must be at least 1, not {limit}")

    # A tensor above the limit counts as one that fills a shard, so that nothing joins it and the limit holds elsewhere.
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

    # Filling greedily up to a cap takes the fewest runs, and fewer the higher the cap, so the cap can be bisected.
    low, high = max(sizes), min(sum(sizes), max_bytes or sum(sizes))
    fewest = len(cut(high))
    while low < high:
        middle = (low + high) // 2
        if len(cut(middle)) <= fewest:
            high = middle
        else:
            low = middle + 1
    return cut(high)


class Writer:
    """Writes one GGUF file, or a set of shards when a limit asks for more than one.

        with Writer(path, metadata, specs, split_max_bytes=50 * 10**9) as w:
            w.write(name, data)     # tensors in the order of specs, each in as many pieces as you like

    metadata         Metadata or a dict; general.alignment and split.* are left out, the writer sets its own
    split_max_bytes  limit on the tensor bytes of a shard (padded to 32; the header is not counted)
    paths            final names: `path`, or PREFIX-00001-of-0000N.gguf for each of N > 1 shards

    Leaving the block completes the files; an exception in it, or tensors that are missing, remove what was written.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        metadata: Mapping[str, Any],
        specs: Iterable[TensorSpec],
        split_max_bytes: int | None = None,
        split_max_tensors: int | None = None,
    ):
        self.path = Path(path)
        self.specs = list(specs)
        _check_unique(self.specs)
        counts = partition([_padded(spec.nbytes) for spec in self.specs], split_max_bytes, split_max_tensors)
        self.paths = _shard_names(self.path, len(counts))
        self._headers = _headers(metadata, self.specs, counts)
        require_space(self.path.parent, sum(map(len, self._headers)) + sum(_padded(s.nbytes) for s in self.specs))
        allow_open_files(len(counts))
        self._first_of_next = np.cumsum(counts).tolist()
        self._files: list[AtomicFile] = []
        self._index = 0  # of the tensor being written
        self._written = 0  # bytes of it
        try:
            self._begin_shards()
        except BaseException:
            self.abort()
            raise

    def write(self, name: str, data: Any) -> None:
        """Append bytes, uint8 of any shape, to tensor `name`: the one begun, or the next of the specs.

        DataError when it is another's turn or when it gets more bytes than its spec says.
        """
        if isinstance(data, (bytes, bytearray, memoryview)):
            data = np.frombuffer(data, np.uint8)
        if not isinstance(data, np.ndarray) or data.dtype != np.uint8:
            raise DataError(
                f"{self.path}: tensor {name}: expected uint8 data, got {getattr(data, 'dtype', type(data))}"
            )
        if self._index == len(self.specs):
            raise DataError(f"{self.path}: tensor {name}: all {len(self.specs)} tensors are written already")
        spec = self.specs[self._index]
        if name != spec.name:
            raise DataError(
                f"{self.path}: it is the turn of tensor {spec.name} ({self._written} of {spec.nbytes} bytes written), "
                f"not of {name}"
            )
        if self._written + data.nbytes > spec.nbytes:
            raise DataError(
                f"{self.path}: tensor {name}: {self._written + data.nbytes} bytes, its {spec.type.name} data of shape "
                f"{spec.shape} are {spec.nbytes}"
            )
        file = self._files[-1]
        with os_errors(file.temporary, f"write tensor {name}"):
            file.stream.write(np.ascontiguousarray(data).data)
            self._written += data.nbytes
            if self._written == spec.nbytes:
                file.stream.write(bytes(_padded(spec.nbytes) - spec.nbytes))
                self._index += 1
                self._written = 0
        if self._written == 0:
            self._begin_shards()

    def close(self) -> None:
        """Check that every tensor is complete and give the files their final names."""
        if self._index < len(self.specs):
            spec = self.specs[self._index]
            self.abort()
            raise DataError(
                f"{self.path}: {self._index} of {len(self.specs)} tensors were written; tensor {spec.name} has "
                f"{self._written} of {spec.nbytes} bytes"
            )
        try:
            publish(self._files)
        finally:
            self.abort()

    def abort(self) -> None:
        """Remove what was written. Does nothing to files that are complete."""
        for file in self._files:
            file.discard()

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def _begin_shards(self) -> None:
        """Open the file that the next tensor goes to, and write its header, if it is not open yet."""
        while len(self._files) < len(self.paths) and (
            not self._files or self._index >= self._first_of_next[len(self._files) - 1]
        ):
            file = AtomicFile(self.paths[len(self._files)])
            self._files.append(file)
            with os_errors(file.temporary, "write the header"):
                file.stream.write(self._headers[len(self._files) - 1])


# --------------------------------------------------------------------------------------------------------------- layout


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _check_unique(specs: Sequence[TensorSpec]) -> None:
    seen: set[str] = set()
    for spec in specs:
        if spec.name in seen:
            raise DataError(f"tensor {spec.name} is to be written twice")
        seen.add(spec.name)


def _shard_names(path: Path, count: int) -> list[Path]:
    if count == 1:
        return [path]
    if count > MAX_SHARDS:
        raise DataError(f"{path}: {count} shards, a set has at most {MAX_SHARDS}; raise the limit of a shard's size")
    prefix = _SHARD_SUFFIX.sub("", path.name)
    return [path.with_name(f"{prefix}-{i + 1:05d}-of-{count:05d}.gguf") for i in range(count)]


def _headers(metadata: Mapping[str, Any], specs: Sequence[TensorSpec], counts: Sequence[int]) -> list[bytes]:
    """The header of every shard: all metadata in the first, the split keys in each when there are several."""
    common = Metadata(metadata) if not isinstance(metadata, Metadata) else metadata.copy()
    for key in [k for k in common if k == "general.alignment" or k.startswith("split.")]:
        del common[key]
    if len(counts) == 1:
        return [_header(common, specs)]
    headers, first = [], 0
    for number, count in enumerate(counts):
        own = common if number == 0 else Metadata()
        own.set("split.no", number, "u16")
        own.set("split.count", len(counts), "u16")
        own.set("split.tensors.count", len(specs), "i32")
        headers.append(_header(own, specs[first : first + count]))
        first += count
    return headers


def _header(metadata: Metadata, specs: Sequence[TensorSpec]) -> bytes:
    parts = [b"GGUF", struct.pack("<IQQ", VERSION, len(specs), len(metadata))]
    for key, value in metadata.items():
        parts += [_string(key, key), _value(key, value, metadata.kind(key))]
    offset = 0
    for spec in specs:
        dims = spec.shape[::-1]
        parts.append(_string(spec.name, spec.name))
        parts.append(struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, spec.type.ggml_type, offset))
        offset += _padded(spec.nbytes)
    header = b"".join(parts)
    return header.ljust(_padded(len(header)), b"\0")


def _value(key: str, value: Any, kind: str) -> bytes:
    """A value with its kind before it."""
    values = value if isinstance(value, list) else [value]
    if kind == "str":
        data = b"".join([_string(v, key) for v in values])
    else:
        data = np.array(values, DTYPES[kind]).tobytes()
    if isinstance(value, list):
        return struct.pack("<IIQ", ARRAY, IDS[kind], len(values)) + data
    return struct.pack("<I", IDS[kind]) + data


def _string(text: str, key: str) -> bytes:
    try:
        data = text.encode("utf-8", "surrogateescape")  # bytes that were no UTF-8 when read come out as they were
    except UnicodeEncodeError as error:
        raise DataError(f"{key}: {text[:40]!r} cannot be written as UTF-8: {error.reason}") from None
    return struct.pack("<Q", len(data)) + data
