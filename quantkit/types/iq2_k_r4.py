"""IQ2_K_R4 (id 337): IQ2_K with four rows interleaved, 304 bytes per 4 rows by 256 columns.

offset  size       field
0       4 x f16    d
8       8 x u8     x    even sub-blocks of the four rows, then the odd ones
16      32 x u8    sc   multiplier s of row k in slot 4 s + k
48      256 x u8   qs
"""

from __future__ import annotations

from quantkit.types.families.interleave import CRUMB, EvenOdd, Field, Interleaved, Lines, Slots, packed, planes
from quantkit.types.iq2_k import IQ2_K


class IQ2_K_R4(Interleaved):
    """IQ2_K_R4: IQ2_K with four rows interleaved, 304 bytes per 4 rows by 256 columns."""

    name, ggml_type, file_type = "iq2_k_r4", 337, 338
    base_class, interleave = IQ2_K, 4
    fields = (
        Field(16, packed(16, 1, at=0), Slots(0, at=0)),
        Field(1, packed(1, 16, at=2), EvenOdd(at=8)),
        Field(4, packed(4, 16, at=4), Slots(32, at=16)),
        Field(2, planes(2, 32, 256, at=12), Lines(CRUMB, at=48)),
    )
