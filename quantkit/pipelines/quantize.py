"""Quantize a file: read, decode, encode and write rows in small pieces, with the types of a plan.

    source tensor -> pieces of rows -> decode -> encode -> check -> writer, in order

One thread decodes and encodes each piece. Several pieces are in flight, and their results are written in order. So each
thread needs a constant amount of memory, tensors of all sizes keep all threads busy, and the bytes do not depend on the
number of threads. The output appears under its final name when it is complete. An interrupted run is resumed
(`resume.py`). The output records its source, importance matrix and codecs (`formats/provenance.py`).

`quantkit.quantize` (`api`) is the public function: it plans, and calls `quantize_with_plan`.
"""

from __future__ import annotations

import functools
import itertools
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from quantkit import __version__
from quantkit.errors import DataError, OptionError, QuantkitError
from quantkit.formats import provenance
from quantkit.formats.atomic import refuse_directory, refuse_inputs
from quantkit.formats.gguf import Metadata, TensorSpec, Writer, dialects
from quantkit.formats.gguf.writer import layouts, refuse_outputs
from quantkit.formats.imatrix import Imatrix
from quantkit.formats.mapping import is_mapped
from quantkit.formats.owned import followed
from quantkit.formats.pipeline import Bar, Job, Progress, pump
from quantkit.pipelines import on_cluster, resume
from quantkit.pipelines.arrivals import Arrivals, ReadByWorkers
from quantkit.pipelines.calibration import Calibration, Stage
from quantkit.pipelines.new_scales import WithNewScales
from quantkit.pipelines.parts import Part
from quantkit.pipelines.pieces import Piece, QuantizeSource, TensorProgress
from quantkit.pipelines.second_moments import PreparedMoments
from quantkit.recipe import Plan, PlannedTensor
from quantkit.recipe.planning.interleaving import FILE_TYPE_BEFORE, rename_repacked
from quantkit.recipe.planning.presets import in_dialect
from quantkit.types import effort_level

if TYPE_CHECKING:
    from distributed import Client

_FLOATS = frozenset(("f32", "f16", "bf16"))
_HIDDEN = "top_secret"  # ik_llama.cpp's placeholder for a hidden imatrix
_MAX_TEXT_BYTES = 127  # bytes of an imatrix string that ik_llama.cpp reads


@dataclass(frozen=True)
class Override:
    """A metadata key set by the user: kind is "int", "float", "bool" or "str"."""

    key: str
    kind: str
    value: Any

    @classmethod
    def parse(cls, text: str) -> Override:
        """Read KEY=TYPE:VALUE."""
        key, equals, rest = text.partition("=")
        kind, colon, value = rest.partition(":")
        readers: dict[str, Any] = {"int": int, "float": float, "str": str, "bool": {"true": True, "false": False}.get}
        try:
            parsed = readers[kind](value) if key and equals and colon else None
        except (KeyError, ValueError):
            parsed = None
        if parsed is None:
            raise QuantkitError(
                f"override '{text}' is not KEY=TYPE:VALUE with TYPE int, float, bool (true, false) or str"
            )
        return cls(key, kind, parsed)


@dataclass(frozen=True)
class Written:
    """The result of `quantize_with_plan`.

    paths    the files
    size     their size in bytes, with headers and padding
    tensors  number of tensors
    resumed  tensors that an interrupted run had finished
    reused   tensors that were copied from an older file
    workers  what each worker of a cluster did, by address
    """

    paths: list[Path]
    size: int
    tensors: int
    resumed: int
    reused: int
    workers: Mapping[str, on_cluster.WorkerWork] = field(default_factory=dict)


