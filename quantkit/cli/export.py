"""`quantkit export`: export a GGUF file to a Hugging Face directory."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Literal

import typer

from quantkit.cli.common.hub import from_hub
from quantkit.cli.common.options import Json, Threads, parse_size
from quantkit.cli.common.output import gib, print_json, print_table
from quantkit.cli.common.progress_options import shows_progress


@shows_progress
@from_hub("source")
def export(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="IN.gguf",
            help="A GGUF file, any shard of a split one, or hf://ORG/NAME/FILE.gguf.",
            show_default=False,
        ),
    ],
    directory: Annotated[Path, typer.Argument(metavar="HF_DIR", help="The output directory.", show_default=False)],
    dtype: Annotated[
        Literal["auto", "bf16", "f16", "f32"],
        typer.Option(help="Type of quantized tensors; auto: f32, which is lossless.", case_sensitive=False),
    ] = "auto",
    max_shard_size: Annotated[
        str,
        typer.Option(
            "--split-max-size",
            "--max-shard-size",
            metavar="SIZE",
            help="Maximum size of a safetensors file, for example 5G.",
        ),
    ] = "5G",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, show the plan and write nothing.")
    ] = False,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Export a GGUF file to a Hugging Face directory.

    Float tensors keep their dtype and bits; quantized ones are decoded exactly. The directory loads in transformers
    (AutoModelForCausalLM, AutoTokenizer), and `quantkit convert` turns it into the same GGUF.
    """
    from quantkit.pipelines import api
    from quantkit.pipelines.options import ExportOptions

    started = time.monotonic()
    options = ExportOptions(dtype, parse_size(max_shard_size, "--max-shard-size"), dry_run, threads)
    done = api.export(source, directory, options, progress=True)
    seconds = time.monotonic() - started
    sizes: dict[str, list[int]] = {}
    for spec in done.specs:
        entry = sizes.setdefault(spec.dtype, [0, 0])
        entry[0] += 1
        entry[1] += spec.nbytes
    if json:
        dtypes = [{"dtype": name, "tensors": count, "bytes": size} for name, (count, size) in sizes.items()]
        record = {"tensors": len(done.specs), "bytes": done.nbytes, "dtypes": dtypes, "paths": done.paths}
        print_json("quantkit.export/1", record | {"seconds": seconds})
        return
    print_table(("dtype", "tensors", "size"), [(name, count, gib(size)) for name, (count, size) in sizes.items()])
    print(f"{len(done.specs)} tensors, {gib(done.nbytes)}; {', '.join(done.files)}")
    if done.paths:
        print(f"wrote {done.directory} in {seconds:.1f} s")
