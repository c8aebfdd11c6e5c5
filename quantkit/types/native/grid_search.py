"""The search of the grid types (`types/families/grid_type.py`): super-scale, multipliers, grid points and signs.

    minimise  sum over the block of  w (x - y)^2        y = s * magnitude * sign,  s = d * m / divisor

A block of 256 has the super-scale d; each sub-block has the multiplier m; each group of 4 or 8 elements has a grid
point (its magnitudes) and signs. With the signs of x, a group's error under scale s is

    sum w x^2 - s (2 P - s R)        P = sum w |x| g,  R = sum w g^2        over its magnitudes g

A sign that is wrong because parity forces it lowers P by 2 w |x| g. So P and R are stored for a point. They give its
error under every scale, called a *line*. The least error of a sub-block under a scale is the envelope of its lines.

The plain search computes s (s R - 2 P) of every grid point and takes the least. `nearest` does that for 16 groups at
once, one per SIMD lane, each under its own scale. The cost of a point is the sum of the costs of its coordinates. So
`_half_costs` makes the costs of all 81 halves of points, and `_scan` adds two halves for each point. Where a sign must
flip, a half has a second cost, that of its cheapest flip, and the flip is in one half or the other; so point and flip
are chosen together. The low byte of the mantissa of a second half's cost holds the code of the half, so that the
minimum also contains which half it was. That rounds the cost by less than 2^-15 of itself.

A block (`_search_block`):
1. Lines of every sub-block for a few scales between those that its mean square and its largest element suggest.
2. The super-scale, of a grid rounded to what a half holds, whose best multipliers on these lines leave the least error.
3. The nearest points under these scales, which are new lines; back to 2 with a finer grid around the last super-scale.
The errors in 2 are those of known points, so every round can only improve (apart from the rounding above).

iq3_xxs shares one parity between two groups of four: both are searched with and without a flip. Effort "fast" ignores
parity in step 1.
"""

from __future__ import annotations

import numpy as np

from quantkit.codegen.half import float_to_half
from quantkit.codegen.jit import kernel, subkernel
from quantkit.codegen.simd import F32, I32, I64, IrBuilder, Value, simd_intrinsic, vector
from quantkit.types.base import FAST
from quantkit.types.families.grid_points import VALUES
from quantkit.types.families.superblock import load_block, relative_importance, storable

_LANES = 16
_F, _I = vector(_LANES, F32), vector(_LANES, I32)
_ROW = 64  # bytes of 16 lanes
_TABLE = 3 * _ROW  # bytes of P, R and F of one value of a coordinate
_CHUNK = 4  # second halves in a row of Grid.halves
_SPACE = 4 * VALUES * VALUES * _LANES  # float32 of scratch: costs of two halves, without and with a flip
_LARGE = np.float32(1e30)
# rules for signs: as they come; even in each group; even in each two groups
_ANY_SIGNS, _EVEN_IN_GROUPS, _EVEN_IN_PAIRS = range(3)

# ------------------------------------------------------------------------------------------------------- in SIMD lanes


def _splat(ir, address):
    return ir.splat(ir.load(F32, address), _LANES)


def _less(ir, a, b):
    return Value(ir, ir.builder.fcmp_ordered("<", a.ir, b.ir))


@simd_intrinsic("void")
def tabulate(ir, elements, levels, tables):
    """P, R and F of each value of four coordinates, from w |x|, w and what a flip costs of two elements each.

    F is the least of (cost of a flip) * magnitude.
    """
    with ir.loop(0, 4) as c, ir.loop(0, VALUES) as v:
        total = []
        for j in range(2):
            level = _splat(ir, levels + v * 8 + 4 * j)
            wx, w, flip = (ir.load(_F, elements + c * (6 * _ROW) + (3 * j + i) * _ROW) for i in range(3))
            total.append((wx * level, w * (level * level), flip * level))
        address = tables + (c * VALUES + v) * _TABLE
        ir.store(total[0][0] + total[1][0], address)
        ir.store(total[0][1] + total[1][1], address + _ROW)
        ir.store(ir.min(total[0][2], total[1][2]), address + 2 * _ROW)


