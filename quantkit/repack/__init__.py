"""Row interleaving of whole arrays, and back: the same bits in the order that CPU kernels like to read.

    repack(data, "IQ4_K", n)        -> (data, "IQ4_K_R4")
    unpack(data, "IQ4_K_R4", n)     -> (data, "IQ4_K")
    interleaved_form(type)          the interleaved type of a base type, or None

Nothing is lost: unpack(repack(x)) is x for any bytes, valid or not. Where each bit goes stands in the type's own file.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from quantkit import types
from quantkit.errors import DataError, UnsupportedError
from quantkit.types import QuantType
from quantkit.types.interleave import Interleaved

__all__ = ["interleaved_form", "repack", "unpack"]


def interleaved_form(base: QuantType) -> Interleaved | None:
    """The type that interleaves rows of `base`; None when it has none (or is one already)."""
    forms = (t for t in types.all() if isinstance(t, Interleaved) and not t.legacy)
    return next((t for t in forms if t.base == base.name and base.has_codec), None)


def repack(data: Any, type_name: str, n: int, *, threads: int | None = None) -> tuple[np.ndarray, str]:
    """Interleave the rows of a matrix, or of each matrix of a stack.

    `data` is uint8[…, rows, row_bytes(n)] of type `type_name` with n columns; rows must be a multiple of the number the
    interleaved type weaves together. Returns the array laid out as in a file, and its type's name; its shape is that
    of `data` but for Q8_KV, whose rows lose 4 bytes.
    """
    base = types.get(type_name)
    form = interleaved_form(base)
    if form is None:
        raise UnsupportedError(f"type {base.name} has no row-interleaved form")
    matrices = _matrices(data, base, n, form.interleave)
    return form.interleave_rows(matrices, threads=threads).reshape(*np.shape(data)[:-1], -1), form.name.upper()


def unpack(data: Any, type_name: str, n: int, *, threads: int | None = None) -> tuple[np.ndarray, str]:
    """Undo `repack`: uint8[…, rows, row_bytes(n)] of an interleaved type as rows of its base type."""
    form = types.get(type_name)
    if not isinstance(form, Interleaved):
        raise UnsupportedError(f"type {form.name} is not row-interleaved; there is nothing to unpack")
    matrices = _matrices(data, form, n, form.interleave)
    return form.deinterleave_rows(matrices, threads=threads).reshape(*np.shape(data)[:-1], -1), form.of.name.upper()


def _matrices(data: Any, kind: QuantType, n: int, interleave: int) -> np.ndarray:
    """The stack as one uint8[all rows, row bytes]. A group never straddles two matrices, so each needs whole groups."""
    data = np.ascontiguousarray(data, np.uint8)
    if data.ndim < 2 or data.shape[-1] != kind.row_bytes(n):
        raise DataError(f"{kind.name}: expected uint8[…, rows, {kind.row_bytes(n)}] for n={n}, got shape {data.shape}")
    if data.shape[-2] % interleave:
        raise DataError(
            f"{kind.name}: {data.shape[-2]} rows are not a multiple of the {interleave} that are interleaved"
        )
    return data.reshape(-1, data.shape[-1])
