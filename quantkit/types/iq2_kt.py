"""IQ2_KT (id 153): rows of a float32 d and blocks of 256 in sub-blocks of 32 and groups of 8, 68 bytes.

    offset  size       field
    0       4 x u8     sc   codes of multipliers m: low nibbles sub-blocks 0 .. 3, high nibbles 4 .. 7
    4       32 x u16   ix   index of each group

    y = (d * m) * v        m = BOOK[code], v the generator's values from index + 4096 on

ik_llama.cpp's matrix products multiply by another 1.05, which files do not hold (and its row decoder does not apply).
Generator and error are in `families/trellis_code.py`, the search in `types/native/trellis_search.py`.
"""

from __future__ import annotations

import numpy as np

from quantkit.codegen.jit import kernel
from quantkit.types.families.trellis_code import BOOK, CODES, OFFSET, code_value, put_row_scale, row_scale
from quantkit.types.families.trellis_type import TrellisSearch, TrellisType

BLOCK = 68


@kernel
def _decode(data: np.ndarray, out: np.ndarray) -> None:
    rows, n = out.shape
    for row in range(rows):
        d = row_scale(data[row])
        for b in range(n // 256):
            block = data[row, 4 + BLOCK * b : 4 + BLOCK * b + BLOCK]
            y = out[row, 256 * b : 256 * b + 256]
            for g in range(32):
                s = g // 4
                scale = d * BOOK[block[s % 4] >> np.uint8(4 * (s // 4)) & np.uint8(15)]
                seed = (np.uint32(block[4 + 2 * g]) | np.uint32(block[5 + 2 * g]) << np.uint32(8)) + np.uint32(OFFSET)
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
            code = np.int64(CODES[multipliers[row, s] + 128])
            out[row, 4 + BLOCK * (s // 8) + s % 4] |= np.uint8(code << (4 * (s % 8 // 4)))
        for i in range(numbers.shape[1]):
            start, number = 4 + BLOCK * (i // 32) + 4 + 2 * (i % 32), numbers[row, i]
            out[row, start], out[row, start + 1] = np.uint8(number), np.uint8(number >> np.uint16(8))


class IQ2_KT(TrellisType):
    """IQ2_KT: rows of a float32 d and blocks of 256 in sub-blocks of 32 and groups of 8, 68 bytes."""

    name, ggml_type, file_type = "iq2_kt", 153, 151
    block_bytes = BLOCK
    plans = (TrellisSearch(16, 0, 2, 5, 1), TrellisSearch(16, 5, 2, 10, 1), TrellisSearch(24, 12, 4, 16, 3))
    decode_rows = staticmethod(_decode)
    _pack = staticmethod(_pack)
    remark = (
        "ik_llama.cpp's products multiply by another 1.05, which is not in the file. quantkit's products, encoder and "
        "`dequantize` take the bare values. Perplexity of SmolLM2, five layers of this type, eval.txt: "
        "16.49 with the bare values (KLD 0.428), 18.48 with the factor (KLD 0.542), of 10.60."
    )
