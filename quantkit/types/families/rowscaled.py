"""Search for the scales of groups of 32 that share a super-scale d, of a row or of a block of 256 (a *span*).

    y = (d * m) * c        m an integer multiplier of the group, c the value of a code in one of two books

    minimise  sum w (x - y)^2  over d, multipliers of either sign, books and codes

It serves iq2_ks, iq3_ks, iq4_ks, iq5_ks, iq4_kss and iq4_xs. Under a scale s = d * m the best codes are the nearest
ones, and they reduce the error by

    gain = s (2 P - s R) = R s (2 q - s)        P = sum w x c,  R = sum w c^2,  q = P / R

1. *Profile.* For a grid of scales of every group, both signs and both books: q and R of the nearest codes.
2. *Initial d.* For the codes of one profile entry the best multiplier under any d is the allowed one nearest to q / d.
   So the profile estimates the gain of every d without reading the elements again; the best of a grid of d is taken.
   Each d is one that the file can hold: it is rounded *before* anything is chosen under it.
3. *Exact rounds.* Under d, the multiplier of largest estimate for either sign and book is measured with its own nearest
   codes, then the neighbours of the best; then d becomes sum m P / sum m^2 R, the optimum for these codes, and again.

Groups are the lanes of SIMD code, LANES of them a tile: sums are formed element by element, so the bytes do not depend
on the width of the CPU's vectors. A span is divided by a power of two that brings its largest magnitude to [1, 2).
Arrays are float32 and flat, so that one loop runs through them:

    data[tile]         element j of a lane at [j * LANES + lane], its weight at [(32 + j) * LANES + lane]
    state              candidate c (of 4) of a lane, value v at [v + c * LANES + lane], v as named below
    q[tile], r[tile]   profile: entry k, candidate c at [k * WIDTH + c * LANES + lane]; c % 2 its sign, c // 2 its book
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from quantkit.codegen.jit import kernel, subkernel
from quantkit.types.families.codebooks import BINS, K2, K3, K4, K5, nearest_table
from quantkit.types.families.superblock import MIN_WEIGHT, power_below, storable

LANES = 16
WIDTH = 4 * LANES  # candidates measured at once

# Values of `state`.
INVERSE = 0  # twice the inverse of the scale: the tables of codes have bins of half a unit
OFFSET = 1 * WIDTH  # where the book begins in the tables of codes
P = 2 * WIDTH
R = 3 * WIDTH
SCALE = 4 * WIDTH
MULTIPLIER = 5 * WIDTH
GAIN = 6 * WIDTH
D = 7 * WIDTH  # of the lane's span
INVERSE_D = 8 * WIDTH  # its inverse
LOSS, LOSS_P, LOSS_R, ODD = 9 * WIDTH, 10 * WIDTH, 11 * WIDTH, 12 * WIDTH  # see _measure_even
STATE_SIZE = 13 * WIDTH

# The tables of all books in one: only reads from a constant array become SIMD gathers beside stores to another.
_ROUNDED = np.concatenate([book.rounded for book in (K2, K3, K4, K5)])
_NEAREST = np.concatenate([book.nearest for book in (K2, K3, K4, K5)])
K2_START, K3_START, K4_START, K5_START = (2 * BINS * i for i in range(4))  # where each begins

_ZERO, _ONE = np.float32(0), np.float32(1)
_TWO, _MIDDLE, _LAST = np.float32(2), np.float32(BINS // 2), np.float32(BINS - 1)
_INFINITE = np.float32(np.inf)
_ROUND = np.float32(3 << 22)  # adding and subtracting it rounds |t| < 2^22 to an integer, ties to even
_MULTIPLIER_LIMIT = np.float32(1 << 20)  # multipliers are clipped to it before they are rounded
_FLOAT_MAX, _MIN_FLOAT = np.float32(3.4e38), np.float32(2.0**-149)
_MIN_UNIT, _MAX_UNIT = np.float32(2.0**-100), np.float32(2.0**120)  # they and their inverses are normal numbers
_GAUSSIAN = np.float32(np.pi / 2)  # variance / (mean magnitude)^2
_MIN_WEIGHT = np.float32(2.0**-60)  # least weight: keeps R above zero
_MIN_SUM = np.float32(2.0**-80)  # against division by zero in lanes without a group

# By effort.
_PROFILE_ENTRIES = (4, 6, 16)  # entries of a profile for each sign and book
_SCALES_PER_ENTRY = 2  # scales tried for each entry, which keeps the best
_TRIES = (8, 24, 32)  # super-scales estimated before each exact search
_STARTS = (1, 1, 6)  # exact searches, each from the best of its own range of super-scales
_MIN_RATIO, _MAX_RATIO = np.float32(0.8), np.float32(1.3)  # super-scales tried, in multiples of the typical one
_ROUNDS = (1, 2, 6)  # exact choices in each


class Rules(NamedTuple):
    """What a type allows, and the range of its search."""

    lowest: np.float32  # multiplier
    highest: np.float32
    step: np.float32  # 1, or 2 for odd multipliers only
    table: int  # K2_START …: where its books begin in the tables
    books: int
    even_parity: bool  # the codes of each word of four have an even number of ones together
    span: int  # groups that share a d, 0 for all of the row
    half: bool  # d is stored as a half
    extreme: np.float32  # code value of largest magnitude
    min_units: np.float32  # the profile puts a group's largest element at this many code units
    max_units: np.float32  # to this many
    variance_weight: np.float32  # this and the next shape the weights without importance, see `_set_weights`
    robust_variance: bool


class RowscaledSpace(NamedTuple):
    """Work space of a search, allocated once a call of the encoder."""

    data: np.ndarray  # [tiles, 64 * LANES]
    maxima: np.ndarray  # [lanes] largest magnitude of a group
    q: np.ndarray  # [tiles, entries * WIDTH]
    r: np.ndarray
    state: np.ndarray  # [STATE_SIZE]
    multiplier: np.ndarray  # [2, lanes]: under the tried d; under the best
    book: np.ndarray  # [2, lanes], likewise: where its book begins in the tables of codes
    p: np.ndarray  # [lanes] sums under the tried d
    s: np.ndarray
    gain: np.ndarray
    span_of: np.ndarray  # int64[lanes] the span of each
    unit: np.ndarray  # [spans]
    typical: np.ndarray  # the d under which the span's largest fitted scale has the largest multiplier
    tried: np.ndarray  # d that is being tried
    estimate: np.ndarray  # its estimated gain
    best_tried: np.ndarray  # d of largest estimate
    best_estimate: np.ndarray  # and that estimate
    best_gain: np.ndarray  # largest gain so far
    d: np.ndarray  # and the d that has it; 0 where zeros are best


@subkernel
def _entries(rules: Rules, effort: int) -> int:
    """Entries of the profile for each of 4 candidates; with one book there are twice as many for each sign."""
    return _PROFILE_ENTRIES[effort] if rules.books == 2 else (2 * _PROFILE_ENTRIES[effort] + 2) // 3


@kernel
def new_space(n: int, rules: Rules, effort: int) -> RowscaledSpace:
    """The arrays for searching rows of n elements."""
    entries = _entries(rules, effort)
    tiles = (n // 32 + LANES - 1) // LANES
    lanes = tiles * LANES
    spans = n // 32 // rules.span if rules.span else 1
    span_of = np.empty(lanes, np.int64)
    for lane in range(lanes):
        span_of[lane] = min(lane // rules.span if rules.span else 0, spans - 1)
    return RowscaledSpace(
        np.zeros((tiles, 64 * LANES), np.float32),
        np.zeros(lanes, np.float32),
        np.zeros((tiles, entries * WIDTH), np.float32),
        np.zeros((tiles, entries * WIDTH), np.float32),
        np.zeros(STATE_SIZE, np.float32),
        np.zeros((2, lanes), np.float32),
        np.zeros((2, lanes), np.float32),
        np.zeros(lanes, np.float32),
        np.zeros(lanes, np.float32),
        np.zeros(lanes, np.float32),
        span_of,
        np.zeros(spans, np.float32),
        np.zeros(spans, np.float32),
        np.zeros(spans, np.float32),
        np.zeros(spans, np.float32),
        np.zeros(spans, np.float32),
        np.zeros(spans, np.float32),
        np.zeros(spans, np.float32),
        np.zeros(spans, np.float32),
    )


# ------------------------------------------------------------------------------------------------------------ loading


@subkernel
def _load(x: np.ndarray, first_group: int, space: RowscaledSpace) -> np.float32:
    """Load a span, float32[n], into `data` and `maxima` from group `first_group` on. Returns its `unit`."""
    largest = _ZERO
    for i in range(len(x)):
        largest = max(largest, abs(x[i]))
    unit = min(max(power_below(largest), _MIN_UNIT), _MAX_UNIT)
    inverse = _ONE / unit
    for g in range(len(x) // 32):
        group = first_group + g
        tile, lane = space.data[group // LANES], group % LANES
        maximum = _ZERO
        for j in range(32):
            value = x[32 * g + j] * inverse
            tile[j * LANES + lane] = value
            maximum = max(maximum, abs(value))
        space.maxima[group] = maximum
    return unit


@subkernel
def _set_weights(importance: np.ndarray, first_group: int, groups: int, rules: Rules, space: RowscaledSpace) -> None:
    """Fill in the weights of a span from importance float32[row] or float32[0].

    w = q where there is an importance q, relative to the span's largest, with a least weight per block and per span.
    Else w = variance_weight * v + x^2, v being the mean of x^2 over the block of 256; with `robust_variance` v is that
    of Gaussian numbers with the block's mean magnitude, which outliers raise less.
    """
    largest = _ZERO
    for i in range(32 * first_group, 32 * (first_group + groups) if len(importance) else 0):
        largest = max(largest, importance[i])
    has_importance = largest > _ZERO
    for block in range(first_group // 8, (first_group + groups) // 8):
        block_max, sizes, squares = _ZERO, _ZERO, _ZERO
        for i in range(256):
            group = 8 * block + i // 32
            value = space.data[group // LANES, i % 32 * LANES + group % LANES]
            sizes += abs(value)
            squares += value * value
            if has_importance:
                block_max = max(block_max, importance[256 * block + i] / largest)
        size, variance = sizes / np.float32(256), squares / np.float32(256)
        if rules.robust_variance:
            variance = _GAUSSIAN * size * size
        min_weight = np.float32(MIN_WEIGHT) * max(block_max, np.float32(MIN_WEIGHT))
        for group in range(8 * block, 8 * block + 8):
            tile, lane = space.data[group // LANES], group % LANES
            for j in range(32):
                if has_importance:
                    weight = max(importance[32 * group + j] / largest, min_weight)
                else:
                    weight = rules.variance_weight * variance + tile[j * LANES + lane] * tile[j * LANES + lane]
                tile[(32 + j) * LANES + lane] = max(weight, _MIN_WEIGHT)


@kernel
def storable_scale(d: np.float32, unit: np.float32, rules: Rules) -> np.float32:
    """The super-scale nearest to d, in units, that a file can hold and that leaves all values finite."""
    if rules.half:
        return storable(d, unit)
    max_scale = _FLOAT_MAX / (rules.extreme * max(rules.highest, -rules.lowest))
    value = min(max(abs(d) * unit, _MIN_FLOAT), max_scale) / unit
    return value if d >= _ZERO else -value


# ---------------------------------------------------------------------------------------------------------- measuring


@subkernel
def _measure_nearest(data: np.ndarray, state: np.ndarray) -> None:
    """P and R of the nearest codes under the 4 candidates of every lane of a tile."""
    for i in range(2 * WIDTH):
        state[P + i] = _ZERO
    for j in range(32):
        for c in range(4):
            for lane in range(LANES):
                x = data[j * LANES + lane]
                i = c * LANES + lane
                t = min(max(x * state[INVERSE + i] + _MIDDLE, _ZERO), _LAST) + state[OFFSET + i]
                value = _ROUNDED[np.int32(t)]
                weighted = data[(32 + j) * LANES + lane] * value
                state[P + i] += weighted * x
                state[R + i] += weighted * value


def _pairs() -> np.ndarray:
    """int32[2 * BINS] for K4: bits 0 to 7 the nearest value + 128, bits 8 to 15 the nearest value + 128 of codes whose
    number of ones has the other parity, bits 16 to 19 that other code, bit 20 whether the nearest code's is odd."""
    ones = np.array([bin(code).count("1") % 2 for code in range(16)])
    packed = []
    for values in (K4.values[:16], K4.values[16:]):
        of_parity = np.array([np.flatnonzero(ones == odd)[nearest_table(values[ones == odd])] for odd in (0, 1)])
        odd = ones[nearest_table(values)]
        nearest, other = of_parity[odd, np.arange(BINS)], of_parity[1 - odd, np.arange(BINS)]
        packed.append(values[nearest] + 128 + (values[other] + 128) * 256 + other * 65536 + odd * (1 << 20))
    return np.concatenate(packed).astype(np.int32)


