"""Moving a few groups of encoded trellis rows so that their errors vanish where inputs are large.

`types/nudge.py` says why, and does it for types whose elements have codes of their own. With e = y - x and the rows of
V, float32[k, n], orthonormal, it lowers

    J = sum w e^2 + t (sum w / k) |V e|^2

in sweeps of rising t, so that the cheap changes go first. Scales, multipliers and tables stay; a group may take another
point. Those near to x are looked for once (`emitted/trellis.py`) and listed, with what they add to both sums:

    cost = sum w e^2,  along = V_g e in R^k        so that   J = cost + t (sum w / k) |rest + along|^2

`rest` being V e of all other groups. A sweep then takes the best of each list: no sweep looks again, and none needs to
know where a point that serves V would be, as the list has all that cost little. Where signs lie beside magnitudes, a
point is listed once more for each sign whose turning costs no more than the farthest point listed.

What was encoded is first in its list, and a row is only changed if J at the last t falls, summed anew in float64.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from quantkit.jit import kernel, part
from quantkit.simd import F32, Emit, Value, emitted, load_float, load_int, vector
from quantkit.types.emitted.trellis import (
    address,
    ask_centroids,
    find,
    look,
    round_weights,
    row_of,
    scratch_for,
    space_of,
)
from quantkit.types.emitted.trellis_lanes import at_least, lowest, ranked, score
from quantkit.types.nudge import STRENGTHS
from quantkit.types.superblock import LEAST_WEIGHT, power_below
from quantkit.types.trellis import Kind

_LISTED = 16  # points of a group at most, what was encoded included: they are the lanes of a vector
_LOOK = 6  # rank of the clusters or boxes looked into: with 10, and 64 points listed, J is 0.2 % less, time twice that
_RANK = 6  # of the points listed: about 7, more with signs turned
_LEAST, _MOST = np.float32(1e-30), np.float32(1e30)  # scales beyond, in units of the row, are left alone

_F = vector(16, F32)
_ROW = 64  # bytes of 16 float32


class Lists(NamedTuple):
    """Points that each group of a row may take."""

    counts: np.ndarray  # int64[groups]
    numbers: np.ndarray  # uint16[groups, _LISTED]
    turned: np.ndarray  # uint8[groups, _LISTED]: bit j: element j has the other sign than x
    costs: np.ndarray  # float32[groups, _LISTED]: infinite beyond `counts`
    along: np.ndarray  # float32[groups, k, _LISTED]
    squares: np.ndarray  # float32[groups, _LISTED] of `along`
    choice: np.ndarray  # int64[groups]


@part
def _value(kind, scale, v, turned, j):
    """Element j of a point, of the sign it has beside that of x where values are folded."""
    if kind.folded:
        y = scale * np.float32(abs(v))
        return -y if turned >> j & 1 else y
    return scale * np.float32(v)


@part
def _gather(kind, space, row, g, scale, chunks, least, names, values, numbers, turned):
    """List points that gain `least`, behind the first; how many the list has then, _LISTED + 1 if it is too short."""
    count, run, first_of = 1, space.runs, kind.group * g
    for first in range(0, 16 * chunks, 64):
        mask = at_least(space.scores + 4 * first, least)
        while mask != 0:
            place = first + lowest(mask)
            mask &= mask - 1
            if place >= 16 * chunks:  # chunks are scored four at a time
                break
            while load_int(run + 24) * 16 <= place:
                run += 16
            begin, inside = 16 * load_int(run), place - 16 * load_int(run + 8)
            number = names[begin + inside]
            if inside > 0 and number == names[begin]:  # clusters are filled up with copies of their first point
                continue
            if count >= _LISTED:
                return _LISTED + 1
            numbers[count], turned[count] = number, np.uint8(0)
            count += 1
            if kind.folded:
                spare = load_float(space.scores + 4 * place) - least
                for j in range(kind.group):
                    i = first_of + j
                    y = scale * np.float32(abs(values[number, j]))
                    if np.float32(4) * row.w[i] * (row.x[i] * y) <= spare:
                        if count >= _LISTED:
                            return _LISTED + 1
                        numbers[count], turned[count] = number, np.uint8(1 << j)
                        count += 1
    return count


@part
def _find_near(kind, space, row, g, table, scale, names, values, numbers, turned):
    """List the points near to group g of a row; how many are listed."""
    chunks = look(kind, space, row, g, table, scale, _LOOK)
    fours = (chunks + 3) // 4 * 4  # what is scored beyond is not looked at
    score(space.a, space.b, fours, scale * row.by[g, 1], scale * scale * row.by[g, 0], 1, space.scores)
    rank = _RANK
    while True:  # with fewer where the best stand in many lanes, or many signs may turn
        least = ranked(space.scores, chunks, rank)
        count = _gather(kind, space, row, g, scale, chunks, least, names[table], values[table], numbers, turned)
        rank //= 2
        if count <= _LISTED or rank == 0:
            return min(count, _LISTED)


@emitted("void")
def _add_lanes(e, errors, w, along, group, count, costs, sums, squares):
    """Of 16 points: costs, V_g e and its squares; errors float32[group, 16], w float32[group], along [group, count]."""
    cost, square, acc = (e.variable(e.zero(_F)) for _ in range(3))
    with e.loop(0, group) as j:
        error = e.load(_F, errors + j * _ROW)
        cost.set(cost.get() + e.splat(e.load(F32, w + j * 4), 16) * (error * error))
    e.store(cost.get(), costs)
    with e.loop(0, count) as q:
        acc.set(e.zero(_F))
        with e.loop(0, group) as j:
            v = e.splat(e.load(F32, along + (j * count + q) * 4), 16)
            acc.set(acc.get() + v * e.load(_F, errors + j * _ROW))
        e.store(acc.get(), sums + q * _ROW)
        square.set(square.get() + acc.get() * acc.get())
    e.store(square.get(), squares)


@emitted("float32")
def _rate_lanes(
    e: Emit, costs: Value, sums: Value, squares: Value, rest: Value, count: Value, lam: float, scores: Value
) -> Value:
    """Store minus J of 16 points, but for what they share, |rest|^2; return the largest."""
    acc = e.variable(e.zero(_F))
    with e.loop(0, count) as q:
        acc.set(acc.get() + e.splat(e.load(F32, rest + q * 4), 16) * e.load(_F, sums + q * _ROW))
    both = acc.get() + acc.get()
    factor = e.splat(lam, 16)  # type: ignore[arg-type]  # `float` tells `emitted` the kind; a Value comes
    rating = e.zero(_F) - (e.load(_F, costs) + factor * (e.load(_F, squares) + both))
    e.store(rating, scores)
    return e.largest(rating)


@part
def _add_up(kind, row, along, g, scale, values, errors, lists):
    """Costs, `along` and its squares of the points listed."""
    count, numbers, turned = lists.counts[g], lists.numbers[g], lists.turned[g]
    first = kind.group * g
    for c in range(count):
        number, turns = numbers[c], turned[c]
        for j in range(kind.group):
            errors[j, c] = _value(kind, scale, values[number, j], turns, j) - row.x[first + j]
    errors[:, count:] = np.float32(0)  # finite sums, so that these lanes cannot hide others
    _add_lanes(
        address(errors), address(row.w) + 4 * first, address(along[first]), kind.group, along.shape[1],
        address(lists.costs[g]), address(lists.along[g]), address(lists.squares[g]),
    )  # fmt: skip
    lists.costs[g, count:] = np.float32(np.inf)


@part
def _sweep(lam, scores, rest, lists):
    """Give each group the best of its list; whether any took another. `rest` is V e before and after."""
    changed, count = False, len(rest)
    for g in range(len(lists.counts)):
        if lists.counts[g] < 2:
            continue
        own = lists.choice[g]
        for q in range(count):
            rest[q] -= lists.along[g, q, own]
        most = _rate_lanes(
            address(lists.costs[g]), address(lists.along[g]), address(lists.squares[g]), address(rest), count, lam,
            address(scores),
        )  # fmt: skip
        if most > scores[own]:
            own = find(address(scores), most)
            lists.choice[g] = own
            changed = True
        for q in range(count):
            rest[q] += lists.along[g, q, own]
    return changed


@part
def _loss(kind, row, along, scales, tables, values, chosen, weights, largest, lists):
    """J at the last t, of what was encoded or what was chosen."""
    error, total, sums = np.float64(0), np.float64(0), np.zeros(along.shape[1], np.float64)
    for i in range(len(row.x)):
        g, s = i // kind.group, i // 32
        c = lists.choice[g] if chosen else 0
        y = _value(kind, scales[s], values[tables[s], lists.numbers[g, c], i % kind.group], lists.turned[g, c],
                   i % kind.group)  # fmt: skip
        e, w = np.float64(y) - np.float64(row.x[i]), np.float64(weights[i] / largest)
        error += w * (e * e)
        total += w
        for q in range(len(sums)):
            sums[q] += along[i, q] * e
    square = np.float64(0)
    for q in range(len(sums)):
        square += sums[q] * sums[q]
    return error + np.float64(STRENGTHS[-1]) * (total / len(sums)) * square


@part
def _lists(groups, count):
    return Lists(
        np.ones(groups, np.int64), np.zeros((groups, _LISTED), np.uint16), np.zeros((groups, _LISTED), np.uint8),
        np.empty((groups, _LISTED), np.float32), np.empty((groups, count, _LISTED), np.float32),
        np.empty((groups, _LISTED), np.float32), np.zeros(groups, np.int64),
    )  # fmt: skip


@kernel
def _nudge(x, weights, directions, kind, index, scratch, signs, d, numbers, multipliers, tables):
    names, values = index[2], index[4]
    rows, n = x.shape
    groups, each, count = n // kind.group, 32 // kind.group, len(directions)
    space, row, lists = space_of(scratch, index), row_of(n, kind.group), _lists(n // kind.group, count)
    along, rest, scales = np.empty((n, count), np.float32), np.empty(count, np.float32), np.empty(n // 32, np.float32)
    errors, scores = np.zeros((kind.group, _LISTED), np.float32), np.full(64, np.float32(-np.inf), np.float32)
    largest, total = weights.max(), np.float64(0)
    for i in range(n):
        row.w[i] = max(weights[i] / largest, np.float32(LEAST_WEIGHT))
        total += row.w[i]
        for q in range(count):
            along[i, q] = directions[q, i]
    for r in range(rows):
        most = np.float32(0)
        for i in range(n):
            most = max(most, abs(x[r, i]))
        unit = power_below(most)
        if unit == np.float32(0) or d[r] == np.float32(0):
            continue
        for i in range(n):
            row.x[i] = x[r, i] / unit
            if kind.folded:  # errors along the directions are those of magnitudes if the directions turn too
                turn = row.x[i] < np.float32(0)
                row.x[i] = abs(row.x[i])
                for q in range(count):
                    along[i, q] = -directions[q, i] if turn else directions[q, i]
        round_weights(kind.group, row)
        lists.choice[:] = 0
        rest[:] = np.float32(0)
        for s in range(n // 32):
            scale = scales[s] = d[r] / unit * np.float32(multipliers[r, s])
            table, sane = tables[r, s], _LEAST < abs(scale) < _MOST
            if sane:
                ask_centroids(kind, space, row, range(each * s, each * s + each))
            for g in range(each * s, each * s + each):
                lists.numbers[g, 0], lists.turned[g, 0], lists.counts[g] = numbers[r, g], np.uint8(0), 1
                if kind.folded:
                    for j in range(kind.group):
                        i = kind.group * g + j
                        turned = (signs[r, i] < np.float32(0)) != (x[r, i] < np.float32(0))
                        lists.turned[g, 0] |= np.uint8(turned << j)
                if sane:
                    lists.counts[g] = _find_near(
                        kind, space, row, g, table, scale, names, values, lists.numbers[g], lists.turned[g]
                    )
                _add_up(kind, row, along, g, scale, values[table], errors, lists)
                for q in range(count):
                    rest[q] += lists.along[g, q, 0]
        changed = False
        for t in STRENGTHS:
            lam = np.float32(np.float64(t) * (total / count))
            changed |= _sweep(lam, scores, rest, lists)
        if not changed:
            continue
        before = _loss(kind, row, along, scales, tables[r], values, False, weights, largest, lists)
        if _loss(kind, row, along, scales, tables[r], values, True, weights, largest, lists) < before:
            for g in range(groups):
                c = lists.choice[g]
                numbers[r, g] = lists.numbers[g, c]
                if kind.folded:
                    for j in range(kind.group):
                        i = kind.group * g + j
                        negative = (lists.turned[g, c] >> j & 1 != 0) != (x[r, i] < np.float32(0))
                        signs[r, i] = np.float32(-1 if negative else 1)


def nudge(
    x: np.ndarray, weights: np.ndarray, directions: np.ndarray, kind: Kind, index: tuple[np.ndarray, ...],
    signs: np.ndarray, d: np.ndarray, numbers: np.ndarray, multipliers: np.ndarray, tables: np.ndarray,
) -> None:  # fmt: skip
    """Change numbers, and signs of folded values, of encoded rows; `emitted/trellis.search` explains the others.

    `signs` float32[rows, n] are negative where values are.
    """
    _nudge(x, weights, directions, kind, index, scratch_for(kind, index), signs, d, numbers, multipliers, tables)
