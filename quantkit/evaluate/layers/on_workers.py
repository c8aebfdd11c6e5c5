"""Run chunks layer by layer on the workers of a cluster, for models larger than a worker's memory.

The layers are a pipeline. Its stages are as many as there are workers, so that each worker keeps the weights of its
layers in memory; hidden states float32[chunks, n_ctx, n_embd] of a batch go from worker to worker. If the model is
larger than the memory of all workers, there are several stages for each: all chunks pass the first layers before a
worker reads its next ones, and their hidden states wait in the memory of the workers.

Batches are those of `layer_by_layer`, so the results have the same bits.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np

from quantkit.cluster.in_order import KeptRun
from quantkit.codegen import blas
from quantkit.errors import UnsupportedError
from quantkit.evaluate.chunk_runs import Measurement, Result, check_context
from quantkit.evaluate.layers.layer_by_layer import chunk_batches, release_block
from quantkit.evaluate.models import ChunkModel
from quantkit.evaluate.on_workers import ClusterRuns, WorkerModel, model_files
from quantkit.formats import gguf
from quantkit.formats.kld.scored_tokens import scored_rows
from quantkit.runtime.blocks.spans import Span

if TYPE_CHECKING:
    from distributed import Client

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
        check_context(model, inputs.shape[1])
        if self.model.numerics != "exact":
            raise UnsupportedError("--by-layer runs a model in exact numerics only; remove --numerics fast")
        batches = chunk_batches(len(inputs), inputs.shape[1], n_batch, first)
        file = gguf.open(self.model.path)
        stages = stage_count(sum(tensor.nbytes for tensor in file.tensors.values()), _memory(self.runs.client))
        make = functools.partial(_Stages.make, self.model, inputs, rows, measure, stages)
        files = [*model_files(self.model.path), *self.files]
        with KeptRun(self.runs.client, make, files, self.runs.on_message) as run:
            for parts in run.results(_Stages.run, batches, stages):
                for part in parts:
                    yield from part
            self.runs.add(run)


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


@dataclass
class _Stages:
    """The state of a worker: the open model, whose layers are split in stages, and the chunks.

    loaded   the stage whose weights are in memory
    """

    model: Model
    inputs: np.ndarray
    rows: slice | Sequence[np.ndarray] | None
    measure: Measurement[Any]
    stages: int
    loaded: int = field(default=0)

    @classmethod
    def make(
        cls, model: WorkerModel, inputs: np.ndarray, rows: slice | Sequence[np.ndarray] | None,
        measure: Measurement[Any], stages: int, threads: int,
    ) -> _Stages:  # fmt: skip
        return cls(model.open(threads), inputs, rows, measure, stages)

    def run(self, argument: tuple[slice, int, np.ndarray | None]) -> list[Any]:
        """Hidden states float32[chunks, n_ctx, n_embd] after a stage; after the last, (index, result) of each chunk."""
        batch, stage, states = argument
        if stage != self.loaded:
            for block in self._blocks(self.loaded):
                release_block(self.model, block)
            self.loaded = stage
        shape = self.inputs[batch].shape
        with blas.single_threaded():
            if states is None:
                states = self.model.embed_checked(self.inputs[batch].reshape(-1))
            x = states.reshape(shape[0] * shape[1], -1)
            caches = [self.model.layer_cache(shape[1]) for _ in range(shape[0])]
            for block in self._blocks(stage):
                spans = [Span(i * shape[1], (i + 1) * shape[1], cache) for i, cache in enumerate(caches)]
                x = self.model.run_block_checked(block, x, spans)
        hidden = x.reshape(*shape, -1)
        return [hidden] if stage + 1 < self.stages else [list(self._measured(batch, hidden))]

    def _blocks(self, stage: int) -> list[Any]:
        count = len(self.model.blocks)
        ends = [count * i // self.stages for i in range(self.stages + 1)]
        return list(itertools.islice(self.model.blocks, ends[stage], ends[stage + 1]))

    def _measured(self, batch: slice, hidden: np.ndarray) -> Iterator[tuple[int, Any]]:
        for index, of_chunk in enumerate(hidden, batch.start):
            rows = self.rows if self.rows is None or isinstance(self.rows, slice) else self.rows[index]
            scored = scored_rows(hidden.shape[1]) if rows is None else rows
            yield index, self.measure(index, self.model.project(of_chunk[scored]))
