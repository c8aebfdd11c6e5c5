"""Importance matrices: the legacy `.dat` file that ik_llama.cpp and every quantizer of its kind reads, both ways.

Little-endian, no alignment:

    i32        n_entries (>= 1)
    n_entries times:
      i32      length of the name
      bytes    name, no terminator: a weight, "blk.0.ffn_up.weight"
      i32      ncall: graph evaluations that touched the weight (one a chunk where a chunk is one batch)
      i32      nval (>= 1): columns x matrices, matrix (expert, head) after matrix
      f32      x nval: mean square of what entered each column, times ncall
    optional:
      i32      last_call: the largest ncall of the run, taken as its number of chunks
      i32      length of the dataset's name
      bytes    dataset's name

The file does not say how many matrices an entry has nor how many vectors each of them saw.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from quantkit.errors import DataError, FormatError, UnsupportedError
from quantkit.files.atomic import writing
from quantkit.files.mapping import map_file

_LONGEST_NAME = 4096  # GGUF keeps names in 63 bytes; a longer length is a sign of desynchronised data
_INT32_MAX = 2**31 - 1


@dataclass
class Entry:
    """What entered one weight.

    values: float32[matrices, n], mean square of each column over the vectors seen.
    counts: int64[matrices], vectors seen by each matrix; what a legacy file gives is its `calls` for want of better.
    calls:  graph evaluations behind the values, their weight when matrices are merged.
    """

    values: np.ndarray
    counts: np.ndarray
    calls: int

    def columns(self, n: int) -> np.ndarray:
        """The values as float32[matrices, n]; DataError unless they are a multiple of `n` columns."""
        if n <= 0 or self.values.size % n:
            raise DataError(f"{self.values.size} importance values do not fit rows of {n} columns")
        return self.values.reshape(-1, n)


@dataclass
class Imatrix:
    """Entries by weight name, in the order in which the weights were first met."""

    entries: dict[str, Entry]
    chunks: int = 0
    dataset: str = ""

    def __getitem__(self, name: str) -> Entry:
        return self.entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self.entries

    def __len__(self) -> int:
        return len(self.entries)


# ---------------------------------------------------------------------------------------------------------------- read


@dataclass
class _Cursor:
    """A position in the file's bytes, with errors that say where it is and what it wanted."""

    path: Path
    data: bytes
    at: int = 0
    where: str = field(default="header")

    def fail(self, problem: str) -> FormatError:
        return FormatError(f"{self.path}: {self.where}, offset {self.at}: {problem}")

    @property
    def left(self) -> int:
        return len(self.data) - self.at

    def take(self, size: int, what: str) -> bytes:
        if size > self.left:
            raise self.fail(f"{what} needs {size} bytes, the file has {self.left} left; it is truncated or corrupt")
        self.at += size
        return self.data[self.at - size : self.at]

    def integer(self, what: str, least: int, most: int) -> int:
        value = struct.unpack("<i", self.take(4, what))[0]
        if not least <= value <= most:
            self.at -= 4
            raise self.fail(f"{what} is {value}, expected {least} to {most}")
        return value

    def text(self, what: str, least: int, most: int) -> str:
        raw = self.take(self.integer(f"length of {what}", least, most), what)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            self.at -= len(raw)
            raise self.fail(f"{what} is not UTF-8") from None


