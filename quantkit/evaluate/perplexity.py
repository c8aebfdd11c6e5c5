"""Perplexity by llama-perplexity's protocol, so that figures are comparable with published ones.

Each chunk is a fresh sequence. Its second half is scored: with first = n_ctx // 2, the logits at first … n_ctx - 2
predict the tokens first + 1 … n_ctx - 1. Over all scored tokens,

    nll = -log softmax(logits)[target]          float32 exponentials, float64 sum
    PPL = exp(mean nll)
    +/- = PPL * sqrt((mean nll² - (mean nll)²) / (count - 1))
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from quantkit.codegen import jit, thread_pool
from quantkit.codegen.jit import kernel
from quantkit.errors import DataError
from quantkit.evaluate.statistics import perplexity_of
from quantkit.evaluate.text import DEFAULT_BATCH, Chunks
from quantkit.formats.kld.base_file import BaseWriter, scored_rows
from quantkit.formats.kld.bounded_file import BoundedWriter
from quantkit.runtime.kernels.reference import exp

# Kernels work on blocks this long: exponentials go to a scratch array in a loop that vectorises, then are summed.
BLOCK = 1024


@kernel(fastmath={"reassoc", "nnan", "nsz"})
def _largest(row):
    top = row[0]
    for i in range(row.shape[0]):
        top = max(top, row[i])
    return top


@kernel
def _exponentials(row, top, out):
    for i in range(row.shape[0]):
        out[i] = exp(row[i] - top)


@kernel(fastmath={"reassoc"})
def total(values):
    """Sum of float32[n] in float64."""
    found = 0.0
    for i in range(values.shape[0]):
        found += np.float64(values[i])
    return found


@kernel
def log_sum_exp(row, scratch):
    """log sum exp of finite float32[n] as (largest value, log of the sum of exponentials relative to it).

    `scratch` is a float32[BLOCK] work buffer.
    """
    top = _largest(row)
    n = row.shape[0]
    found = 0.0
    for start in range(0, n, BLOCK):
        size = min(BLOCK, n - start)
        _exponentials(row[start : start + size], top, scratch[:size])
        found += total(scratch[:size])
    return top, np.log(found)


@kernel
def log_total(row):
    """log sum exp of float32[n], in float64: figures are printed to the sixth digit of differences between these."""
    top = row[0]
    for i in range(row.shape[0]):
        top = max(top, row[i])
    found = 0.0
    for i in range(row.shape[0]):
        found += np.exp(np.float64(row[i]) - np.float64(top))
    return np.float64(top) + np.log(found)


@kernel
def first_largest(values):
    best = 0
    for i in range(values.shape[0]):
        if values[i] > values[best]:
            best = i
    return best


@kernel
def _nll_rows(logits, targets, out):
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


@dataclass(frozen=True)
class Perplexity:
    """Result: nll float64[n_chunk, rows_per_chunk] in nats, one per scored token."""

    nll: np.ndarray
    n_ctx: int

    @property
    def value(self) -> float:
        return perplexity_of(float(self.nll.mean()))

    @property
    def mean_error(self) -> float:
        """Standard error of the mean nll."""
        flat = self.nll.reshape(-1)
        variance = float(np.mean(flat**2) - flat.mean() ** 2)
        return math.sqrt(variance / (flat.size - 1)) if variance > 0 and flat.size > 1 else 0.0

    @property
    def error(self) -> float:
        return self.value * self.mean_error

    def after(self, chunks: int) -> Perplexity:
        """The result over the first `chunks` chunks."""
        return Perplexity(self.nll[:chunks], self.n_ctx)

    def __str__(self) -> str:
        return f"{self.value:.4f} +/- {self.error:.5f}"


def evaluate_chunks(
    model: Any, inputs: np.ndarray, n_batch: int = DEFAULT_BATCH, rows: slice | None = None, first: int = 0
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (index, float32[k, n_vocab] logits of a chunk's positions `rows`, by default the scored ones) in order.

    Chunks are run `n_batch` tokens at a time, starting at chunk `first`; only one chunk's logits are in memory.
    """
    n_chunk, n_ctx = inputs.shape
    check_context(model, n_ctx)
    together = max(1, n_batch // n_ctx)
    for start in range(first, n_chunk, together):
        hidden = model.hidden_sequences(inputs[start : start + together], rows or scored_rows(n_ctx))
        for index, states in enumerate(hidden, start):
            yield index, model.project(states)


Run = Callable[..., Iterator[tuple[int, np.ndarray]]]  # same parameters as `evaluate_chunks`


def check_context(model: Any, n_ctx: int) -> None:
    """Raise DataError if the chunks are longer than the model's training context."""
    if model.n_ctx_train and n_ctx > model.n_ctx_train:
        raise DataError(f"chunks of {n_ctx} tokens, but the model was trained with {model.n_ctx_train}; lower -c")


def perplexity(
    model: Any,
    chunks: Chunks,
    *,
    n_batch: int = DEFAULT_BATCH,
    base: BaseWriter | BoundedWriter | None = None,
    on_chunk: Callable[[Perplexity], None] | None = None,
    done: np.ndarray | None = None,
    run: Run = evaluate_chunks,
) -> Perplexity:
    """Perplexity of a model over chunks.

    done: float64[k, positions], the nll of the first k chunks (whole batches) from an earlier run.
    run: runs the chunks: `evaluate_chunks` or `streamed.streamed_chunks`.

    `base` also gets every chunk's logits. `on_chunk` is called after each chunk with the result so far. The model
    itself reports NaN and Inf and names the tensor that caused them.
    """
    rows = chunks.rows
    nll = np.empty((len(chunks), rows.stop - rows.start))
    first = 0 if done is None else len(done)
    nll[:first] = 0 if done is None else done
    for index, logits in run(model, chunks.inputs, n_batch, rows, first):
        nll[index] = negative_log_likelihood(logits, chunks.tokens[index, rows.start + 1 :])
        if base is not None:
            base.write(logits)
        if on_chunk is not None:
            on_chunk(Perplexity(nll[: index + 1], chunks.n_ctx))
    return Perplexity(nll, chunks.n_ctx)
