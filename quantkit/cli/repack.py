"""`quantkit repack`: interleave rows for the CPU."""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from quantkit.cli.common.hub import from_hub
from quantkit.cli.common.options import (
    DryRun,
    Json,
    KeepSplit,
    Out,
    RepackPattern,
    Source,
    SplitMaxSize,
    SplitMaxTensors,
    Threads,
    split_limit,
)
from quantkit.cli.common.output import gib, mib, print_json, print_table
from quantkit.cli.common.positional import refuse_type
from quantkit.cli.common.progress_options import shows_progress
from quantkit.errors import printable

if TYPE_CHECKING:
    from quantkit.pipelines.api import RepackResult
    from quantkit.pipelines.options import RepackOptions
    from quantkit.pipelines.repack_file import Repacking


@shows_progress
@from_hub("source")
def repack(
    source: Source,
    out: Out,
    repack_pattern: RepackPattern = None,
    placed: Annotated[
        str | None,
        typer.Option(
            "--for",
            metavar="PLACEMENT",
            help="Only tensors on the CPU under these flags, for example '-ngl 99 -ot exps=CPU'.",
        ),
    ] = None,
    runtime: Annotated[
        Literal["ik_llama.cpp", "quantkit"],
        typer.Option(help="With --for: the program of that run. Its GPUs must take the types there."),
    ] = "ik_llama.cpp",
    split_max_size: SplitMaxSize = None,
    split_max_tensors: SplitMaxTensors = None,
    keep_split: KeepSplit = False,
    dry_run: DryRun = False,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Interleave the rows of a file's tensors for CPU kernels.

    Values do not change, and `quantkit unpack` restores the file. These stay unchanged: embeddings, types without an
    interleaved form, and matrices whose number of rows is not a multiple of the number that is interleaved. BF16 is
    interleaved only if a pattern names it, because bf16_r16 needs a CPU with AVX512_BF16. F16 is not interleaved,
    because that would lose bits. Interleaved tensors are for the CPU: pass the flags of the later run with --for, or
    select tensors with --repack-pattern. If nothing would change, no file is written.
    """
    from quantkit.pipelines.options import RepackOptions

    size = split_limit(split_max_size, split_max_tensors, keep_split)
    options = RepackOptions(
        repack_pattern or (), placed, runtime, size, split_max_tensors, keep_split, dry_run, threads
    )
    run_repacking(source, out, options, json, unpack=False)


def run_repacking(source: Path, out: Path, options: RepackOptions, json: bool, *, unpack: bool) -> None:
    """Repack or unpack a file; print the changes first, then what was written."""
    from quantkit.pipelines import api

    refuse_type(str(out), "OUT", "the types follow from those of IN")
    job = api.prepare_repack(source, options, unpack=unpack)
    for rule in job.placement.idle if job.placement else ():
        print(f"warning: {printable(rule.text)} decides no tensor", file=sys.stderr)
    if not json:
        _print_changes(job)
    done = api.write_repacking(job, out, options, progress=True)
    if json:
        print_json(f"quantkit.{'unpack' if unpack else 'repack'}/1", _record(done))
    elif not job.changed:
        print(f"nothing to do: no tensor of {job.source.path} would change; no file is written")
    elif done.paths:
        for path in done.paths:
            print(f"wrote {path}")
        speed = done.bytes / max(done.seconds, 1e-9) / 2**20
        print(f"{len(job.changed)} tensors changed; {gib(done.bytes)} in {done.seconds:.1f} s, {speed:.0f} MiB/s")


def _print_changes(job: Repacking) -> None:
    """Print the changes as a table, with the reason for tensors that are copied."""
    classes: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for change in job.changes:
        classes[change.tensor.type.name, change.type.name, change.reason].append(change.tensor.nbytes)
    rows = [(old, new, reason, len(sizes), mib(sum(sizes))) for (old, new, reason), sizes in classes.items()]
    print_table(("from", "to", "why not", "tensors", "size"), rows, left=3, end="\n\n")
    before, after = _file_types(job)
    if before != after:
        print(f"general.file_type {before} -> {after}", end="\n\n")


def _file_types(job: Repacking) -> list[object]:
    return [metadata.get("general.file_type") for metadata in (job.source.metadata, job.metadata)]


def _record(done: RepackResult) -> dict[str, object]:
    job = done.job
    return {
        "source": job.source.path,
        "paths": done.paths,
        "bytes": done.bytes,
        "seconds": done.seconds,
        "file_type": _file_types(job),
        "changed": len(job.changed),
        "tensors": [
            {"name": c.tensor.name, "from": c.tensor.type.name, "to": c.type.name, "reason": c.reason or None}
            for c in job.changes
        ],
    }
