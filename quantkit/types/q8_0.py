"""Q8_0 (id 8): blocks of 32, 34 bytes.

    offset  size     field
    0       f16      d
    2       32 x i8  q

    y = d * q

Encode: see `_encode_block`.
"""

from __future__ import annotations

import numpy as np

from quantkit.half import half_to_float
from quantkit.jit import kernel
from quantkit.types.base import QuantType


@kernel
def _decode(data, out):
    rows, n = out.shape
    for row in range(rows):
        block = data[row].view(np.int8)
        half = data[row].view(np.uint16)  # 17 a block
        for b in range(n // 32):
            scale = half_to_float(half[17 * b])
            for j in range(32):
                out[row, 32 * b + j] = scale * np.float32(block[34 * b + 2 + j])


class Q8_0(QuantType):
    name, ggml_type, file_type = "q8_0", 8, 7
    block_size, block_bytes = 32, 34
    decode_rows = staticmethod(_decode)
