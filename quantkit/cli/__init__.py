"""The command line: `quantkit COMMAND`, one file per command.

The file `sweep_bench.py` holds the function `sweep_bench`, which becomes the command `sweep-bench`. typer reads its
signature for the usage and its docstring for the help; the docstring's first sentence is the line in the list of
commands. A file may also name functions in `SUBCOMMANDS`: `quantkit COMMAND SUBCOMMAND`. Files that begin with `_` are
not commands; what commands share is in the package `common`. `app` is an ordinary typer application that imports a
command's file on first use.

The libraries raise exceptions, and the command line turns them into exit statuses:

    0 success    1 failure (`error: …` on stderr)    2 bad usage    130 interrupted    141 the output pipe is closed
"""

from __future__ import annotations

import difflib
import functools
import importlib
import itertools
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from typer.core import TyperGroup

from quantkit import __version__
from quantkit.cli.common.command import Command
from quantkit.cli.common.terminal import escaped_controls, message
from quantkit.errors import OptionError, QuantkitError, printable

# The order of the help page, by when a user needs them. A command that is not listed comes last.
_ORDER = ("demo", "convert", "export", "imatrix", "sensitivity", "saliency", "recipe", "plan", "quantize", "repack",
          "unpack", "fuse-gate-up", "prune", "perplexity", "compare", "mtp", "lm-eval", "bench", "sweep-bench",
          "batched-bench", "generate", "serve", "inspect", "diff", "verify", "split", "merge", "upload", "metadata",
          "types")  # fmt: skip

# llama.cpp's tools and their commands: a line for one can be pasted behind `quantkit` as it is.
_TOOLS = {
    "llama-batched-bench": "batched-bench", "llama-bench": "bench", "llama-cli": "generate",
    "llama-completion": "generate", "llama-imatrix": "imatrix", "llama-perplexity": "perplexity",
    "llama-quantize": "quantize", "llama-sweep-bench": "sweep-bench", "convert_hf_to_gguf.py": "convert",
    "llama-gguf-split": "split", "llama-server": "serve",
}  # fmt: skip

_MODEL_OR_TEXT = ("-m", "--model", "-hf", "-hfr", "--hf-repo", "-f", "--file")

INTERRUPTED = 130
BROKEN_PIPE = 141
# Of a command whose file sets PASSES_ON: all words are arguments, except for --help before the first of them.
_PASS_ON: dict[str, Any] = {"ignore_unknown_options": True, "allow_interspersed_args": False}
_SETTINGS: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


def commands() -> list[str]:
    """Names of the commands, in the order of the help page."""
    names = {path.stem.replace("_", "-") for path in Path(__file__).parent.glob("[!_]*.py")}
    return [name for name in _ORDER if name in names] + sorted(names.difference(_ORDER))


def subcommands(command: str) -> list[str]:
    """Names of the subcommands of a command, for example "show" of `imatrix`."""
    return list(getattr(_module(command), "SUBCOMMANDS", {}))


def load(command: str, *subcommand: str) -> Callable[..., None]:
    """The function that a command, or a subcommand of it, runs."""
    module = _module(command)
    function: Callable[..., None]
    function = module.SUBCOMMANDS[subcommand[0]] if subcommand else getattr(module, command.replace("-", "_"))
    return function


def _similar(name: str) -> str:
    """Commands with a similar name, for a misspelled one; empty for a valid name or when none is similar."""
    return "" if name in commands() else ", ".join(difflib.get_close_matches(name, commands(), n=3, cutoff=0.5))


def as_command(args: list[str]) -> list[str]:
    """The words of a command line with the command's name for a tool of llama.cpp: `./bin/llama-cli` is generate."""
    words = _without_python(args)
    tool = re.split(r"[/\\]", words[0])[-1].removesuffix(".exe") if words else ""
    if tool not in _TOOLS:
        return args
    command, rest = _TOOLS[tool], words[1:]
    if command == "split":  # one tool for both directions
        command = "merge" if "--merge" in rest else "split"
        rest = [word for word in rest if word not in ("--merge", "--split")]
    if command == "quantize" and "--repack" in rest:  # which ignores TYPE
        return ["repack", *_without_type(rest)]
    if command == "imatrix" and "--in-file" in rest and (show := _only_files(rest)):
        return [command, show, *(word for word in rest if word not in ("--in-file", "--show-statistics"))]
    return [command, *rest]


def _only_files(words: list[str]) -> str:
    """What `llama-imatrix --in-file FILE …` does with its files: "show" or "merge"; "" if it measures and adds them."""
    if "--show-statistics" in words:
        return "show"
    return "" if any(word.partition("=")[0] in _MODEL_OR_TEXT for word in words) else "merge"


