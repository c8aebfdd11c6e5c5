"""The grids of iq2_xxs, iq2_xs, iq2_s (8 magnitudes of 3 levels) and iq3_xxs, iq3_s (4 magnitudes of 8 levels).

A group of 8 or 4 elements is stored as the number of a grid point and a sign for each element; a multiplier for each
sub-block and a half for each block of 256 scale it:

    y = ((d * (m / DIVISOR)) * magnitude) * sign        m = 1, 3 ... 31, stored as (m - 1) / 2 in 4 bits

where every product is exact but for overflow. iq2_xxs, iq2_xs and iq3_xxs store 7 signs of 8; the eighth makes the
number of negative ones even.

The points of a grid ascend when read as numbers in base 3 (8), first element least; the gaps between
them are stored here, halved where all are even, one byte each, in base 85.
"""

from __future__ import annotations

import base64
from typing import NamedTuple

import numpy as np

from quantkit.codegen.jit import kernel

_GAPS = {
    "iq2_xxs": (
        "009930RaI60RjO50Rsa90RsU81_S{E0tXKU1_22Y4FLlM0RsU71_c2F1_J>C1_ufO1q=ZR4+#ST0RsjC0RsUG3=A9vBLM>i1PKNM0tW*I2?P"
        "Zg1sMYd0tN~d5D^C=0RssR4FVz;76Ahb2m}Ec1Q-D*0RssK6b=e73<elK8UX_X0s#X91Of#C0|^NZ1Of~M3<L!a0|pWZ3k4o20RssF85IHr9"
        "1sZu0s{dO0}KrpBPan3B@-0|0}vh_Cj$u#4-^~^5&|m$7ei|S0}2if1_mG`0RsXD2@((y3knGnDJ&%e1_Kuh6df4~1uR+?Nf8SVB`|~-"
    ),
    "iq2_xs": (
        "009930RaI40RaI40RjO50RaI40RjO70RaI50RjO90RaI40RaI40RaO60RaL50|Np90|@~E0RjO71pxyB2LuWM0RaI40RaL50|5a60s#R61px"
        "yI0RaI50RsgA0|f*Q0RsmD0S*iS0RaI40RsX90RsaD2?PNF0|^cT3JC)i0tEp90RaI40RjO70RaI50Rsd90RssE0RaL50|fyC2?hZN0RaLD2"
        "@(MT0RjO71pxv91_KTO0|^@j3m5?d0SE>P3j!A+6#)SO0RaI40|fyC2?+%O0|^5N5DF0t0s#XE0UHhl5C#Yy0s{dB3knAv1`Gxh0s#sE0RaI"
        "40RaL50|5a60RaI60s{d92>}5C0s#XB0RssF2m}EG0S5sa0RaI50RjO90RssJ2mu2I0~Q4Y3j-Gc0|^2I1Q7)a0|*c&0RaI50Rsa90RssR0R"
        "sXD0U8e(0RaOA1PKKR1OpfY6c7sp1_%TZ4g~=>3;_cP1_TBQ0W${=2nQw!0v0S986Xh^5di@K0s#XA0RaOE0Sf^E0RaLD1p^Za5&;MU0s#X7"
        "0S5^P3J(_w6Al9i3k3lS1TYZ;1O);C0|^HR3<?e<3JL-Z0|Ouv0TwM36CMx}0RjO91Q!<r5dr}M3JwVp6i5mR1pxvW0|OfY7XcFp"
    ),
    "iq2_s": (
        "009930RaI40RaI40RjO50RaI40RjO50RaI40RjO70s;X60RaI40RaL50|5a60s#R50RjO60RsU60|5g80RaL50|Ws90RaI52Lb{D1Ox#A0Ra"
        "I40RjO50RaI40RaI40RaI40RsU60RaL50s#X70RaI40RaI40s#U60RaI40RaL50|5a60s#XB0RaI40tW&C0s#XB0RssE0RaL50RaI50s#R50"
        "RaI40RjO70t5#E0RsU60RjX90RjO71q2BN0R#d81rY`T0RaI40RaL50RjO50RjO50RaI40RjO50s;X70RsU60RaI40RaI40RaL50RaI40RaL"
        "50|5a60s#mC0s#U80RsX90SEyD2>}5C0s#R50RjO60RaI40RaI50RsU60RjO71pxs80RaI40s#X70RaL50|fyC2?7BE0RsgA0|^ZQ0RaI40s"
        "#U90RaI50RsgA3;_WF0s#XB0RspN1p^5O6afJN0s#R50RjR60RsU61Oo&D2LS;C0RaO90RaO60|fyC2?PcL0RjUI0SE#C0RaI50RjO70RaI5"
        "0RsgA0|^2F0s#XB0RsmD4gmuR2onMW0SEyD4G94O104$n4h8`V0RaI40RaI40RaI50RaI40RaI40RaI60RsX70s#X70RaL50RaI40RsU60Ra"
        "I40RjO70RaI50RsgA0|5a60|Np90s#XB0So~F0RaI40RaI40RaL50RaI40RaL50|5a60s#XB0RaI40RaI50RsU60RjO71OWj92>}5C0s#XB0"
        "RssO0|5d70RaI50RsU60RjO71_KEJ0RaL50|fyC2?qxO0|^@e0RaL50RaI40RaL50RaI40RaL50|5a60s#mC0RaI40RaL50|5a60s#XB0Rss"
        "F0RjO71pxyH0S*BH0RaI40RjO70RaI50RsgA0|@~E0RjO71pxyI4gmuP0viDV0RjO71pxyD1r7lN2^$C%3IYKE0s#R50s#X80RjO71_KEJ0R"
        "aL50|fyC2?z%R2?r1a0s#U60|fyC2@U}R2?PiS2q6do0~87d4JsA{0RaI50RjO60|5g80RaL80s{dE0RjO50RaL50|5a60s#mC0|)^E0s#RC"
        "0RtBS0RaI40RaL80RaI50RsgA0|@~E0RjO71pxyI1PTEI2mu=c0|5vD0}})R3=0|y0R{;K0RjO50RaO80RaI50RsgA0|^2H0SEyD1QP)R2^j"
        "(b0RaL50|fyC2?qxO0|^xZ1P}-j0RsmD8UYakH3<R&0t5pA0Rs~Q4hs<j1_A*O0s#mD0RssU2LlK*8VDH|3Jw7U0Rj>V"
    ),
    "iq3_xxs": (
        "00II90t5j92MHMh1Of#D2LuBG2MY`c0s;jG0tW&F3I+}Y1_1&KBNG$_3k(7T1``l77Zd~n6%G&r1p)^G1p)#K0T==Y2Ldkw1p)^LA_f8u2@M"
        "bn1S2Q}5)%wf4j=*t0tEsD0|_4j0s{gE2O9(d2m%KN0RjyH4HO3iECeAA7!(Q{MFI;K90vji0u>Df1_BNV3j!Mg1q~Gt4-!2O69xth8y^xCC"
        ">0b74gw4WO%x9S5C#z*A0-PR4i!xU0uC}47YGIr7atBF2q_&41S1F+Pb>~H5CRSzARZ+o21X$zF(?i)0s;XN5G)ER8wC~(4izB~9|96Y"
    ),
    "iq3_s": (
        "009950s#R50s;a71O^2H0|Ej91p)^H0|5a60t5jB0|NvC1P2WS1qJ~G0s#X90|WyE1_J^D0u2KQ1_T2F2Lb~I1Og2L1Op2M0s{sH0|pNY0t^"
        "BK1qK8H4+RSY0uB)m2Lb{N0t5vO1QY=Q0t5j90s;X72Ll2Q0s{#K0RjU81O*2J1_uHT1_BBL0s#aD1_KHM3I_uN0RsjG0R#mR1`7fO0u2HO1"
        "OfyV2LlEN0uLty0}TQj0tEsG3<MDd2mt~D0s#U70s{gB0RjgC0s{gK0RsX90tN#F0|NvD1_u}e0}28K2LcKN3IhZJ0|W^I1p)^K4hsee0|x^"
        "H83P9e2@L@Y4G01S3LFF!1PuZU1sVqe0s;dE0s;jB0|E*L2m%5J1p*Ba3IqZQ1_}ZU83zOf0t5jG0t5yQ2nGcN2N4DY4F>`X1quoc6B8f;4F"
        "U@z1O^5K0|N&K5DEnX0tW^K1_lHa0tE#G3Iz`X1`GuP1p)^IBLWf&0T~Pe3LzO06c_~y3kDem1O^TS0|N{O1p)#E2MHhs2?_-U4HpFg4-Ewj"
        "1_lER3JfF+69P9N0uDC<0t^Bb5D*6)77_*v1qKKV1rIe24-Nwv6crmO0yP8!2?7iP3<eMf3l9Pu0|W*G2N4+<0}d7h1_c-@5Fi&P"
    ),
}
_LEVELS = {
    "iq2": (8, 25, 43),
    "iq3_xxs": (4, 12, 20, 28, 36, 44, 52, 62),
    "iq3_s": (1, 3, 5, 7, 9, 11, 13, 15),
}
VALUES = 9  # of a coordinate, see Grid; the last is not used with 8 levels
_CHUNK = 4  # second halves that the search takes at once


