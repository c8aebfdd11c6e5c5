"""Stage `kernels`: the rates of the products of each type, beside what the machine reaches. No results are checked.

bytes_rate, of_copy   packed bytes/s that products with one vector read, rows x columns, from `out_of_cache` bytes or
                      more, so that the GPU's cache does not help; the same over the rate of copies
batch_rate, of_gemm   operations/s of a product with `tokens` vectors by decoded tiles and torch's product; the same
                      over torch's bfloat16 product
"""

from __future__ import annotations

from benchmarks.gpu.run import Figures, Run, given, in_processes, seconds
from benchmarks.records import Column, Table
from quantkit import types
from quantkit.runtime.kernels.cuda.device import Gpu, Matrices
from quantkit.runtime.kernels.cuda.dispatch import FLOAT_IDS

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


def measure(run: Run) -> None:
    """The rates of each type, as soon as its kernels are compiled."""
    for name, compiled in in_processes(run, compile_type, run.types(), run.capability):

        def task(got: Figures, name: str = name, compiled: object = compiled) -> None:
            given(compiled)
            got |= rates_of(run, name)

        run.item(name, task, line)


def rows(figures: Figures) -> list[Figures]:
    """Of the types that were measured, by this stage or by `types`, which says whether they decode exactly."""
    exact = {True: "yes", False: "no", None: "not checked"}
    return [
        {"type": name, "exact": exact[got.get("exact")], "gb_s": got["bytes_rate"] / 1e9, "of_copy": got["of_copy"],
         "tflop_s": got["batch_rate"] / 1e12, "of_gemm": got["of_gemm"]}
        for name, got in figures.items() if "failed" not in got
    ]  # fmt: skip


def line(got: Figures) -> str:
    """The rates in words."""
    return (
        f"{got['bytes_rate'] / 1e9:.0f} GB/s, {100 * got['of_copy']:.0f} % of copy; "
        f"{got['batch_rate'] / 1e12:.0f} TFLOP/s, {100 * got['of_gemm']:.0f} % of gemm"
    )


def rates_of(run: Run, name: str) -> Figures:
    """All four rates of a type."""
    vector, batch = vector_rate(run, name), batch_rate(run, name)
    return {
        "bytes_rate": vector, "of_copy": vector / run.peak["copy"],
        "batch_rate": batch, "of_gemm": batch / run.peak["gemm"],
    }  # fmt: skip


def vector_rate(run: Run, name: str) -> float:
    """Packed bytes/s of products with one vector, of enough matrices to leave the cache, in a CUDA graph."""
    gpu, sizes = run.gpu, run.sizes
    matrix_bytes = sizes.rows * types.get(name).row_bytes(sizes.columns)
    count = -(-sizes.out_of_cache // matrix_bytes)
    matrices = random_matrices(gpu, name, sizes.rows, sizes.columns, count)
    x = gpu.empty(1, sizes.columns).normal_()
    ids = gpu.torch.arange(count, dtype=gpu.torch.int32, device=gpu.torch_device).reshape(1, count)
    graph = gpu.capture(lambda: matrices.of_experts(x, ids))
    return count * matrix_bytes / seconds(gpu, graph.replay, sizes.repeat, 4)


def batch_rate(run: Run, name: str) -> float:
    """Operations/s of a product with the vectors of a prompt."""
    gpu, sizes = run.gpu, run.sizes
    matrices = random_matrices(gpu, name, sizes.rows, sizes.columns, 1)
    batch = gpu.empty(sizes.tokens, sizes.columns).normal_()
    operations = 2 * sizes.tokens * sizes.columns * sizes.rows
    return operations / seconds(gpu, lambda: matrices(batch), sizes.repeat)


def random_matrices(gpu: Gpu, name: str, rows: int, n: int, count: int) -> Matrices:
    """Matrices of random bytes below 64, which give finite scales."""
    kind = types.get(name)
    size = count * rows * kind.row_bytes(n)
    data = gpu.torch.randint(0, 64, (size,), dtype=gpu.torch.uint8, device=gpu.torch_device)
    return Matrices(gpu, data, kind, rows, n)


def compile_type(name: str, capability: tuple[int, int] | None) -> None:
    """Compile the kernels that `rates_of` runs to the cache on disk; none in a dry run."""
    from quantkit.runtime.kernels.cuda import floats, weights

    if capability is None:
        return
    number = types.get(name).ggml_type
    module = floats if number in FLOAT_IDS else weights
    for kernel in (module.matvec(number, 1), module.dequantize(number, "bf16")):
        kernel.cubin(capability)
