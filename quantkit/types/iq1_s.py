"""IQ1_S (id 19): blocks of 256 in sub-blocks of 32, 50 bytes.

    offset  size      field
    0       f16       d
    2       32 x u8   qs   low 8 bits of the grid point of each group of 8
    34      8 x u16   qh   per sub-block: bits 3 k .. + 2 the high bits of the point of group k, bits 12 .. 14 the
                           multiplier's number s, bit 15 a negative delta

    y = (d * (2 s + 1)) * (g + delta)       delta = 1/8 or -1/8

Encode: minimise sum w (x - y)^2 with w = q, the importance; search in `families/iq1.py`. Without importance this
type is refused, as by ik_llama.cpp.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np

from quantkit.codegen.half import half_to_float
from quantkit.codegen.jit import kernel
from quantkit.types.base import QuantType
from quantkit.types.families.iq1 import DELTA, LEVELS, NUMBER, new_space, search_span, set_weights
from quantkit.types.families.super_scale import ODD
from quantkit.types.families.superblock import load_block, put_half

if TYPE_CHECKING:
    from quantkit.types.refine.vector_codes import VectorCodes

BLOCK = 50


@kernel
def decode_sub_block(d: np.float32, qs: np.ndarray, step: int, high: np.uint32, y: np.ndarray) -> None:
    """Decode 32 values: every `step`-th byte of qs has the low bits of a group, `high` is its entry of qh."""
    scale = d * np.float32(np.uint32(2) * ((high >> np.uint32(12)) & np.uint32(7)) + np.uint32(1))
    delta = -DELTA if high >> np.uint32(15) else DELTA
    for g in range(4):
        point = np.int64(qs[step * g]) | np.int64((high >> np.uint32(3 * g)) & np.uint32(7)) << 8
        for i in range(8):
            y[8 * g + i] = scale * (LEVELS[point, i] + delta)


@kernel
def encode_sub_block(
    codes: np.ndarray, negative: np.bool_, multiplier: np.float32, qs: np.ndarray, step: int, qh: np.ndarray
) -> None:
    """The inverse of `decode_sub_block`: writes qs and the two bytes qh."""
    high = np.uint32(multiplier) >> np.uint32(1) << np.uint32(12) | np.uint32(negative) << np.uint32(15)
    for g in range(4):
        point = np.uint32(NUMBER[codes[g]])
        qs[step * g] = np.uint8(point)
        high |= point >> np.uint32(8) << np.uint32(3 * g)
    qh[0], qh[1] = np.uint8(high), np.uint8(high >> np.uint32(8))


@kernel
def _decode(data: np.ndarray, out: np.ndarray) -> None:
    rows, n = out.shape
    for row in range(rows):
        for b in range(n // 256):
            block = data[row, BLOCK * b : BLOCK * b + BLOCK]
            d = half_to_float(np.uint16(block[0]) | np.uint16(block[1]) << np.uint16(8))
            for s in range(8):
                high = np.uint32(block[34 + 2 * s]) | np.uint32(block[35 + 2 * s]) << np.uint32(8)
                start = 256 * b + 32 * s
                decode_sub_block(d, block[2 + 4 * s :], 1, high, out[row, start : start + 32])


@kernel
def _encode(x: np.ndarray, importance: np.ndarray, effort: int, out: np.ndarray) -> None:
    rows, n = x.shape
    xs, w = np.empty(256, np.float32), np.empty(256, np.float32)
    codes, negatives = np.empty((2, 32), np.uint32), np.empty((2, 32), np.bool_)
    multipliers, space = np.empty((3, 8), np.float32), new_space(256, 4)
    for row in range(rows):
        for b in range(n // 256):
            block = out[row, BLOCK * b : BLOCK * b + BLOCK]
            unit, mean = load_block(x[row, 256 * b : 256 * b + 256], xs, np.float32(2.0**-25))
            if unit == np.float32(0):
                block[:] = np.uint8(0)
                continue
            set_weights(xs, mean, importance, 256 * b, w)
            d = search_span(xs, w, unit, 4, ODD, effort, codes, negatives, multipliers, space)
            put_half(block, 0, d * unit)
            for s in range(8):
                encode_sub_block(
                    codes[0, 4 * s :],
                    negatives[0, 4 * s],
                    multipliers[0, s],
                    block[2 + 4 * s :],
                    1,
                    block[34 + 2 * s :],
                )


_G = np.arange(32)[:, None]
POINT_BITS = np.concatenate(  # of each group
    [8 * (2 + _G) + np.arange(8), 8 * (34 + 2 * (_G // 4)) + 3 * (_G % 4) + np.arange(3)], axis=1
)
EIGHTHS = np.stack([8 * LEVELS + 1, 8 * LEVELS - 1]).astype(np.int8)  # g + delta of either sign, times 8


class IQ1_S(QuantType):
    """IQ1_S: blocks of 256 in sub-blocks of 32, 50 bytes."""

    name, ggml_type, file_type = "iq1_s", 19, 24
    block_size, block_bytes = 256, BLOCK
    requires_imatrix = uses_imatrix = True
    encode_rows = staticmethod(_encode)
    decode_rows = staticmethod(_decode)

    @functools.cached_property
    def vector_codes(self) -> VectorCodes:
        from quantkit.types.refine.vector_codes import make_codes

        return make_codes(0, BLOCK, EIGHTHS, POINT_BITS, None, 8 * (34 + 2 * np.arange(8)) + 15)
