"""NVFP4 (id 40): blocks of 64, 36 bytes. A type of llama.cpp; ik_llama.cpp does not know it.

    offset  size     field
    0       4 x u8   d    of the four sub-blocks of 16
    4       32 x u8  qs   8 bytes a sub-block; low nibble of byte j: element j; high nibble: element j + 8

    y = UE4M3[d] / 2 * E2M1[q]        q in 0..15; E2M1 doubled, so that its entries are integers

UE4M3 is an unsigned float with four bits of exponent, biased by 7, over three of mantissa: bit 7 is ignored, d = 0..7
are d * 2^-9, 126 is 448, and 127, the NaN of E4M3, is 0 (255 is 480: the whole byte is compared with 127). The scale of
a whole tensor is not part of the type: llama.cpp keeps it in a tensor of its own, NAME.scale.

Encode: the d and nearest codes that minimise sum w (x - y)^2, w the importance of the column (1 without), for each
sub-block: all scales from those that clip its largest element to those that place it at 4 or lower, as far as effort
goes. Sub-blocks are loaded and searched in batches of LANES, as the blocks of MXFP4 are. Magnitudes end at 2688 and are
clipped there; scales below 2^-6, for elements up to 0.09, are 2^-9 apart.
"""

from __future__ import annotations

import numpy as np

from quantkit.codegen.jit import kernel
from quantkit.types.base import QuantType
from quantkit.types.families.block32 import scale_search
from quantkit.types.families.block32.scale_search import BEST, ERROR, EXTREME, INVERSE, LANES, SCALE, UNIT, pack_nibbles
from quantkit.types.families.e2m1 import E2M1, LARGEST, code_of, nearest_float

_codes = np.arange(256)
_exponents, _mantissas = _codes >> 3 & 15, _codes & 7
UE4M3 = np.where(_exponents == 0, _mantissas / 512, (1 + _mantissas / 8) * 2.0 ** (_exponents - 7)).astype(np.float32)
UE4M3[127] = 0
_HALVED = UE4M3 / np.float32(2)
_FIRST_NORMAL, _FIRST_NORMAL_CODE = np.float32(2.0**-6), np.int32(8)
_LAST_CODE = np.int32(126)

# Candidates are the code that places the largest element at 6, plus the first few of these. Where codes are even (in
# units of 1/8 octave), +4 and +5 place it at 4, +8 at 3; below 0 it is clipped.
_OFFSETS = np.array([0, 1, -1, 4, 5, 2, -2, 3, 6, -3, 7, -4, 8, 9, -5, -6, -7, -8, 10, 11], np.int32)
_COUNTS = 5, 12, len(_OFFSETS)

# Rows of `state`, as int32, in place of rows of `scale_search` that this search does not need.
_FIRST, _CODE, _BEST_CODE = scale_search.CURVE, scale_search.SLOPE, scale_search.BEST_SCALE

_ZERO = np.float32(0)


