"""Q8_0_R8 (id 208): Q8_0 with eight rows interleaved, 272 bytes per 8 rows by 32 columns.

offset  size      field
0       8 x f16   d
16      256 x i8  q    four columns of each row in turn
"""

from __future__ import annotations

from quantkit.types.families.interleave import QUAD, Field, Interleaved, Lines, Slots, packed
from quantkit.types.q8_0 import Q8_0


class Q8_0_R8(Interleaved):
    """Q8_0_R8: Q8_0 with eight rows interleaved, 272 bytes per 8 rows by 32 columns."""

    name, ggml_type, file_type = "q8_0_r8", 208, 207
    base_class, interleave = Q8_0, 8
    fields = (
        Field(16, packed(16, 1, at=0), Slots(0, at=0)),
        Field(8, packed(8, 32, at=2), Lines(QUAD, at=16)),
    )
