"""Q8_0 (id 8): blocks of 32, 34 bytes.

    offset  size     field
    0       f16      d
    2       32 x i8  q    -127..127 (-128 decodes, but kernels in the field negate codes: it is never written)

    y = d * q

Encode: the half d and nearest codes that minimise sum w (x - y)^2; see `search`. Eight bits leave little to find, so
the grid is short.
"""

from __future__ import annotations

import numpy as np

from quantkit.half import float_to_half, half_to_float
from quantkit.jit import kernel
from quantkit.types import search
from quantkit.types.base import QuantType

_LO, _HI = np.float32(-127), np.float32(127)
_GRID, _STEPS = search.grid_between((127,), 0.984, 1.004, 5), search.steps_down(0.001, 0)


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
            half[17 * b] = float_to_half(scale)
            search.nearest_codes(x[row, 32 * b : 32 * b + 32], scale, _LO, _HI, codes)
            for j in range(32):  # codes count from -127; modulo 256 this is two's complement
                out[row, 34 * b + 2 + j] = np.uint8(codes[j] - np.uint32(127))


class Q8_0(QuantType):
    name, ggml_type, file_type = "q8_0", 8, 7
    block_size, block_bytes = 32, 34
    uses_imatrix = True
    encode_rows = staticmethod(_encode)
    decode_rows = staticmethod(_decode)
