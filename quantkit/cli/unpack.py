"""`quantkit unpack`: interleaved rows put back."""

from __future__ import annotations

from quantkit.cli._shared import (
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
from quantkit.cli.repack import Split, carry_out


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
    """Undo repacking: give interleaved tensors the rows of their base types.

    Every bit is kept: a file that `quantkit repack` wrote becomes the file it was made from, and one that was quantized
    straight to interleaved types becomes one that GPUs and other tools can use. Tensors of IQ1_S_R4 become IQ1_S, those
    of IQ1_M_R4 become IQ1_M where it can hold their scales and stay otherwise, those of Q8_K_R8 become Q8_0: their
    values do not change, their sizes do. When nothing can change, nothing is written.
    """
    from quantkit.formats import gguf
    from quantkit.pipelines.repack_file import plan_unpack

    split = Split(split_limit(split_max_size, split_max_tensors, keep_split), split_max_tensors, keep_split)
    carry_out(plan_unpack(gguf.require_model(gguf.open(source))), out, split, dry_run, threads, json)
