"""Second moments of the inputs of weights: how columns go together, beside the importance matrix.

    H = E[x x^T] = D C D       D = diag(sqrt(importance)), C the correlations, 1 on the diagonal

Only C is stored, as float16: the importance is in the file anyway, and correlations are at most 1, so that float16 has
an absolute error of 2^-12. Of a symmetric matrix the upper triangle is stored, row after row, or factors of low rank:

    full       one triangle of n columns: n (n + 1) / 2 values
    blocks     a triangle for each block of `block` columns; 0 is assumed between blocks
    rank       n rows of `rank` factors (`factors`)

Inputs that several weights share (q, k and v; gate and up) are stored once. One C serves all matrices of a stack whose
inputs are drawn from the same states (gate and up of experts): H of an expert has its own importance.

Correlations of the measured text are too large in magnitude for another text, and those estimated from few vectors are
too large for any. `shrinkage` says how much smaller they are taken: in all forms by the number of columns that go
together, which was best for factors too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quantkit.errors import DataError, FormatError
from quantkit.formats.imatrix import factors

BLOCK = 256  # columns of a block where none are given
OF_THE_TEXT = 0.25  # share of a correlation that another text does not have (docs/explanation/second-moments.md)
_MOST = 1.01  # largest magnitude of a stored correlation: rounding errors of float16 and of sums included


@dataclass(frozen=True)
class SecondMoments:
    """Second moments of the input of a weight, or of the matrices of a stack; importance comes from the weight's entry.

    correlations   float16[stored, values]: for each matrix, or one for all
    block          columns of a block; `columns` in the other forms
    tokens         int64[stored], vectors that were seen
    origin         "FILE: TENSOR" for errors, or what measured them
    rank           factors of a column, up to `columns`; 0 in the other forms
    """

    columns: int
    block: int
    correlations: np.ndarray
    tokens: np.ndarray
    origin: str = "second moments"
    rank: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.rank <= self.columns:
            raise FormatError(f"{self.origin}: rank {self.rank} of {self.columns} columns; it must not be larger")
        wanted = len(self.tokens), stored_values(self.columns, self.block, self.rank)
        if self.correlations.shape != wanted:
            raise FormatError(
                f"{self.origin}: correlations have shape {self.correlations.shape}; {len(self.tokens)} matrices of "
                f"{self.columns} columns in form {self.form} need {wanted}"
            )

    @property
    def form(self) -> str:
        """ "full", "blocks:N" or "rank:N"."""
        if self.rank:
            return f"rank:{self.rank}"
        return "full" if self.block >= self.columns else f"blocks:{self.block}"

    @property
    def nbytes(self) -> int:
        return int(self.correlations.nbytes)

    def _stored(self, matrix: int) -> int:
        return matrix if len(self.tokens) > 1 else 0

    def correlation(self, matrix: int = 0) -> np.ndarray:
        """float32[columns, columns]: C of a matrix as measured. DataError where that is no correlation."""
        if self.rank:
            return factors.expand(self.factors(matrix))
        packed = self.correlations[self._stored(matrix)].astype(np.float32)
        if not (np.abs(packed) <= _MOST).all():  # NaN included
            bad = packed[~(np.abs(packed) <= _MOST)]
            raise DataError(f"{self.origin}: {len(bad)} correlations are above 1 or not finite, for example {bad[0]}")
        found = unpack(packed, self.columns, self.block)
        if (own := np.diagonal(found).min(initial=0)) < 0:
            raise DataError(
                f"{self.origin}: a column has a correlation of {own:g} with itself, which is 1; the file is corrupt, "
                "measure the importance matrix again"
            )
        return found

    def factors(self, matrix: int = 0) -> np.ndarray:
        """float32[columns, rank] of the rank form. DataError where they cannot be factors of correlations."""
        stored = self.correlations[self._stored(matrix)]
        found = np.asarray(stored, np.float32).reshape(self.columns, self.rank)
        if not factors.are_valid(found, _MOST):
            raise DataError(
                f"{self.origin}: the factors of a column are longer than 1 or not finite, the largest value is "
                f"{np.abs(found).max()}"
            )
        return found

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
        stored = self.form if self.rank else self.block
        digest = hashlib.sha256(f"{stored} {self.tokens.tolist()}\n".encode())
        digest.update(np.ascontiguousarray(self.correlations, "<f2").data)
        return digest.hexdigest()


def stored_values(columns: int, block: int, rank: int = 0) -> int:
    """Correlations, or factors, that are stored for an input."""
    if rank:
        return columns * rank
    whole, rest = divmod(columns, min(block, max(columns, 1)))
    return whole * _triangle(min(block, columns)) + _triangle(rest)


def _triangle(n: int) -> int:
    return n * (n + 1) // 2


def shrinkage(tokens: int, columns: int) -> float:
    """The share by which correlations are taken smaller: noise, n / (n + tokens), and OF_THE_TEXT of the rest."""
    noise = columns / (columns + max(tokens, 0)) if columns else 0.0
    return noise + (1 - noise) * OF_THE_TEXT


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

    Correlations that matrices share are weighted by the mean of their importance. Factors are fitted again to those of
    all parts beside each other. One part stays as it is. DataError where forms differ.
    """
    _, first, _ = parts[0]
    if len(parts) == 1:
        return first
    for _, other, _ in parts[1:]:
        if (other.form, other.correlations.shape) != (first.form, first.correlations.shape):
            raise DataError(
                f"{name}: second moments of form {first.form} ({first.origin}) and {other.form} ({other.origin}) "
                "cannot be merged; measure both with the same --second-moments"
            )
    merged = np.empty_like(first.correlations)
    for i in range(len(merged)):
        merged[i] = (_merged_factors if first.rank else _merged_blocks)([
            (share * max(1, int(part.tokens[i])), part,
             np.sqrt(own[i] if len(merged) > 1 else own.mean(axis=0)).astype(np.float64))
            for share, part, own in parts
        ], i)  # fmt: skip
    tokens = np.sum([part.tokens for _, part, _ in parts], axis=0)
    return SecondMoments(first.columns, first.block, merged, tokens, "a merge", first.rank)


_Part = tuple[float, SecondMoments, np.ndarray]  # its weight, and the square root of its importance float64[n]


def _merged_blocks(parts: Sequence[_Part], matrix: int) -> np.ndarray:
    """Stored values of a matrix of a merge."""
    n, block = parts[0][1].columns, parts[0][1].block
    h = np.zeros((n, n))
    for weight, part, root in parts:
        h += weight * (part.correlation(matrix) * root * root[:, None])
    return pack([h[a : a + block, a : a + block] for a in range(0, n, block)])


def _merged_factors(parts: Sequence[_Part], matrix: int) -> np.ndarray:
    """Stored values of a matrix of a merge: factors of all parts beside each other are factors of the sum."""
    total = np.sqrt(np.sum([weight * root**2 for weight, _, root in parts], axis=0))
    beside = [
        part.factors(matrix) * np.divide(weight**0.5 * root, total, out=np.zeros_like(total), where=total > 0)[:, None]
        for weight, part, root in parts
    ]
    return factors.pack(factors.fit(np.hstack(beside), parts[0][1].rank))