def quantize_with_plan(
    source: QuantizeSource,
    out: str | os.PathLike[str],
    plan: Plan,
    *,
    imatrix: Imatrix | None = None,
    imatrix_file: str = "",
    hide_imatrix: bool = False,
    calibration: Calibration | None = None,
    overrides: Sequence[Override] = (),
    effort: str = "normal",
    threads: int | None = None,
    split_max_bytes: int | None = None,
    split_max_tensors: int | None = None,
    keep_split: bool = False,
    progress: Progress | bool = False,
    fresh: bool = False,
    old: resume.OldFile | None = None,
    partial_requant: bool = False,
    part: Part | None = None,
    client: Client | None = None,
    shared_output: bool = False,
    on_message: Callable[[str], None] = lambda text: None,
) -> Written:
    """Write `source` to `out` with every tensor in the type that `plan` gives it.

    imatrix          the importance matrix that the plan was made with
    imatrix_file     its name in the output's metadata; with `hide_imatrix` the metadata say only that one was used
    calibration      measures the importance stage by stage; `imatrix` then only names the tensors that will have one
    effort           encoder effort: "fast", "normal" or "best"; stored in the metadata unless it is "normal"
    keep_split       write the same shards as the source
    fresh            restart instead of resuming an interrupted run
    old              an older file: tensors that would come out unchanged are copied from it
    partial_requant  use the existing output as `old`
    part             write only these tensors of the plan (`parts.py`)
    client           encode on the workers of this dask cluster (`on_cluster.py`)
    shared_output    with `client`: workers write their pieces into the output themselves
    on_message       called with a line of text that says how many tensors are resumed or reused

    Raises DataError that names file, tensor, row and column of a value that is not finite. After an error or an
    interrupt the final name is unchanged, and the finished tensors stay in `OUT.partial-job` for the next run
    (`resume.unfinished`).
    """
    effort_level(effort)
    plan.require_codecs()
    if client is not None:
        on_cluster.require_input(source, calibration, old is not None or partial_requant)
    _check_options(plan, calibration, shared_output, client)
    out = followed(Path(out))
    refuse_directory(out)
    refuse_inputs([out], source.paths)
    metadata = output_metadata(source.metadata, plan, imatrix, imatrix_file, overrides, effort, hide_imatrix)
    if calibration is not None:
        _set_calibration(metadata, calibration, hide_imatrix)
    if part is not None:
        part.set_keys(metadata, plan)
        plan = part.of(plan)
    scaled = WithNewScales(source, plan)
    expected = _expected_records(plan, imatrix, effort, calibration)
    arrivals: Arrivals | None = getattr(source, "arrivals", None)
    if arrivals is not None and client is not None:
        arrivals = ReadByWorkers(arrivals.identities)
    job = resume.ResumableJob(
        out,
        source.paths,
        expected,
        whole_source=calibration is not None,
        is_streamed=arrivals is not None,
        identities=arrivals.identities if arrivals is not None else None,
    )
    has_records = plan.file_type.number is not None and (part is None or part.shards is None)
    if has_records:
        _set_records(metadata, job.expected.values(), hide_imatrix)
    specs = [TensorSpec(t.name, t.shape, t.type) for t in plan.tensors]
    counts = (part.counts if part is not None else _shards(source, plan)) if keep_split else None
    limits = (split_max_bytes, split_max_tensors, counts)
    chosen = part.shards if part is not None else None
    job.layouts = layouts(out, metadata, specs, *limits, chosen=chosen)
    refuse_outputs([layout.path for layout in job.layouts], source.paths)
    job.find_interrupted(_settings(metadata, source), fresh)
    if partial_requant and (existing := [layout.path for layout in job.layouts if layout.path.exists()]):
        old = resume.open_old_shards(existing)
    pool: on_cluster.Workers | None = None
    with Writer(out, metadata, specs, *limits, resumable=True, chosen=chosen) as writer:
        try:
            for message in job.find_unchanged(scaled.tensors, plan.tensors, old, threads=threads, progress=progress):
                on_message(message)
            job.start(writer)
            run = _Run(scaled, plan, effort, job, writer, arrivals)
            if client is not None:
                shared = on_cluster.shared_files(writer, job.layouts) if shared_output else None
                pool = on_cluster.Workers(client, source, imatrix_file, shared, on_message)
            with Bar(run.nbytes, progress) as bar:
                for stage in _stages(plan, imatrix, calibration, job, bar):
                    if pool is None:
                        pump(run.pieces(stage, bar.describe), run.write, bar, threads=threads)
                    else:
                        pump(run.copies(stage), run.write, bar, threads=threads)
                        run.encode_on(pool, stage, source, bar)
                if arrivals is not None:
                    bar.describe("checking the last file")
                    arrivals.finish()
            job.close()
            if has_records:
                _set_records(metadata, run.records(), hide_imatrix)
                writer.rewrite(metadata)
        except BaseException:
            if arrivals is not None:
                arrivals.close()
            writer.resumable = job.abort()
            raise
        finally:
            if pool is not None:
                pool.close()
        if arrivals is not None:
            _end_of_arrivals(arrivals, job, on_message)
    job.remove_leftovers()
    size = sum(path.stat().st_size for path in writer.paths)
    workers = pool.work if pool is not None else {}
    return Written(writer.paths, size, len(plan.tensors), len(job.resumed), len(job.reused), workers)


