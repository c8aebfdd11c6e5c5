"""Check and time what runs on a GPU: the kernels of every type, dense models, models with experts.

    python benchmarks/bench_gpu.py [--stage rates,types,models,experts] [--types q4_K,iq4_k] [--models q8_0]
                                   [--device 0] [--folder /dev/shm] [--json FILE]            (make bench-gpu)

Without a GPU it prints one line and exits with 1. A stage runs alone; `types` checks each type, measures its rates too
and needs most of the time, for compiling. `--json FILE` is written anew after every figure, so that a run that is
stopped leaves what it had.

    copy       GB/s of torch's copies of 1 GiB, read plus written bytes; bus: from pinned memory to the GPU
    gemm       TFLOP/s of torch's bfloat16 product, 2048 x 4096 by 4096 x 14336
    values     whether decoded values equal those of the CPU's decoder (float32, 64 rows of 1024)
    product    root-mean-square error of products relative to the CPU's decoded values in float32: with one vector
               (activations as bytes) and with 40 (bfloat16)
    logits     a tiny llama on the GPU and on the CPU: the largest difference of logits, divided by their standard
               deviation, in exact numerics; the root mean square of the differences in fast numerics. A prompt of 9,
               then three tokens, the last one with a CUDA graph
    GB/s, %    packed bytes that products with one vector read per second, 14336 x 4096, from 512 MiB or more, so that
               the GPU's cache does not help; percent of copy
    TFLOP/s, % products with 2048 vectors by decoded tiles and torch's product; percent of gemm
    8B         a llama of 8B's shape with random weights, run as with `load(…, devices="cuda:0")`: tokens/s of
               generation after 512 tokens, in percent of copy; tokens/s of a prompt of 2048, in percent of gemm. The
               targets are 60 % and 40 %
    experts    a qwen3moe with random weights: on the CPU; with its experts on the CPU and the rest on the GPU (hybrid);
               the same with experts copied to the GPU for prompts (streamed); on the GPU; with a second GPU, layers
               shared by both (-sm graph): tokens/s of prompt and generation, and the error of logits against the CPU

Times are medians of wall-clock times. A failure is printed in its line and makes the exit status 1; the other parts
still run. The last line is JSON. --tiny selects shapes so small that numba's simulator can run everything:
tests/runtime/cuda/test_sim_bench.py.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import records
from benchmarks.records import Column, Table
from benchmarks.synthetic import write
from quantkit import types
from quantkit.errors import UnsupportedError
from quantkit.evaluate.bench import bytes_per_token
from quantkit.placement.offload import Offload
from quantkit.runtime.cuda import gpu_worker
from quantkit.runtime.kernels.cuda.device import Gpu, Matrices
from quantkit.runtime.kernels.cuda.dispatch import FLOAT_IDS, product
from quantkit.runtime.loading import load
from quantkit.runtime.model import Model


@dataclass(frozen=True)
class Sizes:
    rows: int = 14336
    columns: int = 4096
    tokens: int = 2048  # of a prompt
    context: int = 512  # before tokens are generated
    generated: int = 32
    copied: int = 1 << 30
    out_of_cache: int = 512 << 20
    checked: tuple[int, int] = 64, 1024  # rows and columns to compare
    llama: str = "llama-8b"
    small: str = "llama-tiny"
    experts: str = "qwen3moe"
    kind_of_experts: str = "q4_K"
    repeat: int = 5


TINY = Sizes(16, 64, 9, 9, 3, 1 << 16, 1 << 11, (4, 64), "llama-dry", "llama-dry", "qwen3moe-dry", "q8_0", 1)
TABLE = Table(
    "gpu",
    "How fast are the kernels on a GPU?",
    (
        Column("type"),
        Column("exact", "decodes exactly"),
        Column("gb_s", "vector, GB/s", ".0f"),
        Column("of_copy", "of copy", ".2f"),
        Column("tflop_s", "batch, TFLOP/s", ".0f"),
        Column("of_gemm", "of gemm", ".2f"),
    ),
    "Products with one vector of 4,096 columns and with 2,048 vectors, against torch's copy and bfloat16 product.",
)
MODEL_TYPES = ("q4_K", "iq4_k", "q8_0", "iq2_k", "iq4_ks", "iq4_kt")
STAGES = ("rates", "types", "models", "experts")
WRITERS = 3  # processes that write models
FAST_TOLERANCE = 0.05  # of logits in fast numerics, whose activations are bytes, to the CPU's
EXACT_TOLERANCE = 1e-3  # of logits in exact numerics to the CPU's


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


def machine(gpu: Gpu, sizes: Sizes) -> dict[str, float]:
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


# ------------------------------------------------------------------------------- what the CPU prepares, type by type


@dataclass
class Prepared:
    """What the CPU computes for a type: encoded rows and their values, a model and its logits."""

    data: np.ndarray
    plain: np.ndarray
    model: Path | None
    logits: np.ndarray | None
    seconds: float


def prepare(name: str, sizes: Sizes, folder: Path, capability: tuple[int, int] | None) -> Prepared:
    """Compute the reference values of a type, and compile its kernels to the cache on disk."""
    from quantkit.runtime.kernels.cuda import kernels

    begin, kind, (rows, n) = time.perf_counter(), types.get(name), sizes.checked
    if capability:
        for kernel in kernels.of_type(kind.ggml_type):
            kernel.cubin(capability)
    compiled = time.perf_counter() - begin
    data = sample(name, rows, n)
    path = logits = None
    if kind.encode_rows is not None:
        path = write(sizes.small, name, folder / f"{name}.gguf")
        logits = model_logits(load(path, threads=1))
    return Prepared(data, kind.dequantize(data, n, products=True), path, logits, compiled)


def prepared(
    names: list[str], sizes: Sizes, folder: Path, capability: tuple[int, int] | None
) -> Iterator[tuple[str, Prepared | Exception]]:
    """`prepare` for all types, with all cores; one after another if nothing is to be compiled."""
    if capability is None:
        yield from ((name, prepare(name, sizes, folder, None)) for name in names)
        return
    with concurrent.futures.ProcessPoolExecutor() as pool:
        futures = {name: pool.submit(prepare, name, sizes, folder, capability) for name in names}
        for name, future in futures.items():
            yield name, future.exception() or future.result()  # type: ignore[misc]


def sample(name: str, rows: int, n: int) -> np.ndarray:
    """uint8[rows, row bytes]: encoded normal rows; random bytes for types without an encoder."""
    kind, rng = types.get(name), np.random.default_rng(0)
    if kind.encode_rows is None:
        return rng.integers(0, 256, (rows, kind.row_bytes(n)), np.uint8)
    x = rng.standard_normal((rows, n)).astype(np.float32)
    return kind.quantize(x, np.ones(n, np.float32) if kind.requires_imatrix else None, effort="fast")


def model_logits(model: Model) -> np.ndarray:
    """Logits of a prompt, and of three single tokens after it."""
    tokens = np.random.default_rng(3).integers(0, model.vocab_size, 12)
    cache = model.new_cache(16)
    return np.concatenate([model.forward(part, cache) for part in np.split(tokens, [9, 10, 11])])


# ------------------------------------------------------------------------------------------------------- every type


def error(values: np.ndarray, expected: np.ndarray) -> float:
    finite = np.isfinite(expected)
    return math.sqrt(np.mean((values - expected)[finite] ** 2) / np.mean(expected[finite] ** 2))


def values(gpu: Gpu, name: str, prepared_type: Prepared) -> dict[str, Any]:
    """Whether decoding is exact, and the errors of products."""
    kind, plain = types.get(name), prepared_type.plain
    rows, n = plain.shape
    matrices = gpu.matrices(prepared_type.data, kind, rows, n)
    decoded = matrices.decoded(exact=True).cpu().numpy()
    x = np.random.default_rng(1).standard_normal((40, n)).astype(np.float32)
    on_gpu = gpu.array(x)
    vector, batch = matrices(on_gpu[:1]).cpu().numpy(), matrices(on_gpu).cpu().numpy()
    return {
        "exact": bool(np.array_equal(decoded, plain, equal_nan=True)),
        "vector_error": error(vector, x[:1] @ plain.T),
        "batch_error": error(batch, x @ plain.T),
    }


def logits(name: str, prepared_type: Prepared, device: str) -> dict[str, Any]:
    """The error of a model's logits against the CPU's; None for types without an encoder."""
    if prepared_type.model is None or prepared_type.logits is None:
        return {"exact_logits": None, "fast_logits": None}
    expected = prepared_type.logits
    exact = model_logits(load(prepared_type.model, devices=device))
    fast = model_logits(load(prepared_type.model, devices=device, numerics="fast", cache_type="f32"))
    spread = float(np.std(expected))
    return {
        "exact_logits": float(np.abs(exact - expected).max()) / spread,
        "fast_logits": float(np.sqrt(np.mean((fast - expected) ** 2))) / spread,
    }


def random_matrices(gpu: Gpu, name: str, rows: int, n: int, count: int) -> Matrices:
    """Matrices of random bytes below 64, which give finite scales."""
    kind = types.get(name)
    size = count * rows * kind.row_bytes(n)
    data = gpu.torch.randint(0, 64, (size,), dtype=gpu.torch.uint8, device=gpu.torch_device)
    return Matrices(gpu, data, kind, rows, n)


def rates(gpu: Gpu, name: str, sizes: Sizes, peak: dict[str, float]) -> dict[str, float]:
    matrix_bytes = sizes.rows * types.get(name).row_bytes(sizes.columns)
    count = -(-sizes.out_of_cache // matrix_bytes)
    matrices = random_matrices(gpu, name, sizes.rows, sizes.columns, count)
    x = gpu.empty(1, sizes.columns).normal_()
    ids = gpu.torch.arange(count, dtype=gpu.torch.int32, device=gpu.torch_device).reshape(1, count)
    graph = gpu.capture(lambda: matrices.of_experts(x, ids))
    bytes_rate = count * matrix_bytes / seconds(gpu, graph.replay, sizes.repeat, 4)
    batch = gpu.empty(sizes.tokens, sizes.columns).normal_()
    rate = 2 * sizes.tokens * sizes.columns * sizes.rows / seconds(gpu, lambda: matrices(batch), sizes.repeat)
    return {
        "bytes_rate": bytes_rate, "of_copy": bytes_rate / peak["copy"],
        "batch_rate": rate, "of_gemm": rate / peak["gemm"],
    }  # fmt: skip


def of_type(gpu: Gpu, name: str, prepared_type: Prepared, sizes: Sizes, peak: dict[str, float]) -> dict[str, Any]:
    figures = (
        values(gpu, name, prepared_type)
        | logits(name, prepared_type, f"cuda:{gpu.index}")
        | rates(gpu, name, sizes, peak)
    )
    off = figures["exact_logits"] is not None and not (
        figures["exact_logits"] < EXACT_TOLERANCE and figures["fast_logits"] < FAST_TOLERANCE
    )
    exact = figures["exact"] or (types.get(name).ggml_type in FLOAT_IDS and figures["vector_error"] < 2**-8)
    return figures | {"right": exact and not off, "compile_seconds": prepared_type.seconds}


def line_of_type(name: str, got: dict[str, Any]) -> str:
    logit_errors = " ".join(
        f"{'-':>9}" if got[key] is None else f"{got[key]:9.2e}" for key in ("exact_logits", "fast_logits")
    )
    return (
        f"{name:>12} {'right' if got['right'] else 'WRONG':>7} {got['vector_error']:9.2e} {got['batch_error']:9.2e} "
        f"{logit_errors} {got['bytes_rate'] / 1e9:7.0f} {100 * got['of_copy']:5.0f} {got['batch_rate'] / 1e12:8.0f} "
        f"{100 * got['of_gemm']:5.0f} {got['compile_seconds']:10.1f}"
    )


# ----------------------------------------------------------------------------------------------------------- models


def generation_speed(model: Model, sizes: Sizes) -> tuple[float, float, np.ndarray]:
    """Tokens/s of a prompt and of generation, and the logits of both."""
    rng = np.random.default_rng(4)
    prompt, context = (rng.integers(0, model.vocab_size, n) for n in (sizes.tokens, sizes.context))
    n_ctx = max(sizes.tokens, sizes.context + sizes.generated)
    cache, times = model.new_cache(n_ctx), []
    for _ in range(1 + min(3, sizes.repeat)):
        cache.clear()
        begin = time.perf_counter()
        last = model.forward(prompt, cache, logits="last")
        times.append(time.perf_counter() - begin)
    cache.clear()
    model.forward(context, cache, logits="last")
    logits_of_steps, step_times = [last], []
    for token in rng.integers(0, model.vocab_size, sizes.generated):
        begin = time.perf_counter()
        logits_of_steps.append(model.forward([int(token)], cache, logits="last"))
        step_times.append(time.perf_counter() - begin)
    return (
        len(prompt) / statistics.median(times[1:]),
        1 / statistics.median(step_times[2:]),
        np.concatenate(logits_of_steps),
    )


def dense_model(gpu: Gpu, path: Path, sizes: Sizes, peak: dict[str, float]) -> dict[str, Any]:
    """A dense model on the GPU; removes the file."""
    try:
        model = load(path, devices=f"cuda:{gpu.index}", numerics="fast", cache_type="f16", n_ctx=sizes.tokens + 64)
        pp, tg, _ = generation_speed(model, sizes)
        nbytes = bytes_per_token(model, 0)
        embedding = model.weights[model.head.embedding]
        weights = sum(math.prod(t.shape) for t in model.weights.values() if t is not embedding)
    finally:
        path.unlink()
    operations = 2 * (weights - math.prod(embedding.shape))  # the output matrix is used for the last token only
    return {
        "pp": pp, "tg": tg, "bytes": nbytes, "tg_of_copy": tg * nbytes / peak["copy"],
        "pp_of_gemm": pp * operations / peak["gemm"],
    }  # fmt: skip


def expert_placements(gpu: Gpu, sizes: Sizes, folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Speed and logit error of a model with experts, for each placement of the experts."""
    device, not_offloaded = f"cuda:{gpu.index}", frozenset({"MUL_MAT_ID"})
    ways: dict[str, dict[str, Any]] = {
        "CPU": {},
        "hybrid": {"devices": device, "override_tensor": "_exps=CPU", "offload": Offload(forbidden=not_offloaded)},
        "streamed": {"devices": device, "override_tensor": "_exps=CPU", "offload": Offload(1)},
        "GPU": {"devices": device},
    }
    other = 0 if gpu.index else 1
    with contextlib.suppress(UnsupportedError):
        gpu_worker.gpu(other)
        ways["graph"] = {"devices": f"{device},cuda:{other}", "split_mode": "graph"}
    path, expected = write(sizes.experts, sizes.kind_of_experts, folder / "experts.gguf"), None
    for way, arguments in ways.items():
        try:
            model = load(path, numerics="fast", cache_type="f16", n_ctx=sizes.tokens + 64, **arguments)
            pp, tg, logits_of_way = generation_speed(model, sizes)
        except Exception as failure:
            yield way, {"failed": f"{type(failure).__name__}: {failure}"}
            continue
        expected = logits_of_way if expected is None else expected
        sent = 0 if model.split is None else model.split.ledger.bytes["CPU", f"CUDA{gpu.index}"]
        yield way, {"pp": pp, "tg": tg, "to_gpu": sent, "error": error(logits_of_way, expected)}
        gpu.torch.cuda.empty_cache()


