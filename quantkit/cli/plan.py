"""`quantkit plan`: the types, sizes and devices of a model's tensors, computed without weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli._planning import (
    PlanOptions,
    Strict,
    Verbose,
    document,
    open_source,
    print_plan,
    require_clean,
    takes_plan_options,
)
from quantkit.cli._shared import Json, print_json


@takes_plan_options()
def plan(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL",
            help="A GGUF file or any shard of a split one, a checkpoint directory, or only its config.json.",
            show_default=False,
        ),
    ],
    file_type: Annotated[
        str | None,
        typer.Argument(
            metavar="TYPE",
            help="File type, for example Q4_K_M; without it and without rules, the current types.",
            show_default=False,
        ),
    ] = None,
    options: PlanOptions = PlanOptions(),  # noqa: B008  immutable
    explain: Annotated[bool, typer.Option("--explain", help="Show the reason for each tensor's device.")] = False,
    strict: Strict = False,
    verbose: Verbose = False,
    json: Json = False,
) -> None:
    """Show the types, sizes and devices that a file type, rules and flags give, and whether the model fits.

    No weights are read; a config.json is enough. The plan shows the type of every class of tensors with the reason, the
    tensors that each rule matches, sizes, and warnings about probable mistakes. With -ngl, -ot, -ts and the related
    flags it shows the bytes on each device, with -c the KV cache, and with --vram and --ram whether the model fits.
    --fit fills the devices and prints the equivalent flags and predicted speeds.
    `quantkit quantize IN OUT --plan FILE` executes the plan that --json prints.
    """
    if file_type is None:
        options.require_no_type_options()
    model = open_source(source)
    made = options.plan_only(model, file_type or "COPY")
    budget = options.budget(made, model.metadata)
    if strict:
        require_clean(made, budget)
    if json:
        print_json("quantkit.plan/1", document(made, budget))
    else:
        print_plan(made, verbose, budget, explain)
