"""Choose the CPU kernels of matrix products by the type of the weights.

product(type)              matrix-vector product, a C function of cpu/matvec.py; None if the type has no kernel
batch(type)                batch product: in integers (cpu/gemm.py), or in float32 (cpu/float_gemm.py) for F32, F16
                           and BF16
linear(tensor, threads)    a callable for batches that quantizes activations; None where decoded weights and BLAS
                           are as fast, or the type has no kernel
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from quantkit.codegen.callbacks import Callback
from quantkit.formats.gguf import Tensor
from quantkit.placement import kernel_sizes
from quantkit.runtime.kernels.cpu import float_gemm, gemm, matvec
from quantkit.runtime.kernels.cpu.float_gemm import MultiplyParameters
from quantkit.runtime.kernels.cpu.formats.registry import FORMATS
from quantkit.runtime.kernels.cpu.op_list import OpList
from quantkit.types import QuantType

FloatArray = np.ndarray[Any, np.dtype[np.float32]]


def product(kind: QuantType) -> Callback | None:
    """The function `void(weights, n, first, last, activations, out)` of a type."""
    return matvec.product(kind.ggml_type)


class Batch(NamedTuple):
    """How a batch is multiplied: `kernel(add)` is the operation out (+)= W x, with MultiplyParameters."""

    quantized: bool  # x is tiles of gemm.py; otherwise float32 rows
    kernel: Callable[[int], Callback]
    scratch_bytes: Callable[[int], int]  # per thread, for n columns


def batch(kind: QuantType) -> Batch:
    """The batch product of a type that has a `product`."""
    number = kind.ggml_type
    fmt = FORMATS.get(number)
    if fmt is not None:
        return Batch(True, lambda add: gemm.multiply(number, add), lambda n: gemm.scratch_bytes(fmt, n))
    return Batch(False, lambda add: float_gemm.multiply(number, add), kernel_sizes.float_scratch_bytes)


def linear(tensor: Tensor, threads: int) -> Callable[[FloatArray, FloatArray], None] | None:
    """`run(x, out)`: out float32[tokens, rows] = x W^T for x float32[tokens, n], with quantized activations.

    Several Python threads may call it at once.
    """
    rows, n = tensor.shape
    if product(tensor.type) is None or n % 32 or rows % tensor.type.interleave:
        return None
    product_of_batch = batch(tensor.type)
    if not product_of_batch.quantized:
        return None
    ops, data = OpList(threads), tensor.data
    count = ops.keep(np.zeros(1, np.int64))
    scratch, stride = ops.private_buffer("scratch", product_of_batch.scratch_bytes(n))
    tokens = count.ctypes.data
    quantize = ops.add(gemm.quantize_tiles, gemm.QuantizeParameters(x=0, n=n, tokens=tokens, tiles=0), barrier=True)
    multiply = ops.add(
        product_of_batch.kernel(0),
        MultiplyParameters(
            weights=data.ctypes.data, n=n, rows=rows, tokens=tokens, x=0, out=0, bias=0, scratch=scratch,
            private_stride=stride, claims=ops.claims(),
        ),
    )  # fmt: skip

    def run(x: FloatArray, out: FloatArray) -> None:
        x = np.ascontiguousarray(x, np.float32)
        tiles = np.empty(kernel_sizes.tiles_bytes(n, len(x)), np.uint8)

        def prepare() -> None:  # several Python threads may run this list
            count[0] = len(x)
            quantize.set(x=x.ctypes.data, tiles=tiles.ctypes.data)
            multiply.set(x=tiles.ctypes.data, out=out.ctypes.data)

        ops.run(prepare)

    ops.keep(data)
    return run
