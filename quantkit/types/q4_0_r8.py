"""Q4_0_R8 (id 202): Q4_0 with eight rows interleaved, 144 bytes per 8 rows by 32 columns.

offset  size       field
0       8 x f16    d
16      128 x u8   qs   four bytes of each row in turn; a byte keeps the two columns it had
"""

from __future__ import annotations

from quantkit.types.families.interleave import QUAD, Field, Interleaved, Lines, Slots, packed
from quantkit.types.q4_0 import Q4_0


class Q4_0_R8(Interleaved):
    """Q4_0_R8: Q4_0 with eight rows interleaved, 144 bytes per 8 rows by 32 columns."""

    name, ggml_type, file_type = "q4_0_r8", 202, 202
    base_class, interleave = Q4_0, 8
    fields = (
        Field(16, packed(16, 1, at=0), Slots(0, at=0)),
        Field(8, packed(8, 16, at=2), Lines(QUAD, at=16)),
    )
