"""The trellis types: the generator as it is defined, one value after the other."""

from __future__ import annotations

from numpy import float32

from tests.types.naive.fields import bit, bits, nibble, single

BOOK = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def values(seed: int, count: int = 8) -> list[int]:
    result = []
    for _ in range(count):
        seed = seed * 3417055213 % (1 << 32)
        result.append(sum((seed & 0x3F3F3F3F).to_bytes(4, "little")) - 126)
    return result


def iq1_kt(row: bytes, n: int) -> list[float32]:
    d, out = single(row, 0), []
    for start in range(4, 4 + 56 * n // 256, 56):
        for g in range(32):
            sub = row[start + g // 4]
            index = row[start + 8 + g] + 256 * nibble(row, start + 40, g) + 4096 * bits(sub, 4 + g % 4, 1)
            scale = d * float32(BOOK[sub & 15])
            out += [scale * float32(v) for v in values(index + 4096)]
    return out


def iq2_kt(row: bytes, n: int) -> list[float32]:
    d, out = single(row, 0), []
    for start in range(4, 4 + 68 * n // 256, 68):
        for g in range(32):
            index = int.from_bytes(row[start + 4 + 2 * g : start + 6 + 2 * g], "little")
            scale = d * float32(BOOK[nibble(row, start, g // 4, 4)])
            out += [scale * float32(v) for v in values(index + 4096)]
    return out


def iq3_kt(row: bytes, n: int) -> list[float32]:
    d, out = single(row, 0), []
    for start in range(4, 4 + 100 * n // 256, 100):
        for g in range(32):
            index = int.from_bytes(row[start + 4 + 2 * g : start + 6 + 2 * g], "little")
            scale = d * float32(nibble(row, start, g // 4, 4))
            for k, v in enumerate(values(index + 4096)):
                y = scale * float32(abs(v))
                out.append(-y if bit(row, start + 68 + g % 4 * 8 + k, g // 4) else y)
    return out


def iq4_kt(row: bytes, n: int) -> list[float32]:
    d, out = single(row, 0), []
    for start in range(4, 4 + 128 * n // 256, 128):
        for g in range(64):
            h = int.from_bytes(row[start + 4 * (g // 8) : start + 4 * (g // 8) + 4], "little")
            index = row[start + 32 + g] + 256 * nibble(row, start + 96, g, 32) + 4096 * bits(h, 8 + 3 * (g % 8), 3)
            scale = d * float32(bits(h, 1, 7) - 64)
            out += [scale * float32(v) for v in values(index + 4096 + 32768 * (h & 1), 4)]
    return out


DECODERS = {"iq1_kt": iq1_kt, "iq2_kt": iq2_kt, "iq3_kt": iq3_kt, "iq4_kt": iq4_kt}
