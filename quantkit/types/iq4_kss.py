"""IQ4_KSS (id 146): row header of 4 bytes, blocks of 256 in groups of 32, 128 bytes.

    row     f32       d
    offset  size      field
    0       64 x u16  words   group g has words[8 g] .. words[8 g + 7]

    sc = bit 0 of the group's words, of the first word in bit 0
    m = (sc & 254) - 127                    odd, -127 to 127
    u = word & 0xfffe,  v = u ^ u >> 1      nibbles of v from the lowest: codes of elements 2 k, 2 k + 16, 2 k + 1,
                                            2 k + 17 of the group, k being the word's number in it
    y = (d * m) * (K4[q] + 4 (sc & 1))      both products rounded to float32

As bit 0 of u is 0, v has an even number of ones: four codes share 15 bits.

Encode: minimise sum w (x - y)^2 by the search of `rowscaled`, with the best codes under that constraint;
`variance_weight` and `robust_variance` below shape w without importance.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from quantkit.codegen.jit import kernel
from quantkit.types.base import QuantType
from quantkit.types.families import rowscaled
from quantkit.types.families.codebooks import K4

if TYPE_CHECKING:
    from quantkit.types.refine import Moments

BLOCK = 128

_VALUES = K4.values
_RULES = rowscaled.Rules(
    lowest=np.float32(-127), highest=np.float32(127), step=np.float32(2), table=rowscaled.K4_START, books=2,
    even_parity=True, span=0, half=False,
    extreme=np.float32(127), min_units=np.float32(75), max_units=np.float32(180),
    variance_weight=np.float32(0.25), robust_variance=False,
)  # fmt: skip


@kernel
def _decode(data: np.ndarray, out: np.ndarray) -> None:
    rows, n = out.shape
    for row in range(rows):
        d = data[row, :4].view(np.float32)[0]
        for group in range(n // 32):
            words = data[row, 4 + 16 * group : 4 + 16 * group + 16]
            y = out[row, 32 * group : 32 * group + 32]
            sc = np.int32(0)
            for k in range(8):
                sc |= np.int32(words[2 * k] & np.uint8(1)) << np.int32(k)
            scale = d * np.float32((sc & np.int32(254)) - np.int32(127))
            first = (sc & np.int32(1)) * np.int32(16)
            for k in range(8):
                u = (np.int32(words[2 * k]) | np.int32(words[2 * k + 1]) << np.int32(8)) & np.int32(0xFFFE)
                v = u ^ u >> np.int32(1)
                for e in range(4):
                    q = v >> np.int32(4 * e) & np.int32(15)
                    y[2 * k + e // 2 + 16 * (e % 2)] = scale * _VALUES[first + q]


@kernel(inline="always")
def _word(codes: np.ndarray, k: int) -> np.int32:
    """The k-th word of a group of codes uint8[32], bit 0 clear."""
    v = np.int32(0)
    for e in range(4):
        v |= np.int32(codes[2 * k + e // 2 + 16 * (e % 2)]) << np.int32(4 * e)
    u = v ^ v >> np.int32(1)  # bit i of u shall be the xor of bits i to 15 of v
    u ^= u >> np.int32(2)
    u ^= u >> np.int32(4)
    return np.int32(u ^ u >> np.int32(8))


@kernel
def _encode(x: np.ndarray, importance: np.ndarray, effort: int, out: np.ndarray) -> None:
    rows, n = x.shape
    space, codes = rowscaled.new_space(n, _RULES, effort), np.empty(32, np.uint8)
    for row in range(rows):
        rowscaled.search(x[row], importance, _RULES, effort, space)
        out[row, :4].view(np.float32)[0] = space.d[0] * space.unit[0]
        for group in range(n // 32):
            words = out[row, 4 + 16 * group : 4 + 16 * group + 16]
            sc = np.int32(rowscaled.scale_byte(group, space))
            rowscaled.even_group_codes(group, space, codes)
            for k in range(8):
                u = _word(codes, k) | sc >> np.int32(k) & np.int32(1)
                words[2 * k], words[2 * k + 1] = np.uint8(u & np.int32(255)), np.uint8(u >> np.int32(8))


@kernel
def _read_codes(data: np.ndarray, codes: np.ndarray, scales: np.ndarray) -> None:
    """Fill codes uint8[rows, n] and scales float32[rows, n / 32] of rows."""
    for row in range(len(data)):
        d = data[row, :4].view(np.float32)[0]
        for group in range(codes.shape[1] // 32):
            words, code = data[row, 4 + 16 * group : 20 + 16 * group], codes[row, 32 * group : 32 * group + 32]
            sc = np.int32(0)
            for k in range(8):
                sc |= np.int32(words[2 * k] & np.uint8(1)) << np.int32(k)
                u = (np.int32(words[2 * k]) | np.int32(words[2 * k + 1]) << np.int32(8)) & np.int32(0xFFFE)
                v = u ^ u >> np.int32(1)
                for e in range(4):
                    code[2 * k + e // 2 + 16 * (e % 2)] = np.uint8(v >> np.int32(4 * e) & np.int32(15))
            scales[row, group] = d * np.float32((sc & np.int32(254)) - np.int32(127))


@kernel
def _write_codes(codes: np.ndarray, data: np.ndarray) -> None:
    """Set the codes of rows to uint8[rows, n], of which each word has an even number of ones; scales stay."""
    for row in range(len(data)):
        for group in range(codes.shape[1] // 32):
            words, code = data[row, 4 + 16 * group : 20 + 16 * group], codes[row, 32 * group : 32 * group + 32]
            for k in range(8):
                u = _word(code, k)
                words[2 * k] = np.uint8(u & np.int32(254)) | words[2 * k] & np.uint8(1)
                words[2 * k + 1] = np.uint8(u >> np.int32(8))


class IQ4_KSS(QuantType):
    name, ggml_type, file_type = "iq4_kss", 146, 148
    block_size, block_bytes, row_meta_bytes = 256, BLOCK, 4
    uses_imatrix = True
    encode_rows = staticmethod(_encode)
    decode_rows = staticmethod(_decode)
    read_codes = staticmethod(_read_codes)
    write_codes = staticmethod(_write_codes)

    @property
    def uses_second_moments(self) -> bool:
        return True

    def refine_rows(self, x: np.ndarray, data: np.ndarray, moments: Moments, effort: int) -> None:
        from quantkit.types.refine import SWEEPS, even_words  # not loaded without: it needs numba

        even_words.refine(self, x, data, moments, SWEEPS[effort])
