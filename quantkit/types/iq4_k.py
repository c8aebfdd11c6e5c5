"""IQ4_K (id 139): blocks of 256 in sub-blocks of 16, 144 bytes.

    offset  size      field
    0       f16       d
    2       u16       x    bit s: sub-block s uses the shifted codebook
    4       4 x u8    sh   bits 2 (s % 4), + 1 of sh[s // 4]: high bits of multiplier s
    8       8 x u8    sl   nibble s % 2 of sl[s // 2]: low bits of multiplier s
    16      128 x u8  qs   per 32 elements 16 bytes: low nibbles elements 0 .. 15, high nibbles 16 .. 31

    m = sl + 16 sh - 32                     -32 to 31
    y = (d * m) * (K[q] + 4 x)              K = CODEBOOK

Both products are rounded to float32; the code value is an integer.

Encode: minimise sum w (x - y)^2 with w = q sqrt(2 v + x^2) where an importance q is given, else w = v + x^2, v being
the mean of x^2 over the block: elements count more the larger they are, as the field has found best, yet the plain
(or importance-weighted) error is low too. Profiles (see `superblock`) of the 16 sub-blocks tell the error of any
super-scale with the best multipliers and codebooks; the best of a grid of super-scales, all rounded to what a half
holds, is then refined exactly: multipliers, signs, codebooks and codes under d, least-squares d under these, twice.
"""

from __future__ import annotations

import numpy as np

from quantkit.half import half_to_float
from quantkit.jit import kernel
from quantkit.types.base import QuantType
from quantkit.types.superblock import (
    BINS,
    PLACES,
    bin_of,
    enter_crossings,
    load_block,
    merge_profile,
    nearest_table,
    profile_gain,
    put_half,
    relative_importance,
    storable,
)

BLOCK = 144
SHIFT = 4
CODEBOOK = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)

_VALUES = np.concatenate([CODEBOOK, CODEBOOK + SHIFT]).astype(np.float32)  # both codebooks, 16 values each
_NEAREST = np.concatenate([nearest_table(_VALUES[:16]), nearest_table(_VALUES[16:])])  # index in one's own codebook
_ROUNDED = np.concatenate([_VALUES[:16][_NEAREST[:BINS]], _VALUES[16:][_NEAREST[BINS:]]])  # its value

_LO, _HI = np.float32(85), np.float32(200)  # the largest element of a sub-block becomes 85 to 200 (clipped) units
_SCALES = 32  # super-scales looked at,
_LEAST, _MOST = np.float32(0.85), np.float32(1.3)  # from and to these multiples of largest / (127 * 32)
_ROUNDS = 3  # exact choices, a least-squares super-scale between them


