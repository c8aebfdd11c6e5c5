"""`quantkit sweep-bench`: speed of prompt and generation as the cache fills."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from quantkit.cli._runtime import (
    CpuMoe,
    GpuLayers,
    NCpuMoe,
    OverrideTensor,
    RunTimeRepack,
    open_model,
    placement_flags,
    with_attention,
)
from quantkit.cli._shared import Json, Threads, print_json
from quantkit.cli.bench import FastNumerics, bandwidth, conditions, record

_HEADER = "|    PP |     TG |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |  TG GB/s |"


@with_attention
def sweep_bench(
    model: Annotated[Path, typer.Argument(help="GGUF file, or any shard of one.")],
    ctx_size: Annotated[int, typer.Option("--ctx-size", "-c", help="Tokens of the cache to fill.", min=5)] = 2048,
    batch_size: Annotated[int, typer.Option("--batch-size", "-b", "-ub", help="Tokens of a step.", min=4)] = 512,
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
    """Time prompt and generation as the cache fills.

    At each step: the time of -b tokens as a prompt, and of a quarter as many generated one by one at the same place.
    Rows come as they are measured.
    """
    from quantkit.evaluate import bench as measure

    flags = placement_flags(gpu_layers, override_tensor, cpu_moe, n_cpu_moe)
    loaded = open_model(model, flags, run_time_repack, numerics=numerics, threads=threads, **attention, n_ctx=ctx_size)
    about = conditions(loaded) | {"n_ctx": ctx_size, "n_batch": batch_size}
    rows = measure.sweep(loaded, ctx_size, batch_size)
    if json:
        steps = [{"prompt": record(prompt), "generation": record(generation)} for prompt, generation in rows]
        print_json({"model": model, "size": loaded.size_bytes, **about, "steps": steps})
        return
    print(f"{model}: " + ", ".join(f"{key} {value}" for key, value in about.items()), file=sys.stderr)
    print(_HEADER)
    print("|" + "|".join("-" * len(cell) for cell in _HEADER.strip("|").split("|")) + "|")
    for prompt, generation in rows:
        print(
            f"| {prompt.tokens:5d} | {generation.tokens:6d} | {prompt.n_kv:6d} "
            f"| {prompt.seconds:8.3f} | {prompt.tokens_per_second:8.2f} "
            f"| {generation.seconds:8.3f} | {generation.tokens_per_second:8.2f} | {bandwidth(generation):>8} |",
            flush=True,
        )
