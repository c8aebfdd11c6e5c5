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
INTS8, WORDS16 = vector(8, I32), vector(16, I16)


@dataclass(frozen=True)
class IntegerScales:
    """A sub-block whose scales are small integers times a block scale: products stay integers for longer.

        y[j] = d * multiplier[j] * (codes[j] / 2^shift + added[j])

    Codes are unsigned, and the sums of two products with -127 .. 127 fit in 16 bits; or they are signed bytes.
    """

    codes: Value
    multipliers: Value  # int16 x 16, for two columns each
    d: Value  # float32 x 8, of the block
    shift: int = 0
    signed: bool = False
    # float32 x 8: multiplier * added of eight scales, in the first of their sub-blocks. Those of 16 columns are in the
    # order of GROUPS.
    added: Value | None = None


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


# The numbers of 16 groups of columns are two vectors of eight, of groups 0, 2, 4, 6, 1, 3, 5, 7, and of the same + 8.
# Then a shuffle within the halves of a vector fills each half with the number of one group of a sub-block.
GROUPS = (0, 2, 4, 6, 1, 3, 5, 7)


def group_bytes(ir: IrBuilder, address: Value) -> Value:
    """The bytes of eight groups, in the order of GROUPS."""
    return ir.shuffle(ir.load(BYTES8, address), None, GROUPS)


class GroupScales:
    """The scales of a block's 16 groups of columns: d * (numbers - zero), numbers int32 x 8 twice, as in GROUPS.

    added   float32 x 8 twice: what IntegerScales adds to the codes of each group
    """

    def __init__(self, ir: IrBuilder, d: Value, numbers: list[Value], zero: int, added: list[Value]):
        self._ir, self._d, self._added = ir, d, added
        self._floats = [float_minus(v, zero) for v in numbers]
        self._multipliers = [_in_both_words(ir, v - zero) for v in numbers]

    def sub_block(self, j: int, codes: Value, of_product: Value, signed: bool = False) -> SubBlock:
        """Sub-block j with these codes, and those of IntegerScales."""
        half, lanes = j // 4, (j % 4, 4 + j % 4)
        multipliers = spread(self._ir, self._multipliers[half], *lanes).view(WORDS16)
        added = self._floats[half] * self._added[half] if j % 4 == 0 else None
        product = IntegerScales(of_product, multipliers, self._d, signed=signed, added=added)
        return SubBlock(codes, spread(self._ir, self._floats[half] * self._d, *lanes), integer_scales=product)


class SubBlockScales:
    """The scales of a block's eight sub-blocks: d * (numbers - zero), numbers int32 x 8.

    added   float32 x 8: what IntegerScales adds to the codes of each sub-block
    """

    def __init__(self, ir: IrBuilder, d: Value, numbers: Value, zero: int, added: Value | None):
        self._ir, self._d, self._added = ir, d, added
        self._floats = float_minus(numbers, zero)
        # Multipliers are loaded one by one: there are fewer loads than shuffles.
        self._multipliers = ir.in_memory(_in_both_words(ir, numbers - zero))

    def sub_block(
        self, j: int, codes: Value, of_product: Value, signed: bool = False, minimum: Value | None = None
    ) -> SubBlock:
        """Sub-block j with these codes, and those of IntegerScales."""
        multipliers = self._ir.splat(self._ir.load(I32, self._multipliers + 4 * j), 8).view(WORDS16)
        added = self._floats * self._added if self._added is not None and j == 0 else None
        product = IntegerScales(of_product, multipliers, self._d, signed=signed, added=added)
        return SubBlock(codes, spread(self._ir, self._floats * self._d, j), minimum, product)


def _in_both_words(ir: IrBuilder, numbers: Value) -> Value:
    """Small signed integers, int32 x 8, as multipliers: each twice as int16."""
    return ir.shuffle(numbers.view(WORDS16), None, [i & ~1 for i in range(16)]).view(INTS8)


def float_minus(bits: Value, zero: int) -> Value:
    """float32 of integers 0 .. 2^23 - 1, minus `zero`: they become the mantissa of 2^23, so one subtraction does it."""
    return (bits | 0x4B000000).view(vector(bits.lanes, F32)) - (8388608.0 + zero)


def spread(ir: IrBuilder, source: Value, *lanes: int) -> SpreadLanes:
    """Eight lanes filled in equal shares by these lanes of `source`."""
    each = 8 // len(lanes)
    return SpreadLanes(ir, ir.shuffle(source, None, [lane for lane in lanes for _ in range(each)]), source, lanes)
