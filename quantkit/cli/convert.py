"""`quantkit convert`: a Hugging Face directory to GGUF."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quantkit.cli.common.options import Json, Threads, parse_size
from quantkit.cli.common.output import gib, print_json, print_left_out, print_table
from quantkit.cli.common.positional import refuse_type
from quantkit.cli.common.progress_options import shows_progress
from quantkit.errors import UnsupportedError

if TYPE_CHECKING:
    from quantkit.pipelines.conversion.plan import Conversion


@shows_progress
def convert(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="HF_DIR", help="Directory with config.json, tokenizer files and weights.", show_default=False
        ),
    ],
    out: Annotated[str, typer.Argument(metavar="OUT.gguf", help="The output file.", show_default=False)],
    outtype: Annotated[
        str, typer.Option(metavar="TYPE", help="auto, bf16, f16, f32 or q8_0; auto: bf16 or f16, by the checkpoint.")
    ] = "auto",
    split_max_size: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Write shards of at most SIZE, for example 50G or 48GiB.")
    ] = None,
    pre: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Value of tokenizer.ggml.pre, if the tokenizer is not recognised."),
    ] = None,
    mtp: Annotated[
        str,
        typer.Option(
            metavar="POLICY",
            help="MTP (multi-token prediction) layers: keep or drop; auto: the architecture's default.",
        ),
    ] = "auto",
    vision: Annotated[
        str,
        typer.Option(metavar="POLICY", help="Image and audio encoders: only drop is supported."),
    ] = "drop",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, show the plan and write nothing.")
    ] = False,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Convert a Hugging Face checkpoint to GGUF.

    Matrices get the outtype; norms, biases and vectors are f32. A float32 checkpoint becomes f16 unless you say
    --outtype f32. Memory use does not grow with the model's size. The output file appears only when it is complete.
    """
    from quantkit.pipelines import api
    from quantkit.pipelines.options import ConvertOptions

    refuse_type(out, "OUT.gguf", "the type of the matrices is --outtype")
    if vision != "drop":
        raise UnsupportedError(f"--vision {vision}: image and audio encoders are not converted; only drop is supported")
    size = None if split_max_size is None else parse_size(split_max_size)
    started = time.monotonic()
    done = api.convert(source, out, outtype, ConvertOptions(pre, mtp, size, dry_run, threads), progress=True)
    record = _record(done, time.monotonic() - started)
    if json:
        print_json("quantkit.convert/1", record)
        return
    rows = [(row["type"], row["tensors"], gib(row["bytes"])) for row in record["types"]]
    print_table(("type", "tensors", "size"), rows)
    print(
        f"{done.arch.name}, {record['parameters'] / 1e6:.2f} M parameters, {len(done.specs)} tensors, "
        f"{gib(done.nbytes)}, {8 * done.nbytes / done.n_params:.3f} bits per weight, "
        f"tokenizer {record['tokenizer']}"
    )
    print_left_out(done.left_out, done.warnings)
    if done.n_mtp_layers:
        print(f"kept: {done.n_mtp_layers} MTP (multi-token prediction) layer(s), which quantkit does not run")
    if done.fallbacks:
        listed = ", ".join(done.fallbacks[:3]) + (", …" if done.fallbacks[3:] else "")
        print(
            f"warning: rows of {len(done.fallbacks)} tensor(s) are not a multiple of {done.outtype.block_size}, so "
            f"they are f16 instead of {done.outtype.name}: {listed}"
        )
    for path in done.paths:
        print(f"wrote {path} in {record['seconds']:.1f} s")


def _record(done: Conversion, seconds: float) -> dict[str, Any]:
    counts, sizes = Counter(s.type.name for s in done.specs), Counter[str]()
    for spec in done.specs:
        sizes[spec.type.name] += spec.nbytes
    metadata = done.metadata
    return {
        "architecture": done.arch.name,
        "outtype": done.outtype.name,
        "parameters": done.n_params,
        "tensors": len(done.specs),
        "bytes": done.nbytes,
        "types": [{"type": name, "tensors": counts[name], "bytes": sizes[name]} for name in counts],
        "fallbacks": done.fallbacks,
        "left_out": done.left_out,
        "warnings": done.warnings,
        "nextn_predict_layers": done.n_mtp_layers,
        "tokenizer": f"{metadata['tokenizer.ggml.model']}/{metadata['tokenizer.ggml.pre']}",
        "paths": done.paths,
        "seconds": seconds,
    }
