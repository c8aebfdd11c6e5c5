"""Types whose groups of 32 share one scale of a row (iq4_xs: of a block), element by element."""

from __future__ import annotations

from numpy import float32

from tests.types.naive.fields import bit, bits, half, nibble, single

K2 = (-31, -13, 1, 17)
K3 = (-63, -40, -23, -10, 1, 13, 28, 47)
K4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
K5 = (-126, -114, -103, -92, -83, -74, -65, -57, -50, -43, -36, -30, -24, -18, -12, -6,
      -1, 5, 11, 17, 23, 29, 36, 43, 51, 59, 68, 77, 87, 97, 109, 121)  # fmt: skip


def two_bits(row: bytes, start: int, j: int) -> int:
    """Element j of 256 codes of 2 bits: per 128 elements 32 bytes, the lowest bits first."""
    return bits(row[start + 32 * (j // 128) + j % 32], 2 * (j // 32 % 4), 2)


def iq2_ks(row: bytes, n: int) -> list[float32]:
    values = []
    for start in range(2, 2 + 70 * n // 256, 70):
        for j in range(256):
            g = j // 32
            m = bits(row[start + 2 + g // 2], 4 * (g % 2), 4) + 16 * bit(row, start + 1, g) - 16
            value = K2[two_bits(row, start + 6, j)] + 5 * bit(row, start, g)
            values.append(half(row, 0) * float32(m) * float32(value))
    return values


def iq3_ks(row: bytes, n: int) -> list[float32]:
    values = []
    for start in range(2, 2 + 102 * n // 256, 102):
        for j in range(256):
            g = j // 32
            m = nibble(row, start + 2, g, 4) + 16 * bit(row, start, g) - 16
            q = two_bits(row, start + 6, j) + 4 * bits(row[start + 70 + j % 32], g, 1)
            value = K3[q] + 4 * bit(row, start + 1, g)
            values.append(half(row, 0) * float32(m) * float32(value))
    return values


def iq4_ks(row: bytes, n: int) -> list[float32]:
    values = []
    for start in range(4, 4 + 136 * n // 256, 136):
        for j in range(256):
            sc = row[start + j // 32]
            value = K4[nibble(row, start + 8 + 16 * (j // 32), j % 32)] + 4 * (sc & 1)
            values.append(single(row, 0) * float32((sc & 254) - 127) * float32(value))
    return values


def iq5_ks(row: bytes, n: int) -> list[float32]:
    values = []
    for start in range(4, 4 + 168 * n // 256, 168):
        for j in range(256):
            sc = row[start + j // 32]
            q = nibble(row, start + 8 + 32 * (j // 64), j % 64, 32) + 16 * bits(row[start + 136 + j % 32], j // 32, 1)
            values.append(single(row, 0) * float32((sc & 254) - 127) * float32(K5[q] + 2 * (sc & 1)))
    return values


def iq4_kss(row: bytes, n: int) -> list[float32]:
    values = []
    for start in range(4, 4 + 128 * n // 256, 128):
        words = [row[start + 2 * i] + 256 * row[start + 2 * i + 1] for i in range(64)]
        for j in range(256):
            g, e = j // 32, j % 32
            s = sum((words[8 * g + k] & 1) << k for k in range(8))
            u = words[8 * g + e % 16 // 2] & 0xFFFE
            q = bits(u ^ u >> 1, 4 * (2 * (e % 2) + e // 16), 4)
            values.append(single(row, 0) * float32((s & 254) - 127) * float32(K4[q] + 4 * (s & 1)))
    return values


def iq4_xs(row: bytes, n: int) -> list[float32]:
    values = []
    for start in range(0, 136 * n // 256, 136):
        for j in range(256):
            g = j // 32
            m = bits(row[start + 4 + g // 2], 4 * (g % 2), 4) + 16 * bits(row[start + 2 + g // 4], 2 * (g % 4), 2) - 32
            value = K4[nibble(row, start + 8 + 16 * g, j % 32)]
            values.append(half(row, start) * float32(m) * float32(value))
    return values


DECODERS = {f.__name__: f for f in (iq2_ks, iq3_ks, iq4_ks, iq5_ks, iq4_kss, iq4_xs)}
