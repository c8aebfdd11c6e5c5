"""Rounding by second moments, for types whose elements have codes of their own: coordinate descent over codes.

    error  e^T H e of a row, e = decoded row - row, H the second moment of the input (`moments`)

Codes are chosen anew first, in the order of the columns, each against the errors of those before it (`feedback`: GPTQ,
Frantar et al., 2022), and with them the scales of their sub-blocks (`sub_block_search`). Then a code moves to the next
larger or smaller value of its block if that lowers the error: a step s of element j changes it by 2 s r_j + s^2 H_jj,
r = e H. Panels of columns are taken in turn: r of a panel comes from one product with all of e; within the panel, r is
updated after each move. Where no code moves any more, scales and minima of sub-blocks do (`sub_block_scales`), then
pairs of codes (`code_pairs`).

Source of the descent: QuantEase (Behdin et al., 2023).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from quantkit.codegen.jit import kernel, subkernel
from quantkit.types.families.code_bits import Codec, Codes, Ladder, write_codes
from quantkit.types.families.scale_bits import minimum_of, scale_of, write_numbers
from quantkit.types.refine import feedback, sub_block_scales, sub_block_search
from quantkit.types.refine.code_pairs import DOWN, UP, best_partner, least_partners
from quantkit.types.refine.coded_rows import read_rows
from quantkit.types.refine.moments import PANEL, Moments, gradient
from quantkit.types.refine.panel_rows import add_scaled, weigh_steps
from quantkit.types.refine.sub_block_scales import Numbers, move_numbers

INNER = 4  # sweeps of a panel over single codes
ROUNDS = ((0,), (0, 1), (0, 0, 2, 2, 2, 2))  # by effort: for each sweep over all columns, rounds of scales and pairs


def refine(
    kind: Codec, found: Codes, x: np.ndarray, data: np.ndarray, moments: Moments, rounds: tuple[int, ...]
) -> None:
    """Lower the error of data uint8[rows, row bytes], which encodes x float32[rows, n], in place, row by row.

    found: `codes_of(kind)`; rounds: one of ROUNDS
    """
    scale, minimum = (scale_of(kind), minimum_of(kind)) if any(rounds) else (None, None)
    factors = feedback.factors(moments, 1)
    before, given = read_rows(kind, found, x, data, moments), data.copy()
    if scale is not None:
        errors = sub_block_search.search(kind, found, scale, x, data, before, factors)
    else:
        codes = before.codes.copy()
        errors = feed_back(before.e.copy(), codes, before.unit, found.ladder, factors, len(x))
        write_codes(codes, found, data)
    coded = read_rows(kind, found, x, data, moments)
    feedback.keep_lower((*coded, data), (*before, given), errors, feedback.row_errors(before.e, factors, 1, len(x)))
    scales, minima = (sub_block_scales.read(kind, number, data, coded.decoded) for number in (scale, minimum))
    for count in rounds:
        moves = descend(
            coded.e, coded.codes, coded.unit, found.ladder, scales, minima, moments.panels, len(x), INNER, count
        )
        if not moves and count:
            break
    write_codes(coded.codes, found, data)
    for number, numbers in ((scale, scales), (minimum, minima)):
        if number is not None:
            write_numbers(number.codes[numbers.places], number, data)


@kernel
def feed_back(
    e: np.ndarray, codes: np.ndarray, unit: np.ndarray, ladder: Ladder, factors: np.ndarray, rows: int
) -> np.ndarray:
    """Choose each code against the errors of the columns before it. As in `descend`; factors: of `feedback.factors`.

    Returns e^T H e of each row, float64[rows].
    """
    n = codes.shape[1]
    r, total = np.empty((len(e), PANEL), np.float32), np.zeros(rows, np.float64)
    for p in range(len(factors)):
        first, last = p * PANEL, min(n, (p + 1) * PANEL)
        gradient(e, factors[p], first, r)
        a = factors[p, first : first + PANEL]
        for row in range(rows):
            own = e[row, first:last], codes[row, first:last], unit[row, first:last]
            total[row] += _choose_codes(own[0], own[1], own[2], ladder, a, r[row])
    return total


@subkernel
def _choose_codes(
    e: np.ndarray, codes: np.ndarray, unit: np.ndarray, ladder: Ladder, a: np.ndarray, fed: np.ndarray
) -> np.float64:
    """Choose the codes of a row in a panel; fed float32[PANEL]: what the errors before it add up to.

    Returns the panel's part of e^T H e.
    """
    total = np.float64(0)
    for j in range(len(codes)):
        codes[j], e[j] = _nearest(ladder, codes[j], unit[j], e[j], fed[j])
        total += (e[j] + fed[j]) * (e[j] + fed[j]) * a[j, j]
        add_scaled(e[j], a[j].ctypes.data, fed.ctypes.data)
    return total


@subkernel
def _nearest(ladder: Ladder, code: int, unit: float, error: float, fed: float) -> tuple[int, float]:
    """The code whose error comes closest to -fed, and its error; they begin with those of `code`."""
    while True:
        apart, up, down = error + fed, unit * ladder.up[code], unit * ladder.down[code]
        if abs(apart + up) < abs(apart):
            code, error = ladder.above[code], error + up
        elif abs(apart + down) < abs(apart):
            code, error = ladder.below[code], error + down
        else:
            return code, error


class Part(NamedTuple):
    """What of a row is in a panel of columns, and H of the panel.

    g            float32[PANEL], the gradient r
    h, apart     float32[PANEL, PANEL], H and H with zeros on its diagonal; diagonal: float32[PANEL]
    e, unit, slope  float32[columns], the error, a unit of the ladder, the directions of scales (or empty)
    codes        uint8[columns]
    places       int64[sub-blocks] of the scales, whose values are `scales` and sub-blocks have `size` elements
    steps        float32[4, PANEL]: the steps UP and DOWN of each code, and what each alone changes
    """

    g: np.ndarray
    h: np.ndarray
    apart: np.ndarray
    diagonal: np.ndarray
    e: np.ndarray
    codes: np.ndarray
    unit: np.ndarray
    slope: np.ndarray
    places: np.ndarray
    scales: np.ndarray
    size: int
    steps: np.ndarray


@kernel
def descend(
    e: np.ndarray,
    codes: np.ndarray,
    unit: np.ndarray,
    ladder: Ladder,
    scales: Numbers,
    minima: Numbers,
    panels: np.ndarray,
    rows: int,
    inner: int,
    rounds: int,
) -> int:
    """Move codes of uint8[rows, n], scales and minima so that e^T H e falls, and e float32[padded rows, padded n].

    Returns the number of moves. From the code of an element to its next value it is unit * up[code], to its last one
    unit * down[code]: unit float32[rows, n], up and down the ladder of the type.
    """
    n = codes.shape[1]
    r, work = np.empty((len(e), PANEL), np.float32), np.empty((8, PANEL), np.float32)
    steps, diagonal, least, product = work[:4], work[4], work[5:7], work[7]
    apart = np.empty((PANEL, PANEL), np.float32)
    no_places, none = np.empty(0, np.int64), np.empty(0, np.float32)
    moves = 0
    for p in range(len(panels)):
        first, last = p * PANEL, min(n, (p + 1) * PANEL)
        gradient(e, panels[p], n, r)
        h = panels[p, first : first + PANEL]
        for i in range(PANEL):  # an assignment between arrays takes four seconds to compile (simd.copy_floats)
            for j in range(PANEL):
                apart[i, j] = h[i, j]
            diagonal[i], apart[i, i] = h[i, i], 0
        steps[:] = 0
        for row in range(rows):
            places, slope = no_places, none
            if scales.size:
                places = scales.places[row, first // scales.size : last // scales.size]
                slope = scales.directions[row, first:last]
            part = Part(r[row], h, apart, diagonal, e[row, first:last], codes[row, first:last], unit[row, first:last],
                        slope, places, scales.values, scales.size, steps)  # fmt: skip
            _read_steps(part, ladder)
            moves += _sweep_codes(part, ladder, inner)
            for _ in range(rounds):
                moved = 0
                if scales.size:
                    moved += move_numbers(
                        part.g, h, part.e, part.unit, slope, places, scales.values, scales.size, True, product
                    )
                if minima.size:
                    own = minima.places[row, first // minima.size : last // minima.size]
                    direction = minima.directions[row, first:last]
                    moved += move_numbers(
                        part.g, h, part.e, none, direction, own, minima.values, minima.size, False, product
                    )
                if moved:
                    _read_steps(part, ladder)
                moved += _sweep_pairs(part, ladder, least)
                if moved == 0:
                    break
                moves += moved
                _sweep_codes(part, ladder, inner)
    return moves


@subkernel
def _read_steps(part: Part, ladder: Ladder) -> None:
    """Rows UP and DOWN of the steps: those of each code to its neighbours, 0 at the ends."""
    steps, unit, codes = part.steps, part.unit, part.codes
    for j in range(len(codes)):
        steps[UP, j], steps[DOWN, j] = unit[j] * ladder.up[codes[j]], unit[j] * ladder.down[codes[j]]


@subkernel
def _move(part: Part, ladder: Ladder, j: int, k: int) -> None:
    """Move the code of element j to its next value (k = UP) or the last one (DOWN)."""
    steps, codes = part.steps, part.codes
    step = steps[k, j]
    part.e[j] += step
    if len(part.slope):
        part.slope[j] += step / part.scales[part.places[j // part.size]]
    add_scaled(step, part.h[j].ctypes.data, part.g.ctypes.data)
    codes[j] = ladder.above[codes[j]] if k == UP else ladder.below[codes[j]]
    steps[UP, j], steps[DOWN, j] = part.unit[j] * ladder.up[codes[j]], part.unit[j] * ladder.down[codes[j]]


@subkernel
def _sweep_codes(part: Part, ladder: Ladder, inner: int) -> int:
    """Move codes to the better of their neighbours, in up to `inner` sweeps; how many moved."""
    g, diagonal, steps = part.g, part.diagonal, part.steps
    moves = 0
    for _ in range(inner):
        weigh_steps(g.ctypes.data, diagonal.ctypes.data, steps.ctypes.data)
        moved = 0
        for j in range(len(part.codes)):
            if not min(steps[2 + UP, j], steps[2 + DOWN, j]) < 0:  # so it was before the moves of this sweep
                continue
            curve, twice = diagonal[j], np.float32(2) * g[j]
            up, down = steps[UP, j] * (twice + steps[UP, j] * curve), steps[DOWN, j] * (twice + steps[DOWN, j] * curve)
            k = UP if up <= down else DOWN
            if min(up, down) < np.float32(-1e-5) * (steps[k, j] * steps[k, j] * curve):
                _move(part, ladder, j, k)
                moved += 1
        moves += moved
        if moved == 0:
            break
    return moves


@subkernel
def _sweep_pairs(part: Part, ladder: Ladder, least: np.ndarray) -> int:
    """Move each code together with the best partner where that helps; how many pairs moved.

    least float32[2, PANEL]: work space
    """
    g, apart, diagonal, steps = part.g, part.apart, part.diagonal, part.steps
    weigh_steps(g.ctypes.data, diagonal.ctypes.data, steps.ctypes.data)
    least_partners(apart.ctypes.data, steps.ctypes.data, 0, len(part.codes), least.ctypes.data)
    moved = 0
    for i in range(len(part.codes)):
        if not min(least[UP, i], least[DOWN, i]) < 0:
            continue
        if moved:  # pairs that have moved change what this one gains
            least_partners(apart.ctypes.data, steps.ctypes.data, i, i + 1, least.ctypes.data)
        k = UP if least[UP, i] <= least[DOWN, i] else DOWN
        a = steps[k, i]
        if least[k, i] < np.float32(-1e-5) * (a * a * diagonal[i]):
            partner, step_of_partner = best_partner(apart[i], steps, a)
            _move(part, ladder, i, k)
            _move(part, ladder, partner, step_of_partner)
            weigh_steps(g.ctypes.data, diagonal.ctypes.data, steps.ctypes.data)
            moved += 1
    return moved
