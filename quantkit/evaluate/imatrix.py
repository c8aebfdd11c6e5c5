"""Collecting an importance matrix: for every weight, the mean square of what enters each of its columns.

Every token vector x that enters a weight adds x_j² to the weight's column j, in float64, and one to its count. All
positions of a chunk count, also those whose logits are not scored. Recorded are the matrices of the blocks (`blk.`),
and the output matrix when asked; `token_embd.weight` is looked up, so nothing enters it unless it is the output too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from quantkit import jit
from quantkit.errors import DataError
from quantkit.evaluate.perplexity import Perplexity, evaluate_chunks, negative_log_likelihood
from quantkit.evaluate.text import DEFAULT_BATCH, Chunks
from quantkit.files.imatrix import Entry, Imatrix
from quantkit.files.kld import rows_per_chunk, scored_rows
from quantkit.jit import kernel

OUTPUT_NAMES = ("output.weight", "token_embd.weight")


@kernel
def _add_squares(x, sums, start, stop):
    """sums float64[n] += column sums of squares of float32[tokens, n], of the columns from `start` to `stop`."""
    for t in range(x.shape[0]):
        for j in range(start, stop):
            sums[j] += np.float64(x[t, j]) * np.float64(x[t, j])


class Collector:
    """Sums of squares by weight; `observe` is what the model's observer calls."""

    def __init__(self, process_output: bool = False):
        self.process_output = process_output
        self.chunks = 0
        self._sums: dict[str, np.ndarray] = {}
        self._counts: dict[str, int] = {}

    def observe(self, name: str, x: np.ndarray) -> None:
        """Add float32[tokens, n] that enters the weight `name`."""
        if not (name.startswith("blk.") or (self.process_output and name in OUTPUT_NAMES)):
            return
        x = x.reshape(-1, x.shape[-1])
        sums = self._sums.setdefault(name, np.zeros(x.shape[1]))
        frozen = jit.readonly(np.ascontiguousarray(x))
        jit.over_rows(lambda a, b: _add_squares(frozen, sums, a, b), x.shape[1], multiple=64, pieces=1)
        self._counts[name] = self._counts.get(name, 0) + len(x)

    def result(self, dataset: str) -> Imatrix:
        """What has been collected so far; DataError that names the first weight that NaN or Inf entered, if one did.

        A chunk counts as one call, as it does in the reference where the batch is the context.
        """
        for name, sums in self._sums.items():
            if not np.isfinite(sums).all():
                raise DataError(f"{name}: NaN or Inf entered it within {self.chunks} chunks")
        entries = {
            name: Entry(
                np.asarray(sums / self._counts[name], np.float32)[None],
                np.array([self._counts[name]], np.int64),
                max(1, self.chunks),
            )
            for name, sums in self._sums.items()
        }
        return Imatrix(entries, self.chunks, dataset)


def collect(
    model: Any,
    chunks: Chunks,
    *,
    process_output: bool = False,
    with_perplexity: bool = True,
    n_batch: int = DEFAULT_BATCH,
    on_chunk: Callable[[int, Perplexity | None, Collector], None] | None = None,
) -> tuple[Imatrix, Perplexity | None]:
    """Run a model over chunks; returns the importance matrix of its weights and the perplexity, if asked for.

    `on_chunk(chunks done, perplexity so far or None, collector)` is called after each chunk.
    """
    collector = Collector(process_output)
    scored = scored_rows(chunks.n_ctx)
    # Every position passes through the blocks whatever is asked for here; through the output matrix only these do.
    asked = slice(0, chunks.n_ctx) if process_output else scored if with_perplexity else slice(0, 0)
    nll = np.empty((len(chunks), rows_per_chunk(chunks.n_ctx)))
    before, model.observer = model.observer, collector.observe
    try:
        for index, logits in evaluate_chunks(model, chunks.inputs, n_batch, asked):
            collector.chunks = index + 1
            if with_perplexity:
                rows = logits[scored] if process_output else logits
                nll[index] = negative_log_likelihood(rows, chunks.tokens[index, scored.start + 1 :])
            if on_chunk is not None:
                so_far = Perplexity(nll[: index + 1], chunks.n_ctx) if with_perplexity else None
                on_chunk(index + 1, so_far, collector)
    finally:
        model.observer = before
    return collector.result(chunks.source), Perplexity(nll, chunks.n_ctx) if with_perplexity else None
