"""IQ2_KL, IQ1_S and IQ1_M, element by element; the grid of the IQ1 types is read from the hex string of `gguf`."""

from __future__ import annotations

import functools
from collections.abc import Callable

from numpy import float32

from tests.types.naive.fields import bit, bits, half, nibble

PAIRS = (
    (-63, -23), (-63, 13), (-40, -63), (-40, -10), (-40, 13), (-40, 47), (-23, -40), (-23, -23),
    (-23, 1), (-23, 13), (-23, 28), (-10, -63), (-10, 1), (-10, 13), (-10, 47), (1, -23),
    (1, -10), (1, 1), (1, 13), (1, 28), (13, -40), (13, -23), (13, -10), (13, 1),
    (13, 13), (28, -63), (28, -23), (28, 1), (28, 28), (28, 47), (47, -23), (47, 13),
)  # fmt: skip


def iq2_kl(row: bytes, n: int) -> list[float32]:
    values = []
    for start in range(2, 2 + 86 * n // 256, 86):
        for j in range(256):
            s, p = j // 32, j % 32 // 2
            low = row[start + 2 + s % 4] >> 4 * (s // 4) & 15
            high = bits(row[start + s // 4], 2 * (s % 4), 2)
            code = row[start + 6 + 16 * (s // 2) + p] >> 4 * (s % 2) & 15 | bit(row, start + 70 + p, s) << 4
            values.append(half(row, 0) * float32(low + 16 * high - 32) * float32(PAIRS[code][j % 2]))
    return values


@functools.cache
def grid() -> tuple[tuple[int, ...], ...]:
    """The 2048 points, eight digits of two bits each from a word of four hex digits, the low byte's first."""
    import gguf

    text = gguf.quants.IQ1_S.grid_hex.decode()
    words = (int(text[i + 2 : i + 4] + text[i : i + 2], 16) for i in range(0, len(text), 4))
    return tuple(tuple(bits(word, 2 * j, 2) - 1 for j in range(8)) for word in words)


def ternary(scale: float32, point: int, negative: int) -> list[float32]:
    """The eight values of a group."""
    delta = float32(-0.125 if negative else 0.125)
    return [scale * (float32(level) + delta) for level in grid()[point]]


def word(row: bytes, start: int) -> int:
    return row[start] | row[start + 1] << 8


def iq1_s(row: bytes, n: int) -> list[float32]:
    values = []
    for start in range(0, 50 * n // 256, 50):
        for g in range(32):
            qh = word(row, start + 34 + 2 * (g // 4))
            scale = half(row, start) * float32(2 * bits(qh, 12, 3) + 1)
            values += ternary(scale, row[start + 2 + g] | bits(qh, 3 * (g % 4), 3) << 8, qh >> 15)
    return values


def iq1_m(row: bytes, n: int) -> list[float32]:
    values = []
    for start in range(0, 56 * n // 256, 56):
        sc = [word(row, start + 48 + 2 * j) for j in range(4)]
        d = sum((s >> 12) << 4 * j for j, s in enumerate(sc))
        for g in range(32):
            scale = half(d.to_bytes(2, "little"), 0) * float32(2 * bits(sc[g // 8], 3 * (g // 2 % 4), 3) + 1)
            high = nibble(row, start + 32 + g // 2, g % 2, 1)
            values += ternary(scale, row[start + g] | bits(high, 0, 3) << 8, high >> 3)
    return values


def iq1_s_r4(rows: bytes, n: int) -> list[list[float32]]:
    """A group of four rows."""
    values: list[list[float32]] = [[], [], [], []]
    for k in range(4):
        for start in range(8, 8 + 24 * n // 32, 24):
            qh = word(rows, start + 16 + 2 * k)
            scale = half(rows, 2 * k) * float32(2 * bits(qh, 12, 3) + 1)
            for g in range(4):
                values[k] += ternary(scale, rows[start + 4 * g + k] | bits(qh, 3 * g, 3) << 8, qh >> 15)
    return values


def iq1_m_r4(rows: bytes, n: int) -> list[list[float32]]:
    """A group of four rows."""
    values: list[list[float32]] = [[], [], [], []]
    for k in range(4):
        for start in range(8, 8 + 28 * n // 32, 28):
            for g in range(4):
                scale = half(rows, 2 * k) * float32(bits(rows[start + 24 + k], 4 * (g // 2), 4))
                high = bits(rows[start + 16 + 4 * (g // 2) + k], 4 * (g % 2), 4)
                values[k] += ternary(scale, rows[start + 4 * g + k] | bits(high, 0, 3) << 8, high >> 3)
    return values


DECODERS: dict[str, Callable[[bytes, int], list[float32]]] = {f.__name__: f for f in (iq2_kl, iq1_s, iq1_m)}
