"""IQ2_S_R4 (id 222): IQ2_S with four rows interleaved, 328 bytes per 4 rows by 256 columns.

offset  size       field
0       4 x f16    d
8       128 x u8   qs      per 32 columns four bytes of each row in turn
136     32 x u8    qh      per 32 columns a byte of each row
168     128 x u8   signs   as qs
296     32 x u8    scales  as qh
"""

from __future__ import annotations

from quantkit.types.families.interleave import Field, Interleaved, Slots, packed
from quantkit.types.iq2_s import IQ2_S


class IQ2_S_R4(Interleaved):
    """IQ2_S_R4: IQ2_S with four rows interleaved, 328 bytes per 4 rows by 256 columns."""

    name, ggml_type, file_type = "iq2_s_r4", 222, 229
    base_class, interleave = IQ2_S, 4
    fields = (
        Field(16, packed(16, 1, at=0), Slots(0, at=0)),
        Field(32, packed(32, 8, at=2), Slots(0, at=8)),
        Field(8, packed(8, 8, at=66), Slots(0, at=136)),
        Field(32, packed(32, 8, at=34), Slots(0, at=168)),
        Field(8, packed(8, 8, at=74), Slots(0, at=296)),
    )
