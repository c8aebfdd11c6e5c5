"""`quantkit split`: a GGUF file as shards."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quantkit.cli._shared import (
    Json,
    Source,
    SplitMaxSize,
    SplitMaxTensors,
    Threads,
    gib,
    parse_size,
    print_json,
    table,
)

if TYPE_CHECKING:
    from quantkit.formats.gguf import GGUF

DEFAULT_TENSORS = 128  # gguf-split's


def split(
    source: Source,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="What the shards' names begin with.", show_default=False)],
    split_max_size: SplitMaxSize = None,
    split_max_tensors: SplitMaxTensors = None,
    no_tensor_first_split: Annotated[
        bool, typer.Option("--no-tensor-first-split", help="Let the first shard hold metadata alone.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the shards and write nothing.")] = False,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Cut a GGUF file into shards OUT-00001-of-0000N.gguf.

    A shard is filled in the file's order until the next tensor would pass the limit, as gguf-split does; without a
    limit after 128 tensors. Sizes count tensors, not headers, and M and G are decimal. A tensor above the limit gets
    a shard of its own. A set of shards is cut anew. `quantkit merge` gives the file back.
    """
    from quantkit.formats import gguf
    from quantkit.formats.gguf import shards
    from quantkit.formats.gguf.writer import shard_names

    file = gguf.open(source)
    if split_max_size is None and split_max_tensors is None:
        split_max_tensors = DEFAULT_TENSORS
    size = None if split_max_size is None else parse_size(split_max_size)
    counts = shards.split_counts(file, size, split_max_tensors, no_tensor_first_split)
    started = time.perf_counter()
    if dry_run:
        paths = shard_names(out, len(counts))
    else:
        paths = shards.split(file, out, counts, threads=threads, progress=not json)
    rows = _rows(file, paths, counts)
    if json:
        print_json({"source": source, "written": not dry_run, "shards": rows})
        return
    print(table(("shard", "tensors", "size"), [(r["path"], r["tensors"], gib(r["bytes"])) for r in rows]))
    if not dry_run:
        print(f"\nwrote {len(paths)} shards in {time.perf_counter() - started:.1f} s")


def _rows(file: GGUF, paths: list[Path], counts: list[int]) -> list[dict[str, Any]]:
    """One dictionary a shard, with the bytes of its tensors."""
    sizes = iter([tensor.nbytes for tensor in file.tensors.values()])
    return [
        {"path": path, "tensors": count, "bytes": sum(next(sizes) for _ in range(count))}
        for path, count in zip(paths, counts)
    ]
