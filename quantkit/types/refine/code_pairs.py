"""Rounding by second moments: moving two codes of a panel at once, where no single move helps.

    steps a of element i and b of element j    change the error by  G_i(a) + G_j(b) + 2 a b H_ij
                                               G_i(a) = 2 a r_i + a^2 H_ii

Where inputs have a few strong directions, one step of one code is too coarse to cancel what is left of the error along
them; two steps that nearly cancel each other are finer. For both steps of an element all partners are weighed at once,
as lanes.
"""

from __future__ import annotations

import numpy as np

from quantkit.codegen.jit import subkernel
from quantkit.codegen.simd import F32, IrBuilder, Value, simd_intrinsic
from quantkit.types.refine.moments import PANEL
from quantkit.types.refine.panel_rows import FLOATS

UP, DOWN = 0, 1  # rows of `steps`; rows 2 and 3 hold what each step alone changes (`panel_rows.weigh_steps`)


@simd_intrinsic("void")
def least_partners(ir: IrBuilder, h: Value, steps: Value, start: Value, stop: Value, out: Value) -> None:
    """out[k, i] = G_i(a) + min over j and both steps b of j of G_j(b) + 2 a b h[i, j], for both steps a of element i.

    h float32[PANEL, PANEL]: H with zeros on its diagonal, for no element is its own partner; steps float32[4, PANEL];
    out float32[2, PANEL], of elements `start` to `stop`
    """
    with ir.loop(start, stop) as i:
        own = [ir.load(F32, steps + i * 4 + 4 * PANEL * k) for k in range(4)]
        doubled = [ir.splat(a + a, 16) for a in own[:2]]
        least = [ir.zero(FLOATS), ir.zero(FLOATS)]
        for j in range(0, 4 * PANEL, 64):
            row = ir.load(FLOATS, h + i * (4 * PANEL) + j)
            a, b, gain_a, gain_b = (ir.load(FLOATS, steps + (4 * PANEL * k + j)) for k in range(4))
            for k in range(2):
                both = doubled[k] * row
                least[k] = ir.min(least[k], ir.min(ir.fma(both, a, gain_a), ir.fma(both, b, gain_b)))
        for k in range(2):
            ir.store(ir.smallest(least[k]) + own[2 + k], out + i * 4 + 4 * PANEL * k)


@subkernel
def best_partner(h: np.ndarray, steps: np.ndarray, a: np.float32) -> tuple[int, int]:
    """The element, and which of its steps (UP or DOWN), that lower the error most together with a step a of another.

    h float32[PANEL]: the row of H of that other element, 0 for itself
    """
    partner, second, best = 0, UP, np.float32(0)
    for k in range(2):
        for j in range(PANEL):
            change = steps[2 + k, j] + np.float32(2) * a * h[j] * steps[k, j]
            if change < best:
                partner, second, best = j, k, change
    return partner, second
