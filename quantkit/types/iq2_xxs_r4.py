"""IQ2_XXS_R4 (id 216): IQ2_XXS with four rows interleaved, 264 bytes per 4 rows by 256 columns.

offset  size       field
0       4 x f16    d
8       128 x u8   sas   per 32 columns four bytes of each row in turn: bit 0 a bit of the scale, the rest the signs
                         of eight columns, re-coded (`interleave.Signs`)
136     128 x u8   qs    grid indices; per 32 columns four bytes of each row in turn
"""

from __future__ import annotations

from quantkit.types.families.interleave import Field, Interleaved, Signs, Slots, packed
from quantkit.types.iq2_xxs import IQ2_XXS

_WORDS = [6 + 8 * b for b in range(8)]  # bits 7 i ... are the signs of part i, bit 28 + i one of the scale


def signs_and_scales(words: list[int]) -> tuple[Field, ...]:
    """The fields from byte 8 of the group on for words of four indices of signs and a scale."""
    return tuple(
        field
        for b, word in enumerate(words)
        for i in range(4)
        for field in (
            Field(7, [8 * word + 7 * i], Slots(0, at=8 + 16 * b + i, pitch=32, bit=1)),
            Field(1, [8 * word + 28 + i], Slots(0, at=8 + 16 * b + i, pitch=32)),
        )
    )


class IQ2_XXS_R4(Interleaved):
    """IQ2_XXS_R4: IQ2_XXS with four rows interleaved, 264 bytes per 4 rows by 256 columns."""

    name, ggml_type, file_type = "iq2_xxs_r4", 216, 219
    base_class, interleave = IQ2_XXS, 4
    signs = Signs(_WORDS, (0, 7, 14, 21))
    fields = (
        Field(16, packed(16, 1, at=0), Slots(0, at=0)),
        *signs_and_scales(_WORDS),
        Field(32, [8 * (2 + 8 * b) for b in range(8)], Slots(0, at=136)),
    )
