"""`quantkit saliency`: measure how much each expert of a model adds, for `prune`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli.common.dialect import knows_dialect
from quantkit.cli.common.options import Json, Threads
from quantkit.cli.common.output import print_json, print_table
from quantkit.cli.common.progress_options import shows_progress
from quantkit.progress import ProgressBar


@shows_progress
@knows_dialect
def saliency(
    model: Annotated[Path, typer.Option("--model", "-m", metavar="GGUF", help="The model.", show_default=False)],
    file: Annotated[Path, typer.Option("--file", "-f", metavar="TEXT", help="Text, UTF-8.", show_default=False)],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Output file, JSON.")] = Path(
        "saliency.json"
    ),
    ctx_size: Annotated[int, typer.Option("--ctx-size", "-c", metavar="N", help="Tokens per chunk.", min=4)] = 512,
    chunks: Annotated[int | None, typer.Option(metavar="N", help="At most N chunks.", min=1)] = None,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Measure the saliency of experts (REAP): router weight times the norm of the expert's output.

    It is the mean over the tokens that the router sends to the expert. `quantkit prune` keeps the
    experts with the largest saliency.
    """
    from quantkit.evaluate.saliency import measure
    from quantkit.evaluate.text import chunked
    from quantkit.formats import gguf
    from quantkit.formats.atomic import check_outputs
    from quantkit.runtime.loading import load

    check_outputs([output], [*gguf.open(model).paths, file])
    opened = load(model, threads=threads, n_ctx=ctx_size)
    text = chunked(opened.tokenizer, file, ctx_size, chunks)
    with ProgressBar("saliency") as bar:
        found = measure(opened, text, lambda done: bar.show(done, len(text)))
    found.write(output)
    rows = []
    for layer in sorted(found.sums):
        scores, tokens = found.of_layer(layer), found.tokens[layer]
        rows.append((layer, len(scores), float(scores.min()), float(scores.max()), int((tokens == 0).sum())))
    if json:
        names = ("layer", "experts", "min", "max", "without_tokens")
        print_json("quantkit.saliency-run/1", {"path": output, "layers": [dict(zip(names, row)) for row in rows]})
        return
    shown = [(layer, count, f"{least:.4g}", f"{most:.4g}", unused) for layer, count, least, most, unused in rows]
    print_table(("layer", "experts", "least", "most", "without tokens"), shown)
    print(f"wrote {output}")
