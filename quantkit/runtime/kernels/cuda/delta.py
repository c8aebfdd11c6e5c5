"""The gated delta rule, a state S float32[dk, dv] for each head, token after token:

    S <- S e^g;   r = beta (v - S^T k);   S <- S + k r^T;   o = S^T q

A thread has a column of S, so that it needs no other thread; k and q of a token go through shared memory. One launch
takes any number of tokens: a step of decoding, or a chunk of a prompt.
"""

from __future__ import annotations

import functools
import math

import numpy as np

from quantkit.runtime.kernels.cuda.hardware import cuda
from quantkit.runtime.kernels.cuda.kernel import CudaKernel

MAX_KEYS = 512
THREADS = 128


@functools.cache
def step(by_rows: bool = False) -> CudaKernel:
    """(q, k, v, g, beta, heads, dk, dv, tokens, state, out): q, k float32[tokens, heads, dk], v and out [.., dv], g and
    beta [tokens, heads], state float32[heads, dk, dv], updated. Grid: (dv / THREADS, heads).

    With `by_rows`, g is float32[tokens, heads, dk]: each row of a state decays by itself.
    """

    def kernel(q, k, v, g, beta, heads, dk, dv, tokens, state, out):
        keys = cuda.shared.array(MAX_KEYS, np.float32)
        queries = cuda.shared.array(MAX_KEYS, np.float32)
        decays = cuda.shared.array(MAX_KEYS if by_rows else 1, np.float32)
        head, thread = cuda.blockIdx.y, cuda.threadIdx.x
        column = cuda.blockIdx.x * THREADS + thread
        inside = column < dv
        first = np.int64(head) * dk * dv + min(column, dv - 1)
        for t in range(tokens):
            row = np.int64(t) * heads + head
            cuda.syncthreads()
            for i in range(thread, dk, THREADS):
                keys[i], queries[i] = k[row * dk + i], q[row * dk + i]
                if by_rows:
                    decays[i] = np.float32(math.exp(g[row * dk + i]))
            cuda.syncthreads()
            if inside:
                decay = np.float32(1) if by_rows else np.float32(math.exp(g[row]))
                predicted = np.float32(0)
                for i in range(dk):
                    shrink = decays[i] if by_rows else decay
                    predicted += state[first + i * dv] * shrink * keys[i]
                update = beta[row] * (v[row * dv + column] - predicted)
                total = np.float32(0)
                for i in range(dk):
                    shrink = decays[i] if by_rows else decay
                    value = state[first + i * dv] * shrink + keys[i] * update
                    state[first + i * dv] = value
                    total += value * queries[i]
                out[row * dv + column] = total

    return CudaKernel(
        "delta_rows" if by_rows else "delta", kernel, "f32[] f32[] f32[] f32[] f32[] i32 i32 i32 i32 f32[] f32[]"
    )
