"""Q4_1 (id 3): blocks of 32, 20 bytes.

    offset  size     field
    0       f16      d
    2       f16      m
    4       16 x u8  qs   low nibble of byte j: element j; high nibble: element j + 16

    y = d * q + m         q in 0..15; the product is rounded to float32, then the sum

Encode: the halves d and m and nearest codes that minimise sum w (x - y)^2; see `affine`.
"""

from __future__ import annotations

import numpy as np

from quantkit.half import float_to_half, half_to_float
from quantkit.jit import kernel
from quantkit.types import affine
from quantkit.types.base import QuantType

_TOP = np.float32(15)
_CUTS, _STEPS = affine.cuts_between(-0.05, 0.2, 6), affine.steps_down(15, 1, 3)


@kernel
def _decode(data, out):
    rows, n = out.shape
    for row in range(rows):
        block = data[row]
        half = block.view(np.uint16)  # 10 a block
        for b in range(n // 32):
            scale = half_to_float(half[10 * b])
            minimum = half_to_float(half[10 * b + 1])
            for j in range(16):
                byte = np.int32(block[20 * b + 4 + j])
                out[row, 32 * b + j] = scale * np.float32(byte & 15) + minimum
                out[row, 32 * b + 16 + j] = scale * np.float32(byte >> 4) + minimum


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
            half[10 * b] = float_to_half(scale)
            half[10 * b + 1] = float_to_half(minimum)
            affine.nearest_codes(x[row, 32 * b : 32 * b + 32], scale, minimum, _TOP, codes)
            for j in range(16):
                out[row, 20 * b + 4 + j] = np.uint8(codes[j] | (codes[j + 16] << np.uint32(4)))


class Q4_1(QuantType):
    name, ggml_type, file_type = "q4_1", 3, 3
    block_size, block_bytes = 32, 20
    uses_imatrix = True
    encode_rows = staticmethod(_encode)
    decode_rows = staticmethod(_decode)
