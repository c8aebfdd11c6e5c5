"""Rounding by second moments: choosing the scale of each sub-block together with its codes, column by column.

    element with code q    y = scale (base + shift + step p_q) + offset    p_q: place of the code on the type's ladder
    its error              d = y - x + fed       fed: what the errors of the columns before it add up to (`feedback`)

The scale that suits the elements is not the best one for elements less `fed`. So LANES candidates are weighed: scales
near the one of the sub-block, and of the other sign, for tables are not symmetric; each with two tables, where the
type has them (`shift`); or with minima near its own (`offset`). Under each, the codes of the sub-block are chosen one
after the other, every one the nearest to its target. The candidate with the smallest sum of D d^2 stays; later
sub-blocks make up for the rest.

GPTQ (Frantar et al., 2022) takes the scale of a group from its range when it comes to its columns. Here scales are
searched for under the error itself.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from quantkit.codegen import jit
from quantkit.codegen.jit import kernel, subkernel
from quantkit.codegen.simd import F32, IrBuilder, Value, simd_intrinsic, vector
from quantkit.types.families.code_bits import Codec, Codes, Ladder, write_codes
from quantkit.types.families.scale_bits import SubBlockNumber, minimum_of, read_numbers, table_of, write_numbers
from quantkit.types.refine import sub_block_scales
from quantkit.types.refine.coded_rows import CodedRows
from quantkit.types.refine.moments import PANEL, gradient
from quantkit.types.refine.panel_rows import add_scaled
from quantkit.types.refine.sub_block_scales import first_place

LANES = 64  # candidates
REACH = 0.3  # logarithm of the largest ratio of a candidate to the scale
REACH_WITH_MINIMA = 0.15
SHIFT = 0.09  # between candidates of the minimum, in steps of the codes
_FEW = 256  # a number with more values is a float16: its candidates lie further apart than its values
_FLOATS = vector(16, F32)


class SubBlocks(NamedTuple):
    """The sub-blocks of some rows. Arrays are [rows, sub-blocks], int64 or float32, where nothing else is said.

    size                          elements of a sub-block
    scales, minima, tables        places of scale and minimum among their values; the table, 0 or 1
    base, shift, step, offset     of the formula; `shift` of the second table, `offset` without the minimum
    per_minimum                   what a minimum of 1 adds to each element
    scale_values, minimum_values  float32[n], rising
    tried, tried_places           float32, int64[scales, LANES]: candidates for each scale and their places; of float16
                                  float32[1, LANES]: ratios to the scale
    shifts                        float32[LANES]: of the middle of the candidates' values, in steps of the codes
    has_minima, has_tables        whether the type has minima, or second tables; never both
    """

    size: int
    scales: np.ndarray
    minima: np.ndarray
    tables: np.ndarray
    base: np.ndarray
    shift: np.ndarray
    step: np.ndarray
    offset: np.ndarray
    per_minimum: np.ndarray
    scale_values: np.ndarray
    minimum_values: np.ndarray
    tried: np.ndarray
    tried_places: np.ndarray
    shifts: np.ndarray
    has_minima: bool
    has_tables: bool


class Rungs(NamedTuple):
    """The ladder of a type as the search reads it.

    values, middles  float32[n], float32[n - 1]: places of the rungs, and the middles between neighbours
    first, gap       of rungs that are equally far apart; `gap` is 0 for others
    codes            uint8[n]
    """

    values: np.ndarray
    middles: np.ndarray
    first: np.float32
    gap: np.float32
    codes: np.ndarray


def search(
    kind: Codec,
    found: Codes,
    scale: SubBlockNumber,
    x: np.ndarray,
    data: np.ndarray,
    coded: CodedRows,
    factors: np.ndarray,
) -> None:
    """Choose scales and codes of x float32[rows, n] anew, in data uint8[rows, row bytes].

    coded: what `data` holds to begin with; found: `codes_of(kind)`; scale: `scale_of(kind)`; factors:
    `feedback.factors` for single columns
    """
    blocks = _read_sub_blocks(kind, found, scale, data, coded)
    codes = coded.codes.copy()
    choose(x, coded.e.copy(), codes, rungs_of(found.ladder), blocks, factors)
    write_codes(codes, found, data)
    write_numbers(scale.codes[blocks.scales], scale, data)
    if (minimum := minimum_of(kind)) is not None:
        write_numbers(minimum.codes[blocks.minima], minimum, data)
    if (table := table_of(kind)) is not None:
        write_numbers(blocks.tables, table, data)


def _read_sub_blocks(kind: Codec, found: Codes, scale: SubBlockNumber, data: np.ndarray, coded: CodedRows) -> SubBlocks:
    """What `data` has. Coefficients are those of the first element of each sub-block: all have the same."""
    minimum, table = minimum_of(kind), table_of(kind)
    numbers = sub_block_scales.read(kind, scale, data, coded.decoded)
    values, first = numbers.values[numbers.places], slice(None, None, scale.size)
    divisor = np.where(values == 0, np.float32(1), values)
    per_scale, step = numbers.directions[:, first], coded.unit[:, first] / divisor
    base = per_scale - step * found.ladder.position[coded.codes[:, first]]
    shift, tables = np.zeros_like(base), np.zeros_like(numbers.places)
    if table is not None:
        read_numbers(data, table, tables)
        moved = data.copy()
        write_numbers(1 - tables, table, moved)
        change = (kind.dequantize(moved, coded.decoded.shape[1], threads=1) - coded.decoded)[:, first] / divisor
        shift = np.where(tables == 0, change, -change)
        base = base - shift * tables.astype(np.float32)
    offset, other = np.zeros_like(base), sub_block_scales.NONE
    minima, per_minimum, shifts = np.zeros_like(numbers.places), np.zeros_like(base), np.zeros(LANES, np.float32)
    if minimum is not None:
        other = sub_block_scales.read(kind, minimum, data, coded.decoded)
        minima, per_minimum = other.places, other.directions[:, first]
        offset = coded.decoded[:, first] - values * per_scale - other.values[minima] * per_minimum
        shifts[:] = _outward(LANES)[np.arange(LANES) // _scales_tried(True, False)] * SHIFT
    tried, tried_places = candidates(scale, minimum is not None, table is not None)
    own = np.ascontiguousarray
    return SubBlocks(
        scale.size, numbers.places, minima, tables, base, own(shift), step, own(offset), own(per_minimum),
        numbers.values, other.values, tried, tried_places, shifts, minimum is not None, table is not None,
    )  # fmt: skip


def rungs_of(ladder: Ladder) -> Rungs:
    """The rungs of a ladder."""
    values = ladder.position[ladder.rungs]
    gaps = np.diff(values)
    gap = float(values[-1] - values[0]) / len(gaps)
    is_even = np.abs(gaps - gap).max() < 1e-4 * gap
    middles = (values[1:] + values[:-1]) / np.float32(2)
    return Rungs(values, middles, values[0], np.float32(gap if is_even else 0), ladder.rungs)


def _scales_tried(minima: bool, tables: bool) -> int:
    return 8 if minima else LANES // 2 if tables else LANES


def _outward(count: int) -> np.ndarray:
    """0, 1, -1, 2, -2 …"""
    k = np.arange(1, count + 1)
    return np.where(k % 2 == 0, k // 2, -(k // 2))


def _ratios(minima: bool, tables: bool) -> np.ndarray:
    """float64[scales tried], those near 1 first. Below a minimum, scales of the other sign are no other tables."""
    count = _scales_tried(minima, tables)
    if minima:
        return np.exp(_outward(count) * (2 * REACH_WITH_MINIMA / count))
    near = np.exp(_outward(count // 2) * (4 * REACH / count))
    return np.stack([near, -near], axis=1).ravel()


@functools.cache
def _candidates(values: bytes, minima: bool, tables: bool) -> tuple[np.ndarray, np.ndarray]:
    scales = np.frombuffer(values, np.float32).astype(np.float64)
    ratios = _ratios(minima, tables)
    places = np.empty((len(scales), len(ratios)), np.int64)
    for place, scale in enumerate(scales):
        chosen = [place]
        for ratio in ratios[1:]:
            free = [i for i in np.abs(scales - scale * ratio).argsort(kind="stable") if i not in chosen]
            fit = [i for i in free[:2] if scales[i] * scale * ratio > 0]
            chosen.append(fit[0] if fit else place)
        places[place] = chosen
    tiled = np.tile(places, LANES // len(ratios))
    return jit.readonly(scales[tiled].astype(np.float32)), jit.readonly(tiled)


def candidates(scale: SubBlockNumber, minima: bool, tables: bool) -> tuple[np.ndarray, np.ndarray]:
    """`SubBlocks.tried` and `tried_places`. The scale itself is the first candidate."""
    if len(scale.values) <= _FEW:
        return _candidates(scale.values.tobytes(), minima, tables)
    ratios = _ratios(minima, tables).astype(np.float32)
    return np.tile(ratios, LANES // len(ratios))[None], np.zeros((1, LANES), np.int64)


@kernel
def choose(
    x: np.ndarray, e: np.ndarray, codes: np.ndarray, rungs: Rungs, blocks: SubBlocks, factors: np.ndarray
) -> None:
    """Choose scales, minima and tables of `blocks` and codes uint8[rows, n] of x float32[rows, n].

    e float32[padded rows, padded n] becomes the error. Sub-blocks whose elements are all the same stay as they are.
    """
    rows, n = codes.shape
    r = np.empty((len(e), PANEL), np.float32)
    values, work = np.empty((3, LANES), np.float32), np.empty((PANEL, 16), np.float32)
    size = blocks.size
    for p in range(len(factors)):
        first, last = p * PANEL, min(n, (p + 1) * PANEL)
        gradient(e, factors[p], first, r)
        a = factors[p, first : first + PANEL]
        for row in range(rows):
            for at in range(0, last - first, size):
                s, end = (first + at) // size, first + at + size
                span = blocks.scale_values[blocks.scales[row, s]] * blocks.step[row, s]
                own = x[row, first + at : end], e[row, first + at : end], codes[row, first + at : end]
                if abs(span) > np.float32(1e-30):
                    _set_candidates(blocks, rungs, row, s, values)
                    _weigh(own[0], r[row, at:], a[at:, at:], rungs, values, work)
                    _take(blocks, row, s, values)
                    low, span = _range(blocks, row, s)
                    _choose_codes(own, rungs, low, span, a[at:], r[row], at)
                else:
                    _keep_codes(own[1], a[at:], r[row])


@subkernel
def _set_candidates(blocks: SubBlocks, rungs: Rungs, row: int, s: int, values: np.ndarray) -> None:
    """Rows 0 and 1 of values float32[3, LANES]: each candidate's smallest value (rung 0 of the ladder) and its unit."""
    place = blocks.scales[row, s]
    is_float16 = len(blocks.tried) == 1
    factor = blocks.scale_values[place] if is_float16 else np.float32(1)
    tried = blocks.tried[0 if is_float16 else place]
    table = blocks.tables[row, s]
    for lane in range(LANES):
        scale = factor * tried[lane]
        values[0, lane] = _lowest(blocks, row, s, scale, table if lane < LANES // 2 else 1 - table)
        values[1, lane] = scale * blocks.step[row, s]
    if not blocks.has_minima:
        return
    for lane in range(LANES):
        minimum = _minimum(blocks, rungs, row, s, values[1, lane], blocks.shifts[lane])
        if len(blocks.minimum_values) <= _FEW:
            minimum = blocks.minimum_values[_nearest(blocks.minimum_values, blocks.minima[row, s], minimum)]
        values[0, lane] += minimum * blocks.per_minimum[row, s]


@subkernel
def _lowest(blocks: SubBlocks, row: int, s: int, scale: np.float32, table: int) -> np.float32:
    """The smallest value under a scale and a table, without the minimum."""
    base = blocks.base[row, s] + (blocks.shift[row, s] if table == 1 else np.float32(0))
    return np.float32(scale * base + blocks.offset[row, s])


@subkernel
def _minimum(blocks: SubBlocks, rungs: Rungs, row: int, s: int, unit: np.float32, shift: np.float32) -> np.float32:
    """The minimum with which the middle of a candidate's values is `shift` steps from where it was."""
    old = blocks.scale_values[blocks.scales[row, s]]
    own = old * blocks.step[row, s]
    middle = (unit - own) * (np.float32(0.5) + blocks.base[row, s] / blocks.step[row, s])
    change = (shift * rungs.gap * own - middle) / blocks.per_minimum[row, s]
    return np.float32(blocks.minimum_values[blocks.minima[row, s]] + change)


@subkernel
def _nearest(values: np.ndarray, start: int, target: np.float32) -> int:
    """The place of the value nearest to `target` in float32[n], rising, searched for from a place near it."""
    at = min(first_place(values, start, target), len(values) - 1)
    return at - 1 if at > 0 and target - values[at - 1] <= values[at] - target else at


@subkernel
def _weigh(x: np.ndarray, fed: np.ndarray, a: np.ndarray, rungs: Rungs, values: np.ndarray, work: np.ndarray) -> None:
    """Row 2 of `values`: sum D d^2 of the candidates."""
    if rungs.gap > 0:
        weigh_candidates(
            x.ctypes.data, fed.ctypes.data, a.ctypes.data, len(x), values.ctypes.data, rungs.values.ctypes.data,
            rungs.middles.ctypes.data, len(rungs.middles), rungs.first, rungs.gap, work.ctypes.data, 1,
        )  # fmt: skip
    else:
        weigh_candidates(
            x.ctypes.data, fed.ctypes.data, a.ctypes.data, len(x), values.ctypes.data, rungs.values.ctypes.data,
            rungs.middles.ctypes.data, len(rungs.middles), rungs.first, rungs.gap, work.ctypes.data, 0,
        )  # fmt: skip


@simd_intrinsic("void")
def weigh_candidates(
    ir: IrBuilder, x: Value, fed: Value, a: Value, size: Value, values: Value, rungs: Value, middles: Value,
    last: Value, first: float, gap: float, work: Value, even: int,
) -> None:  # fmt: skip
    """values[2] = sum over j < `size` of a[j, j] d_j^2 for each candidate; values float32[3, LANES].

    x, fed float32[size]; a float32[size, PANEL]: the factors, D on the diagonal; rungs float32[last + 1], middles
    float32[last]; `even`: rungs are first + k gap; work float32[size, 16]
    """
    for lane in range(0, 4 * LANES, 64):
        low, unit = ir.load(_FLOATS, values + lane), ir.load(_FLOATS, values + (4 * LANES + lane))
        if even:
            low = low + unit * ir.splat(first, 16)  # type: ignore[arg-type]
            unit = unit * ir.splat(gap, 16)  # type: ignore[arg-type]
        inverse = ir.splat(ir.constant(F32, 1.0), 16) / unit
        total = ir.variable(ir.zero(_FLOATS))
        with ir.loop(0, size) as j:
            ir.store(ir.splat(ir.load(F32, fed + j * 4), 16), work + j * 64)
        with ir.loop(0, size) as j:
            already = ir.load(_FLOATS, work + j * 64)
            target = ir.splat(ir.load(F32, x + j * 4), 16) - already
            place = (target - low) * inverse
            if even:
                most = ir.splat(last.real(), 16)
                rung = ir.nearest(ir.max(ir.min(place, most), ir.zero(_FLOATS))).real()
            else:
                value = ir.variable(ir.splat(ir.load(F32, rungs), 16))
                with ir.loop(0, last) as k:
                    over = ir.less(ir.splat(ir.load(F32, middles + k * 4), 16), place)
                    value.set(ir.choose(over, ir.splat(ir.load(F32, rungs + k * 4 + 4), 16), value.get()))
                rung = value.get()
            apart = low + unit * rung - target
            row = a + j * (4 * PANEL)
            total.set(ir.fma(apart * apart, ir.splat(ir.load(F32, row + j * 4), 16), total.get()))
            own = apart - already
            with ir.loop(j + 1, size) as i:
                factor = ir.splat(ir.load(F32, row + i * 4), 16)
                ir.store(ir.fma(own, factor, ir.load(_FLOATS, work + i * 64)), work + i * 64)
        ir.store(total.get(), values + (8 * LANES + lane))


@subkernel
def _take(blocks: SubBlocks, row: int, s: int, values: np.ndarray) -> None:
    """Make the best candidate the scale, minimum and table of the sub-block."""
    best = 0
    for lane in range(1, LANES):
        if values[2, lane] < values[2, best]:
            best = lane
    place, unit = blocks.scales[row, s], values[1, best]
    if best == 0:
        return
    if blocks.has_tables and best >= LANES // 2:
        blocks.tables[row, s] ^= 1
    if len(blocks.tried) > 1:
        blocks.scales[row, s] = blocks.tried_places[place, best]
    else:
        near = _nearest(blocks.scale_values, place, blocks.scale_values[place] * blocks.tried[0, best])
        blocks.scales[row, s] = near if blocks.scale_values[near] != 0 else place
    if blocks.has_minima:
        low = values[0, best] - blocks.offset[row, s] - blocks.base[row, s] / blocks.step[row, s] * unit
        minimum = low / blocks.per_minimum[row, s]
        blocks.minima[row, s] = _nearest(blocks.minimum_values, blocks.minima[row, s], minimum)


@subkernel
def _range(blocks: SubBlocks, row: int, s: int) -> tuple[np.float32, np.float32]:
    """The smallest value of the sub-block's ladder, and its unit."""
    scale = blocks.scale_values[blocks.scales[row, s]]
    low = _lowest(blocks, row, s, scale, blocks.tables[row, s])
    if blocks.has_minima:
        low += blocks.minimum_values[blocks.minima[row, s]] * blocks.per_minimum[row, s]
    return low, scale * blocks.step[row, s]


@subkernel
def _choose_codes(
    own: tuple[np.ndarray, np.ndarray, np.ndarray],
    rungs: Rungs,
    low: np.float32,
    unit: np.float32,
    a: np.ndarray,
    fed: np.ndarray,
    at: int,
) -> None:
    """Choose the codes of a sub-block of elements `at` and on; own: its x, e and codes; fed float32[PANEL]."""
    x, e, codes = own
    for j in range(len(x)):
        k = _rung(rungs, (x[j] - fed[at + j] - low) / unit)
        codes[j] = rungs.codes[k]
        e[j] = low + unit * rungs.values[k] - x[j]
        add_scaled(e[j], a[j].ctypes.data, fed.ctypes.data)


@subkernel
def _keep_codes(e: np.ndarray, a: np.ndarray, fed: np.ndarray) -> None:
    """Feed back the errors of a sub-block whose codes stay."""
    for j in range(len(e)):
        add_scaled(e[j], a[j].ctypes.data, fed.ctypes.data)


@subkernel
def _rung(rungs: Rungs, place: np.float32) -> int:
    """The rung nearest to a place on the ladder."""
    last = len(rungs.middles)
    if rungs.gap > 0:
        return int(np.rint(min(max((place - rungs.first) / rungs.gap, np.float32(0)), np.float32(last))))
    k = 0
    for middle in rungs.middles:
        k += 1 if middle < place else 0
    return k
