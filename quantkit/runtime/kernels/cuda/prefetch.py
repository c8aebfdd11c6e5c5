"""Loading weights into the L2 cache before their product, while steps of few threads leave memory idle."""

from __future__ import annotations

import functools

import numpy as np

from quantkit.runtime.kernels.cuda import hardware
from quantkit.runtime.kernels.cuda.hardware import cuda
from quantkit.runtime.kernels.cuda.kernel import CudaKernel

THREADS = 256
LINE = 128  # bytes of a line of the cache
LINES = 8  # of a thread


@functools.cache
def prefetch() -> CudaKernel:
    """(data, lines): ask for the first `lines` lines of uint8 data. Grid: lines / (THREADS * LINES)."""

    def kernel(data, lines):
        first = cuda.blockIdx.x * np.int64(THREADS) + cuda.threadIdx.x
        for j in range(LINES):
            i = first + j * np.int64(cuda.gridDim.x * THREADS)
            if i < lines:
                hardware.prefetch(data, LINE * i)

    return CudaKernel("prefetch", kernel, "u8[] i64")
