"""MXFP4_R8 (id 353): MXFP4 with eight rows interleaved, 136 bytes per 8 rows by 32 columns.

    offset  size       field
    0       8 x u8     e
    8       128 x u8   qs   four bytes of each row in turn; a byte keeps the two columns it had

ik_llama.cpp's row decoder of this type gives other values; here they are those of MXFP4.
"""

from __future__ import annotations

from quantkit.types.families.interleave import QUAD, Field, Interleaved, Lines, Slots, packed
from quantkit.types.mxfp4 import MXFP4


class MXFP4_R8(Interleaved):
    """MXFP4_R8: MXFP4 with eight rows interleaved, 136 bytes per 8 rows by 32 columns."""

    name, ggml_type, file_type = "mxfp4_r8", 353, 351
    base_class, interleave = MXFP4, 8
    fields = (
        Field(8, packed(8, 1, at=0), Slots(0, at=0)),
        Field(8, packed(8, 16, at=1), Lines(QUAD, at=8)),
    )
