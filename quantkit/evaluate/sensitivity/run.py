"""`sensitivity`: measure the costs of all matrices of a model, and write the costs file.

The work is a list of measurements, first the probe of each matrix, then its errors. Each is recorded in a journal
beside the output when it is done. A run that is killed is resumed by the same call, with the same numbers: no
measurement depends on another. After a change of model, text or settings the journal belongs to another run, and that
is an error.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from quantkit import types
from quantkit.cluster.in_order import KeptRun, WorkerTime
from quantkit.errors import DataError, UnsupportedError
from quantkit.evaluate.fingerprint import fingerprint
from quantkit.evaluate.layers.checkpoint_model import CheckpointModel
from quantkit.evaluate.models import OnMessage, no_message
from quantkit.evaluate.sensitivity.encoding_errors import encoding_errors
from quantkit.evaluate.sensitivity.probes import EncodedTensor, Probes
from quantkit.evaluate.text import DEFAULT_CONTEXT, chunked
from quantkit.formats import gguf, imatrix, journal
from quantkit.formats.atomic import JOURNAL, PARTIAL_JOB, check_outputs
from quantkit.formats.gguf import Tensor
from quantkit.formats.imatrix import Imatrix
from quantkit.formats.owned import followed
from quantkit.pipelines import planning
from quantkit.pipelines.second_moments import PreparedMoments
from quantkit.placement.allocation.costs import Costs, TensorCost, check_probe
from quantkit.recipe import Options, PlannedTensor, parse, plan
from quantkit.recipe.planning.planner import fitted_type
from quantkit.repack.eligible import looked_up
from quantkit.runtime.scale_check import layer_of
from quantkit.types import QuantType

if TYPE_CHECKING:
    from distributed import Client

    from quantkit.runtime.model import Model

PROBE = "q4_0"
TYPES = ("iq2_ks", "iq2_k", "iq3_ks", "iq3_k", "iq4_ks", "iq4_k", "iq5_ks", "iq5_k", "iq6_k", "q8_0")

_KINDS = ("kld", "errors")

_Progress = Callable[[int, int, str], None]  # measurements that are done, all, the tensor


@dataclass(frozen=True, kw_only=True)
class SensitivityOptions:
    """Options of `sensitivity`: the flags of `quantkit sensitivity`.

    imatrix             importance matrix that files will be quantized with; its second moments are the metric of errors
    no_second_moments   do not use them: neither for the metric nor for encoding
    types               names of the types to measure; of those that do not fit a tensor's rows the fallback is measured
    probe               the type of the probes
    ctx_size, chunks    tokens per chunk, and at most this many chunks
    rows                rows of a matrix that are encoded
    effort              encoder effort
    threads             number of threads
    restart             discard the measurements of an interrupted run
    """

    imatrix: str | os.PathLike[str] | None = None
    no_second_moments: bool = False
    types: Sequence[str] = TYPES
    probe: str = PROBE
    ctx_size: int = DEFAULT_CONTEXT
    chunks: int | None = 2
    rows: int = 128
    effort: str = "normal"
    threads: int | None = None
    restart: bool = False


def sensitivity(
    source: str | os.PathLike[str],
    text: str | os.PathLike[str],
    output: str | os.PathLike[str],
    options: SensitivityOptions | None = None,
    *,
    progress: _Progress = lambda done, total, name: None,
    on_message: OnMessage = no_message,
    client: Client | None = None,
    on_workers: Callable[[Mapping[str, WorkerTime]], None] = lambda times: None,
) -> Costs:
    """Measure what every type costs in every matrix of a model, and write the costs file `output`.

        source      a GGUF file or a checkpoint directory
        text        a text file, UTF-8: of the kind that the model will be used for, and not the one it is tested on
        progress    called after each measurement with the number of those done, of all, and the tensor

    A tensor's cost in a type is the error of its encoding in the metric of its inputs, times what such an error costs
    at the model's output, measured with a coarse type (`probe`) in that tensor alone.

    With `client`, the workers of a dask cluster measure: a layer's probes, or the errors of a matrix, are a task. They
    read the model, the text and the importance matrix, which must be files that they see too. At the end `on_workers`
    gets their tasks and seconds by address.

    An interrupted run leaves OUTPUT.partial-job.journal; the same call resumes it. DataError if that is of another run.
    """
    o = options or SensitivityOptions()
    run = _Run(source, Path(text), followed(Path(output)), o)
    return run.measure(progress, on_message, client, on_workers)


class _Task(NamedTuple):
    """Measurements of one kind, "kld" or "errors", of some tensors."""

    kind: str
    names: tuple[str, ...]


_Measured = tuple[str, str, dict[str, Any]]  # kind, tensor, values


class _Run:
    """One call of `sensitivity`."""

    def __init__(self, source: str | os.PathLike[str], text: Path, output: Path, o: SensitivityOptions):
        self.options, self.output = o, output
        self.probe = types.get(o.probe)
        self.wanted = [types.get(name) for name in dict.fromkeys(o.types)]
        for flag, kind in (("--probe", self.probe), *(("--types", kind) for kind in self.wanted)):
            if kind.encode_rows is None or kind.interleave > 1 or kind.activation:
                raise UnsupportedError(
                    f"{flag} {kind.name}: measured are types that quantkit encodes row by row; an interleaved type "
                    "costs what its base does"
                )
        if self.probe.block_size == 1:
            raise DataError(f"--probe {self.probe.name}: stores matrices without an error; name a quantized type")
        if all(kind.block_size == 1 for kind in self.wanted):
            listed = ",".join(kind.name for kind in self.wanted)
            raise DataError(f"--types {listed}: floats have no errors to measure; name quantized types")
        opened = planning.open_model(source, weights=True)
        assert opened.file is not None
        paths = [*opened.file.paths, text, *([Path(o.imatrix)] if o.imatrix else [])]
        self.files, self._made_of = paths, (source, text)
        check_outputs([output], paths)
        matrix = _read_imatrix(o)
        self.free = {t.name: t for t in _free(opened, matrix)}
        self.moments = None if matrix is None else PreparedMoments(matrix)
        self.model = _load(opened.file, o)
        self.chunks = chunked(self.model.tokenizer, text, o.ctx_size, o.chunks)
        names = ("no_second_moments", "probe", "ctx_size", "rows", "effort")
        settings: dict[str, object] = {name: getattr(o, name) for name in names}
        settings |= {"types": [t.name for t in self.wanted], "chunks": len(self.chunks)}
        self.about: dict[str, Any] = {
            "model": str(source),
            "model_hash": fingerprint(list(opened.file.paths), {}),
            "text": str(text),
            "text_hash": fingerprint([text], {}),
            "imatrix": str(o.imatrix) if o.imatrix else None,
            **settings,
            "quantkit": _version(),
        }
        self.job = fingerprint(paths, settings | {"quantkit": _version()})

    def measure(
        self,
        progress: _Progress,
        on_message: OnMessage,
        client: Client | None,
        on_workers: Callable[[Mapping[str, WorkerTime]], None],
    ) -> Costs:
        """Measure what is not in the journal, and write the costs."""
        path = self.output.with_name(self.output.name + PARTIAL_JOB + JOURNAL)
        done = self._stored(path)
        measured = [t for t in self.free.values() if self._kind(t, self.probe).block_size > 1]
        total = 2 * len(measured)
        entries = {name: dict(entry) for name, entry in done.entries.items()} if done is not None else {}
        if entries:
            on_message(f"{len(entries)} of {total} measurements are already in {path}")
        writer = journal.Journal(path, {"job": self.job}, lambda: None, done)
        progress(len(entries), total, "")
        probes, errors = ([t.name for t in measured if f"{kind} {t.name}" not in entries] for kind in _KINDS)
        try:
            if client is None:
                results = self._here(probes, errors)
            else:
                results = self._there(client, probes, errors, on_message, on_workers)
            for kind, name, values in results:
                entries[f"{kind} {name}"] = {"name": f"{kind} {name}", **values}
                writer.add(entries[f"{kind} {name}"])
                progress(len(entries), total, name)
        finally:
            writer.close()
        found = {t.name: _cost(t, entries) for t in measured}
        costs = Costs(found, self.about, str(self.output))
        costs.write(self.output)
        path.unlink(missing_ok=True)
        return costs

    def _here(self, probes: Sequence[str], errors: Sequence[str]) -> Iterator[_Measured]:
        for task in (_Task("kld", tuple(probes)), _Task("errors", tuple(errors))):
            yield from self.measured(task)

    def _there(
        self,
        client: Client,
        probes: Sequence[str],
        errors: Sequence[str],
        on_message: OnMessage,
        on_workers: Callable[[Mapping[str, WorkerTime]], None],
    ) -> Iterator[_Measured]:
        """The measurements on workers: the probes of a layer together, since they share what enters it."""
        tasks = [_Task("kld", tuple(names)) for _, names in itertools.groupby(probes, layer_of)]
        tasks += [_Task("errors", (name,)) for name in errors]
        source, text = map(os.path.abspath, self._made_of)
        o = self.options
        o = o if o.imatrix is None else replace(o, imatrix=os.path.abspath(o.imatrix))
        make = functools.partial(_Run.on_worker, source, Path(text), self.output.absolute(), o)
        with KeptRun(client, make, self.files, on_message) as run:
            for parts in run.results(_Run.parts, tasks):
                for part in parts:
                    yield from part
        on_workers(run.workers)

    @classmethod
    def on_worker(
        cls, source: str | os.PathLike[str], text: Path, output: Path, o: SensitivityOptions, threads: int
    ) -> _Run:
        """The state of a worker: the same run with the worker's threads."""
        return cls(source, text, output, replace(o, threads=o.threads or threads))

    def parts(self, task: _Task) -> list[list[_Measured]]:
        """A task on a worker."""
        return [list(self.measured(task))]

    def measured(self, task: _Task) -> Iterator[_Measured]:
        """Yield the measurements of a task."""
        if task.kind == "kld":
            for name, found in self._probes.run(task.names):
                yield "kld", name, {"kld": found.kld, "error": found.error}
            return
        for name in task.names:
            yield "errors", name, self._errors(self.free[name])

    def _stored(self, path: Path) -> journal.StoredJournal | None:
        if self.options.restart:
            return None
        found = journal.read(path)
        if found is not None and found.header.get("job") != self.job:
            raise DataError(
                f"{path}: belongs to another run: model, text, importance matrix or a setting differs; pass --restart "
                "to discard it, or name another output"
            )
        return found

    def _kind(self, t: PlannedTensor, kind: QuantType) -> QuantType:
        """A type, or what the tensor's rows allow instead."""
        return fitted_type(kind, t)[0]

    @functools.cached_property
    def _probes(self) -> Probes:
        def replacement(tensor: Tensor) -> Tensor:
            kind = self._kind(self.free[tensor.name], self.probe)
            return EncodedTensor(tensor, kind, self._encoded(tensor, kind))

        return Probes(self.model, self.chunks, replacement)

    def _inputs(self, name: str) -> PreparedMoments | None:
        """What was measured of the inputs of a tensor."""
        return None if self.free[name].importance is None else self.moments

    def _encoded(self, tensor: Tensor, kind: QuantType) -> np.ndarray:
        """All rows of a tensor in the probe's type, encoded as a file's tensors will be."""
        o, rows = self.options, tensor.shape[-2]
        parts, columns = [], tensor.shape[-1]
        for matrix in range(tensor.n_rows // rows):
            x = tensor.type.dequantize(tensor.rows(matrix * rows, (matrix + 1) * rows), columns)
            importance, prepared = None, None
            if (inputs := self._inputs(tensor.name)) is not None:
                importance, prepared = inputs.of_matrix(tensor.name, columns, matrix, kind, o.effort)
            if importance is None and kind.requires_imatrix:
                importance = np.ones(columns, np.float32)  # as errors of types are measured
            moments = prepared() if prepared is not None else None
            parts.append(kind.quantize(x, importance, second_moments=moments, effort=o.effort, threads=o.threads))
        return np.concatenate(parts)

    def _errors(self, t: PlannedTensor) -> dict[str, Any]:
        kinds = list(dict.fromkeys(self._kind(t, kind) for kind in self.wanted))
        quantized = [kind for kind in kinds if kind.block_size > 1]
        o = self.options
        metric, probe, errors = encoding_errors(
            self.model.weights[t.name], self._kind(t, self.probe), quantized, self._inputs(t.name), rows=o.rows,
            in_products=t.name not in looked_up(self.model.weights),
            effort=o.effort, threads=o.threads,
        )  # fmt: skip
        try:
            check_probe(probe, errors)
        except DataError as error:
            raise DataError(f"{t.name}: {error}") from None
        return {"probe": probe, "errors": {name: list(values) for name, values in errors.items()}, "metric": metric}


def _version() -> str:
    from quantkit import __version__

    return __version__


def _free(model: planning.PlanInput, matrix: Imatrix | None) -> list[PlannedTensor]:
    """The tensors whose types a recipe decides, with the importance that their types will have."""
    options = Options(allow_requantize=True, ignore_imatrix_rules=True)
    found = plan(model.tensors, "Q4_0", parse(".*=q4_0"), metadata=model.metadata, imatrix=matrix, options=options)
    return [t for t in found.tensors if t.wanted is not None]


def _read_imatrix(o: SensitivityOptions) -> Imatrix | None:
    if o.imatrix is None:
        return None
    found = imatrix.read(o.imatrix)
    return Imatrix(found.entries, found.chunks, found.dataset, found.chunk_size) if o.no_second_moments else found


def _load(file: Any, o: SensitivityOptions) -> Model:
    from quantkit.runtime import loading

    opened = file if isinstance(file, gguf.GGUF) else CheckpointModel.of(file)
    return loading.load(opened, threads=o.threads, n_ctx=o.ctx_size)


def _cost(t: PlannedTensor, entries: dict[str, dict[str, Any]]) -> TensorCost:
    probed, errors = entries[f"kld {t.name}"], entries[f"errors {t.name}"]
    each = {name: (float(value), float(error)) for name, (value, error) in errors["errors"].items()}
    return TensorCost(t.shape, float(probed["kld"]), float(probed["error"]), float(errors["probe"]), each,
                      str(errors["metric"]))  # fmt: skip
