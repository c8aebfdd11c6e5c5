"""TQ1_0 (id 34): ternary blocks of 256, 54 bytes. A type of llama.cpp; ik_llama.cpp does not know it.

    offset  size     field
    0       32 x u8  qs   byte j: digits of elements j, 32 + j, ... 128 + j
    32      16 x u8       byte j: digits of elements 160 + j, 176 + j, ... 224 + j
    48      4 x u8   qh   byte j: digits of elements 240 + j, 244 + j, 248 + j, 252 + j
    52      f16      d

    y = d * (t - 1)       t = 0, 1, 2

Digits t0 ... t4 of a byte are N = 81 t0 + 27 t1 + 9 t2 + 3 t3 + t4 (t4 = 0 in qh) as the fraction N / 243: the byte is
ceil(256 N / 243), and digit k comes back as (3 u) div 256 of u = (byte * 3^k) mod 256.

Encode: as TQ2_0, which holds the same values: d and nearest codes that minimise sum w (x - y)^2
(`families/ternary_blocks.py`). By second moments the codes of TQ2_0 are moved, and packed here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from quantkit.codegen.half import half_to_float
from quantkit.codegen.jit import kernel
from quantkit.types import tq2_0
from quantkit.types.base import QuantType, by_id
from quantkit.types.families import ternary_blocks

if TYPE_CHECKING:
    from quantkit.types.refine import Moments

# First byte, first element and step of the elements of each run of bytes; the last one has four digits a byte.
_BYTES, _FIRST, _STEP = np.array([0, 32, 48, 52]), np.array([0, 160, 240]), np.array([32, 16, 4])


@kernel
def unpack(block: np.ndarray, codes: np.ndarray) -> None:
    """Fill codes uint8[256] with t of a block uint8[54]."""
    for run in range(3):
        for i in range(_BYTES[run], _BYTES[run + 1]):
            u = np.uint32(block[i])
            for k in range(5 if run < 2 else 4):
                codes[_FIRST[run] + _STEP[run] * k + i - _BYTES[run]] = np.uint8(np.uint32(u * np.uint32(3)) >> 8)
                u = np.uint32(u * np.uint32(3)) & np.uint32(255)


@kernel
def _pack(codes: np.ndarray, half: np.uint16, block: np.ndarray) -> None:
    """Write codes uint8[256] and the bits of d as a block uint8[54]."""
    for run in range(3):
        for i in range(_BYTES[run], _BYTES[run + 1]):
            number = np.uint32(0)
            for k in range(5):
                digit = codes[_FIRST[run] + _STEP[run] * k + i - _BYTES[run]] if run < 2 or k < 4 else np.uint8(0)
                number = np.uint32(number * np.uint32(3)) + np.uint32(digit)
            block[i] = np.uint8((number * np.uint32(256) + np.uint32(242)) // np.uint32(243))
    block[52:54].view(np.uint16)[0] = half


@kernel
def _decode(data: np.ndarray, out: np.ndarray) -> None:
    blocks, y, codes = data.reshape(-1, 54), out.reshape(-1, 256), np.empty(256, np.uint8)
    for b in range(len(y)):
        scale = half_to_float(blocks[b, 52:].view(np.uint16)[0])
        unpack(blocks[b], codes)
        for j in range(256):
            y[b, j] = scale * np.float32(np.int32(np.int32(codes[j]) - np.int32(1)))


@kernel
def _encode(x: np.ndarray, importance: np.ndarray, effort: int, out: np.ndarray) -> None:
    rows, n = x.shape
    w, codes = ternary_blocks.block_weights(importance, n), np.empty(256, np.uint8)
    for row in range(rows):
        for b in range(n // 256):
            span = x[row, 256 * b : 256 * b + 256]
            half = ternary_blocks.find_codes(span, w[256 * b : 256 * b + 256], effort, codes)
            _pack(codes, half, out[row, 54 * b : 54 * b + 54])


@kernel
def _to_pairs_of_bits(data: np.ndarray, out: np.ndarray) -> None:
    """Rows of TQ2_0, uint8[rows, row bytes], of rows of TQ1_0."""
    blocks, packed, codes = data.reshape(-1, 54), out.reshape(-1, 66), np.empty(256, np.uint8)
    for b in range(len(blocks)):
        unpack(blocks[b], codes)
        tq2_0.pack(codes, blocks[b, 52:].view(np.uint16)[0], packed[b])


@kernel
def _from_pairs_of_bits(data: np.ndarray, out: np.ndarray) -> None:
    """Rows of TQ1_0 of rows of TQ2_0."""
    blocks, packed, codes = data.reshape(-1, 66), out.reshape(-1, 54), np.empty(256, np.uint8)
    for b in range(len(blocks)):
        tq2_0.unpack(blocks[b], codes)
        _pack(codes, blocks[b, 64:].view(np.uint16)[0], packed[b])


class TQ1_0(QuantType):
    """TQ1_0: ternary blocks of 256, 54 bytes."""

    name, ggml_type, file_type = "tq1_0", 34, 36
    block_size, block_bytes = 256, 54
    uses_imatrix = True
    encode_rows = staticmethod(_encode)
    decode_rows = staticmethod(_decode)

    @property
    def uses_second_moments(self) -> bool:
        return True

    def refine_rows(self, x: np.ndarray, data: np.ndarray, moments: Moments, effort: int) -> None:
        same = by_id(tq2_0.TQ2_0.ggml_type)
        pairs = np.empty((len(data), same.row_bytes(x.shape[1])), np.uint8)
        _to_pairs_of_bits(data, pairs)
        same.refine_rows(x, pairs, moments, effort)
        _from_pairs_of_bits(pairs, data)
