"""Rounding by second moments: choosing the scale of each sub-block together with its codes, column by column.

    element with code q    y = scale (base + shift + step p_q) + offset    p_q: place of the code on the type's ladder
    its error              d = y - x + fed       fed: what the errors of the columns before it add up to (`feedback`)

The scale that suits the elements is not the best one for elements less `fed`. So LANES candidates are weighed: scales
near the one of the sub-block, and of the other sign, for tables are not symmetric; each with two tables, where the
type has them (`shift`); or with minima near its own (`offset`). All are values that the format stores. Under each, the
codes of the sub-block are chosen one after the other, every one the nearest to its target. The candidate with the
smallest sum of D d^2 stays, with its errors; later sub-blocks make up for the rest.

GPTQ (Frantar et al., 2022) takes the scale of a group from its range when it comes to its columns. Here scales are
searched for under the error itself.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from quantkit.codegen import jit
from quantkit.codegen.half import float_to_half, half_to_float
from quantkit.codegen.jit import kernel, subkernel
from quantkit.codegen.simd import F32, IrBuilder, Value, simd_intrinsic, vector
from quantkit.types.families.code_bits import Codec, Codes, Ladder, write_codes
from quantkit.types.families.scale_bits import SubBlockNumber, minimum_of, read_numbers, table_of, write_numbers
from quantkit.types.refine import sub_block_scales
from quantkit.types.refine.coded_rows import CodedRows
from quantkit.types.refine.moments import PANEL, gradient
from quantkit.types.refine.panel_rows import combine
from quantkit.types.refine.sub_block_scales import first_place

LANES = 64  # candidates
REACH = 0.3  # logarithm of the largest ratio of a candidate to the scale
REACH_WITH_MINIMA = 0.15
SHIFT = 0.09  # between candidates of the minimum, in steps of the codes
_FEW = 256  # a number with more values is a float16: its candidates lie further apart than its values
_LARGEST_HALF = np.float32(65504)
_TOGETHER = 4  # columns whose errors are fed back to later ones at once
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


class Candidates(NamedTuple):
    """Work space: what is weighed for one sub-block.

    low, unit       float32[LANES]: the smallest value (rung 0 of the ladder) and what a unit of the ladder is worth
    sums            float32[LANES]: sum of D d^2
    scale, minimum  float32[LANES]
    errors          float32[LANES / 32, PANEL, 32]: e of each element
    """

    low: np.ndarray
    unit: np.ndarray
    sums: np.ndarray
    scale: np.ndarray
    minimum: np.ndarray
    errors: np.ndarray


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
) -> np.ndarray:
    """Choose scales and codes of x float32[rows, n] anew, in data uint8[rows, row bytes]. Returns `row_errors`.

    coded: what `data` holds to begin with; found: `codes_of(kind)`; scale: `scale_of(kind)`; factors:
    `feedback.factors` for single columns
    """
    blocks = _read_sub_blocks(kind, found, scale, data, coded)
    codes = coded.codes.copy()
    errors: np.ndarray = choose(x, coded.e.copy(), codes, rungs_of(found.ladder), blocks, factors)
    write_codes(codes, found, data)
    write_numbers(scale.codes[blocks.scales], scale, data)
    if (minimum := minimum_of(kind)) is not None:
        write_numbers(minimum.codes[blocks.minima], minimum, data)
    if (table := table_of(kind)) is not None:
        write_numbers(blocks.tables, table, data)
    return errors


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
        values = kind.dequantize(moved, coded.decoded.shape[1], threads=1, products=True)
        change = (values - coded.decoded)[:, first] / divisor
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
    return jit.readonly(np.tile(ratios, LANES // len(ratios))[None]), jit.readonly(np.zeros((1, LANES), np.int64))


@kernel
def choose(
    x: np.ndarray, e: np.ndarray, codes: np.ndarray, rungs: Rungs, blocks: SubBlocks, factors: np.ndarray
) -> np.ndarray:
    """Choose scales, minima and tables of `blocks` and codes uint8[rows, n] of x float32[rows, n].

    e float32[padded rows, padded n] becomes the error. Sub-blocks whose elements are all the same stay as they are.
    Returns e^T H e of each row, float64[rows].
    """
    rows, n = codes.shape
    size = blocks.size
    r, total = np.empty((len(e), PANEL), np.float32), np.zeros(rows, np.float64)
    numbers, product = np.zeros((5, LANES), np.float32), np.empty(PANEL, np.float32)
    errors = np.empty((LANES // 32, PANEL, 32), np.float32)
    tried = Candidates(numbers[0], numbers[1], numbers[2], numbers[3], numbers[4], errors)
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
                    _set_candidates(blocks, rungs, row, s, tried)
                    best = _weigh(own[0], r[row, at:], a[at:, at:], rungs, tried)
                    _take(blocks, row, s, tried, best)
                    _take_codes(own, rungs, tried, best)
                    total[row] += tried.sums[best]
                    _feed_back(own[1], a[at:], r[row], product)
                else:
                    for j in range(size):
                        d = own[1][j] + r[row, at + j]
                        total[row] += d * d * a[at + j, at + j]
                        _feed_back(own[1][j : j + 1], a[at + j :], r[row], product)
    return total


@subkernel
def _set_candidates(blocks: SubBlocks, rungs: Rungs, row: int, s: int, tried: Candidates) -> None:
    """Everything but the sums and errors of the candidates."""
    place, table = blocks.scales[row, s], blocks.tables[row, s]
    if len(blocks.tried) > 1:
        for lane in range(LANES):
            tried.scale[lane] = blocks.tried[place, lane]
    else:
        own, factor = blocks.scale_values[place], blocks.scale_values[-1] / _LARGEST_HALF
        for lane in range(LANES):
            scale = _to_half(own * blocks.tried[0, lane], factor)
            tried.scale[lane] = scale if scale != 0 else own
    step, offset = blocks.step[row, s], blocks.offset[row, s]
    for half in range(2):
        base = blocks.base[row, s] + (blocks.shift[row, s] if half != table else np.float32(0))
        for lane in range(half * LANES // 2, (half + 1) * LANES // 2):
            tried.low[lane] = tried.scale[lane] * base + offset
            tried.unit[lane] = tried.scale[lane] * step
    if blocks.has_minima:
        _set_minima(blocks, rungs, row, s, tried)


@subkernel
def _to_half(number: np.float32, factor: np.float32) -> np.float32:
    """The nearest number that is a finite float16 times `factor`."""
    half = min(max(number / factor, -_LARGEST_HALF), _LARGEST_HALF)
    return np.float32(half_to_float(float_to_half(half)) * factor)


@subkernel
def _set_minima(blocks: SubBlocks, rungs: Rungs, row: int, s: int, tried: Candidates) -> None:
    """The minimum with which the middle of a candidate's values is its shift of steps from where it was."""
    values, per_minimum = blocks.minimum_values, blocks.per_minimum[row, s]
    old, own = values[blocks.minima[row, s]], tried.unit[0]
    middle = (np.float32(0.5) + blocks.base[row, s] / blocks.step[row, s]) / per_minimum
    per_shift, last = rungs.gap * own / per_minimum, np.float32(len(values) - 1)
    gap = values[-1] / last
    for lane in range(LANES):
        tried.minimum[lane] = old + blocks.shifts[lane] * per_shift - (tried.unit[lane] - own) * middle
    if len(values) > _FEW:
        for lane in range(LANES):
            tried.minimum[lane] = _to_half(tried.minimum[lane], values[-1] / _LARGEST_HALF)
    else:
        for lane in range(LANES):
            place = np.rint(tried.minimum[lane] / gap)
            tried.minimum[lane] = min(max(place, np.float32(0)), last) * gap
    for lane in range(LANES):
        tried.low[lane] += tried.minimum[lane] * per_minimum


