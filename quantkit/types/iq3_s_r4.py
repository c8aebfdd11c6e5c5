"""IQ3_S_R4 (id 221): IQ3_S with four rows interleaved, 440 bytes per 4 rows by 256 columns.

offset  size       field
0       4 x f16    d
8       256 x u8   qs      entries 0, 4, 1, 5, 2, 6, 3, 7 of 32 columns, each of the four rows in turn
264     32 x u8    qh      per 32 columns a byte of each row
296     128 x u8   signs
424     16 x u8    scales  those of 32 columns s of row k in slot 4 s + k
"""

from __future__ import annotations

from quantkit.types.families.interleave import PLANE_A, Field, Interleaved, Lines, Slots, packed
from quantkit.types.iq3_s import IQ3_S

_ENTRIES = [8 * (2 + 8 * b + entry) for b in range(8) for entry in (0, 4, 1, 5, 2, 6, 3, 7)]


class IQ3_S_R4(Interleaved):
    """IQ3_S_R4: IQ3_S with four rows interleaved, 440 bytes per 4 rows by 256 columns."""

    name, ggml_type, file_type = "iq3_s_r4", 221, 226
    base_class, interleave = IQ3_S, 4
    fields = (
        Field(16, packed(16, 1, at=0), Slots(0, at=0)),
        Field(8, _ENTRIES, Slots(0, at=8)),
        Field(8, packed(8, 8, at=66), Slots(0, at=264)),
        Field(1, packed(1, 256, at=74), Lines(PLANE_A, at=296)),
        Field(4, packed(4, 8, at=106), Slots(16, at=424)),
    )
