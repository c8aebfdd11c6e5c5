"""The public functions for files: convert, export, plan, quantize, repack_file, unpack_file, verify.

    quantkit.convert("HF_DIR", "model-bf16.gguf")
    quantkit.quantize("model-bf16.gguf", "model-q4.gguf", "Q4_K_M", QuantizeOptions(imatrix="imatrix.dat"))

Each function opens what its caller names, runs a pipeline and returns a result. The commands of the same names parse
flags, call these functions and print the results. `prepare_quantize` and `prepare_repack` are their first half: they
decide everything and write nothing. The functions below this module take opened inputs, plans and single values
instead of options: `convert_checkpoint`, `export_gguf`, `quantize_with_plan`, `verify_gguf`.

`progress` is True for a bar on stderr where that is a terminal, or a `Progress`: a function of the bytes done, the
bytes in all, and the name of a tensor. Errors derive from `QuantkitError`; OptionError is raised for options that
contradict each other, before any weight is read.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.errors import OptionError, UnsupportedError
from quantkit.hub import models
from quantkit.pipelines.options import (
    ConvertOptions,
    ExportOptions,
    PathLike,
    PlanOptions,
    QuantizeOptions,
    RepackOptions,
    TypeOptions,
    VerifyOptions,
    comma_separated,
    texts,
)

if TYPE_CHECKING:
    from distributed import Client

    from quantkit.cluster.in_order import WorkerTime
    from quantkit.formats.gguf import GGUF
    from quantkit.formats.imatrix import Imatrix
    from quantkit.formats.pipeline import Progress
    from quantkit.hub.address import Address
    from quantkit.pipelines.calibration import Calibration
    from quantkit.pipelines.conversion.plan import Conversion
    from quantkit.pipelines.export import Export
    from quantkit.pipelines.on_cluster import WorkerWork
    from quantkit.pipelines.parts import Part
    from quantkit.pipelines.planning import PlanInput
    from quantkit.pipelines.repack_file import Repacking
    from quantkit.pipelines.verify import Verified
    from quantkit.placement.budget import Budget
    from quantkit.placement.many_machines import Prediction
    from quantkit.recipe import Plan


# -------------------------------------------------------------------------------------------------- convert and export


def convert(
    source: PathLike,
    output: PathLike,
    type: str = "auto",
    options: ConvertOptions | None = None,
    *,
    client: Client | None = None,
    progress: Progress | bool = False,
    on_message: Callable[[str], None] = lambda text: None,
) -> Conversion:
    """Convert the Hugging Face checkpoint in directory `source` to the GGUF file `output`.

    `source` may be a checkpoint on the Hub, hf://ORG/NAME. It is streamed: it never lies on the disk as a whole, the
    hash of every file is checked, and an interrupted run is resumed by the same call. `on_message` is called with lines
    of text about that.

    `type` is the type of matrices: "bf16", "f16", "f32", "q8_0", or "auto" for the checkpoint's own 16-bit type. Norms,
    biases and vectors are f32. In the name `output`, {name} stands for the directory's name and {ftype} for the type
    of matrices. `options` are the command's flags, and `progress` reports bytes. The file appears under
    its name when it is complete.

    With `client`, a `distributed.Client` (`quantkit.cluster.connect` makes one), the workers of its cluster convert;
    the bytes are the same, and an interrupted run is resumed by the same call.

    Returns the Conversion: `paths` (the output files), `specs` (name, shape and type of each tensor), `metadata`,
    `nbytes`, `n_params`, `left_out` and `warnings`. Raises FormatError or UnsupportedError with the file, tensor or
    setting that cannot be converted, and DataError for a value that the type cannot hold.
    """
    from quantkit.pipelines.conversion.convert import convert_checkpoint

    options = options or ConvertOptions()
    if options.merge_lora is not None and (client is not None or options.shared_output):
        raise OptionError("--merge-lora adds the adapter on this machine: run it without --cluster")
    if address := models.checkpoint_address(source):
        return _convert_remote(address, output, type, options, client, progress, on_message)
    if options.disk is not None or options.keep_shards:
        raise OptionError(f"{source} is not a checkpoint on the Hub, which --disk and --keep-shards are about")
    if client is not None or options.shared_output:
        from quantkit.pipelines.conversion.plan import plan_conversion

        about = (options.pre, options.mtp, options.metadata, options.model_name)
        conversion = plan_conversion(source, type, *about, fuse_gate_up=options.fuse_gate_up)
        return _convert_as_copy(conversion, output, options, client, progress, on_message)
    return convert_checkpoint(
        source,
        output,
        type,
        pre=options.pre,
        mtp=options.mtp,
        metadata=options.metadata,
        model_name=options.model_name,
        fuse_gate_up=options.fuse_gate_up,
        merge_lora=options.merge_lora,
        split_max_bytes=options.split_max_size,
        split_max_tensors=options.split_max_tensors,
        dry_run=options.dry_run,
        threads=options.threads,
        progress=progress,
        dialect=options.dialect,
    )


def _convert_remote(
    address: Address,
    output: PathLike,
    type: str,
    options: ConvertOptions,
    client: Client | None,
    progress: Progress | bool,
    on_message: Callable[[str], None],
) -> Conversion:
    """Convert a checkpoint on the Hub while it is streamed."""
    from quantkit.pipelines.conversion.remote import plan_remote

    conversion = plan_remote(address, type, options, options.mtp)
    return _convert_as_copy(conversion, output, options, client, progress, on_message)


def _convert_as_copy(
    conversion: Conversion,
    output: PathLike,
    options: ConvertOptions,
    client: Client | None,
    progress: Progress | bool,
    on_message: Callable[[str], None],
) -> Conversion:
    """Write a planned conversion as `quantize` copies it: with a journal, from a stream or on a cluster."""
    from quantkit.pipelines import planning
    from quantkit.pipelines.conversion.convert import refuse_foreign_specs
    from quantkit.pipelines.output import filled_name
    from quantkit.pipelines.quantize import quantize_with_plan

    refuse_foreign_specs(conversion, options.dialect)
    if not options.dry_run:
        view = conversion.as_gguf
        written = quantize_with_plan(
            view,
            filled_name(output, conversion.source, conversion.outtype.name),
            planning.plan_types(planning.PlanInput.of(view), "COPY", QuantizeOptions(), None),
            split_max_bytes=options.split_max_size,
            split_max_tensors=options.split_max_tensors,
            threads=options.threads,
            progress=progress,
            client=client,
            shared_output=options.shared_output,
            on_message=on_message,
        )
        conversion.paths.extend(written.paths)
        conversion.workers.update(written.workers)
    return conversion


def export(
    source: PathLike,
    output: PathLike,
    options: ExportOptions | None = None,
    *,
    progress: Progress | bool = False,
) -> Export:
    """Export the GGUF file `source` to the Hugging Face directory `output`, which transformers loads.

    Float tensors keep their dtype and bits; quantized ones are decoded exactly and stored as `options.dtype`.
    `progress` reports bytes. The weights appear under their names when they are complete.

    Returns the Export: `paths` (the output files), `specs` (name, shape and dtype of each tensor) and `nbytes`. Raises
    UnsupportedError for an architecture or a tokenizer that cannot be exported.
    """
    from quantkit.pipelines.export import export_gguf

    options = options or ExportOptions()
    return export_gguf(
        source,
        output,
        options.dtype,
        max_shard_bytes=options.max_shard_size,
        dry_run=options.dry_run,
        threads=options.threads,
        progress=progress,
    )


# --------------------------------------------------------------------------------------------------- plan and quantize


@dataclass(frozen=True)
class PlanResult:
    """The result of `plan`.

    Fields:

        plan     type, reason and size in bytes of every tensor (`plan.tensors`), effects of the rules, warnings, sums
        devices  what each device holds and whether it fits; None without an option about devices, memory or cache
        imatrix  the importance matrix that was used
        cluster  the time that a cluster takes to quantize; None without the option
    """

    plan: Plan
    devices: Budget | None
    imatrix: Imatrix | None
    cluster: Prediction | None = None

    def to_json(self) -> dict[str, Any]:
        """The document that `quantkit plan --json` prints and `QuantizeOptions.plan` takes."""
        found = self.plan.to_json() | ({"budget": self.devices.to_json()} if self.devices else {})
        return found | ({"cluster": self.cluster.to_json()} if self.cluster else {})


def plan(
    source: PathLike | GGUF | PlanInput, type: str | None = None, options: PlanOptions | None = None
) -> PlanResult:
    """Decide the type and the device of every tensor of `source`. No weights are read.

    `source` is a GGUF file, a checkpoint directory or a config.json, on the disk or on the Hub. `type` is a file type
    such as "Q4_K_M". Without a
    type and without options that choose types, tensors keep theirs. A type that needs an importance matrix is planned
    without one, with a warning in `plan.warnings`.

    Raises RecipeError for rules that cannot be read or, with `options.strict`, for any warning; DataError for an
    importance matrix that does not fit the model; OptionError for options that contradict each other.
    """
    from quantkit.pipelines import planning

    options = options or PlanOptions()
    target = planning.require_file_type(options, type)
    model = planning.open_model(source, mtp=options.mtp)
    matrix = planning.read_imatrix(options)
    type_plan = planning.plan_types_assuming_imatrix(model, target, options, matrix)
    devices = planning.plan_devices(options, type_plan, model.metadata)
    if options.strict:
        planning.require_clean(type_plan, devices)
    predicted = None
    if options.cluster is not None:
        from quantkit.pipelines.encoder_speed import encoder_speeds
        from quantkit.placement.many_machines import Machines, predict

        machines = Machines.parse(options.cluster)
        predicted = predict(type_plan, machines, encoder_speeds(t.type for t in type_plan.tensors))
    return PlanResult(type_plan, devices, matrix, predicted)


@dataclass(frozen=True)
class QuantizeResult:
    """The result of `quantize`.

    Fields:

        plan     type and reason of every tensor
        paths    the files
        bytes    their size, with headers and padding
        resumed  number of tensors that an interrupted run had finished
        reused   number of tensors that were copied from an older file
        seconds  time taken
        workers  what each worker of a cluster did, by address
    """

    plan: Plan
    paths: list[Path]
    bytes: int
    resumed: int
    reused: int
    seconds: float
    workers: Mapping[str, WorkerWork] = field(default_factory=dict)


@dataclass(frozen=True)
class Quantization:
    """A planned quantization: the opened input, the plan, the importance matrix. `write` executes it.

    With a `calibration`, importance is measured while the file is written, and `imatrix` only has the names. With a
    `part`, only its tensors are written.
    """

    model: PlanInput
    plan: Plan
    imatrix: Imatrix | None
    options: QuantizeOptions
    calibration: Calibration | None = None
    part: Part | None = None

    def write(
        self,
        output: PathLike,
        *,
        client: Client | None = None,
        progress: Progress | bool = False,
        on_message: Callable[[str], None] = lambda text: None,
    ) -> QuantizeResult:
        """Write the file. Parameters, result and errors are those of `quantize`."""
        from quantkit.errors import FormatError
        from quantkit.formats.atomic import refuse_inputs
        from quantkit.pipelines import resume
        from quantkit.pipelines.quantize import Override, quantize_with_plan

        options, started = self.options, time.perf_counter()
        if self.model.file is None:
            raise FormatError("the input contains no weights; pass its directory or a GGUF file")
        imatrix_file = str(options.imatrix) if isinstance(options.imatrix, (str, Path)) else ""
        refuse_inputs([Path(output)], [Path(imatrix_file)] if imatrix_file else [])
        written = quantize_with_plan(
            self.model.file,
            output,
            self.plan,
            imatrix=self.imatrix,
            imatrix_file=imatrix_file,
            hide_imatrix=options.hide_imatrix,
            calibration=self.calibration,
            overrides=[Override.parse(text) for text in texts(options.override_kv)],
            effort=options.effort,
            threads=options.threads,
            split_max_bytes=options.split_max_size,
            split_max_tensors=options.split_max_tensors,
            keep_split=options.keep_split,
            progress=progress,
            fresh=options.fresh,
            old=resume.open_old_file(Path(options.reuse)) if options.reuse else None,
            partial_requant=options.partial_requant,
            part=self.part,
            client=client,
            shared_output=options.shared_output,
            on_message=on_message,
        )
        seconds = time.perf_counter() - started
        plan = self.plan if self.part is None else self.part.of(self.plan)
        return QuantizeResult(
            plan, written.paths, written.size, written.resumed, written.reused, seconds, written.workers
        )


def prepare_quantize(
    source: PathLike | GGUF | Conversion | PlanInput,
    type: str | None,
    options: QuantizeOptions | None = None,
    *,
    weights: bool = True,
) -> Quantization:
    """Plan a quantization without writing it; parameters and errors as of `quantize`.

    Without `weights`, `source` may be a config.json, and the plan can only be read.
    """
    from quantkit.errors import FormatError
    from quantkit.pipelines import parts, planning
    from quantkit.pipelines.quantize import Override
    from quantkit.types import effort_level

    options = options or QuantizeOptions()
    effort_level(options.effort)  # an unknown level fails before any file is read
    if options.partial_requant and options.reuse:
        raise OptionError("--partial-requant copies tensors from OUT and --reuse from another file: pass one of them")
    if type is None and options.plan is None:
        raise OptionError("TYPE is missing: give a file type such as Q4_K_M, its number, or COPY")
    if type is not None and options.plan is not None:
        raise planning.conflicts_with_plan("TYPE")
    if isinstance(source, (str, os.PathLike)):
        source = parts.open_source(Path(source), options) or source
    model = planning.open_model(source, weights, options, options.mtp)
    if model.file is None and weights:
        raise FormatError(f"{source} contains no weights; pass its directory or a GGUF file")
    matrix = planning.read_imatrix(options)
    for text in texts(options.override_kv):
        Override.parse(text)
    if type is None:
        type_plan = planning.replay_plan(model, options, matrix)
    else:
        type_plan = planning.plan_types(model, type, options, matrix)
    type_plan.require_codecs()
    part = parts.choose(type_plan, model.file, options)
    return Quantization(model, type_plan, matrix, options, part=part)


def quantize(
    source: PathLike | GGUF | Conversion,
    output: PathLike,
    type: str | None,
    options: QuantizeOptions | None = None,
    *,
    client: Client | None = None,
    progress: Progress | bool = False,
    on_message: Callable[[str], None] = lambda text: None,
) -> QuantizeResult:
    """Quantize a GGUF file or a checkpoint directory to the GGUF file `output`.

        source      a GGUF file, a checkpoint directory, either on the Hub, or what `quantkit.open` returned
        output      the file, or the prefix of its shards; it appears under its name when it is complete; in it {name}
                    and {ftype} stand for the name of a source that is a path, and for the file type
        type        a file type such as "Q4_K_M"; None if `options.plan` decides every type
        options     the command's flags: importance matrix, rules, encoder effort, shards
        client      a `distributed.Client` (`quantkit.cluster.connect` makes one): the workers of its cluster encode
        progress    reports bytes
        on_message  called with a line of text that says how many tensors are resumed or reused

    An interrupted run leaves `OUTPUT.partial-job`; the same call resumes it. Raises ImportanceError if a type needs an
    importance matrix, RecipeError for rules that cannot be read and, with `options.strict`, for any warning, and
    DataError with file, tensor, row and column of a value that is not finite.
    """
    from quantkit.pipelines.output import filled_name

    job = prepare_quantize(source, type, options)
    if job.options.strict:
        job.plan.require_clean()
    if isinstance(source, (str, os.PathLike)):
        output = filled_name(output, source, job.plan.file_type.name)
    return job.write(output, client=client, progress=progress, on_message=on_message)


# --------------------------------------------------------------------------------------------------- repack and unpack


@dataclass(frozen=True)
class RepackResult:
    """The result of `repack_file` and `unpack_file`.

    Fields:

        job      what was planned: `job.changes` has each tensor with its new type, or the reason why it is copied
        paths    the files; empty if no tensor would change, or with `dry_run`
        bytes    tensor data of the output
        seconds  time taken
    """

    job: Repacking
    paths: list[Path]
    bytes: int
    seconds: float


def prepare_repack(source: PathLike | GGUF, options: RepackOptions | None = None, *, unpack: bool = False) -> Repacking:
    """Plan to interleave the rows of a file's tensors, or to undo it, without writing anything."""
    from quantkit.formats import gguf
    from quantkit.pipelines.repack_file import plan_repack, plan_unpack

    options = options or RepackOptions()
    file = gguf.require_model(source if isinstance(source, gguf.GGUF) else gguf.open(source))
    if unpack:
        return plan_unpack(file)
    placement = None
    if options.placement is not None:
        from quantkit.placement import rules

        flags = options.placement
        parsed = rules.parse_flags(flags) if isinstance(flags, str) else flags
        parsed = replace(parsed, runtime=options.runtime)
        placement = rules.plan(file.tensors, parsed, file.metadata, file.path)
    return plan_repack(file, comma_separated(options.repack_pattern), placement)


