"""KL divergence from a bounded base: a value, and how far from it the exact one can be.

What is stored, and why the unknown is a sum of independent terms X with mean zero, stands at the top of
formats/kld/bounded_file.py. Bernstein's inequality bounds such a sum over all rows, with V the sum of variances, b
what no |X| exceeds, and L = log(3 / MISSED):

    |sum X|  <=  sqrt(2 V L) + b L / 3

V follows from e = log p - log q, which is known to an eighth octave of p, or two, of tokens that are kept:

    grid    X is of two values, their distance D apart: its variance is at most (D e)² / 4
    tail    s with probability p / s: at most s p e². What is kept is a fair sample of these: the sum of (s e)² over
            kept tokens is V on average, and as its terms are at most c, the largest (s e)², with the same certainty

                V  <=  (sqrt(c L / 2) + sqrt(c L / 2 + that sum))²         (lower tail of sums of positive terms)

Probabilities below 2^-20 s are never kept; their part of the sum lies between those with the smallest and the largest
-log q that they can have, certainly.
"""

from __future__ import annotations

import math

import numpy as np

from quantkit.codegen import jit
from quantkit.codegen.jit import kernel
from quantkit.evaluate.perplexity import first_largest, log_total
from quantkit.formats.kld.bounded_file import GRID, LARGE, LOG_ODDS, TAIL, BoundedRows

DOUBTS = 4  # numbers of a row that a bound is made of, see `bound`
_EIGHTH = math.log(2) / 8
_SLACK = 1e-9  # nats, of log p: for the rounding of edges
_FLOAT32 = 1e-7  # of a float32, relative: 2^-24 and what computing it adds


def _table(step: float) -> np.ndarray:
    """float64[4, 255]: of the classes but the largest what r is, the ends of log p, and D (of the tail s)."""
    found = np.zeros((4, LARGE))
    below = np.arange(TAIL)
    found[0, 1 : TAIL + 1] = found[3, 1 : TAIL + 1] = step
    found[1, 1 : TAIL + 1] = math.log(step) - (below + 1) * _EIGHTH
    found[2, 1 : TAIL + 1] = math.log(step) - below * _EIGHTH
    lower, upper = np.concatenate([[1.0], GRID[:-1]]), np.concatenate([GRID[1:], GRID[-1:]])
    found[0, TAIL + 1 :] = step * GRID
    found[1, TAIL + 1 :], found[2, TAIL + 1 :] = np.log(step * lower), np.log(step * upper)
    found[3, TAIL + 1 :] = step * np.maximum(GRID - lower, upper - GRID)
    return found


@kernel
def _compare_rows(logits, classes, large, starts, numbers, top, step, table, targets, out, same_top):
    """Fill out[r] = nll, nll of the base, KLD, and what a bound is made of; same_top[r]."""
    ceiling, floor = np.log(step), np.log(step) - 20.0 * np.log(2.0)
    for r in range(logits.shape[0]):
        row, log_sum, at = logits[r], log_total(logits[r]), starts[r]
        value, tail, grid, reach, certain = numbers[r, 0], 0.0, 0.0, 0.0, 1e-11
        smallest, largest = np.inf, -np.inf  # x of tokens below s
        for i in range(row.shape[0]):
            x, c = log_sum - np.float64(row[i]), classes[r, i]
            if c == 255:
                p = np.float64(large[at])
                at += 1
                value += p * x
                certain += p * abs(np.log(p) + x) * _FLOAT32
                continue
            if c <= 160:
                smallest, largest = min(smallest, x), max(largest, x)
            if c > 0:
                value += table[0, c] * x
                e = max(abs(table[1, c] + x), abs(table[2, c] + x)) + _SLACK
                if c <= 160:
                    tail += (table[3, c] * e) ** 2
                else:
                    grid += (table[3, c] * e) ** 2 / 4
                    reach = max(reach, table[3, c] * e)
        wide = 0.0
        if smallest <= largest:
            wide = step * (max(abs(ceiling + largest), abs(floor + smallest)) + _EIGHTH)
            value += numbers[r, 1] + numbers[r, 2] * (smallest + largest) / 2
            certain += numbers[r, 2] * (largest - smallest) / 2
        out[r, 0] = log_sum - np.float64(row[targets[r]])
        out[r, 1] = numbers[r, 3]
        out[r, 2] = value
        out[r, 3] = tail
        out[r, 4] = grid
        out[r, 5] = max(wide, reach)
        out[r, 6] = certain
        same_top[r] = first_largest(row) == top[r]


def compare_rows(
    logits: np.ndarray, base: BoundedRows, targets: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """float64[rows, 3]: nll, nll of the base, KLD; float64[rows, DOUBTS]: for `bound`; bool[rows]: the same top."""
    rows = len(logits)
    out, same_top = np.empty((rows, 3 + DOUBTS)), np.empty(rows, np.bool_)
    starts = np.zeros(rows, np.int64)
    np.cumsum(np.count_nonzero(base.classes == LARGE, axis=1)[:-1], out=starts[1:])
    inputs = [jit.readonly(np.ascontiguousarray(a)) for a in (logits, base.classes, starts, base.numbers, base.top)]
    large, targets = jit.readonly(base.large), jit.readonly(np.asarray(targets, np.int32))
    table = jit.readonly(_table(base.step))

    def task(a: int, b: int) -> None:
        row, classes, start, numbers, top = (array[a:b] for array in inputs)
        _compare_rows(row, classes, large, start, numbers, top, base.step, table, targets[a:b], out[a:b],
                      same_top[a:b])  # fmt: skip

    jit.over_rows(task, rows)
    return out[:, :3], out[:, 3:], same_top


def bound(doubts: np.ndarray) -> float:
    """How far the mean KLD over rows can be from the exact one, nats, but for a probability of `qkld.MISSED`.

    doubts  float64[rows, DOUBTS]: the sample of the tail's variance, the grid's variance, the largest |X| (of the tail
            s |e|), and what is certain
    """
    tail, grid, certain = (float(doubts[:, i].sum()) for i in (0, 1, 3))
    largest = float(doubts[:, 2].max())
    more = largest**2 * LOG_ODDS / 2
    variance = grid + (math.sqrt(more) + math.sqrt(more + tail)) ** 2
    return (math.sqrt(2 * variance * LOG_ODDS) + largest * LOG_ODDS / 3 + certain) / len(doubts)
