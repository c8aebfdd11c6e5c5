"""IQ1_KT (id 158): rows of a float32 d and blocks of 256 in sub-blocks of 32 and groups of 8, 56 bytes.

    offset  size      field
    0       8 x u8    sh   low nibble: code of multiplier m of each sub-block; bit 4 + i: index bit 12 of its group i
    8       32 x u8   ql   index bits 0 .. 7 of each group
    40      16 x u8   qh   index bits 8 .. 11: low nibbles groups 0 .. 15, high nibbles 16 .. 31

    y = (d * m) * v        m = BOOK[code], v the generator's values from index + 4096 on

Generator and error are in `families/trellis_code.py`, the search in `types/native/trellis_search.py`.
"""

from __future__ import annotations

import numpy as np

from quantkit.codegen.jit import kernel
from quantkit.types.families.trellis_code import BOOK, CODES, OFFSET, code_value, put_row_scale, row_scale
from quantkit.types.families.trellis_type import TrellisSearch, TrellisType

BLOCK = 56


@kernel
def _decode(data: np.ndarray, out: np.ndarray) -> None:
    rows, n = out.shape
    for row in range(rows):
        d = row_scale(data[row])
        for b in range(n // 256):
            block = data[row, 4 + BLOCK * b : 4 + BLOCK * b + BLOCK]
            y = out[row, 256 * b : 256 * b + 256]
            for g in range(32):
                sub = np.uint32(block[g // 4])
                high = np.uint32(block[40 + g % 16]) >> np.uint32(4 * (g // 16)) & np.uint32(15)
                seed = np.uint32(block[8 + g]) | high << np.uint32(8)
                seed = (seed | (sub >> np.uint32(4 + g % 4) & np.uint32(1)) << np.uint32(12)) + np.uint32(OFFSET)
                scale = d * BOOK[sub & np.uint32(15)]
                for k in range(8):
                    y[8 * g + k] = scale * np.float32(code_value(seed, k))


@kernel
def _pack(
    x: np.ndarray, d: np.ndarray, numbers: np.ndarray, multipliers: np.ndarray, tables: np.ndarray, out: np.ndarray
) -> None:
    out[:] = np.uint8(0)
    for row in range(len(out)):
        put_row_scale(out[row], d[row])
        for s in range(multipliers.shape[1]):
            out[row, 4 + BLOCK * (s // 8) + s % 8] = CODES[multipliers[row, s] + 128]
        for i in range(numbers.shape[1]):
            block, g, number = out[row, 4 + BLOCK * (i // 32) :], i % 32, np.int64(numbers[row, i])
            block[8 + g] = np.uint8(number & 255)
            block[40 + g % 16] |= np.uint8((number >> 8 & 15) << (4 * (g // 16)))
            block[g // 4] |= np.uint8((number >> 12) << (4 + g % 4))


class IQ1_KT(TrellisType):
    """IQ1_KT: rows of a float32 d and blocks of 256 in sub-blocks of 32 and groups of 8, 56 bytes."""

    name, ggml_type, file_type = "iq1_kt", 158, 156
    block_bytes = BLOCK
    index_bits, clusters = 13, 256
    plans = (TrellisSearch(16, 0, 2, 6, 1), TrellisSearch(16, 6, 2, 11, 1), TrellisSearch(24, 12, 4, 16, 4))
    decode_rows = staticmethod(_decode)
    _pack = staticmethod(_pack)
