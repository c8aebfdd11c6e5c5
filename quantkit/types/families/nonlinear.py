"""Search shared by iq2_k, iq3_k, iq4_k, iq5_k and iq6_k: blocks of 256, sub-blocks of 16, a codebook.

    y = d * m * c          d: a half for the block; m: an integer for the sub-block, of either sign; c: a value of one
                           of two codebooks, which a flag of the sub-block selects; the second is the first plus a shift

    minimise  sum w (x - y)^2 over a block

Given d, the best multiplier, flag and codes of each sub-block do not depend on other sub-blocks. So the block's error
is a function of d alone, and this function is searched. The 16 sub-blocks are SIMD lanes: arrays are [element, lane].

Scales are searched on a logarithmic grid: *place* k of the grid is the scale 2^(k / q).

1.  *Profile.* For each lane and place: the gain, that is the error that nearest codes remove, for both signs and books,
    over the range of scales that the lane's largest element allows.
2.  *Estimate.* A product d * m of two places is a place: the sum of their numbers. So for each d of a range, the gain
    of every multiplier is read from the profile, and the best ones are added up over the lanes.
3.  *Exact.* For the d of largest estimate, *rounded to a half first*: choose among the multipliers next to those of
    the profile, both signs and both books, by the exact error of nearest codes. Then d becomes the least-squares d.
    Repeat while the error falls.
4.  *Align.* Where multipliers are finer than places (iq6_k): the d for which the sub-blocks' least-squares scales are
    nearest to multiples of d, and step 3 once more.
5.  *Norm.* Least squares leave the block sqrt(1 - e^2) of its norm, e^2 being the relative error: at 2 bits each
    matrix gives 3 % less than it should, and a layer of several loses more. Multiplying d by 1 + e^2 / 2 corrects this
    and costs e^2 / 4 of the squared error: 1.6 % at 2 bits, negligible at 4. Perplexity decided: with it it is lower
    (docs/notes/2026-11-22-encoder-weights.md). ik_llama.cpp's factors are 1.03 for IQ2_K and 1.01 for IQ3_K.

A negative scale times a book is a positive scale times the negated book. So there are four books, 2 * sign + flag.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from quantkit.codegen.jit import kernel, shared_subkernel, subkernel
from quantkit.types.base import BEST, FAST
from quantkit.types.families.codebooks import BINS, K2, K3, K4, K5, K6, Book
from quantkit.types.families.superblock import MIN_HALF, load_block, relative_importance, storable

LANES = 16
PLACES = 160  # of a profile, at most
COUNT = 128  # super-scales that are estimated, at most; a multiple of 32 for SIMD

RAISED = 768  # what `_raised` adds to 2 c
FINE_MULTIPLIERS = 64  # where the largest multiplier is at least this, one step of it is less than a place


class NonlinearFormat(NamedTuple):
    """The numbers in which the types differ."""

    book: int  # where its codebook begins in the tables
    min_multiplier: int  # the smallest magnitude of a multiplier,
    step: int  # the distance to the next
    max_multiplier: int  # and the largest that exists in both signs
    extreme: int  # the largest of all; where above `max_multiplier`, it exists only as a negative number
    min_units: np.float32  # the profile's scales let the largest element of a sub-block become this
    max_units: np.float32  # to this many units of the codebook
    min_ratio: np.float32  # super-scales tried, from and to these multiples of the one under which the sub-block of
    max_ratio: np.float32  # the largest scale gets the multiplier `max_multiplier`
    places_per_octave: int  # places of the profile to the octave, for effort normal; half for fast, double for best
    tries: int  # super-scales tried exactly, for effort normal; 1 also makes effort fast faster
    zero_below: np.float32  # a block of smaller magnitudes is stored as zeros: the least super-scale does no better
    variance_weight: np.float32  # w = variance_weight * v + x^2 without importance, v the mean of x^2 in the block


class NonlinearSearch(NamedTuple):
    """The numbers of a search for one effort."""

    q: int  # places to the octave
    places: int  # of a profile
    below: int  # places from the lanes' largest scale to the first super-scale estimated
    scales: int  # how many are estimated, one in each place
    tries: int  # how many of them are tried exactly
    width: int  # steps of the multiplier to either side that are tried
    rounds: int  # of exact choices, with refits between
    fits: int  # super-scales near the best that step 4 compares
    steps: np.ndarray  # int64[2, 128] the multipliers' places, without repetition; a multiplier there
    reach: int  # how many of `steps` are used, a multiple of 4
    extreme: int  # the place of the extreme multiplier


class NonlinearSpace(NamedTuple):
    """Work space of an encoder."""

    flat: np.ndarray  # float32[2, 256] elements, weights
    x: np.ndarray  # float32[3, 16, 16] elements, weights, their product, by [element, lane]
    lanes: np.ndarray  # float32[5, 16] largest elements, scales, 2 / scales, least errors or best gains, first scales
    sums: np.ndarray  # float32[8, 16] of each book: what is summed by lane
    starts: np.ndarray  # int64[2, 16] of each lane: the first place of its profile, its best place
    profile: np.ndarray  # float32[3, 16, COUNT + PLACES + COUNT] gains of scales > 0, < 0, either; 0 at both margins
    totals: np.ndarray  # float32[4, COUNT] of each super-scale: gain with negative, with positive extremes; scratch
    at: np.ndarray  # uint64[4] scratch
    chosen: np.ndarray  # int32[3, 2, 16] multipliers, books: what is tried, what was best under d, under any d


# ---------------------------------------------------------------------------------------------------------- the tables

BOOKS = (K2, K3, K4, K5, K6)


def _four(table: np.ndarray, sign: int) -> np.ndarray:
    """int8[BINS, 4] of a table of both books, [2 * BINS]: its entries for either book, and for either book negated."""
    plain = table.reshape(2, BINS)
    return np.concatenate([plain, sign * plain[:, ::-1]]).T.astype(np.int8)


def _words(book: Book) -> np.ndarray:
    """uint32[BINS]: the four values of a bin, + 128, as the bytes of a word: one gather serves all books."""
    result: np.ndarray = (
        ((_four(book.rounded, -1).astype(np.int64) + 128) << np.array([0, 8, 16, 24])).sum(axis=1).astype(np.uint32)
    )
    return result


_VALUES = np.concatenate([_words(book) for book in BOOKS])
_CODES = np.concatenate([_four(book.nearest, 1) for book in BOOKS]).astype(np.uint8)


def book_start(book: Book) -> int:
    """Where the table of a codebook begins among those of all codebooks."""
    return next(BINS * i for i, b in enumerate(BOOKS) if b is book)


def _logarithms(size: int) -> np.ndarray:
    """int64[size]: 4096 log2(1 + (i + 0.5) / size), bit by bit: the same on every machine."""
    out = np.zeros(size, np.int64)
    x = 1 + (np.arange(size) + 0.5) / size
    for bit in range(11, -1, -1):
        x = x * x
        out += np.where(x >= 2, 1 << bit, 0)
        x = np.where(x >= 2, x / 2, x)
    return out


def _powers(size: int) -> np.ndarray:
    """float32[size]: 2^(i / size), size a power of two."""
    root, count = 2.0, size
    while count > 1:
        root, count = float(np.sqrt(root)), count // 2
    return np.multiply.accumulate(np.r_[1.0, np.full(size - 1, root)]).astype(np.float32)


_LOG = _logarithms(1024)
_POWER = _powers(128)


@subkernel
def place_of(value: np.float32, q: int) -> int:
    """The place nearest to a positive float32, on a grid of q to the octave where 1 is place 0."""
    bits = np.int64(np.float32(value).view(np.uint32))
    log = ((bits >> 23) - 127) * 4096 + _LOG[(bits >> 13) & 1023]
    result: int = (log * q + 2048) >> 12
    return result


@subkernel
def scale_at(place: int, q: int) -> np.float32:
    """The scale of a place: 2^(place / q)."""
    exponent = place // q
    power = np.uint32((exponent + 127) << 23).view(np.float32)
    result: np.float32 = power * _POWER[(place - exponent * q) * (128 // q)]
    return result


@subkernel
def new_plan(f: NonlinearFormat, effort: int) -> NonlinearSearch:
    """The numbers of the search for an effort."""
    q = (
        f.places_per_octave // 2
        if effort == FAST
        else (2 * f.places_per_octave if effort == BEST else f.places_per_octave)
    )
    steps, reach = np.empty((2, 128), np.int64), 0
    for m in range(f.min_multiplier, f.max_multiplier + 1, f.step):
        place = place_of(np.float32(m), q)
        if reach == 0 or steps[0, reach - 1] != place:
            steps[0, reach], steps[1, reach] = place, m
            reach += 1
    while reach % 4:
        steps[0, reach], steps[1, reach] = steps[0, reach - 1], steps[1, reach - 1]
        reach += 1
    count = (place_of(f.max_ratio / f.min_ratio, q) + 31) // 32 * 32
    places, below = (
        min(place_of(f.max_units / f.min_units, q) + 1, PLACES),
        place_of(f.min_ratio, q) - place_of(np.float32(f.max_multiplier), q),
    )
    tries, width, rounds, fits = f.tries, 1, 2, 128
    if effort == FAST:
        tries, width, fits = 1, min(f.tries, 2) - 1, 0
    elif effort == BEST:
        tries, width, rounds, fits = 6, 2, 4, 256
    if f.max_multiplier < FINE_MULTIPLIERS:
        fits = 0
    elif effort != FAST:
        width += 2
    extreme = place_of(np.float32(f.extreme), q)
    return NonlinearSearch(q, places, below, min(count, COUNT), tries, width, rounds, fits, steps, reach, extreme)


@subkernel
def new_space() -> NonlinearSpace:
    """Work space for a block, not initialized."""
    return NonlinearSpace(
        np.empty((2, 256), np.float32),
        np.empty((3, LANES, LANES), np.float32),
        np.empty((5, LANES), np.float32),
        np.empty((8, LANES), np.float32),
        np.empty((2, LANES), np.int64),
        np.zeros((3, LANES, COUNT + PLACES + COUNT), np.float32),
        np.empty((4, COUNT), np.float32),
        np.empty(4, np.uint64),
        np.empty((3, 2, LANES), np.int32),
    )


# ---------------------------------------------------------------------------------------------------------- the search


@kernel(inline="always")
def _bin(t: np.float32) -> np.uint32:
    """The table entry of a value t, given in half units, relative to the type's first entry."""
    clipped = min(max(t + np.float32(255.5), np.float32(0)), np.float32(BINS - 1))
    return np.float32(clipped + np.float32(8388608)).view(np.uint32) & np.uint32(BINS - 1)


