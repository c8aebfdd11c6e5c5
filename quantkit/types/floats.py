"""F32, F16 and BF16: the types that are numbers already.

    f32   4 bytes, IEEE single
    f16   2 bytes, IEEE half; encoding rounds to nearest even
    bf16  2 bytes, upper half of an IEEE single; encoding rounds to nearest even

Decoding is exact. A finite weight rounded to Inf would ruin a model without a word, so `quantize` refuses it and names
its place; `overflow` is the first magnitude that rounds to Inf. numpy does these conversions at memory speed, so there
is nothing to compile.
"""

from __future__ import annotations

import numpy as np

from quantkit.types.base import QuantType


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

    @staticmethod
    def encode_rows(x: np.ndarray, importance: np.ndarray, out: np.ndarray) -> None:
        out.view("<f2")[...] = x

    @staticmethod
    def decode_rows(data: np.ndarray, out: np.ndarray) -> None:
        out[...] = data.view("<f2")


class BF16(QuantType):
    name, ggml_type, file_type = "bf16", 30, 32
    block_size, block_bytes = 1, 2
    overflow = 255.5 * 2.0**120

    @staticmethod
    def encode_rows(x: np.ndarray, importance: np.ndarray, out: np.ndarray) -> None:
        bits = x.view("<u4")
        out.view("<u2")[...] = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16

    @staticmethod
    def decode_rows(data: np.ndarray, out: np.ndarray) -> None:
        out.view("<u4")[...] = data.view("<u2").astype(np.uint32) << 16
