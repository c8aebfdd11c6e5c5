"""Search for the scale of a block of 32, or another size: the encoder shared by the types `y = d * code`.

    minimise  sum over the block of  w * (x - d * q)^2      w = importance of the column (1 without)
    over      d, an IEEE half of either sign, and the codes q, integers in [lo, hi]

The best codes under a given d are the nearest ones. A candidate d yields three sums over the block,

    E = sum w r^2,  D = sum w r q,  Q = sum w q^2           with r = x / d - q

which give the error of the same codes under any other scale d (1 + s): d^2 (E - 2 s D + s^2 Q), least at s = D / Q. So
each candidate is moved to its own optimum, rounded to the half that a file can hold, and scored *after* rounding. The
codes that are stored are those nearest under the stored half, which can only lower the score. Candidates come from a
grid around `largest element / largest code`; factors near 1 then refine the best. Where one element dominates its
block, scales under which that element is exactly a code are candidates too: only the rounding of the half remains.

Blocks are encoded in batches of LANES, one per SIMD lane. Sums are formed element by element in a fixed order, so the
bytes depend neither on the width of the CPU's vectors nor on threads. Two flat float32 arrays hold everything:

    data   element j of lane l at data[j * LANES + l]; its weight in the second half, data[(32 + j) * LANES + l]
    state  value k of lane l at state[k * LANES + l], k one of the names below

Blocks are divided by a power of two (UNIT) so that their largest magnitude lies in [1, 2); weights likewise. Nothing
overflows. A weight is at least 2^-20 of the block's largest, and 1 where the importance of the whole block is zero: a
column that the calibration never saw is still encoded sanely. Scales end at the largest half: elements beyond 65504
times the largest code are clipped, never stored as Inf. Candidates begin at the smallest half, so that blocks of
weights around 1e-7 do not all become zeros.

The weight is the importance alone. ik_llama.cpp multiplies it by sqrt(mean x^2 + x^2). Weights that grow with size
were tried on SmolLM2, over two random roundings of the source weights. Without importance the KL divergence moved by
-11% and -1% (Q4_0), +1% (IQ4_NL) and +17% (Q4_1); with it, in one run, from 0.128 to 0.137 (Q4_0). No gain could be
shown.
"""

from __future__ import annotations

import numpy as np

from quantkit.codegen.half import float_to_half, half_to_float
from quantkit.codegen.jit import kernel

LANES = 64  # blocks of a batch
DATA_SIZE = 2 * 32 * LANES  # of blocks of 32

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
DOMINANT = 9  # the element that dominates its block, 0 where none does
STATE_SIZE = 10 * LANES

_ZERO = np.float32(0)
_HALF = np.float32(0.5)
_ONE = np.float32(1)
_TWO = np.float32(2)
_HALF_MAX = np.float32(65504)
_SMALLEST_HALF = np.float32(2.0**-24)
_ROUND = np.float32(3 << 22)  # adding and subtracting it rounds |t| < 2^22 to an integer, ties to even
_MIN_WEIGHT = np.float32(2.0**-20)
_DOMINANT_SHARE = np.float32(0.8)  # of the block's sum w x^2
_DOMINANT_CODES = 4  # codes up and down from the nearest that a dominant element is tried at


# ------------------------------------------------------------------------------------------------------------- numbers


@kernel(inline="always")
def nearest_half(v: np.float32) -> np.float32:
    """The half nearest to `v`, as a float32, ties to even. Magnitudes above 65504 become 65504. Branch-free."""
    v = min(max(v, -_HALF_MAX), _HALF_MAX)
    exponent = max(np.float32(v).view(np.uint32) & np.uint32(0x7F800000), np.uint32(113 << 23))
    shift = np.uint32(exponent + np.uint32(13 << 23) + np.uint32(1 << 22)).view(np.float32)
    return np.float32(np.float32(v + shift) - shift)