# ------------------------------------------------------------------------------------------------------------- main


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Correctness and rates of what runs on a GPU.")
    parser.add_argument("--types", help="a comma list; all by default")
    parser.add_argument("--models", default=",".join(MODEL_TYPES), help='types of the 8B models; "" for none')
    parser.add_argument("--stage", default=",".join(STAGES), help=f"a comma list of {', '.join(STAGES)}")
    parser.add_argument("--json", type=Path, help="file for the figures, written anew after each")
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="for models, 36 GB in all; a temporary one by default")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, to try the bench itself")
    records.add_option(parser)
    return parser.parse_args(arguments)


def all_types(
    gpu: Gpu, names: list[str], sizes: Sizes, folder: Path, peak: dict[str, float], results: dict[str, Any],
    save: Callable[[], None],
) -> None:  # fmt: skip
    """The checks and rates of each type."""
    heads: tuple[tuple[str, int], ...]
    heads = ("type", 12), ("values", 7), ("product", 9), ("of 40", 9), ("logits", 9), ("fast", 9), ("GB/s", 7), ("%", 5)
    heads = *heads, ("TFLOP/s", 8), ("%", 5), ("compile s", 10)
    print(" ".join(f"{head:>{width}}" for head, width in heads))
    for name, prepared_type in prepared(names, sizes, folder, None if sizes is TINY else gpu.capability):
        try:
            if isinstance(prepared_type, Exception):
                raise prepared_type
            results[name] = of_type(gpu, name, prepared_type, sizes, peak)
            print(line_of_type(name, results[name]), flush=True)
        except Exception as failure:
            results[name] = {"right": False, "failed": f"{type(failure).__name__}: {failure}"}
            print(f"{name:>12}  FAILED {results[name]['failed']}", flush=True)
        gpu.torch.cuda.empty_cache()
        save()


