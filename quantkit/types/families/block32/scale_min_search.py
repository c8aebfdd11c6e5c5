"""Search for scale and minimum of a block of 32: the encoder shared by the types `y = d * q + m`.

    minimise  sum over the block of  w * (x - d * q - m)^2      w = importance of the column (1 without)
    over      d >= 0 and m, IEEE halves, and the codes q, integers in [0, top]

Arrays, lanes and UNIT are those of `scale_search`. A candidate (d, m) gives nearest codes and, with r = x - d q - m,
the sums E = sum w r^2, D = sum w r q, Q = sum w q^2, O = sum w r, C = sum w q, W = sum w. Under d + s, m + t the same
codes have the error E - 2 s D - 2 t O + s^2 Q + 2 s t C + t^2 W. Its minimum solves a 2 x 2 linear system. s is then
rounded so that d + s is a half, t is refitted to that s and rounded too, and the result is scored.
"""

from __future__ import annotations

import numpy as np

from quantkit.codegen.jit import kernel
from quantkit.types.families.block32.scale_search import LANES, UNIT, at_least_smallest_half, nearest_half

# Rows of `state`; UNIT is that of `scale_search`.
SCALE, MINIMUM, INVERSE = 0, 1, 2
ERROR, SLOPE, CURVE, OFFSET, CROSS, WEIGHT = 3, 4, 5, 6, 9, 10
BEST, BEST_SCALE, BEST_MINIMUM = 11, 12, 13
LOW, HIGH = 14, 15
STATE_SIZE = 16 * LANES

_ZERO, _HALF, _ONE, _TWO = np.float32(0), np.float32(0.5), np.float32(1), np.float32(2)
_ROUND = np.float32(3 << 22)
_SINGULAR = np.float32(1e-5)


@kernel
def _reset(data: np.ndarray, state: np.ndarray) -> None:
    """Fill LOW, HIGH and WEIGHT of each lane; no candidate scored yet."""
    for lane in range(LANES):
        state[LOW * LANES + lane] = data[lane]
        state[HIGH * LANES + lane] = data[lane]
        state[WEIGHT * LANES + lane] = _ZERO
        state[BEST * LANES + lane] = np.float32(np.inf)
        state[BEST_SCALE * LANES + lane] = _ZERO
        state[BEST_MINIMUM * LANES + lane] = _ZERO
    for j in range(32):
        for lane in range(LANES):
            x = data[j * LANES + lane]
            state[LOW * LANES + lane] = min(state[LOW * LANES + lane], x)
            state[HIGH * LANES + lane] = max(state[HIGH * LANES + lane], x)
            state[WEIGHT * LANES + lane] += data[(32 + j) * LANES + lane]


@kernel
def _propose_margins(state: np.ndarray, low_margin: np.float32, high_margin: np.float32, max_code: np.float32) -> None:
    """A candidate: codes 0 ... top span the block's range less the margins at either end."""
    for lane in range(LANES):
        low, high = state[LOW * LANES + lane], state[HIGH * LANES + lane]
        span = high - low
        scale = span * ((_ONE - low_margin - high_margin) / max_code)
        state[SCALE * LANES + lane] = at_least_smallest_half(scale, state[UNIT * LANES + lane])
        state[MINIMUM * LANES + lane] = low + span * low_margin


@kernel
def _propose_step(state: np.ndarray, factor: np.float32, shift: np.float32) -> None:
    """The best pair with its scale times `factor` and its minimum raised by `shift` times its old scale."""
    for lane in range(LANES):
        scale = state[BEST_SCALE * LANES + lane]
        state[SCALE * LANES + lane] = scale * factor
        state[MINIMUM * LANES + lane] = state[BEST_MINIMUM * LANES + lane] + scale * shift


@kernel
def _sums(data: np.ndarray, state: np.ndarray, max_code: np.float32) -> None:
    """E, D, Q, O and C of the nearest codes under each lane's SCALE and MINIMUM."""
    for lane in range(LANES):
        scale = state[SCALE * LANES + lane]
        state[INVERSE * LANES + lane] = _ONE / scale if scale > _ZERO else _ZERO
        state[ERROR * LANES + lane] = _ZERO
        state[SLOPE * LANES + lane] = _ZERO
        state[CURVE * LANES + lane] = _ZERO
        state[OFFSET * LANES + lane] = _ZERO
        state[CROSS * LANES + lane] = _ZERO
    for j in range(32):
        for lane in range(LANES):
            x = data[j * LANES + lane] - state[MINIMUM * LANES + lane]
            w = data[(32 + j) * LANES + lane]
            t = min(max(x * state[INVERSE * LANES + lane], _ZERO), max_code)
            q = (t + _ROUND) - _ROUND
            r = x - state[SCALE * LANES + lane] * q
            wr = w * r
            wq = w * q
            state[ERROR * LANES + lane] += wr * r
            state[OFFSET * LANES + lane] += wr
            state[SLOPE * LANES + lane] += wr * q
            state[CROSS * LANES + lane] += wq
            state[CURVE * LANES + lane] += wq * q


