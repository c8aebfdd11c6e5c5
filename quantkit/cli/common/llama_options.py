"""Options of llama.cpp's tools that single commands know: without effect (`without_effect`), or refused (`refused`)."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from quantkit.cli.common import refused, without_effect
from quantkit.cli.common.evaluation import on_message


def takes_llama_options(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator: a command takes the options `names` of the tables, and says why they do nothing or are refused."""
    return lambda command: _with_options(command, names)


def _with_options(command: Callable[..., None], names: tuple[str, ...]) -> Callable[..., None]:
    signature = inspect.signature(command, eval_str=True)  # evaluated here, in the command's own namespace
    table = {name: without_effect.OF_COMMANDS.get(name) or refused.OF_COMMANDS[name] for name in names}
    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=option.annotation())
        for name, option in table.items()
    ]

    @functools.wraps(command)
    def run(**given: Any) -> None:
        values = {name: given.pop(name, None) for name in table}
        for name in table:
            if name in refused.OF_COMMANDS:
                refused.OF_COMMANDS[name].check(values[name])
            elif values[name] is not None:
                on_message(f"note: {without_effect.OF_COMMANDS[name].note(values[name])}")
        command(**given)

    parameters = [*signature.parameters.values(), *options]
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run
