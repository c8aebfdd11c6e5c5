"""Where a block keeps its numbers, as sums that a GPU works out in a few instructions. No numba here.

`types/families/interleave.py` describes an interleaved type by its fields: for each the bit addresses of its elements
in a block of the base type and in one of a group of rows. All these addresses, and those of the other types, are
*linear in the
bits* of the column j and of the row k,

    address(k, j) = first + sum over bits b of j: columns[b] * bit b of j + the same of k

so that a `Place`, which is these weights, serves base and interleaved types alike. `place` finds the weights from the
addresses and checks every one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quantkit.types.families.interleave import Field, FieldPlacement, Interleaved


@dataclass(frozen=True)
class Place:
    """Bit addresses of elements of `width` bits in a block of a row, or of a group of rows."""

    width: int
    first: int
    columns: tuple[int, ...]  # weights of the element number's bits, lowest first
    rows: tuple[int, ...]  # of the row's in its group


def place(width: int, addresses: np.ndarray | Sequence[int]) -> Place:
    """Of bit addresses int[count] or int[rows, count], counts powers of two. TypeError where they are not linear."""
    table = np.atleast_2d(np.asarray(addresses, np.int64))
    rows, count = table.shape
    first = int(table[0, 0])
    columns = tuple(int(table[0, 1 << b]) - first for b in range((count - 1).bit_length()))
    of_rows = tuple(int(table[1 << b, 0]) - first for b in range((rows - 1).bit_length()))
    expected = first + _sums(of_rows, rows)[:, None] + _sums(columns, count)
    if not np.array_equal(expected, table):
        raise TypeError("bit addresses are not linear in the bits of column and row")
    return Place(width, first, columns, of_rows)


def _sums(weights: Sequence[int], count: int) -> np.ndarray:
    bits = np.arange(count)[:, None] >> np.arange(len(weights)) & 1
    return bits @ np.array(weights, np.int64).reshape(-1)


def interleaved(width: int, count: int, rows: int, group: FieldPlacement) -> Place:
    """Of elements that a group of rows keeps as a placement of `types/families/interleave.py` says."""
    return place(width, group.addresses(rows, width, count))


def in_base(field: Field) -> Place:
    """A field in a block of the base type."""
    return place(field.width, field.base)


def in_group(field: Field, rows: int) -> Place:
    """A field in a block of a group of rows."""
    return interleaved(field.width, len(field.base), rows, field.group)


def both(kind: type[Interleaved]) -> dict[str, tuple[Place, ...]]:
    """The fields of an interleaved type and of its base type, by their names."""
    fields = kind.fields
    return {
        kind.of.name: tuple(in_base(f) for f in fields),
        kind.name: tuple(in_group(f, kind.interleave) for f in fields),
    }
