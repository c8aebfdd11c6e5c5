"""IQ5_K_R4 (id 340): IQ5_K with four rows interleaved, 704 bytes per 4 rows by 256 columns.

offset  size       field
0       4 x f16    d
8       8 x u8     x    even sub-blocks of the four rows, then the odd ones
16      16 x u8    sh   high 2 bits of multiplier s of row k in slot 4 s + k
32      32 x u8    sl   low 4 bits, the same slots
64      512 x u8   qs   low four bits
576     128 x u8   qh   high bit
"""

from __future__ import annotations

from quantkit.types.families.interleave import NIB, PLANE_D, EvenOdd, Field, Interleaved, Lines, Slots, packed, planes
from quantkit.types.iq5_k import IQ5_K


class IQ5_K_R4(Interleaved):
    """IQ5_K_R4: IQ5_K with four rows interleaved, 704 bytes per 4 rows by 256 columns."""

    name, ggml_type, file_type = "iq5_k_r4", 340, 341
    base_class, interleave = IQ5_K, 4
    fields = (
        Field(16, packed(16, 1, at=0), Slots(0, at=0)),
        Field(1, packed(1, 16, at=2), EvenOdd(at=8)),
        Field(2, packed(2, 16, at=4), Slots(16, at=16)),
        Field(4, packed(4, 16, at=8), Slots(32, at=32)),
        Field(4, planes(4, 32, 256, at=16), Lines(NIB, at=64)),
        Field(1, planes(1, 32, 256, at=144), Lines(PLANE_D, at=576)),
    )
