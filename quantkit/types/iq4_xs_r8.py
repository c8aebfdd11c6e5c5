"""IQ4_XS_R8 (id 223): IQ4_XS with eight rows interleaved, 1088 bytes per 8 rows by 256 columns.

offset  size        field
0       8 x f16     d
16      16 x u8     high 2 bits of the scales: sub-block s of row k in slot 8 s + k
32      32 x u8     low 4 bits, the same slots
64      1024 x u8   qs   columns 8 l + i and 8 l + 4 + i share a byte
"""

from __future__ import annotations

from quantkit.types.families.interleave import Field, Interleaved, Lines, Slots, packed, planes
from quantkit.types.iq4_xs import IQ4_XS


class IQ4_XS_R8(Interleaved):
    """IQ4_XS_R8: IQ4_XS with eight rows interleaved, 1088 bytes per 8 rows by 256 columns."""

    name, ggml_type, file_type = "iq4_xs_r8", 223, 230
    base_class, interleave = IQ4_XS, 8
    fields = (
        Field(16, packed(16, 1, at=0), Slots(0, at=0)),
        Field(2, packed(2, 8, at=2), Slots(16, at=16)),
        Field(4, packed(4, 8, at=4), Slots(32, at=32)),
        Field(4, planes(4, 16, 256, at=8), Lines(((0, 4),), at=64)),
    )
