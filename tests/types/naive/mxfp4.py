"""MXFP4, element by element."""

from __future__ import annotations

from numpy import float32, ldexp

from tests.types.naive.fields import nibble

E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def mxfp4(row: bytes, n: int) -> list[float32]:
    blocks = range(0, 17 * n // 32, 17)
    return [
        float32(ldexp(float(E2M1[nibble(row, start + 1, j)]), row[start] - 128)) for start in blocks for j in range(32)
    ]


DECODERS = {"mxfp4": mxfp4}