def _check_options(plan: Plan, calibration: Calibration | None, shared_output: bool, client: Client | None) -> None:
    """OptionError for options that do not go together."""
    if shared_output and client is None:
        raise OptionError("--shared-output is about the workers of a cluster: pass --cluster")
    if calibration is not None and any(t.scale is not None for t in plan.tensors):
        raise OptionError("--scale-nvfp4: --calibrate runs layers that are written already, without new scales")


def _end_of_arrivals(arrivals: Arrivals, job: resume.ResumableJob, on_message: Callable[[str], None]) -> None:
    """Close a streamed input, and say what was reused and which files had the right hash."""
    arrivals.close()
    for message in job.reuse_summary():
        on_message(message)
    for name, digest in arrivals.verified.items():
        on_message(f"checked: {name} has the hash {digest}")


def written_size(
    source: Mapping[str, object],
    plan: Plan,
    imatrix: Imatrix | None = None,
    imatrix_file: str = "",
    effort: str = "normal",
) -> int:
    """Bytes of the file that `quantize_with_plan` writes of an input with this metadata: header, tensors, padding."""
    metadata = output_metadata(source, plan, imatrix, imatrix_file, effort=effort)
    if plan.file_type.number is not None:
        _set_records(metadata, _expected_records(plan, imatrix, effort).values(), False)
    specs = [TensorSpec(t.name, t.shape, t.type) for t in plan.tensors]
    return sum(layout.size for layout in layouts(Path("out.gguf"), metadata, specs))


def _stages(
    plan: Plan, imatrix: Imatrix | None, calibration: Calibration | None, job: resume.ResumableJob, bar: Bar
) -> Iterable[Stage]:
    """The tensors of a plan in the order in which they are encoded."""
    if calibration is None:
        return [Stage(plan.tensors, imatrix)]
    return calibration.stages(plan.tensors, job.done.keys() | job.copied.keys(), job.written, bar.describe)


def _shards(source: QuantizeSource, plan: Plan) -> list[int]:
    """The number of planned tensors in each shard of the source."""
    shards: list[int] | None = getattr(source, "shards", None)
    if shards is None:
        raise QuantkitError(f"{source.paths[0]}: a checkpoint has no GGUF shards to keep; use --split-max-size")
    names = iter(source.tensors)
    shard_of = {name: i for i, count in enumerate(shards) for name in itertools.islice(names, count)}
    counts, shard = [0] * len(shards), 0
    for t in plan.tensors:
        shard = shard_of.get(t.name, shard)  # a new scale follows its tensor
        counts[shard] += 1
    return counts


# ----------------------------------------------------------------------------------------------------------- the pieces


