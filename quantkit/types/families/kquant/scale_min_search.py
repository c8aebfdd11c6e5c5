"""Search of the K types with scales and minima: q2_K, q4_K and q5_K.

    y = (d * S) * q - (dmin * M)     q 0 to `max_code`; S and M 0 to `max_scale`; d and dmin halves

    minimise  sum e (x - y)^2 over a block, e the weights of `lanes.Weighting`

The codes q of a sub-block enter its error through three sums only, beside sum e, sum e x and sum e x^2:

    sum e (x - s q + m)^2 = sum e x^2 + s (s sum e q^2 - 2 sum e q x) + m (m sum e + 2 (sum e x - s sum e q))

1. *Fit.* Each sub-block on its own: candidates map its range, zero included, to various numbers of steps with various
   offsets. Each gives codes, their sums, and by these the least-squares scale and minimum. SLOTS of them are kept, the
   best of each part of the range of steps, and their codes are derived again from the fit.
2. *Scan.* For a grid of super-scales d and dmin, rounded to halves: the S and M of each sub-block that are best for any
   of its slots. With the sums this takes a few operations a sub-block. A block may be negated first (d and dmin are
   then stored negative): codes run down instead of up, and the same sums follow by arithmetic.
3. *Exact.* From the best of the grid: each S with its neighbours, for each the best M with its neighbours, and nearest
   codes. Then d and dmin by least squares, and again.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from quantkit.codegen.jit import shared_subkernel, subkernel
from quantkit.types.families.kquant.lanes import (
    INFINITE,
    LANES,
    ONE,
    PER_UNIT,
    ROUND,
    SUM_E,
    TWO,
    UNIT,
    ZERO,
    Lanes,
    Weighting,
    block_codes,
    block_maxima,
    block_sums,
    broadcast,
    copy_row,
    fill_row,
    grid_factor,
    load,
    storable,
)


class ScaleMinFormat(NamedTuple):
    """The numbers in which the types differ; `scale_min_format` makes one."""

    subs: int  # sub-blocks of a block
    max_code: np.float32  # codes q are 0 to this
    max_scale: np.float32  # S and M are 0 to this
    min_steps: np.float32  # step 1 divides the range of a sub-block into at least this many steps
    max_steps: np.float32  # and at most this many
    first_s: np.float32  # in the grid of super-scales the largest scale becomes an S between `first_s`
    span_s: int  # and `first_s - span_s`,
    first_m: np.float32  # and the largest minimum an M in the same way
    span_m: int


def scale_min_format(
    subs: int,
    max_code: float,
    max_scale: float,
    steps: tuple[float, float],
    scales: tuple[float, int],
    minima: tuple[float, int],
) -> ScaleMinFormat:
    """A `ScaleMinFormat` of float32 numbers; pairs are (min, max) steps and (first, span) of S and M."""
    first_s, first_m = np.float32(scales[0]), np.float32(minima[0])
    min_steps, max_steps = np.float32(steps[0]), np.float32(steps[1])
    return ScaleMinFormat(
        subs, np.float32(max_code), np.float32(max_scale), min_steps, max_steps, first_s, scales[1], first_m, minima[1]
    )


SLOTS = 8  # at most

# Rows of `state`, after the common ones.
SUM_EX, SIGN, LOW, HIGH = 3, 4, 5, 6  # the block is negated where SIGN is -1
SCALE, MINIMUM, INVERSE, OFFSET = 7, 8, 9, 10  # a candidate: q = round(x * INVERSE + OFFSET)
EQ, EQQ, EQX, ERROR = 11, 12, 13, 14  # the three sums of its codes; its error, without sum e x^2 or exactly
FIRST_D, FIRST_DMIN = 15, 16  # super-scales that the largest scale and minimum suggest
D, DMIN, S, M = 17, 18, 19, 20  # the point that the search is at
NEW_S, NEW_M = 21, 22
BEST_ERROR, BEST_D, BEST_DMIN, BEST_S, BEST_M, BEST_SIGN = 23, 24, 25, 26, 27, 28  # best of the block so far
TERM = 29  # five rows of terms of block sums
STATE_SIZE = (TERM + 5) * LANES
# A slot has six rows: scale, minimum, the three sums, the error.


Work = tuple[Lanes, np.ndarray, np.ndarray, np.ndarray]  # data, state, slots, codes: see `workspace`


@subkernel
def _accumulate(data: Lanes, state: np.ndarray, size: int, max_code: np.float32) -> None:
    """The three sums of the codes of the candidate."""
    xs, ws = data
    for lane in range(LANES):
        state[EQ * LANES + lane] = state[EQQ * LANES + lane] = state[EQX * LANES + lane] = ZERO
    for j in range(size):
        for lane in range(LANES):
            x, e = xs[j * LANES + lane], ws[j * LANES + lane]
            t = min(max(x * state[INVERSE * LANES + lane] + state[OFFSET * LANES + lane], ZERO), max_code)
            q = (t + ROUND) - ROUND
            eq = e * q
            state[EQ * LANES + lane] += eq
            state[EQQ * LANES + lane] += eq * q
            state[EQX * LANES + lane] += eq * x


@subkernel
def _errors(data: Lanes, state: np.ndarray, size: int, max_code: np.float32) -> None:
    """ERROR: the error of nearest codes under SCALE and MINIMUM."""
    xs, ws = data
    for lane in range(LANES):
        state[ERROR * LANES + lane] = ZERO
    for j in range(size):
        for lane in range(LANES):
            x, e = xs[j * LANES + lane], ws[j * LANES + lane]
            t = min(max(x * state[INVERSE * LANES + lane] + state[OFFSET * LANES + lane], ZERO), max_code)
            q = (t + ROUND) - ROUND
            r = (x - state[SCALE * LANES + lane] * q) + state[MINIMUM * LANES + lane]
            state[ERROR * LANES + lane] += e * r * r


@subkernel
def _reset(data: Lanes, state: np.ndarray, slots: np.ndarray, size: int) -> None:
    """Fill SUM_EX, LOW and HIGH; empty the slots, except that the first gets a minimum without scale.

    Where all elements have the same negative value, a minimum without a scale is exact; no candidate gives that.
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
    fill_row(state, SIGN, ONE)
    fill_row(state, BEST_ERROR, INFINITE)
    slots[:] = ZERO
    for lane in range(LANES):
        e, ex = state[SUM_E * LANES + lane], min(state[SUM_EX * LANES + lane], ZERO)
        minimum = -ex / (e if e > ZERO else ONE)
        slots[0, LANES + lane] = minimum
        slots[0, 5 * LANES + lane] = minimum * ex


