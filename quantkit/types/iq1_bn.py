"""IQ1_BN (id 134): ternary rows, a header of 2 bytes and blocks of 64, 13 bytes.

    row header: f16 d
    offset  size     field
    0       12 x u8  ql   byte 3 i + k: digits of elements 16 i + 5 k ... 16 i + 5 k + 4
    12      u8       ex   digits of elements 15, 31, 47, 63

    y = d * (t - 1)       t = 0, 1, 2

Digits t0 ... t4 of a byte are N = t0 + 3 t1 + 9 t2 + 27 t3 + 81 t4 (t4 = 0 in ex) as the fraction N / 243: the byte is
ceil(256 N / 243), and digit k comes back as (3 u) div 256 of u = (byte * 3^(4 - k)) mod 256.

Encode: d and nearest codes that minimise sum w (x - y)^2 (`families/ternary.py`). The only error of rows that are
ternary already is the rounding of d to a half. ik_llama.cpp's row decoder ignores the header and the scale; its matrix
products, and this module, do not.
"""

from __future__ import annotations

import numpy as np

from quantkit.codegen.half import float_to_half, half_to_float
from quantkit.codegen.jit import kernel
from quantkit.types.families import ternary

_HALF_MAX = np.float32(65504)

# A 64-bit word of five digits, one a byte, the lowest first, times _POWERS has N in byte 4: no lower byte overflows.
_FIVE_BYTES = np.uint64(0xFFFFFFFFFF)
_POWERS = np.uint64(sum(3**k << 8 * (4 - k) for k in range(5)))

# t - 1 of the five digits of every byte.
_bytes = np.arange(256)[:, None]
_DIGITS = ((_bytes * 3 ** np.arange(4, -1, -1) % 256 * 3 // 256) - 1).astype(np.float32)


@kernel
def _decode(data: np.ndarray, out: np.ndarray) -> None:
    rows, n = out.shape
    for row in range(rows):
        scale = half_to_float(data[row, :2].view(np.uint16)[0])
        for b in range(n // 64):
            block, y = data[row, 2 + 13 * b : 15 + 13 * b], out[row, 64 * b : 64 * b + 64]
            for i in range(4):
                for k in range(3):
                    for j in range(5):
                        y[16 * i + 5 * k + j] = scale * _DIGITS[block[3 * i + k], j]
                y[16 * i + 15] = scale * _DIGITS[block[12], i]


@kernel(inline="always")
def _pack(digits: np.uint64) -> np.uint8:
    """The byte that stores five digits, given in the low five bytes of a word."""
    number = ((digits & _FIVE_BYTES) * _POWERS) >> np.uint64(32) & np.uint64(255)
    return np.uint8((number * np.uint64(256) + np.uint64(242)) // np.uint64(243))


@kernel
def _pack_blocks(codes: np.ndarray, out: np.ndarray) -> None:
    """Write codes uint8[n] into a row behind its header."""
    word = codes.view(np.uint64)
    for b in range(codes.size // 64):
        block = out[2 + 13 * b : 15 + 13 * b]
        last_digits = np.uint64(0)
        for i in range(4):
            low, high = word[8 * b + 2 * i], word[8 * b + 2 * i + 1]
            block[3 * i] = _pack(low)
            block[3 * i + 1] = _pack(low >> np.uint64(40) | high << np.uint64(24))
            block[3 * i + 2] = _pack(high >> np.uint64(16))
            last_digits |= high >> np.uint64(56) << np.uint64(8 * i)
        block[12] = _pack(last_digits)


@kernel
def _pack_rows(codes: np.ndarray, out: np.ndarray) -> None:
    for row in range(len(out)):
        _pack_blocks(codes[row], out[row])


@kernel
def _encode(x: np.ndarray, importance: np.ndarray, effort: int, out: np.ndarray) -> None:
    rows, n = x.shape
    w, codes = np.empty(n, np.float32), np.empty(n, np.uint8)
    ternary.row_weights(importance, w)
    for row in range(rows):
        half = float_to_half(min(ternary.find_scale(x[row], w, effort), _HALF_MAX))
        out[row, :2].view(np.uint16)[0] = half
        ternary.nearest_codes(x[row], half_to_float(half), codes)
        _pack_blocks(codes, out[row])


class IQ1_BN(ternary.TernaryType):
    name, ggml_type, file_type = "iq1_bn", 134, 136
    block_size, block_bytes, row_meta_bytes = 64, 13, 2
    scale_dtype = np.float16
    encode_rows = staticmethod(_encode)
    decode_rows = staticmethod(_decode)
    pack_rows = staticmethod(_pack_rows)
