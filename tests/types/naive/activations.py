"""Activation formats (spec/types-ik.md 7)."""

from __future__ import annotations

import struct
from collections.abc import Callable

from numpy import float32

from tests.types.naive.fields import half, single

Decoder = Callable[[bytes, int], list[float32]]


def codes(row: bytes, start: int, count: int) -> list[float32]:
    return [float32(q) for q in struct.unpack_from(f"<{count}b", row, start)]


def blocks(width: int, size: int, codes_at: int) -> Decoder:
    """Blocks that begin with a float32 scale."""

    def decode(row: bytes, n: int) -> list[float32]:
        starts = range(0, n // width * size, size)
        return [single(row, start) * q for start in starts for q in codes(row, start + codes_at, width)]

    return decode


def classes(run: int, header: int) -> Decoder:
    def decode(row: bytes, n: int) -> list[float32]:
        return [single(row, 4 * (j // run % 4)) * q for j, q in enumerate(codes(row, header, n))]

    return decode


def by_four(head: int, scale: Callable[[bytes, int], float32]) -> Decoder:
    """Four blocks of 32 share a head of 4 * `head` bytes, the scales first; those that are left have each its own."""

    def decode(row: bytes, n: int) -> list[float32]:
        values, start, left = [], 0, n // 32
        while left:
            count = 4 if left >= 4 else 1
            for i in range(count):
                d = scale(row, start + 2 * i)
                values += [d * q for q in codes(row, start + head * count + 32 * i, 32)]
            start, left = start + (head + 32) * count, left - count
        return values

    return decode


def bfloat(row: bytes, start: int) -> float32:
    return float32(struct.unpack("<f", b"\0\0" + row[start : start + 2])[0])


def q8_1(row: bytes, n: int) -> list[float32]:
    return [half(row, start) * q for start in range(0, 36 * n // 32, 36) for q in codes(row, start + 4, 32)]


DECODERS: dict[str, Decoder] = {
    "q8_1": q8_1,
    "q8_k": blocks(256, 296, 8), "q8_kr8": blocks(256, 296, 8), "q8_k32": blocks(256, 296, 8),
    "q8_k128": blocks(128, 140, 12),
    "q8_0_x4": by_four(2, half), "q8_1_x4": by_four(4, half), "q8_2_x4": by_four(4, bfloat),
    "q8_k64": classes(4, 32), "q8_k16": classes(16, 20),
}  # fmt: skip