@subkernel
def _propose(state: np.ndarray, steps: np.float32, code: np.float32) -> None:
    """A candidate: the range is divided into `steps`, its low end gets `code`."""
    for lane in range(LANES):
        low, high = state[LOW * LANES + lane], state[HIGH * LANES + lane]
        inverse = steps / (high - low) if high > low else ZERO
        state[INVERSE * LANES + lane] = inverse
        state[OFFSET * LANES + lane] = code - low * inverse


@subkernel
def _keep_in_slot(state: np.ndarray, slot: np.ndarray) -> None:
    """Fit scale and minimum >= 0 to the codes of the candidate; keep it in the slot if it is the best there."""
    for lane in range(LANES):
        e, ex = state[SUM_E * LANES + lane], state[SUM_EX * LANES + lane]
        eq, eqq, eqx = state[EQ * LANES + lane], state[EQQ * LANES + lane], state[EQX * LANES + lane]
        determinant = e * eqq - eq * eq
        sound = determinant > np.float32(1e-6) * e * eqq
        inverse = ONE / (determinant if sound else ONE)
        scale, minimum = (e * eqx - eq * ex) * inverse, (eq * eqx - eqq * ex) * inverse
        sound = sound and scale > ZERO and minimum > ZERO
        scale_only = max(eqx, ZERO) / (eqq if eqq > ZERO else ONE)
        scale = scale if sound else scale_only
        minimum = minimum if sound else ZERO
        error = scale * (scale * eqq - TWO * eqx) + minimum * (minimum * e + TWO * (ex - scale * eq))
        better = error < slot[5 * LANES + lane]
        slot[lane] = scale if better else slot[lane]
        slot[LANES + lane] = minimum if better else slot[LANES + lane]
        slot[2 * LANES + lane] = eq if better else slot[2 * LANES + lane]
        slot[3 * LANES + lane] = eqq if better else slot[3 * LANES + lane]
        slot[4 * LANES + lane] = eqx if better else slot[4 * LANES + lane]
        slot[5 * LANES + lane] = error if better else slot[5 * LANES + lane]