def all_models(
    gpu: Gpu, names: list[str], sizes: Sizes, folder: Path, peak: dict[str, float], results: dict[str, Any],
    save: Callable[[], None],
) -> None:  # fmt: skip
    """The dense models."""
    for name, path in written(names, sizes, folder):
        try:
            if isinstance(path, BaseException):
                raise path
            got = results[name] = dense_model(gpu, path, sizes, peak)
            print(f"8B {name:9} TG {got['tg']:7.1f} tokens/s, {100 * got['tg_of_copy']:.0f} % of copy (aim 60); "
                  f"PP {got['pp']:8.0f}, {100 * got['pp_of_gemm']:.0f} % of gemm (aim 40)", flush=True)  # fmt: skip
        except Exception as failure:
            results[name] = {"failed": f"{type(failure).__name__}: {failure}"}
            print(f"8B {name:9} FAILED {results[name]['failed']}", flush=True)
        gpu.torch.cuda.empty_cache()
        save()


def written(names: list[str], sizes: Sizes, folder: Path) -> Iterator[tuple[str, Path | BaseException]]:
    """Files of the dense models, WRITERS at a time; the next are written while one is measured."""
    if sizes is TINY:
        yield from ((name, write(sizes.llama, name, folder / f"{name}.gguf")) for name in names)
        return
    with concurrent.futures.ProcessPoolExecutor(WRITERS) as pool:
        futures = {name: pool.submit(write, sizes.llama, name, folder / f"{name}.gguf") for name in names}
        for name, future in futures.items():
            yield name, future.exception() or future.result()