@kernel(inline="always")
def _stored_error(state: np.ndarray, lane: int, s: np.float32, t: np.float32) -> np.float32:
    """The error of a lane's codes when its scale and minimum become s and t; s and t are halves."""
    s -= state[SCALE * LANES + lane]
    t -= state[MINIMUM * LANES + lane]
    slope, offset = state[SLOPE * LANES + lane], state[OFFSET * LANES + lane]
    curve, cross, weight = state[CURVE * LANES + lane], state[CROSS * LANES + lane], state[WEIGHT * LANES + lane]
    error = state[ERROR * LANES + lane] - s * (_TWO * slope - s * curve) - t * (_TWO * offset - t * weight)
    result: np.float32 = error + _TWO * s * t * cross
    return result


@kernel
def _keep_better(state: np.ndarray) -> None:
    """Score each candidate, given the sums, as halves and moved to its best pair of halves; keep what beats BEST.

    The unmoved pair keeps weights exact that are on such a grid already.
    """
    for lane in range(LANES):
        scale, minimum = state[SCALE * LANES + lane], state[MINIMUM * LANES + lane]
        slope, offset = state[SLOPE * LANES + lane], state[OFFSET * LANES + lane]
        curve, cross, weight = state[CURVE * LANES + lane], state[CROSS * LANES + lane], state[WEIGHT * LANES + lane]
        unit = state[UNIT * LANES + lane]
        determinant = curve * weight - cross * cross
        solvable = determinant > _SINGULAR * curve * weight
        s = (slope * weight - offset * cross) / determinant if solvable else _ZERO
        stored = nearest_half(max(scale + s, _ZERO) * unit) * (_ONE / unit)
        base = nearest_half((minimum + (offset - (stored - scale) * cross) / weight) * unit) * (_ONE / unit)
        error = _stored_error(state, lane, stored, base)
        scale, minimum = nearest_half(scale * unit) * (_ONE / unit), nearest_half(minimum * unit) * (_ONE / unit)
        unmoved = _stored_error(state, lane, scale, minimum)
        stored, base = (scale, minimum) if unmoved < error else (stored, base)
        error = min(error, unmoved)
        better = error < state[BEST * LANES + lane]
        state[BEST * LANES + lane] = error if better else state[BEST * LANES + lane]
        state[BEST_SCALE * LANES + lane] = stored if better else state[BEST_SCALE * LANES + lane]
        state[BEST_MINIMUM * LANES + lane] = base if better else state[BEST_MINIMUM * LANES + lane]


@kernel
def find_scales_and_mins(
    data: np.ndarray, state: np.ndarray, margins: np.ndarray, steps: np.ndarray, max_code: np.float32
) -> None:
    """BEST_SCALE and BEST_MINIMUM of a batch that is loaded.

    margins float32[candidates, 2]: the fractions of the block's range that a candidate leaves out at its low and high
    end. steps float32[candidates, 2]: (factor of the scale, shift of the minimum) applied to the best so far.
    """
    _reset(data, state)
    for k in range(margins.shape[0]):
        _propose_margins(state, margins[k, 0], margins[k, 1], max_code)
        _sums(data, state, max_code)
        _keep_better(state)
    for k in range(steps.shape[0]):
        _propose_step(state, steps[k, 0], steps[k, 1])
        _sums(data, state, max_code)
        _keep_better(state)


@kernel
def store_scales_and_mins(state: np.ndarray, scales: np.ndarray, minima: np.ndarray) -> None:
    """scales, minima float32[LANES]: the lanes' BEST_SCALE and BEST_MINIMUM in the units of x."""
    for lane in range(LANES):
        scales[lane] = state[BEST_SCALE * LANES + lane] * state[UNIT * LANES + lane]
        minima[lane] = state[BEST_MINIMUM * LANES + lane] * state[UNIT * LANES + lane]


@kernel
def code_of(x: np.float32, inverse: np.float32, minimum: np.float32, max_code: np.float32) -> np.int32:
    """The integer in [0, top] nearest to (x - minimum) * inverse."""
    return np.int32(min(max((x - minimum) * inverse, _ZERO), max_code) + _HALF)


def range_margins(low: float, high: float, count: int) -> np.ndarray:
    """`margins` for `find_scales_and_mins`: zeros, then pairs from `low` to `high`; negative ones widen the range.

    They follow the two-dimensional golden ratio (rho^3 = rho + 1): every prefix of the list is spread evenly.
    """
    rho = 1.32471795724474602596
    position = np.arange(count)[:, None] / rho ** np.arange(1, 3) % 1
    return np.where(np.arange(count)[:, None] > 0, low + (high - low) * position, 0).astype(np.float32)


def refinement_steps(max_code: float, first: float, count: int) -> np.ndarray:
    """`steps` for `find_scales_and_mins`: the range widened, narrowed, moved by s codes, s = first, first / 2 ...

    Widening by s moves the low end s down and the high end s up. A refit ends the list.
    """
    moves = []
    for s in first * 0.5 ** np.arange(count):
        moves += [(1 + 2 * s / max_code, -s), (1 - 2 * s / max_code, s), (1, s), (1, -s)]
    return np.array([*moves, (1, 0)], np.float32)
