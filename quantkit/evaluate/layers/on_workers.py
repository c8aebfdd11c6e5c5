"""Run chunks layer by layer on the workers of a cluster, for models larger than a worker's memory.

The layers are a pipeline. Its stages are as many as there are workers, so that each worker keeps the weights of its
layers in memory; hidden states float32[chunks, n_ctx, state width] of a batch go from worker to worker, and keys and
values that later layers read. If the model is larger than the memory of all workers, there are several stages for each:
all chunks pass the first layers before a worker reads its next ones, and their states wait in the workers' memory.

Batches are those of `layer_by_layer`, so the results have the same bits.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np

from quantkit.cluster.in_order import KeptRun
from quantkit.codegen import blas
from quantkit.evaluate.chunk_runs import Measurement, Result
from quantkit.evaluate.layers.layer_by_layer import (
    Selections,
    check_by_layer,
    chunk_batches,
    merge_streams,
    release_block,
    run_sequences,
)
from quantkit.evaluate.layers.shared_keys import SharedKeys, needs_shared_keys
from quantkit.evaluate.models import ChunkModel
from quantkit.evaluate.on_workers import ClusterRuns, WorkerModel, model_files
from quantkit.formats import gguf
from quantkit.formats.kld.scored_tokens import scored_rows

if TYPE_CHECKING:
    from distributed import Client

    from quantkit.archs.common.blocks import Block
    from quantkit.runtime.model import Model

_OF_MEMORY = 0.7  # share of a worker's memory for the weights of a stage


@dataclass(frozen=True)
class LayersOnWorkers:
    """A `MeasureChunks` by layer. `files` are those besides the model's that workers read."""

    runs: ClusterRuns
    model: WorkerModel
    files: Sequence[Path] = ()

    def __call__(
        self,
        model: ChunkModel,
        inputs: np.ndarray,
        n_batch: int,
        rows: slice | Sequence[np.ndarray] | None,
        first: int,
        measure: Measurement[Result],
    ) -> Iterator[tuple[int, Result]]:
        check_by_layer(model, inputs.shape[1], self.model.numerics)
        batches = chunk_batches(len(inputs), inputs.shape[1], n_batch, first)
        stages = stages_of(self.model.path, self.runs.client)
        make = functools.partial(_Stages.make, self.model, inputs, rows, measure, stages)
        files = [*model_files(self.model.path), *self.files]
        with KeptRun(self.runs.client, make, files, self.runs.on_message) as run:
            for parts in run.results(_Stages.run, batches, stages):
                for part in parts:
                    yield from part
            self.runs.add(run)


def stages_of(path: Path, client: Client) -> int:
    """Stages of a pipeline over the workers of a cluster, for the model of a file."""
    return stage_count(sum(tensor.nbytes for tensor in gguf.open(path).tensors.values()), _memory(client))


def stage_count(model_bytes: int, memory: Sequence[int]) -> int:
    """Stages of a pipeline over workers with so many bytes of memory: one for each, or a multiple of that."""
    return len(memory) * max(1, math.ceil(model_bytes / (_OF_MEMORY * sum(memory))))


def _memory(client: Client) -> list[int]:
    """Bytes of memory for each worker; those of one machine share it."""
    available: dict[str, int] = client.run(_available)
    hosts = Counter(urlsplit(address).hostname for address in available)
    return [size // hosts[urlsplit(address).hostname] for address, size in available.items()]


def _available() -> int:
    import psutil  # distributed needs it

    return int(psutil.virtual_memory().available)


class States(NamedTuple):
    """What goes from stage to stage.

    hidden       float32[chunks, n_ctx, state width]
    selections   what a block has selected
    shared       rows of `SharedKeys`; None before there are any, and when no later layer reads them
    """

    hidden: np.ndarray
    selections: Selections
    shared: np.ndarray | None


@dataclass
class StagedModel:
    """A model on a worker, whose layers are split in stages. `loaded` is the stage whose weights are in memory."""

    model: Model
    stages: int
    loaded: int = field(default=0)

    def load(self, stage: int) -> list[Block]:
        """The blocks of a stage; drops the weights of another one."""
        if stage != self.loaded:
            for block in self._blocks(self.loaded):
                release_block(self.model, block)
            self.loaded = stage
        return self._blocks(stage)

    def run(self, stage: int, inputs: np.ndarray, before: States | None) -> States:
        """The states of int[chunks, n_ctx] after a stage, from those of the stage before; None: embed the tokens.

        After the last stage they are those before the output norm.
        """
        blocks = self.load(stage)
        with blas.single_threaded():
            if before is None:
                before = States(self.model.embed_checked(inputs.reshape(-1)).reshape(*inputs.shape, -1), [], None)
            states, selections = before.hidden, list(before.selections)  # what a task gets is not changed
            shared = SharedKeys.of(self.model, *inputs.shape)
            if before.shared is not None:
                shared.rows[:] = before.shared
            caches = [self.model.layer_cache(inputs.shape[1]) for _ in range(len(inputs))]
            for block in blocks:
                states = run_sequences(self.model, block, inputs, states, caches, selections, shared)
            if stage + 1 == self.stages:
                states = merge_streams(self.model, states)
        done = self._first(stage + 1)
        passes_keys = needs_shared_keys(self.model.blocks[:done], self.model.blocks[done:])
        return States(states, selections, shared.rows if passes_keys else None)

    def _blocks(self, stage: int) -> list[Block]:
        return list(self.model.blocks[self._first(stage) : self._first(stage + 1)])

    def _first(self, stage: int) -> int:
        """The first of the blocks of a stage."""
        return len(self.model.blocks) * stage // self.stages


@dataclass(frozen=True)
class _Stages:
    """The state of a worker: the open model, and the chunks."""

    staged: StagedModel
    inputs: np.ndarray
    rows: slice | Sequence[np.ndarray] | None
    measure: Measurement[Any]

    @classmethod
    def make(
        cls, model: WorkerModel, inputs: np.ndarray, rows: slice | Sequence[np.ndarray] | None,
        measure: Measurement[Any], stages: int, threads: int,
    ) -> _Stages:  # fmt: skip
        return cls(StagedModel(model.open(threads), stages), inputs, rows, measure)

    def run(self, argument: tuple[slice, int, States | None]) -> list[Any]:
        """The states after a stage; after the last, (index, result) of each chunk."""
        batch, stage, before = argument
        after = self.staged.run(stage, self.inputs[batch], before)
        return [after] if stage + 1 < self.staged.stages else [list(self._measured(batch, after.hidden))]

    def _measured(self, batch: slice, hidden: np.ndarray) -> Iterator[tuple[int, Any]]:
        for index, of_chunk in enumerate(hidden, batch.start):
            rows = self.rows if self.rows is None or isinstance(self.rows, slice) else self.rows[index]
            scored = scored_rows(hidden.shape[1]) if rows is None else rows
            yield index, self.measure(index, self.staged.model.project(of_chunk[scored]))