def compile_for_rates(name: str, capability: tuple[int, int]) -> None:
    """The kernels that `rates` runs, to the cache on disk."""
    from quantkit.runtime.kernels.cuda import floats, weights

    number = types.get(name).ggml_type
    module = floats if number in FLOAT_IDS else weights
    for kernel in (module.matvec(number, 1), module.dequantize(number, "bf16")):
        kernel.cubin(capability)


def all_rates(
    gpu: Gpu, names: list[str], sizes: Sizes, peak: dict[str, float], results: dict[str, Any], save: Callable[[], None]
) -> None:
    """`rates` of each type, without checks."""
    if sizes is not TINY:
        with concurrent.futures.ProcessPoolExecutor() as pool:
            list(pool.map(compile_for_rates, names, [gpu.capability] * len(names)))
    for name in names:
        got = results[name] = rates(gpu, name, sizes, peak)
        print(f"{name:>12} {got['bytes_rate'] / 1e9:7.0f} GB/s {100 * got['of_copy']:4.0f} % of copy; "
              f"{got['batch_rate'] / 1e12:6.0f} TFLOP/s {100 * got['of_gemm']:4.0f} % of gemm", flush=True)  # fmt: skip
        gpu.torch.cuda.empty_cache()
        save()


def main(arguments: list[str] | None = None) -> int:
    options = parsed(arguments)
    sizes = TINY if options.tiny else Sizes()
    stages = options.stage.split(",")
    if unknown := set(stages) - set(STAGES):
        print(f"bench-gpu: no stage {', '.join(sorted(unknown))}; there are {', '.join(STAGES)}", file=sys.stderr)
        return 1
    try:
        gpu = gpu_worker.gpu(options.device)
    except UnsupportedError as failure:
        print(f"bench-gpu: {failure}", file=sys.stderr)
        return 1
    begin, peak = time.perf_counter(), machine(gpu, sizes)
    copy, bus, gemm = peak["copy"] / 1e9, peak["bus"] / 1e9, peak["gemm"] / 1e12
    print(f"{gpu.name}, torch {gpu.torch.__version__}: copy {copy:.0f} GB/s, bus {bus:.0f}, gemm {gemm:.0f} TFLOP/s\n")
    names = options.types.split(",") if options.types else [t.name for t in types.all() if product(t)]
    models = [name for name in options.models.split(",") if name]
    figures: dict[str, Any] = {"gpu": gpu.name, "torch": gpu.torch.__version__, "types": {}, "rates": {}, "models": {}}
    figures |= {"experts": {}} | peak

    def save() -> None:
        if options.json:
            new = options.json.with_suffix(".new")
            new.write_text(json.dumps(figures))
            new.replace(options.json)

    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        folder = Path(temporary)
        if "rates" in stages and "types" not in stages:
            all_rates(gpu, names, sizes, peak, figures["rates"], save)
        if "types" in stages:
            all_types(gpu, names, sizes, folder, peak, figures["types"], save)
        if "models" in stages:
            all_models(gpu, models, sizes, folder, peak, figures["models"], save)
        for way, got in expert_placements(gpu, sizes, folder) if "experts" in stages else ():
            figures["experts"][way] = got
            line = f"FAILED {got['failed']}" if "failed" in got else (
                f"TG {got['tg']:7.1f} tokens/s, PP {got['pp']:8.0f}; logits {got['error']:.1e} from the CPU's"
            )  # fmt: skip
            print(f"experts {way:9} {line}", flush=True)
            save()
    figures["seconds"] = time.perf_counter() - begin
    measured = figures["types"] or figures["rates"]
    exact = {True: "yes", False: "no", None: "not checked"}
    rows = [
        {"type": name, "exact": exact[got.get("exact")], "gb_s": got["bytes_rate"] / 1e9, "of_copy": got["of_copy"],
         "tflop_s": got["batch_rate"] / 1e12, "of_gemm": got["of_gemm"]}
        for name, got in measured.items() if "failed" not in got
    ]  # fmt: skip
    if measured:
        records.save(TABLE, rows, options, figures)
    save()
    print(json.dumps(figures))
    others = [*figures["models"].values(), *figures["experts"].values()]
    off = any(got.get("error", 0) > FAST_TOLERANCE for got in others)
    wrong = not all(got["right"] for got in figures["types"].values())
    return 1 if wrong or off or any("failed" in got for got in others) else 0


if __name__ == "__main__":
    sys.exit(main())
