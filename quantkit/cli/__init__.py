"""The command line: `quantkit COMMAND`, one file a command.

The file `sweep_bench.py` holds the function `sweep_bench`; that makes the command `sweep-bench`. Its signature is the
usage (typer reads the annotations), its docstring the help, and the docstring's first sentence the line in the list.
A file may also name functions in `SUBCOMMANDS`, reached as `quantkit COMMAND SUBCOMMAND`. Files that begin with `_`
are no commands. Libraries raise, `main` translates:

    0 done    1 the job failed (`error: …` on stderr)    2 bad usage    130 interrupted    141 nobody reads the output

Listing the commands parses their files and imports none, so `quantkit --help` costs what starting Python costs.
"""

from __future__ import annotations

import ast
import atexit
import contextlib
import functools
import gc
import importlib
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from quantkit import __version__
from quantkit.errors import QuantkitError

# The order of a cook's day; a command that is not named here comes last.
_ORDER = ("demo", "convert", "export", "imatrix", "recipe", "plan", "quantize", "repack", "unpack", "perplexity",
          "compare", "bench", "sweep-bench", "generate", "inspect", "diff", "verify", "split", "merge",
          "metadata", "types")  # fmt: skip

INTERRUPTED = 130
NOBODY_READS = 141


def commands() -> list[str]:
    """Names of the commands, in the order of the help page."""
    names = {path.stem.replace("_", "-") for path in Path(__file__).parent.glob("[!_]*.py")}
    return [name for name in _ORDER if name in names] + sorted(names.difference(_ORDER))


def summary(command: str) -> str:
    """First sentence of a command's docstring, read without importing it."""
    function = command.replace("-", "_")
    source = (Path(__file__).parent / f"{function}.py").read_text(encoding="utf-8")
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            text = " ".join((ast.get_docstring(node) or "").partition("\n\n")[0].split())
            return re.split(r"(?<=\.)\s", text)[0].rstrip(".")
    return ""


def help_page() -> str:
    width = max(map(len, commands()), default=0)
    listed = "\n".join(f"  {name:{width}}  {summary(name)}" for name in commands())
    return (
        "Usage: quantkit COMMAND [ARGS]...\n\n"
        "Cook, check and run quantized GGUF models.\n\n"
        f"Commands:\n{listed}\n\n"
        "quantkit COMMAND --help tells all about one of them; quantkit --version prints the version.\n"
    )


def load(command: str, *subcommand: str) -> Callable[..., None]:
    """The function that a command, or a subcommand of it, runs."""
    function = command.replace("-", "_")
    module = importlib.import_module(f"{__name__}.{function}")
    return module.SUBCOMMANDS[subcommand[0]] if subcommand else getattr(module, function)


def subcommands(command: str) -> list[str]:
    module = importlib.import_module(f"{__name__}.{command.replace('-', '_')}")
    return list(getattr(module, "SUBCOMMANDS", {}))


def parser(function: Callable[..., None]) -> Any:
    """The parser that typer makes of a function: call it with a list of arguments."""
    import typer

    from quantkit.cli._plain import take_plain_arguments

    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})(function)
    command = typer.main.get_command(app)
    take_plain_arguments(command)
    return command


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    if argv is None:
        _collect_rarely()
    args = sys.argv[1:] if argv is None else list(argv)
    for stream in (sys.stdout, sys.stderr):
        _speak_utf8(stream)
    try:
        status = _translated(_dispatch)(args)
        sys.stdout.flush()
    except SystemExit as done:
        status = done.code if isinstance(done.code, int) else 0
    except BrokenPipeError:  # met by the flush
        status = _nobody_reads()
    if argv is None:
        atexit.register(_leave, status)
    return status


def _dispatch(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help"):
        print(help_page(), end="", file=sys.stdout if args else sys.stderr)
        return 0 if args else 2
    if args[0] in ("-V", "--version"):
        print(f"quantkit {__version__}")
        return 0
    if args[0] not in commands():
        return _unknown(args[0])
    path = args[:1]
    if len(args) > 1 and args[1] in subcommands(args[0]):
        path = args[:2]
    function = _translated(load(*path))
    try:
        result = parser(function).main(args[len(path) :], prog_name=" ".join(["quantkit", *path]))
    except SystemExit as done:
        result = done.code
    return result if isinstance(result, int) else 0


def _unknown(name: str) -> int:
    import difflib

    near = difflib.get_close_matches(name, commands(), n=3, cutoff=0.5)
    hint = f"did you mean {', '.join(near)}?" if near else "see `quantkit --help`"
    print(f"quantkit: no command '{name}'; {hint}", file=sys.stderr)
    return 2


def _translated(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` whose exceptions end the process as the table above says.

    Wrapped round the command itself as well as round the dispatch, because versions of typer differ in what they make
    of an interrupt. A bug still shows its traceback.
    """

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except QuantkitError as error:
            print(f"error: {error}", file=sys.stderr)
            raise SystemExit(1) from None
        except BrokenPipeError:
            raise SystemExit(_nobody_reads()) from None
        except OSError as error:  # a missing file, a full disk: the user's to mend
            place = f"{error.filename}: " if error.filename else ""
            print(f"error: {place}{error.strerror or error}", file=sys.stderr)
            raise SystemExit(1) from None
        except KeyboardInterrupt:
            print("\ninterrupted", file=sys.stderr)
            raise SystemExit(INTERRUPTED) from None

    return run


def _collect_rarely() -> None:
    """Have a process of our own look for garbage now and then.

    Modules that are loaded are many objects and no garbage; going over them again and again takes a tenth of the start.
    """
    gc.set_threshold(50_000, 20, 100)


def _leave(status: int) -> None:
    """End the process, whose threads are done by now, when the other handlers are.

    Python would take all modules apart first, which takes a twentieth of a start.
    """
    atexit.unregister(_leave)
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def _speak_utf8(stream: TextIO) -> None:
    """Token strings and tensor names are UTF-8 on every console, Windows' included."""
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(encoding="utf-8", errors="replace")


def _nobody_reads() -> int:
    """Point stdout at nothing, so that Python's own flush at exit stays silent too."""
    if hasattr(os, "dup2"):
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, sys.stdout.fileno())
    return NOBODY_READS
