"""Rounding by second moments: what encoded rows of a type with single codes hold, for the search and the descent."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from quantkit.codegen.jit import kernel
from quantkit.types.families.code_bits import Codec, Codes, Ladder, read_codes, write_codes
from quantkit.types.refine.moments import Moments


class CodedRows(NamedTuple):
    """Encoded rows.

    e        float32[padded rows, padded n], as `moments.gradient` takes it: decoded row - row
    codes    uint8[rows, n]
    decoded  float32[rows, n]
    unit     float32[rows, n]: what a unit of the type's ladder is worth
    """

    e: np.ndarray
    codes: np.ndarray
    decoded: np.ndarray
    unit: np.ndarray


def read_rows(kind: Codec, found: Codes, x: np.ndarray, data: np.ndarray, moments: Moments) -> CodedRows:
    """What data uint8[rows, row bytes] holds, the encoding of x float32[rows, n]; found: `codes_of(kind)`."""
    rows, n = x.shape
    codes, others = np.empty((2, rows, n), np.uint8)
    read_codes(data, found, codes)
    decoded = kind.dequantize(data, n, threads=1, products=True)
    e = moments.padded_zeros(rows)
    np.subtract(decoded, x, out=e[:rows, :n])
    _neighbours(codes, found.ladder, others)
    moved = data.copy()
    write_codes(others, found, moved)
    unit = kind.dequantize(moved, n, threads=1, products=True)
    _divide_by_steps(codes, found.ladder, decoded, unit)
    return CodedRows(e, codes, decoded, unit)


@kernel
def _neighbours(codes: np.ndarray, ladder: Ladder, out: np.ndarray) -> None:
    """out uint8[rows, n] = the code of the next value of each element, of the last one for the largest value."""
    for row in range(len(codes)):
        for j in range(codes.shape[1]):
            code = codes[row, j]
            out[row, j] = ladder.above[code] if ladder.up[code] != 0 else ladder.below[code]


@kernel
def _divide_by_steps(codes: np.ndarray, ladder: Ladder, decoded: np.ndarray, unit: np.ndarray) -> None:
    """Make units of the ladder of unit float32[rows, n], the values of `_neighbours`; decoded: those of the codes."""
    for row in range(len(codes)):
        for j in range(codes.shape[1]):
            code = codes[row, j]
            step = ladder.up[code] if ladder.up[code] != 0 else ladder.down[code]
            unit[row, j] = (unit[row, j] - decoded[row, j]) / step
