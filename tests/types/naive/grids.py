"""The grid types, element by element; the grids are those of the gguf package."""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable
from typing import Any

import gguf.quants
from numpy import float32

from tests.types.naive.fields import bit, bits, half


@functools.cache
def points(name: str) -> list[list[int]]:
    """Magnitudes of every grid point."""
    kind: Any = getattr(gguf.quants, name.upper())
    kind.init_grid()
    return [[int(v) for v in point] for point in kind.grid.reshape(kind.grid_shape)]


def word(row: bytes, start: int, size: int) -> int:
    return int.from_bytes(row[start : start + size], "little")


def sign(index: int, j: int) -> int:
    """Of element j of 8 by 7 bits: the eighth makes the number of ones even."""
    return -1 if (bits(index, j, 1) if j < 7 else bin(index).count("1") % 2) else 1


def value(d: float32, multiplier: float, magnitude: int, negative: int) -> float32:
    return d * float32(multiplier) * float32(magnitude) * float32(negative)


def iq2_xxs(row: bytes, start: int, j: int) -> float32:
    number = row[start + 2 + j // 32 * 8 + j % 32 // 8]
    packed = word(row, start + 6 + j // 32 * 8, 4)
    negative = sign(bits(packed, 7 * (j % 32 // 8), 7), j % 8)
    return value(half(row, start), (bits(packed, 28, 4) + 0.5) / 4, points("iq2_xxs")[number][j % 8], negative)


def iq2_xs(row: bytes, start: int, j: int) -> float32:
    (packed,) = struct.unpack_from("<H", row, start + 2 + j // 8 * 2)
    multiplier = (bits(row[start + 66 + j // 32], 4 * (j // 16 % 2), 4) + 0.5) / 4
    return value(half(row, start), multiplier, points("iq2_xs")[bits(packed, 0, 9)][j % 8], sign(packed >> 9, j % 8))


def iq2_s(row: bytes, start: int, j: int) -> float32:
    g = j // 8
    number = row[start + 2 + g] + 256 * bits(row[start + 66 + g // 4], 2 * (g % 4), 2)
    multiplier = (bits(row[start + 74 + j // 32], 4 * (j // 16 % 2), 4) + 0.5) / 4
    return value(half(row, start), multiplier, points("iq2_s")[number][j % 8], 1 - 2 * bit(row, start + 34, j))


def iq3_xxs(row: bytes, start: int, j: int) -> float32:
    packed = word(row, start + 66 + j // 32 * 4, 4)
    negative = sign(bits(packed, 7 * (j % 32 // 8), 7), j % 8)
    magnitude = points("iq3_xxs")[row[start + 2 + j // 4]][j % 4]
    return value(half(row, start), (bits(packed, 28, 4) + 0.5) / 2, magnitude, negative)


def iq3_s(row: bytes, start: int, j: int) -> float32:
    number = row[start + 2 + j // 4] + 256 * bit(row, start + 66, j // 4)
    multiplier = 2 * bits(row[start + 106 + j // 64], 4 * (j // 32 % 2), 4) + 1
    return value(half(row, start), multiplier, points("iq3_s")[number][j % 4], 1 - 2 * bit(row, start + 74, j))


def _of_rows(element: Callable[[bytes, int, int], float32], size: int) -> Callable[[bytes, int], list[float32]]:
    return lambda row, n: [element(row, start, j) for start in range(0, n // 256 * size, size) for j in range(256)]


DECODERS = {f.__name__: _of_rows(f, size)
            for f, size in ((iq2_xxs, 66), (iq2_xs, 74), (iq2_s, 82), (iq3_xxs, 98), (iq3_s, 110))}  # fmt: skip
