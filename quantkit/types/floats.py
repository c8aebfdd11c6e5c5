"""F32, F16 and BF16: the types that are numbers already.

    f32   4 bytes, IEEE single
    f16   2 bytes, IEEE half; encoding rounds to nearest, ties to even
    bf16  2 bytes, upper half of an IEEE single; encoding rounds to nearest, ties to even

Decoding is exact. A finite weight rounded to Inf would ruin a model without a word, so `quantize` refuses it and names
its place; `overflow` is the first magnitude that rounds to Inf. The conversions are kernels because numpy's of halves
run at a sixth of memory speed.
"""

from __future__ import annotations

import numpy as np

from quantkit.half import bfloat_to_float, float_to_half, half_to_float
from quantkit.jit import kernel
from quantkit.types.base import QuantType


@kernel
def _encode_f16(x, importance, out):
    rows, n = x.shape
    for row in range(rows):
        half = out[row].view(np.uint16)
        for j in range(n):
            half[j] = float_to_half(x[row, j])


@kernel
def _decode_f16(data, out):
    rows, n = out.shape
    for row in range(rows):
        half = data[row].view(np.uint16)
        for j in range(n):
            out[row, j] = half_to_float(half[j])


@kernel
def _encode_bf16(x, importance, out):
    rows, n = x.shape
    for row in range(rows):
        upper = out[row].view(np.uint16)
        for j in range(n):
            bits = np.float32(x[row, j]).view(np.uint32)
            odd = (bits >> np.uint32(16)) & np.uint32(1)
            upper[j] = np.uint16((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))


@kernel
def _decode_bf16(data, out):
    rows, n = out.shape
    for row in range(rows):
        upper = data[row].view(np.uint16)
        for j in range(n):
            out[row, j] = bfloat_to_float(upper[j])


class F32(QuantType):
    name, ggml_type, file_type = "f32", 0, 0
    block_size, block_bytes = 1, 4

    @staticmethod
    def encode_rows(x: np.ndarray, importance: np.ndarray, out: np.ndarray) -> None:
        out.view("<f4")[...] = x

    @staticmethod
    def decode_rows(data: np.ndarray, out: np.ndarray) -> None:
        out[...] = data.view("<f4")


class F16(QuantType):
    name, ggml_type, file_type = "f16", 1, 1
    block_size, block_bytes = 1, 2
    overflow = 65520.0
    encode_rows = staticmethod(_encode_f16)
    decode_rows = staticmethod(_decode_f16)


class BF16(QuantType):
    name, ggml_type, file_type = "bf16", 30, 32
    block_size, block_bytes = 1, 2
    overflow = 255.5 * 2.0**120
    encode_rows = staticmethod(_encode_bf16)
    decode_rows = staticmethod(_decode_bf16)
