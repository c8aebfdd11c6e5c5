"""Codebooks of the non-linear types (IQ4_NL, IQ*_K, IQ*_KS), and tables for finding the nearest code.

These types have two codebooks: the one listed here and the same plus a shift; a flag of each sub-block selects one.
`Book` holds both side by side: `values[count * flag + code]`, float32; `nearest[BINS * flag + bin]`, the code nearest
to t for bin = int(2 t + 256) clipped to 0 .. BINS - 1 (`bin_of`); `rounded[…]`, the value of that code. Bins are half a
unit wide from -128 on: the midpoints of integers fall on their edges, so a bin has one nearest code.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quantkit.codegen.jit import kernel

BINS = 512


@dataclass(frozen=True)
class Book:
    """A codebook of `count` values and its shifted copy, with tables for rounding; see the module."""

    count: int
    values: np.ndarray  # float32[2 * count]
    nearest: np.ndarray  # int32[2 * BINS]
    rounded: np.ndarray  # float32[2 * BINS]


def nearest_table(levels: np.ndarray) -> np.ndarray:
    """int32[BINS]: the index of the level nearest to each bin of [-128, 128); exact midpoints go to the larger."""
    centre = np.arange(BINS) / 2 - 127.75
    result: np.ndarray = np.abs(centre[:, None] - levels).argmin(axis=1).astype(np.int32)
    return result


@kernel(inline="always")
def bin_of(t: np.float32) -> np.int32:
    """The bin of a code value; values outside go to the outermost bins."""
    return np.int32(min(max(t * np.float32(2) + np.float32(256), np.float32(0)), np.float32(BINS - 1)))


def _book(levels: list[int], shift: int) -> Book:
    base = np.array(levels, np.float32)
    codebooks = [base, base + np.float32(shift)]
    tables = [nearest_table(values) for values in codebooks]
    rounded = [values[table] for values, table in zip(codebooks, tables)]
    return Book(len(base), np.concatenate(codebooks), np.concatenate(tables), np.concatenate(rounded))


K2 = _book([-31, -13, 1, 17], 5)
K3 = _book([-63, -40, -23, -10, 1, 13, 28, 47], 4)
K4 = _book([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], 4)
K5 = _book(
    [-126, -114, -103, -92, -83, -74, -65, -57, -50, -43, -36, -30, -24, -18, -12, -6,
     -1, 5, 11, 17, 23, 29, 36, 43, 51, 59, 68, 77, 87, 97, 109, 121], 2,
)  # fmt: skip
# The integers nearest to a cubic, q = 0 .. 63.
K6 = _book([round(-127 + q * (6.2568 + q * (-0.11218 + q * 0.0011972))) for q in range(64)], 1)
