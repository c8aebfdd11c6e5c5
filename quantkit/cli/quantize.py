"""`quantkit quantize`: plan, show the plan, write."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quantkit.cli._planning import (
    Asked,
    Model,
    Strict,
    Verbose,
    asks,
    decided,
    document,
    open_source,
    print_plan,
    require_clean,
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


@asks("fit", "bandwidth", "compute", "offload_threshold", "offload_policy")
def quantize(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="IN",
            help="A GGUF file, any shard of a set, or a checkpoint's directory; for --dry-run also its config.json.",
            show_default=False,
        ),
    ],
    out: Annotated[
        str | None,
        typer.Argument(
            metavar="OUT",
            help="The file to write; without it ggml-model-TYPE.gguf in the folder of IN.",
            show_default=False,
        ),
    ] = None,
    file_type: Annotated[
        str | None,
        typer.Argument(metavar="TYPE", help="File type, as Q4_K_M, its number, or COPY.", show_default=False),
    ] = None,
    thread_count: Annotated[
        str | None, typer.Argument(metavar="THREADS", help="As --threads.", show_default=False)
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Types as `quantkit plan --json` wrote them; no TYPE then.")
    ] = None,
    asked: Asked = Asked(),  # noqa: B008  its options' own defaults
    hide_imatrix: Annotated[
        bool, typer.Option("--hide-imatrix", help="Do not say in the output which importance matrix it was.")
    ] = False,
    effort: Annotated[
        str, typer.Option(metavar="E", help="What the search for codes may cost: fast, normal or best.")
    ] = "normal",
    override_kv: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=TYPE:VALUE", help="Set a metadata key; TYPE int, float, bool or str. Repeatable."),
    ] = None,
    pre: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="tokenizer.ggml.pre, where a checkpoint's tokenizer is not recognised."),
    ] = None,
    split_max_size: SplitMaxSize = None,
    split_max_tensors: SplitMaxTensors = None,
    keep_split: KeepSplit = False,
    strict: Strict = False,
    partial_requant: Annotated[
        bool, typer.Option("--partial-requant", help="Make only tensors anew that would differ from those in OUT.")
    ] = False,
    reuse: Annotated[
        Path | None,
        typer.Option(metavar="OLD", help="The same with another file, as OLD.gguf or OLD.gguf.partial-job."),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Drop what a run that ended early has done, instead of going on with it.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan and write nothing.")] = False,
    verbose: Verbose = False,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Quantize a GGUF file or a checkpoint by file type, rules and flags.

    A checkpoint's directory is read as `quantkit convert` would write it, FP8 and MXFP4 as bf16, rows by rows, with no
    file in between: the tensors are those that the detour gives.

    What decides a tensor's type, strongest first: --token-embedding-type and --output-tensor-type; the first matching
    rule of --custom-q, --tensor-type and --recipe; --attn-q-type and its kin; the mix of TYPE; its default. Rows that
    do not fit a type fall back to a narrower one. Rules that do nothing, or more than they say, are warned about; the
    output carries its recipe. --plan takes all types from a file instead. --repack and --repack-pattern do in one pass
    what `quantkit repack` would do to the output; the pattern alone is enough. Types that are interleaved, as
    IQ4_K_R4, can also be asked for like any other. Flags of placement, cache and memory change nothing that is
    written: the plan shows where the tensors will go with them.

    A run that was killed or interrupted goes on where it was when the same command is given again. --partial-requant
    redoes only tensors whose type, source, importance or codec is another than what OUT says of them, and copies the
    rest; `quantkit verify` tells what that would be. Where there is no OUT all are made.
    """
    if partial_requant and reuse:
        raise typer.BadParameter(
            "--partial-requant takes over what is in OUT, --reuse what is in another file: pass one"
        )
    from quantkit.pipelines import resume
    from quantkit.pipelines.quantize import Override
    from quantkit.pipelines.quantize import quantize as run
    from quantkit.types import effort_level

    effort_level(effort)  # refused before anything is read
    positional = read_positional((out, file_type, thread_count))
    thread_limit = _thread_limit(threads, positional.threads)
    model = open_source(source, not dry_run, pre)
    if model.file is None and not dry_run:
        raise QuantkitError(f"{source}: there are no weights in it; pass the directory that it lies in, or a GGUF file")
    matrix = asked.read_imatrix()
    overrides = [Override.parse(text) for text in override_kv or []]
    size = split_limit(split_max_size, split_max_tensors, keep_split)
    made = _plan(asked, positional.file_type, plan, model, matrix)
    made.require_codecs()
    budget = asked.budget(made, model.metadata)
    if strict:
        require_clean(made, budget)
    if not json:
        print_left_out(getattr(model.file, "left_out", {}), getattr(model.file, "warnings", ()))
        print_plan(made, verbose, budget)
    path = positional.out or default_out(source, made.file_type.name)
    if positional.out is None and not json:
        print(f"no OUT is given: the output is {path}")
    if dry_run or model.file is None:
        if json:
            print_json(document(made, budget))
        return
    started = time.perf_counter()
    try:
        written = run(
            model.file,
            path,
            made,
            imatrix=matrix,
            imatrix_file=str(asked.imatrix or ""),
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
            say=(lambda line: None) if json else print,
        )
    except BaseException:
        _tell_unfinished(path)
        raise
    _report(made, written, time.perf_counter() - started, json)


def _plan(asked: Asked, file_type: str | None, path: Path | None, model: Model, matrix: Imatrix | None) -> Plan:
    """The plan of a file type, or the one in a file, for this model."""
    from quantkit.recipe import replay

    if path is None:
        if file_type is None:
            raise typer.BadParameter("TYPE is missing: a file type as Q4_K_M, its number, or COPY")
        return asked.plan(model, file_type, matrix)
    if file_type is not None:
        raise decided("TYPE")
    asked.refuse_choices()
    return replay(
        json_input.read(path), model.tensors, matrix, allow_requantize=asked.allow_requantize, where=str(path)
    )


def _tell_unfinished(out: Path) -> None:
    """Say what an error or an interrupt has left, and how to go on."""
    from quantkit.pipelines.resume import unfinished

    if left := unfinished(out):
        print(
            f"\n{left[0]} of {left[1]} tensors are done and kept in {out}.partial-job; the same command goes on from "
            "there, with --fresh it starts anew",
            file=sys.stderr,
        )


def _thread_limit(option: int | None, positional: int | None) -> int | None:
    """The threads of --threads or THREADS; zero and less of the latter mean all CPUs, as in llama-quantize."""
    if option is not None and positional is not None and option != positional:
        raise typer.BadParameter(f"THREADS is {positional} and --threads {option}; drop one of them")
    return option or checked_threads(positional if positional and positional > 0 else None)


def _report(plan: Plan, written: Written, seconds: float, json: bool) -> None:
    if json:
        counts = {name: getattr(written, name) for name in ("paths", "size", "resumed", "reused")}
        print_json(plan.to_json() | counts | {"seconds": seconds})
        return
    for path in written.paths:
        print(f"wrote {path}")
    speed = plan.bytes_before / max(seconds, 1e-9) / 2**20
    print(f"{gib(written.size)} in {seconds:.1f} s, {speed:.0f} MiB/s of input")
