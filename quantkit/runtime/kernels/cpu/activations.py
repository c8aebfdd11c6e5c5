"""Activations as the integer kernels read them: integers a with scales, x = scale * a, in two forms.

int8    one scale per four columns. It costs nothing where one 32-bit lane of a byte product is four columns, as in
        products of plain rows with a vector: then a scale is a lane too.
int16   one scale per 32 columns, a = 256 * high + low, as high bytes and low bytes. For kernels where a lane is a row:
        products of interleaved rows and of batches. Weights are unpacked once for both, and the product with `low` is
        added to the product with `high`, shifted, in int32.

8 bits with one scale per 32 columns would make more noise than the weights of Q8_0: beside an outlier, few steps are
left for the other 31 columns. KLD from exact numerics for SmolLM2 Q8_0: 0.0032, int8 0.0004, int16 6e-7.

The activation buffer of n columns (n a multiple of 32) has `activation_bytes(n)` bytes:

    offset   type       field                content
    0        n x f32    x                    the floats, for kernels that do not quantize
    4 n      n x i8     INT8_CODES           -127 .. 127
    5 n      n/4 x i32  INT8_SUMS            sums over four columns: corrects for the offset of the weights' codes
    6 n      n/16 x f32 INT8_SCALED_SUMS     sums of scale * sum over 16 columns: multiplied by the weights' minimums
    6.25 n   n/32 x f32                      the same over 32 columns
    7 n      n/4 x f32  INT8_SCALES          largest magnitude of the four / 127
    8 n      2 n x i8   INT16_CODES          per 32 columns the high bytes, -127 .. 127, then the low bytes
    10 n     n/4 x i32  INT16_SUMS           sums over four columns
    11 n     n x i16    INT16_WORDS          a; of each four columns the first, third, second and fourth; not with VNNI
    13 n     n/32 x f32 INT16_SCALES         largest magnitude of the 32 / 32512

If x has a NaN or an Inf, the scale is NaN, so that every result shows it.
"""

from __future__ import annotations

from quantkit.codegen.jit import kernel
from quantkit.codegen.simd import F32, I8, I16, I32, IrBuilder, Value, simd_intrinsic, vector

# offsets of the fields, times n
INT8_CODES, INT8_SUMS, INT8_SCALED_SUMS, INT8_SCALES = 4, 5, 6, 7
INT16_CODES, INT16_SUMS, INT16_WORDS, INT16_SCALES = 8, 10, 11, 13
_INT16_LARGEST = 127 << 8  # magnitude of a


def _inverse(ir: IrBuilder, scale: Value) -> Value:
    """1 / scale, or 0 for 0."""
    kind = scale.type
    is_zero = ir.builder.fcmp_ordered("==", scale.ir, ir.zero(kind).ir)
    return Value(ir, ir.builder.select(is_zero, ir.zero(kind).ir, (ir.constant(kind, 1.0) / scale).ir))


def _int8_block(ir: IrBuilder, x: Value) -> tuple[Value, Value]:
    """32 floats as (32 signed bytes, 8 scales)."""
    a, b, c, d = (ir.shuffle(ir.absolute(x), None, range(first, 32, 4)) for first in range(4))
    total = a + b + c + d
    not_finite = total - total  # 0, or NaN
    scales = (ir.max(ir.max(a, b), ir.max(c, d)) + not_finite) * (1 / 127)
    spread = ir.shuffle(_inverse(ir, scales), None, [i // 4 for i in range(32)])
    return ir.nearest(x * spread).narrow(I8), scales


def int16_block(ir: IrBuilder, x: Value) -> tuple[Value, Value, Value]:
    """32 floats as (32 high bytes, 32 low bytes, scale)."""
    not_finite = ir.sum(x - x)  # 0, or NaN
    scale = (ir.largest(ir.absolute(x)) + not_finite) * (1 / _INT16_LARGEST)
    a = ir.nearest(x * ir.splat(_inverse(ir, scale), 32))
    return (a + 128).signed_shift(8).narrow(I8), a.narrow(I8), scale


def int16_sums(ir: IrBuilder, high: Value, low: Value) -> Value:
    """int32 x 8: sums of a over four neighbouring columns."""
    ones, zero = ir.constant(vector(32, I8), 1), ir.zero(vector(8, I32))
    return ir.dot4(ir.dot4(zero, ones, high, 1) << 8, ones, low, 1)


def int16_words(ir: IrBuilder, high: Value, low: Value) -> Value:
    """int16 x 32: a, of each four columns the first, third, second and fourth, as they leave 32 bits of byte codes."""
    a = (high.signed(I16) << 8) + low.signed(I16)
    return ir.shuffle(a, None, [4 * (i // 4) + (0, 2, 1, 3)[i % 4] for i in range(32)])


def has_vnni(ir: IrBuilder) -> bool:
    """Whether activations are multiplied as bytes, the high and the low ones, in all kernels."""
    return ir.isa == "avx512vnni"


def scaled_sums(buffer: Value, n: Value, column: Value, columns: int) -> Value:
    """Address of INT8_SCALED_SUMS from a column on, over `columns` columns each: 16 or 32."""
    start = buffer + n * INT8_SCALED_SUMS
    return start + (column >> 2) if columns == 16 else start + (n >> 2) + (column >> 3)


@simd_intrinsic("void")
def quantize_range(ir, buffer, n, first, last):
    """Fill both forms for columns first .. last - 1 of a buffer that holds x; multiples of 32."""
    ones = ir.constant(vector(32, I8), 1)
    with ir.loop(first, last, 32) as i:
        x = ir.load(vector(32, F32), buffer + i * 4)
        codes, scales = _int8_block(ir, x)
        sums = ir.dot4(ir.zero(vector(8, I32)), ones, codes, 1)
        for field, value in ((INT8_CODES, codes), (INT8_SUMS, sums), (INT8_SCALES, scales)):
            ir.store(value, buffer + n * field + i)
        scaled = sums.real() * scales
        while scaled.lanes > 2:
            even, odd = (range(lane, scaled.lanes, 2) for lane in range(2))
            scaled = ir.shuffle(scaled, None, even) + ir.shuffle(scaled, None, odd)
        ir.store(scaled, scaled_sums(buffer, n, i, 16))
        ir.store(scaled.lane(0) + scaled.lane(1), scaled_sums(buffer, n, i, 32))
        high, low, scale = int16_block(ir, x)
        ir.store(high, buffer + n * INT16_CODES + i * 2)
        ir.store(low, buffer + n * INT16_CODES + i * 2 + 32)
        ir.store(int16_sums(ir, high, low), buffer + n * INT16_SUMS + i)
        if not has_vnni(ir):
            ir.store(int16_words(ir, high, low), buffer + n * INT16_WORDS + i * 2)
        ir.store(scale, buffer + n * INT16_SCALES + (i >> 3))


@kernel(inline="always")
def quantize(buffer, n):
    """Fill both forms of a buffer that holds x."""
    quantize_range(buffer, n, 0, n)
