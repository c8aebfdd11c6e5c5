"""The K types that `basic` does not have."""

from __future__ import annotations

from collections.abc import Callable

from numpy import float32

from tests.types.naive.fields import bit, bits, half, nibble


def q2_k(row: bytes, n: int) -> list[float32]:
    values = []
    for start in range(0, 84 * n // 256, 84):
        for j in range(256):
            q = bits(row[start + 16 + 32 * (j // 128) + j % 32], 2 * (j % 128 // 32), 2)
            scale = half(row, start + 80) * float32(bits(row[start + j // 16], 0, 4))
            values.append(scale * float32(q) - half(row, start + 82) * float32(bits(row[start + j // 16], 4, 4)))
    return values


def q3_k(row: bytes, n: int) -> list[float32]:
    values = []
    for start in range(0, 110 * n // 256, 110):
        for j in range(256):
            s, sc = j // 16, start + 96
            multiplier = nibble(row, sc, s, 8) + 16 * bits(row[sc + 8 + s % 4], 2 * (s // 4), 2) - 32
            low = bits(row[start + 32 + 32 * (j // 128) + j % 32], 2 * (j % 128 // 32), 2)
            q = low + 4 * bits(row[start + j % 32], j // 32, 1) - 4
            values.append(half(row, start + 108) * float32(multiplier) * float32(q))
    return values


def q5_k(row: bytes, n: int) -> list[float32]:
    values = []
    for start in range(0, 176 * n // 256, 176):
        sc = row[start + 4 : start + 16]
        for j in range(256):
            s = j // 32
            scale = sc[s] & 63 if s < 4 else sc[s + 4] & 15 | sc[s - 4] >> 6 << 4
            minimum = sc[s + 4] & 63 if s < 4 else sc[s + 4] >> 4 | sc[s] >> 6 << 4
            q = nibble(row, start + 48 + 32 * (j // 64), j % 64, 32) + 16 * bit(row, start + 16 + j % 32, s)
            product = half(row, start) * float32(scale) * float32(q)
            values.append(product - half(row, start + 2) * float32(minimum))
    return values


DECODERS: dict[str, Callable[[bytes, int], list[float32]]] = {f.__name__: f for f in (q2_k, q3_k, q5_k)}
