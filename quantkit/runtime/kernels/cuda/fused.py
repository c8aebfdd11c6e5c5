"""Kernels for one token that do several steps of a block at once: in generation, a launch costs more than its work.

    add_norm      x + what a part adds, its RMS norm, and that as signed bytes for the products that follow
    activate      act(gate) * up, and that as bytes
    rope_append   RoPE of queries and keys, after a norm of each head where there is one; keys and values to a cache

Formulas are those of `elementwise`, `activations` and `attention`, whose kernels do one step each for any tokens.
"""

from __future__ import annotations

import functools
import math

import numpy as np

from quantkit.runtime.kernels.cuda import attention
from quantkit.runtime.kernels.cuda.activations import store_codes, store_four
from quantkit.runtime.kernels.cuda.elementwise import ACTIVATIONS, NORM_THREADS, block_sum
from quantkit.runtime.kernels.cuda.hardware import cuda, inlined, load_floats, store_floats, warp_sum
from quantkit.runtime.kernels.cuda.kernel import CudaKernel

THREADS = 256
WARP = 32  # threads of a block of `rope_append`


@functools.cache
def add_norm(loads: int) -> CudaKernel:
    """(x, added, adds, weight, n, eps, total, y, words, scales, sums), of one block of `norm_threads(n)`.

    total = x + added, or x where `adds` is 0; y = total / sqrt(mean(total^2) + eps) * weight, float32[n]; the last
    three are y by `activations`, the codes as int32[n / 4]. n is a multiple of 32. A thread has four columns of each
    of `norm_loads(n)` rounds, in registers: it waits for memory once.
    """
    columns = 4 * loads

    def kernel(x, added, adds, weight, n, eps, total, y, words, scales, sums):
        sum_of, factor = cuda.local.array(columns, np.float32), cuda.local.array(columns, np.float32)
        first, step = 4 * cuda.threadIdx.x, 4 * cuda.blockDim.x
        squares = np.float32(0)
        for j in range(loads):
            i, at = first + j * step, min(first + j * step, n - 4)
            a, b, c, d = load_floats(x, at)
            e, f, g, h = load_floats(weight, at)
            factor[4 * j], factor[4 * j + 1], factor[4 * j + 2], factor[4 * j + 3] = e, f, g, h
            if adds != 0:
                e, f, g, h = load_floats(added, at)
                a, b, c, d = a + e, b + f, c + g, d + h
            sum_of[4 * j], sum_of[4 * j + 1], sum_of[4 * j + 2], sum_of[4 * j + 3] = a, b, c, d
            squares += a * a + b * b + (c * c + d * d) if i < n else np.float32(0)
        scale = np.float32(np.float32(1) / math.sqrt(block_sum(squares) / np.float32(n) + eps))
        for j in range(loads):
            i = first + j * step
            a, b, c, d = sum_of[4 * j], sum_of[4 * j + 1], sum_of[4 * j + 2], sum_of[4 * j + 3]
            if i < n:
                store_floats(total, i, a, b, c, d)
            a, b = a * scale * factor[4 * j], b * scale * factor[4 * j + 1]
            c, d = c * scale * factor[4 * j + 2], d * scale * factor[4 * j + 3]
            if i < n:
                store_floats(y, i, a, b, c, d)
            store_four(a, b, c, d, i, i < n, words, scales, sums)

    return CudaKernel(f"add_norm_{loads}", kernel, "f32[] f32[] i32 f32[] i32 f32 f32[] f32[] i32[] f32[] f32[]")


