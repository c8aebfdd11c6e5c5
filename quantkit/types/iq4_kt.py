"""IQ4_KT (id 155): rows of a float32 d and blocks of 256 in sub-blocks of 32 and groups of 4, 128 bytes.

    offset  size      field
    0       8 x u32   h    of each sub-block: bit 0 which table; bits 1 .. 7 multiplier m + 64; bits 8 + 3 i .. 10 + 3 i
                           index bits 12 .. 14 of its group i
    32      64 x u8   ql   index bits 0 .. 7 of each group
    96      32 x u8   qh   index bits 8 .. 11: low nibbles groups 0 .. 31, high nibbles 32 .. 63

    y = (d * m) * v        v the generator's values from index + 4096 + 32768 table on

Generator and error are in `families/trellis_code.py`, the search in `types/native/trellis_search.py`.
"""

from __future__ import annotations

import numpy as np

from quantkit.codegen.jit import kernel
from quantkit.types.families.trellis_code import OFFSET, code_value, put_row_scale, row_scale
from quantkit.types.families.trellis_type import TrellisSearch, TrellisType

BLOCK = 128


@kernel
def _decode(data: np.ndarray, out: np.ndarray) -> None:
    rows, n = out.shape
    for row in range(rows):
        d = row_scale(data[row])
        for b in range(n // 256):
            block = data[row, 4 + BLOCK * b : 4 + BLOCK * b + BLOCK]
            y = out[row, 256 * b : 256 * b + 256]
            for s in range(8):
                h = np.uint32(0)
                for i in range(4):
                    h |= np.uint32(block[4 * s + i]) << np.uint32(8 * i)
                scale = d * np.float32(np.int32(h >> np.uint32(1) & np.uint32(127)) - np.int32(64))
                offset = np.uint32(OFFSET) + ((h & np.uint32(1)) << np.uint32(15))
                for i in range(8):
                    g = 8 * s + i
                    high = np.uint32(block[96 + g % 32]) >> np.uint32(4 * (g // 32)) & np.uint32(15)
                    high_bits = h >> np.uint32(8 + 3 * i) & np.uint32(7)
                    seed = (np.uint32(block[32 + g]) | high << np.uint32(8) | high_bits << np.uint32(12)) + offset
                    for k in range(4):
                        y[4 * g + k] = scale * np.float32(code_value(seed, k))


@kernel
def _pack(
    x: np.ndarray, d: np.ndarray, numbers: np.ndarray, multipliers: np.ndarray, tables: np.ndarray, out: np.ndarray
) -> None:
    out[:] = np.uint8(0)
    for row in range(len(out)):
        put_row_scale(out[row], d[row])
        for s in range(multipliers.shape[1]):
            block = out[row, 4 + BLOCK * (s // 8) :]
            h = np.int64(tables[row, s]) | (np.int64(multipliers[row, s]) + 64) << 1
            for i in range(8):
                g, number = 8 * (s % 8) + i, np.int64(numbers[row, 8 * s + i])
                block[32 + g] = np.uint8(number & 255)
                block[96 + g % 32] |= np.uint8((number >> 8 & 15) << (4 * (g // 32)))
                h |= (number >> 12) << (8 + 3 * i)
            for i in range(4):
                block[4 * (s % 8) + i] = np.uint8(h >> (8 * i) & 255)


class IQ4_KT(TrellisType):
    """IQ4_KT: rows of a float32 d and blocks of 256 in sub-blocks of 32 and groups of 4, 128 bytes."""

    name, ggml_type, file_type = "iq4_kt", 155, 153
    block_bytes = BLOCK
    group, index_bits = 4, 15
    offsets = (OFFSET, OFFSET + (1 << 15))
    symmetric = has_zero = True
    largest = (90, 84)
    steps = np.arange(1, 64, dtype=np.float32)
    plans = (TrellisSearch(24, 6, 1, 5, 1, 1), TrellisSearch(24, 6, 2, 7, 2), TrellisSearch(48, 10, 6, 14, 4))
    decode_rows = staticmethod(_decode)
    _pack = staticmethod(_pack)
