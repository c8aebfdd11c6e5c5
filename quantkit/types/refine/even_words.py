"""Rounding by second moments, for IQ4_KSS: four codes of 4 bits share a word that has an even number of ones.

    error  e^T H e of a row, as in `scalar_codes`

Within a word one code moves to the next larger or smaller one of the same parity, or two codes each to the next of the
other parity, whichever lowers the error most: changes d of two elements i and k change it by

    d_i (2 r_i + d_i H_ii) + d_k (2 r_k + d_k H_kk) + 2 d_i d_k H_ik,   r = e H

All words of a panel are taken in turn until nothing moves, or INNER times.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from quantkit.codegen.jit import kernel
from quantkit.types.families.codebooks import K4
from quantkit.types.refine.moments import PANEL, Moments, gradient

INNER = 2  # sweeps of a panel

_VALUES = K4.values[:16].astype(np.float32)  # rising; the shifted book has the same differences
_PARITY = np.array([bin(code).count("1") % 2 for code in range(16)])
_NO_GAIN = np.float32(np.inf)


def _next_codes(same: bool) -> np.ndarray:
    """int64[16, 2]: the next smaller and the next larger code of the same parity or of the other; its own for none."""
    found = np.repeat(np.arange(16)[:, None], 2, axis=1)
    for code in range(16):
        fitting = np.flatnonzero((_PARITY[code] == _PARITY) == same)
        if (fitting < code).any():
            found[code, 0] = fitting[fitting < code].max()
        if (fitting > code).any():
            found[code, 1] = fitting[fitting > code].min()
    return found


_NEXT = np.hstack([_next_codes(same=False), _next_codes(same=True)])  # int64[16, 4]


class EvenWords(Protocol):
    """What is asked of a type here."""

    def dequantize(
        self, data: np.ndarray, n: int, *, threads: int | None = None, products: bool = False
    ) -> np.ndarray: ...
    def read_codes(self, data: np.ndarray, codes: np.ndarray, scales: np.ndarray) -> None: ...
    def write_codes(self, codes: np.ndarray, data: np.ndarray) -> None: ...


def refine(kind: EvenWords, x: np.ndarray, data: np.ndarray, moments: Moments, sweeps: int) -> None:
    """Lower the error of data uint8[rows, row bytes], which encodes x float32[rows, n], in place, row by row."""
    rows, n = x.shape
    codes, scales = np.empty((rows, n), np.uint8), np.empty((rows, n // 32), np.float32)
    kind.read_codes(data, codes, scales)
    e = moments.padded_zeros(rows)
    e[:rows, :n] = kind.dequantize(data, n, threads=1, products=True) - x
    for _ in range(sweeps):
        if not descend(e, codes, scales, moments.panels, rows, INNER):
            break
    kind.write_codes(codes, data)


@kernel
def descend(e: np.ndarray, codes: np.ndarray, scales: np.ndarray, panels: np.ndarray, rows: int, inner: int) -> int:
    """Move codes of uint8[rows, n] so that e^T H e falls, and e float32[padded rows, padded n] with them.

    scales float32[rows, n / 32]. Returns the number of moves.
    """
    n = codes.shape[1]
    r = np.empty((len(e), PANEL), np.float32)
    steps, gains = np.empty((4, 4), np.float32), np.empty((4, 4), np.float32)
    moves = 0
    for p in range(len(panels)):
        first = p * PANEL
        many = min(PANEL, n - first)
        gradient(e, panels[p], n, r)
        h = panels[p, first : first + PANEL]
        for row in range(rows):
            own_e, own_codes = e[row, first : first + many], codes[row, first : first + many]
            own_scales = scales[row, first // 32 : (first + many) // 32]
            for _ in range(inner):
                moved = _sweep(own_e, r[row], h, own_codes, own_scales, steps, gains)
                moves += moved
                if moved == 0:
                    break
    return moves


@kernel
def _sweep(
    e: np.ndarray,
    g: np.ndarray,
    h: np.ndarray,
    codes: np.ndarray,
    scales: np.ndarray,
    steps: np.ndarray,
    gains: np.ndarray,
) -> int:
    """Move the codes of each word of a row's part in a panel; how many words changed. steps, gains: [4, 4] to use."""
    moved = 0
    for word in range(len(codes) // 4):
        start, scale = word // 8 * 32 + word % 8 * 2, scales[word // 8]
        best, i, k, by_i, by_k = np.float32(0), -1, -1, 0, 0
        for c in range(4):
            j = start + c // 2 + 16 * (c % 2)
            slope, curve, code = np.float32(2) * g[j], h[j, j], codes[j]
            for a in range(4):
                to = _NEXT[code, a]
                step = scale * (_VALUES[to] - _VALUES[code])
                steps[c, a], gains[c, a] = step, step * (slope + step * curve) if to != code else _NO_GAIN
            for a in range(2, 4):
                if gains[c, a] < best:
                    best, i, k, by_i = gains[c, a], c, -1, a
            for other in range(c):
                twice = np.float32(2) * h[j, start + other // 2 + 16 * (other % 2)]
                for a in range(2):
                    for b in range(2):
                        both = gains[c, a] + gains[other, b] + twice * (steps[c, a] * steps[other, b])
                        if both < best:
                            best, i, k, by_i, by_k = both, c, other, a, b
        if i < 0:
            continue
        at, step = start + i // 2 + 16 * (i % 2), steps[i, by_i]
        limit = step * step * h[at, at]
        if k >= 0:
            second = start + k // 2 + 16 * (k % 2)
            limit += steps[k, by_k] * steps[k, by_k] * h[second, second]
        if not best < np.float32(-1e-5) * limit:
            continue
        _move(at, step, _NEXT[codes[at], by_i], e, g, h, codes)
        if k >= 0:
            _move(second, steps[k, by_k], _NEXT[codes[second], by_k], e, g, h, codes)
        moved += 1
    return moved


@kernel
def _move(at: int, step: np.float32, code: int, e: np.ndarray, g: np.ndarray, h: np.ndarray, codes: np.ndarray) -> None:
    e[at] += step
    codes[at] = np.uint8(code)
    for k in range(PANEL):
        g[k] += step * h[at, k]
