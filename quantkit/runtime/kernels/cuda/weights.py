"""Kernels of packed weights: decoding, and products with a few vectors. Each type has one of each kind.

A thread decodes a sub-block of 32 columns (`reader.py`); `dequantize` exchanges them through shared memory, so that
neighbouring threads store neighbouring bytes. Activations are 8-bit (`activations.py`): eight words of codes, a scale
xs and, for each 16 columns, the scale times the sum of codes, xm, for types with shifts or mins:

    y += xs * (s0 * dot(first 16) + s1 * dot(last 16)) + f0 * xm[0] + f1 * xm[1]       f: s * shift + min

`data` holds matrices, `matrix_bytes` apart; ids[slot] says which one a slot takes: experts, or all 0.
Grids: dequantize (sub-blocks of 32 columns / THREADS), matvec (rows / rows_of_block, groups of vectors, slots of each).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from quantkit.runtime.kernels.cuda import hardware
from quantkit.runtime.kernels.cuda.codecs.registry import CODECS
from quantkit.runtime.kernels.cuda.hardware import (
    bfloats_of,
    bits_of,
    cuda,
    dot4,
    halves_of,
    lanes_sum,
    load_words,
    plus,
    signed_bytes,
    store_words,
    times,
)
from quantkit.runtime.kernels.cuda.kernel import CudaKernel
from quantkit.runtime.kernels.cuda.reader import Codec

THREADS = 128
WARPS = THREADS // 32
OUTPUTS = ("f32", "f16", "bf16")
TOKENS = (1, 2, 4, 8)  # vectors that a product is made for


@functools.cache
def dequantize(ggml_type: int, output: str) -> CudaKernel:
    """(data, start, row_bytes, rows, n, out): y of whole rows as words, two numbers each but for f32."""
    codec = CODECS[ggml_type]
    return CudaKernel(f"dequantize_{codec.name}_{output}", _dequantize(codec, output), "u8[] i64 i64 i32 i32 u32[]")


def _dequantize(codec: Codec, output: str) -> Callable[..., None]:
    read, single = hardware.sub_block_reader(codec), output == "f32"
    has_min, has_shift = codec.has_min, codec.has_shift
    pair, runs = halves_of if output == "f16" else bfloats_of, 8 if single else 4  # of 16 bytes, in 32 columns
    staging = hardware.shared_words(4 * runs * THREADS)

    @hardware.inlined
    def four(code, scale, minimum, shift):
        """The values of four codes."""
        a, b, c, d = signed_bytes(code)
        if has_shift:
            a, b, c, d = plus(a, shift), plus(b, shift), plus(c, shift), plus(d, shift)
        a, b, c, d = times(scale, a), times(scale, b), times(scale, c), times(scale, d)
        if has_min:
            a, b, c, d = plus(a, minimum), plus(b, minimum), plus(c, minimum), plus(d, minimum)
        return a, b, c, d

    @hardware.inlined
    def place(run):
        """Where a run is staged: eight neighbours, or those of eight threads, are in different banks."""
        return 4 * (run ^ run >> 3 & runs - 1)

    @hardware.inlined
    def stage(low, high, scale, minimum, shift, staged, run):
        """Eight columns: those of two words of codes."""
        a, b, c, d = four(low, scale, minimum, shift)
        e, f, g, h = four(high, scale, minimum, shift)
        if single:
            store_words(staged, place(run), bits_of(a), bits_of(b), bits_of(c), bits_of(d))
            store_words(staged, place(run + 1), bits_of(e), bits_of(f), bits_of(g), bits_of(h))
        else:
            store_words(staged, place(run), pair(a, b), pair(c, d), pair(e, f), pair(g, h))

    def kernel(data, start, row_bytes, rows, n, out):
        staged, thread = staging(), cuda.threadIdx.x & THREADS - 1  # the compiler then knows that it is small
        units, first = np.uint32(n) >> np.uint32(5), cuda.blockIdx.x * np.int64(THREADS)
        left = np.int32(min(np.int64(rows) * units - first, np.int64(THREADS)))  # units of this block
        unit = np.uint32(np.uint32(first) + np.uint32(min(thread, left - 1)))  # sums of words are 64 bits in numba
        row, number = unit // units, unit % units
        codes, scales, mins, shifts = read(data, start, row_bytes, np.int32(row), np.int32(number))
        run, step = runs * thread, runs // 4
        stage(codes[0], codes[1], scales[0], mins[0], shifts[0], staged, run)
        stage(codes[2], codes[3], scales[0], mins[0], shifts[0], staged, run + step)
        stage(codes[4], codes[5], scales[1], mins[1], shifts[1], staged, run + 2 * step)
        stage(codes[6], codes[7], scales[1], mins[1], shifts[1], staged, run + 3 * step)
        cuda.syncthreads()
        # Stores of a warp are neighbours: those of a thread's own columns would be half sectors, 64 bytes apart.
        for i in range(runs):
            run = i * THREADS + thread
            if run < runs * left:
                a, b, c, d = load_words(staged, place(run))
                at = 4 * (first * runs + run)
                store_words(out, at, np.uint32(a), np.uint32(b), np.uint32(c), np.uint32(d))

    return kernel


class Split(NamedTuple):
    """How `matvec` is split among threads, by what an H200 does fastest.

    pairs   whether a thread takes two neighbouring sub-blocks at a time, which often share bytes
    rows    of a thread, 1, 2 or 4: what it loads of the activations serves all of them
    """

    pairs: bool
    rows: int


_SPLITS = {"q4_K": Split(True, 2), "q5_K": Split(True, 2), "q6_K": Split(False, 2)}  # faster than what others have


def split_of(ggml_type: int, tokens: int) -> Split:
    """Blocks of 32 columns share nothing, and pairs of them are too far apart for a warp's loads to be one."""
    codec = CODECS[ggml_type]
    if codec.columns < 64 or tokens > 1:
        return Split(False, 2)
    return _SPLITS.get(codec.name, Split(True, 4))


