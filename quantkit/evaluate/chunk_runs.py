"""Run a model over chunks of tokens and yield the logits of one chunk after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from quantkit.errors import DataError
from quantkit.evaluate.models import ChunkModel
from quantkit.evaluate.text import DEFAULT_BATCH
from quantkit.formats.kld.base_file import scored_rows


def evaluate_chunks(
    model: ChunkModel, inputs: np.ndarray, n_batch: int = DEFAULT_BATCH, rows: slice | None = None, first: int = 0
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


RunChunks = Callable[..., Iterator[tuple[int, np.ndarray]]]  # same parameters as `evaluate_chunks`


def check_context(model: ChunkModel, n_ctx: int) -> None:
    """Raise DataError if the chunks are longer than the model's training context."""
    if model.n_ctx_train and n_ctx > model.n_ctx_train:
        raise DataError(
            f"chunks of {n_ctx} tokens, but the model was trained with {model.n_ctx_train}; take shorter chunks"
        )
