"""Rounding by second moments, for types whose codes stand for groups of elements: grids, trellises, pairs.

    group of G elements     y = a * s * V[p]      p a point of the codebook V, s signs, a the scale of the group
    error                   e^T H e of a row, as in `scalar_codes`

Points are chosen anew first, each against the errors of the groups before it (`feedback`), under the scale of the
sub-block and those next to it. Then a group moves to one of the NEAR points nearest to its own, or one sign changes
(two, where a type stores the parity of eight signs in place of the last), if that lowers the error: a change d of the
elements g changes it by

    2 d . r_g + d^T H_gg d,   r = e H

All neighbours of a point are weighed at once, as lanes. In the later sweeps the scales of sub-blocks move, too
(`sub_block_scales`). Where the fields are in a block, a type says by packing them:
`find_bits` compares blocks that differ in one bit of one field.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from quantkit.codegen import jit, thread_pool
from quantkit.codegen.array_cache import disk_cached
from quantkit.codegen.jit import kernel, subkernel
from quantkit.codegen.simd import F32, I8, I32, IrBuilder, Value, simd_intrinsic, vector
from quantkit.types.families.scale_bits import SubBlockNumber, get_bit, read_field, set_bit, write_field, write_numbers
from quantkit.types.refine import feedback, sub_block_scales
from quantkit.types.refine.moments import PANEL, Moments, gradient
from quantkit.types.refine.panel_rows import add_scaled
from quantkit.types.refine.sub_block_scales import Decoder, Numbers, move_numbers

NEAR = 32  # neighbours of a point
WALK = 8  # steps from a point to the best of its neighbours, at most, where errors are fed back
REACH = 1  # next larger and smaller scales that are weighed for a sub-block
INNER = 2  # sweeps of a panel
SCALES = (
    (False,),
    (False, False, True, True),
    (False, False, True, True, True, True, True, True),
)  # by effort: `refine`


class VectorCodes(NamedTuple):
    """Codebooks of a type and where the fields of its blocks are: numbers of bits from a block's first byte on."""

    header: int  # bytes before the blocks of a row
    block_bytes: int
    values: np.ndarray  # int8[tables, points, G]
    near: np.ndarray  # uint16[tables, points, NEAR]
    near_values: np.ndarray  # int8[tables, points, G, NEAR]
    point_bits: np.ndarray  # int64[groups of a block, bits], the lowest first
    sign_bits: np.ndarray  # int64[256], -1 where the sign is the parity of the seven before; int64[0] without signs
    table_bits: np.ndarray  # int64[8], of sub-blocks of 32; int64[0] with one table


# ------------------------------------------------------------------------------------------------------------ codebooks


def make_codes(
    header: int,
    block_bytes: int,
    values: np.ndarray,
    point_bits: np.ndarray,
    sign_bits: np.ndarray | None = None,
    table_bits: np.ndarray | None = None,
) -> VectorCodes:
    """The codes of a type: the fields of `VectorCodes` but for neighbours, which are found once and kept on disk."""
    near, near_values = disk_cached(nearest_points, np.ascontiguousarray(values), NEAR)
    none = np.empty(0, np.int64)
    arrays = (values, near, near_values, point_bits, none if sign_bits is None else sign_bits,
              none if table_bits is None else table_bits)  # fmt: skip
    return VectorCodes(header, block_bytes, *(jit.readonly(np.ascontiguousarray(array)) for array in arrays))


def find_bits(plain: np.ndarray, blocks: np.ndarray) -> np.ndarray:
    """int64[...]: the bit in which each of uint8[..., block bytes] differs from `plain`; -1 where none does."""
    changed = np.unpackbits(blocks ^ plain, axis=-1, bitorder="little")
    result: np.ndarray = np.where(changed.any(axis=-1), changed.argmax(axis=-1), -1)
    return result


