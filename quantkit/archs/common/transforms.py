"""Transforms of tensors that several architectures share. `archs/common/tensors.py` has the basic ones."""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from quantkit.archs.common.tensors import COPY, ReadRows, Shape, Transform
from quantkit.errors import FormatError


class Elementwise(Transform):
    """Apply a function to every element: `forward`, with `backward` as the inverse, both float32 to float32."""

    copies_rows = False

    def __init__(self, forward: Callable[[np.ndarray], np.ndarray], backward: Callable[[np.ndarray], np.ndarray]):
        self.forward, self.backward = forward, backward

    def rows(self, sources: Sequence[ReadRows], start: int, stop: int) -> np.ndarray:
        return self.forward(np.asarray(sources[0](start, stop), np.float32))

    def inverse(self) -> Transform:
        return Elementwise(self.backward, self.forward)


def add(number: float) -> Elementwise:
    """Add a number to every element."""
    return Elementwise(lambda x: x + np.float32(number), lambda x: x - np.float32(number))


class RowToVector(Transform):
    """Turn a matrix of one row into a vector; with `to_vector=False`, a vector into a matrix of one row."""

    copies_rows = False

    def __init__(self, columns: int, to_vector: bool = True):
        self.columns, self.to_vector = columns, to_vector

    def shape(self, *sources: Shape) -> Shape:
        return sources[0][-1:] if self.to_vector else (1, *sources[0])

    def rows(self, sources: Sequence[ReadRows], start: int, stop: int) -> np.ndarray:
        if self.to_vector:
            return sources[0](0, 1).reshape(-1, 1)[start:stop]
        return sources[0](0, self.columns).reshape(1, -1)[start:stop]

    def inverse(self) -> Transform:
        return RowToVector(self.columns, not self.to_vector)


