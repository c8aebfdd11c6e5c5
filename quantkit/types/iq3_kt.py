"""IQ3_KT (id 154): rows of a float32 d and blocks of 256 in sub-blocks of 32 and groups of 8, 100 bytes.

    offset  size       field
    0       4 x u8     sc   multipliers m: low nibbles sub-blocks 0 .. 3, high nibbles 4 .. 7
    4       32 x u16   ix   index of each group
    68      32 x u8    sg   bit s of sg[r]: element r of sub-block s is negative

    y = (d * m) * |v|, negated where the sign says so        v the generator's values from index + 4096 on

ik_llama.cpp's matrix products multiply by another 1.01, which files do not hold (and its row decoder does not apply).
Generator and error are in `families/trellis_code.py`, the search in `types/native/trellis_search.py`; signs are those
of x.
"""

from __future__ import annotations

import numpy as np

from quantkit.codegen.jit import kernel
from quantkit.types.families.trellis_code import OFFSET, code_value, put_row_scale, row_scale
from quantkit.types.families.trellis_type import TrellisSearch, TrellisType

BLOCK = 100


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
                scale = d * np.float32(block[s % 4] >> np.uint8(4 * (s // 4)) & np.uint8(15))
                seed = (np.uint32(block[4 + 2 * g]) | np.uint32(block[5 + 2 * g]) << np.uint32(8)) + np.uint32(OFFSET)
                signs = block[68 + 8 * (g % 4) :]
                for k in range(8):
                    value = scale * np.float32(abs(code_value(seed, k)))
                    sign = np.uint32(signs[k]) >> np.uint32(s) << np.uint32(31)
                    y[8 * g + k] = np.uint32(np.float32(value).view(np.uint32) ^ sign).view(np.float32)


@kernel
def _pack(
    x: np.ndarray, d: np.ndarray, numbers: np.ndarray, multipliers: np.ndarray, tables: np.ndarray, out: np.ndarray
) -> None:
    out[:] = np.uint8(0)
    for row in range(len(out)):
        put_row_scale(out[row], d[row])
        for s in range(multipliers.shape[1]):
            block = out[row, 4 + BLOCK * (s // 8) :]
            block[s % 4] |= np.uint8(multipliers[row, s] << (4 * (s % 8 // 4)))
            for r in range(32):
                block[68 + r] |= np.uint8((x[row, 32 * s + r] < np.float32(0)) << (s % 8))
        for i in range(numbers.shape[1]):
            start, number = 4 + BLOCK * (i // 32) + 4 + 2 * (i % 32), numbers[row, i]
            out[row, start], out[row, start + 1] = np.uint8(number), np.uint8(number >> np.uint16(8))


class IQ3_KT(TrellisType):
    """IQ3_KT: rows of a float32 d and blocks of 256 in sub-blocks of 32 and groups of 8, 100 bytes."""

    name, ggml_type, file_type = "iq3_kt", 154, 152
    block_bytes = BLOCK
    folded = has_zero = True
    steps = np.arange(1, 16, dtype=np.float32)
    plans = (TrellisSearch(16, 4, 1, 10, 1), TrellisSearch(24, 8, 2, 13, 2), TrellisSearch(32, 14, 4, 16, 6))
    decode_rows = staticmethod(_decode)
    _pack = staticmethod(_pack)
    remark = (
        "ik_llama.cpp's products multiply by another 1.01, which is not in the file. quantkit's products, encoder and "
        "`dequantize` take the bare values. Perplexity of SmolLM2, five layers of this type, eval.txt: "
        "11.94 with the bare values (KLD 0.1076), 11.99 with the factor (KLD 0.1117), of 10.60."
    )
