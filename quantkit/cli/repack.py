"""`quantkit repack`: interleave rows for the CPU."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from quantkit.cli._shared import (
    DryRun,
    Json,
    KeepSplit,
    Out,
    RepackPattern,
    Source,
    SplitMaxSize,
    SplitMaxTensors,
    Threads,
    comma_separated,
    gib,
    mib,
    print_json,
    split_limit,
    table,
)
from quantkit.errors import printable

if TYPE_CHECKING:
    from quantkit.formats.gguf import GGUF
    from quantkit.pipelines.repack_file import Repacking
    from quantkit.placement.rules import Placement


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
        str,
        typer.Option(
            metavar="NAME",
            help="With --for: the program of that run, ik_llama.cpp or quantkit. Its GPUs must take the types there.",
        ),
    ] = "ik_llama.cpp",
    split_max_size: SplitMaxSize = None,
    split_max_tensors: SplitMaxTensors = None,
    keep_split: KeepSplit = False,
    dry_run: DryRun = False,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Interleave the rows of a file's tensors, because CPU kernels read them faster.

    Values do not change, and `quantkit unpack` restores the file. These stay unchanged: embeddings, types without an
    interleaved form, and matrices whose number of rows is not a multiple of the number that is interleaved. BF16 is
    interleaved only if a pattern names it, because bf16_r16 needs a CPU with AVX512_BF16. F16 is not interleaved,
    because that would lose bits. Interleaved tensors are for the CPU: pass the flags of the later run with --for, or
    select tensors with --repack-pattern. If nothing would change, no file is written.
    """
    from quantkit.formats import gguf
    from quantkit.pipelines.repack_file import plan_repack

    split = Split(split_limit(split_max_size, split_max_tensors, keep_split), split_max_tensors, keep_split)
    file = gguf.require_model(gguf.open(source))
    placement = _placement(file, placed, runtime) if placed is not None else None
    job = plan_repack(file, comma_separated(repack_pattern), placement)
    run_repacking("repack", job, out, split, dry_run, threads, json)


def _placement(file: GGUF, text: str, runtime: str) -> Placement:
    """The placement under these flags; UnsupportedError for an interleaved tensor that a GPU cannot use."""
    from quantkit.placement.rules import parse_flags, plan

    found = plan(file.tensors, replace(parse_flags(text), runtime=runtime), file.metadata, file.path)
    for rule in found.idle:
        print(f"warning: {printable(rule.text)} decides no tensor", file=sys.stderr)
    return found


class Split(NamedTuple):
    """Sharding of the output: maximum bytes or tensors per shard, or the shards of the input."""

    max_bytes: int | None
    max_tensors: int | None
    keep: bool


def run_repacking(
    command: str, job: Repacking, out: Path, split: Split, dry_run: bool, threads: int | None, json: bool
) -> None:
    """Print the changes that `command`, repack or unpack, makes, and write the file unless nothing changes."""
    from quantkit.pipelines.repack_file import write

    paths: list[Path] = []
    started = time.perf_counter()
    if not json:
        print(_summary(job), end="\n\n")
    if job.changed and not dry_run:
        paths = write(
            job,
            out,
            split_max_bytes=split.max_bytes,
            split_max_tensors=split.max_tensors,
            keep_split=split.keep,
            threads=threads,
            progress=not json,
        )
    seconds = time.perf_counter() - started
    if json:
        print_json(f"quantkit.{command}/1", _record(job, paths, seconds))
    elif not job.changed:
        print(f"nothing to do: no tensor of {job.source.path} would change; no file is written")
    elif paths:
        for path in paths:
            print(f"wrote {path}")
        speed = job.nbytes / max(seconds, 1e-9) / 2**20
        print(f"{len(job.changed)} tensors changed; {gib(job.nbytes)} in {seconds:.1f} s, {speed:.0f} MiB/s")


def _summary(job: Repacking) -> str:
    """The changes as a table, with the reason for tensors that are copied."""
    classes: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for change in job.changes:
        classes[change.tensor.type.name, change.type.name, change.reason].append(change.tensor.nbytes)
    rows = [(old, new, reason, len(sizes), mib(sum(sizes))) for (old, new, reason), sizes in classes.items()]
    text = table(("from", "to", "why not", "tensors", "size"), rows, left=3)
    before, after = _file_types(job)
    return text if before == after else f"{text}\n\ngeneral.file_type {before} -> {after}"


def _file_types(job: Repacking) -> list[object]:
    return [metadata.get("general.file_type") for metadata in (job.source.metadata, job.metadata)]


def _record(job: Repacking, paths: list[Path], seconds: float) -> dict[str, object]:
    return {
        "source": job.source.path,
        "paths": paths,
        "bytes": job.nbytes,
        "seconds": seconds,
        "file_type": _file_types(job),
        "changed": len(job.changed),
        "tensors": [
            {"name": c.tensor.name, "from": c.tensor.type.name, "to": c.type.name, "reason": c.reason or None}
            for c in job.changes
        ],
    }
