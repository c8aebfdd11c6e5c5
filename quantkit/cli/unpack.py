"""`quantkit unpack`: interleaved rows put back."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli._shared import Json, Threads
from quantkit.cli.repack import carry_out


def unpack(
    source: Annotated[
        Path, typer.Argument(metavar="IN", help="A GGUF file, or any shard of a set.", show_default=False)
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The file to write.", show_default=False)],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would change and write nothing.")] = False,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Undo repacking: give interleaved tensors the rows of their base types.

    Every bit is kept: a file that `quantkit repack` wrote becomes the file it was made from, and one that was quantized
    straight to interleaved types becomes one that GPUs and other tools can use. When nothing is interleaved, nothing is
    written.
    """
    import quantkit
    from quantkit.repack_file import plan_unpack

    carry_out(plan_unpack(quantkit.open(source)), out, dry_run, threads, json)
