"""`quantkit unpack`: undo the interleaving of rows."""

from __future__ import annotations

from quantkit.cli.common.hub import from_hub
from quantkit.cli.common.options import (
    DryRun,
    Json,
    KeepSplit,
    Out,
    Source,
    SplitMaxSize,
    SplitMaxTensors,
    Threads,
    split_limit,
)
from quantkit.cli.common.progress_options import shows_progress
from quantkit.cli.repack import run_repacking


@shows_progress
@from_hub("source")
def unpack(
    source: Source,
    out: Out,
    split_max_size: SplitMaxSize = None,
    split_max_tensors: SplitMaxTensors = None,
    keep_split: KeepSplit = False,
    dry_run: DryRun = False,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Undo repacking: convert interleaved tensors to their base types.

    No bit is lost: a file from `quantkit repack` becomes its input again, and a file that was quantized directly to
    interleaved types becomes one that all GPUs and tools can use. IQ1_S_R4 becomes IQ1_S, Q8_K_R8 becomes Q8_0, and
    IQ1_M_R4 becomes IQ1_M if that can store its scales; the values of these stay the same, but their sizes change. If
    nothing would change, no file is written.
    """
    from quantkit.pipelines.options import RepackOptions

    size = split_limit(split_max_size, split_max_tensors, keep_split)
    options = RepackOptions(
        split_max_size=size,
        split_max_tensors=split_max_tensors,
        keep_split=keep_split,
        dry_run=dry_run,
        threads=threads,
    )
    run_repacking(source, out, options, json, unpack=True)
