"""IQ4_XS (id 23): blocks of 256 in groups of 32, 136 bytes.

    offset  size       field
    0       f16        d
    2       2 x u8     sh   bits 2 (g % 4), + 1 of sh[g // 4]: high bits of the multiplier of group g
    4       4 x u8     sl   nibble g % 2 of sl[g // 2]: its low bits
    8       128 x u8   qs   per group 16 bytes: low nibbles elements 0 .. 15, high nibbles 16 .. 31

    m = sl + 16 sh - 32      -32 to 31
    y = (d * m) * K4[q]      both products rounded to float32; the codebook is never shifted

Encode: minimise sum w (x - y)^2 (`families/rowscaled.py`) with w = q where an importance q is given, else w as
`variance_weight` and `robust_variance` below say.
"""

from __future__ import annotations

import numpy as np

from quantkit.codegen.half import half_to_float
from quantkit.codegen.jit import kernel
from quantkit.types.base import QuantType
from quantkit.types.families import rowscaled
from quantkit.types.families.codebooks import K4
from quantkit.types.families.superblock import put_half

BLOCK = 136

_VALUES = K4.values
_RULES = rowscaled.Rules(
    lowest=np.float32(-32), highest=np.float32(31), step=np.float32(1), table=rowscaled.K4_START, books=1,
    even_parity=False, span=8, half=True,
    extreme=np.float32(127), min_units=np.float32(75), max_units=np.float32(180),
    variance_weight=np.float32(0.9), robust_variance=False,
)  # fmt: skip


@kernel
def _decode(data: np.ndarray, out: np.ndarray) -> None:
    rows, n = out.shape
    for row in range(rows):
        for b in range(n // 256):
            block = data[row, BLOCK * b : BLOCK * b + BLOCK]
            y = out[row, 256 * b : 256 * b + 256]
            d = half_to_float(np.uint16(block[0]) | np.uint16(block[1]) << np.uint16(8))
            for g in range(8):
                low = block[4 + g // 2] >> np.uint8(4 * (g % 2)) & np.uint8(15)
                high = block[2 + g // 4] >> np.uint8(2 * (g % 4)) & np.uint8(3)
                scale = d * np.float32(np.int32(low) + np.int32(16) * np.int32(high) - np.int32(32))
                for j in range(16):
                    byte = block[8 + 16 * g + j]
                    y[32 * g + j] = scale * _VALUES[byte & np.uint8(15)]
                    y[32 * g + 16 + j] = scale * _VALUES[byte >> np.uint8(4)]


@kernel
def _encode(x: np.ndarray, importance: np.ndarray, effort: int, out: np.ndarray) -> None:
    rows, n = x.shape
    space, codes = rowscaled.new_space(n, _RULES, effort), np.empty(32, np.uint8)
    for row in range(rows):
        rowscaled.search(x[row], importance, _RULES, effort, space)
        for b in range(n // 256):
            block = out[row, BLOCK * b : BLOCK * b + BLOCK]
            block[:] = np.uint8(0)
            put_half(block, 0, space.d[b] * space.unit[b])
            for g in range(8):
                m = np.uint8(np.int32(space.multiplier[1, 8 * b + g]) + np.int32(32))
                block[2 + g // 4] |= (m >> np.uint8(4)) << np.uint8(2 * (g % 4))
                block[4 + g // 2] |= (m & np.uint8(15)) << np.uint8(4 * (g % 2))
                rowscaled.group_codes(8 * b + g, space, codes)
                for j in range(16):
                    block[8 + 16 * g + j] = codes[j] | codes[16 + j] << np.uint8(4)


class IQ4_XS(QuantType):
    """IQ4_XS: blocks of 256 in groups of 32, 136 bytes."""

    name, ggml_type, file_type = "iq4_xs", 23, 30
    block_size, block_bytes = 256, BLOCK
    uses_imatrix = True
    encode_rows = staticmethod(_encode)
    decode_rows = staticmethod(_decode)
