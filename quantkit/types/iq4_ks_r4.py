"""IQ4_KS_R4 (id 344): IQ4_KS with four rows interleaved; four f32 row scales, then 544 bytes per 4 rows by 256 columns.

offset  size       field
0       32 x u8    sc   sub-block s of row k at 4 s + k
32      512 x u8   qs
"""

from __future__ import annotations

from quantkit.types.families.interleave import NIB, Field, Interleaved, Lines, Slots, packed, planes
from quantkit.types.iq4_ks import IQ4_KS


class IQ4_KS_R4(Interleaved):
    """IQ4_KS_R4: IQ4_KS with four rows interleaved; four f32 row scales, then 544 bytes per 4 rows by 256 columns."""

    name, ggml_type, file_type = "iq4_ks_r4", 344, 345
    base_class, interleave = IQ4_KS, 4
    fields = (
        Field(8, packed(8, 8, at=0), Slots(0, at=0)),
        Field(4, planes(4, 16, 256, at=8), Lines(NIB, at=32)),
    )
