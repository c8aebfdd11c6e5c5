"""`quantkit bench`: tokens per second of prompt processing and generation."""

from __future__ import annotations

import csv
import gc
import itertools
import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from quantkit.cli.common.bench_lists import integers
from quantkit.cli.common.command import in_sections, takes_model
from quantkit.cli.common.evaluation import on_message
from quantkit.cli.common.hub import from_hub
from quantkit.cli.common.launch import Launch, runs_variants
from quantkit.cli.common.llama_options import takes_llama_options
from quantkit.cli.common.options import FastNumerics, Json, checked_threads, unless_from_environment
from quantkit.cli.common.output import gib, print_json
from quantkit.cli.common.progress_options import shows_progress
from quantkit.errors import OptionError
from quantkit.progress import ProgressBar, is_terminal

if TYPE_CHECKING:
    from quantkit.evaluate.bench import Case, MeasuredSpeed
    from quantkit.runtime.model import Model

_COLUMNS = ("model", "size", "params", "backend", "threads", "test", "t/s", "GB/s", "of memory")
_WIDTHS = (5, 11, 9, 7, 7, 6, 16, 6, 9)  # of the columns on a terminal, where a row is not wider


@shows_progress
@in_sections(
    Tests=["n_prompt", "n_gen", "n_depth", "prompt_and_gen", "gen_after_prompt", "repetitions", "threads", "warmup",
           "delay", "numerics"],
)  # fmt: skip
@takes_llama_options("embeddings", "output_err")
@takes_model("models")
@from_hub("models")
@runs_variants
def bench(
    models: Annotated[
        list[Path],
        typer.Argument(
            metavar="MODEL…",
            help="GGUF files, any shard of a split one, or hf://ORG/NAME/FILE.gguf.",
            show_default=False,
        ),
    ],
    n_prompt: Annotated[
        str,
        typer.Option(
            "--n-prompt", "-p", metavar="N,…", help="Prompt tokens; 0: no prompt test. 16-64+16 and 16-64*2 are ranges."
        ),
    ] = "512",
    n_gen: Annotated[
        str, typer.Option("--n-gen", "-n", metavar="N,…", help="Tokens to generate; 0: no generation test.")
    ] = "128",
    n_depth: Annotated[
        str, typer.Option("--n-depth", "-d", metavar="N,…", help="Tokens in the cache before the test; not timed.")
    ] = "0",
    prompt_and_gen: Annotated[
        list[str] | None,
        typer.Option("-pg", metavar="P,G", help="Prompt of P tokens and generation of G, timed together. Repeatable."),
    ] = None,
    gen_after_prompt: Annotated[
        list[str] | None,
        typer.Option("-gp", metavar="P,G", help="Generation of G tokens after an untimed prompt of P. Repeatable."),
    ] = None,
    repetitions: Annotated[
        int, typer.Option("--repetitions", "-r", metavar="N", help="Repetitions; the median is reported.", min=1)
    ] = 5,
    threads: Annotated[
        str | None,
        typer.Option(
            "--threads",
            "-t",
            metavar="N,…",
            help="Number of threads; default, and -1: the CPUs that this process may use.",
            envvar="QUANTKIT_THREADS",
            callback=unless_from_environment(),
        ),
    ] = None,
    warmup: Annotated[bool, typer.Option("--warmup/--no-warmup", help="Run each test once before, untimed.")] = True,
    delay: Annotated[float, typer.Option(metavar="SECONDS", help="Pause before each test.", min=0)] = 0,
    numerics: FastNumerics = "fast",
    launches: Sequence[Launch] = (),  # the decorator gives it
    output: Annotated[
        Literal["md", "csv", "json", "jsonl"], typer.Option("--output", "-o", help="Output format.")
    ] = "md",
    json: Json = False,
) -> None:
    """Time prompt processing and token generation.

    t/s is the median of the repetitions ± their standard deviation. GB/s is the rate at which generation reads weights
    and cache. The last column is its share of the bandwidth that the same threads reach when they only sum the model's
    bytes.
    """
    from quantkit.evaluate import bench as measure
    from quantkit.evaluate.conditions import run_conditions

    form = "json" if json else output
    cases = _cases(n_prompt, n_gen, n_depth, prompt_and_gen or [], gen_after_prompt or [])
    longest = max(case.n_ctx for case in cases)
    counts = _thread_counts(threads)
    rows: list[dict[str, Any]] = []
    columns = varying_columns([launch_record(launch.given) for launch in launches])

    name_columns = max(len(path.name) for path in models)

    def show_repetition(test: str, rate: float) -> None:
        bar.show(bar.done + 1, total, values=f"{test} {rate:.2f} tok/s")

    def timed(path: Path, model: Model, options: dict[str, Any]) -> None:
        memory = measure.read_speed(model)
        about = run_conditions(model) | {"repetitions": repetitions}
        on_message(f"{path}: {bench_conditions_line(about, memory)}")
        timings = measure.bench(model, cases, repetitions, warmup=warmup, delay=delay, progress=show_repetition)
        for speed in timings:
            row = _model_record(model, path) | about | options | record(speed, memory)
            rows.append(row)
            _show(row, form, columns, name_columns, first=len(rows) == 1)

    total = len(models) * len(launches) * len(counts) * len(cases) * (repetitions + warmup)
    with ProgressBar("bench", ticks=False) as bar:  # nothing is drawn while a test is timed
        for path, launch, count in itertools.product(models, launches, counts):
            opened = launch.open(path, numerics=numerics, threads=count, n_ctx=longest)
            timed(path, opened, launch_record(launch.given))
            del opened
            gc.collect()  # a model has reference cycles; the next one needs its memory
    if form == "json":
        print_json("quantkit.bench/1", {"runs": rows})


