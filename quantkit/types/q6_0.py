"""Q6_0 (id 133): blocks of 32, 26 bytes.

    offset  size     field
    0       f16      d
    2       8 x u8   qh   bits k and k + 1 of byte j % 8, k = 4 (j % 16 // 8) + 2 (j // 16): bits 4 and 5 of element j
    10      16 x u8  qs   low nibble of byte j: element j; high nibble: element j + 16

    y = d * (q - 32)      q in 0..63

Encode: the half d, of either sign, and nearest codes that minimise sum w (x - y)^2; see
`families/block32/scale_search.py`. Without importance w = x^2 + 0.5 * its mean over the block.
"""

from __future__ import annotations

import numpy as np

from quantkit.codegen.jit import kernel
from quantkit.types.base import QuantType
from quantkit.types.families.block32 import scale_search
from quantkit.types.families.block32.scale_search import (
    LANES,
    code_of,
    half_at,
    halves_of,
    inverse_of,
    pack_nibbles,
    put_half,
)

_LO, _HI = np.float32(-32), np.float32(31)
# Either sign of d: the extreme element around code -32, or around code 31; see `scale_search.spread`.
# The candidates, and how many of them each effort (fast, normal, best) tries.
_GRID, _COUNTS = scale_search.scale_grid((-32, 31), 0.75, 1.2, 192), (8, 48, 192)
_STEPS = scale_search.refinement_steps(0.012, 2)
# How much of the mean of x^2 the weight has. ik_llama.cpp weighs by x^2 alone; this keeps the unweighted error low too.
_MEAN_SQUARE = np.float32(0.5)


@kernel
def _decode(data: np.ndarray, out: np.ndarray) -> None:
    blocks, y = data.reshape(-1, 26), out.reshape(-1, 32)
    for b in range(len(y)):
        scale = half_at(blocks[b], 0)
        for part in range(2):  # elements 8 * part + (0..7), and 16 further
            low, values = blocks[b, 10 + 8 * part :], y[b, 8 * part :]
            for j in range(8):
                high = np.int32(blocks[b, 2 + j]) >> (4 * part)
                byte = np.int32(low[j])
                values[j] = scale * np.float32(np.int32(((byte & 15) | ((high & 3) << 4)) - 32))
                values[j + 16] = scale * np.float32(np.int32(((byte >> 4) | ((high & 12) << 2)) - 32))


@kernel
def _pack(x: np.ndarray, scales: np.ndarray, halves: np.ndarray, out: np.ndarray) -> None:
    """Write blocks, uint8[count, 26], of x float32[count, 32]: scales, given with their bits, and nearest codes."""
    for b in range(len(out)):
        put_half(halves[b], out[b], 0)
        inverse = inverse_of(scales[b])
        for j in range(8):
            a, c = code_of(x[b, j], inverse, _LO, _HI), code_of(x[b, j + 16], inverse, _LO, _HI)
            out[b, 10 + j] = pack_nibbles(a & 15, c)
            e, g = code_of(x[b, j + 8], inverse, _LO, _HI), code_of(x[b, j + 24], inverse, _LO, _HI)
            out[b, 18 + j] = pack_nibbles(e & 15, g)
            out[b, 2 + j] = np.uint8((a >> 4) + (c >> 4) * 4 + (e >> 4) * 16 + (g >> 4) * 64)


@kernel
def _encode(x: np.ndarray, importance: np.ndarray, effort: int, out: np.ndarray) -> None:
    blocks, packed = x.reshape(-1, 32), out.reshape(-1, 26)
    data, state = np.empty(scale_search.DATA_SIZE, np.float32), np.empty(scale_search.STATE_SIZE, np.float32)
    weights = scale_search.relative_weights(importance)
    scales, halves = np.empty(LANES, np.float32), np.empty(LANES, np.uint16)
    for first in range(0, len(blocks), LANES):
        batch = blocks[first : first + LANES]
        scale_search.load_blocks(batch, weights, first, data, state)
        if len(weights) == 0:
            scale_search.weight_by_square(data, state, _MEAN_SQUARE)
        scale_search.find_scales(data, state, _GRID[: _COUNTS[effort]], _STEPS, _LO, _HI)
        scale_search.store_scales(state, scales)
        halves_of(scales, halves)
        _pack(batch, scales, halves, packed[first : first + LANES])


class Q6_0(QuantType):
    """Q6_0: blocks of 32, 26 bytes."""

    name, ggml_type, file_type = "q6_0", 133, 135
    block_size, block_bytes = 32, 26
    uses_imatrix = True
    encode_rows = staticmethod(_encode)
    decode_rows = staticmethod(_decode)
