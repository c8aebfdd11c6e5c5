"""`quantkit bench`: tokens per second of prompts and of generation."""

from __future__ import annotations

import csv
import gc
import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quantkit.cli._runtime import Launch, conditions, runs_a_model
from quantkit.cli._shared import Json, checked_threads, gib, print_json
from quantkit.errors import QuantkitError, UnknownNameError

if TYPE_CHECKING:
    from quantkit.evaluate.bench import Case

FastNumerics = Annotated[
    str, typer.Option("--numerics", help="exact: float32 activations; fast: quantized where that is faster.")
]
_FORMATS = ("md", "csv", "json", "jsonl")
_COLUMNS = ("model", "size", "params", "backend", "threads", "test", "t/s", "GB/s", "of memory")


@runs_a_model
def bench(
    models: Annotated[list[Path], typer.Argument(help="GGUF files, or any shard of one.")],
    n_prompt: Annotated[str, typer.Option("--n-prompt", "-p", metavar="N,…", help="Tokens of a prompt; 0: none.")] = (
        "512"
    ),
    n_gen: Annotated[str, typer.Option("--n-gen", "-n", metavar="N,…", help="Tokens to generate; 0: none.")] = "128",
    n_depth: Annotated[
        str, typer.Option("--n-depth", "-d", metavar="N,…", help="Tokens in the cache before, which are not timed.")
    ] = "0",
    prompt_and_gen: Annotated[
        list[str] | None,
        typer.Option("-pg", metavar="P,G", help="A prompt and its answer, timed together. Repeatable."),
    ] = None,
    gen_after_prompt: Annotated[
        list[str] | None, typer.Option("-gp", metavar="G,P", help="An answer, after a prompt not timed. Repeatable.")
    ] = None,
    repetitions: Annotated[int, typer.Option("--repetitions", "-r", help="Times; the median counts.", min=1)] = 5,
    threads: Annotated[
        str | None, typer.Option("--threads", "-t", metavar="N,…", help="Threads; default: the CPUs of this process.")
    ] = None,
    warmup: Annotated[
        bool, typer.Option("--warmup/--no-warmup", help="Once more before, which does not count.")
    ] = True,
    numerics: FastNumerics = "fast",
    launch: Launch = None,  # type: ignore[assignment]  # the decorator gives it
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="md|csv|json|jsonl", help="Form of the rows.")
    ] = "md",
    json: Json = False,
) -> None:
    """Time prompts and the generation of tokens.

    t/s is the median over the repetitions ± their standard deviation. GB/s is what generating reads, weights and cache,
    and the last column its share of what the same threads reach when they only sum the model's bytes.
    """
    from quantkit.evaluate import bench as measure

    form = "json" if json else output
    if form not in _FORMATS:
        raise UnknownNameError("form of output", form, _FORMATS)
    cases = _cases(n_prompt, n_gen, n_depth, prompt_and_gen or [], gen_after_prompt or [])
    longest = max(case.n_ctx for case in cases)
    counts = [checked_threads(count) for count in (_numbers("-t", threads, 1) if threads else [None])]
    rows: list[dict[str, Any]] = []

    def timed(path: Path, model: Any) -> None:
        memory = measure.read_speed(model)
        about = conditions(model) | {"repetitions": repetitions}
        print(f"{path}: {said(about, memory)}", file=sys.stderr)
        for speed in measure.bench(model, cases, repetitions, warmup=warmup):
            row = _described(model, path) | about | record(speed, memory)
            rows.append(row)
            _show(row, form, first=len(rows) == 1)

    for path in models:
        for count in counts:
            timed(path, launch.open(path, numerics=numerics, threads=count, n_ctx=longest))
            gc.collect()  # parts of a model refer to it; the next one needs its memory
    if form == "json":
        print_json(rows)


def _cases(prompts: str, answers: str, depths: str, both: list[str], after: list[str]) -> list[Case]:
    from quantkit.evaluate.bench import Case

    cases = []
    for depth in _numbers("-d", depths, 0):
        cases += [Case(n, 0, depth) for n in _numbers("-p", prompts, 0) if n]
        cases += [Case(0, n, depth) for n in _numbers("-n", answers, 0) if n]
    cases += [Case(*_pair("-pg", text)) for text in both]
    cases += [Case(0, *_pair("-gp", text)) for text in after]
    if not cases:
        raise QuantkitError("bench with -p 0 and -n 0 measures nothing; give one of them a number of tokens")
    return cases


def _numbers(option: str, text: str, least: int) -> list[int]:
    """The integers of a comma list."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) >= least for part in parts):
        raise typer.BadParameter(f"{option} {text}: write whole numbers from {least} on, as 512,1024")
    return [int(part) for part in parts]


def _pair(option: str, text: str) -> tuple[int, int]:
    numbers = _numbers(option, text, 1)
    if len(numbers) != 2:
        raise typer.BadParameter(f"{option} {text}: write two numbers of tokens, as 512,128")
    return numbers[0], numbers[1]


def _described(model: Any, path: Path) -> dict[str, Any]:
    """What a model is, by the keys of llama-bench."""
    count = sum(math.prod(tensor.shape) for tensor in model.weights.values())
    return {"model_filename": str(path), "model_type": model.hparams.arch, "model_size": model.size_bytes,
            "model_n_params": count, "backend": "CPU"}  # fmt: skip


def record(speed: Any, memory: float) -> dict[str, Any]:
    """A speed, by the keys of llama-bench and ours; `memory` in bytes/s."""
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


def said(about: dict[str, Any], memory: float) -> str:
    """Conditions in a line."""
    return ", ".join(f"{key} {value}" for key, value in about.items()) + f"; memory {memory / 1e9:.1f} GB/s"


def _show(row: dict[str, Any], form: str, first: bool) -> None:
    """Print a row, as soon as it is known; JSON comes as one document at the end."""
    if form == "jsonl":
        print_json(row)
    elif form == "csv":
        flat = {key: value for key, value in row.items() if not isinstance(value, list)}
        writer = csv.DictWriter(sys.stdout, flat.keys(), lineterminator="\n")
        if first:
            writer.writeheader()
        writer.writerow(flat)
    elif form == "md":
        cells = [Path(row["model_filename"]).name, gib(row["model_size"]), f"{row['model_n_params'] / 1e9:.3f} B",
                 row["backend"], row["threads"], row["test"], f"{row['median_ts']:.2f} ± {row['stddev_ts']:.2f}",
                 *shares(row)]  # fmt: skip
        if first:
            print("| " + " | ".join(_COLUMNS) + " |\n|" + " --- |" * 4 + " ---: |" * 5)
        print("| " + " | ".join(map(str, cells)) + " |")
    sys.stdout.flush()


def shares(row: dict[str, Any]) -> list[str]:
    """GB/s and its share of the speed of memory, where the row has them."""
    return [f"{row['gb_per_second']:.1f}", f"{row['share_of_memory']:.0%}"] if row["gb_per_second"] else ["", ""]
