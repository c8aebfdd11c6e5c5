"""IQ2_S (id 22): blocks of 256 in sub-blocks of 16 and groups of 8, 82 bytes.

    offset  size     field
    0       f16      d
    2       32 x u8  low 8 bits of the number of the grid point of each group
    34      32 x u8  signs of each group, element j in bit j
    66      8 x u8   bits 2 (g % 4), + 1 of byte g // 4: high bits of the number of group g
    74      8 x u8   nibble s % 2 of byte s // 2: l of sub-block s

    y = ((d * (l + 0.5) / 4) * magnitude) * sign

Encode: minimise the error that `families/grid_type.py` states; the search is in `types/native/grid_search.py`.
"""

from __future__ import annotations

import numpy as np

from quantkit.codegen.half import half_to_float
from quantkit.codegen.jit import kernel
from quantkit.types.families.grid_points import SIGNS, grid, write_group
from quantkit.types.families.grid_type import GridType

BLOCK = 82

_GRID = grid("iq2_s")
_POINTS = _GRID.points


@kernel
def _decode(data: np.ndarray, out: np.ndarray) -> None:
    rows, n = out.shape
    for row in range(rows):
        for b in range(n // 256):
            block = data[row, BLOCK * b : BLOCK * b + BLOCK]
            y = out[row, 256 * b : 256 * b + 256]
            d = half_to_float(np.uint16(block[0]) | np.uint16(block[1]) << np.uint16(8))
            for g in range(32):
                low = (block[74 + g // 4] >> np.uint8(4 * (g // 2 % 2))) & np.uint8(15)
                scale = d * ((np.float32(low) + np.float32(0.5)) * np.float32(0.25))
                high = np.int64(block[66 + g // 4] >> np.uint8(2 * (g % 4))) & 3
                point = _POINTS[np.int64(block[2 + g]) | high << 8]
                write_group(scale, point, SIGNS[block[34 + g]], y[8 * g : 8 * g + 8])


@kernel
def _pack(scales: np.ndarray, multipliers: np.ndarray, points: np.ndarray, signs: np.ndarray, out: np.ndarray) -> None:
    for b in range(len(scales)):
        out[b, 0], out[b, 1] = np.uint8(scales[b]), np.uint8(scales[b] >> np.uint16(8))
        for i in range(8):
            high = np.int64(0)
            for k in range(4):
                g = 4 * i + k
                out[b, 2 + g] = np.uint8(points[b, g])
                out[b, 34 + g] = signs[b, g]
                high |= np.int64(points[b, g] >> np.uint16(8)) << (2 * k)
            out[b, 66 + i] = np.uint8(high)
            out[b, 74 + i] = multipliers[b, 2 * i] | multipliers[b, 2 * i + 1] << np.uint8(4)


class IQ2_S(GridType):
    """IQ2_S: blocks of 256 in sub-blocks of 16 and groups of 8, 82 bytes."""

    name, ggml_type, file_type = "iq2_s", 22, 29
    block_bytes = BLOCK
    grid, sub_block, divisor, even_signs = _GRID, 16, 8, False
    variance_weight = 1.0
    _pack = staticmethod(_pack)
    decode_rows = staticmethod(_decode)
