"""`quantkit quantize`: plan, show the plan, write the file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from quantkit.cli.common.cluster import Cluster, SharedOutput, check_cluster, connected, print_workers, worker_rows
from quantkit.cli.common.command import in_sections
from quantkit.cli.common.hub import Disk, KeepShards, is_on_hub
from quantkit.cli.common.llama_options import takes_llama_options
from quantkit.cli.common.options import (
    Json,
    KeepSplit,
    MetadataFile,
    ModelName,
    SplitMaxSize,
    SplitMaxTensors,
    Threads,
    checked_threads,
    parse_size,
    split_limit,
)
from quantkit.cli.common.output import gib, print_json, print_left_out, print_unfinished
from quantkit.cli.common.plan_options import Verbose, takes_plan_options
from quantkit.cli.common.plan_tables import print_imatrix, print_plan
from quantkit.cli.common.positional import default_out
from quantkit.cli.common.positional import read as read_positional
from quantkit.cli.common.progress_options import shows_progress
from quantkit.errors import OptionError
from quantkit.pipelines.options import PlanOptions, QuantizeOptions

if TYPE_CHECKING:
    from quantkit.evaluate.imatrix.one_pass import CalibrationOptions
    from quantkit.pipelines.api import QuantizeResult


@shows_progress
@in_sections(
    Calibration=[
        "calibrate", "calibrate_ctx", "calibrate_chunks", "propagate", "second_moments", "second_moments_size",
        "token_weights",
    ],
    Shards=["split_max_size", "split_max_tensors", "keep_split"],
    Parts_of_a_model=["only", "individual_tensors", "skip_first_shard"],
)  # fmt: skip
@takes_llama_options("slow_iq2ks", "prune_layers", "extra_output_tensor", "symmetric_q40")
@takes_plan_options("fit", "bandwidth", "compute", "cluster", "offload_threshold", "offload_policy")
def quantize(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="IN",
            help="A GGUF file, any shard of a split one, or a checkpoint directory; with --dry-run also config.json. "
            "hf://ORG/NAME[@REVISION] is a checkpoint on the Hub, hf://ORG/NAME/FILE.gguf a file.",
            show_default=False,
        ),
    ],
    out: Annotated[
        str | None,
        typer.Argument(
            metavar="OUT",
            help="The output file, in which {name} and {ftype} stand for the names of IN and TYPE; default: "
            "ggml-model-TYPE.gguf in the directory of IN.",
            show_default=False,
        ),
    ] = None,
    file_type: Annotated[
        str | None,
        typer.Argument(metavar="TYPE", help="File type, for example Q4_K_M, its number, or COPY.", show_default=False),
    ] = None,
    thread_count: Annotated[
        str | None, typer.Argument(metavar="THREADS", help="Same as --threads.", show_default=False)
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Use the plan that `quantkit plan --json` wrote, instead of TYPE."),
    ] = None,
    options: PlanOptions = PlanOptions(),  # noqa: B008  immutable
    calibrate: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="TEXT",
            help="Measure importance and second moments on this text while quantizing, in place of --imatrix. "
            "Repeatable.",
            show_default=False,
        ),
    ] = None,
    calibrate_ctx: Annotated[
        int | None, typer.Option(metavar="N", help="Tokens per chunk of the texts; default 512.", min=4)
    ] = None,
    calibrate_chunks: Annotated[
        int | None, typer.Option(metavar="N", help="At most N chunks of each text.", min=1)
    ] = None,
    propagate: Annotated[
        Literal["original", "quantized"] | None,
        typer.Option(help="Weights that compute the inputs of the next layer; default: original."),
    ] = None,
    second_moments: Annotated[
        str | None,
        typer.Option(
            metavar="FORM", help="Second moments that --calibrate measures: full (default), rank:N, blocks:N or auto."
        ),
    ] = None,
    second_moments_size: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Memory limit for the second moments of a layer, for example 8G; auto stays within it."
        ),
    ] = None,
    token_weights: Annotated[
        Literal["attention", "none"] | None,
        typer.Option(
            help="Weight of tokens in the inputs of queries, keys and values that --calibrate measures: the attention "
            "that they receive (default), or none: all alike."
        ),
    ] = None,
    hide_imatrix: Annotated[
        bool, typer.Option("--hide-imatrix", help="Do not store the name of the importance matrix in the output.")
    ] = False,
    effort: Annotated[Literal["fast", "normal", "best"], typer.Option(help="Encoder effort.")] = "normal",
    override_kv: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=TYPE:VALUE", help="Set a metadata key; TYPE is int, float, bool or str. Repeatable."),
    ] = None,
    pre: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Value of tokenizer.ggml.pre, if a checkpoint's tokenizer is not recognised."
        ),
    ] = None,
    metadata: MetadataFile = None,
    model_name: ModelName = None,
    split_max_size: SplitMaxSize = None,
    split_max_tensors: SplitMaxTensors = None,
    keep_split: KeepSplit = False,
    partial_requant: Annotated[
        bool,
        typer.Option(
            "--partial-requant", help="Quantize only tensors that would differ from those in OUT; copy the rest."
        ),
    ] = False,
    reuse: Annotated[
        Path | None,
        typer.Option(metavar="OLD", help="Like --partial-requant, but copy from OLD: a .gguf or .gguf.partial-job."),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--only",
            metavar="REGEX",
            help="Write only tensors whose name matches, as a part that `quantkit merge` joins. Repeatable.",
        ),
    ] = None,
    individual_tensors: Annotated[
        str | None,
        typer.Option(
            "--individual-tensors",
            metavar="N,…",
            help="With --keep-split: write only these shards, and the first one. Other shards of IN may be missing.",
        ),
    ] = None,
    skip_first_shard: Annotated[
        bool,
        typer.Option(
            "--skip-first-shard",
            help="With --individual-tensors: do not write the first shard.",
        ),
    ] = False,
    disk: Disk = None,
    keep_shards: KeepShards = False,
    cluster: Cluster = None,
    shared_output: SharedOutput = False,
    fresh: Annotated[
        bool,
        typer.Option("--restart", "--fresh", help="Discard the results of an interrupted run instead of resuming it."),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan and write nothing.")] = False,
    verbose: Verbose = False,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Quantize a GGUF file or a checkpoint by file type, rules and flags.

    A checkpoint is read a few rows at a time, without an intermediate file. The result is that of `quantkit convert
    --outtype stored` followed by `quantkit quantize`.

    These decide a tensor's type, highest priority first: --token-embedding-type, --per-layer-token-embedding-type,
    --output-tensor-type and --ffn-gate-inp-type; the first matching rule of --custom-q, --tensor-type,
    --tensor-type-file and --recipe; --attn-q-type and the related flags; the mix of TYPE; its default. Rows that do not
    fit a type get a type with smaller blocks. quantkit warns about rules that match nothing, or more than they seem to.
    --plan takes all types from a file instead. The output contains its recipe.

    --repack and --repack-pattern do in one pass what `quantkit repack` does to a file; --repack-pattern implies
    --repack. Interleaved types such as IQ4_K_R4 are also valid types. Flags for placement, cache and memory do not
    change the output: the plan shows where the tensors will go.

    A checkpoint on the Hub is streamed: its tensors are fetched while others are quantized, and removed from the disk
    when they are done. The hash of every file is checked.

    With --cluster, the workers of a dask cluster read IN and encode; OUT has the same bytes. The workers must find IN
    under the same name, or reach the Hub.

    To resume an interrupted run, give the same command again. --partial-requant quantizes only tensors whose type,
    source, importance or encoder differs from what OUT records, and copies the rest; `quantkit verify` lists them. If
    OUT does not exist, it quantizes all tensors.

    --calibrate runs the model over texts, layer by layer, and encodes each layer when its inputs are measured. Neither
    a converted file nor an importance matrix is stored. Of a checkpoint on the Hub, only the files of a layer are on
    the disk.
    """
    from quantkit.pipelines import api, planning
    from quantkit.pipelines.output import filled_name

    check_cluster(cluster)
    positional = read_positional((out, file_type, thread_count))
    given = QuantizeOptions(
        **api.type_options(options),
        plan=plan,
        pre=pre,
        metadata=metadata,
        model_name=model_name,
        override_kv=override_kv or (),
        hide_imatrix=hide_imatrix,
        effort=effort,
        threads=_thread_limit(threads, positional.threads),
        fresh=fresh,
        partial_requant=partial_requant,
        reuse=reuse,
        split_max_size=split_limit(split_max_size, split_max_tensors, keep_split),
        split_max_tensors=split_max_tensors,
        keep_split=keep_split,
        only=only or (),
        individual_tensors=(individual_tensors,) if individual_tensors else (),
        skip_first_shard=skip_first_shard,
        disk=None if disk is None else parse_size(disk, "--disk"),
        keep_shards=keep_shards,
        shared_output=shared_output,
    )
    if calibrate and (only or individual_tensors):
        raise OptionError("--calibrate runs the model over all layers: --only and --individual-tensors need --imatrix")
    calibration = _calibration(
        calibrate_ctx, calibrate_chunks, propagate, second_moments, second_moments_size, token_weights
    )
    on_message = (lambda line: None) if json else print
    if calibrate:
        from quantkit.evaluate.imatrix import one_pass

        job = one_pass.prepare(source, positional.file_type, calibrate, given, calibration, on_message=on_message)
    elif calibration is not None:
        raise OptionError("options of calibration are given without a text: pass --calibrate TEXT")
    else:
        job = api.prepare_quantize(source, positional.file_type, given, weights=not dry_run)
    devices = planning.plan_devices(options, job.plan, job.model.metadata)
    if options.strict:
        planning.require_clean(job.plan, devices)
    if not calibrate:
        print_imatrix(options.imatrix, job.imatrix)
    if not json:
        print_left_out(getattr(job.model.file, "left_out", {}), getattr(job.model.file, "warnings", ()))
        print_plan(job.plan, verbose, devices)
    if job.part is not None and not json:
        shards = f" in {len(job.part.counts)} shard(s)" if job.part.shards else ""
        print(f"a part: {len(job.part.names)} of {len(job.plan.tensors)} tensors are written{shards}")
    path = positional.out or default_out(Path() if is_on_hub(source) else source, job.plan.file_type.name)
    path = filled_name(path, source, job.plan.file_type.name)
    if path != positional.out and not json:
        print(f"the output is {path}" if positional.out else f"OUT is not given: the output is {path}")
    if dry_run:
        if json:
            print_json("quantkit.plan/1", api.PlanResult(job.plan, devices, job.imatrix).to_json())
        return
    try:
        with connected(cluster, on_message) as client:
            result = job.write(path, client=client, progress=True, on_message=on_message)
    except BaseException:
        print_unfinished(path)
        raise
    _report(result, json)