@kernel(inline="always")
def _raised(shifted: np.uint32) -> np.float32:
    """RAISED + 2 c of the byte c + 128 at bits 15 to 22: the bits become the mantissa of a float of 512 or more."""
    return np.uint32((shifted & np.uint32(0x7F8000)) | np.uint32(0x44000000)).view(np.float32)


@kernel(inline="always")
def _value(t: np.float32, book: int, f: NonlinearFormat) -> np.float32:
    """The value nearest to t, given in half units, in one of the four books."""
    word = _VALUES[_bin(t) + np.uint32(f.book)] >> (np.uint32(8) * np.uint32(book))
    return np.float32(0.5) * (_raised(np.uint32(word << np.uint32(15))) - np.float32(RAISED))


@shared_subkernel
def load_sub_blocks(
    x: np.ndarray, importance: np.ndarray, first: int, f: NonlinearFormat, space: NonlinearSpace
) -> np.float32:
    """Load a block, divided by a power of two, and its weights. Returns the power; 0 for a block of zeros."""
    xs, w, lanes = space.flat[0], space.flat[1], space.x
    unit, mean = load_block(x, xs, f.zero_below)
    if unit == np.float32(0):
        return unit
    if not relative_importance(importance, first, w):
        for i in range(256):
            w[i] = f.variance_weight * mean + xs[i] * xs[i]
    for s in range(LANES):
        for j in range(LANES):
            lanes[0, j, s] = xs[16 * s + j]
            lanes[1, j, s] = w[16 * s + j]
            lanes[2, j, s] = w[16 * s + j] * xs[16 * s + j]
    return unit


