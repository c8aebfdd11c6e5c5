"""Q1_0_G128 (id 41): blocks of 128, 18 bytes.

    offset  size     field
    0       f16      d
    2       16 x u8  qs   bit j % 8 of byte j // 8: the sign of element j, 1 for plus

    y = d where the bit is 1, else -d

Encode: the signs, and the half d nearest to sum w |x| / sum w, w = importance of the column (1 without): as the error
is a parabola of d, no other half makes sum w (x - y)^2 smaller.
"""

from __future__ import annotations

import numpy as np

from quantkit.codegen.half import float_to_half, half_to_float
from quantkit.codegen.jit import kernel
from quantkit.types.base import QuantType

_LANES = 16  # sums of elements j, j + 16, ...: wide enough for any CPU
_ZERO, _ONE = np.float32(0), np.float32(1)
_MIN_WEIGHT = np.float32(2.0**-20)  # of the block's largest: a column that the calibration never saw still counts
_BLOCK_SHARE = np.float32(1 / 128)  # keeps the sum over a block finite even for the largest floats
_HALF_MAX = 65504.0

# A word of eight bytes 0 or 1 times _GATHER has them as the bits of its highest byte; the first byte becomes bit 0.
_GATHER = np.uint64(0x0102040810204080)
_HIGHEST_BYTE = np.uint64(56)


@kernel
def _decode(data: np.ndarray, out: np.ndarray) -> None:
    rows, n = out.shape
    for row in range(rows):
        block = data[row]
        half = block.view(np.uint16)  # 9 a block
        for b in range(n // 128):
            bits = np.float32(half_to_float(half[9 * b])).view(np.uint32)
            value = out[row, 128 * b : 128 * b + 128].view(np.uint32)
            for i in range(16):
                byte = np.uint32(block[18 * b + 2 + i])
                for k in range(8):
                    minus = np.uint32(np.uint32(~byte) >> np.uint32(k)) << np.uint32(31)
                    value[8 * i + k] = np.uint32(bits ^ np.uint32(minus))


@kernel
def _encode(x: np.ndarray, importance: np.ndarray, effort: int, out: np.ndarray) -> None:
    rows, n = x.shape
    weights = np.empty(n, np.float32)
    shares = np.empty(n // 128, np.float64)
    _prepare(importance, weights, shares)
    sums = np.empty(_LANES, np.float64)
    signs = np.empty(128, np.uint8)
    eights = signs.view(np.uint64)
    for row in range(rows):
        half = out[row].view(np.uint16)
        for b in range(n // 128):
            block, w = x[row, 128 * b : 128 * b + 128], weights[128 * b : 128 * b + 128]
            scale = _weighted_mean(block, w, sums) * shares[b]
            half[9 * b] = float_to_half(np.float32(min(scale, _HALF_MAX)))
            for j in range(128):
                signs[j] = np.uint8(1) if block[j] >= _ZERO else np.uint8(0)
            for i in range(16):
                out[row, 18 * b + 2 + i] = np.uint8((eights[i] * _GATHER) >> _HIGHEST_BYTE)


@kernel
def _prepare(importance: np.ndarray, weights: np.ndarray, shares: np.ndarray) -> None:
    """Fill weights float32[n] with w / (128 max w) of each block, and shares float64[blocks] with 1 / their sum."""
    for b in range(shares.size):
        w = weights[128 * b : 128 * b + 128]
        largest = _ZERO
        for j in range(128 if importance.size else 0):
            largest = max(largest, importance[128 * b + j])
        total = 0.0
        for j in range(128):
            weight = importance[128 * b + j] / largest if largest > _ZERO else _ONE
            w[j] = max(weight, _MIN_WEIGHT) * _BLOCK_SHARE
            total += np.float64(w[j])
        shares[b] = 1.0 / total


@kernel
def _weighted_mean(x: np.ndarray, w: np.ndarray, sums: np.ndarray) -> float:
    """sum w |x|, in lanes, and in float64, so that the nearest half is found for certain."""
    for lane in range(_LANES):
        sums[lane] = 0.0
    for j in range(128 // _LANES):
        for lane in range(_LANES):
            sums[lane] += np.float64(w[_LANES * j + lane] * abs(x[_LANES * j + lane]))
    total = 0.0
    for lane in range(_LANES):
        total += sums[lane]
    return total


class Q1_0_G128(QuantType):
    """Q1_0_G128: blocks of 128, 18 bytes."""

    name, ggml_type, file_type = "q1_0_g128", 41, 41
    block_size, block_bytes = 128, 18
    uses_imatrix = True
    encode_rows = staticmethod(_encode)
    decode_rows = staticmethod(_decode)
