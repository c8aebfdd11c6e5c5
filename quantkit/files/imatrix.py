"""Importance matrices: the legacy `.dat` file that ik_llama.cpp and every quantizer of its kind reads, both ways, and
llama.cpp's GGUF form (imatrix_gguf.py).

Of the legacy file, little-endian, no alignment:

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

The file does not say how many matrices an entry has nor how many vectors each of them saw. What was done about experts
that saw none stands behind the dataset's name, as " (missing experts: layer-mean)": readers copy that name.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from quantkit.errors import DataError, FormatError
from quantkit.files.atomic import writing
from quantkit.files.mapping import map_file

_LONGEST_NAME = 4096  # GGUF keeps names in 63 bytes; a longer length is a sign of desynchronised data
_INT32_MAX = 2**31 - 1
POLICIES = ("weight-one", "layer-mean", "error")
_SAID = re.compile(r"(.*) \(missing experts: (weight-one|layer-mean)\)", re.DOTALL)


@dataclass
class Entry:
    """What entered one weight.

    values: float32[matrices, n], mean square of each column over the vectors seen; of a matrix that saw none what
            `fill_missing` put there.
    counts: int64[matrices], vectors seen by each matrix; what a legacy file gives is its `calls` for want of better.
    calls:  graph evaluations behind the values, their weight when matrices of unknown counts are merged.
    """

    values: np.ndarray
    counts: np.ndarray
    calls: int

    @property
    def missing(self) -> list[int]:
        """Matrices that saw nothing."""
        return np.flatnonzero(self.counts == 0).tolist()

    def columns(self, n: int) -> np.ndarray:
        """The values as float32[matrices, n]; DataError unless they are a multiple of `n` columns."""
        if n <= 0 or self.values.size % n:
            raise DataError(f"{self.values.size} importance values do not fit rows of {n} columns")
        return self.values.reshape(-1, n)


@dataclass
class Imatrix:
    """Entries by weight name, in the order in which the weights were first met.

    chunks      of text that were seen            chunk_size  tokens of each; 0 where counts are not known
    dataset     names of the texts, joined by +   policy      what `fill_missing` did, "" where it had nothing to do
    """

    entries: dict[str, Entry]
    chunks: int = 0
    dataset: str = ""
    chunk_size: int = 0
    policy: str = ""

    @property
    def described(self) -> str:
        """The dataset with what was done about experts that saw none of it."""
        return f"{self.dataset} (missing experts: {self.policy})" if self.policy else self.dataset

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
    """Read an importance matrix of either form.

    Every entry of a legacy file comes as one matrix; `Entry.columns(n)` parts it by row length.
    """
    path = Path(path)
    data = map_file(path)
    if data[:4].tobytes() == b"GGUF":
        from quantkit.files import imatrix_gguf

        return imatrix_gguf.read(path)
    cursor = _Cursor(path, data.tobytes())
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
    said = _SAID.fullmatch(dataset)
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


# --------------------------------------------------------------------------------------------------------------- write


def form_of(path: str | os.PathLike[str]) -> str:
    """The form that a file of this name gets: "gguf" where it ends so, else "legacy"."""
    return "gguf" if Path(path).suffix == ".gguf" else "legacy"


def write(path: str | os.PathLike[str], imatrix: Imatrix, form: str = "") -> None:
    """Write an importance matrix, atomically, as "gguf" or "legacy"; by default what its name says (`form_of`).

    The same matrix gives the same bytes. DataError for values that no reader could use, among them those of experts
    that saw nothing and were not filled in.
    """
    if not imatrix.entries:
        raise DataError(f"{path}: an importance matrix needs at least one entry, this one has none")
    for name, entry in imatrix.entries.items():
        if not (np.isfinite(entry.values) & (entry.values >= 0)).all():
            raise DataError(f"{path}: entry {name!r} holds values that are negative or not finite")
    if (form or form_of(path)) == "gguf":
        from quantkit.files import imatrix_gguf

        imatrix_gguf.write(path, imatrix)
        return
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


# --------------------------------------------------------------------------------------------------------------- merge


def merge(imatrices: Iterable[Imatrix], weights: Sequence[float] | None = None) -> Imatrix:
    """The mean of several importance matrices, each times its weight of `weights`.

    Each entry counts as often as vectors entered it, matrix by matrix, so that an expert's values come from those who
    saw it; where some counts are not known (legacy files), as often as it was evaluated. Entries that only some have
    are kept. Values without calls (a file may say 0) count as one call. Chunks add up; the dataset is all of theirs,
    joined by "+".
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
            found.setdefault(name, []).append((share, entry))
    sizes = {m.chunk_size for m in matrices}
    counted = 0 not in sizes
    entries = {name: _mean(name, parts, counted) for name, parts in found.items()}
    datasets = list(dict.fromkeys(m.dataset for m in matrices if m.dataset))
    policy = min((m.policy for m in matrices if m.policy), key=POLICIES.index, default="")  # whatever their order
    if counted and not any(entry.missing for entry in entries.values()):
        policy = ""  # what one lacked another saw
    chunks = sum(m.chunks for m in matrices)
    return Imatrix(entries, chunks, "+".join(datasets), max(sizes) if counted else 0, policy)


