"""`quantkit sweep-bench`: prompt and generation speed as the cache fills."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from quantkit.cli.bench import bench_conditions_line, record, shares
from quantkit.cli.common.command import takes_model
from quantkit.cli.common.evaluation import on_message
from quantkit.cli.common.hub import from_hub
from quantkit.cli.common.launch import Launch, context_size, runs_a_model
from quantkit.cli.common.options import FastNumerics, Json, Threads
from quantkit.cli.common.output import print_json
from quantkit.cli.common.progress_options import shows_progress
from quantkit.errors import UnsupportedError
from quantkit.progress import ProgressBar

if TYPE_CHECKING:
    from quantkit.evaluate.bench import MeasuredSpeed

_HEADER = "|    PP |     TG |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s | TG GB/s | of mem |"
_MEMORY = "  RSS HWM |"


@shows_progress
@takes_model()
@from_hub("model")
@runs_a_model
def sweep_bench(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL",
            help="A GGUF file, any shard of a split one, or hf://ORG/NAME/FILE.gguf.",
            show_default=False,
        ),
    ],
    ctx_size: Annotated[
        int,
        typer.Option("--ctx-size", "-c", help="Tokens of the cache to fill; 0: the model's context length.", min=0),
    ] = 2048,
    batch_size: Annotated[
        int, typer.Option("--batch-size", "-b", help="Tokens per step, if fewer than -ub.", min=4)
    ] = 2048,
    ubatch_size: Annotated[int, typer.Option("--ubatch-size", "-ub", help="Tokens per step.", min=4)] = 512,
    n_predict: Annotated[
        int, typer.Option("--n-predict", "-n", help="Tokens to generate per step; 0: a quarter of a step.", min=0)
    ] = 0,
    repeat: Annotated[
        int, typer.Option("--repeat", "-nrep", metavar="N", help="Repetitions per step; the median is reported.", min=1)
    ] = 1,
    sweep_stride: Annotated[int, typer.Option("--sweep-stride", metavar="N", help="Time every Nth step.", min=1)] = 1,
    warmup: Annotated[
        bool, typer.Option("--warmup/--no-warmup", help="Generate one token beforehand, untimed.")
    ] = True,
    warmup_batch: Annotated[
        bool, typer.Option("--warmup-batch", "-wb", help="Warm up with a whole step instead of one token.")
    ] = False,
    sweep_memory: Annotated[
        bool, typer.Option("--sweep-memory", help="Also print the peak resident memory in MiB.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Plot tokens/s over depth to a PNG, SVG or PDF file.")
    ] = None,
    numerics: FastNumerics = "fast",
    launch: Launch = None,  # type: ignore[assignment]  # the decorator gives it
    threads: Threads = None,
    output_format: Annotated[Literal["md", "jsonl"], typer.Option("--output-format", help="Output format.")] = "md",
    json: Json = False,
) -> None:
    """Time prompt and generation as the cache fills.

    Each step times a prompt of -ub tokens, then generation (by default of a quarter as many tokens) at the same depth.
    The last columns are the GB/s that generation reads, and its share of the bandwidth that the same threads reach when
    they only sum the model's bytes. Rows are printed as they are measured.
    """
    from quantkit.evaluate import bench as measure
    from quantkit.evaluate.conditions import run_conditions

    if sweep_memory and sys.platform == "win32":
        raise UnsupportedError("--sweep-memory: Windows does not tell a program its peak memory; drop the option")
    ctx_size, step = context_size(ctx_size, model), min(batch_size, ubatch_size)
    if plot is not None:
        from quantkit.evaluate.report.plots import require_plot_file

        require_plot_file(plot)
    loaded = launch.open(model, numerics=numerics, threads=threads, n_ctx=ctx_size)
    memory = measure.read_speed(loaded)
    about = run_conditions(loaded) | {"n_kv_max": ctx_size, "n_ubatch": step, "repeat": repeat}
    about["warmup"] = "a batch" if warmup_batch else "a token" if warmup else "none"
    on_message(f"{model}: {bench_conditions_line(about, memory)}")
    rows, steps = [], []
    how: dict[str, Any] = {
        "n_generate": n_predict,
        "repeat": repeat,
        "stride": sweep_stride,
        "warmup": warmup,
        "warmup_batch": warmup_batch,
    }
    with ProgressBar("sweep-bench", ticks=False) as bar:  # nothing is drawn while a step is timed
        for row in measure.sweep(loaded, ctx_size, step, **how):
            rows.append(row)
            steps.append(_step(*row, memory))
            if output_format == "jsonl":
                print_json(
                    "quantkit.sweep-bench-step/1",
                    about | {key: value for key, value in steps[-1].items() if key not in ("prompt", "generation")},
                )
            elif not json:
                _show(steps[-1], sweep_memory, first=len(rows) == 1)
            sys.stdout.flush()
            depth, rates = steps[-1]["n_kv"], f"PP {steps[-1]['speed_pp']:.1f} TG {steps[-1]['speed_tg']:.1f} tok/s"
            bar.show(depth + step, ctx_size, values=rates)
    if json:
        print_json(
            "quantkit.sweep-bench/1",
            {"path": model, "bytes": loaded.size_bytes, **about, "memory_bytes_per_second": memory, "steps": steps},
        )
    if plot is not None:
        from quantkit.evaluate.report.plots import plot_sweep

        plot_sweep(plot, rows, memory, f"{model.name}: {loaded.threads} threads, {about['isa']}, {about['cache_type']}")
        on_message(f"plot: {plot}")


def _step(prompt: MeasuredSpeed, generation: MeasuredSpeed, memory: float) -> dict[str, Any]:
    """A row with the keys of ik_llama.cpp's JSON lines, plus the records of prompt and generation."""
    generated = record(generation, memory)
    return {
        "pp": prompt.tokens,
        "tg": generation.tokens,
        "n_kv": prompt.n_kv,
        "t_pp": prompt.seconds,
        "speed_pp": prompt.tokens_per_second,
        "t_tg": generation.seconds,
        "speed_tg": generation.tokens_per_second,
        "gb_per_second": generated["gb_per_second"],
        "share_of_memory": generated["share_of_memory"],
        "rss_hwm": _peak_memory(),
        "prompt": record(prompt, memory),
        "generation": generated,
    }


def _peak_memory() -> int | None:
    """The largest resident size of this process in bytes; None on Windows, where Python has no `resource`."""
    if sys.platform == "win32":
        return None
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _show(step: dict[str, Any], memory: bool, first: bool) -> None:
    if first:
        header = _HEADER + _MEMORY * memory
        print(header)
        print("|" + "|".join("-" * len(cell) for cell in header.strip("|").split("|")) + "|")
    speed, share = shares(step)
    line = (
        f"| {step['pp']:5d} | {step['tg']:6d} | {step['n_kv']:6d} | {step['t_pp']:8.3f} | {step['speed_pp']:8.2f} "
        f"| {step['t_tg']:8.3f} | {step['speed_tg']:8.2f} | {speed:>7} | {share:>6} |"
    )
    print(line + f" {step['rss_hwm'] / 2**20:8.0f} |" * memory)