@subkernel
def _weigh(x: np.ndarray, fed: np.ndarray, a: np.ndarray, rungs: Rungs, tried: Candidates) -> int:
    """Sums and errors of the candidates. Returns the lane of the best one."""
    if rungs.gap > 0:
        best = weigh_candidates(
            x.ctypes.data, fed.ctypes.data, a.ctypes.data, len(x), tried.low.ctypes.data, tried.unit.ctypes.data,
            rungs.values.ctypes.data, rungs.middles.ctypes.data, len(rungs.middles), rungs.first, rungs.gap,
            tried.sums.ctypes.data, tried.errors.ctypes.data, 1,
        )  # fmt: skip
    else:
        best = weigh_candidates(
            x.ctypes.data, fed.ctypes.data, a.ctypes.data, len(x), tried.low.ctypes.data, tried.unit.ctypes.data,
            rungs.values.ctypes.data, rungs.middles.ctypes.data, len(rungs.middles), rungs.first, rungs.gap,
            tried.sums.ctypes.data, tried.errors.ctypes.data, 0,
        )  # fmt: skip
    return int(best)


@simd_intrinsic("float32")
def weigh_candidates(
    ir: IrBuilder, x: Value, fed: Value, a: Value, size: Value, lows: Value, units: Value, rungs: Value, middles: Value,
    last: Value, first: float, gap: float, sums: Value, errors: Value, even: int,
) -> Value:  # fmt: skip
    """sums = sum over j < `size` of a[j, j] d_j^2, and errors e_j, of each candidate.

    lows, units, sums float32[LANES]; x, fed float32[size], a multiple of _TOGETHER; a float32[size, PANEL]: the
    factors, D on the diagonal; rungs float32[last + 1], middles float32[last]; `even`: rungs are first + k gap; errors
    float32[LANES / 32, PANEL, 32]

    Returns the first lane of the smallest sum.

    Two vectors of candidates and _TOGETHER columns at a time stay in registers. Until a column comes, its place in
    `errors` holds what has been fed back to it.
    """
    two, columns, found_sums = range(2), range(_TOGETHER), []
    for lane in range(0, 4 * LANES, 128):
        low = [ir.load(_FLOATS, lows + (lane + 64 * v)) for v in two]
        unit = [ir.load(_FLOATS, units + (lane + 64 * v)) for v in two]
        if even:
            low = [low[v] + unit[v] * ir.splat(first, 16) for v in two]  # type: ignore[arg-type]
            unit = [unit[v] * ir.splat(gap, 16) for v in two]  # type: ignore[arg-type]
        inverse = [ir.splat(ir.constant(F32, 1.0), 16) / unit[v] for v in two]
        totals = [ir.variable(ir.zero(_FLOATS)) for _ in two]
        fed_back = errors + lane * PANEL
        with ir.loop(0, size) as j:
            for v in two:
                ir.store(ir.splat(ir.load(F32, fed + j * 4), 16), fed_back + (j * 128 + 64 * v))
        with ir.loop(0, size, _TOGETHER) as j:
            already = [[ir.load(_FLOATS, fed_back + (j * 128 + 128 * c + 64 * v)) for v in two] for c in columns]
            own = []
            for c in columns:
                row = a + (j + c) * (4 * PANEL) + j * 4
                targets = [ir.splat(ir.load(F32, x + j * 4 + 4 * c), 16) - already[c][v] for v in two]
                places = [(targets[v] - low[v]) * inverse[v] for v in two]
                found = _even_rungs(ir, places, last) if even else _uneven_rungs(ir, places, rungs, middles, last)
                apart = [low[v] + unit[v] * found[v] - targets[v] for v in two]
                weight = ir.splat(ir.load(F32, row + 4 * c), 16)
                for v in two:
                    totals[v].set(ir.fma(apart[v] * apart[v], weight, totals[v].get()))
                own.append([apart[v] - already[c][v] for v in two])
                for v in two:
                    ir.store(own[c][v], fed_back + (j * 128 + 128 * c + 64 * v))
                for later in columns[c + 1 :]:
                    factor = ir.splat(ir.load(F32, row + 4 * later), 16)
                    already[later] = [ir.fma(own[c][v], factor, already[later][v]) for v in two]
            with ir.loop(j + _TOGETHER, size) as i:
                later_ones = [ir.load(_FLOATS, fed_back + (i * 128 + 64 * v)) for v in two]
                for c in columns:
                    factor = ir.splat(ir.load(F32, a + (j + c) * (4 * PANEL) + i * 4), 16)
                    later_ones = [ir.fma(own[c][v], factor, later_ones[v]) for v in two]
                for v in two:
                    ir.store(later_ones[v], fed_back + (i * 128 + 64 * v))
        for v in two:
            ir.store(totals[v].get(), sums + (lane + 64 * v))
            found_sums.append(totals[v].get())
    least = ir.smallest(functools.reduce(ir.min, found_sums))
    best = ir.splat(ir.constant(F32, LANES - 1), 16)
    for v, total in reversed(list(enumerate(found_sums))):
        lanes = ir.constant(_FLOATS, [float(16 * v + k) for k in range(16)])
        best = ir.choose(ir.less(ir.splat(least, 16), total), best, lanes)
    return ir.smallest(best)


