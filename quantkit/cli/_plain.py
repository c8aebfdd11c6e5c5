"""Arguments that need no conversion, taken as they are.

Recent versions of typer have pydantic convert every argument. Loading it costs a tenth of a second, as much as all of
numpy, and for a path, a text or a small number it has nothing to do. So parameters get a converter that passes those
on and leaves all else, be it odd or wrong, to typer's. Where typer has other insides nothing is done.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any


def take_plain_arguments(command: Any) -> None:
    """Give the parameters of a command that typer made the light converter."""
    if not hasattr(command, "context_class"):
        return
    for parameter in command.get_params(command.context_class(command, **command.context_settings)):  # --help too
        if hasattr(parameter, "type_descriptor") and getattr(parameter, "_runtime_param", 0) is None:
            parameter._runtime_param = _Converter(parameter.type_descriptor)


class _Converter:
    """What typer asks to `coerce` the values of a parameter."""

    def __init__(self, descriptor: Any):
        self._descriptor = descriptor

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        info = self._descriptor.parameter_info
        several = param.multiple or param.nargs == -1
        if value is None or (several and len(value) == 0):
            return () if several else None
        if not several and type(value) is str and info.parser is None:
            annotation = self._descriptor.annotation
            if annotation is str:
                return value
            if annotation is Path and not (info.exists or info.resolve_path or info.allow_dash or info.path_type):
                return Path(value)
            if annotation is int and value.isdecimal() and value.isascii() and _within(int(value), info):
                return int(value)
        from typer._coercion import build_runtime_param

        return build_runtime_param(self._descriptor).coerce(value, param=param, ctx=ctx)


def _within(number: int, info: Any) -> bool:
    return (info.min is None or info.min <= number) and (info.max is None or number <= info.max)
