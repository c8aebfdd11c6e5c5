"""Choosing the super-scale d of many sub-blocks from a few encodings of each.

Codes c of a sub-block with P = sum w x c and R = sum w c^2 reduce its error by s (2 P - s R) under a scale s: a
parabola. The P and R of a few encodings of each sub-block, found under scales of its own, estimate the gain of any d
and multipliers m, with s = d m. The codes for the chosen d are then searched again.
"""

from __future__ import annotations

import numpy as np

from quantkit.codegen.jit import kernel
from quantkit.types.families.superblock import storable

ODD, SMALL, SIGNED = range(3)  # multipliers 1, 3 .. 15; 0 .. 15; -32 .. 31
_REACH = np.array([15, 15, 31], np.float32)

# Super-scales tried, as multiples of the one under which the largest scale gets the largest multiplier.
_LOW, _HIGH = np.float32(0.75), np.float32(1.25)
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
    unit: np.float32,
    rule: int,
    candidates: int,
    p: np.ndarray,
    r: np.ndarray,
    gains: np.ndarray,
    multipliers: np.ndarray,
) -> np.float32:
    """The super-scale, a half divided by `unit`, of largest estimated gain.

    p, r float32[encodings, sub-blocks]; `candidates` values are tried. Fills `multipliers` float32[sub-blocks] with the
    best under it; `gains` is scratch of the same size.
    """
    count, subs = p.shape
    reach = np.float32(0)
    for s in range(subs):
        best_gain, scale = np.float32(0), np.float32(0)
        for k in range(count):
            ratio = abs(p[k, s]) / max(r[k, s], _LEAST)
            if ratio * abs(p[k, s]) > best_gain:
                best_gain, scale = ratio * abs(p[k, s]), ratio
        reach = max(reach, scale)
    best_total, best_d = np.float32(-1), np.float32(0)
    for i in range(candidates + 1):
        is_last = i == candidates  # the best again, for its multipliers
        d = reach / _REACH[rule] * (_LOW + (_HIGH - _LOW) * np.float32(i) / np.float32(candidates - 1))
        d = best_d if is_last else storable(d, unit)
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
        if total > best_total:
            best_total, best_d = total, d
    return best_d
