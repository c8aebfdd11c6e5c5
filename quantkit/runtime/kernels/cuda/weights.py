"""Kernels of packed weights: decoding, and products with a few vectors. Each type has one of each kind.

A thread decodes a sub-block of 32 columns (`reader.py`). Activations are 8-bit (`activations.py`): eight words of
codes, a scale xs and, for each 16 columns, the scale times the sum of codes, xm, which types with a min f need:

    y += xs * (s0 * dot(first 16) + s1 * dot(last 16)) + f0 * xm[0] + f1 * xm[1]

`data` holds matrices, `matrix_bytes` apart; ids[slot] says which one blockIdx.y takes: experts, or all 0.
Grids: dequantize (sub-blocks of 32 columns / THREADS, rows), matvec (rows / ROWS_OF_BLOCK, slots).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from quantkit.runtime.kernels.cuda import hardware
from quantkit.runtime.kernels.cuda.codecs.registry import CODECS
from quantkit.runtime.kernels.cuda.hardware import bfloat_of, cuda, dot4, half_of, load_words, plus, times, warp_sum
from quantkit.runtime.kernels.cuda.kernel import CudaKernel
from quantkit.runtime.kernels.cuda.reader import Codec

THREADS = 128
WARPS = THREADS // 32
ROWS_OF_BLOCK = 2 * WARPS  # two of a warp: what it loads of the activations serves both
OUTPUTS = ("f32", "f16", "bf16")
TOKENS = (1, 2, 4, 8)  # vectors that a product is made for


@functools.cache
def dequantize(ggml_type: int, output: str) -> CudaKernel:
    """(data, start, row_bytes, rows, n, out): y of whole rows as words, two numbers each but for f32."""
    codec = CODECS[ggml_type]
    return CudaKernel(f"dequantize_{codec.name}_{output}", _dequantize(codec, output), "u8[] i64 i64 i32 i32 u32[]")


def _dequantize(codec: Codec, output: str) -> Callable[..., None]:
    read, has_min, single = hardware.sub_block_reader(codec), codec.has_min, output == "f32"
    convert = hardware.bits_of if single else half_of if output == "f16" else bfloat_of
    words = 32 if single else 16
    # in shared memory: so that the threads of a warp are in banks of their own
    pitch, size = (words + 1, THREADS * (words + 1))

    def kernel(data, start, row_bytes, rows, n, out):
        shared = cuda.shared.array(size, np.uint32)
        thread = cuda.threadIdx.x
        units = n // 32
        first = cuda.blockIdx.x * THREADS
        unit_count = min(units - first, THREADS)
        for row in range(cuda.blockIdx.y, rows, cuda.gridDim.y):
            if thread < unit_count:
                codes, scales, mins = read(data, start, row_bytes, row, first + thread)
                for q in range(8):
                    scale = scales[0] if q < 4 else scales[1]
                    minimum = mins[0] if q < 4 else mins[1]
                    for pair in range(2):
                        low = times(scale, np.float32((codes[q] << (24 - 16 * pair)) >> 24))
                        high = times(scale, np.float32((codes[q] << (16 - 16 * pair)) >> 24))
                        if has_min:
                            low, high = plus(low, minimum), plus(high, minimum)
                        if single:
                            shared[thread * pitch + 4 * q + 2 * pair] = convert(low)
                            shared[thread * pitch + 4 * q + 2 * pair + 1] = convert(high)
                        else:
                            word = np.uint32(convert(low)) | np.uint32(convert(high)) << 16
                            shared[thread * pitch + 2 * q + pair] = word
            cuda.syncthreads()
            at = (np.int64(row) * units + first) * words
            for i in range(thread, unit_count * words, THREADS):
                out[at + i] = shared[i // words * pitch + i % words]
            cuda.syncthreads()

    return kernel


@functools.cache
def matvec(ggml_type: int, tokens: int) -> CudaKernel:
    """(data, matrix_bytes, ids, row_bytes, rows, n, codes, scales, sums, share, out)

    out float32[slots, tokens, rows]: slot s is matrix ids[s] times the `tokens` vectors from tokens * (s // share) on:
    codes int32[vectors, n / 4], scales float32[vectors, n / 32], sums float32[vectors, n / 16].
    Zeros where ids[s] is -1.
    """
    codec = CODECS[ggml_type]
    parameters = "u8[] i64 i32[] i64 i32 i32 i32[] f32[] f32[] i32 f32[]"
    return CudaKernel(f"matvec_{codec.name}_{tokens}", _matvec(codec, tokens), parameters)


def _matvec(codec: Codec, tokens: int) -> Callable[..., None]:
    read, has_min, halves = hardware.sub_block_reader(codec), codec.has_min, codec.group == 16

    @hardware.inlined
    def add(data, start, row_bytes, row, number, units, vector, xq, xs, xm, total):
        codes, scales, mins = read(data, start, row_bytes, row, number)
        for t in range(tokens):
            unit = np.int64(vector + t) * units + number
            a0, a1, a2, a3 = load_words(xq, 8 * unit)
            a4, a5, a6, a7 = load_words(xq, 8 * unit + 4)
            low = dot4(codes[3], a3, dot4(codes[2], a2, dot4(codes[1], a1, dot4(codes[0], a0, np.int32(0)))))
            if halves:
                high = dot4(codes[5], a5, dot4(codes[4], a4, np.int32(0)))
                high = dot4(codes[7], a7, dot4(codes[6], a6, high))
                value = scales[0] * np.float32(low) + scales[1] * np.float32(high)
            else:
                low = dot4(codes[7], a7, dot4(codes[6], a6, dot4(codes[5], a5, dot4(codes[4], a4, low))))
                value = scales[0] * np.float32(low)
            total[t] += xs[unit] * value
            if has_min:
                total[t] += mins[0] * xm[2 * unit] + mins[1] * xm[2 * unit + 1]

    def kernel(data, matrix_bytes, ids, row_bytes, rows, n, xq, xs, xm, share, out):
        lane, warp = cuda.threadIdx.x % 32, cuda.threadIdx.x // 32
        slot = cuda.blockIdx.y
        start = ids[slot] * matrix_bytes
        row = cuda.blockIdx.x * ROWS_OF_BLOCK + warp * 2
        units = n // 32
        vector = slot // share * tokens
        # An array for each row: indexed by a loop that the compiler does not unroll they would not be registers.
        first, second = cuda.local.array(tokens, np.float32), cuda.local.array(tokens, np.float32)
        for t in range(tokens):
            first[t] = second[t] = np.float32(0)
        for number in range(lane, units if ids[slot] >= 0 else 0, 32):
            add(data, start, row_bytes, min(row, rows - 1), number, units, vector, xq, xs, xm, first)
            add(data, start, row_bytes, min(row + 1, rows - 1), number, units, vector, xq, xs, xm, second)
        for t in range(tokens):
            a, b = warp_sum(first[t]), warp_sum(second[t])
            at = (np.int64(slot) * tokens + t) * rows + row
            if lane == 0 and row < rows:
                out[at] = a
            if lane == 0 and row + 1 < rows:
                out[at + 1] = b

    return kernel
