"""Collect an importance matrix layer by layer on the workers of a cluster, for models larger than a worker's memory.

The layers are a pipeline, as in `layers.on_workers`. A stage observes the inputs of its weights, and its sums go from
batch to batch on its worker (`cluster.summed`): they are added in the order of chunks, and sent here once, after the
last batch. So a sketch of second moments works too. A task is a batch of chunks as without workers (-b).
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from quantkit.cluster.in_order import KeptRun
from quantkit.cluster.summed import SummedPipeline
from quantkit.evaluate.imatrix.collect import CollectOptions, Collector
from quantkit.evaluate.imatrix.input_sums import InputSums
from quantkit.evaluate.imatrix.mtp import mtp_head, observe_batches
from quantkit.evaluate.imatrix.on_workers import in_parts
from quantkit.evaluate.imatrix.second_moments import InputForm, MomentsCollector
from quantkit.evaluate.layers.layer_by_layer import chunk_batches, whole_batches
from quantkit.evaluate.layers.on_workers import StagedModel, States, stages_of
from quantkit.evaluate.on_workers import ClusterRuns, WorkerModel, model_files
from quantkit.evaluate.text import Chunks

if TYPE_CHECKING:
    from quantkit.runtime.mtp import MtpHead


class _Batch(NamedTuple):
    """Tokens int[chunks, n_ctx]: what the model gets, and the text's own."""

    inputs: np.ndarray
    tokens: np.ndarray


class CollectLayersOnWorkers:
    """A `CollectChunks` by layer on workers, for all texts of a run; a context manager. The first call hands out all
    chunks."""

    def __init__(
        self, runs: ClusterRuns, model: WorkerModel, chunk_sets: Sequence[Chunks],
        forms: Mapping[str, InputForm] | None, options: CollectOptions,
    ):  # fmt: skip
        self._runs, self._chunk_sets, self._options = runs, chunk_sets, options
        self._stages = stages_of(model.path, runs.client)
        make = functools.partial(_CollectingStages.make, model, self._stages, forms, options)
        self._run = KeptRun(runs.client, make, model_files(model.path))
        self._pipeline: SummedPipeline | None = None
        self._next = 0  # text

    def __enter__(self) -> CollectLayersOnWorkers:
        self._run.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self._pipeline is not None:
            self._pipeline.cancel()
        self._run.__exit__(*error)
        self._runs.add(self._run)

    def __call__(
        self, collector: Collector, chunks: Chunks, first: int, options: CollectOptions
    ) -> Generator[np.ndarray | None, None, None]:
        text, self._next = self._next, self._next + 1
        if first == len(chunks):
            return
        if self._pipeline is None:
            groups = [self._batches(of_text) for of_text in self._chunk_sets]
            self._pipeline = SummedPipeline(self._run, _CollectingStages.run, groups, self._stages, _in_pieces)
        for nll in self._pipeline.results(text):
            yield from nll
        for piece in self._pipeline.sums(text):
            collector.update(piece)

    def _batches(self, chunks: Chunks) -> list[_Batch]:
        slices = whole_batches(len(chunks), chunks.n_ctx, self._options.n_batch)
        return [_Batch(chunks.inputs[batch], chunks.tokens[batch]) for batch in slices]


@dataclass(frozen=True)
class _CollectingStages:
    """The state of a worker: the model, whose layers are split in stages, its MTP layers, and what is collected."""

    staged: StagedModel
    head: MtpHead | None
    forms: Mapping[str, InputForm] | None
    options: CollectOptions

    @classmethod
    def make(
        cls, model: WorkerModel, stages: int, forms: Mapping[str, InputForm] | None, options: CollectOptions,
        threads: int,
    ) -> _CollectingStages:  # fmt: skip
        opened = model.open(threads)
        return cls(StagedModel(opened, stages), mtp_head(opened), forms, options)

    def run(self, argument: tuple[_Batch, int, list[States] | None, Collector | None]) -> tuple[Any, Collector]:
        """The states after a stage, or after the last one the nll of each chunk; and the sums with those of the batch.

        The states are those of the sequences that run at a time.
        """
        batch, stage, before, sums = argument
        collector = self._empty() if sums is None else copy.deepcopy(sums)  # a task may run again with what it got
        model, n_ctx = self.staged.model, batch.inputs.shape[1]
        parts = chunk_batches(len(batch.inputs), n_ctx, self.options.n_batch)
        model.observer = collector.observe
        try:
            after = [
                self.staged.run(stage, batch.inputs[part], None if before is None else before[i])
                for i, part in enumerate(parts)
            ]
            if stage + 1 < self.staged.stages:
                found: Any = after
            else:
                found = self._ended(batch, np.concatenate([states.hidden for states in after]), collector)
        finally:
            model.observer = None
        collector.end_batch()
        return found, collector

    def _empty(self) -> Collector:
        moments = MomentsCollector(self.forms) if self.forms is not None else None
        return Collector(self.options.process_output, moments)

    def _ended(self, batch: _Batch, hidden: np.ndarray, collector: Collector) -> list[np.ndarray | None]:
        """Observe the MTP layers, and the output matrix; the nll of each chunk."""
        if self.head is not None:
            observe_batches(self.head, batch.inputs, hidden, [slice(None)], lambda _: collector.observe)
        rows = self.options.rows(batch.inputs.shape[1])
        return [
            self.options.nll(self.staged.model.project(of_chunk[rows]), tokens)
            for of_chunk, tokens in zip(hidden, batch.tokens, strict=True)
        ]


def _in_pieces(collector: Collector) -> list[Collector]:
    """Collectors that have the sums of some weights each, in messages of about 64 MiB."""
    pieces = []
    for names in in_parts(list(collector.sums), lambda name: collector.sums[name].nbytes):
        piece = Collector(collector.process_output)
        piece.sums = {name: collector.sums[name] for name in names}
        piece.counts = {name: collector.counts[name] for name in names}
        pieces.append(piece)
    moments = collector.moments
    if moments is None:
        return pieces
    for names in in_parts(list(moments.sums), lambda name: _nbytes(moments.sums[name])):
        some = MomentsCollector({}, {name: moments.sums[name] for name in names}, dict(moments.first))
        pieces.append(Collector(collector.process_output, some))
    return pieces


def _nbytes(sums: InputSums) -> int:
    return sum(array.nbytes for array in sums.arrays().values())
