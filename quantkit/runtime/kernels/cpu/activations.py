"""Activations as the integer kernels read them.

A vector of n floats (n a multiple of 32) becomes one buffer of `activation_bytes(n)` bytes:

    0       n x f32        x        the floats themselves, for kernels that do not quantize
    4 n     n x i8         codes    -127 .. 127, x = scale * code in each block of 32
    5 n     n/4 x i32      sums     of four codes: what an offset of the weights' codes must take back
    6 n     n/4 x f32      floors   scale * sums: what a floor of the weights is multiplied by
    7 n     n/32 x f32     scales   largest magnitude of the block / 127

A block with a NaN or an Inf gets the scale NaN, so that it shows in every result.
"""

from __future__ import annotations

from quantkit.jit import kernel
from quantkit.simd import F32, I8, I32, Emit, Value, emitted, vector

CODES, SUMS, FLOORS, SCALES = 4, 5, 6, 7  # offsets in the buffer, in units of n


def activation_bytes(n: int) -> int:
    return 7 * n + n // 8


def quantize_block(e: Emit, x: Value) -> tuple[Value, Value]:
    """32 floats as (32 signed bytes, scale)."""
    spoiled = e.sum(x - x)  # 0, or NaN where any element is not finite
    scale = (e.largest(e.absolute(x)) + spoiled) * (1 / 127)
    is_zero = e.builder.fcmp_ordered("==", scale.ir, e.zero(F32).ir)
    inverse = Value(e, e.builder.select(is_zero, e.zero(F32).ir, (e.constant(F32, 1.0) / scale).ir))
    return e.nearest(x * e.splat(inverse, 32)).narrow(I8), scale


@emitted("void")
def quantize_range(e, buffer, n, first, last):
    """Fill codes, sums, floors and scales of elements first .. last - 1 of a buffer that holds x."""
    ones = e.constant(vector(32, I8), 1)
    with e.loop(first, last, 32) as i:
        codes, scale = quantize_block(e, e.load(vector(32, F32), buffer + i * 4))
        sums = e.dot4(e.zero(vector(8, I32)), ones, codes, 1)
        e.store(codes, buffer + n * CODES + i)
        e.store(sums, buffer + n * SUMS + i)
        e.store(sums.real() * e.splat(scale, 8), buffer + n * FLOORS + i)
        e.store(scale, buffer + n * SCALES + (i >> 3))


@kernel(inline="always")
def quantize(buffer, n):
    """Fill codes, sums, floors and scales of a buffer that holds x."""
    quantize_range(buffer, n, 0, n)
