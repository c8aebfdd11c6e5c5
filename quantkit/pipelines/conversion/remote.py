"""Conversion of a checkpoint on the Hub: planned from its headers, written while its files are streamed.

The output has the bytes that it has from a directory of the same checkpoint, named as the repository. It is written by
`quantize`, as a copy: with a journal, so that it is resumed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from quantkit.formats.pipeline import Progress
from quantkit.hub.address import Address
from quantkit.pipelines.conversion.convert import filled_name
from quantkit.pipelines.conversion.plan import Conversion, plan_conversion
from quantkit.pipelines.options import ConvertOptions, PathLike, QuantizeOptions


def plan_remote(address: Address, outtype: str, options: ConvertOptions | QuantizeOptions, mtp: str) -> Conversion:
    """Read configuration, tokenizer and headers of a checkpoint on the Hub and plan its GGUF."""
    from quantkit.hub.checkpoint import open_checkpoint
    from quantkit.hub.stream import CheckpointStream

    remote = open_checkpoint(address)
    stream = CheckpointStream(remote, options.disk, options.keep_shards)
    about = (options.pre, mtp, options.metadata, options.model_name)
    return plan_conversion(remote.directory, outtype, *about, opened=remote.checkpoint, arrivals=stream)


def convert_remote(
    address: Address,
    out: PathLike,
    outtype: str,
    options: ConvertOptions,
    progress: Progress | bool,
    on_message: Callable[[str], None],
) -> Conversion:
    """Convert a checkpoint on the Hub; parameters and result as of `api.convert`."""
    from quantkit.pipelines import planning
    from quantkit.pipelines.quantize import quantize_with_plan

    conversion = plan_remote(address, outtype, options, options.mtp)
    if not options.dry_run:
        view = conversion.as_gguf
        written = quantize_with_plan(
            view,
            Path(filled_name(out, conversion.source, conversion.outtype.name)),
            planning.plan_types(planning.PlanInput.of(view), "COPY", QuantizeOptions(), None),
            split_max_bytes=options.split_max_size,
            split_max_tensors=options.split_max_tensors,
            threads=options.threads,
            progress=progress,
            on_message=on_message,
        )
        conversion.paths.extend(written.paths)
    return conversion
