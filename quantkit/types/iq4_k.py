"""IQ4_K (id 139): blocks of 256 in sub-blocks of 16, 144 bytes.

    offset  size      field
    0       f16       d
    2       u16       x    bit s: sub-block s uses the shifted codebook
    4       4 x u8    sh   bits 2 (s % 4), + 1 of sh[s // 4]: high bits of multiplier s
    8       8 x u8    sl   nibble s % 2 of sl[s // 2]: low bits of multiplier s
    16      128 x u8  qs   per 32 elements 16 bytes: low nibbles elements 0 .. 15, high nibbles 16 .. 31

    m = sl + 16 sh - 32                     -32 to 31
    y = (d * m) * (K4[q] + 4 x)

Both products are rounded to float32; the code value is an integer.

Encode: minimise sum w (x - y)^2 (`families/nonlinear.py`) with w = q where an importance q is given, else w = v / 2 +
x^2, v being the mean of x^2 over the block: large elements count more, yet the plain error is low too.
"""

from __future__ import annotations

import numpy as np

from quantkit.codegen.half import half_to_float
from quantkit.codegen.jit import kernel
from quantkit.types.base import QuantType
from quantkit.types.families.codebooks import K4
from quantkit.types.families.nonlinear import NonlinearFormat, book_start, load_sub_blocks, new_plan, new_space, search
from quantkit.types.families.superblock import put_flags, put_half, put_multipliers, put_nibbles

BLOCK = 144
FORMAT = NonlinearFormat(
    book=book_start(K4), min_multiplier=1, step=1, max_multiplier=31, extreme=32,
    min_units=np.float32(88), max_units=np.float32(185), min_ratio=np.float32(0.8), max_ratio=np.float32(1.35),
    places_per_octave=32, tries=2, zero_below=np.float32(2.0**-25), variance_weight=np.float32(0.5),
)  # fmt: skip
_VALUES = K4.values


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
                low = (block[8 + s // 2] >> np.uint8(4 * (s % 2))) & np.uint8(15)
                high = (block[4 + s // 4] >> np.uint8(2 * (s % 4))) & np.uint8(3)
                scale = d * np.float32(np.int32(low) + np.int32(high) * np.int32(16) - np.int32(32))
                book = np.uint32(16) * ((flags >> np.uint32(s)) & np.uint32(1))
                codes, shift = block[16 + 16 * (s // 2) :], np.uint8(4 * (s % 2))
                for j in range(16):
                    y[16 * s + j] = scale * _VALUES[book + np.uint32((codes[j] >> shift) & np.uint8(15))]


@kernel
def _store(d: np.float32, multipliers: np.ndarray, flags: np.ndarray, codes: np.ndarray, out: np.ndarray) -> None:
    """Write a block."""
    out[:] = np.uint8(0)
    put_half(out, 0, d)
    put_flags(flags, out[2:4])
    put_multipliers(multipliers, out[4:8], out[8:16])
    put_nibbles(codes, 16, out[16:144])


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


class IQ4_K(QuantType):
    """IQ4_K: blocks of 256 in sub-blocks of 16, 144 bytes."""

    name, ggml_type, file_type = "iq4_k", 139, 140
    block_size, block_bytes = 256, BLOCK
    uses_imatrix = True
    encode_rows = staticmethod(_encode)
    decode_rows = staticmethod(_decode)
