"""Q6_0 (id 133): blocks of 32, 26 bytes.

    offset  size     field
    0       f16      d
    2       8 x u8   qh   bits 4 * ((j % 16) div 8) + 2 * (j div 16), two of them, of byte j % 8: bits 4, 5 of element j
    10      16 x u8  qs   low nibble of byte j: element j; high nibble: element j + 16

    y = d * (q - 32)      q in 0..63

Encode: the half d, of either sign, and nearest codes that minimise sum w (x - y)^2; see `search`.
"""

from __future__ import annotations

import numpy as np

from quantkit.half import float_to_half, half_to_float
from quantkit.jit import kernel
from quantkit.types import search
from quantkit.types.base import QuantType

_LO, _HI = np.float32(-32), np.float32(31)
# Either sign of d: the extreme element at or beyond code -32, or at or beyond code 31.
_GRID, _STEPS = search.grid_between((-32, 31), 0.97, 1.5, 16), search.steps_down(0.012, 2)


@kernel
def _decode(data, out):
    rows, n = out.shape
    for row in range(rows):
        block = data[row]
        half = block.view(np.uint16)  # 13 a block
        for b in range(n // 32):
            scale = half_to_float(half[13 * b])
            for part in range(2):  # elements 8 * part + (0..7), and 16 further
                for j in range(8):
                    high = np.int32(block[26 * b + 2 + j]) >> (4 * part)
                    byte = np.int32(block[26 * b + 10 + 8 * part + j])
                    low = (byte & 15) | ((high & 3) << 4)
                    up = (byte >> 4) | ((high & 12) << 2)
                    out[row, 32 * b + 8 * part + j] = scale * np.float32(low - 32)
                    out[row, 32 * b + 8 * part + j + 16] = scale * np.float32(up - 32)


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
            half[13 * b] = float_to_half(scale)
            search.nearest_codes(x[row, 32 * b : 32 * b + 32], scale, _LO, _HI, codes)
            for j in range(16):
                out[row, 26 * b + 10 + j] = np.uint8(
                    (codes[j] & np.uint32(15)) | ((codes[j + 16] & np.uint32(15)) << np.uint32(4))
                )
            for j in range(8):
                first = (codes[j] >> np.uint32(4)) | ((codes[j + 16] >> np.uint32(4)) << np.uint32(2))
                second = (codes[j + 8] >> np.uint32(4)) | ((codes[j + 24] >> np.uint32(4)) << np.uint32(2))
                out[row, 26 * b + 2 + j] = np.uint8(first | (second << np.uint32(4)))


class Q6_0(QuantType):
    name, ggml_type, file_type = "q6_0", 133, 135
    block_size, block_bytes = 32, 26
    uses_imatrix = True
    encode_rows = staticmethod(_encode)
    decode_rows = staticmethod(_decode)
