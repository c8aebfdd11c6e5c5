"""Scales of blocks of 32 in closed form: for effort below "best" where all elements weigh the same.

There ik_llama.cpp does not search: it takes the scale that puts the largest element on the last code, at the speed of
memory. These kernels do so for one or a few candidates, then move each to the least-squares optimum of its codes,

    y = d q:      d = d0 P / Q                          P = sum t q, Q = sum q^2,   t = x / d0
    y = d q + m:  d = d0 (32 P - T S) / (32 Q - S^2)    S = sum q,   T = sum t,     t = (x - low) / d0

round it to a half, and keep the candidate that removes most error. With t in fixed point all sums are integer sums:
their order does not matter. So SIMD instructions sum a block in place, with the same result on every CPU.
"""

from __future__ import annotations

import numpy as np

from quantkit.codegen.jit import kernel
from quantkit.types.families.block32.scale_search import at_least_smallest_half, extremes, inverse_of, nearest_half

_ZERO, _HALF, _ONE, _TWO, _COUNT = np.float32(0), np.float32(0.5), np.float32(1), np.float32(2), np.float32(32)
_ROUND = np.float32(3 << 22)  # see `block32.scale_search`
_FIXED = np.float32(1 << 11)  # of fixed point: 32 sums of |t| < 128 times |q| < 128 stay below 2^30


@kernel
def _sums(
    x: np.ndarray, inverses: np.ndarray, lo: np.float32, hi: np.float32, products: np.ndarray, squares: np.ndarray
) -> None:
    """P and Q of the codes in [lo, hi] nearest to t = x * inverse; P in fixed point. |t| must not be above 128."""
    for b in range(len(x)):
        inverse = inverses[b]
        p = q = np.int32(0)
        for j in range(32):
            t = x[b, j] * inverse
            code = np.int32((min(max(t, lo), hi) + _ROUND) - _ROUND)
            p += np.int32(np.int32(t * _FIXED) * code)
            q += np.int32(code * code)
        products[b], squares[b] = p, q


@kernel
def _keep_better(
    extreme: np.ndarray,
    first: np.ndarray,
    products: np.ndarray,
    squares: np.ndarray,
    gains: np.ndarray,
    scales: np.ndarray,
) -> None:
    """Move the candidates `first` float32[count] to their optima; keep in `scales` what beats `gains`.

    Gains are in units of the largest element squared, so that they never overflow.
    """
    for b in range(len(first)):
        p, q = np.float32(products[b]) * (_ONE / _FIXED), np.float32(squares[b])
        stored = nearest_half(first[b] * (p * inverse_of(q)))
        moved = stored * inverse_of(first[b])
        unit = first[b] * inverse_of(extreme[b])
        gain = unit * unit * (moved * (_TWO * p - moved * q))
        better = gain > gains[b]
        gains[b] = gain if better else gains[b]
        scales[b] = stored if better else scales[b]


@kernel
def find_scales(
    x: np.ndarray, starts: np.ndarray, lo: np.float32, hi: np.float32, space: np.ndarray, scales: np.ndarray
) -> None:
    """scales float32[LANES]: those, exactly halves, of the blocks of x float32[count, 32]; codes lie in [lo, hi].

    Candidates are `starts` times the block's extreme element. `space` float32[6, LANES] is scratch.
    """
    count = len(x)
    extreme, first, inverse, gains = space[0, :count], space[1, :count], space[2, :count], space[3, :count]
    products, squares = space[4, :count].view(np.int32), space[5, :count].view(np.int32)
    extremes(x, extreme)
    gains[:] = scales[:] = _ZERO
    for k in range(starts.size):
        for b in range(count):
            first[b] = at_least_smallest_half(extreme[b] * starts[k], _ONE)
            inverse[b] = inverse_of(first[b])
        _sums(x, inverse, lo, hi, products, squares)
        _keep_better(extreme, first, products, squares, gains, scales)


@kernel
def _ranges(x: np.ndarray, lows: np.ndarray, highs: np.ndarray) -> None:
    """The least and the largest element of each block; see `scale_search.extremes`.

    Bits compare as integers do once those of negative numbers, but for the sign, are inverted.
    """
    for b in range(len(x)):
        low, high = np.int32(0x7FFFFFFF), np.int32(-0x80000000)
        for j in range(x.shape[1]):
            bits = np.float32(x[b, j]).view(np.int32)
            bits = np.int32(bits ^ np.int32(np.int32(bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))
            low, high = np.int32(min(low, bits)), np.int32(max(high, bits))
        lows[b] = np.int32(low ^ np.int32(np.int32(low >> np.int32(31)) & np.int32(0x7FFFFFFF))).view(np.float32)
        highs[b] = np.int32(high ^ np.int32(np.int32(high >> np.int32(31)) & np.int32(0x7FFFFFFF))).view(np.float32)


@kernel
def _affine_sums(x: np.ndarray, lows: np.ndarray, inverses: np.ndarray, max_code: np.float32, sums: np.ndarray) -> None:
    """Rows of sums int32[3, count]: P and T in fixed point; Q + 2^16 S of the codes nearest to t."""
    for b in range(len(x)):
        low, inverse = lows[b], inverses[b]
        p = s = c = np.int32(0)
        for j in range(32):
            t = min((x[b, j] - low) * inverse, max_code)
            code = np.int32((t + _ROUND) - _ROUND)
            fixed = np.int32(t * _FIXED)
            p += np.int32(fixed * code)
            s += fixed
            c += np.int32(code * np.int32(code + np.int32(0x10000)))
        sums[0, b], sums[1, b], sums[2, b] = p, s, c


@kernel
def find_scales_and_mins(
    x: np.ndarray, max_code: np.float32, space: np.ndarray, scales: np.ndarray, minima: np.ndarray
) -> None:
    """scales, minima float32[LANES]: the pairs, exactly halves, of the blocks of x float32[count, 32].

    Codes 0 ... top span each block's range; `space` float32[6, LANES] is scratch.
    """
    count = len(x)
    lows, highs, inverses, sums = space[0, :count], space[1, :count], space[2, :count], space[3:].view(np.int32)
    _ranges(x, lows, highs)
    for b in range(count):
        half_span = highs[b] * _HALF - lows[b] * _HALF  # the span itself may overflow
        highs[b] = at_least_smallest_half(half_span * (_TWO / max_code), _ONE)
        inverses[b] = inverse_of(highs[b])
    _affine_sums(x, lows, inverses, max_code, sums)
    for b in range(count):
        p, t = np.float32(sums[0, b]) * (_ONE / _FIXED), np.float32(sums[1, b]) * (_ONE / _FIXED)
        q, s = np.float32(sums[2, b] & np.int32(0xFFFF)), np.float32(np.int32(sums[2, b] >> np.int32(16)))
        slope = (_COUNT * p - t * s) * inverse_of(_COUNT * q - s * s)
        scales[b] = nearest_half(highs[b] * slope)
        minima[b] = nearest_half(lows[b] + (highs[b] * t - scales[b] * s) * (_ONE / _COUNT))
