"""`quantkit convert-mla`: change the layout of MLA (latent attention) tensors."""

from __future__ import annotations

import time
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
    Source,
    SplitMaxSize,
    SplitMaxTensors,
    Threads,
    split_limit,
)
from quantkit.cli.common.output import gib, mib, print_json, print_table
from quantkit.cli.common.progress_options import shows_progress

if TYPE_CHECKING:
    from quantkit.pipelines.convert_mla import Relayout


@shows_progress
@from_hub("source")
def convert_mla(
    source: Source,
    out: Out,
    layout: Annotated[
        Literal["kv_b", "k_b+v_b", "both"],
        typer.Option(help="k_b+v_b is llama.cpp's, both ik_llama.cpp's.", show_default=False),
    ],
    type_: Annotated[
        str | None,
        typer.Option("--type", metavar="TYPE", help="Type of tensors that must be quantized again; default: q8_0."),
    ] = None,
    split_max_size: SplitMaxSize = None,
    split_max_tensors: SplitMaxTensors = None,
    keep_split: KeepSplit = False,
    dry_run: DryRun = False,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Change the layout of a DeepSeek or Kimi file's MLA tensors.

    These are attn_kv_b, attn_k_b and attn_v_b. Tensors that both layouts have are copied bit for bit. attn_v_b consists
    of rows of attn_kv_b, unchanged. attn_k_b consists of the other rows, transposed: f32, f16 and bf16 lose nothing;
    other types are quantized again to --type, and the error is measured and printed, relative to the root mean square
    of the values. A file with all three tensors loses nothing in any layout. If nothing would change, no file is
    written.
    """
    from quantkit.formats import gguf
    from quantkit.pipelines.convert_mla import plan_relayout, write_relayout

    limit = split_limit(split_max_size, split_max_tensors, keep_split)
    job = plan_relayout(gguf.require_model(gguf.open(source)), layout, type_)
    paths: list[Path] = []
    started = time.perf_counter()
    if job.changed and not dry_run:
        paths = write_relayout(
            job,
            out,
            split_max_bytes=limit,
            split_max_tensors=split_max_tensors,
            keep_split=keep_split,
            threads=threads,
            progress=True,
        )
    seconds = time.perf_counter() - started
    if json:
        print_json("quantkit.convert-mla/1", _record(job, paths, seconds))
        return
    if not job.changed:
        print(f"nothing to do: {source} already has the layout {layout}; no file is written")
        return
    _print_changes(job)
    if job.errors:
        worst = max(job.errors, key=lambda name: job.errors[name])
        print(f"largest error of quantizing again: {job.errors[worst]:.3g} of the root mean square, {worst}")
    for path in paths:
        print(f"wrote {path}")
    if paths:
        print(f"{gib(job.nbytes)} in {seconds:.1f} s")


def _print_changes(job: Relayout) -> None:
    """Print the changes as a table, one row per class of tensors."""
    classes: dict[tuple[str, str, str, str], list[int]] = defaultdict(list)
    for change in job.new_tensors:
        kind = change.spec.name.split(".")[-2]
        before = ", ".join(f"{part}_b {tensor.type.name}" for part, tensor in change.sources.items())
        classes[kind, before, change.spec.type.name, change.how].append(change.spec.nbytes)
    for name in job.dropped:
        tensor = job.source.tensors[name]
        classes[name.split(".")[-2], tensor.type.name, "", "left out"].append(tensor.nbytes)
    rows = [(*key, len(sizes), mib(sum(sizes))) for key, sizes in classes.items()]
    print_table(("tensor", "from", "to", "how", "tensors", "size"), rows, left=4)


def _record(job: Relayout, paths: list[Path], seconds: float) -> dict[str, object]:
    return {
        "source": job.source.path,
        "layout": job.layout,
        "paths": paths,
        "bytes": job.nbytes,
        "seconds": seconds,
        "left_out": job.dropped,
        "made": [
            {
                "name": change.spec.name,
                "from": {f"attn_{part}_b": tensor.type.name for part, tensor in change.sources.items()},
                "to": change.spec.type.name,
                "how": change.how,
                "relative_error": job.errors.get(change.spec.name),
            }
            for change in job.new_tensors
        ],
        "largest_relative_error": max(job.errors.values(), default=0.0),
    }
