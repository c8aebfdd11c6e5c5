"""Shards of a file's tensors, as tensors: ranges of rows, columns or experts for tensor parallelism.

A range of rows, or of experts, is a view of the mapped file. Columns, and rows of each expert, are copied when they are
first read: the header and whole blocks of every row, or of every group of interleaved rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from quantkit.codegen import jit
from quantkit.errors import DataError, UnsupportedError
from quantkit.formats.gguf import Tensor
from quantkit.types import QuantType


def part(tensor: Tensor, axis: int, first: int, stop: int) -> Tensor:
    """Elements first … stop of an axis of a tensor's shape.

    DataError where that is not at whole blocks, or whole groups of interleaved rows.
    """
    if not 0 <= first <= stop <= tensor.shape[axis]:
        raise DataError(
            f"{tensor.path}: tensor {tensor.name} has {tensor.shape[axis]} elements on axis {axis}, "
            f"not {first} to {stop}"
        )
    if (first, stop) == (0, tensor.shape[axis]):
        return tensor
    shape = (*tensor.shape[:axis], stop - first, *tensor.shape[axis + 1 :])
    if axis == len(shape) - 1:
        return _Columns(tensor, shape, first, stop)
    if axis == 0:
        return _Rows(tensor, shape, first * math.prod(shape[1:-1]))
    return _RowsOfEach(tensor, shape, first, stop)


def matrix(tensor: Tensor, number: int) -> Tensor:
    """A matrix of a stack [matrices, rows, columns], where it is."""
    return _Rows(tensor, tensor.shape[1:], number * tensor.shape[1])


def ranges(tensor: Tensor, axis: int, bounds: Sequence[tuple[int, int]]) -> Tensor:
    """Several ranges of an axis, one after another."""
    pieces = [part(tensor, axis, first, stop) for first, stop in bounds if stop > first]
    if len(pieces) < 2:
        return pieces[0] if pieces else part(tensor, axis, 0, 0)
    return _Joined(pieces, axis)


class _Joined(Tensor):
    """Tensors one after another along an axis; copied when the bytes are first read."""

    __slots__ = ("_axis", "_pieces")

    def __init__(self, pieces: list[Tensor], axis: int):
        first = pieces[0]
        shape = (*first.shape[:axis], sum(piece.shape[axis] for piece in pieces), *first.shape[axis + 1 :])
        super().__init__(first.name, shape, first.type, _nbytes(first.type, shape), 0, first.path)
        self._pieces, self._axis = pieces, axis

    @property
    def stored(self) -> np.ndarray:
        if self._file.size != self.nbytes:
            kind = self.type
            if self._axis < len(self.shape) - 1:
                before = math.prod(self.shape[: self._axis])
                joined = np.concatenate([piece.data.reshape(before, -1) for piece in self._pieces], axis=1)
            else:
                rows = [piece.data.reshape(-1, kind.interleave * piece.row_bytes) for piece in self._pieces]
                meta = kind.interleave * kind.row_meta_bytes
                joined = np.concatenate([rows[0], *(row[:, meta:] for row in rows[1:])], axis=1)
            self._file = jit.readonly(np.ascontiguousarray(joined).reshape(-1))
        return self._file


class _Rows(Tensor):
    """Rows of a tensor from `first` on, where they are."""

    __slots__ = ("_first", "_whole")

    def __init__(self, whole: Tensor, shape: tuple[int, ...], first: int):
        _require_groups(whole, first, first + math.prod(shape[:-1]))
        super().__init__(whole.name, shape, whole.type, _nbytes(whole.type, shape), whole.offset, whole.path)
        self._whole, self._first = whole, first

    def _rows(self, start: int, stop: int) -> np.ndarray:
        return self._whole._rows(self._first + start, self._first + stop)

    @property
    def stored(self) -> np.ndarray:
        return self.data.reshape(-1)


class _Copied(Tensor):
    """A tensor that is copied out of another one when its bytes are first read."""

    __slots__ = ("_first", "_stop", "_whole")

    def __init__(self, whole: Tensor, shape: tuple[int, ...], first: int, stop: int):
        super().__init__(whole.name, shape, whole.type, _nbytes(whole.type, shape), 0, whole.path)
        self._whole, self._first, self._stop = whole, first, stop

    def _copy(self) -> np.ndarray:
        """uint8[rows, row_bytes]."""
        raise NotImplementedError

    @property
    def stored(self) -> np.ndarray:
        if self._file.size != self.nbytes:
            self._file = jit.readonly(np.ascontiguousarray(self._copy()).reshape(-1))
        return self._file


class _RowsOfEach(_Copied):
    """Rows first … stop of each matrix of a stack."""

    __slots__ = ()

    def __init__(self, whole: Tensor, shape: tuple[int, ...], first: int, stop: int):
        _require_groups(whole, first, stop)
        super().__init__(whole, shape, first, stop)

    def _copy(self) -> np.ndarray:
        each = self._whole.shape[1]
        return np.concatenate(
            [self._whole.rows(i * each + self._first, i * each + self._stop) for i in range(self.shape[0])]
        )


class _Columns(_Copied):
    """Columns first … stop of every row."""

    __slots__ = ()

    def __init__(self, whole: Tensor, shape: tuple[int, ...], first: int, stop: int):
        kind = whole.type
        if kind.whole_tensor:
            raise UnsupportedError(f"{whole.path}: tensor {whole.name}: {kind.name} has no rows that could be cut")
        if first % kind.block_size or stop % kind.block_size:
            raise DataError(
                f"{whole.path}: tensor {whole.name}: {kind.name} can be cut at multiples of {kind.block_size} columns, "
                f"not at {first} and {stop}"
            )
        super().__init__(whole, shape, first, stop)

    def _copy(self) -> np.ndarray:
        kind, group = self.type, self.type.interleave
        data = self._whole.data.reshape(-1, group * self._whole.row_bytes)  # headers of a group, then its blocks
        meta = group * kind.row_meta_bytes
        first, stop = (meta + n // kind.block_size * group * kind.block_bytes for n in (self._first, self._stop))
        return np.concatenate([data[:, :meta], data[:, first:stop]], axis=1)


def _nbytes(kind: QuantType, shape: tuple[int, ...]) -> int:
    return kind.tensor_bytes(shape) if math.prod(shape) else 0


def _require_groups(tensor: Tensor, first: int, stop: int) -> None:
    group = tensor.type.interleave
    if first % group or stop % group:
        raise DataError(
            f"{tensor.path}: tensor {tensor.name}: {tensor.type.name} interleaves {group} rows and can be cut between "
            f"groups, not at {first} and {stop}"
        )
