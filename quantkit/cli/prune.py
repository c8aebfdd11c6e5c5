"""`quantkit prune`: leave experts or layers out of a file."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

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
from quantkit.cli.common.output import gib, print_json
from quantkit.cli.common.progress_options import shows_progress
from quantkit.errors import OptionError, UnsupportedError


@shows_progress
@from_hub("source")
def prune(
    source: Source,
    out: Out,
    prune_experts: Annotated[
        str | None,
        typer.Option(
            metavar="KEEP|FILE",
            help='Experts that stay in each layer: a number, or JSON {"keep": {"LAYER": [EXPERT, …]}}.',
        ),
    ] = None,
    saliency: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Saliencies for --prune-experts KEEP, of quantkit saliency."),
    ] = None,
    prune_layers: Annotated[
        str | None, typer.Option(metavar="L0,L1,…", help="Layers to leave out, such as 3,5-7.")
    ] = None,
    split_max_size: SplitMaxSize = None,
    split_max_tensors: SplitMaxTensors = None,
    keep_split: KeepSplit = False,
    dry_run: DryRun = False,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Leave experts or layers out of a model; the rest is copied bit for bit.

    Router rows and metadata follow. What is left out is lost, and the model answers otherwise: measure it with
    `quantkit compare`, on a text other than that of the saliencies.
    """
    from quantkit.formats import gguf
    from quantkit.inputs.json_input import read_object
    from quantkit.pipelines import prune as pruning

    limit = split_limit(split_max_size, split_max_tensors, keep_split)
    file = gguf.require_model(gguf.open(source))
    if prune_experts is None and prune_layers is None:
        raise OptionError("prune needs --prune-experts KEEP|FILE or --prune-layers L0,L1,…")
    if (saliency is not None) != (prune_experts is not None and prune_experts.isdecimal()):
        raise OptionError(
            "--prune-experts KEEP takes the saliencies of `quantkit saliency`: add --saliency FILE; a FILE of experts "
            "goes without"
        )
    keep: dict[int, list[int]] | None = None
    if prune_experts is not None and saliency is not None:
        arch = file.metadata.get("general.architecture")
        experts, groups = (file.metadata.get(f"{arch}.expert{key}") for key in ("_count", "_group_count"))
        if not isinstance(experts, int):
            raise UnsupportedError(f"{source}: the file has no experts to prune")
        scores = pruning.saliencies(read_object(_there(saliency)), saliency, experts)
        keep = pruning.most_salient(scores, int(prune_experts), groups if isinstance(groups, int) and groups else 1)
    elif prune_experts is not None:
        keep = pruning.kept_experts(read_object(_there(Path(prune_experts))), prune_experts)
    started = time.perf_counter()
    job = pruning.plan_prune(file, keep, () if prune_layers is None else _layers(prune_layers))
    paths: list[Path] = []
    if not dry_run:
        paths = job.write(
            out,
            split_max_bytes=limit,
            split_max_tensors=split_max_tensors,
            keep_split=keep_split,
            threads=threads,
            progress=True,
        )
    seconds, before = time.perf_counter() - started, sum(t.nbytes for t in file.tensors.values())
    if json:
        record = {"source": source, "paths": paths, "bytes_before": before, "bytes": job.nbytes, "seconds": seconds}
        print_json("quantkit.prune/1", record | {"experts": {str(k): v for k, v in (keep or {}).items()}})
        return
    print(f"{gib(before)} become {gib(job.nbytes)}, {job.nbytes / before:.1%}")
    for path in paths:
        print(f"wrote {path} in {seconds:.1f} s")


def _layers(text: str) -> set[int]:
    from quantkit.recipe.errors import RecipeError
    from quantkit.recipe.rules.layers import numbers

    try:
        return numbers(text)
    except RecipeError:
        raise OptionError(f"--prune-layers {text!r}: layers are numbers and ranges of numbers, such as 3,5-7") from None


def _there(path: Path) -> Path:
    if not path.is_file():
        raise OptionError(f"{path}: no such file")
    return path
