"""CUDA codecs of the trellis types iq1_kt to iq4_kt: an index seeds a generator, which gives 4 or 8 values.

The byte maps are in the types' files: `types/iq1_kt.py` and so on.
"""

from __future__ import annotations

from typing import Any

from quantkit.runtime.kernels.cuda.codecs.base import as_words, base_field, codecs
from quantkit.runtime.kernels.cuda.reader import ONES, Reader, SubBlock
from quantkit.types.families.interleave import packed, planes
from quantkit.types.families.trellis_code import BOOK, OFFSET, POWERS

_SIXES, _MIDDLE = 0x3F3F3F3F, 126


def _values(r: Reader, seed: Any, first: int) -> list[Any]:
    """Four signed values of a group, from its `first` on: sums of four bytes."""
    ones, middle = r.ir.word(ONES), r.ir.word(-_MIDDLE)
    return [r.ir.dot(seed * int(POWERS[first + k]) & _SIXES, ones, middle) for k in range(4)]


def _codebook_scale(r: Reader, code: Any) -> list[Any]:
    table = r.words(*as_words(BOOK))
    return [r.head_float() * r.ir.real(r.ir.signed_byte(r.lookup(table, code)))]


def _bytes(word: Any) -> list[Any]:
    return [word >> 8 * i & 255 for i in range(4)]


_IQ1_KT = base_field(8, packed(8, 8)), base_field(8, packed(8, 32, at=8)), base_field(4, planes(4, 16, 32, at=40))
_IQ2_KT = base_field(4, planes(4, 4, 8)), base_field(16, packed(16, 32, at=4))
_IQ3_KT = *_IQ2_KT, base_field(1, planes(1, 32, 256, at=68))
_IQ4_KT = base_field(32, packed(32, 8)), base_field(8, packed(8, 64, at=32)), base_field(4, planes(4, 32, 64, at=96))


@codecs({"iq1_kt": _IQ1_KT})
def iq1_kt(r: Reader) -> SubBlock:
    """`types/iq1_kt.py`."""
    subs, low, high = r.fields
    sub, codes = subs.at(1), []
    indices = low.quads(1, 4)[0], high.quads(1, 4)[0]
    for i, (a, b) in enumerate(zip(*map(_bytes, indices))):
        seed = (a | b << 8 | (sub >> 4 + i & 1) << 12) + OFFSET
        codes += [r.join(_values(r, seed, first)) for first in (0, 4)]
    return SubBlock(codes, _codebook_scale(r, sub & 15), [])


def _seeds(r: Reader) -> list[Any]:
    return [r.fields[1].at(4, i) + OFFSET for i in range(4)]


@codecs({"iq2_kt": _IQ2_KT})
def iq2_kt(r: Reader) -> SubBlock:
    """`types/iq2_kt.py`."""
    codes = [r.join(_values(r, seed, first)) for seed in _seeds(r) for first in (0, 4)]
    return SubBlock(codes, _codebook_scale(r, r.fields[0].at(1)), [])


@codecs({"iq3_kt": _IQ3_KT})
def iq3_kt(r: Reader) -> SubBlock:
    """Magnitudes of the generator's values, under signs of their own."""
    codes, signs = [], r.fields[2].quads()
    for i, seed in enumerate(_seeds(r)):
        for half in range(2):
            values = []
            for value, negative in zip(_values(r, seed, 4 * half), _bytes(signs[2 * i + half])):
                wrong = value >> 31 ^ negative  # the value's sign is not the one stored
                values.append((value ^ wrong * -1) + wrong)
            codes.append(r.join(values))
    return SubBlock(codes, [r.head_float() * r.ir.real(r.fields[0].at(1))], [])


@codecs({"iq4_kt": _IQ4_KT})
def iq4_kt(r: Reader) -> SubBlock:
    """`types/iq4_kt.py`."""
    words, low, high = r.fields
    word, codes = words.at(1), []
    offset = ((word & 1) << 15) + OFFSET
    pairs = zip(low.quads(2, 8), high.quads(2, 8))
    indices = [index for a, b in pairs for index in zip(_bytes(a), _bytes(b))]
    for i, (a, b) in enumerate(indices):
        seed = (a | b << 8 | (word >> 8 + 3 * i & 7) << 12) + offset
        codes.append(r.join(_values(r, seed, 0)))
    return SubBlock(codes, [r.head_float() * r.ir.real((word >> 1 & 127) - 64)], [])
