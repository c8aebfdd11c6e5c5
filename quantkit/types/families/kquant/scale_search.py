"""Search of the K types with scales and no minima: q3_K and q6_K.

    y = (d * S) * q        q `min_code` to `max_code`; S an integer of `min_scale` to `max_scale`, one for
                            16 elements; d a half of either sign

    minimise  sum w (x - y)^2 over a block, w the weights of `lanes.Weighting`

Under a scale s the nearest codes have E = sum w r^2, D = sum w r q, Q = sum w q^2 with r = x - s q. The same codes have
their least error E - D^2 / Q at s + D / Q, and around it the error grows by Q times the square of the distance.

1. *Fit.* Each sub-block on its own: candidates place its largest element at various codes, of either sign, and move to
   the least squares of their codes. SLOTS of them are kept, the best of each part of the range.
2. *Scan.* For a grid of super-scales d, rounded to halves: the S of each sub-block that is best for any of its slots.
   With E, Q and s this takes a few operations a sub-block.
3. *Exact.* From the best of the grid: the S of each slot with its neighbours and nearest codes. Then d by least
   squares, and again.
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
    UNIT,
    ZERO,
    Lanes,
    Weighting,
    block_codes,
    block_sums,
    broadcast,
    copy_row,
    fill_row,
    grid_factor,
    load,
    storable,
)


class ScaleFormat(NamedTuple):
    """The numbers in which the types differ; `scale_format` makes one."""

    min_code: np.float32
    max_code: np.float32
    min_scale: np.float32  # of S; the extreme of larger magnitude
    max_scale: np.float32
    span: int  # in the grid of super-scales the largest scale becomes `min_scale`, or smaller by up to this


def scale_format(min_code: float, max_code: float, min_scale: float, max_scale: float, span: int) -> ScaleFormat:
    """A `ScaleFormat` of float32 numbers."""
    return ScaleFormat(np.float32(min_code), np.float32(max_code), np.float32(min_scale), np.float32(max_scale), span)


SUBS, SIZE = 16, 16
BLOCKS = LANES // SUBS  # searched at once
SLOTS = 8  # at most; half of them for each sign

# Rows of `state`, after the common ones.
EXTREME = 3  # the element of largest magnitude, with its sign
SCALE, INVERSE, ERROR, SLOPE, CURVE = 4, 5, 6, 7, 8  # a candidate: s, 1 / s, E, D, Q
FIRST_D = 9  # the super-scale that the largest scale suggests
D, S, NEW_S = 10, 11, 12  # the point that the search is at
TERM = 13  # scratch, three rows
BEST_ERROR, BEST_D, BEST_S = 16, 17, 18  # best of the block so far
ZERO_ERROR = 19  # sum w x^2: the error of zeros
STATE_SIZE = 20 * LANES


Work = tuple[Lanes, np.ndarray, np.ndarray, np.ndarray]  # data, state, slots, codes: see `workspace`


@subkernel
def _sums(data: Lanes, state: np.ndarray, min_code: np.float32, max_code: np.float32) -> None:
    """E, D and Q of nearest codes under SCALE."""
    xs, ws = data
    for lane in range(LANES):
        state[ERROR * LANES + lane] = state[SLOPE * LANES + lane] = state[CURVE * LANES + lane] = ZERO
    for j in range(SIZE):
        for lane in range(LANES):
            x, w = xs[j * LANES + lane], ws[j * LANES + lane]
            q = (min(max(x * state[INVERSE * LANES + lane], min_code), max_code) + ROUND) - ROUND
            r = x - state[SCALE * LANES + lane] * q
            wr, wq = w * r, w * q
            state[ERROR * LANES + lane] += wr * r
            state[SLOPE * LANES + lane] += wr * q
            state[CURVE * LANES + lane] += wq * q


@subkernel
def _errors(data: Lanes, state: np.ndarray, min_code: np.float32, max_code: np.float32) -> None:
    """E of nearest codes under SCALE."""
    xs, ws = data
    for lane in range(LANES):
        state[ERROR * LANES + lane] = ZERO
    for j in range(SIZE):
        for lane in range(LANES):
            x, w = xs[j * LANES + lane], ws[j * LANES + lane]
            q = (min(max(x * state[INVERSE * LANES + lane], min_code), max_code) + ROUND) - ROUND
            r = x - state[SCALE * LANES + lane] * q
            state[ERROR * LANES + lane] += w * r * r


@subkernel
def _reset(data: Lanes, state: np.ndarray, slots: np.ndarray) -> None:
    """Fill EXTREME and ZERO_ERROR; empty the slots."""
    xs, ws = data
    fill_row(state, EXTREME, ZERO)
    fill_row(state, ZERO_ERROR, ZERO)
    fill_row(state, BEST_ERROR, INFINITE)
    for j in range(SIZE):
        for lane in range(LANES):
            x, extreme = xs[j * LANES + lane], state[EXTREME * LANES + lane]
            state[EXTREME * LANES + lane] = x if abs(x) > abs(extreme) else extreme
            state[ZERO_ERROR * LANES + lane] += ws[j * LANES + lane] * x * x
    for k in range(len(slots)):
        for lane in range(LANES):
            slots[k, lane] = slots[k, 2 * LANES + lane] = ZERO
            slots[k, LANES + lane] = state[ZERO_ERROR * LANES + lane]


@subkernel
def _propose(state: np.ndarray, units: np.float32) -> None:
    """A candidate: the largest element gets the code `units`, which need not be whole."""
    for lane in range(LANES):
        scale = state[EXTREME * LANES + lane] / units
        state[SCALE * LANES + lane] = scale
        state[INVERSE * LANES + lane] = ONE / scale if scale != ZERO else ZERO


@subkernel
def _keep_in_slot(state: np.ndarray, slot: np.ndarray) -> None:
    """Move the candidate to the least squares of its codes; keep it in the slot if it is the best there."""
    for lane in range(LANES):
        slope, curve = state[SLOPE * LANES + lane], state[CURVE * LANES + lane]
        step = slope / (curve if curve > ZERO else ONE)
        error = state[ERROR * LANES + lane] - step * slope
        better = error < slot[LANES + lane]
        slot[lane] = state[SCALE * LANES + lane] + step if better else slot[lane]
        slot[LANES + lane] = error if better else slot[LANES + lane]
        slot[2 * LANES + lane] = curve if better else slot[2 * LANES + lane]


@subkernel
def _candidate_from_slot(state: np.ndarray, slot: np.ndarray) -> None:
    """Make the fit of a slot the candidate."""
    for lane in range(LANES):
        scale = slot[lane]
        state[SCALE * LANES + lane] = scale
        state[INVERSE * LANES + lane] = ONE / scale if scale != ZERO else ZERO


@subkernel
def _fit(
    data: Lanes, state: np.ndarray, slots: np.ndarray, fmt: ScaleFormat, sizes: int, rounds: int, units: np.ndarray
) -> None:
    """Step 1: `sizes` candidates for each slot, then `rounds` of codes from the fit."""
    for k in range(len(slots)):
        for g in range(sizes):
            code = units[0] - units[1] * np.float32(k // 2 * sizes + g)
            _propose(state, code + (fmt.min_code + fmt.max_code) if k % 2 else -code)
            _sums(data, state, fmt.min_code, fmt.max_code)
            _keep_in_slot(state, slots[k])
        for _ in range(rounds):
            _candidate_from_slot(state, slots[k])
            _sums(data, state, fmt.min_code, fmt.max_code)
            _keep_in_slot(state, slots[k])


@subkernel
def _suggest_super_scales(state: np.ndarray, slots: np.ndarray, fmt: ScaleFormat) -> None:
    """FIRST_D: the one under which the scale of largest magnitude in a block becomes the S of largest magnitude."""
    fill_row(state, TERM, INFINITE)
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
            state[FIRST_D * LANES + s * BLOCKS + b] = largest / fmt.min_scale


@subkernel
def _set_scales(state: np.ndarray, factor: np.float32) -> None:
    """D: `factor` times FIRST_D, as a half."""
    for lane in range(LANES):
        unit, per_unit = state[UNIT * LANES + lane], state[PER_UNIT * LANES + lane]
        d = state[FIRST_D * LANES + lane] * factor
        stored = storable(abs(d), unit, per_unit)
        state[D * LANES + lane] = stored if d >= ZERO else -stored


@subkernel
def _estimate(state: np.ndarray, slots: np.ndarray, min_scale: np.float32, max_scale: np.float32) -> None:
    """The least ERROR of any slot under D, or of S = 0, and its S."""
    for lane in range(LANES):
        state[ERROR * LANES + lane] = state[ZERO_ERROR * LANES + lane]
        state[S * LANES + lane] = ZERO
        state[INVERSE * LANES + lane] = ONE / state[D * LANES + lane]
    for k in range(len(slots)):
        slot = slots[k]
        for lane in range(LANES):
            fitted = slot[lane]
            s = (min(max(fitted * state[INVERSE * LANES + lane], min_scale), max_scale) + ROUND) - ROUND
            distance = s * state[D * LANES + lane] - fitted
            error = slot[LANES + lane] + slot[2 * LANES + lane] * distance * distance
            better = error < state[ERROR * LANES + lane]
            state[ERROR * LANES + lane] = min(error, state[ERROR * LANES + lane])
            state[S * LANES + lane] = s if better else state[S * LANES + lane]


@subkernel
def _scan_super_scales(state: np.ndarray, slots: np.ndarray, fmt: ScaleFormat, estimates: np.ndarray) -> None:
    """Step 2: estimates[i, b] is the error of block b at place i of the grid of d."""
    _suggest_super_scales(state, slots, fmt)
    for i in range(len(estimates)):
        _set_scales(state, grid_factor(i, len(estimates), -fmt.min_scale, -fmt.min_scale, fmt.span))
        _estimate(state, slots, fmt.min_scale, fmt.max_scale)
        block_sums(state, ERROR, SUBS, estimates[i])


@subkernel
def _start_from_best(state: np.ndarray, fmt: ScaleFormat, estimates: np.ndarray, blocks: np.ndarray) -> None:
    """Set D of each block to the grid place of least estimated error, and exclude that place from now on."""
    for b in range(BLOCKS):
        choice = 0
        for i in range(len(estimates)):
            if estimates[i, b] < estimates[choice, b]:
                choice = i
        estimates[choice, b] = INFINITE
        blocks[b] = grid_factor(choice, len(estimates), -fmt.min_scale, -fmt.min_scale, fmt.span)
    broadcast(blocks, SUBS, state, TERM)
    for lane in range(LANES):
        state[TERM * LANES + lane] *= state[FIRST_D * LANES + lane]
        unit, per_unit = state[UNIT * LANES + lane], state[PER_UNIT * LANES + lane]
        d = state[TERM * LANES + lane]
        stored = storable(abs(d), unit, per_unit)
        state[D * LANES + lane] = stored if d >= ZERO else -stored


@subkernel
def _set_candidate(state: np.ndarray, d: int, s: int) -> None:
    """Make the values in these rows of `state` the candidate."""
    for lane in range(LANES):
        scale = state[d * LANES + lane] * state[s * LANES + lane]
        state[SCALE * LANES + lane] = scale
        state[INVERSE * LANES + lane] = ONE / scale if scale != ZERO else ZERO


@subkernel
def _try(data: Lanes, state: np.ndarray, fmt: ScaleFormat) -> None:
    """Replace S by NEW_S, clipped to its range, where its exact error is below row TERM; update TERM."""
    for lane in range(LANES):
        s = min(max(state[NEW_S * LANES + lane], fmt.min_scale), fmt.max_scale)
        scale = s * state[D * LANES + lane]
        state[NEW_S * LANES + lane], state[SCALE * LANES + lane] = s, scale
        state[INVERSE * LANES + lane] = ONE / scale if scale != ZERO else ZERO
    _errors(data, state, fmt.min_code, fmt.max_code)
    for lane in range(LANES):
        better = state[ERROR * LANES + lane] < state[TERM * LANES + lane]
        state[TERM * LANES + lane] = min(state[ERROR * LANES + lane], state[TERM * LANES + lane])
        state[S * LANES + lane] = state[NEW_S * LANES + lane] if better else state[S * LANES + lane]


@subkernel
def _search_neighbours(
    data: Lanes, state: np.ndarray, slots: np.ndarray, fmt: ScaleFormat, reach: int, neighbour_slots: int
) -> None:
    """S of least exact error: that of `_estimate`, those of the first `neighbour_slots` slots, and their neighbours."""
    copy_row(state, TERM, ZERO_ERROR)
    copy_row(state, TERM + 1, S)
    fill_row(state, S, ZERO)
    for k in range(-1, neighbour_slots):
        for i in range(-reach, reach + 1):
            for lane in range(LANES):
                s = state[(TERM + 1) * LANES + lane]
                state[NEW_S * LANES + lane] = s + np.float32(i)
            if k >= 0:
                slot = slots[k]
                for lane in range(LANES):
                    fitted = min(max(slot[lane] / state[D * LANES + lane], fmt.min_scale), fmt.max_scale)
                    state[NEW_S * LANES + lane] = ((fitted + ROUND) - ROUND) + np.float32(i)
            _try(data, state, fmt)


@subkernel
def _record(state: np.ndarray, blocks: np.ndarray) -> None:
    """Keep the current D and S of each block whose error, in row TERM, is the least so far."""
    block_sums(state, TERM, SUBS, blocks)
    broadcast(blocks, SUBS, state, TERM)
    for lane in range(LANES):
        better = state[TERM * LANES + lane] < state[BEST_ERROR * LANES + lane]
        state[BEST_ERROR * LANES + lane] = min(state[TERM * LANES + lane], state[BEST_ERROR * LANES + lane])
        state[BEST_D * LANES + lane] = state[D * LANES + lane] if better else state[BEST_D * LANES + lane]
        state[BEST_S * LANES + lane] = state[S * LANES + lane] if better else state[BEST_S * LANES + lane]


@subkernel
def _refit(data: Lanes, state: np.ndarray, fmt: ScaleFormat, sums: np.ndarray) -> None:
    """D of least error for the codes that D and S give."""
    _set_candidate(state, D, S)
    _sums(data, state, fmt.min_code, fmt.max_code)
    for lane in range(LANES):
        s = state[S * LANES + lane]
        state[TERM * LANES + lane] = s * state[SLOPE * LANES + lane]
        state[(TERM + 1) * LANES + lane] = s * s * state[CURVE * LANES + lane]
    block_sums(state, TERM, SUBS, sums[0])
    block_sums(state, TERM + 1, SUBS, sums[1])
    for b in range(BLOCKS):
        sums[0, b] = sums[0, b] / sums[1, b] if sums[1, b] > ZERO else ZERO
    broadcast(sums[0], SUBS, state, TERM)
    for lane in range(LANES):
        unit, per_unit = state[UNIT * LANES + lane], state[PER_UNIT * LANES + lane]
        d = state[D * LANES + lane] + state[TERM * LANES + lane]
        stored = storable(abs(d), unit, per_unit)
        state[D * LANES + lane] = stored if d >= ZERO else -stored


@subkernel
def workspace() -> Work:
    """Allocate the work space of `search`: elements and weights, state, slots, codes."""
    data = np.empty(32 * LANES, np.float32), np.empty(32 * LANES, np.float32)
    state, slots = np.empty(STATE_SIZE, np.float32), np.empty((SLOTS, 3 * LANES), np.float32)
    return data, state, slots, np.empty(32 * LANES, np.uint8)


@shared_subkernel
def search(
    x: np.ndarray,
    importance: np.ndarray,
    plan: np.ndarray,
    units: np.ndarray,
    first: int,
    fmt: ScaleFormat,
    weighting: Weighting,
    work: Work,
) -> None:
    """Search the BLOCKS blocks from `first` on; `block_result` then gives the result of each.

    `plan`, eight integers, sets the effort. Step 1: slots (even), candidates for each, rounds of codes from the fit.
    Step 2: places of d. Step 3: starts, rounds of neighbours, how many to either side, of how many slots beside the
    best. Candidate k of step 1 gives the largest element of a sub-block the code units[0] - k units[1]; one less where
    its code is positive.
    """
    data, state, slots, codes = work
    slot_count, sizes, rounds, count, starts, exact_rounds, reach, neighbour_slots = plan
    slots = slots[:slot_count]
    blocks, sums = np.empty(BLOCKS, np.float32), np.empty((2, BLOCKS), np.float32)
    estimates = np.empty((count, BLOCKS), np.float32)
    load(x, importance, first, SUBS, weighting, data, state)
    _reset(data, state, slots)
    _fit(data, state, slots, fmt, sizes, rounds, units)
    _scan_super_scales(state, slots, fmt, estimates)
    for _ in range(starts):
        _start_from_best(state, fmt, estimates, blocks)
        for exact_round in range(exact_rounds):
            _estimate(state, slots, fmt.min_scale, fmt.max_scale)
            _search_neighbours(data, state, slots, fmt, reach, neighbour_slots)
            _record(state, blocks)
            if exact_round + 1 < exact_rounds:
                _refit(data, state, fmt, sums)
    _set_candidate(state, BEST_D, BEST_S)
    _codes(data, state, fmt, codes)


@subkernel
def _codes(data: Lanes, state: np.ndarray, fmt: ScaleFormat, codes: np.ndarray) -> None:
    """Nearest codes - `min_code` under the candidate."""
    xs, _ = data
    for j in range(SIZE):
        for lane in range(LANES):
            t = min(max(xs[j * LANES + lane] * state[INVERSE * LANES + lane], fmt.min_code), fmt.max_code)
            codes[j * LANES + lane] = np.uint8(np.int32(((t + ROUND) - ROUND) - fmt.min_code))


@subkernel
def block_result(work: Work, b: int, codes: np.ndarray, scales: np.ndarray) -> np.float32:
    """Result of block b: fills codes uint8[256] with q - `min_code` and scales int8[16] with S; returns d."""
    _, state, _, lanes = work
    block_codes(lanes, b, SUBS, codes)
    any_scale = False
    for s in range(SUBS):
        scales[s] = np.int8(np.int32(state[BEST_S * LANES + s * BLOCKS + b]))
        any_scale |= scales[s] != 0
    return state[BEST_D * LANES + b] * state[UNIT * LANES + b] if any_scale else ZERO
