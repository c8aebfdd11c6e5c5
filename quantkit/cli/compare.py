"""`quantkit compare`: compare models with a reference on the same texts; print a table, JSON, plot or HTML report."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quantkit.cli.common.cluster import Cluster, connected
from quantkit.cli.common.command import in_sections, takes_model
from quantkit.cli.common.evaluation import (
    Batch,
    ByCategory,
    ByPosition,
    Chat,
    ChunkBar,
    ChunkLimit,
    Context,
    Numerics,
    Score,
    Tasks,
    ThreadsBatch,
    markdown,
    on_message,
    scores_tasks,
)
from quantkit.cli.common.hub import from_hub
from quantkit.cli.common.launch import Launch, context_size, runs_a_model
from quantkit.cli.common.options import Json, Threads
from quantkit.cli.common.output import json_text, print_json, print_table, with_schema
from quantkit.cli.common.progress_options import shows_progress
from quantkit.errors import OptionError
from quantkit.progress import ProgressBar

if TYPE_CHECKING:
    from quantkit.evaluate.comparison import Comparison
    from quantkit.evaluate.tasks import Score as TaskScore

_SCHEMA = "quantkit.compare/1"
_TASKS_SCHEMA = "quantkit.compare-tasks/1"


@shows_progress
@in_sections(
    Evaluation=["file", "chat", "score", "by_category", "by_position", "ctx_size", "chunks", "batch_size",
                "noise_floor", "layers", "speed", "numerics"],
    Reports=["plot", "html", "output", "as_markdown", "json"],
)  # fmt: skip
@takes_model("models")
@from_hub("reference", "models")
@runs_a_model
@scores_tasks
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
    chat: Chat = False,
    score: Score = None,
    by_category: ByCategory = False,
    by_position: ByPosition = False,
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
    tasks: Tasks | None = None,  # the decorator gives it
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot",
            metavar="FILE",
            help="Plot to a PNG, SVG or PDF file: KLD over size, with --by-position over position, with several texts "
            "or categories for each.",
        ),
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
    cluster: Cluster = None,
    launch: Launch = None,  # type: ignore[assignment]  # the decorator gives it
    json: Json = False,
) -> None:
    """Compare models with a reference: size, PPL, KL divergence.

    All models read the same tokens. ± is one standard error of the mean over chunks. Differences are paired by token,
    so their errors are much smaller than those of the PPLs. Models whose difference is not significant share a rank.
    With --chat, each conversation is a sequence of its own, cut after -c tokens. With --hellaswag, --winogrande or
    --multiple-choice, the models answer these tasks instead, and the answers that change are counted.
    """
    from quantkit.evaluate import compare as evaluation
    from quantkit.evaluate.divergence import Divergence
    from quantkit.formats import gguf
    from quantkit.formats.atomic import check_outputs

    if tasks:
        others = {"--chat": chat, "--score": score, "--by-category": by_category, "--by-position": by_position,
                  "--chunks": chunks, "--layers": layers, "--speed": speed, "--plot": plot, "--html": html,
                  "--cluster": cluster}  # fmt: skip
        if unused := [name for name, value in others.items() if value]:
            raise typer.BadParameter(f"--{tasks.kind} compares answers; remove {', '.join(unused)}")
        if tasks.binary_file is None and len(file or []) > 1:
            raise typer.BadParameter(f"--{tasks.kind} takes one task file, {len(file or [])} are given with -f")
        text = tasks.file(file[0] if file else None)
        _compare_tasks(reference, models, tasks, text, numerics, threads_batch or threads, launch, output, as_markdown,
                       json)  # fmt: skip
        return
    if not file:
        raise OptionError("compare needs a text: pass one with -f FILE, or several")
    check_outputs([plot, html, output], [*file, *(p for m in (reference, *models) for p in gguf.open(m).paths)])
    if plot is not None:
        from quantkit.evaluate.report.plots import require_plot_file

        require_plot_file(plot)
    options = evaluation.CompareOptions(
        ctx_size=context_size(ctx_size, reference),
        chunks=chunks, chat=chat, score=score, by_category=by_category, batch_size=batch_size,
        noise_floor=noise_floor, layers=layers, speed=speed, numerics=numerics, threads=threads_batch or threads,
    )  # fmt: skip

    def show(state: evaluation.CompareProgress) -> None:
        so_far = state.chunk.so_far
        kld = so_far.mean_kld.value if isinstance(so_far, Divergence) else None
        bar.show(state.chunk, kld, run=state.run, runs=state.runs, label=state.model)

    with connected(cluster, on_message) as client, ChunkBar("compare", "KLD", 5, ticks=not speed) as bar:
        found = evaluation.compare(
            reference, models, file, options, progress=show, on_message=on_message, open_model=launch.open,
            client=client,
        )  # fmt: skip
    record = found.record()
    _write(output, html, found, record)
    if plot is not None:
        from quantkit.evaluate.report.plots import plot_comparison

        plot_comparison(plot, found, by_position)
        on_message(f"plot: {plot}")
    if json:
        print_json(_SCHEMA, record)
    else:
        _print(found, as_markdown, speed, by_position)


def _compare_tasks(
    reference: Path, models: Sequence[Path], tasks: Tasks, file: Path, numerics: str, threads: int | None,
    launch: Launch, output: Path | None, as_markdown: bool, json: bool,
) -> None:  # fmt: skip
    """Compare answers to multiple-choice tasks and print the table."""
    from quantkit.evaluate.conditions import conditions_line
    from quantkit.evaluate.report.tables import flip_table
    from quantkit.evaluate.task_flips import compare_tasks
    from quantkit.formats import gguf
    from quantkit.formats.atomic import check_outputs, writing

    check_outputs([output], [file, *(p for m in (reference, *models) for p in gguf.open(m).paths)])

    def show(name: str, score: TaskScore, count: int) -> None:
        bar.show(score.tasks, count, label=name, values=f"accuracy {100 * score.accuracy:.2f} %")

    with ProgressBar("compare") as bar:
        found = compare_tasks(
            reference, models, tasks.kind, file, tasks.limit, numerics=numerics, threads=threads, progress=show,
            on_message=on_message, open_model=launch.open,
        )  # fmt: skip
    record = found.record()
    if output is not None:
        with writing(output) as stream:
            stream.write(json_text(with_schema(_TASKS_SCHEMA, record), indent=1).encode(errors="backslashreplace"))
    if json:
        print_json(_TASKS_SCHEMA, record)
        return
    header, rows = flip_table(found)
    if as_markdown:
        print(markdown(header, rows))
    else:
        print_table(header, rows)
    print(f"\n{tasks.kind}: {found.reference.tasks} tasks of {file}; {conditions_line(found.conditions)}")


def _print(found: Comparison, as_markdown: bool, speed: bool, by_position: bool) -> None:
    from quantkit.evaluate.conditions import conditions_line
    from quantkit.evaluate.report.tables import (
        domain_rows,
        model_card,
        position_rows,
        table_header,
        table_rows,
        verdicts,
    )

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
    if by_position:
        print()
        show(*position_rows(found))
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
