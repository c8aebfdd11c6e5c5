"""KL divergence from a bounded base: a value, and between which two the exact one provably lies.

What is stored, and why the bound holds for any candidate, stands at the top of files/qkld.py. With x = -log q of the
candidate, of each class of n tokens: mean probability m, mean x̄, and V = sqrt(sum (x - x̄)²),

    sum p x   =  n m x̄ ± D V            (and n m x̄ exactly for a class of one token)
    tail      =  T x̄ ± D V, not less and not more than when the mass lies on the smallest or largest x, at most the
                 largest p of the tail each, and not less than Gibbs' inequality allows

The value itself supposes, within that, that the candidate's error is not correlated with p inside a class, so that
x = -log p + noise: sum (p - m)(x - x̄) = -n (D/√n)² / m, and the tail adds T (log(T/Q) + σ²/2), with σ² the variance of
the noise as the lowest classes show it.
"""

from __future__ import annotations

import numpy as np

from quantkit import jit
from quantkit.evaluate.perplexity import first_largest, log_total
from quantkit.files.qkld import CLASSES, BoundedRows
from quantkit.jit import kernel

_BINS = 256
_MEAN_ROUNDING = 4.01 / 131068.0  # of a stored mean, in steps: half a code of the widest class
_HEAD_ROUNDING = 1e-7  # of a float32, relative: 2^-24 and what computing it adds


@kernel
def _fill(histogram, low, width, mass, largest, upward):
    """The sum of p x when `mass` is put, at most `largest` a token, on the smallest (upward) or largest x.

    Of a bin the edge that is further out is taken, so that what is found is a bound.
    """
    found = 0.0
    for step in range(histogram.shape[0]):
        at = step if upward else histogram.shape[0] - 1 - step
        edge = low + width * (at if upward else at + 1)
        taken = min(mass, histogram[at] * largest)
        found += taken * edge
        mass -= taken
    return found + mass * (low if upward else low + width * histogram.shape[0])


@kernel
def _tail(row, classes, log_sum, numbers, n, mean, spread, noise, histogram):
    """(low, value, high) of the tail's part of sum p x."""
    entropy, mass, largest, deviation = numbers[1], numbers[2], numbers[3], numbers[4]
    low_x, high_x, q = np.inf, -np.inf, 0.0
    for i in range(row.shape[0]):
        if classes[i] == 0:
            x = log_sum - np.float64(row[i])
            low_x, high_x = min(low_x, x), max(high_x, x)
            q += np.exp(-x)
    width = max(high_x - low_x, 1e-9) / histogram.shape[0] * (1 + 1e-12)
    histogram[:] = 0
    for i in range(row.shape[0]):
        if classes[i] == 0:
            at = int((log_sum - np.float64(row[i]) - low_x) / width)
            histogram[min(at, histogram.shape[0] - 1)] += 1
    low = max(mass * mean - deviation * spread, _fill(histogram, low_x, width, mass, largest, True))
    high = min(mass * mean + deviation * spread, _fill(histogram, low_x, width, mass, largest, False))
    gibbs = mass * np.log(mass / max(q, 1e-300)) - entropy
    low = max(low, gibbs)
    return low, min(max(gibbs + mass * noise / 2, low), max(high, low)), max(high, low)


@kernel
def _compare_rows(logits, classes, head, starts, numbers, top, means, deviations, step, targets, out, same_top):
    """Fill out[r] = nll, nll of the base, KLD, its lower and its upper bound; same_top[r]."""
    count, first, second = np.empty(64, np.int64), np.empty(64, np.float64), np.empty(64, np.float64)
    histogram = np.empty(_BINS, np.int64)
    for r in range(logits.shape[0]):
        row, log_sum = logits[r], log_total(logits[r])
        count[:] = 0
        first[:] = 0
        second[:] = 0
        at, kept = starts[r], 0.0
        for i in range(row.shape[0]):
            x, j = log_sum - np.float64(row[i]), classes[r, i]
            if j == 64:
                kept += np.float64(head[at]) * x
                at += 1
            else:
                count[j] += 1
                first[j] += x
                second[j] += x * x
        error = kept * _HEAD_ROUNDING
        noise, seen = 0.0, 0
        for j in range(1, 64):
            if count[j] == 0:
                continue
            n, m, d = count[j], means[r, j - 1], deviations[r, j - 1]
            mean = first[j] / n
            squares = max(0.0, second[j] - n * mean * mean)
            reach = d * np.sqrt(n * squares)
            kept += n * m * mean - min(n * d * d / m, reach)
            error += reach + n * step * _MEAN_ROUNDING * abs(mean)
            error += min(n * d * d / m, reach)  # the value does not stand in the middle
            if j <= 4 and n > 1:
                noise += squares - n * (d / m) ** 2
                seen += n
        low = high = value = 0.0
        if count[0] and numbers[r, 2] > 0:
            mean = first[0] / count[0]
            spread = np.sqrt(max(0.0, second[0] - count[0] * mean * mean))
            noise = max(0.0, noise / seen) if seen > 8 else 0.0
            low, value, high = _tail(row, classes[r], log_sum, numbers[r], count[0], mean, spread, noise, histogram)
        rounding = 1e-12 * row.shape[0] ** 0.5 + 1e-11
        out[r, 3] = max(0.0, numbers[r, 0] + kept - error + low - rounding)
        out[r, 4] = max(0.0, numbers[r, 0] + kept + error + high + rounding)
        out[r, 2] = min(max(numbers[r, 0] + kept + value, out[r, 3]), out[r, 4])
        out[r, 0] = log_sum - np.float64(row[targets[r]])
        out[r, 1] = numbers[r, 5]
        same_top[r] = first_largest(row) == top[r]


def compare_rows(logits: np.ndarray, base: BoundedRows, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float64[rows, 5]: nll, nll of the base, KLD, its bounds; bool[rows]: whether both have the same top token."""
    rows = len(logits)
    out, same_top = np.empty((rows, 5)), np.empty(rows, np.bool_)
    starts = np.zeros(rows, np.int64)
    np.cumsum(np.count_nonzero(base.classes == CLASSES + 1, axis=1)[:-1], out=starts[1:])
    inputs = [jit.readonly(np.ascontiguousarray(a)) for a in
              (logits, base.classes, starts, base.numbers, base.top, base.means(), base.deviations())]  # fmt: skip
    head, targets = jit.readonly(base.head), jit.readonly(np.asarray(targets, np.int32))

    def task(a: int, b: int) -> None:
        row, classes, start, numbers, top, means, deviations = (array[a:b] for array in inputs)
        _compare_rows(row, classes, head, start, numbers, top, means, deviations, base.step, targets[a:b],
                      out[a:b], same_top[a:b])  # fmt: skip

    jit.over_rows(task, rows)
    return out, same_top
