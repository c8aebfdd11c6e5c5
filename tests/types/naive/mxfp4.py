"""MXFP4 and NVFP4, element by element."""

from __future__ import annotations

from numpy import float32, ldexp

from tests.types.naive.fields import bits, nibble

E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def mxfp4(row: bytes, n: int) -> list[float32]:
    blocks = range(0, 17 * n // 32, 17)
    return [
        float32(ldexp(float(E2M1[nibble(row, start + 1, j)]), row[start] - 128)) for start in blocks for j in range(32)
    ]


def ue4m3(byte: int) -> float:
    exponent, mantissa = bits(byte, 3, 4), bits(byte, 0, 3)
    if byte == 127:
        return 0.0
    return mantissa / 512 if exponent == 0 else (8 + mantissa) / 8 * 2.0 ** (exponent - 7)


def nvfp4(row: bytes, n: int) -> list[float32]:
    def value(start: int, j: int) -> float32:
        s, k = divmod(j, 16)
        return float32(ue4m3(row[start + s]) / 2) * float32(E2M1[nibble(row, start + 4 + 8 * s, k, 8)])

    return [value(start, j) for start in range(0, 36 * n // 64, 36) for j in range(64)]


DECODERS = {"mxfp4": mxfp4, "nvfp4": nvfp4}
