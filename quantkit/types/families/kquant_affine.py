"""Search of the K types with scales and minima: q2_K, q4_K and q5_K.

    y = (d * S) * q - (dmin * M)        q 0 to `top`; S and M 0 to `most`, one pair a sub-block; d, dmin halves

    minimise  sum e (x - y)^2 over a block, e the weights of `kquant`

The codes q of a sub-block enter its error through three sums only, beside sum e, sum e x and sum e x^2:

    sum e (x - s q + m)^2 = sum e x^2 + s (s sum e q^2 - 2 sum e q x) + m (m sum e + 2 (sum e x - s sum e q))

1. Each sub-block is fitted alone: candidates map its range, zero included, to various numbers of steps with various
   offsets; each gives codes, their sums, and by these the least-squares scale and minimum. SLOTS of them are kept, the
   best of as many parts of the range of steps, and their codes derived anew from the fit.
2. For a grid of super-scales d and dmin, rounded to halves: the S and M of each sub-block that are best for any of its
   slots. By the sums alone this takes a few operations a sub-block. A block may be negated first (d and dmin are then
   stored negative): codes run down instead of up, for which the same sums are easily had.
3. Exactly, from the best of the grid: each S with its neighbours, for each the best M with its neighbours, and nearest
   codes; then d and dmin by least squares, and again.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from quantkit.codegen.jit import inner, part
from quantkit.types.families.kquant import (
    INFINITE,
    LANES,
    ONE,
    PER_UNIT,
    ROUND,
    SUM_E,
    TWO,
    UNIT,
    ZERO,
    block_maxima,
    block_sums,
    codes_of,
    copy,
    factor_of,
    fill,
    load,
    spread,
    storable,
)


class Affine(NamedTuple):
    """What tells the types apart; `affine` makes one."""

    subs: int  # sub-blocks of a block
    top: np.float32  # the largest code,
    most: np.float32  # the largest S and M
    narrow: np.float32  # the range of a sub-block becomes from so many steps
    wide: np.float32  # to so many
    first_s: np.float32  # under the super-scales looked at, the largest scale becomes this S
    span_s: int  # or less by up to so much;
    first_m: np.float32  # the largest minimum likewise
    span_m: int


def affine(
    subs: int, top: float, most: float, steps: tuple[float, float], scales: tuple[float, int], minima: tuple[float, int]
) -> Affine:
    first_s, first_m = np.float32(scales[0]), np.float32(minima[0])
    narrow, wide = np.float32(steps[0]), np.float32(steps[1])
    return Affine(subs, np.float32(top), np.float32(most), narrow, wide, first_s, scales[1], first_m, minima[1])


SLOTS = 8  # at most

# Rows of `state`, after the common ones.
SUM_EX, SIGN, LOW, HIGH = 3, 4, 5, 6  # the block is negated where SIGN is -1
SCALE, MINIMUM, INVERSE, OFFSET = 7, 8, 9, 10  # a candidate: q = round(x * INVERSE + OFFSET)
EQ, EQQ, EQX, ERROR = 11, 12, 13, 14  # the three sums of its codes; its error, without sum e x^2 or exactly
FIRST_D, FIRST_DMIN = 15, 16  # super-scales that the largest scale and minimum suggest
D, DMIN, S, M = 17, 18, 19, 20  # where a search stands
NEW_S, NEW_M = 21, 22
BEST_ERROR, BEST_D, BEST_DMIN, BEST_S, BEST_M, BEST_SIGN = 23, 24, 25, 26, 27, 28  # best of the block so far
TERM = 29  # five rows of terms of block sums
STATE_SIZE = (TERM + 5) * LANES
# A slot has six rows: scale, minimum, the three sums, the error.


@part
def _accumulate(data, state, size, top):
    """The three sums of the codes of the candidate."""
    xs, ws = data
    for lane in range(LANES):
        state[EQ * LANES + lane] = state[EQQ * LANES + lane] = state[EQX * LANES + lane] = ZERO
    for j in range(size):
        for lane in range(LANES):
            x, e = xs[j * LANES + lane], ws[j * LANES + lane]
            t = min(max(x * state[INVERSE * LANES + lane] + state[OFFSET * LANES + lane], ZERO), top)
            q = (t + ROUND) - ROUND
            eq = e * q
            state[EQ * LANES + lane] += eq
            state[EQQ * LANES + lane] += eq * q
            state[EQX * LANES + lane] += eq * x


@part
def _errors(data, state, size, top):
    """ERROR: the error of nearest codes under SCALE and MINIMUM."""
    xs, ws = data
    for lane in range(LANES):
        state[ERROR * LANES + lane] = ZERO
    for j in range(size):
        for lane in range(LANES):
            x, e = xs[j * LANES + lane], ws[j * LANES + lane]
            t = min(max(x * state[INVERSE * LANES + lane] + state[OFFSET * LANES + lane], ZERO), top)
            q = (t + ROUND) - ROUND
            r = (x - state[SCALE * LANES + lane] * q) + state[MINIMUM * LANES + lane]
            state[ERROR * LANES + lane] += e * r * r


@part
def _prepare(data, state, slots, size):
    """SUM_EX, LOW and HIGH; empty slots, but that the first has a minimum alone.

    No scale is needed where all elements are the same below 0, and no candidate's codes can do without one there: all
    of them become 0.
    """
    xs, ws = data
    for lane in range(LANES):
        state[SUM_EX * LANES + lane] = state[LOW * LANES + lane] = state[HIGH * LANES + lane] = ZERO
    for j in range(size):
        for lane in range(LANES):
            x = xs[j * LANES + lane]
            state[SUM_EX * LANES + lane] += ws[j * LANES + lane] * x
            state[LOW * LANES + lane] = min(state[LOW * LANES + lane], x)
            state[HIGH * LANES + lane] = max(state[HIGH * LANES + lane], x)
    fill(state, SIGN, ONE)
    fill(state, BEST_ERROR, INFINITE)
    slots[:] = ZERO
    for lane in range(LANES):
        e, ex = state[SUM_E * LANES + lane], min(state[SUM_EX * LANES + lane], ZERO)
        minimum = -ex / (e if e > ZERO else ONE)
        slots[0, LANES + lane] = minimum
        slots[0, 5 * LANES + lane] = minimum * ex


@part
def _propose(state, steps, code):
    """A candidate: the range becomes so many steps, its low end such a code."""
    for lane in range(LANES):
        low, high = state[LOW * LANES + lane], state[HIGH * LANES + lane]
        inverse = steps / (high - low) if high > low else ZERO
        state[INVERSE * LANES + lane] = inverse
        state[OFFSET * LANES + lane] = code - low * inverse


@part
def _keep(state, slot):
    """Fit scale and minimum >= 0 to the codes of the candidate; keep it in the slot if it is the best there."""
    for lane in range(LANES):
        e, ex = state[SUM_E * LANES + lane], state[SUM_EX * LANES + lane]
        eq, eqq, eqx = state[EQ * LANES + lane], state[EQQ * LANES + lane], state[EQX * LANES + lane]
        determinant = e * eqq - eq * eq
        sound = determinant > np.float32(1e-6) * e * eqq
        inverse = ONE / (determinant if sound else ONE)
        scale, minimum = (e * eqx - eq * ex) * inverse, (eq * eqx - eqq * ex) * inverse
        sound = sound and scale > ZERO and minimum > ZERO
        alone = max(eqx, ZERO) / (eqq if eqq > ZERO else ONE)
        scale = scale if sound else alone
        minimum = minimum if sound else ZERO
        error = scale * (scale * eqq - TWO * eqx) + minimum * (minimum * e + TWO * (ex - scale * eq))
        better = error < slot[5 * LANES + lane]
        slot[lane] = scale if better else slot[lane]
        slot[LANES + lane] = minimum if better else slot[LANES + lane]
        slot[2 * LANES + lane] = eq if better else slot[2 * LANES + lane]
        slot[3 * LANES + lane] = eqq if better else slot[3 * LANES + lane]
        slot[4 * LANES + lane] = eqx if better else slot[4 * LANES + lane]
        slot[5 * LANES + lane] = error if better else slot[5 * LANES + lane]


@part
def _return_to(state, slot):
    """Make the fit of a slot the candidate."""
    for lane in range(LANES):
        scale, minimum = slot[lane], slot[LANES + lane]
        inverse = ONE / scale if scale > ZERO else ZERO
        state[INVERSE * LANES + lane] = inverse
        state[OFFSET * LANES + lane] = minimum * inverse


@part
def _fit(data, state, slots, form, steps, offsets, rounds):
    """Step 1: `steps` sizes of step for each slot with `offsets` offsets each; `rounds` of codes anew."""
    size = 256 // form.subs
    for k in range(len(slots)):
        for g in range(steps):
            part = (np.float32(k * steps + g) + np.float32(0.5)) / np.float32(len(slots) * steps)
            for o in range(offsets):
                code = (np.float32(o) + np.float32(0.5)) / np.float32(offsets) * np.float32(1.4) - np.float32(0.9)
                _propose(state, form.narrow + (form.wide - form.narrow) * part, code)
                _accumulate(data, state, size, form.top)
                _keep(state, slots[k])
        for _ in range(rounds):
            _return_to(state, slots[k])
            _accumulate(data, state, size, form.top)
            _keep(state, slots[k])


@part
def _negate(data, state, slots, form, wanted):
    """Negate the blocks whose SIGN is not as the row `wanted` says, and what is known about them."""
    xs, _ = data
    changes = False
    for lane in range(LANES):
        changes |= state[SIGN * LANES + lane] != state[wanted * LANES + lane]
    if not changes:
        return
    top = form.top
    for j in range(256 // form.subs):
        for lane in range(LANES):
            xs[j * LANES + lane] *= state[SIGN * LANES + lane] * state[wanted * LANES + lane]
    for k in range(len(slots)):
        slot = slots[k]
        for lane in range(LANES):
            e, ex = state[SUM_E * LANES + lane], state[SUM_EX * LANES + lane]
            eq, eqq = slot[2 * LANES + lane], slot[3 * LANES + lane]
            eqx = slot[4 * LANES + lane]
            scale, minimum = slot[lane], slot[LANES + lane]
            turn = state[SIGN * LANES + lane] != state[wanted * LANES + lane]
            slot[lane] = minimum / top if turn and scale == ZERO else scale  # a minimum alone: its codes are the top
            slot[LANES + lane] = max(top * scale - minimum, ZERO) if turn else minimum
            slot[2 * LANES + lane] = top * e - eq if turn else eq
            slot[3 * LANES + lane] = top * (top * e - TWO * eq) + eqq if turn else eqq
            slot[4 * LANES + lane] = eqx - top * ex if turn else eqx
    for lane in range(LANES):
        state[SUM_EX * LANES + lane] *= state[SIGN * LANES + lane] * state[wanted * LANES + lane]
        state[SIGN * LANES + lane] = state[wanted * LANES + lane]


@part
def _suggest(state, slots, form, blocks):
    """FIRST_D and FIRST_DMIN: under which the largest scale and minimum of a block become the largest S and M."""
    fill(state, S, ZERO)
    fill(state, M, ZERO)
    fill(state, ERROR, ZERO)
    for k in range(len(slots)):
        slot = slots[k]
        for lane in range(LANES):
            better = slot[5 * LANES + lane] < state[ERROR * LANES + lane]
            state[ERROR * LANES + lane] = min(slot[5 * LANES + lane], state[ERROR * LANES + lane])
            state[S * LANES + lane] = slot[lane] if better else state[S * LANES + lane]
            state[M * LANES + lane] = slot[LANES + lane] if better else state[M * LANES + lane]
    for value, row in ((S, FIRST_D), (M, FIRST_DMIN)):
        block_maxima(state, value, form.subs, blocks)
        spread(blocks, form.subs, state, row)
        for lane in range(LANES):
            state[row * LANES + lane] /= form.most


@part
def _set_scales(state, first, factor, row):
    """A row of super-scales: `factor` times row `first`, as a half."""
    for lane in range(LANES):
        unit, per_unit = state[UNIT * LANES + lane], state[PER_UNIT * LANES + lane]
        state[row * LANES + lane] = storable(state[first * LANES + lane] * factor, unit, per_unit)


@part
def _promise(state, slots, most):
    """ERROR, S and M that are best for any slot under D and DMIN; the sums of that slot's codes become the candidate's.

    The minimum is the best beside each of two scales, the whole numbers around what the slot asks for.
    """
    fill(state, ERROR, INFINITE)
    for k in range(len(slots)):
        slot = slots[k]
        for lane in range(LANES):
            e, ex, dmin = state[SUM_E * LANES + lane], state[SUM_EX * LANES + lane], state[DMIN * LANES + lane]
            eq, eqq = slot[2 * LANES + lane], slot[3 * LANES + lane]
            eqx = slot[4 * LANES + lane]
            per_dmin = ONE / (e * dmin if e > ZERO else ONE)
            wanted = min(slot[lane] / state[D * LANES + lane], most)
            nearest = (wanted + ROUND) - ROUND
            other = min(nearest + (ONE if wanted > nearest else -ONE), most)
            other = max(other, ZERO)
            scale = state[D * LANES + lane] * nearest
            m = (min(max((scale * eq - ex) * per_dmin, ZERO), most) + ROUND) - ROUND
            minimum = dmin * m
            error = scale * (scale * eqq - TWO * eqx) + minimum * (minimum * e + TWO * (ex - scale * eq))
            scale = state[D * LANES + lane] * other
            other_m = (min(max((scale * eq - ex) * per_dmin, ZERO), most) + ROUND) - ROUND
            minimum = dmin * other_m
            error_2 = scale * (scale * eqq - TWO * eqx) + minimum * (minimum * e + TWO * (ex - scale * eq))
            s = other if error_2 < error else nearest
            m = other_m if error_2 < error else m
            error = min(error, error_2)
            better = error < state[ERROR * LANES + lane]
            state[ERROR * LANES + lane] = error if better else state[ERROR * LANES + lane]
            state[S * LANES + lane] = s if better else state[S * LANES + lane]
            state[M * LANES + lane] = m if better else state[M * LANES + lane]
            state[EQ * LANES + lane] = eq if better else state[EQ * LANES + lane]
            state[EQQ * LANES + lane] = eqq if better else state[EQQ * LANES + lane]
            state[EQX * LANES + lane] = eqx if better else state[EQX * LANES + lane]


@part
def _refit(state, form, sums):
    """D and DMIN of least error for S, M and the candidate's sums; sums float32[5, blocks] is scratch."""
    for lane in range(LANES):
        s, m = state[S * LANES + lane], state[M * LANES + lane]
        state[TERM * LANES + lane] = s * s * state[EQQ * LANES + lane]
        state[(TERM + 1) * LANES + lane] = s * m * state[EQ * LANES + lane]
        state[(TERM + 2) * LANES + lane] = m * m * state[SUM_E * LANES + lane]
        state[(TERM + 3) * LANES + lane] = s * state[EQX * LANES + lane]
        state[(TERM + 4) * LANES + lane] = m * state[SUM_EX * LANES + lane]
    for i in range(5):
        block_sums(state, TERM + i, form.subs, sums[i])
    for b in range(LANES // form.subs):
        ss, sm, mm, sx, mx = sums[0, b], sums[1, b], sums[2, b], sums[3, b], sums[4, b]
        determinant = ss * mm - sm * sm
        d = dmin = ZERO
        if determinant > np.float32(1e-6) * ss * mm:
            d, dmin = (sx * mm - sm * mx) / determinant, (sx * sm - ss * mx) / determinant
        elif ss > ZERO:
            d = sx / ss
        sums[0, b], sums[1, b] = d, dmin
    spread(sums[0], form.subs, state, TERM)
    spread(sums[1], form.subs, state, TERM + 1)
    for row, found in ((D, TERM), (DMIN, TERM + 1)):
        for lane in range(LANES):
            if state[found * LANES + lane] > ZERO:
                unit, per_unit = state[UNIT * LANES + lane], state[PER_UNIT * LANES + lane]
                state[row * LANES + lane] = storable(state[found * LANES + lane], unit, per_unit)


@part
def _survey(data, state, slots, form, count, minima, turns, promised, blocks):
    """Step 2: promised[turn, i, h, b] is the error under the places i, h of the grid, of a block turned or not."""
    for turn in range(turns):
        if turn:
            for lane in range(LANES):
                state[TERM * LANES + lane] = -ONE
            _negate(data, state, slots, form, TERM)
        _suggest(state, slots, form, blocks)
        for i in range(count):
            _set_scales(state, FIRST_D, factor_of(i, count, form.most, form.first_s, form.span_s), D)
            for h in range(minima):
                _set_scales(state, FIRST_DMIN, factor_of(h, minima, form.most, form.first_m, form.span_m), DMIN)
                _promise(state, slots, form.most)
                block_sums(state, ERROR, form.subs, promised[turn, i, h])


@part
def _start(data, state, slots, form, promised, blocks, indices):
    """Turn to the most promising place of the grid, block by block, and cross it out."""
    turns, count, minima = promised.shape[0], promised.shape[1], promised.shape[2]
    places = promised.reshape(turns * count * minima, promised.shape[3])
    for b in range(LANES // form.subs):
        choice = 0
        for i in range(len(places)):
            if places[i, b] < places[choice, b]:
                choice = i
        places[choice, b] = INFINITE
        indices[b] = choice
        blocks[b] = -ONE if choice >= count * minima else ONE
    spread(blocks, form.subs, state, TERM)
    _negate(data, state, slots, form, TERM)
    _suggest(state, slots, form, blocks)
    for b in range(LANES // form.subs):
        blocks[b] = factor_of(indices[b] // minima % count, count, form.most, form.first_s, form.span_s)
    spread(blocks, form.subs, state, TERM)
    for b in range(LANES // form.subs):
        blocks[b] = factor_of(indices[b] % minima, minima, form.most, form.first_m, form.span_m)
    spread(blocks, form.subs, state, TERM + 1)
    for lane in range(LANES):
        state[FIRST_D * LANES + lane] *= state[TERM * LANES + lane]
        state[FIRST_DMIN * LANES + lane] *= state[(TERM + 1) * LANES + lane]
    _set_scales(state, FIRST_D, ONE, D)
    _set_scales(state, FIRST_DMIN, ONE, DMIN)


@part
def _look_around(data, state, form, wide):
    """S and M of least exact error among the neighbours of S, and for each the neighbours of the M that fits best."""
    copy(state, NEW_S, S)
    copy(state, NEW_M, M)
    fill(state, TERM, INFINITE)
    for i in range(-wide, wide + 1):
        for h in range(-1, 2):
            for lane in range(LANES):
                d, dmin = state[D * LANES + lane], state[DMIN * LANES + lane]
                s = min(max(state[NEW_S * LANES + lane] + np.float32(i), ZERO), form.most)
                scale = d * s
                e = state[SUM_E * LANES + lane]
                per_dmin = ONE / (e * dmin if e > ZERO else ONE)
                m = (scale * state[EQ * LANES + lane] - state[SUM_EX * LANES + lane]) * per_dmin + np.float32(h)
                m = (min(max(m, ZERO), form.most) + ROUND) - ROUND
                inverse = ONE / scale if s > ZERO else ZERO
                state[SCALE * LANES + lane], state[MINIMUM * LANES + lane] = scale, dmin * m
                state[INVERSE * LANES + lane], state[OFFSET * LANES + lane] = inverse, dmin * m * inverse
                state[(TERM + 1) * LANES + lane], state[(TERM + 2) * LANES + lane] = s, m
            _errors(data, state, 256 // form.subs, form.top)
            for lane in range(LANES):
                better = state[ERROR * LANES + lane] < state[TERM * LANES + lane]
                state[TERM * LANES + lane] = min(state[ERROR * LANES + lane], state[TERM * LANES + lane])
                state[S * LANES + lane] = state[(TERM + 1) * LANES + lane] if better else state[S * LANES + lane]
                state[M * LANES + lane] = state[(TERM + 2) * LANES + lane] if better else state[M * LANES + lane]


@part
def _aim(state, d, dmin, s, m):
    """Make what these rows say the candidate."""
    for lane in range(LANES):
        scale = state[d * LANES + lane] * state[s * LANES + lane]
        minimum = state[dmin * LANES + lane] * state[m * LANES + lane]
        inverse = ONE / scale if state[s * LANES + lane] > ZERO else ZERO
        state[INVERSE * LANES + lane], state[OFFSET * LANES + lane] = inverse, minimum * inverse


@part
def _record(state, form, blocks):
    """Keep where the search of each block stands if its error, in row TERM, is the least so far."""
    block_sums(state, TERM, form.subs, blocks)
    spread(blocks, form.subs, state, TERM)
    for lane in range(LANES):
        better = state[TERM * LANES + lane] < state[BEST_ERROR * LANES + lane]
        state[BEST_ERROR * LANES + lane] = min(state[TERM * LANES + lane], state[BEST_ERROR * LANES + lane])
        state[BEST_D * LANES + lane] = state[D * LANES + lane] if better else state[BEST_D * LANES + lane]
        state[BEST_DMIN * LANES + lane] = state[DMIN * LANES + lane] if better else state[BEST_DMIN * LANES + lane]
        state[BEST_S * LANES + lane] = state[S * LANES + lane] if better else state[BEST_S * LANES + lane]
        state[BEST_M * LANES + lane] = state[M * LANES + lane] if better else state[BEST_M * LANES + lane]
        state[BEST_SIGN * LANES + lane] = state[SIGN * LANES + lane] if better else state[BEST_SIGN * LANES + lane]


@part
def workspace():
    """What `search` works in: elements and weights, state, slots, codes."""
    data = np.empty(32 * LANES, np.float32), np.empty(32 * LANES, np.float32)
    state, slots = np.empty(STATE_SIZE, np.float32), np.empty((SLOTS, 6 * LANES), np.float32)
    return data, state, slots, np.empty(32 * LANES, np.uint8)


@inner
def search(x, importance, plan, first, form, weighing, work):
    """Search the LANES // subs blocks from `first` on; `block_of` then tells what was found.

    `plan`, eleven integers, is how hard to look. Step 1: slots, sizes of step for each, offsets, rounds of codes anew;
    step 2: places of d, of dmin, ways round, refits; step 3: starts, rounds of looking around, how far.
    """
    data, state, slots, codes = work
    many_slots, steps, offsets, rounds, count, minima, turns, refits, starts, looks, wide = plan
    slots = slots[:many_slots]
    many = LANES // form.subs
    blocks, sums, indices = np.empty(many, np.float32), np.empty((5, many), np.float32), np.empty(many, np.int64)
    promised = np.empty((turns, count, minima, many), np.float32)
    load(x, importance, first, form.subs, weighing, data, state)
    _prepare(data, state, slots, 256 // form.subs)
    _fit(data, state, slots, form, steps, offsets, rounds)
    _survey(data, state, slots, form, count, minima, turns, promised, blocks)
    for _ in range(starts):
        _start(data, state, slots, form, promised, blocks, indices)
        for _ in range(refits):
            _promise(state, slots, form.most)
            _refit(state, form, sums)
        _promise(state, slots, form.most)
        for look in range(looks):
            _look_around(data, state, form, wide)
            _record(state, form, blocks)
            if look + 1 < looks:
                _aim(state, D, DMIN, S, M)
                _accumulate(data, state, 256 // form.subs, form.top)
                _refit(state, form, sums)
    _negate(data, state, slots, form, BEST_SIGN)
    _aim(state, BEST_D, BEST_DMIN, BEST_S, BEST_M)
    _codes(data, state, form, codes)


@part
def _codes(data, state, form, codes):
    """Nearest codes under the candidate."""
    xs, _ = data
    for j in range(256 // form.subs):
        for lane in range(LANES):
            t = xs[j * LANES + lane] * state[INVERSE * LANES + lane] + state[OFFSET * LANES + lane]
            codes[j * LANES + lane] = np.uint8(np.int32((min(max(t, ZERO), form.top) + ROUND) - ROUND))


@part
def block_of(work, form, b, codes, scales, minima):
    """What was found for block b: codes uint8[256], S and M to scales and minima uint8[subs]; returns d and dmin."""
    _, state, _, lanes = work
    count = LANES // form.subs
    codes_of(lanes, b, form.subs, codes)
    any_scale = any_minimum = False
    for s in range(form.subs):
        scales[s] = np.uint8(np.int32(state[BEST_S * LANES + s * count + b]))
        minima[s] = np.uint8(np.int32(state[BEST_M * LANES + s * count + b]))
        any_scale |= scales[s] > 0
        any_minimum |= minima[s] > 0
    unit = state[UNIT * LANES + b] * state[BEST_SIGN * LANES + b]
    d, dmin = state[BEST_D * LANES + b] * unit, state[BEST_DMIN * LANES + b] * unit
    return d if any_scale else ZERO, dmin if any_minimum else ZERO