@subkernel
def _candidate_from_slot(state: np.ndarray, slot: np.ndarray) -> None:
    """Make the fit of a slot the candidate."""
    for lane in range(LANES):
        scale, minimum = slot[lane], slot[LANES + lane]
        inverse = ONE / scale if scale > ZERO else ZERO
        state[INVERSE * LANES + lane] = inverse
        state[OFFSET * LANES + lane] = minimum * inverse


@subkernel
def _fit(
    data: Lanes, state: np.ndarray, slots: np.ndarray, fmt: ScaleMinFormat, steps: int, offsets: int, rounds: int
) -> None:
    """Step 1: `steps` step sizes for each slot with `offsets` offsets each, then `rounds` of codes from the fit."""
    size = 256 // fmt.subs
    for k in range(len(slots)):
        for g in range(steps):
            part = (np.float32(k * steps + g) + np.float32(0.5)) / np.float32(len(slots) * steps)
            for o in range(offsets):
                code = (np.float32(o) + np.float32(0.5)) / np.float32(offsets) * np.float32(1.4) - np.float32(0.9)
                _propose(state, fmt.min_steps + (fmt.max_steps - fmt.min_steps) * part, code)
                _accumulate(data, state, size, fmt.max_code)
                _keep_in_slot(state, slots[k])
        for _ in range(rounds):
            _candidate_from_slot(state, slots[k])
            _accumulate(data, state, size, fmt.max_code)
            _keep_in_slot(state, slots[k])


