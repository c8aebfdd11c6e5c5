"""Rounding by second moments: lowering e^T H e of encoded rows, H = E[x x^T] of the input of their matrix.

Takes rows, their encoding and H; gives a better encoding in the same format, in place. `moments` makes H ready,
`scalar_codes` moves the codes of types whose elements have codes of their own, `vector_codes` those of groups of
elements, `ternary_rows` and `even_words` those of the types that call them from their `refine_rows`.
`QuantType.quantize` is the only user. Must not import `types.base`, which imports it.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from quantkit.types.families.code_bits import Codec, codes_of
from quantkit.types.families.scale_bits import scale_of
from quantkit.types.refine import scalar_codes, vector_codes
from quantkit.types.refine.moments import Moments, prepare
from quantkit.types.refine.vector_codes import VectorCodes

__all__ = ["Moments", "applies_to", "prepare", "refine"]

SWEEPS = (1, 2, 6)  # over all columns, by effort, of types that call their method from `refine_rows`


class Refinable(Codec, Protocol):
    """What is asked of a type here."""

    @property
    def vector_codes(self) -> VectorCodes | None: ...


def applies_to(kind: Refinable) -> bool:
    """Whether `refine` changes the bytes of a type (row by row, not interleaved)."""
    return kind.vector_codes is not None or codes_of(kind) is not None


def refine(kind: Refinable, x: np.ndarray, data: np.ndarray, moments: Moments, effort: int) -> None:
    """Lower the error of data uint8[rows, row bytes], the encoding of float32[rows, n], in place.

    Rows are independent: bytes depend neither on threads nor on the CPU. Floats stay as they are.
    """
    if (groups := kind.vector_codes) is not None:
        vector_codes.refine(kind, groups, scale_of(kind), x, data, moments, vector_codes.SCALES[effort])
    elif (codes := codes_of(kind)) is not None:
        scalar_codes.refine(kind, codes, x, data, moments, scalar_codes.ROUNDS[effort])
