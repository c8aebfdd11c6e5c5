"""IQ5_K (id 140): blocks of 256 in sub-blocks of 16, 176 bytes.

    offset  size      field
    0       f16       d
    2       u16       x    bit s: sub-block s uses the shifted codebook
    4       4 x u8    sh   bits 2 (s % 4), + 1 of sh[s // 4]: high bits of multiplier s
    8       8 x u8    sl   nibble s % 2 of sl[s // 2]: low bits of multiplier s
    16      128 x u8  qs   low 4 bits of codes, per 64 elements 32 bytes: low nibbles elements 0 .. 31, high 32 .. 63
    144     32 x u8   qh   high bit of codes: bit j // 32 of qh[j % 32]

    m = sl + 16 sh - 32                     -32 to 31
    y = (d * m) * (K5[q] + 2 x)

Both products are rounded to float32; the code value is an integer.

Encode: minimise sum w (x - y)^2 (`families/nonlinear.py`) with w = q where an importance q is given, else w = v + x^2,
v being the mean of x^2 over the block.
"""

from __future__ import annotations

import numpy as np

from quantkit.codegen.half import half_to_float
from quantkit.codegen.jit import kernel
from quantkit.types.base import QuantType
from quantkit.types.families.codebooks import K5
from quantkit.types.families.nonlinear import NonlinearFormat, book_start, load_sub_blocks, new_plan, new_space, search
from quantkit.types.families.superblock import put_bits, put_flags, put_half, put_multipliers, put_nibbles

BLOCK = 176
FORMAT = NonlinearFormat(
    book=book_start(K5), min_multiplier=1, step=1, max_multiplier=31, extreme=32,
    min_units=np.float32(100), max_units=np.float32(165), min_ratio=np.float32(0.8), max_ratio=np.float32(1.35),
    places_per_octave=64, tries=2, zero_below=np.float32(2.0**-25), variance_weight=np.float32(1),
)  # fmt: skip
_VALUES = K5.values


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
                book = np.uint32(32) * ((flags >> np.uint32(s)) & np.uint32(1))
                nibbles, shift = block[16 + 32 * (s // 4) + 16 * (s % 2) :], np.uint8(4 * (s // 2 % 2))
                bits, group = block[144 + 16 * (s % 2) :], np.uint8(s // 2)
                for j in range(16):
                    code = (nibbles[j] >> shift) & np.uint8(15) | ((bits[j] >> group) & np.uint8(1)) << np.uint8(4)
                    y[16 * s + j] = scale * _VALUES[book + np.uint32(code)]


@kernel
def _store(d: np.float32, multipliers: np.ndarray, flags: np.ndarray, codes: np.ndarray, out: np.ndarray) -> None:
    """Write a block."""
    out[:] = np.uint8(0)
    put_half(out, 0, d)
    put_flags(flags, out[2:4])
    put_multipliers(multipliers, out[4:8], out[8:16])
    put_nibbles(codes, 32, out[16:144])
    put_bits(codes, 4, out[144:176])


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


class IQ5_K(QuantType):
    """IQ5_K: blocks of 256 in sub-blocks of 16, 176 bytes."""

    name, ggml_type, file_type = "iq5_k", 140, 141
    block_size, block_bytes = 256, BLOCK
    uses_imatrix = True
    encode_rows = staticmethod(_encode)
    decode_rows = staticmethod(_decode)
