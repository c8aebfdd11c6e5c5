"""`quantkit merge`: join shards into one GGUF file."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli.common.options import Json, Out, Threads
from quantkit.cli.common.output import gib, print_json
from quantkit.cli.common.progress_options import shows_progress
from quantkit.errors import QuantkitError


@shows_progress
def merge(
    first: Annotated[Path, typer.Argument(metavar="SHARD", help="Any shard of a split file.", show_default=False)],
    out: Out,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Join the shards of a split file into one GGUF file.

    All shards must exist and belong to the same file; otherwise an error names the shard and nothing is written. An
    existing file is not overwritten, as in gguf-split.
    """
    from quantkit.formats import gguf
    from quantkit.formats.gguf import shards

    if os.path.lexists(out):
        raise QuantkitError(f"{out} already exists, and merge does not overwrite files; remove it or give another name")
    started = time.perf_counter()
    file = gguf.open(first)
    path = shards.merge(file, out, threads=threads, progress=True)
    size = path.stat().st_size
    if json:
        print_json(
            "quantkit.merge/1",
            {
                "shards": [{"path": shard} for shard in file.paths],
                "path": path,
                "tensors": len(file.tensors),
                "bytes": size,
            },
        )
        return
    print(f"wrote {path}")
    seconds = time.perf_counter() - started
    print(f"{len(file.paths)} shards, {len(file.tensors)} tensors, {gib(size)} in {seconds:.1f} s")
