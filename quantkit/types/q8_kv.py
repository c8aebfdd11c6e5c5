"""Q8_KV (id 151): rows of n 8-bit codes under one scale, 8 + n bytes.

    offset  size     field
    0       f32      d
    4       i32      sum   of all codes of the row, which products need; the decoder does not
    8       n x i8   q     -127..127 (-128 decodes, but is not written: kernels negate codes)

    y = d * q

Encode: d = largest magnitude / 127 and the nearest codes; importance is not used. Effort "best" also lowers d in steps,
which clips the largest elements, and keeps the d of least sum (x - y)^2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from quantkit.codegen.jit import kernel
from quantkit.types.base import BEST, QuantType

if TYPE_CHECKING:
    from quantkit.types.refine import Moments

_MAGNITUDE = np.int32(0x7FFFFFFF)
_INF_BITS = np.int32(0x7F800000)
_ZERO, _ONE, _MAX_CODE = np.float32(0), np.float32(1), np.float32(127)
_MAX_SCALE = np.nextafter(np.finfo(np.float32).max / _MAX_CODE, _ZERO)  # times 127 it is still finite
_ROUND = np.float32(3 << 22)  # adding it rounds |t| < 2^22 to an integer, ties to even, in the sum's lowest bits
_ROUND_BITS = _ROUND.view(np.int32)
# 1 / d would overflow soon below: such rows, of magnitudes below 1.5e-36, become zeros
_MIN_SCALE = np.float32(2.0**-126)

_LANES = 32
# Effort "best": distance of the scales that it tries; it stops after so many without a gain.
_SCALE_STEP, _MAX_FAILURES = np.float32(2.0**-8), 4


@kernel
def _decode(data: np.ndarray, out: np.ndarray) -> None:
    rows, n = out.shape
    for row in range(rows):
        scale = data[row, :4].view(np.float32)[0]
        code = data[row, 8:].view(np.int8)
        for j in range(n):
            out[row, j] = scale * np.float32(code[j])


@kernel
def _encode(x: np.ndarray, importance: np.ndarray, effort: int, out: np.ndarray) -> np.int32:
    rows, n = x.shape
    max_bits = np.int32(0)
    for row in range(rows):
        bits = x[row].view(np.int32)
        largest = np.int32(0)
        for j in range(n):
            largest = np.int32(max(largest, np.int32(bits[j] & _MAGNITUDE)))
        max_bits = max(max_bits, largest)
        scale = min(np.int32(largest).view(np.float32) / _MAX_CODE, _MAX_SCALE)
        if scale < _MIN_SCALE or largest >= _INF_BITS:  # the caller refuses the latter
            out[row] = np.uint8(0)
            continue
        source = x[row]
        if effort == BEST:
            scale = _search(source, scale)
            source = np.minimum(np.maximum(source, -_MAX_CODE * scale), _MAX_CODE * scale)
        out[row, :4].view(np.float32)[0] = scale
        out[row, 4:8].view(np.int32)[0] = _nearest(source, _ONE / scale, out[row, 8:].view(np.int8))
    return max_bits


@kernel
def _nearest(x: np.ndarray, inverse: np.float32, code: np.ndarray) -> np.int32:
    """Fill int8[n] with the integers nearest to x * inverse, none beyond 127; returns their sum."""
    total = np.int32(0)
    for j in range(x.size):
        bits = np.float32(x[j] * inverse + _ROUND).view(np.int32)
        code[j] = np.int8(bits)
        total = np.int32(total + bits)
    return np.int32(total - np.int32(np.int32(x.size) * _ROUND_BITS))


@kernel
def _search(x: np.ndarray, first: np.float32) -> np.float32:
    """The scale at or below `first` with the least squared error; stops after _MAX_FAILURES scales without a gain."""
    sums = np.empty(_LANES, np.float32)
    best, least_error, failed = first, np.float32(np.inf), 0
    scale = first
    while failed < _MAX_FAILURES:
        relative = scale / first
        error = relative * relative * _squared_error(x, _ONE / scale, sums)
        failed += 1
        if error < least_error:
            best, least_error, failed = scale, error, 0
        scale -= first * _SCALE_STEP
    return best


@kernel
def _squared_error(x: np.ndarray, inverse: np.float32, sums: np.ndarray) -> np.float32:
    """sum (x * inverse - code)^2 of the nearest codes."""
    sums[:] = _ZERO
    for first in range(0, x.size, _LANES):
        for lane in range(_LANES):
            t = x[first + lane] * inverse
            r = t - ((min(max(t, -_MAX_CODE), _MAX_CODE) + _ROUND) - _ROUND)
            sums[lane] += r * r
    total = _ZERO
    for lane in range(_LANES):
        total += sums[lane]
    return total


class Q8_KV(QuantType):
    name, ggml_type, file_type = "q8_KV", 151, 149
    block_size, block_bytes, row_meta_bytes = 32, 32, 8
    reports_largest = True
    unwritten_code, moments_effort = 0x80, BEST  # -128
    encode_rows = staticmethod(_encode)
    decode_rows = staticmethod(_decode)

    def refine_rows(self, x: np.ndarray, data: np.ndarray, moments: Moments, effort: int) -> None:
        """As other types do it; then the sums of codes are those of the new codes."""
        super().refine_rows(x, data, moments, effort)
        data[:, 4:8] = data[:, 8:].view(np.int8).sum(axis=1, dtype=np.int32)[:, None].view(np.uint8)
