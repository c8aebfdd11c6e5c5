"""Collect an importance matrix on the workers of a cluster (`evaluate.on_workers`): a task is a batch of chunks.

A worker returns the sums of each call of the observer, and they are added here in the order of chunks and calls, as
`Collector.observe` adds them. They travel in parts of about 64 MiB, so a worker and this process hold those of one
batch at most. A larger batch (-b) makes fewer of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np

from quantkit.cluster.in_order import KeptRun
from quantkit.evaluate.chunk_runs import evaluate_chunks
from quantkit.evaluate.imatrix.collect import CollectOptions, Collector, Observation, Recorder
from quantkit.evaluate.imatrix.mtp import with_mtp_layers
from quantkit.evaluate.imatrix.second_moments import InputForm, MomentsObservation, MomentsRecorder
from quantkit.evaluate.models import ChunkModel
from quantkit.evaluate.on_workers import ClusterRuns, WorkerModel, model_files
from quantkit.evaluate.text import Chunks

PART_BYTES = 1 << 26  # of sums in a message

Item = TypeVar("Item")


class _Collected(NamedTuple):
    """A part of what a batch gives: sums of some calls of the observer, and of the first part the chunks' nll."""

    nll: Sequence[np.ndarray | None]
    seen: Sequence[Observation]
    moments: Sequence[MomentsObservation]


class CollectOnWorkers:
    """A `CollectChunks` on workers, for all texts of a run; a context manager."""

    def __init__(self, runs: ClusterRuns, model: WorkerModel, forms: Mapping[str, InputForm] | None):
        if forms is not None:
            MomentsRecorder(forms)  # raises for forms that depend on order
        self._runs = runs
        make = functools.partial(_CollectingModel.make, model, forms)
        self._run = KeptRun(runs.client, make, model_files(model.path), runs.on_message)

    def __enter__(self) -> CollectOnWorkers:
        self._run.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._run.__exit__(*error)
        self._runs.add(self._run)

    def __call__(
        self, collector: Collector, chunks: Chunks, first: int, options: CollectOptions
    ) -> Generator[np.ndarray | None, None, None]:
        together = max(1, options.n_batch // chunks.n_ctx)
        arguments = [
            (chunks.inputs[a : a + together], chunks.tokens[a : a + together], options)
            for a in range(first, len(chunks), together)
        ]
        for parts in self._run.results(_CollectingModel.batch, arguments):
            nll: Sequence[np.ndarray | None] = ()
            for part in parts:
                nll = nll or part.nll
                for seen in part.seen:
                    collector.add(seen)
                for of_moments in part.moments:
                    assert collector.moments is not None
                    collector.moments.add(of_moments)
            yield from nll


@dataclass(frozen=True)
class _CollectingModel:
    """The state of a worker: the open model, and the forms of second moments."""

    model: ChunkModel
    forms: Mapping[str, InputForm] | None

    @classmethod
    def make(cls, model: WorkerModel, forms: Mapping[str, InputForm] | None, threads: int) -> _CollectingModel:
        return cls(with_mtp_layers(model.open(threads)), forms)

    def batch(self, argument: tuple[np.ndarray, np.ndarray, CollectOptions]) -> list[_Collected]:
        """The sums and nll of a batch int[chunks, n_ctx], in parts of about PART_BYTES."""
        inputs, tokens, options = argument
        recorder = Recorder(options.process_output, self.forms)
        self.model.observer = recorder.observe
        try:
            run = evaluate_chunks(self.model, inputs, options.n_batch, options.rows(inputs.shape[1]))
            nll = [options.nll(logits, of_chunk) for (_, logits), of_chunk in zip(run, tokens, strict=True)]
        finally:
            self.model.observer = None
        moments = [] if recorder.moments is None else recorder.moments.seen
        parts = [_Collected(nll, [], [])]
        parts += [_Collected((), some, []) for some in in_parts(recorder.seen, lambda seen: seen.squares.nbytes)]
        parts += [_Collected((), [], some) for some in in_parts(moments, _bytes_of_moments)]
        return parts


def _bytes_of_moments(seen: MomentsObservation) -> int:
    return 0 if seen.sums is None else sum(block.nbytes for block in seen.sums.blocks[0])


def in_parts(items: Sequence[Item], nbytes: Callable[[Item], int]) -> Iterator[list[Item]]:
    """Consecutive items, each list of about PART_BYTES."""
    part, size = list[Item](), 0
    for item in items:
        part.append(item)
        size += nbytes(item)
        if size >= PART_BYTES:
            yield part
            part, size = [], 0
    if part:
        yield part
