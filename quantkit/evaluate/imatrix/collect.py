"""Collect an importance matrix: for every weight, the mean square of the activations that enter each column.

Every token vector x that enters a weight adds x_j² to the sum of column j, in float64, and 1 to the weight's count.
Each of several stacked experts has its own columns and its own count, and only vectors routed to it count. All
positions of a chunk count, also those whose logits are not scored. The matrices of the blocks (`blk.`) are recorded,
and on request the output matrix. `token_embd.weight` is only looked up, so no vector enters it unless it is also the
output.

A run can be saved at the end of a batch of chunks (`saved_run`) and resumed there from its `TextState`. Sums are stored
exactly, so the result has the same bytes as that of an uninterrupted run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from quantkit.codegen import jit, thread_pool
from quantkit.codegen.jit import kernel
from quantkit.errors import DataError
from quantkit.evaluate.chunk_runs import evaluate_chunks
from quantkit.evaluate.imatrix.second_moments import MomentsCollector
from quantkit.evaluate.models import ChunkModel
from quantkit.evaluate.nll import negative_log_likelihood
from quantkit.evaluate.perplexity import Perplexity
from quantkit.evaluate.text import DEFAULT_BATCH, Chunks
from quantkit.formats.imatrix import Entry, Imatrix, merge
from quantkit.formats.kld.scored_tokens import rows_per_chunk, scored_rows

OUTPUT_NAMES = ("output.weight", "token_embd.weight")


@kernel
def _add_squares(x: np.ndarray, sums: np.ndarray, start: int, stop: int) -> None:
    """sums float64[n] += column sums of squares of float32[tokens, n], of the columns from `start` to `stop`."""
    for t in range(x.shape[0]):
        for j in range(start, stop):
            sums[j] += np.float64(x[t, j]) * np.float64(x[t, j])


class Collector:
    """Sums of squares by weight, and of products where `moments` is given; set `observe` as the model's observer."""

    def __init__(self, process_output: bool = False, moments: MomentsCollector | None = None):
        self.process_output, self.moments = process_output, moments
        self.chunks = 0
        self.sums: dict[str, np.ndarray] = {}  # float64[matrices, n]
        self.counts: dict[str, np.ndarray] = {}  # int64[matrices]

    def observe(self, name: str, x: np.ndarray, number: int = 0, matrices: int = 1) -> None:
        """Add float32[tokens, n] that enters the weight `name`: matrix `number` of a stack of `matrices`."""
        if not (name.startswith("blk.") or (self.process_output and name in OUTPUT_NAMES)):
            return
        if self.moments is not None:
            self.moments.observe(name, x, number, matrices)
        x = x.reshape(-1, x.shape[-1])
        if name not in self.sums:
            self.sums[name] = np.zeros((matrices, x.shape[1]))
            self.counts[name] = np.zeros(matrices, np.int64)
        sums = self.sums[name][number]
        frozen = jit.readonly(np.ascontiguousarray(x))
        thread_pool.over_rows(lambda a, b: _add_squares(frozen, sums, a, b), x.shape[1], multiple=64, pieces=1)
        self.counts[name][number] += len(x)

    def result(self, dataset: str, chunk_size: int = 0) -> Imatrix:
        """The importance matrix so far. Raises DataError that names the first weight that NaN or Inf entered.

        A chunk counts as one call, as in ik_llama.cpp when the batch is the context. An expert that no token was routed
        to has a count of 0 and zeros.
        """
        entries = {}
        for name, sums in self.sums.items():
            if not np.isfinite(sums).all():
                raise DataError(f"{name}: NaN or Inf entered it within {self.chunks} chunks")
            counts = self.counts[name]
            values = np.asarray(sums / np.maximum(counts, 1)[:, None], np.float32)
            entries[name] = Entry(values, counts.copy(), max(1, self.chunks))
        moments = self.moments.result(entries, dataset) if self.moments is not None else {}
        return Imatrix(entries, self.chunks, dataset, chunk_size, second_moments=moments)


@dataclass
class TextState:
    """The state of a run over one text: its sums, and the negative log-likelihoods of the scored tokens so far."""

    collector: Collector
    nll: np.ndarray | None = None  # float64[n_chunk, rows_per_chunk]; None at the start, or without perplexity
    done: int = 0  # chunks


def collect(
    model: ChunkModel,
    chunks: Chunks,
    *,
    process_output: bool = False,
    with_perplexity: bool = True,
    n_batch: int = DEFAULT_BATCH,
    on_chunk: Callable[[int, Perplexity | None], None] | None = None,
    on_batch: Callable[[TextState], None] | None = None,
    state: TextState | None = None,
) -> tuple[Imatrix, Perplexity | None]:
    """Run a model over chunks; return the importance matrix of its weights, and the perplexity if requested.

    `on_chunk(chunks done, perplexity so far or None)` is called after each chunk, `on_batch(state)` after
    each batch, when the sums cover whole chunks and may be saved. With `state` the run resumes after the chunks that
    are done, and updates it.
    """
    state = state or TextState(Collector(process_output))
    collector = state.collector
    scored = scored_rows(chunks.n_ctx)
    # Every position passes through the blocks; only these positions pass through the output matrix.
    rows = slice(0, chunks.n_ctx) if process_output else scored if with_perplexity else slice(0, 0)
    if with_perplexity and state.nll is None:
        state.nll = np.zeros((len(chunks), rows_per_chunk(chunks.n_ctx)))
    together, first = max(1, n_batch // chunks.n_ctx), state.done
    before, model.observer = model.observer, collector.observe
    try:
        for offset, logits in evaluate_chunks(model, chunks.inputs[first:], n_batch, rows):
            index = first + offset
            collector.chunks = state.done = index + 1
            so_far = None
            if with_perplexity and state.nll is not None:
                scored_logits = logits[scored] if process_output else logits
                state.nll[index] = negative_log_likelihood(scored_logits, chunks.tokens[index, scored.start + 1 :])
                so_far = Perplexity(state.nll[: index + 1], chunks.n_ctx)
            if on_chunk is not None:
                on_chunk(index + 1, so_far)
            if on_batch is not None and (state.done % together == 0 or state.done == len(chunks)):
                on_batch(state)
    finally:
        model.observer = before
    found = Perplexity(state.nll, chunks.n_ctx) if with_perplexity and state.nll is not None else None
    return collector.result(chunks.source, chunks.n_ctx), found


# -------------------------------------------------------------------------------------------------------- several texts


def pooled(parts: Sequence[Imatrix], shares: Sequence[float] | None = None) -> Imatrix:
    """Merge the importance matrices of several texts: every vector counts the same, or with `shares` each text has the
    given weight, whatever its length."""
    if shares is None:
        return merge(parts)
    if len(shares) != len(parts):
        raise DataError(f"{len(shares)} shares for {len(parts)} texts; give each text one")
    return merge(parts, [share / max(1, part.chunks) for share, part in zip(shares, parts)])
