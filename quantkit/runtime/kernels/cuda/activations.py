"""Activations as signed bytes: what `weights.matvec` multiplies with.

Of each 32 columns xs = largest magnitude / 127 and the codes nearest to x / xs, ties away from zero; of each 16 the
sum of codes times xs. Values are float32; where one is NaN or infinite xs is, and so are the products. A block of
threads quantizes 8 runs of 32.
"""

from __future__ import annotations

import functools

import numpy as np

from quantkit.runtime.kernels.cuda.hardware import cuda, inlined, lanes_largest, lanes_sum, warp_sum
from quantkit.runtime.kernels.cuda.kernel import CudaKernel

THREADS = 256


@inlined
def larger(a, b):
    """Of two numbers; NaN if one is."""
    return a if a != a or a > b else b


@inlined
def code_of(value, inverse):
    """Nearest to value * inverse, ties away from zero; 0 where that is NaN."""
    exact = abs(value) * inverse
    size = np.int32(exact + np.float32(0.5)) if exact < np.float32(128) else np.int32(0)
    return -size if value < np.float32(0) else size


@inlined
def store_codes(value, i, inside, codes, scales, sums):
    """Store element i where it is `inside`. A warp has a run of 32; all threads of a block call this together."""
    lane = cuda.threadIdx.x % 32
    scale = lanes_largest(abs(value), 32) / np.float32(127)
    inverse = np.float32(1) / scale if scale > np.float32(0) else np.float32(0)
    code = code_of(value, inverse)
    low = warp_sum(np.float32(code) if lane < 16 else np.float32(0))
    high = warp_sum(np.float32(code) if lane >= 16 else np.float32(0))
    if inside:
        codes[i] = code
        if lane == 0:
            scales[i // 32] = scale
            sums[i // 16] = scale * low
            sums[i // 16 + 1] = scale * high


@inlined
def store_four(a, b, c, d, i, inside, words, scales, sums):
    """Store elements i … i + 3 where they are `inside`, i a multiple of 4; their codes are word i / 4.

    Eight threads have a run of 32; all threads of a block call this together.
    """
    scale = lanes_largest(larger(larger(abs(a), abs(b)), larger(abs(c), abs(d))), 8) / np.float32(127)
    inverse = np.float32(1) / scale if scale > np.float32(0) else np.float32(0)
    first, second, third, fourth = code_of(a, inverse), code_of(b, inverse), code_of(c, inverse), code_of(d, inverse)
    total = lanes_sum(np.float32(first + second + third + fourth), 4)
    if inside:
        words[i // 4] = first & 255 | (second & 255) << 8 | (third & 255) << 16 | fourth << 24
        if i % 16 == 0:
            sums[i // 16] = scale * total
        if i % 32 == 0:
            scales[i // 32] = scale


@functools.cache
def quantize() -> CudaKernel:
    """(x, count, codes, scales, sums): float32[count] to int8[count], float32[count / 32], [count / 16]."""

    def kernel(x, count, codes, scales, sums):
        i = cuda.blockIdx.x * np.int64(THREADS) + cuda.threadIdx.x
        value = x[i] if i < count else np.float32(0)
        store_codes(value, i, i < count, codes, scales, sums)

    return CudaKernel("quantize_q8", kernel, "f32[] i64 i8[] f32[] f32[]")