class _Run:
    """Encodes and writes the pieces that are not done yet; collects the provenance records of all tensors."""

    def __init__(
        self,
        source: WithNewScales,
        plan: Plan,
        effort: str,
        job: resume.ResumableJob,
        writer: Writer,
        arrivals: Arrivals | None = None,
    ):
        self._arrivals = arrivals
        self._source, self._plan, self._job, self._writer = source, plan, job, writer
        self.effort = effort
        self._records: dict[str, provenance.Record] = dict(job.done)
        self._in_progress: dict[str, TensorProgress] = {}

    @property
    def nbytes(self) -> int:
        """Bytes that are not yet written."""
        unfinished = [t for t in self._plan.tensors if t.name not in self._job.done]
        written = [TensorProgress(t, self._job.pieces[t.name]).done for t in unfinished if t.name in self._job.pieces]
        return sum(t.bytes_after for t in unfinished) - sum(written)

    def records(self) -> list[provenance.Record]:
        """The records of all tensors, in the order of the output."""
        return [self._records[t.name] for t in self._plan.tensors]

    def write(self, name: str, data: np.ndarray) -> None:
        """Write the next piece of a tensor in order; after the last one, add the tensor's record to the journal."""
        progress = self._in_progress[name]
        self._writer.put(name, progress.offset(progress.missing[-progress.left]), data)
        self._count(progress, 1)

    def encoded(self, done: on_cluster.Done) -> None:
        """Write consecutive pieces of a tensor, which workers encoded, or count those that they have written."""
        progress = self._in_progress[done.name]
        offset = progress.offset(done.first)
        if isinstance(self._arrivals, ReadByWorkers):
            self._arrivals.verified.update(done.verified)
        if done.data is not None:
            self._writer.put(done.name, offset, done.data)
        else:
            self._writer.count(done.name, offset, done.nbytes)
        progress.source[done.first : done.stop], progress.data[done.first : done.stop] = done.source, done.hashes
        if progress.left > done.stop - done.first:
            self._job.finish_pieces(progress.planned, done.first, done.source, done.hashes)
        self._count(progress, done.stop - done.first)

    def _count(self, progress: TensorProgress, pieces: int) -> None:
        """Count pieces of a tensor as written; the last ones finish it."""
        progress.left -= pieces
        if progress.left:
            return
        name = progress.planned.name
        del self._in_progress[name]
        copied = self._job.copied.get(name)
        self._records[name] = copied[1] if copied else progress.record(self._job.expected[name])
        finish = functools.partial(self._job.finish, self._records[name])
        if self._arrivals is not None:
            self._arrivals.when_verified(name, finish)
        else:
            finish()

    def pieces(self, stage: Stage, on_wait: Callable[[str], None]) -> Iterator[Job]:
        """The unfinished pieces of a stage, in its order, or in that in which their sources arrive.

        `on_wait` is called with a text while a source has not arrived.
        """
        moments = PreparedMoments(stage.imatrix) if stage.imatrix is not None else None
        if self._arrivals is None:
            yield from self._pieces(stage.tensors, moments)
            return
        unfinished = {t.name: t for t in stage.tensors if t.name not in self._job.done}
        tensors: Mapping[str, Any] = self._source.tensors
        inputs = {name: [] if name in self._job.copied else tensors[name].inputs for name in unfinished}
        for name in self._arrivals.begin(self._job.out, inputs):
            self._arrivals.wait(name, on_wait)
            if name not in self._job.copied:
                self._job.reuse(unfinished[name], tensors[name])
            jobs = list(self._pieces([unfinished[name]], moments))
            left = _Countdown(len(jobs), functools.partial(self._arrivals.release, name))
            yield from ((name, functools.partial(left.counted, make)) for _, make in jobs)

    def copies(self, stage: Stage) -> Iterator[Job]:
        """The pieces of a stage that are copied from an older file, and new scales: what no worker can read."""
        return self._pieces(
            [t for t in stage.tensors if t.name in self._job.copied or t.name in self._source.new], None
        )

    def encodings(self, stage: Stage) -> Iterator[tuple[TensorProgress, Callable[[int], Piece], provenance.Record]]:
        """The unfinished tensors of a stage that are not copied: their pieces left, by number, and their records."""
        moments = PreparedMoments(stage.imatrix) if stage.imatrix is not None else None
        for planned in self._encoded_tensors(stage):
            if progress := self._begin(planned):
                make = functools.partial(self._piece, progress, moments)
                yield progress, make, self._job.expected[planned.name]

    def encode_on(self, pool: on_cluster.Workers, stage: Stage, source: QuantizeSource, bar: Bar) -> None:
        """Have workers encode the pieces that `encodings` gives."""
        groups = on_cluster.by_file(source, stage.tensors)
        encodings = [self.encodings(stage._replace(tensors=group)) for group in groups]
        pool.encode(encodings, self.pieces_left(stage), self.nbytes, self.encoded, bar)

    def pieces_left(self, stage: Stage) -> int:
        """How many pieces `encodings` gives in all."""
        left = [t for t in self._encoded_tensors(stage) if t.name not in self._job.done]
        return sum(TensorProgress(t, self._job.pieces.get(t.name, {})).left for t in left)

    def _encoded_tensors(self, stage: Stage) -> Iterator[PlannedTensor]:
        """The tensors of a stage that are neither copied nor new scales."""
        return (t for t in stage.tensors if t.name not in self._job.copied and t.name not in self._source.new)

    def _begin(self, planned: PlannedTensor) -> TensorProgress | None:
        """Begin a tensor; None if nothing of it is left to do."""
        if planned.name in self._job.done:
            return None
        progress = TensorProgress(planned, self._job.pieces.get(planned.name, {}))
        self._in_progress[planned.name] = progress
        if progress.left:
            return progress
        self._count(progress, 0)
        return None

    def _pieces(self, tensors: Iterable[PlannedTensor], moments: PreparedMoments | None) -> Iterator[Job]:
        for planned in tensors:
            progress, name = self._begin(planned), planned.name
            if progress is None:
                continue
            if name in self._job.copied:
                stored = self._job.copied[name][0]
                yield from ((name, functools.partial(stored.rows, start, stop)) for start, stop in progress.ranges)
                continue
            for number in progress.missing:
                yield name, functools.partial(progress.encoded, number, self._piece(progress, moments, number))

    def _piece(self, progress: TensorProgress, moments: PreparedMoments | None, number: int) -> Piece:
        planned, rows = progress.planned, progress.ranges[number]
        importance, of_matrix = None, None
        if moments is not None and planned.importance is not None:
            matrix = rows[0] // planned.shape[-2] if len(planned.shape) > 1 else 0
            importance, of_matrix = moments.of_matrix(
                planned.name, planned.shape[-1], matrix, planned.type, self.effort
            )
            if importance is None and planned.type.requires_imatrix:
                raise DataError(f"{planned.name}: no importance was measured, which {planned.type.name} needs")
        # Copied float tensors, above all norms, are checked too: a NaN in them breaks the model like any other.
        same_bits = planned.copied or planned.reordered
        verbatim = same_bits and (self._plan.file_type.default is None or planned.source.name not in _FLOATS)
        tensor = self._source.tensors[planned.name]
        return Piece(planned, tensor, *rows, importance, of_matrix, self.effort, verbatim)


