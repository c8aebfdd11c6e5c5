"""Loops over the PANEL columns of a panel, written as SIMD: what moves of codes and scales do to the gradient of a row.

    add_scaled     y += factor x
    combine        out = sum over j of u_j H_j, the rows H_j of a panel
    dot            sum of x_j y_j
    weigh_steps    G = a (2 r + a H_jj), what a step a of each element alone changes, for two steps of each

Each has its bits on every CPU: a sum has one order, a multiply-add rounds once.
"""

from __future__ import annotations

from quantkit.codegen.simd import F32, IrBuilder, Value, simd_intrinsic, vector
from quantkit.types.refine.moments import PANEL

FLOATS = vector(16, F32)


@simd_intrinsic("void")
def add_scaled(ir: IrBuilder, factor: float, x: Value, y: Value) -> None:
    """y += factor x, float32[PANEL]."""
    scale = ir.splat(factor, 16)  # type: ignore[arg-type]
    for k in range(0, 4 * PANEL, 64):
        ir.store(ir.fma(scale, ir.load(FLOATS, x + k), ir.load(FLOATS, y + k)), y + k)


@simd_intrinsic("void")
def combine(ir: IrBuilder, u: Value, h: Value, count: Value, out: Value) -> None:
    """out float32[PANEL] = sum of u[j] h[j] over `count` rows of h float32[count, PANEL]."""
    sums = [ir.variable(ir.zero(FLOATS)) for _ in range(PANEL // 16)]
    with ir.loop(0, count) as j:
        factor = ir.splat(ir.load(F32, u + j * 4), 16)
        for k, total in enumerate(sums):
            total.set(ir.fma(factor, ir.load(FLOATS, h + j * (4 * PANEL) + 64 * k), total.get()))
    for k, total in enumerate(sums):
        ir.store(total.get(), out + 64 * k)


@simd_intrinsic("float32")
def dot(ir: IrBuilder, x: Value, y: Value, count: Value) -> Value:
    """The sum of x[j] y[j] over `count` elements, a multiple of 16."""
    total = ir.variable(ir.zero(FLOATS))
    with ir.loop(0, count, 16) as j:
        total.set(ir.fma(ir.load(FLOATS, x + j * 4), ir.load(FLOATS, y + j * 4), total.get()))
    return ir.sum(total.get())


@simd_intrinsic("void")
def weigh_steps(ir: IrBuilder, g: Value, diagonal: Value, steps: Value) -> None:
    """Rows 2 and 3 of steps float32[4, PANEL]: G of the steps in rows 0 and 1.

    g float32[PANEL], the gradient r; diagonal float32[PANEL], H_jj
    """
    for k in range(0, 4 * PANEL, 64):
        r, curve = ir.load(FLOATS, g + k), ir.load(FLOATS, diagonal + k)
        for row in range(2):
            a = ir.load(FLOATS, steps + (4 * PANEL * row + k))
            ir.store(a * ir.fma(a, curve, r + r), steps + (4 * PANEL * (row + 2) + k))
