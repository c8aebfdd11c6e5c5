"""Q5_0_R4 (id 206): Q5_0 with four rows interleaved, 88 bytes per 4 rows by 32 columns.

offset  size      field
0       4 x f16   d
8       16 x u8   qh   the fifth bits
24      64 x u8   qs
"""

from __future__ import annotations

from quantkit.types.families.interleave import NIB, PLANE_B, Field, Interleaved, Lines, Slots, packed, planes
from quantkit.types.q5_0 import Q5_0


class Q5_0_R4(Interleaved):
    """Q5_0_R4: Q5_0 with four rows interleaved, 88 bytes per 4 rows by 32 columns."""

    name, ggml_type, file_type = "q5_0_r4", 206, 208
    base_class, interleave = Q5_0, 4
    fields = (
        Field(16, packed(16, 1, at=0), Slots(0, at=0)),
        Field(1, packed(1, 32, at=2), Lines(PLANE_B, at=8)),
        Field(4, planes(4, 16, 32, at=6), Lines(NIB, at=24)),
    )
