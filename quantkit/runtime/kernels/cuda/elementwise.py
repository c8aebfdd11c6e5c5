"""Norms, activations, RoPE, weighted sums of rows, argmax and sampling in float32, by the formulas of `reference`.

Where a row is summed, a thread block has a row; elsewhere a thread has an element.
"""

from __future__ import annotations

import functools
import math

import numpy as np

from quantkit.runtime.kernels.cuda.hardware import (
    bfloats_of,
    cuda,
    inlined,
    load_floats,
    store_words,
    warp_max,
    warp_sum,
)
from quantkit.runtime.kernels.cuda.kernel import CudaKernel

THREADS = 256
NORM_THREADS = 1024
_LOWEST = np.float32(-3.4e38)


@inlined
def block_sum(value):
    """The sum over all threads of a block, which all call it."""
    shared = cuda.shared.array(32, np.float32)
    of_warp = warp_sum(value)
    lane = cuda.threadIdx.x % 32
    if lane == 0:
        shared[cuda.threadIdx.x // 32] = of_warp
    cuda.syncthreads()
    total = warp_sum(shared[lane] if lane < cuda.blockDim.x // 32 else np.float32(0))
    cuda.syncthreads()
    return total


@inlined
def block_max(value):
    """The largest of all threads of a block, which all call it."""
    shared = cuda.shared.array(32, np.float32)
    of_warp = warp_max(value)
    if cuda.threadIdx.x % 32 == 0:
        shared[cuda.threadIdx.x // 32] = of_warp
    cuda.syncthreads()
    largest = shared[0]
    for i in range(1, cuda.blockDim.x // 32):
        largest = max(largest, shared[i])
    cuda.syncthreads()
    return largest


def norm_threads(n: int) -> int:
    """Threads of a block of `rms_norm`, which load four columns at a time and up to four times."""
    return min(NORM_THREADS, max(32, n // 16 // 32 * 32))


@functools.cache
def rms_norm() -> CudaKernel:
    """(x, weight, n, eps, out): x / sqrt(mean(x^2) + eps) * weight of rows of n, or of heads; a block each."""

    def kernel(x, weight, n, eps, out):
        first = np.int64(cuda.blockIdx.x) * n
        width = 4 if n % 4 == 0 else 1  # columns of one load
        total = np.float32(0)
        for i in range(width * cuda.threadIdx.x, n, width * cuda.blockDim.x):
            if width == 4:
                a, b, c, d = load_floats(x, first + i)
                total += a * a + b * b + (c * c + d * d)
            else:
                total += x[first + i] * x[first + i]
        scale = np.float32(np.float32(1) / math.sqrt(block_sum(total) / np.float32(n) + eps))
        for i in range(width * cuda.threadIdx.x, n, width * cuda.blockDim.x):
            if width == 4:
                a, b, c, d = load_floats(x, first + i)
                e, f, g, h = load_floats(weight, i)
                out[first + i], out[first + i + 1] = a * scale * e, b * scale * f
                out[first + i + 2], out[first + i + 3] = c * scale * g, d * scale * h
            else:
                out[first + i] = x[first + i] * scale * weight[i]

    return CudaKernel("rms_norm", kernel, "f32[] f32[] i32 f32 f32[]")


def _swiglu(g, u):
    return g / (np.float32(1) + math.exp(-g)) * u


def _geglu(g, u):
    inner = np.float32(0.7978845608) * (g + np.float32(0.044715) * g * g * g)
    return g / (np.float32(1) + math.exp(np.float32(-2) * inner)) * u


def _swiglu_oai(g, u):
    g = np.float32(7) if g > np.float32(7) else g  # NaN stays NaN
    u = np.float32(7) if u > np.float32(7) else u
    u = np.float32(-7) if u < np.float32(-7) else u
    return g / (np.float32(1) + math.exp(np.float32(-1.702) * g)) * (np.float32(1) + u)


ACTIVATIONS = {"swiglu": _swiglu, "geglu": _geglu, "swiglu_oai": _swiglu_oai}


@functools.cache
def activate(name: str) -> CudaKernel:
    """(gate, up, count): act(gate) * up in place of `gate`, float32[count]."""
    act = inlined(ACTIVATIONS[name])

    def kernel(gate, up, count):
        i = cuda.blockIdx.x * np.int64(THREADS) + cuda.threadIdx.x
        if i < count:
            gate[i] = act(gate[i], up[i])

    return CudaKernel(name, kernel, "f32[] f32[] i64")


@functools.cache
def activate_rounded(name: str) -> CudaKernel:
    """(gate, up, count, out): act(gate) * up as bfloat16, two in a word of uint32[count / 2]; count a multiple of 8."""
    act = inlined(ACTIVATIONS[name])

    @inlined
    def four(gate, up, i):
        a, b, c, d = load_floats(gate, i)
        e, f, g, h = load_floats(up, i)
        return bfloats_of(act(a, e), act(b, f)), bfloats_of(act(c, g), act(d, h))

    def kernel(gate, up, count, out):
        i = 8 * (cuda.blockIdx.x * np.int64(THREADS) + cuda.threadIdx.x)
        if i < count:
            a, b = four(gate, up, i)
            c, d = four(gate, up, i + 4)
            store_words(out, i // 2, a, b, c, d)

    return CudaKernel(f"{name}_bf16", kernel, "f32[] f32[] i64 u32[]")


@functools.cache
def add() -> CudaKernel:
    """(x, y, n, count): x[i] += y[i % n]: a residual, n = count, or a bias of n."""

    def kernel(x, y, n, count):
        i = cuda.blockIdx.x * np.int64(THREADS) + cuda.threadIdx.x
        if i < count:
            x[i] += y[i % n]

    return CudaKernel("add", kernel, "f32[] f32[] i32 i64")


@functools.cache
def mix() -> CudaKernel:
    """(parts, weights, used, n, tokens, out): out[t] = sum over j of weights[t, j] * parts[t, j, :n], j < used."""

    def kernel(parts, weights, used, n, tokens, out):
        i = cuda.blockIdx.x * np.int64(THREADS) + cuda.threadIdx.x
        if i < np.int64(tokens) * n:
            token, column = i // n, i % n
            total = np.float32(0)
            for j in range(used):
                total += weights[token * used + j] * parts[(token * used + j) * n + column]
            out[i] = total

    return CudaKernel("mix", kernel, "f32[] f32[] i32 i32 i32 f32[]")


@functools.cache
def rope() -> CudaKernel:
    """(x, heads, head_dim, pairs, cos, sin, positions, step, stride, tokens): RoPE in place.

    x float32[tokens, heads * head_dim], a thread for each pair; cos, sin [positions, pairs] are those of
    `float_ops.rope_tables`, flat.
    """

    def kernel(x, heads, head_dim, pairs, cos, sin, positions, step, stride, tokens):
        i = cuda.blockIdx.x * np.int64(THREADS) + cuda.threadIdx.x
        if i < np.int64(tokens) * heads * pairs:
            pair, head = i % pairs, i // pairs
            first = head * head_dim + pair * step
            angle = np.int64(positions[head // heads]) * pairs + pair
            a, b, c, s = x[first], x[first + stride], cos[angle], sin[angle]
            x[first] = a * c - b * s
            x[first + stride] = a * s + b * c

    return CudaKernel("rope", kernel, "f32[] i32 i32 i32 f32[] f32[] i32[] i32 i32 i32")


@functools.cache
def argmax() -> CudaKernel:
    """(logits, n, best): the first of the largest of each row, a block a row; a NaN is the largest."""

    def kernel(logits, n, best):
        first = np.int64(cuda.blockIdx.x) * n
        largest, index = _LOWEST, np.int32(n)
        for i in range(cuda.threadIdx.x, n, THREADS):
            value = logits[first + i]
            if value != value:
                value = np.float32(math.inf)
            if value > largest or index == n:
                largest, index = value, np.int32(i)
        row_max = block_max(largest)
        # Indices are below 2^24, so that float32 represents them; the smallest is the largest negative.
        chosen = block_max(-np.float32(index) if largest == row_max else np.float32(-n))
        if cuda.threadIdx.x == 0:
            best[cuda.blockIdx.x] = np.int32(-chosen)

    return CudaKernel("argmax", kernel, "f32[] i32 i32[]")


@functools.cache
def sample() -> CudaKernel:
    """(logits, n, per_temperature, u, chosen): sample each row from softmax(logits * per_temperature), a block a row.

    Chooses the first token whose cumulative probability is above u[row], a random number in [0, 1) from the host.
    """

    def kernel(logits, n, per_temperature, u, chosen):
        first = np.int64(cuda.blockIdx.x) * n
        sums = cuda.shared.array(THREADS, np.float32)
        thread = cuda.threadIdx.x
        largest = _LOWEST
        for i in range(thread, n, THREADS):
            largest = max(largest, logits[first + i])
        row_max = block_max(largest)
        each = (n + THREADS - 1) // THREADS  # neighbours for each thread, so that the sums are in order
        total = np.float32(0)
        for i in range(thread * each, min(n, thread * each + each)):
            total += np.float32(math.exp((logits[first + i] - row_max) * per_temperature))
        sums[thread] = total
        cuda.syncthreads()
        before, total_of_row = np.float32(0), np.float32(0)
        for i in range(THREADS):
            if i == thread:
                before = total_of_row
            total_of_row += sums[i]
        target = u[cuda.blockIdx.x] * total_of_row
        if before <= target < before + total or (thread == THREADS - 1 and target >= total_of_row):
            candidate = min(n - 1, thread * each)
            reached = before
            for i in range(thread * each, min(n, thread * each + each)):
                candidate = i
                reached += np.float32(math.exp((logits[first + i] - row_max) * per_temperature))
                if reached > target:
                    break
            chosen[cuda.blockIdx.x] = candidate

    return CudaKernel("sample", kernel, "f32[] i32 f32 f32[] i32[]")
