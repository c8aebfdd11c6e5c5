"""Search for the scale of a block of 32: the encoder shared by the types `y = d * q`, and parts for all others.

    minimise  sum over the block of  w * (x - d * q)^2      w = importance of the column (1 without)
    over      d, an IEEE half, and the codes q, integers in [lo, hi]

A candidate `d` gives nearest codes q = round(x / d) and three sums over the block,

    E = sum w r^2,  D = sum w r q,  Q = sum w q^2           with r = x - d q

from which the error of the same codes under any other scale d + s follows: E - 2 s D + s^2 Q, least at s = D / Q.
So each candidate is moved to its own optimum, rounded to the half a file can hold, and scored *after* rounding; the
codes finally stored are those nearest under the stored half, which can only lower the score. Candidates come from a
grid around `largest element / largest code`; the best is then improved by re-deriving codes until nothing changes.
Where one column outweighs the rest of its block, as massive activations make it do, the scales under which its element
is a whole code are candidates too: what remains is then the rounding of the half, and each of them has its own.

Kernels look at LANES blocks at once, one per SIMD lane: sums are formed element by element in a fixed order, so the
bytes depend neither on the width of the CPU's vectors nor on threads. Two flat float32 arrays hold everything:

    data   element j of lane l at data[j * LANES + l]; its weight at data[(32 + j) * LANES + l]
    state  value k of lane l at state[k * LANES + l], k one of the names below

Blocks are scaled by a power of two to a largest magnitude in [1, 2), weights likewise, so nothing overflows. A weight
is at least 2^-20 of the block's largest, and 1 where the importance of the whole block is zero: a column the
calibration never saw is still encoded sanely. Scales end at the largest half: elements beyond 65504 times the largest
code are clipped, never stored as Inf. Candidates begin at the smallest half, so that blocks of weights around 1e-7 keep
what can be kept.

Why the importance alone: the reference multiplies it by sqrt(mean x^2 + x^2). Weights that grow with size were tried on
SmolLM2, over two random roundings of the source weights. Without importance the KL divergence moved by -11% and -1%
(Q4_0), +1% (IQ4_NL) and +17% (Q4_1); with it, in one run, from 0.128 to 0.137 (Q4_0). No gain could be shown.
"""

from __future__ import annotations

import numpy as np

from quantkit.jit import kernel

LANES = 64
DATA_SIZE = 2 * 32 * LANES

# Rows of `state`.
SCALE = 0  # the candidate d, in units of UNIT
INVERSE = 1  # 1 / d, 0 for d = 0
ERROR = 2  # E
SLOPE = 3  # D
CURVE = 4  # Q
BEST = 5  # least error so far ...
BEST_SCALE = 6  # ... and its d
UNIT = 7  # power of two the block was divided by
EXTREME = 8  # element of largest magnitude, with its sign
ANCHOR = 9  # element that outweighs its block, 0 where none does
STATE_SIZE = 10 * LANES

_ZERO = np.float32(0)
_ONE = np.float32(1)
_TWO = np.float32(2)
_HALF_MAX = np.float32(65504)
_HALF_TINY = np.float32(2.0**-24)
_ROUND = np.float32(3 << 22)  # adding and subtracting it rounds |t| < 2^22 to an integer, ties to even
_LEAST_WEIGHT = np.float32(2.0**-20)
_OUTWEIGHS = np.float32(0.8)  # of the block's sum w x^2


@kernel(inline="always")
def nearest_half(v):
    """The half nearest to `v` as a float32, ties to even; magnitudes above 65504 become 65504. Branch-free."""
    v = min(max(v, -_HALF_MAX), _HALF_MAX)
    exponent = max(np.float32(v).view(np.uint32) & np.uint32(0x7F800000), np.uint32(113 << 23))
    shift = np.uint32(exponent + np.uint32(13 << 23) + np.uint32(1 << 22)).view(np.float32)
    return np.float32(np.float32(v + shift) - shift)


