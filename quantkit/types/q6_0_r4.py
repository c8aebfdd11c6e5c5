"""Q6_0_R4 (id 233): Q6_0 with four rows interleaved, 104 bytes per 4 rows by 32 columns.

offset  size      field
0       4 x f16   d
8       32 x u8   qh   the high two bits
40      64 x u8   qs
"""

from __future__ import annotations

from quantkit.types.families.interleave import CRUMB, NIB, Field, Interleaved, Lines, Slots, packed, planes
from quantkit.types.q6_0 import Q6_0

# Column j has bits 4 (j % 16 // 8) + 2 (j // 16), + 1 of byte 2 + j % 8.
_HIGH = [8 * (2 + j % 8) + 4 * (j % 16 // 8) + 2 * (j // 16) for j in range(32)]


class Q6_0_R4(Interleaved):
    """Q6_0_R4: Q6_0 with four rows interleaved, 104 bytes per 4 rows by 32 columns."""

    name, ggml_type, file_type = "q6_0_r4", 233, 335
    base_class, interleave = Q6_0, 4
    fields = (
        Field(16, packed(16, 1, at=0), Slots(0, at=0)),
        Field(2, _HIGH, Lines(CRUMB, at=8)),
        Field(4, planes(4, 16, 32, at=10), Lines(NIB, at=40)),
    )
