"""Q3_K_R4 (id 211): Q3_K with four rows interleaved, 440 bytes per 4 rows by 256 columns.

offset  size       field
0       4 x f16    d
8       16 x u8    high 2 bits of the scales: sub-block s of row k in slot 4 s + k
24      32 x u8    low 4 bits, the same slots
56      128 x u8   qh   the third bits
184     256 x u8   qs
"""

from __future__ import annotations

from quantkit.types.families.interleave import CRUMB, PLANE_A, Field, Interleaved, Lines, Slots, packed, planes
from quantkit.types.q3_k import Q3_K


class Q3_K_R4(Interleaved):
    """Q3_K_R4: Q3_K with four rows interleaved, 440 bytes per 4 rows by 256 columns."""

    name, ggml_type, file_type = "q3_k_r4", 211, 211
    base_class, interleave = Q3_K, 4
    fields = (
        Field(16, packed(16, 1, at=108), Slots(0, at=0)),
        Field(2, planes(2, 4, 16, at=104), Slots(16, at=8)),
        Field(4, planes(4, 8, 16, at=96), Slots(32, at=24)),
        Field(1, planes(1, 32, 256, at=0), Lines(PLANE_A, at=56)),
        Field(2, planes(2, 32, 256, at=32), Lines(CRUMB, at=184)),
    )
