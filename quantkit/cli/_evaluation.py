"""What the evaluating commands share: options of the model and the text, running values with an ETA, conditions."""

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

TextFile = Annotated[Path | None, typer.Option("--file", "-f", help="Text, UTF-8.", show_default=False)]
Context = Annotated[int, typer.Option("--ctx-size", "-c", help="Tokens of a chunk.", min=4)]
ChunkLimit = Annotated[int | None, typer.Option("--chunks", help="Evaluate at most so many chunks.", min=1)]
Batch = Annotated[int, typer.Option("--batch-size", "-b", help="Tokens evaluated together: whole chunks.", min=1)]
Numerics = Annotated[
    str, typer.Option("--numerics", help="exact: decoded weights, float32 activations; fast: as generating does.")
]


def conditions(model: Any, n_ctx: int, chunks: int, text: str) -> dict[str, Any]:
    """All that a figure depends on besides the file, for people and for JSON."""
    return {
        "text": text,
        "n_ctx": n_ctx,
        "chunks": chunks,
        **_runtime.conditions(model),
        "numpy": importlib.metadata.version("numpy"),
        "numba": importlib.metadata.version("numba"),
        "python": platform.python_version(),
    }


_NOT_THE_RESULT = ("text", "threads", "cpu", "isa", "python")


def deciding(values: dict[str, Any]) -> dict[str, Any]:
    """Of the conditions those that a figure's bits depend on. (Of the text it is what it says, not its name.)"""
    return {key: value for key, value in values.items() if key not in _NOT_THE_RESULT}


def conditions_line(values: dict[str, Any]) -> str:
    """`text wiki.txt, n_ctx 512, …`"""
    return ", ".join(f"{key} {value}" for key, value in values.items())


def required_text(path: Path | None, what: str) -> Path:
    if path is None:
        raise QuantkitError(f"{what} needs a text: pass one with -f FILE")
    return path


class Running:
    """Prints running values as they come, and on stderr how long the rest will take."""

    def __init__(self, chunks: int, n_ctx: int, n_batch: int, every_seconds: float = 60.0):
        self._chunks = chunks
        self._together = max(1, n_batch // n_ctx)  # chunks come in batches: a pace holds where one ends
        self._every = every_seconds
        self._started = time.monotonic()
        self._said = -every_seconds

    def value(self, index: int, value: float) -> None:
        """`[3]11.1929,` of the chunk with this number, counted from one."""
        print(f"[{index}]{value:.4f},", end="", flush=True)
        self.tick(index)

    def tick(self, index: int) -> None:
        """The chunk with this number, counted from one, is done."""
        if index % self._together or index == self._chunks or self.seconds - self._said < self._every:
            return
        self._said = self.seconds
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
    """A table for a model card."""
    lines = [list(map(str, header))]
    lines += [["---"] + ["---:"] * (len(lines[0]) - 1)]
    lines += [list(map(str, row)) for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
