"""CUDA codecs of iq4_xs and of types with a scale for each row.

These are iq2_ks to iq5_ks, iq4_kss, iq2_kl, q8_KV, q8_k_r8, q8_k_r16, iq2_bn, i2_s and iq1_bn. The byte maps are in the
types' files: `types/iq4_xs.py`, and of interleaved rows `types/iq4_xs_r8.py`, and so on.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from quantkit.runtime.kernels.cuda.codecs.base import as_words, base_field, codecs, minus_offset
from quantkit.runtime.kernels.cuda.codecs.nonlinear import lookup_codes, lookup_of_four, shifts_of, table_of
from quantkit.runtime.kernels.cuda.fields import LinearAddresses, base_and_interleaved, interleaved
from quantkit.runtime.kernels.cuda.reader import Reader, SubBlock
from quantkit.types.families.codebooks import K2, K3, K4, K5
from quantkit.types.families.interleave import QUAD, Lines, Slots, packed, planes
from quantkit.types.iq2_bn_r4 import IQ2_BN_R4
from quantkit.types.iq2_kl import PAIRS
from quantkit.types.iq4_ks_r4 import IQ4_KS_R4
from quantkit.types.iq4_xs_r8 import IQ4_XS_R8
from quantkit.types.iq5_ks_r4 import IQ5_KS_R4


@codecs(base_and_interleaved(IQ4_XS_R8))
def iq4_xs(r: Reader) -> SubBlock:
    """`types/iq4_xs.py`."""
    d, high, low, nibbles = r.fields
    scale = r.half(d.at()) * minus_offset(r, low.at(1) | high.at(1) << 4, 32)
    return SubBlock(nibbles.looked_up(table_of(r, K4)), [scale], [])


_IQ2_KS = (
    base_field(1, packed(1, 8, at=0)), base_field(1, packed(1, 8, at=1)), base_field(4, packed(4, 8, at=2)),
    base_field(2, planes(2, 32, 256, at=6)),
)  # fmt: skip
_IQ3_KS = (
    base_field(1, packed(1, 8, at=1)), base_field(1, packed(1, 8, at=0)), base_field(4, planes(4, 4, 8, at=2)),
    base_field(2, planes(2, 32, 256, at=6)), base_field(1, planes(1, 32, 256, at=70)),
)  # fmt: skip


def _five_bits(r: Reader) -> list[Any]:
    _, high, low, *_ = r.fields
    return [r.head_half() * minus_offset(r, low.at(1) | high.at(1) << 4, 16)]


@codecs({"iq2_ks": _IQ2_KS})
def iq2_ks(r: Reader) -> SubBlock:
    """`types/iq2_ks.py`."""
    flags, *_, crumbs = r.fields
    return SubBlock(lookup_of_four(r, K2, crumbs.quads(), [flags.at(1)]), _five_bits(r), [])


@codecs({"iq3_ks": _IQ3_KS}, has_shift=True)
def iq3_ks(r: Reader) -> SubBlock:
    """`types/iq3_ks.py`."""
    crumbs, high = r.fields[3:]
    codes = [c | high_bit << 2 for c, high_bit in zip(crumbs.quads(), high.quads())]
    return SubBlock(lookup_codes(r, K3, codes), _five_bits(r), [], shifts_of(r, K3, [r.fields[0].at(1)]))


def _odd_multiplier(r: Reader, number: Any) -> tuple[list[Any], list[Any]]:
    """d * m of a byte that holds an odd m from -127 on over a flag, and the flag."""
    return [r.head_float() * minus_offset(r, number & 254, 127)], [number & 1]


@codecs(base_and_interleaved(IQ4_KS_R4), has_shift=True)
def iq4_ks(r: Reader) -> SubBlock:
    """`types/iq4_ks.py`."""
    numbers, nibbles = r.fields
    scales, flags = _odd_multiplier(r, numbers.at(1))
    return SubBlock(nibbles.looked_up(table_of(r, K4)), scales, [], shifts_of(r, K4, flags))


@codecs(base_and_interleaved(IQ5_KS_R4), has_shift=True)
def iq5_ks(r: Reader) -> SubBlock:
    """`types/iq5_ks.py`."""
    numbers, nibbles, fifths = r.fields
    scales, flags = _odd_multiplier(r, numbers.at(1))
    codes = [low | high << 4 for low, high in zip(nibbles.quads(), fifths.quads())]
    return SubBlock(lookup_codes(r, K5, codes), scales, [], shifts_of(r, K5, flags))


@codecs({"iq4_kss": (base_field(8, packed(8, 128)),)}, has_shift=True)
def iq4_kss(r: Reader) -> SubBlock:
    """Halves of words: four codes in the upper 15 bits; their lowest bits make the multiplier."""
    words = r.fields[0].quads(4, 16)
    number = r.ir.word(0)
    for i, word in enumerate(words):
        number = number | (word & 1) << 2 * i | (word >> 16 & 1) << 2 * i + 1
    scales, flags = _odd_multiplier(r, number)
    even = [word & 0xFFFEFFFE for word in words]
    mixed = [word ^ (word >> 1 & 0x7FFF7FFF) for word in even]
    return SubBlock(r.lookup_halves(table_of(r, K4), mixed), scales, [], shifts_of(r, K4, flags))


_IQ2_KL = (
    base_field(2, packed(2, 8, at=0)), base_field(4, planes(4, 4, 8, at=2)), base_field(4, planes(4, 16, 128, at=6)),
    base_field(1, planes(1, 16, 128, at=70)),
)  # fmt: skip


@codecs({"iq2_kl": _IQ2_KL})
def iq2_kl(r: Reader) -> SubBlock:
    """A code names the values of two neighbours."""
    high, low, nibbles, fifths = r.fields
    scale = r.head_half() * minus_offset(r, low.at(1) | high.at(1) << 4, 32)
    first, second = (r.words(*as_words(PAIRS[:, element])) for element in range(2))
    codes = []
    for nibble, fifth in zip(nibbles.quads(4, 16), fifths.quads(4, 16)):
        a, b = (r.lookup(table, nibble | fifth << 4) for table in (first, second))
        codes += [r.ir.permute(a, b, r.ir.word(order)) for order in (0x5140, 0x7362)]
    return SubBlock(codes, [scale], [])


@codecs({"q8_KV": (base_field(8, packed(8, 32)),)})
def q8_kv(r: Reader) -> SubBlock:
    """`types/q8_kv.py`: signed bytes."""
    return SubBlock(r.fields[0].quads(), [r.head_float(8)], [])


@codecs({"q8_KV_r8": (interleaved(8, 32, 8, Lines(QUAD, at=0)),)})
def q8_kv_r8(r: Reader) -> SubBlock:
    """`types/q8_kv_r8.py`."""
    return SubBlock(r.fields[0].quads(), [r.head_float()], [])


def _rows_of_bytes(rows: int) -> tuple[LinearAddresses, LinearAddresses]:
    return interleaved(16, 1, rows, Slots(0, at=0)), interleaved(8, 256, rows, Lines(QUAD, at=2 * rows))


@codecs({"q8_k_r8": _rows_of_bytes(8)})
def q8_k_r8(r: Reader) -> SubBlock:
    """`types/q8_k_r8.py`."""
    d, codes = r.fields
    return SubBlock(codes.quads(), [r.half(d.at())], [])


@codecs({"q8_k_r16": _rows_of_bytes(16)})
def q8_k_r16(r: Reader) -> SubBlock:
    """Bytes are codes + 128."""
    d, codes = r.fields
    return SubBlock([c ^ 0x80808080 for c in codes.quads()], [r.half(d.at())], [])


@codecs(base_and_interleaved(IQ2_BN_R4), has_shift=True)
def iq2_bn(r: Reader) -> SubBlock:
    """`types/iq2_bn.py`: codes 0 to 2 minus 1."""
    return SubBlock(r.fields[0].quads(), [r.head_float()], [], [r.number(-1)])


@codecs({"i2_s": (base_field(2, 8 * (np.arange(128) % 32) + 6 - 2 * (np.arange(128) // 32)),)}, has_shift=True, tail=32)
def i2_s(r: Reader) -> SubBlock:
    """`types/i2_s.py`."""
    return SubBlock(r.fields[0].quads(), [r.tail_float()], [], [r.number(-1)])


@codecs({"iq1_bn": (base_field(8, packed(8, 8)), base_field(8, packed(8, 1, at=12)))}, has_shift=True)
def iq1_bn(r: Reader) -> SubBlock:
    """Sixteen columns are three bytes of five digits, and one digit of the last byte."""
    packed_bytes = [_byte(r, 6, t) for t in range(6)]
    last = r.fields[1].at()
    second = r.sub_block * -1
    digits = []
    for h in range(2):
        for t in range(3):
            digits += [_digit(packed_bytes[3 * h + t], r.ir.word(3 ** (4 - k))) for k in range(5)]
        of_first, of_second = (r.ir.word(3 ** (4 - 2 * u - h)) for u in range(2))
        digits.append(_digit(last, r.ir.choose(second, of_second, of_first)))
    words = [r.join(digits[i : i + 4]) for i in range(0, 32, 4)]
    return SubBlock(words, [r.head_half()], [], [r.number(-1)])


def _byte(r: Reader, pitch: int, number: int) -> Any:
    """A byte of the block, at pitch * unit + number."""
    return r.ir.load(8, r.block + number + r.ir.wide(r.sub_block * pitch), 1)


def _digit(byte: Any, power: Any) -> Any:
    """0, 1 or 2: what base 3 has in the place of a power, counted from the top."""
    return (byte * power & 255) * 3 >> 8
