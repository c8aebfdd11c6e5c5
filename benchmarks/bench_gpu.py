"""What the CUDA kernels do on a GPU, in one command: right values of every type, and rates beside what the GPU can do.

    python benchmarks/bench_gpu.py [--types q4_K,iq4_k] [--device 0] [--no-model]     (make bench-gpu)

Without a GPU it says so in one line and exits with 1. With one it takes under 8 minutes, most of them compiling.

    copy       GB/s of torch's copies of 1 GiB, read and written bytes counted
    gemm       TFLOP/s of torch's bfloat16 product, 2048 x 4096 by 4096 x 14336
    decode     the type's decoded values against the plain decoder's, which must be equal (float32, 64 rows of 1024)
    product    root of the mean squared difference of products over that of the products, against the plain decoder's
               in float32: with one vector (bytes as activations) and with 40 (bfloat16)
    GB/s, %    packed bytes that products with one vector read a second, 14336 x 4096, out of 512 MiB and more so that
               nothing stays in the GPU's cache; percent of copy
    TFLOP/s, % of products with 2048 vectors, decoded tiles and torch's product; percent of gemm
    model      a llama of 8B's sizes with random weights in Q4_K, IQ4_K, Q8_0 and IQ2_K: tokens a second of a decoding
               step (a CUDA graph, 512 positions in an f16 cache), percent of weight bytes / copy; and of a prompt of
               2048, percent of gemm. The aims are 60 % and 40 %.

Times are medians of CUDA events. The last line is JSON.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from quantkit import types
from quantkit.errors import UnsupportedError
from quantkit.runtime.kernels.cuda.device import Gpu, Matrices
from quantkit.runtime.kernels.cuda.table import FLOAT_IDS, product

ROWS, COLUMNS, TOKENS = 14336, 4096, 2048
OUT_OF_CACHE = 512 << 20
MODEL_TYPES = ("q4_K", "iq4_k", "q8_0", "iq2_k")
LAYERS, EMBD, HEADS, KV_HEADS, DIM, FF, VOCAB, CONTEXT = 32, 4096, 32, 8, 128, 14336, 128256, 512


def seconds(gpu: Gpu, run: Callable[[], Any], repeat: int = 7) -> float:
    """Median time of a call on the GPU, after one to warm up."""
    torch = gpu.torch
    run()
    taken = []
    for _ in range(repeat):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize(gpu.place)
        taken.append(begin.elapsed_time(end) / 1000)
    return statistics.median(taken)


def copy_rate(gpu: Gpu) -> float:
    """Bytes a second, those read and those written."""
    source = gpu.empty(1 << 30, kind="uint8")
    target = gpu.torch.empty_like(source)
    return 2 * source.numel() / seconds(gpu, lambda: target.copy_(source))


def gemm_rate(gpu: Gpu) -> float:
    """Operations a second of bfloat16 products."""
    a, b = gpu.empty(TOKENS, COLUMNS, kind="bfloat16").normal_(), gpu.empty(ROWS, COLUMNS, kind="bfloat16").normal_()
    return 2 * TOKENS * COLUMNS * ROWS / seconds(gpu, lambda: gpu.torch.matmul(a, b.T))


# --------------------------------------------------------------------------------------------------------- compiling


def compile_all(name: str, capability: tuple[int, int]) -> float:
    """Machine code, on disk, of the kernels of a type that are measured here; the seconds it took."""
    from quantkit.runtime.kernels.cuda import kernels

    begin = time.perf_counter()
    number = types.get(name).ggml_type
    for kernel in kernels.of_type(number):
        if kernel.name.endswith(("_bf16", "_f32", "_1")):
            kernel.cubin(capability)
    return time.perf_counter() - begin


def compile_types(names: list[str], capability: tuple[int, int]) -> dict[str, float]:
    with concurrent.futures.ProcessPoolExecutor() as pool:
        return dict(zip(names, pool.map(compile_all, names, [capability] * len(names))))


# ------------------------------------------------------------------------------------------------------- every type


def sample(name: str, rows: int, n: int) -> np.ndarray:
    """uint8[rows, row bytes]: encoded normal rows, or of types without encoder any bytes."""
    kind, rng = types.get(name), np.random.default_rng(0)
    if kind.encode_rows is None:
        return rng.integers(0, 256, (rows, kind.row_bytes(n)), np.uint8)
    x = rng.standard_normal((rows, n)).astype(np.float32)
    return kind.quantize(x, np.ones(n, np.float32) if kind.requires_imatrix else None, effort="fast")


def error(found: np.ndarray, right: np.ndarray) -> float:
    fine = np.isfinite(right)
    return math.sqrt(np.mean((found - right)[fine] ** 2) / np.mean(right[fine] ** 2))


def is_right(gpu: Gpu, name: str) -> dict[str, Any]:
    """Whether decoding is exact, and how far products are off."""
    from quantkit.runtime.kernels.cuda import weights

    kind, rows, n = types.get(name), 64, 1024
    data = sample(name, rows, n)
    matrices = gpu.matrices(data, kind, rows, n)
    plain = kind.dequantize(data, n, products=True)
    if kind.ggml_type in FLOAT_IDS:
        exact = bool(error(matrices.decoded().float().cpu().numpy(), plain) < 2**-8)
    else:
        out = gpu.empty(rows, n)
        blocks = -(-n // 32 // weights.THREADS), rows
        gpu.launch(weights.dequantize(kind.ggml_type, "f32"), blocks, weights.THREADS, matrices.data, 0,
                   matrices.row_bytes, rows, n, out.view(gpu.torch.int32))  # fmt: skip
        exact = bool(np.array_equal(out.cpu().numpy(), plain, equal_nan=True))
    x = np.random.default_rng(1).standard_normal((40, n)).astype(np.float32)
    there = gpu.array(x)
    one, many = matrices(there[:1]).cpu().numpy(), matrices(there).cpu().numpy()
    return {"exact": exact, "vector_error": error(one, x[:1] @ plain.T), "batch_error": error(many, x @ plain.T)}


def random_matrices(gpu: Gpu, name: str, rows: int, n: int, count: int) -> Matrices:
    """Of any bytes below 64: few enough large halves for finite scales."""
    kind = types.get(name)
    size = count * rows * kind.row_bytes(n)
    data = gpu.torch.randint(0, 64, (size,), dtype=gpu.torch.uint8, device=gpu.place)
    return Matrices(gpu, data, kind, rows, n)


def rates(gpu: Gpu, name: str, copy: float, gemm: float) -> dict[str, float]:
    one = ROWS * types.get(name).row_bytes(COLUMNS)
    count = -(-OUT_OF_CACHE // one)
    matrices = random_matrices(gpu, name, ROWS, COLUMNS, count)
    x = gpu.empty(1, COLUMNS).normal_()
    ids = gpu.torch.arange(count, dtype=gpu.torch.int32, device=gpu.place).reshape(1, count)
    graph = gpu.capture(lambda: matrices.of_experts(x, ids))
    bytes_rate = count * one / seconds(gpu, graph.replay)
    many = gpu.empty(TOKENS, COLUMNS).normal_()
    rate = 2 * TOKENS * COLUMNS * ROWS / seconds(gpu, lambda: matrices(many), 3)
    return {"bytes_rate": bytes_rate, "of_copy": bytes_rate / copy, "batch_rate": rate, "of_gemm": rate / gemm}


# -------------------------------------------------------------------------------------------------------- the model


class Llama:
    """Steps of a llama of 8B's sizes, of the kernels that a runtime would launch. Weights are random bytes."""

    def __init__(self, gpu: Gpu, name: str):
        self.gpu = gpu
        shapes = {"qkv": ((HEADS + 2 * KV_HEADS) * DIM, EMBD), "out": (EMBD, HEADS * DIM), "gate": (FF, EMBD),
                  "up": (FF, EMBD), "down": (EMBD, FF)}  # fmt: skip
        self.layers = [{k: random_matrices(gpu, name, *v, 1) for k, v in shapes.items()} for _ in range(LAYERS)]
        self.head = random_matrices(gpu, name, VOCAB, EMBD, 1)
        self.nbytes = self.head.nbytes + sum(m.nbytes for layer in self.layers for m in layer.values())
        self.weight = gpu.torch.ones(EMBD, device=gpu.place)
        self.caches = [gpu.torch.zeros((2, KV_HEADS * (TOKENS + CONTEXT) * DIM * 2), dtype=gpu.torch.uint8,
                                       device=gpu.place) for _ in range(LAYERS)]  # fmt: skip
        angles = np.arange(TOKENS + CONTEXT)[:, None] * 500000.0 ** (-2 * np.arange(DIM // 2) / DIM)
        self.tables = gpu.array(np.cos(angles).astype(np.float32)), gpu.array(np.sin(angles).astype(np.float32))

    def step(self, x: Any, positions: Any) -> Any:
        """Logits of the last of float32[tokens, EMBD] at int32[tokens]."""
        from quantkit.runtime.kernels.cuda import elementwise

        gpu, tokens = self.gpu, len(x)
        x = x.clone()
        for layer, cache in zip(self.layers, self.caches):
            x += layer["out"](self._attended(layer["qkv"](self._normed(x)), cache, positions))
            y = self._normed(x)
            gate, up = layer["gate"](y).contiguous(), layer["up"](y).contiguous()
            gpu.launch(elementwise.activate("swiglu"), -(-gate.numel() // elementwise.THREADS), elementwise.THREADS,
                       gate, up, gate.numel())  # fmt: skip
            x += layer["down"](gate)
        return self.head(self._normed(x[tokens - 1 :].contiguous()))

    def _normed(self, x: Any) -> Any:
        from quantkit.runtime.kernels.cuda import elementwise

        out = self.gpu.torch.empty_like(x)
        self.gpu.launch(elementwise.rms_norm(), len(x), elementwise.THREADS, x, self.weight, EMBD, 1e-5, out)
        return out

    def _attended(self, qkv: Any, cache: Any, positions: Any) -> Any:
        from quantkit.runtime.kernels.cuda import attention, elementwise

        gpu, tokens, group = self.gpu, len(qkv), HEADS // KV_HEADS
        q, k, v = (part.contiguous() for part in qkv.split([HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM], dim=1))
        n_ctx = TOKENS + CONTEXT
        for part, heads in ((q, HEADS), (k, KV_HEADS)):
            pairs = tokens * heads * (DIM // 2)
            gpu.launch(elementwise.rope(), -(-pairs // elementwise.THREADS), elementwise.THREADS, part, heads, DIM,
                       DIM // 2, *self.tables, positions, 2, 1, tokens)  # fmt: skip
        runs = tokens * KV_HEADS * (DIM // 32)
        for part, rows in zip((k, v), cache):
            gpu.launch(attention.remember("f16"), -(-runs // 4), attention.THREADS, part, KV_HEADS, DIM, 2 * DIM, n_ctx,
                       positions, tokens, rows)  # fmt: skip
        if tokens > 1:  # as a runtime would: torch's own attention over the prompt
            each = [p.bfloat16().view(tokens, -1, DIM).transpose(0, 1)[None] for p in (q, k, v)]
            out = gpu.torch.nn.functional.scaled_dot_product_attention(*each, is_causal=True, enable_gqa=True)
            return out[0].transpose(0, 1).reshape(tokens, -1).float()
        shares, rows = 16, tokens * group
        top, total = (gpu.empty(shares * KV_HEADS * rows) for _ in range(2))
        acc, mixed = gpu.empty(shares * KV_HEADS * rows * DIM), gpu.empty(tokens, HEADS * DIM)
        gpu.launch(attention.attend("f16", "f16", DIM, DIM), (shares, -(-rows // attention.ROWS), KV_HEADS),
                   attention.threads_of(DIM), q, cache[0], cache[1], 2 * DIM, 2 * DIM, n_ctx, HEADS, group, tokens,
                   positions, n_ctx, DIM**-0.5, shares, top, total, acc)  # fmt: skip
        gpu.launch(attention.combine(False), (rows, KV_HEADS), attention.THREADS, top, total, acc, shares, HEADS, group,
                   tokens, DIM, top, mixed)  # fmt: skip
        return mixed


def model_rates(gpu: Gpu, name: str, copy: float, gemm: float) -> dict[str, float]:
    """Tokens a second of decoding and of a prompt, and their shares of what bytes and operations allow."""
    torch = gpu.torch
    llama = Llama(gpu, name)
    x, one = torch.zeros((1, EMBD), device=gpu.place), torch.full((1,), CONTEXT, dtype=torch.int32, device=gpu.place)
    graph = gpu.capture(lambda: llama.step(x, one))
    step = seconds(gpu, graph.replay)
    prompt = torch.zeros((TOKENS, EMBD), device=gpu.place)
    positions = torch.arange(TOKENS, dtype=torch.int32, device=gpu.place)
    taken = seconds(gpu, lambda: llama.step(prompt, positions), 3)
    elements = sum(m.rows * m.n for layer in llama.layers for m in layer.values())
    rate = 2 * TOKENS * elements / taken
    return {"tg": 1 / step, "tg_of_copy": llama.nbytes / step / copy, "pp": TOKENS / taken, "pp_of_gemm": rate / gemm}


# ------------------------------------------------------------------------------------------------------------- main


def main() -> int:
    parser = argparse.ArgumentParser(description="Correctness and rates of the CUDA kernels.")
    parser.add_argument("--types", help="a comma list; all by default")
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--no-model", action="store_true", help="leave out the synthetic 8B models")
    options = parser.parse_args()
    try:
        gpu = Gpu(options.device)
    except UnsupportedError as found:
        print(f"bench-gpu: {found}", file=sys.stderr)
        return 1
    begin = time.perf_counter()
    names = options.types.split(",") if options.types else [t.name for t in types.all() if product(t)]
    took = compile_types(names, gpu.capability)
    spent = time.perf_counter() - begin
    print(f"{gpu.name}, torch {gpu.torch.__version__}; compiled {len(names)} types in {spent:.0f} s")
    copy, gemm = copy_rate(gpu), gemm_rate(gpu)
    print(f"copy {copy / 1e9:.0f} GB/s, gemm {gemm / 1e12:.0f} TFLOP/s\n")
    heads = ("type", 12), ("decode", 7), ("product", 9), ("of 40", 9), ("GB/s", 7), ("%", 5), ("TFLOP/s", 8), ("%", 5)
    print(" ".join(f"{head:>{width}}" for head, width in (*heads, ("compile s", 10))))
    figures: dict[str, Any] = {"gpu": gpu.name, "copy": copy, "gemm": gemm, "types": {}, "models": {}}
    for name in names:
        got = is_right(gpu, name) | rates(gpu, name, copy, gemm) | {"compile_seconds": took[name]}
        figures["types"][name] = got
        print(
            f"{name:>12} {'exact' if got['exact'] else 'WRONG':>7} {got['vector_error']:9.2e} "
            f"{got['batch_error']:9.2e} {got['bytes_rate'] / 1e9:7.0f} {100 * got['of_copy']:5.0f} "
            f"{got['batch_rate'] / 1e12:8.0f} {100 * got['of_gemm']:5.0f} {took[name]:10.1f}",
            flush=True,
        )
        gpu.torch.cuda.empty_cache()
    for name in () if options.no_model else MODEL_TYPES:
        got = model_rates(gpu, name, copy, gemm)
        figures["models"][name] = got
        print(f"8B {name:9} TG {got['tg']:6.1f} tokens/s, {100 * got['tg_of_copy']:.0f} % of copy (aim 60); "
              f"PP {got['pp']:7.0f}, {100 * got['pp_of_gemm']:.0f} % of gemm (aim 40)", flush=True)  # fmt: skip
        gpu.torch.cuda.empty_cache()
    figures["seconds"] = time.perf_counter() - begin
    print(json.dumps(figures))
    return 0 if all(got["exact"] for got in figures["types"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