@kernel(inline="always")
def at_least_smallest_half(v: np.float32, unit: np.float32) -> np.float32:
    """`v`, in units of `unit`, moved away from zero to the smallest half where it is below that but not zero."""
    tiny = _SMALLEST_HALF * (_ONE / unit)
    if v == _ZERO or abs(v) >= tiny:
        return v
    return tiny if v > _ZERO else -tiny


@kernel(inline="always")
def power_of_two_below(v: np.float32) -> np.float32:
    """The power of two at or below `v` >= 0, held to [2^-60, 2^126] so that it has an inverse."""
    bits = np.float32(v).view(np.uint32) & np.uint32(0x7F800000)
    return np.uint32(min(max(bits, np.uint32(67 << 23)), np.uint32(253 << 23))).view(np.float32)


@kernel(inline="always")
def inverse_of(scale: np.float32) -> np.float32:
    """1 / scale; 0 for 0."""
    return _ONE / scale if scale != _ZERO else _ZERO


# ------------------------------------------------------------------------------------------------------------- batches


@kernel
def extremes(x: np.ndarray, out: np.ndarray) -> None:
    """Fill out float32[LANES] with the element of largest magnitude of each block of x float32[count, 32].

    Bits rotated left by one compare as magnitudes do, the sign breaking ties; as integers their largest is found in
    SIMD. The length of the inner loop is read from the array: unrolled for a constant it would not become SIMD.
    """
    for b in range(len(x)):
        max_bits = np.uint32(0)
        for j in range(x.shape[1]):
            bits = np.float32(x[b, j]).view(np.uint32)
            max_bits = np.uint32(
                max(max_bits, np.uint32(np.uint32(bits << np.uint32(1)) | np.uint32(bits >> np.uint32(31))))
            )
        out[b] = np.uint32(np.uint32(max_bits >> np.uint32(1)) | np.uint32(max_bits << np.uint32(31))).view(np.float32)


@kernel
def relative_weights(importance: np.ndarray, size: int = 32) -> np.ndarray:
    """Weights, between 2^-20 and 2, of the blocks of a row: float32[blocks + LANES, size]; [0, size] of float32[0].

    The first blocks are repeated at the end, so that the weights of any batch, which runs on from row to row, are
    consecutive.
    """
    blocks = importance.size // size
    weights = np.empty((blocks + LANES if blocks else 0, size), np.float32)
    for b in range(len(weights)):
        block = importance[size * (b % blocks) : size * (b % blocks) + size]
        largest = _ZERO
        for j in range(size):
            largest = max(largest, block[j])
        unit = _ONE / power_of_two_below(largest)
        for j in range(size):
            weights[b, j] = max(block[j] * unit, _MIN_WEIGHT) if largest > _ZERO else _ONE
    return weights


@kernel
def load_blocks(x: np.ndarray, weights: np.ndarray, first: int, data: np.ndarray, state: np.ndarray) -> None:
    """Fill `data`, UNIT and EXTREME from x float32[count, size], a batch whose first block is number `first` of all.

    data float32[2 * size * LANES]. Lanes past `count` become zeros. `weights` are those of `relative_weights`; 1 where
    there are none.
    """
    size = x.shape[1]
    extremes(x, state[EXTREME * LANES :])
    for lane in range(len(x), LANES):
        state[EXTREME * LANES + lane] = _ZERO
    for lane in range(LANES):
        unit = power_of_two_below(abs(state[EXTREME * LANES + lane]))
        state[UNIT * LANES + lane] = unit
        state[INVERSE * LANES + lane] = _ONE / unit
        state[EXTREME * LANES + lane] *= _ONE / unit
    if len(x) < LANES:
        data[: size * LANES] = _ZERO
    for j in range(size):
        for lane in range(len(x)):
            data[j * LANES + lane] = x[lane, j] * state[INVERSE * LANES + lane]
    if len(weights) == 0:
        data[size * LANES :] = _ONE
        return
    start = first % (len(weights) - LANES)
    batch_weights = weights[start : start + LANES]
    for j in range(size):
        for lane in range(LANES):
            data[(size + j) * LANES + lane] = batch_weights[lane, j]


