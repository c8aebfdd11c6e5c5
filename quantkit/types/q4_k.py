"""Q4_K (id 12): blocks of 256 in sub-blocks of 32, 144 bytes.

    offset  size      field
    0       f16       d      scale of the scales
    2       f16       dmin   scale of the minima
    4       12 x u8   sc     eight 6-bit scales S and minima M, packed as below
    16      128 x u8  qs     low nibbles of qs[32 p ..] are elements 64 p .., high nibbles elements 64 p + 32 ..

    j < 4    S[j] = sc[j] & 63                              M[j] = sc[j + 4] & 63
    j >= 4   S[j] = sc[j + 4] & 15 | (sc[j - 4] >> 6) << 4   M[j] = sc[j + 4] >> 4 | (sc[j] >> 6) << 4

    y = (d * S) * q - (dmin * M)        q 0 to 15

Each product and the difference are rounded to float32.

Encode: minimise sum e (x - y)^2 with e = w sqrt(2 v + x^2) where an importance w is given, else e = sqrt(v) + |x|, v
being the mean of x^2 over the block (of the sub-block in the second case). Three steps:

1. For each sub-block a grid of code ranges, the least-squares scale and minimum of each, codes anew under these, again.
   What is kept of the best are five sums, which give the error of any scale and minimum for its codes.
2. For a grid of super-scales d and dmin, rounded to what halves hold: S and M of all sub-blocks by these sums.
3. Exactly, at the best of the grid: each S and M with its neighbours and nearest codes; then d and dmin by least
   squares, and again.
"""

from __future__ import annotations

import numpy as np

from quantkit.half import half_to_float
from quantkit.jit import kernel
from quantkit.types.base import QuantType
from quantkit.types.superblock import load_block, put_half, relative_importance, storable

BLOCK = 144

_LANES = 32  # candidates side by side, one per SIMD lane: 8 step sizes times 4 offsets
_NARROW, _WIDE = np.float32(11.5), np.float32(17)  # the range of a sub-block becomes so many steps,
_BELOW, _ABOVE = np.float32(-0.8), np.float32(0.4)  # its smallest element, or zero, becomes such a code
_SCALES, _MINIMA = 10, 6  # super-scales looked at,
_LEAST, _MOST = np.float32(0.94), np.float32(1.2)  # from and to these multiples of largest / 63
_ROUNDS = 3  # exact choices, least-squares super-scales between them


@kernel(inline="always")
def _scale_and_min(sc, j):
    """S[j] and M[j] from the twelve bytes, as uint8."""
    if j < 4:
        return sc[j] & np.uint8(63), sc[j + 4] & np.uint8(63)
    scale = (sc[j + 4] & np.uint8(15)) | (sc[j - 4] >> np.uint8(6)) << np.uint8(4)
    minimum = (sc[j + 4] >> np.uint8(4)) | (sc[j] >> np.uint8(6)) << np.uint8(4)
    return scale, minimum


