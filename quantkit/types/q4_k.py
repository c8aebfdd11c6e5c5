"""Q4_K (id 12): blocks of 256 in sub-blocks of 32, 144 bytes.

    offset  size      field
    0       f16       d      scale of the scales
    2       f16       dmin   scale of the minima
    4       12 x u8   sc     eight 6-bit scales S and minima M, packed as below
    16      128 x u8  qs     low nibbles of qs[32 p ..] are elements 64 p .., high nibbles elements 64 p + 32 ..

    j < 4    S[j] = sc[j] & 63                              M[j] = sc[j + 4] & 63
    j >= 4   S[j] = sc[j + 4] & 15 | (sc[j - 4] >> 6) << 4   M[j] = sc[j + 4] >> 4 | (sc[j] >> 6) << 4

    y = (d * S) * q - (dmin * M)        q 0 to 15

Each product and the difference are rounded to float32.
"""

from __future__ import annotations

import numpy as np

from quantkit.half import half_to_float
from quantkit.jit import kernel
from quantkit.types.base import QuantType

BLOCK = 144


@kernel(inline="always")
def _scale_and_min(sc, j):
    """S[j] and M[j] from the twelve bytes, as uint8."""
    if j < 4:
        return sc[j] & np.uint8(63), sc[j + 4] & np.uint8(63)
    scale = (sc[j + 4] & np.uint8(15)) | (sc[j - 4] >> np.uint8(6)) << np.uint8(4)
    minimum = (sc[j + 4] >> np.uint8(4)) | (sc[j] >> np.uint8(6)) << np.uint8(4)
    return scale, minimum


@kernel
def _decode(data, out):
    rows, n = out.shape
    for row in range(rows):
        for b in range(n // 256):
            block = data[row, BLOCK * b : BLOCK * b + BLOCK]
            y = out[row, 256 * b : 256 * b + 256]
            d = half_to_float(np.uint16(block[0]) | np.uint16(block[1]) << np.uint16(8))
            dmin = half_to_float(np.uint16(block[2]) | np.uint16(block[3]) << np.uint16(8))
            for j in range(8):
                scale_code, min_code = _scale_and_min(block[4:16], j)
                scale = d * np.float32(scale_code)
                minimum = dmin * np.float32(min_code)
                codes = block[16 + 32 * (j // 2) :]
                shift = np.uint8(4 * (j % 2))
                for i in range(32):
                    q = (codes[i] >> shift) & np.uint8(15)
                    y[32 * j + i] = scale * np.float32(q) - minimum


class Q4_K(QuantType):
    name, ggml_type, file_type = "q4_K", 12, 15
    block_size, block_bytes = 256, BLOCK
    uses_imatrix = True
    decode_rows = staticmethod(_decode)
