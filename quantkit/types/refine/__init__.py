"""Rounding by second moments: lowering e^T H e of encoded rows, H = E[x x^T] of the input of their matrix.

Takes rows, their encoding and H; gives a better encoding in the same format, in place. `moments` makes H ready,
`scalar_codes` moves the codes of types whose elements have codes of their own. `QuantType.quantize` is the only user.
Must not import `types.base`, which imports it.
"""

from __future__ import annotations

import numpy as np

from quantkit.types.families.code_bits import Codec, codes_of
from quantkit.types.refine import scalar_codes
from quantkit.types.refine.moments import Moments, prepare

__all__ = ["Moments", "applies_to", "prepare", "refine"]

SWEEPS = (1, 3, 8)  # over all columns, by effort


def applies_to(kind: Codec) -> bool:
    """Whether second moments change the bytes of a type (row by row, not interleaved)."""
    return codes_of(kind) is not None


def refine(kind: Codec, x: np.ndarray, data: np.ndarray, moments: Moments, effort: int) -> None:
    """Lower the error of data uint8[rows, row bytes], the encoding of float32[rows, n], in place.

    Rows are independent: bytes depend neither on threads nor on the CPU. Types whose codes are wider than six bits stay
    as they are: hardly any error is left in them.
    """
    if (codes := codes_of(kind)) is not None:
        scalar_codes.refine(kind, codes, x, data, moments, SWEEPS[effort])
