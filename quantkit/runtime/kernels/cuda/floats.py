"""Kernels of f32, f16, bf16 and bf16_r16: conversion of the last one, and products of all with a few vectors.

torch converts the others, and multiplies batches. Activations are float32. `data` holds matrices as in `weights.py`; in
`matvec` a warp has a row, of which a thread loads 16 bytes at a time where rows are whole runs of 16 bytes.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from quantkit.runtime.kernels.cuda.dispatch import FLOAT_IDS
from quantkit.runtime.kernels.cuda.hardware import (
    bfloat_of,
    bits_of,
    cuda,
    float_of_bfloat,
    float_of_bits,
    float_of_half,
    half_of,
    inlined,
    load_floats,
    load_words,
    warp_sum,
)
from quantkit.runtime.kernels.cuda.kernel import CudaKernel

THREADS = 128
ROWS_OF_BLOCK = THREADS // 32
_ROWS = 16  # of bf16_r16: pairs of columns of each row in turn


def _element(name: str) -> Any:
    """Device function (data, start, n, row, column) -> float32; data and start in numbers of the type's width."""
    if name == "f32":
        return inlined(lambda data, start, n, row, column: data[start + np.int64(row) * n + column])
    if name == "f16":

        def plain(data, start, n, row, column):
            return float_of_half(data[start + np.int64(row) * n + column])

        return inlined(plain)
    if name == "bf16":

        def brain(data, start, n, row, column):
            return float_of_bfloat(data[start + np.int64(row) * n + column])

        return inlined(brain)

    def interleaved(data, start, n, row, column):
        group = start + np.int64(row // _ROWS) * _ROWS * n
        return float_of_bfloat(data[group + np.int64(column // 2) * 2 * _ROWS + row % _ROWS * 2 + column % 2])

    return inlined(interleaved)


def _width(name: str) -> str:
    return "f32[]" if name == "f32" else "u16[]"


@functools.cache
def dequantize(ggml_type: int, output: str) -> CudaKernel:
    """(data, start, rows, n, out): rows as u32 (the bits of float32) or u16 (of halves or bfloats)."""
    name = FLOAT_IDS[ggml_type]
    element = _element(name)
    convert = {"f32": bits_of, "f16": half_of, "bf16": bfloat_of}[output]

    def kernel(data, start, rows, n, out):
        column = cuda.blockIdx.x * THREADS + cuda.threadIdx.x
        for row in range(cuda.blockIdx.y, rows, cuda.gridDim.y):
            if column < n:
                out[np.int64(row) * n + column] = convert(element(data, start, n, row, column))

    result = "u32[]" if output == "f32" else "u16[]"
    return CudaKernel(f"dequantize_{name}_{output}", kernel, f"{_width(name)} i64 i32 i32 {result}")


def numbers_of(name: str) -> Any:
    """Device function (word) -> its two numbers as float32: halves (f16), or bfloats."""
    if name == "f16":

        def halves(word):
            return float_of_half(np.uint16(word & 0xFFFF)), float_of_half(np.uint16(np.uint32(word) >> np.uint32(16)))

        return inlined(halves)

    def brains(word):
        low = float_of_bits(np.uint32(np.uint32(word) << np.uint32(16)))
        return low, float_of_bits(np.uint32(np.uint32(word) & np.uint32(0xFFFF0000)))

    return inlined(brains)


def _run(name: str) -> tuple[int, Any]:
    """Numbers in 16 bytes, and device function (data, at, x, first) -> their products with x[first …], summed."""
    if name == "f32":

        def four(data, at, x, first):
            a, b, c, d = load_floats(data, at)
            e, f, g, h = load_floats(x, first)
            return a * e + b * f + c * g + d * h

        return 4, inlined(four)
    numbers = numbers_of(name)

    def eight(data, at, x, first):
        w0, w1, w2, w3 = load_words(data, at)
        a, b = numbers(w0)
        c, d = numbers(w1)
        e, f, g, h = load_floats(x, first)
        low = a * e + b * f + c * g + d * h
        a, b = numbers(w2)
        c, d = numbers(w3)
        e, f, g, h = load_floats(x, first + 4)
        return low + (a * e + b * f + c * g + d * h)

    return 8, inlined(eight)


@functools.cache
def matvec(ggml_type: int, tokens: int) -> CudaKernel:
    """(data, matrix_size, ids, rows, n, x, out): as `weights.matvec`, of x float32[vectors, n]."""
    name = FLOAT_IDS[ggml_type]
    element, (width, run) = _element(name), _run(name)
    has_runs = name != "bf16_r16"

    def kernel(data, matrix_size, ids, rows, n, x, out):
        lane, group = cuda.threadIdx.x & 31, cuda.blockIdx.y
        slot = group * cuda.gridDim.z + cuda.blockIdx.z
        row = cuda.blockIdx.x * ROWS_OF_BLOCK + (cuda.threadIdx.x >> 5)
        clamped_row = min(row, rows - 1)
        start = ids[slot] * matrix_size
        vector = group * tokens
        total = cuda.local.array(tokens, np.float32)
        for t in range(tokens):
            total[t] = np.float32(0)
        columns = n if ids[slot] >= 0 else 0
        in_runs = columns if has_runs and n & width - 1 == 0 else 0
        for column in range(lane * width, in_runs, 32 * width):
            for t in range(tokens):
                at = start + np.int64(clamped_row) * n + column
                total[t] += run(data, at, x, np.int64(vector + t) * n + column)
        for column in range(in_runs + lane, columns, 32):
            weight = element(data, start, n, clamped_row, column)
            for t in range(tokens):
                total[t] += weight * x[np.int64(vector + t) * n + column]
        for t in range(tokens):
            value = warp_sum(total[t])
            if lane == 0 and row < rows:
                out[(np.int64(slot) * tokens + t) * rows + row] = value

    return CudaKernel(f"matvec_{name}_{tokens}", kernel, f"{_width(name)} i64 i32[] i32 i32 f32[] f32[]")
