"""IQ1_M_R4 (id 229): groups of four rows, each with one scale; 28 bytes per 4 rows by 32 columns.

    header   4 x f16   d    of each row
    offset   size      field
    0        16 x u8   qs   low 8 bits of the grid point of columns 8 g .. + 7 of row k: qs[4 g + k]
    16       8 x u8    qh   columns 16 h .. + 15 of row k: qh[4 h + k], two nibbles as in IQ1_M
    24       4 x u8    sc   of row k: nibble h is the multiplier m of columns 16 h .. + 15

    y = (d * m) * (g + delta)       m = 0 .. 15; delta = 1/8 or -1/8

Not IQ1_M in another order: d belongs to a whole row, and multipliers may be even or 0.

Encode: minimise sum w (x - y)^2 with w = q where an importance q is given, else w = sqrt(2 v + x^2), v being
the mean of x^2 over the row; search in `families/iq1.py`.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np

from quantkit.codegen.half import half_to_float
from quantkit.codegen.jit import kernel
from quantkit.types.families.four_rows import FourRows
from quantkit.types.families.iq1 import NUMBER, new_space, search_row
from quantkit.types.families.super_scale import SMALL
from quantkit.types.families.superblock import put_half
from quantkit.types.iq1_m import EIGHTHS, decode_group, high_nibble

if TYPE_CHECKING:
    from quantkit.types.refine.vector_codes import VectorCodes

BLOCK = 28  # of four rows


@kernel
def _decode(data: np.ndarray, out: np.ndarray) -> None:
    rows, n = out.shape
    for first in range(0, rows, 4):
        group = data[first : first + 4].reshape(-1)
        for k in range(4):
            d = half_to_float(np.uint16(group[2 * k]) | np.uint16(group[2 * k + 1]) << np.uint16(8))
            for b in range(n // 32):
                block = group[8 + BLOCK * b : 8 + BLOCK * b + BLOCK]
                for g in range(4):
                    m = (block[24 + k] >> np.uint8(4 * (g // 2))) & np.uint8(15)
                    high = (block[16 + 4 * (g // 2) + k] >> np.uint8(4 * (g % 2))) & np.uint8(15)
                    start = 32 * b + 8 * g
                    decode_group(d * np.float32(m), block[4 * g + k], high, out[first + k, start : start + 8])


@kernel
def _encode(x: np.ndarray, importance: np.ndarray, effort: int, out: np.ndarray) -> None:
    rows, n = x.shape
    xs, w = np.empty(n, np.float32), np.empty(n, np.float32)
    codes, negatives = np.empty((2, n // 8), np.uint32), np.empty((2, n // 8), np.bool_)
    multipliers, space = np.empty((3, n // 16), np.float32), new_space(n, 2)
    for first in range(0, rows, 4):
        group = out[first : first + 4].reshape(-1)
        for k in range(4):
            d = search_row(x[first + k], importance, xs, w, 2, SMALL, effort, codes, negatives, multipliers, space)
            put_half(group, 2 * k, d)
            for b in range(n // 32):
                block = group[8 + BLOCK * b : 8 + BLOCK * b + BLOCK]
                for h in range(2):
                    g = 4 * b + 2 * h
                    high = high_nibble(codes[0, g + 1], negatives[0, g + 1]) << np.uint16(4)
                    block[16 + 4 * h + k] = np.uint8(high | high_nibble(codes[0, g], negatives[0, g]))
                    block[8 * h + k] = np.uint8(NUMBER[codes[0, g]])
                    block[8 * h + 4 + k] = np.uint8(NUMBER[codes[0, g + 1]])
                block[24 + k] = np.uint8(multipliers[0, 2 * b] + np.float32(16) * multipliers[0, 2 * b + 1])


# Of a row apart: qs[0 .. 3], qh[0 .. 1], sc.
_PLACES = np.array([[4 * i + k for i in range(7)] for k in range(4)])
_G = np.arange(4)[:, None]
_POINT_BITS = np.concatenate([8 * _G + np.arange(8), 32 + 4 * _G + np.arange(4)], axis=1)  # of each group


class IQ1_M_R4(FourRows):
    name, ggml_type, file_type = "iq1_m_r4", 229, 231
    block_bytes = BLOCK // 4
    places = _PLACES
    encode_rows = staticmethod(_encode)
    decode_rows = staticmethod(_decode)

    @functools.cached_property
    def vector_codes(self) -> VectorCodes:
        from quantkit.types.refine.vector_codes import make_codes

        return make_codes(2, BLOCK // 4, EIGHTHS, _POINT_BITS)
