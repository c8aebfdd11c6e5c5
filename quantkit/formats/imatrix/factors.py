"""Correlations as factors of low rank: what is kept of a matrix of second moments where all of it is too much.

    C_ij ~ sum over r of F_ir F_jr  for i != j,     C_ii = 1,       F float16[columns, rank]

The diagonal of F F^T is no part of C, so it is free: F is not made of eigenvectors of C, whose largest part would serve
the diagonal, but fits what is outside it (principal axis factoring). `fit` alternates: the diagonal of C is taken from
F F^T, then F from the leading eigenvectors. It begins with those of C.

Measured on inputs of SmolLM2-135M (768 and 1536 columns), IQ4_NL, the error under the whole of H relative to rounding
without second moments; whole H gives 0.654, blocks of 256 columns 0.764:

    eigenvectors           rank 128   rank 32
    of C                     0.725      0.775
    of H, scaled to C        0.719      0.775
    fitted to C, exact       0.695      0.766

Fitted with the importance as weights: the same within 0.001. From a sketch in place of C, see `evaluate.imatrix`.

With rows of F no longer than 1, which `pack` and `expand` see to, C = F F^T + diag(1 - |F_i|^2) is positive
semidefinite, whatever F is, and its entries are at most 1. So is each mixture with the unit matrix.
"""

from __future__ import annotations

import numpy as np

from quantkit.codegen import blas, jit

RANK = 128  # where none is given
_FITS = 8  # after 5 it changes by less than 0.0005


def fit(wide: np.ndarray, rank: int) -> np.ndarray:
    """float64[n, rank]: F whose products are nearest to those of float64[n, k] `wide` outside the diagonal.

    A `wide` of no more than `rank` columns is returned with zeros beside it. The same bits for any number of threads.
    """
    n, k = wide.shape
    if k <= rank:
        return np.hstack([wide, np.zeros((n, rank - k))])
    with blas.single_threaded():
        _, turned = np.linalg.eigh(wide.T @ wide)
        factors = (
            wide @ turned[:, ::-1][:, :rank]
        )  # eigenvectors of `wide` `wide`^T, times the roots of the eigenvalues
        basis, _ = np.linalg.qr(factors)
        own = _squares(wide)
        for _ in range(_FITS if rank < n else 0):
            change = np.minimum(_squares(factors), 1) - own  # of the diagonal of `wide` `wide`^T
            shift = max(0.0, -float(change.min()))  # no eigenvalue is negative, so the leading ones are the largest
            basis, _ = np.linalg.qr(wide @ (wide.T @ basis) + (change + shift)[:, None] * basis)
            image = wide @ (wide.T @ basis) + change[:, None] * basis
            inner = basis.T @ image
            values, vectors = np.linalg.eigh((inner + inner.T) / 2)
            basis = basis @ vectors[:, ::-1]
            factors = basis * np.sqrt(np.maximum(values[::-1], 0))
    return np.asarray(factors)


def _squares(factors: np.ndarray) -> np.ndarray:
    """Squared lengths of rows."""
    return np.asarray((factors * factors).sum(axis=1))


def _limited(factors: np.ndarray) -> np.ndarray:
    """The factors with rows no longer than 1."""
    return np.asarray(factors / np.sqrt(np.maximum(_squares(factors), 1))[:, None])


def pack(factors: np.ndarray) -> np.ndarray:
    """float16[n * rank] as stored, of float64[n, rank]."""
    return np.asarray(_limited(factors).astype(np.float16).reshape(-1))


def are_valid(factors: np.ndarray, most: float) -> bool:
    """Whether float32[n, rank] are finite and no row is longer than `most`."""
    return bool((np.abs(factors) <= most).all() and (_squares(factors) <= most**2).all())


def expand(factors: np.ndarray) -> np.ndarray:
    """float32[n, n]: C of float32[n, rank]. Sums run in order: bits depend neither on threads nor on the CPU."""
    from quantkit.types.refine.moments import PANEL, TILE_ROWS, gradient

    n, rank = factors.shape
    rows = np.zeros((-(-n // TILE_ROWS) * TILE_ROWS, rank), np.float32)
    rows[:n] = _limited(factors)
    left, out = jit.readonly(rows), np.empty((len(rows), PANEL), np.float32)
    found = np.empty((n, n), np.float32)
    for first in range(0, n, PANEL):
        many = min(PANEL, n - first)
        panel = np.zeros((rank, PANEL), np.float32)
        panel[:, :many] = rows[first : first + many].T
        gradient(left, jit.readonly(panel), rank, out)
        found[:, first : first + many] = out[:n, :many]
    np.fill_diagonal(found, 1)
    return found