@kernel(inline="always")
def at_least_tiny(v, unit):
    """`v`, in units of `unit`, moved away from zero to the smallest half where it is below that but not zero."""
    tiny = _HALF_TINY * (_ONE / unit)
    if v == _ZERO or abs(v) >= tiny:
        return v
    return tiny if v > _ZERO else -tiny


@kernel(inline="always")
def power_below(v):
    """The power of two at or below `v` >= 0, held to [2^-60, 2^126] so that it has an inverse."""
    bits = np.float32(v).view(np.uint32) & np.uint32(0x7F800000)
    return np.uint32(min(max(bits, np.uint32(67 << 23)), np.uint32(253 << 23))).view(np.float32)


@kernel
def load_blocks(x, importance, first, data, state):
    """Fill `data`, UNIT and EXTREME from blocks first ... first + LANES - 1 of float32[rows, n]; zeros past the end."""
    columns = x.shape[1]
    flat = x.reshape(-1)
    for lane in range(LANES):
        at = (first + lane) * 32
        if at >= flat.size:
            for j in range(32):
                data[j * LANES + lane] = _ZERO
                data[(32 + j) * LANES + lane] = _ONE
            state[UNIT * LANES + lane] = _ONE
            state[EXTREME * LANES + lane] = _ZERO
            continue
        extreme = flat[at]
        for j in range(1, 32):
            if abs(flat[at + j]) > abs(extreme):
                extreme = flat[at + j]
        unit = power_below(abs(extreme))
        state[UNIT * LANES + lane] = unit
        state[EXTREME * LANES + lane] = extreme * (_ONE / unit)
        for j in range(32):
            data[j * LANES + lane] = flat[at + j] * (_ONE / unit)
        _load_weights(importance, at % columns, data, lane)


@kernel
def _load_weights(importance, column, data, lane):
    largest = _ZERO
    if importance.size:
        for j in range(32):
            largest = max(largest, importance[column + j])
    if largest == _ZERO:
        for j in range(32):
            data[(32 + j) * LANES + lane] = _ONE
        return
    unit = _ONE / power_below(largest)
    for j in range(32):
        data[(32 + j) * LANES + lane] = max(importance[column + j] * unit, _LEAST_WEIGHT)


@kernel
def clear_sums(state):
    """E, D, Q to zero and INVERSE from SCALE."""
    for lane in range(LANES):
        scale = state[SCALE * LANES + lane]
        state[INVERSE * LANES + lane] = _ONE / scale if scale != _ZERO else _ZERO
        state[ERROR * LANES + lane] = _ZERO
        state[SLOPE * LANES + lane] = _ZERO
        state[CURVE * LANES + lane] = _ZERO


@kernel
def _sums(data, state, lo, hi):
    """E, D and Q of the nearest codes in [lo, hi] under each lane's SCALE."""
    clear_sums(state)
    for j in range(32):
        for lane in range(LANES):
            x = data[j * LANES + lane]
            w = data[(32 + j) * LANES + lane]
            t = min(max(x * state[INVERSE * LANES + lane], lo), hi)
            q = (t + _ROUND) - _ROUND
            r = x - state[SCALE * LANES + lane] * q
            wr = w * r
            state[ERROR * LANES + lane] += wr * r
            state[SLOPE * LANES + lane] += wr * q
            state[CURVE * LANES + lane] += w * q * q


@kernel
def keep_better(state):
    """Score each candidate, given E, D and Q, as a half and moved to its best half; keep what beats BEST.

    A scale of 0 is no candidate. The unmoved one keeps weights exact that were on a grid before.
    """
    for lane in range(LANES):
        scale = state[SCALE * LANES + lane]
        slope = state[SLOPE * LANES + lane]
        curve = state[CURVE * LANES + lane]
        unit = state[UNIT * LANES + lane]
        fitted = scale + (slope / curve if curve > _ZERO else _ZERO)
        stored = nearest_half(fitted * unit) * (_ONE / unit)
        step = stored - scale
        error = state[ERROR * LANES + lane] - step * (_TWO * slope - step * curve)
        unmoved = nearest_half(scale * unit) * (_ONE / unit)
        step = unmoved - scale
        error_unmoved = state[ERROR * LANES + lane] - step * (_TWO * slope - step * curve)
        stored = unmoved if error_unmoved < error else stored
        error = min(error, error_unmoved)
        better = error < state[BEST * LANES + lane] and scale != _ZERO
        state[BEST * LANES + lane] = error if better else state[BEST * LANES + lane]
        state[BEST_SCALE * LANES + lane] = stored if better else state[BEST_SCALE * LANES + lane]


