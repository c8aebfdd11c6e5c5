"""Q6_K (id 14): blocks of 256 in sub-blocks of 16, 210 bytes.

    offset  size      field
    0       128 x u8  ql   low 4 bits: nibble (t // 2) of ql[64 p + 32 (t % 2) + j]
    128     64 x u8   qh   high 2 bits: bits 2t, 2t+1 of qh[32 p + j]
    192     16 x i8   sc   multiplier of the sub-block
    208     f16       d

for element 128 p + 32 t + j (p < 2, t < 4, j < 32), which lies in sub-block 8 p + 2 t + j // 16.

    y = (d * sc) * (q - 32)        q = the six bits, 0 to 63

Both products are rounded to float32.

Encode: minimise sum w (x - y)^2 with w = q where an importance q is given, else w = v + x^2, v being the mean of x^2
over the block. For each of a few super-scales, rounded to what a half holds, every multiplier that puts the largest
element of a sub-block near the end of the code range is tried with nearest codes; the best is refined by least-squares
super-scales. Where importance makes a few elements outweigh all others, as massive activations do, what counts is how
near codes come to those few, large or not: more super-scales are tried there, and multipliers from a wider range.
"""

from __future__ import annotations

import numpy as np

from quantkit.half import half_to_float
from quantkit.jit import kernel
from quantkit.types.base import QuantType
from quantkit.types.superblock import LEAST_WEIGHT, load_block, put_half, relative_importance, storable

BLOCK = 210

_LEAST, _MOST = np.float32(0.99), np.float32(1.2)  # super-scales from and to these multiples of largest / (32 * 128)
_REFITS = 2
# How many of them are looked at, and how many units the largest element of a sub-block may become; over 32 is clipped.
_SCALES, _WINDOW = 6, (np.float32(29.5), np.float32(34))
_WIDE_SCALES, _WIDE_WINDOW = 24, (np.float32(20), np.float32(44))
_LANES = 160  # multipliers of a sub-block that are tried at once, at most
_FEW = np.float32(24)  # columns