def _cases(prompts: str, answers: str, depths: str, both: list[str], after: list[str]) -> list[Case]:
    """The tests of -p, -n and -d, then those of -pg and -gp."""
    from quantkit.evaluate.bench import Case

    cases = []
    for depth in integers("-d", depths, 0):
        cases += [Case(n, 0, depth) for n in integers("-p", prompts, 0) if n]
        cases += [Case(0, n, depth) for n in integers("-n", answers, 0) if n]
    cases += [Case(*_pair("-pg", text)) for text in both]
    for text in after:
        prompt, generated = _pair("-gp", text)
        cases.append(Case(0, generated, prompt))
    if not cases:
        raise OptionError("-p 0 and -n 0 leave nothing to measure; give one of them a number of tokens")
    return cases


def _thread_counts(text: str | None) -> list[int | None]:
    """The numbers of threads of -t; None, and -1, for the CPUs that this process may use."""
    if text is None or text == "-1":
        return [None]
    return [checked_threads(count) for count in integers("-t", text, 1)]


def _pair(option: str, text: str) -> tuple[int, int]:
    numbers = integers(option, text, 1)
    if len(numbers) != 2:
        raise typer.BadParameter(f"{option} {text}: write two numbers of tokens, for example 512,128")
    return numbers[0], numbers[1]


def _model_record(model: Model, path: Path) -> dict[str, Any]:
    """The model as a record with llama-bench's keys."""
    count = sum(math.prod(tensor.shape) for tensor in model.weights.values())
    return {"model_filename": str(path), "model_type": model.hparams.arch, "model_size": model.size_bytes,
            "model_n_params": count, "backend": "CPU"}  # fmt: skip


def launch_record(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options that take lists, under llama-bench's keys."""
    layers = given["gpu_layers"]
    return {
        "n_gpu_layers": int(layers) if layers is not None and layers.isdecimal() else layers,
        "flash_attn": given["flash_attn"] == "on",
        "type_k": given["cache_type_k"],
        "type_v": given["cache_type_v"],
        "mla_attn": given["mla"],
        "attn_max_batch": given["attention_max_batch"],
        "fused_moe": given["fused_moe"],
        "repack": given["run_time_repack"],
        "use_mmap": given["mmap"] and not given["huge_pages"],
        "use_thp": given["huge_pages"],
    }


def varying_columns(variants: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys whose values are not the same in all variants."""
    return [key for key in variants[0] if len({variant[key] for variant in variants}) > 1]


def record(speed: MeasuredSpeed, memory: float) -> dict[str, Any]:
    """A measured speed as a record with llama-bench's keys and our own; `memory` in bytes/s."""
    rates = [speed.tokens / seconds for seconds in speed.samples]
    gb = speed.gb_per_second
    return {
        "test": speed.test,
        "n_kv": speed.n_kv,
        "tokens": speed.tokens,
        "test_time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "samples_ns": [round(1e9 * seconds) for seconds in speed.samples],
        "samples_ts": rates,
        "median_ts": speed.tokens_per_second,
        "avg_ts": sum(rates) / len(rates),
        "stddev_ts": speed.deviation,
        "gb_per_second": gb,
        "memory_gb_per_second": memory / 1e9,
        "share_of_memory": None if gb is None else gb * 1e9 / memory,
    }


def bench_conditions_line(about: Mapping[str, object], memory: float) -> str:
    """The conditions and the memory bandwidth in one line."""
    return ", ".join(f"{key} {value}" for key, value in about.items()) + f"; memory {memory / 1e9:.1f} GB/s"


def _show(row: dict[str, Any], form: str, columns: Sequence[str], name_columns: int, first: bool) -> None:
    """Print a row as soon as it is measured. JSON is printed as one document at the end."""
    if form == "jsonl":
        print_json("quantkit.bench-run/1", row)
    elif form == "csv":
        flat = {key: value for key, value in row.items() if not isinstance(value, list)}
        writer = csv.DictWriter(sys.stdout, flat.keys(), lineterminator="\n")
        if first:
            writer.writeheader()
        writer.writerow(flat)
    elif form == "md":
        model = [Path(row["model_filename"]).name, gib(row["model_size"]), f"{row['model_n_params'] / 1e9:.3f} B"]
        options = [_cell(row[key]) for key in columns]
        speed = [row["test"], f"{row['median_ts']:.2f} ± {row['stddev_ts']:.2f}", *shares(row)]
        cells = [*model, row["backend"], row["threads"], *options, *speed]
        header = [*_COLUMNS[:5], *columns, *_COLUMNS[5:]]
        widths = [max(name_columns, _WIDTHS[0]), *_WIDTHS[1:5], *(max(len(key), 5) for key in columns), *_WIDTHS[5:]]
        lines = [header, ["---"] * 4 + ["---:"] * (len(header) - 4), cells] if first else [cells]
        for line in lines:
            aligned = _aligned(line, widths) if is_terminal(sys.stdout) else map(str, line)
            print("| " + " | ".join(aligned) + " |")
    sys.stdout.flush()


def _cell(value: object) -> str:
    """A value of an option: a switch as 0 or 1, a default as a dash."""
    return "-" if value is None else str(int(value) if isinstance(value, bool) else value)


def _aligned(cells: Sequence[object], widths: Sequence[int]) -> list[str]:
    """Cells padded to widths: Markdown that is a table on a terminal too."""
    return [f"{cell!s:<{w}}" if i < 4 else f"{cell!s:>{w}}" for i, (cell, w) in enumerate(zip(cells, widths))]


def shares(row: dict[str, Any]) -> list[str]:
    """The cells GB/s and share of memory bandwidth; empty if the row has none."""
    return [f"{row['gb_per_second']:.1f}", f"{row['share_of_memory']:.0%}"] if row["gb_per_second"] else ["", ""]
