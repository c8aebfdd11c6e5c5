"""Shared parts of the evaluation commands: options for text and numerics, messages, the bar of a run over chunks."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer

from quantkit.cli.common.command import in_section
from quantkit.cli.common.options import checked_threads, with_options
from quantkit.errors import OptionError
from quantkit.progress import ProgressBar, messages_shown

if TYPE_CHECKING:
    from quantkit.evaluate.progress import ChunkProgress

TextFile = Annotated[
    Path | None,
    typer.Option("--file", "-f", metavar="FILE", help="Text file, UTF-8; - is stdin.", show_default=False),
]
_MIN_CONTEXT = 4


def _checked_context(count: int) -> int:
    if 0 < count < _MIN_CONTEXT:
        raise typer.BadParameter(f"{count} tokens are too few to score; write at least {_MIN_CONTEXT}, or 0")
    return count


def _checked_limit(count: int | None) -> int | None:
    if count == 0:
        raise typer.BadParameter("0 chunks leave nothing to evaluate; write at least 1, or -1 for all")
    return None if count == -1 else count


Context = Annotated[
    int,
    typer.Option(
        "--ctx-size",
        "-c",
        metavar="N",
        help="Tokens per chunk; 0: the model's context length.",
        min=0,
        callback=_checked_context,
    ),
]
ChunkLimit = Annotated[
    int | None,
    typer.Option(
        "--chunks",
        metavar="N",
        help="Evaluate at most N chunks; -1: all.",
        min=-1,
        callback=_checked_limit,
        show_default=False,
    ),
]
Chat = Annotated[
    bool,
    typer.Option(
        "--chat",
        help="Texts hold conversations, a .jsonl line or two paragraphs each; the model's chat template formats them. "
        "--chat FILE.jsonl is short for --chat -f FILE.jsonl.",
    ),
]
Score = Annotated[
    Literal["half", "all", "assistant"] | None,
    typer.Option(
        "--score",
        help="Scored tokens: the second half of each chunk; all but the first; those of the assistant (with --chat). "
        "Default: assistant with --chat, else half.",
        show_default=False,
    ),
]
ByCategory = Annotated[
    bool,
    typer.Option("--by-category", help='Texts are .jsonl files of "text", or "messages" with --chat, and "category".'),
]
ByPosition = Annotated[
    bool, typer.Option("--by-position", help="Also show KLD and top-1 flips by position in the chunk.")
]
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
        min=-1,
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


class Tasks(NamedTuple):
    """What --hellaswag, --winogrande or --multiple-choice asks for: the kind of tasks, how many, and -bf if given."""

    kind: str
    limit: int
    binary_file: Path | None

    def file(self, text: Path | None) -> Path:
        """The task file, of -f or -bf; QuantkitError if there is none."""
        return required_text((self.binary_file or text) if self.kind == "multiple-choice" else text, self.kind)


_FirstTasks = Annotated[int, typer.Option(metavar="N", help="Use the first N tasks; 0: all.", min=0)]
_TASK_OPTIONS: dict[str, tuple[Any, Any]] = {
    "hellaswag": (
        Annotated[bool, typer.Option("--hellaswag", help="Score HellaSwag tasks in -f: 6 lines each.")],
        False,
    ),
    "hellaswag_tasks": (
        Annotated[int, typer.Option(metavar="N", help="Number of tasks, sampled as in llama-perplexity.", min=1)],
        400,
    ),
    "winogrande": (Annotated[bool, typer.Option("--winogrande", help="Score Winogrande tasks in -f: CSV.")], False),
    "winogrande_tasks": (_FirstTasks, 0),
    "multiple_choice": (
        Annotated[bool, typer.Option("--multiple-choice", help="Score multiple-choice tasks in -bf.")],
        False,
    ),
    "multiple_choice_tasks": (_FirstTasks, 0),
    "binary_file": (
        Annotated[
            Path | None, typer.Option("--binary-file", "-bf", metavar="FILE", help="Task file of --multiple-choice.")
        ],
        None,
    ),
}


def scores_tasks(command: Callable[..., None]) -> Callable[..., None]:
    """Decorator: replace a command's parameter `tasks` by the options for multiple-choice tasks.

    The command gets Tasks, or None if no kind is asked for.
    """
    section = "Multiple choice tasks"
    options = {name: (in_section(kind, section), default) for name, (kind, default) in _TASK_OPTIONS.items()}
    return with_options(command, "tasks", options, _chosen_tasks)


def _chosen_tasks(given: Mapping[str, Any]) -> Tasks | None:
    kinds = ("hellaswag", "winogrande", "multiple_choice")
    chosen = [kind for kind in kinds if given[kind]]
    if len(chosen) > 1:
        names = ", ".join(f"--{kind.replace('_', '-')}" for kind in kinds)
        raise typer.BadParameter(f"{names}: pass only one")
    if not chosen:
        return None
    return Tasks(chosen[0].replace("_", "-"), given[f"{chosen[0]}_tasks"], given["binary_file"])


def on_message(line: str) -> None:
    """Print a message of a run to stderr at once; with --quiet, only a warning."""
    if messages_shown() or line.startswith("warning:"):
        print(line, file=sys.stderr, flush=True)


def required_text(path: Path | None, what: str) -> Path:
    """The value of -f; QuantkitError if it is missing."""
    if path is None:
        raise OptionError(f"{what} needs a text: pass one with -f FILE")
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