@kernel
def _decode(data: np.ndarray, out: np.ndarray) -> None:
    rows, n = out.shape
    for row in range(rows):
        blocks, y = data[row].reshape(-1, 36), out[row].reshape(-1, 16)
        for i in range(n // 16):
            block, s = blocks[i // 4], i % 4
            scale = _HALVED[block[s]]
            for j in range(8):
                byte = block[4 + 8 * s + j]
                y[i, j] = scale * E2M1[byte & 15]
                y[i, j + 8] = scale * E2M1[byte >> 4]


@kernel
def _nearest_scale(v: np.float32) -> np.int32:
    """The code of the UE4M3 nearest to v >= 0."""
    if v < _FIRST_NORMAL:
        return np.int32(v * np.float32(512) + np.float32(0.5))
    bits = np.int32(np.float32(v).view(np.uint32) >> np.uint32(19))  # one bit of the mantissa more than is kept
    code = np.int32(np.int32(bits + np.int32(1)) >> np.int32(1)) - np.int32((127 - 7) << 3)
    return np.int32(min(code, _LAST_CODE))


@kernel
def _find_first(state: np.ndarray, codes: np.ndarray) -> None:
    """The code under which the largest element of each lane is nearest to 6."""
    for lane in range(LANES):
        largest = abs(state[EXTREME * LANES + lane]) * state[UNIT * LANES + lane]
        codes[_FIRST * LANES + lane] = _nearest_scale(largest / LARGEST)


@kernel
def _propose(state: np.ndarray, codes: np.ndarray, offset: np.int32) -> None:
    """The candidate FIRST + offset of each lane: its code, SCALE in units of UNIT, INVERSE."""
    for lane in range(LANES):
        code = min(max(codes[_FIRST * LANES + lane] + offset, np.int32(1)), _LAST_CODE)
        codes[_CODE * LANES + lane] = code
        scale, unit = UE4M3[code], state[UNIT * LANES + lane]
        state[SCALE * LANES + lane] = scale / unit
        state[INVERSE * LANES + lane] = unit / scale
        state[ERROR * LANES + lane] = _ZERO


@kernel
def _sums(data: np.ndarray, state: np.ndarray) -> None:
    """sum w (x - SCALE * nearest entry)^2 of each lane."""
    for j in range(16):
        for lane in range(LANES):
            x = data[j * LANES + lane]
            r = x - state[SCALE * LANES + lane] * nearest_float(x * state[INVERSE * LANES + lane])
            state[ERROR * LANES + lane] += data[(16 + j) * LANES + lane] * r * r


@kernel
def _keep_better(state: np.ndarray, codes: np.ndarray) -> None:
    """Keep the code of what beats BEST."""
    for lane in range(LANES):
        better = state[ERROR * LANES + lane] < state[BEST * LANES + lane]
        state[BEST * LANES + lane] = state[ERROR * LANES + lane] if better else state[BEST * LANES + lane]
        codes[_BEST_CODE * LANES + lane] = codes[_CODE * LANES + lane] if better else codes[_BEST_CODE * LANES + lane]


@kernel
def _pack(x: np.ndarray, best: np.ndarray, first: int, blocks: np.ndarray) -> None:
    """Write sub-blocks x float32[count, 16], the first of them number `first` of all, with the scales `best`.

    A sub-block whose codes are all 0 has the scale 0.
    """
    for i in range(len(x)):
        block, s = blocks[(first + i) // 4], (first + i) % 4
        inverse = np.float32(1) / UE4M3[best[i]]
        used = np.uint8(0)
        for j in range(8):
            byte = pack_nibbles(code_of(x[i, j] * inverse), code_of(x[i, j + 8] * inverse))
            block[4 + 8 * s + j] = byte
            used = np.uint8(used | byte)
        block[s] = np.uint8(best[i]) if used else np.uint8(0)


@kernel
def _encode(x: np.ndarray, importance: np.ndarray, effort: int, out: np.ndarray) -> None:
    sub_blocks, blocks = x.reshape(-1, 16), out.reshape(-1, 36)
    data, state = np.empty(2 * 16 * LANES, np.float32), np.empty(scale_search.STATE_SIZE, np.float32)
    codes, weights = state.view(np.int32), scale_search.relative_weights(importance, 16)
    for first in range(0, len(sub_blocks), LANES):
        batch = sub_blocks[first : first + LANES]
        scale_search.load_blocks(batch, weights, first, data, state)
        scale_search.reset_best(state)
        _find_first(state, codes)
        for k in range(_COUNTS[effort]):
            _propose(state, codes, _OFFSETS[k])
            _sums(data, state)
            _keep_better(state, codes)
        _pack(batch, codes[_BEST_CODE * LANES :], first, blocks)


class NVFP4(QuantType):
    """NVFP4: blocks of 64, 36 bytes."""

    name, ggml_type, file_type = "nvfp4", 40, 39
    block_size, block_bytes = 64, 36
    uses_imatrix = True
    encode_rows = staticmethod(_encode)
    decode_rows = staticmethod(_decode)
