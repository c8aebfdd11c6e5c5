"""The scale of a ternary row: y = d * t with t in -1, 0, 1, shared by IQ1_BN and IQ2_BN.

    minimise  sum over the row of  w * (x - d * t)^2      w = importance of the column (1 without)

Under a given d the nearest code of x is 0 where |x| < d / 2, else the sign of x: so a row's codes are one threshold on
|x|. The elements above a threshold, with A = sum w |x| and Q = sum w over them, have their best scale at d = A / Q and
take A^2 / Q off the error. Thresholds on a coarse grid in units of the row's mean find the highest local
maximum (rows with outlier columns have two). Then d -> A / Q of the elements above d / 2 climbs it; no step loses.

Rows that are ternary already, {-a, 0, a}, as in BitNet models, keep their a exactly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

from quantkit.codegen.jit import kernel
from quantkit.types.base import BEST, QuantType

if TYPE_CHECKING:
    from quantkit.types.refine import Moments

_MAGNITUDE, _EXPONENT = np.int32(0x7FFFFFFF), np.int32(0x7F800000)
_ZERO, _ONE, _HALF = np.float32(0), np.float32(1), np.float32(0.5)

# Sums are of integers, which compilers may add in any order: weights and w |x| in units of 2^-20 of the row's largest,
# over spans of 1024 elements in 32 bits. 2^-20 is also the smallest weight: a column that calibration never saw counts.
_UNITS = np.float32(2.0**20)
_SPAN = 1024
_MIN_UNIT = np.float32(2.0**-100)  # of |x|: below it the inverse may overflow

# Thresholds in units of the row's weighted mean of |x|, upwards. A normal distribution has its best at 0.77.
_GRID = np.array([0.5, 1, 2, 4], np.float32)
_FINE_GRID = np.geomspace(0.35, 12, 24).astype(np.float32)
_STOP_RATIO = np.float32(0.6)  # of the best gain: below it the scan of the grid ends
_STEPS = 1, 2, 8  # of the climb, by effort


@kernel
def row_weights(importance: np.ndarray, w: np.ndarray) -> None:
    """Fill float32[n] with weights in units of 2^-20 of the largest, all 2^20 without importance or where it is 0."""
    largest = _ZERO
    for j in range(importance.size):
        largest = max(largest, importance[j])
    for j in range(w.size):
        w[j] = max(np.floor(importance[j] / largest * _UNITS), _ONE) if largest > _ZERO else _UNITS


@kernel
def find_scale(x: np.ndarray, w: np.ndarray, effort: int) -> np.float32:
    """The scale d of a row; 0 where it is all zero."""
    bits = x.view(np.int32)
    largest = np.int32(0)
    min_nonzero_less_1 = np.uint32(0xFFFFFFFF)
    for j in range(bits.size):
        magnitude = np.int32(bits[j] & _MAGNITUDE)
        largest = np.int32(max(largest, magnitude))
        # 0 wraps around to the largest uint32
        min_nonzero_less_1 = np.uint32(min(min_nonzero_less_1, np.uint32(np.uint32(magnitude) - np.uint32(1))))
    max_value = np.int32(largest).view(np.float32)
    if max_value == _ZERO or np.uint32(largest) == np.uint32(min_nonzero_less_1 + np.uint32(1)):  # zeros, or ternary
        return max_value
    inverse = _HALF / max(np.int32(largest & _EXPONENT).view(np.float32), _MIN_UNIT)  # |x| * inverse < 1
    mean = _sum_above(x, w, inverse, -_ONE)[0]
    best = scale = _ZERO
    grid = _FINE_GRID if effort == BEST else _GRID
    for k in range(grid.size):
        fitted, gain = _sum_above(x, w, inverse, grid[k] * mean)
        if gain > best:
            best, scale = gain, fitted
        if gain < _STOP_RATIO * best and effort != BEST:
            break
    for _ in range(_STEPS[effort]):
        scale = _sum_above(x, w, inverse, _HALF * scale)[0]
    return scale / inverse


@kernel
def _sum_above(
    x: np.ndarray, w: np.ndarray, inverse: np.float32, threshold: np.float32
) -> tuple[np.float32, np.float32]:
    """A / Q and A^2 / Q of the elements with |x| * inverse above the threshold."""
    total = weights = np.float32(0)
    for first in range(0, x.size, _SPAN):
        part, part_weights = x[first : first + _SPAN], w[first : first + _SPAN]
        span_total = span_weights = np.int32(0)
        for j in range(part.size):
            a = abs(part[j]) * inverse
            above = np.int32(-np.int32(a > threshold))  # all bits or none
            span_total = np.int32(span_total + np.int32(np.int32(a * part_weights[j] + _HALF) & above))
            span_weights = np.int32(span_weights + np.int32(np.int32(part_weights[j]) & above))
        total += np.float32(span_total)
        weights += np.float32(span_weights)
    fitted = total / weights if weights > _ZERO else _ZERO
    return fitted, fitted * total


@kernel
def nearest_codes(x: np.ndarray, scale: np.float32, codes: np.ndarray) -> None:
    """Fill uint8[n] with t + 1: 0, 1 or 2."""
    half = _HALF * scale
    for j in range(x.size):
        codes[j] = np.uint8(np.int32(1) + np.int32(x[j] >= half) - np.int32(x[j] <= -half))


class PackRows(Protocol):
    """Write codes t + 1, uint8[rows, n], into out uint8[rows, row bytes] behind the rows' headers."""

    def __call__(self, codes: np.ndarray, out: np.ndarray, /) -> None: ...


class TernaryType(QuantType):
    """Rows of a scale and ternary codes. The header of a row is its scale, of `scale_dtype`."""

    uses_imatrix = True
    scale_dtype: ClassVar[Any] = None
    pack_rows: PackRows

    @property
    def uses_second_moments(self) -> bool:
        return True

    def refine_rows(self, x: np.ndarray, data: np.ndarray, moments: Moments, effort: int) -> None:
        from quantkit.types.refine import ternary_rows  # not loaded without: it needs numba

        ternary_rows.refine(self, x, data, moments, ternary_rows.ROUNDS[effort])
