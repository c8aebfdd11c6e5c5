"""The second moment H = E[x x^T] of a matrix' input, made ready for rounding: damped, and cut into panels of columns.

    error of a row    e^T H e,  e = decoded row - row,  with H + DAMPING mean(diag H) I in place of H
    gradient          r = e H;  a change of element j by s changes the error by 2 s r_j + s^2 H_jj

A panel holds PANEL columns of H, all rows, contiguous: `gradient` multiplies rows of e by one panel. Each sum runs over
the columns in their order with one rounding a step, so its bits do not depend on the CPU.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from quantkit.codegen import jit
from quantkit.codegen.jit import kernel
from quantkit.codegen.simd import F32, IrBuilder, Value, simd_intrinsic, vector
from quantkit.errors import DataError
from quantkit.inputs import arguments

PANEL = 128  # columns
TILE_ROWS = 8
_TOGETHER = 512  # rows of a panel: 256 KiB
DAMPING = 0.01  # of the mean of the diagonal, as GPTQ does
_FLOATS16 = vector(16, F32)


@dataclass(frozen=True)
class Moments:
    """Damped second moments of an input of `columns` elements.

    importance: float32[columns], the diagonal before damping
    panels: float32[number of panels, columns padded to panels, PANEL]; what is padded is zero
    factors: what `feedback.factors` has made of them, by size of group, under `lock`
    """

    importance: np.ndarray
    panels: np.ndarray
    factors: dict[int, np.ndarray] = field(default_factory=dict, repr=False)
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def columns(self) -> int:
        return len(self.importance)

    def padded_zeros(self, rows: int) -> np.ndarray:
        """Zeros float32[rows padded to TILE_ROWS, columns padded to panels], as `gradient` takes them."""
        return np.zeros((-(-rows // TILE_ROWS) * TILE_ROWS, self.panels.shape[1]), np.float32)


def prepare(second_moments: Any, n: int) -> Moments:
    """`Moments` of float32[n, n], or `second_moments` itself where they are prepared already.

    DataError for another shape, NaN, Inf, a negative diagonal, or a matrix that is not symmetric.
    """
    if isinstance(second_moments, Moments):
        if second_moments.columns != n:
            raise DataError(f"second moments are of {second_moments.columns} columns, the rows have {n}")
        return second_moments
    h = arguments.real_numbers(second_moments, "second moments")
    if h.shape != (n, n):
        raise DataError(f"second moments have shape {h.shape}, rows of {n} columns need ({n}, {n})")
    largest = _check(h)
    scale = np.float32(1 / largest if largest else 1)  # only ratios matter; products neither over- nor underflow
    added = np.float32(DAMPING * float(np.diagonal(h).mean(dtype=np.float64)) * float(scale) if n else 0)
    count = -(-n // PANEL)
    panels = np.zeros((count, count * PANEL, PANEL), np.float32)
    for p, panel in enumerate(panels):
        columns = np.arange(p * PANEL, min(n, (p + 1) * PANEL))
        panel[:n, : len(columns)] = h[:, columns] * scale
        panel[columns, columns - p * PANEL] += added
    return Moments(jit.readonly(np.diagonal(h).copy()), jit.readonly(panels))


def _check(h: np.ndarray) -> float:
    """The largest magnitude of a second moment; DataError for one that cannot be."""
    largest = 0.0
    for first in range(0, len(h), PANEL):
        columns = h[:, first : first + PANEL]
        most = float(np.abs(columns).max())
        if not np.isfinite(most):
            row, column = (int(v) for v in np.argwhere(~np.isfinite(columns))[0])
            raise DataError(f"the second moment of columns {row} and {first + column} is {columns[row, column]}")
        if (difference := np.abs(columns - h[first : first + PANEL].T)).max() > 1e-3 * most:
            row, column = (int(v) for v in np.argwhere(difference == difference.max())[0])
            raise DataError(
                f"second moments are not symmetric: columns {row} and {first + column} have {columns[row, column]} "
                f"one way and {h[first + column, row]} the other"
            )
        largest = max(largest, most)
    if len(bad := np.flatnonzero(np.diagonal(h) < 0)):
        raise DataError(f"the second moment of column {bad[0]} is {h[bad[0], bad[0]]}; it must not be negative")
    return largest


@simd_intrinsic("void")
def _tile(ir: IrBuilder, e: Value, e_stride: Value, panel: Value, n: Value, out: Value, add: int) -> None:
    """out[i, c] (+)= sum over j of e[i, j] panel[j, c] for TILE_ROWS rows and PANEL columns; `e_stride` in bytes."""
    rows, wide = (TILE_ROWS, 2) if ir.isa.startswith("avx512") else (TILE_ROWS // 2, 1)
    for first in range(0, TILE_ROWS, rows):
        for column in range(0, PANEL, 16 * wide):
            places = [(i, v) for i in range(rows) for v in range(wide)]
            target = {(i, v): out + 4 * ((first + i) * PANEL + column + 16 * v) for i, v in places}
            sums = {p: ir.variable(ir.load(_FLOATS16, target[p]) if add else ir.zero(_FLOATS16)) for p in places}
            with ir.loop(0, n) as j:
                right = [ir.load(_FLOATS16, panel + j * (4 * PANEL) + 4 * (column + 16 * v)) for v in range(wide)]
                for i in range(rows):
                    number = ir.splat(ir.load(F32, e + e_stride * (first + i) + j * 4), 16)
                    for v in range(wide):
                        sums[i, v].set(ir.fma(number, right[v], sums[i, v].get()))
            for p in places:
                ir.store(sums[p].get(), target[p])


@kernel
def gradient(e: np.ndarray, panel: np.ndarray, n: int, out: np.ndarray) -> None:
    """out = e @ panel over the first `n` columns of e float32[rows, columns]; rows are a multiple of TILE_ROWS."""
    if n == 0:
        out[:] = np.float32(0)
    stride = e.shape[1] * 4
    for first in range(0, n, _TOGETHER):  # these rows of the panel stay in the cache for all rows of e
        many = min(_TOGETHER, n - first)
        for row in range(0, len(e), TILE_ROWS):
            left, right = e[row, first:].ctypes.data, panel[first:].ctypes.data
            if first == 0:
                _tile(left, stride, right, many, out[row:].ctypes.data, 0)
            else:
                _tile(left, stride, right, many, out[row:].ctypes.data, 1)


@kernel
def add_product(e: np.ndarray, panel: np.ndarray, out: np.ndarray) -> None:
    """out += e @ panel for e float32[rows, PANEL] and a panel of PANEL rows; rows are a multiple of TILE_ROWS."""
    for row in range(0, len(e), TILE_ROWS):
        _tile(e[row].ctypes.data, e.shape[1] * 4, panel.ctypes.data, PANEL, out[row:].ctypes.data, 1)
