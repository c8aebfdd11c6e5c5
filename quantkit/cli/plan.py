"""`quantkit plan`: the types, sizes and devices of a model's tensors, computed without weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli.common.command import takes_model
from quantkit.cli.common.options import Json
from quantkit.cli.common.output import print_json
from quantkit.cli.common.plan_options import (
    Verbose,
    takes_plan_options,
)
from quantkit.cli.common.plan_tables import print_imatrix, print_plan, print_prediction
from quantkit.cli.common.progress_options import takes_quiet
from quantkit.pipelines.options import PlanOptions


@takes_quiet
@takes_model("source", "file_type")
@takes_plan_options()
def plan(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL",
            help="A GGUF file or any shard of a split one, a checkpoint directory, or only its config.json; "
            "or hf://ORG/NAME[@REVISION][/FILE].",
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
    verbose: Verbose = False,
    json: Json = False,
) -> None:
    """Show a plan: types, sizes, devices, and whether it fits.

    No weights are read; a config.json is enough. Of a model on the Hub, only config.json or the header of the GGUF file
    is fetched. The plan shows the type of every class of tensors with the reason, the
    tensors that each rule matches, sizes, and warnings about probable mistakes. With -ngl, -ot, -ts and the related
    flags it shows the bytes on each device, with -c the KV cache, and with --vram and --ram whether the model fits.
    --fit fills the devices and prints the equivalent flags and predicted speeds. --cluster predicts how long quantize
    takes on several machines, and whether encoding, reading or the network binds.
    `quantkit quantize IN OUT --plan FILE` executes the plan that --json prints.
    """
    from quantkit.pipelines import api

    found = api.plan(source, file_type, options)
    print_imatrix(options.imatrix, found.imatrix)
    if json:
        print_json("quantkit.plan/1", found.to_json())
    else:
        print_plan(found.plan, verbose, found.devices, explain)
        if found.cluster is not None:
            print_prediction(found.cluster)
