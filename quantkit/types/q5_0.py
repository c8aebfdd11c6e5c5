"""Q5_0 (id 6): blocks of 32, 22 bytes.

    offset  size     field
    0       f16      d
    2       u32      qh   bit j: fifth bit of element j
    6       16 x u8  qs   low nibble of byte j: element j; high nibble: element j + 16

    y = d * (q - 16)      q in 0..31

Encode: the half d, of either sign, and nearest codes that minimise sum w (x - y)^2; see `search`.
"""

from __future__ import annotations

import numpy as np

from quantkit.half import float_to_half, half_to_float
from quantkit.jit import kernel
from quantkit.types import search
from quantkit.types.base import QuantType

_LO, _HI = np.float32(-16), np.float32(15)
# Either sign of d: the extreme element at or beyond code -16, or at or beyond code 15.
_GRID, _STEPS = search.grid_between((-16, 15), 0.95, 1.8, 14), search.steps_down(0.02, 2)


@kernel
def _decode(data, out):
    rows, n = out.shape
    for row in range(rows):
        block = data[row]
        half = block.view(np.uint16)  # 11 a block
        for b in range(n // 32):
            scale = half_to_float(half[11 * b])
            high = np.uint32(half[11 * b + 1]) | (np.uint32(half[11 * b + 2]) << np.uint32(16))
            for j in range(16):
                byte = np.uint32(block[22 * b + 6 + j])
                low = (byte & np.uint32(15)) | (((high >> np.uint32(j)) & np.uint32(1)) << np.uint32(4))
                up = (byte >> np.uint32(4)) | (((high >> np.uint32(j + 16)) & np.uint32(1)) << np.uint32(4))
                out[row, 32 * b + j] = scale * np.float32(np.int32(low) - 16)
                out[row, 32 * b + 16 + j] = scale * np.float32(np.int32(up) - 16)


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
            search.nearest_codes(x[row, 32 * b : 32 * b + 32], scale, _LO, _HI, codes)
            high = np.uint32(0)
            for j in range(32):
                high |= (codes[j] >> np.uint32(4)) << np.uint32(j)
            half[11 * b] = float_to_half(scale)
            half[11 * b + 1] = np.uint16(high & np.uint32(0xFFFF))
            half[11 * b + 2] = np.uint16(high >> np.uint32(16))
            for j in range(16):
                out[row, 22 * b + 6 + j] = np.uint8(
                    (codes[j] & np.uint32(15)) | ((codes[j + 16] & np.uint32(15)) << np.uint32(4))
                )


class Q5_0(QuantType):
    name, ggml_type, file_type = "q5_0", 6, 8
    block_size, block_bytes = 32, 22
    uses_imatrix = True
    encode_rows = staticmethod(_encode)
    decode_rows = staticmethod(_decode)