@kernel
def start(state):
    """No candidate seen yet."""
    for lane in range(LANES):
        state[BEST * LANES + lane] = np.float32(np.inf)
        state[BEST_SCALE * LANES + lane] = _ZERO


@kernel
def find_anchors(data, state):
    """Fill ANCHOR; tells whether any lane has one."""
    found = False
    for lane in range(LANES):
        total = most = anchor = _ZERO
        for j in range(32):
            x = data[j * LANES + lane]
            squared = data[(32 + j) * LANES + lane] * x * x
            total += squared
            if squared > most:
                most, anchor = squared, x
        if most <= _OUTWEIGHS * total:
            anchor = _ZERO
        state[ANCHOR * LANES + lane] = anchor
        if anchor != _ZERO:
            found = True
    return found


@kernel
def propose(state, origin, factor):
    """Make factor * value `origin` of the state (EXTREME, BEST_SCALE or ANCHOR) the candidate of every lane."""
    for lane in range(LANES):
        unit = state[UNIT * LANES + lane]
        state[SCALE * LANES + lane] = at_least_tiny(state[origin * LANES + lane] * factor, unit)


@kernel
def find_scales(x, importance, grid, steps, lo, hi, scales):
    """scales float32[blocks]: the stored scale (exactly a half) of every block of x float32[rows, n].

    Candidates are `grid` times the block's extreme element, its anchor divided by every code, then each of `steps`
    times the best so far.
    """
    data = np.empty(DATA_SIZE, np.float32)
    state = np.empty(STATE_SIZE, np.float32)
    for first in range(0, scales.size, LANES):
        load_blocks(x, importance, first, data, state)
        start(state)
        for k in range(grid.size):
            propose(state, EXTREME, grid[k])
            _sums(data, state, lo, hi)
            keep_better(state)
        if importance.size and find_anchors(data, state):
            for k in range(np.int64(lo), np.int64(hi) + 1):
                if k:
                    propose(state, ANCHOR, _ONE / np.float32(k))
                    _sums(data, state, lo, hi)
                    keep_better(state)
        for k in range(steps.size):
            propose(state, BEST_SCALE, steps[k])
            _sums(data, state, lo, hi)
            keep_better(state)
        store_scales(state, first, scales)


@kernel
def store_scales(state, first, scales):
    """Write the lanes' BEST_SCALE, in the units of x, to scales[first ...]."""
    for lane in range(min(LANES, scales.size - first)):
        scales[first + lane] = state[BEST_SCALE * LANES + lane] * state[UNIT * LANES + lane]


@kernel
def nearest_codes(x, scale, lo, hi, codes):
    """codes uint32[32]: the integers in [lo, hi] nearest to x / scale, counted from lo, for x float32[32]."""
    inverse = _ONE / scale if scale != _ZERO else _ZERO
    for j in range(32):
        t = min(max(x[j] * inverse, lo), hi)
        codes[j] = np.uint32(np.int32(((t + _ROUND) - _ROUND) - lo))


def grid_between(codes: tuple[float, ...], low: float, high: float, count: int) -> np.ndarray:
    """Candidates as fractions of the extreme element: for each of the end codes c, it sits at low * c ... high * c.

    Beyond 1 it is clipped to the end code. Steps are geometric.
    """
    return np.concatenate([1.0 / (code * np.geomspace(low, high, count)) for code in codes]).astype(np.float32)


def steps_down(first: float, count: int) -> np.ndarray:
    """Factors for the best scale: 1 + s and 1 - s for `count` sizes s = first, first / 2 ..., then 1 for a refit."""
    sizes = first * 0.5 ** np.arange(count)
    return np.append(np.stack([1 + sizes, 1 - sizes], axis=1), 1.0).astype(np.float32)