def uncounted(imatrices: Iterable[Imatrix]) -> bool:
    """Whether counts of some are lost in a merge, because others have none."""
    return len({m.chunk_size > 0 for m in imatrices}) > 1


def _mean(name: str, parts: list[tuple[float, Entry]], counted: bool) -> Entry:
    """Weighted mean of one weight's entries, in the shape of the one that tells most about its matrices."""
    sizes = {entry.values.size for _, entry in parts}
    if len(sizes) > 1:
        raise DataError(f"entry {name!r} has {sorted(sizes)} values: these matrices are of different models")
    shape = max((entry.values.shape for _, entry in parts), key=lambda s: s[0])
    total = np.zeros(shape[0])
    values = np.zeros(shape)
    for share, entry in parts:
        seen = _spread(entry.counts, shape[0])
        weight = share * (seen if counted else max(1, entry.calls) * (seen > 0))
        total += weight
        values += weight[:, None] * entry.values.reshape(shape).astype(np.float64)
    filled = np.mean([entry.values.reshape(shape) for _, entry in parts], axis=0)  # where nobody saw anything
    known = total[:, None] > 0
    values = np.where(known, values / np.where(known, total[:, None], 1), filled)
    calls = sum(max(1, entry.calls) for _, entry in parts)
    counts = sum(_spread(e.counts, shape[0]) for _, e in parts) if counted else np.where(total > 0, calls, 0)
    return Entry(np.asarray(values, np.float32), np.asarray(counts, np.int64), calls)


def _spread(counts: np.ndarray, matrices: int) -> np.ndarray:
    """Counts of each matrix, of an entry that has one for all."""
    return np.broadcast_to(counts, (matrices,))


# ------------------------------------------------------------------------------------------------------ missing experts


def check_policy(policy: str) -> None:
    """DataError for what is no policy."""
    if policy not in POLICIES:
        raise DataError(f"unknown policy for missing experts '{policy}'; known are {', '.join(POLICIES)}")


def fill_missing(imatrix: Imatrix, policy: str) -> Imatrix:
    """An importance matrix in which experts that saw nothing have values, and which says how they got them.

    weight-one   ones: every column counts the same, as without an importance matrix; what llama.cpp does
    layer-mean   the mean of the layer's other experts, by the vectors that each saw
    error        a DataError that names them

    Entries of which no matrix saw anything are left out, as quantizers then do without.
    """
    check_policy(policy)
    entries, used = {}, ""
    for name, entry in imatrix.entries.items():
        missing = entry.missing
        if missing and policy == "error":
            some = ", ".join(map(str, missing[:8])) + (", …" if len(missing) > 8 else "")
            raise DataError(
                f"{name}: no token of {imatrix.dataset or 'the text'} entered {len(missing)} of {len(entry.counts)} "
                f"matrices: {some}; measure on more or more varied text, or choose --missing-experts layer-mean"
            )
        if len(missing) == len(entry.counts):
            continue
        if missing:
            values = entry.values.copy()
            mean = np.average(entry.values.astype(np.float64), axis=0, weights=entry.counts)
            values[missing] = 1.0 if policy == "weight-one" else mean
            entry, used = replace(entry, values=values), policy
        entries[name] = entry
    return replace(imatrix, entries=entries, policy=used)


def few(entry: Entry, matrices: int, threshold: int) -> list[int]:
    """Matrices (experts) that saw fewer vectors than `threshold`: by their counts where they were counted one by one,
    else those of which a matrix says nothing, all ones or zeros as its maker fills in."""
    if len(entry.counts) == matrices > 1 and not (entry.counts == entry.calls).all():
        return np.flatnonzero(entry.counts < threshold).tolist()
    values = entry.values.reshape(matrices, -1)
    filled = (values == values[:, :1]).all(axis=1) & np.isin(values[:, 0], (0.0, 1.0))
    return [] if filled.all() else np.flatnonzero(filled).tolist()