def _even_rungs(ir: IrBuilder, places: list[Value], last: Value) -> list[Value]:
    """The rungs nearest to vectors of places, for rungs 0 to `last`."""
    most = ir.splat(last.real(), 16)
    return [ir.nearest(ir.max(ir.min(place, most), ir.zero(_FLOATS))).real() for place in places]


def _uneven_rungs(ir: IrBuilder, places: list[Value], rungs: Value, middles: Value, last: Value) -> list[Value]:
    """The rungs nearest to vectors of places; rungs float32[last + 1], middles float32[last]."""
    found = [ir.variable(ir.splat(ir.load(F32, rungs), 16)) for _ in places]
    with ir.loop(0, last) as k:
        middle, rung = (ir.splat(ir.load(F32, address + k * 4), 16) for address in (middles, rungs + 4))
        for place, value in zip(places, found):
            value.set(ir.choose(ir.less(middle, place), rung, value.get()))
    return [value.get() for value in found]


@subkernel
def _take(blocks: SubBlocks, row: int, s: int, tried: Candidates, best: int) -> None:
    """Make a candidate the scale, minimum and table of the sub-block."""
    place = blocks.scales[row, s]
    if blocks.has_tables and best >= LANES // 2:
        blocks.tables[row, s] ^= 1
    if len(blocks.tried) > 1:
        blocks.scales[row, s] = blocks.tried_places[place, best]
    else:
        blocks.scales[row, s] = _nearest(blocks.scale_values, place, tried.scale[best])
    if blocks.has_minima:
        blocks.minima[row, s] = _nearest(blocks.minimum_values, blocks.minima[row, s], tried.minimum[best])


