"""F32 (id 0), F16 (id 1) and BF16 (id 30): floating-point numbers.

    f32   4 bytes, IEEE single
    f16   2 bytes, IEEE half; encoding rounds to nearest, ties to even
    bf16  2 bytes, upper half of an IEEE single; encoding rounds to nearest, ties to even

Decoding is exact. A finite weight that rounds to Inf would ruin a model silently, so `quantize` refuses it and names
its place; `overflow` is the first magnitude that rounds to Inf. The conversions are kernels because numpy's of halves
run at a sixth of memory speed.
"""

from __future__ import annotations

import numpy as np

from quantkit.codegen.half import bfloat_to_float, half_to_float
from quantkit.codegen.jit import kernel
from quantkit.types.base import QuantType

# Bits of float32, as int32: numba widens what is not cast back to 32 bits, which halves the speed.
_SIGN, _MAGNITUDE, _EXPONENT = np.int32(0x8000), np.int32(0x7FFFFFFF), np.int32(0x7F800000)
# Exponent of the smallest normal half, 2^-14. Below it the last bit of a half keeps its value.
_MIN_NORMAL_HALF = np.int32(113 << 23)
_ANCHOR = np.int32(13 << 23)  # the last bit of a float32 with an exponent larger by 13 is worth that of the half
_MANTISSA_SHIFT, _SIGN_SHIFT = np.int32(13), np.int32(16)  # bits by which exponent and mantissa, and the sign, move


@kernel
def _encode_f16(x: np.ndarray, importance: np.ndarray, effort: int, out: np.ndarray) -> np.int32:
    """Convert to halves; returns the bits of the largest magnitude as an integer.

    Adding a power of two whose last bit is worth that of the half rounds to nearest even, and leaves the half's
    mantissa in the last bits of the sum.
    """
    bits, half = x.reshape(-1).view(np.int32), out.reshape(-1).view(np.uint16)
    max_bits = np.int32(0)
    for i in range(bits.size):
        magnitude = np.int32(bits[i] & _MAGNITUDE)
        max_bits = np.int32(max(max_bits, magnitude))
        exponent = np.int32(max(np.int32(magnitude & _EXPONENT), _MIN_NORMAL_HALF))
        anchor = np.int32(exponent + _ANCHOR)
        total = np.float32(np.int32(magnitude).view(np.float32) + np.int32(anchor).view(np.float32))
        mantissa = np.int32(np.float32(total).view(np.int32) - anchor)
        unsigned = np.int32(mantissa + np.int32(np.int32(exponent - _MIN_NORMAL_HALF) >> _MANTISSA_SHIFT))
        half[i] = np.uint16(np.int32(unsigned | np.int32(np.int32(bits[i] >> _SIGN_SHIFT) & _SIGN)))
    return max_bits


@kernel
def _decode_f16(data: np.ndarray, out: np.ndarray) -> None:
    half, value = data.reshape(-1).view(np.uint16), out.reshape(-1)
    for i in range(value.size):
        value[i] = half_to_float(half[i])


@kernel
def _encode_bf16(x: np.ndarray, importance: np.ndarray, effort: int, out: np.ndarray) -> np.uint32:
    """Convert to bfloat16, ties to even; returns the bits of the largest magnitude as an integer."""
    bits, upper = x.reshape(-1).view(np.uint32), out.reshape(-1).view(np.uint16)
    max_bits = np.uint32(0)
    for i in range(bits.size):
        max_bits = np.uint32(max(max_bits, np.uint32(bits[i] & np.uint32(0x7FFFFFFF))))
        odd = np.uint32(np.uint32(bits[i] >> np.uint32(16)) & np.uint32(1))
        upper[i] = np.uint16(np.uint32(np.uint32(bits[i] + np.uint32(0x7FFF)) + odd) >> np.uint32(16))
    return max_bits


@kernel
def _decode_bf16(data: np.ndarray, out: np.ndarray) -> None:
    upper, value = data.reshape(-1).view(np.uint16), out.reshape(-1)
    for i in range(value.size):
        value[i] = bfloat_to_float(upper[i])


FLOATS = ("f32", "f16", "bf16")
_INTEGERS = {"f32": (np.int32, np.uint32), "f16": (np.int16, np.uint16), "bf16": (np.int16, np.uint16)}
_INF = {"f32": 0x7F800000, "f16": 0x7C00, "bf16": 0x7F80}  # bits of Inf; those of NaN are above
_CHUNK_BYTES = 1 << 20  # bytes, small enough that the second pass reads them from the cache


def is_finite(kind: QuantType, data: np.ndarray) -> bool:
    """Whether uint8 bytes of f32, f16 or bf16 hold no NaN and no Inf; False for other types.

    As signed integers, the bits of the largest positive number are the largest; as unsigned integers, those of the
    negative number of largest magnitude. numpy finds both maxima at memory speed.
    """
    if kind.name not in _INF or not data.flags.c_contiguous:
        return False
    data, inf = data.reshape(-1), _INF[kind.name]
    signed, unsigned = _INTEGERS[kind.name]
    minus_inf = inf | 1 << 8 * kind.block_bytes - 1
    chunks = (data[start : start + _CHUNK_BYTES] for start in range(0, data.size, _CHUNK_BYTES))
    return all(chunk.view(signed).max() < inf and chunk.view(unsigned).max() < minus_inf for chunk in chunks)


class F32(QuantType):
    """IEEE single."""

    name, ggml_type, file_type = "f32", 0, 0
    block_size, block_bytes = 1, 4

    @staticmethod
    def encode_rows(x: np.ndarray, importance: np.ndarray, effort: int, out: np.ndarray) -> None:
        """Copy; see `QuantType.encode_rows`."""
        out.view("<f4")[...] = x

    @staticmethod
    def decode_rows(data: np.ndarray, out: np.ndarray) -> None:
        """Copy; see `QuantType.decode_rows`."""
        out[...] = data.view("<f4")


class F16(QuantType):
    """IEEE half."""

    name, ggml_type, file_type = "f16", 1, 1
    block_size, block_bytes = 1, 2
    reports_largest = True
    overflow = 65520.0
    encode_rows = staticmethod(_encode_f16)
    decode_rows = staticmethod(_decode_f16)


class BF16(QuantType):
    """The upper half of an IEEE single."""

    name, ggml_type, file_type = "bf16", 30, 32
    block_size, block_bytes = 1, 2
    reports_largest = True
    overflow = 255.5 * 2.0**120
    encode_rows = staticmethod(_encode_bf16)
    decode_rows = staticmethod(_decode_bf16)
