"""Q4_0 (id 2): blocks of 32, 18 bytes.

    offset  size     field
    0       f16      d
    2       16 x u8  qs   low nibble of byte j: element j; high nibble: element j + 16

    y = d * (q - 8)       q in 0..15

Encode: the half d, of either sign, and nearest codes that minimise sum w (x - y)^2; see `search`.
"""

from __future__ import annotations

import numpy as np

from quantkit.half import float_to_half, half_to_float
from quantkit.jit import kernel
from quantkit.types import search
from quantkit.types.base import QuantType

_LO, _HI = np.float32(-8), np.float32(7)
# Either sign of d: the extreme element at or beyond code -8, or at or beyond code 7.
_GRID, _STEPS = search.grid_between((-8, 7), 0.9, 2.2, 14), search.steps_down(0.03, 2)


@kernel
def _decode(data, out):
    rows, n = out.shape
    for row in range(rows):
        block = data[row]
        half = block.view(np.uint16)  # 9 a block
        for b in range(n // 32):
            scale = half_to_float(half[9 * b])
            for j in range(16):
                byte = np.int32(block[18 * b + 2 + j])
                out[row, 32 * b + j] = scale * np.float32((byte & 15) - 8)
                out[row, 32 * b + 16 + j] = scale * np.float32((byte >> 4) - 8)


@kernel
def _encode(x, importance, out):
    rows, n = x.shape
    blocks = n // 32
    scales = np.empty(rows * blocks, np.float32)
    search.find_scales(x, importance, _GRID, _STEPS, _LO, _HI, scales)
    codes = np.empty(32, np.uint32)
    for row in range(rows):
        half = out[row].view(np.uint16)
        for b in range(blocks):
            scale = scales[row * blocks + b]
            half[9 * b] = float_to_half(scale)
            search.nearest_codes(x[row, 32 * b : 32 * b + 32], scale, _LO, _HI, codes)
            for j in range(16):
                out[row, 18 * b + 2 + j] = np.uint8(codes[j] | (codes[j + 16] << np.uint32(4)))


class Q4_0(QuantType):
    name, ggml_type, file_type = "q4_0", 2, 2
    block_size, block_bytes = 32, 18
    uses_imatrix = True
    encode_rows = staticmethod(_encode)
    decode_rows = staticmethod(_decode)