@kernel
def weight_by_square(data: np.ndarray, state: np.ndarray, part: np.float32) -> None:
    """Set the weights of a loaded batch to x^2 + `part` * mean x^2 of the block, at least 2^-20."""
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
            data[(32 + j) * LANES + lane] = max(data[(32 + j) * LANES + lane] + mean, _MIN_WEIGHT)


@kernel
def code_of(x: np.float32, inverse: np.float32, lo: np.float32, hi: np.float32) -> np.int32:
    """The integer in [lo, hi] nearest to x * inverse, counted from lo."""
    return np.int32(min(max(x * inverse, lo), hi) + (_HALF - lo))


@kernel
def pack_nibbles(low: int | np.integer, high: int | np.integer) -> np.uint8:
    """Two codes of 4 bits as a byte."""
    return np.uint8(np.uint8(low) | np.uint8(np.uint8(high) << np.uint8(4)))


@kernel
def halves_of(values: np.ndarray, halves: np.ndarray) -> None:
    """halves uint16[LANES]: the bits of float32 values that are halves."""
    for lane in range(LANES):
        halves[lane] = float_to_half(values[lane])


@kernel
def half_at(block: np.ndarray, offset: int) -> np.float32:
    """The value of the half that two bytes of uint8[] hold."""
    result: np.float32 = half_to_float(
        np.uint16(np.uint16(block[offset]) | np.uint16(np.uint16(block[offset + 1]) << np.uint16(8)))
    )
    return result


@kernel
def put_half(half: np.uint16, out: np.ndarray, offset: int) -> None:
    """Write the bits of a half as two bytes."""
    out[offset], out[offset + 1] = np.uint8(half), np.uint8(half >> np.uint16(8))


# -------------------------------------------------------------------------------------------------------------- search


@kernel
def reset_sums(state: np.ndarray) -> None:
    """E, D, Q to zero and INVERSE from SCALE."""
    for lane in range(LANES):
        state[INVERSE * LANES + lane] = inverse_of(state[SCALE * LANES + lane])
        state[ERROR * LANES + lane] = _ZERO
        state[SLOPE * LANES + lane] = _ZERO
        state[CURVE * LANES + lane] = _ZERO


@kernel
def _sums(data: np.ndarray, state: np.ndarray, lo: np.float32, hi: np.float32) -> None:
    """E, D and Q of the nearest codes in [lo, hi] under each lane's SCALE."""
    reset_sums(state)
    size = data.size // (2 * LANES)
    for j in range(size):
        for lane in range(LANES):
            w = data[(size + j) * LANES + lane]
            t = data[j * LANES + lane] * state[INVERSE * LANES + lane]
            q = (min(max(t, lo), hi) + _ROUND) - _ROUND
            r = t - q
            wr = w * r
            state[ERROR * LANES + lane] += wr * r
            state[SLOPE * LANES + lane] += wr * q
            state[CURVE * LANES + lane] += w * q * q


