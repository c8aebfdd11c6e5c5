"""CUDA codecs of iq2_xxs_r4, iq2_xs_r4, iq2_s_r4, iq3_xxs_r4 and iq3_s_r4: points of `grids.py`, four rows interleaved.

The byte maps are in the types' files: `types/iq2_xxs_r4.py` and so on. Where seven signs stand for eight, these types
store their running exclusive-or (`types/families/interleave.Signs`).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from quantkit.runtime.kernels.cuda.codecs.base import codecs
from quantkit.runtime.kernels.cuda.codecs.grids import bytes_of, odd, points_under, signed
from quantkit.runtime.kernels.cuda.fields import LinearAddresses, interleaved, linear_addresses
from quantkit.runtime.kernels.cuda.reader import Reader, SubBlock
from quantkit.types.families.interleave import PLANE_A, Lines, Slots

_D = interleaved(16, 1, 4, Slots(0, at=0))


def _words(offset: int, each: int = 1) -> LinearAddresses:
    """Of each sub-block so many words of each row in turn, of eight sub-blocks: word `each` * unit + number."""
    k, j = np.arange(4)[:, None], np.arange(8 * each)
    return linear_addresses(32, 8 * (offset + 4 * (each * (4 * (j // each) + k) + j % each)))


def _bytes(offset: int) -> LinearAddresses:
    return interleaved(8, 8, 4, Slots(0, at=offset))


def _running(sevens: Any) -> Any:
    """Eight signs of the running exclusive-or of seven."""
    return (sevens ^ sevens << 1) & 255


def _signs_and_scale(word: Any) -> tuple[list[Any], Any]:
    """Of a word of four bytes: a bit of the scale each, and seven signs."""
    each = bytes_of(word)
    number = (each[0] & 1) | (each[1] & 1) << 1 | (each[2] & 1) << 2 | (each[3] & 1) << 3
    return [_running(byte >> 1) for byte in each], number


@codecs({"iq2_xxs_r4": (_D, _words(8), _words(136))})
def iq2_xxs_r4(r: Reader) -> SubBlock:
    """`types/iq2_xxs_r4.py`."""
    d, signs, points = r.fields
    negative, number = _signs_and_scale(signs.at(1))
    codes = signed(r, "iq2_xxs", bytes_of(points.at(1)), negative)
    return SubBlock(codes, [odd(r, r.half(d.at()), number, 0.125)], [])


@codecs({"iq2_xs_r4": (_D, _words(8, 2), _bytes(264))}, group=16)
def iq2_xs_r4(r: Reader) -> SubBlock:
    """`types/iq2_xs_r4.py`."""
    d, words, numbers = r.fields
    each = [half for i in range(2) for half in (words.at(2, i) & 0xFFFF, words.at(2, i) >> 16)]
    codes = signed(r, "iq2_xs", [w & 511 for w in each], [_running(w >> 9) for w in each])
    scale, byte = r.half(d.at()), numbers.at(1)
    return SubBlock(codes, [odd(r, scale, byte >> 4 * h & 15, 0.125) for h in range(2)], [])


@codecs({"iq2_s_r4": (_D, _words(8), _bytes(136), _words(168), _bytes(296))}, group=16)
def iq2_s_r4(r: Reader) -> SubBlock:
    """`types/iq2_s_r4.py`."""
    d, low, high, signs, numbers = r.fields
    high_bits, byte = high.at(1), numbers.at(1)
    points = [a | (high_bits >> 2 * i & 3) << 8 for i, a in enumerate(bytes_of(low.at(1)))]
    scale = r.half(d.at())
    codes = signed(r, "iq2_s", points, bytes_of(signs.at(1)))
    return SubBlock(codes, [odd(r, scale, byte >> 4 * h & 15, 0.125) for h in range(2)], [])


@codecs({"iq3_xxs_r4": (_D, _words(8), _words(136, 2))})
def iq3_xxs_r4(r: Reader) -> SubBlock:
    """`types/iq3_xxs_r4.py`."""
    d, signs, points = r.fields
    negative, number = _signs_and_scale(signs.at(1))
    numbers = [byte for i in range(2) for byte in bytes_of(points.at(2, i))]
    return SubBlock(signed(r, "iq3_xxs", numbers, negative), [odd(r, r.half(d.at()), number, 0.25)], [])


def _entries() -> LinearAddresses:
    """The eight numbers of a unit: 0, 4, 1, 5, 2, 6, 3, 7, of each row in turn."""
    k, j = np.arange(4)[:, None], np.arange(64)
    return linear_addresses(8, 8 * (8 + 4 * (j // 8 * 8 + j % 4 * 2 + j % 8 // 4) + k))


_IQ3_S = (
    _D,
    _entries(),
    _bytes(264),
    interleaved(1, 256, 4, Lines(PLANE_A, at=296)),
    interleaved(4, 8, 4, Slots(16, at=424)),
)


@codecs({"iq3_s_r4": _IQ3_S})
def iq3_s_r4(r: Reader) -> SubBlock:
    """`types/iq3_s_r4.py`."""
    d, low, high, signs, numbers = r.fields
    high_bits = high.at(1)
    points = [low.at(8, i) | (high_bits >> i & 1) << 8 for i in range(8)]
    codes = [r.negate(code, ones) for code, ones in zip(points_under(r, "iq3_s", points), signs.quads())]
    return SubBlock(codes, [odd(r, r.half(d.at()), numbers.at(1), 1.0)], [])