@subkernel
def _errors(x: np.ndarray, scales: np.ndarray, twice: np.ndarray, book: int, sums: np.ndarray) -> None:
    """sums[b]: the error of the nearest codes of book b at the lanes' scales."""
    table = _VALUES[book : book + BINS]
    sums[:4] = np.float32(0)
    for j in range(LANES):
        for s in range(LANES):
            t = x[0, j, s] * twice[s]
            word = table[_bin(t)]
            t += np.float32(RAISED)
            a, b = t - _raised(np.uint32(word << np.uint32(15))), t - _raised(np.uint32(word << np.uint32(7)))
            c, d = t - _raised(np.uint32(word >> np.uint32(1))), t - _raised(np.uint32(word >> np.uint32(9)))
            sums[0, s] += x[1, j, s] * (a * a)
            sums[1, s] += x[1, j, s] * (b * b)
            sums[2, s] += x[1, j, s] * (c * c)
            sums[3, s] += x[1, j, s] * (d * d)
    for b in range(4):
        for s in range(LANES):
            sums[b, s] *= np.float32(0.25) * (scales[s] * scales[s])


@subkernel
def _error_of_zeros(x: np.ndarray, errors: np.ndarray) -> None:
    errors[:] = np.float32(0)
    for j in range(LANES):
        for s in range(LANES):
            errors[s] += x[2, j, s] * x[0, j, s]


