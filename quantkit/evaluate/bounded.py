"""KL divergence from a bounded base file: an estimate, and a bound of its error.

`formats/kld/bounded_file.py` describes what is stored, and why the unknown error is a sum of independent terms X with
mean zero. Bernstein's inequality bounds such a sum over all rows. With V the sum of variances, b the largest |X| and
L = log(3 / FAILURE_PROBABILITY):

    |sum X|  <=  sqrt(2 V L) + b L / 3

V follows from e = log p - log q. For stored tokens e is known to one or two eighths of an octave of p:

    grid    X takes one of two values at a distance D: its variance is at most (D e)² / 4
    tail    X is s with probability p / s: its variance is at most s p e². The stored tokens are an unbiased sample: the
            sum of (s e)² over them has mean V. Its terms are at most c, the largest (s e)². With the same probability,

                V  <=  (sqrt(c L / 2) + sqrt(c L / 2 + that sum))²         (lower tail of sums of positive terms)

Probabilities below 2^-20 s are never stored. Their part of the sum lies between its values with the smallest and with
the largest possible -log q.
"""

from __future__ import annotations

import math

import numpy as np

from quantkit.codegen import jit, thread_pool
from quantkit.codegen.jit import kernel
from quantkit.evaluate.nll import first_largest, log_sum_exp_float64
from quantkit.formats.kld.bounded_file import GRID, LARGE, LOG_ODDS, TAIL, BoundedRows

BOUND_TERMS = 4  # numbers per row that `bound` takes
_EIGHTH = math.log(2) / 8
_SLACK = 1e-9  # nats of log p: tolerance for rounded grid edges
_FLOAT32 = 1e-7  # relative error of a float32: 2^-24 plus the error of computing it


def _table(step: float) -> np.ndarray:
    """float64[4, 255] for the classes below LARGE: the stored value r, both ends of log p, and D (s for the tail)."""
    table = np.zeros((4, LARGE))
    below = np.arange(TAIL)
    table[0, 1 : TAIL + 1] = table[3, 1 : TAIL + 1] = step
    table[1, 1 : TAIL + 1] = math.log(step) - (below + 1) * _EIGHTH
    table[2, 1 : TAIL + 1] = math.log(step) - below * _EIGHTH
    lower, upper = np.concatenate([[1.0], GRID[:-1]]), np.concatenate([GRID[1:], GRID[-1:]])
    table[0, TAIL + 1 :] = step * GRID
    table[1, TAIL + 1 :], table[2, TAIL + 1 :] = np.log(step * lower), np.log(step * upper)
    table[3, TAIL + 1 :] = step * np.maximum(GRID - lower, upper - GRID)
    return table


@kernel
def _compare_rows(
    logits: np.ndarray, classes: np.ndarray, large: np.ndarray, starts: np.ndarray, numbers: np.ndarray,
    top: np.ndarray, step: float, table: np.ndarray, targets: np.ndarray, out: np.ndarray, same_top: np.ndarray,
) -> None:  # fmt: skip
    """Fill out[r] = nll, nll of the base, KLD and the terms of the bound; and same_top[r]."""
    ceiling, floor = np.log(step), np.log(step) - 20.0 * np.log(2.0)
    for r in range(logits.shape[0]):
        row, log_sum, next_large = logits[r], log_sum_exp_float64(logits[r]), starts[r]
        value, tail, grid, grid_term, deterministic = numbers[r, 0], 0.0, 0.0, 0.0, 1e-11
        smallest, largest = np.inf, -np.inf  # x of tokens below s
        for i in range(row.shape[0]):
            x, class_ = log_sum - np.float64(row[i]), classes[r, i]
            if class_ == 255:
                p = np.float64(large[next_large])
                next_large += 1
                value += p * x
                deterministic += p * abs(np.log(p) + x) * _FLOAT32
                continue
            if class_ <= 160:
                smallest, largest = min(smallest, x), max(largest, x)
            if class_ > 0:
                value += table[0, class_] * x
                e = max(abs(table[1, class_] + x), abs(table[2, class_] + x)) + _SLACK
                if class_ <= 160:
                    tail += (table[3, class_] * e) ** 2
                else:
                    grid += (table[3, class_] * e) ** 2 / 4
                    grid_term = max(grid_term, table[3, class_] * e)
        tail_term = 0.0
        if smallest <= largest:
            tail_term = step * (max(abs(ceiling + largest), abs(floor + smallest)) + _EIGHTH)
            value += numbers[r, 1] + numbers[r, 2] * (smallest + largest) / 2
            deterministic += numbers[r, 2] * (largest - smallest) / 2
        out[r, 0] = log_sum - np.float64(row[targets[r]])
        out[r, 1] = numbers[r, 3]
        out[r, 2] = value
        out[r, 3] = tail
        out[r, 4] = grid
        out[r, 5] = max(tail_term, grid_term)
        out[r, 6] = deterministic
        same_top[r] = first_largest(row) == top[r]


def compare_rows(
    logits: np.ndarray, base: BoundedRows, targets: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """float64[rows, 3] (nll, nll of the base, KLD), float64[rows, BOUND_TERMS] for `bound`, bool[rows] (same top)."""
    rows = len(logits)
    out, same_top = np.empty((rows, 3 + BOUND_TERMS)), np.empty(rows, np.bool_)
    starts = np.zeros(rows, np.int64)
    np.cumsum(np.count_nonzero(base.classes == LARGE, axis=1)[:-1], out=starts[1:])
    inputs = [jit.readonly(np.ascontiguousarray(a)) for a in (logits, base.classes, starts, base.numbers, base.top)]
    large, targets = jit.readonly(base.large), jit.readonly(np.asarray(targets, np.int32))
    table = jit.readonly(_table(base.step))

    def task(a: int, b: int) -> None:
        row, classes, start, numbers, top = (array[a:b] for array in inputs)
        _compare_rows(row, classes, large, start, numbers, top, base.step, table, targets[a:b], out[a:b],
                      same_top[a:b])  # fmt: skip

    thread_pool.over_rows(task, rows)
    return out[:, :3], out[:, 3:], same_top


def bound(terms: np.ndarray) -> float:
    """Bound, in nats, of the distance between the mean KLD over rows and the exact one.

    It fails with a probability of at most `bounded_file.FAILURE_PROBABILITY`.

    terms  float64[rows, BOUND_TERMS]: sampled variance of the tail, variance of the grid, largest |X| (s |e| for the
           tail), and the deterministic part
    """
    tail, grid, deterministic = (float(terms[:, i].sum()) for i in (0, 1, 3))
    largest = float(terms[:, 2].max())
    correction = largest**2 * LOG_ODDS / 2
    variance = grid + (math.sqrt(correction) + math.sqrt(correction + tail)) ** 2
    return (math.sqrt(2 * variance * LOG_ODDS) + largest * LOG_ODDS / 3 + deterministic) / len(terms)
