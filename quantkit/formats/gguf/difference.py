"""Differences between two GGUF files: keys, and for each tensor type, shape, bytes and decoded values.

Figures over all values of a tensor, x in file A and y in file B, in float64:

    rms       sqrt(sum (x - y)² / sum x²): the relative root-mean-square error
    weighted  sqrt(sum w (x - y)² / sum w x²): the same with the importance w of each column, which quantizing with an
              importance matrix minimizes
    largest   max |x - y|, at `place` (row of the tensor as a matrix, column)
    cosine    sum x y / sqrt(sum x² sum y²)

They cover the positions where both values are finite; `nonfinite` counts the others. An error of 0/0 is 0.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from quantkit.formats.gguf import scales
from quantkit.formats.gguf.metadata import Value
from quantkit.formats.gguf.reader import GGUF, Metadata, Tensor
from quantkit.formats.mapping import release
from quantkit.formats.pipeline import spread

_PIECE_BYTES = 4 << 20
_PIECE_ELEMENTS = 1 << 19
_MISSING = object()

Weights = Callable[[str, int, int], "np.ndarray | None"]
"""(name, matrices, columns) -> importance of a tensor, float[matrices, columns], or None if there is none."""


@dataclass
class Difference:
    """One tensor of two files. `a` or `b` is None if the file lacks it; figures are None if not measured.

    status: "only in a", "only in b", or the first difference of "shape", "type", "bytes"; "same" if there is none.
    """

    name: str
    a: Tensor | None
    b: Tensor | None
    status: str
    rms: float | None = None
    weighted: float | None = None
    largest: float | None = None
    place: tuple[int, int] | None = None
    cosine: float | None = None
    nonfinite: int = 0

    @property
    def severity(self) -> tuple[float, ...]:
        """Sort key: equal tensors first, then those measured by their error, then those that cannot be compared."""
        if self.status == "same":
            return (0.0,)
        if self.rms is None:
            return (2.0,)
        return 1.0, float(self.nonfinite > 0), self.rms if self.weighted is None else self.weighted, self.rms


@dataclass(frozen=True)
class KeyDifference:
    """A key that is "added" (only in B), "removed" (only in A) or "changed"; None on the side without it."""

    key: str
    status: str
    a: Value | None
    b: Value | None
    kinds: tuple[str | None, str | None]


def of_metadata(a: Metadata, b: Metadata) -> list[KeyDifference]:
    """Keys whose value or kind differs; those of A first."""
    differences = []
    for key in dict.fromkeys([*a, *b]):
        x, y = (m.get(key, _MISSING) for m in (a, b))
        kinds = tuple(m.kind(key) if key in m else None for m in (a, b))
        if kinds[0] == kinds[1] and type(x) is type(y) and _equal(x, y):
            continue
        status = "added" if x is _MISSING else "removed" if y is _MISSING else "changed"
        x, y = (None if value is _MISSING else value for value in (x, y))
        differences.append(KeyDifference(key, status, x, y, (kinds[0], kinds[1])))
    return differences


def _equal(x: object, y: object) -> bool:
    """Whether values are equal; NaN equals NaN."""
    return x == y or repr(x) == repr(y)


def of_tensors(
    a: GGUF,
    b: GGUF,
    *,
    values: bool = True,
    weights: Weights | None = None,
    threads: int | None = None,
    progress: bool = False,
) -> list[Difference]:
    """Compare all tensors of two files. The largest difference comes first, equal tensors last, in A's order.

    Without `values` no tensor is decoded; bytes of tensors of the same type are still compared. Memory is bounded by a
    few pieces a thread.
    """
    differences = [_compare_infos(a, b, name) for name in dict.fromkeys([*a.tensors, *b.tensors])]
    alike = [d for d in differences if d.status == "same"]
    differing = {d.name for d in alike if _scaled_otherwise(d)}
    compared = (task for d in alike for task in _byte_tasks(d, differing))
    spread(compared, sum(d.a.nbytes for d in alike if d.a), threads=threads, progress=progress)
    for d in alike:
        if d.name in differing:
            d.status = "bytes"
    if values:
        _measure([d for d in differences if d.status in ("bytes", "type")], weights, threads, progress)
    return sorted(differences, key=lambda d: d.severity, reverse=True)


def _compare_infos(a: GGUF, b: GGUF, name: str) -> Difference:
    """Compare presence, shape and type of a tensor, not its data; "same" if they agree."""
    x, y = a.tensors.get(name), b.tensors.get(name)
    if x is None or y is None:
        return Difference(name, x, y, "only in b" if x is None else "only in a")
    return Difference(name, x, y, "shape" if x.shape != y.shape else "type" if x.type is not y.type else "same")


def _scaled_otherwise(d: Difference) -> bool:
    """Whether the values of two NVFP4 tensors are multiplied by different numbers."""
    x, y = (None if t is None else t.scales for t in (d.a, d.b))
    return not (x is y or (x is not None and y is not None and np.array_equal(x, y)))


def _byte_tasks(d: Difference, differing: set[str]) -> Iterator[Callable[[], int]]:
    assert d.a is not None
    assert d.b is not None
    for start in range(0, d.a.nbytes, _PIECE_BYTES):
        yield functools.partial(_compare_bytes, d.a, d.b, start, differing)


def _compare_bytes(x: Tensor, y: Tensor, start: int, differing: set[str]) -> int:
    p, q = (t.stored[start : start + _PIECE_BYTES] for t in (x, y))
    if x.name not in differing and not np.array_equal(p, q):
        differing.add(x.name)
    release(p)
    release(q)
    return p.nbytes


# --------------------------------------------------------------------------------------------------------------- values


@dataclass
class _Sums:
    """The sums over one piece, from which the figures of its tensor are computed."""

    error: float = 0.0
    x: float = 0.0
    y: float = 0.0
    product: float = 0.0
    weighted_error: float = 0.0
    weighted_x: float = 0.0
    largest: float = -1.0
    place: tuple[int, int] = (0, 0)
    nonfinite: int = 0


@dataclass
class _Measured:
    """The sums of a tensor's pieces by first row, so that the result does not depend on the order of threads."""

    weights: np.ndarray | None
    pieces: dict[int, _Sums] = field(default_factory=dict)


