"""Rounding in the order of the columns, each group against the errors of those before it (LDLQ, Chee et al. 2023).

    H = (I + A) D (I + A)^T     A zero on and below its blocks of G columns, D block diagonal
    e^T H e = sum over groups g of d_g^T D_g d_g,  d_g = e_g + sum over j < g of e_j A_jg

Choosing group g by d_g leaves the errors of later groups free to make up for its own. It is a better start
for the descent of `vector_codes` than rounding by the diagonal of H: neighbours of a point are few. GPTQ has G = 1.

The factors follow from R, upper triangular with H = R R^T: A_jg = R_jg R_gg^-1 and D_g = R_gg R_gg^T. Panels of R are
made from the last to the first. All sums have a fixed order, so the bits do not depend on the CPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np

from quantkit.codegen import jit, thread_pool
from quantkit.codegen.jit import kernel
from quantkit.types.refine.moments import PANEL, TILE_ROWS, Moments, add_product, gradient

_LEAST = 1e-6  # of the largest diagonal element: smaller pivots are rounding errors
_MIN_PARALLEL_ROWS = 2048


def keep_lower(
    now: Sequence[np.ndarray], before: Sequence[np.ndarray], errors: np.ndarray, errors_before: np.ndarray
) -> None:
    """Undo changes in the rows whose error did not fall. now, before: arrays by rows; errors: float64[rows]."""
    kept = np.flatnonzero(~(errors < errors_before))
    for array, old in zip(now, before):
        array[kept] = old[kept]


@kernel
def row_errors(e: np.ndarray, found: np.ndarray, size: int, rows: int) -> np.ndarray:
    """e^T H e of each row, float64[rows], as the sum of d_g^T D_g d_g; found: `factors` for groups of `size`.

    Half the multiplications of e^T (e H), as A is triangular.
    """
    r, total = np.empty((len(e), PANEL), np.float32), np.zeros(rows, np.float64)
    own = np.empty(size, np.float32)
    for p in range(len(found)):
        first = p * PANEL
        gradient(e, found[p], first + PANEL, r)  # D of the group stands where I belongs: `own` corrects it
        block = found[p, first:]
        for row in range(rows):
            d = e[row, first : first + PANEL]
            for at in range(0, PANEL, size):
                for i in range(size):
                    product = np.float32(0)
                    for k in range(size):
                        product += d[at + k] * block[at + k, at + i]
                    own[i] = d[at + i] + (r[row, at + i] - product)
                for i in range(size):
                    product = np.float32(0)
                    for k in range(size):
                        product += own[k] * block[at + k, at + i]
                    total[row] += np.float64(own[i]) * np.float64(product)
    return total


def factors(moments: Moments, size: int) -> np.ndarray:
    """A, and D in place of its diagonal blocks, for groups of `size` columns: panels as those of `moments`, float32.

    Made once; takes columns^3 / 3 multiplications. Threads that need them meanwhile wait.
    """
    with moments.lock:
        if size not in moments.factors:
            found = np.zeros_like(moments.panels)
            _factorize(moments.panels, moments.columns, found)
            for p, panel in enumerate(found):
                _divide_by_blocks(panel, p * PANEL, min(PANEL, moments.columns - p * PANEL), size)
            moments.factors[size] = jit.readonly(found)
        return moments.factors[size]


def _factorize(panels: np.ndarray, n: int, found: np.ndarray) -> None:
    """found = R, in panels."""
    least = _LEAST * float(max(panels[i // PANEL, i, i % PANEL] for i in range(n)))
    inverse = np.empty((PANEL, PANEL), np.float32)
    for p in range(len(panels) - 1, -1, -1):
        first, panel = p * PANEL, found[p]
        _over_rows(functools.partial(_subtract_products, panels, found, p), first + PANEL)
        _factorize_block(panel[first:], min(PANEL, n - first), least, inverse)
        if p:
            above = panel[:first].copy()
            panel[:first] = 0
            _over_rows(lambda a, b: add_product(above[a:b], inverse, panel[a:b]), first)  # noqa: B023


def _over_rows(task: Callable[[int, int], None], rows: int) -> None:
    thread_pool.over_rows(task, rows, multiple=TILE_ROWS, is_long=rows >= _MIN_PARALLEL_ROWS)


@kernel
def _subtract_products(panels: np.ndarray, found: np.ndarray, p: int, start: int, stop: int) -> None:
    """Rows of H of panel p less R R^T of the panels behind it."""
    across = np.empty((PANEL, PANEL), np.float32)
    for i in range(start, stop):  # an assignment between arrays takes four seconds to compile (simd.copy_floats)
        for k in range(PANEL):
            found[p, i, k] = panels[p, i, k]
    for q in range(p + 1, len(panels)):
        for i in range(PANEL):
            for k in range(PANEL):
                across[k, i] = -found[q, p * PANEL + i, k]
        add_product(found[q, start:stop], across, found[p, start:stop])


@kernel
def _factorize_block(h: np.ndarray, width: int, least: float, inverse: np.ndarray) -> None:
    """In place: r, upper triangular, of h[:width, :width] = r r^T float32[PANEL, PANEL]. Also its inverse, transposed.

    The rest of r is zero, of the inverse the identity.
    """
    r, solved = np.zeros((PANEL, PANEL), np.float64), np.zeros((PANEL, PANEL), np.float64)
    for j in range(width, PANEL):
        r[j, j] = 1
    for j in range(width - 1, -1, -1):
        pivot = np.float64(h[j, j])
        for k in range(j + 1, width):
            pivot -= r[j, k] * r[j, k]
        r[j, j] = np.sqrt(max(pivot, least, 1e-30))
        for i in range(j):
            value = np.float64(h[i, j])
            for k in range(j + 1, width):
                value -= r[i, k] * r[j, k]
            r[i, j] = value / r[j, j]
    for j in range(PANEL):  # column j of the inverse
        for i in range(j, -1, -1):
            value = np.float64(1 if i == j else 0)
            for k in range(i + 1, j + 1):
                value -= r[i, k] * solved[k, j]
            solved[i, j] = value / r[i, i]
    for i in range(PANEL):
        for k in range(PANEL):
            h[i, k] = np.float32(r[i, k]) if i < width and k < width else np.float32(0)
            inverse[k, i] = np.float32(solved[i, k])


@kernel
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
