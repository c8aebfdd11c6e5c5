"""Shared parts of the evaluation commands: options for text and numerics, messages, the bar of a run over chunks."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from quantkit.cli.common.options import checked_threads
from quantkit.errors import QuantkitError
from quantkit.progress import ProgressBar, messages_shown

if TYPE_CHECKING:
    from quantkit.evaluate.progress import ChunkProgress

TextFile = Annotated[
    Path | None,
    typer.Option("--file", "-f", metavar="FILE", help="Text file, UTF-8; - is stdin.", show_default=False),
]
Context = Annotated[int, typer.Option("--ctx-size", "-c", metavar="N", help="Tokens per chunk.", min=4)]
ChunkLimit = Annotated[int | None, typer.Option("--chunks", metavar="N", help="Evaluate at most N chunks.", min=1)]
Batch = Annotated[
    int, typer.Option("--batch-size", "-b", metavar="N", help="Tokens per batch, in whole chunks.", min=1)
]
ThreadsBatch = Annotated[
    int | None,
    typer.Option(
        "--threads-batch",
        "-tb",
        metavar="N",
        help="Number of threads, in place of -t: evaluations compute batches only.",
        min=1,
        callback=checked_threads,
        show_default=False,
    ),
]
Numerics = Annotated[
    Literal["exact", "fast"],
    typer.Option(
        "--numerics",
        help="exact: decoded weights, float32 activations; fast: packed weights, as in generate.",
    ),
]


def on_message(line: str) -> None:
    """Print a message of a run to stderr at once; with --quiet, only a warning."""
    if messages_shown() or line.startswith("warning:"):
        print(line, file=sys.stderr, flush=True)


def required_text(path: Path | None, what: str) -> Path:
    """The value of -f; QuantkitError if it is missing."""
    if path is None:
        raise QuantkitError(f"{what} needs a text: pass one with -f FILE")
    return path


class ChunkBar:
    """The bar of a run over chunks: time left, tokens/s, and the running value of a quantity such as "PPL"."""

    def __init__(self, label: str, quantity: str = "", digits: int = 4, *, ticks: bool = True):
        self._bar, self._quantity, self._digits = ProgressBar(label, ticks=ticks), quantity, digits
        self._tokens_per_second = ""
        self._text: str | None = None  # of the chunks that are shown

    def __enter__(self) -> ChunkBar:
        self._bar.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._bar.__exit__(*error)

    @property
    def replaces_values(self) -> bool:
        """Whether the running values are seen in the bar alone: the results go to the same terminal."""
        return self._bar.mode == "bar" and sys.stdout.isatty()

    @property
    def on_layer(self) -> Callable[[int, int], None] | None:
        """Shows the layers of a run by layer; None where messages tell them."""
        return self._show_layer if self._bar.mode == "bar" else None

    def _show_layer(self, done: int, layers: int) -> None:
        self._bar.show(done, layers, values="layer by layer")

    def print_value(self, progress: ChunkProgress[object], value: float) -> None:
        """Show a chunk's running value: in the bar, or as `[3]11.1929,` on stdout."""
        if not self.replaces_values:
            print(f"[{progress.done}]{value:.4f},", end="", flush=True)
        self.show(progress, value)

    def show(
        self, progress: ChunkProgress[object], value: float | None = None, *, run: int = 0, runs: int = 1,
        label: str = "",
    ) -> None:  # fmt: skip
        """Show that a chunk is done; `run` of `runs` over as many chunks, one after another, are complete."""
        before = run * progress.chunks
        if self._text != progress.text and not run:
            self._text, self._bar.rate = progress.text, 0.0  # the time left is not known yet
            self._bar.started = time.monotonic() - progress.seconds
        if progress.ends_batch:
            done = before + progress.done - progress.resumed
            self._bar.rate = done / max(1e-9, time.monotonic() - self._bar.started)
            self._tokens_per_second = f"{progress.tokens_per_second:.0f} tok/s"
        parts = [self._tokens_per_second] if self._tokens_per_second else []
        if value is not None:
            parts.append(f"{self._quantity} {round(value, self._digits) + 0.0:.{self._digits}f}")  # not -0.0000
        self._bar.show(before + progress.done, runs * progress.chunks, label=label, values=", ".join(parts))


def markdown(header: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    """A Markdown table."""
    lines = [list(map(str, header))]
    lines += [["---"] + ["---:"] * (len(lines[0]) - 1)]
    lines += [list(map(str, row)) for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
