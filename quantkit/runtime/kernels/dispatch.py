"""Which kernel computes with which type on this machine's CPU.

product(type)               weights times one vector, a C function of kernels/cpu/matvec.py; None where there is none
batch(type)                 how a batch is multiplied: in integers (gemm.py), or in float32 (floats.py) where the
                            weights are floats
linear(tensor, threads)     a callable for batches that quantizes activations; None where decoded panels and BLAS
                            are as fast, or the type has no kernel
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from quantkit.codegen.callbacks import Callback
from quantkit.formats.gguf import Tensor
from quantkit.placement import kernel_sizes
from quantkit.runtime.kernels.cpu import float_gemm, gemm, matvec
from quantkit.runtime.kernels.cpu.formats.registry import FORMATS
from quantkit.runtime.kernels.cpu.thread_team import OpList
from quantkit.types import QuantType


def product(kind: QuantType) -> Callback | None:
    """`void(weights, n, first, last, activations, out)`."""
    return matvec.product(kind.ggml_type)


class Batch(NamedTuple):
    """`kernel(add)` is the operation out (+)= W x; `quantized`: x are tiles of gemm.py, not float32 rows."""

    quantized: bool
    kernel: Callable[[int], Callback]
    scratch_bytes: Callable[[int], int]  # of each thread, for rows of n


def batch(kind: QuantType) -> Batch:
    """For types that have a `product`."""
    number = kind.ggml_type
    found = FORMATS.get(number)
    if found is not None:
        return Batch(True, lambda add: gemm.multiply(number, add), lambda n: gemm.scratch_bytes(found, n))
    return Batch(False, lambda add: float_gemm.multiply(number, add), kernel_sizes.float_scratch_bytes)


def linear(tensor: Tensor, threads: int) -> Callable[[np.ndarray, np.ndarray], None] | None:
    """`run(x, out)`: out float32[tokens, rows] = x W^T for x float32[tokens, n], with activations quantized.

    Several Python threads may call it at once.
    """
    rows, n = tensor.shape
    if product(tensor.type) is None or n % 32 or rows % tensor.type.interleave:
        return None
    how = batch(tensor.type)
    if not how.quantized:
        return None
    ops, data = OpList(threads), tensor.data
    count = ops.keep(np.zeros(1, np.int64))
    scratch, stride = ops.private("scratch", how.scratch_bytes(n))
    tokens = count.ctypes.data
    quantize = ops.add(gemm.quantize_tiles.address, gemm.QUANTIZE, wait=True, n=n, tokens=tokens)
    multiply = ops.add(
        how.kernel(0).address, gemm.MULTIPLY, weights=data.ctypes.data, n=n, rows=rows, tokens=tokens,
        scratch=scratch, private_stride=stride,
    )  # fmt: skip

    def run(x: np.ndarray, out: np.ndarray) -> None:
        x = np.ascontiguousarray(x, np.float32)
        tiles = np.empty(kernel_sizes.tiles_bytes(n, len(x)), np.uint8)

        def prepare() -> None:  # several Python threads may run the one list
            count[0] = len(x)
            quantize[gemm.QUANTIZE.index("x")] = x.ctypes.data
            quantize[gemm.QUANTIZE.index("tiles")] = multiply[gemm.MULTIPLY.index("x")] = tiles.ctypes.data
            multiply[gemm.MULTIPLY.index("out")] = out.ctypes.data

        ops.run(prepare)

    ops.keep(data)
    return run
