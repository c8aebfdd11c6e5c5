"""Shared parts of the evaluation commands: options for model and text, running values with an ETA, conditions."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from quantkit.cli import _runtime
from quantkit.errors import QuantkitError

TextFile = Annotated[Path | None, typer.Option("--file", "-f", help="Text file, UTF-8.", show_default=False)]
Context = Annotated[int, typer.Option("--ctx-size", "-c", help="Tokens per chunk.", min=4)]
ChunkLimit = Annotated[int | None, typer.Option("--chunks", metavar="N", help="Evaluate at most N chunks.", min=1)]
Batch = Annotated[int, typer.Option("--batch-size", "-b", help="Tokens per batch, in whole chunks.", min=1)]
Numerics = Annotated[
    str,
    typer.Option(
        "--numerics",
        metavar="exact|fast",
        help="exact: decoded weights, float32 activations; fast: packed weights, as in generate.",
    ),
]


def conditions(model: Any, n_ctx: int, chunks: int, text: str) -> dict[str, Any]:
    """Everything besides the file that a figure depends on, to print and for JSON."""
    return {
        "text": text,
        "n_ctx": n_ctx,
        "chunks": chunks,
        **_runtime.conditions(model),
        "numpy": importlib.metadata.version("numpy"),
        "numba": importlib.metadata.version("numba"),
        "python": platform.python_version(),
    }


_WITHOUT_EFFECT = ("text", "threads", "cpu", "isa", "python")


def result_conditions(values: dict[str, Any]) -> dict[str, Any]:
    """The conditions that can change the bits of a result. (The text's contents can, its name cannot.)"""
    return {key: value for key, value in values.items() if key not in _WITHOUT_EFFECT}


def conditions_line(values: dict[str, Any]) -> str:
    """`text wiki.txt, n_ctx 512, …`"""
    return ", ".join(f"{key} {value}" for key, value in values.items())


def required_text(path: Path | None, what: str) -> Path:
    if path is None:
        raise QuantkitError(f"{what} needs a text: pass one with -f FILE")
    return path


class Running:
    """Prints running values, and on stderr the estimated time left."""

    def __init__(self, chunks: int, n_ctx: int, n_batch: int, every_seconds: float = 60.0):
        self._chunks = chunks
        self._chunks_per_batch = max(1, n_batch // n_ctx)  # the rate is only known at the end of a batch
        self._every = every_seconds
        self._started = time.monotonic()
        self._last_report = -every_seconds

    def value(self, index: int, value: float) -> None:
        """Print `[3]11.1929,` for a chunk; `index` counts from 1."""
        print(f"[{index}]{value:.4f},", end="", flush=True)
        self.tick(index)

    def tick(self, index: int) -> None:
        """Count a chunk as done and print the time left when it is due; `index` counts from 1."""
        if index % self._chunks_per_batch or index == self._chunks or self.seconds - self._last_report < self._every:
            return
        self._last_report = self.seconds
        left = duration(self.seconds / index * (self._chunks - index))
        print(f"\n{self.seconds / index:.2f} seconds per chunk, ETA {left}", file=sys.stderr, flush=True)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started


def duration(seconds: float) -> str:
    """`1 h 02 min`, `3 min 20 s`, `12 s`."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 60} min {whole % 60:02d} s" if whole >= 60 else f"{whole} s"


def markdown(header: Iterable[Any], rows: Iterable[Iterable[Any]]) -> str:
    """A Markdown table."""
    lines = [list(map(str, header))]
    lines += [["---"] + ["---:"] * (len(lines[0]) - 1)]
    lines += [list(map(str, row)) for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
