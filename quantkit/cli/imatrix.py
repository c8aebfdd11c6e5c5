"""`quantkit imatrix`: collect an importance matrix, show one, merge several."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from quantkit.cli._evaluation import (
    Batch,
    ChunkLimit,
    Context,
    Numerics,
    Running,
    TextFile,
    conditions,
    conditions_line,
    required_text,
)
from quantkit.cli._runtime import Launch, runs_a_model
from quantkit.cli._shared import Json, Threads, print_json, table

Output = Annotated[Path, typer.Option("--output", "-o", help="The importance matrix, legacy .dat.")]


@runs_a_model
def imatrix(
    model: Annotated[Path, typer.Argument(help="GGUF file, or any shard of one.")],
    file: TextFile = None,
    output: Output = Path("imatrix.dat"),
    ctx_size: Context = 512,
    chunks: ChunkLimit = None,
    from_chunk: Annotated[int, typer.Option("--from-chunk", "--chunk", help="Skip so many chunks.", min=0)] = 0,
    process_output: Annotated[bool, typer.Option("--process-output", help="Also the output matrix.")] = False,
    no_ppl: Annotated[bool, typer.Option("--no-ppl", help="Do not compute the perplexity on the way.")] = False,
    in_file: Annotated[
        list[Path] | None, typer.Option("--in-file", help="Importance matrix to begin with; may be repeated.")
    ] = None,
    output_frequency: Annotated[
        int, typer.Option("--output-frequency", "-ofreq", help="Save after so many chunks each.", min=1)
    ] = 10,
    batch_size: Batch = 2048,
    numerics: Numerics = "exact",
    threads: Threads = None,
    launch: Launch = None,  # type: ignore[assignment]  # the decorator gives it
    json: Json = False,
) -> None:
    """Collect an importance matrix: what enters each column of each weight, in the mean square, over a text.

    `quantkit imatrix show FILE` prints what one holds, `quantkit imatrix merge FILE… -o OUT` makes one of several.
    """
    from quantkit.evaluate import imatrix as collecting
    from quantkit.evaluate.text import chunked
    from quantkit.files import imatrix as files

    before = [files.read(path) for path in in_file or []]
    text = required_text(file, "imatrix")
    loaded = launch.open(model, numerics=numerics, threads=threads)
    cut = chunked(loaded.tokenizer, text, ctx_size, chunks, from_chunk)
    print(f"importance matrix over {len(cut)} chunks of {ctx_size} tokens, batch {batch_size}", file=sys.stderr)
    running = Running(len(cut), ctx_size, batch_size)

    def show(index: int, so_far: Any, collector: collecting.Collector) -> None:
        if so_far is not None and not json:
            running.value(index, so_far.value)
        else:
            running.tick(index)
        if index % output_frequency == 0 and index < len(cut):
            files.write(output, files.merge([*before, collector.result(str(text))]))

    found, ppl = collecting.collect(
        loaded, cut, process_output=process_output, with_perplexity=not no_ppl, n_batch=batch_size, on_chunk=show
    )
    files.write(output, files.merge([*before, found]))
    said = conditions(loaded, ctx_size, len(cut), str(text))
    if json:
        result = {"ppl": ppl.value, "ppl_error": ppl.error} if ppl else {}
        print_json({"model": model, "output": output, "entries": len(found), **result, "conditions": said})
        return
    if ppl:
        print(f"\nFinal estimate: PPL = {ppl}")
    print(f"{output}: {len(found)} entries, {running.seconds:.1f} s")
    print(conditions_line(said), file=sys.stderr)


def show(file: Annotated[Path, typer.Argument(help="Importance matrix, legacy .dat.")], json: Json = False) -> None:
    """Print what an importance matrix holds: per weight its columns, calls, and how unequal its columns are."""
    import numpy as np

    from quantkit.files.imatrix import read

    found = read(file)
    rows = []
    for name, entry in found.entries.items():
        values = np.sort(entry.values.reshape(-1).astype(np.float64))
        top = values[-max(1, values.size // 100) :].sum() / (values.sum() or 1.0)
        rows.append((name, values.size, entry.calls, float(values.mean()), float(values[-1]), float(top)))
    keys = ("name", "values", "calls", "mean", "max", "share_of_top_1_percent")
    if json:
        entries = [dict(zip(keys, row)) for row in rows]
        print_json({"file": file, "chunks": found.chunks, "dataset": found.dataset, "entries": entries})
        return
    cells = [(*row[:3], f"{row[3]:.4g}", f"{row[4]:.4g}", f"{100 * row[5]:.1f} %") for row in rows]
    print(table(("weight", "values", "calls", "mean", "max", "top 1 % hold"), cells))
    print(f"{len(rows)} entries, {found.chunks} chunks, dataset {found.dataset or 'not named'}")


def merge(
    files: Annotated[list[Path], typer.Argument(help="Importance matrices of the same model, legacy .dat.")],
    output: Output = Path("imatrix.dat"),
) -> None:
    """Merge importance matrices of one model: the mean, each entry weighed by its calls."""
    from quantkit.files import imatrix as formats

    merged = formats.merge(formats.read(path) for path in files)
    formats.write(output, merged)
    print(f"{output}: {len(merged)} entries, {merged.chunks} chunks, of {len(files)} files")


SUBCOMMANDS = {"show": show, "merge": merge}