def _without_python(args: list[str]) -> list[str]:
    """The words of `python3.11 -u convert_hf_to_gguf.py …` from the script on."""
    if not args or not re.fullmatch(r"(?:.*[/\\])?python(?:\d(?:\.\d+)?)?(?:\.exe)?", args[0]):
        return args
    return list(itertools.dropwhile(lambda word: re.fullmatch(r"-[a-zA-Z]+", word), args[1:]))


def _without_type(words: list[str]) -> list[str]:
    """The words of `llama-quantize --repack IN OUT TYPE [THREADS]` without the flag, TYPE and THREADS."""
    kept, positional = [], 0
    rest = iter(words)
    for word in rest:
        if word == "--repack-pattern":
            kept += [word, next(rest, "")]
        elif word.startswith("-"):
            kept += [word] * (word != "--repack")
        elif (positional := positional + 1) <= 2:
            kept.append(word)
    return kept


def _module(command: str) -> Any:
    return importlib.import_module(f"{__name__}.{command.replace('-', '_')}")


def parser(*path: str) -> Any:
    """The parser that typer builds for a command or a subcommand."""
    single = typer.Typer(add_completion=False, rich_markup_mode=None)
    context = _SETTINGS | (_PASS_ON if getattr(_module(path[0]), "PASSES_ON", False) else {})
    settings: dict[str, Any] = {"name": " ".join(path), "cls": Command, "context_settings": context}
    single.command(**settings)(_with_exit_status(load(*path)))
    return typer.main.get_command(single)


class _Commands(TyperGroup):
    """A group that imports a command on first use."""

    def list_commands(self, ctx: Any) -> list[str]:
        return commands()

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        path = cmd_name.split(" ")
        return parser(*path) if path[0] in commands() else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """As in any group, except that `imatrix show` is one name, because `imatrix MODEL` is a command too."""
        args = as_command(args)
        if len(args) > 1 and args[0] in commands() and args[1] in subcommands(args[0]):
            args = [" ".join(args[:2]), *args[2:]]
        elif args and not ctx.resilient_parsing and (similar := _similar(args[0])):
            ctx.fail(f"No such command '{args[0]}'. Did you mean {similar}?")
        return super().resolve_command(ctx, args)


app = typer.Typer(  # Python prints tracebacks, not rich
    cls=_Commands,
    no_args_is_help=True,
    context_settings=_SETTINGS,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _print_version(value: bool) -> None:
    if value:
        print(f"quantkit {__version__}")
        raise typer.Exit


def _set_cache(value: Path | None) -> None:
    """Set the folder of the kernel cache, for the processes that this one starts too."""
    if value is not None:
        os.environ["QUANTKIT_CACHE_DIR"] = str(value)


@app.callback()
def _quantkit(
    cache_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder for compiled kernels; default: quantkit in the user's cache folder.",
            envvar="QUANTKIT_CACHE_DIR",
            callback=_set_cache,
            show_default=False,
        ),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", "-V", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Quantize, evaluate and run GGUF models."""


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    for stream in (sys.stdout, sys.stderr):
        _use_utf8(stream)
    try:
        with escaped_controls():
            _with_exit_status(app)(argv, prog_name="quantkit")
        sys.stdout.flush()
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else 0
    except BrokenPipeError:  # raised by the flush
        return _broken_pipe()
    return 0


def _with_exit_status(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `function` so that its exceptions end the process with the exit statuses in the table above.

    Both each command and `app` are wrapped, because typer uses another exit status for an interrupt. A bug still shows
    its traceback.
    """

    @functools.wraps(function)
    def run(*args: object, **kwargs: object) -> Any:
        try:
            return function(*args, **kwargs)
        except OptionError as error:
            raise typer.BadParameter(str(error)) from None
        except QuantkitError as error:
            print(f"error: {message(str(error))}", file=sys.stderr)
            raise SystemExit(1) from None
        except BrokenPipeError:
            raise SystemExit(_broken_pipe()) from None
        except OSError as error:  # for example a missing file or a full disk
            place = f"{error.filename}: " if error.filename else ""
            print(f"error: {printable(f'{place}{error.strerror or error}')}", file=sys.stderr)
            raise SystemExit(1) from None
        except KeyboardInterrupt:
            print("\ninterrupted", file=sys.stderr)
            raise SystemExit(INTERRUPTED) from None

    return run


def _use_utf8(stream: TextIO) -> None:
    """Print token strings and tensor names as UTF-8 on every console, including Windows."""
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(encoding="utf-8", errors="replace")


def _broken_pipe() -> int:
    """Redirect stdout to the null device, so that Python's flush at exit does not raise again."""
    if hasattr(os, "dup2"):
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, sys.stdout.fileno())
    return BROKEN_PIPE
