"""IQ1_S_R4 (id 219): groups of four rows, each with one scale; 24 bytes per 4 rows by 32 columns.

    header   4 x f16   d    of each row
    offset   size      field
    0        16 x u8   qs   low 8 bits of the grid point of columns 8 g .. + 7 of row k: qs[4 g + k]
    16       4 x u16   qh   per row as in IQ1_S

    y = (d * (2 s + 1)) * (g + delta)       delta = 1/8 or -1/8

Not IQ1_S in another order: d belongs to a whole row.

Encode: minimise sum w (x - y)^2 with w = q where an importance q is given, else w = sqrt(2 v + x^2), v being the mean
of x^2 over the row; search in `families/iq1.py`. A sub-block of zeros decodes to +- d / 8: the format has no smaller
value.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np

from quantkit.codegen.half import half_to_float
from quantkit.codegen.jit import kernel
from quantkit.types.families.four_rows import FourRows
from quantkit.types.families.iq1 import new_space, search_row
from quantkit.types.families.super_scale import ODD
from quantkit.types.families.superblock import put_half
from quantkit.types.iq1_s import EIGHTHS, decode_sub_block, encode_sub_block

if TYPE_CHECKING:
    from quantkit.types.refine.vector_codes import VectorCodes

BLOCK = 24  # of four rows


@kernel
def _decode(data: np.ndarray, out: np.ndarray) -> None:
    rows, n = out.shape
    for first in range(0, rows, 4):
        group = data[first : first + 4].reshape(-1)
        for k in range(4):
            d = half_to_float(np.uint16(group[2 * k]) | np.uint16(group[2 * k + 1]) << np.uint16(8))
            for b in range(n // 32):
                block = group[8 + BLOCK * b : 8 + BLOCK * b + BLOCK]
                high = np.uint32(block[16 + 2 * k]) | np.uint32(block[17 + 2 * k]) << np.uint32(8)
                decode_sub_block(d, block[k:], 4, high, out[first + k, 32 * b : 32 * b + 32])


@kernel
def _encode(x: np.ndarray, importance: np.ndarray, effort: int, out: np.ndarray) -> None:
    rows, n = x.shape
    xs, w = np.empty(n, np.float32), np.empty(n, np.float32)
    codes, negatives = np.empty((2, n // 8), np.uint32), np.empty((2, n // 8), np.bool_)
    multipliers, space = np.empty((3, n // 32), np.float32), new_space(n, 4)
    for first in range(0, rows, 4):
        group = out[first : first + 4].reshape(-1)
        for k in range(4):
            d = search_row(x[first + k], importance, xs, w, 4, ODD, effort, codes, negatives, multipliers, space)
            put_half(group, 2 * k, d)
            for b in range(n // 32):
                block = group[8 + BLOCK * b : 8 + BLOCK * b + BLOCK]
                encode_sub_block(
                    codes[0, 4 * b :], negatives[0, 4 * b], multipliers[0, b], block[k:], 4, block[16 + 2 * k :]
                )


# Of a row apart: qs[0 .. 3], then its two bytes of qh.
_PLACES = np.array([[k, 4 + k, 8 + k, 12 + k, 16 + 2 * k, 17 + 2 * k] for k in range(4)])
_G = np.arange(4)[:, None]
_POINT_BITS = np.concatenate([8 * _G + np.arange(8), 32 + 3 * _G + np.arange(3)], axis=1)  # of each group


class IQ1_S_R4(FourRows):
    name, ggml_type, file_type = "iq1_s_r4", 219, 224
    block_bytes = BLOCK // 4
    places = _PLACES
    encode_rows = staticmethod(_encode)
    decode_rows = staticmethod(_decode)

    @functools.cached_property
    def vector_codes(self) -> VectorCodes:
        from quantkit.types.refine.vector_codes import make_codes

        return make_codes(2, BLOCK // 4, EIGHTHS, _POINT_BITS, None, np.array([32 + 15]))