@kernel
def _decode(data, out):
    rows, n = out.shape
    for row in range(rows):
        for b in range(n // 256):
            block = data[row, BLOCK * b : BLOCK * b + BLOCK]
            y = out[row, 256 * b : 256 * b + 256]
            d = half_to_float(np.uint16(block[208]) | np.uint16(block[209]) << np.uint16(8))
            for s in range(16):
                p, t, half = s // 8, (s // 2) % 4, s % 2
                scale = d * np.float32(np.int8(block[192 + s]))
                low = block[64 * p + 32 * (t % 2) + 16 * half :]
                high = block[128 + 32 * p + 16 * half :]
                for j in range(16):
                    q = ((low[j] >> np.uint8(4 * (t // 2))) & np.uint8(15)) | (
                        ((high[j] >> np.uint8(2 * t)) & np.uint8(3)) << np.uint8(4)
                    )
                    y[16 * s + j] = scale * np.float32(np.int32(q) - np.int32(32))


@kernel
def _choose(x, w, d, top, window, scales, inverses, errors):
    """The multiplier of least error under super-scale d > 0 for a sub-block whose largest magnitude is `top`.

    The arrays float32[_LANES] are scratch: what is tried stands side by side, so that the inner loop runs in SIMD
    lanes. Returns the multiplier, 0 where nothing beats zeros, and the error.
    """
    low = min(max(int(top / (window[1] * d)), 1), 127)
    high = min(max(int(top / (window[0] * d)) + 1, low), low + _LANES // 2 - 1, 128)
    count = 2 * (high - low + 1)
    for c in range(count):
        scales[c] = d * np.float32(_multiplier(low, c))
        inverses[c] = np.float32(1) / scales[c]
        errors[c] = np.float32(0)
    best = np.float32(0)
    for j in range(16):
        best += w[j] * (x[j] * x[j])
        for c in range(count):
            code = np.rint(min(max(x[j] * inverses[c], np.float32(-32)), np.float32(31)))
            rest = x[j] - scales[c] * code
            errors[c] += w[j] * (rest * rest)
    choice = 0
    for c in range(count):
        if errors[c] < best:
            best, choice = errors[c], _multiplier(low, c)
    return choice, best


@kernel(inline="always")
def _multiplier(low, c):
    """Lane c tries low, -low, low + 1, -(low + 1), …, within -128 to 127."""
    magnitude = low + c // 2
    return -magnitude if c % 2 else min(magnitude, 127)


@kernel
def _choose_all(xs, w, d, tops, window, multipliers, limit, lanes):
    """Multipliers of all sub-blocks under d and the block's error; gives up, returning Inf, beyond `limit`."""
    total = np.float32(0)
    for s in range(16):
        multipliers[s] = 0
        if tops[s] > np.float32(0):
            x, weight = xs[16 * s : 16 * s + 16], w[16 * s : 16 * s + 16]
            multipliers[s], error = _choose(x, weight, d, tops[s], window, lanes[0], lanes[1], lanes[2])
            total += error
            if total > limit:
                return np.float32(np.inf)
    return total


@kernel
def _refit(xs, w, d, multipliers):
    """The super-scale of least error for the codes that d and the multipliers give."""
    p = q = np.float32(0)
    for s in range(16):
        if multipliers[s] == 0:
            continue
        m = np.float32(multipliers[s])
        inverse = np.float32(1) / (d * m)
        for j in range(16 * s, 16 * s + 16):
            c = m * np.rint(min(max(xs[j] * inverse, np.float32(-32)), np.float32(31)))
            p += w[j] * (xs[j] * c)
            q += w[j] * (c * c)
    return p / q if q > np.float32(0) else np.float32(0)


@kernel
def _needs_wide_search(xs, w):
    """Whether few columns count, (sum w)^2 / sum w^2 of them, or none do at some sub-block's largest element."""
    total = squares = np.float32(0)
    for s in range(16):
        top = 16 * s
        for i in range(16 * s, 16 * s + 16):
            total += w[i]
            squares += w[i] * w[i]
            top = i if abs(xs[i]) > abs(xs[top]) else top
        if w[top] <= np.float32(LEAST_WEIGHT):
            return True
    return total * total < _FEW * squares


@kernel
def _search(xs, w, unit, scales, window, multipliers, tops, lanes):
    """Super-scale of a block, of `scales` and refits; its multipliers go to row 0 of `multipliers` int64[2, 16]."""
    largest = np.float32(0)
    for s in range(16):
        tops[s] = np.float32(0)
        for j in range(16 * s, 16 * s + 16):
            tops[s] = max(tops[s], abs(xs[j]))
        largest = max(largest, tops[s])
    least, best = np.float32(np.inf), np.float32(0)
    for trial in range(scales + _REFITS):
        if trial < scales:
            factor = _LEAST + (_MOST - _LEAST) * np.float32(trial) / np.float32(scales - 1)
            d = storable(largest * factor / np.float32(32 * 128), unit)
        else:
            d = storable(_refit(xs, w, best, multipliers[0]), unit)
        if d == best:
            continue
        total = _choose_all(xs, w, d, tops, window, multipliers[1], least, lanes)
        if total < least:
            least, best = total, d
            multipliers[0] = multipliers[1]
    return best


@kernel
def _store(xs, unit, d, multipliers, out):
    """Write a block: the codes nearest under the multipliers, these, and the super-scale."""
    out[:] = np.uint8(0)
    put_half(out, 208, d * unit)
    for s in range(16):
        p, t, half = s // 8, (s // 2) % 4, s % 2
        out[192 + s] = np.uint8(multipliers[s])
        inverse = np.float32(1) / (d * np.float32(multipliers[s])) if multipliers[s] else np.float32(0)
        low = out[64 * p + 32 * (t % 2) + 16 * half :]
        high = out[128 + 32 * p + 16 * half :]
        for j in range(16):
            code = np.int32(np.rint(min(max(xs[16 * s + j] * inverse, np.float32(-32)), np.float32(31)))) + 32
            low[j] |= np.uint8((code & 15) << (4 * (t // 2)))
            high[j] |= np.uint8((code >> 4) << (2 * t))


@kernel
def _encode(x, importance, out):
    rows, n = x.shape
    xs, w, tops = np.empty(256, np.float32), np.empty(256, np.float32), np.empty(16, np.float32)
    multipliers, lanes = np.empty((2, 16), np.int64), np.empty((3, _LANES), np.float32)
    for row in range(rows):
        for b in range(n // 256):
            block = out[row, BLOCK * b : BLOCK * b + BLOCK]
            unit, mean = load_block(x[row, 256 * b : 256 * b + 256], xs, np.float32(2.0**-25))
            if unit == np.float32(0):
                block[:] = np.uint8(0)
                continue
            scales, window = _SCALES, _WINDOW
            if relative_importance(importance, 256 * b, w):
                if _needs_wide_search(xs, w):
                    scales, window = _WIDE_SCALES, _WIDE_WINDOW
            else:
                for i in range(256):
                    w[i] = mean + xs[i] * xs[i]
            d = _search(xs, w, unit, scales, window, multipliers, tops, lanes)
            _store(xs, unit, d, multipliers[0], block)


class Q6_K(QuantType):
    name, ggml_type, file_type = "q6_K", 14, 18
    block_size, block_bytes = 256, BLOCK
    uses_imatrix = True
    encode_rows = staticmethod(_encode)
    decode_rows = staticmethod(_decode)
