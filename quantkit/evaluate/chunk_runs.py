"""Run a model over chunks of tokens: the logits of one chunk after another, or what is measured of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

import numpy as np

from quantkit.errors import DataError
from quantkit.evaluate.models import ChunkModel
from quantkit.evaluate.text import DEFAULT_BATCH
from quantkit.formats.kld.scored_tokens import scored_rows


def evaluate_chunks(
    model: ChunkModel,
    inputs: np.ndarray,
    n_batch: int = DEFAULT_BATCH,
    rows: slice | Sequence[np.ndarray] | None = None,
    first: int = 0,
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (index, float32[k, n_vocab] logits of a chunk's positions `rows`, by default the scored ones) in order.

    `rows` are the same for all chunks, or int[k] of each. In the second case a batch ends after the last of them.
    Chunks are run `n_batch` tokens at a time, starting at chunk `first`; only one chunk's logits are in memory.
    """
    n_chunk, n_ctx = inputs.shape
    check_context(model, n_ctx)
    together = max(1, n_batch // n_ctx)
    for start in range(first, n_chunk, together):
        batch = inputs[start : start + together]
        if rows is None or isinstance(rows, slice):
            span = rows or scored_rows(n_ctx)
        else:
            span = slice(0, 1 + max(int(of_chunk[-1]) for of_chunk in rows[start : start + len(batch)]))
            batch = batch[:, : span.stop]
        for index, states in enumerate(model.hidden_sequences(batch, span), start):
            yield index, model.project(states if rows is None or isinstance(rows, slice) else states[rows[index]])


RunChunks = Callable[..., Iterator[tuple[int, np.ndarray]]]  # same parameters as `evaluate_chunks`

Result = TypeVar("Result")
Result_co = TypeVar("Result_co", covariant=True)


class Measurement(Protocol[Result_co]):
    """What is computed of the logits of each chunk. It can be pickled: a worker may compute it."""

    def __call__(self, index: int, logits: np.ndarray) -> Result_co:
        """The result of chunk `index`, of the float32[k, n_vocab] logits of its scored positions."""


class MeasureChunks(Protocol):
    """Runs a model over chunks and measures each, as `Here` does in this process."""

    def __call__(
        self,
        model: ChunkModel,
        inputs: np.ndarray,
        n_batch: int,
        rows: slice | Sequence[np.ndarray] | None,
        first: int,
        measure: Measurement[Result],
    ) -> Iterator[tuple[int, Result]]:
        """Yield (index, result) in the order of the chunks; the parameters are those of `evaluate_chunks`."""


class Here:
    """Measures chunks in this process; `run` runs them: `evaluate_chunks`, or another with its parameters."""

    def __init__(self, run: RunChunks = evaluate_chunks):
        self._run = run

    def __call__(
        self,
        model: ChunkModel,
        inputs: np.ndarray,
        n_batch: int,
        rows: slice | Sequence[np.ndarray] | None,
        first: int,
        measure: Measurement[Result],
    ) -> Iterator[tuple[int, Result]]:
        for index, logits in self._run(model, inputs, n_batch, rows, first):
            yield index, measure(index, logits)


def check_context(model: ChunkModel, n_ctx: int) -> None:
    """Raise DataError if the chunks are longer than the model's training context."""
    if model.n_ctx_train and n_ctx > model.n_ctx_train:
        raise DataError(
            f"chunks of {n_ctx} tokens, but the model was trained with {model.n_ctx_train}; take shorter chunks"
        )