@subkernel
def _negate(data: Lanes, state: np.ndarray, slots: np.ndarray, fmt: ScaleMinFormat, sign_row: int) -> None:
    """Negate the blocks whose SIGN differs from row `sign_row` of `state`, with their sums and slots."""
    xs, _ = data
    changes = False
    for lane in range(LANES):
        changes |= state[SIGN * LANES + lane] != state[sign_row * LANES + lane]
    if not changes:
        return
    max_code = fmt.max_code
    for j in range(256 // fmt.subs):
        for lane in range(LANES):
            xs[j * LANES + lane] *= state[SIGN * LANES + lane] * state[sign_row * LANES + lane]
    for k in range(len(slots)):
        slot = slots[k]
        for lane in range(LANES):
            e, ex = state[SUM_E * LANES + lane], state[SUM_EX * LANES + lane]
            eq, eqq = slot[2 * LANES + lane], slot[3 * LANES + lane]
            eqx = slot[4 * LANES + lane]
            scale, minimum = slot[lane], slot[LANES + lane]
            negate = state[SIGN * LANES + lane] != state[sign_row * LANES + lane]
            # Of a minimum without scale all codes become `max_code`.
            slot[lane] = minimum / max_code if negate and scale == ZERO else scale
            slot[LANES + lane] = max(max_code * scale - minimum, ZERO) if negate else minimum
            slot[2 * LANES + lane] = max_code * e - eq if negate else eq
            slot[3 * LANES + lane] = max_code * (max_code * e - TWO * eq) + eqq if negate else eqq
            slot[4 * LANES + lane] = eqx - max_code * ex if negate else eqx
    for lane in range(LANES):
        state[SUM_EX * LANES + lane] *= state[SIGN * LANES + lane] * state[sign_row * LANES + lane]
        state[SIGN * LANES + lane] = state[sign_row * LANES + lane]


@subkernel
def _suggest_super_scales(state: np.ndarray, slots: np.ndarray, fmt: ScaleMinFormat, blocks: np.ndarray) -> None:
    """FIRST_D and FIRST_DMIN: those under which the largest scale and minimum of a block become the largest S and M."""
    fill_row(state, S, ZERO)
    fill_row(state, M, ZERO)
    fill_row(state, ERROR, ZERO)
    for k in range(len(slots)):
        slot = slots[k]
        for lane in range(LANES):
            better = slot[5 * LANES + lane] < state[ERROR * LANES + lane]
            state[ERROR * LANES + lane] = min(slot[5 * LANES + lane], state[ERROR * LANES + lane])
            state[S * LANES + lane] = slot[lane] if better else state[S * LANES + lane]
            state[M * LANES + lane] = slot[LANES + lane] if better else state[M * LANES + lane]
    for value, row in ((S, FIRST_D), (M, FIRST_DMIN)):
        block_maxima(state, value, fmt.subs, blocks)
        broadcast(blocks, fmt.subs, state, row)
        for lane in range(LANES):
            state[row * LANES + lane] /= fmt.max_scale


@subkernel
def _set_scales(state: np.ndarray, first: int, factor: np.float32, row: int) -> None:
    """A row of super-scales: `factor` times row `first`, as a half."""
    for lane in range(LANES):
        unit, per_unit = state[UNIT * LANES + lane], state[PER_UNIT * LANES + lane]
        state[row * LANES + lane] = storable(state[first * LANES + lane] * factor, unit, per_unit)


@subkernel
def _estimate(state: np.ndarray, slots: np.ndarray, max_scale: np.float32) -> None:
    """ERROR, S and M that are best for any slot under D and DMIN; the sums of that slot's codes become the candidate's.

    For each slot two S are tried, the integers around its fitted scale, each with its best M.
    """
    fill_row(state, ERROR, INFINITE)
    for k in range(len(slots)):
        slot = slots[k]
        for lane in range(LANES):
            e, ex, dmin = state[SUM_E * LANES + lane], state[SUM_EX * LANES + lane], state[DMIN * LANES + lane]
            eq, eqq = slot[2 * LANES + lane], slot[3 * LANES + lane]
            eqx = slot[4 * LANES + lane]
            per_dmin = ONE / (e * dmin if e > ZERO else ONE)
            fitted = min(slot[lane] / state[D * LANES + lane], max_scale)
            nearest = (fitted + ROUND) - ROUND
            second = min(nearest + (ONE if fitted > nearest else -ONE), max_scale)
            second = max(second, ZERO)
            scale = state[D * LANES + lane] * nearest
            m = (min(max((scale * eq - ex) * per_dmin, ZERO), max_scale) + ROUND) - ROUND
            minimum = dmin * m
            error = scale * (scale * eqq - TWO * eqx) + minimum * (minimum * e + TWO * (ex - scale * eq))
            scale = state[D * LANES + lane] * second
            second_m = (min(max((scale * eq - ex) * per_dmin, ZERO), max_scale) + ROUND) - ROUND
            minimum = dmin * second_m
            second_error = scale * (scale * eqq - TWO * eqx) + minimum * (minimum * e + TWO * (ex - scale * eq))
            s = second if second_error < error else nearest
            m = second_m if second_error < error else m
            error = min(error, second_error)
            better = error < state[ERROR * LANES + lane]
            state[ERROR * LANES + lane] = error if better else state[ERROR * LANES + lane]
            state[S * LANES + lane] = s if better else state[S * LANES + lane]
            state[M * LANES + lane] = m if better else state[M * LANES + lane]
            state[EQ * LANES + lane] = eq if better else state[EQ * LANES + lane]
            state[EQQ * LANES + lane] = eqq if better else state[EQQ * LANES + lane]
            state[EQX * LANES + lane] = eqx if better else state[EQX * LANES + lane]


@subkernel
def _refit(state: np.ndarray, fmt: ScaleMinFormat, sums: np.ndarray) -> None:
    """D and DMIN of least error for S, M and the candidate's sums; sums float32[5, blocks] is scratch."""
    for lane in range(LANES):
        s, m = state[S * LANES + lane], state[M * LANES + lane]
        state[TERM * LANES + lane] = s * s * state[EQQ * LANES + lane]
        state[(TERM + 1) * LANES + lane] = s * m * state[EQ * LANES + lane]
        state[(TERM + 2) * LANES + lane] = m * m * state[SUM_E * LANES + lane]
        state[(TERM + 3) * LANES + lane] = s * state[EQX * LANES + lane]
        state[(TERM + 4) * LANES + lane] = m * state[SUM_EX * LANES + lane]
    for i in range(5):
        block_sums(state, TERM + i, fmt.subs, sums[i])
    for b in range(LANES // fmt.subs):
        ss, sm, mm, sx, mx = sums[0, b], sums[1, b], sums[2, b], sums[3, b], sums[4, b]
        determinant = ss * mm - sm * sm
        d = dmin = ZERO
        if determinant > np.float32(1e-6) * ss * mm:
            d, dmin = (sx * mm - sm * mx) / determinant, (sx * sm - ss * mx) / determinant
        elif ss > ZERO:
            d = sx / ss
        sums[0, b], sums[1, b] = d, dmin
    broadcast(sums[0], fmt.subs, state, TERM)
    broadcast(sums[1], fmt.subs, state, TERM + 1)
    for row, fitted in ((D, TERM), (DMIN, TERM + 1)):
        for lane in range(LANES):
            if state[fitted * LANES + lane] > ZERO:
                unit, per_unit = state[UNIT * LANES + lane], state[PER_UNIT * LANES + lane]
                state[row * LANES + lane] = storable(state[fitted * LANES + lane], unit, per_unit)


@subkernel
def _scan_super_scales(
    data: Lanes,
    state: np.ndarray,
    slots: np.ndarray,
    fmt: ScaleMinFormat,
    count: int,
    minima: int,
    signs: int,
    estimates: np.ndarray,
    blocks: np.ndarray,
) -> None:
    """Step 2: estimates[negate, i, h, b] is the error of a block, negated or not, at the places i, h of the grid."""
    for negate in range(signs):
        if negate:
            for lane in range(LANES):
                state[TERM * LANES + lane] = -ONE
            _negate(data, state, slots, fmt, TERM)
        _suggest_super_scales(state, slots, fmt, blocks)
        for i in range(count):
            _set_scales(state, FIRST_D, grid_factor(i, count, fmt.max_scale, fmt.first_s, fmt.span_s), D)
            for h in range(minima):
                _set_scales(state, FIRST_DMIN, grid_factor(h, minima, fmt.max_scale, fmt.first_m, fmt.span_m), DMIN)
                _estimate(state, slots, fmt.max_scale)
                block_sums(state, ERROR, fmt.subs, estimates[negate, i, h])


@subkernel
def _start_from_best(
    data: Lanes,
    state: np.ndarray,
    slots: np.ndarray,
    fmt: ScaleMinFormat,
    estimates: np.ndarray,
    blocks: np.ndarray,
    indices: np.ndarray,
) -> None:
    """Set D and DMIN of each block to the grid place of least estimated error, and exclude that place from now on."""
    signs, count, minima = estimates.shape[0], estimates.shape[1], estimates.shape[2]
    candidates = estimates.reshape(signs * count * minima, estimates.shape[3])
    for b in range(LANES // fmt.subs):
        choice = 0
        for i in range(len(candidates)):
            if candidates[i, b] < candidates[choice, b]:
                choice = i
        candidates[choice, b] = INFINITE
        indices[b] = choice
        blocks[b] = -ONE if choice >= count * minima else ONE
    broadcast(blocks, fmt.subs, state, TERM)
    _negate(data, state, slots, fmt, TERM)
    _suggest_super_scales(state, slots, fmt, blocks)
    for b in range(LANES // fmt.subs):
        blocks[b] = grid_factor(indices[b] // minima % count, count, fmt.max_scale, fmt.first_s, fmt.span_s)
    broadcast(blocks, fmt.subs, state, TERM)
    for b in range(LANES // fmt.subs):
        blocks[b] = grid_factor(indices[b] % minima, minima, fmt.max_scale, fmt.first_m, fmt.span_m)
    broadcast(blocks, fmt.subs, state, TERM + 1)
    for lane in range(LANES):
        state[FIRST_D * LANES + lane] *= state[TERM * LANES + lane]
        state[FIRST_DMIN * LANES + lane] *= state[(TERM + 1) * LANES + lane]
    _set_scales(state, FIRST_D, ONE, D)
    _set_scales(state, FIRST_DMIN, ONE, DMIN)


@subkernel
def _search_neighbours(data: Lanes, state: np.ndarray, fmt: ScaleMinFormat, reach: int) -> None:
    """S and M of least exact error: the neighbours of S, for each the neighbours of the M that fits it best."""
    copy_row(state, NEW_S, S)
    copy_row(state, NEW_M, M)
    fill_row(state, TERM, INFINITE)
    for i in range(-reach, reach + 1):
        for h in range(-1, 2):
            for lane in range(LANES):
                d, dmin = state[D * LANES + lane], state[DMIN * LANES + lane]
                s = min(max(state[NEW_S * LANES + lane] + np.float32(i), ZERO), fmt.max_scale)
                scale = d * s
                e = state[SUM_E * LANES + lane]
                per_dmin = ONE / (e * dmin if e > ZERO else ONE)
                m = (scale * state[EQ * LANES + lane] - state[SUM_EX * LANES + lane]) * per_dmin + np.float32(h)
                m = (min(max(m, ZERO), fmt.max_scale) + ROUND) - ROUND
                inverse = ONE / scale if s > ZERO else ZERO
                state[SCALE * LANES + lane], state[MINIMUM * LANES + lane] = scale, dmin * m
                state[INVERSE * LANES + lane], state[OFFSET * LANES + lane] = inverse, dmin * m * inverse
                state[(TERM + 1) * LANES + lane], state[(TERM + 2) * LANES + lane] = s, m
            _errors(data, state, 256 // fmt.subs, fmt.max_code)
            for lane in range(LANES):
                better = state[ERROR * LANES + lane] < state[TERM * LANES + lane]
                state[TERM * LANES + lane] = min(state[ERROR * LANES + lane], state[TERM * LANES + lane])
                state[S * LANES + lane] = state[(TERM + 1) * LANES + lane] if better else state[S * LANES + lane]
                state[M * LANES + lane] = state[(TERM + 2) * LANES + lane] if better else state[M * LANES + lane]


@subkernel
def _set_candidate(state: np.ndarray, d: int, dmin: int, s: int, m: int) -> None:
    """Make the values in these rows of `state` the candidate."""
    for lane in range(LANES):
        scale = state[d * LANES + lane] * state[s * LANES + lane]
        minimum = state[dmin * LANES + lane] * state[m * LANES + lane]
        inverse = ONE / scale if state[s * LANES + lane] > ZERO else ZERO
        state[INVERSE * LANES + lane], state[OFFSET * LANES + lane] = inverse, minimum * inverse


@subkernel
def _record(state: np.ndarray, fmt: ScaleMinFormat, blocks: np.ndarray) -> None:
    """Keep the current D, DMIN, S and M of each block whose error, in row TERM, is the least so far."""
    block_sums(state, TERM, fmt.subs, blocks)
    broadcast(blocks, fmt.subs, state, TERM)
    for lane in range(LANES):
        better = state[TERM * LANES + lane] < state[BEST_ERROR * LANES + lane]
        state[BEST_ERROR * LANES + lane] = min(state[TERM * LANES + lane], state[BEST_ERROR * LANES + lane])
        state[BEST_D * LANES + lane] = state[D * LANES + lane] if better else state[BEST_D * LANES + lane]
        state[BEST_DMIN * LANES + lane] = state[DMIN * LANES + lane] if better else state[BEST_DMIN * LANES + lane]
        state[BEST_S * LANES + lane] = state[S * LANES + lane] if better else state[BEST_S * LANES + lane]
        state[BEST_M * LANES + lane] = state[M * LANES + lane] if better else state[BEST_M * LANES + lane]
        state[BEST_SIGN * LANES + lane] = state[SIGN * LANES + lane] if better else state[BEST_SIGN * LANES + lane]


@subkernel
def workspace() -> Work:
    """Allocate the work space of `search`: elements and weights, state, slots, codes."""
    data = np.empty(32 * LANES, np.float32), np.empty(32 * LANES, np.float32)
    state, slots = np.empty(STATE_SIZE, np.float32), np.empty((SLOTS, 6 * LANES), np.float32)
    return data, state, slots, np.empty(32 * LANES, np.uint8)


@shared_subkernel
def search(
    x: np.ndarray,
    importance: np.ndarray,
    plan: np.ndarray,
    first: int,
    fmt: ScaleMinFormat,
    weighting: Weighting,
    work: Work,
) -> None:
    """Search the LANES // subs blocks from `first` on; `block_result` then gives the result of each.

    `plan`, eleven integers, sets the effort. Step 1: slots, step sizes for each, offsets, rounds of codes from the fit.
    Step 2: places of d and of dmin, signs (2: also the negated block), refits. Step 3: starts, rounds of neighbours,
    how many neighbours to either side.
    """
    data, state, slots, codes = work
    slot_count, steps, offsets, rounds, count, minima, signs, refits, starts, exact_rounds, reach = plan
    slots = slots[:slot_count]
    block_count = LANES // fmt.subs
    blocks, sums, indices = (
        np.empty(block_count, np.float32),
        np.empty((5, block_count), np.float32),
        np.empty(block_count, np.int64),
    )
    estimates = np.empty((signs, count, minima, block_count), np.float32)
    load(x, importance, first, fmt.subs, weighting, data, state)
    _reset(data, state, slots, 256 // fmt.subs)
    _fit(data, state, slots, fmt, steps, offsets, rounds)
    _scan_super_scales(data, state, slots, fmt, count, minima, signs, estimates, blocks)
    for _ in range(starts):
        _start_from_best(data, state, slots, fmt, estimates, blocks, indices)
        for _ in range(refits):
            _estimate(state, slots, fmt.max_scale)
            _refit(state, fmt, sums)
        _estimate(state, slots, fmt.max_scale)
        for exact_round in range(exact_rounds):
            _search_neighbours(data, state, fmt, reach)
            _record(state, fmt, blocks)
            if exact_round + 1 < exact_rounds:
                _set_candidate(state, D, DMIN, S, M)
                _accumulate(data, state, 256 // fmt.subs, fmt.max_code)
                _refit(state, fmt, sums)
    _negate(data, state, slots, fmt, BEST_SIGN)
    _set_candidate(state, BEST_D, BEST_DMIN, BEST_S, BEST_M)
    _codes(data, state, fmt, codes)


@subkernel
def _codes(data: Lanes, state: np.ndarray, fmt: ScaleMinFormat, codes: np.ndarray) -> None:
    """Nearest codes under the candidate."""
    xs, _ = data
    for j in range(256 // fmt.subs):
        for lane in range(LANES):
            t = xs[j * LANES + lane] * state[INVERSE * LANES + lane] + state[OFFSET * LANES + lane]
            codes[j * LANES + lane] = np.uint8(np.int32((min(max(t, ZERO), fmt.max_code) + ROUND) - ROUND))


@subkernel
def block_result(
    work: Work, fmt: ScaleMinFormat, b: int, codes: np.ndarray, scales: np.ndarray, minima: np.ndarray
) -> tuple[np.float32, np.float32]:
    """Result of block b: fills codes uint8[256], scales (S) and minima (M) uint8[subs]; returns d and dmin."""
    _, state, _, lanes = work
    count = LANES // fmt.subs
    block_codes(lanes, b, fmt.subs, codes)
    any_scale = any_minimum = False
    for s in range(fmt.subs):
        scales[s] = np.uint8(np.int32(state[BEST_S * LANES + s * count + b]))
        minima[s] = np.uint8(np.int32(state[BEST_M * LANES + s * count + b]))
        any_scale |= scales[s] > 0
        any_minimum |= minima[s] > 0
    unit = state[UNIT * LANES + b] * state[BEST_SIGN * LANES + b]
    d, dmin = state[BEST_D * LANES + b] * unit, state[BEST_DMIN * LANES + b] * unit
    return d if any_scale else ZERO, dmin if any_minimum else ZERO
