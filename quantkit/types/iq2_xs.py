"""IQ2_XS (id 17): blocks of 256 in sub-blocks of 16 and groups of 8, 74 bytes.

    offset  size      field
    0       f16       d
    2       32 x u16  for each group: bits 0 ... 8 number of the grid point, 9 ... 15 signs, the eighth their parity
    66      8 x u8    nibble s % 2 of byte s // 2: l of sub-block s

    y = ((d * (l + 0.5) / 4) * magnitude) * sign

Encode: minimise the error that `families/grid_type.py` states; the search is in `types/native/grid_search.py`.
"""

from __future__ import annotations

import numpy as np

from quantkit.codegen.half import half_to_float
from quantkit.codegen.jit import kernel
from quantkit.types.families.grid_points import EVEN_SIGNS, grid, write_group
from quantkit.types.families.grid_type import GridType

BLOCK = 74

_GRID = grid("iq2_xs")
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
                low = (block[66 + g // 4] >> np.uint8(4 * (g // 2 % 2))) & np.uint8(15)
                scale = d * ((np.float32(low) + np.float32(0.5)) * np.float32(0.25))
                word = np.int64(block[2 + 2 * g]) | np.int64(block[3 + 2 * g]) << 8
                write_group(scale, _POINTS[word & 511], EVEN_SIGNS[word >> 9], y[8 * g : 8 * g + 8])


@kernel
def _pack(scales: np.ndarray, multipliers: np.ndarray, points: np.ndarray, signs: np.ndarray, out: np.ndarray) -> None:
    for b in range(len(scales)):
        out[b, 0], out[b, 1] = np.uint8(scales[b]), np.uint8(scales[b] >> np.uint16(8))
        for g in range(32):
            out[b, 2 + 2 * g] = np.uint8(points[b, g])
            out[b, 3 + 2 * g] = np.uint8(points[b, g] >> np.uint16(8)) | signs[b, g] << np.uint8(1)
        for i in range(8):
            out[b, 66 + i] = multipliers[b, 2 * i] | multipliers[b, 2 * i + 1] << np.uint8(4)


class IQ2_XS(GridType):
    """IQ2_XS: blocks of 256 in sub-blocks of 16 and groups of 8, 74 bytes."""

    name, ggml_type, file_type = "iq2_xs", 17, 20
    block_bytes = BLOCK
    requires_imatrix = True
    grid, sub_block, divisor, even_signs = _GRID, 16, 8, True
    variance_weight = 1.0
    _pack = staticmethod(_pack)
    decode_rows = staticmethod(_decode)
