"""IQ2_K (id 137): blocks of 256 in sub-blocks of 16, 76 bytes.

    offset  size      field
    0       f16       d
    2       u16       x    bit s: sub-block s uses the shifted codebook
    4       8 x u8    sc   nibble s % 2 of sc[s // 2]: multiplier of sub-block s, + 8
    12      64 x u8   qs   codes of 128 elements in 32 bytes: bits 2 (j // 32 % 4), + 1 of qs[32 (j // 128) + j % 32]

    m = nibble - 8                          -8 to 7
    y = (d * m) * (K2[q] + 5 x)

Both products are rounded to float32; the code value is an integer.

Encode: minimise sum w (x - y)^2 (`families/nonlinear.py`) with w = q where an importance q is given, else w = v / 2 +
x^2, v being the mean of x^2 over the block.
"""

from __future__ import annotations

import numpy as np

from quantkit.codegen.half import half_to_float
from quantkit.codegen.jit import kernel
from quantkit.types.base import QuantType
from quantkit.types.families.codebooks import K2
from quantkit.types.families.nonlinear import NonlinearFormat, book_start, load_sub_blocks, new_plan, new_space, search
from quantkit.types.families.superblock import put_flags, put_half, put_pairs

BLOCK = 76
FORMAT = NonlinearFormat(
    book=book_start(K2), min_multiplier=1, step=1, max_multiplier=7, extreme=8,
    min_units=np.float32(18), max_units=np.float32(55), min_ratio=np.float32(0.65), max_ratio=np.float32(1.29),
    places_per_octave=32, tries=2, zero_below=np.float32(2.0**-20), variance_weight=np.float32(0.5),
)  # fmt: skip
_VALUES = K2.values


@kernel
def _decode(data: np.ndarray, out: np.ndarray) -> None:
    rows, n = out.shape
    for row in range(rows):
        for b in range(n // 256):
            block = data[row, BLOCK * b : BLOCK * b + BLOCK]
            y = out[row, 256 * b : 256 * b + 256]
            d = half_to_float(np.uint16(block[0]) | np.uint16(block[1]) << np.uint16(8))
            flags = np.uint32(block[2]) | np.uint32(block[3]) << np.uint32(8)
            for s in range(16):
                m = (block[4 + s // 2] >> np.uint8(4 * (s % 2))) & np.uint8(15)
                scale = d * np.float32(np.int32(m) - np.int32(8))
                book = np.uint32(4) * ((flags >> np.uint32(s)) & np.uint32(1))
                low, shift = block[12 + 32 * (s // 8) + 16 * (s % 2) :], np.uint8(2 * (s // 2 % 4))
                for j in range(16):
                    y[16 * s + j] = scale * _VALUES[book + np.uint32((low[j] >> shift) & np.uint8(3))]


@kernel
def _store(d: np.float32, multipliers: np.ndarray, flags: np.ndarray, codes: np.ndarray, out: np.ndarray) -> None:
    """Write a block."""
    out[:] = np.uint8(0)
    put_half(out, 0, d)
    put_flags(flags, out[2:4])
    for s in range(16):
        out[4 + s // 2] |= np.uint8((multipliers[s] + 8) << (4 * (s % 2)))
    put_pairs(codes, 0, out[12:76])


@kernel
def _encode(x: np.ndarray, importance: np.ndarray, effort: int, out: np.ndarray) -> None:
    rows, n = x.shape
    plan, space = new_plan(FORMAT, effort), new_space()
    multipliers, flags, codes = np.empty(16, np.int32), np.empty(16, np.int32), np.empty(256, np.uint8)
    for row in range(rows):
        for b in range(n // 256):
            block = out[row, BLOCK * b : BLOCK * b + BLOCK]
            unit = load_sub_blocks(x[row, 256 * b : 256 * b + 256], importance, 256 * b, FORMAT, space)
            if unit == np.float32(0):
                block[:] = np.uint8(0)
                continue
            d = search(FORMAT, plan, unit, space, multipliers, flags, codes)
            _store(d, multipliers, flags, codes, block)


class IQ2_K(QuantType):
    """IQ2_K: blocks of 256 in sub-blocks of 16, 76 bytes."""

    name, ggml_type, file_type = "iq2_k", 137, 138
    block_size, block_bytes = 256, BLOCK
    uses_imatrix = True
    encode_rows = staticmethod(_encode)
    decode_rows = staticmethod(_decode)
