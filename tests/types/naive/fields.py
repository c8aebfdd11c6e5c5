"""Fields of packed bytes, one at a time."""

from __future__ import annotations

import struct

from numpy import float32


def half(row: bytes, start: int) -> float32:
    return float32(struct.unpack_from("<e", row, start)[0])


def nibble(row: bytes, start: int, j: int, count: int = 16) -> int:
    """Element j of 2 * count nibbles: the low ones first."""
    return row[start + j % count] >> 4 * (j // count) & 15


def bit(row: bytes, start: int, j: int) -> int:
    return row[start + j // 8] >> j % 8 & 1


def single(row: bytes, start: int) -> float32:
    return float32(struct.unpack_from("<f", row, start)[0])


def bits(v: int, first: int, width: int) -> int:
    """The `width` bits of v that start at bit `first`."""
    return v >> first & (1 << width) - 1