class _Countdown:
    """Calls `at_end` after the last of some jobs. Their results are not views of the source, which may go then."""

    def __init__(self, jobs: int, at_end: Callable[[], None]):
        self._left, self._at_end = jobs, at_end
        self._lock = threading.Lock()

    def counted(self, make: Callable[[], np.ndarray]) -> np.ndarray:
        """The result of a job."""
        data = make()
        if is_mapped(data):
            data = data.copy()
        with self._lock:
            self._left -= 1
            is_last = self._left == 0
        if is_last:
            self._at_end()
        return data


# ----------------------------------------------------------------------------------------------------------- provenance


def _expected_records(
    plan: Plan, imatrix: Imatrix | None, effort: str, calibration: Calibration | None = None
) -> dict[str, provenance.Record]:
    """The provenance record that each tensor will have; the hashes of source and output are not known yet."""
    found = {}
    for planned in plan.tensors:
        importance, codec = provenance.NONE, provenance.COPY
        if not planned.copied and not planned.reordered:
            if imatrix is not None and planned.importance is not None and planned.type.uses_imatrix:
                with_moments = planned.type.uses_second_moments_at(effort)
                if calibration is not None:
                    importance = provenance.of_calibration(calibration.digest, with_moments)
                else:
                    importance = provenance.of_entry(imatrix, planned.importance, with_moments)
            codec = provenance.codec(planned.type.name, effort, provenance.has_moments(importance), planned.scale)
        found[planned.name] = provenance.unknown(planned.name, planned.type.name, importance, codec)
    return found


def _set_records(metadata: Metadata, records: Iterable[provenance.Record], hidden: bool) -> None:
    """Set the provenance keys. Unknown hashes take as many bytes as known ones, so the header keeps its size."""
    listed = list(records)
    metadata.set(provenance.SOURCE, provenance.of_sources(listed), "str")
    metadata.set(provenance.TENSORS, [str(record.hidden() if hidden else record) for record in listed], "str")


