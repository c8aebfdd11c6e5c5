"""IQ2_KS (id 145): row header of 2 bytes, blocks of 256 in groups of 32, 70 bytes.

    row     f16      d
    offset  size     field
    0       u8       x    bit g: group g uses the shifted codebook
    1       u8       mh   bit g: high bit of the multiplier of group g
    2       4 x u8   ml   nibble g % 2 of ml[g // 2]: low bits of the multiplier of group g
    6       64 x u8  qs   per 4 groups 32 bytes: bits 2 (g % 4), + 1 of byte j are the code of element j of group g

    m = ml + 16 mh - 16           -16 to 15
    y = (d * m) * (K2[q] + 5 x)   both products rounded to float32

Encode: minimise sum w (x - y)^2 (`families/rowscaled.py`) with w = q where an importance q is given, else w as
`variance_weight` and `robust_variance` below say.
"""

from __future__ import annotations

import numpy as np

from quantkit.codegen.half import half_to_float
from quantkit.codegen.jit import kernel
from quantkit.types.base import QuantType
from quantkit.types.families import rowscaled
from quantkit.types.families.codebooks import K2
from quantkit.types.families.superblock import put_half

BLOCK = 70

_VALUES = K2.values
_RULES = rowscaled.Rules(
    lowest=np.float32(-16), highest=np.float32(15), step=np.float32(1), table=rowscaled.K2_START, books=2,
    even_parity=False, span=0, half=True,
    extreme=np.float32(31), min_units=np.float32(14), max_units=np.float32(70),
    variance_weight=np.float32(0.75), robust_variance=False,
)  # fmt: skip


@kernel
def _decode(data: np.ndarray, out: np.ndarray) -> None:
    rows, n = out.shape
    for row in range(rows):
        d = half_to_float(np.uint16(data[row, 0]) | np.uint16(data[row, 1]) << np.uint16(8))
        for b in range(n // 256):
            block = data[row, 2 + BLOCK * b : 2 + BLOCK * b + BLOCK]
            y = out[row, 256 * b : 256 * b + 256]
            for g in range(8):
                low = block[2 + g // 2] >> np.uint8(4 * (g % 2)) & np.uint8(15)
                high = block[1] >> np.uint8(g) & np.uint8(1)
                scale = d * np.float32(np.int32(low) + np.int32(16) * np.int32(high) - np.int32(16))
                first = np.int64(block[0] >> np.uint8(g) & np.uint8(1)) * 4
                for j in range(32):
                    q = block[6 + 32 * (g // 4) + j] >> np.uint8(2 * (g % 4)) & np.uint8(3)
                    y[32 * g + j] = scale * _VALUES[first + np.int64(q)]


@kernel
def _encode(x: np.ndarray, importance: np.ndarray, effort: int, out: np.ndarray) -> None:
    rows, n = x.shape
    space, codes = rowscaled.new_space(n, _RULES, effort), np.empty(32, np.uint8)
    for row in range(rows):
        out[row] = np.uint8(0)
        rowscaled.search(x[row], importance, _RULES, effort, space)
        put_half(out[row], 0, space.d[0] * space.unit[0])
        for group in range(n // 32):
            block, g = out[row, 2 + group // 8 * BLOCK :], group % 8
            m = np.uint8(np.int32(space.multiplier[1, group]) + np.int32(16))
            block[0] |= np.uint8(space.book[1, group] != np.float32(rowscaled.K2_START)) << np.uint8(g)
            block[1] |= (m >> np.uint8(4)) << np.uint8(g)
            block[2 + g // 2] |= (m & np.uint8(15)) << np.uint8(4 * (g % 2))
            rowscaled.group_codes(group, space, codes)
            for j in range(32):
                block[6 + 32 * (g // 4) + j] |= codes[j] << np.uint8(2 * (g % 4))


class IQ2_KS(QuantType):
    """IQ2_KS: row header of 2 bytes, blocks of 256 in groups of 32, 70 bytes."""

    name, ggml_type, file_type = "iq2_ks", 145, 147
    block_size, block_bytes, row_meta_bytes = 256, BLOCK, 2
    uses_imatrix = True
    encode_rows = staticmethod(_encode)
    decode_rows = staticmethod(_decode)
