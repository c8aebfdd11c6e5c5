"""What the stages share: sizes, the GPU and its measured rates, files of models, figures, and the time that is left."""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from benchmarks.records import Table
from benchmarks.synthetic import write
from quantkit import types
from quantkit.runtime.cuda import gpu_worker
from quantkit.runtime.kernels.cuda.device import Gpu
from quantkit.runtime.kernels.cuda.dispatch import product

Figures = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """Shapes and counts of what is measured; names of models are of synthetic.SHAPES."""

    rows: int = 14336
    columns: int = 4096
    tokens: int = 2048  # of a product
    prompt: int = 2048  # tokens
    prompts: int = 3  # timed ones, after one to warm up; 0: that one is timed
    context: int = 512  # before tokens are generated
    generated: int = 32
    traced: int = 4  # tokens under the profiler
    recorded: int = 8  # tokens whose parts are measured alone
    copied: int = 1 << 30  # bytes
    out_of_cache: int = 512 << 20  # bytes
    checked: tuple[int, int] = 64, 1024  # rows and columns to compare
    llama: str = "llama-8b"
    small: str = "llama-tiny"
    with_experts: tuple[str, ...] = ("deepseek-v3-layers", "qwen3-30b-layers")
    on_cpu: str = "llama-1.2b"
    cpu_tokens: int = 256  # of a prompt on the CPU
    threads: tuple[int, ...] = (1, 4, 8, 16)
    repeat: int = 5


TINY = Sizes(
    rows=16, columns=64, tokens=9, prompt=2, prompts=0, context=1, generated=3, traced=1, recorded=1, copied=1 << 16,
    out_of_cache=1 << 11, checked=(4, 64), llama="llama-dry", small="llama-dry",
    with_experts=("deepseek2-dry", "qwen3moe-dry"), on_cpu="llama-dry", cpu_tokens=3, threads=(1,), repeat=1,
)  # fmt: skip


class Stage(Protocol):
    """A module of this folder that `bench_gpu.py --stage` names."""

    TABLE: Table

    def measure(self, run: Run) -> None:
        """Put the stage's figures into the run's, one after another."""

    def rows(self, figures: Figures) -> list[Figures]:
        """The rows of TABLE, from the figures of the stage."""


class Run:
    """One run of the benchmark.

    gpu       the GPU, and `peak`, its measured rates; only after `open`
    figures   all that was measured, by stage and name; `save` writes them
    wrong     whether something failed, or gave other results than the CPU
    """

    gpu: Gpu
    peak: dict[str, float]

    def __init__(self, options: argparse.Namespace, folder: Path):
        self.options, self.folder, self.sizes = options, folder, TINY if options.tiny else Sizes()
        self.figures: Figures = {}
        self.wrong = False
        self._files: dict[tuple[str, str], Path] = {}
        self._stage, self._end = "", math.inf

    def open(self) -> None:
        """Open the GPU and measure and print the machine's rates. UnsupportedError without one."""
        gpu = self.gpu = gpu_worker.gpu(self.options.device)
        self.peak = rates_of_machine(gpu, self.sizes)
        self.figures |= {"gpu": gpu.name, "torch": gpu.torch.__version__, **self.peak}
        copy, bus, gemm = self.peak["copy"] / 1e9, self.peak["bus"] / 1e9, self.peak["gemm"] / 1e12
        print(
            f"{gpu.name}, torch {gpu.torch.__version__}: copy {copy:.0f} GB/s, bus {bus:.0f}, gemm {gemm:.0f} TFLOP/s"
        )

    @property
    def capability(self) -> tuple[int, int] | None:
        """What kernels are compiled for in advance; None in a dry run, which compiles none."""
        return None if self.options.tiny else self.gpu.capability

    def types(self) -> list[str]:
        """Names of --types; all that have kernels by default."""
        if self.options.tiny and self.options.types is None:
            return ["q8_0"]  # whose blocks fit the rows
        return names_of(self.options.types) or [kind.name for kind in types.all() if product(kind)]

    def types_of_models(self, default: Sequence[str]) -> list[str]:
        """Names of --models, or the stage's default."""
        if self.options.models is not None:
            return names_of(self.options.models)
        return ["q8_0"] if self.options.tiny else list(default)

    def file(self, shape: str, kind: str) -> Path:
        """A model with random weights, written once in a run."""
        if (shape, kind) not in self._files:
            self._files[shape, kind] = write(shape, kind, self.folder / f"{shape}.{kind}.gguf")
        return self._files[shape, kind]

    # ---------------------------------------------------------------------------------------------------------- figures

    def begin(self, stage: str) -> None:
        """Start a stage: its figures and its time."""
        self._stage, self._end = stage, time.perf_counter() + self.options.limit
        self.figures[stage] = {}

    @property
    def seconds_left(self) -> float:
        """Seconds until the stage should end."""
        return self._end - time.perf_counter()

    def item(self, name: str, task: Callable[[Figures], None], line: Callable[[Figures], str]) -> None:
        """Measure one thing of the stage: `task` fills its figures, `line` says them. Saves, also after a failure.

        When the stage's time is over it is left out: its name goes to `figures["left_out"]`.
        """
        if self.seconds_left <= 0:
            self.figures.setdefault("left_out", {}).setdefault(self._stage, []).append(name)
            print(f"{self._stage} {name}: left out, the stage has had its {self.options.limit:.0f} s (--limit)")
            return
        got: Figures = {}
        self.figures[self._stage][name] = got
        try:
            task(got)
            said = line(got)
        except Exception as failure:
            got["failed"] = f"{type(failure).__name__}: {failure}"
            said = f"FAILED {got['failed']}"
        self.wrong |= "failed" in got or got.get("right") is False
        print(f"{self._stage} {name}: {said}", flush=True)
        self.save()  # first: a GPU that has met an illegal access does nothing more
        if hasattr(self, "gpu"):
            self.gpu.torch.cuda.empty_cache()

    def save(self) -> None:
        """Write the figures to the file of --json; a reader never sees half of them."""
        if self.options.json:
            new = self.options.json.with_suffix(".new")
            new.write_text(json.dumps(self.figures), encoding="utf-8")
            new.replace(self.options.json)