_PAIRS = _pairs()
_PAIR_OFFSET, _CENTRE = np.float32(K4_START), np.float32(128)


@subkernel
def _measure_even(data: np.ndarray, state: np.ndarray) -> None:
    """P and R of the best codes of which each word of four has an even number of ones.

    These are the nearest codes; where a word has an odd number of ones, the code whose replacement by its nearest
    code of the other parity costs least is replaced. To replace three costs more.
    """
    for i in range(2 * WIDTH):
        state[P + i] = _ZERO
    for k in range(8):
        for i in range(WIDTH):
            state[ODD + i], state[LOSS + i] = _ZERO, _INFINITE
        for e in range(4):
            j = 2 * k + e // 2 + 16 * (e % 2)
            for c in range(4):
                for lane in range(LANES):
                    x, w = data[j * LANES + lane], data[(32 + j) * LANES + lane]
                    i = c * LANES + lane
                    t = min(max(x * state[INVERSE + i] + _MIDDLE, _ZERO), _LAST) + state[OFFSET + i] - _PAIR_OFFSET
                    pair = _PAIRS[np.int32(t)]
                    value = np.float32(pair & np.int32(255)) - _CENTRE
                    other = np.float32((pair >> np.int32(8)) & np.int32(255)) - _CENTRE
                    odd = np.float32(pair >> np.int32(20))
                    state[P + i] += w * x * value
                    state[R + i] += w * value * value
                    loss_p = w * x * (other - value)
                    loss_r = w * (other - value) * (other + value)
                    loss = state[SCALE + i] * (state[SCALE + i] * loss_r - loss_p - loss_p)
                    least, least_p, least_r = state[LOSS + i], state[LOSS_P + i], state[LOSS_R + i]
                    state[LOSS + i] = loss if loss < least else least
                    state[LOSS_P + i] = loss_p if loss < least else least_p
                    state[LOSS_R + i] = loss_r if loss < least else least_r
                    state[ODD + i] = abs(state[ODD + i] - odd)
        for i in range(WIDTH):
            state[P + i] += state[ODD + i] * state[LOSS_P + i]
            state[R + i] += state[ODD + i] * state[LOSS_R + i]


