"""Kernels of f32, f16, bf16 and bf16_r16: conversion, and products with a few vectors.

torch multiplies batches. Activations are float32. `data` holds matrices as in `weights.py`; in `matvec` a warp has a
row.
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
    float_of_half,
    half_of,
    inlined,
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


@functools.cache
def matvec(ggml_type: int, tokens: int) -> CudaKernel:
    """(data, matrix_size, ids, rows, n, x, share, out): as `weights.matvec`, of x float32[vectors, n]."""
    name = FLOAT_IDS[ggml_type]
    element = _element(name)

    def kernel(data, matrix_size, ids, rows, n, x, share, out):
        lane, slot = cuda.threadIdx.x % 32, cuda.blockIdx.y
        row = cuda.blockIdx.x * ROWS_OF_BLOCK + cuda.threadIdx.x // 32
        clamped_row = min(row, rows - 1)
        start = ids[slot] * matrix_size
        vector = slot // share * tokens
        total = cuda.local.array(tokens, np.float32)
        for t in range(tokens):
            total[t] = np.float32(0)
        for column in range(lane, n if ids[slot] >= 0 else 0, 32):
            weight = element(data, start, n, clamped_row, column)
            for t in range(tokens):
                total[t] += weight * x[np.int64(vector + t) * n + column]
        for t in range(tokens):
            value = warp_sum(total[t])
            if lane == 0 and row < rows:
                out[(np.int64(slot) * tokens + t) * rows + row] = value

    return CudaKernel(f"matvec_{name}_{tokens}", kernel, f"{_width(name)} i64 i32[] i32 i32 f32[] i32 f32[]")
