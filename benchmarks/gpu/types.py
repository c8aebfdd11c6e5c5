"""Stage `types`: whether each type gives the CPU's results, and its rates. Most of its time compiles kernels.

values     whether decoded values equal those of the CPU's decoder (float32, `checked` rows and columns)
product    root-mean-square error of products relative to the CPU's decoded values in float32: with one vector
           (activations as bytes) and with 40 (bfloat16)
logits     a tiny llama on the GPU and on the CPU: the largest difference of logits, divided by their standard
           deviation, in exact numerics; the root mean square of the differences in fast numerics. A prompt of 9,
           then three tokens, the last one with a CUDA graph
rates      as the stage `kernels`
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.gpu import kernels
from benchmarks.gpu.run import Figures, Run, Sizes, error, given, in_processes
from benchmarks.synthetic import write
from quantkit import types
from quantkit.runtime.kernels.cuda.dispatch import FLOAT_IDS
from quantkit.runtime.loading import load
from quantkit.runtime.model import Model

TABLE = kernels.TABLE
rows = kernels.rows
FAST_TOLERANCE = 0.05  # of logits in fast numerics, whose activations are bytes, to the CPU's
EXACT_TOLERANCE = 1e-3  # of logits in exact numerics to the CPU's


@dataclass
class Prepared:
    """What the CPU computes for a type: encoded rows and their values, a model and its logits."""

    data: np.ndarray
    plain: np.ndarray
    model: Path | None
    logits: np.ndarray | None
    seconds: float  # to compile its kernels


def measure(run: Run) -> None:
    """Each type, as soon as the CPU has what it is compared with."""
    arguments = run.sizes, run.folder, run.capability
    for name, prepared in in_processes(run, prepare, run.types(), *arguments):

        def task(got: Figures, name: str = name, prepared: object = prepared) -> None:
            got |= of_type(run, name, given(prepared))

        run.item(name, task, line)


def line(got: Figures) -> str:
    """The results and rates in words."""
    logits = "" if got["exact_logits"] is None else f", logits {got['exact_logits']:.2e}, fast {got['fast_logits']:.2e}"
    return (
        f"{'right' if got['right'] else 'WRONG'}; errors of products {got['vector_error']:.2e}, of 40 "
        f"{got['batch_error']:.2e}{logits}; {kernels.line(got)}; compiled in {got['compile_seconds']:.1f} s"
    )


def prepare(name: str, sizes: Sizes, folder: Path, capability: tuple[int, int] | None) -> Prepared:
    """Compute the reference values of a type, and compile its kernels to the cache on disk."""
    from quantkit.runtime.kernels.cuda import kernels as all_kernels

    begin, kind, (count, n) = time.perf_counter(), types.get(name), sizes.checked
    if capability:
        for kernel in all_kernels.of_type(kind.ggml_type):
            kernel.cubin(capability)
    compiled = time.perf_counter() - begin
    data = sample(name, count, n)
    path = logits = None
    if kind.encode_rows is not None:
        path = write(sizes.small, name, folder / f"{name}.gguf")
        logits = model_logits(load(path, threads=1))
    return Prepared(data, kind.dequantize(data, n, products=True), path, logits, compiled)


def sample(name: str, count: int, n: int) -> np.ndarray:
    """uint8[count, row bytes]: encoded normal rows; random bytes for types without an encoder."""
    kind, rng = types.get(name), np.random.default_rng(0)
    if kind.encode_rows is None:
        return rng.integers(0, 256, (count, kind.row_bytes(n)), np.uint8)
    x = rng.standard_normal((count, n)).astype(np.float32)
    return kind.quantize(x, np.ones(n, np.float32) if kind.requires_imatrix else None, effort="fast")


def model_logits(model: Model) -> np.ndarray:
    """Logits of a prompt, and of three single tokens after it."""
    tokens = np.random.default_rng(3).integers(0, model.vocab_size, 12)
    cache = model.new_cache(16)
    return np.concatenate([model.forward(part, cache) for part in np.split(tokens, [9, 10, 11])])


def of_type(run: Run, name: str, prepared: Prepared) -> Figures:
    """All figures of a type, and whether they are right."""
    got = values(run, name, prepared) | logits(name, prepared, f"cuda:{run.gpu.index}") | kernels.rates_of(run, name)
    off = got["exact_logits"] is not None and not (
        got["exact_logits"] < EXACT_TOLERANCE and got["fast_logits"] < FAST_TOLERANCE
    )
    exact = got["exact"] or (types.get(name).ggml_type in FLOAT_IDS and got["vector_error"] < 2**-8)
    return got | {"right": exact and not off, "compile_seconds": prepared.seconds}


def values(run: Run, name: str, prepared: Prepared) -> Figures:
    """Whether decoding is exact, and the errors of products."""
    gpu, kind, plain = run.gpu, types.get(name), prepared.plain
    count, n = plain.shape
    matrices = gpu.matrices(prepared.data, kind, count, n)
    decoded = matrices.decoded(exact=True).cpu().numpy()
    x = np.random.default_rng(1).standard_normal((40, n)).astype(np.float32)
    on_gpu = gpu.array(x)
    vector, batch = matrices(on_gpu[:1]).cpu().numpy(), matrices(on_gpu).cpu().numpy()
    return {
        "exact": bool(np.array_equal(decoded, plain, equal_nan=True)),
        "vector_error": error(vector, x[:1] @ plain.T),
        "batch_error": error(batch, x @ plain.T),
    }


def logits(name: str, prepared: Prepared, device: str) -> Figures:
    """The error of a model's logits against the CPU's; None for types without an encoder."""
    if prepared.model is None or prepared.logits is None:
        return {"exact_logits": None, "fast_logits": None}
    expected = prepared.logits
    exact = model_logits(load(prepared.model, devices=device))
    fast = model_logits(load(prepared.model, devices=device, numerics="fast", cache_type="f32"))
    spread = float(np.std(expected))
    return {
        "exact_logits": float(np.abs(exact - expected).max()) / spread,
        "fast_logits": float(np.sqrt(np.mean((fast - expected) ** 2))) / spread,
    }
