"""Q6_K (id 14): blocks of 256 in sub-blocks of 16, 210 bytes.

    offset  size      field
    0       128 x u8  ql   low 4 bits: nibble (t // 2) of ql[64 p + 32 (t % 2) + j]
    128     64 x u8   qh   high 2 bits: bits 2t, 2t+1 of qh[32 p + j]
    192     16 x i8   sc   multiplier of the sub-block
    208     f16       d

for element 128 p + 32 t + j (p < 2, t < 4, j < 32), which lies in sub-block 8 p + 2 t + j // 16.

    y = (d * sc) * (q - 32)        q = the six bits, 0 to 63

Both products are rounded to float32.

Encode: minimise sum w (x - y)^2 over a block, w the WEIGHTING below; the search is `families/kquant/scale_search`.
"""

from __future__ import annotations

import numpy as np

from quantkit.codegen.half import half_to_float
from quantkit.codegen.jit import kernel, subkernel
from quantkit.types.base import QuantType
from quantkit.types.families.kquant.lanes import make_weighting
from quantkit.types.families.kquant.scale_search import BLOCKS, block_result, scale_format, search, workspace
from quantkit.types.families.superblock import put_half

BLOCK = 210

# As in q3_K; less of the mean is enough.
WEIGHTING = make_weighting(given=16, mean=0.6, square=1)
FORMAT = scale_format(min_code=-32, max_code=31, min_scale=-128, max_scale=127, span=28)
# Effort of `search`: fast, normal, best; then the same with importance.
PLANS = np.array(
    [
        [4, 1, 0, 4, 1, 1, 0, 0],
        [8, 2, 0, 24, 1, 2, 1, 0],
        [8, 4, 1, 48, 4, 3, 1, 2],
        [4, 3, 0, 4, 1, 1, 0, 0],
        [8, 4, 0, 24, 1, 2, 1, 0],
        [8, 8, 1, 48, 4, 3, 1, 2],
    ]
)
UNITS = np.array([[32, 2], [32, 2], [33, 1], [36, 2], [46, 2], [48, 1]], np.float32)


@kernel
def _decode(data: np.ndarray, out: np.ndarray) -> None:
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


@subkernel
def _store(codes: np.ndarray, d: np.float32, scales: np.ndarray, out: np.ndarray) -> None:
    """Write a block."""
    for p in range(2):
        for j in range(64):
            q = codes[128 * p + j] & np.uint8(15)
            out[64 * p + j] = q | (codes[128 * p + 64 + j] & np.uint8(15)) << np.uint8(4)
        for j in range(32):
            high = np.uint8(0)
            for t in range(4):
                high |= (codes[128 * p + 32 * t + j] >> np.uint8(4)) << np.uint8(2 * t)
            out[128 + 32 * p + j] = high
    for s in range(16):
        out[192 + s] = np.uint8(scales[s])
    put_half(out, 208, d)


@kernel
def _encode(x: np.ndarray, importance: np.ndarray, effort: int, out: np.ndarray) -> None:
    work = workspace()
    codes, scales = np.empty(256, np.uint8), np.empty(16, np.int8)
    flat = out.reshape(-1)
    blocks = len(flat) // BLOCK
    plan = effort + 3 if importance.size else effort
    for first in range(0, blocks, BLOCKS):
        search(x, importance, PLANS[plan], UNITS[plan], first, FORMAT, WEIGHTING, work)
        for b in range(min(BLOCKS, blocks - first)):
            d = block_result(work, b, codes, scales)
            _store(codes, d, scales, flat[BLOCK * (first + b) : BLOCK * (first + b + 1)])


class Q6_K(QuantType):
    """Q6_K: blocks of 256 in sub-blocks of 16, 210 bytes."""

    name, ggml_type, file_type = "q6_K", 14, 18
    block_size, block_bytes = 256, BLOCK
    uses_imatrix = True
    encode_rows = staticmethod(_encode)
    decode_rows = staticmethod(_decode)
