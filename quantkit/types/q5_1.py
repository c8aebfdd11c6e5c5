"""Q5_1 (id 7): blocks of 32, 24 bytes.

    offset  size     field
    0       f16      d
    2       f16      m
    4       u32      qh   bit j: fifth bit of element j
    8       16 x u8  qs   low nibble of byte j: element j; high nibble: element j + 16

    y = d * q + m         q in 0..31; the product is rounded to float32, then the sum

Encode: the halves d and m and nearest codes that minimise sum w (x - y)^2; see `affine`.
"""

from __future__ import annotations

import numpy as np

from quantkit.half import float_to_half, half_to_float
from quantkit.jit import kernel
from quantkit.types import affine
from quantkit.types.base import QuantType

_TOP = np.float32(31)
_CUTS, _STEPS = affine.cuts_between(-0.03, 0.12, 6), affine.steps_down(31, 1, 3)


@kernel
def _decode(data, out):
    rows, n = out.shape
    for row in range(rows):
        block = data[row]
        half = block.view(np.uint16)  # 12 a block
        for b in range(n // 32):
            scale = half_to_float(half[12 * b])
            minimum = half_to_float(half[12 * b + 1])
            high = np.uint32(half[12 * b + 2]) | (np.uint32(half[12 * b + 3]) << np.uint32(16))
            for j in range(16):
                byte = np.uint32(block[24 * b + 8 + j])
                low = (byte & np.uint32(15)) | (((high >> np.uint32(j)) & np.uint32(1)) << np.uint32(4))
                up = (byte >> np.uint32(4)) | (((high >> np.uint32(j + 16)) & np.uint32(1)) << np.uint32(4))
                out[row, 32 * b + j] = scale * np.float32(np.int32(low)) + minimum
                out[row, 32 * b + 16 + j] = scale * np.float32(np.int32(up)) + minimum


@kernel
def _encode(x, importance, out):
    rows, n = x.shape
    blocks = n // 32
    scales, minima = np.empty(rows * blocks, np.float32), np.empty(rows * blocks, np.float32)
    affine.find_pairs(x, importance, _CUTS, _STEPS, _TOP, scales, minima)
    codes = np.empty(32, np.uint32)
    for row in range(rows):
        half = out[row].view(np.uint16)
        for b in range(blocks):
            scale, minimum = scales[row * blocks + b], minima[row * blocks + b]
            affine.nearest_codes(x[row, 32 * b : 32 * b + 32], scale, minimum, _TOP, codes)
            high = np.uint32(0)
            for j in range(32):
                high |= (codes[j] >> np.uint32(4)) << np.uint32(j)
            half[12 * b] = float_to_half(scale)
            half[12 * b + 1] = float_to_half(minimum)
            half[12 * b + 2] = np.uint16(high & np.uint32(0xFFFF))
            half[12 * b + 3] = np.uint16(high >> np.uint32(16))
            for j in range(16):
                low = codes[j] & np.uint32(15)
                out[row, 24 * b + 8 + j] = np.uint8(low | ((codes[j + 16] & np.uint32(15)) << np.uint32(4)))


class Q5_1(QuantType):
    name, ggml_type, file_type = "q5_1", 7, 9
    block_size, block_bytes = 32, 24
    uses_imatrix = True
    encode_rows = staticmethod(_encode)
    decode_rows = staticmethod(_decode)
