"""`quantkit fuse-gate-up`: gate and up of experts in one tensor, or apart."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli.common.evaluation import on_message
from quantkit.cli.common.hub import from_hub
from quantkit.cli.common.options import (
    DryRun,
    Json,
    KeepSplit,
    Out,
    Source,
    SplitMaxSize,
    SplitMaxTensors,
    Threads,
    split_limit,
)
from quantkit.cli.common.output import gib, print_json
from quantkit.cli.common.progress_options import shows_progress


@shows_progress
@from_hub("source")
def fuse_gate_up(
    source: Source,
    out: Out,
    undo: Annotated[
        bool, typer.Option("--undo", help="Split ffn_gate_up_exps into ffn_gate_exps and ffn_up_exps.")
    ] = False,
    split_max_size: SplitMaxSize = None,
    split_max_tensors: SplitMaxTensors = None,
    keep_split: KeepSplit = False,
    dry_run: DryRun = False,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Fuse gate and up of experts into one tensor, ffn_gate_up_exps.

    It has, for each expert, the rows of gate, then those of up; codes are copied. llama.cpp's converter writes the same
    with --fuse-gate-up-exps. Both forms give the same logits; ik_llama.cpp and llama.cpp read both. Layers whose gate
    and up have different types stay as they are.
    """
    from quantkit.formats import gguf
    from quantkit.pipelines.fuse_experts import plan_fuse, plan_separate

    limit = split_limit(split_max_size, split_max_tensors, keep_split)
    started = time.perf_counter()
    job = (plan_separate if undo else plan_fuse)(gguf.require_model(gguf.open(source)))
    paths: list[Path] = []
    if not dry_run:
        paths = job.write(
            out,
            split_max_bytes=limit,
            split_max_tensors=split_max_tensors,
            keep_split=keep_split,
            threads=threads,
            progress=True,
        )
    seconds = time.perf_counter() - started
    made = [tensor.spec.name for tensor in job.changed]
    if json:
        record = {"source": source, "paths": paths, "bytes": job.nbytes, "seconds": seconds, "made": made}
        print_json("quantkit.fuse-gate-up/1", record | {"left_as_is": job.notes})
        return
    for note in job.notes:
        on_message(f"left as it is: {note}")
    print(f"{len(made)} tensors of experts {'written apart' if undo else 'fused'}, {gib(job.nbytes)} in all")
    for path in paths:
        print(f"wrote {path} in {seconds:.1f} s")
