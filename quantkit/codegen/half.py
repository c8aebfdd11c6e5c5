"""IEEE half and bfloat16 inside kernels, where numba has no such types: conversions on their bits.

    half_to_float(uint16) -> float32      exact, subnormals, Inf and NaN included
    float_to_half(float32) -> uint16      nearest, ties to even; beyond 65504 Inf, as the hardware's conversion
    bfloat_to_float(uint16) -> float32    exact

Plain integer arithmetic, the same on every CPU; loops over it vectorise. `IrBuilder` has the same conversions for
vectors, with the CPU's instructions. Both give the same bits for all numbers (tests/runtime/test_elementary.py); a NaN
stays a NaN, with any payload. Types import this module when they are imported, so it must not load numba.
"""

from __future__ import annotations

import numpy as np

from quantkit.codegen.jit import kernel


@kernel(inline="always")
def half_to_float(h):
    """The value of the half with bits `h`."""
    bits = (np.uint32(h) & np.uint32(0x7FFF)) << np.uint32(13)
    exponent = bits & np.uint32(0x0F800000)
    bits += np.uint32(112 << 23)
    value = np.uint32(bits).view(np.float32)
    if exponent == np.uint32(0x0F800000):  # Inf, NaN
        value = np.uint32(bits + np.uint32(112 << 23)).view(np.float32)
    elif exponent == np.uint32(0):  # zero, subnormal: normalize
        value = np.uint32(bits + np.uint32(1 << 23)).view(np.float32) - np.float32(6.103515625e-05)
    sign = (np.uint32(h) & np.uint32(0x8000)) << np.uint32(16)
    return np.uint32(np.float32(value).view(np.uint32) | sign).view(np.float32)


@kernel(inline="always")
def float_to_half(x):
    """Bits of the half nearest to the float32 `x`."""
    bits = np.float32(x).view(np.uint32)
    sign = (bits >> np.uint32(16)) & np.uint32(0x8000)
    bits &= np.uint32(0x7FFFFFFF)
    if bits >= np.uint32(0x47800000):  # 65536 and more, Inf, NaN
        half = np.uint32(0x7E00) if bits > np.uint32(0x7F800000) else np.uint32(0x7C00)
    elif bits < np.uint32(0x38800000):  # below 2^-14: let the addition of 0.5 round to a multiple of 2^-24
        half = np.float32(np.uint32(bits).view(np.float32) + np.float32(0.5)).view(np.uint32) - np.uint32(0x3F000000)
    else:
        odd = (bits >> np.uint32(13)) & np.uint32(1)
        half = (bits + np.uint32(0xC8000FFF) + odd) >> np.uint32(13)
    return np.uint16(half | sign)


@kernel(inline="always")
def bfloat_to_float(h):
    """The value of the bfloat16 with bits `h`."""
    return np.uint32(np.uint32(h) << np.uint32(16)).view(np.float32)
