"""The selective state space of a Mamba-2 mixer, a state S float32[dk, dv] for each head, token after token:

    S <- S e^(a step) + step B u^T;   o = S^T C + skip u

A thread has a column of S, so that it needs no other thread; B and C of a token go through shared memory. One launch
takes any number of tokens: a step of decoding, or a chunk of a prompt.
"""

from __future__ import annotations

import functools
import math

import numpy as np

from quantkit.runtime.kernels.cuda.hardware import cuda
from quantkit.runtime.kernels.cuda.kernel import CudaKernel

MAX_KEYS = 512
THREADS = 64


@functools.cache
def step() -> CudaKernel:
    """(x, steps, a, skip, heads, groups, dk, dv, tokens, state, out): u, B and C are in x float32[tokens, heads dv + 2
    groups dk]; steps [tokens, heads], a and skip [heads], state [heads, dk, dv], updated, out [tokens, heads, dv].
    Grid: (dv / THREADS, heads)."""

    def kernel(x, steps, a, skip, heads, groups, dk, dv, tokens, state, out):
        entering = cuda.shared.array(MAX_KEYS, np.float32)
        leaving = cuda.shared.array(MAX_KEYS, np.float32)
        head, thread = cuda.blockIdx.y, cuda.threadIdx.x
        column = cuda.blockIdx.x * THREADS + thread
        inside = column < dv
        first = np.int64(head) * dk * dv + min(column, dv - 1)
        inner = heads * dv
        for t in range(tokens):
            row = np.int64(t) * (inner + 2 * groups * dk)
            b = row + inner + head * groups // heads * dk
            cuda.syncthreads()
            for i in range(thread, dk, THREADS):
                entering[i], leaving[i] = x[b + i], x[b + groups * dk + i]
            cuda.syncthreads()
            if inside:
                each = steps[np.int64(t) * heads + head]
                decay = np.float32(math.exp(a[head] * each))
                u = x[row + head * dv + column]
                total = skip[head] * u
                for i in range(dk):
                    value = state[first + i * dv] * decay + entering[i] * (each * u)
                    state[first + i * dv] = value
                    total += value * leaving[i]
                out[np.int64(t) * inner + head * dv + column] = total

    return CudaKernel("mamba2", kernel, "f32[] f32[] f32[] f32[] i32 i32 i32 i32 i32 f32[] f32[]")