@kernel
def _decode(data, out):
    rows, n = out.shape
    for row in range(rows):
        for b in range(n // 256):
            block = data[row, BLOCK * b : BLOCK * b + BLOCK]
            y = out[row, 256 * b : 256 * b + 256]
            d = half_to_float(np.uint16(block[0]) | np.uint16(block[1]) << np.uint16(8))
            dmin = half_to_float(np.uint16(block[2]) | np.uint16(block[3]) << np.uint16(8))
            for j in range(8):
                scale_code, min_code = _scale_and_min(block[4:16], j)
                scale = d * np.float32(scale_code)
                minimum = dmin * np.float32(min_code)
                codes = block[16 + 32 * (j // 2) :]
                shift = np.uint8(4 * (j % 2))
                for i in range(32):
                    q = (codes[i] >> shift) & np.uint8(15)
                    y[32 * j + i] = scale * np.float32(q) - minimum


# The five sums over a sub-block that say all about codes q with weights e: of e, e x, e q, e q^2 and e q x.


@kernel(inline="always")
def _error(sums, scale, minimum):
    """sum e (x - (scale q - minimum))^2 - sum e x^2."""
    squares = scale * (scale * sums[3] - np.float32(2) * sums[4])
    return squares + minimum * (minimum * sums[0] + np.float32(2) * (sums[1] - scale * sums[2]))


@kernel(inline="always")
def _solve(sums):
    """Scale and minimum >= 0 that are least squares for the codes behind the sums."""
    e, ex, eq, eqq, eqx = sums
    determinant = e * eqq - eq * eq
    if determinant > np.float32(1e-6) * e * eqq:
        scale = (e * eqx - eq * ex) / determinant
        minimum = (eq * eqx - eqq * ex) / determinant
        if minimum > np.float32(0) and scale > np.float32(0):
            return scale, minimum
    return max(eqx / eqq, np.float32(0)) if eqq > np.float32(0) else np.float32(0), np.float32(0)


@kernel
def _accumulate(x, e, inverses, offsets, eq, eqq, eqx):
    """Per lane the sums that depend on the codes, q = round(x * inverse + offset) within 0 to 15."""
    count = len(inverses)
    eq[:], eqq[:], eqx[:] = np.float32(0), np.float32(0), np.float32(0)
    for j in range(len(x)):
        for c in range(count):
            q = np.rint(min(max(x[j] * inverses[c] + offsets[c], np.float32(0)), np.float32(15)))
            weighted = e[j] * q
            eq[c] += weighted
            eqq[c] += weighted * q
            eqx[c] += weighted * x[j]


@kernel
def _fit(x, e, best, lanes):
    """Step 1 for a sub-block: the five sums of the best codes found go to `best`; returns their scale and minimum."""
    inverses, offsets, eq, eqq, eqx = lanes[0], lanes[1], lanes[2], lanes[3], lanes[4]
    low, high = np.float32(0), x[0]
    sum_e = sum_ex = np.float32(0)
    for j in range(len(x)):
        low, high = min(low, x[j]), max(high, x[j])
        sum_e += e[j]
        sum_ex += e[j] * x[j]
    best[:] = np.float32(0)
    best[0], best[1] = sum_e, sum_ex
    if high == low:  # all equal and not positive: the minimum alone says it
        return np.float32(0), -low
    for c in range(_LANES):
        steps = _NARROW + (_WIDE - _NARROW) * np.float32(c // 4) / np.float32(_LANES // 4 - 1)
        inverses[c] = steps / (high - low)
        offsets[c] = _BELOW + (_ABOVE - _BELOW) * np.float32(c % 4) / np.float32(3) - low * inverses[c]
    scale = minimum = least = np.float32(0)
    for _ in range(2):
        _accumulate(x, e, inverses, offsets, eq, eqq, eqx)
        for c in range(_LANES):
            sums = (sum_e, sum_ex, eq[c], eqq[c], eqx[c])
            s, m = _solve(sums)
            error = _error(sums, s, m)
            if error < least:
                scale, minimum, least = s, m, error
                best[2], best[3], best[4] = eq[c], eqq[c], eqx[c]
            if s > np.float32(0):
                inverses[c] = np.float32(1) / s
                offsets[c] = m / s
    return scale, minimum


@kernel(inline="always")
def _minimum_beside(sums, d, dmin, s):
    """The M that is best beside S = s for the codes behind the sums, and the error."""
    scale = d * np.float32(s)
    wanted = (scale * sums[2] - sums[1]) / (sums[0] * dmin)
    m = np.int64(np.rint(min(max(wanted, np.float32(0)), np.float32(63))))
    return m, _error(sums, scale, dmin * np.float32(m))


@kernel
def _settle(sums, scale, d, dmin):
    """S and M of a sub-block under d and dmin by its sums, and the error."""
    low = np.int64(min(max(scale / d, np.float32(0)), np.float32(63)))
    high = min(low + 1, 63)
    m_low, error_low = _minimum_beside(sums, d, dmin, low)
    m_high, error_high = _minimum_beside(sums, d, dmin, high)
    if error_low <= error_high:
        return low, m_low, error_low
    return high, m_high, error_high


@kernel
def _first_scales(sums, scales, minima, unit):
    """Step 2: the d and dmin of the grid that promise the least error."""
    top_scale, top_minimum = scales.max() / np.float32(63), minima.max() / np.float32(63)
    least, d, dmin = np.float32(np.inf), np.float32(0), np.float32(0)
    for a in range(_SCALES):
        one = storable(top_scale * (_LEAST + (_MOST - _LEAST) * np.float32(a) / np.float32(_SCALES - 1)), unit)
        for b in range(_MINIMA):
            two = storable(top_minimum * (_LEAST + (_MOST - _LEAST) * np.float32(b) / np.float32(_MINIMA - 1)), unit)
            total = np.float32(0)
            for j in range(8):
                total += _settle(sums[j], scales[j], one, two)[2]
            if total < least:
                least, d, dmin = total, one, two
    return d, dmin


@kernel
def _choose(x, e, d, dmin, s, m, lanes):
    """Step 3 for a sub-block: of S next to s and M next to m, with nearest codes, the best by its exact error."""
    scales, minima, inverses, errors = lanes[0], lanes[1], lanes[2], lanes[3]
    first_s, first_m = min(max(s - 1, 0), 61), min(max(m - 1, 0), 60)
    for c in range(12):
        scales[c] = d * np.float32(first_s + c // 4)
        minima[c] = dmin * np.float32(first_m + c % 4)
        inverses[c] = np.float32(1) / scales[c] if scales[c] > np.float32(0) else np.float32(0)
        errors[c] = np.float32(0)
    for j in range(len(x)):
        for c in range(12):
            up = x[j] + minima[c]
            q = np.rint(min(max(up * inverses[c], np.float32(0)), np.float32(15)))
            rest = up - scales[c] * q
            errors[c] += e[j] * (rest * rest)
    best = 0
    for c in range(12):
        if errors[c] < errors[best]:
            best = c
    return first_s + best // 4, first_m + best % 4, errors[best]


@kernel
def _refit(xs, e, d, dmin, s, m, unit):
    """d and dmin of least error for the codes that d, dmin, S and M give, as halves hold them."""
    a = b = c = u = v = np.float32(0)  # normal equations in S q and -M
    for j in range(8):
        scale, minimum = d * np.float32(s[j]), dmin * np.float32(m[j])
        inverse = np.float32(1) / scale if s[j] else np.float32(0)
        for i in range(32 * j, 32 * j + 32):
            q = np.rint(min(max((xs[i] + minimum) * inverse, np.float32(0)), np.float32(15)))
            one, two = np.float32(s[j]) * q, np.float32(-m[j])
            a += e[i] * (one * one)
            b += e[i] * (one * two)
            c += e[i] * (two * two)
            u += e[i] * (one * xs[i])
            v += e[i] * (two * xs[i])
    determinant = a * c - b * b
    if determinant > np.float32(1e-6) * a * c:
        one, two = (c * u - b * v) / determinant, (a * v - b * u) / determinant
        if one > np.float32(0) and two > np.float32(0):
            return storable(one, unit), storable(two, unit)
    elif a > np.float32(0) and c == np.float32(0) and u > np.float32(0):
        return storable(u / a, unit), dmin
    return d, dmin


@kernel
def _search(xs, e, unit, s, m, space):
    """d and dmin of a block; S and M go to row 0 of s and m, int64[2, 8]."""
    sums, scales, minima, lanes = space
    for j in range(8):
        scales[j], minima[j] = _fit(xs[32 * j : 32 * j + 32], e[32 * j : 32 * j + 32], sums[j], lanes)
    d, dmin = _first_scales(sums, scales, minima, unit)
    for j in range(8):
        s[1, j], m[1, j], _ = _settle(sums[j], scales[j], d, dmin)
    least, best_d, best_dmin = np.float32(np.inf), d, dmin
    for _ in range(_ROUNDS):
        total = np.float32(0)
        for j in range(8):
            x, weight = xs[32 * j : 32 * j + 32], e[32 * j : 32 * j + 32]
            s[1, j], m[1, j], error = _choose(x, weight, d, dmin, s[1, j], m[1, j], lanes)
            total += error
        if total < least:
            least, best_d, best_dmin = total, d, dmin
            s[0], m[0] = s[1], m[1]
        one, two = _refit(xs, e, d, dmin, s[1], m[1], unit)
        if one == d and two == dmin:
            break
        d, dmin = one, two
    return best_d, best_dmin


@kernel
def _store(xs, unit, d, dmin, s, m, out):
    """Write a block: super-scales, packed scales and minima, and the codes nearest under them."""
    out[:] = np.uint8(0)
    put_half(out, 0, d * unit)
    put_half(out, 2, dmin * unit)
    sc = out[4:16]
    for j in range(8):
        if j < 4:
            sc[j] |= np.uint8(s[j])
            sc[j + 4] |= np.uint8(m[j])
        else:
            sc[j + 4] |= np.uint8((s[j] & 15) | (m[j] & 15) << 4)
            sc[j - 4] |= np.uint8((s[j] >> 4) << 6)
            sc[j] |= np.uint8((m[j] >> 4) << 6)
        minimum = dmin * np.float32(m[j])
        inverse = np.float32(1) / (d * np.float32(s[j])) if s[j] else np.float32(0)
        codes = out[16 + 32 * (j // 2) :]
        for i in range(32):
            q = np.rint(min(max((xs[32 * j + i] + minimum) * inverse, np.float32(0)), np.float32(15)))
            codes[i] |= np.uint8(np.int64(q) << (4 * (j % 2)))


@kernel
def _weigh(xs, mean, importance, first, e):
    """The weights of a block."""
    if relative_importance(importance, first, e):
        for i in range(256):
            e[i] *= np.sqrt(np.float32(2) * mean + xs[i] * xs[i])
        return
    for j in range(8):
        squares = np.float32(0)
        for i in range(32 * j, 32 * j + 32):
            squares += xs[i] * xs[i]
        size = np.sqrt(squares / np.float32(32))
        for i in range(32 * j, 32 * j + 32):
            e[i] = size + abs(xs[i])


@kernel
def _encode(x, importance, out):
    rows, n = x.shape
    xs, e = np.empty(256, np.float32), np.empty(256, np.float32)
    s, m = np.empty((2, 8), np.int64), np.empty((2, 8), np.int64)
    space = (
        np.empty((8, 5), np.float32),
        np.empty(8, np.float32),
        np.empty(8, np.float32),
        np.empty((5, _LANES), np.float32),
    )
    for row in range(rows):
        for b in range(n // 256):
            block = out[row, BLOCK * b : BLOCK * b + BLOCK]
            unit, mean = load_block(x[row, 256 * b : 256 * b + 256], xs, np.float32(2.0**-25))
            if unit == np.float32(0):
                block[:] = np.uint8(0)
                continue
            _weigh(xs, mean, importance, 256 * b, e)
            d, dmin = _search(xs, e, unit, s, m, space)
            _store(xs, unit, d, dmin, s[0], m[0], block)


class Q4_K(QuantType):
    name, ggml_type, file_type = "q4_K", 12, 15
    block_size, block_bytes = 256, BLOCK
    uses_imatrix = True
    encode_rows = staticmethod(_encode)
    decode_rows = staticmethod(_decode)
