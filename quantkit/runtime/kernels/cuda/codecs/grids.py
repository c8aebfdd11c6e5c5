"""CUDA codecs of types whose codes are points of a grid: iq2_xxs, iq2_xs, iq2_s, iq3_xxs, iq3_s, iq1_s and iq1_m.

The byte maps are in the types' files: `types/iq2_xxs.py` and so on. A point is 4 or 8 magnitudes under signs; iq1_s and
iq1_m have ternary points plus a shift of 1/8 for each sub-block.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from quantkit.runtime.kernels.cuda.codecs.base import base_field, codecs
from quantkit.runtime.kernels.cuda.fields import interleaved
from quantkit.runtime.kernels.cuda.reader import Reader, SubBlock
from quantkit.types.families.grid_points import grid
from quantkit.types.families.interleave import Slots, packed
from quantkit.types.families.iq1 import LEVELS


def _table(points: np.ndarray) -> list[int]:
    """Points as words of four bytes, one after the other."""
    return np.ascontiguousarray(points).astype(np.int8).view("<u4").ravel().tolist()


_GRIDS = {name: _table(grid(name).points) for name in ("iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s")}
_TERNARY = _table(8 * LEVELS + 8)  # in eighths, as the shift is, and none negative


def bytes_of(word: Any) -> list[Any]:
    """The four bytes of a word, as words."""
    return [word >> 8 * i & 255 for i in range(4)]


def points_under(r: Reader, name: str, numbers: list[Any]) -> list[Any]:
    """The magnitudes of four or eight points of a grid, as eight words."""
    if len(numbers) == 8:
        return [r.ir.table(name, _GRIDS[name], number) for number in numbers]
    return [r.ir.table(name, _GRIDS[name], number * 2 + half) for number in numbers for half in range(2)]


def signed(r: Reader, name: str, numbers: list[Any], signs: list[Any]) -> list[Any]:
    """Codes of a unit: the same under four bytes of signs."""
    nibbles = [byte >> 4 * half & 15 for byte in signs for half in range(2)]
    return [r.negate(word, r.spread(n)) for word, n in zip(points_under(r, name, numbers), nibbles)]


def _with_parity(sevens: Any) -> Any:
    """Seven signs and the eighth, which makes the number of negative ones even."""
    half = sevens ^ sevens >> 4
    half = half ^ half >> 2
    return sevens | (half ^ half >> 1) << 7 & 128


def odd(r: Reader, d: Any, number: Any, unit: float) -> Any:
    """(2 l + 1) * unit * d; exact, so that (d * (l + 0.5) / 4) is this with an eighth."""
    return d * unit * r.ir.real(number * 2 + 1)


@codecs({"iq2_xxs": (base_field(16, [0]), base_field(32, packed(32, 16, at=2)))})
def iq2_xxs(r: Reader) -> SubBlock:
    """`types/iq2_xxs.py`."""
    d, words = r.fields
    word = words.at(2, 1)
    signs = [_with_parity(word >> 7 * i & 127) for i in range(4)]
    codes = signed(r, "iq2_xxs", bytes_of(words.at(2)), signs)
    return SubBlock(codes, [odd(r, r.half(d.at()), word >> 28, 0.125)], [])


@codecs(
    {"iq2_xs": (base_field(16, [0]), base_field(16, packed(16, 32, at=2)), base_field(4, packed(4, 16, at=66)))},
    group=16,
)
def iq2_xs(r: Reader) -> SubBlock:
    """`types/iq2_xs.py`."""
    d, words, numbers = r.fields
    each = [words.at(4, i) for i in range(4)]
    codes = signed(r, "iq2_xs", [w & 511 for w in each], [_with_parity(w >> 9) for w in each])
    scale = r.half(d.at())
    return SubBlock(codes, [odd(r, scale, numbers.at(2, h), 0.125) for h in range(2)], [])


_IQ2_S = (
    base_field(16, [0]),
    base_field(8, packed(8, 32, at=2)),
    base_field(8, packed(8, 32, at=34)),
    base_field(8, packed(8, 8, at=66)),
    base_field(4, packed(4, 16, at=74)),
)


@codecs({"iq2_s": _IQ2_S}, group=16)
def iq2_s(r: Reader) -> SubBlock:
    """`types/iq2_s.py`."""
    d, low, signs, high, numbers = r.fields
    high_bits = high.at(1)
    points = [a | (high_bits >> 2 * i & 3) << 8 for i, a in enumerate(bytes_of(low.quads(1, 4)[0]))]
    codes = signed(r, "iq2_s", points, bytes_of(signs.quads(1, 4)[0]))
    scale = r.half(d.at())
    return SubBlock(codes, [odd(r, scale, numbers.at(2, h), 0.125) for h in range(2)], [])


@codecs({"iq3_xxs": (base_field(16, [0]), base_field(8, packed(8, 64, at=2)), base_field(32, packed(32, 8, at=66)))})
def iq3_xxs(r: Reader) -> SubBlock:
    """`types/iq3_xxs.py`."""
    d, low, words = r.fields
    word = words.at(1)
    points = [point for quad in low.quads(2, 8) for point in bytes_of(quad)]
    signs = [_with_parity(word >> 7 * i & 127) for i in range(4)]
    return SubBlock(signed(r, "iq3_xxs", points, signs), [odd(r, r.half(d.at()), word >> 28, 0.25)], [])


_IQ3_S = (
    base_field(16, [0]),
    base_field(8, packed(8, 64, at=2)),
    base_field(8, packed(8, 8, at=66)),
    base_field(8, packed(8, 32, at=74)),
    base_field(4, packed(4, 8, at=106)),
)


@codecs({"iq3_s": _IQ3_S})
def iq3_s(r: Reader) -> SubBlock:
    """`types/iq3_s.py`."""
    d, low, high, signs, numbers = r.fields
    high_bits = high.at(1)
    points = [point for quad in low.quads(2, 8) for point in bytes_of(quad)]
    points = [point | (high_bits >> i & 1) << 8 for i, point in enumerate(points)]
    codes = signed(r, "iq3_s", points, bytes_of(signs.quads(1, 4)[0]))
    return SubBlock(codes, [odd(r, r.half(d.at()), numbers.at(1), 1.0)], [])


def _ternary(r: Reader, points: list[Any], negative: list[Any]) -> list[Any]:
    """Codes in eighths of four points, each under its flag of a negative shift, plus 9."""
    codes = []
    for point, flag in zip(points, negative):
        shift = r.ir.choose(flag, r.ir.word(0), r.ir.word(0x02020202))
        for half in range(2):
            codes.append(r.ir.table("iq1", _TERNARY, point * 2 + half) + shift)
    return codes


@codecs(
    {"iq1_s": (base_field(16, [0]), base_field(8, packed(8, 32, at=2)), base_field(16, packed(16, 8, at=34)))},
    has_shift=True,
)
def iq1_s(r: Reader) -> SubBlock:
    """`types/iq1_s.py`."""
    d, low, high = r.fields
    return _sub_block(r, r.half(d.at()), bytes_of(low.quads(1, 4)[0]), high.at(1))


def _sub_block(r: Reader, d: Any, low: list[Any], word: Any) -> SubBlock:
    points = [a | (word >> 3 * i & 7) << 8 for i, a in enumerate(low)]
    codes = _ternary(r, points, [word >> 15 & 1] * 4)
    return SubBlock(codes, [odd(r, d, word >> 12 & 7, 0.125)], [], [r.number(-9)])


@codecs({"iq1_s_r4": (interleaved(8, 4, 4, Slots(0, at=0)), interleaved(16, 1, 4, Slots(0, at=16)))}, has_shift=True)
def iq1_s_r4(r: Reader) -> SubBlock:
    """`types/iq1_s_r4.py`."""
    low, high = r.fields
    return _sub_block(r, r.head_half(), [low.at(0, i) for i in range(4)], high.at())


@codecs(
    {
        "iq1_m": (
            base_field(8, packed(8, 32)),
            base_field(8, packed(8, 16, at=32)),
            base_field(16, packed(16, 4, at=48)),
        )
    },
    group=16,
    has_shift=True,
)
def iq1_m(r: Reader) -> SubBlock:
    """`types/iq1_m.py`: the f16 scale is in the top four bits of four words."""
    low, high, words = r.fields
    bits = r.ir.word(0)
    for j in range(4):
        bits = bits | words.at(0, j) >> 12 << 4 * j
    d = r.half(bits)
    nibbles = [high.at(2, g // 2) >> 4 * (g % 2) & 15 for g in range(4)]
    points = [a | (n & 7) << 8 for a, n in zip(bytes_of(low.quads(1, 4)[0]), nibbles)]
    numbers = r.ir.load(16, r.block + 48 + r.ir.wide((r.sub_block >> 1) * 2), 2) >> (r.sub_block & 1) * 6
    scales = [odd(r, d, numbers >> 3 * h & 7, 0.125) for h in range(2)]
    return SubBlock(_ternary(r, points, [n & 8 for n in nibbles]), scales, [], [r.number(-9)])


_IQ1_M_R4 = (
    interleaved(8, 4, 4, Slots(0, at=0)),
    interleaved(8, 2, 4, Slots(0, at=16)),
    interleaved(8, 1, 4, Slots(0, at=24)),
)


@codecs({"iq1_m_r4": _IQ1_M_R4}, group=16, has_shift=True)
def iq1_m_r4(r: Reader) -> SubBlock:
    """`types/iq1_m_r4.py`."""
    low, high, multipliers = r.fields
    d, byte = r.head_half(), multipliers.at()
    nibbles = [high.at(0, g // 2) >> 4 * (g % 2) & 15 for g in range(4)]
    points = [low.at(0, g) | (n & 7) << 8 for g, n in enumerate(nibbles)]
    scales = [d * r.ir.real(byte >> 4 * h & 15) * 0.125 for h in range(2)]
    return SubBlock(_ternary(r, points, [n & 8 for n in nibbles]), scales, [], [r.number(-9)])
