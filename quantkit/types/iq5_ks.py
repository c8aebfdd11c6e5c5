"""IQ5_KS (id 152): row header of 4 bytes, blocks of 256 in groups of 32, 168 bytes.

    row     f32       d
    offset  size      field
    0       8 x u8    sc   bit 0 of sc[g]: group g uses the shifted codebook; bits 1 to 7: its multiplier
    8       128 x u8  qs   per 2 groups 32 bytes: low bits of codes: low nibbles the first group, high the second
    136     32 x u8   qh   bit g of qh[j]: high bit of element j of group g

    m = (sc & 254) - 127                    odd, -127 to 127
    y = (d * m) * (K5[q] + 2 (sc & 1))      both products rounded to float32

Encode: minimise sum w (x - y)^2 (`families/rowscaled.py`) with w = q where an importance q is given, else w as
`variance_weight` and `robust_variance` below say.
"""

from __future__ import annotations

import numpy as np

from quantkit.codegen.jit import kernel
from quantkit.types.base import QuantType
from quantkit.types.families import rowscaled
from quantkit.types.families.codebooks import K5

BLOCK = 168

_VALUES = K5.values
_RULES = rowscaled.Rules(
    lowest=np.float32(-127), highest=np.float32(127), step=np.float32(2), table=rowscaled.K5_START, books=2,
    even_parity=False, span=0, half=False,
    extreme=np.float32(126), min_units=np.float32(85), max_units=np.float32(150),
    variance_weight=np.float32(0.6), robust_variance=False,
)  # fmt: skip


@kernel
def _decode(data: np.ndarray, out: np.ndarray) -> None:
    rows, n = out.shape
    for row in range(rows):
        d = data[row, :4].view(np.float32)[0]
        for b in range(n // 256):
            block = data[row, 4 + BLOCK * b : 4 + BLOCK * b + BLOCK]
            y = out[row, 256 * b : 256 * b + 256]
            for g in range(8):
                scale = d * np.float32(np.int32(block[g] & np.uint8(254)) - np.int32(127))
                first = np.int64(block[g] & np.uint8(1)) * 32
                for j in range(32):
                    low = block[8 + 32 * (g // 2) + j] >> np.uint8(4 * (g % 2)) & np.uint8(15)
                    high = block[136 + j] >> np.uint8(g) & np.uint8(1)
                    y[32 * g + j] = scale * _VALUES[first + np.int64(low) + 16 * np.int64(high)]


@kernel
def _encode(x: np.ndarray, importance: np.ndarray, effort: int, out: np.ndarray) -> None:
    rows, n = x.shape
    space, codes = rowscaled.new_space(n, _RULES, effort), np.empty(32, np.uint8)
    for row in range(rows):
        out[row] = np.uint8(0)
        rowscaled.search(x[row], importance, _RULES, effort, space)
        out[row, :4].view(np.float32)[0] = space.d[0] * space.unit[0]
        for group in range(n // 32):
            block, g = out[row, 4 + group // 8 * BLOCK :], group % 8
            block[g] = rowscaled.scale_byte(group, space)
            rowscaled.group_codes(group, space, codes)
            for j in range(32):
                block[8 + 32 * (g // 2) + j] |= (codes[j] & np.uint8(15)) << np.uint8(4 * (g % 2))
                block[136 + j] |= (codes[j] >> np.uint8(4)) << np.uint8(g)


class IQ5_KS(QuantType):
    """IQ5_KS: row header of 4 bytes, blocks of 256 in groups of 32, 168 bytes."""

    name, ggml_type, file_type = "iq5_ks", 152, 150
    block_size, block_bytes, row_meta_bytes = 256, BLOCK, 4
    uses_imatrix = True
    encode_rows = staticmethod(_encode)
    decode_rows = staticmethod(_decode)