class Grid(NamedTuple):
    """A grid's points and, for the search, the same by halves.

    The search sees a point as four *coordinates*: of 3 levels two neighbouring elements, 9 values; of 8 levels one
    element, 8 values. A *half* is two coordinates, a and b, its row in a table VALUES a + b, its code 16 a + b.
    """

    points: np.ndarray  # float32[count, 8 or 4]: magnitudes
    levels: np.ndarray  # float32[VALUES, 2]: magnitudes of a coordinate's elements; 1 where it has no second
    halves: np.ndarray  # int32[chunks, 2 + _CHUNK]: row and code of a first half, rows of second halves beside it
    numbers: np.ndarray  # int16[VALUES^4]: number of the point with these coordinates, the first most significant


def _coordinates(digits: np.ndarray, base: int) -> np.ndarray:
    """int64[count, 4] of the points' digits: pairs of elements of 3 levels, elements of 8."""
    return digits if base == 8 else digits[:, 0::2] * base + digits[:, 1::2]


def _halves(coordinates: np.ndarray) -> np.ndarray:
    """`Grid.halves`: each first half with all its second halves, _CHUNK at a time; the last one pads a chunk."""
    first = coordinates[:, 0] * VALUES + coordinates[:, 1]
    second = coordinates[:, 2] * VALUES + coordinates[:, 3]
    second_rows: dict[int, list[int]] = {}  # plain Python: this runs when a type is loaded
    for row, second_row in zip(first.tolist(), second.tolist()):
        second_rows.setdefault(row, []).append(second_row)
    chunks = []
    for row in sorted(second_rows):
        code = row // VALUES * 16 + row % VALUES
        for start in range(0, len(second_rows[row]), _CHUNK):
            part = second_rows[row][start : start + _CHUNK]
            chunks.append([row, code, *part, *part[-1:] * (_CHUNK - len(part))])
    return np.array(chunks, np.int32)


