"""Choosing the super-scale d of many sub-blocks from a few encodings of each.

Codes c of a sub-block with P = sum w x c and R = sum w c^2 reduce its error by s (2 P - s R) under a scale s: a
parabola. A few of these for each sub-block, found under scales of its own, estimate the gain of any d with any
multipliers m, s = d m. The codes for the d that is chosen are then searched again.
"""

from __future__ import annotations

import numpy as np

from quantkit.codegen.jit import kernel
from quantkit.types.families.superblock import storable

ODD, SMALL, SIGNED = range(3)  # multipliers 1, 3 .. 15; 0 .. 15; -32 .. 31
_REACH = np.array([15, 15, 31], np.float32)

_LOW, _HIGH = (
    np.float32(0.75),
    np.float32(1.25),
)  # super-scales tried, as multiples of the one that just reaches the largest sub-block
_ROUND = np.float32(12582912)
_LEAST = np.float32(1e-30)


@kernel
def nearest_multiplier(t: np.float32, rule: int) -> np.float32:
    """The multiplier nearest to t."""
    if rule == ODD:
        m = min(max((t - np.float32(1)) * np.float32(0.5), np.float32(0)), np.float32(7))
        return ((m + _ROUND) - _ROUND) * np.float32(2) + np.float32(1)
    low, high = (np.float32(0), np.float32(15)) if rule == SMALL else (np.float32(-32), np.float32(31))
    return (min(max(t, low), high) + _ROUND) - _ROUND


@kernel
def best_super_scale(
    unit: np.float32, rule: int, places: int, p: np.ndarray, r: np.ndarray, gains: np.ndarray, multipliers: np.ndarray
) -> np.float32:
    """The super-scale, a half divided by `unit`, of largest estimated gain.

    p, r float32[encodings, sub-blocks]; `places` values are tried. Fills `multipliers` float32[sub-blocks] with the
    best under it; `gains` is scratch of the same size.
    """
    count, subs = p.shape
    reach = np.float32(0)
    for s in range(subs):
        top, scale = np.float32(0), np.float32(0)
        for k in range(count):
            ratio = abs(p[k, s]) / max(r[k, s], _LEAST)
            if ratio * abs(p[k, s]) > top:
                top, scale = ratio * abs(p[k, s]), ratio
        reach = max(reach, scale)
    best, choice = np.float32(-1), np.float32(0)
    for place in range(places + 1):
        last = place == places  # the best again, for its multipliers
        d = reach / _REACH[rule] * (_LOW + (_HIGH - _LOW) * np.float32(place) / np.float32(places - 1))
        d = choice if last else storable(d, unit)
        inverse = np.float32(1) / d
        for s in range(subs):
            gains[s] = np.float32(-1e30)
        for k in range(count):
            for s in range(subs):
                m = nearest_multiplier(p[k, s] / max(r[k, s], _LEAST) * inverse, rule)
                scale = d * m
                gain = scale * (p[k, s] + p[k, s] - scale * r[k, s])
                better = gain > gains[s]
                gains[s] = gain if better else gains[s]
                multipliers[s] = m if better else multipliers[s]
        total = np.float32(0)
        for s in range(subs):
            total += gains[s]
        if total > best:
            best, choice = total, d
    return choice
