"""IQ2_XS_R4 (id 217): IQ2_XS with four rows interleaved, 296 bytes per 4 rows by 256 columns.

offset  size        field
0       4 x f16     d
8       128 x u16   qs       per 32 columns four of each row in turn; bits 9 ... 15 are signs, re-coded
264     32 x u8     scales   per 32 columns a byte of each row
"""

from __future__ import annotations

from quantkit.types.families.interleave import Field, Interleaved, Signs, Slots, packed
from quantkit.types.iq2_xs import IQ2_XS


class IQ2_XS_R4(Interleaved):
    """IQ2_XS_R4: IQ2_XS with four rows interleaved, 296 bytes per 4 rows by 256 columns."""

    name, ggml_type, file_type = "iq2_xs_r4", 217, 220
    base_class, interleave = IQ2_XS, 4
    signs = Signs(range(2, 66, 4), (9, 25))
    fields = (
        Field(16, packed(16, 1, at=0), Slots(0, at=0)),
        Field(64, packed(64, 8, at=2), Slots(0, at=8)),
        Field(8, packed(8, 8, at=66), Slots(0, at=264)),
    )
