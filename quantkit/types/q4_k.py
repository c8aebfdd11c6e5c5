"""Q4_K (id 12): blocks of 256 in sub-blocks of 32, 144 bytes.

    offset  size      field
    0       f16       d      scale of the scales
    2       f16       dmin   scale of the minima
    4       12 x u8   sc     eight 6-bit scales S and minima M, packed as below
    16      128 x u8  qs     low nibbles of qs[32 p ..] are elements 64 p .., high nibbles elements 64 p + 32 ..

    j < 4    S[j] = sc[j] & 63                              M[j] = sc[j + 4] & 63
    j >= 4   S[j] = sc[j + 4] & 15 | (sc[j - 4] >> 6) << 4   M[j] = sc[j + 4] >> 4 | (sc[j] >> 6) << 4

    y = (d * S) * q - (dmin * M)        q 0 to 15

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

BLOCK = 144

# With importance: almost the importance alone. Without: the weights of ik_llama.cpp.
WEIGHTING = make_weighting(given=16, root=1, magnitude=1)
FORMAT = scale_min_format(subs=8, max_code=15, max_scale=63, steps=(11.5, 17), scales=(63, 12), minima=(63, 10))
# Effort of `search`: fast, normal, best; then the same with importance.
PLANS = np.array(
    [
        [2, 1, 2, 1, 3, 2, 1, 1, 1, 1, 0],
        [4, 2, 4, 1, 8, 5, 1, 1, 1, 1, 1],
        [8, 3, 5, 1, 12, 8, 2, 2, 4, 2, 2],
        [2, 2, 2, 1, 3, 2, 1, 1, 1, 1, 0],
        [4, 2, 4, 1, 10, 6, 1, 1, 1, 2, 1],
        [8, 3, 5, 1, 12, 8, 2, 2, 4, 2, 2],
    ]
)


@kernel(inline="always")
def scale_and_min(sc: np.ndarray, j: int) -> tuple[np.uint8, np.uint8]:
    """S[j] and M[j] from the twelve bytes, as uint8."""
    if j < 4:
        return sc[j] & np.uint8(63), sc[j + 4] & np.uint8(63)
    scale = (sc[j + 4] & np.uint8(15)) | (sc[j - 4] >> np.uint8(6)) << np.uint8(4)
    minimum = (sc[j + 4] >> np.uint8(4)) | (sc[j] >> np.uint8(6)) << np.uint8(4)
    return scale, minimum


@kernel
def _decode(data: np.ndarray, out: np.ndarray) -> None:
    rows, n = out.shape
    for row in range(rows):
        for b in range(n // 256):
            block = data[row, BLOCK * b : BLOCK * b + BLOCK]
            y = out[row, 256 * b : 256 * b + 256]
            d = half_to_float(np.uint16(block[0]) | np.uint16(block[1]) << np.uint16(8))
            dmin = half_to_float(np.uint16(block[2]) | np.uint16(block[3]) << np.uint16(8))
            for j in range(8):
                scale_code, min_code = scale_and_min(block[4:16], j)
                scale = d * np.float32(scale_code)
                minimum = dmin * np.float32(min_code)
                codes = block[16 + 32 * (j // 2) :]
                shift = np.uint8(4 * (j % 2))
                for i in range(32):
                    q = (codes[i] >> shift) & np.uint8(15)
                    y[32 * j + i] = scale * np.float32(q) - minimum


@subkernel
def put_scales_and_minima(s: np.ndarray, m: np.ndarray, sc: np.ndarray) -> None:
    """Pack eight scales and minima, uint8, into twelve bytes."""
    for j in range(4):
        sc[j] = s[j] | (s[j + 4] >> np.uint8(4)) << np.uint8(6)
        sc[j + 4] = m[j] | (m[j + 4] >> np.uint8(4)) << np.uint8(6)
        sc[j + 8] = (s[j + 4] & np.uint8(15)) | (m[j + 4] & np.uint8(15)) << np.uint8(4)


@subkernel
def _store(codes: np.ndarray, d: np.float32, dmin: np.float32, s: np.ndarray, m: np.ndarray, out: np.ndarray) -> None:
    """Write a block."""
    put_half(out, 0, d)
    put_half(out, 2, dmin)
    put_scales_and_minima(s, m, out[4:16])
    for p in range(4):
        for j in range(32):
            out[16 + 32 * p + j] = codes[64 * p + j] | codes[64 * p + 32 + j] << np.uint8(4)


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


class Q4_K(QuantType):
    """Q4_K: blocks of 256 in sub-blocks of 32, 144 bytes."""

    name, ggml_type, file_type = "q4_K", 12, 15
    block_size, block_bytes = 256, BLOCK
    uses_imatrix = True
    encode_rows = staticmethod(_encode)
    decode_rows = staticmethod(_decode)
