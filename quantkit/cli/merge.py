"""`quantkit merge`: join shards, or parts of a model, into one GGUF file."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli.common.options import DryRun, Json, Threads
from quantkit.cli.common.output import gib, print_json
from quantkit.cli.common.plan_options import Dialect
from quantkit.cli.common.progress_options import shows_progress
from quantkit.errors import QuantkitError


@shows_progress
def merge(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="SHARD|PART… OUT",
            help="Any shard of a split file, or all parts that `quantize --only` wrote; the last one is the output.",
            show_default=False,
        ),
    ],
    dialect: Dialect = None,
    dry_run: DryRun = False,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Join the shards of a split file, or parts of a model, into one GGUF file.

    All shards must exist and belong to the same file; otherwise an error names the shard and nothing is written. The
    same holds for parts, which may be given in any order. An existing file is not overwritten, as in gguf-split.
    """
    from quantkit.formats import gguf
    from quantkit.formats.gguf import dialects, shards
    from quantkit.pipelines import parts
    from quantkit.pipelines.parts import TENSORS as PART

    *inputs, out = files
    if not inputs:
        raise typer.BadParameter(f"OUT is missing: {out} is the only file; write merge SHARD OUT or merge PART… OUT")
    if os.path.lexists(out):
        raise QuantkitError(f"{out} already exists, and merge does not overwrite files; remove it or give another name")
    started = time.perf_counter()
    with dialects.assumed(dialect):
        if len(inputs) == 1 and PART not in (file := gguf.open(inputs[0])).metadata:
            if dialect is not None:
                dialects.state(file.metadata, file.tensors, dialect, inputs[0])
            path, joined = shards.merge(file, out, dry_run=dry_run, threads=threads, progress=True), file.paths
            tensors, kind = len(file.tensors), "shards"
        else:
            path, tensors = parts.join(
                inputs, out, dialect=dialect, dry_run=dry_run, threads=threads, progress=True
            )  # fmt: skip
            joined, kind = inputs, "parts"
    size = sum(map(_tensor_bytes, inputs)) if dry_run else path.stat().st_size
    if json:
        print_json(
            "quantkit.merge/1",
            {
                "shards": [{"path": shard} for shard in joined],
                "path": path,
                "written": not dry_run,
                "tensors": tensors,
                "bytes": size,
            },
        )
        return
    if dry_run:
        print(f"{len(joined)} {kind}, {tensors} tensors, {gib(size)} would become {path}; nothing is written")
        return
    print(f"wrote {path}")
    seconds = time.perf_counter() - started
    print(f"{len(joined)} {kind}, {tensors} tensors, {gib(size)} in {seconds:.1f} s")


def _tensor_bytes(path: Path) -> int:
    """Bytes of the tensors of a file, or of the whole set if it is a shard."""
    from quantkit.formats import gguf

    return sum(tensor.nbytes for tensor in gguf.open(path).tensors.values())
