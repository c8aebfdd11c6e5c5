"""--progress, --no-progress and --quiet: the decorator `shows_progress` gives them to a command."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Annotated, Any, get_args

import typer

from quantkit import progress
from quantkit.cli.common.options import unless_from_environment

Progress = Annotated[
    bool | None,
    typer.Option(
        "--progress/--no-progress",
        help="Show progress: a bar on a terminal, elsewhere a line a minute; default: only on a terminal.",
        envvar=progress.VARIABLE,
        callback=unless_from_environment(),
        show_default=False,
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Only print results, warnings and errors.")]
_OPTIONS: dict[str, tuple[Any, Any]] = {"bars": (Progress, None), "quiet": (Quiet, False)}
_STATUS_AFTER = 1.0  # seconds


def shows_progress(command: Callable[..., None]) -> Callable[..., None]:
    """Decorator: a command shows what it does while it runs, and gets the options --progress and --quiet.

    Its name and the time are shown after a second, and in their place the bars of what it calls.
    """

    def shown(**given: object) -> None:
        status = progress.ProgressBar(command.__name__.strip("_").replace("_", "-"), after=_STATUS_AFTER)
        with _compiling_shown(), status:
            command(**given)

    return _with_settings(command, shown, _OPTIONS)


def takes_quiet(command: Callable[..., None]) -> Callable[..., None]:
    """Decorator: a command that shows no progress takes the same options, so that scripts can pass them to any command.

    Its help does not list them; -q leaves out messages here too.
    """
    hidden = {}
    for name, (annotation, default) in _OPTIONS.items():
        kind, about = get_args(annotation)
        about = copy.copy(about)
        about.hidden = True
        hidden[name] = Annotated[kind, about], default
    return _with_settings(command, command, hidden)


def _with_settings(
    command: Callable[..., None], call: Callable[..., None], options: dict[str, tuple[Any, Any]]
) -> Callable[..., None]:
    """The command with `options`, which are those of `_OPTIONS`: `call` runs it within what they say."""
    signature = inspect.signature(command, eval_str=True)  # evaluated here, in the command's own namespace
    own = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
        for name, (kind, default) in options.items()
    ]

    @functools.wraps(command)
    def run(*, bars: bool | None = None, quiet: bool = False, **given: object) -> None:
        with progress.settings(bars=False if quiet else bars, messages=not quiet):
            call(**given)

    parameters = [*signature.parameters.values(), *own]
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


@contextlib.contextmanager
def _compiling_shown() -> Iterator[None]:
    """A context in which the compilation of kernels is shown like any other work."""
    from quantkit.codegen import compile_notice

    before, bars = compile_notice.show, list[progress.ProgressBar]()

    def show(state: compile_notice.Compilation) -> None:
        if bars:
            bars.pop().close()
        if state.is_running and progress.mode() == "bar":
            bar = progress.ProgressBar(compile_notice.WHAT, spent=state.seconds)
            bar.values = f"{state.kernels} done"
            bars.append(bar.__enter__())
        elif state.is_running and progress.messages_shown():
            before(state)

    compile_notice.show = show
    try:
        yield
    finally:
        compile_notice.show = before