def _cost(ir, flips, address, scale, odd):
    """Cost s (s R - 2 P) of a value of a coordinate; with `flips` also what its cheapest flip adds."""
    doubled = scale + scale
    cost = scale * (scale * ir.load(_F, address + _ROW)) - doubled * ir.load(_F, address)
    return [cost, (doubled + doubled) * odd * ir.load(_F, address + 2 * _ROW)] if flips else [cost]


def _half_costs(ir, flips, tables, half, scale, odd, out):
    """Costs of all rows of a half, and those with a flip; those of second halves carry their codes."""
    tables = tables + 2 * half * VALUES * _TABLE
    second_costs = [_cost(ir, flips, tables + (VALUES + b) * _TABLE, scale, odd) for b in range(VALUES)]
    stride = len(second_costs[0]) * _ROW
    with ir.loop(0, VALUES) as a:
        first_cost = _cost(ir, flips, tables + a * _TABLE, scale, odd)
        code = ir.splat((a << 4).narrow(I32), _LANES)
        address = out + a * (VALUES * stride)
        for b, second_cost in enumerate(second_costs):
            costs = [first_cost[0] + second_cost[0]]
            if flips:
                costs.append(costs[0] + ir.min(first_cost[1], second_cost[1]))
            for i, cost in enumerate(costs):
                keyed = ((cost.view(_I) & ~0xFF) | (code | b)).view(_F) if half else cost
                ir.store(keyed, address + (b * stride + i * _ROW))


class _RunningMinimum:
    """The least cost so far in each lane, and the codes of its point."""

    def __init__(self, ir):
        self.ir, self.cost = ir, ir.variable(ir.constant(_F, float(_LARGE)))
        self.key, self.first = ir.variable(ir.zero(_F)), ir.variable(ir.zero(_I))

    def offer(self, cost, key, first):
        better = _less(self.ir, cost, self.cost.get())
        for best, new in ((self.cost, cost), (self.key, key), (self.first, first)):
            best.set(self.ir.choose(better, new, best.get()))

    def code(self):
        return (self.first.get() << 8) | (self.key.get().view(_I) & 0xFF)


def _scan(ir, rule, first, second, halves, chunks):
    """The codes, 256 * first + second, of the points of least cost; for _EVEN_IN_PAIRS without and with a flip."""
    stride = _ROW if rule == _ANY_SIGNS else 2 * _ROW
    best, flipped = _RunningMinimum(ir), _RunningMinimum(ir) if rule == _EVEN_IN_PAIRS else None
    with ir.loop(0, chunks) as i:
        chunk = halves + i * (4 * (2 + _CHUNK))
        rows = [ir.load(I32, chunk + 8 + 4 * k).signed(I64) * stride + second for k in range(_CHUNK)]
        first_row = ir.load(I32, chunk).signed(I64) * stride + first
        code = ir.splat(ir.load(I32, chunk + 4), _LANES)

        def minimum(offset, rows=rows):
            m = [ir.load(_F, row + offset) for row in rows]
            while len(m) > 1:
                m = [ir.min(a, b) for a, b in zip(m[::2], m[1::2])]
            return m[0]

        plain = minimum(0)
        if rule != _EVEN_IN_GROUPS:
            best.offer(ir.load(_F, first_row) + plain, plain, code)
        if rule != _ANY_SIGNS:
            flip_in_first, flipped_second = ir.load(_F, first_row + _ROW) + plain, minimum(_ROW)
            flip_in_second = ir.load(_F, first_row) + flipped_second
            where = _less(ir, flip_in_second, flip_in_first)
            (flipped or best).offer(
                ir.min(flip_in_first, flip_in_second), ir.choose(where, flipped_second, plain), code
            )
    return best.code(), flipped.code() if flipped else None


def _values(ir, code, tables):
    """P, R and F of each coordinate of points."""
    coordinates = []
    for c in range(4):
        digit = (code >> (12 - 4 * c)) & 15
        each = [ir.load(_F, tables + c * VALUES * _TABLE + i * _ROW) for i in range(3)]
        for v in range(1, VALUES):
            matches = Value(ir, ir.builder.icmp_signed("==", digit.ir, ir.constant(_I, v).ir))
            address = tables + (c * VALUES + v) * _TABLE
            each = [ir.choose(matches, ir.load(_F, address + i * _ROW), value) for i, value in enumerate(each)]
        coordinates.append(each)
    return coordinates


