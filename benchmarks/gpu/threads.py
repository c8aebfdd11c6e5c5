"""Stage `threads`: the CPU's runtime with 1, 4, 8 and 16 threads, beside ik_llama.cpp's wheel where it is installed.

    pp, tg                       tokens/s of a prompt of `cpu_tokens`, and of generation; llama-1.2b, random weights
    pp_reference, tg_reference   the same of ik_llama.cpp, in alternation with quantkit; None without the wheel
    pp_ratio, tg_ratio           quantkit's over ik_llama.cpp's, the median over rounds

Needs no GPU. Numbers of threads above those of the CPU are left out.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.bench_model import SPEEDS, Ours, Reference, from_empty_cache
from benchmarks.gpu.run import Figures, Run
from benchmarks.records import Column, Table
from quantkit.codegen import thread_pool
from quantkit.runtime.kv.cache_type import CacheType

TABLE = Table(
    "threads",
    "How does the CPU's speed grow with threads?",
    (Column("threads"), *SPEEDS),
    "A llama of 1.2B parameters with random weights; both programs in alternation, with an f16 cache.",
)
MODEL_TYPES = ("q4_K",)
ROUNDS = 2  # timed ones, after one to warm up


def measure(run: Run) -> None:
    """Each number of threads; most first, because one thread takes longest."""
    available = thread_pool.available_cpus()
    for kind in run.types_of_models(MODEL_TYPES):
        for threads in sorted((n for n in run.sizes.threads if n <= available), reverse=True):
            run.item(f"{kind}, {threads}", functools.partial(of_threads, run, kind, threads), line)


def rows(figures: Figures) -> list[Figures]:
    """One row for each number of threads, fewest first."""
    return [{"threads": name, **got} for name, got in reversed(figures.items()) if "failed" not in got]


def line(got: Figures) -> str:
    """The rates in words."""
    compared = {
        name: "" if got[f"{name}_ratio"] is None else f" ({got[f'{name}_ratio']:.2f} of ik_llama.cpp)"
        for name in ("pp", "tg")
    }
    return f"PP {got['pp']:.1f} tokens/s{compared['pp']}, TG {got['tg']:.1f}{compared['tg']}"


def of_threads(run: Run, kind: str, threads: int, got: Figures) -> None:
    """Prompt and generation with a number of threads."""
    path, sizes = run.file(run.sizes.on_cpu, kind), run.sizes
    n_ctx, counts = sizes.cpu_tokens + sizes.generated, {"pp": sizes.cpu_tokens, "tg": sizes.generated}
    lengths = argparse.Namespace(n_prompt=sizes.cpu_tokens, n_gen=sizes.generated)
    with programs(path, threads, n_ctx) as sides:
        tokens = np.random.default_rng(0).integers(0, sides[0].model.vocab_size, n_ctx)
        rounds = [[from_empty_cache(side, tokens, lengths) for side in sides] for _ in range(1 + ROUNDS)][1:]
    for which, (name, count) in enumerate(counts.items()):
        ours, *theirs = ([turn[side][which] for turn in rounds] for side in range(len(sides)))
        got |= {name: count / statistics.median(ours), f"{name}_reference": None, f"{name}_ratio": None}
        for reference in theirs:
            got[f"{name}_reference"] = count / statistics.median(reference)
            got[f"{name}_ratio"] = statistics.median(b / a for a, b in zip(ours, reference))


@contextlib.contextmanager
def programs(path: Path, threads: int, n_ctx: int) -> Iterator[list[Any]]:
    """quantkit and, where it is installed, ik_llama.cpp, on a model."""
    cache = CacheType("f16", "f16")
    sides: list[Any] = [Ours(path, threads, n_ctx, cache)]
    if importlib.util.find_spec("ik_llama_cpp"):
        sides.append(Reference(path, threads, n_ctx, n_ctx, cache, recurrent=False))
    try:
        yield sides
    finally:
        for reference in sides[1:]:
            reference.close()
