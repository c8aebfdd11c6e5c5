"""CUDA codecs of types with blocks of 32 columns: q4_0, q4_1, q5_0, q5_1, q6_0, q8_0, iq4_nl, mxfp4; and q1_0_g128.

The byte maps are in the types' files: `types/q4_0.py`, and of interleaved rows `types/q4_0_r8.py`, and so on.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from quantkit.runtime.kernels.cuda.codecs.base import as_words, base_field, codecs
from quantkit.runtime.kernels.cuda.fields import LinearAddresses, base_and_interleaved, linear_addresses
from quantkit.runtime.kernels.cuda.reader import LOW, ONES, Reader, SubBlock
from quantkit.types.families.codebooks import K4
from quantkit.types.families.interleave import packed, planes
from quantkit.types.iq4_nl_r4 import IQ4_NL_R4
from quantkit.types.mxfp4 import E2M1
from quantkit.types.mxfp4_r8 import MXFP4_R8
from quantkit.types.q4_0_r8 import Q4_0_R8
from quantkit.types.q5_0_r4 import Q5_0_R4
from quantkit.types.q6_0_r4 import Q6_0_R4
from quantkit.types.q8_0_r8 import Q8_0_R8

_K4 = as_words(K4.values[:16])  # iq4_nl has the same values
_E2M1 = as_words(E2M1)


def _halves(words: list[Any]) -> list[Any]:
    """Low nibbles of 16 bytes, then the high ones."""
    return [w & LOW for w in words] + [w >> 4 & LOW for w in words]


@codecs(base_and_interleaved(Q4_0_R8))
def q4_0(r: Reader) -> SubBlock:
    """`types/q4_0.py`: codes 0 to 15 minus 8."""
    d, packed_bytes = r.fields
    codes = _halves(packed_bytes.quads(4, 16))
    return SubBlock([r.minus(c, 8) for c in codes], [r.half(d.at())], [])


def _runs(rows: int, run: int) -> tuple[LinearAddresses, LinearAddresses]:
    """Where groups of q4_0_4x4 and related types hold scales and bytes: `run` bytes of each row in turn."""
    k, j = np.arange(rows)[:, None], np.arange(16)
    return linear_addresses(16, 16 * k), linear_addresses(8, 8 * (2 * rows + (j // run * rows + k) * run + j % run))


@codecs({"q4_0_4x4": _runs(4, 4), "q4_0_4x8": _runs(4, 8), "q4_0_8x8": _runs(8, 8)})
def q4_0_runs(r: Reader) -> SubBlock:
    """With nibbles in two's complement."""
    d, packed_bytes = r.fields
    codes = _halves(packed_bytes.quads(4, 16))
    return SubBlock([r.minus(c ^ 8 * ONES, 8) for c in codes], [r.half(d.at())], [])


@codecs({"q4_1": (base_field(16, [0]), base_field(16, [16]), base_field(8, packed(8, 16, at=4)))}, has_min=True)
def q4_1(r: Reader) -> SubBlock:
    """`types/q4_1.py`: codes 0 to 15, and a min."""
    d, minimum, packed_bytes = r.fields
    return SubBlock(_halves(packed_bytes.quads(4, 16)), [r.half(d.at())], [r.half(minimum.at())])


@codecs(base_and_interleaved(Q5_0_R4))
def q5_0(r: Reader) -> SubBlock:
    """`types/q5_0.py`: codes 0 to 31 minus 16."""
    d, fifths, nibbles = r.fields
    codes = [low | high << 4 for low, high in zip(nibbles.quads(), fifths.quads())]
    return SubBlock([r.minus(c, 16) for c in codes], [r.half(d.at())], [])


@codecs(
    {
        "q5_1": (
            base_field(16, [0]),
            base_field(16, [16]),
            base_field(1, packed(1, 32, at=4)),
            base_field(4, planes(4, 16, 32, at=8)),
        )
    },
    has_min=True,
)
def q5_1(r: Reader) -> SubBlock:
    """`types/q5_1.py`: codes 0 to 31, and a min."""
    d, minimum, fifths, nibbles = r.fields
    codes = [low | high << 4 for low, high in zip(nibbles.quads(), fifths.quads())]
    return SubBlock(codes, [r.half(d.at())], [r.half(minimum.at())])


@codecs(base_and_interleaved(Q6_0_R4))
def q6_0(r: Reader) -> SubBlock:
    """`types/q6_0.py`: codes 0 to 63 minus 32."""
    d, high_bits, nibbles = r.fields
    codes = [low | high << 4 for low, high in zip(nibbles.quads(), high_bits.quads())]
    return SubBlock([r.minus(c, 32) for c in codes], [r.half(d.at())], [])


@codecs(base_and_interleaved(Q8_0_R8))
def q8_0(r: Reader) -> SubBlock:
    """`types/q8_0.py`: signed bytes."""
    d, codes = r.fields
    return SubBlock(codes.quads(), [r.half(d.at())], [])


@codecs(base_and_interleaved(IQ4_NL_R4))
def iq4_nl(r: Reader) -> SubBlock:
    """`types/iq4_nl.py`: codes name values of a codebook."""
    d, nibbles = r.fields
    table = r.words(*_K4)
    return SubBlock(nibbles.looked_up(table), [r.half(d.at())], [])


@codecs(base_and_interleaved(MXFP4_R8))
def mxfp4(r: Reader) -> SubBlock:
    """`types/mxfp4.py`: codes name E2M1 values, the scale is a power of two."""
    exponent, packed_bytes = r.fields
    table = r.words(*_E2M1)
    return SubBlock(r.lookup_halves(table, packed_bytes.quads(4, 16)), [r.ir.power(exponent.at())], [])


@codecs({"q1_0_g128": (base_field(16, [0]), base_field(1, packed(1, 128, at=2)))})
def q1_0_g128(r: Reader) -> SubBlock:
    """`types/q1_0_g128.py`: a bit is 1 or -1."""
    d, plus = r.fields
    return SubBlock([(ones ^ ONES) * 255 | ones for ones in plus.quads()], [r.half(d.at())], [])
