"""Q4_1 (id 3): blocks of 32, 20 bytes.

    offset  size     field
    0       f16      d
    2       f16      m
    4       16 x u8  qs   low nibble of byte j: element j; high nibble: element j + 16

    y = d * q + m         q in 0..15; the product is rounded to float32, then the sum

Encode: the halves d and m and nearest codes that minimise sum w (x - y)^2; see `families/block32/scale_min_search.py`.
Without importance w = 1, and below effort "best" d and m come in closed form; see `families/block32/closed_form.py`.
"""

from __future__ import annotations

import numpy as np

from quantkit.codegen.jit import kernel
from quantkit.types.base import BEST, QuantType
from quantkit.types.families.block32 import closed_form, scale_min_search, scale_search
from quantkit.types.families.block32.scale_min_search import code_of
from quantkit.types.families.block32.scale_search import LANES, half_at, halves_of, inverse_of, pack_nibbles, put_half

_MAX_CODE = np.float32(15)
# The candidates, and how many of them each effort (fast, normal, best) tries.
_MARGINS, _COUNTS = scale_min_search.range_margins(-0.08, 0.12, 192), (8, 56, 192)
_STEPS = scale_min_search.refinement_steps(15, 1, 3)


@kernel
def _decode(data: np.ndarray, out: np.ndarray) -> None:
    blocks, y = data.reshape(-1, 20), out.reshape(-1, 32)
    for b in range(len(y)):
        scale = half_at(blocks[b], 0)
        minimum = half_at(blocks[b], 2)
        for j in range(16):
            byte = np.int32(blocks[b, 4 + j])
            y[b, j] = scale * np.float32(np.int32(byte & 15)) + minimum
            y[b, j + 16] = scale * np.float32(np.int32(byte >> 4)) + minimum


@kernel
def _pack(x: np.ndarray, scales: np.ndarray, minima: np.ndarray, halves: np.ndarray, out: np.ndarray) -> None:
    """Write blocks, uint8[count, 20], of x float32[count, 32]: pairs, given with their bits, and nearest codes."""
    for b in range(len(out)):
        put_half(halves[0, b], out[b], 0)
        put_half(halves[1, b], out[b], 2)
        inverse, minimum = inverse_of(scales[b]), minima[b]
        for j in range(16):
            out[b, 4 + j] = pack_nibbles(
                code_of(x[b, j], inverse, minimum, _MAX_CODE), code_of(x[b, j + 16], inverse, minimum, _MAX_CODE)
            )


@kernel
def _encode(x: np.ndarray, importance: np.ndarray, effort: int, out: np.ndarray) -> None:
    blocks, packed = x.reshape(-1, 32), out.reshape(-1, 20)
    data, state = np.empty(scale_search.DATA_SIZE, np.float32), np.empty(scale_min_search.STATE_SIZE, np.float32)
    space, scales, minima = np.empty((6, LANES), np.float32), np.empty(LANES, np.float32), np.empty(LANES, np.float32)
    halves, weights = np.empty((2, LANES), np.uint16), scale_search.relative_weights(importance)
    for first in range(0, len(blocks), LANES):
        batch = blocks[first : first + LANES]
        if len(weights) == 0 and effort != BEST:
            closed_form.find_scales_and_mins(batch, _MAX_CODE, space, scales, minima)
        else:
            scale_search.load_blocks(batch, weights, first, data, state)
            scale_min_search.find_scales_and_mins(data, state, _MARGINS[: _COUNTS[effort]], _STEPS, _MAX_CODE)
            scale_min_search.store_scales_and_mins(state, scales, minima)
        halves_of(scales, halves[0])
        halves_of(minima, halves[1])
        _pack(batch, scales, minima, halves, packed[first : first + LANES])


class Q4_1(QuantType):
    """Q4_1: blocks of 32, 20 bytes."""

    name, ggml_type, file_type = "q4_1", 3, 3
    block_size, block_bytes = 32, 20
    uses_imatrix = True
    encode_rows = staticmethod(_encode)
    decode_rows = staticmethod(_decode)
