"""Search for the scale of a block of 32: the encoder shared by the types `y = d * q`, and parts for all others.

    minimise  sum over the block of  w * (x - d * q)^2      w = importance of the column (1 without)
    over      d, an IEEE half, and the codes q, integers in [lo, hi]

A candidate `d` gives nearest codes q = round(x / d) and three sums over the block,

    E = sum w r^2,  D = sum w r q,  Q = sum w q^2           with r = x / d - q

from which the error of the same codes under any other scale d (1 + s) follows: d^2 (E - 2 s D + s^2 Q), least at
s = D / Q. So each candidate is moved to its own optimum, rounded to the half a file can hold, and scored *after*
rounding; the codes finally stored are those nearest under the stored half, which can only lower the score. Candidates
come from a grid around `largest element / largest code`; the best is then improved by re-deriving codes.
Where one column outweighs the rest of its block, as massive activations make it do, scales under which its element
is a whole code are candidates too: what remains is then the rounding of the half, and each of them has its own.

Types are encoded in batches of LANES blocks, one per SIMD lane: sums are formed element by element in a fixed order, so
the bytes depend neither on the width of the CPU's vectors nor on threads. Two flat float32 arrays hold everything:

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

from quantkit.codegen.half import float_to_half, half_to_float
from quantkit.codegen.jit import kernel

LANES = 64  # blocks of a batch
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
_HALF = np.float32(0.5)
_ONE = np.float32(1)
_TWO = np.float32(2)
_HALF_MAX = np.float32(65504)
_HALF_TINY = np.float32(2.0**-24)
_ROUND = np.float32(3 << 22)  # adding and subtracting it rounds |t| < 2^22 to an integer, ties to even
_LEAST_WEIGHT = np.float32(2.0**-20)
_OUTWEIGHS = np.float32(0.8)  # of the block's sum w x^2
_NEIGHBOURS = 4  # codes up and down from the one it has that an anchor is tried at


# ------------------------------------------------------------------------------------------------------------- numbers


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


@kernel(inline="always")
def inverse_of(scale):
    """1 / scale; 0 for 0."""
    return _ONE / scale if scale != _ZERO else _ZERO


# ------------------------------------------------------------------------------------------------------------- batches


@kernel
def extremes(x, found):
    """found float32[LANES]: the element of largest magnitude, with its sign, of each block of x float32[count, 32].

    Bits rotated left by one compare as magnitudes do, the sign breaking ties; as integers their largest is found in
    SIMD. The length of the inner loop is read from the array: unrolled for a constant it would not become SIMD.
    """
    for b in range(len(x)):
        most = np.uint32(0)
        for j in range(x.shape[1]):
            bits = np.float32(x[b, j]).view(np.uint32)
            most = np.uint32(max(most, np.uint32(np.uint32(bits << np.uint32(1)) | np.uint32(bits >> np.uint32(31)))))
        found[b] = np.uint32(np.uint32(most >> np.uint32(1)) | np.uint32(most << np.uint32(31))).view(np.float32)


@kernel
def relative_weights(importance):
    """float32[blocks of a row + LANES, 32]: weights of each block's elements, between 2^-20 and 2; no rows without any.

    The first blocks are repeated at the end, so that the weights of any batch, which runs on from row to row, are
    consecutive.
    """
    blocks = importance.size // 32
    weights = np.empty((blocks + LANES if blocks else 0, 32), np.float32)
    for b in range(len(weights)):
        given = importance[32 * (b % blocks) : 32 * (b % blocks) + 32]
        largest = _ZERO
        for j in range(32):
            largest = max(largest, given[j])
        unit = _ONE / power_below(largest)
        for j in range(32):
            weights[b, j] = max(given[j] * unit, _LEAST_WEIGHT) if largest > _ZERO else _ONE
    return weights


@kernel
def load_blocks(x, weights, first, data, state):
    """Fill `data`, UNIT and EXTREME from x float32[count, 32], a batch whose first block is number `first` of all.

    Lanes past `count` become zeros. `weights` are those of `relative_weights`; 1 where there are none.
    """
    extremes(x, state[EXTREME * LANES :])
    for lane in range(len(x), LANES):
        state[EXTREME * LANES + lane] = _ZERO
    for lane in range(LANES):
        unit = power_below(abs(state[EXTREME * LANES + lane]))
        state[UNIT * LANES + lane] = unit
        state[INVERSE * LANES + lane] = _ONE / unit
        state[EXTREME * LANES + lane] *= _ONE / unit
    if len(x) < LANES:
        data[: 32 * LANES] = _ZERO
    for j in range(32):
        for lane in range(len(x)):
            data[j * LANES + lane] = x[lane, j] * state[INVERSE * LANES + lane]
    if len(weights) == 0:
        data[32 * LANES :] = _ONE
        return
    at = first % (len(weights) - LANES)
    some = weights[at : at + LANES]
    for j in range(32):
        for lane in range(LANES):
            data[(32 + j) * LANES + lane] = some[lane, j]


@kernel
def weigh_by_size(data, state, part):
    """Make the weights of a batch that is loaded x^2 + `part` of the block's mean x^2, at least 2^-20."""
    for lane in range(LANES):
        state[ERROR * LANES + lane] = _ZERO
    for j in range(32):
        for lane in range(LANES):
            x = data[j * LANES + lane]
            data[(32 + j) * LANES + lane] = x * x
            state[ERROR * LANES + lane] += x * x
    for j in range(32):
        for lane in range(LANES):
            mean = state[ERROR * LANES + lane] * (part / np.float32(32))
            data[(32 + j) * LANES + lane] = max(data[(32 + j) * LANES + lane] + mean, _LEAST_WEIGHT)


