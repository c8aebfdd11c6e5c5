"""The generator of the trellis types IQ1_KT, IQ2_KT, IQ3_KT and IQ4_KT, and how errors are weighted.

A group of 8 (or 4) elements is stored as one index. Its values come from a multiplicative congruential generator that
starts there: x_0 = index + offset, x_k = MULTIPLIER x_(k-1) modulo 2^32,

    v_k = (sum of the four bytes of x_k & 0x3F3F3F3F) - 126           k = 1 .. 8

so x_k = POWERS[k - 1] x_0, and a group is decoded in SIMD lanes. The values are nearly Gaussian, root mean square 36.9.

    y = (d * m) * v          d: float32, the row's header;  m: integer, of each 32 elements

Both products are rounded to float32.

Encode: minimise sum w (x - y)^2; `weigh` computes w.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from quantkit.codegen.jit import kernel
from quantkit.types.families.superblock import MIN_WEIGHT

MULTIPLIER = 3417055213
OFFSET = 4096
POWERS = np.array([pow(MULTIPLIER, k, 1 << 32) for k in range(1, 9)], np.uint32)

BOOK = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)  # m of 4 bits
CODES = np.zeros(256, np.uint8)  # the code of m at m + 128
CODES[BOOK.astype(np.int64) + 128] = np.arange(16)

_SIXES = np.uint32(0x3F3F3F3F)  # what each byte contributes
_BYTES = np.uint32(0x01010101)  # the product with it has the sum of four bytes, which is below 256, on top
_TOP = np.uint32(24)
_MIDDLE = np.int32(126)


@kernel(inline="always")
def code_value(seed: np.uint32, k: int) -> np.int32:
    """Value k of the group of a seed (index + offset), int32."""
    x = np.uint32(seed * POWERS[k]) & _SIXES
    return np.int32(np.uint32(x * _BYTES) >> _TOP) - _MIDDLE


@kernel
def row_scale(data: np.ndarray) -> np.float32:
    """The float32 stored in the first four bytes of uint8[]."""
    bits = np.uint32(data[0]) | np.uint32(data[1]) << np.uint32(8)
    bits |= np.uint32(data[2]) << np.uint32(16) | np.uint32(data[3]) << np.uint32(24)
    return np.uint32(bits).view(np.float32)


@kernel
def put_row_scale(out: np.ndarray, d: np.float32) -> None:
    """Store d as float32 in the first four bytes of uint8[]."""
    bits = np.float32(d).view(np.uint32)
    for i in range(4):
        out[i] = np.uint8(bits >> np.uint32(8 * i))


@kernel
def weigh(x: np.ndarray, importance: np.ndarray, w: np.ndarray) -> bool:
    """Fill w float32[n] with the weights of a row x. Returns whether there is an importance.

    w is the importance relative to the row's largest. Without one w = v / 2 + x^2, as in ik_llama.cpp, v being the
    mean of x^2 over 256 elements.
    """
    n = len(x)
    largest = np.float32(0)
    for i in range(len(importance)):
        largest = max(largest, importance[i])
    if largest > np.float32(0):
        for i in range(n):
            w[i] = max(importance[i] / largest, np.float32(MIN_WEIGHT))
        return True
    for first in range(0, n, 256):
        squares = np.float32(0)
        for i in range(first, first + 256):
            squares += x[i] * x[i]
        v = squares / np.float32(256)
        for i in range(first, first + 256):
            w[i] = np.float32(0.5) * v + x[i] * x[i]
    return False


def code_values(bits: int, group: int, offset: int) -> np.ndarray:
    """int8[2^bits, group]: the values of every index."""
    seeds = np.arange(1 << bits, dtype=np.uint32) + np.uint32(offset)
    each = (seeds[:, None] * POWERS[:group]) & _SIXES
    return (((each * _BYTES) >> _TOP).astype(np.int32) - _MIDDLE).astype(np.int8)


class SearchParameters(NamedTuple):
    """What the search needs to know of a type (fields of `TrellisType`) and an effort (fields of `Plan`)."""

    group: int  # elements
    folded: int  # the next three are 0 or 1
    symmetric: int
    has_zero: int
    tables: int
    clusters: int
    scales: int
    rank: int
    finalists: int
    final_rank: int
    row_scales: int
