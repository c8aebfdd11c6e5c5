"""Perplexity by the reference's protocol, so that figures compare with published ones.

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

from quantkit import jit
from quantkit.errors import DataError
from quantkit.evaluate.text import DEFAULT_BATCH, Chunks, batches
from quantkit.files.kld import BaseWriter, scored_rows
from quantkit.jit import kernel


@kernel
def log_sum_exp(row):
    """log sum exp of float32[n] as (largest value, log of the sum of exponentials relative to it)."""
    top = row[0]
    for i in range(row.shape[0]):
        top = max(top, row[i])
    total = 0.0
    for i in range(row.shape[0]):
        total += np.float64(np.exp(np.float32(row[i] - top)))
    return top, np.log(total)


@kernel
def _nll_rows(logits, targets, out):
    for r in range(logits.shape[0]):
        top, log_sum = log_sum_exp(logits[r])
        out[r] = log_sum - (np.float64(logits[r, targets[r]]) - np.float64(top))


def negative_log_likelihood(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """float64[rows]: -log softmax(logits)[target] of float32[rows, n_vocab] logits and int[rows] targets."""
    out = np.empty(len(logits), np.float64)
    logits, targets = jit.readonly(np.ascontiguousarray(logits)), jit.readonly(np.asarray(targets, np.int32))
    jit.over_rows(lambda a, b: _nll_rows(logits[a:b], targets[a:b], out[a:b]), len(logits))
    return out


@dataclass(frozen=True)
class Perplexity:
    """Result: nll float64[n_chunk, rows_per_chunk], natural logarithms, one a scored token."""

    nll: np.ndarray
    n_ctx: int

    @property
    def value(self) -> float:
        return float(math.exp(self.nll.mean()))

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
        """The result as it stood after so many chunks."""
        return Perplexity(self.nll[:chunks], self.n_ctx)

    def __str__(self) -> str:
        return f"{self.value:.4f} +/- {self.error:.5f}"


def evaluate_chunks(model: Any, inputs: np.ndarray, n_batch: int = DEFAULT_BATCH) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (index, float32[rows_per_chunk, n_vocab] logits of the scored positions) chunk after chunk."""
    n_chunk, n_ctx = inputs.shape
    check_context(model, n_ctx)
    for part in batches(n_chunk, n_ctx, model.vocab_size, n_batch):
        logits = model.forward_sequences(inputs[part], scored_rows(n_ctx))
        for index in range(part.start, part.stop):
            yield index, logits[index - part.start]


def check_context(model: Any, n_ctx: int) -> None:
    """DataError when the model was not trained for chunks this long."""
    if model.n_ctx_train and n_ctx > model.n_ctx_train:
        raise DataError(f"chunks of {n_ctx} tokens, but the model was trained with {model.n_ctx_train}; lower -c")


def perplexity(
    model: Any,
    chunks: Chunks,
    *,
    n_batch: int = DEFAULT_BATCH,
    base: BaseWriter | None = None,
    on_chunk: Callable[[Perplexity], None] | None = None,
) -> Perplexity:
    """Perplexity of a model over chunks.

    `base` also gets every chunk's logits. `on_chunk` is called after each chunk with the result so far. Logits that
    are NaN or Inf are a DataError that names the first weight whose input was.
    """
    rows = scored_rows(chunks.n_ctx)
    nll = np.empty((len(chunks), rows.stop - rows.start))
    for index, logits in evaluate_chunks(model, chunks.inputs, n_batch):
        nll[index] = negative_log_likelihood(logits, chunks.tokens[index, rows.start + 1 :])
        require_finite(model, chunks.inputs, index, nll[index])
        if base is not None:
            base.write(logits)
        if on_chunk is not None:
            on_chunk(Perplexity(nll[: index + 1], chunks.n_ctx))
    return Perplexity(nll, chunks.n_ctx)


# ------------------------------------------------------------------------------------------------------- the tripwire


def require_finite(model: Any, inputs: np.ndarray, index: int, nll: np.ndarray) -> None:
    """Raise DataError when a chunk's nll holds NaN or Inf, naming the weight that was the first to see one."""
    if np.isfinite(nll).all():
        return
    position = int(np.argmin(np.isfinite(nll))) + scored_rows(inputs.shape[1]).start
    culprit = first_not_finite(model, inputs[index])
    raise DataError(
        f"chunk {index + 1}: the logits at position {position} are not finite; "
        + (f"NaN or Inf first entered {culprit}" if culprit else "every weight's input was finite")
    )


def first_not_finite(model: Any, tokens: np.ndarray) -> str | None:
    """Name of the first weight that NaN or Inf enters when the model is run over int[n] tokens; None if none does."""
    found: list[str] = []

    def watch(name: str, x: np.ndarray) -> None:
        if not found and not np.isfinite(x.sum(dtype=np.float64)):
            found.append(name)

    before, model.observer = model.observer, watch
    try:
        model.forward_sequences(tokens[None], slice(len(tokens) - 1, len(tokens)))
    finally:
        model.observer = before
    return found[0] if found else None
