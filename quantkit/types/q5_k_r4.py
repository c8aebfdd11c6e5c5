"""Q5_K_R4 (id 213): Q5_K with four rows interleaved, 704 bytes per 4 rows by 256 columns.

offset  size       field
0       64 bytes   d, dmin, scales and minima, as in Q4_K_R4
64      128 x u8   qh   the fifth bits
192     512 x u8   qs
"""

from __future__ import annotations

from quantkit.types.families.interleave import NIB, PLANE_C, Field, Interleaved, Lines, planes
from quantkit.types.q4_k_r4 import SCALES
from quantkit.types.q5_k import Q5_K


class Q5_K_R4(Interleaved):
    """Q5_K_R4: Q5_K with four rows interleaved, 704 bytes per 4 rows by 256 columns."""

    name, ggml_type, file_type = "q5_k_r4", 213, 216
    base_class, interleave = Q5_K, 4
    fields = (
        *SCALES,
        Field(1, planes(1, 32, 256, at=16), Lines(PLANE_C, at=64)),
        Field(4, planes(4, 32, 256, at=48), Lines(NIB, at=192)),
    )