def read(path: str | os.PathLike[str]) -> Imatrix:
    """Read a legacy importance matrix. Every entry comes as one matrix; `Entry.columns(n)` parts it by row length."""
    path = Path(path)
    cursor = _Cursor(path, map_file(path).tobytes())
    if cursor.data[:4] == b"GGUF":
        raise UnsupportedError(
            f"{path}: an importance matrix in GGUF form is not read; make a legacy one (quantkit imatrix -o X.dat)"
        )
    n_entries = cursor.integer("number of entries", 1, max(1, len(cursor.data) // 17))  # 17: the smallest entry
    entries: dict[str, Entry] = {}
    for index in range(n_entries):
        cursor.where = f"entry {index} of {n_entries}"
        name = cursor.text("name", 1, _LONGEST_NAME)
        cursor.where += f" ({name!r})"
        if name in entries:
            raise cursor.fail("a second entry of this name")
        entries[name] = _read_entry(cursor)
    cursor.where = "trailer"
    if not cursor.left:
        return Imatrix(entries)
    chunks = cursor.integer("last_call", 0, _INT32_MAX)
    dataset = cursor.text("dataset name", 0, 1 << 16)
    if cursor.left:
        raise cursor.fail(f"{cursor.left} bytes follow the end")
    return Imatrix(entries, chunks, dataset)


def _read_entry(cursor: _Cursor) -> Entry:
    calls = cursor.integer("ncall", 0, _INT32_MAX)
    n_values = cursor.integer("number of values", 1, _INT32_MAX)
    start = cursor.at
    values = np.frombuffer(cursor.take(4 * n_values, f"{n_values} values"), "<f4").astype(np.float32)
    bad = np.flatnonzero(~(np.isfinite(values) & (values >= 0)))
    if len(bad):
        cursor.at = start + 4 * int(bad[0])
        raise cursor.fail(
            f"value {bad[0]} of {n_values} is {values[bad[0]]}; {len(bad)} value(s) are negative or not finite"
        )
    if calls:
        values /= np.float32(calls)
    return Entry(values.reshape(1, -1), np.array([calls], np.int64), calls)


# --------------------------------------------------------------------------------------------------------------- write


def write(path: str | os.PathLike[str], imatrix: Imatrix) -> None:
    """Write a legacy importance matrix, atomically; the same matrix gives the same bytes."""
    if not imatrix.entries:
        raise DataError(f"{path}: an importance matrix needs at least one entry, this one has none")
    with writing(path) as file:
        file.write(struct.pack("<i", len(imatrix)))
        for name, entry in imatrix.entries.items():
            values = np.ascontiguousarray(entry.values, "<f4").reshape(-1)
            if not (np.isfinite(values) & (values >= 0)).all():
                raise DataError(f"{path}: entry {name!r} holds values that are negative or not finite")
            if entry.calls:
                values = values * np.float32(entry.calls)
            raw = name.encode()
            file.write(struct.pack("<i", len(raw)) + raw + struct.pack("<ii", entry.calls, values.size))
            file.write(values.tobytes())
        raw = imatrix.dataset.encode()
        file.write(struct.pack("<ii", imatrix.chunks, len(raw)) + raw)


# --------------------------------------------------------------------------------------------------------------- merge


def merge(imatrices: Iterable[Imatrix], weights: Sequence[float] | None = None) -> Imatrix:
    """The mean of several importance matrices, each entry weighed by its calls (times `weights`, one a matrix).

    Entries that only some of them have are kept. Values without calls (a file may say 0) count as one call. Chunks
    add up; the dataset is all of theirs, joined by "+".
    """
    matrices = list(imatrices)
    shares = [1.0] * len(matrices) if weights is None else list(weights)
    if not matrices or len(shares) != len(matrices):
        raise DataError(f"cannot merge {len(matrices)} importance matrices with {len(shares)} weights")
    if any(not (np.isfinite(share) and share > 0) for share in shares):
        raise DataError(f"weights of a merge must be finite and positive, got {shares}")
    found: dict[str, list[tuple[float, Entry]]] = {}
    for share, matrix in zip(shares, matrices):
        for name, entry in matrix.entries.items():
            found.setdefault(name, []).append((share * max(1, entry.calls), entry))
    entries = {name: _mean(name, parts) for name, parts in found.items()}
    datasets = list(dict.fromkeys(m.dataset for m in matrices if m.dataset))
    return Imatrix(entries, sum(m.chunks for m in matrices), "+".join(datasets))


def _mean(name: str, parts: list[tuple[float, Entry]]) -> Entry:
    """Weighted mean of one weight's entries, in the shape of the one that tells most about its matrices."""
    sizes = {entry.values.size for _, entry in parts}
    if len(sizes) > 1:
        raise DataError(f"entry {name!r} has {sorted(sizes)} values: these matrices are of different models")
    shape = max((entry.values.shape for _, entry in parts), key=lambda s: s[0])
    total = sum(weight for weight, _ in parts)
    values = sum(weight / total * entry.values.reshape(shape).astype(np.float64) for weight, entry in parts)
    counts = sum(np.broadcast_to(entry.counts, shape[:1]) for _, entry in parts)
    calls = sum(max(1, entry.calls) for _, entry in parts)
    return Entry(np.asarray(values, np.float32), np.asarray(counts, np.int64), calls)
