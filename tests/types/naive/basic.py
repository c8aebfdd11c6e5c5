"""The types of the main job, element by element; every operation on float32 is rounded at once, as the formats say."""

from __future__ import annotations

import struct
from collections.abc import Callable

from numpy import float32

from tests.types.naive.fields import bit, half, nibble

KVALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def f32(row: bytes, n: int) -> list[float32]:
    return [float32(v) for v in struct.unpack(f"<{n}f", row)]


def f16(row: bytes, n: int) -> list[float32]:
    return [half(row, 2 * j) for j in range(n)]


def bf16(row: bytes, n: int) -> list[float32]:
    return [float32(struct.unpack("<f", b"\0\0" + row[2 * j : 2 * j + 2])[0]) for j in range(n)]


def q4_0(row: bytes, n: int) -> list[float32]:
    return [
        half(row, start) * float32(nibble(row, start + 2, j) - 8)
        for start in range(0, 18 * n // 32, 18)
        for j in range(32)
    ]


def q4_1(row: bytes, n: int) -> list[float32]:
    blocks = range(0, 20 * n // 32, 20)
    return [
        half(row, start) * float32(nibble(row, start + 4, j)) + half(row, start + 2)
        for start in blocks
        for j in range(32)
    ]


def q5_0(row: bytes, n: int) -> list[float32]:
    def code(start: int, j: int) -> int:
        return nibble(row, start + 6, j) + 16 * bit(row, start + 2, j) - 16

    return [half(row, start) * float32(code(start, j)) for start in range(0, 22 * n // 32, 22) for j in range(32)]


def q5_1(row: bytes, n: int) -> list[float32]:
    def code(start: int, j: int) -> int:
        return nibble(row, start + 8, j) + 16 * bit(row, start + 4, j)

    blocks = range(0, 24 * n // 32, 24)
    return [half(row, start) * float32(code(start, j)) + half(row, start + 2) for start in blocks for j in range(32)]


def q6_0(row: bytes, n: int) -> list[float32]:
    def code(start: int, j: int) -> int:
        i, h = j % 16, j // 16
        return nibble(row, start + 10, j) + 16 * (row[start + 2 + i % 8] >> 4 * (i // 8) + 2 * h & 3) - 32

    return [half(row, start) * float32(code(start, j)) for start in range(0, 26 * n // 32, 26) for j in range(32)]


def q8_0(row: bytes, n: int) -> list[float32]:
    def code(start: int) -> int:
        return struct.unpack_from("<b", row, start)[0]

    return [half(row, start) * float32(code(start + 2 + j)) for start in range(0, 34 * n // 32, 34) for j in range(32)]


def iq4_nl(row: bytes, n: int) -> list[float32]:
    blocks = range(0, 18 * n // 32, 18)
    return [half(row, start) * float32(KVALUES[nibble(row, start + 2, j)]) for start in blocks for j in range(32)]


def q4_k(row: bytes, n: int) -> list[float32]:
    values = []
    for start in range(0, 144 * n // 256, 144):
        sc = row[start + 4 : start + 16]
        for j in range(256):
            s = j // 32
            scale = sc[s] & 63 if s < 4 else sc[s + 4] & 15 | sc[s - 4] >> 6 << 4
            minimum = sc[s + 4] & 63 if s < 4 else sc[s + 4] >> 4 | sc[s] >> 6 << 4
            q = nibble(row, start + 16 + 32 * (j // 64), j % 64, 32)
            product = half(row, start) * float32(scale) * float32(q)
            values.append(product - half(row, start + 2) * float32(minimum))
    return values


def q6_k(row: bytes, n: int) -> list[float32]:
    values = []
    for start in range(0, 210 * n // 256, 210):
        for j in range(256):
            part, i = j // 128, j % 128
            low = nibble(row, start + 64 * part, i, 64)
            high = row[start + 128 + 32 * part + i % 32] >> 2 * (i // 32) & 3
            scale = struct.unpack_from("<b", row, start + 192 + j // 16)[0]
            values.append(half(row, start + 208) * float32(scale) * float32(low + 16 * high - 32))
    return values


def iq4_k(row: bytes, n: int) -> list[float32]:
    values = []
    for start in range(0, 144 * n // 256, 144):
        for j in range(256):
            s = j // 16
            low = row[start + 8 + s // 2] >> 4 * (s % 2) & 15
            high = row[start + 4 + s // 4] >> 2 * (s % 4) & 3
            shift = 4 * bit(row, start + 2, s)
            q = nibble(row, start + 16 + 16 * (j // 32), j % 32)
            values.append(half(row, start) * float32(low + 16 * high - 32) * float32(KVALUES[q] + shift))
    return values


DECODERS: dict[str, Callable[[bytes, int], list[float32]]] = {
    f.__name__: f for f in (f32, f16, bf16, q4_0, q4_1, q5_0, q5_1, q6_0, q8_0, iq4_nl, q4_k, q6_k, iq4_k)
}
