"""Rounding in the order of the columns, each group against the errors of those before it (LDLQ, Chee et al. 2023).

    H = (I + A) D (I + A)^T     A zero on and below its blocks of G columns, D block diagonal
    e^T H e = sum over groups g of d_g^T D_g d_g,  d_g = e_g + sum over j < g of e_j A_jg

Choosing group g by d_g leaves the errors of later groups free to make up for its own. It is a better start
for the descent of `vector_codes` than rounding by the diagonal of H: neighbours of a point are few. GPTQ has G = 1.

The factors follow from R, upper triangular with H = R R^T: A_jg = R_jg R_gg^-1 and D_g = R_gg R_gg^T. Panels of R are
made from the last to the first. All sums have a fixed order, so the bits do not depend on the CPU.
"""

from __future__ import annotations

import numpy as np

from quantkit.codegen import jit
from quantkit.codegen.jit import kernel, subkernel
from quantkit.types.refine.moments import PANEL, Moments, add_product

_LEAST = 1e-6  # of the largest diagonal element: pivots below are those of rounding errors


def factors(moments: Moments, size: int) -> np.ndarray:
    """A, and D in place of its diagonal blocks, for groups of `size` columns: panels as those of `moments`, float32.

    Made once; takes columns^3 / 3 multiplications, in one thread.
    """
    with moments.lock:
        if size not in moments.factors:
            found = np.zeros_like(moments.panels)
            _factorize(moments.panels, moments.columns, size, found)
            moments.factors[size] = jit.readonly(found)
        return moments.factors[size]


@kernel
def _factorize(panels: np.ndarray, n: int, size: int, found: np.ndarray) -> None:
    across = np.empty((PANEL, PANEL), np.float32)
    block = np.empty((PANEL, PANEL), np.float64)
    largest = np.float64(0)
    for i in range(n):
        largest = max(largest, np.float64(panels[i // PANEL, i, i % PANEL]))
    for p in range(len(panels) - 1, -1, -1):
        first = p * PANEL
        width = min(PANEL, n - first)
        rest = found[p]
        rest[: first + width] = panels[p, : first + width]
        for q in range(p + 1, len(panels)):  # minus R_q R_q[panel]^T
            for i in range(PANEL):
                for k in range(PANEL):
                    across[k, i] = -found[q, first + i, k]
            add_product(found[q, : first + PANEL], across, rest)
        _factorize_block(rest[first:], width, _LEAST * largest, block)
        _solve(rest, first, width, block)
        for i in range(PANEL):
            for k in range(PANEL):
                rest[first + i, k] = np.float32(block[i, k])
    for p in range(len(panels)):
        _divide_by_blocks(found[p], p * PANEL, min(PANEL, n - p * PANEL), size)


@subkernel
def _factorize_block(h: np.ndarray, width: int, least: float, r: np.ndarray) -> None:
    """r float64[PANEL, PANEL], upper triangular, with h[:width, :width] = r r^T; the rest is the identity."""
    r[:] = 0
    for j in range(width, PANEL):
        r[j, j] = 1
    for j in range(width - 1, -1, -1):
        pivot = np.float64(h[j, j])
        for k in range(j + 1, width):
            pivot -= r[j, k] * r[j, k]
        r[j, j] = np.sqrt(pivot) if pivot > least else np.sqrt(max(least, 1e-30))
        for i in range(j):
            value = np.float64(h[i, j])
            for k in range(j + 1, width):
                value -= r[i, k] * r[j, k]
            r[i, j] = value / r[j, j]


@subkernel
def _solve(rest: np.ndarray, rows: int, width: int, r: np.ndarray) -> None:
    """rest[:rows] = rest[:rows] r^-T, in place."""
    for i in range(rows):
        row = rest[i]
        for j in range(width - 1, -1, -1):
            value = np.float64(row[j])
            for k in range(j + 1, width):
                value -= np.float64(row[k]) * r[j, k]
            row[j] = np.float32(value / r[j, j])


@subkernel
def _divide_by_blocks(found: np.ndarray, first: int, width: int, size: int) -> None:
    """R of a panel becomes A, and D in its diagonal blocks."""
    block = np.empty((size, size), np.float64)
    for at in range(0, width, size):
        own = found[first + at : first + at + size, at : at + size]
        for i in range(size):
            for k in range(size):
                block[i, k] = own[i, k]
        for row in range(first + at):
            for j in range(size):
                value = np.float64(found[row, at + j])
                for k in range(j):
                    value -= np.float64(found[row, at + k]) * block[k, j]
                found[row, at + j] = np.float32(value / block[j, j])
        for i in range(size):
            for k in range(size):
                total = np.float64(0)
                for j in range(max(i, k), size):
                    total += block[i, j] * block[k, j]
                own[i, k] = np.float32(total)
