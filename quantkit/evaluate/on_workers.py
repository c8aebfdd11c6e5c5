"""Evaluate on the workers of a cluster: a task is a batch of chunks, and a worker opens the model once.

    runs = ClusterRuns(client, on_message)
    run = MeasureOnWorkers(runs, WorkerModel(open_model, path, …))      in place of `chunk_runs.Here`

Batches are those of a run in one process and results come in the order of chunks, so that they have the same bits.
What a task returns is small: negative log-likelihoods, figures, rows of a base file as they are stored, or sums of
squares. Logits and hidden states stay on the workers.

Exact numerics multiply by BLAS, whose rounding may depend on the kind of CPU: `ClusterRuns` says where kinds differ.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from quantkit.cluster.in_order import KeptRun
from quantkit.codegen import cpu_target
from quantkit.errors import QuantkitError
from quantkit.evaluate.chunk_runs import Measurement, Result, check_context, evaluate_chunks
from quantkit.evaluate.conditions import Conditions, cpu_name
from quantkit.evaluate.models import ChunkModel, OnMessage, OpenModel, no_message
from quantkit.formats import gguf

if TYPE_CHECKING:
    from distributed import Client

    from quantkit.runtime.kv.cache_type import CacheType
    from quantkit.runtime.model import Model


@dataclass(frozen=True)
class WorkerModel:
    """How a worker opens the model of a run.

    open_model   picklable; it is called on the workers
    threads      None: those that dask gives the worker
    weighs_tokens   of a BlockRunner
    """

    open_model: OpenModel
    path: Path
    numerics: str
    threads: int | None
    n_ctx: int | None
    cache_type: CacheType | None = None
    weighs_tokens: bool = False

    def open(self, threads: int) -> Model:
        """The model, on a worker of so many threads."""
        opened = self.open_model(
            self.path.absolute(), numerics=self.numerics, threads=self.threads or threads, n_ctx=self.n_ctx,
            cache_type=self.cache_type,
        )  # fmt: skip
        opened.weighs_tokens = self.weighs_tokens
        return opened


def require_path(model: object, client: object) -> None:
    """QuantkitError for an open model with a client: workers open models by their paths."""
    if client is not None and not isinstance(model, (str, Path)) and not hasattr(model, "__fspath__"):
        raise QuantkitError("workers open the model themselves: pass the path of its file, not an open model")


def model_files(path: Path) -> list[Path]:
    """The files of a GGUF model: all shards."""
    return list(gguf.open(path).paths)


class WorkerTimes(NamedTuple):
    """What `--json` shows of a worker."""

    cpu: str
    batches: int
    seconds: float


def cpu_kinds(client: Client) -> dict[str, tuple[str, str]]:
    """By address of a worker: the name of its CPU and the instructions that its kernels use."""
    found: dict[str, tuple[str, str]] = client.run(_cpu_kind)
    return found


def _cpu_kind() -> tuple[str, str]:
    return cpu_name(), cpu_target.isa()


class ClusterRuns:
    """The runs of a command on a cluster: says where workers differ, and has the times of workers for conditions."""

    def __init__(self, client: Client, on_message: OnMessage = no_message):
        self.client, self.on_message = client, on_message
        self._kinds, self._times = cpu_kinds(client), dict[str, WorkerTimes]()
        if len(kinds := sorted(set(self._kinds.values()))) > 1:
            names = ", ".join(f"{name} ({isa})" for name, isa in kinds)
            on_message(
                f"warning: the workers have different CPUs: {names}; exact numerics may differ in the last bits from "
                "those of one machine"
            )

    def add(self, run: KeptRun) -> None:
        """Add the times of a run that has ended."""
        for address, times in run.workers.items():
            before = self._times.get(address, WorkerTimes(self._kinds.get(address, ("unknown", ""))[0], 0, 0.0))
            self._times[address] = WorkerTimes(
                before.cpu, before.batches + times.tasks, round(before.seconds + times.seconds, 3)
            )

    def conditions(self) -> Conditions:
        """`workers`: what each worker did."""
        return {"workers": {address: times._asdict() for address, times in sorted(self._times.items())}}


@dataclass(frozen=True)
class MeasureOnWorkers:
    """A `MeasureChunks`: each task runs a batch of chunks and returns what is measured of them.

    files   those besides the model's that workers read
    """

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
        together = max(1, n_batch // inputs.shape[1])
        state = functools.partial(_MeasuringModel.make, self.model, inputs, rows, n_batch, measure)
        files = [*model_files(self.model.path), *self.files]
        with KeptRun(self.runs.client, state, files, self.runs.on_message) as run:
            for parts in run.results(_MeasuringModel.batch, range(first, len(inputs), together)):
                for part in parts:
                    yield from part
            self.runs.add(run)


@dataclass(frozen=True)
class _MeasuringModel:
    """The state of a worker: the open model, the chunks and the measurement."""

    model: ChunkModel
    inputs: np.ndarray
    rows: slice | Sequence[np.ndarray] | None
    n_batch: int
    measure: Measurement[Any]

    @classmethod
    def make(
        cls, model: WorkerModel, inputs: np.ndarray, rows: slice | Sequence[np.ndarray] | None, n_batch: int,
        measure: Measurement[Any], threads: int,
    ) -> _MeasuringModel:  # fmt: skip
        return cls(model.open(threads), inputs, rows, n_batch, measure)

    def batch(self, first: int) -> list[list[tuple[int, Any]]]:
        """The results of the batch that begins at a chunk, a part for each chunk."""
        stop = min(len(self.inputs), first + max(1, self.n_batch // self.inputs.shape[1]))
        of_batch = self.rows if self.rows is None or isinstance(self.rows, slice) else self.rows[first:stop]
        run = evaluate_chunks(self.model, self.inputs[first:stop], self.n_batch, of_batch)
        return [[(first + offset, self.measure(first + offset, logits))] for offset, logits in run]


def with_workers(conditions: Conditions, runs: ClusterRuns | None) -> Conditions:
    """Conditions with what the workers did."""
    return conditions if runs is None else {**conditions, **runs.conditions()}
