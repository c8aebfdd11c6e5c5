"""How CPU kernels see a type's blocks: small integer codes and scales. All kernels share this one description.

A row is read in sub-blocks of 32 columns, whatever the type's own groups of columns with one scale (16, 32 or more). A
format's reader yields the sub-blocks of one block:

    y[j] = scale[j] * (codes[j] - offset) + minimum[j]          j in 0 .. 31

`codes` are 32 unsigned bytes in column order. `scale` and `minimum` are float32 x 8: lane i is for columns 4i .. 4i+3,
the four that one 32-bit lane of a byte product sums. The byte maps are in `quantkit/types`.

A reader of an interleaved type yields `InterleavedSubBlock`s: 8 lanes are 8 rows, or 4 rows twice. A sub-block is a
list of steps of 32 bytes; lane i of a step holds four columns of row i % rows. With 4 rows, lanes 0..3 are in the
sub-block's first 16 columns and lanes 4..7 in its last.

Readers are called as `read(ir, block)` or, for types whose rows have a header, `read(ir, block, header)`; both are
addresses. `formats/registry.py` finds them by type.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from quantkit.codegen.simd import F32, I8, I16, I32, IrBuilder, Value, vector

BYTES4, BYTES8, BYTES16, BYTES32 = (vector(lanes, I8) for lanes in (4, 8, 16, 32))
FLOATS4, FLOATS8, FLOATS16 = (vector(lanes, F32) for lanes in (4, 8, 16))
INTS8 = vector(8, I32)


@dataclass(frozen=True)
class IntegerScales:
    """A sub-block whose scales are small integers times a block scale: products stay integers for longer.

    Codes may be shifted left by `shift` bits, where that saves an instruction; the sum of two products of bytes must
    fit in 16 bits.
    """

    codes: Value  # times 2^shift
    shift: int
    multipliers: Value  # int16 x 16, for two columns each: scale = multiplier * d
    d: Value  # float32 x 8, of the block


@dataclass(frozen=True)
class SubBlock:
    """32 columns of one row. `minimum` is None in formats without minimums, `integer_scales` in most formats."""

    codes: Value
    scale: Value
    minimum: Value | None = None
    integer_scales: IntegerScales | None = None


@dataclass(frozen=True)
class InterleavedSubBlock:
    """32 columns of `Format.rows` rows. A step is (codes, first column of lanes 0..3, first column of lanes 4..7)."""

    steps: list[tuple[Value, int, int]]
    scale: Value
    minimum: Value | None = None


@dataclass(frozen=True)
class Format:
    """How CPU kernels read a type. A row group is `rows` interleaved rows, or one row."""

    name: str
    read: Callable[..., Iterator[Any]]
    columns: int  # of a block
    nbytes: int  # of a block, of all rows of a group
    offset: int
    largest: int  # code
    scale_columns: int = 32  # columns that share a scale, and a minimum: 16 or 32
    has_minimum: bool = False
    rows: int = 1
    head: int = 0  # bytes of the header of a row group

    def row_group_bytes(self, blocks: Value) -> Value:
        """Bytes of a row group with this number of blocks."""
        return blocks * self.nbytes + self.head

    def sub_blocks(self, ir: IrBuilder, group: Value, b: Value) -> Iterator[Any]:
        """Yield the sub-blocks of block b of the row group at an address."""
        block = group + b * self.nbytes + self.head
        return self.read(ir, block, group) if self.head else self.read(ir, block)


def format_of(name: str, **numbers: Any) -> Callable[[Callable[..., Iterator[Any]]], Format]:
    """Decorator: make a Format of a reader. `registry.py` collects them by type."""
    return lambda read: Format(name, read, **numbers)


# --------------------------------------------------------------------------------------- what readers have in common


def load_half(ir: IrBuilder, address: Value) -> Value:
    """A float16 at an address, as float32."""
    return ir.half_to_float(ir.load(I16, address))


def load_halves(ir: IrBuilder, address: Value, lanes: int) -> Value:
    """Several float16 at an address, as float32."""
    return ir.half_to_float(ir.load(vector(lanes, I16), address))


def low_then_high(ir: IrBuilder, packed: Value) -> Value:
    """All low nibbles of 16 bytes, then all high nibbles."""
    return low_and_high(ir, ir.shuffle(packed, None, [*range(16), *range(16)]))


def low_and_high(ir: IrBuilder, packed: Value) -> Value:
    """The low nibbles of the first 16 of 32 bytes, the high nibbles of the others."""
    return (packed.view(INTS8) >> ir.constant(INTS8, [0, 0, 0, 0, 4, 4, 4, 4])).view(BYTES32) & 15


class SpreadLanes(Value):
    """The result of `spread`, with its source: a kernel may apply one operation to all source lanes at once."""

    __slots__ = ("lanes_used", "source")

    def __init__(self, ir: IrBuilder, spread: Value, source: Value, lanes_used: tuple[int, ...]):
        super().__init__(ir, spread.ir)
        self.source, self.lanes_used = source, lanes_used


def spread(ir: IrBuilder, source: Value, *lanes: int) -> SpreadLanes:
    """Eight lanes filled in equal shares by these lanes of `source`."""
    each = 8 // len(lanes)
    return SpreadLanes(ir, ir.shuffle(source, None, [lane for lane in lanes for _ in range(each)]), source, lanes)
