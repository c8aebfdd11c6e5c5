"""`quantkit verify`: check a file for damage, and whether a rerun would give the same bytes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quantkit.cli.common.cluster import Cluster, connected, worker_rows
from quantkit.cli.common.command import takes_model
from quantkit.cli.common.evaluation import on_message
from quantkit.cli.common.hub import Disk, from_hub
from quantkit.cli.common.options import Json, Threads, parse_size
from quantkit.cli.common.output import print_json
from quantkit.cli.common.progress_options import shows_progress

if TYPE_CHECKING:
    from quantkit.pipelines.verify import Verified

_SHOWN = 10


@shows_progress
@takes_model("file")
@from_hub("file")
def verify(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="A GGUF file, any shard of a split one, or hf://ORG/NAME/FILE.gguf.",
            show_default=False,
        ),
    ],
    source: Annotated[
        Path | None,
        typer.Option(
            metavar="IN", help="The input it was quantized from: a GGUF file, a checkpoint directory, or hf://ORG/NAME."
        ),
    ] = None,
    imatrix: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The importance matrix it was quantized with.")
    ] = None,
    disk: Disk = None,
    threads: Threads = None,
    cluster: Cluster = None,
    json: Json = False,
) -> None:
    """Check the structure, values and hashes of a file.

    Every tensor is decoded, to find NaN and Inf, and hashed if `quantkit quantize` recorded a hash. With --source, the
    input tensors are hashed too, and tensors whose source, importance or encoder has changed are listed:
    `quantize --partial-requant` would quantize these again. If there are none, a rerun gives the same bytes. Exit
    status 1 means damage.
    """
    from quantkit.pipelines import api
    from quantkit.pipelines.options import VerifyOptions

    options = VerifyOptions(source, imatrix, threads, disk=None if disk is None else parse_size(disk, "--disk"))
    with connected(cluster, on_message) as client:
        found = api.verify(file, options, client=client, progress=True, on_message=on_message)
    if json:
        workers = {"workers": worker_rows(found.workers)} if found.workers else {}
        print_json("quantkit.verify/1", found.to_json() | workers)
    else:
        _print(found)
    if found.damage:
        raise SystemExit(1)


def _print(found: Verified) -> None:
    total = len(found.file.tensors)
    print(f"structure: sound, {total} tensors in {len(found.file.paths)} file(s)")
    print(f"values: {found.decoded} of {total} tensors decoded")
    print(f"hashes: {found.hashed} of {found.recorded} recorded hashes match")
    for sentence in found.damage[:_SHOWN]:
        print(f"damaged: {sentence}")
    if len(found.damage) > _SHOWN:
        print(f"damaged: {len(found.damage) - _SHOWN} more")
    for name, reasons in list(found.changes.items())[:_SHOWN]:
        print(f"would change: {name}: {'; '.join(reasons)}")
    if len(found.changes) > _SHOWN:
        print(f"would change: {len(found.changes) - _SHOWN} more")
    for note in found.notes:
        print(f"note: {note}")
    if found.rerun is not None:
        outcome = "the same bytes" if found.rerun else f"other bytes, in {len(found.changes)} tensors"
        print(f"a rerun would give {outcome if found.rerun or found.changes else 'the same tensors'}")
