"""Token generation compared with its two upper bounds: memory bandwidth, and the speed of the kernel itself.

    python benchmarks/bench_bound.py [--types q4_0,iq4_k,q8_0] [--shape llama-1.2b] [-t 2] [-n 64] [-r 5]

GB/s of weights of a synthetic model (synthetic.py, written to --folder), all with the same number of threads:
    memory   sum of the model's bytes with vector instructions, as in `quantkit bench`
    kernel   matrix-vector products whose rows stay in the core's cache: the bound given by instructions
    TG       token generation: bytes of weights and KV cache read per token, divided by the time of a token
    share    TG divided by the smaller of the two
Attention, norms and the synchronization between operations keep the share below 1. Prints a table; the last line is
JSON.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import threading
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import records
from benchmarks.bench_kernels import prepared
from benchmarks.records import Column, Table
from benchmarks.synthetic import SHAPES, write
from quantkit import types
from quantkit.codegen import cpu_target
from quantkit.evaluate.bench import Case, bench, read_speed
from quantkit.runtime.kernels import dispatch
from quantkit.runtime.loading import load
from tests.types.data import tame_bytes

TABLE = Table(
    "bound",
    "How close is generation to its bound?",
    (
        Column("type"),
        Column("memory", "memory, GB/s", ".1f"),
        Column("kernel", "kernel, GB/s", ".1f"),
        Column("tg", "generation, GB/s", ".1f"),
        Column("share", "share of the smaller", ".2f"),
    ),
    "Memory: a vectorized read of the model; kernel: products with rows that stay in the core's cache.",
)
RESIDENT = 512 << 10  # bytes of weights that stay in a core's cache
_SECONDS = 0.3


def kernel_speed(kind: types.QuantType, n: int, threads: int) -> float:
    """GB/s of all threads together; each multiplies its own rows repeatedly."""
    product = dispatch.product(kind)
    assert product is not None
    rows = max(kind.interleave, RESIDENT // kind.row_bytes(n) // kind.interleave * kind.interleave)
    buffer, rng = prepared(n), np.random.default_rng(0)
    run = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 6)(product.address)
    start, done = threading.Barrier(threads), [0.0] * threads
    weights = [tame_bytes(kind, rng, rows, n) for _ in range(threads)]

    def work(thread: int) -> None:
        data, out = weights[thread], np.zeros(rows, np.float32)
        arguments = data.ctypes.data, n, 0, rows, buffer.ctypes.data, out.ctypes.data
        run(*arguments)
        start.wait()
        begin, count = time.perf_counter(), 0
        while time.perf_counter() - begin < _SECONDS:
            run(*arguments)
            count += 1
        done[thread] = count * data.nbytes / (time.perf_counter() - begin)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return sum(done) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", default="q4_0,iq4_k,q8_0")
    parser.add_argument("--shape", choices=SHAPES, default="llama-1.2b")
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("-n", "--generate", type=int, default=64)
    parser.add_argument("-r", "--repeat", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/quantkit-models"))
    records.add_option(parser)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    print(f"{options.shape}, {options.threads} threads, {cpu_target.isa()}; GB/s")
    print(f"{'type':10s} {'memory':>8s} {'kernel':>8s} {'TG':>8s} {'t/s':>8s} {'share':>7s}")
    rows = []
    for name in options.types.split(","):
        path = write(options.shape, name, options.folder / f"{options.shape}.{name}.gguf")
        model = load(path, numerics="fast", threads=options.threads)
        (speed,) = bench(model, [Case(0, options.generate)], options.repeat)
        assert speed.gb_per_second is not None
        memory = read_speed(model) / 1e9
        kernel = kernel_speed(types.get(name), SHAPES[options.shape].columns, options.threads)
        share = speed.gb_per_second / min(memory, kernel)
        rows.append({"type": name, "memory": memory, "kernel": kernel, "tg": speed.gb_per_second,
                     "tokens_s": speed.tokens_per_second, "share": share})  # fmt: skip
        print(f"{name:10s} {memory:8.1f} {kernel:8.1f} {speed.gb_per_second:8.1f} {speed.tokens_per_second:8.1f} "
              f"{share:7.2f}", flush=True)  # fmt: skip
        del model
        path.unlink()
    records.save(TABLE, rows, options)
    print(json.dumps({"bench": "bound", "isa": cpu_target.isa(), "shape": options.shape, "threads": options.threads,
                      "rows": rows}))  # fmt: skip


if __name__ == "__main__":
    main()
