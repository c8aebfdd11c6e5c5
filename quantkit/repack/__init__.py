"""Row interleaving of whole arrays, and its inverse: the same bits in the order in which CPU kernels read them fast.

    repack(data, "IQ4_K", n)        -> (data, "IQ4_K_R4")
    unpack(data, "IQ4_K_R4", n)     -> (data, "IQ4_K")
    interleaved_form(type)          the interleaved type of a base type, or None
    row_form(type)                  what unpacking makes of a type, or None

It is lossless: unpack(repack(x)) is x for any bytes, valid or not, except for the sums of Q8_KV, which are computed
again. The file of each type says where each bit goes. IQ1_S_R4, IQ1_M_R4 and Q8_K_R8 are not another type in another
order: nothing is repacked to them, and `unpack` converts them where that is exact (`conversions`).

Quantizing to an interleaved type encodes to its base type and interleaves. An importance that is zero over a sub-block
is handled by the base type's encoder; ik_llama.cpp's separate guard for it is not needed.
"""

from __future__ import annotations

import functools
import math

import numpy as np
from numpy.typing import ArrayLike

from quantkit import types
from quantkit.errors import DataError, UnsupportedError
from quantkit.inputs import arguments
from quantkit.repack import conversions
from quantkit.types import QuantType
from quantkit.types.families.interleave import Interleaved

__all__ = ["interleaved_form", "repack", "row_form", "to_rows", "unpack", "why_not"]


@functools.cache
def interleaved_form(base: QuantType) -> Interleaved | None:
    """The type that interleaves rows of `base`; None when it has none (or is one already)."""
    begins = f"{base.name}_r".lower()  # the older forms of Q4_0, q4_0_4x4 and so on, are unpacked but never made
    forms = (types.layout(name) for name in types.names() if name.lower().startswith(begins))
    return next((t for t in forms if isinstance(t, Interleaved) and t.base == base.name), None)


def repack(data: ArrayLike, type_name: str, n: int, *, threads: int | None = None) -> tuple[np.ndarray, str]:
    """Interleave the rows of a matrix, or of each matrix of a stack.

    `data` is uint8[…, rows, row_bytes(n)] of type `type_name` with n columns; rows must be a multiple of the rows that
    the interleaved type has in a group. Returns the array with the bytes of a file, and its type's name; its shape is
    that of `data`, except for Q8_KV, whose rows lose 4 bytes.
    """
    base = types.get(type_name)
    form = interleaved_form(base)
    if form is None:
        raise UnsupportedError(f"type {base.name} has no row-interleaved form")
    matrices = _matrices(data, base, n, form.interleave)
    converted = form.interleave_rows(_rows(matrices), threads=threads)
    return converted.reshape(*matrices.shape[:-1], converted.shape[1]), form.name.upper()


def row_form(t: QuantType) -> QuantType | None:
    """The row-by-row type that unpacking makes of `t`; None when it interleaves no rows."""
    return conversions.row_form(t) or (t.base_type if isinstance(t, Interleaved) else None)


def unpack(data: ArrayLike, type_name: str, n: int, *, threads: int | None = None) -> tuple[np.ndarray, str]:
    """Undo `repack`: convert the rows of an interleaved type to its base type.

    `data` is uint8[…, rows, row_bytes(n)] of type `type_name` with n columns; `threads` defaults to the CPUs that this
    process may use. Returns the array in the base type, and that type's name. DataError names the first
    row of IQ1_S_R4 or IQ1_M_R4 that IQ1_S or IQ1_M cannot hold.
    """
    t = types.get(type_name)
    base = row_form(t)
    if base is None:
        raise UnsupportedError(f"type {t.name} is not row-interleaved; there is nothing to unpack")
    matrices = _matrices(data, t, n, t.interleave)
    rows = to_rows(t, _rows(matrices), n, threads=arguments.threads(threads))
    return rows.reshape(*matrices.shape[:-1], rows.shape[1]), base.name.upper()


def why_not(t: QuantType, data: np.ndarray, n: int, first_row: int = 0) -> str:
    """Why groups of `t`, uint8[rows, row bytes], cannot be unpacked without loss; "" where they can.

    Rows are counted from `first_row` in the message.
    """
    return conversions.why_not(t, data, n, first_row) if conversions.row_form(t) else ""


def to_rows(
    t: QuantType, data: np.ndarray, n: int, *, threads: int | None = None, out: np.ndarray | None = None
) -> np.ndarray:
    """Groups of `t`, uint8[rows, row bytes], as rows of `row_form(t)`; in `out` if that is given."""
    if not conversions.row_form(t):
        assert isinstance(t, Interleaved)
        return t.deinterleave_rows(data, threads=threads, out=out)
    converted = conversions.convert(t, data, n, threads=threads)
    if out is None:
        return converted
    arguments.output(out, converted.shape, np.uint8, data, t.name)[...] = converted
    return out


def _rows(matrices: np.ndarray) -> np.ndarray:
    """The stack as one uint8[all rows, row bytes]."""
    return matrices.reshape(math.prod(matrices.shape[:-1]), matrices.shape[-1])


def _matrices(data: ArrayLike, kind: QuantType, n: int, interleave: int) -> np.ndarray:
    """The stack as contiguous uint8. A group never straddles two matrices, so each needs whole groups."""
    data = arguments.encoded(data, kind.name)
    if data.ndim < 2 or data.shape[-1] != kind.row_bytes(n):
        raise DataError(f"{kind.name}: expected uint8[…, rows, {kind.row_bytes(n)}] for n={n}, got shape {data.shape}")
    if data.shape[-2] % interleave:
        raise DataError(
            f"{kind.name}: {data.shape[-2]} rows are not a multiple of the {interleave} that are interleaved"
        )
    result: np.ndarray = data
    return result
