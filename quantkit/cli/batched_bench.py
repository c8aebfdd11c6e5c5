"""`quantkit batched-bench`: prompt and generation speed of several sequences at once."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from quantkit.cli.common.bench_lists import integers
from quantkit.cli.common.command import takes_model
from quantkit.cli.common.evaluation import on_message
from quantkit.cli.common.hub import from_hub
from quantkit.cli.common.launch import Launch, runs_a_model
from quantkit.cli.common.options import FastNumerics, Json, Threads
from quantkit.cli.common.output import print_json
from quantkit.cli.common.progress_options import shows_progress
from quantkit.errors import OptionError
from quantkit.progress import ProgressBar

if TYPE_CHECKING:
    from quantkit.evaluate.bench import BatchedCase, BatchedSpeed

_HEADER = "|    PP |     TG |    B |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |      T s |    S t/s |"


@shows_progress
@takes_model()
@from_hub("model")
@runs_a_model
def batched_bench(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL",
            help="A GGUF file, any shard of a split one, or hf://ORG/NAME/FILE.gguf.",
            show_default=False,
        ),
    ],
    prompts: Annotated[str, typer.Option("-npp", metavar="N,…", help="Prompt tokens of a sequence.")],
    generated: Annotated[str, typer.Option("-ntg", metavar="N,…", help="Tokens to generate of a sequence.")],
    sequences: Annotated[str, typer.Option("-npl", metavar="N,…", help="Number of sequences.")],
    shared: Annotated[bool, typer.Option("-pps", help="One prompt for all sequences: it is computed once.")] = False,
    ctx_size: Annotated[
        int | None,
        typer.Option(
            "--ctx-size", "-c", help="Skip tests with more tokens in the caches; default: none is skipped.", min=1
        ),
    ] = None,
    numerics: FastNumerics = "fast",
    launch: Launch = None,  # type: ignore[assignment]  # the decorator gives it
    threads: Threads = None,
    output_format: Annotated[Literal["md", "jsonl"], typer.Option("--output-format", help="Output format.")] = "md",
    json: Json = False,
) -> None:
    """Time prompts and generation of several sequences.

    For each number of prompt tokens, generated tokens and sequences: the prompts of all sequences together, then one
    token of every sequence at a time. B is the number of sequences; speeds count the tokens of all. Rows are printed as
    they are measured, once each, as in llama-batched-bench.
    """
    from quantkit.evaluate import bench as measure
    from quantkit.evaluate.conditions import conditions_line, run_conditions

    cases = _cases(prompts, generated, sequences, shared, ctx_size)
    longest = max(case.prompt + case.generate for case in cases)
    loaded = launch.open(model, numerics=numerics, threads=threads, n_ctx=longest)
    about = run_conditions(loaded) | {"n_kv_max": ctx_size, "is_pp_shared": shared}
    on_message(f"{model}: {conditions_line(about)}")
    rows = []
    with ProgressBar("batched-bench", ticks=False) as bar:  # nothing is drawn while a test is timed
        for speed in measure.batched(loaded, cases):
            rows.append(_record(speed))
            if output_format == "jsonl":
                print_json("quantkit.batched-bench-row/1", about | rows[-1])
            elif not json:
                _show(rows[-1], first=len(rows) == 1)
            sys.stdout.flush()
            bar.show(len(rows), len(cases), values=f"{speed.rate:.1f} tok/s")
    if json:
        print_json("quantkit.batched-bench/1", {"path": model, "bytes": loaded.size_bytes, **about, "rows": rows})


def _cases(prompts: str, generated: str, sequences: str, shared: bool, limit: int | None) -> list[BatchedCase]:
    """The tests in llama-batched-bench's order, without those of more than `limit` tokens, which are named."""
    from quantkit.evaluate.bench import BatchedCase

    lists = (integers("-npp", prompts, 1), integers("-ntg", generated, 1), integers("-npl", sequences, 1))
    cases = [BatchedCase(*numbers, shared) for numbers in itertools.product(*lists)]
    kept = [case for case in cases if limit is None or case.n_kv <= limit]
    for case in cases:
        if case not in kept:
            on_message(
                f"note: skipped: {case.prompt} + {case.generate} tokens of {case.sequences} sequences are {case.n_kv} "
                f"in the caches, -c is {limit}"
            )
    if not kept:
        raise OptionError(f"-c {limit} leaves nothing to measure; raise it to {min(case.n_kv for case in cases)}")
    return kept


def _record(speed: BatchedSpeed) -> dict[str, Any]:
    """A row with the keys of llama-batched-bench's JSON lines."""
    case = speed.case
    return {
        "pp": case.prompt,
        "tg": case.generate,
        "pl": case.sequences,
        "n_kv": case.n_kv,
        "t_pp": speed.prompt_seconds,
        "speed_pp": speed.prompt_rate,
        "t_tg": speed.generation_seconds,
        "speed_tg": speed.generation_rate,
        "t": speed.seconds,
        "speed": speed.rate,
    }


def _show(row: dict[str, Any], first: bool) -> None:
    if first:
        print(_HEADER)
        print("|" + "|".join("-" * len(cell) for cell in _HEADER.strip("|").split("|")) + "|")
    print(
        f"| {row['pp']:5d} | {row['tg']:6d} | {row['pl']:4d} | {row['n_kv']:6d} | {row['t_pp']:8.3f} "
        f"| {row['speed_pp']:8.2f} | {row['t_tg']:8.3f} | {row['speed_tg']:8.2f} | {row['t']:8.3f} "
        f"| {row['speed']:8.2f} |"
    )
