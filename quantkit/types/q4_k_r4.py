"""Q4_K_R4 (id 212): Q4_K with four rows interleaved, 576 bytes per 4 rows by 256 columns.

offset  size       field
0       4 x f16    d
8       4 x f16    dmin
16      16 x u8    high bits: sub-block s of row k in slot 4 s + k, two bits of its scale, two of its minimum
32      32 x u8    low bits: byte 4 s + k, a nibble of the scale, a nibble of the minimum
64      512 x u8   qs
"""

from __future__ import annotations

from quantkit.types.families.interleave import NIB, Field, Interleaved, Lines, Slots, packed, planes
from quantkit.types.q4_k import Q4_K

# Where a block of Q4_K or Q5_K keeps the low 4 and high 2 bits of its eight scales; the minima are one nibble, or four
# bytes, further (byte map in q4_k.py).
_LOW = [8 * (4 + s) for s in range(4)] + [8 * (12 + s) for s in range(4)]
_MIN_LOW = [8 * (8 + s) for s in range(4)] + [8 * (12 + s) + 4 for s in range(4)]
_HIGH = [8 * (4 + s) + 4 for s in range(4)] + [8 * (4 + s) + 6 for s in range(4)]
_MIN_HIGH = [8 * (8 + s) + 4 for s in range(4)] + [8 * (8 + s) + 6 for s in range(4)]
SCALES = (
    Field(16, packed(16, 1, at=0), Slots(0, at=0)),
    Field(16, packed(16, 1, at=2), Slots(0, at=8)),
    Field(2, _HIGH, Slots(16, at=16, pitch=4)),
    Field(2, _MIN_HIGH, Slots(16, at=16, pitch=4, bit=2)),
    Field(4, _LOW, Slots(0, at=32, pitch=8)),
    Field(4, _MIN_LOW, Slots(0, at=32, pitch=8, bit=4)),
)


class Q4_K_R4(Interleaved):
    """Q4_K_R4: Q4_K with four rows interleaved, 576 bytes per 4 rows by 256 columns."""

    name, ggml_type, file_type = "q4_k_r4", 212, 214
    base_class, interleave = Q4_K, 4
    fields = (
        *SCALES,
        Field(4, planes(4, 32, 256, at=16), Lines(NIB, at=64)),
    )
