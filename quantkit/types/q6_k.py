"""Q6_K (id 14): blocks of 256 in sub-blocks of 16, 210 bytes.

    offset  size      field
    0       128 x u8  ql   low 4 bits: nibble (t // 2) of ql[64 p + 32 (t % 2) + j]
    128     64 x u8   qh   high 2 bits: bits 2t, 2t+1 of qh[32 p + j]
    192     16 x i8   sc   multiplier of the sub-block
    208     f16       d

for element 128 p + 32 t + j (p < 2, t < 4, j < 32), which lies in sub-block 8 p + 2 t + j // 16.

    y = (d * sc) * (q - 32)        q = the six bits, 0 to 63

Both products are rounded to float32.
"""

from __future__ import annotations

import numpy as np

from quantkit.half import half_to_float
from quantkit.jit import kernel
from quantkit.types.base import QuantType

BLOCK = 210


@kernel
def _decode(data, out):
    rows, n = out.shape
    for row in range(rows):
        for b in range(n // 256):
            block = data[row, BLOCK * b : BLOCK * b + BLOCK]
            y = out[row, 256 * b : 256 * b + 256]
            d = half_to_float(np.uint16(block[208]) | np.uint16(block[209]) << np.uint16(8))
            for s in range(16):
                p, t, half = s // 8, (s // 2) % 4, s % 2
                scale = d * np.float32(np.int8(block[192 + s]))
                low = block[64 * p + 32 * (t % 2) + 16 * half :]
                high = block[128 + 32 * p + 16 * half :]
                for j in range(16):
                    q = ((low[j] >> np.uint8(4 * (t // 2))) & np.uint8(15)) | (
                        ((high[j] >> np.uint8(2 * t)) & np.uint8(3)) << np.uint8(4)
                    )
                    y[16 * s + j] = scale * np.float32(np.int32(q) - np.int32(32))


class Q6_K(QuantType):
    name, ggml_type, file_type = "q6_K", 14, 18
    block_size, block_bytes = 256, BLOCK
    uses_imatrix = True
    decode_rows = staticmethod(_decode)
