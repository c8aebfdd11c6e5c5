"""IQ4_KS (id 144): row header of 4 bytes, blocks of 256 in groups of 32, 136 bytes.

    row     f32       d
    offset  size      field
    0       8 x u8    sc   bit 0 of sc[g]: group g uses the shifted codebook; bits 1 to 7: its multiplier
    8       128 x u8  qs   per group 16 bytes: low nibbles elements 0 .. 15, high nibbles 16 .. 31

    m = (sc & 254) - 127                    odd, -127 to 127
    y = (d * m) * (K4[q] + 4 (sc & 1))      both products rounded to float32

Encode: minimise sum w (x - y)^2 (`families/rowscaled.py`) with w = q where an importance q is given, else w as
`variance_weight` and `robust_variance` below say.
"""

from __future__ import annotations

import numpy as np

from quantkit.codegen.jit import kernel
from quantkit.types.base import QuantType
from quantkit.types.families import rowscaled
from quantkit.types.families.codebooks import K4

BLOCK = 136

_VALUES = K4.values
_RULES = rowscaled.Rules(
    lowest=np.float32(-127), highest=np.float32(127), step=np.float32(2), table=rowscaled.K4_START, books=2,
    even_parity=False, span=0, half=False,
    extreme=np.float32(127), min_units=np.float32(75), max_units=np.float32(180),
    variance_weight=np.float32(0.35), robust_variance=False,
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
                first = np.int64(block[g] & np.uint8(1)) * 16
                for j in range(16):
                    byte = block[8 + 16 * g + j]
                    y[32 * g + j] = scale * _VALUES[first + np.int64(byte & np.uint8(15))]
                    y[32 * g + 16 + j] = scale * _VALUES[first + np.int64(byte >> np.uint8(4))]


@kernel
def _encode(x: np.ndarray, importance: np.ndarray, effort: int, out: np.ndarray) -> None:
    rows, n = x.shape
    space, codes = rowscaled.new_space(n, _RULES, effort), np.empty(32, np.uint8)
    for row in range(rows):
        rowscaled.search(x[row], importance, _RULES, effort, space)
        out[row, :4].view(np.float32)[0] = space.d[0] * space.unit[0]
        for group in range(n // 32):
            block, g = out[row, 4 + group // 8 * BLOCK :], group % 8
            block[g] = rowscaled.scale_byte(group, space)
            rowscaled.group_codes(group, space, codes)
            for j in range(16):
                block[8 + 16 * g + j] = codes[j] | codes[16 + j] << np.uint8(4)


class IQ4_KS(QuantType):
    """IQ4_KS: row header of 4 bytes, blocks of 256 in groups of 32, 136 bytes."""

    name, ggml_type, file_type = "iq4_ks", 144, 145
    block_size, block_bytes, row_meta_bytes = 256, BLOCK, 4
    uses_imatrix = True
    encode_rows = staticmethod(_encode)
    decode_rows = staticmethod(_decode)
