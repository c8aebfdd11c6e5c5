"""IQ6_K (id 141): blocks of 256 in sub-blocks of 16, 212 bytes.

    offset  size      field
    0       f16       d
    2       u16       x    bit s: sub-block s uses the shifted codebook
    4       16 x i8   sc   multiplier of sub-block s
    20      128 x u8  qs   low 4 bits of codes, per 64 elements 32 bytes: low nibbles elements 0 .. 31, high 32 .. 63
    148     64 x u8   qh   high 2 bits of codes, 128 elements in 32 bytes: bits 2 (j // 32 % 4), + 1 of
                           qh[32 (j // 128) + j % 32]

    m = sc                                  -127 to 127 (-128 decodes, but is not written)
    y = (d * m) * (t(q) + x)                t(q) = -127 + q (6.2568 + q (-0.11218 + q 0.0011972))

Decoded values are those of ik_llama.cpp's row decoder: t(q) by three fused multiply-adds in float32; the sum with x
and both products are rounded to float32. Its matrix products use the integer nearest to t(q), K6[q], instead.

Encode: minimise sum w (x - y)^2 (`families/nonlinear.py`) with w = q where an importance q is given, else w = 2 v +
x^2, v being the mean of x^2 over the block; y with the *integer* K6[q], by which quantkit's products multiply too: on a
model the divergence is 12% lower than with the cubic (`remark`).
"""

from __future__ import annotations

import numpy as np

from quantkit.codegen.half import half_to_float
from quantkit.codegen.jit import kernel
from quantkit.types.base import QuantType
from quantkit.types.families.codebooks import K6
from quantkit.types.families.nonlinear import NonlinearFormat, book_start, load_sub_blocks, new_plan, new_space, search
from quantkit.types.families.superblock import put_flags, put_half, put_nibbles, put_pairs

BLOCK = 212
FORMAT = NonlinearFormat(
    book=book_start(K6), min_multiplier=1, step=1, max_multiplier=127, extreme=127,
    min_units=np.float32(100), max_units=np.float32(150), min_ratio=np.float32(0.9), max_ratio=np.float32(1.2),
    places_per_octave=64, tries=2, zero_below=np.float32(2.0**-25), variance_weight=np.float32(2),
)  # fmt: skip


def _fused(a: np.float32, b: int, c: float) -> np.float32:
    """a * b + c, c a float32 constant, with one rounding. The product needs 30 bits and the sum fewer than 53."""
    return np.float32(float(a) * b + float(np.float32(c)))


def _cubic(q: int) -> np.float32:
    return _fused(_fused(_fused(np.float32(0.0011972), q, -0.11218), q, 6.2568), q, -127)


_CUBIC = np.array([_cubic(q) for q in range(64)], np.float32)
_VALUES = np.concatenate([_CUBIC, _CUBIC + np.float32(1)])
_INTEGERS = K6.values


@kernel
def _decode_values(data: np.ndarray, out: np.ndarray, values: np.ndarray) -> None:
    rows, n = out.shape
    for row in range(rows):
        for b in range(n // 256):
            block = data[row, BLOCK * b : BLOCK * b + BLOCK]
            y = out[row, 256 * b : 256 * b + 256]
            d = half_to_float(np.uint16(block[0]) | np.uint16(block[1]) << np.uint16(8))
            flags = np.uint32(block[2]) | np.uint32(block[3]) << np.uint32(8)
            for s in range(16):
                scale = d * np.float32(np.int8(block[4 + s]))
                book = np.uint32(64) * ((flags >> np.uint32(s)) & np.uint32(1))
                low, shift = block[20 + 32 * (s // 4) + 16 * (s % 2) :], np.uint8(4 * (s // 2 % 2))
                high, pair = block[148 + 32 * (s // 8) + 16 * (s % 2) :], np.uint8(2 * (s // 2 % 4))
                for j in range(16):
                    code = (low[j] >> shift) & np.uint8(15) | ((high[j] >> pair) & np.uint8(3)) << np.uint8(4)
                    y[16 * s + j] = scale * values[book + np.uint32(code)]


@kernel
def _decode(data: np.ndarray, out: np.ndarray) -> None:
    _decode_values(data, out, _VALUES)


@kernel
def _decode_for_products(data: np.ndarray, out: np.ndarray) -> None:
    _decode_values(data, out, _INTEGERS)


@kernel
def _store(d: np.float32, multipliers: np.ndarray, flags: np.ndarray, codes: np.ndarray, out: np.ndarray) -> None:
    """Write a block."""
    out[:] = np.uint8(0)
    put_half(out, 0, d)
    put_flags(flags, out[2:4])
    for s in range(16):
        out[4 + s] = np.uint8(multipliers[s])
    put_nibbles(codes, 32, out[20:148])
    put_pairs(codes, 4, out[148:212])


@kernel
def _encode(x: np.ndarray, importance: np.ndarray, effort: int, out: np.ndarray) -> None:
    rows, n = x.shape
    plan, space = new_plan(FORMAT, effort), new_space()
    multipliers, flags, codes = np.empty(16, np.int32), np.empty(16, np.int32), np.empty(256, np.uint8)
    for row in range(rows):
        for b in range(n // 256):
            block = out[row, BLOCK * b : BLOCK * b + BLOCK]
            unit = load_sub_blocks(x[row, 256 * b : 256 * b + 256], importance, 256 * b, FORMAT, space)
            if unit == np.float32(0):
                block[:] = np.uint8(0)
                continue
            d = search(FORMAT, plan, unit, space, multipliers, flags, codes)
            _store(d, multipliers, flags, codes, block)


class IQ6_K(QuantType):
    """IQ6_K: blocks of 256 in sub-blocks of 16, 212 bytes."""

    name, ggml_type, file_type = "iq6_k", 141, 142
    block_size, block_bytes = 256, BLOCK
    uses_imatrix = True
    encode_rows = staticmethod(_encode)
    decode_rows = staticmethod(_decode)
    product_rows = staticmethod(_decode_for_products)
    remark = (
        "`dequantize` gives the cubic values of ik_llama.cpp's row decoder. Products, ik_llama.cpp's and quantkit's, "
        "use the integers nearest to them, for which codes are chosen too. On SmolLM2 (half of its layers, eval.txt) "
        "the divergence is 0.00238 with the integers, 0.00271 with the cubic."
    )
