"""Q4_0 (id 2): blocks of 32, 18 bytes.

    offset  size     field
    0       f16      d
    2       16 x u8  qs   low nibble of byte j: element j; high nibble: element j + 16

    y = d * (q - 8)       q in 0..15

Encode: the half d, of either sign, and nearest codes that minimise sum w (x - y)^2; see `search`.
Without importance w = 1, and below effort "best" d is one of two in closed form; see `refit`.
"""

from __future__ import annotations

import numpy as np

from quantkit.codegen.jit import kernel
from quantkit.types.base import BEST, QuantType
from quantkit.types.families import refit, search
from quantkit.types.families.search import LANES, code_of, half_at, halves_of, inverse_of, nibbles, put_half

_LO, _HI = np.float32(-8), np.float32(7)
# Either sign of d: the extreme element around code -8, or around code 7; see `search.spread`.
# The candidates, and how many of them each effort tries.
_GRID, _COUNTS = search.spread((-8, 7), 0.85, 2.0, 64), (6, 28, 64)
_STEPS = search.steps_down(0.03, 2)
_STARTS = np.array([1 / -8, 1 / -8.8], np.float32)


@kernel
def _decode(data, out):
    blocks, y = data.reshape(-1, 18), out.reshape(-1, 32)
    for b in range(len(y)):
        scale = half_at(blocks[b], 0)
        for j in range(16):
            byte = np.int32(blocks[b, 2 + j])
            y[b, j] = scale * np.float32(np.int32((byte & 15) - 8))
            y[b, j + 16] = scale * np.float32(np.int32((byte >> 4) - 8))


@kernel
def _pack(x, scales, halves, out):
    """Write blocks, uint8[count, 18], of x float32[count, 32]: scales, given with their bits, and nearest codes."""
    for b in range(len(out)):
        put_half(halves[b], out[b], 0)
        inverse = inverse_of(scales[b])
        for j in range(16):
            out[b, 2 + j] = nibbles(code_of(x[b, j], inverse, _LO, _HI), code_of(x[b, j + 16], inverse, _LO, _HI))


@kernel
def _encode(x, importance, effort, out):
    blocks, packed = x.reshape(-1, 32), out.reshape(-1, 18)
    data, state = np.empty(search.DATA_SIZE, np.float32), np.empty(search.STATE_SIZE, np.float32)
    space, scales = np.empty((6, LANES), np.float32), np.empty(LANES, np.float32)
    halves, weights = np.empty(LANES, np.uint16), search.relative_weights(importance)
    for first in range(0, len(blocks), LANES):
        some = blocks[first : first + LANES]
        if len(weights) == 0 and effort != BEST:
            refit.find_scales(some, _STARTS, _LO, _HI, space, scales)
        else:
            search.load_blocks(some, weights, first, data, state)
            search.find_scales(data, state, _GRID[: _COUNTS[effort]], _STEPS, _LO, _HI)
            search.store_scales(state, scales)
        halves_of(scales, halves)
        _pack(some, scales, halves, packed[first : first + LANES])


class Q4_0(QuantType):
    name, ggml_type, file_type = "q4_0", 2, 2
    block_size, block_bytes = 32, 18
    uses_imatrix = True
    encode_rows = staticmethod(_encode)
    decode_rows = staticmethod(_decode)