def nearest_points(values: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """For each point of int8[tables, points, G] the `count` nearest others, nearest first, and their values.

    uint16[tables, points, count] and int8[tables, points, G, count]. Of equally near ones the first; a point is its own
    neighbour where there are not as many others.
    """
    tables, points, _ = values.shape
    near = np.tile(np.arange(points, dtype=np.uint16)[:, None], (tables, 1, count))
    for table in range(tables):
        columns = jit.readonly(np.ascontiguousarray(values[table].T))
        thread_pool.over_rows(lambda a, b: _search(columns, a, b, near[table]), points, is_long=True)  # noqa: B023
    rows = np.stack([values[table][near[table]] for table in range(tables)])
    return near, np.ascontiguousarray(rows.transpose(0, 1, 3, 2))


@kernel
def _search(columns: np.ndarray, start: int, stop: int, near: np.ndarray) -> None:
    """Rows `start` to `stop` of near uint16[points, count] for columns int8[G, points]."""
    size, points = columns.shape
    count, chunk = near.shape[1], 1024
    distances = np.empty(chunk, np.int32)
    best = np.empty(count, np.int32)
    for p in range(start, stop):
        best[:] = np.int32(1 << 30)
        for first in range(0, points, chunk):
            many = min(chunk, points - first)
            distances[:] = 0
            for i in range(size):
                own, column = np.int32(columns[i, p]), columns[i, first : first + many]
                for q in range(many):
                    step = np.int32(column[q]) - own
                    distances[q] += step * step
            for q in range(many):
                if distances[q] < best[count - 1] and first + q != p:
                    at = count - 1
                    while at > 0 and best[at - 1] > distances[q]:
                        best[at], near[p, at] = best[at - 1], near[p, at - 1]
                        at -= 1
                    best[at], near[p, at] = distances[q], first + q


# --------------------------------------------------------------------------------------------------------------- fields


@kernel
def read_fields(
    data: np.ndarray, codes: VectorCodes, points: np.ndarray, signs: np.ndarray, tables: np.ndarray
) -> None:
    """The points int64[rows, groups], signs float32[rows, n] and tables int64[rows, sub-blocks] of rows."""
    groups = len(codes.point_bits)
    for row in range(len(data)):
        for b in range(points.shape[1] // groups):
            block = data[row, codes.header + b * codes.block_bytes :]
            for g in range(groups):
                points[row, b * groups + g] = read_field(block, codes.point_bits[g])
            for s in range(len(codes.table_bits)):
                tables[row, b * len(codes.table_bits) + s] = get_bit(block, codes.table_bits[s])
            parity = np.int64(0)
            for j in range(len(codes.sign_bits)):
                parity = np.int64(0) if j % 8 == 0 else parity
                address = codes.sign_bits[j]
                negative = parity if address < 0 else get_bit(block, address)
                parity ^= negative
                signs[row, 256 * b + j] = np.float32(1 - 2 * negative)


@kernel
def write_fields(data: np.ndarray, codes: VectorCodes, points: np.ndarray, signs: np.ndarray) -> None:
    """Set points and signs of rows; what `read_fields` does not read stays."""
    groups = len(codes.point_bits)
    for row in range(len(data)):
        for b in range(points.shape[1] // groups):
            block = data[row, codes.header + b * codes.block_bytes :]
            for g in range(groups):
                write_field(block, codes.point_bits[g], points[row, b * groups + g])
            for j in range(len(codes.sign_bits)):
                if codes.sign_bits[j] >= 0:
                    set_bit(block, codes.sign_bits[j], np.int64(signs[row, 256 * b + j] < 0))


# -------------------------------------------------------------------------------------------------------------- descent


class Part(NamedTuple):
    """What of a row is in a panel of columns, and H of the panel.

    e, signs                float32[columns]: the error, and the signs
    g, h                    float32[PANEL], the gradient r; float32[PANEL, PANEL], H
    points, tables, scales  int64[groups], int64[groups], float32[groups]
    places                  int64[sub-blocks], of the scales of sub-blocks; empty where they do not move
    """

    e: np.ndarray
    g: np.ndarray
    h: np.ndarray
    signs: np.ndarray
    points: np.ndarray
    tables: np.ndarray
    scales: np.ndarray
    places: np.ndarray


def refine(
    kind: Decoder,
    codes: VectorCodes,
    number: SubBlockNumber | None,
    x: np.ndarray,
    data: np.ndarray,
    moments: Moments,
    moves_scales: Sequence[bool],
) -> None:
    """Lower the error of data uint8[rows, row bytes], which encodes x float32[rows, n], in place, row by row.

    number: the scale of sub-blocks; moves_scales: for each sweep over all columns, whether it moves as well
    """
    rows, n = x.shape
    size = codes.values.shape[2]
    points = np.empty((rows, n // size), np.int64)
    signs, tables = np.ones((rows, n), np.float32), np.zeros((rows, n // 32), np.int64)
    read_fields(data, codes, points, signs, tables)
    decoded = kind.dequantize(data, n, threads=1, products=True)
    table = np.repeat(tables, 32 // size, axis=1)
    signed = codes.values[table, points].reshape(rows, n // size, size) * signs.reshape(rows, -1, size)
    largest = np.abs(signed).argmax(axis=2)[..., None]
    top = np.take_along_axis(signed, largest, 2)[..., 0]
    scales = np.take_along_axis(decoded.reshape(signed.shape), largest, 2)[..., 0] / np.where(top != 0, top, 1)
    scales = np.where(np.isfinite(scales) & (top != 0), scales, 0).astype(np.float32)
    e = moments.padded_zeros(rows)
    e[:rows, :n] = decoded - x
    flips = 0 if not len(codes.sign_bits) else 2 if (codes.sign_bits < 0).any() else 1
    number = number if any(moves_scales) else None
    numbers = sub_block_scales.read(kind, number, data, decoded)
    chosen = [e, points, signs, scales, *([numbers.places] if number is not None else [])]
    before = [array.copy() for array in chosen]
    factors = feedback.factors(moments, size)
    errors_before = feedback.row_errors(e, factors, size, rows)
    errors = feed_back(e, points, signs, table, scales, numbers, codes, factors, rows, flips)
    feedback.keep_lower(chosen, before, errors, errors_before)
    for moves in moves_scales:
        own = numbers if moves else sub_block_scales.NONE
        moved = descend(e, points, signs, table, scales, own, codes, moments.panels, rows, flips, INNER)
        if moves and not moved:  # scales may move where no point does
            break
    write_fields(data, codes, points, signs)
    if number is not None:
        write_numbers(number.codes[numbers.places], number, data)


@kernel
def feed_back(
    e: np.ndarray,
    points: np.ndarray,
    signs: np.ndarray,
    tables: np.ndarray,
    scales: np.ndarray,
    numbers: Numbers,
    codes: VectorCodes,
    factors: np.ndarray,
    rows: int,
    flips: int,
) -> np.ndarray:
    """Choose each group's point against the errors of the groups before it (`feedback`), walking from its own point to
    the best of its neighbours until none is better; with `numbers` also the scale of each sub-block, among the REACH
    next smaller and larger ones. Parameters as in `descend`; factors: of `feedback.factors`.

    Returns e^T H e of each row, float64[rows].
    """
    size, n = codes.values.shape[2], points.shape[1] * codes.values.shape[2]
    r, total = np.empty((len(e), PANEL), np.float32), np.zeros(rows, np.float64)
    work = (
        np.empty((size, NEAR), np.float32),
        np.empty(NEAR, np.float32),
        np.empty(size, np.float32),
        np.empty(size, np.float32),
    )
    first_choice = Choice(np.empty((4, PANEL), np.float32), np.empty(PANEL, np.int64))
    best = Choice(np.empty((4, PANEL), np.float32), np.empty(PANEL, np.int64))
    no_places = np.empty(0, np.int64)
    for p in range(len(factors)):
        first = p * PANEL
        last = min(first + PANEL, n)
        gradient(e, factors[p], first, r)
        a = factors[p, first : first + PANEL]
        groups = slice(first // size, last // size)
        for row in range(rows):
            places = numbers.places[row, first // numbers.size : last // numbers.size] if numbers.size else no_places
            part = Part(e[row, first:last], r[row], a, signs[row, first:last], points[row, groups],
                        tables[row, groups], scales[row, groups], places)  # fmt: skip
            if numbers.size:
                for block in range(len(places)):
                    total[row] += _choose_sub_block(part, codes, numbers, block, flips, work, first_choice, best)
            else:
                total[row] += _choose_points(part, codes, flips, work, 0, len(part.points))
    return total


class Choice(NamedTuple):
    """What is chosen for a sub-block of a part, and what that feeds back.

    floats float32[4, PANEL]: e, signs, scales (of groups) and g; points int64[PANEL] (of groups)
    """

    floats: np.ndarray
    points: np.ndarray


@subkernel
def _save(part: Part, start: int, stop: int, size: int, choice: Choice) -> None:
    """Keep the choice for elements `start` to `stop` of a part."""
    for j in range(start, stop):
        choice.floats[0, j], choice.floats[1, j] = part.e[j], part.signs[j]
    for group in range(start // size, stop // size):
        choice.floats[2, group], choice.points[group] = part.scales[group], part.points[group]
    for j in range(PANEL):
        choice.floats[3, j] = part.g[j]


@subkernel
def _restore(part: Part, start: int, stop: int, size: int, choice: Choice) -> None:
    """Make a kept choice that of the part."""
    for j in range(start, stop):
        part.e[j], part.signs[j] = choice.floats[0, j], choice.floats[1, j]
    for group in range(start // size, stop // size):
        part.scales[group], part.points[group] = choice.floats[2, group], choice.points[group]
    for j in range(PANEL):
        part.g[j] = choice.floats[3, j]


@subkernel
def _rescale(part: Part, codes: VectorCodes, start: int, stop: int, ratio: np.float32) -> None:
    """Multiply the scales of elements `start` to `stop` by `ratio`."""
    size = codes.values.shape[2]
    for group in range(start // size, stop // size):
        change = (ratio - np.float32(1)) * part.scales[group]
        for i in range(size):
            value = np.float32(codes.values[part.tables[group], part.points[group], i])
            part.e[group * size + i] += change * part.signs[group * size + i] * value
        part.scales[group] *= ratio


@subkernel
def _choose_sub_block(
    part: Part, codes: VectorCodes, numbers: Numbers, block: int, flips: int, work: tuple[np.ndarray, ...],
    first: Choice, best: Choice,
) -> np.float32:  # fmt: skip
    """Choose the scale and the points of a sub-block: those with the smallest sum of d^T D d, which is returned.

    first, best: work space
    """
    size, start, stop = codes.values.shape[2], block * numbers.size, (block + 1) * numbers.size
    place = part.places[block]
    _save(part, start, stop, size, first)
    least = _choose_points(part, codes, flips, work, start // size, stop // size)
    _save(part, start, stop, size, best)
    for other in range(max(place - REACH, 0), min(place + REACH + 1, len(numbers.values))):
        if other == place or not numbers.values[other] * numbers.values[place] > 0:
            continue
        _restore(part, start, stop, size, first)
        _rescale(part, codes, start, stop, numbers.values[other] / numbers.values[place])
        total = _choose_points(part, codes, flips, work, start // size, stop // size)
        if total < least:
            least, part.places[block] = total, other
            _save(part, start, stop, size, best)
    _restore(part, start, stop, size, best)
    return least


@subkernel
def _choose_points(
    part: Part, codes: VectorCodes, flips: int, work: tuple[np.ndarray, ...], start: int, stop: int
) -> np.float32:
    """Choose the points of groups `start` to `stop` of a part, whose h is a panel of factors; their sum of d^T D d.

    work: space float32[size, NEAR], float32[NEAR], float32[size], float32[size]
    """
    e, fed, a, size = part.e, part.g, part.h, codes.values.shape[2]
    step, gains, factors, slopes = work
    total = np.float32(0)
    for group in range(start, stop):
        at = group * size
        if flips == 1 and part.scales[group] != 0:
            _follow_target(part, codes.values, group)
        for i in range(size):
            factors[i] = part.scales[group] * part.signs[at + i]
            slopes[i] = np.float32(0)
            for k in range(size):
                slopes[i] += (e[at + k] + fed[at + k]) * a[at + k, at + i]
        if part.scales[group] != 0:
            for _ in range(WALK):
                table, point = part.tables[group], part.points[group]
                best = _best_neighbour(codes, table, point, factors, slopes, a[at:, at:], step, gains)
                if not gains[best] < np.float32(0):
                    break
                part.points[group] = np.int64(codes.near[table, point, best])
                for i in range(size):
                    e[at + i] += step[i, best]
                    for k in range(size):
                        slopes[k] += step[i, best] * a[at + i, at + k]
        for i in range(size):
            total += (e[at + i] + fed[at + i]) * slopes[i]
        for i in range(size):  # to the columns behind the group; those of the group itself are not read any more
            add_scaled(e[at + i], a[at + i].ctypes.data, fed.ctypes.data)
    return total


@subkernel
def _follow_target(part: Part, values: np.ndarray, group: int) -> None:
    """Give the elements of a group the signs of what they stand for: the row's elements less what was fed back."""
    size = values.shape[2]
    for at in range(group * size, group * size + size):
        value = part.scales[group] * np.float32(values[part.tables[group], part.points[group], at % size])
        target = part.signs[at] * value - part.e[at] - part.g[at]
        if target * part.signs[at] * value < np.float32(0):
            part.e[at] -= np.float32(2) * part.signs[at] * value
            part.signs[at] = -part.signs[at]


@kernel
def descend(
    e: np.ndarray,
    points: np.ndarray,
    signs: np.ndarray,
    tables: np.ndarray,
    scales: np.ndarray,
    numbers: Numbers,
    codes: VectorCodes,
    panels: np.ndarray,
    rows: int,
    flips: int,
    inner: int,
) -> int:
    """Move points int64[rows, groups], signs and scales so that e^T H e falls, and e with them. Returns the moves.

    tables int64[rows, groups], scales float32[rows, groups]; flips: signs that change at once, 0 without signs.
    """
    size, n = codes.values.shape[2], points.shape[1] * codes.values.shape[2]
    r = np.empty((len(e), PANEL), np.float32)
    work = np.empty((3, PANEL), np.float32)
    step, gains, factors = np.empty((size, NEAR), np.float32), np.empty(NEAR, np.float32), np.empty(size, np.float32)
    no_places = np.empty(0, np.int64)
    moves = 0
    for p in range(len(panels)):
        first = p * PANEL
        last = min(first + PANEL, n)
        gradient(e, panels[p], n, r)
        h = panels[p, first : first + PANEL]
        groups = slice(first // size, last // size)
        for row in range(rows):
            places = no_places
            if numbers.size:
                places = numbers.places[row, first // numbers.size : last // numbers.size]
            part = Part(e[row, first:last], r[row], h, signs[row, first:last], points[row, groups],
                        tables[row, groups], scales[row, groups], places)  # fmt: skip
            for _ in range(inner):
                moved = _sweep_points(part, codes, step, gains, factors)
                if flips > 0:
                    moved += _sweep_signs(part, codes.values, flips, gains)
                moves += moved
                if moved == 0:
                    break
            if numbers.size:
                moves += _move_scales(part, codes.values, numbers.values, numbers.size, work)
    return moves


@subkernel
def _move_scales(part: Part, values: np.ndarray, of_places: np.ndarray, block: int, work: np.ndarray) -> int:
    """Move the scales of the part's sub-blocks of `block` elements; how many moved.

    of_places: the scale of each place, up to a factor; work float32[3, PANEL]
    """
    size, scales = values.shape[2], part.scales
    directions, before = work[0], work[1]
    for group in range(len(part.points)):
        scale = of_places[part.places[group * size // block]]
        before[group] = scale
        factor = scales[group] / scale if scale != 0 else np.float32(0)
        for i in range(size):
            value = np.float32(values[part.tables[group], part.points[group], i])
            directions[group * size + i] = factor * part.signs[group * size + i] * value
    moved = move_numbers(
        part.g, part.h, part.e, part.e[:0], directions[: len(part.e)], part.places, of_places, block, True, work[2]
    )
    if moved:
        for group in range(len(part.points)):
            if before[group] != 0:
                scales[group] *= of_places[part.places[group * size // block]] / before[group]
    return moved


@simd_intrinsic("void")
def _weigh(
    ir: IrBuilder, size: int, near: Value, own: Value, factors: Value, g: Value, h: Value, step: Value, gains: Value
) -> None:
    """What each of NEAR neighbours changes: step float32[size, NEAR] of the elements, gains float32[NEAR] of the error.

    near int8[size, NEAR], own int8[size], factors float32[size], g float32[size]; h float32[size, PANEL] holds H_gg.
    """
    kind = vector(16, F32)
    factor = [ir.splat(ir.load(F32, factors + 4 * i), 16) for i in range(size)]
    value = [ir.splat(ir.load(I8, own + i).signed(I32).real(), 16) for i in range(size)]
    for first in range(0, NEAR, 16):
        steps: list[Value] = []
        total = ir.zero(kind)
        for i in range(size):
            to = ir.load(vector(16, I8), near + (NEAR * i + first)).signed(I32).real()
            steps.append(factor[i] * (to - value[i]))
            ir.store(steps[i], step + 4 * (NEAR * i + first))
            slope = ir.splat(ir.load(F32, g + 4 * i), 16)
            for k in range(i):
                slope = ir.fma(ir.splat(ir.load(F32, h + 4 * (PANEL * i + k)), 16), steps[k], slope)
            curve = ir.splat(ir.load(F32, h + 4 * (PANEL * i + i)), 16)
            total = ir.fma(steps[i], ir.fma(curve, steps[i], slope + slope), total)
        ir.store(total, gains + 4 * first)


@subkernel
def _best_neighbour(
    codes: VectorCodes, table: int, point: int, factors: np.ndarray, g: np.ndarray, h: np.ndarray, step: np.ndarray,
    gains: np.ndarray,
) -> int:  # fmt: skip
    """Which neighbour of a point lowers the error most, by gains[...]; g and h begin at the group's elements."""
    size, place = codes.values.shape[2], table * codes.values.shape[1] + point
    near = codes.near_values.ctypes.data + place * codes.near_values.strides[1]
    own = codes.values.ctypes.data + place * codes.values.strides[1]
    by, slope, curve = factors.ctypes.data, g.ctypes.data, h.ctypes.data
    if size == 2:
        _weigh(2, near, own, by, slope, curve, step.ctypes.data, gains.ctypes.data)
    elif size == 8:
        _weigh(8, near, own, by, slope, curve, step.ctypes.data, gains.ctypes.data)
    else:
        _weigh(4, near, own, by, slope, curve, step.ctypes.data, gains.ctypes.data)
    best = 0
    for m in range(1, NEAR):
        if gains[m] < gains[best]:
            best = m
    return best


@kernel
def _sweep_points(part: Part, codes: VectorCodes, step: np.ndarray, gains: np.ndarray, factors: np.ndarray) -> int:
    """Move each group of the part to the best of its nearest points; how many moved."""
    e, g, h, scales = part.e, part.g, part.h, part.scales
    size, moved = codes.values.shape[2], 0
    for group in range(len(part.points)):
        if scales[group] == 0:
            continue
        at, point, table = group * size, part.points[group], part.tables[group]
        for i in range(size):
            factors[i] = scales[group] * part.signs[at + i]
        best = _best_neighbour(codes, table, point, factors, g[at:], h[at:, at:], step, gains)
        threshold = np.float32(0)
        for i in range(size):
            threshold += h[at + i, at + i] * step[i, best] * step[i, best]
        if gains[best] < np.float32(-1e-5) * threshold:
            for i in range(size):
                e[at + i] += step[i, best]
                for k in range(PANEL):
                    g[k] += step[i, best] * h[at + i, k]
            part.points[group] = np.int64(codes.near[table, point, best])
            moved += 1
    return moved


@kernel
def _sweep_signs(part: Part, values: np.ndarray, flips: int, step: np.ndarray) -> int:
    """Of each eight elements change the sign of the best one, or of the best two; how many eights changed.

    step float32[at least 16]: work space.
    """
    e, g, h, signs = part.e, part.g, part.h, part.signs
    size, moved = values.shape[2], 0
    for at in range(0, len(e), 8):
        for i in range(8):
            own = (at + i) // size
            value = np.float32(values[part.tables[own], part.points[own], i % size])
            step[i] = np.float32(-2) * part.scales[own] * signs[at + i] * value
            curve = h[at + i, at + i]
            step[8 + i] = step[i] * (np.float32(2) * g[at + i] + curve * step[i])  # what this one alone changes
        best, first, second = np.float32(0), -1, -1
        for i in range(8):
            if flips == 1:
                if step[8 + i] < best:
                    best, first = step[8 + i], i
                continue
            for k in range(i):
                both = step[8 + i] + step[8 + k] + np.float32(2) * h[at + i, at + k] * (step[i] * step[k])
                if both < best:
                    best, first, second = both, i, k
        if first < 0:
            continue
        limit = h[at + first, at + first] * step[first] * step[first]
        if second >= 0:
            limit += h[at + second, at + second] * step[second] * step[second]
        if not best < np.float32(-1e-5) * limit:
            continue
        for i in (first, second):
            if i >= 0:
                e[at + i] += step[i]
                signs[at + i] = -signs[at + i]
                for k in range(PANEL):
                    g[k] += step[i] * h[at + i, k]
        moved += 1
    return moved
