"""`quantkit plan`: what a recipe makes of a model, and whether that fits, before there are weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli._planning import Asked, Strict, Verbose, asks, document, open_source, print_plan, require_clean
from quantkit.cli._shared import Json, print_json


@asks()
def plan(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL",
            help="A GGUF file, or any shard of a set, a checkpoint's directory, or its config.json alone.",
            show_default=False,
        ),
    ],
    file_type: Annotated[
        str | None,
        typer.Argument(
            metavar="TYPE",
            help="File type, as Q4_K_M; without it, and without rules, the types that are there.",
            show_default=False,
        ),
    ] = None,
    asked: Asked = Asked(),  # noqa: B008  its options' own defaults
    explain: Annotated[bool, typer.Option("--explain", help="Show why tensors are where they are.")] = False,
    strict: Strict = False,
    verbose: Verbose = False,
    json: Json = False,
) -> None:
    """Show what a file type, rules and flags make of a model, who goes where, and whether it fits.

    No weight is read, and none need be there: a config.json is enough. The plan names the type of every class of
    tensors with the reason, what each rule matched, sizes, and what is probably a mistake. With -ngl, -ot, -ts and
    their kin it tells the bytes on each device, with -c the cache, with --vram and --ram whether it fits. --fit fills
    the devices and prints the flags that do the same, with speeds that their bytes allow.
    `quantkit quantize IN OUT --plan FILE` executes what --json prints.
    """
    if file_type is None:
        asked.require_no_choice()
    model = open_source(source)
    made = asked.plan_only(model, file_type or "COPY")
    budget = asked.budget(made, model.metadata)
    if strict:
        require_clean(made, budget)
    if json:
        print_json(document(made, budget))
    else:
        print_plan(made, verbose, budget, explain)
