"""Shared parts of the evaluation commands: options for text and numerics, messages, running values with an ETA."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from quantkit.cli.common.options import checked_threads
from quantkit.errors import QuantkitError

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
    """Print a message of a run to stderr at once."""
    print(line, file=sys.stderr, flush=True)


def required_text(path: Path | None, what: str) -> Path:
    """The value of -f; QuantkitError if it is missing."""
    if path is None:
        raise QuantkitError(f"{what} needs a text: pass one with -f FILE")
    return path


class ChunkPrinter:
    """Prints the value after each chunk, and the estimated time left to stderr."""

    def __init__(self, every_seconds: float = 60.0):
        self._every = every_seconds
        self._last_report = -every_seconds

    def value(self, progress: ChunkProgress[object], value: float) -> None:
        """Print `[3]11.1929,` for a chunk, and the time left when it is due."""
        print(f"[{progress.done}]{value:.4f},", end="", flush=True)
        self.show_eta(progress)

    def show_eta(self, progress: ChunkProgress[object]) -> None:
        """Print the time left, after the first batch and then once a minute."""
        if progress.done == progress.resumed + progress.per_batch:
            self._last_report = progress.seconds - self._every
        at_end = progress.done == progress.chunks
        if (progress.done - progress.resumed) % progress.per_batch or at_end:
            return
        if progress.seconds - self._last_report < self._every:
            return
        self._last_report = progress.seconds
        left = duration(progress.seconds_left)
        on_message(f"\n{progress.seconds_per_chunk:.2f} seconds per chunk, ETA {left}")


def duration(seconds: float) -> str:
    """`1 h 02 min`, `3 min 20 s`, `12 s`."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 60} min {whole % 60:02d} s" if whole >= 60 else f"{whole} s"


def markdown(header: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    """A Markdown table."""
    lines = [list(map(str, header))]
    lines += [["---"] + ["---:"] * (len(lines[0]) - 1)]
    lines += [list(map(str, row)) for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
