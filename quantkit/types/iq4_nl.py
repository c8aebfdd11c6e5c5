"""IQ4_NL (id 20): blocks of 32, 18 bytes.

    offset  size     field
    0       f16      d
    2       16 x u8  qs   low nibble of byte j: element j; high nibble: element j + 16

    y = d * CODEBOOK[q]   q in 0..15

Encode: the half d, of either sign, and nearest codebook entries that minimise sum w (x - y)^2; see `search`.
"""

from __future__ import annotations

import numpy as np

from quantkit.half import float_to_half, half_to_float
from quantkit.jit import kernel
from quantkit.types import search
from quantkit.types.base import QuantType
from quantkit.types.search import CURVE, ERROR, INVERSE, LANES, SCALE, SLOPE

CODEBOOK = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
_MIDPOINTS = (CODEBOOK[1:] + CODEBOOK[:-1]) / np.float32(2)
_GAPS = np.diff(CODEBOOK)
_ZERO, _ONE = np.float32(0), np.float32(1)
# Either sign of d: the extreme element at or beyond entry -127, or at or beyond 113.
_GRID, _STEPS = search.grid_between((-127, 113), 0.7, 2.0, 13), search.steps_down(0.04, 2)


@kernel
def _decode(data, out):
    rows, n = out.shape
    for row in range(rows):
        block = data[row]
        half = block.view(np.uint16)  # 9 a block
        for b in range(n // 32):
            scale = half_to_float(half[9 * b])
            for j in range(16):
                byte = block[18 * b + 2 + j]
                out[row, 32 * b + j] = scale * CODEBOOK[byte & 15]
                out[row, 32 * b + 16 + j] = scale * CODEBOOK[byte >> 4]


@kernel
def _sums(data, state):
    """`search`'s E, D and Q of the nearest entries under each lane's SCALE."""
    search.clear_sums(state)
    for j in range(32):
        for lane in range(LANES):
            x = data[j * LANES + lane]
            w = data[(32 + j) * LANES + lane]
            t = x * state[INVERSE * LANES + lane]
            q = CODEBOOK[0]
            for k in range(15):
                q += _GAPS[k] if t > _MIDPOINTS[k] else _ZERO
            r = x - state[SCALE * LANES + lane] * q
            wr = w * r
            state[ERROR * LANES + lane] += wr * r
            state[SLOPE * LANES + lane] += wr * q
            state[CURVE * LANES + lane] += w * q * q


@kernel
def _find_scales(x, importance, grid, steps, scales):
    data = np.empty(search.DATA_SIZE, np.float32)
    state = np.empty(search.STATE_SIZE, np.float32)
    for first in range(0, scales.size, LANES):
        search.load_blocks(x, importance, first, data, state)
        search.start(state)
        for k in range(grid.size):
            search.propose(state, search.EXTREME, grid[k])
            _sums(data, state)
            search.keep_better(state)
        if importance.size and search.find_anchors(data, state):
            for k in range(CODEBOOK.size):
                search.propose(state, search.ANCHOR, _ONE / CODEBOOK[k])
                _sums(data, state)
                search.keep_better(state)
        for k in range(steps.size):
            search.propose(state, search.BEST_SCALE, steps[k])
            _sums(data, state)
            search.keep_better(state)
        search.store_scales(state, first, scales)


@kernel
def _encode(x, importance, out):
    rows, n = x.shape
    blocks = n // 32
    scales = np.empty(rows * blocks, np.float32)
    _find_scales(x, importance, _GRID, _STEPS, scales)
    codes = np.empty(32, np.uint32)
    for row in range(rows):
        half = out[row].view(np.uint16)
        for b in range(blocks):
            scale = scales[row * blocks + b]
            half[9 * b] = float_to_half(scale)
            inverse = _ONE / scale if scale != _ZERO else _ZERO
            for j in range(32):
                t = x[row, 32 * b + j] * inverse
                code = np.uint32(0)
                for k in range(15):
                    code += np.uint32(t > _MIDPOINTS[k])
                codes[j] = code
            for j in range(16):
                out[row, 18 * b + 2 + j] = np.uint8(codes[j] | (codes[j + 16] << np.uint32(4)))


class IQ4_NL(QuantType):
    name, ggml_type, file_type = "iq4_nl", 20, 25
    block_size, block_bytes = 32, 18
    uses_imatrix = True
    encode_rows = staticmethod(_encode)
    decode_rows = staticmethod(_decode)