def write_repacking(
    job: Repacking, output: PathLike, options: RepackOptions | None = None, *, progress: Progress | bool = False
) -> RepackResult:
    """Write what `prepare_repack` planned, unless nothing changes or `options.dry_run` is set."""
    from quantkit.pipelines.repack_file import write_repacked

    options = options or RepackOptions()
    started, paths = time.perf_counter(), list[Path]()
    if job.changed and not options.dry_run:
        paths = write_repacked(
            job,
            output,
            split_max_bytes=options.split_max_size,
            split_max_tensors=options.split_max_tensors,
            keep_split=options.keep_split,
            threads=options.threads,
            progress=progress,
        )
    return RepackResult(job, paths, job.nbytes, time.perf_counter() - started)


def repack_file(
    source: PathLike | GGUF,
    output: PathLike,
    options: RepackOptions | None = None,
    *,
    progress: Progress | bool = False,
) -> RepackResult:
    """Interleave the rows of the tensors of `source`, because CPU kernels read them faster, and write `output`.

    Values do not change, and `unpack_file` restores the file. `options` are the command's flags; `progress` reports
    bytes. If nothing would change, no file is written. Raises QuantkitError for a pattern that matches no tensor's
    name, and UnsupportedError for an interleaved tensor that a GPU of `options.placement` cannot use.
    """
    return write_repacking(prepare_repack(source, options), output, options, progress=progress)


