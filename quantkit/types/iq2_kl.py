"""IQ2_KL (id 157): rows with one scale; blocks of 256 in sub-blocks of 32, 86 bytes; elements are coded in pairs.

    header   f16       d    of the row
    offset   size      field
    0        u16       sh   bits 2 s, + 1: high bits of the multiplier of sub-block s
    2        4 x u8    sl   nibble s / 4 of sl[s % 4]: its low bits
    6        64 x u8   qs   nibble s % 2 of qs[16 (s / 2) + p]: low bits of the code of pair p, elements 2 p and 2 p + 1
    70       16 x u8   qh   bit s of qh[p]: high bit of the code

    m = sl + 16 sh - 32                     -32 to 31
    y = (d * m) * PAIRS[q]                  two values

Both products are rounded to float32; the code values are integers.

Encode: minimise sum w (x - y)^2 with w = q where an importance q is given, else w = |x| + root v / 16, v being the mean
of x^2 over the row.

1. Under a scale s the error of a pair is a sum over its two elements. `_match` tabulates it for the eight levels of
   each element and takes the best of the 32 pairs, for the 128 pairs of a block in SIMD lanes.
2. `_profile` does so for a range of scales of either sign. From these encodings `best_super_scale` estimates d.
3. In rounds: `_choose` takes the multipliers next to the best and the codes under them, by their exact error; then d
   becomes the least-squares d.

Below, P = sum w x c and R = sum w c^2 of the codes c of a sub-block.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np

from quantkit.codegen.half import half_to_float
from quantkit.codegen.jit import kernel, subkernel
from quantkit.types.base import QuantType
from quantkit.types.families.super_scale import SIGNED, best_super_scale, nearest_multiplier
from quantkit.types.families.superblock import load_block, put_half, relative_importance, storable

if TYPE_CHECKING:
    from quantkit.types.refine.vector_codes import VectorCodes

BLOCK = 86
LEVELS = np.array([-63, -40, -23, -10, 1, 13, 28, 47], np.float32)
# The levels of each pair's first and second element.
FIRST = np.array([0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 4, 5, 5, 5, 5, 5, 6, 6, 6, 6, 6, 7, 7])
SECOND = np.array([2, 5, 0, 3, 5, 7, 1, 2, 4, 5, 6, 0, 4, 5, 7, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 0, 2, 4, 6, 7, 2, 5])
PAIRS = np.stack([LEVELS[FIRST], LEVELS[SECOND]], axis=1)

_MAGNITUDE_OFFSET = np.float32(1 / 16)  # root mean squares added to |x| in the weight without importance

Lanes = tuple[np.ndarray, ...]  # pull, weight, scales, tables, best, code, p, r, scratch: see `_encode`
Space = tuple[Lanes, np.ndarray, np.ndarray, np.ndarray]  # lanes; P, R and gains by sub-block
LANES = 128  # the pairs of a block: pair p of sub-block s is lane 8 p + s
_FIRST_LEVELS = np.ascontiguousarray(PAIRS[:, 0])
_SECOND_LEVELS = np.ascontiguousarray(PAIRS[:, 1])

# For effort fast, normal, best: scales of either sign in the profile, super-scales, multipliers tried, rounds.
_PROFILE = np.array([4, 8, 16])
_SUPER = np.array([12, 24, 96])
_TRIES = np.array([1, 3, 5])
_ROUNDS = np.array([1, 1, 3])
_LO, _HI = np.float32(40), np.float32(100)  # a profile's scales let the largest element become this many units


@kernel
def _decode(data: np.ndarray, out: np.ndarray) -> None:
    rows, n = out.shape
    for row in range(rows):
        d = half_to_float(np.uint16(data[row, 0]) | np.uint16(data[row, 1]) << np.uint16(8))
        for b in range(n // 256):
            block = data[row, 2 + BLOCK * b : 2 + BLOCK * b + BLOCK]
            high = np.uint32(block[0]) | np.uint32(block[1]) << np.uint32(8)
            for s in range(8):
                low = (block[2 + s % 4] >> np.uint8(4 * (s // 4))) & np.uint8(15)
                high_bits = (high >> np.uint32(2 * s)) & np.uint32(3)
                scale = d * np.float32(np.int32(low) + np.int32(16) * np.int32(high_bits) - np.int32(32))
                y = out[row, 256 * b + 32 * s : 256 * b + 32 * s + 32]
                for p in range(16):
                    code = (block[6 + 16 * (s // 2) + p] >> np.uint8(4 * (s % 2))) & np.uint8(15)
                    code |= ((block[70 + p] >> np.uint8(s)) & np.uint8(1)) << np.uint8(4)
                    y[2 * p] = scale * PAIRS[code, 0]
                    y[2 * p + 1] = scale * PAIRS[code, 1]


@subkernel
def _load_lanes(xs: np.ndarray, w: np.ndarray, start: int, pull: np.ndarray, weight: np.ndarray) -> None:
    """Fill pull (w x) and weight (w), float32[element of the pair, lane], of the block that starts at `at`."""
    for s in range(8):
        for p in range(16):
            for e in range(2):
                i = start + 32 * s + 2 * p + e
                pull[e, 8 * p + s] = w[i] * xs[i]
                weight[e, 8 * p + s] = w[i]


@subkernel
def _match(
    pull: np.ndarray,
    weight: np.ndarray,
    scales: np.ndarray,
    tables: np.ndarray,
    best: np.ndarray,
    code: np.ndarray,
    p: np.ndarray,
    r: np.ndarray,
) -> None:
    """The best pairs of a block under its sub-blocks' `scales`, in `code`, and their P and R of each sub-block."""
    for i in range(8):
        level = LEVELS[i]
        for lane in range(LANES):
            s = scales[lane]
            for e in range(2):
                tables[e, i, lane] = s * level * (pull[e, lane] + pull[e, lane] - s * level * weight[e, lane])
    for lane in range(LANES):
        best[lane], code[lane] = np.float32(-1e30), np.uint32(0)
    for q in range(0, 32, 4):
        for lane in range(LANES):
            best_gain, best_code = best[lane], code[lane]
            for k in range(4):
                gain = tables[0, FIRST[q + k], lane] + tables[1, SECOND[q + k], lane]
                best_code = np.uint32(q + k) if gain > best_gain else best_code
                best_gain = gain if gain > best_gain else best_gain
            best[lane], code[lane] = best_gain, best_code
    p[:], r[:] = np.float32(0), np.float32(0)
    for pair in range(16):
        for s in range(8):
            lane = 8 * pair + s
            a, b = _FIRST_LEVELS[code[lane] & np.uint32(31)], _SECOND_LEVELS[code[lane] & np.uint32(31)]
            p[s] += pull[0, lane] * a + pull[1, lane] * b
            r[s] += weight[0, lane] * (a * a) + weight[1, lane] * (b * b)