@subkernel
def _start_profile(f: NonlinearFormat, plan: NonlinearSearch, space: NonlinearSpace) -> None:
    """The first place of each lane's profile, and the scale there."""
    maxima, first = space.lanes[0], space.lanes[4]
    maxima[:] = np.float32(2.0**-40)
    for j in range(LANES):
        for s in range(LANES):
            maxima[s] = max(maxima[s], abs(space.x[0, j, s]))
    for s in range(LANES):
        place = place_of(maxima[s] / f.max_units, plan.q)
        space.starts[0, s] = place
        first[s] = scale_at(place, plan.q)


@subkernel
def _profile(f: NonlinearFormat, plan: NonlinearSearch, space: NonlinearSpace) -> int:
    """Fill the profile of every lane; returns the place of the largest of the lanes' best scales."""
    sums, profile = space.sums, space.profile
    scales, twice, energy, first = space.lanes[1], space.lanes[2], space.lanes[3], space.lanes[4]
    _start_profile(f, plan, space)
    _error_of_zeros(space.x, energy)
    for k in range(plan.places):
        ratio = scale_at(k, plan.q)
        for s in range(LANES):
            scales[s] = first[s] * ratio
            twice[s] = np.float32(2) / scales[s]
        _errors(space.x, scales, twice, f.book, sums)
        for s in range(LANES):
            sums[0, s] = energy[s] - min(sums[0, s], sums[1, s])
            sums[1, s] = energy[s] - min(sums[2, s], sums[3, s])
            sums[2, s] = max(sums[0, s], sums[1, s])
        for s in range(LANES):
            profile[0, s, COUNT + k], profile[1, s, COUNT + k] = sums[0, s], sums[1, s]
            profile[2, s, COUNT + k] = sums[2, s]
    largest = -(1 << 30)
    for s in range(LANES):
        best, place = np.float32(0), 0
        for k in range(plan.places):
            if profile[2, s, COUNT + k] > best:
                best, place = profile[2, s, COUNT + k], k
        if best > np.float32(0):
            largest = max(largest, space.starts[0, s] + place)
    return largest


@subkernel
def _max_of_four(
    best: np.ndarray, row: np.ndarray, a: np.uint64, b: np.uint64, c: np.uint64, d: np.uint64, count: int
) -> None:
    """best = max(best, row from each of four places on), `count` elements. Places are unsigned: numba checks signed
    indices for negative ones, which keeps the loop from becoming SIMD."""
    for g in range(np.uint64(0), np.uint64(count), np.uint64(1)):
        best[g] = max(best[g], max(max(row[a + g], row[b + g]), max(row[c + g], row[d + g])))


