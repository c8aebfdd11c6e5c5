"""Four-bit floats E2M1, the codes of MXFP4 and NVFP4: 0 0.5 1 1.5 2 3 4 6, and their negatives from code 8 on."""

from __future__ import annotations

import numpy as np

from quantkit.codegen.jit import kernel

E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)  # doubled: integers
LARGEST = np.float32(6)

_MIDPOINTS = (E2M1[1:8] + E2M1[:7]) / np.float32(4)  # of neighbours
_ROUND = np.float32(3 << 21)  # times a power of two p: adding and subtracting it rounds to a multiple of p / 2


@kernel(inline="always")
def nearest_float(t: np.float32) -> np.float32:
    """The E2M1 float nearest to t. One of a power of two p <= |t| < 2 p is a multiple of p / 2, below 1 of 1 / 2."""
    q = min(max(t, -LARGEST), LARGEST)
    power = max(np.float32(q).view(np.uint32) & np.uint32(0x7F800000), np.uint32(127 << 23))
    shift = np.uint32(power).view(np.float32) * _ROUND
    return np.float32((q + shift) - shift)


@kernel
def code_of(t: np.float32) -> np.int32:
    """The code of the float nearest to t; never that of -0."""
    code = np.int32(0)
    for k in range(7):
        code += np.int32(abs(t) > _MIDPOINTS[k])
    return np.int32(code + np.int32(8)) if t < -_MIDPOINTS[0] else code
