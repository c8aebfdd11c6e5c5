"""IQ4_K (id 139): blocks of 256 in sub-blocks of 16, 144 bytes.

    offset  size      field
    0       f16       d
    2       u16       x    bit s: sub-block s uses the shifted codebook
    4       4 x u8    sh   bits 2 (s % 4), + 1 of sh[s // 4]: high bits of multiplier s
    8       8 x u8    sl   nibble s % 2 of sl[s // 2]: low bits of multiplier s
    16      128 x u8  qs   per 32 elements 16 bytes: low nibbles elements 0 .. 15, high nibbles 16 .. 31

    m = sl + 16 sh - 32                     -32 to 31
    y = (d * m) * (K[q] + 4 x)              K = CODEBOOK

Both products are rounded to float32; the code value is an integer.
"""

from __future__ import annotations

import numpy as np

from quantkit.half import half_to_float
from quantkit.jit import kernel
from quantkit.types.base import QuantType

BLOCK = 144
SHIFT = 4
CODEBOOK = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)

_VALUES = np.concatenate([CODEBOOK, CODEBOOK + SHIFT]).astype(np.float32)  # both codebooks, 16 values each


@kernel
def _decode(data, out):
    rows, n = out.shape
    for row in range(rows):
        for b in range(n // 256):
            block = data[row, BLOCK * b : BLOCK * b + BLOCK]
            y = out[row, 256 * b : 256 * b + 256]
            d = half_to_float(np.uint16(block[0]) | np.uint16(block[1]) << np.uint16(8))
            shifts = np.uint32(block[2]) | np.uint32(block[3]) << np.uint32(8)
            for s in range(16):
                low = (block[8 + s // 2] >> np.uint8(4 * (s % 2))) & np.uint8(15)
                high = (block[4 + s // 4] >> np.uint8(2 * (s % 4))) & np.uint8(3)
                scale = d * np.float32(np.int32(low) + np.int32(high) * np.int32(16) - np.int32(32))
                first = np.int64((shifts >> np.uint32(s)) & np.uint32(1)) * 16
                codes = block[16 + 16 * (s // 2) :]
                shift = np.uint8(4 * (s % 2))
                for j in range(16):
                    q = (codes[j] >> shift) & np.uint8(15)
                    y[16 * s + j] = scale * _VALUES[first + np.int64(q)]


class IQ4_K(QuantType):
    name, ggml_type, file_type = "iq4_k", 139, 140
    block_size, block_bytes = 256, BLOCK
    uses_imatrix = True
    decode_rows = staticmethod(_decode)
