"""Rounding by second moments, for ternary rows: y = d * t with t in -1, 0, 1 under one scale d.

    error  e^T H e of a row, e = d t - x, as in `scalar_codes`

Moves of single codes by one alternate with the best scale of the codes as they are, rounded as the type stores it:

    d  ->  d - t^T H e / t^T H t
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from quantkit.codegen.jit import kernel
from quantkit.types.families.code_bits import Ladder
from quantkit.types.refine.moments import PANEL, Moments, gradient
from quantkit.types.refine.scalar_codes import INNER, descend
from quantkit.types.refine.sub_block_scales import NONE

_LADDER = Ladder(  # of codes t + 1 under the unit d
    np.array([1, 2, 2], np.uint8),
    np.array([0, 0, 1], np.uint8),
    np.array([1, 1, 0], np.float32),
    np.array([0, -1, -1], np.float32),
    np.array([0, 1, 2], np.float32),
    np.array([0, 1, 2], np.uint8),
)
ROUNDS = ((0,), (1, 1), (1, 2, 2, 2, 2, 2))  # by effort: for each sweep over all columns, rounds of pairs


class TernaryRows(Protocol):
    """What is asked of a type here. `pack_rows` writes codes t + 1, uint8[rows, n], behind the rows' headers."""

    @property
    def scale_dtype(self) -> Any: ...
    @property
    def pack_rows(self) -> Callable[[np.ndarray, np.ndarray], None]: ...
    def dequantize(
        self, data: np.ndarray, n: int, *, threads: int | None = None, products: bool = False
    ) -> np.ndarray: ...


def refine(kind: TernaryRows, x: np.ndarray, data: np.ndarray, moments: Moments, rounds: tuple[int, ...]) -> None:
    """Lower the error of data uint8[rows, row bytes], which encodes x float32[rows, n], in place, row by row.

    rounds: one of ROUNDS
    """
    rows, n = x.shape
    decoded = kind.dequantize(data, n, threads=1, products=True)
    t = moments.padded_zeros(rows)
    e, codes = np.zeros_like(t), (np.sign(decoded) + 1).astype(np.uint8)
    e[:rows, :n] = decoded - x
    header = np.dtype(kind.scale_dtype).itemsize
    scales = np.ascontiguousarray(data[:, :header]).view(kind.scale_dtype)[:, 0]
    for count in rounds:
        unit = np.repeat(scales.astype(np.float32)[:, None], n, axis=1)
        moved = descend(e, codes, unit, _LADDER, NONE, NONE, moments.panels, rows, INNER, count)
        t[:rows, :n] = codes.astype(np.float32) - 1
        fitted = fit_scales(scales, t, e, moments)
        changed = fitted != scales
        if not moved and not changed.any():
            break
        scales[changed] = fitted[changed]
        e[:rows, :n][changed] = scales[changed].astype(np.float32)[:, None] * t[:rows, :n][changed] - x[changed]
    data[:, :header] = scales[:, None].view(np.uint8)
    kind.pack_rows(codes, data)


def fit_scales(scales: np.ndarray, t: np.ndarray, e: np.ndarray, moments: Moments) -> np.ndarray:
    """The scale of each row that minimises e^T H e, of the dtype of `scales`; the row's own where it is no better.

    t and e float32[padded rows, padded n]
    """
    products = np.zeros((2, len(scales)))
    sum_products(t, e, moments.panels, moments.columns, products)
    slope, curve = products  # an added s changes the error by s (2 slope + s curve)
    own = scales.astype(np.float64)
    with np.errstate(all="ignore"):
        fitted = np.minimum(own - slope / curve, float(np.finfo(scales.dtype).max)).astype(scales.dtype)
        step = fitted.astype(np.float64) - own
        better = (fitted > 0) & (step * (2 * slope + step * curve) < -1e-5 * (step * step * curve))
    return np.where(better, fitted, scales)


@kernel
def sum_products(t: np.ndarray, e: np.ndarray, panels: np.ndarray, n: int, out: np.ndarray) -> None:
    """Add t^T H e and t^T H t of each row to float64[2, rows]."""
    r = np.empty((len(t), PANEL), np.float32)
    for p in range(len(panels)):
        first = p * PANEL
        gradient(t, panels[p], n, r)
        for row in range(out.shape[1]):
            for k in range(min(PANEL, n - first)):
                out[0, row] += np.float64(r[row, k]) * np.float64(e[row, first + k])
                out[1, row] += np.float64(r[row, k]) * np.float64(t[row, first + k])