def _measure(differences: Iterable[Difference], weights: Weights | None, threads: int | None, progress: bool) -> None:
    """Measure the tensors that differ, if both types can be decoded."""
    chosen: list[tuple[Difference, _Measured]] = []
    for d in differences:
        if d.a is None or d.b is None or not (d.a.type.has_codec and d.b.type.has_codec):
            continue
        importance = weights(d.name, math.prod(d.a.shape[:-2]), d.a.shape[-1]) if weights else None
        chosen.append((d, _Measured(importance)))
    tasks = (task for d, sums in chosen for task in _value_tasks(d, sums))
    spread(tasks, sum(d.a.nbytes for d, _ in chosen if d.a), threads=threads, progress=progress)
    for d, measured in chosen:
        _conclude(d, measured)


def _value_tasks(d: Difference, measured: _Measured) -> Iterator[Callable[[], int]]:
    """Tasks for pieces of whole interleaved groups, none across two matrices."""
    assert d.a is not None
    assert d.b is not None
    rows = d.a.shape[-2] if len(d.a.shape) > 1 else 1
    group = math.lcm(d.a.type.interleave, d.b.type.interleave)
    step = max(1, _PIECE_ELEMENTS // d.a.shape[-1] // group) * group
    for matrix in range(d.a.n_rows // rows):
        for start in range(matrix * rows, (matrix + 1) * rows, step):
            stop = min(start + step, (matrix + 1) * rows)
            yield functools.partial(_compare_values, d.a, d.b, start, stop, matrix, measured)


def _compare_values(x: Tensor, y: Tensor, start: int, stop: int, matrix: int, measured: _Measured) -> int:
    stored = x.rows(start, stop), y.rows(start, stop)
    p, q = (scales.decode(t, rows, start, threads=1).astype(np.float64) for t, rows in zip((x, y), stored))
    measured.pieces[start] = _sums(p, q, start, None if measured.weights is None else measured.weights[matrix])
    for rows in stored:
        release(rows)
    return stored[0].nbytes


def _sums(p: np.ndarray, q: np.ndarray, start: int, weights: np.ndarray | None) -> _Sums:
    """The sums of a piece: float64[rows, n] of each file, whose first row is row `start` of the tensor."""
    sums = _Sums()
    bad = ~(np.isfinite(p) & np.isfinite(q))
    sums.nonfinite = int(bad.sum())
    if sums.nonfinite:
        p, q = np.where(bad, 0.0, p), np.where(bad, 0.0, q)
    error = p - q
    index = int(np.argmax(np.abs(error)))
    sums.largest = float(abs(error.flat[index]))
    sums.place = start + index // p.shape[1], index % p.shape[1]
    sums.product = float(np.vdot(p, q))
    sums.y = float(np.vdot(q, q))
    by_column = np.einsum("ij,ij->j", error, error), np.einsum("ij,ij->j", p, p)
    sums.error, sums.x = (float(s.sum()) for s in by_column)
    if weights is not None:
        sums.weighted_error, sums.weighted_x = (float(s @ weights.astype(np.float64)) for s in by_column)
    return sums


def _conclude(d: Difference, measured: _Measured) -> None:
    pieces = [measured.pieces[start] for start in sorted(measured.pieces)]
    total = {name: math.fsum(getattr(p, name) for p in pieces)
             for name in ("error", "x", "y", "product", "weighted_error", "weighted_x")}  # fmt: skip
    worst = max(pieces, key=lambda p: p.largest)
    d.rms = _relative(total["error"], total["x"])
    if measured.weights is not None:
        d.weighted = _relative(total["weighted_error"], total["weighted_x"])
    d.largest, d.place = worst.largest, worst.place
    d.nonfinite = sum(p.nonfinite for p in pieces)
    norms = math.sqrt(total["x"]) * math.sqrt(total["y"])
    d.cosine = total["product"] / norms if norms else float(total["x"] == total["y"])


def _relative(error: float, total: float) -> float:
    if error == 0:
        return 0.0
    return math.sqrt(error / total) if total else math.inf
