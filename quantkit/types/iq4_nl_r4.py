"""IQ4_NL_R4 (id 220): IQ4_NL with four rows interleaved, 72 bytes per 4 rows by 32 columns.

offset  size      field
0       4 x f16   d
8       64 x u8   qs
"""

from __future__ import annotations

from quantkit.types.families.interleave import NIB, Field, Interleaved, Lines, Slots, packed, planes
from quantkit.types.iq4_nl import IQ4_NL


class IQ4_NL_R4(Interleaved):
    """IQ4_NL_R4: IQ4_NL with four rows interleaved, 72 bytes per 4 rows by 32 columns."""

    name, ggml_type, file_type = "iq4_nl_r4", 220, 225
    base_class, interleave = IQ4_NL, 4
    fields = (
        Field(16, packed(16, 1, at=0), Slots(0, at=0)),
        Field(4, planes(4, 16, 32, at=2), Lines(NIB, at=8)),
    )