@subkernel
def _nearest(values: np.ndarray, start: int, target: np.float32) -> int:
    """The place of the value nearest to `target` in float32[n], rising, searched for from a place near it."""
    at = min(first_place(values, start, target), len(values) - 1)
    return at - 1 if at > 0 and target - values[at - 1] <= values[at] - target else at


@subkernel
def _take_codes(own: tuple[np.ndarray, np.ndarray, np.ndarray], rungs: Rungs, tried: Candidates, best: int) -> None:
    """Make the errors of a candidate those of the sub-block, and its codes what gives them; own: x, e and codes."""
    x, e, codes = own
    low, unit, errors = tried.low[best], tried.unit[best], tried.errors[best // 32, :, best % 32]
    last, first, gap = np.float32(len(rungs.middles)), rungs.first, rungs.gap
    for j in range(len(x)):
        e[j] = errors[j]
        place = (x[j] + e[j] - low) / unit
        if gap > 0:
            place = (place - first) / gap
            k = int(np.rint(min(place, last))) if place > 0 else 0  # NaN, too: such rows stay as they were
        else:
            k = 0
            for middle in rungs.middles:
                k += 1 if middle < place else 0
        codes[j] = rungs.codes[k]


@subkernel
def _feed_back(e: np.ndarray, a: np.ndarray, fed: np.ndarray, product: np.ndarray) -> None:
    """Feed errors of some columns back to those behind them; fed, product (work space) float32[PANEL].

    What it adds to the columns themselves is not read any more.
    """
    combine(e.ctypes.data, a.ctypes.data, len(e), product.ctypes.data)
    for k in range(PANEL):
        fed[k] += product[k]
