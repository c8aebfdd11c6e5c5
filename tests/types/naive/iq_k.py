"""IQ2_K, IQ3_K, IQ5_K and IQ6_K (cubic), element by element: spec/types-ik.md 4.1 to 4.5. IQ4_K is in `basic`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction

from numpy import float32

from tests.types.naive.fields import bit, bits, half

K2 = (-31, -13, 1, 17)
K3 = (-63, -40, -23, -10, 1, 13, 28, 47)
K5 = (-126, -114, -103, -92, -83, -74, -65, -57, -50, -43, -36, -30, -24, -18, -12, -6,
      -1, 5, 11, 17, 23, 29, 36, 43, 51, 59, 68, 77, 87, 97, 109, 121)  # fmt: skip


def elements(n: int, size: int) -> Iterator[tuple[int, int, int]]:
    """Block's first byte, sub-block and number of every element."""
    return ((start, j // 16, j) for start in range(0, size * n // 256, size) for j in range(256))


def p1(row: bytes, start: int, j: int) -> int:
    return bits(row[start + j % 32], j // 32, 1)


def p2(row: bytes, start: int, j: int) -> int:
    return bits(row[start + 32 * (j // 128) + j % 32], 2 * (j // 32 % 4), 2)


def p4w(row: bytes, start: int, j: int) -> int:
    return bits(row[start + 32 * (j // 64) + j % 32], 4 * (j // 32 % 2), 4)


def iq2_k(row: bytes, n: int) -> list[float32]:
    values = []
    for start, s, j in elements(n, 76):
        m = bits(row[start + 4 + s // 2], 4 * (s % 2), 4) - 8
        c = K2[p2(row, start + 12, j)] + 5 * bit(row, start + 2, s)
        values.append(half(row, start) * float32(m) * float32(c))
    return values


def iq3_k(row: bytes, n: int) -> list[float32]:
    values = []
    for start, s, j in elements(n, 110):
        m = (2 * bits(row[start + 6 + s // 2], 4 * (s % 2), 4) + 1) * (-1 if bit(row, start + 4, s) else 1)
        c = K3[p2(row, start + 14, j) + 4 * p1(row, start + 78, j)] + 4 * bit(row, start + 2, s)
        values.append(half(row, start) * float32(m) * float32(c))
    return values


def iq5_k(row: bytes, n: int) -> list[float32]:
    values = []
    for start, s, j in elements(n, 176):
        m = bits(row[start + 8 + s // 2], 4 * (s % 2), 4) + 16 * bits(row[start + 4 + s // 4], 2 * (s % 4), 2) - 32
        c = K5[p4w(row, start + 16, j) + 16 * p1(row, start + 144, j)] + 2 * bit(row, start + 2, s)
        values.append(half(row, start) * float32(m) * float32(c))
    return values


def rounded(value: Fraction) -> float32:
    """A fraction rounded once: the ones here are short enough to be exact in double precision."""
    assert Fraction(float(value)) == value
    return float32(float(value))


def iq6_k(row: bytes, n: int) -> list[float32]:
    a, b, c, d = (Fraction(float(float32(v))) for v in (-127, 6.2568, -0.11218, 0.0011972))
    values = []
    for start, s, j in elements(n, 212):
        m = (row[start + 4 + s] ^ 128) - 128
        q = p4w(row, start + 20, j) + 16 * p2(row, start + 148, j)
        t = d
        for constant in (c, b, a):
            t = Fraction(float(rounded(t * q + constant)))
        values.append(half(row, start) * float32(m) * (float32(float(t)) + float32(bit(row, start + 2, s))))
    return values


DECODERS: dict[str, Callable[[bytes, int], list[float32]]] = {f.__name__: f for f in (iq2_k, iq3_k, iq5_k, iq6_k)}