@subkernel
def _estimate_gains(f: NonlinearFormat, plan: NonlinearSearch, d0: int, space: NonlinearSpace) -> None:
    """Estimate the gain of each super-scale from place d0 on by the profile: totals[0] where the extreme multiplier
    makes negative scales, as under positive super-scales, totals[1] where it makes positive ones."""
    profile, totals, count, at = space.profile, space.totals, plan.scales, space.at
    totals[:2] = np.float32(0)
    best, best_with_extreme = totals[2], totals[3]
    for s in range(LANES):
        best[:] = np.float32(0)
        either = profile[2, s]
        first = COUNT + d0 - space.starts[0, s]
        for i in range(0, plan.reach, 4):
            if first + plan.steps[0, i] >= COUNT + plan.places:
                break
            if first + plan.steps[0, i + 3] > COUNT - count:
                for k in range(4):
                    at[k] = np.uint64(min(max(first + plan.steps[0, i + k], 0), COUNT + plan.places))
                _max_of_four(best, either, at[0], at[1], at[2], at[3], count)
        if f.extreme == f.max_multiplier:
            for g in range(count):
                totals[0, g] += best[g]
            continue
        extreme_start = np.uint64(min(max(first + plan.extreme, 0), COUNT + plan.places))
        for side in range(2):
            for g in range(count):
                best_with_extreme[g] = best[g]
            _max_of_four(
                best_with_extreme,
                profile[1 - side, s],
                extreme_start,
                extreme_start,
                extreme_start,
                extreme_start,
                count,
            )
            for g in range(count):
                totals[side, g] += best_with_extreme[g]


@subkernel
def _likely_multipliers(
    f: NonlinearFormat, plan: NonlinearSearch, place: int, side: int, space: NonlinearSpace
) -> None:
    """chosen[0, 0]: the magnitudes of the best multipliers, by the profile, under the super-scale at `place`."""
    profile, likely = space.profile, space.chosen[0, 0]
    for s in range(LANES):
        best, choice = np.float32(0), f.min_multiplier
        first = place - space.starts[0, s]
        for i in range(plan.reach):
            index = first + plan.steps[0, i]
            if 0 <= index < plan.places and profile[2, s, COUNT + index] > best:
                best, choice = profile[2, s, COUNT + index], plan.steps[1, i]
        if f.extreme > f.max_multiplier:
            index = first + plan.extreme
            if 0 <= index < plan.places and profile[1 - side, s, COUNT + index] > best:
                choice = f.extreme
        likely[s] = choice


@subkernel
def _choose_multipliers(
    f: NonlinearFormat, plan: NonlinearSearch, d: np.float32, side: int, space: NonlinearSpace
) -> np.float32:
    """Fill chosen[1] with the multipliers (magnitudes) next to chosen[0, 0], and books, of least error; return it."""
    scales, twice, best, sums = space.lanes[1], space.lanes[2], space.lanes[3], space.sums
    likely, tried, magnitudes, books = space.chosen[0, 0], space.chosen[0, 1], space.chosen[1, 0], space.chosen[1, 1]
    if f.step == 1:  # there is a multiplier 0
        _error_of_zeros(space.x, best)
    else:
        best[:] = np.float32(np.inf)
    magnitudes[:], books[:] = np.int32(0), np.int32(0)
    for k in range(-plan.width, plan.width + 1):
        for s in range(LANES):
            m = min(max(likely[s] + np.int32(k * f.step), np.int32(f.min_multiplier)), np.int32(f.extreme))
            tried[s] = m
            scales[s] = d * np.float32(m)
            twice[s] = np.float32(2) / scales[s]
        _errors(space.x, scales, twice, f.book, sums)
        for b in range(4):
            excluded = np.int32(f.extreme) if f.extreme > f.max_multiplier and b // 2 == side else np.int32(0)
            for s in range(LANES):
                better = (sums[b, s] < best[s]) & (tried[s] != excluded)
                magnitudes[s] = tried[s] if better else magnitudes[s]
                books[s] = np.int32(b) if better else books[s]
                best[s] = sums[b, s] if better else best[s]
    total = np.float32(0)
    for s in range(LANES):
        total += best[s]
    return total