@subkernel
def _profile(xs: np.ndarray, w: np.ndarray, count: int, subs_p: np.ndarray, subs_r: np.ndarray, space: Lanes) -> None:
    """P and R, float32[2 count, sub-block], of the best codes under `count` scales of either sign."""
    pull, weight, scales, tables, best, code, p, r, maxima = space
    for b in range(len(xs) // 256):
        _load_lanes(xs, w, 256 * b, pull, weight)
        for s in range(8):
            maxima[s] = np.float32(0)
            for i in range(256 * b + 32 * s, 256 * b + 32 * s + 32):
                maxima[s] = max(maxima[s], abs(xs[i]))
        for k in range(2 * count):
            units = _LO + (_HI - _LO) * np.float32(k // 2) / np.float32(count - 1)
            factor = (np.float32(1) if k % 2 else np.float32(-1)) / units
            for lane in range(LANES):
                scales[lane] = factor * maxima[lane % 8]
            _match(pull, weight, scales, tables, best, code, p, r)
            for s in range(8):
                subs_p[k, 8 * b + s], subs_r[k, 8 * b + s] = p[s], r[s]


@subkernel
def _choose(
    xs: np.ndarray,
    w: np.ndarray,
    tries: int,
    d: np.float32,
    initial: np.ndarray,
    codes: np.ndarray,
    multipliers: np.ndarray,
    space: Lanes,
) -> tuple[np.float32, np.float32]:
    """Choose multipliers near `initial` and codes by their exact error under d. Returns sum m P and sum m^2 R."""
    pull, weight, scales, tables, best, code, p, r, gains = space
    sum_p = sum_r = np.float32(0)
    best_p, best_r = np.empty(8, np.float32), np.empty(8, np.float32)
    for b in range(len(xs) // 256):
        _load_lanes(xs, w, 256 * b, pull, weight)
        for k in range(tries):
            offset = np.float32((k + 1) // 2 * (1 - k % 2 * 2))
            for lane in range(LANES):
                scales[lane] = d * nearest_multiplier(initial[8 * b + lane % 8] + offset, SIGNED)
            _match(pull, weight, scales, tables, best, code, p, r)
            for s in range(8):
                gain = scales[s] * (p[s] + p[s] - scales[s] * r[s])
                if k == 0 or gain > gains[s]:
                    gains[s], best_p[s], best_r[s] = gain, p[s], r[s]
                    multipliers[8 * b + s] = nearest_multiplier(initial[8 * b + s] + offset, SIGNED)
                    for pair in range(16):
                        codes[128 * b + 16 * s + pair] = np.uint8(code[8 * pair + s])
        for s in range(8):
            m = multipliers[8 * b + s]
            sum_p += m * best_p[s]
            sum_r += m * m * best_r[s]
    return sum_p, sum_r


@subkernel
def _search(
    xs: np.ndarray,
    w: np.ndarray,
    unit: np.float32,
    effort: int,
    codes: np.ndarray,
    multipliers: np.ndarray,
    space: Space,
) -> np.float32:
    """The super-scale d of a row. Row 0 of codes uint8[2, n / 2] and multipliers float32[3, n / 32] are results."""
    lanes, p, r, gains = space
    count = _PROFILE[effort]
    _profile(xs, w, count, p, r, lanes)
    initial = multipliers[2]
    d = best_super_scale(unit, SIGNED, _SUPER[effort], p[: 2 * count], r[: 2 * count], gains, initial)
    best_gain, best_d = np.float32(-1), d
    for _ in range(_ROUNDS[effort]):
        sum_p, sum_r = _choose(xs, w, _TRIES[effort], d, initial, codes[1], multipliers[1], lanes)
        refitted = storable(sum_p / sum_r, unit) if sum_p > np.float32(0) else d
        gain = refitted * (sum_p + sum_p - refitted * sum_r)
        if gain > best_gain:
            best_gain, best_d = gain, refitted
            for i in range(codes.shape[1]):
                codes[0, i] = codes[1, i]
            for s in range(len(initial)):
                multipliers[0, s] = multipliers[1, s]
        if refitted == d:
            break
        d = refitted
        for s in range(len(initial)):
            initial[s] = multipliers[1, s]
    return storable(best_d, unit)


@subkernel
def _store(codes: np.ndarray, multipliers: np.ndarray, block: np.ndarray) -> None:
    """Write a block: the codes of its 128 pairs, the multipliers of its 8 sub-blocks."""
    block[:] = np.uint8(0)
    for s in range(8):
        m = np.uint32(multipliers[s] + np.float32(32))
        block[s // 4] |= np.uint8(m >> np.uint32(4) << np.uint32(2 * (s % 4)))
        block[2 + s % 4] |= np.uint8((m & np.uint32(15)) << np.uint32(4 * (s // 4)))
        for p in range(16):
            code = codes[16 * s + p]
            block[6 + 16 * (s // 2) + p] |= np.uint8((code & np.uint8(15)) << np.uint8(4 * (s % 2)))
            block[70 + p] |= np.uint8(code >> np.uint8(4) << np.uint8(s))


@kernel
def _encode(x: np.ndarray, importance: np.ndarray, effort: int, out: np.ndarray) -> None:
    rows, n = x.shape
    xs, w = np.empty(n, np.float32), np.empty(n, np.float32)
    codes, multipliers = np.empty((2, n // 2), np.uint8), np.empty((3, n // 32), np.float32)
    lanes = (
        np.empty((2, LANES), np.float32),
        np.empty((2, LANES), np.float32),
        np.empty(LANES, np.float32),
        np.empty((2, 8, LANES), np.float32),
        np.empty(LANES, np.float32),
        np.empty(LANES, np.uint32),
        np.empty(8, np.float32),
        np.empty(8, np.float32),
        np.empty(8, np.float32),
    )
    profiles = 2 * _PROFILE[effort]
    p, r = np.empty((profiles, n // 32), np.float32), np.empty((profiles, n // 32), np.float32)
    space = (lanes, p, r, np.empty(n // 32, np.float32))
    for row in range(rows):
        unit, mean = load_block(x[row], xs, np.float32(2.0**-25))
        if unit == np.float32(0):
            out[row] = np.uint8(0)
            continue
        if not relative_importance(importance, 0, w):
            offset = _MAGNITUDE_OFFSET * np.sqrt(mean)
            for i in range(n):
                w[i] = abs(xs[i]) + offset
        put_half(out[row], 0, _search(xs, w, unit, effort, codes, multipliers, space) * unit)
        for b in range(n // 256):
            start = 2 + BLOCK * b
            _store(
                codes[0, 128 * b : 128 * b + 128], multipliers[0, 8 * b : 8 * b + 8], out[row, start : start + BLOCK]
            )


_S, _P = np.divmod(np.arange(128)[:, None], 16)  # sub-block and number in it of each pair
_PAIR_BITS = np.concatenate([8 * (6 + 16 * (_S // 2) + _P) + 4 * (_S % 2) + np.arange(4), 8 * (70 + _P) + _S], axis=1)


class IQ2_KL(QuantType):
    """IQ2_KL: rows with one scale; blocks of 256 in sub-blocks of 32, 86 bytes; elements are coded in pairs."""

    name, ggml_type, file_type = "iq2_kl", 157, 155
    block_size, block_bytes, row_meta_bytes = 256, BLOCK, 2
    uses_imatrix = True
    encode_rows = staticmethod(_encode)
    decode_rows = staticmethod(_decode)

    @functools.cached_property
    def vector_codes(self) -> VectorCodes:
        from quantkit.types.refine.vector_codes import make_codes

        return make_codes(2, BLOCK, PAIRS.astype(np.int8)[None], _PAIR_BITS)
