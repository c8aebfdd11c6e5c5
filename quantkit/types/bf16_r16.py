"""BF16_R16 (id 230): BF16 with sixteen rows interleaved, 64 bytes per 16 rows by 2 columns.

    offset  size        field
    0       32 x u16    upper halves of float32: columns 0 and 1 of row 0, then of row 1 ... row 15

Encoding rounds to the nearest BF16; ik_llama.cpp truncates.
"""

from __future__ import annotations

import functools

from quantkit.errors import DataError
from quantkit.types.families.interleave import Field, Interleaved, Permutation, Slots, packed
from quantkit.types.floats import BF16


class BF16_R16(Interleaved):
    """BF16_R16: BF16 with sixteen rows interleaved, 64 bytes per 16 rows by 2 columns."""

    name, ggml_type, file_type = "bf16_r16", 230, 232
    base_class, interleave = BF16, 16
    overflow = BF16.overflow
    fields = (Field(32, packed(32, 1), Slots(0, at=0)),)

    def row_bytes(self, n: int) -> int:
        if n % 2:
            raise DataError(f"{self.name}: rows of {n} elements cannot be interleaved by pairs of columns")
        return super().row_bytes(n)

    @functools.cached_property
    def permutation(self) -> Permutation:
        return Permutation(self.fields, self.interleave, block_bytes=4)
