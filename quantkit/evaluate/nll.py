"""Negative log-likelihood of tokens under float32 logits, with compiled kernels."""

from __future__ import annotations

import numpy as np

from quantkit.codegen import jit, thread_pool
from quantkit.codegen.jit import kernel
from quantkit.runtime.kernels.reference import exp

# Block length of kernels: exponentials are written to a scratch array in a loop that vectorizes, then summed.
BLOCK = 1024


@kernel(fastmath={"reassoc", "nnan", "nsz"})
def _largest(row: np.ndarray) -> float:
    top: float = row[0]
    for i in range(row.shape[0]):
        top = max(top, row[i])
    return top


@kernel
def _exponentials(row: np.ndarray, top: float, out: np.ndarray) -> None:
    for i in range(row.shape[0]):
        out[i] = exp(row[i] - top)


@kernel(fastmath={"reassoc"})
def total(values: np.ndarray) -> float:
    """Sum of float32[n] in float64."""
    sum_ = 0.0
    for i in range(values.shape[0]):
        sum_ += np.float64(values[i])
    return sum_


@kernel
def log_sum_exp(row: np.ndarray, scratch: np.ndarray) -> tuple[float, float]:
    """log sum exp of finite float32[n] as (largest value, log of the sum of exponentials relative to it).

    `scratch` is a float32[BLOCK] work buffer.
    """
    top = _largest(row)
    n = row.shape[0]
    sum_ = 0.0
    for start in range(0, n, BLOCK):
        size = min(BLOCK, n - start)
        _exponentials(row[start : start + size], top, scratch[:size])
        sum_ += total(scratch[:size])
    return top, np.log(sum_)


@kernel
def log_sum_exp_float64(row: np.ndarray) -> float:
    """log sum exp of float32[n] with float64 exponentials: printed figures are small differences of such values."""
    top = row[0]
    for i in range(row.shape[0]):
        top = max(top, row[i])
    sum_ = 0.0
    for i in range(row.shape[0]):
        sum_ += np.exp(np.float64(row[i]) - np.float64(top))
    log_sum: float = np.float64(top) + np.log(sum_)
    return log_sum


@kernel
def first_largest(values: np.ndarray) -> int:
    """Index of the largest element, the first in a tie."""
    best = 0
    for i in range(values.shape[0]):
        if values[i] > values[best]:
            best = i
    return best


@kernel
def _nll_rows(logits: np.ndarray, targets: np.ndarray, out: np.ndarray) -> None:
    scratch = np.empty(BLOCK, np.float32)
    for r in range(logits.shape[0]):
        top, log_sum = log_sum_exp(logits[r], scratch)
        out[r] = log_sum - (np.float64(logits[r, targets[r]]) - np.float64(top))


def negative_log_likelihood(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """float64[rows]: -log softmax(logits)[target] of float32[rows, n_vocab] logits and int[rows] targets."""
    out = np.empty(len(logits), np.float64)
    logits, targets = jit.readonly(np.ascontiguousarray(logits)), jit.readonly(np.asarray(targets, np.int32))
    thread_pool.over_rows(lambda a, b: _nll_rows(logits[a:b], targets[a:b], out[a:b]), len(logits))
    return out
