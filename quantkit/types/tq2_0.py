"""TQ2_0 (id 35): ternary blocks of 256, 66 bytes. A type of llama.cpp; ik_llama.cpp does not know it.

    offset  size     field
    0       64 x u8  qs   bits 2 k and 2 k + 1 of byte 32 g + j: t of element 128 g + 32 k + j
    64      f16      d

    y = d * (t - 1)       t = 0, 1, 2 (3 decodes to 2 d and is never written)

Encode: d and nearest codes that minimise sum w (x - y)^2 (`families/ternary_blocks.py`). llama.cpp's encoder takes the
largest magnitude as d, which only suits weights that are ternary already.
"""

from __future__ import annotations

import numpy as np

from quantkit.codegen.half import half_to_float
from quantkit.codegen.jit import kernel
from quantkit.types.base import QuantType
from quantkit.types.families import ternary_blocks


@kernel
def _decode(data: np.ndarray, out: np.ndarray) -> None:
    blocks, y = data.reshape(-1, 66), out.reshape(-1, 256)
    for b in range(len(y)):
        scale = half_to_float(blocks[b, 64:].view(np.uint16)[0])
        for g in range(2):
            for k in range(4):
                for j in range(32):
                    t = np.int32(np.int32(blocks[b, 32 * g + j]) >> np.int32(2 * k)) & np.int32(3)
                    y[b, 128 * g + 32 * k + j] = scale * np.float32(np.int32(t - np.int32(1)))


@kernel
def pack(codes: np.ndarray, half: np.uint16, block: np.ndarray) -> None:
    """Write codes uint8[256] and the bits of d as a block uint8[66]."""
    for g in range(2):
        for j in range(32):
            t = codes[128 * g + j :]
            block[32 * g + j] = np.uint8(t[0] | t[32] << 2 | t[64] << 4 | t[96] << 6)
    block[64:66].view(np.uint16)[0] = half


@kernel
def unpack(block: np.ndarray, codes: np.ndarray) -> None:
    """Fill codes uint8[256] from a block uint8[66]."""
    for j in range(256):
        codes[j] = block[j // 128 * 32 + j % 32] >> np.uint8(j % 128 // 32 * 2) & np.uint8(3)


@kernel
def _encode(x: np.ndarray, importance: np.ndarray, effort: int, out: np.ndarray) -> None:
    rows, n = x.shape
    w, codes = ternary_blocks.block_weights(importance, n), np.empty(256, np.uint8)
    for row in range(rows):
        for b in range(n // 256):
            span = x[row, 256 * b : 256 * b + 256]
            half = ternary_blocks.find_codes(span, w[256 * b : 256 * b + 256], effort, codes)
            pack(codes, half, out[row, 66 * b : 66 * b + 66])


class TQ2_0(QuantType):
    """TQ2_0: ternary blocks of 256, 66 bytes."""

    name, ggml_type, file_type = "tq2_0", 35, 37
    block_size, block_bytes = 256, 66
    uses_imatrix, unwritten_code = True, 3
    encode_rows = staticmethod(_encode)
    decode_rows = staticmethod(_decode)
