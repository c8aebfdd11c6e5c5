"""IQ3_K_R4 (id 338): IQ3_K with four rows interleaved, 440 bytes per 4 rows by 256 columns.

offset  size       field
0       4 x f16    d
8       8 x u8     x    even sub-blocks of the four rows, then the odd ones
16      8 x u8     sg   sign of multiplier s of row k in slot 4 s + k
24      32 x u8    sl   its magnitude, the same slots
56      256 x u8   qs   low two bits
312     128 x u8   qh   high bit
"""

from __future__ import annotations

from quantkit.types.families.interleave import (
    CRUMB,
    PLANE_A,
    EvenOdd,
    Field,
    Interleaved,
    Lines,
    Slots,
    packed,
    planes,
)
from quantkit.types.iq3_k import IQ3_K


class IQ3_K_R4(Interleaved):
    """IQ3_K_R4: IQ3_K with four rows interleaved, 440 bytes per 4 rows by 256 columns."""

    name, ggml_type, file_type = "iq3_k_r4", 338, 339
    base_class, interleave = IQ3_K, 4
    fields = (
        Field(16, packed(16, 1, at=0), Slots(0, at=0)),
        Field(1, packed(1, 16, at=2), EvenOdd(at=8)),
        Field(1, packed(1, 16, at=4), Slots(8, at=16)),
        Field(4, packed(4, 16, at=6), Slots(32, at=24)),
        Field(2, planes(2, 32, 256, at=14), Lines(CRUMB, at=56)),
        Field(1, planes(1, 32, 256, at=78), Lines(PLANE_A, at=312)),
    )
