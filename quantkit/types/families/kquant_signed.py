"""Search of the K types with scales alone: q3_K and q6_K.

    y = (d * S) * q        q `low` to `high`; S one integer of `least` to `most` for 16 elements; d a half of any sign

    minimise  sum w (x - y)^2 over a block, w the weights of `kquant`

Under a scale s the nearest codes have E = sum w r^2, D = sum w r q, Q = sum w q^2 with r = x - s q; the same codes have
their least error E - D^2 / Q at s + D / Q, and around it the error grows by Q times the square of the distance.

1. Each sub-block is fitted alone: candidates make its largest element various numbers of units, of either sign, and
   move to the least squares of their codes. SLOTS of them are kept, the best of as many parts of the range.
2. For a grid of super-scales d, rounded to halves: the S of each sub-block that is best for any of its slots. By E, Q
   and s alone this takes a few operations a sub-block.
3. Exactly, from the best of the grid: the S of each slot with its neighbours and nearest codes; then d by least
   squares, and again.
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
    UNIT,
    ZERO,
    block_sums,
    codes_of,
    copy,
    factor_of,
    fill,
    load,
    spread,
    storable,
)


class Signed(NamedTuple):
    """What tells the types apart; `signed` makes one."""

    low: np.float32  # the least code,
    high: np.float32  # the largest
    least: np.float32  # the least S,
    most: np.float32  # the largest
    span: int  # under the super-scales looked at, the largest scale becomes `least`, or less by up to so much


def signed(low: float, high: float, least: float, most: float, span: int) -> Signed:
    return Signed(np.float32(low), np.float32(high), np.float32(least), np.float32(most), span)


SUBS, SIZE = 16, 16
BLOCKS = LANES // SUBS  # searched at once
SLOTS = 8  # at most; half of them for either sign

# Rows of `state`, after the common ones.
EXTREME = 3  # the element of largest magnitude, with its sign
SCALE, INVERSE, ERROR, SLOPE, CURVE = 4, 5, 6, 7, 8  # a candidate: s, 1 / s, E, D, Q
FIRST_D = 9  # the super-scale that the largest scale suggests
D, S, NEW_S = 10, 11, 12  # where a search stands
TERM = 13  # scratch, three rows
BEST_ERROR, BEST_D, BEST_S = 16, 17, 18  # best of the block so far
ALONE = 19  # sum w x^2: the error of zeros
STATE_SIZE = 20 * LANES


@part
def _sums(data, state, low, high):
    """E, D and Q of nearest codes under SCALE."""
    xs, ws = data
    for lane in range(LANES):
        state[ERROR * LANES + lane] = state[SLOPE * LANES + lane] = state[CURVE * LANES + lane] = ZERO
    for j in range(SIZE):
        for lane in range(LANES):
            x, w = xs[j * LANES + lane], ws[j * LANES + lane]
            q = (min(max(x * state[INVERSE * LANES + lane], low), high) + ROUND) - ROUND
            r = x - state[SCALE * LANES + lane] * q
            wr, wq = w * r, w * q
            state[ERROR * LANES + lane] += wr * r
            state[SLOPE * LANES + lane] += wr * q
            state[CURVE * LANES + lane] += wq * q


@part
def _errors(data, state, low, high):
    """E of nearest codes under SCALE."""
    xs, ws = data
    for lane in range(LANES):
        state[ERROR * LANES + lane] = ZERO
    for j in range(SIZE):
        for lane in range(LANES):
            x, w = xs[j * LANES + lane], ws[j * LANES + lane]
            q = (min(max(x * state[INVERSE * LANES + lane], low), high) + ROUND) - ROUND
            r = x - state[SCALE * LANES + lane] * q
            state[ERROR * LANES + lane] += w * r * r


@part
def _prepare(data, state, slots):
    """EXTREME and ALONE; empty slots."""
    xs, ws = data
    fill(state, EXTREME, ZERO)
    fill(state, ALONE, ZERO)
    fill(state, BEST_ERROR, INFINITE)
    for j in range(SIZE):
        for lane in range(LANES):
            x, extreme = xs[j * LANES + lane], state[EXTREME * LANES + lane]
            state[EXTREME * LANES + lane] = x if abs(x) > abs(extreme) else extreme
            state[ALONE * LANES + lane] += ws[j * LANES + lane] * x * x
    for k in range(len(slots)):
        for lane in range(LANES):
            slots[k, lane] = slots[k, 2 * LANES + lane] = ZERO
            slots[k, LANES + lane] = state[ALONE * LANES + lane]


@part
def _propose(state, units):
    """A candidate: the largest element becomes so many units."""
    for lane in range(LANES):
        scale = state[EXTREME * LANES + lane] / units
        state[SCALE * LANES + lane] = scale
        state[INVERSE * LANES + lane] = ONE / scale if scale != ZERO else ZERO


@part
def _keep(state, slot):
    """Move the candidate to the least squares of its codes; keep it in the slot if it is the best there."""
    for lane in range(LANES):
        slope, curve = state[SLOPE * LANES + lane], state[CURVE * LANES + lane]
        step = slope / (curve if curve > ZERO else ONE)
        error = state[ERROR * LANES + lane] - step * slope
        better = error < slot[LANES + lane]
        slot[lane] = state[SCALE * LANES + lane] + step if better else slot[lane]
        slot[LANES + lane] = error if better else slot[LANES + lane]
        slot[2 * LANES + lane] = curve if better else slot[2 * LANES + lane]


@part
def _return_to(state, slot):
    """Make the fit of a slot the candidate."""
    for lane in range(LANES):
        scale = slot[lane]
        state[SCALE * LANES + lane] = scale
        state[INVERSE * LANES + lane] = ONE / scale if scale != ZERO else ZERO


@part
def _fit(data, state, slots, form, sizes, rounds, units):
    """Step 1: `sizes` candidates for each slot; `rounds` of codes anew."""
    for k in range(len(slots)):
        for g in range(sizes):
            become = units[0] - units[1] * np.float32(k // 2 * sizes + g)
            _propose(state, become + (form.low + form.high) if k % 2 else -become)
            _sums(data, state, form.low, form.high)
            _keep(state, slots[k])
        for _ in range(rounds):
            _return_to(state, slots[k])
            _sums(data, state, form.low, form.high)
            _keep(state, slots[k])


@part
def _suggest(state, slots, form):
    """FIRST_D: under which the scale of largest magnitude in a block becomes the S of largest magnitude."""
    fill(state, TERM, INFINITE)
    for k in range(len(slots)):
        slot = slots[k]
        for lane in range(LANES):
            better = slot[LANES + lane] < state[TERM * LANES + lane]
            state[TERM * LANES + lane] = min(slot[LANES + lane], state[TERM * LANES + lane])
            state[S * LANES + lane] = slot[lane] if better else state[S * LANES + lane]
    for b in range(BLOCKS):
        largest = ZERO
        for s in range(SUBS):
            scale = state[S * LANES + s * BLOCKS + b]
            largest = scale if abs(scale) > abs(largest) else largest
        for s in range(SUBS):
            state[FIRST_D * LANES + s * BLOCKS + b] = largest / form.least


@part
def _set_scales(state, factor):
    """D: `factor` times FIRST_D, as a half."""
    for lane in range(LANES):
        unit, per_unit = state[UNIT * LANES + lane], state[PER_UNIT * LANES + lane]
        d = state[FIRST_D * LANES + lane] * factor
        stored = storable(abs(d), unit, per_unit)
        state[D * LANES + lane] = stored if d >= ZERO else -stored


@part
def _promise(state, slots, least, most):
    """ERROR that is least for any slot under D, or for S = 0, and that S."""
    for lane in range(LANES):
        state[ERROR * LANES + lane] = state[ALONE * LANES + lane]
        state[S * LANES + lane] = ZERO
        state[INVERSE * LANES + lane] = ONE / state[D * LANES + lane]
    for k in range(len(slots)):
        slot = slots[k]
        for lane in range(LANES):
            wanted = slot[lane]
            s = (min(max(wanted * state[INVERSE * LANES + lane], least), most) + ROUND) - ROUND
            off = s * state[D * LANES + lane] - wanted
            error = slot[LANES + lane] + slot[2 * LANES + lane] * off * off
            better = error < state[ERROR * LANES + lane]
            state[ERROR * LANES + lane] = min(error, state[ERROR * LANES + lane])
            state[S * LANES + lane] = s if better else state[S * LANES + lane]


@part
def _survey(state, slots, form, promised):
    """Step 2: promised[i, b] is the error under place i of the grid of d."""
    _suggest(state, slots, form)
    for i in range(len(promised)):
        _set_scales(state, factor_of(i, len(promised), -form.least, -form.least, form.span))
        _promise(state, slots, form.least, form.most)
        block_sums(state, ERROR, SUBS, promised[i])


@part
def _start(state, form, promised, blocks):
    """D of the most promising place of the grid, block by block; it is crossed out."""
    for b in range(BLOCKS):
        choice = 0
        for i in range(len(promised)):
            if promised[i, b] < promised[choice, b]:
                choice = i
        promised[choice, b] = INFINITE
        blocks[b] = factor_of(choice, len(promised), -form.least, -form.least, form.span)
    spread(blocks, SUBS, state, TERM)
    for lane in range(LANES):
        state[TERM * LANES + lane] *= state[FIRST_D * LANES + lane]
        unit, per_unit = state[UNIT * LANES + lane], state[PER_UNIT * LANES + lane]
        d = state[TERM * LANES + lane]
        stored = storable(abs(d), unit, per_unit)
        state[D * LANES + lane] = stored if d >= ZERO else -stored


@part
def _aim(state, d, s):
    """Make what these rows say the candidate."""
    for lane in range(LANES):
        scale = state[d * LANES + lane] * state[s * LANES + lane]
        state[SCALE * LANES + lane] = scale
        state[INVERSE * LANES + lane] = ONE / scale if scale != ZERO else ZERO


@part
def _try(data, state, form):
    """Make NEW_S, held to its bounds, S where its exact error is below row TERM, which then is that."""
    for lane in range(LANES):
        s = min(max(state[NEW_S * LANES + lane], form.least), form.most)
        scale = s * state[D * LANES + lane]
        state[NEW_S * LANES + lane], state[SCALE * LANES + lane] = s, scale
        state[INVERSE * LANES + lane] = ONE / scale if scale != ZERO else ZERO
    _errors(data, state, form.low, form.high)
    for lane in range(LANES):
        better = state[ERROR * LANES + lane] < state[TERM * LANES + lane]
        state[TERM * LANES + lane] = min(state[ERROR * LANES + lane], state[TERM * LANES + lane])
        state[S * LANES + lane] = state[NEW_S * LANES + lane] if better else state[S * LANES + lane]


@part
def _look_around(data, state, slots, form, wide, many):
    """S of least exact error among that of `_promise`, those of the first `many` slots, and their neighbours."""
    copy(state, TERM, ALONE)
    copy(state, TERM + 1, S)
    fill(state, S, ZERO)
    for k in range(-1, many):
        for i in range(-wide, wide + 1):
            for lane in range(LANES):
                s = state[(TERM + 1) * LANES + lane]
                state[NEW_S * LANES + lane] = s + np.float32(i)
            if k >= 0:
                slot = slots[k]
                for lane in range(LANES):
                    wanted = min(max(slot[lane] / state[D * LANES + lane], form.least), form.most)
                    state[NEW_S * LANES + lane] = ((wanted + ROUND) - ROUND) + np.float32(i)
            _try(data, state, form)


@part
def _record(state, blocks):
    """Keep where the search of each block stands if its error, in row TERM, is the least so far."""
    block_sums(state, TERM, SUBS, blocks)
    spread(blocks, SUBS, state, TERM)
    for lane in range(LANES):
        better = state[TERM * LANES + lane] < state[BEST_ERROR * LANES + lane]
        state[BEST_ERROR * LANES + lane] = min(state[TERM * LANES + lane], state[BEST_ERROR * LANES + lane])
        state[BEST_D * LANES + lane] = state[D * LANES + lane] if better else state[BEST_D * LANES + lane]
        state[BEST_S * LANES + lane] = state[S * LANES + lane] if better else state[BEST_S * LANES + lane]


@part
def _refit(data, state, form, sums):
    """D of least error for the codes that D and S give."""
    _aim(state, D, S)
    _sums(data, state, form.low, form.high)
    for lane in range(LANES):
        s = state[S * LANES + lane]
        state[TERM * LANES + lane] = s * state[SLOPE * LANES + lane]
        state[(TERM + 1) * LANES + lane] = s * s * state[CURVE * LANES + lane]
    block_sums(state, TERM, SUBS, sums[0])
    block_sums(state, TERM + 1, SUBS, sums[1])
    for b in range(BLOCKS):
        sums[0, b] = sums[0, b] / sums[1, b] if sums[1, b] > ZERO else ZERO
    spread(sums[0], SUBS, state, TERM)
    for lane in range(LANES):
        unit, per_unit = state[UNIT * LANES + lane], state[PER_UNIT * LANES + lane]
        d = state[D * LANES + lane] + state[TERM * LANES + lane]
        stored = storable(abs(d), unit, per_unit)
        state[D * LANES + lane] = stored if d >= ZERO else -stored


@part
def workspace():
    """What `search` works in: elements and weights, state, slots, codes."""
    data = np.empty(32 * LANES, np.float32), np.empty(32 * LANES, np.float32)
    state, slots = np.empty(STATE_SIZE, np.float32), np.empty((SLOTS, 3 * LANES), np.float32)
    return data, state, slots, np.empty(32 * LANES, np.uint8)


@inner
def search(x, importance, plan, units, first, form, weighing, work):
    """Search the BLOCKS blocks from `first` on; `block_of` then tells what was found.

    `plan`, eight integers, is how hard to look. Step 1: slots (even), candidates for each, rounds of codes anew; step
    2: places of d; step 3: starts, rounds of looking around, how far, at how many slots beside the best. `units`: the
    largest element of a sub-block becomes units[0] units, or less by so many times units[1]; one less where it gets a
    positive code.
    """
    data, state, slots, codes = work
    many_slots, sizes, rounds, count, starts, looks, wide, many = plan
    slots = slots[:many_slots]
    blocks, sums = np.empty(BLOCKS, np.float32), np.empty((2, BLOCKS), np.float32)
    promised = np.empty((count, BLOCKS), np.float32)
    load(x, importance, first, SUBS, weighing, data, state)
    _prepare(data, state, slots)
    _fit(data, state, slots, form, sizes, rounds, units)
    _survey(state, slots, form, promised)
    for _ in range(starts):
        _start(state, form, promised, blocks)
        for look in range(looks):
            _promise(state, slots, form.least, form.most)
            _look_around(data, state, slots, form, wide, many)
            _record(state, blocks)
            if look + 1 < looks:
                _refit(data, state, form, sums)
    _aim(state, BEST_D, BEST_S)
    _codes(data, state, form, codes)


@part
def _codes(data, state, form, codes):
    """Nearest codes - low under the candidate."""
    xs, _ = data
    for j in range(SIZE):
        for lane in range(LANES):
            t = min(max(xs[j * LANES + lane] * state[INVERSE * LANES + lane], form.low), form.high)
            codes[j * LANES + lane] = np.uint8(np.int32(((t + ROUND) - ROUND) - form.low))


@part
def block_of(work, b, codes, scales):
    """What was found for block b: codes - low to uint8[256], S to int8[16]; returns d."""
    _, state, _, lanes = work
    codes_of(lanes, b, SUBS, codes)
    any_scale = False
    for s in range(SUBS):
        scales[s] = np.int8(np.int32(state[BEST_S * LANES + s * BLOCKS + b]))
        any_scale |= scales[s] != 0
    return state[BEST_D * LANES + b] * state[UNIT * LANES + b] if any_scale else ZERO