@kernel
def _decode(data, out):
    rows, n = out.shape
    for row in range(rows):
        for b in range(n // 256):
            block = data[row, BLOCK * b : BLOCK * b + BLOCK]
            y = out[row, 256 * b : 256 * b + 256]
            d = half_to_float(np.uint16(block[0]) | np.uint16(block[1]) << np.uint16(8))
            shifts = np.uint32(block[2]) | np.uint32(block[3]) << np.uint32(8)
            for s in range(16):
                low = (block[8 + s // 2] >> np.uint8(4 * (s % 2))) & np.uint8(15)
                high = (block[4 + s // 4] >> np.uint8(2 * (s % 4))) & np.uint8(3)
                scale = d * np.float32(np.int32(low) + np.int32(high) * np.int32(16) - np.int32(32))
                first = np.int64((shifts >> np.uint32(s)) & np.uint32(1)) * 16
                codes = block[16 + 16 * (s // 2) :]
                shift = np.uint8(4 * (s % 2))
                for j in range(16):
                    q = (codes[j] >> shift) & np.uint8(15)
                    y[16 * s + j] = scale * _VALUES[first + np.int64(q)]


@kernel
def _profiles(xs, w, tops, p, r, scratch):
    """Profiles of the 16 sub-blocks: [s, 0] the best of both signs and codebooks, [s, 1] of negative scales only."""
    p[:], r[:], scratch[:] = np.float32(0), np.float32(0), np.float32(0)
    for s in range(16):
        x, weight = xs[16 * s : 16 * s + 16], w[16 * s : 16 * s + 16]
        tops[s] = np.float32(0)
        for j in range(16):
            tops[s] = max(tops[s], abs(x[j]))
        if tops[s] == np.float32(0):
            continue
        first, step = _LO / tops[s], (_HI - _LO) / (tops[s] * np.float32(PLACES - 1))
        for turn in range(2):
            for book in range(2):
                levels, table = _VALUES[16 * book : 16 * book + 16], _NEAREST[BINS * book : BINS * book + BINS]
                sign = np.float32(2 * turn - 1)
                enter_crossings(x, weight, sign, levels, table, first, step, scratch[0], scratch[1])
                merge_profile(scratch[0], scratch[1], first, step, p[s, 0], r[s, 0])
            if turn == 0:
                p[s, 1], r[s, 1] = p[s, 0], r[s, 0]


@kernel
def _promise(d, top, p, r):
    """The |m| that the profile of a sub-block likes best under super-scale d, and the error it removes."""
    first, per_step = _LO / top, np.float32(PLACES - 1) * top / (_HI - _LO)
    low, high = int(top / (_HI * d)), int(top / (_LO * d)) + 1
    best, choice = np.float32(0), 0
    low = min(max(low, 1), 31)
    for m in range(low, min(high, 31) + 1):
        gain = profile_gain(p[0], r[0], d * np.float32(m), first, per_step)
        if gain > best:
            best, choice = gain, m
    if high >= 32:  # of the two signs only -32 exists
        gain = profile_gain(p[1], r[1], d * np.float32(32), first, per_step)
        if gain > best:
            best, choice = gain, 32
    return best, choice


@kernel
def _first_scale(unit, tops, p, r):
    """The super-scale, of a grid around the usual one, under which the profiles promise the least error."""
    usual = np.float32(0)
    for s in range(16):
        usual = max(usual, tops[s] / np.float32(127 * 32))
    best, choice = np.float32(-1), np.float32(0)
    for g in range(_SCALES):
        d = storable(usual * (_LEAST + (_MOST - _LEAST) * np.float32(g) / np.float32(_SCALES - 1)), unit)
        if d == choice:
            continue
        total = np.float32(0)
        for s in range(16):
            if tops[s] > np.float32(0):
                total += _promise(d, tops[s], p[s], r[s])[0]
        if total > best:
            best, choice = total, d
    return choice


@kernel
def _choose(x, w, d, near, scales, twice, offsets, errors):
    """The best multiplier with |m| next to `near`, of either sign, and codebook, by the exact error of nearest codes.

    The arrays of 16 are scratch: what is tried stands side by side, so that the inner loop runs in SIMD lanes.
    Returns multiplier, codebook and error; multiplier 0 where nothing beats zeros.
    """
    least = max(near - 1, 1)
    for c in range(12):
        m = (least + c // 4) * (2 * (c % 2) - 1)
        scales[c] = d * np.float32(max(min(m, 31), -32))
        twice[c] = np.float32(2) / scales[c]
        offsets[c] = BINS * (c // 2 % 2)
    errors[:] = np.float32(0)
    best = np.float32(0)
    for j in range(16):
        best += w[j] * (x[j] * x[j])
        for c in range(12):
            t = min(max(x[j] * twice[c] + np.float32(256), np.float32(0)), np.float32(BINS - 1))
            rest = x[j] - scales[c] * _ROUNDED[np.int32(t) + offsets[c]]
            errors[c] += w[j] * (rest * rest)
    multiplier, book = 0, 0
    for c in range(12):
        if errors[c] < best:
            best, book = errors[c], c // 2 % 2
            multiplier = max(min((least + c // 4) * (2 * (c % 2) - 1), 31), -32)
    return multiplier, book, best


@kernel
def _refit(xs, w, d, multipliers, books):
    """The super-scale of least error for the codes that d, multipliers and codebooks give."""
    p = q = np.float32(0)
    for s in range(16):
        if multipliers[s] == 0:
            continue
        m = np.float32(multipliers[s])
        inverse = np.float32(1) / (d * m)
        for j in range(16 * s, 16 * s + 16):
            c = m * _ROUNDED[bin_of(xs[j] * inverse) + BINS * books[s]]
            p += w[j] * (xs[j] * c)
            q += w[j] * (c * c)
    return p / q if q > np.float32(0) else np.float32(0)


@kernel
def _search(xs, w, unit, multipliers, books, space):
    """Super-scale of a block; its multipliers and codebooks go to `multipliers` and `books`, int64[2, 16], row 0."""
    tops, p, r, scratch, lanes, offsets = space
    _profiles(xs, w, tops, p, r, scratch)
    d = _first_scale(unit, tops, p, r)
    least, best = np.float32(np.inf), d
    for _ in range(_ROUNDS):
        total = np.float32(0)
        for s in range(16):
            multipliers[1, s], books[1, s] = 0, 0
            if tops[s] > np.float32(0):
                near = _promise(d, tops[s], p[s], r[s])[1]
                x, weight = xs[16 * s : 16 * s + 16], w[16 * s : 16 * s + 16]
                multipliers[1, s], books[1, s], error = _choose(
                    x, weight, d, near, lanes[0], lanes[1], offsets, lanes[2]
                )
                total += error
        if total < least:
            least, best = total, d
            multipliers[0], books[0] = multipliers[1], books[1]
        refitted = _refit(xs, w, d, multipliers[1], books[1])
        if refitted <= np.float32(0) or storable(refitted, unit) == d:
            break
        d = storable(refitted, unit)
    return best


@kernel
def _store(xs, unit, d, multipliers, books, out):
    """Write a block: header, multipliers, and the codes nearest under them."""
    out[:] = np.uint8(0)
    put_half(out, 0, d * unit)
    for s in range(16):
        m = multipliers[s] + 32
        out[2 + s // 8] |= np.uint8(books[s] << (s % 8))
        out[4 + s // 4] |= np.uint8((m >> 4) << (2 * (s % 4)))
        out[8 + s // 2] |= np.uint8((m & 15) << (4 * (s % 2)))
        inverse = np.float32(1) / (d * np.float32(multipliers[s])) if multipliers[s] else np.float32(0)
        for j in range(16):
            code = _NEAREST[bin_of(xs[16 * s + j] * inverse) + BINS * books[s]]
            out[16 + 16 * (s // 2) + j] |= np.uint8(code << (4 * (s % 2)))


@kernel
def _encode(x, importance, out):
    rows, n = x.shape
    xs, w = np.empty(256, np.float32), np.empty(256, np.float32)
    multipliers, books = np.empty((2, 16), np.int64), np.empty((2, 16), np.int64)
    space = (
        np.empty(16, np.float32),
        np.empty((16, 2, PLACES), np.float32),
        np.empty((16, 2, PLACES), np.float32),
        np.empty((2, PLACES), np.float32),
        np.empty((3, 16), np.float32),
        np.empty(16, np.int64),
    )
    for row in range(rows):
        for b in range(n // 256):
            block = out[row, BLOCK * b : BLOCK * b + BLOCK]
            unit, mean = load_block(x[row, 256 * b : 256 * b + 256], xs, np.float32(2.0**-25))
            if unit == np.float32(0):
                block[:] = np.uint8(0)
                continue
            given = relative_importance(importance, 256 * b, w)
            for i in range(256):
                square = xs[i] * xs[i]
                w[i] *= np.sqrt(np.float32(2) * mean + square) if given else mean + square
            d = _search(xs, w, unit, multipliers, books, space)
            _store(xs, unit, d, multipliers[0], books[0], block)


class IQ4_K(QuantType):
    name, ggml_type, file_type = "iq4_k", 139, 140
    block_size, block_bytes = 256, BLOCK
    uses_imatrix = True
    encode_rows = staticmethod(_encode)
    decode_rows = staticmethod(_decode)
