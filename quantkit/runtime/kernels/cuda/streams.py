"""What parts of blocks read and write of residual streams: `blocks.HyperConnection`, a thread for each token."""

from __future__ import annotations

import functools
import math

import numpy as np

from quantkit.runtime.kernels.cuda.hardware import cuda
from quantkit.runtime.kernels.cuda.kernel import CudaKernel

THREADS = 64


@functools.cache
def hyper_weights(n: int) -> CudaKernel:
    """(logits, scale, base, eps, iterations, tokens, pre, post, mixing), of n streams

    logits float32[tokens, (2 + n) n] are those of pre [n], post [n] and comb [n, n], scale float32[3], base float32
    [(2 + n) n]. pre, post float32[tokens, n] are sigmoid + eps and 2 sigmoid; mixing float32[tokens, n, n] is the
    transpose of C: `hyper_connections.doubly_stochastic`.
    """
    square = n * n

    def kernel(logits, scale, base, eps, iterations, tokens, pre, post, mixing):
        token = cuda.blockIdx.x * np.int64(THREADS) + cuda.threadIdx.x
        if token >= tokens:
            return
        first, at = token * (2 + n) * n, token * n
        for i in range(n):
            x = logits[first + i] * scale[0] + base[i]
            pre[at + i] = np.float32(1) / (np.float32(1) + math.exp(-x)) + eps
            x = logits[first + n + i] * scale[1] + base[n + i]
            post[at + i] = np.float32(2) / (np.float32(1) + math.exp(-x))
        c = cuda.local.array(square, np.float32)
        for i in range(n):
            largest = np.float32(-math.inf)
            for j in range(n):
                e = 2 * n + i * n + j
                c[i * n + j] = logits[first + e] * scale[2] + base[e]
                largest = max(largest, c[i * n + j])
            total = np.float32(0)
            for j in range(n):
                c[i * n + j] = math.exp(c[i * n + j] - largest)
                total += c[i * n + j]
            for j in range(n):
                c[i * n + j] = c[i * n + j] / total + eps
        for step in range(iterations):
            if step > 0:
                for i in range(n):
                    total = eps
                    for j in range(n):
                        total += c[i * n + j]
                    for j in range(n):
                        c[i * n + j] /= total
            for j in range(n):
                total = eps
                for i in range(n):
                    total += c[i * n + j]
                for i in range(n):
                    c[i * n + j] /= total
        for i in range(n):
            for j in range(n):
                mixing[at * n + j * n + i] = c[i * n + j]

    return CudaKernel(f"hyper_weights_{n}", kernel, "f32[] f32[] f32[] f32 i32 i64 f32[] f32[] f32[]")
