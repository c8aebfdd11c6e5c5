"""Collect an importance matrix: for every weight, the mean square of the activations that enter each column.

Every token vector x that enters a weight adds x_j² to the sum of column j, in float64, and 1 to the weight's count.
Each of several stacked experts has its own columns and its own count, and only vectors routed to it count. All
positions of a chunk count, also those whose logits are not scored. The matrices of the blocks (`blk.`) are recorded,
and on request the output matrix. `token_embd.weight` is only looked up, so no vector enters it unless it is also the
output.

What the observer sees in one call is summed by itself and then added. So these sums may be computed elsewhere
(`Recorder`) and added in the order of the calls, with the same bits.

A run can be saved at the end of a batch of chunks (`saved_run`) and resumed there from its `TextState`. Sums are stored
exactly, so the result has the same bytes as that of an uninterrupted run.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from quantkit.codegen import jit, thread_pool
from quantkit.codegen.jit import kernel
from quantkit.errors import DataError, UnknownNameError
from quantkit.evaluate.chunk_runs import evaluate_chunks
from quantkit.evaluate.imatrix.mtp import with_mtp_layers
from quantkit.evaluate.imatrix.second_moments import OUTPUT_NAMES, InputForm, MomentsCollector, MomentsRecorder
from quantkit.evaluate.models import ChunkModel
from quantkit.evaluate.nll import negative_log_likelihood
from quantkit.evaluate.perplexity import Perplexity
from quantkit.evaluate.text import DEFAULT_BATCH, Chunks
from quantkit.formats.imatrix import TOKEN_WEIGHTS, Entry, Imatrix, merge
from quantkit.formats.kld.scored_tokens import rows_per_chunk, scored_rows


@kernel
def _add_squares(x: np.ndarray, sums: np.ndarray, start: int, stop: int) -> None:
    """sums float64[n] += column sums of squares of float32[tokens, n], of the columns from `start` to `stop`."""
    for t in range(x.shape[0]):
        for j in range(start, stop):
            sums[j] += np.float64(x[t, j]) * np.float64(x[t, j])


def _sums_of_squares(x: np.ndarray) -> np.ndarray:
    """float64[n]: column sums of squares of float32[tokens, n]."""
    sums = np.zeros(x.shape[1])
    frozen = jit.readonly(np.ascontiguousarray(x))
    thread_pool.over_rows(lambda a, b: _add_squares(frozen, sums, a, b), x.shape[1], multiple=64, pieces=1)
    return sums


class Observation(NamedTuple):
    """The sums of squares float64[n] of `tokens` vectors that entered matrix `number` of a stack of `matrices`."""

    name: str
    number: int
    matrices: int
    squares: np.ndarray
    tokens: int


def is_collected(name: str, process_output: bool) -> bool:
    """Whether what enters a weight is recorded."""
    return name.startswith("blk.") or (process_output and name in OUTPUT_NAMES)


def chosen_weights(token_weights: str, with_moments: bool) -> str:
    """What weighs the tokens, one of TOKEN_WEIGHTS; for "" attention with second moments. OptionError for others."""
    if not token_weights:
        return "attention" if with_moments else "none"
    if token_weights not in TOKEN_WEIGHTS:
        raise UnknownNameError("choice of --token-weights", token_weights, TOKEN_WEIGHTS)
    return token_weights


def collects_output(process_output: bool | None, with_moments: bool) -> bool:
    """Whether the output matrix is collected for; None: with second moments.

    llama.cpp leaves it out by default. With its second moments SmolLM2 in Q5_0, the tied embedding included, has a KL
    divergence of 0.017 instead of 0.032.
    """
    return with_moments if process_output is None else process_output


class Collector:
    """Sums of squares by weight, and of products where `moments` is given; set `observe` as the model's observer.

    token_weights   what weighs the tokens that the model passes on (`Model.weighs_tokens`)
    """

    def __init__(
        self, process_output: bool = False, moments: MomentsCollector | None = None, token_weights: str = "none"
    ):
        self.process_output, self.moments, self.token_weights = process_output, moments, token_weights
        self.chunks = 0
        self.sums: dict[str, np.ndarray] = {}  # float64[matrices, n]
        self.counts: dict[str, np.ndarray] = {}  # int64[matrices]

    def observe(self, name: str, x: np.ndarray, number: int = 0, matrices: int = 1) -> None:
        """Add float32[tokens, n] that enters the weight `name`: matrix `number` of a stack of `matrices`."""
        if not is_collected(name, self.process_output):
            return
        if self.moments is not None:
            self.moments.observe(name, x, number, matrices)
        x = x.reshape(-1, x.shape[-1])
        self.add(Observation(name, number, matrices, _sums_of_squares(x), len(x)))

    def add(self, seen: Observation) -> None:
        """Add the sums of one call of an observer."""
        if seen.name not in self.sums:
            self.sums[seen.name] = np.zeros((seen.matrices, len(seen.squares)))
            self.counts[seen.name] = np.zeros(seen.matrices, np.int64)
        self.sums[seen.name][seen.number] += seen.squares
        self.counts[seen.name][seen.number] += seen.tokens

    def end_batch(self) -> None:
        """Drop the last input, which only the next calls of the same batch may share."""
        if self.moments is not None:
            self.moments.end_batch()

    def update(self, other: Collector) -> None:
        """Take the sums of weights that another collector has observed over the same chunks."""
        self.sums |= other.sums
        self.counts |= other.counts
        if self.moments is not None and other.moments is not None:
            self.moments.sums |= other.moments.sums
            self.moments.first |= other.moments.first

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
            stored = sums.astype(np.float32).astype(np.float64)  # as in a GGUF file, whose readers divide these
            values = np.asarray(stored / np.maximum(counts, 1)[:, None], np.float32)
            entries[name] = Entry(values, counts.copy(), max(1, self.chunks))
        moments = self.moments.result(entries, dataset) if self.moments is not None else {}
        return Imatrix(
            entries, self.chunks, dataset, chunk_size, second_moments=moments, token_weights=self.token_weights
        )


class Recorder:
    """An observer as `Collector` is one, which keeps the sums of each call for a collector elsewhere: `seen`.

    forms   of second moments, whose sums of products are in `moments`, in the order of calls; None: none
    """

    def __init__(self, process_output: bool, forms: Mapping[str, InputForm] | None):
        self.seen: list[Observation] = []
        self.moments = None if forms is None else MomentsRecorder(forms)
        self._process_output = process_output
        self._last: tuple[np.ndarray, np.ndarray] | None = None  # an input and its sums of squares

    def observe(self, name: str, x: np.ndarray, number: int = 0, matrices: int = 1) -> None:
        """Keep the sums of float32[tokens, n] that enters the weight `name`."""
        if not is_collected(name, self._process_output):
            return
        if self.moments is not None:
            self.moments.observe(name, x, number, matrices)
        if self._last is None or self._last[0] is not x:  # q, k and v get the same array: it is sent once
            self._last = x, _sums_of_squares(x.reshape(-1, x.shape[-1]))
        squares = self._last[1]
        self.seen.append(Observation(name, number, matrices, squares, x.size // len(squares)))


@dataclass
class TextState:
    """The state of a run over one text: its sums, and the negative log-likelihoods of the scored tokens so far."""

    collector: Collector
    nll: np.ndarray | None = None  # float64[n_chunk, rows_per_chunk]; None at the start, or without perplexity
    done: int = 0  # chunks


@dataclass(frozen=True)
class CollectOptions:
    """What is collected over chunks.

    process_output    also what enters the output matrix
    with_perplexity   also the negative log-likelihoods
    n_batch           tokens per batch, in whole chunks
    """

    process_output: bool = False
    with_perplexity: bool = True
    n_batch: int = DEFAULT_BATCH

    def rows(self, n_ctx: int) -> slice:
        """The positions that pass through the output matrix. (Every position passes through the blocks.)"""
        if self.process_output:
            return slice(0, n_ctx)
        return scored_rows(n_ctx) if self.with_perplexity else slice(0, 0)

    def nll(self, logits: np.ndarray, tokens: np.ndarray) -> np.ndarray | None:
        """float64[k]: the nll of a chunk int[n_ctx], of the logits at its `rows`; None without perplexity."""
        if not self.with_perplexity:
            return None
        scored = scored_rows(len(tokens))
        return negative_log_likelihood(logits[scored] if self.process_output else logits, tokens[scored.start + 1 :])


# Runs a model over chunks from `first` on: adds to the collector, and yields the nll of each chunk once the collector
# has the sums of its whole batch. `collect_here`, or one that has workers run batches.
CollectChunks = Callable[[Collector, Chunks, int, CollectOptions], Generator["np.ndarray | None", None, None]]


def collect_here(
    model: ChunkModel, collector: Collector, chunks: Chunks, first: int, options: CollectOptions
) -> Generator[np.ndarray | None, None, None]:
    """A `CollectChunks` with a model in this process."""
    model = with_mtp_layers(model)
    before, model.observer = model.observer, collector.observe
    try:
        run = evaluate_chunks(model, chunks.inputs[first:], options.n_batch, options.rows(chunks.n_ctx))
        for offset, logits in run:
            yield options.nll(logits, chunks.tokens[first + offset])
    finally:
        model.observer = before


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
    run: CollectChunks | None = None,
) -> tuple[Imatrix, Perplexity | None]:
    """Run a model over chunks; return the importance matrix of its weights, and the perplexity if requested.

    `on_chunk(chunks done, perplexity so far or None)` is called after each chunk, `on_batch(state)` after
    each batch, when the sums cover whole chunks and may be saved. With `state` the run resumes after the chunks that
    are done, and updates it. `run` runs the chunks; None: here.
    """
    state = state or TextState(Collector(process_output))
    options = CollectOptions(process_output, with_perplexity, n_batch)
    if with_perplexity and state.nll is None:
        state.nll = np.zeros((len(chunks), rows_per_chunk(chunks.n_ctx)))
    together = max(1, n_batch // chunks.n_ctx)
    of_chunks = (run or functools.partial(collect_here, model))(state.collector, chunks, state.done, options)
    with contextlib.closing(of_chunks):
        for index, nll in enumerate(of_chunks, state.done):
            state.collector.chunks = state.done = index + 1
            so_far = None
            if nll is not None and state.nll is not None:
                state.nll[index] = nll
                so_far = Perplexity(state.nll[: index + 1], chunks.n_ctx)
            if on_chunk is not None:
                on_chunk(index + 1, so_far)
            if on_batch is not None and (state.done % together == 0 or state.done == len(chunks)):
                on_batch(state)
    found = Perplexity(state.nll, chunks.n_ctx) if with_perplexity and state.nll is not None else None
    return state.collector.result(chunks.source, chunks.n_ctx), found


# -------------------------------------------------------------------------------------------------------- several texts


def pooled(parts: Sequence[Imatrix], shares: Sequence[float] | None = None) -> Imatrix:
    """Merge the importance matrices of several texts: every vector counts the same, or with `shares` each text has the
    given weight, whatever its length."""
    if shares is None:
        return merge(parts)
    if len(shares) != len(parts):
        raise DataError(f"{len(shares)} shares for {len(parts)} texts; give each text one")
    return merge(parts, [share / max(1, part.chunks) for share, part in zip(shares, parts)])
