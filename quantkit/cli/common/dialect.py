"""--dialect of commands that read GGUF files: the program that a file is for, where the file does not say it.

`knows_dialect` gives a command the option. While the command runs, it is in the environment, which also reaches the
processes that the command starts. Commands with a --dialect of their own, about the file that they write, keep theirs.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any, Literal

import typer

from quantkit.cli.common.options import unless_from_environment

ReadDialect = Annotated[
    Literal["ik", "llama.cpp"] | None,
    typer.Option(
        "--dialect",
        help="Program that the file is for, where the file does not say it: ik (ik_llama.cpp) or llama.cpp.",
        envvar="QUANTKIT_DIALECT",
        callback=unless_from_environment(),
        show_default=False,
    ),
]


def knows_dialect(command: Callable[..., None]) -> Callable[..., None]:
    """Decorator: files that the command reads are taken for those of the program of --dialect."""
    signature = inspect.signature(command, eval_str=True)  # evaluated here, in the command's own namespace
    if "dialect" in signature.parameters:
        return command

    @functools.wraps(command)
    def run(*, dialect: str | None = None, **given: Any) -> None:
        from quantkit.formats.gguf import dialects

        with dialects.assumed(dialect):
            command(**given)

    option = inspect.Parameter("dialect", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=ReadDialect)
    parameters = [*signature.parameters.values(), option]
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run
