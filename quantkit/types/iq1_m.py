"""IQ1_M (id 29): blocks of 256 in sub-blocks of 16, 56 bytes.

    offset  size      field
    0       32 x u8   qs   low 8 bits of the grid point of each group of 8
    32      16 x u8   qh   per sub-block, nibble k: bits 0 .. 2 the high bits of the point of group k, bit 3 a negative
                           delta
    48      4 x u16   sc   bits 3 k .. + 2 of sc[j]: the multiplier's number s of sub-block 4 j + k;
                           bits 12 .. 15 of sc[j]: bits 4 j .. + 3 of the f16 d

    y = (d * (2 s + 1)) * (g + delta)       delta = 1/8 or -1/8

Encode: minimise sum w (x - y)^2 with w = q where an importance q is given, else w = v / 4 + x^2, v being the mean of
x^2 over the block; search in `families/iq1.py`.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np

from quantkit.codegen.half import float_to_half, half_to_float
from quantkit.codegen.jit import kernel
from quantkit.types.base import QuantType
from quantkit.types.families.iq1 import DELTA, LEVELS, NUMBER, new_space, search_span
from quantkit.types.families.super_scale import ODD
from quantkit.types.families.superblock import load_block, relative_importance

if TYPE_CHECKING:
    from quantkit.types.refine.vector_codes import VectorCodes

BLOCK = 56


@kernel
def decode_group(scale: np.float32, low: np.uint8, high: np.uint8, y: np.ndarray) -> None:
    """Decode 8 values: `low` and the three low bits of `high` are the point's number, bit 3 a negative delta."""
    delta = -DELTA if high & np.uint8(8) else DELTA
    point = np.int64(low) | np.int64(high & np.uint8(7)) << 8
    for i in range(8):
        y[i] = scale * (LEVELS[point, i] + delta)


@kernel
def high_nibble(code: np.uint32, negative: np.bool_) -> np.uint16:
    """The nibble `high` of `decode_group` for a ternary number and the sign of delta."""
    result: np.uint16 = NUMBER[code] >> np.uint16(8) | (np.uint16(8) if negative else np.uint16(0))
    return result


@kernel
def _decode(data: np.ndarray, out: np.ndarray) -> None:
    rows, n = out.shape
    for row in range(rows):
        for b in range(n // 256):
            block = data[row, BLOCK * b : BLOCK * b + BLOCK]
            half = np.uint16(0)
            for j in range(4):
                half |= np.uint16(block[49 + 2 * j] >> np.uint8(4)) << np.uint16(4 * j)
            d = half_to_float(half)
            for g in range(32):
                s = g // 2
                scales = np.uint32(block[48 + 2 * (s // 4)]) | np.uint32(block[49 + 2 * (s // 4)]) << np.uint32(8)
                m = np.uint32(2) * ((scales >> np.uint32(3 * (s % 4))) & np.uint32(7)) + np.uint32(1)
                high = (block[32 + s] >> np.uint8(4 * (g % 2))) & np.uint8(15)
                decode_group(d * np.float32(m), block[g], high, out[row, 256 * b + 8 * g : 256 * b + 8 * g + 8])


@kernel
def _store(d: np.float32, codes: np.ndarray, negatives: np.ndarray, multipliers: np.ndarray, block: np.ndarray) -> None:
    """Write a block."""
    block[:] = np.uint8(0)
    for g in range(32):
        block[g] = np.uint8(NUMBER[codes[g]])
        block[32 + g // 2] |= np.uint8(high_nibble(codes[g], negatives[g]) << np.uint16(4 * (g % 2)))
    half = np.uint32(float_to_half(d))
    for j in range(4):
        scales = (half >> np.uint32(4 * j)) << np.uint32(12)
        for k in range(4):
            scales |= np.uint32(multipliers[4 * j + k]) >> np.uint32(1) << np.uint32(3 * k)
        block[48 + 2 * j] = np.uint8(scales)
        block[49 + 2 * j] = np.uint8(scales >> np.uint32(8))


@kernel
def _encode(x: np.ndarray, importance: np.ndarray, effort: int, out: np.ndarray) -> None:
    rows, n = x.shape
    xs, w = np.empty(256, np.float32), np.empty(256, np.float32)
    codes, negatives = np.empty((2, 32), np.uint32), np.empty((2, 32), np.bool_)
    multipliers, space = np.empty((3, 16), np.float32), new_space(256, 2)
    for row in range(rows):
        for b in range(n // 256):
            block = out[row, BLOCK * b : BLOCK * b + BLOCK]
            unit, mean = load_block(x[row, 256 * b : 256 * b + 256], xs, np.float32(2.0**-25))
            if unit == np.float32(0):
                block[:] = np.uint8(0)
                continue
            if not relative_importance(importance, 256 * b, w):
                for i in range(256):
                    w[i] = xs[i] * xs[i] + np.float32(0.25) * mean
            d = search_span(xs, w, unit, 2, ODD, effort, codes, negatives, multipliers, space)
            _store(d * unit, codes[0], negatives[0], multipliers[0], block)


_G = np.arange(32)[:, None]
_POINT_BITS = np.concatenate([8 * _G + np.arange(8), 8 * (32 + _G // 2) + 4 * (_G % 2) + np.arange(4)], axis=1)
# g + delta, times 8, of each point with a positive delta, then of each with a negative one.
EIGHTHS = np.concatenate([8 * LEVELS + 1, 8 * LEVELS - 1]).astype(np.int8)[None]


class IQ1_M(QuantType):
    name, ggml_type, file_type = "iq1_m", 29, 31
    block_size, block_bytes = 256, BLOCK
    uses_imatrix = True
    encode_rows = staticmethod(_encode)
    decode_rows = staticmethod(_decode)

    @functools.cached_property
    def vector_codes(self) -> VectorCodes:
        from quantkit.types.refine.vector_codes import make_codes

        return make_codes(0, BLOCK, EIGHTHS, _POINT_BITS)
