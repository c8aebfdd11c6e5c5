"""Activations as the integer kernels read them: as integers a with scales, x = scale * a, in two forms.

fine    8 bits and a scale for every four columns. It costs nothing where one 32-bit lane of a byte product is four
        columns, as in the products of plain rows with a vector: a scale is a lane too.
wide    16 bits and a scale for every 32 columns, a = 256 * high + low, in two planes of bytes. Where a lane is a row,
        in products of interleaved rows and of batches: weights are unpacked once for both planes, and the product with
        `high`, shifted, is what the one with `low` is added to, in int32.

One plane with a scale for 32 columns makes more noise than the weights of Q8_0: beside an outlier few steps are left
for the other 31. KLD from exact numerics, SmolLM2 Q8_0: .0032, fine .0004, wide 6e-7.

A vector of n floats (n a multiple of 32) becomes one buffer of `activation_bytes(n)` bytes:

    0       n x f32        x        the floats themselves, for kernels that do not quantize
    4 n     n x i8         fine     -127 .. 127
    5 n     n/4 x i32      sums     of four: what an offset of the weights' codes must take back
    6 n     n/16 x f32     floors   sums of scale * sums over 16 columns: what a floor of the weights is multiplied by
    6.25 n  n/32 x f32     floors   the same over 32
    7 n     n/4 x f32      scales   largest magnitude of the four / 127
    8 n     2 n x i8       wide     of each 32 their high bytes, -127 .. 127, then their low ones
    10 n    n/4 x i32      sums     of four a
    11 n    n/32 x f32     scales   largest magnitude of the 32 / 32512

Where there is a NaN or an Inf the scale is NaN, so that it shows in every result.
"""

from __future__ import annotations

from quantkit.codegen.jit import kernel
from quantkit.codegen.simd import F32, I8, I32, IrBuilder, Value, simd_intrinsic, vector

FINE, FINE_SUMS, FINE_FLOORS, FINE_SCALES, WIDE, WIDE_SUMS, WIDE_SCALES = 4, 5, 6, 7, 8, 10, 11  # offsets, times n
_LARGEST = 127 << 8  # magnitude of a, wide


def _inverse(ir: IrBuilder, scale: Value) -> Value:
    """1 / scale, 0 for 0."""
    kind = scale.type
    is_zero = ir.builder.fcmp_ordered("==", scale.ir, ir.zero(kind).ir)
    return Value(ir, ir.builder.select(is_zero, ir.zero(kind).ir, (ir.constant(kind, 1.0) / scale).ir))


def _fine(ir: IrBuilder, x: Value) -> tuple[Value, Value]:
    """32 floats as (32 signed bytes, 8 scales)."""
    a, b, c, d = (ir.shuffle(ir.absolute(x), None, range(first, 32, 4)) for first in range(4))
    together = a + b + c + d
    scales = (ir.max(ir.max(a, b), ir.max(c, d)) + (together - together)) * (1 / 127)  # NaN where any is not finite
    spread = ir.shuffle(_inverse(ir, scales), None, [i // 4 for i in range(32)])
    return ir.nearest(x * spread).narrow(I8), scales


def wide_block(ir: IrBuilder, x: Value) -> tuple[Value, Value, Value]:
    """32 floats as (32 high bytes, 32 low bytes, scale)."""
    spoiled = ir.sum(x - x)  # 0, or NaN where any element is not finite
    scale = (ir.largest(ir.absolute(x)) + spoiled) * (1 / _LARGEST)
    a = ir.nearest(x * ir.splat(_inverse(ir, scale), 32))
    return (a + 128).signed_shift(8).narrow(I8), a.narrow(I8), scale


def wide_sums(ir: IrBuilder, high: Value, low: Value) -> Value:
    """int32 x 8: the sums of four neighbouring a."""
    ones, zero = ir.constant(vector(32, I8), 1), ir.zero(vector(8, I32))
    return ir.dot4(ir.dot4(zero, ones, high, 1) << 8, ones, low, 1)


def fine_floors(buffer: Value, n: Value, column: Value, group: int) -> Value:
    """The address of the floors of a vector from a column on, over `group` columns each: 16 or 32."""
    start = buffer + n * FINE_FLOORS
    return start + (column >> 2) if group == 16 else start + (n >> 2) + (column >> 3)


@simd_intrinsic("void")
def quantize_range(ir, buffer, n, first, last):
    """Fill both forms of elements first .. last - 1 of a buffer that holds x."""
    ones = ir.constant(vector(32, I8), 1)
    with ir.loop(first, last, 32) as i:
        x = ir.load(vector(32, F32), buffer + i * 4)
        codes, scales = _fine(ir, x)
        sums = ir.dot4(ir.zero(vector(8, I32)), ones, codes, 1)
        for part, value in ((FINE, codes), (FINE_SUMS, sums), (FINE_SCALES, scales)):
            ir.store(value, buffer + n * part + i)
        floors = sums.real() * scales
        while floors.lanes > 2:
            even, odd = (range(lane, floors.lanes, 2) for lane in range(2))
            floors = ir.shuffle(floors, None, even) + ir.shuffle(floors, None, odd)
        ir.store(floors, fine_floors(buffer, n, i, 16))
        ir.store(floors.lane(0) + floors.lane(1), fine_floors(buffer, n, i, 32))
        high, low, scale = wide_block(ir, x)
        ir.store(high, buffer + n * WIDE + i * 2)
        ir.store(low, buffer + n * WIDE + i * 2 + 32)
        ir.store(wide_sums(ir, high, low), buffer + n * WIDE_SUMS + i)
        ir.store(scale, buffer + n * WIDE_SCALES + (i >> 3))


@kernel(inline="always")
def quantize(buffer, n):
    """Fill both forms of a buffer that holds x."""
    quantize_range(buffer, n, 0, n)
