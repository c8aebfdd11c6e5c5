"""Blocks of 256 ternary elements, y = d * t with t in -1, 0, 1, shared by TQ1_0 and TQ2_0.

    minimise  sum over the block of  w * (x - d * t)^2      w = importance of the column (1 without), d a half

d is that of `ternary.find_scale`, rounded; codes are the nearest ones under the rounded d. Elements that are ternary
already keep their values, as halves.
"""

from __future__ import annotations

import numpy as np

from quantkit.codegen.half import float_to_half, half_to_float
from quantkit.codegen.jit import kernel
from quantkit.types.families import ternary

SIZE = 256
_HALF_MAX = np.float32(65504)


@kernel
def block_weights(importance: np.ndarray, n: int) -> np.ndarray:
    """float32[n]: the weights of `ternary.row_weights`, each block for itself."""
    w = np.empty(n, np.float32)
    for first in range(0, n, SIZE):
        ternary.row_weights(importance[first : first + SIZE], w[first : first + SIZE])
    return w


@kernel
def find_codes(x: np.ndarray, w: np.ndarray, effort: int, codes: np.ndarray) -> np.uint16:
    """Fill codes uint8[256] with t + 1 for x float32[256]; returns the bits of the half d."""
    half: np.uint16 = float_to_half(min(ternary.find_scale(x, w, effort), _HALF_MAX))
    ternary.nearest_codes(x, half_to_float(half), codes)
    return half
