"""IQ4_NL (id 20): blocks of 32, 18 bytes.

    offset  size     field
    0       f16      d
    2       16 x u8  qs   low nibble of byte j: element j; high nibble: element j + 16

    y = d * CODEBOOK[q]   q in 0..15

Encode: the half d, of either sign, and nearest codebook entries that minimise sum w (x - y)^2; see `search`. Without
importance w = x^2 + a part of its mean over the block.
"""

from __future__ import annotations

import numpy as np

from quantkit.codegen.jit import kernel
from quantkit.types.base import QuantType
from quantkit.types.families import search
from quantkit.types.families.codebooks import BINS, K4, bin_of
from quantkit.types.families.search import (
    CURVE,
    ERROR,
    INVERSE,
    LANES,
    SLOPE,
    half_at,
    halves_of,
    inverse_of,
    nibbles,
    put_half,
)

CODEBOOK = K4.values[:16]
_NEAREST = K4.nearest[:BINS].astype(np.uint8)
_ROUNDED = CODEBOOK[_NEAREST]
# Either sign of d: the extreme element around entry -127, or around 113; see `search.spread`.
# The candidates, and how many of them each effort tries.
_GRID, _COUNTS = search.spread((-127, 113), 0.6, 2.0, 96), (5, 36, 96)
_STEPS = search.steps_down(0.04, 2)
_MEAN_SQUARE = np.float32(0.75)  # its part: the reference weighs by x^2 alone, the plain error should not suffer


@kernel
def _decode(data, out):
    blocks, y = data.reshape(-1, 18), out.reshape(-1, 32)
    for b in range(len(y)):
        scale = half_at(blocks[b], 0)
        for j in range(16):
            byte = blocks[b, 2 + j]
            y[b, j] = scale * CODEBOOK[byte & 15]
            y[b, j + 16] = scale * CODEBOOK[byte >> 4]


@kernel
def _sums(data, state):
    """`search`'s E, D and Q of the nearest entries under each lane's SCALE."""
    search.clear_sums(state)
    for j in range(32):
        for lane in range(LANES):
            w = data[(32 + j) * LANES + lane]
            t = data[j * LANES + lane] * state[INVERSE * LANES + lane]
            q = _ROUNDED[bin_of(t)]
            r = t - q
            wr = w * r
            state[ERROR * LANES + lane] += wr * r
            state[SLOPE * LANES + lane] += wr * q
            state[CURVE * LANES + lane] += w * q * q


@kernel
def _find_scales(data, state, grid, steps):
    """`search.find_scales` with entries of the codebook."""
    search.start(state)
    for k in range(grid.size):
        search.propose(state, search.EXTREME, grid[k])
        _sums(data, state)
        search.keep_better(state)
    for k in range(steps.size):
        search.propose(state, search.BEST_SCALE, steps[k])
        _sums(data, state)
        search.keep_better(state)
    if search.find_anchors(data, state):
        for k in range(CODEBOOK.size):
            search.propose(state, search.ANCHOR, np.float32(1) / CODEBOOK[k])
            _sums(data, state)
            search.keep_better(state)


@kernel
def _code_of(x, inverse):
    return _NEAREST[bin_of(x * inverse)]


@kernel
def _pack(x, scales, halves, out):
    """Write blocks, uint8[count, 18], of x float32[count, 32]: scales, given with their bits, and nearest entries."""
    for b in range(len(out)):
        put_half(halves[b], out[b], 0)
        inverse = inverse_of(scales[b])
        for j in range(16):
            out[b, 2 + j] = nibbles(_code_of(x[b, j], inverse), _code_of(x[b, j + 16], inverse))


@kernel
def _encode(x, importance, effort, out):
    blocks, packed = x.reshape(-1, 32), out.reshape(-1, 18)
    data, state = np.empty(search.DATA_SIZE, np.float32), np.empty(search.STATE_SIZE, np.float32)
    weights = search.relative_weights(importance)
    scales, halves = np.empty(LANES, np.float32), np.empty(LANES, np.uint16)
    for first in range(0, len(blocks), LANES):
        some = blocks[first : first + LANES]
        search.load_blocks(some, weights, first, data, state)
        if len(weights) == 0:
            search.weigh_by_size(data, state, _MEAN_SQUARE)
        _find_scales(data, state, _GRID[: _COUNTS[effort]], _STEPS)
        search.store_scales(state, scales)
        halves_of(scales, halves)
        _pack(some, scales, halves, packed[first : first + LANES])


class IQ4_NL(QuantType):
    name, ggml_type, file_type = "iq4_nl", 20, 25
    block_size, block_bytes = 32, 18
    uses_imatrix = True
    encode_rows = staticmethod(_encode)
    decode_rows = staticmethod(_decode)
