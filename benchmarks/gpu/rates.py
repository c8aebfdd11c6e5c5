"""Stage `rates`: what the machine reaches without quantkit, and what other products with 4-bit weights reach.

    copy            bytes/s of torch's copies within the GPU, read plus written
    bus             bytes/s of copies from pinned memory of the host to the GPU
    gemm            operations/s of torch's bfloat16 product, tokens x columns by columns x rows
    torch bf16      bytes/s of weights that products with one vector read, in one CUDA graph, from `out_of_cache` bytes
    torch int4      the same of `torch._weight_int4pack_mm`, groups of 128 columns with a scale and a zero
    triton int4     the same of a plain Triton kernel, groups of 32 columns with a scale (`triton_int4.py`)
    quantkit q4_0   the same of quantkit's kernel, for comparison

What another library does not have here is "unavailable", with the reason; that is no failure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.gpu import kernels
from benchmarks.gpu.run import Figures, Run, seconds
from benchmarks.records import Column, Table

TABLE = Table(
    "gpu_rates",
    "What does a GPU reach without quantkit?",
    (
        Column("what"),
        Column("gb_s", "GB/s", ".0f"),
        Column("of_copy", "of copy", ".2f"),
        Column("tflop_s", "TFLOP/s", ".0f"),
    ),
    "Copies, read plus written; the bus from pinned memory; torch's bfloat16 product; others' products of a vector.",
)
GROUP = 128  # columns of torch's groups
Product = Callable[[], Any]


def measure(run: Run) -> None:
    """The machine's rates, then each product with one vector."""
    for name in ("copy", "bus", "gemm"):
        run.item(name, lambda got, name=name: got.update(of_machine(run, name)), line)  # type: ignore[misc]
    for name, make in (("torch bf16", torch_bf16), ("torch int4", torch_int4), ("triton int4", triton_int4)):
        run.item(name, lambda got, make=make: got.update(of_others(run, make)), line)  # type: ignore[misc]
    run.item("quantkit q4_0", lambda got: got.update(of_copy(run, kernels.vector_rate(run, "q4_0"))), line)


def rows(figures: Figures) -> list[Figures]:
    """What was available."""
    found = {name: got for name, got in figures.items() if not {"failed", "unavailable"} & got.keys()}
    return [
        {"what": name, "gb_s": scaled(got.get("bytes_rate"), 1e9), "of_copy": got.get("of_copy"),
         "tflop_s": scaled(got.get("rate"), 1e12)}
        for name, got in found.items()
    ]  # fmt: skip


def scaled(value: float | None, unit: float) -> float | None:
    """A rate in a unit; None for none."""
    return None if value is None else value / unit


def line(got: Figures) -> str:
    """A rate in words."""
    if "unavailable" in got:
        return f"unavailable: {got['unavailable']}"
    if "rate" in got:
        return f"{got['rate'] / 1e12:.0f} TFLOP/s"
    share = f", {100 * got['of_copy']:.0f} % of copy" if "of_copy" in got else ""
    return f"{got['bytes_rate'] / 1e9:.0f} GB/s{share}"


def of_machine(run: Run, name: str) -> Figures:
    """One of the machine's rates."""
    return {"rate" if name == "gemm" else "bytes_rate": run.peak[name]}


def of_copy(run: Run, rate: float) -> Figures:
    """A rate in bytes/s, and its share of the rate of copies."""
    return {"bytes_rate": rate, "of_copy": rate / run.peak["copy"]}


def of_others(run: Run, make: Callable[[Run], tuple[Product, int]]) -> Figures:
    """The rate of another library's product with one vector, of enough matrices to leave the cache."""
    try:
        product, nbytes = make(run)
        products = [product] + [make(run)[0] for _ in range(-(-run.sizes.out_of_cache // nbytes) - 1)]
        graph = run.gpu.capture(lambda: [multiply() for multiply in products])
    except Exception as failure:  # a library may be missing, too old, or know no kernel for this GPU
        return {"unavailable": f"{type(failure).__name__}: {str(failure).partition(chr(10))[0]}"}
    return of_copy(run, len(products) * nbytes / seconds(run.gpu, graph.replay, run.sizes.repeat, 4))


def torch_bf16(run: Run) -> tuple[Product, int]:
    """torch's product of a bfloat16 vector and matrix, and the matrix's bytes."""
    gpu, sizes = run.gpu, run.sizes
    x = gpu.empty(1, sizes.columns, kind="bfloat16").normal_()
    matrix = gpu.empty(sizes.rows, sizes.columns, kind="bfloat16").normal_()
    return lambda: gpu.torch.matmul(x, matrix.T), 2 * matrix.numel()


def torch_int4(run: Run) -> tuple[Product, int]:
    """torch's product with 4-bit weights and bfloat16 scales and zeros, and the bytes of all."""
    gpu, sizes = run.gpu, run.sizes
    x = gpu.empty(1, sizes.columns, kind="bfloat16").normal_()
    codes = random_bytes(gpu, sizes.rows, sizes.columns // 2)
    packed = gpu.torch.ops.aten._convert_weight_to_int4pack(codes, 8)
    scales = gpu.empty(sizes.columns // GROUP, sizes.rows, 2, kind="bfloat16").normal_()
    multiply = gpu.torch.ops.aten._weight_int4pack_mm
    return lambda: multiply(x, packed, GROUP, scales), codes.numel() + 2 * scales.numel()


def triton_int4(run: Run) -> tuple[Product, int]:
    """The product of `triton_int4.py`, and the bytes of codes and scales."""
    from benchmarks.gpu import triton_int4

    gpu, sizes = run.gpu, run.sizes
    x = gpu.empty(sizes.columns, kind="bfloat16").normal_()
    codes = random_bytes(gpu, sizes.rows, sizes.columns // 2)
    scales = gpu.empty(sizes.rows, sizes.columns // triton_int4.GROUP, kind="float16").normal_()
    return lambda: triton_int4.product(x, codes, scales), codes.numel() + 2 * scales.numel()


def random_bytes(gpu: Any, rows: int, columns: int) -> Any:
    """uint8[rows, columns] on the GPU."""
    return gpu.torch.randint(0, 256, (rows, columns), dtype=gpu.torch.uint8, device=gpu.torch_device)
