"""`quantkit imatrix show`, `merge` and `convert`: commands on the files of importance matrices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from quantkit.cli.common.evaluation import on_message
from quantkit.cli.common.options import Json
from quantkit.cli.common.output import print_json, print_table
from quantkit.cli.common.progress_options import shows_progress

if TYPE_CHECKING:
    from quantkit.evaluate.imatrix.coverage import Coverage
    from quantkit.evaluate.imatrix.second_moments import InputMoments
    from quantkit.formats.imatrix import Imatrix

FEW_PER_COLUMN = 4  # tokens; with fewer, over 1/5 of the correlations is noise; as in recipe.planning.lint
FEW_TOKENS = 32  # the mean of 32 squares of normal numbers has a relative error of 1/4; as in recipe.planning.lint

Output = Annotated[
    Path,
    typer.Option(
        "--output",
        "--output-file",
        "-o",
        metavar="FILE",
        help="Output file: llama.cpp's GGUF format for .gguf, else the legacy format.",
    ),
]
Missing = Annotated[
    Literal["weight-one", "layer-mean", "error"],
    typer.Option(help="For experts without tokens; layer-mean: the mean of the layer's other experts."),
]
ModelFile = Annotated[
    Path | None, typer.Option("--model", "-m", metavar="GGUF", help="The model, to split legacy entries by expert.")
]


@shows_progress
def show(
    file: Annotated[Path, typer.Argument(help="Importance matrix, GGUF or legacy.")],
    model: ModelFile = None,
    threshold: Annotated[
        int, typer.Option(metavar="N", help="List experts with fewer than N tokens.", min=1)
    ] = FEW_TOKENS,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a plot as PNG, SVG or PDF.", show_default=False)
    ] = None,
    json: Json = False,
) -> None:
    """Show the contents of an importance matrix: token counts by weight and expert, and the spread over columns.

    tokens: minimum / median / maximum over experts; covered: share of experts with enough tokens; experts: effective
    number of experts (2 to the power of the entropy of the token counts); columns: effective number of columns, as a
    share of all; similar: cosine similarity with the previous layer. Of second moments: effective rank (sum of the
    eigenvalues)² / (sum of their squares), and the share of the first eigenvector.
    """
    from quantkit.evaluate.imatrix.coverage import coverage, split_by_matrix
    from quantkit.evaluate.imatrix.second_moments import describe
    from quantkit.formats.imatrix import read

    if plot is not None:
        from quantkit.evaluate.report.plots import require_plot_file

        require_plot_file(plot)
    found = read(file)
    if model is not None:
        import quantkit

        found = split_by_matrix(found, {t.name: t.shape for t in quantkit.open(model).tensors.values()})
    rows, inputs = coverage(found, threshold), describe(found)
    if plot is not None:
        title = f"{file.name}: {len(found)} entries, {found.chunks} chunks of {found.dataset or 'an unnamed text'}"
        from quantkit.evaluate.report.plots import plot_importance

        plot_importance(plot, rows, title)
    if json:
        about = {"chunks": found.chunks, "chunk_size": found.chunk_size, "dataset": found.dataset,
                 "missing_experts": found.policy or None, "token_weights": found.token_weights,
                 "threshold": threshold}  # fmt: skip
        records = {"tensors": [row.record() for row in rows], "second_moments": [vars(row) for row in inputs]}
        print_json("quantkit.imatrix-show/1", {"path": file, **about, **records})
        return
    _print_rows(rows)
    if inputs:
        _print_inputs(inputs)
    for line in few_experts_lines(rows, threshold):
        print(line)
    print(_summary(found))


def _print_rows(rows: Sequence[Coverage]) -> None:
    header = ("weight", "matrices", "columns", "tokens", "covered", "experts", "columns", "similar", "mean", "top 1 %")
    cells = []
    for r in rows:
        lowest, highest = int(r.counts.min()), int(r.counts.max())
        between = f"{lowest} / {r.median_count:.12g} / {highest}"
        tokens = "" if not r.counted else str(highest) if lowest == highest else between
        stacked = len(r.counts) > 1
        cells.append((
            r.name, len(r.counts), r.columns, tokens, f"{100 * r.covered:.1f} %" if stacked else "",
            "" if r.effective_experts is None else f"{r.effective_experts:.1f}", f"{100 * r.effective_columns:.1f} %",
            "" if r.similarity is None else f"{r.similarity:.3f}", f"{r.mean:.4g}", f"{100 * r.share_of_top:.1f} %",
        ))  # fmt: skip
    print_table(header, cells, end="\n\n")


def _print_inputs(inputs: Sequence[InputMoments]) -> None:
    header = (
        "second moments of the input of",
        "form",
        "columns",
        "tokens",
        "tokens / column",
        "effective rank",
        "first",
    )
    cells = [
        (", ".join([i.name, *(n.rpartition("blk.")[2].partition(".")[2] for n in i.shared_with)]), i.form, i.columns,
         i.tokens, f"{i.tokens_per_column:.1f}", f"{i.effective_rank:.1f}", f"{100 * i.first_share:.1f} %")
        for i in inputs
    ]  # fmt: skip
    print_table(header, cells, end="\n\n")
    if few := [i for i in inputs if i.tokens_per_column < FEW_PER_COLUMN]:
        print(
            f"{len(few)} of {len(inputs)} inputs saw fewer than {FEW_PER_COLUMN} tokens a column, for example "
            f"{few[0].name}: their correlations are uncertain; measure on more text"
        )


def _summary(found: Imatrix) -> str:
    size = f" of {found.chunk_size} tokens" if found.chunk_size else " without token counts"
    policy = f", experts without tokens: {found.policy}" if found.policy else ""
    weights = f", tokens weighed by {found.token_weights}" if found.token_weights != "none" else ""
    return f"{len(found)} entries, {found.chunks} chunks{size}, dataset {found.dataset or 'unnamed'}{policy}{weights}"


@shows_progress
def merge(
    files: Annotated[list[Path], typer.Argument(help="Importance matrices of the same model, GGUF or legacy.")],
    output: Output = Path("imatrix.dat"),
    weights: Annotated[str | None, typer.Option(metavar="N,N,…", help="Extra weight of each file; default: 1.")] = None,
    missing_experts: Missing = "weight-one",
) -> None:
    """Merge importance matrices of one model: the mean, each expert weighted by its tokens.

    Legacy files have no token counts. If one is among the files, entries are weighted by their calls.
    """
    from quantkit.evaluate.corpus import require_different
    from quantkit.evaluate.imatrix.run import UNCOUNTED
    from quantkit.formats import imatrix as formats

    require_different(files)
    read = [formats.read(path) for path in files]
    if formats.loses_counts(read):
        on_message(UNCOUNTED)
    merged = formats.merge(read, numbers("--weights", weights, len(files)))
    if lost := {name for matrix in read for name in matrix.second_moments} - merged.second_moments.keys():
        on_message(
            f"note: {len(lost)} weights, such as {min(lost)}, have second moments in some of the files only; the merge "
            "has none of them"
        )
    merged = _for_format(formats.fill_missing(merged, missing_experts), output)
    formats.write(output, merged)
    print(f"{output}: {len(merged)} entries, {merged.chunks} chunks from {len(files)} files")


@shows_progress
def convert(
    file: Annotated[Path, typer.Argument(metavar="IN", help="Importance matrix, GGUF or legacy.")],
    output: Annotated[Path, typer.Argument(metavar="OUT", help="Output file: GGUF for .gguf, else legacy.")],
    model: ModelFile = None,
) -> None:
    """Convert an importance matrix between the GGUF and the legacy format.

    Legacy files do not store the number of experts of an entry; --model gives it, so that the GGUF file has values per
    expert. They store no token counts either; each call counts as 512 tokens.
    """
    from quantkit.evaluate.imatrix.coverage import split_by_matrix
    from quantkit.formats import imatrix as formats
    from quantkit.formats.atomic import check_outputs

    found = formats.read(file)
    if model is not None:
        import quantkit

        check_outputs([output], quantkit.open(model).paths)
        found = split_by_matrix(found, {t.name: t.shape for t in quantkit.open(model).tensors.values()})
    formats.write(output, _for_format(found, output))
    print(f"{output}: {_summary(found)}")


def _for_format(found: Imatrix, output: Path) -> Imatrix:
    """The matrix without second moments if the output's format does not hold them."""
    from quantkit.formats.imatrix import form_of

    if not found.second_moments or form_of(output) == "gguf":
        return found
    on_message(f"note: {output} is in the legacy format, which does not hold second moments; they are left out")
    return replace(found, second_moments={})


def few_experts_lines(rows: Sequence[Coverage], threshold: int) -> list[str]:
    """One line per layer for experts with too few tokens; weights with the same experts share a line."""
    groups: dict[tuple[int | None, tuple[int, ...], int], list[str]] = {}
    for row in rows:
        if row.few:
            groups.setdefault((row.layer, tuple(row.few), len(row.counts)), []).append(row.kind)
    lines = []
    for (layer, experts, count), kinds in groups.items():
        place = f"layer {layer}: " if layer is not None else ""
        named = ", ".join(map(str, experts[:24])) + (", …" if len(experts) > 24 else "")
        lines.append(f"{place}{len(experts)} of {count} experts saw fewer than {threshold} tokens "
                     f"({', '.join(kinds)}): {named}")  # fmt: skip
    return lines


def numbers(flag: str, text: str | None, count: int) -> list[float] | None:
    """The numbers of an option with one positive number per file; bad usage for others."""
    if text is None:
        return None
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if len(found) != count or any(not 0 < value < float("inf") for value in found):
        raise typer.BadParameter(f"{flag} '{text}': write {count} positive numbers, comma-separated, one for each file")
    return found
