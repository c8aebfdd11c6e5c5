"""Q4_0 (id 2): blocks of 32, 18 bytes.

    offset  size     field
    0       f16      d
    2       16 x u8  qs   low nibble of byte j: element j; high nibble: element j + 16

    y = d * (q - 8)       q in 0..15

Encode: the half d, of either sign, and nearest codes that minimise sum w (x - y)^2; see
`families/block32/scale_search.py`. Without importance w = 1, and below effort "best" d is one of two in closed form;
see `families/block32/closed_form.py`.
"""

from __future__ import annotations

import numpy as np

from quantkit.codegen.jit import kernel
from quantkit.types.base import BEST, QuantType
from quantkit.types.families.block32 import closed_form, scale_search
from quantkit.types.families.block32.scale_search import (
    LANES,
    code_of,
    half_at,
    halves_of,
    inverse_of,
    pack_nibbles,
    put_half,
)

_LO, _HI = np.float32(-8), np.float32(7)
# Either sign of d: the extreme element around code -8, or around code 7; see `scale_search.spread`.
# The candidates, and how many of them each effort (fast, normal, best) tries.
_GRID, _COUNTS = scale_search.scale_grid((-8, 7), 0.85, 2.0, 64), (6, 28, 64)
_STEPS = scale_search.refinement_steps(0.03, 2)
_STARTS = np.array([1 / -8, 1 / -8.8], np.float32)


@kernel
def _decode(data: np.ndarray, out: np.ndarray) -> None:
    blocks, y = data.reshape(-1, 18), out.reshape(-1, 32)
    for b in range(len(y)):
        scale = half_at(blocks[b], 0)
        for j in range(16):
            byte = np.int32(blocks[b, 2 + j])
            y[b, j] = scale * np.float32(np.int32((byte & 15) - 8))
            y[b, j + 16] = scale * np.float32(np.int32((byte >> 4) - 8))


@kernel
def _pack(x: np.ndarray, scales: np.ndarray, halves: np.ndarray, out: np.ndarray) -> None:
    """Write blocks, uint8[count, 18], of x float32[count, 32]: scales, given with their bits, and nearest codes."""
    for b in range(len(out)):
        put_half(halves[b], out[b], 0)
        inverse = inverse_of(scales[b])
        for j in range(16):
            out[b, 2 + j] = pack_nibbles(code_of(x[b, j], inverse, _LO, _HI), code_of(x[b, j + 16], inverse, _LO, _HI))


@kernel
def _encode(x: np.ndarray, importance: np.ndarray, effort: int, out: np.ndarray) -> None:
    blocks, packed = x.reshape(-1, 32), out.reshape(-1, 18)
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


class Q4_0(QuantType):
    """Q4_0: blocks of 32, 18 bytes."""

    name, ggml_type, file_type = "q4_0", 2, 2
    block_size, block_bytes = 32, 18
    uses_imatrix = True
    encode_rows = staticmethod(_encode)
    decode_rows = staticmethod(_decode)
