"""`quantkit compare`: compare models with a reference on the same texts; print a table, JSON, plot or HTML report."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from quantkit.cli._evaluation import Batch, ChunkLimit, Context, Numerics, conditions, conditions_line, markdown
from quantkit.cli._runtime import Launch, runs_a_model
from quantkit.cli._shared import Json, Threads, json_text, print_json, table, with_schema
from quantkit.errors import QuantkitError


@runs_a_model
def compare(
    reference: Annotated[Path, typer.Argument(help="The model to compare with.")],
    models: Annotated[list[Path], typer.Argument(help="GGUF files with the same vocabulary.")],
    file: Annotated[
        list[Path] | None,
        typer.Option("--file", "-f", help="Text file, UTF-8. Repeatable: each text is a domain.", show_default=False),
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
    launch: Launch = None,  # type: ignore[assignment]  # the decorator gives it
    json: Json = False,
) -> None:
    """Compare models with a reference on the same tokens: size, PPL, KL divergence, same top token.

    ± is one standard error of the mean over chunks. Differences are paired by token, so their errors are much smaller
    than those of the PPLs. Models whose difference is not significant share a rank.
    """
    from quantkit.evaluate.compare import TIMED_TOKENS
    from quantkit.evaluate.compare import compare as measure
    from quantkit.formats import gguf
    from quantkit.formats.atomic import check_outputs

    if not file:
        raise QuantkitError("compare needs a text: pass one with -f FILE, or several")
    check_outputs([plot, html, output], [*file, *(p for m in (reference, *models) for p in gguf.open(m).paths)])
    if plot is not None:
        from quantkit.evaluate.plots import require_picture

        require_picture(plot)
    how: dict[str, Any] = {}  # conditions of the model that was loaded last
    longest = max(ctx_size, TIMED_TOKENS) if speed and numerics == "fast" else ctx_size

    def open_model(path: Path) -> Any:
        model = launch.open(path, numerics=numerics, threads=threads, n_ctx=longest)
        how.update(conditions(model, ctx_size, 0, ""))
        return model

    def open_fast(path: Path) -> Any:
        return launch.open(path, numerics="fast", threads=threads, n_ctx=TIMED_TOKENS)

    def on_message(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    found = measure(
        reference,
        models,
        file,
        open_model=open_model,
        open_fast=None if not speed else open_model if numerics == "fast" else open_fast,
        noise=_noise(noise_floor, numerics, threads, ctx_size, launch),
        n_ctx=ctx_size,
        limit=chunks,
        n_batch=batch_size,
        on_message=on_message,
    )
    said = how | {"chunks": found.chunks, "text": ", ".join(map(str, file))}
    added = {}
    if layers:  # without -rtr: compare tensors in the files' types
        model = launch.open(reference, numerics=numerics, threads=threads, n_ctx=ctx_size, repack=False)
        added = _layers(model, models, file[0], ctx_size, on_message)
    record = {"reference": str(reference), **found.record(), "conditions": said}
    if added:
        record["layers"] = {name: [a._asdict() for a in rows] for name, rows in added.items()}
    _write(output, html, found, said, added, record)
    if plot is not None:
        _draw(plot, found, said)
    if json:
        print_json("quantkit.compare/1", record)
    else:
        _print(found, said, added, as_markdown, speed)


def _noise(
    kind: str, numerics: str, threads: int | None, n_ctx: int, launch: Launch
) -> tuple[str, Callable[[Path], Any]] | None:
    """Label and loader of the reference's second run, for the noise floor."""
    if kind == "off":
        return None
    if kind == "auto":
        kind = "fast" if numerics == "exact" else "exact"
    if kind == numerics:
        raise QuantkitError(
            f"--noise-floor {kind}: the models already run with these numerics; name others or a cache type"
        )
    if kind in ("fast", "exact"):
        return f"numerics {kind}", lambda path: launch.open(path, numerics=kind, threads=threads, n_ctx=n_ctx)
    from quantkit.runtime.kv.cache_type import CacheType

    cache = CacheType(kind, kind)
    return f"cache {kind}", lambda path: launch.open(
        path, numerics=numerics, threads=threads, n_ctx=n_ctx, cache_type=cache
    )


def _layers(reference: Any, models: list[Path], text: Path, n_ctx: int, on_message: Any) -> dict[str, Any]:
    """By file, the error that each of its tensors adds in the loaded reference."""
    from quantkit.evaluate.compare import unique_names
    from quantkit.evaluate.layer_errors import compare_layers
    from quantkit.evaluate.text import chunked
    from quantkit.formats import gguf

    tokens = chunked(reference.tokenizer, text, n_ctx, 1).inputs
    found = {}
    for path, name in zip(models, unique_names([reference.path, *models])[1:]):
        on_message(f"{name}: error of each tensor over {tokens.size} tokens")
        found[name] = compare_layers(reference, gguf.open(path), tokens)
    return found


def _print(found: Any, said: dict[str, Any], added: dict[str, Any], as_markdown: bool, speed: bool) -> None:
    from quantkit.evaluate.compare import domain_rows, model_card, table_header, table_rows, verdicts

    form = markdown if as_markdown else table
    print(form(table_header(found), table_rows(found)))
    header, rows = domain_rows(found)
    if rows:
        print("\n" + form(header, rows))
    for name, tensors in added.items():
        worst = sorted(tensors, key=lambda a: -a.error)[:20]
        rows = [[a.name, a.type, f"{a.error:.3g}", f"{100 * a.share:.1f}"] for a in worst]
        print(f"\n{name}: error that each tensor adds\n" + form(["tensor", "type", "error", "share %"], rows))
    lines = verdicts(found)
    if lines:
        print("\n" + "\n".join(f"- {line}" for line in lines))
    line = conditions_line(said) + ("; PP and TG: numerics fast" if speed else "")
    if as_markdown:
        print("\n" + model_card(found, line))
    else:
        print(f"\n{found.positions} tokens; {line}")


def _write(
    output: Path | None, html: Path | None, found: Any, said: dict[str, Any], added: dict[str, Any], record: Any
) -> None:
    """Write the files of --output and --html."""
    from quantkit.evaluate.html_report import page
    from quantkit.formats.atomic import writing

    if output is not None:
        with writing(output) as stream:
            text = json_text(with_schema("quantkit.compare/1", record), indent=1)
            stream.write(text.encode(errors="backslashreplace"))
    if html is not None:
        with writing(html) as stream:
            stream.write(page(found, said, added).encode(errors="backslashreplace"))
        print(f"report: {html}", file=sys.stderr)


def _draw(path: Path, found: Any, said: dict[str, Any]) -> None:
    from quantkit.evaluate.plots import plot

    name = found.candidates[0].name
    plot(path, found.candidates, f"Divergence from {name}: {found.positions} tokens of {Path(said['text']).name}")
    print(f"plot: {path}", file=sys.stderr)
