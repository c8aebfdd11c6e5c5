"""Q3_K (id 11): blocks of 256 in sub-blocks of 16, 110 bytes.

    offset  size      field
    0       32 x u8   hm     high bit of the code: bit 4 p + t of hm[j]
    32      64 x u8   qs     its low bits: bits 2t, 2t+1 of qs[32 p + j]
    96      12 x u8   sc     sixteen 6-bit multipliers: low four bits of number s the nibble s // 8 of sc[s % 8],
                             high two bits the bits 2 (s // 4), + 1 of sc[8 + s % 4]
    108     f16       d

for element 128 p + 32 t + j (p < 2, t < 4, j < 32), which lies in sub-block s = 8 p + 2 t + j // 16.

    y = (d * (S - 32)) * (q - 4)        S 0 to 63, q 0 to 7

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

BLOCK = 110

# With importance: almost the importance alone; ik_llama.cpp's `given`, 2, has a larger error weighted by importance.
# Without: x^2 as in ik_llama.cpp, and enough of the mean to keep the unweighted error of heavy tails below its.
WEIGHTING = make_weighting(given=16, mean=1.5, square=1)
FORMAT = scale_format(min_code=-4, max_code=3, min_scale=-32, max_scale=31, span=8)
# Effort of `search`: fast, normal, best; then the same with importance.
PLANS = np.array(
    [
        [2, 1, 0, 1, 1, 1, 0, 0],
        [2, 3, 0, 8, 1, 1, 0, 0],
        [8, 4, 1, 32, 4, 3, 1, 2],
        [4, 2, 0, 8, 1, 1, 0, 0],
        [4, 4, 0, 16, 1, 2, 1, 0],
        [8, 4, 1, 32, 4, 3, 1, 2],
    ]
)
UNITS = np.array([[4, 0], [5, 1], [8, 0.5], [6, 1], [8, 0.75], [8, 0.5]], np.float32)


@kernel
def _decode(data: np.ndarray, out: np.ndarray) -> None:
    rows, n = out.shape
    for row in range(rows):
        for b in range(n // 256):
            block = data[row, BLOCK * b : BLOCK * b + BLOCK]
            y = out[row, 256 * b : 256 * b + 256]
            d = half_to_float(np.uint16(block[108]) | np.uint16(block[109]) << np.uint16(8))
            for s in range(16):
                low = (block[96 + s % 8] >> np.uint8(4 * (s // 8))) & np.uint8(15)
                high = (block[104 + s % 4] >> np.uint8(2 * (s // 4))) & np.uint8(3)
                scale = d * np.float32(np.int32(low | high << np.uint8(4)) - np.int32(32))
                bits, codes = block[16 * (s % 2) :], block[32 + 32 * (s // 8) + 16 * (s % 2) :]
                shift, bit = np.uint8(2 * (s // 2 % 4)), np.uint8(s // 2)
                for j in range(16):
                    q = (codes[j] >> shift) & np.uint8(3) | ((bits[j] >> bit) & np.uint8(1)) << np.uint8(2)
                    y[16 * s + j] = scale * np.float32(np.int32(q) - np.int32(4))


@subkernel
def _store(codes: np.ndarray, d: np.float32, scales: np.ndarray, out: np.ndarray) -> None:
    """Write a block."""
    for j in range(32):
        high = np.uint8(0)
        for t in range(8):
            high |= (codes[32 * t + j] >> np.uint8(2)) << np.uint8(t)
        out[j] = high
    for p in range(2):
        for j in range(32):
            low = np.uint8(0)
            for t in range(4):
                low |= (codes[128 * p + 32 * t + j] & np.uint8(3)) << np.uint8(2 * t)
            out[32 + 32 * p + j] = low
    out[96:108] = np.uint8(0)
    for s in range(16):
        multiplier = np.uint8(np.int32(scales[s]) + np.int32(32))
        out[96 + s % 8] |= (multiplier & np.uint8(15)) << np.uint8(4 * (s // 8))
        out[104 + s % 4] |= (multiplier >> np.uint8(4)) << np.uint8(2 * (s // 4))
    put_half(out, 108, d)


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


class Q3_K(QuantType):
    """Q3_K: blocks of 256 in sub-blocks of 16, 110 bytes."""

    name, ggml_type, file_type = "q3_K", 11, 12
    block_size, block_bytes = 256, BLOCK
    uses_imatrix = True
    encode_rows = staticmethod(_encode)
    decode_rows = staticmethod(_decode)
