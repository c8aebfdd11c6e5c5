"""Importance matrices as legacy `.dat` files, which ik_llama.cpp and llama.cpp read and write.

The file, little-endian, without alignment:

    i32        n_entries (>= 1)
    n_entries times:
      i32      length of the name
      bytes    name, no terminator: a weight, "blk.0.ffn_up.weight"
      i32      ncall: graph evaluations that used the weight (one a chunk if a chunk is one batch)
      i32      nval (>= 1): columns x matrices, matrix (expert, head) after matrix
      f32      x nval: mean square of the activations that entered each column, times ncall
    optional:
      i32      last_call: the largest ncall of the run, taken as its number of chunks
      i32      length of the dataset's name
      bytes    dataset's name

The file does not say how many matrices an entry has, nor how many vectors each of them saw. The policy for experts
that saw none is appended to the dataset's name, as " (missing experts: layer-mean)": readers copy that name.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from quantkit.errors import FormatError
from quantkit.formats.atomic import writing
from quantkit.formats.imatrix.matrix import DESCRIBED_DATASET, Entry, Imatrix
from quantkit.formats.mapping import map_file

_LONGEST_NAME = 4096  # GGUF keeps names in 63 bytes; a longer length is a sign of desynchronised data
_INT32_MAX = 2**31 - 1


@dataclass
class _Cursor:
    """A position in the file's bytes; errors name the entry, the offset and the field."""

    path: Path
    data: np.ndarray  # uint8, mapped
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
        return self.data[self.at - size : self.at].tobytes()

    def integer(self, what: str, least: int, most: int) -> int:
        (value,) = struct.unpack("<i", self.take(4, what))
        if not least <= value <= most:
            self.at -= 4
            raise self.fail(f"{what} is {value}, expected {least} to {most}")
        return int(value)

    def text(self, what: str, least: int, most: int) -> str:
        raw = self.take(self.integer(f"length of {what}", least, most), what)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            self.at -= len(raw)
            raise self.fail(f"{what} is not UTF-8") from None


def read(path: str | os.PathLike[str]) -> Imatrix:
    """Read a legacy file. Each entry is one matrix; `Entry.columns(n)` divides it into rows of `n` columns.

    FormatError names the entry and the offset of what is wrong.
    """
    path = Path(path)
    data = map_file(path)
    cursor = _Cursor(path, data)
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
    said = DESCRIBED_DATASET.fullmatch(dataset)
    return Imatrix(entries, chunks, said[1], policy=said[2]) if said else Imatrix(entries, chunks, dataset)


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
    return Entry(values.reshape(1, -1), np.array([max(1, calls)], np.int64), calls)


def write(path: str | os.PathLike[str], imatrix: Imatrix) -> None:
    """Write a legacy file atomically; the same matrix gives the same bytes."""
    with writing(path) as file:
        file.write(struct.pack("<i", len(imatrix)))
        for name, entry in imatrix.entries.items():
            values = np.ascontiguousarray(entry.values, "<f4").reshape(-1)
            if entry.calls:
                values = values * np.float32(entry.calls)
            raw = name.encode()
            file.write(struct.pack("<i", len(raw)) + raw + struct.pack("<ii", entry.calls, values.size))
            file.write(values.tobytes())
        raw = imatrix.described.encode(errors="backslashreplace")  # names of files need not be UTF-8
        file.write(struct.pack("<ii", imatrix.chunks, len(raw)) + raw)
