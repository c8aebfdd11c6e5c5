"""Rounding by second moments, for types whose elements have codes of their own: coordinate descent over codes.

    error  e^T H e of a row, e = decoded row - row, H the second moment of the input (`moments`)

A code moves to the next larger or smaller value of its block if that lowers the error: a step s of element j changes it
by 2 s r_j + s^2 H_jj, r = e H. Panels of columns are taken in turn: r of a panel comes from one product with all of e;
within the panel, r is updated after each move, and the panel is swept until nothing moves or INNER times.

Source of the method: coordinate descent on the objective of GPTQ (Frantar et al., 2022), as in QuantEase (Behdin et
al., 2023).
"""

from __future__ import annotations

import numpy as np

from quantkit.codegen.jit import kernel
from quantkit.types.families.code_bits import Codec, Codes, read_codes, write_codes
from quantkit.types.refine.moments import PANEL, TILE_ROWS, Moments, gradient

INNER = 4  # sweeps of a panel


def refine(kind: Codec, found: Codes, x: np.ndarray, data: np.ndarray, moments: Moments, sweeps: int) -> None:
    """Lower the error of data uint8[rows, row bytes], which encodes x float32[rows, n], in place, row by row.

    found: `codes_of(kind)`
    """
    rows, n = x.shape
    codes = np.empty((rows, n), np.uint8)
    read_codes(data, found, codes)
    decoded = kind.dequantize(data, n, threads=1)
    e = np.zeros((-(-rows // TILE_ROWS) * TILE_ROWS, moments.panels.shape[1]), np.float32)
    e[:rows, :n] = decoded - x
    at_end = found.above == np.arange(len(found.above))
    moved = data.copy()
    write_codes(np.where(at_end, found.below, found.above)[codes], found, moved)
    unit = (kind.dequantize(moved, n, threads=1) - decoded) / np.where(at_end, found.down, found.up)[codes]
    for _ in range(sweeps):
        if not descend(e, codes, unit, found.up, found.down, found.above, found.below, moments.panels, rows, INNER):
            break
    write_codes(codes, found, data)


@kernel
def descend(
    e: np.ndarray,
    codes: np.ndarray,
    unit: np.ndarray,
    up: np.ndarray,
    down: np.ndarray,
    next_code: np.ndarray,
    last_code: np.ndarray,
    panels: np.ndarray,
    rows: int,
    inner: int,
) -> int:
    """Move codes of uint8[rows, n] so that e^T H e falls, and e float32[padded rows, padded n] with them.

    Returns the number of moves. From the code of an element to its next value it is unit * up[code], to its last one
    unit * down[code]: unit float32[rows, n], up and down the ladder of the type.
    """
    n = codes.shape[1]
    r = np.empty((len(e), PANEL), np.float32)
    moves = 0
    for p in range(len(panels)):
        first = p * PANEL
        many = min(PANEL, n - first)
        gradient(e, panels[p], n, r)
        h = panels[p, first : first + PANEL]
        for row in range(rows):
            g = r[row]
            for _ in range(inner):
                moved = 0
                for j in range(many):
                    at = first + j
                    code, scale = codes[row, at], unit[row, at]
                    a, b = scale * up[code], scale * down[code]
                    slope, curve = np.float32(2) * g[j], h[j, j]
                    gain_a, gain_b = a * (slope + a * curve), b * (slope + b * curve)
                    step = a if gain_a <= gain_b else b
                    gain = min(gain_a, gain_b)
                    if gain < np.float32(-1e-5) * (step * step * curve):
                        codes[row, at] = next_code[code] if gain_a <= gain_b else last_code[code]
                        e[row, at] += step
                        for k in range(PANEL):
                            g[k] += step * h[j, k]
                        moved += 1
                moves += moved
                if moved == 0:
                    break
    return moves