def _sums(ir, code, tables, wrong=None):
    """P and R of points, P lowered by the cheapest flip where `wrong` is 1."""
    each = _values(ir, code, tables)
    p, r = ((each[0][i] + each[1][i]) + (each[2][i] + each[3][i]) for i in range(2))
    if wrong:
        p = p - (wrong + wrong) * ir.min(ir.min(each[0][2], each[1][2]), ir.min(each[2][2], each[3][2]))
    return p, r


def _flip_of_pair(ir, odd, without, flipped):
    """Where of two neighbouring lanes that are odd this one has the flip, costing less there."""
    loss = flipped - without
    other_loss = ir.shuffle(loss, None, [lane ^ 1 for lane in range(_LANES)])
    even = ir.constant(_I, [1 - lane % 2 for lane in range(_LANES)])
    less, equal = _less(ir, loss, other_loss).ir, ir.builder.fcmp_ordered("==", loss.ir, other_loss.ir)
    first = ir.builder.and_(equal, ir.builder.icmp_signed("==", even.ir, ir.constant(_I, 1).ir))
    is_odd = _less(ir, ir.zero(_F), odd).ir
    return Value(ir, ir.builder.and_(is_odd, ir.builder.or_(less, first)))


@simd_intrinsic("void")
def nearest(
    ir: IrBuilder,
    rule: int,
    tables: Value,
    scales: Value,
    odd: Value,
    halves: Value,
    chunks: Value,
    space: Value,
    out: Value,
) -> None:
    """Find the nearest points of 16 groups under scales float32[16].

    `out` gets their codes int32[16], then P, R and whether a sign is wrong, float32[16]. `rule` is which points need
    an even number of signs, and `odd` is 1 where the number of negative elements is odd.
    """
    scale = ir.load(_F, scales)
    second = space + VALUES * VALUES * 2 * _ROW
    wrong = {_ANY_SIGNS: ir.zero(_F), _EVEN_IN_GROUPS: ir.load(_F, odd), _EVEN_IN_PAIRS: ir.constant(_F, 1.0)}[rule]
    _half_costs(ir, rule != _ANY_SIGNS, tables, 0, scale, wrong, space)
    _half_costs(ir, rule != _ANY_SIGNS, tables, 1, scale, wrong, second)
    code, flipped = _scan(ir, rule, space, second, halves, chunks)
    p, r = _sums(ir, code, tables, wrong if rule == _EVEN_IN_GROUPS else None)
    if rule == _EVEN_IN_PAIRS:
        p_flipped, r_flipped = _sums(ir, flipped, tables, wrong)
        costs = [scale * (scale * b - (a + a)) for a, b in ((p, r), (p_flipped, r_flipped))]
        takes_flip = _flip_of_pair(ir, ir.load(_F, odd), *costs)
        code, p, r = (ir.choose(takes_flip, a, b) for a, b in ((flipped, code), (p_flipped, p), (r_flipped, r)))
        wrong = ir.choose(takes_flip, wrong, ir.zero(_F))
    for i, values in enumerate((code, p, r, wrong)):
        ir.store(values, out + i * _ROW)


# ---------------------------------------------------------------------------------------------------------- the search

# By effort, for groups of 8 and of 4, whose many levels make error jump more from scale to scale:
_COARSE = ((3, 4, 8), (4, 5, 8))  # scales of step 1,
_FINE = ((0, 0, 4), (0, 4, 8))  # then so many around the best of them,
_SPACING = (0.0, 0.06, 0.03)  # so far apart,
_ROUNDS = (1, 2, 4)  # rounds of steps 2 and 3
_MAX_LINES = 24
_LOW, _HIGH = np.float32(0.7), np.float32(1.1)  # step 1 ends at these multiples of the smaller and larger guess
_SPREAD = np.float32(0.5)  # a guess: the root mean square of a sub-block is this much of the largest magnitude
_DS = 32  # super-scales looked at in step 2,
_FIRST, _LAST = np.float32(0.8), np.float32(1.3)  # first of these multiples of (largest scale) / 31,
_LAST_SPREAD = np.float32(0.06)  # then this much around the last one
_MIN_SCALE = np.float32(0.004)  # the least scale of step 1, of the block's largest: what vanishes beside the block
_ROUND = np.float32(3 << 22)  # adding and subtracting it rounds |t| < 2^22 to an integer


