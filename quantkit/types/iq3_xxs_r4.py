"""IQ3_XXS_R4 (id 218): IQ3_XXS with four rows interleaved, 392 bytes per 4 rows by 256 columns.

offset  size       field
0       4 x f16    d
8       128 x u8   sas   signs and scales, as in IQ2_XXS_R4
136     256 x u8   qs    grid indices; per 32 columns eight bytes of each row in turn
"""

from __future__ import annotations

from quantkit.types.families.interleave import Field, Interleaved, Signs, Slots, packed
from quantkit.types.iq2_xxs_r4 import signs_and_scales
from quantkit.types.iq3_xxs import IQ3_XXS

_WORDS = [66 + 4 * b for b in range(8)]


class IQ3_XXS_R4(Interleaved):
    """IQ3_XXS_R4: IQ3_XXS with four rows interleaved, 392 bytes per 4 rows by 256 columns."""

    name, ggml_type, file_type = "iq3_xxs_r4", 218, 223
    base_class, interleave = IQ3_XXS, 4
    signs = Signs(_WORDS, (0, 7, 14, 21))
    fields = (
        Field(16, packed(16, 1, at=0), Slots(0, at=0)),
        *signs_and_scales(_WORDS),
        Field(64, packed(64, 8, at=2), Slots(0, at=136)),
    )
