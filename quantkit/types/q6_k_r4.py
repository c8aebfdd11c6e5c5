"""Q6_K_R4 (id 214): Q6_K with four rows interleaved, 840 bytes per 4 rows by 256 columns.

offset  size       field
0       4 x f16    d
8       64 x i8    scales   sub-block s of row k at 4 s + k
72      256 x u8   qh   the high two bits
328     512 x u8   ql
"""

from __future__ import annotations

from quantkit.types.families.interleave import NIB, Field, Interleaved, Lines, Slots, packed, planes
from quantkit.types.q6_k import Q6_K


class Q6_K_R4(Interleaved):
    """Q6_K_R4: Q6_K with four rows interleaved, 840 bytes per 4 rows by 256 columns."""

    name, ggml_type, file_type = "q6_k_r4", 214, 218
    base_class, interleave = Q6_K, 4
    fields = (
        Field(16, packed(16, 1, at=208), Slots(0, at=0)),
        Field(8, packed(8, 16, at=192), Slots(0, at=8)),
        Field(2, planes(2, 32, 256, at=128), Lines(((0, 8, 4, 12),), at=72)),
        Field(4, planes(4, 64, 256, at=0), Lines(NIB, at=328)),
    )
