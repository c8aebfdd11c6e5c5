"""Activations as the integer kernels read them: 16 bits each, in two planes of bytes.

x = scale * a, the scale one of each block of 32, the integer a = 256 * high + low with signed bytes. A product of bytes
with `high`, shifted, and one with `low` are added in int32; so weights are unpacked once for both. One plane alone, 8
bits, makes more noise than the weights of Q8_0: a block with an outlier has few steps left for its other columns.

A vector of n floats (n a multiple of 32) becomes one buffer of `activation_bytes(n)` bytes:

    0       n x f32        x        the floats themselves, for kernels that do not quantize
    4 n     2 n x i8       codes    of each block its 32 high bytes, then its 32 low ones
    6 n     n/4 x i32      sums     of four a: what an offset of the weights' codes must take back
    7 n     n/4 x f32      floors   scale * sums: what a floor of the weights is multiplied by
    8 n     n/32 x f32     scales   largest magnitude of the block / 32512, so that high is -127 .. 127

A block with a NaN or an Inf gets the scale NaN, so that it shows in every result.
"""

from __future__ import annotations

from quantkit.jit import kernel
from quantkit.simd import F32, I8, I32, Emit, Value, emitted, vector

CODES, SUMS, FLOORS, SCALES = 4, 6, 7, 8  # offsets in the buffer, in units of n
LARGEST = 127 << 8  # magnitude of a


def activation_bytes(n: int) -> int:
    return 8 * n + n // 8


def quantize_block(e: Emit, x: Value) -> tuple[Value, Value, Value]:
    """32 floats as (32 high bytes, 32 low bytes, scale)."""
    spoiled = e.sum(x - x)  # 0, or NaN where any element is not finite
    scale = (e.largest(e.absolute(x)) + spoiled) * (1 / LARGEST)
    is_zero = e.builder.fcmp_ordered("==", scale.ir, e.zero(F32).ir)
    inverse = Value(e, e.builder.select(is_zero, e.zero(F32).ir, (e.constant(F32, 1.0) / scale).ir))
    a = e.nearest(x * e.splat(inverse, 32))
    return (a + 128).signed_shift(8).narrow(I8), a.narrow(I8), scale


def sums_of_four(e: Emit, high: Value, low: Value) -> Value:
    """int32 x 8: the sums of four neighbouring a of a block."""
    ones, zero = e.constant(vector(32, I8), 1), e.zero(vector(8, I32))
    return e.dot4(e.dot4(zero, ones, high, 1) << 8, ones, low, 1)


@emitted("void")
def quantize_range(e, buffer, n, first, last):
    """Fill codes, sums, floors and scales of elements first .. last - 1 of a buffer that holds x."""
    with e.loop(first, last, 32) as i:
        high, low, scale = quantize_block(e, e.load(vector(32, F32), buffer + i * 4))
        sums = sums_of_four(e, high, low)
        e.store(high, buffer + n * CODES + i * 2)
        e.store(low, buffer + n * CODES + i * 2 + 32)
        e.store(sums, buffer + n * SUMS + i)
        e.store(sums.real() * e.splat(scale, 8), buffer + n * FLOORS + i)
        e.store(scale, buffer + n * SCALES + (i >> 3))


@kernel(inline="always")
def quantize(buffer, n):
    """Fill codes, sums, floors and scales of a buffer that holds x."""
    quantize_range(buffer, n, 0, n)