def grid(name: str) -> Grid:
    """The grid of the type called `name`."""
    levels = np.array(_LEVELS[name if name in _LEVELS else "iq2"], np.float32)
    base, length = (3, 8) if len(levels) == 3 else (8, 4)
    gaps = np.frombuffer(base64.b85decode("".join(_GAPS[name])), np.uint8).astype(np.int64)
    code = np.cumsum(gaps) * (2 if base == 3 else 1)
    digits = code[:, None] // base ** np.arange(length) % base
    coordinates = _coordinates(digits, base)
    numbers = np.zeros(VALUES**4, np.int16)
    numbers[coordinates @ VALUES ** np.arange(3, -1, -1)] = np.arange(len(code))
    pairs = np.ones((VALUES, 2), np.float32)
    if base == 3:
        pairs[:] = np.stack([levels.repeat(3), np.tile(levels, 3)], axis=1)
    else:
        pairs[:, 0] = np.append(levels, levels[-1])
    return Grid(levels[digits], pairs, _halves(coordinates), numbers)


_bits = np.arange(256)[:, None] >> np.arange(8) & 1
SIGNS = (1 - 2 * _bits).astype(np.float32)  # [byte, element]: bit j set makes element j negative
EVEN_SIGNS = SIGNS[np.arange(128) | _bits[:128].sum(axis=1) % 2 << 7]  # of 7 bits; the eighth is their parity


@kernel(inline="always")
def write_group(scale: np.float32, magnitudes: np.ndarray, signs: np.ndarray, out: np.ndarray) -> None:
    """out[j] = (scale * magnitudes[j]) * signs[j]."""
    for j in range(len(magnitudes)):
        out[j] = scale * magnitudes[j] * signs[j]
