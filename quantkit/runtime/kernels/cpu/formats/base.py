"""What a type's blocks are to the CPU kernels: small integers and scales. The one description that all of them share.

A row is read in units of 32 columns. A format's reader yields the units of one block,

    y[j] = scale[j] * (codes[j] - offset) + floor[j]          j in 0 .. 31

with `codes` 32 unsigned bytes in column order and `scale`, `floor` float32 x 8, lane i for columns 4i .. 4i+3 (the
four that one 32-bit lane of a byte product sums up). The byte maps stand in `quantkit/types`.

An interleaved type has a reader of its own kind: 8 lanes are 8 rows, or 4 rows twice, and a unit is steps of 32 bytes,
lane i of a step holding four columns of row i % rows. With 4 rows, lanes 0..3 stand in the unit's first 16 columns and
lanes 4..7 in its last.

Readers are called with (e, block) or, for types whose rows have a header, with (e, block, head): addresses.
`runtime/kernels/cpu/formats/registry.py` has them all, by type.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from quantkit.codegen.simd import F32, I8, I16, I32, IrBuilder, Value, vector

BYTES4, BYTES8, BYTES16, BYTES32 = (vector(lanes, I8) for lanes in (4, 8, 16, 32))
FLOATS4, FLOATS8, FLOATS16 = (vector(lanes, F32) for lanes in (4, 8, 16))
INTS4, INTS8, INTS16 = (vector(lanes, I32) for lanes in (4, 8, 16))


@dataclass(frozen=True)
class Small:
    """32 columns whose scales are small integers times what the block has in common: products stay integers for longer.

    Codes stand `up` bits higher in their bytes, where that saves a shift; two products of bytes must fit in 16 bits.
    """

    codes: Value  # of the unit, times 2^up
    up: int
    words: Value  # int16 x 16, of two columns each: scale = words * d
    d: Value  # float32 x 8, of the block


@dataclass(frozen=True)
class Unit:
    """32 columns of one row; `floor` is None for formats without one, `small` for most of those with an offset."""

    codes: Value
    scale: Value
    floor: Value | None = None
    small: Small | None = None


@dataclass(frozen=True)
class LaneUnit:
    """32 columns of `rows` rows: each step is (codes, first column of lanes 0..3, of lanes 4..7)."""

    steps: list[tuple[Value, int, int]]
    scale: Value
    floor: Value | None = None


@dataclass(frozen=True)
class Format:
    """A type as kernels see it. `rows` rows share a group; `group` columns share a scale, and a floor."""

    name: str
    read: Callable[..., Iterator]
    columns: int  # of a block
    nbytes: int  # of a block, times `rows` for a group of rows
    offset: int
    largest: int  # code
    group: int = 32
    floor: bool = False
    rows: int = 1
    head: int = 0  # bytes before the blocks of a row, of all rows of a group

    def group_bytes(self, blocks: Value) -> Value:
        """Bytes of a group of rows, or of a row, with so many blocks."""
        return blocks * self.nbytes + self.head

    def units(self, ir: IrBuilder, group: Value, b: Value) -> Iterator:
        """The units of block b of the group, or row, at an address."""
        block = group + b * self.nbytes + self.head
        return self.read(ir, block, group) if self.head else self.read(ir, block)


def format_of(name: str, **numbers: Any) -> Callable[[Callable[..., Iterator]], Format]:
    """Decorator: make a Format of its reader. Collected in table.py by the type's name."""
    return lambda read: Format(name, read, **numbers)


# --------------------------------------------------------------------------------------- what readers have in common


def load_half(ir: IrBuilder, address: Value) -> Value:
    return ir.half_to_float(ir.load(I16, address))


def load_halves(ir: IrBuilder, address: Value, lanes: int) -> Value:
    return ir.half_to_float(ir.load(vector(lanes, I16), address))


def low_then_high(ir: IrBuilder, packed: Value) -> Value:
    """All low nibbles of 16 bytes, then all high ones."""
    return low_and_high(ir, ir.shuffle(packed, None, [*range(16), *range(16)]))


def low_and_high(ir: IrBuilder, packed: Value) -> Value:
    """Low nibbles of the first 16 bytes, high ones of the others."""
    return (packed.view(INTS8) >> ir.constant(INTS8, [0, 0, 0, 0, 4, 4, 4, 4])).view(BYTES32) & 15


class Picked(Value):
    """What `pick` gives, with what it was picked from: kernels can first do to all scales what they do to each."""

    __slots__ = ("scales", "which")

    def __init__(self, ir: IrBuilder, spread: Value, scales: Value, which: tuple[int, ...]):
        super().__init__(ir, spread.ir)
        self.scales, self.which = scales, which


def pick(ir: IrBuilder, scales: Value, *lanes: int) -> Picked:
    """Eight lanes filled in equal shares by these lanes of `scales`."""
    each = 8 // len(lanes)
    return Picked(ir, ir.shuffle(scales, None, [lane for lane in lanes for _ in range(each)]), scales, lanes)
