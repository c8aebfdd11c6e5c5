"""IQ5_KS_R4 (id 352): IQ5_KS with four rows interleaved; four f32 row scales, then 672 bytes per 4 rows by 256 columns.

offset  size       field
0       32 x u8    sc   sub-block s of row k at 4 s + k
32      512 x u8   qs   low four bits
544     128 x u8   qh   high bit
"""

from __future__ import annotations

from quantkit.types.families.interleave import NIB, PLANE_D, Field, Interleaved, Lines, Slots, packed, planes
from quantkit.types.iq5_ks import IQ5_KS


class IQ5_KS_R4(Interleaved):
    """IQ5_KS_R4: IQ5_KS with four rows interleaved; four f32 row scales, then 672 bytes per 4 rows by 256 columns."""

    name, ggml_type, file_type = "iq5_ks_r4", 352, 350
    base_class, interleave = IQ5_KS, 4
    fields = (
        Field(8, packed(8, 8, at=0), Slots(0, at=0)),
        Field(4, planes(4, 32, 256, at=8), Lines(NIB, at=32)),
        Field(1, planes(1, 32, 256, at=136), Lines(PLANE_D, at=544)),
    )
