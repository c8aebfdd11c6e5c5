"""`quantkit compare`: a reference and models over one text, as a table, JSON and a picture."""

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
    TextFile,
    conditions,
    conditions_line,
    markdown,
    required_text,
)
from quantkit.cli._runtime import Launch, runs_a_model
from quantkit.cli._shared import Json, Threads, print_json, table


@runs_a_model
def compare(
    reference: Annotated[Path, typer.Argument(help="The model that the others are measured against.")],
    models: Annotated[list[Path], typer.Argument(help="GGUF files with the same vocabulary.")],
    file: TextFile = None,
    ctx_size: Context = 512,
    chunks: ChunkLimit = None,
    batch_size: Batch = 2048,
    speed: Annotated[
        bool, typer.Option("--speed", help="Also time a prompt of 512 and generation, numerics fast.")
    ] = False,
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw KLD against size to this PNG, SVG or PDF.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Also write the results here, JSON.")] = None,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print the table for a model card.")] = False,
    numerics: Numerics = "exact",
    threads: Threads = None,
    launch: Launch = None,  # type: ignore[assignment]  # the decorator gives it
    json: Json = False,
) -> None:
    """Compare models with a reference: size, PPL, KL divergence, same top token, on the same tokens.

    ± is one standard error. All differences are paired by token, so they are far surer than the PPLs' own errors.
    """
    from json import dumps

    from quantkit.evaluate.compare import compare as measure
    from quantkit.evaluate.compare import table_header, table_rows
    from quantkit.files.atomic import writing

    text = required_text(file, "compare")
    opened: list[Any] = []

    def open_model(path: Path) -> Any:
        opened[:] = [launch.open(path, numerics=numerics, threads=threads)]
        return opened[0]

    found = measure(
        reference,
        models,
        text,
        open_model=open_model,
        open_fast=(lambda path: launch.open(path, numerics="fast", threads=threads)) if speed else None,
        n_ctx=ctx_size,
        limit=chunks,
        n_batch=batch_size,
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )
    said = conditions(opened[0], ctx_size, found.chunks, str(text))
    if plot is not None:
        _draw(plot, found, said)
    record = {"reference": str(reference), "models": [c.record() for c in found.candidates], "conditions": said}
    if output is not None:
        with writing(output) as stream:
            stream.write(dumps(record, indent=1).encode())
    if json:
        print_json(record)
        return
    header, rows = table_header(found), table_rows(found)
    print(markdown(header, rows) if as_markdown else table(header, rows))
    print(f"\n{found.positions} tokens; {conditions_line(said)}" + ("; PP and TG: numerics fast" if speed else ""))


def _draw(path: Path, found: Any, said: dict[str, Any]) -> None:
    from quantkit.evaluate.plots import plot

    name = found.candidates[0].path.stem
    plot(path, found.candidates, f"Divergence from {name}: {found.positions} tokens of {Path(said['text']).name}")
    print(f"picture: {path}", file=sys.stderr)