@kernel
def code_of(x, inverse, lo, hi):
    """The integer in [lo, hi] nearest to x * inverse, counted from lo."""
    return np.int32(min(max(x * inverse, lo), hi) + (_HALF - lo))


@kernel
def nibbles(low, high):
    """Two codes of 4 bits as a byte."""
    return np.uint8(np.uint8(low) | np.uint8(np.uint8(high) << np.uint8(4)))


@kernel
def halves_of(values, halves):
    """halves uint16[LANES]: the bits of float32 values that are halves."""
    for lane in range(LANES):
        halves[lane] = float_to_half(values[lane])


@kernel
def half_at(block, at):
    """The value of the half that two bytes of uint8[] hold."""
    return half_to_float(np.uint16(np.uint16(block[at]) | np.uint16(np.uint16(block[at + 1]) << np.uint16(8))))


@kernel
def put_half(half, out, at):
    """Write the bits of a half as two bytes."""
    out[at], out[at + 1] = np.uint8(half), np.uint8(half >> np.uint16(8))


# -------------------------------------------------------------------------------------------------------------- search


@kernel
def clear_sums(state):
    """E, D, Q to zero and INVERSE from SCALE."""
    for lane in range(LANES):
        state[INVERSE * LANES + lane] = inverse_of(state[SCALE * LANES + lane])
        state[ERROR * LANES + lane] = _ZERO
        state[SLOPE * LANES + lane] = _ZERO
        state[CURVE * LANES + lane] = _ZERO