def norm_threads(n: int) -> int:
    """Threads of `add_norm`'s block: four columns each, as far as they go."""
    return min(NORM_THREADS, -(-n // 128) * 32)


def norm_loads(n: int) -> int:
    """Rounds in which `norm_threads(n)` threads have all columns."""
    return -(-n // (4 * norm_threads(n)))


@functools.cache
def activate(name: str) -> CudaKernel:
    """(gate, up, count, codes, scales, sums): act(gate) * up in place of `gate`, float32[count], and by `activations`.

    count is a multiple of 32.
    """
    act = inlined(ACTIVATIONS[name])

    def kernel(gate, up, count, codes, scales, sums):
        i = cuda.blockIdx.x * np.int64(THREADS) + cuda.threadIdx.x
        value = np.float32(act(gate[i], up[i])) if i < count else np.float32(0)
        if i < count:
            gate[i] = value
        store_codes(value, i, i < count, codes, scales, sums)

    return CudaKernel(f"{name}_quantized", kernel, "f32[] f32[] i64 i8[] f32[] f32[]")


@functools.cache
def rope_append(k_kind: str, v_kind: str, dim_k: int, dim_v: int, normed: bool) -> CudaKernel:
    """(q, k, v, q_weight, k_weight, eps, heads, pairs, cos, sin, positions, step, stride, n_ctx, k_bytes, v_bytes,
    k_cache, v_cache)

    q float32[heads, dim_k], in place; k, v float32[kv heads, dim]; weights float32[dim_k] of the norms, if `normed`;
    RoPE as `elementwise.rope` has it; the caches' row positions[0] of each head, as `attention.append` writes them.
    Grid: (heads + 2 kv heads), of WARP threads.
    """
    write_k, write_v = attention.row_writer(k_kind), attention.row_writer(v_kind)
    size = max(dim_k, dim_v)

    @inlined
    def rotate(x, first, weight, eps, pairs, cos, sin, position, step, stride, row, lane):
        """A head of x, normed and rotated, to `row`, which all threads see afterwards."""
        squares = np.float32(0)
        for i in range(lane, dim_k, WARP):
            row[i] = x[first + i]
            squares += row[i] * row[i]
        if normed:
            scale = np.float32(np.float32(1) / math.sqrt(warp_sum(squares) / np.float32(dim_k) + eps))
            for i in range(lane, dim_k, WARP):
                row[i] = row[i] * scale * weight[i]
        cuda.syncthreads()
        for pair in range(lane, pairs, WARP):
            a, b = row[pair * step], row[pair * step + stride]
            c, s = cos[np.int64(position) * pairs + pair], sin[np.int64(position) * pairs + pair]
            row[pair * step] = a * c - b * s
            row[pair * step + stride] = a * s + b * c
        cuda.syncthreads()

    def kernel(
        q,
        k,
        v,
        q_weight,
        k_weight,
        eps,
        heads,
        pairs,
        cos,
        sin,
        positions,
        step,
        stride,
        n_ctx,
        k_bytes,
        v_bytes,
        k_cache,
        v_cache,
    ):
        row = cuda.shared.array(size, np.float32)
        lane, number, position = cuda.threadIdx.x, cuda.blockIdx.x, positions[0]
        kv_heads = (cuda.gridDim.x - heads) // 2
        if number < heads:
            rotate(q, number * dim_k, q_weight, eps, pairs, cos, sin, position, step, stride, row, lane)
            for i in range(lane, dim_k, WARP):
                q[number * dim_k + i] = row[i]
        elif number < heads + kv_heads:
            head = number - heads
            rotate(k, head * dim_k, k_weight, eps, pairs, cos, sin, position, step, stride, row, lane)
            start = (np.int64(head) * n_ctx + position) * k_bytes
            for first in range(0, dim_k, WARP):  # all threads as often: a block of q8_0 has one scale
                value = row[first + lane] if first + lane < dim_k else np.float32(0)
                write_k(value, first + lane < dim_k, first // 32, lane, start, k_cache)
        else:
            head = number - heads - kv_heads
            start = (np.int64(head) * n_ctx + position) * v_bytes
            for first in range(0, dim_v, WARP):
                value = v[head * dim_v + first + lane] if first + lane < dim_v else np.float32(0)
                write_v(value, first + lane < dim_v, first // 32, lane, start, v_cache)

    name = f"rope_append_{k_kind}_{dim_k}_{v_kind}_{dim_v}{'_normed' if normed else ''}"
    numbers = "f32 i32 i32 f32[] f32[] i32[] i32 i32 i64 i64 i64"
    return CudaKernel(name, kernel, f"f32[] f32[] f32[] f32[] f32[] {numbers} u8[] u8[]")