@subkernel
def _sums(f: NonlinearFormat, d: np.float32, row: int, space: NonlinearSpace) -> None:
    """Fill sums[0] with sum w x c and sums[1] with sum w c^2 of each lane, for codes under d and chosen[which]."""
    x, twice, sums = space.x, space.lanes[2], space.sums
    magnitudes, books = space.chosen[row, 0], space.chosen[row, 1]
    for s in range(LANES):
        twice[s] = np.float32(2) / (d * np.float32(magnitudes[s])) if magnitudes[s] else np.float32(0)
    sums[:2] = np.float32(0)
    for j in range(LANES):
        for s in range(LANES):
            c = _value(x[0, j, s] * twice[s], books[s], f)
            sums[0, s] += x[2, j, s] * c
            sums[1, s] += x[1, j, s] * (c * c)


@subkernel
def _refit(f: NonlinearFormat, d: np.float32, space: NonlinearSpace) -> np.float32:
    """The super-scale of least error for the codes that d, multipliers and books of chosen[1] give."""
    _sums(f, d, 1, space)
    p = q = np.float32(0)
    for s in range(LANES):
        m = np.float32(space.chosen[1, 0, s])
        p += m * space.sums[0, s]
        q += m * m * space.sums[1, s]
    return p / q if q > np.float32(0) else np.float32(0)


@subkernel
def _refine(
    f: NonlinearFormat,
    plan: NonlinearSearch,
    d: np.float32,
    unit: np.float32,
    side: int,
    least_error: np.float32,
    space: NonlinearSpace,
) -> tuple[np.float32, np.float32]:
    """Choose multipliers and refit d while the error falls; store in chosen[2] what has less error than `least_error`.

    Returns the least error and its super-scale, which is 0 where nothing was better.
    """
    chosen = space.chosen
    best_d = np.float32(0)
    last = np.float32(np.inf)
    for _ in range(plan.rounds):
        error = _choose_multipliers(f, plan, d, side, space)
        if error < least_error:
            least_error, best_d = error, d
            for s in range(LANES):
                chosen[2, 0, s], chosen[2, 1, s] = chosen[1, 0, s], chosen[1, 1, s]
        if error >= last:
            break
        last = error
        refitted = _refit(f, d, space)
        if refitted <= np.float32(0) or storable(refitted, unit) == d:
            break
        d = storable(refitted, unit)
        for s in range(LANES):
            chosen[0, 0, s] = max(chosen[1, 0, s], np.int32(f.min_multiplier))
    return least_error, best_d


@subkernel
def _align_scale(
    f: NonlinearFormat, plan: NonlinearSearch, d: np.float32, unit: np.float32, space: NonlinearSpace
) -> np.float32:
    """The super-scale near d of which the least-squares scales of the sub-blocks are nearest to being multiples.

    Their multipliers go to chosen[0, 0]. For fine multipliers, where the profile's places are too wide.
    """
    ideal, weight, multipliers, errors = space.sums[0], space.sums[1], space.chosen[0, 0], space.sums[2]
    _sums(f, d, 2, space)
    for s in range(LANES):
        fits = space.chosen[2, 0, s] != 0 and ideal[s] > np.float32(0)
        ideal[s] = ideal[s] / weight[s] if fits else np.float32(0)
    least_error, best_d = np.float32(np.inf), d
    previous = np.float32(0)
    for g in range(plan.fits):
        factor = np.float32(0.9) + np.float32(0.25) * (np.float32(g) + np.float32(0.5)) / np.float32(plan.fits)
        tried = storable(d * factor, unit)
        if tried == previous:
            continue
        previous, inverse = tried, np.float32(1) / tried
        for s in range(LANES):
            m = (ideal[s] * inverse + np.float32(12582912)) - np.float32(12582912)
            residual = ideal[s] - tried * min(max(m, np.float32(f.min_multiplier)), np.float32(f.extreme))
            errors[s] = weight[s] * (residual * residual)
        total = np.float32(0)
        for s in range(LANES):
            total += errors[s]
        if total < least_error:
            least_error, best_d = total, tried
    for s in range(LANES):
        m = np.int32(ideal[s] / best_d + np.float32(0.5))
        multipliers[s] = min(max(m, np.int32(f.min_multiplier)), np.int32(f.extreme))
    return best_d