def lanes_of_row(n: int, pairs: bool) -> int:
    """log2 of the threads that share a row of n columns: as few idle ones as can be."""
    parts = n // (64 if pairs else 32)
    return 5 if parts > 16 else 4 if parts > 8 else 3


def rows_of_block(n: int, split: Split) -> int:
    """Rows of a thread block of `matvec`."""
    return WARPS * (32 >> lanes_of_row(n, split.pairs)) * split.rows


@functools.cache
def matvec(ggml_type: int, tokens: int) -> CudaKernel:
    """(data, matrix_bytes, ids, row_bytes, rows, n, codes, scales, sums, lanes, out)

    out float32[slots, tokens, rows]: slot s is matrix ids[s] times the `tokens` vectors of its group, s // gridDim.z:
    codes int32[vectors, n / 4], scales float32[vectors, n / 32], sums float32[vectors, n / 16].
    Zeros where ids[s] is -1. 2^lanes threads share a row: `lanes_of_row`.
    """
    codec, split = CODECS[ggml_type], split_of(ggml_type, tokens)
    parameters = "u8[] i64 i32[] i64 i32 i32 i32[] f32[] f32[] i32 f32[]"
    return CudaKernel(f"matvec_{codec.name}_{tokens}", _matvec(codec, tokens, split), parameters)


def _matvec(codec: Codec, tokens: int, split: Split) -> Callable[..., None]:
    read, halves = hardware.sub_block_reader(codec), codec.group == 16
    has_shift, has_offset = codec.has_shift, codec.has_min or codec.has_shift
    pairs, each = split

    @hardware.inlined
    def product(sub_block, xq, xs, xm, unit):
        """Of a sub-block and that of a vector."""
        codes, scales, mins, shifts = sub_block
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
        value *= xs[unit]
        if has_offset:
            first, second = mins[0], mins[1]
            if has_shift:
                first, second = first + scales[0] * shifts[0], second + scales[1] * shifts[1]
            value += first * xm[2 * unit] + second * xm[2 * unit + 1]
        return value

    @hardware.inlined
    def add(data, start, row_bytes, row, number, units, vector, xq, xs, xm, total):
        """Add the products of a sub-block or of two; where these share bytes, the compiler loads them once."""
        first = read(data, start, row_bytes, row, number)
        if pairs:
            second = read(data, start, row_bytes, row, number | 1)
        for t in range(tokens):
            unit = np.int64(vector + t) * units + number
            total[t] += product(first, xq, xs, xm, unit)
            if pairs:
                total[t] += product(second, xq, xs, xm, unit + 1)

    @hardware.inlined
    def finish(total, lanes, part, slot, rows, row, out):
        for t in range(tokens):
            value = lanes_sum(total[t], 1 << lanes)
            if part == 0 and row < rows:
                out[(np.int64(slot) * tokens + t) * rows + row] = value

    def kernel(data, matrix_bytes, ids, row_bytes, rows, n, xq, xs, xm, lanes, out):
        # Shifts and a grid of three dimensions: a division of numbers that the compiler does not know takes 50
        # instructions, as much as a sub-block.
        lane, warp = cuda.threadIdx.x & 31, cuda.threadIdx.x >> 5
        part = lane & (1 << lanes) - 1
        group = cuda.blockIdx.y
        slot = group * cuda.gridDim.z + cuda.blockIdx.z
        start = ids[slot] * matrix_bytes
        row = (((cuda.blockIdx.x * WARPS + warp) << 5 - lanes) + (lane >> lanes)) * each
        units = n >> 5
        vector = group * tokens
        # An array for each row: indexed by a loop that the compiler does not unroll they would not be registers.
        total0, total1 = cuda.local.array(tokens, np.float32), cuda.local.array(tokens, np.float32)
        total2, total3 = cuda.local.array(tokens, np.float32), cuda.local.array(tokens, np.float32)
        for t in range(tokens):
            total0[t] = total1[t] = total2[t] = total3[t] = np.float32(0)
        for place in range(part, units >> pairs if ids[slot] >= 0 else 0, 1 << lanes):
            number = np.int32(place) << pairs
            add(data, start, row_bytes, min(row, rows - 1), number, units, vector, xq, xs, xm, total0)
            if each > 1:
                add(data, start, row_bytes, min(row + 1, rows - 1), number, units, vector, xq, xs, xm, total1)
            if each > 2:
                add(data, start, row_bytes, min(row + 2, rows - 1), number, units, vector, xq, xs, xm, total2)
                add(data, start, row_bytes, min(row + 3, rows - 1), number, units, vector, xq, xs, xm, total3)
        finish(total0, lanes, part, slot, rows, row, out)
        if each > 1:
            finish(total1, lanes, part, slot, rows, row + 1, out)
        if each > 2:
            finish(total2, lanes, part, slot, rows, row + 2, out)
            finish(total3, lanes, part, slot, rows, row + 3, out)

    return kernel
