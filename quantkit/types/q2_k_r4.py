"""Q2_K_R4 (id 210): Q2_K with four rows interleaved, 336 bytes per 4 rows by 256 columns.

offset  size       field
0       4 x f16    d
8       4 x f16    dmin
16      64 x u8    scales   sub-block s of row k at 4 s + k
80      256 x u8   qs
"""

from __future__ import annotations

from quantkit.types.families.interleave import CRUMB, Field, Interleaved, Lines, Slots, packed, planes
from quantkit.types.q2_k import Q2_K


class Q2_K_R4(Interleaved):
    """Q2_K_R4: Q2_K with four rows interleaved, 336 bytes per 4 rows by 256 columns."""

    name, ggml_type, file_type = "q2_k_r4", 210, 210
    base_class, interleave = Q2_K, 4
    fields = (
        Field(16, packed(16, 1, at=80), Slots(0, at=0)),
        Field(16, packed(16, 1, at=82), Slots(0, at=8)),
        Field(8, packed(8, 16, at=0), Slots(0, at=16)),
        Field(2, planes(2, 32, 256, at=16), Lines(CRUMB, at=80)),
    )