@kernel
def keep_better(state: np.ndarray) -> None:
    """Score each candidate, given E, D and Q, as a half and moved to its best half; keep what beats BEST.

    A scale of 0 is no candidate. The unmoved scale keeps weights exact that are on such a grid already.
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
def reset_best(state: np.ndarray) -> None:
    """Reset BEST and BEST_SCALE: no candidate scored yet."""
    for lane in range(LANES):
        state[BEST * LANES + lane] = np.float32(np.inf)
        state[BEST_SCALE * LANES + lane] = _ZERO


@kernel
def find_dominant(data: np.ndarray, state: np.ndarray) -> bool:
    """Fill DOMINANT. Returns whether any lane has such an element."""
    for lane in range(LANES):
        state[ERROR * LANES + lane] = state[SLOPE * LANES + lane] = state[DOMINANT * LANES + lane] = _ZERO
    size = data.size // (2 * LANES)
    for j in range(size):
        for lane in range(LANES):
            x = data[j * LANES + lane]
            squared = data[(size + j) * LANES + lane] * x * x
            largest = state[ERROR * LANES + lane]
            state[DOMINANT * LANES + lane] = x if squared > largest else state[DOMINANT * LANES + lane]
            state[ERROR * LANES + lane] = max(squared, largest)
            state[SLOPE * LANES + lane] += squared
    count = 0
    for lane in range(LANES):
        outweighs = state[ERROR * LANES + lane] > _DOMINANT_SHARE * state[SLOPE * LANES + lane]
        state[DOMINANT * LANES + lane] = state[DOMINANT * LANES + lane] if outweighs else _ZERO
        count += outweighs
    return count > 0


@kernel
def propose(state: np.ndarray, origin: int, factor: np.float32) -> None:
    """Make factor * value `origin` of the state (EXTREME, BEST_SCALE or DOMINANT) the candidate of every lane."""
    for lane in range(LANES):
        unit = state[UNIT * LANES + lane]
        state[SCALE * LANES + lane] = at_least_smallest_half(state[origin * LANES + lane] * factor, unit)


@kernel
def _propose_for_dominant(state: np.ndarray, offset: np.float32) -> None:
    """The candidate under which each lane's dominant element is a whole code, `away` codes from the nearest."""
    for lane in range(LANES):
        dominant, scale = state[DOMINANT * LANES + lane], state[BEST_SCALE * LANES + lane]
        code = (dominant * inverse_of(scale) + _ROUND) - _ROUND + offset
        candidate = dominant * inverse_of(code)
        state[SCALE * LANES + lane] = at_least_smallest_half(candidate, state[UNIT * LANES + lane])


@kernel
def find_scales(
    data: np.ndarray, state: np.ndarray, grid: np.ndarray, steps: np.ndarray, lo: np.float32, hi: np.float32
) -> None:
    """BEST_SCALE of a batch that is loaded.

    Candidates: `grid` times the block's extreme element, then `steps` times the best so far, then the scales that make
    the dominant element, where there is one, a whole code.
    """
    reset_best(state)
    for k in range(grid.size):
        propose(state, EXTREME, grid[k])
        _sums(data, state, lo, hi)
        keep_better(state)
    for k in range(steps.size):
        propose(state, BEST_SCALE, steps[k])
        _sums(data, state, lo, hi)
        keep_better(state)
    if find_dominant(data, state):
        for k in range(-_DOMINANT_CODES, _DOMINANT_CODES + 1):
            _propose_for_dominant(state, np.float32(k))
            _sums(data, state, lo, hi)
            keep_better(state)


@kernel
def store_scales(state: np.ndarray, scales: np.ndarray) -> None:
    """scales float32[LANES]: the lanes' BEST_SCALE in the units of x."""
    for lane in range(LANES):
        scales[lane] = state[BEST_SCALE * LANES + lane] * state[UNIT * LANES + lane]


def scale_grid(codes: tuple[float, ...], low: float, high: float, count: int) -> np.ndarray:
    """float32[count]: candidates for d as fractions of a block's extreme element.

    They place it at low * c ... high * c, c the end codes in turn; beyond 1 it is clipped to c. The first ones place it
    at c itself. The others follow the golden ratio, so that every prefix of the list is spread evenly: effort decides
    how many are tried.
    """
    k = np.arange(count)
    position = low * (high / low) ** (k * (np.sqrt(5) - 1) / 2 % 1)
    position[: len(codes)] = 1
    result: np.ndarray = (1 / (position * np.array(codes)[k % len(codes)])).astype(np.float32)
    return result


def refinement_steps(first: float, count: int) -> np.ndarray:
    """Factors of the best scale: 1 + s and 1 - s for `count` sizes s = first, first / 2 ..., then 1 for a refit."""
    sizes = first * 0.5 ** np.arange(count)
    return np.append(np.stack([1 + sizes, 1 - sizes], axis=1), 1.0).astype(np.float32)