def _calibration(
    ctx_size: int | None,
    chunks: int | None,
    propagate: str | None,
    second_moments: str | None,
    second_moments_size: str | None,
    token_weights: str | None,
) -> CalibrationOptions | None:
    """Options of --calibrate; None where none is given."""
    size = parse_size(second_moments_size, "--second-moments-size") if second_moments_size else None
    named = {"ctx_size": ctx_size, "chunks": chunks, "propagate": propagate, "second_moments": second_moments,
             "second_moments_size": size, "token_weights": token_weights}  # fmt: skip
    given: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
    if not given:
        return None
    from quantkit.evaluate.imatrix.one_pass import CalibrationOptions

    return CalibrationOptions(**given)


def _thread_limit(option: int | None, positional: int | None) -> int | None:
    """The number of threads from --threads or THREADS; THREADS <= 0 means all CPUs, as in llama-quantize."""
    if option is not None and positional is not None and option != positional:
        raise typer.BadParameter(f"THREADS is {positional} and --threads {option}; drop one of them")
    return option or checked_threads(positional if positional and positional > 0 else None)


def _report(result: QuantizeResult, json: bool) -> None:
    if json:
        record = {"paths": result.paths, "bytes": result.bytes, "resumed": result.resumed, "reused": result.reused}
        workers = {"workers": worker_rows(result.workers)} if result.workers else {}
        print_json("quantkit.quantize/1", result.plan.to_json() | record | {"seconds": result.seconds} | workers)
        return
    print_workers(result.workers)
    for path in result.paths:
        print(f"wrote {path}")
    speed = result.plan.bytes_before / max(result.seconds, 1e-9) / 2**20
    print(f"{gib(result.bytes)} in {result.seconds:.1f} s, {speed:.0f} MiB/s of input")
