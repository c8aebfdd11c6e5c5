"""`quantkit sensitivity`: measure what every type costs in every matrix, for `recipe fit`."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from quantkit.cli.common.cluster import Cluster, connected, worker_rows
from quantkit.cli.common.command import takes_model
from quantkit.cli.common.dialect import knows_dialect
from quantkit.cli.common.evaluation import Context, TextFile, on_message, required_text
from quantkit.cli.common.launch import context_size
from quantkit.cli.common.options import Json, Threads, comma_separated
from quantkit.cli.common.output import print_json, print_table
from quantkit.cli.common.plan_options import ImatrixFile, NoSecondMoments
from quantkit.cli.common.progress_options import shows_progress
from quantkit.progress import ProgressBar

if TYPE_CHECKING:
    from quantkit.cluster.in_order import WorkerTime


@shows_progress
@takes_model()
@knows_dialect
def sensitivity(
    model: Annotated[
        Path,
        typer.Argument(metavar="MODEL", help="A GGUF file or a checkpoint directory, unquantized.", show_default=False),
    ],
    file: TextFile = None,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The costs file.")] = Path(
        "costs.json"
    ),
    imatrix: ImatrixFile = None,
    no_second_moments: NoSecondMoments = False,
    types: Annotated[
        list[str] | None,
        typer.Option("--types", metavar="TYPE,…", help="Types to measure; default: IQ2_KS to IQ6_K and Q8_0."),
    ] = None,
    probe: Annotated[str, typer.Option("--probe", metavar="TYPE", help="Type that probes one matrix at a time.")] = (
        "q4_0"
    ),
    ctx_size: Context = 512,
    chunks: Annotated[int, typer.Option("--chunks", metavar="N", help="Probe with at most N chunks.", min=1)] = 2,
    rows: Annotated[int, typer.Option("--rows", metavar="N", help="Rows of a matrix to encode.", min=2)] = 128,
    effort: Annotated[
        Literal["fast", "normal", "best"], typer.Option("--effort", help="Effort of the encoders.")
    ] = "normal",
    threads: Threads = None,
    cluster: Cluster = None,
    restart: Annotated[bool, typer.Option("--restart", help="Discard the state of an interrupted run.")] = False,
    json: Json = False,
) -> None:
    """Measure how much the KL divergence rises for each matrix and each type.

    The costs file is for `quantkit recipe fit`. Two things are measured for each matrix: the KL divergence at the
    model's output with that matrix alone in the probe's type, and the error of each type relative to the probe, in the
    metric of the matrix's inputs: second moments if the importance matrix has them, else importance. An interrupted run
    is resumed by the same command and gives the same numbers. The table shows the predicted KL divergence with one
    type for all matrices.
    """
    from quantkit.evaluate.sensitivity.run import TYPES, SensitivityOptions
    from quantkit.evaluate.sensitivity.run import sensitivity as measure
    from quantkit.pipelines.allocate import single_types
    from quantkit.pipelines.planning import open_model

    options = SensitivityOptions(
        imatrix=imatrix, no_second_moments=no_second_moments, types=tuple(comma_separated(types)) or TYPES,
        probe=probe, ctx_size=context_size(ctx_size, model), chunks=chunks,
        rows=rows, effort=effort, threads=threads, restart=restart,
    )  # fmt: skip
    begin = time.perf_counter()
    text = required_text(file, "sensitivity")
    with connected(cluster, on_message) as client, ProgressBar("sensitivity") as bar:

        def show(done: int, total: int, name: str) -> None:
            if not name:
                bar.initial = done  # by an earlier run: no part of the rate
            bar.show(done, total, label=name)

        times: dict[str, WorkerTime] = {}
        found = measure(
            model, text, output, options, progress=show, on_message=on_message, client=client, on_workers=times.update
        )
    seconds = time.perf_counter() - begin
    points = single_types(open_model(model), found)
    if json:
        print_json(
            "quantkit.sensitivity/1",
            {
                "path": output,
                "tensors": len(found.tensors),
                "types": found.types(),
                "metrics": dict(Counter(t.metric for t in found.tensors.values())),
                "single_types": [point.to_json() for point in points],
                "seconds": seconds,
                **({"workers": worker_rows(times)} if times else {}),
            },
        )
        return
    rows_of = [(point.label, f"{point.bits_per_weight:.3f}", f"{point.cost:.5f}") for point in points]
    print_table(("all matrices", "bpw", "predicted KLD"), rows_of)
    print(f"{output}: {len(found.tensors)} matrices, {len(found.types())} types, {seconds:.0f} s")