@subkernel
def _exclude_unstorable(plan: NonlinearSearch, d0: int, unit: np.float32, totals: np.ndarray) -> None:
    """Where halves are further apart than places, exclude the places that are not halves."""
    ulp = np.float32(MIN_HALF) / unit
    if scale_at(d0, plan.q) < np.float32(2 * plan.q) * ulp:
        for g in range(plan.scales):
            d = scale_at(d0 + g, plan.q)
            if place_of(storable(d, unit), plan.q) != d0 + g:
                totals[0, g] = totals[1, g] = np.float32(-1)


@subkernel
def _pop_best(count: int, totals: np.ndarray) -> tuple[int, int]:
    """Place and sign of the super-scale of largest estimate. Removes it and its neighbours from the list."""
    best, choice, side = np.float32(-1), -1, 0
    for sign in range(2):
        for g in range(count):
            if totals[sign, g] > best:
                best, choice, side = totals[sign, g], g, sign
    totals[:2, max(choice - 1, 0) : choice + 2] = np.float32(-1)
    return choice, side


@shared_subkernel
def search(
    f: NonlinearFormat,
    plan: NonlinearSearch,
    unit: np.float32,
    space: NonlinearSpace,
    multipliers: np.ndarray,
    flags: np.ndarray,
    codes: np.ndarray,
) -> np.float32:
    """Search the block that `load_sub_blocks` loaded; returns its super-scale.

    Fills multipliers int32[16], signed, flags int32[16] and codes uint8[256].
    """
    space.chosen[2] = np.int32(0)
    d0 = _profile(f, plan, space) + plan.below
    _estimate_gains(f, plan, d0, space)
    least_error, d, sign = np.float32(np.inf), np.float32(0), 0
    _exclude_unstorable(plan, d0, unit, space.totals)
    for i in range(plan.tries):
        choice, side = _pop_best(plan.scales, space.totals)
        if choice < 0 and i > 0:
            break
        start = storable(scale_at(d0 + choice, plan.q), unit)
        if choice < 0:  # not one half among them: the next above
            ulp = np.float32(MIN_HALF) / unit
            start = storable(np.ceil(scale_at(d0, plan.q) / ulp) * ulp, unit)
        _likely_multipliers(f, plan, place_of(start, plan.q), side, space)
        least_error, refined = _refine(f, plan, start, unit, side, least_error, space)
        if refined > np.float32(0):
            d, sign = refined, side
    if plan.fits and d > np.float32(0):
        start = _align_scale(f, plan, d, unit, space)
        if start != d:
            least_error, refined = _refine(f, plan, start, unit, sign, least_error, space)
            d = refined if refined > np.float32(0) else d
    _final_codes(f, d, sign, space, multipliers, flags, codes)
    if d > np.float32(0):
        d = storable(d * _norm_correction(least_error, space), unit)
    return (d if sign == 0 else -d) * unit


@subkernel
def _norm_correction(error: np.float32, space: NonlinearSpace) -> np.float32:
    """The factor 1 + e^2 / 2 that gives a block its norm back, e^2 being the relative error."""
    norm = np.float32(0)
    for j in range(LANES):
        for s in range(LANES):
            norm += space.x[0, j, s] * space.x[2, j, s]
    return np.float32(1) + error / (norm + norm)


@subkernel
def _final_codes(
    f: NonlinearFormat,
    d: np.float32,
    sign: int,
    space: NonlinearSpace,
    multipliers: np.ndarray,
    flags: np.ndarray,
    codes: np.ndarray,
) -> None:
    """Signed multipliers, flags and codes of the best choice."""
    x = space.flat[0]
    for s in range(LANES):
        m, b = space.chosen[2, 0, s], space.chosen[2, 1, s]
        multipliers[s] = m if (b < 2) == (sign == 0) else -m
        flags[s] = b & 1
        twice = np.float32(2) / (d * np.float32(m)) if m else np.float32(0)
        for j in range(16 * s, 16 * s + 16):
            codes[j] = _CODES[_bin(x[j] * twice) + np.uint32(f.book), b]