@subkernel
def _measure(data: np.ndarray, rules: Rules, state: np.ndarray) -> None:
    """P and R of the best codes a type allows under the 4 candidates of every lane of a tile."""
    if rules.even_parity:
        _measure_even(data, state)
    else:
        _measure_nearest(data, state)


@subkernel
def _profile(space: RowscaledSpace, rules: Rules, entries: int) -> None:
    """Fill the profile: scales that put a group's largest element at `min_units` to `max_units` code units.

    Each entry keeps, of _SCALES_PER_ENTRY scales, the one of largest gain R q^2 at its own optimum.
    """
    state, count = space.state, entries * _SCALES_PER_ENTRY
    for tile in range(len(space.data)):
        maxima = space.maxima[tile * LANES : tile * LANES + LANES]
        for k in range(count):
            for c in range(4):
                step = np.float32(k) + (_ZERO if rules.books == 2 else np.float32(0.5) * np.float32(c // 2))
                units = rules.min_units + (rules.max_units - rules.min_units) * step / np.float32(count - 1)
                sign = np.float32(1 - c % 2 * 2)
                for lane in range(LANES):
                    scale = sign * max(maxima[lane], _MIN_WEIGHT) / units
                    state[SCALE + c * LANES + lane] = scale
                    state[INVERSE + c * LANES + lane] = _TWO / scale
                    state[OFFSET + c * LANES + lane] = np.float32(rules.table + BINS * (c // 2) * (rules.books - 1))
            _measure(space.data[tile], rules, state)
            first = k // _SCALES_PER_ENTRY * WIDTH
            q, r = space.q[tile, first : first + WIDTH], space.r[tile, first : first + WIDTH]
            is_first = k % _SCALES_PER_ENTRY == 0
            for i in range(WIDTH):
                best, previous = state[P + i] / max(state[R + i], _MIN_SUM), q[i]
                better = is_first or state[P + i] * best > r[i] * previous * previous
                q[i] = best if better else previous
                r[i] = state[R + i] if better else r[i]


# ----------------------------------------------------------------------------------------------------------- choosing


@subkernel
def _set_scales(tile: int, space: RowscaledSpace) -> None:
    """D and INVERSE_D of a tile's lanes from TRIED of their spans."""
    state = space.state
    for lane in range(LANES):
        state[D + lane] = space.tried[space.span_of[tile * LANES + lane]]
    for i in range(3 * LANES):
        state[D + LANES + i] = state[D + i % LANES]
    for i in range(WIDTH):
        state[INVERSE_D + i] = _ONE / state[D + i]


@kernel(inline="always")
def _nearest_multiplier(q: np.float32, inverse_d: np.float32, rules: Rules) -> np.float32:
    """The allowed multiplier nearest to q / d; `inverse_d` is 1 / d."""
    t = min(max((q * inverse_d + _ONE - rules.step) * (_ONE / rules.step), -_MULTIPLIER_LIMIT), _MULTIPLIER_LIMIT)
    return min(max(((t + _ROUND) - _ROUND) * rules.step + rules.step - _ONE, rules.lowest), rules.highest)


@subkernel
def _estimate_gains(groups: int, rules: Rules, entries: int, space: RowscaledSpace) -> None:
    """Fill `estimate` of every span under `tried`: the summed gain of its lanes' best profile entries."""
    state = space.state
    for span in range(len(space.estimate)):
        space.estimate[span] = _ZERO
    for tile in range(len(space.data)):
        q, r = space.q[tile], space.r[tile]
        _set_scales(tile, space)
        for i in range(WIDTH):
            state[GAIN + i] = -_INFINITE
        for k in range(entries):
            for i in range(WIDTH):
                best = q[k * WIDTH + i]
                s = state[D + i] * _nearest_multiplier(best, state[INVERSE_D + i], rules)
                gain = r[k * WIDTH + i] * s * (best + best - s)
                state[GAIN + i] = max(gain, state[GAIN + i])
        for lane in range(min(LANES, groups - tile * LANES)):
            left = max(state[GAIN + lane], state[GAIN + LANES + lane])
            right = max(state[GAIN + 2 * LANES + lane], state[GAIN + 3 * LANES + lane])
            space.estimate[space.span_of[tile * LANES + lane]] += max(left, right)


@subkernel
def _best_multipliers(q: np.ndarray, r: np.ndarray, rules: Rules, entries: int, state: np.ndarray) -> None:
    """MULTIPLIER of largest estimate under D of every lane of a tile, for each sign and book."""
    for i in range(WIDTH):
        state[GAIN + i] = -_INFINITE
    for k in range(entries):
        for i in range(WIDTH):
            best = q[k * WIDTH + i]
            m = _nearest_multiplier(best, state[INVERSE_D + i], rules)
            s = state[D + i] * m
            gain = r[k * WIDTH + i] * s * (best + best - s)
            best_gain, best_m = state[GAIN + i], state[MULTIPLIER + i]
            state[GAIN + i] = max(gain, best_gain)
            state[MULTIPLIER + i] = m if gain > best_gain else best_m


@subkernel
def _measure_candidates(rules: Rules, data: np.ndarray, state: np.ndarray) -> None:
    """P and R of the candidates given by MULTIPLIER and OFFSET."""
    for i in range(WIDTH):
        m = min(max(state[MULTIPLIER + i], rules.lowest), rules.highest)
        state[MULTIPLIER + i] = m
        scale = state[D + i] * m
        state[SCALE + i] = scale
        state[INVERSE + i] = _TWO / scale if m != _ZERO else _ZERO
    _measure(data, rules, state)


@subkernel
def _keep_best(tile: int, space: RowscaledSpace) -> None:
    """Keep the measured candidates of a tile that are better than the best so far."""
    state = space.state
    for c in range(4):
        for lane in range(LANES):
            i, index = c * LANES + lane, tile * LANES + lane
            s = state[SCALE + i]
            gain = s * (state[P + i] + state[P + i] - s * state[R + i])
            if gain > space.gain[index]:
                space.gain[index], space.p[index], space.s[index] = gain, state[P + i], state[R + i]
                space.multiplier[0, index], space.book[0, index] = state[MULTIPLIER + i], state[OFFSET + i]


@subkernel
def _choose_multipliers(rules: Rules, entries: int, space: RowscaledSpace) -> None:
    """Choose multiplier and book of every lane under `tried`, by exact gains."""
    state = space.state
    for lane in range(len(space.gain)):
        space.gain[lane] = -_INFINITE
    for tile in range(len(space.data)):
        _set_scales(tile, space)
        _best_multipliers(space.q[tile], space.r[tile], rules, entries, state)
        for i in range(WIDTH):
            state[OFFSET + i] = np.float32(rules.table + BINS * (i // (2 * LANES)) * (rules.books - 1))
        _measure_candidates(rules, space.data[tile], state)
        _keep_best(tile, space)
        for c in range(4):
            offset = rules.step * np.float32(c // 2 + 1) * np.float32(1 - c % 2 * 2)
            for lane in range(LANES):
                state[MULTIPLIER + c * LANES + lane] = space.multiplier[0, tile * LANES + lane] + offset
                state[OFFSET + c * LANES + lane] = space.book[0, tile * LANES + lane]
        _measure_candidates(rules, space.data[tile], state)
        _keep_best(tile, space)


# ---------------------------------------------------------------------------------------------------------- searching


@subkernel
def _typical_scales(groups: int, rules: Rules, entries: int, space: RowscaledSpace) -> None:
    """Fill `typical`: the d of each span whose largest multiplier gives the largest scale that a group of it fits."""
    for span in range(len(space.typical)):
        space.typical[span] = _MIN_WEIGHT
    for group in range(groups):
        q, r = space.q[group // LANES], space.r[group // LANES]
        best_gain, best_scale = _ZERO, _ZERO
        for k in range(4 * entries):
            i = k * LANES + group % LANES
            gain = r[i] * q[i] * q[i]
            if gain > best_gain:
                best_gain, best_scale = gain, abs(q[i])
        span = space.span_of[group]
        space.typical[span] = max(space.typical[span], best_scale / max(rules.highest, -rules.lowest))


@subkernel
def _initial_scales(
    low: np.float32, high: np.float32, tries: int, groups: int, rules: Rules, entries: int, space: RowscaledSpace
) -> None:
    """Set `tried` of every span to the d of largest estimate among `low` to `high` times the typical one.

    Signs take turns where the multipliers of the two differ.
    """
    symmetric = rules.lowest == -rules.highest
    for span in range(len(space.d)):
        space.best_estimate[span] = -_INFINITE
    for t in range(tries):
        factor = low + (high - low) * np.float32(t) / np.float32(tries - 1)
        if t % 2 and not symmetric:
            factor = -factor
        for span in range(len(space.d)):
            space.tried[span] = storable_scale(factor * space.typical[span], space.unit[span], rules)
        _estimate_gains(groups, rules, entries, space)
        for span in range(len(space.d)):
            if space.estimate[span] > space.best_estimate[span]:
                space.best_estimate[span], space.best_tried[span] = space.estimate[span], space.tried[span]
    for span in range(len(space.d)):
        space.tried[span] = space.best_tried[span]


@subkernel
def _record_and_refit(groups: int, rules: Rules, space: RowscaledSpace) -> bool:
    """Record the result of `_choose_multipliers` where it is a span's best; set `tried` to the least-squares d.

    Returns whether any d changed.
    """
    changed = False
    span_groups = rules.span if rules.span else groups
    for span in range(len(space.d)):
        total, numerator, denominator = _ZERO, _ZERO, _ZERO
        for lane in range(span * span_groups, (span + 1) * span_groups):
            m = space.multiplier[0, lane]
            total += space.gain[lane]
            numerator += m * space.p[lane]
            denominator += m * m * space.s[lane]
        d = space.tried[span]
        if total > space.best_gain[span]:
            space.best_gain[span], space.d[span] = total, d
            for lane in range(span * span_groups, (span + 1) * span_groups):
                space.multiplier[1, lane], space.book[1, lane] = space.multiplier[0, lane], space.book[0, lane]
        ratio = numerator / (denominator * d) if denominator > _ZERO else _ONE
        if np.float32(0.5) < ratio < np.float32(2):
            space.tried[span] = storable_scale(d * ratio, space.unit[span], rules)
        changed |= space.tried[span] != d
    return changed


@kernel
def search(x: np.ndarray, importance: np.ndarray, rules: Rules, effort: int, space: RowscaledSpace) -> None:
    """Find d of every span of a row (divided by `unit`; 0 where zeros are best), multipliers and books of its groups.

    Results are `space.d`, `space.unit` and row 1 of `space.multiplier` and `space.book`.
    """
    groups = len(x) // 32
    span_groups = rules.span if rules.span else groups
    entries, tries, starts = _entries(rules, effort), _TRIES[effort], _STARTS[effort]
    for span in range(len(space.d)):
        first = span * span_groups
        space.unit[span] = _load(x[32 * first : 32 * (first + span_groups)], first, space)
        _set_weights(importance, first, span_groups, rules, space)
        space.best_gain[span], space.d[span] = _ZERO, _ZERO
    for group in range(groups):
        space.multiplier[1, group], space.book[1, group] = rules.step - _ONE, np.float32(rules.table)
    _profile(space, rules, entries)
    _typical_scales(groups, rules, entries, space)
    width = (_MAX_RATIO - _MIN_RATIO) / np.float32(starts)
    for start in range(starts):
        low = _MIN_RATIO + width * np.float32(start)
        _initial_scales(low, low + width, tries, groups, rules, entries, space)
        for _ in range(_ROUNDS[effort]):
            _choose_multipliers(rules, entries, space)
            if not _record_and_refit(groups, rules, space):
                break


@kernel
def group_codes(group: int, space: RowscaledSpace, codes: np.ndarray) -> None:
    """Fill codes uint8[32] of a group under the scales that `search` chose."""
    scale = space.d[space.span_of[group]] * space.multiplier[1, group]
    book = np.int32(space.book[1, group])
    twice = _TWO / scale if scale != _ZERO else _ZERO
    tile, lane = space.data[group // LANES], group % LANES
    for j in range(32):
        t = min(max(tile[j * LANES + lane] * twice + _MIDDLE, _ZERO), _LAST)
        codes[j] = np.uint8(_NEAREST[np.int32(t) + book])


@kernel
def even_group_codes(group: int, space: RowscaledSpace, codes: np.ndarray) -> None:
    """`group_codes` where each word of four codes, 2k, 2k + 16, 2k + 1, 2k + 17, has an even number of ones (K4)."""
    scale = space.d[space.span_of[group]] * space.multiplier[1, group]
    book = np.int32(space.book[1, group]) - np.int32(K4_START)
    group_codes(group, space, codes)
    twice = _TWO / scale if scale != _ZERO else _ZERO
    tile, lane = space.data[group // LANES], group % LANES
    for k in range(8):
        odd, least_loss, replaced, code = False, _INFINITE, 0, np.uint8(0)
        for e in range(4):
            j = 2 * k + e // 2 + 16 * (e % 2)
            x, w = tile[j * LANES + lane], tile[(32 + j) * LANES + lane]
            pair = _PAIRS[np.int32(min(max(x * twice + _MIDDLE, _ZERO), _LAST)) + book]
            value = np.float32(pair & np.int32(255)) - _CENTRE
            other = np.float32((pair >> np.int32(8)) & np.int32(255)) - _CENTRE
            odd ^= (pair >> np.int32(20)) == np.int32(1)
            loss = scale * (scale * (w * (other - value) * (other + value)) - _TWO * (w * x * (other - value)))
            if loss < least_loss:
                least_loss, replaced, code = loss, j, np.uint8((pair >> np.int32(16)) & np.int32(15))
        if odd:
            codes[replaced] = code


@kernel
def scale_byte(group: int, space: RowscaledSpace) -> np.uint8:
    """The byte that holds an odd multiplier of -127 to 127 and, in bit 0, the book."""
    shifted = np.int32(space.book[1, group]) // np.int32(BINS) % np.int32(2)
    return np.uint8(np.int32(space.multiplier[1, group]) + np.int32(127) + shifted)
