"""Second moments of the inputs of weights: how columns go together, beside the importance matrix.

    H = E[x x^T] = D C D       D = diag(sqrt(importance)), C the correlations, 1 on the diagonal

Only C is stored, as float16: the importance is in the file anyway, and correlations are at most 1, so that float16 has
an absolute error of 2^-12. Of a symmetric matrix the upper triangle is stored, row after row:

    full       one triangle of n columns: n (n + 1) / 2 values
    blocks     a triangle for each block of `block` columns; 0 is assumed between blocks

Inputs that several weights share (q, k and v; gate and up) are stored once. One C serves all matrices of a stack whose
inputs are drawn from the same states (gate and up of experts): H of an expert has its own importance.

Correlations estimated from few vectors are too large in magnitude. `shrinkage` says how much smaller they are taken.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quantkit.errors import DataError, FormatError

BLOCK = 256  # columns of a block where none are given
_MOST = 1.01  # largest magnitude of a stored correlation: rounding errors of float16 and of sums included


@dataclass(frozen=True)
class SecondMoments:
    """Second moments of the input of a weight, or of the matrices of a stack; importance comes from the weight's entry.

    correlations   float16[stored, values]: for each matrix, or one for all
    block          columns of a block; `columns` in the full form
    tokens         int64[stored], vectors that were seen
    origin         "FILE: TENSOR" for errors, or what measured them
    """

    columns: int
    block: int
    correlations: np.ndarray
    tokens: np.ndarray
    origin: str = "second moments"

    def __post_init__(self) -> None:
        wanted = len(self.tokens), stored_values(self.columns, self.block)
        if self.correlations.shape != wanted:
            raise FormatError(
                f"{self.origin}: correlations have shape {self.correlations.shape}; {len(self.tokens)} matrices of "
                f"{self.columns} columns in blocks of {self.block} need {wanted}"
            )

    @property
    def form(self) -> str:
        """ "full" or "blocks:N"."""
        return "full" if self.block >= self.columns else f"blocks:{self.block}"

    @property
    def nbytes(self) -> int:
        return int(self.correlations.nbytes)

    def _stored(self, matrix: int) -> int:
        return matrix if len(self.tokens) > 1 else 0

    def correlation(self, matrix: int = 0) -> np.ndarray:
        """float32[columns, columns]: C of a matrix as measured. DataError where that is no correlation."""
        packed = self.correlations[self._stored(matrix)].astype(np.float32)
        if not (np.abs(packed) <= _MOST).all():  # NaN included
            bad = packed[~(np.abs(packed) <= _MOST)]
            raise DataError(f"{self.origin}: {len(bad)} correlations are above 1 or not finite, for example {bad[0]}")
        return unpack(packed, self.columns, self.block)

    def dense(self, importance: np.ndarray, matrix: int = 0) -> np.ndarray:
        """float32[columns, columns]: H of a matrix from its importance float32[columns] and shrunk correlations."""
        c = self.correlation(matrix)
        tokens = int(self.tokens[self._stored(matrix)])
        c *= np.float32(1 - shrinkage(tokens, min(self.block, self.columns)))
        np.fill_diagonal(c, 1)
        root = np.sqrt(importance)
        c *= root
        c *= root[:, None]
        return c

    def sha256(self) -> str:
        """Of all that `dense` depends on but the importance."""
        digest = hashlib.sha256(f"{self.block} {self.tokens.tolist()}\n".encode())
        digest.update(np.ascontiguousarray(self.correlations, "<f2").data)
        return digest.hexdigest()


def stored_values(columns: int, block: int) -> int:
    """Correlations that are stored for an input."""
    whole, rest = divmod(columns, min(block, max(columns, 1)))
    return whole * _triangle(min(block, columns)) + _triangle(rest)


def _triangle(n: int) -> int:
    return n * (n + 1) // 2


def shrinkage(tokens: int, columns: int) -> float:
    """The share of correlations that is noise, n / (n + tokens): by as much they are taken smaller."""
    return columns / (columns + max(tokens, 0)) if columns else 0.0


def unpack(packed: np.ndarray, columns: int, block: int) -> np.ndarray:
    """float32[columns, columns], symmetric, from upper triangles of blocks; 0 between blocks."""
    found = np.zeros((columns, columns), np.float32)
    at = 0
    for first in range(0, columns, block):
        n = min(block, columns - first)
        here = found[first : first + n, first : first + n]
        for row in range(n):
            here[row, row:] = here[row:, row] = packed[at : at + n - row]
            at += n - row
    return found


def pack(blocks: Sequence[np.ndarray]) -> np.ndarray:
    """float16[values]: correlations from sums of products, float32[n, n] for each block; upper triangles are read.

    A column that was always 0 goes with no other.
    """
    parts = [np.empty(0, np.float16)]
    for sums in blocks:
        root = np.sqrt(np.diagonal(sums).astype(np.float64))
        inverse = np.where(root > 0, 1 / np.where(root > 0, root, 1), 0)
        for row in range(len(sums)):
            values = np.clip(sums[row, row:] * (inverse[row] * inverse[row:]), -1, 1)
            values[0] = 1
            parts.append(values.astype(np.float16))
    return np.concatenate(parts)


def merge(name: str, parts: Sequence[tuple[float, SecondMoments, np.ndarray]]) -> SecondMoments:
    """The mean of several of one weight, each with a share times its tokens, and its importance float32[matrices, n].

    Correlations that matrices share are weighted by the mean of their importance. DataError where forms differ.
    """
    _, first, _ = parts[0]
    for _, other, _ in parts[1:]:
        if (other.form, other.correlations.shape) != (first.form, first.correlations.shape):
            raise DataError(
                f"{name}: second moments of form {first.form} ({first.origin}) and {other.form} ({other.origin}) "
                "cannot be merged; measure both with the same --second-moments"
            )
    merged = np.empty_like(first.correlations)
    for i in range(len(merged)):
        h = np.zeros((first.columns, first.columns))
        for share, part, importance in parts:
            root = np.sqrt(importance[i] if len(merged) > 1 else importance.mean(axis=0)).astype(np.float64)
            h += share * max(1, int(part.tokens[i])) * (part.correlation(i) * root * root[:, None])
        merged[i] = pack([h[a : a + first.block, a : a + first.block] for a in range(0, first.columns, first.block)])
    tokens = np.sum([part.tokens for _, part, _ in parts], axis=0)
    return SecondMoments(first.columns, first.block, merged, tokens, "a merge")
