"""Q2_K (id 10): blocks of 256 in sub-blocks of 16, 84 bytes.

    offset  size      field
    0       16 x u8   sc     low nibble: scale S of the sub-block, high nibble: its minimum M
    16      64 x u8   qs     bits 2t, 2t+1 of qs[32 p + j] are element 128 p + 32 t + j (p < 2, t < 4, j < 32)
    80      f16       d      scale of the scales
    82      f16       dmin   scale of the minima

    y = (d * S) * q - (dmin * M)        q 0 to 3

Each product and the difference are rounded to float32.

Encode: minimise sum w (x - y)^2 over a block, w the WEIGHTING below; the search is `families/kquant/scale_min_search`.
"""

from __future__ import annotations

import numpy as np

from quantkit.codegen.half import half_to_float
from quantkit.codegen.jit import kernel, subkernel
from quantkit.types.base import QuantType
from quantkit.types.families.kquant.lanes import LANES, make_weighting
from quantkit.types.families.kquant.scale_min_search import block_result, scale_min_format, search, workspace
from quantkit.types.families.superblock import put_half

BLOCK = 84

# With importance: almost the importance alone. Without: ik_llama.cpp's weight, |x|, and a little of the mean square;
# by magnitude alone zeros would not count, and no code is 0 by itself. It costs the other weights nothing.
WEIGHTING = make_weighting(given=16, mean=0.1, magnitude=1)
FORMAT = scale_min_format(subs=16, max_code=3, max_scale=15, steps=(2.4, 3.9), scales=(20, 8), minima=(17, 5))
# Effort of `search`: fast, normal, best; then the same with importance.
PLANS = np.array(
    [
        [2, 1, 2, 1, 3, 2, 1, 1, 1, 1, 0],
        [4, 1, 3, 1, 6, 4, 1, 1, 1, 1, 1],
        [8, 2, 4, 1, 12, 8, 2, 2, 4, 2, 1],
        [2, 2, 2, 1, 3, 3, 1, 1, 1, 1, 0],
        [4, 2, 3, 1, 8, 5, 1, 1, 1, 1, 1],
        [8, 2, 4, 1, 12, 8, 2, 2, 4, 2, 1],
    ]
)


@kernel
def _decode(data: np.ndarray, out: np.ndarray) -> None:
    rows, n = out.shape
    for row in range(rows):
        for b in range(n // 256):
            block = data[row, BLOCK * b : BLOCK * b + BLOCK]
            y = out[row, 256 * b : 256 * b + 256]
            d = half_to_float(np.uint16(block[80]) | np.uint16(block[81]) << np.uint16(8))
            dmin = half_to_float(np.uint16(block[82]) | np.uint16(block[83]) << np.uint16(8))
            for s in range(16):
                scale = d * np.float32(block[s] & np.uint8(15))
                minimum = dmin * np.float32(block[s] >> np.uint8(4))
                codes = block[16 + 32 * (s // 8) + 16 * (s % 2) :]
                shift = np.uint8(2 * (s // 2 % 4))
                for j in range(16):
                    q = (codes[j] >> shift) & np.uint8(3)
                    y[16 * s + j] = scale * np.float32(q) - minimum


@subkernel
def _store(codes: np.ndarray, d: np.float32, dmin: np.float32, s: np.ndarray, m: np.ndarray, out: np.ndarray) -> None:
    """Write a block."""
    for i in range(16):
        out[i] = s[i] | m[i] << np.uint8(4)
    for p in range(2):
        for j in range(32):
            q = codes[128 * p + j] | codes[128 * p + 32 + j] << np.uint8(2)
            q |= codes[128 * p + 64 + j] << np.uint8(4)
            out[16 + 32 * p + j] = q | codes[128 * p + 96 + j] << np.uint8(6)
    put_half(out, 80, d)
    put_half(out, 82, dmin)


@kernel
def _encode(x: np.ndarray, importance: np.ndarray, effort: int, out: np.ndarray) -> None:
    work = workspace()
    codes, s, m = np.empty(256, np.uint8), np.empty(16, np.uint8), np.empty(16, np.uint8)
    flat = out.reshape(-1)
    blocks = len(flat) // BLOCK
    plan = effort + 3 if importance.size else effort
    for first in range(0, blocks, LANES // 16):
        search(x, importance, PLANS[plan], first, FORMAT, WEIGHTING, work)
        for b in range(min(LANES // 16, blocks - first)):
            d, dmin = block_result(work, FORMAT, b, codes, s, m)
            _store(codes, d, dmin, s, m, flat[BLOCK * (first + b) : BLOCK * (first + b + 1)])


class Q2_K(QuantType):
    """Q2_K: blocks of 256 in sub-blocks of 16, 84 bytes."""

    name, ggml_type, file_type = "q2_K", 10, 10
    block_size, block_bytes = 256, BLOCK
    uses_imatrix = True
    encode_rows = staticmethod(_encode)
    decode_rows = staticmethod(_decode)
