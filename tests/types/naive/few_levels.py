"""Types of one bit or two, of three values (spec/types-ik.md 6.5 to 6.8), and q8_KV (6.3)."""

from __future__ import annotations

import struct
from collections.abc import Callable

from numpy import float32

from tests.types.naive.fields import bit, bits, half, single


def q1_0_g128(row: bytes, n: int) -> list[float32]:
    def sign(start: int, j: int) -> int:
        return 1 if bit(row, start + 2, j) else -1

    return [half(row, start) * float32(sign(start, j)) for start in range(0, 18 * n // 128, 18) for j in range(128)]


def iq1_bn(row: bytes, n: int) -> list[float32]:
    def digit(start: int, j: int) -> int:
        i, p = divmod(j, 16)
        byte, k = (row[start + 3 * i + p // 5], p % 5) if p < 15 else (row[start + 12], i)
        return 3 * (byte * 3 ** (4 - k) % 256) // 256

    blocks = range(2, 2 + 13 * n // 64, 13)
    return [half(row, 0) * float32(digit(start, j) - 1) for start in blocks for j in range(64)]


def iq2_bn(row: bytes, n: int) -> list[float32]:
    blocks = range(4, 4 + 16 * n // 64, 16)
    return [
        single(row, 0) * float32(bits(row[start + j % 16], 2 * (j // 16), 2) - 1) for start in blocks for j in range(64)
    ]


def i2_s(row: bytes, n: int) -> list[float32]:
    def field(k: int) -> int:
        return bits(row[32 * (k // 128) + k % 32], 6 - 2 * (k % 128 // 32), 2)

    return [single(row, n // 4) * float32(field(k) - 1) for k in range(n)]


def tq1_0(row: bytes, n: int) -> list[float32]:
    def digit(start: int, j: int) -> int:
        first, count, at = (0, 32, 0) if j < 160 else (160, 16, 32) if j < 240 else (240, 4, 48)
        k, i = divmod(j - first, count)
        return row[start + at + i] * 3**k % 256 * 3 // 256

    blocks = range(0, 54 * n // 256, 54)
    return [half(row, start + 52) * float32(digit(start, j) - 1) for start in blocks for j in range(256)]


def tq2_0(row: bytes, n: int) -> list[float32]:
    def field(start: int, j: int) -> int:
        return bits(row[start + 32 * (j // 128) + j % 32], 2 * (j % 128 // 32), 2)

    blocks = range(0, 66 * n // 256, 66)
    return [half(row, start + 64) * float32(field(start, j) - 1) for start in blocks for j in range(256)]


def q2_0(row: bytes, n: int) -> list[float32]:
    """dequantize_row_q2_0 of llama.cpp: -d, 0, d, 2 d; low bits first."""
    blocks = range(0, 18 * n // 64, 18)
    return [
        half(row, start) * float32(bits(row[start + 2 + j // 4], 2 * (j % 4), 2) - 1)
        for start in blocks
        for j in range(64)
    ]


def q8_kv(row: bytes, n: int) -> list[float32]:
    return [single(row, 0) * float32(q) for q in struct.unpack_from(f"<{n}b", row, 8)]


DECODERS: dict[str, Callable[[bytes, int], list[float32]]] = {
    f.__name__: f for f in (q1_0_g128, iq1_bn, iq2_bn, i2_s, tq1_0, tq2_0, q2_0, q8_kv)
}
