"""IQ4_NL (id 20): blocks of 32, 18 bytes.

    offset  size     field
    0       f16      d
    2       16 x u8  qs   low nibble of byte j: element j; high nibble: element j + 16

    y = d * CODEBOOK[q]   q in 0..15

Encode: the half d, of either sign, and nearest codebook entries that minimise sum w (x - y)^2; see
`families/block32/scale_search.py`. Without importance w = x^2 + 0.75 * its mean over the block.
"""

from __future__ import annotations

import numpy as np

from quantkit.codegen.jit import kernel
from quantkit.types.base import QuantType
from quantkit.types.families.block32 import scale_search
from quantkit.types.families.block32.scale_search import (
    CURVE,
    ERROR,
    INVERSE,
    LANES,
    SLOPE,
    half_at,
    halves_of,
    inverse_of,
    pack_nibbles,
    put_half,
)
from quantkit.types.families.codebooks import BINS, K4, bin_of

CODEBOOK = K4.values[:16]
_NEAREST = K4.nearest[:BINS].astype(np.uint8)
_ROUNDED = CODEBOOK[_NEAREST]
# Either sign of d: the extreme element around entry -127, or around 113; see `scale_search.spread`.
# The candidates, and how many of them each effort (fast, normal, best) tries.
_GRID, _COUNTS = scale_search.scale_grid((-127, 113), 0.6, 2.0, 96), (5, 36, 96)
_STEPS = scale_search.refinement_steps(0.04, 2)
# How much of the mean of x^2 the weight has. ik_llama.cpp weighs by x^2 alone; this keeps the unweighted error low too.
_MEAN_SQUARE = np.float32(0.75)


@kernel
def _decode(data: np.ndarray, out: np.ndarray) -> None:
    blocks, y = data.reshape(-1, 18), out.reshape(-1, 32)
    for b in range(len(y)):
        scale = half_at(blocks[b], 0)
        for j in range(16):
            byte = blocks[b, 2 + j]
            y[b, j] = scale * CODEBOOK[byte & 15]
            y[b, j + 16] = scale * CODEBOOK[byte >> 4]


@kernel
def _sums(data: np.ndarray, state: np.ndarray) -> None:
    """`scale_search`'s E, D and Q of the nearest entries under each lane's SCALE."""
    scale_search.reset_sums(state)
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
def _find_scales(data: np.ndarray, state: np.ndarray, grid: np.ndarray, steps: np.ndarray) -> None:
    """`scale_search.find_scales` with entries of the codebook."""
    scale_search.reset_best(state)
    for k in range(grid.size):
        scale_search.propose(state, scale_search.EXTREME, grid[k])
        _sums(data, state)
        scale_search.keep_better(state)
    for k in range(steps.size):
        scale_search.propose(state, scale_search.BEST_SCALE, steps[k])
        _sums(data, state)
        scale_search.keep_better(state)
    if scale_search.find_dominant(data, state):
        for k in range(CODEBOOK.size):
            scale_search.propose(state, scale_search.DOMINANT, np.float32(1) / CODEBOOK[k])
            _sums(data, state)
            scale_search.keep_better(state)


@kernel
def _code_of(x: np.float32, inverse: np.float32) -> np.uint8:
    result: np.uint8 = _NEAREST[bin_of(x * inverse)]
    return result


@kernel
def _pack(x: np.ndarray, scales: np.ndarray, halves: np.ndarray, out: np.ndarray) -> None:
    """Write blocks, uint8[count, 18], of x float32[count, 32]: scales, given with their bits, and nearest entries."""
    for b in range(len(out)):
        put_half(halves[b], out[b], 0)
        inverse = inverse_of(scales[b])
        for j in range(16):
            out[b, 2 + j] = pack_nibbles(_code_of(x[b, j], inverse), _code_of(x[b, j + 16], inverse))


@kernel
def _encode(x: np.ndarray, importance: np.ndarray, effort: int, out: np.ndarray) -> None:
    blocks, packed = x.reshape(-1, 32), out.reshape(-1, 18)
    data, state = np.empty(scale_search.DATA_SIZE, np.float32), np.empty(scale_search.STATE_SIZE, np.float32)
    weights = scale_search.relative_weights(importance)
    scales, halves = np.empty(LANES, np.float32), np.empty(LANES, np.uint16)
    for first in range(0, len(blocks), LANES):
        batch = blocks[first : first + LANES]
        scale_search.load_blocks(batch, weights, first, data, state)
        if len(weights) == 0:
            scale_search.weight_by_square(data, state, _MEAN_SQUARE)
        _find_scales(data, state, _GRID[: _COUNTS[effort]], _STEPS)
        scale_search.store_scales(state, scales)
        halves_of(scales, halves)
        _pack(batch, scales, halves, packed[first : first + LANES])


class IQ4_NL(QuantType):
    """IQ4_NL: blocks of 32, 18 bytes."""

    name, ggml_type, file_type = "iq4_nl", 20, 25
    block_size, block_bytes = 32, 18
    uses_imatrix = True
    encode_rows = staticmethod(_encode)
    decode_rows = staticmethod(_decode)
