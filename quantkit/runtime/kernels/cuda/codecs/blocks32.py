"""CUDA codecs of types with blocks of 32 columns: q4_0, q4_1, q5_0, q5_1, q6_0, q8_0, iq4_nl, mxfp4.

And of nvfp4, q1_0_g128, q2_0, tq1_0 and tq2_0.

The byte maps are in the types' files: `types/q4_0.py`, and of interleaved rows `types/q4_0_r8.py`, and so on.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from quantkit.runtime.kernels.cuda.codecs.base import as_words, base_field, codecs
from quantkit.runtime.kernels.cuda.fields import LinearAddresses, base_and_interleaved, linear_addresses
from quantkit.runtime.kernels.cuda.reader import LOW, ONES, Reader, SubBlock, load_word
from quantkit.types.families.codebooks import K4
from quantkit.types.families.e2m1 import E2M1
from quantkit.types.families.interleave import packed, planes
from quantkit.types.iq4_nl_r4 import IQ4_NL_R4
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


@codecs(base_and_interleaved(Q4_0_R8), has_shift=True)
def q4_0(r: Reader) -> SubBlock:
    """`types/q4_0.py`: codes 0 to 15 minus 8."""
    d, packed_bytes = r.fields
    return SubBlock(_halves(packed_bytes.quads(4, 16)), [r.half(d.at())], [], [r.number(-8)])


def _runs(rows: int, run: int) -> tuple[LinearAddresses, LinearAddresses]:
    """Where groups of q4_0_4x4 and related types hold scales and bytes: `run` bytes of each row in turn."""
    k, j = np.arange(rows)[:, None], np.arange(16)
    return linear_addresses(16, 16 * k), linear_addresses(8, 8 * (2 * rows + (j // run * rows + k) * run + j % run))


@codecs({"q4_0_4x4": _runs(4, 4), "q4_0_4x8": _runs(4, 8), "q4_0_8x8": _runs(8, 8)}, has_shift=True)
def q4_0_runs(r: Reader) -> SubBlock:
    """With nibbles in two's complement."""
    d, packed_bytes = r.fields
    codes = _halves(packed_bytes.quads(4, 16))
    return SubBlock([c ^ 8 * ONES for c in codes], [r.half(d.at())], [], [r.number(-8)])


@codecs({"q4_1": (base_field(16, [0]), base_field(16, [16]), base_field(8, packed(8, 16, at=4)))}, has_min=True)
def q4_1(r: Reader) -> SubBlock:
    """`types/q4_1.py`: codes 0 to 15, and a min."""
    d, minimum, packed_bytes = r.fields
    return SubBlock(_halves(packed_bytes.quads(4, 16)), [r.half(d.at())], [r.half(minimum.at())])


@codecs(base_and_interleaved(Q5_0_R4), has_shift=True)
def q5_0(r: Reader) -> SubBlock:
    """`types/q5_0.py`: codes 0 to 31 minus 16."""
    d, fifths, nibbles = r.fields
    codes = [low | high << 4 for low, high in zip(nibbles.quads(), fifths.quads())]
    return SubBlock(codes, [r.half(d.at())], [], [r.number(-16)])


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


@codecs(base_and_interleaved(Q6_0_R4), has_shift=True)
def q6_0(r: Reader) -> SubBlock:
    """`types/q6_0.py`: codes 0 to 63 minus 32."""
    d, high_bits, nibbles = r.fields
    codes = [low | high << 4 for low, high in zip(nibbles.quads(), high_bits.quads())]
    return SubBlock(codes, [r.half(d.at())], [], [r.number(-32)])


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


_SUB_BLOCKS = np.arange(64) // 16
_NVFP4 = (
    base_field(8, packed(8, 4)),
    base_field(4, 32 + 64 * _SUB_BLOCKS + 8 * (np.arange(64) % 8) + 4 * (np.arange(64) % 16 // 8)),
)


@codecs({"nvfp4": _NVFP4}, group=16)
def nvfp4(r: Reader) -> SubBlock:
    """`types/nvfp4.py`: a scale is a half whose exponent lacks 8; 127 is no number but 0."""
    numbers, nibbles = r.fields
    codes = [numbers.at(2, h) for h in range(2)]
    halves = [r.ir.choose(c ^ 127, (c & 127) << 7, r.ir.word(0)) for c in codes]
    return SubBlock(nibbles.looked_up(r.words(*_E2M1)), [r.half(h) * 128.0 for h in halves], [])


@codecs({"q1_0_g128": (base_field(16, [0]), base_field(1, packed(1, 128, at=2)))})
def q1_0_g128(r: Reader) -> SubBlock:
    """`types/q1_0_g128.py`: a bit is 1 or -1."""
    d, plus = r.fields
    return SubBlock([(ones ^ ONES) * 255 | ones for ones in plus.quads()], [r.half(d.at())], [])


@codecs({"q2_0": (base_field(16, [0]), base_field(32, [16, 48, 80, 112]))}, has_shift=True)
def q2_0(r: Reader) -> SubBlock:
    """`types/q2_0.py`: codes 0 to 3 minus 1; a byte has those of four columns."""
    d, packed_words = r.fields
    words = [packed_words.at(2, h) for h in range(2)]
    codes = []
    for word in words:
        for q in range(4):
            byte = word >> 8 * q & 255
            codes.append((byte | byte << 6 | byte << 12 | byte << 18) & 3 * ONES)
    return SubBlock(codes, [r.half(d.at())], [], [r.number(-1)])


@codecs({"tq2_0": (base_field(16, [512]), base_field(2, planes(2, 32, 256)))}, has_shift=True)
def tq2_0(r: Reader) -> SubBlock:
    """`types/tq2_0.py`: codes 0 to 2 minus 1."""
    d, codes = r.fields
    return SubBlock(codes.quads(), [r.half(d.at())], [], [r.number(-1)])


# Of the eight sub-blocks of tq1_0: the first bytes of their columns 0 .. 15 and 16 .. 31, and the powers of three that
# bring up their digits. Columns 16 .. 31 of the last one are four digits of the same four bytes.
_TQ1_BYTES = ([0] * 5 + [32] * 3, [16] * 5 + [32, 32, 48])
_TQ1_POWERS = ([1, 3, 9, 27, 81, 1, 9, 81], [1, 3, 9, 27, 81, 3, 27, 1])


@codecs({"tq1_0": (base_field(16, [416]),)}, has_shift=True)
def tq1_0(r: Reader) -> SubBlock:
    """`types/tq1_0.py`: digits 0 to 2 minus 1."""
    is_other = r.sub_block ^ 7
    codes = []
    for half in range(2):
        first = r.ir.table(f"tq1_0_bytes_{half}", _TQ1_BYTES[half], r.sub_block)
        power = r.ir.table(f"tq1_0_powers_{half}", _TQ1_POWERS[half], r.sub_block)
        for q in range(4):
            step, factor = r.ir.word(4 * q), power
            if half:
                step = r.ir.choose(is_other, step, r.ir.word(0))
                factor = r.ir.choose(is_other, power, r.ir.word(3**q))
            codes.append(_digits(load_word(r.ir, r.block + r.ir.wide(first + step), 2), factor))
    return SubBlock(codes, [r.half(r.fields[0].at())], [], [r.number(-1)])


def _digits(word: Any, power: Any) -> Any:
    """Of each byte of a word: what base 3 has in the place of a power, counted from the top."""
    even, odd = ((w & 0x00FF00FF) * power & 0x00FF00FF for w in (word, word >> 8))
    even, odd = ((w * 3 >> 8) & 0x00030003 for w in (even, odd))
    return even | odd << 8
