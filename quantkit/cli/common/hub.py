"""Commands that take models from the Hub: hf://ORG/NAME/FILE.gguf in place of a path."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from quantkit.cli.common.dialect import knows_dialect

PANEL = "Checkpoints on the Hub"

Disk = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Disk space for streaming, beyond the output, for example 50G; with --cluster on each worker; "
        "default: 10G, or more if that is needed.",
        rich_help_panel=PANEL,
        show_default=False,
    ),
]
KeepShards = Annotated[
    bool,
    typer.Option(
        "--keep-shards", help="Leave the checkpoint in the directory NAME beside the output.", rich_help_panel=PANEL
    ),
]


def from_hub(*names: str, headers: bool = False) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator: the arguments `names`, files or lists of files, may be on the Hub; the command gets local paths.

    Whole files are fetched into the cache. With `headers`, the command gets files of which only the headers are there.
    The command gets --dialect (`knows_dialect`).
    """
    return lambda command: _with_local_paths(knows_dialect(command), names, headers)


def _with_local_paths(command: Callable[..., None], names: Sequence[str], headers: bool) -> Callable[..., None]:
    def local(given: Any) -> Any:
        from quantkit.hub import models

        if isinstance(given, (list, tuple)):
            return [local(one) for one in given]
        if given is None or str(given) == "-":
            return given
        return models.header_file(given) if headers else models.model_file(given)

    @functools.wraps(command)
    def run(**given: Any) -> None:
        command(**given | {name: local(given[name]) for name in names if name in given})

    signature = inspect.signature(command, eval_str=True)  # evaluated here, in the command's own namespace
    run.__signature__ = signature  # type: ignore[attr-defined]
    run.__annotations__ = {name: parameter.annotation for name, parameter in signature.parameters.items()}
    return run


def is_on_hub(source: Path) -> bool:
    """Whether a model is, or can only be, on the Hub."""
    from quantkit.hub import address

    return address.find(source) is not None
