"""IQ2_XXS (id 16): blocks of 256 in sub-blocks of 32 and groups of 8, 66 bytes.

    offset  size    field
    0       f16     d
    2       8 x 8   for each sub-block
                    4 x u8   number of the grid point of each group
                    u32      bits 7 i ... 7 i + 6: signs of group i, the eighth sign their parity; bits 28 ... 31: l

    y = ((d * (l + 0.5) / 4) * magnitude) * sign

Encode: minimise the error that `families/grid_type.py` states; the search is in `types/native/grid_search.py`.
"""

from __future__ import annotations

import numpy as np

from quantkit.codegen.half import half_to_float
from quantkit.codegen.jit import kernel
from quantkit.types.families.grid_points import EVEN_SIGNS, grid, write_group
from quantkit.types.families.grid_type import GridType

BLOCK = 66

_GRID = grid("iq2_xxs")
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
                part = block[2 + 8 * s : 10 + 8 * s]
                word = np.uint32(0)
                for i in range(4):
                    word |= np.uint32(part[4 + i]) << np.uint32(8 * i)
                scale = d * ((np.float32(word >> np.uint32(28)) + np.float32(0.5)) * np.float32(0.25))
                for i in range(4):
                    signs = EVEN_SIGNS[(word >> np.uint32(7 * i)) & np.uint32(127)]
                    start = 32 * s + 8 * i
                    write_group(scale, _POINTS[part[i]], signs, y[start : start + 8])


@kernel
def _pack(scales: np.ndarray, multipliers: np.ndarray, points: np.ndarray, signs: np.ndarray, out: np.ndarray) -> None:
    for b in range(len(scales)):
        out[b, 0], out[b, 1] = np.uint8(scales[b]), np.uint8(scales[b] >> np.uint16(8))
        for s in range(8):
            part = out[b, 2 + 8 * s : 10 + 8 * s]
            word = np.uint32(multipliers[b, s]) << np.uint32(28)
            for i in range(4):
                part[i] = np.uint8(points[b, 4 * s + i])
                word |= np.uint32(signs[b, 4 * s + i] & np.uint8(127)) << np.uint32(7 * i)
            for i in range(4):
                part[4 + i] = np.uint8(word >> np.uint32(8 * i))


class IQ2_XXS(GridType):
    """IQ2_XXS: blocks of 256 in sub-blocks of 32 and groups of 8, 66 bytes."""

    name, ggml_type, file_type = "iq2_xxs", 16, 19
    block_bytes = BLOCK
    requires_imatrix = True
    grid, sub_block, divisor, even_signs = _GRID, 32, 8, True
    variance_weight = 1.0
    _pack = staticmethod(_pack)
    decode_rows = staticmethod(_decode)