@kernel
def _sums(data, state, lo, hi):
    """E, D and Q of the nearest codes in [lo, hi] under each lane's SCALE."""
    clear_sums(state)
    for j in range(32):
        for lane in range(LANES):
            w = data[(32 + j) * LANES + lane]
            t = data[j * LANES + lane] * state[INVERSE * LANES + lane]
            q = (min(max(t, lo), hi) + _ROUND) - _ROUND
            r = t - q
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
        scale, inverse = state[SCALE * LANES + lane], state[INVERSE * LANES + lane]
        slope, curve = state[SLOPE * LANES + lane], state[CURVE * LANES + lane]
        unit = state[UNIT * LANES + lane]
        fitted = scale + (scale * slope / curve if curve > _ZERO else _ZERO)
        stored = nearest_half(fitted * unit) * (_ONE / unit)
        step = (stored - scale) * inverse
        error = state[ERROR * LANES + lane] - step * (_TWO * slope - step * curve)
        unmoved = nearest_half(scale * unit) * (_ONE / unit)
        step = (unmoved - scale) * inverse
        error_unmoved = state[ERROR * LANES + lane] - step * (_TWO * slope - step * curve)
        stored = unmoved if error_unmoved < error else stored
        error = min(error, error_unmoved) * (scale * scale)
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
    for lane in range(LANES):
        state[ERROR * LANES + lane] = state[SLOPE * LANES + lane] = state[ANCHOR * LANES + lane] = _ZERO
    for j in range(32):
        for lane in range(LANES):
            x = data[j * LANES + lane]
            squared = data[(32 + j) * LANES + lane] * x * x
            most = state[ERROR * LANES + lane]
            state[ANCHOR * LANES + lane] = x if squared > most else state[ANCHOR * LANES + lane]
            state[ERROR * LANES + lane] = max(squared, most)
            state[SLOPE * LANES + lane] += squared
    found = 0
    for lane in range(LANES):
        outweighs = state[ERROR * LANES + lane] > _OUTWEIGHS * state[SLOPE * LANES + lane]
        state[ANCHOR * LANES + lane] = state[ANCHOR * LANES + lane] if outweighs else _ZERO
        found += outweighs
    return found > 0


@kernel
def propose(state, origin, factor):
    """Make factor * value `origin` of the state (EXTREME, BEST_SCALE or ANCHOR) the candidate of every lane."""
    for lane in range(LANES):
        unit = state[UNIT * LANES + lane]
        state[SCALE * LANES + lane] = at_least_tiny(state[origin * LANES + lane] * factor, unit)


@kernel
def propose_anchored(state, away):
    """The candidates near the best scales under which the anchors are whole codes, `away` from the nearest."""
    for lane in range(LANES):
        anchor, scale = state[ANCHOR * LANES + lane], state[BEST_SCALE * LANES + lane]
        code = (anchor * inverse_of(scale) + _ROUND) - _ROUND + away
        candidate = anchor * inverse_of(code)
        state[SCALE * LANES + lane] = at_least_tiny(candidate, state[UNIT * LANES + lane])


@kernel
def find_scales(data, state, grid, steps, lo, hi):
    """BEST_SCALE of a batch that is loaded.

    Candidates are `grid` times the block's extreme element, then each of `steps` times the best so far, then what makes
    the anchor, where there is one, a whole code.
    """
    start(state)
    for k in range(grid.size):
        propose(state, EXTREME, grid[k])
        _sums(data, state, lo, hi)
        keep_better(state)
    for k in range(steps.size):
        propose(state, BEST_SCALE, steps[k])
        _sums(data, state, lo, hi)
        keep_better(state)
    if find_anchors(data, state):
        for k in range(-_NEIGHBOURS, _NEIGHBOURS + 1):
            propose_anchored(state, np.float32(k))
            _sums(data, state, lo, hi)
            keep_better(state)


@kernel
def store_scales(state, scales):
    """scales float32[LANES]: the lanes' BEST_SCALE in the units of x."""
    for lane in range(LANES):
        scales[lane] = state[BEST_SCALE * LANES + lane] * state[UNIT * LANES + lane]


def spread(codes: tuple[float, ...], low: float, high: float, count: int) -> np.ndarray:
    """Candidates as fractions of the extreme element: it sits at low * c ... high * c, c the end codes in turn.

    Beyond 1 it is clipped to the end code. The first put it at c itself; the others follow the golden ratio, so that
    every beginning of the list is spread evenly: how many are tried is a matter of effort.
    """
    k = np.arange(count)
    at = low * (high / low) ** (k * (np.sqrt(5) - 1) / 2 % 1)
    at[: len(codes)] = 1
    return (1 / (at * np.array(codes)[k % len(codes)])).astype(np.float32)


def steps_down(first: float, count: int) -> np.ndarray:
    """Factors for the best scale: 1 + s and 1 - s for `count` sizes s = first, first / 2 ..., then 1 for a refit."""
    sizes = first * 0.5 ** np.arange(count)
    return np.append(np.stack([1 + sizes, 1 - sizes], axis=1), 1.0).astype(np.float32)
