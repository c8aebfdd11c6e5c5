"""CUDA codecs of the k-quants, q2_K to q6_K, interleaved or not.

The byte maps are in the types' files: `types/q2_k.py`, and of interleaved rows `types/q2_k_r4.py`, and so on.
"""

from __future__ import annotations

from typing import Any

from quantkit.runtime.kernels.cuda.codecs.base import codecs, minus_offset
from quantkit.runtime.kernels.cuda.fields import base_and_interleaved
from quantkit.runtime.kernels.cuda.reader import Reader, SubBlock
from quantkit.types.q2_k_r4 import Q2_K_R4
from quantkit.types.q3_k_r4 import Q3_K_R4
from quantkit.types.q4_k_r4 import Q4_K_R4
from quantkit.types.q5_k_r4 import Q5_K_R4
from quantkit.types.q6_k_r4 import Q6_K_R4


@codecs(base_and_interleaved(Q2_K_R4), group=16, has_min=True)
def q2_k(r: Reader) -> SubBlock:
    """`types/q2_k.py`: scale and min are four bits each."""
    d, dmin, numbers, codes = r.fields
    scale, minimum = r.half(d.at()), r.half(dmin.at()) * -1.0
    both_halves = [numbers.at(2, h) for h in range(2)]
    return SubBlock(
        codes.quads(),
        [scale * r.ir.real(n & 15) for n in both_halves],
        [minimum * r.ir.real(n >> 4) for n in both_halves],
    )


@codecs(base_and_interleaved(Q3_K_R4), group=16, has_shift=True)
def q3_k(r: Reader) -> SubBlock:
    """`types/q3_k.py`: codes 0 to 7 minus 4."""
    d, high, low, thirds, codes = r.fields
    scale = r.half(d.at())
    scales = [scale * minus_offset(r, low.at(2, h) | high.at(2, h) << 4, 32) for h in range(2)]
    return SubBlock([c | t << 2 for c, t in zip(codes.quads(), thirds.quads())], scales, [], [r.number(-4)])


def _scale_and_min(r: Reader) -> tuple[list[Any], list[Any]]:
    """Of q4_K and q5_K."""
    if r.codec.rows == 1:
        return _of_header(r)
    d, dmin, high, high_least, low, low_least, *_ = r.fields
    scale = r.half(d.at()) * r.ir.real(low.at(1) | high.at(1) << 4)
    return [scale], [r.half(dmin.at()) * -1.0 * r.ir.real(low_least.at(1) | high_least.at(1) << 4)]


def _of_header(r: Reader) -> tuple[list[Any], list[Any]]:
    """The same by one load of 16 bytes: d, dmin, and the bytes a, b and c that sub-blocks j and j + 4 share.

    Of j the six bits are a & 63 and b & 63; of j + 4 the nibbles of c, under the two upper bits of a and b.
    """
    halves, *words = r.ir.load_words(4, r.block)
    a, b, c = (word >> (r.sub_block & 3) * 8 & 255 for word in words)
    is_later = r.sub_block >> 2
    number = r.ir.choose(is_later, c & 15 | a >> 6 << 4, a & 63)
    least = r.ir.choose(is_later, c >> 4 | b >> 6 << 4, b & 63)
    return [r.half(halves) * r.ir.real(number)], [r.half(halves >> 16) * -1.0 * r.ir.real(least)]


@codecs(base_and_interleaved(Q4_K_R4), has_min=True)
def q4_k(r: Reader) -> SubBlock:
    """`types/q4_k.py`."""
    return SubBlock(r.fields[6].quads(), *_scale_and_min(r))


@codecs(base_and_interleaved(Q5_K_R4), has_min=True)
def q5_k(r: Reader) -> SubBlock:
    """`types/q5_k.py`."""
    fifths, nibbles = r.fields[6:]
    codes = [low | high << 4 for low, high in zip(nibbles.quads(), fifths.quads())]
    return SubBlock(codes, *_scale_and_min(r))


@codecs(base_and_interleaved(Q6_K_R4), group=16, has_shift=True)
def q6_k(r: Reader) -> SubBlock:
    """`types/q6_k.py`: codes 0 to 63 minus 32."""
    d, numbers, crumbs, nibbles = r.fields
    scale = r.half(d.at())
    scales = [scale * r.ir.real(r.ir.signed_byte(numbers.at(2, h))) for h in range(2)]
    codes = [low | high << 4 for low, high in zip(nibbles.quads(), crumbs.quads())]
    return SubBlock(codes, scales, [], [r.number(-32)])
