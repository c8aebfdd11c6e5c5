"""IQ3_S (id 21): blocks of 256 in sub-blocks of 32 and groups of 4, 110 bytes.

    offset  size     field
    0       f16      d
    2       64 x u8  low 8 bits of the number of the grid point of each group
    66      8 x u8   bit g % 8 of byte g // 8: ninth bit of the number of group g
    74      32 x u8  signs of each 8 elements, element j in bit j
    106     4 x u8   nibble s % 2 of byte s // 2: l of sub-block s

    y = ((d * (2 l + 1)) * magnitude) * sign

Encode: minimise the error that `families/grid_type.py` states; the search is in `types/native/grid_search.py`.
"""

from __future__ import annotations

import numpy as np

from quantkit.codegen.half import half_to_float
from quantkit.codegen.jit import kernel
from quantkit.types.families.grid_points import SIGNS, grid, write_group
from quantkit.types.families.grid_type import GridType

BLOCK = 110

_GRID = grid("iq3_s")
_POINTS = _GRID.points


@kernel
def _decode(data: np.ndarray, out: np.ndarray) -> None:
    rows, n = out.shape
    for row in range(rows):
        for b in range(n // 256):
            block = data[row, BLOCK * b : BLOCK * b + BLOCK]
            y = out[row, 256 * b : 256 * b + 256]
            d = half_to_float(np.uint16(block[0]) | np.uint16(block[1]) << np.uint16(8))
            for s in range(8):
                low = (block[106 + s // 2] >> np.uint8(4 * (s % 2))) & np.uint8(15)
                scale = d * (np.float32(low) * np.float32(2) + np.float32(1))
                for i in range(8):
                    high = np.int64(block[66 + s] >> np.uint8(i)) & 1
                    point = _POINTS[np.int64(block[2 + 8 * s + i]) | high << 8]
                    signs = SIGNS[block[74 + 4 * s + i // 2]]
                    start = 32 * s + 4 * i
                    write_group(scale, point, signs[4 * (i % 2) :], y[start : start + 4])


@kernel
def _pack(scales: np.ndarray, multipliers: np.ndarray, points: np.ndarray, signs: np.ndarray, out: np.ndarray) -> None:
    for b in range(len(scales)):
        out[b, 0], out[b, 1] = np.uint8(scales[b]), np.uint8(scales[b] >> np.uint16(8))
        for s in range(8):
            high = np.int64(0)
            for i in range(8):
                out[b, 2 + 8 * s + i] = np.uint8(points[b, 8 * s + i])
                high |= np.int64(points[b, 8 * s + i] >> np.uint16(8)) << i
            out[b, 66 + s] = np.uint8(high)
        out[b, 74:106] = signs[b]
        for i in range(4):
            out[b, 106 + i] = multipliers[b, 2 * i] | multipliers[b, 2 * i + 1] << np.uint8(4)


class IQ3_S(GridType):
    """IQ3_S: blocks of 256 in sub-blocks of 32 and groups of 4, 110 bytes."""

    name, ggml_type, file_type = "iq3_s", 21, 26
    block_bytes = BLOCK
    grid, sub_block, divisor, even_signs = _GRID, 32, 1, False
    variance_weight = 0.5
    _pack = staticmethod(_pack)
    decode_rows = staticmethod(_decode)
