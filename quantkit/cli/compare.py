"""`quantkit compare`: compare models with a reference on the same texts; print a table, JSON, plot or HTML report."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quantkit.cli.common.command import in_sections, takes_model
from quantkit.cli.common.evaluation import (
    Batch,
    ChunkBar,
    ChunkLimit,
    Context,
    Numerics,
    ThreadsBatch,
    markdown,
    on_message,
)
from quantkit.cli.common.hub import from_hub
from quantkit.cli.common.launch import Launch, runs_a_model
from quantkit.cli.common.options import Json, Threads
from quantkit.cli.common.output import json_text, print_json, print_table, with_schema
from quantkit.cli.common.progress_options import shows_progress
from quantkit.errors import QuantkitError

if TYPE_CHECKING:
    from quantkit.evaluate.compare import Comparison

_SCHEMA = "quantkit.compare/1"


@shows_progress
@in_sections(
    Evaluation=["file", "ctx_size", "chunks", "batch_size", "noise_floor", "layers", "speed", "numerics"],
    Reports=["plot", "html", "output", "as_markdown", "json"],
)
@takes_model("models")
@from_hub("reference", "models")
@runs_a_model
def compare(
    reference: Annotated[
        Path,
        typer.Argument(
            metavar="REFERENCE",
            help="The model to compare with; it and the others may be hf://ORG/NAME/FILE.gguf.",
            show_default=False,
        ),
    ],
    models: Annotated[
        list[Path], typer.Argument(metavar="MODEL…", help="GGUF files with the same vocabulary.", show_default=False)
    ],
    file: Annotated[
        list[Path] | None,
        typer.Option(
            "--file", "-f", help="Text file, UTF-8; - is stdin. Repeatable: each text is a domain.", show_default=False
        ),
    ] = None,
    ctx_size: Context = 512,
    chunks: ChunkLimit = None,
    batch_size: Batch = 2048,
    noise_floor: Annotated[
        str,
        typer.Option(
            help="Also compare the reference with itself under other numerics (fast, exact) or a cache type such as "
            "q8_0; auto: the other numerics; off: do not."
        ),
    ] = "auto",
    layers: Annotated[
        bool, typer.Option("--layers", help="Also rank tensors by the error that each adds, on the first chunk.")
    ] = False,
    speed: Annotated[
        bool, typer.Option("--speed", help="Also time a prompt of 512 tokens and generation, with numerics fast.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Plot KLD over size to a PNG, SVG or PDF file.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a self-contained HTML report with plots.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Also write the results as JSON.")
    ] = None,
    as_markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the table as Markdown for a model card.")
    ] = False,
    numerics: Numerics = "exact",
    threads: Threads = None,
    threads_batch: ThreadsBatch = None,
    launch: Launch = None,  # type: ignore[assignment]  # the decorator gives it
    json: Json = False,
) -> None:
    """Compare models with a reference: size, PPL, KL divergence.

    All models read the same tokens. ± is one standard error of the mean over chunks. Differences are paired by token,
    so their errors are much smaller than those of the PPLs. Models whose difference is not significant share a rank.
    """
    from quantkit.evaluate import compare as evaluation
    from quantkit.evaluate.divergence import Divergence
    from quantkit.formats import gguf
    from quantkit.formats.atomic import check_outputs

    if not file:
        raise QuantkitError("compare needs a text: pass one with -f FILE, or several")
    check_outputs([plot, html, output], [*file, *(p for m in (reference, *models) for p in gguf.open(m).paths)])
    if plot is not None:
        from quantkit.evaluate.report.plots import require_plot_file

        require_plot_file(plot)
    options = evaluation.CompareOptions(
        ctx_size=ctx_size, chunks=chunks, batch_size=batch_size, noise_floor=noise_floor, layers=layers, speed=speed,
        numerics=numerics, threads=threads_batch or threads,
    )  # fmt: skip

    def show(state: evaluation.CompareProgress) -> None:
        so_far = state.chunk.so_far
        kld = so_far.mean_kld.value if isinstance(so_far, Divergence) else None
        bar.show(state.chunk, kld, run=state.run, runs=state.runs, label=state.model)

    with ChunkBar("compare", "KLD", 5, ticks=not speed) as bar:
        found = evaluation.compare(
            reference, models, file, options, progress=show, on_message=on_message, open_model=launch.open
        )
    record = found.record()
    _write(output, html, found, record)
    if plot is not None:
        from quantkit.evaluate.report.plots import plot_comparison

        plot_comparison(plot, found)
        on_message(f"plot: {plot}")
    if json:
        print_json(_SCHEMA, record)
    else:
        _print(found, as_markdown, speed)


def _print(found: Comparison, as_markdown: bool, speed: bool) -> None:
    from quantkit.evaluate.conditions import conditions_line
    from quantkit.evaluate.report.tables import domain_rows, model_card, table_header, table_rows, verdicts

    def show(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        if as_markdown:
            print(markdown(header, rows))
        else:
            print_table(header, rows)

    show(table_header(found), table_rows(found))
    header, rows = domain_rows(found)
    if rows:
        print()
        show(header, rows)
    for name, tensors in found.layers.items():
        worst = sorted(tensors, key=lambda a: -a.error)[:20]
        rows = [[a.name, a.type, f"{a.error:.3g}", f"{100 * a.share:.1f}"] for a in worst]
        print(f"\n{name}: error that each tensor adds")
        show(["tensor", "type", "error", "share %"], rows)
    lines = verdicts(found)
    if lines:
        print("\n" + "\n".join(f"- {line}" for line in lines))
    line = conditions_line(found.conditions) + ("; PP and TG: numerics fast" if speed else "")
    if as_markdown:
        print("\n" + model_card(found, line))
    else:
        print(f"\n{found.positions} tokens; {line}")


def _write(output: Path | None, html: Path | None, found: Comparison, record: dict[str, Any]) -> None:
    """Write the files of --output and --html."""
    from quantkit.evaluate.report.html_page import page
    from quantkit.evaluate.report.plots import MissingPlots, require_matplotlib
    from quantkit.formats.atomic import writing

    if output is not None:
        with writing(output) as stream:
            text = json_text(with_schema(_SCHEMA, record), indent=1)
            stream.write(text.encode(errors="backslashreplace"))
    if html is not None:
        with writing(html) as stream:
            stream.write(page(found).encode(errors="backslashreplace"))
        on_message(f"report: {html}")
        try:
            require_matplotlib()
        except MissingPlots as error:
            print(f"warning: {html}: {error}", file=sys.stderr)
