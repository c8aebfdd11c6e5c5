"""CUDA codecs of iq2_k to iq6_k, interleaved or not: codes name values of a codebook.

The byte maps are in the types' files: `types/iq2_k.py`, and of interleaved rows `types/iq2_k_r4.py`, and so on. Each 16
columns have a flag that selects the codebook or its shifted form (`types/families/codebooks.py`): the plain values and
a shift.
"""

from __future__ import annotations

from typing import Any

from quantkit.runtime.kernels.cuda.codecs.base import as_words, base_field, codecs, minus_offset
from quantkit.runtime.kernels.cuda.fields import base_and_interleaved
from quantkit.runtime.kernels.cuda.reader import Reader, SubBlock
from quantkit.types.families.codebooks import K2, K3, K4, K5, K6, Book
from quantkit.types.families.interleave import packed, planes
from quantkit.types.iq2_k_r4 import IQ2_K_R4
from quantkit.types.iq3_k_r4 import IQ3_K_R4
from quantkit.types.iq4_k_r4 import IQ4_K_R4
from quantkit.types.iq5_k_r4 import IQ5_K_R4


def table_of(r: Reader, book: Book) -> list[Any]:
    """The words of a book's plain values."""
    return r.words(*as_words(book.values[: book.count]))


def lookup_codes(r: Reader, book: Book, codes: list[Any]) -> list[Any]:
    """The plain values of a sub-block's codes."""
    return [r.lookup(table_of(r, book), c) for c in codes]


def lookup_of_four(r: Reader, book: Book, codes: list[Any], flags: list[Any]) -> list[Any]:
    """The values of codes of a book of four, of which each of `flags` chooses the form for its part of the codes.

    Such a table is one word: choosing it is cheaper than a shift.
    """
    plain, raised = r.words(*as_words(book.values))
    each = len(codes) // len(flags)
    return [r.lookup([r.ir.choose(flags[i // each], raised, plain)], c) for i, c in enumerate(codes)]


def shifts_of(r: Reader, book: Book, flags: list[Any]) -> list[Any]:
    """By how much values are above the plain ones; flags are words of 0 or 1."""
    step = float(book.values[book.count] - book.values[0])
    return [r.ir.real(flag) * step for flag in flags]


def _flags(r: Reader) -> list[Any]:
    return [r.fields[1].at(2, h) for h in range(2)]


@codecs(base_and_interleaved(IQ2_K_R4), group=16)
def iq2_k(r: Reader) -> SubBlock:
    """`types/iq2_k.py`."""
    d, _, numbers, crumbs = r.fields
    scale = r.half(d.at())
    scales = [scale * minus_offset(r, numbers.at(2, h), 8) for h in range(2)]
    return SubBlock(lookup_of_four(r, K2, crumbs.quads(), _flags(r)), scales, [])


@codecs(base_and_interleaved(IQ3_K_R4), group=16, has_shift=True)
def iq3_k(r: Reader) -> SubBlock:
    """`types/iq3_k.py`."""
    d, _, signs, numbers, crumbs, high = r.fields
    scale, scales = r.half(d.at()), []
    for h in range(2):
        size = numbers.at(2, h) * 2 + 1
        scales.append(scale * r.ir.real(r.ir.choose(signs.at(2, h), size * -1, size)))
    codes = [c | high_bits << 2 for c, high_bits in zip(crumbs.quads(), high.quads())]
    return SubBlock(lookup_codes(r, K3, codes), scales, [], shifts_of(r, K3, _flags(r)))


def _six_bits(r: Reader) -> list[Any]:
    d, _, high, low, *_ = r.fields
    scale = r.half(d.at())
    return [scale * minus_offset(r, low.at(2, h) | high.at(2, h) << 4, 32) for h in range(2)]


@codecs(base_and_interleaved(IQ4_K_R4), group=16, has_shift=True)
def iq4_k(r: Reader) -> SubBlock:
    """`types/iq4_k.py`."""
    values = r.fields[4].looked_up(table_of(r, K4))
    return SubBlock(values, _six_bits(r), [], shifts_of(r, K4, _flags(r)))


@codecs(base_and_interleaved(IQ5_K_R4), group=16, has_shift=True)
def iq5_k(r: Reader) -> SubBlock:
    """`types/iq5_k.py`."""
    nibbles, fifths = r.fields[4:]
    codes = [low | high << 4 for low, high in zip(nibbles.quads(), fifths.quads())]
    return SubBlock(lookup_codes(r, K5, codes), _six_bits(r), [], shifts_of(r, K5, _flags(r)))


_IQ6_K = (
    base_field(16, [0]),
    base_field(1, packed(1, 16, at=2)),
    base_field(8, packed(8, 16, at=4)),
    base_field(4, planes(4, 32, 256, at=20)),
    base_field(2, planes(2, 32, 256, at=148)),
)


@codecs({"iq6_k": _IQ6_K}, group=16, has_shift=True)
def iq6_k(r: Reader) -> SubBlock:
    """With the integers that products use, not the row decoder's cubic."""
    d, _, numbers, nibbles, crumbs = r.fields
    scale = r.half(d.at())
    scales = [scale * r.ir.real(r.ir.signed_byte(numbers.at(2, h))) for h in range(2)]
    codes = [low | high << 4 for low, high in zip(nibbles.quads(), crumbs.quads())]
    return SubBlock(lookup_codes(r, K6, codes), scales, [], shifts_of(r, K6, _flags(r)))