class FoldVector(Transform):
    """Make a vector of n elements a matrix (n / columns, columns); with `to_matrix=False`, a matrix a vector."""

    copies_rows = False

    def __init__(self, columns: int, to_matrix: bool = True):
        self.columns, self.to_matrix = columns, to_matrix

    def shape(self, *sources: Shape) -> Shape:
        n = math.prod(sources[0])
        if len(sources[0]) != (1 if self.to_matrix else 2) or n % self.columns:
            expected = "a vector" if self.to_matrix else "a matrix"
            raise FormatError(
                f"a tensor of shape {sources[0]}; {expected} with a multiple of {self.columns} elements was expected"
            )
        return (n // self.columns, self.columns) if self.to_matrix else (n,)

    def rows(self, sources: Sequence[ReadRows], start: int, stop: int) -> np.ndarray:
        n = self.columns
        if self.to_matrix:
            return np.asarray(sources[0](start * n, stop * n)).reshape(-1, n)
        first = start // n
        return np.asarray(sources[0](first, -(-stop // n))).reshape(-1, 1)[start - first * n : stop - first * n]

    def inverse(self) -> Transform:
        return FoldVector(self.columns, not self.to_matrix)


class RepeatFirstRow(Transform):
    """Append copies of the first row to a matrix of `count` rows until it has `rows`. The inverse keeps all of them."""

    def __init__(self, count: int, rows: int):
        self.count, self.total = count, rows

    def shape(self, *sources: Shape) -> Shape:
        if len(sources[0]) != 2 or sources[0][0] != self.count or self.count > self.total:
            raise FormatError(f"a tensor of shape {sources[0]}; a matrix of {self.count} rows was expected")
        return (self.total, sources[0][1])

    def rows(self, sources: Sequence[ReadRows], start: int, stop: int) -> np.ndarray:
        parts = [sources[0](start, min(stop, self.count))] if start < self.count else []
        if stop > self.count:
            parts.append(np.repeat(sources[0](0, 1), stop - max(start, self.count), axis=0))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def locate(self, start: int, stop: int) -> tuple[int, int] | None:
        return (0, start) if stop <= self.count else None

    def inverse(self) -> Transform:
        return COPY


class SqueezeMiddle(Transform):
    """Drop the middle axis of convolution weights (channels, 1, kernel), or insert it (`has_middle=False`)."""

    def __init__(self, has_middle: bool = True):
        self.has_middle = has_middle

    def shape(self, *sources: Shape) -> Shape:
        first, *between, last = sources[0] if len(sources[0]) > 1 else (0, 0, 0)
        if between != [1] * self.has_middle:
            expected = "(channels, 1, kernel)" if self.has_middle else "(channels, kernel)"
            raise FormatError(f"a convolution of shape {sources[0]}; {expected} was expected")
        return (first, last) if self.has_middle else (first, 1, last)

    def inverse(self) -> Transform:
        return SqueezeMiddle(not self.has_middle)


class LeadingOnes(Transform):
    """Give a tensor `to_gguf` dimensions by leading axes of length 1; the inverse gives it `to_hf`."""

    def __init__(self, to_gguf: int, to_hf: int):
        self.to_gguf, self.to_hf = to_gguf, to_hf

    def shape(self, *sources: Shape) -> Shape:
        (shape,) = sources
        extra = len(shape) - self.to_gguf
        if any(n != 1 for n in shape[: max(0, extra)]):
            raise FormatError(
                f"a tensor of shape {shape}; {self.to_gguf} dimensions were expected, with axes of length 1 before them"
            )
        return shape[extra:] if extra > 0 else (1,) * -extra + tuple(shape)

    def inverse(self) -> Transform:
        return LeadingOnes(self.to_hf, self.to_gguf)


class GatherRows(Transform):
    """Concatenate runs of rows, each (index of the source, first row, number of rows).

    `lead` is the result's shape without its last axis; by default the number of rows. The inverse exists only for runs
    that cover one source completely.
    """

    def __init__(self, runs: Iterable[tuple[int, int, int]], lead: Shape | None = None):
        self.runs = list(runs)
        self.starts = [0, *itertools.accumulate(count for _, _, count in self.runs)]
        self.lead = lead or (self.starts[-1],)

    def shape(self, *sources: Shape) -> Shape:
        for number, source in enumerate(sources):
            rows = math.prod(source[:-1]) if len(source) > 1 else source[0]
            least = max((first + count for which, first, count in self.runs if which == number), default=0)
            if rows < least:
                raise FormatError(f"a tensor of {rows} rows (shape {source}) where config.json makes it {least}")
        return self.lead if len(sources[0]) == 1 else (*self.lead, sources[0][-1])

    def rows(self, sources: Sequence[ReadRows], start: int, stop: int) -> np.ndarray:
        parts = []
        while start < stop:
            run = bisect.bisect_right(self.starts, start) - 1
            source, first, count = self.runs[run]
            skipped = start - self.starts[run]
            taken = min(count - skipped, stop - start)
            parts.append(sources[source](first + skipped, first + skipped + taken))
            start += taken
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def inverse(self) -> Transform:
        placed = sorted((first, at, count) for (_, first, count), at in zip(self.runs, self.starts))
        assert [first for first, _, _ in placed] == [0, *itertools.accumulate(count for _, _, count in placed)][:-1]
        return GatherRows((0, at, count) for _, at, count in placed)


class ShuffleColumns(Transform):
    """Column j of the result is column order[j] of the source."""

    copies_rows = False

    def __init__(self, order: Iterable[int]):
        self.order = np.array(list(order), np.intp)

    def rows(self, sources: Sequence[ReadRows], start: int, stop: int) -> np.ndarray:
        return np.ascontiguousarray(sources[0](start, stop)[:, self.order])

    def inverse(self) -> Transform:
        return ShuffleColumns(np.argsort(self.order))


class ExpertRows(Transform):
    """Every `stride`-th row from `first` on of each expert's matrix [n, columns], which may be stored transposed."""

    def __init__(self, n: int, columns: int, layout: str, first: int = 0, stride: int = 1):
        self.n, self.columns, self.layout, self.first, self.stride = n, columns, layout, first, stride
        self.copies_rows = layout == "rows"
        self.row_multiple = n // stride

    def shape(self, *sources: Shape) -> Shape:
        stored = (self.n, self.columns) if self.copies_rows else (self.columns, self.n)
        if len(sources[0]) != 3 or sources[0][1:] != stored:
            raise FormatError(f"experts of shape {sources[0]}; config.json makes each {stored}")
        return (sources[0][0], self.row_multiple, self.columns)

    def rows(self, sources: Sequence[ReadRows], start: int, stop: int) -> np.ndarray:
        first, last = start // self.row_multiple, -(-stop // self.row_multiple)
        tall = self.n if self.copies_rows else self.columns
        parts = []
        for expert in range(first, last):
            stored = sources[0](expert * tall, (expert + 1) * tall)
            matrix = stored if self.copies_rows else stored.reshape(self.columns, self.n).T
            parts.append(matrix[self.first :: self.stride])
        found = np.concatenate(parts)[start - first * self.row_multiple : stop - first * self.row_multiple]
        return np.ascontiguousarray(found)

    def inverse(self) -> Transform:
        assert self.stride == 1
        return self if self.copies_rows else ExpertRows(self.columns, self.n, self.layout)


class Chain(Transform):
    """Apply several transforms in turn. Only the first may have several sources."""

    def __init__(self, *steps: Transform):
        self.steps = steps
        self.copies_rows = all(step.copies_rows for step in steps)

    def shape(self, *sources: Shape) -> Shape:
        first, *others = self.steps
        return functools.reduce(lambda shape, step: step.shape(shape), others, first.shape(*sources))

    def rows(self, sources: Sequence[ReadRows], start: int, stop: int) -> np.ndarray:
        for step in self.steps[:-1]:
            sources = [functools.partial(step.rows, sources)]
        return self.steps[-1].rows(sources, start, stop)

    def inverse(self) -> Transform:
        return Chain(*(step.inverse() for step in reversed(self.steps)))


class TransposedRows(Transform):
    """Rows first … first + count of each matrix in a stack [matrices, columns, rows], as [matrices, count, columns]."""

    copies_rows = False

    def __init__(self, columns: int, first: int, count: int):
        self.columns, self.first, self.count = columns, first, count
        self.row_multiple = count

    def shape(self, *sources: Shape) -> Shape:
        matrices, columns, rows = sources[0] if len(sources[0]) == 3 else (0, 0, 0)
        if columns != self.columns or rows < self.first + self.count:
            raise FormatError(
                f"experts of shape {sources[0]}; config.json makes each ({self.columns}, {self.first + self.count} or "
                "more), transposed"
            )
        return (matrices, self.count, self.columns)

    def rows(self, sources: Sequence[ReadRows], start: int, stop: int) -> np.ndarray:
        first, last = start // self.count, -(-stop // self.count)
        kept = slice(self.first, self.first + self.count)
        matrices = [sources[0](i * self.columns, (i + 1) * self.columns)[:, kept].T for i in range(first, last)]
        found = np.concatenate(matrices)[start - first * self.count : stop - first * self.count]
        return np.ascontiguousarray(found)

    def inverse(self) -> Transform:
        return JoinTransposed(self.columns, (self.count,))


class JoinTransposed(Transform):
    """Stacks [matrices, counts[i], columns] side by side and transposed: [matrices, columns, sum of counts]."""

    copies_rows = False

    def __init__(self, columns: int, counts: Sequence[int]):
        self.columns, self.counts = columns, tuple(counts)
        self.row_multiple = columns

    def shape(self, *sources: Shape) -> Shape:
        return (sources[0][0], self.columns, sum(self.counts))

    def rows(self, sources: Sequence[ReadRows], start: int, stop: int) -> np.ndarray:
        first, last = start // self.columns, -(-stop // self.columns)
        matrices = [
            np.concatenate([source(i * n, (i + 1) * n) for source, n in zip(sources, self.counts)]).T
            for i in range(first, last)
        ]
        return np.concatenate(matrices)[start - first * self.columns : stop - first * self.columns]

    def inverse(self) -> Transform:
        assert len(self.counts) == 1
        return TransposedRows(self.columns, 0, self.counts[0])
