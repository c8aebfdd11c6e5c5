"""MXFP4 (id 39): blocks of 32, 17 bytes.

    offset  size     field
    0       u8       e
    1       16 x u8  qs   low nibble of byte j: element j; high nibble: element j + 16

    y = 2^(e - 128) * E2M1[q]         q in 0..15; E2M1 doubled, so that its entries are integers

e = 0 and e = 1 give subnormal scales; 255 is a scale as all others. Codes 0 and 8 both are +0.

Encode: the exponent and nearest codes that minimise sum w (x - y)^2, w the importance of the column (1 without). All
exponents that bring the largest element near the largest entry, or clip it, are tried. Blocks are loaded, weighted and
searched in batches of LANES by `families/block32/scale_search.py`. No exponent is so large that an entry becomes Inf.
"""

from __future__ import annotations

import numpy as np

from quantkit.codegen.jit import kernel
from quantkit.types.base import QuantType
from quantkit.types.families.block32 import scale_search
from quantkit.types.families.block32.scale_search import (
    BEST,
    ERROR,
    EXTREME,
    INVERSE,
    LANES,
    SCALE,
    UNIT,
    inverse_of,
    pack_nibbles,
)
from quantkit.types.families.e2m1 import E2M1, code_of, nearest_float

_MAX_E = np.int32(252)  # 6 * 2^125 is the largest finite value

# Candidates are e0 + the first few of these, as many as effort allows; under e0 the largest element lies in [4, 8).
# Without importance the first three hold the best; elements of little importance may be clipped further.
_OFFSETS, _COUNTS = np.array([0, 1, -1, -2, 2, -3], np.int32), (2, 4, 6)

# Rows of `state`, as int32, in place of rows of `scale_search` that this search does not need.
_E, _BEST_E = scale_search.SLOPE, scale_search.BEST_SCALE

_ZERO = np.float32(0)


@kernel
def _decode(data: np.ndarray, out: np.ndarray) -> None:
    rows, n = out.shape
    for row in range(rows):
        blocks, y = data[row].reshape(-1, 17), out[row].reshape(-1, 32)
        for b in range(n // 32):
            e = np.uint32(blocks[b, 0])
            bits = np.uint32((e - np.uint32(1)) << np.uint32(23)) if e > 1 else np.uint32(np.uint32(0x200000) << e)
            scale = np.uint32(bits).view(np.float32)
            for j in range(16):
                byte = blocks[b, 1 + j]
                y[b, j] = scale * E2M1[byte & 15]
                y[b, j + 16] = scale * E2M1[byte >> 4]


@kernel(inline="always")
def _exponent(v: np.float32) -> np.int32:
    """The exponent field of a float32: 127 for 1, 0 for 0."""
    return np.int32(np.uint32(np.float32(v).view(np.uint32) << np.uint32(1)) >> np.uint32(24))


@kernel
def _propose(state: np.ndarray, codes: np.ndarray, offset: np.int32) -> None:
    """The candidate e0 + offset of each lane: its e in `codes`, SCALE = 2^(e - 127) in units of UNIT, INVERSE."""
    for lane in range(LANES):
        exponent, unit = _exponent(state[EXTREME * LANES + lane]), _exponent(state[UNIT * LANES + lane])
        e = min(max(exponent + unit - np.int32(129) + offset, np.int32(0)), _MAX_E)
        codes[_E * LANES + lane] = e
        state[SCALE * LANES + lane] = np.uint32(np.int32(e - unit + np.int32(127)) << np.int32(23)).view(np.float32)
        state[INVERSE * LANES + lane] = np.float32(1) / state[SCALE * LANES + lane]
        state[ERROR * LANES + lane] = _ZERO


@kernel
def _sums(data: np.ndarray, state: np.ndarray) -> None:
    """sum w (x / SCALE - nearest entry)^2 of each lane."""
    for j in range(32):
        for lane in range(LANES):
            w = data[(32 + j) * LANES + lane]
            t = data[j * LANES + lane] * state[INVERSE * LANES + lane]
            r = t - nearest_float(t)
            state[ERROR * LANES + lane] += w * r * r


@kernel
def _keep_better(state: np.ndarray, codes: np.ndarray) -> None:
    """Keep the exponent of what beats BEST; errors are in units of EXTREME squared."""
    for lane in range(LANES):
        size = state[SCALE * LANES + lane] * inverse_of(state[EXTREME * LANES + lane])
        error = state[ERROR * LANES + lane] * (size * size)
        better = error < state[BEST * LANES + lane]
        state[BEST * LANES + lane] = error if better else state[BEST * LANES + lane]
        codes[_BEST_E * LANES + lane] = codes[_E * LANES + lane] if better else codes[_BEST_E * LANES + lane]


@kernel
def _pack(x: np.ndarray, state: np.ndarray, best: np.ndarray, out: np.ndarray) -> None:
    """Write blocks, uint8[count, 17], of x float32[count, 32] with the exponents `best` int32[LANES]."""
    for b in range(len(out)):
        e, unit = best[b], np.float32(1) / state[UNIT * LANES + b]  # x * 2^(127 - e) in two steps that float32 holds
        exponent = np.int32(_exponent(state[UNIT * LANES + b]) - e + np.int32(127))
        inverse = np.uint32(exponent << np.int32(23)).view(np.float32)
        out[b, 0] = np.uint8(e if state[EXTREME * LANES + b] != _ZERO else 0)
        for j in range(16):
            out[b, 1 + j] = pack_nibbles(code_of(x[b, j] * unit * inverse), code_of(x[b, j + 16] * unit * inverse))


@kernel
def _encode(x: np.ndarray, importance: np.ndarray, effort: int, out: np.ndarray) -> None:
    blocks, packed = x.reshape(-1, 32), out.reshape(-1, 17)
    data, state = np.empty(scale_search.DATA_SIZE, np.float32), np.empty(scale_search.STATE_SIZE, np.float32)
    codes, weights = state.view(np.int32), scale_search.relative_weights(importance)
    for first in range(0, len(blocks), LANES):
        batch = blocks[first : first + LANES]
        scale_search.load_blocks(batch, weights, first, data, state)
        scale_search.reset_best(state)
        for k in range(_COUNTS[effort]):
            _propose(state, codes, _OFFSETS[k])
            _sums(data, state)
            _keep_better(state, codes)
        _pack(batch, state, codes[_BEST_E * LANES :], packed[first : first + LANES])


class MXFP4(QuantType):
    """MXFP4: blocks of 32, 17 bytes."""

    name, ggml_type, file_type = "mxfp4", 39, 38
    block_size, block_bytes = 32, 17
    uses_imatrix = True
    encode_rows = staticmethod(_encode)
    decode_rows = staticmethod(_decode)
