"""IQ2_BN_R4 (id 335): IQ2_BN with four rows interleaved; four f32 row scales, then 64 bytes per 4 rows by 64 columns.

offset  size      field
0       64 x u8   qs
"""

from __future__ import annotations

from quantkit.types.families.interleave import CRUMB, Field, Interleaved, Lines, planes
from quantkit.types.iq2_bn import IQ2_BN


class IQ2_BN_R4(Interleaved):
    """IQ2_BN_R4: IQ2_BN with four rows interleaved; four f32 row scales, then 64 bytes per 4 rows by 64 columns."""

    name, ggml_type, file_type = "iq2_bn_r4", 335, 337
    base_class, interleave = IQ2_BN, 4
    fields = (Field(2, planes(2, 16, 64, at=0), Lines(CRUMB, at=0)),)
