"""Q5_K (id 13): blocks of 256 in sub-blocks of 32, 176 bytes.

    offset  size      field
    0       f16       d      scale of the scales
    2       f16       dmin   scale of the minima
    4       12 x u8   sc     eight 6-bit scales S and minima M, packed as in Q4_K
    16      32 x u8   qh     high bit of element 32 t + j: bit t of qh[j]
    48      128 x u8  qs     low four bits, as in Q4_K

    y = (d * S) * q - (dmin * M)        q 0 to 31

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
from quantkit.types.q4_k import put_scales_and_minima, scale_and_min

BLOCK = 176

# With importance: almost the importance alone. Without: the weights of ik_llama.cpp.
WEIGHTING = make_weighting(given=16, root=1, magnitude=1)
FORMAT = scale_min_format(subs=8, max_code=31, max_scale=63, steps=(26, 33), scales=(63, 12), minima=(63, 10))
# Effort of `search`: fast, normal, best; then the same with importance.
PLANS = np.array(
    [
        [2, 1, 2, 1, 3, 2, 1, 1, 1, 1, 0],
        [4, 2, 4, 1, 6, 5, 1, 1, 1, 2, 0],
        [8, 3, 5, 1, 12, 8, 2, 2, 4, 2, 2],
        [2, 2, 2, 1, 3, 2, 1, 1, 1, 1, 0],
        [4, 2, 4, 1, 10, 6, 1, 1, 1, 2, 1],
        [8, 3, 5, 1, 12, 8, 2, 2, 4, 2, 2],
    ]
)


@kernel
def _decode(data: np.ndarray, out: np.ndarray) -> None:
    rows, n = out.shape
    for row in range(rows):
        for b in range(n // 256):
            block = data[row, BLOCK * b : BLOCK * b + BLOCK]
            y = out[row, 256 * b : 256 * b + 256]
            d = half_to_float(np.uint16(block[0]) | np.uint16(block[1]) << np.uint16(8))
            dmin = half_to_float(np.uint16(block[2]) | np.uint16(block[3]) << np.uint16(8))
            for t in range(8):
                scale_code, min_code = scale_and_min(block[4:16], t)
                scale = d * np.float32(scale_code)
                minimum = dmin * np.float32(min_code)
                high, codes = block[16:48], block[48 + 32 * (t // 2) :]
                shift = np.uint8(4 * (t % 2))
                for j in range(32):
                    bit = (high[j] >> np.uint8(t)) & np.uint8(1)
                    q = (codes[j] >> shift) & np.uint8(15) | bit << np.uint8(4)
                    y[32 * t + j] = scale * np.float32(q) - minimum


@subkernel
def _store(codes: np.ndarray, d: np.float32, dmin: np.float32, s: np.ndarray, m: np.ndarray, out: np.ndarray) -> None:
    """Write a block."""
    put_half(out, 0, d)
    put_half(out, 2, dmin)
    put_scales_and_minima(s, m, out[4:16])
    for j in range(32):
        high = np.uint8(0)
        for t in range(8):
            high |= (codes[32 * t + j] >> np.uint8(4)) << np.uint8(t)
        out[16 + j] = high
    for p in range(4):
        for j in range(32):
            low = codes[64 * p + j] & np.uint8(15)
            out[48 + 32 * p + j] = low | (codes[64 * p + 32 + j] & np.uint8(15)) << np.uint8(4)


@kernel
def _encode(x: np.ndarray, importance: np.ndarray, effort: int, out: np.ndarray) -> None:
    work = workspace()
    codes, s, m = np.empty(256, np.uint8), np.empty(8, np.uint8), np.empty(8, np.uint8)
    flat = out.reshape(-1)
    blocks = len(flat) // BLOCK
    plan = effort + 3 if importance.size else effort
    for first in range(0, blocks, LANES // 8):
        search(x, importance, PLANS[plan], first, FORMAT, WEIGHTING, work)
        for b in range(min(LANES // 8, blocks - first)):
            d, dmin = block_result(work, FORMAT, b, codes, s, m)
            _store(codes, d, dmin, s, m, flat[BLOCK * (first + b) : BLOCK * (first + b + 1)])


class Q5_K(QuantType):
    """Q5_K: blocks of 256 in sub-blocks of 32, 176 bytes."""

    name, ggml_type, file_type = "q5_K", 13, 17
    block_size, block_bytes = 256, BLOCK
    uses_imatrix = True
    encode_rows = staticmethod(_encode)
    decode_rows = staticmethod(_decode)
