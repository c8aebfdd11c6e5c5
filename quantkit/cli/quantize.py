"""`quantkit quantize`: plan, show the plan, write the file."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quantkit.cli._planning import (
    Model,
    PlanOptions,
    Strict,
    Verbose,
    conflicts_with_plan,
    document,
    open_source,
    print_plan,
    require_clean,
    takes_plan_options,
)
from quantkit.cli._positional import default_out
from quantkit.cli._positional import read as read_positional
from quantkit.cli._shared import (
    Json,
    KeepSplit,
    SplitMaxSize,
    SplitMaxTensors,
    Threads,
    checked_threads,
    gib,
    print_json,
    print_left_out,
    split_limit,
)
from quantkit.errors import QuantkitError
from quantkit.inputs import json_input

if TYPE_CHECKING:
    from quantkit.formats.imatrix import Imatrix
    from quantkit.pipelines.quantize import Written
    from quantkit.recipe import Plan


@takes_plan_options("fit", "bandwidth", "compute", "offload_threshold", "offload_policy")
def quantize(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="IN",
            help="A GGUF file, any shard of a split one, or a checkpoint directory; with --dry-run also config.json.",
            show_default=False,
        ),
    ],
    out: Annotated[
        str | None,
        typer.Argument(
            metavar="OUT",
            help="The output file; default: ggml-model-TYPE.gguf in the directory of IN.",
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
    hide_imatrix: Annotated[
        bool, typer.Option("--hide-imatrix", help="Do not store the name of the importance matrix in the output.")
    ] = False,
    effort: Annotated[str, typer.Option(metavar="EFFORT", help="Encoder effort: fast, normal or best.")] = "normal",
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
    split_max_size: SplitMaxSize = None,
    split_max_tensors: SplitMaxTensors = None,
    keep_split: KeepSplit = False,
    strict: Strict = False,
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
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Discard the results of an interrupted run instead of resuming it.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan and write nothing.")] = False,
    verbose: Verbose = False,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Quantize a GGUF file or a checkpoint by file type, rules and flags.

    A checkpoint directory is read as `quantkit convert` would write it (FP8 and MXFP4 become bf16), a few rows at a
    time and without an intermediate file. The result is the same as with `quantkit convert` first.

    These decide a tensor's type, highest priority first: --token-embedding-type and --output-tensor-type; the first
    matching rule of --custom-q, --tensor-type and --recipe; --attn-q-type and the related flags; the mix of TYPE; its
    default. Rows that do not fit a type fall back to a type with smaller blocks. quantkit warns about rules that match
    nothing or more than they seem to. The output contains its recipe. --plan takes all types from a file instead.
    --repack and --repack-pattern do in one pass what `quantkit repack` does to a file; --repack-pattern implies
    --repack. Interleaved types such as IQ4_K_R4 are also valid types. Flags for placement, cache and memory do not
    change the output: the plan shows where the tensors will go.

    To resume an interrupted run, give the same command again. --partial-requant quantizes only tensors whose type,
    source, importance or codec differs from what OUT records, and copies the rest; `quantkit verify` lists them. If OUT
    does not exist, it quantizes all tensors.
    """
    if partial_requant and reuse:
        raise typer.BadParameter(
            "--partial-requant copies tensors from OUT and --reuse from another file: pass one of them"
        )
    from quantkit.pipelines import resume
    from quantkit.pipelines.quantize import Override
    from quantkit.pipelines.quantize import quantize as run
    from quantkit.types import effort_level

    effort_level(effort)  # an unknown level fails before any file is read
    positional = read_positional((out, file_type, thread_count))
    thread_limit = _thread_limit(threads, positional.threads)
    model = open_source(source, not dry_run, pre)
    if model.file is None and not dry_run:
        raise QuantkitError(f"{source} contains no weights; pass its directory or a GGUF file")
    matrix = options.read_imatrix()
    overrides = [Override.parse(text) for text in override_kv or []]
    size = split_limit(split_max_size, split_max_tensors, keep_split)
    made = _plan(options, positional.file_type, plan, model, matrix)
    made.require_codecs()
    budget = options.budget(made, model.metadata)
    if strict:
        require_clean(made, budget)
    if not json:
        print_left_out(getattr(model.file, "left_out", {}), getattr(model.file, "warnings", ()))
        print_plan(made, verbose, budget)
    path = positional.out or default_out(source, made.file_type.name)
    if positional.out is None and not json:
        print(f"OUT is not given: the output is {path}")
    if dry_run or model.file is None:
        if json:
            print_json("quantkit.plan/1", document(made, budget))
        return
    started = time.perf_counter()
    try:
        written = run(
            model.file,
            path,
            made,
            imatrix=matrix,
            imatrix_file=str(options.imatrix or ""),
            hide_imatrix=hide_imatrix,
            overrides=overrides,
            effort=effort,
            threads=thread_limit,
            split_max_bytes=size,
            split_max_tensors=split_max_tensors,
            keep_split=keep_split,
            progress=True,
            fresh=fresh,
            old=resume.open_old(reuse) if reuse else None,
            partial_requant=partial_requant,
            on_message=(lambda line: None) if json else print,
        )
    except BaseException:
        _print_unfinished(path)
        raise
    _report(made, written, time.perf_counter() - started, json)


def _plan(options: PlanOptions, file_type: str | None, path: Path | None, model: Model, matrix: Imatrix | None) -> Plan:
    """The plan for this model: from a file type, or replayed from the file of --plan."""
    from quantkit.recipe import replay

    if path is None:
        if file_type is None:
            raise typer.BadParameter("TYPE is missing: give a file type such as Q4_K_M, its number, or COPY")
        return options.plan(model, file_type, matrix)
    if file_type is not None:
        raise conflicts_with_plan("TYPE")
    options.refuse_type_options()
    return replay(
        json_input.read(path), model.tensors, matrix, allow_requantize=options.allow_requantize, where=str(path)
    )


def _print_unfinished(out: Path) -> None:
    """After an error or an interrupt, print what is saved and how to resume."""
    from quantkit.pipelines.resume import unfinished

    if left := unfinished(out):
        print(
            f"\n{left[0]} of {left[1]} tensors are done and saved in {out}.partial-job; run the same command to "
            "resume, or add --fresh to start over",
            file=sys.stderr,
        )


def _thread_limit(option: int | None, positional: int | None) -> int | None:
    """The number of threads from --threads or THREADS; THREADS <= 0 means all CPUs, as in llama-quantize."""
    if option is not None and positional is not None and option != positional:
        raise typer.BadParameter(f"THREADS is {positional} and --threads {option}; drop one of them")
    return option or checked_threads(positional if positional and positional > 0 else None)


def _report(plan: Plan, written: Written, seconds: float, json: bool) -> None:
    if json:
        counts = {"resumed": written.resumed, "reused": written.reused, "seconds": seconds}
        record = plan.to_json() | {"paths": written.paths, "bytes": written.size} | counts
        print_json("quantkit.quantize/1", record)
        return
    for path in written.paths:
        print(f"wrote {path}")
    speed = plan.bytes_before / max(seconds, 1e-9) / 2**20
    print(f"{gib(written.size)} in {seconds:.1f} s, {speed:.0f} MiB/s of input")
