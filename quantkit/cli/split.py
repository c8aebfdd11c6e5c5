"""`quantkit split`: split a GGUF file into shards."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quantkit.cli.common.hub import from_hub
from quantkit.cli.common.options import Json, Source, SplitMaxSize, SplitMaxTensors, Threads, parse_size
from quantkit.cli.common.output import gib, print_json, print_table
from quantkit.cli.common.plan_options import Dialect
from quantkit.cli.common.progress_options import shows_progress

if TYPE_CHECKING:
    from quantkit.formats.gguf import GGUF

DEFAULT_TENSORS = 128  # as in gguf-split


@shows_progress
@from_hub("source")
def split(
    source: Source,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Prefix of the shards' names.", show_default=False)],
    split_max_size: SplitMaxSize = None,
    split_max_tensors: SplitMaxTensors = None,
    no_tensor_first_split: Annotated[
        bool, typer.Option("--no-tensor-first-split", help="Write only metadata to the first shard.")
    ] = False,
    dialect: Dialect = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the shards and write nothing.")] = False,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Split a GGUF file into shards OUT-00001-of-0000N.gguf.

    Tensors go to a shard in file order until the next one would exceed the limit, as in gguf-split. The default limit
    is 128 tensors. Sizes count tensors, not headers; M and G are decimal. A tensor above the limit gets its own shard.
    IN may be split already. `quantkit merge` restores the file.
    """
    from quantkit.formats import gguf
    from quantkit.formats.gguf import dialects, shards
    from quantkit.formats.gguf.writer import shard_names

    with dialects.assumed(dialect):
        file = gguf.open(source)
    if dialect is not None:
        dialects.state(file.metadata, file.tensors, dialect, source)
    if split_max_size is None and split_max_tensors is None:
        split_max_tensors = DEFAULT_TENSORS
    size = None if split_max_size is None else parse_size(split_max_size, "--split-max-size")
    counts = shards.split_counts(file, size, split_max_tensors, no_tensor_first_split)
    started = time.perf_counter()
    if dry_run:
        paths = shard_names(out, len(counts))
    else:
        paths = shards.split(file, out, counts, threads=threads, progress=True)
    rows = _rows(file, paths, counts)
    if json:
        print_json("quantkit.split/1", {"source": source, "written": not dry_run, "shards": rows})
        return
    print_table(("shard", "tensors", "size"), [(r["path"], r["tensors"], gib(r["bytes"])) for r in rows])
    if not dry_run:
        print(f"\nwrote {len(paths)} shards in {time.perf_counter() - started:.1f} s")


def _rows(file: GGUF, paths: list[Path], counts: list[int]) -> list[dict[str, Any]]:
    """One dictionary per shard, with the bytes of its tensors."""
    sizes = iter([tensor.nbytes for tensor in file.tensors.values()])
    return [
        {"path": path, "tensors": count, "bytes": sum(next(sizes) for _ in range(count))}
        for path, count in zip(paths, counts)
    ]