def _set_calibration(metadata: Metadata, calibration: Calibration, hidden: bool) -> None:
    """Say how the importance was measured, in place of the matrix that was read."""
    metadata.pop(provenance.IMATRIX, None)
    if not hidden:
        metadata.set(provenance.CALIBRATION, calibration.described, "str")
        metadata.set(provenance.IMATRIX, calibration.digest, "str")


def _settings(metadata: Metadata, source: QuantizeSource) -> dict[str, str]:
    """The settings of a job by name, for a message that says how another job differs."""
    keys = {
        "file type": "general.file_type", "recipe": "quantkit.recipe", "version of quantkit": "quantkit.version",
        "effort": "quantkit.effort", "importance matrix": provenance.IMATRIX,
    }  # fmt: skip
    return {"input": str(source.paths[0])} | {name: str(metadata.get(key, "")) for name, key in keys.items()}


# ------------------------------------------------------------------------------------------------------------- metadata


def output_metadata(
    source: Mapping[str, object],
    plan: Plan,
    imatrix: Imatrix | None = None,
    imatrix_file: str = "",
    overrides: Sequence[Override] = (),
    effort: str = "normal",
    hide_imatrix: bool = False,
) -> Metadata:
    """The input's keys in their order, then quantization version, overrides, importance matrix, recipe, file type."""
    from gguf.constants import GGML_QUANT_VERSION  # takes 0.03 s, which a plan does not need

    metadata = Metadata(source)
    metadata.set("general.quantization_version", GGML_QUANT_VERSION, "u32")
    for override in overrides:
        _apply_override(metadata, override)
    if imatrix is not None:
        entries, chunks = (0, 0) if hide_imatrix else (len(imatrix), imatrix.chunks)
        for key, text in (("file", imatrix_file), ("dataset", imatrix.described)):
            metadata.set(f"quantize.imatrix.{key}", _HIDDEN if hide_imatrix else _truncated(text), "str")
        metadata.set("quantize.imatrix.entries_count", entries, "i32")
        if imatrix.chunks > 0:
            metadata.set("quantize.imatrix.chunks_count", chunks, "i32")
    if plan.file_type.number is not None:  # a plain copy keeps the input's recipe and provenance
        metadata.pop(provenance.IMATRIX, None)  # describes the input
        if imatrix is not None and not hide_imatrix:
            metadata.set(provenance.IMATRIX, provenance.of_imatrix(imatrix), "str")
        metadata.set("quantkit.recipe", plan.text(), "str")
        metadata.set("quantkit.version", __version__, "str")
        for key in ("quantkit.effort", provenance.CALIBRATION):  # describe the input
            metadata.pop(key, None)
        if effort != "normal":
            metadata.set("quantkit.effort", effort, "str")
        metadata.pop(FILE_TYPE_BEFORE, None)  # describes the input
        metadata.set("general.file_type", in_dialect(plan.file_type, plan.dialect).number, "u32")
    if (dialect := plan.written_dialect) is not None:
        metadata.set(dialects.KEY, dialect, "str")
    elif plan.file_type.number is not None:
        metadata.pop(dialects.KEY, None)  # describes the input
    rename_repacked(metadata, plan.type_changes())
    return metadata


def _apply_override(metadata: Metadata, override: Override) -> None:
    """Set a metadata key. An existing key keeps its type, because readers reject a key of another type."""
    new = {"int": "i32", "float": "f32", "bool": "bool", "str": "str"}[override.kind]
    kind = metadata.kind(override.key) if override.key in metadata else new
    if isinstance(metadata.get(override.key), list) or (override.kind == "int") != (kind[0] in "ui"):
        found = "a list" if isinstance(metadata.get(override.key), list) else kind
        raise QuantkitError(f"override {override.key}: the file's value is {found}, the override is {override.kind}")
    metadata.set(override.key, override.value, kind)


def _truncated(text: str) -> str:
    """The first bytes of a text, as many as readers of imatrix keys accept. Bytes that are not UTF-8 become `?`."""
    return text.encode(errors="replace")[:_MAX_TEXT_BYTES].decode(errors="ignore")