def unpack_file(
    source: PathLike | GGUF,
    output: PathLike,
    options: RepackOptions | None = None,
    *,
    progress: Progress | bool = False,
) -> RepackResult:
    """Convert the interleaved tensors of `source` to their base types, without losing a bit, and write `output`.

    `options` are the command's flags; `progress` reports bytes. If nothing would change, no file is written. A tensor
    that cannot be unpacked is copied, and `job.changes` of the result says why. Raises FormatError for a file that is
    no model.
    """
    return write_repacking(prepare_repack(source, options, unpack=True), output, options, progress=progress)


# -------------------------------------------------------------------------------------------------------------- verify


def verify(
    source: PathLike | GGUF,
    options: VerifyOptions | None = None,
    *,
    client: Client | None = None,
    progress: Progress | bool = False,
    on_message: Callable[[str], None] = lambda text: None,
) -> Verified:
    """Check a GGUF file: its structure, values and recorded hashes, and whether a rerun would give the same bytes.

    `source` is the file to check; `options` name the input that it was made from; `progress` reports bytes. With
    `client`, a `distributed.Client`, the workers of its cluster read and check the tensors, and `on_message` is told
    which of them were refused.

    Returns Verified: `damage` (one sentence for each defect; empty if the file is sound), `changes` (for each tensor
    that a rerun would change: why), `notes`, and `rerun` (None if the input was not compared). Raises FormatError for
    a file whose structure is broken.
    """
    from quantkit.formats import gguf, imatrix
    from quantkit.formats.imatrix import Imatrix
    from quantkit.pipelines.planning import open_model
    from quantkit.pipelines.verify import verify_gguf

    options = options or VerifyOptions()
    original = None
    if options.source is not None:
        original = open_model(options.source, weights=True, options=QuantizeOptions(disk=options.disk)).file
    elif options.disk is not None:
        raise OptionError("--disk is about a --source on the Hub: pass one, or drop it")
    matrix = options.imatrix
    if matrix is not None and not isinstance(matrix, Imatrix):
        matrix = imatrix.read(matrix)
    file = source if isinstance(source, gguf.GGUF) else gguf.open(source)
    check = None
    times: dict[str, WorkerTime] = {}
    if client is not None:
        from quantkit.pipelines.verify_on_cluster import check_on_workers

        if getattr(original, "arrivals", None) is not None:
            raise UnsupportedError(
                f"{options.source}: a checkpoint on the Hub is streamed through one machine; for --cluster fetch it to "
                "where all workers find it, with `hf download ORG/NAME --local-dir DIR`"
            )
        check = functools.partial(check_on_workers, client, file, options, progress, on_message, times)
    found = verify_gguf(file, original, matrix, threads=options.threads, progress=progress, check=check)
    found.workers = times
    return found


def type_options(options: TypeOptions) -> dict[str, Any]:
    """The values of the fields that `PlanOptions` and `QuantizeOptions` share."""
    return {f.name: getattr(options, f.name) for f in fields(TypeOptions)}