@subkernel
def _to_lanes(xs, w, rule, elements, odd):
    """Transpose a block into lanes: w |x|, w and flip costs by set of 16 groups and coordinate; which lanes are odd."""
    length = 256 // (len(elements) * _LANES)
    for g in range(256 // length):
        lane = g % _LANES
        rows = elements[g // _LANES]
        negative = 0
        for j in range(length):
            i = g * length + j
            magnitude = abs(xs[i])
            negative += xs[i] < np.float32(0)
            c, row = (j // 2, 3 * (j % 2)) if length == 8 else (j, 0)
            rows[c, row, lane] = w[i] * magnitude
            rows[c, row + 1, lane] = w[i]
            rows[c, row + 2, lane] = w[i] * magnitude
            if length == 4:
                rows[c, 3, lane] = rows[c, 4, lane] = np.float32(0)
                rows[c, 5, lane] = _LARGE
        odd[g] = np.float32(negative % 2)
    if rule == _EVEN_IN_PAIRS:
        for g in range(0, 64, 2):
            odd[g] = odd[g + 1] = np.float32(odd[g] != odd[g + 1])


@subkernel
def _scale_range(xs, w, max_level, low, high):
    """Lowest and highest inverse scale of step 1 for every sub-block."""
    count = len(low)
    length = 256 // count
    largest = np.float32(0)
    for i in range(256):
        largest = max(largest, abs(xs[i]))
    for s in range(count):
        maximum = squares = weights = np.float32(0)
        for i in range(s * length, s * length + length):
            maximum = max(maximum, abs(xs[i]))
            squares += w[i] * (xs[i] * xs[i])
            weights += w[i]
        by_maximum = max(maximum, largest * _MIN_SCALE) / max_level
        by_mean = max(np.sqrt(squares / weights), largest * _MIN_SCALE) / (max_level * _SPREAD)
        low[s] = np.float32(1) / (_HIGH * max(by_maximum, by_mean))
        high[s] = np.float32(1) / (_LOW * min(by_maximum, by_mean))


@subkernel
def _evaluate(sub_scales, rule, state, halves, p, r):
    """Find the nearest points of all groups, under a scale for each sub-block.

    The points go to `results`, P and R of sub-blocks to p and r.
    """
    elements, tables, odd, scales, space, results = state
    groups = len(odd)
    each = groups // len(sub_scales)
    for g in range(groups):
        scales[g] = sub_scales[g // each]
    halves_at, chunks, space_at = np.int64(halves.ctypes.data), len(halves), np.int64(space.ctypes.data)
    for s in range(len(elements)):
        table_at, scale_at = np.int64(tables[s].ctypes.data), np.int64(scales[s * _LANES :].ctypes.data)
        odd_at, out = np.int64(odd[s * _LANES :].ctypes.data), np.int64(results[s].ctypes.data)
        if rule == _ANY_SIGNS:
            nearest(_ANY_SIGNS, table_at, scale_at, odd_at, halves_at, chunks, space_at, out)
        elif rule == _EVEN_IN_GROUPS:
            nearest(_EVEN_IN_GROUPS, table_at, scale_at, odd_at, halves_at, chunks, space_at, out)
        else:
            nearest(_EVEN_IN_PAIRS, table_at, scale_at, odd_at, halves_at, chunks, space_at, out)
    for s in range(len(sub_scales)):
        sum_p = sum_r = np.float32(0)
        for g in range(s * each, s * each + each):
            sum_p += results[g // _LANES, 1, g % _LANES]
            sum_r += results[g // _LANES, 2, g % _LANES]
        p[s], r[s] = sum_p, sum_r


@kernel(inline="always")
def _multiplier(scale, inverse_step):
    """The odd number of 1 to 31 that is nearest to scale / step."""
    m = min(max((scale * inverse_step - np.float32(1)) * np.float32(0.5), np.float32(0)), np.float32(15))
    return np.float32(2) * ((m + _ROUND) - _ROUND) + np.float32(1)


@subkernel
def _gains(p, r, lines, steps, lanes):
    """lanes[0]: by how much the best lines lower the error under each step = d / divisor."""
    inverse, best, total = lanes[1], lanes[2], lanes[0]
    for i in range(_DS):
        inverse[i] = np.float32(1) / steps[i]
        total[i] = np.float32(0)
    for s in range(p.shape[1]):
        for i in range(_DS):
            best[i] = -_LARGE
        for k in range(lines):
            p_k, r_k = p[k, s], r[k, s]
            scale = p_k / r_k
            for i in range(_DS):
                y = steps[i] * _multiplier(scale, inverse[i])
                gain = y * ((p_k + p_k) - y * r_k)
                best[i] = max(best[i], gain)
        for i in range(_DS):
            total[i] += best[i]


@subkernel
def _choose_scales(p, r, lines, step, sub_scales):
    """The scales of the sub-blocks under a step."""
    for s in range(p.shape[1]):
        best = -_LARGE
        for k in range(lines):
            y = step * _multiplier(p[k, s] / r[k, s], np.float32(1) / step)
            gain = y * ((p[k, s] + p[k, s]) - y * r[k, s])
            if gain > best:
                best, sub_scales[s] = gain, y


@subkernel
def _find_step(p, r, lines, first, last, unit, divisor, lanes):
    """The best of _DS steps from first to last, as halves hold d = step * divisor."""
    steps = lanes[3]
    for i in range(_DS):
        step = first + (last - first) * (np.float32(i) / np.float32(_DS - 1))
        steps[i] = storable(step * divisor, unit) / divisor
    _gains(p, r, lines, steps, lanes)
    best = 0
    for i in range(_DS):
        if lanes[0, i] > lanes[0, best]:
            best = i
    return steps[best]


@subkernel
def _best_scales(p, r, lines, scales):
    """The best scale of each sub-block by its lines, and the largest of them."""
    largest = np.float32(0)
    for s in range(len(scales)):
        best = np.float32(0)
        for k in range(lines):
            if p[k, s] > np.float32(0) and p[k, s] * p[k, s] > best * r[k, s]:
                best, scales[s] = p[k, s] * p[k, s] / r[k, s], p[k, s] / r[k, s]
        if best > np.float32(0):
            largest = max(largest, scales[s])
        else:
            scales[s] = np.float32(0)
    return largest


@subkernel
def _search_block(xs, w, unit, effort, rule, divisor, levels, halves, state, lines, lanes):
    """The step d / divisor of a block; scales of sub-blocks go to lines[2, 0]. 0 where zeros are best."""
    p, r, sub_scales, low, high = lines[0], lines[1], lines[2, 0], lines[2, 1], lines[2, 2]
    elements, tables, odd = state[0], state[1], state[2]
    _to_lanes(xs, w, rule, elements, odd)
    for s in range(len(elements)):
        tabulate(np.int64(elements[s].ctypes.data), np.int64(levels.ctypes.data), np.int64(tables[s].ctypes.data))
    _scale_range(xs, w, levels[VALUES - 1, 0], low, high)
    family = 0 if len(elements) == 2 else 1
    count = _COARSE[family][effort]
    for k in range(count):
        for s in range(len(sub_scales)):
            sub_scales[s] = np.float32(1) / (low[s] + (high[s] - low[s]) * (np.float32(k) / np.float32(count - 1)))
        _evaluate(sub_scales, _ANY_SIGNS if effort == FAST else rule, state, halves, p[k], r[k])
    _best_scales(p, r, count, low)
    for k in range(_FINE[family][effort]):
        shift = np.float32((k // 2 + 1) * (2 * (k % 2) - 1) * _SPACING[effort])
        for s in range(len(sub_scales)):
            sub_scales[s] = low[s] * (np.float32(1) + shift)
        _evaluate(sub_scales, rule, state, halves, p[count + k], r[count + k])
    count += _FINE[family][effort]
    largest = _best_scales(p, r, count, low)
    first, last = largest / np.float32(31) * _FIRST, largest / np.float32(31) * _LAST
    step = np.float32(0)
    for k in range(count, count + _ROUNDS[effort]):
        step = _find_step(p, r, k, first, last, unit, divisor, lanes)
        _choose_scales(p, r, k, step, sub_scales)
        _evaluate(sub_scales, rule, state, halves, p[k], r[k])
        first, last = step * (np.float32(1) - _LAST_SPREAD), step * (np.float32(1) + _LAST_SPREAD)
    gain = np.float32(0)
    k = count + _ROUNDS[effort] - 1
    for s in range(len(sub_scales)):
        gain += sub_scales[s] * ((p[k, s] + p[k, s]) - sub_scales[s] * r[k, s])
    return step if gain > np.float32(0) else np.float32(0)


# ----------------------------------------------------------------------------------------------- fields of the block


@subkernel
def _cheapest_flip(w, xs, levels, code, first, length):
    """The element, of `length` from `first` on, whose sign is cheapest to get wrong at the point `code`."""
    least_cost, choice = np.float32(np.inf), 0
    for j in range(length):
        c = j // 2 if length == 8 else j
        magnitude = levels[(code >> (12 - 4 * c)) & 15, j % 2 if length == 8 else 0]
        cost = w[first + j] * abs(xs[first + j]) * magnitude
        if cost < least_cost:
            least_cost, choice = cost, j
    return first + choice


@subkernel
def _write_fields(xs, w, step, levels, numbers, state, sub_scales, multipliers, points, signs):
    """Write the fields of a block from the results of `_search_block`."""
    results = state[5]
    codes = results.view(np.int32)
    length = 256 // len(points)
    for s in range(len(sub_scales)):
        multipliers[s] = np.uint8(np.int64(_multiplier(sub_scales[s], np.float32(1) / step)) // 2)
    for i in range(32):
        bits = 0
        for j in range(8):
            bits |= (xs[8 * i + j] < np.float32(0)) << j
        signs[i] = np.uint8(bits)
    for g in range(len(points)):
        code = np.int64(codes[g // _LANES, 0, g % _LANES])
        number = np.int64(0)
        for c in range(4):
            number = number * VALUES + ((code >> (12 - 4 * c)) & 15)
        points[g] = numbers[number]
        if results[g // _LANES, 3, g % _LANES] > np.float32(0):
            element = _cheapest_flip(w, xs, levels, code, g * length, length)
            signs[element // 8] ^= np.uint8(1 << (element % 8))


@subkernel
def _workspace(sets):
    """Scratch arrays of a search, each aligned to a cache line."""
    sizes = (
        sets * 4 * 6 * _LANES,
        sets * 4 * VALUES * 3 * _LANES,
        sets * _LANES,
        sets * _LANES,
        _SPACE,
        sets * 4 * _LANES,
    )
    total = 16
    for size in sizes:
        total += size
    memory = np.empty(total, np.float32)
    a = (-np.int64(memory.ctypes.data) % 64) // 4
    b = a + sizes[0]
    c = b + sizes[1]
    d = c + sizes[2]
    e = d + sizes[3]
    f = e + sizes[4]
    return (
        memory[a:b].reshape((sets, 4, 6, _LANES)),
        memory[b:c].reshape((sets, 4 * VALUES * 3 * _LANES)),
        memory[c:d],
        memory[d:e],
        memory[e:f],
        memory[f : f + sizes[5]].reshape((sets, 4, _LANES)),
    )


@kernel
def search(
    x, importance, effort, levels, halves, numbers, divisor, even, variance_weight, scales, multipliers, points, signs
):
    """Fill the fields of the blocks of x float32[rows, n], as `GridType._pack` takes them."""
    n = x.shape[1]
    flat = x.reshape(-1)
    sets, subs = points.shape[1] // _LANES, multipliers.shape[1]
    rule = _ANY_SIGNS
    if even:
        rule = _EVEN_IN_GROUPS if points.shape[1] == 32 else _EVEN_IN_PAIRS
    state = _workspace(sets)
    xs, w = np.empty(256, np.float32), np.empty(256, np.float32)
    lines, lanes = np.empty((3, _MAX_LINES, subs), np.float32), np.empty((4, _DS), np.float32)
    for b in range(len(scales)):
        scales[b] = np.uint16(0)
        multipliers[b], points[b], signs[b] = np.uint8(0), np.uint16(0), np.uint8(0)
        unit, mean = load_block(flat[256 * b : 256 * b + 256], xs, np.float32(2.0**-25))
        if unit == np.float32(0):
            continue
        if not relative_importance(importance, 256 * b % n, w):
            for i in range(256):
                w[i] = variance_weight * mean + xs[i] * xs[i]
        step = _search_block(xs, w, unit, effort, rule, np.float32(divisor), levels, halves, state, lines, lanes)
        if step > np.float32(0):
            scales[b] = float_to_half(step * np.float32(divisor) * unit)
            _write_fields(xs, w, step, levels, numbers, state, lines[2, 0], multipliers[b], points[b], signs[b])
