"""`quantkit bench`: tokens per second of a prompt and of generation."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from quantkit.cli._runtime import (
    CpuMoe,
    GpuLayers,
    NCpuMoe,
    OverrideTensor,
    RunTimeRepack,
    attention_conditions,
    open_model,
    placement_flags,
    repacked,
    with_attention,
)
from quantkit.cli._shared import Json, Threads, gib, print_json, table
from quantkit.errors import QuantkitError

FastNumerics = Annotated[
    str, typer.Option("--numerics", help="exact: float32 activations; fast: quantized where that is faster.")
]


@with_attention
def bench(
    model: Annotated[Path, typer.Argument(help="GGUF file, or any shard of one.")],
    n_prompt: Annotated[int, typer.Option("--n-prompt", "-p", help="Tokens of the prompt; 0: none.", min=0)] = 512,
    n_gen: Annotated[int, typer.Option("--n-gen", "-n", help="Tokens to generate; 0: none.", min=0)] = 128,
    repetitions: Annotated[int, typer.Option("--repetitions", "-r", help="Times; the median counts.", min=1)] = 5,
    numerics: FastNumerics = "fast",
    attention: Any = None,
    threads: Threads = None,
    gpu_layers: GpuLayers = None,
    override_tensor: OverrideTensor = None,
    cpu_moe: CpuMoe = False,
    n_cpu_moe: NCpuMoe = 0,
    run_time_repack: RunTimeRepack = False,
    json: Json = False,
) -> None:
    """Time a prompt and the generation of tokens.

    GB/s is what generating reads, weights and cache, beside which the memory's own speed is the limit.
    """
    from quantkit.evaluate import bench as measure

    if not n_prompt and not n_gen:
        raise QuantkitError("bench with -p 0 and -n 0 measures nothing; give one of them a number of tokens")
    flags = placement_flags(gpu_layers, override_tensor, cpu_moe, n_cpu_moe)
    loaded = open_model(model, flags, run_time_repack, numerics=numerics, threads=threads, **attention)
    speeds = measure.bench(loaded, n_prompt, n_gen, repetitions)
    about = conditions(loaded) | {"repetitions": repetitions}
    if json:
        print_json({"model": model, "size": loaded.size_bytes, **about, "tests": [record(s) for s in speeds]})
        return
    rows = [[model.name, gib(loaded.size_bytes), s.test, f"{s.tokens_per_second:.1f}", bandwidth(s)] for s in speeds]
    print(table(["model", "size", "test", "t/s", "GB/s"], rows))
    print(", ".join(f"{key} {value}" for key, value in about.items()), file=sys.stderr)


def conditions(model: Any) -> dict[str, Any]:
    """What the speed depends on besides the file."""
    from quantkit import __version__, jit

    found = {
        "numerics": model.numerics,
        **attention_conditions(model),
        "threads": model.threads,
        "isa": jit.isa(),
        "quantkit": __version__,
        **repacked(model),
    }
    return found | ({"layer_by_layer": model.slow_because} if model.slow_because else {})


def record(speed: Any) -> dict[str, Any]:
    """A row for JSON."""
    return asdict(speed) | {"tokens_per_second": speed.tokens_per_second, "gb_per_second": speed.gb_per_second}


def bandwidth(speed: Any) -> str:
    return "" if speed.gb_per_second is None else f"{speed.gb_per_second:.1f}"
