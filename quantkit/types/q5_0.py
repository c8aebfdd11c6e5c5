"""Q5_0 (id 6): blocks of 32, 22 bytes.

    offset  size     field
    0       f16      d
    2       u32      qh   bit j: fifth bit of element j
    6       16 x u8  qs   low nibble of byte j: element j; high nibble: element j + 16

    y = d * (q - 16)      q in 0..31

Encode: the half d, of either sign, and nearest codes that minimise sum w (x - y)^2; see
`families/block32/scale_search.py`. Without importance w = 1, and below effort "best" d is one of two in closed form;
see `families/block32/closed_form.py`.
"""

from __future__ import annotations

import numpy as np

from quantkit.codegen.half import half_to_float
from quantkit.codegen.jit import kernel
from quantkit.types.base import BEST, QuantType
from quantkit.types.families.block32 import closed_form, scale_search
from quantkit.types.families.block32.scale_search import LANES, code_of, halves_of, inverse_of, pack_nibbles, put_half

_LO, _HI = np.float32(-16), np.float32(15)
# Either sign of d: the extreme element around code -16, or around code 15; see `scale_search.spread`.
# The candidates, and how many of them each effort (fast, normal, best) tries.
_GRID, _COUNTS = scale_search.scale_grid((-16, 15), 0.8, 1.4, 96), (6, 32, 96)
_STEPS = scale_search.refinement_steps(0.02, 2)
_STARTS = np.array([1 / -16, 1 / 15], np.float32)


@kernel
def _decode(data: np.ndarray, out: np.ndarray) -> None:
    rows, n = out.shape
    for row in range(rows):
        block = data[row]
        half = block.view(np.uint16)  # 11 a block
        for b in range(n // 32):
            scale = half_to_float(half[11 * b])
            high = np.uint32(half[11 * b + 1]) | (np.uint32(half[11 * b + 2]) << np.uint32(16))
            for j in range(16):
                byte = np.uint32(block[22 * b + 6 + j])
                low = (byte & np.uint32(15)) | (((high >> np.uint32(j)) & np.uint32(1)) << np.uint32(4))
                upper = (byte >> np.uint32(4)) | (((high >> np.uint32(j + 16)) & np.uint32(1)) << np.uint32(4))
                out[row, 32 * b + j] = scale * np.float32(np.int32(low) - 16)
                out[row, 32 * b + 16 + j] = scale * np.float32(np.int32(upper) - 16)


@kernel
def _pack(x: np.ndarray, scales: np.ndarray, halves: np.ndarray, out: np.ndarray) -> None:
    """Write blocks, uint8[count, 22], of x float32[count, 32]: scales, given with their bits, and nearest codes."""
    for b in range(len(out)):
        put_half(halves[b], out[b], 0)
        inverse = inverse_of(scales[b])
        fifth_bits = np.uint32(0)
        for j in range(16):
            low, high = code_of(x[b, j], inverse, _LO, _HI), code_of(x[b, j + 16], inverse, _LO, _HI)
            out[b, 6 + j] = pack_nibbles(low & 15, high)
            fifth_bits = np.uint32(fifth_bits | np.uint32(np.uint32(low >> 4) << np.uint32(j)))
            fifth_bits = np.uint32(fifth_bits | np.uint32(np.uint32(high >> 4) << np.uint32(j + 16)))
        for j in range(4):
            out[b, 2 + j] = np.uint8(fifth_bits >> np.uint32(8 * j))


@kernel
def _encode(x: np.ndarray, importance: np.ndarray, effort: int, out: np.ndarray) -> None:
    blocks, packed = x.reshape(-1, 32), out.reshape(-1, 22)
    data, state = np.empty(scale_search.DATA_SIZE, np.float32), np.empty(scale_search.STATE_SIZE, np.float32)
    space, scales = np.empty((6, LANES), np.float32), np.empty(LANES, np.float32)
    halves, weights = np.empty(LANES, np.uint16), scale_search.relative_weights(importance)
    for first in range(0, len(blocks), LANES):
        batch = blocks[first : first + LANES]
        if len(weights) == 0 and effort != BEST:
            closed_form.find_scales(batch, _STARTS, _LO, _HI, space, scales)
        else:
            scale_search.load_blocks(batch, weights, first, data, state)
            scale_search.find_scales(data, state, _GRID[: _COUNTS[effort]], _STEPS, _LO, _HI)
            scale_search.store_scales(state, scales)
        halves_of(scales, halves)
        _pack(batch, scales, halves, packed[first : first + LANES])


class Q5_0(QuantType):
    """Q5_0: blocks of 32, 22 bytes."""

    name, ggml_type, file_type = "q5_0", 6, 8
    block_size, block_bytes = 32, 22
    uses_imatrix = True
    encode_rows = staticmethod(_encode)
    decode_rows = staticmethod(_decode)