def names_of(text: str | None) -> list[str]:
    """The names of a comma list."""
    return [name for name in (text or "").split(",") if name]


def seconds(gpu: Gpu, run: Callable[[], Any], repeat: int, calls: int = 1) -> float:
    """Median time of a call, after one to warm up; the GPU is synchronized once per `calls` calls."""
    run()
    times = []
    for _ in range(repeat):
        gpu.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            run()
        gpu.synchronize()
        times.append((time.perf_counter() - begin) / calls)
    return statistics.median(times)


def rates_of_machine(gpu: Gpu, sizes: Sizes) -> dict[str, float]:
    """Bytes/s of copies and of the bus, operations/s of bfloat16 products."""
    source = gpu.empty(sizes.copied, kind="uint8")
    target, host = gpu.torch.empty_like(source), gpu.pinned(sizes.copied)
    a = gpu.empty(sizes.tokens, sizes.columns, kind="bfloat16").normal_()
    b = gpu.empty(sizes.rows, sizes.columns, kind="bfloat16").normal_()
    operations = 2 * sizes.tokens * sizes.columns * sizes.rows
    return {
        "copy": 2 * source.numel() / seconds(gpu, lambda: target.copy_(source), sizes.repeat, 4),
        "bus": source.numel() / seconds(gpu, lambda: target.copy_(host, non_blocking=True), sizes.repeat),
        "gemm": operations / seconds(gpu, lambda: gpu.torch.matmul(a, b.T), sizes.repeat, 8),
    }


def in_processes(
    run: Run, task: Callable[..., Any], names: Sequence[str], *arguments: Any, processes: int | None = None
) -> Iterator[tuple[str, Any]]:
    """(name, what `task(name, *arguments)` gives, or its exception) in order, computed by processes ahead of it.

    A dry run computes them here, one after another. When the stage's time is over, the rest is None and is not begun.
    """
    if run.options.tiny:
        yield from ((name, task(name, *arguments)) for name in names)
        return
    pool = concurrent.futures.ProcessPoolExecutor(processes)
    try:
        futures = {name: pool.submit(task, name, *arguments) for name in names}
        for name, future in futures.items():
            done, _ = concurrent.futures.wait([future], timeout=max(0.0, run.seconds_left))
            yield name, (future.exception() or future.result()) if done else None
    finally:
        pool.shutdown(cancel_futures=True)


def given(result: Any) -> Any:
    """A result of `in_processes`; raises an exception."""
    if isinstance(result, BaseException):
        raise result
    return result


def error(values: np.ndarray, expected: np.ndarray) -> float:
    """Root mean square of the differences relative to that of the expected values, where these are finite."""
    finite = np.isfinite(expected)
    return math.sqrt(np.mean((values - expected)[finite] ** 2) / np.mean(expected[finite] ** 2))


def median_error(values: np.ndarray, expected: np.ndarray) -> float:
    """Median of the rows' errors: of the logits of tokens, some of which a rounding gives other experts."""
    return statistics.median(map(error, values, expected))
