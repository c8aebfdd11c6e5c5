"""Q5_1 (id 7): blocks of 32, 24 bytes.

    offset  size     field
    0       f16      d
    2       f16      m
    4       u32      qh   bit j: fifth bit of element j
    8       16 x u8  qs   low nibble of byte j: element j; high nibble: element j + 16

    y = d * q + m         q in 0..31; the product is rounded to float32, then the sum

Encode: the halves d and m and nearest codes that minimise sum w (x - y)^2; see `families/block32/scale_min_search.py`.
Without importance w = 1, and below effort "best" d and m come in closed form; see `families/block32/closed_form.py`.
"""

from __future__ import annotations

import numpy as np

from quantkit.codegen.half import half_to_float
from quantkit.codegen.jit import kernel
from quantkit.types.base import BEST, QuantType
from quantkit.types.families.block32 import closed_form, scale_min_search, scale_search
from quantkit.types.families.block32.scale_min_search import code_of
from quantkit.types.families.block32.scale_search import LANES, halves_of, inverse_of, pack_nibbles, put_half

_MAX_CODE = np.float32(31)
# The candidates, and how many of them each effort (fast, normal, best) tries.
_MARGINS, _COUNTS = scale_min_search.range_margins(-0.07, 0.06, 192), (8, 56, 192)
_STEPS = scale_min_search.refinement_steps(31, 1, 3)


@kernel
def _decode(data: np.ndarray, out: np.ndarray) -> None:
    rows, n = out.shape
    for row in range(rows):
        block = data[row]
        half = block.view(np.uint16)  # 12 a block
        for b in range(n // 32):
            scale = half_to_float(half[12 * b])
            minimum = half_to_float(half[12 * b + 1])
            high = np.uint32(half[12 * b + 2]) | (np.uint32(half[12 * b + 3]) << np.uint32(16))
            for j in range(16):
                byte = np.uint32(block[24 * b + 8 + j])
                low = (byte & np.uint32(15)) | (((high >> np.uint32(j)) & np.uint32(1)) << np.uint32(4))
                upper = (byte >> np.uint32(4)) | (((high >> np.uint32(j + 16)) & np.uint32(1)) << np.uint32(4))
                out[row, 32 * b + j] = scale * np.float32(np.int32(low)) + minimum
                out[row, 32 * b + 16 + j] = scale * np.float32(np.int32(upper)) + minimum


@kernel
def _pack(x: np.ndarray, scales: np.ndarray, minima: np.ndarray, halves: np.ndarray, out: np.ndarray) -> None:
    """Write blocks, uint8[count, 24], of x float32[count, 32]: pairs, given with their bits, and nearest codes."""
    for b in range(len(out)):
        put_half(halves[0, b], out[b], 0)
        put_half(halves[1, b], out[b], 2)
        inverse, minimum = inverse_of(scales[b]), minima[b]
        fifth_bits = np.uint32(0)
        for j in range(16):
            low, high = (
                code_of(x[b, j], inverse, minimum, _MAX_CODE),
                code_of(x[b, j + 16], inverse, minimum, _MAX_CODE),
            )
            out[b, 8 + j] = pack_nibbles(low & 15, high)
            fifth_bits = np.uint32(fifth_bits | np.uint32(np.uint32(low >> 4) << np.uint32(j)))
            fifth_bits = np.uint32(fifth_bits | np.uint32(np.uint32(high >> 4) << np.uint32(j + 16)))
        for j in range(4):
            out[b, 4 + j] = np.uint8(fifth_bits >> np.uint32(8 * j))


@kernel
def _encode(x: np.ndarray, importance: np.ndarray, effort: int, out: np.ndarray) -> None:
    blocks, packed = x.reshape(-1, 32), out.reshape(-1, 24)
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


class Q5_1(QuantType):
    """Q5_1: blocks of 32, 24 bytes."""

    name, ggml_type, file_type = "q5_1", 7, 9
    block_size, block_bytes = 32, 24
    uses_imatrix = True
    encode_rows = staticmethod(_encode)
    decode_rows = staticmethod(_decode)
