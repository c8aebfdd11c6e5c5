"""Speed of the products with packed weights, by type: with one vector, and with a batch of 192.

    python benchmarks/bench_kernels.py [--types iq4_k,q4_K] [--rows 4096] [--n 2048] [--repeat 3] [--rounds 5]

CPU seconds of one thread: of each round the median of --repeat runs, of all rounds the least. A round goes through all
types, so that the rounds of a type are minutes apart: on a machine that others use, a neighbour on the same core
doubles the time for as long. Weights are random bytes; choose --rows x --n larger than the caches. For a vector: GB/s
of weights and 10^9 weights/s; for comparison, GB/s of summing F32 bytes, the memory bandwidth of one thread. For a
batch: GOP/s, counting two operations per weight and token. Prints a table; the last line is JSON.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import records
from benchmarks.records import Column, Table
from quantkit import types
from quantkit.codegen import cpu_target
from quantkit.codegen.jit import kernel
from quantkit.placement import kernel_sizes
from quantkit.runtime.kernels import dispatch
from quantkit.runtime.kernels.cpu import activations, gemm
from quantkit.runtime.kernels.cpu.float_gemm import MultiplyParameters
from quantkit.runtime.kernels.cpu.formats.registry import FORMATS
from quantkit.runtime.kernels.cpu.op_list import OpList
from tests.types.data import tame_bytes

TABLE = Table(
    "kernels",
    "How fast are matrix products?",
    (
        Column("type"),
        Column("gb_s", "vector, GB/s", ".2f"),
        Column("gweights_s", "vector, 10⁹ weights/s", ".1f"),
        Column("gop_s", "batch of 192, GOP/s", ".0f"),
    ),
    "One thread, CPU time, the best of rounds that are minutes apart; weights larger than the caches.",
)
TOKENS = 192


@kernel
def _quantize(address: int, n: int) -> None:
    activations.quantize(address, n)


def seconds(run: Callable[[], None], repeat: int) -> float:
    run()
    found = []
    for _ in range(repeat):
        begin = time.process_time()
        run()
        found.append(time.process_time() - begin)
    return float(np.median(found))


def prepared(n: int) -> np.ndarray:
    """A quantized vector, in the form that the products read."""
    buffer = np.zeros(kernel_sizes.activation_bytes(n), np.uint8)
    buffer[: 4 * n].view(np.float32)[:] = np.random.default_rng(1).standard_normal(n)
    _quantize(buffer.ctypes.data, n)
    return buffer


def vector(kind: types.QuantType, data: np.ndarray, n: int, repeat: int) -> float:
    product = dispatch.product(kind)
    assert product is not None
    buffer = prepared(n)
    out = np.zeros(len(data), np.float32)
    run = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 6)(product.address)
    arguments = data.ctypes.data, n, 0, len(data), buffer.ctypes.data, out.ctypes.data
    return seconds(lambda: run(*arguments), repeat)


def batch(kind: types.QuantType, data: np.ndarray, n: int, repeat: int) -> float:
    ops = OpList(1)
    x = np.random.default_rng(1).standard_normal((TOKENS, n)).astype(np.float32)
    out = np.zeros((TOKENS, len(data)), np.float32)
    tokens = ops.keep(np.array([TOKENS])).ctypes.data
    tiles = ops.buffer("tiles", kernel_sizes.tiles_bytes(n, TOKENS))
    quantize = gemm.QuantizeParameters(x=x.ctypes.data, n=n, tokens=tokens, tiles=tiles)
    ops.add(gemm.quantize_tiles, quantize, barrier=True)
    scratch, stride = ops.private_buffer("scratch", gemm.scratch_bytes(FORMATS[kind.ggml_type], n))
    multiply = MultiplyParameters(weights=data.ctypes.data, n=n, rows=len(data), tokens=tokens, x=tiles,
                                  out=out.ctypes.data, bias=0, scratch=scratch, private_stride=stride,
                                  claims=ops.claims())  # fmt: skip
    ops.add(gemm.multiply(kind.ggml_type, 0), multiply)
    return seconds(ops.run, repeat)


def measured(name: str, options: argparse.Namespace) -> tuple[float, float]:
    """Seconds of the product with a vector, and with a batch."""
    kind = types.get(name)
    data = tame_bytes(kind, np.random.default_rng(0), options.rows, options.n)
    return vector(kind, data, options.n, options.repeat), batch(kind, data, options.n, options.repeat)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", help="names separated by commas; all that have integer kernels without")
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--n", type=int, default=2048)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    records.add_option(parser)
    options = parser.parse_args()
    wanted = options.types.split(",") if options.types else [f.name for f in FORMATS.values()]
    best = {name: (math.inf, math.inf) for name in wanted}
    floats, memory = np.ones(options.rows * options.n // 8, np.float32), math.inf
    for number in range(options.rounds):
        memory = min(memory, seconds(floats.sum, options.repeat))
        for name in wanted:
            one, many = measured(name, options)
            best[name] = min(best[name][0], one), min(best[name][1], many)
        print(f"round {number + 1} of {options.rounds}", flush=True)
    memory = floats.nbytes / memory / 1e9
    print(f"{options.rows} x {options.n}, {cpu_target.isa()}, one thread; numpy sums F32 at {memory:.1f} GB/s")
    print(f"{'type':12s} {'GB/s':>7s} {'Gweights/s':>11s} {'batch GOP/s':>12s}")
    results, weights = {}, options.rows * options.n
    for name, (one, many) in best.items():
        nbytes = types.get(name).row_bytes(options.n) * options.rows
        row = {
            "gb_s": nbytes / one / 1e9,
            "gweights_s": weights / one / 1e9,
            "gop_s": 2 * weights * TOKENS / many / 1e9,
        }
        results[name] = row
        print(f"{name:12s} {row['gb_s']:7.2f} {row['gweights_s']:11.2f} {row['gop_s']:12.0f}")
    records.save(TABLE, [{"type": name, **row} for name, row in results.items()], options)
    print(
        json.dumps({"bench": "kernels", "isa": cpu_target.isa(), **vars(options), "memory": memory, "types": results})
    )


if __name__ == "__main__":
    main()
