"""Moving a few codes of encoded rows so that their errors vanish where inputs are large.

An encoder minimises sum w e^2, e = y - x: as if the columns of inputs were independent. Where the axes of a model were
turned they are not: half of what the inputs of a matrix hold may lie along a few directions, which the model's own
weights tell (quantkit/directions.py). With the rows of V, float32[k, n], orthonormal, being such directions, the error
of a product is more nearly

    J = sum w e^2 + t (sum w / k) |V e|^2

Its second part is k numbers a row, and a row has hundreds of codes that stand nearly half way between two values:
moving some two in a hundred of them makes V e vanish and costs one or two percent of sum w e^2.

Each element has one alternative, the value on the other side of x, so a row is a set of toggles: toggle j changes J by
c_j + t (sum w / k) (2 s_j V_j . r + s_j^2 |V_j|^2), r = V e, s_j the step, c_j = w_j (2 e_j s_j + s_j^2); toggled back,
s and c change sign. Those that lower J are taken, in order, in sweeps of rising t, so that the cheap ones go first; at
the last t at once, the first elements of the row would pay for all.

Which alternatives there are says `codes`; both sides are decoded by the type's own decoder. A type whose codes name
several elements overrides `QuantType.nudge_rows` or leaves its rows as they are.
"""

from __future__ import annotations

import numpy as np

from quantkit.jit import kernel
from quantkit.types.base import QuantType
from quantkit.types.codes import codes_of, neighbours, step

STRENGTHS = np.array([0.01, 0.03, 0.1, 0.3], np.float32)  # t of the sweeps


def nudge(kind: QuantType, x: np.ndarray, weights: np.ndarray, directions: np.ndarray, data: np.ndarray) -> None:
    """Lower J of uint8[rows, row bytes], in place.

    x float32[rows, n], directions float32[k, n]; weights float32[n], or float32[0] where all columns are alike.
    """
    codes = codes_of(kind)
    assert codes is not None, f"{kind.name}: asked to move codes of several elements"
    if not weights.any():
        weights = np.ones(x.shape[1], np.float32)
    y, above, below = np.empty((3, *x.shape), np.float32)
    next_data, last_data = data.copy(), data.copy()
    neighbours(data, next_data, last_data, x.shape[1], codes)
    for coded, values in ((data, y), (next_data, above), (last_data, below)):
        kind.decode_rows(coded, values)
    moves = np.empty(x.shape, np.int8)
    settle(x, y, above, below, weights, directions, STRENGTHS, moves)
    step(data, moves, codes)


@kernel
def settle(x, y, above, below, weights, directions, strengths, moves):
    """moves int8[rows, n]: 1 where a row takes the value in `above`, -1 where that in `below`, 0 where that in y."""
    rows, n = x.shape
    errors, steps, costs = np.empty(n, np.float32), np.empty(n, np.float32), np.empty(n, np.float32)
    squares, changes = np.empty(n, np.float32), np.empty(n, np.float32)
    along = np.empty(len(directions), np.float32)
    _squares(directions, squares)
    total = np.float64(0)
    for j in range(n):
        total += weights[j]
    for row in range(rows):
        _toggles(x[row], y[row], above[row], below[row], weights, errors, steps, costs, moves[row])
        _products(directions, errors, along)
        for strength in strengths:
            t = np.float32(strength * total / len(directions))
            _sweep(t, directions, squares, steps, costs, along, changes)
        for j in range(n):
            if (steps[j] < np.float32(0)) != (errors[j] < np.float32(0)):  # it still points to x: it was not taken
                moves[row, j] = 0


@kernel
def _squares(directions, squares):
    """|V_j|^2 of each column."""
    squares[:] = np.float32(0)
    for k in range(len(directions)):
        for j in range(len(squares)):
            squares[j] += directions[k, j] * directions[k, j]


@kernel
def _toggles(x, y, above, below, weights, errors, steps, costs, moves):
    """Errors, and of each element's toggle the move, what it adds to y and what to sum w e^2."""
    for j in range(len(x)):
        e = y[j] - x[j]
        up, down = above[j] - y[j], below[j] - y[j]
        rises = up * e < np.float32(0)
        falls = down * e < np.float32(0)
        s = up if rises else (down if falls else np.float32(0))
        errors[j], steps[j], costs[j] = e, s, weights[j] * (s * (e + e + s))
        moves[j] = np.int8(1) if rises else (np.int8(-1) if falls else np.int8(0))


@kernel
def _products(directions, errors, along):
    """V e; four sums side by side, as each addition waits for the one before it."""
    for k in range(len(along)):
        v = directions[k]
        a = b = c = d = np.float32(0)
        for j in range(0, len(errors), 4):
            a += v[j] * errors[j]
            b += v[j + 1] * errors[j + 1]
            c += v[j + 2] * errors[j + 2]
            d += v[j + 3] * errors[j + 3]
        along[k] = (a + b) + (c + d)


@kernel
def _sweep(t, directions, squares, steps, costs, along, changes):
    """Take in turn the toggles that would lower J as it is before the sweep, if they still do."""
    changes[:] = np.float32(0)
    for k in range(len(along)):
        r, column = along[k] + along[k], directions[k]
        for j in range(len(changes)):
            changes[j] += column[j] * r
    for j in range(len(changes)):
        changes[j] = costs[j] + t * (steps[j] * (changes[j] + steps[j] * squares[j]))
    for j in range(len(changes)):
        if changes[j] < np.float32(0):
            product = np.float32(0)
            for k in range(len(along)):
                product += directions[k, j] * along[k]
            if costs[j] + t * (steps[j] * (product + product + steps[j] * squares[j])) < np.float32(0):
                for k in range(len(along)):
                    along[k] += directions[k, j] * steps[j]
                steps[j], costs[j] = -steps[j], -costs[j]
