"""Bit addresses of a block's fields, as sums that a GPU computes in a few instructions. Does not import numba.

`types/families/interleave.py` describes an interleaved type by its fields: for each, the bit addresses of its elements
in a block of the base type and in a block of a group of rows. All these addresses, and those of the other types, are
*linear in the bits* of the column j and of the row k:

    address(k, j) = first + sum over bits b of j: columns[b] * bit b of j + the same for k

So `LinearAddresses`, which holds these weights, serves base and interleaved types. `linear_addresses` finds the weights
from a table of addresses and checks every entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quantkit.types.families.interleave import Field, FieldPlacement, Interleaved


@dataclass(frozen=True)
class LinearAddresses:
    """Bit addresses of elements of `width` bits in a block of a row, or of a group of rows."""

    width: int
    first: int
    columns: tuple[int, ...]  # weights of the element number's bits, lowest first
    rows: tuple[int, ...]  # of the row's in its group


def linear_addresses(width: int, addresses: np.ndarray | Sequence[int]) -> LinearAddresses:
    """The weights of bit addresses int[count] or int[rows, count], both powers of two. TypeError if not linear."""
    table = np.atleast_2d(np.asarray(addresses, np.int64))
    rows, count = table.shape
    first = int(table[0, 0])
    columns = tuple(int(table[0, 1 << b]) - first for b in range((count - 1).bit_length()))
    of_rows = tuple(int(table[1 << b, 0]) - first for b in range((rows - 1).bit_length()))
    expected = first + _sums(of_rows, rows)[:, None] + _sums(columns, count)
    if not np.array_equal(expected, table):
        raise TypeError("bit addresses are not linear in the bits of column and row")
    return LinearAddresses(width, first, columns, of_rows)


def _sums(weights: Sequence[int], count: int) -> np.ndarray:
    bits = np.arange(count)[:, None] >> np.arange(len(weights)) & 1
    return bits @ np.array(weights, np.int64).reshape(-1)


def interleaved(width: int, count: int, rows: int, group: FieldPlacement) -> LinearAddresses:
    """The addresses of a field in a group of interleaved rows, by a `FieldPlacement` of `interleave.py`."""
    return linear_addresses(width, group.addresses(rows, width, count))


def in_base(field: Field) -> LinearAddresses:
    """A field in a block of the base type."""
    return linear_addresses(field.width, field.base)


def in_group(field: Field, rows: int) -> LinearAddresses:
    """A field in a block of a group of rows."""
    return interleaved(field.width, len(field.base), rows, field.group)


def base_and_interleaved(kind: type[Interleaved]) -> dict[str, tuple[LinearAddresses, ...]]:
    """The fields of an interleaved type and of its base type, by their names."""
    fields = kind.fields
    return {
        kind.base_class.name: tuple(in_base(f) for f in fields),
        kind.name: tuple(in_group(f, kind.interleave) for f in fields),
    }
