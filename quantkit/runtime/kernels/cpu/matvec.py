"""Products of a matrix with one vector: for each type a C function for rows first .. last - 1,

    void(weights, n, first, last, activations, out)     out[row] = sum over j of y[row, j] * x[j]

All arguments are int64; addresses are integers. `activations` is an activation buffer (activations.py), n a multiple of
the type's block and of 32, and `out` float32, of which [first, last) is written. For an interleaved type `first` and
`last` are multiples of its rows.

The formula for a sub-block of 32 columns, with weights scale * (code - offset) + minimum and activations s * a:

    s * scale * (sum code * a  -  offset * sum a)  +  minimum * s * sum a

for each four of its columns with int8 activations; for all 32 with int16 activations (interleaved rows), where the
first sum is 256 * sum code * high + sum code * low.

The bracket is exact in int32. Scales that are small integers times a block scale d stay integers with it: the sum of
s * multiplier * (sum code * a) over the block is multiplied by d once. What the offset and flags add to all codes of a
scale is added to it as multiplier * s * sum a, for eight scales at once.

Each byte of the weights is read once, in order. With VNNI the work per byte fits in the time in which it arrives; with
AVX2 the instructions bind in types of few bits.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable

from quantkit.codegen.callbacks import Callback, callback
from quantkit.codegen.simd import F32, I8, I16, I32, IrBuilder, Value, Variable, simd_intrinsic, vector
from quantkit.runtime.kernels.cpu.activations import (
    INT8_CODES,
    INT8_SCALES,
    INT8_SUMS,
    INT16_CODES,
    INT16_SCALES,
    INT16_SUMS,
    INT16_WORDS,
    has_vnni,
    scaled_sums,
)
from quantkit.runtime.kernels.cpu.dequantize import FLOAT_TYPES, load_floats
from quantkit.runtime.kernels.cpu.formats.base import GROUPS, Format, InterleavedSubBlock, SpreadLanes
from quantkit.runtime.kernels.cpu.formats.registry import FORMATS

SIGNATURE = "void(int64, int64, int64, int64, int64, int64)"
TOGETHER = {1: 4, 4: 2, 8: 1}  # by the rows of a group: what is loaded or computed of activations serves them all

_SMALL = 63  # largest code for which bytes are faster than 16-bit integers without VNNI: two sums fit in 16 bits

_INTS8, _WORDS16, _FLOATS8, _FLOATS16 = vector(8, I32), vector(16, I16), vector(8, F32), vector(16, F32)


@simd_intrinsic("void")
def integer_product(
    ir: IrBuilder, ggml_type: int, weights: Value, n: Value, first: Value, last: Value, activations: Value, out: Value
) -> None:
    """Matrix-vector product of a type of FORMATS, with quantized activations; see the module."""
    f = FORMATS[ggml_type]
    blocks = n >> (f.columns.bit_length() - 1)
    size, row_bits = f.row_group_bytes(blocks), f.rows.bit_length() - 1
    products = _rows if f.rows == 1 else _interleaved_rows

    def groups_at(row: Value, count: int) -> None:
        addresses = [weights + size * ((row >> row_bits) + r) for r in range(count)]
        products(ir, f, addresses, blocks, n, activations, out + row * 4)

    _for_each_group(ir, first, last, f.rows, groups_at)


def _prefetch_tile(ir: IrBuilder, start: Value, steps: Value, step: Value, nbytes: int) -> None:
    """Prefetch two tiles ahead, at the pace at which a tile of `steps` steps of `nbytes` bytes is read.

    The hardware prefetcher follows one stream well, but rows read together are several short ones: this made reading
    1.1 to 3 times faster, more so where rows cross more pages.
    """
    ahead = start + steps * (2 * nbytes) + step * nbytes
    for line in range(0, nbytes, 64):
        ir.prefetch(ahead + line)


def _for_each_group(
    ir: IrBuilder, first: Value, last: Value, rows: int, groups_at: Callable[[Value, int], None]
) -> None:
    """Call `groups_at(row, count)` for several row groups of `rows` rows together, then for each that is left."""
    together = TOGETHER[rows]
    middle = last - ((last - first) & (together * rows - 1))
    with ir.loop(first, middle, together * rows) as row:
        groups_at(row, together)
    if together > 1:
        with ir.loop(middle, last, rows) as row:
            groups_at(row, 1)


def _rows(ir: IrBuilder, f: Format, addresses: list[Value], blocks: Value, n: Value, x: Value, out: Value) -> None:
    """Products of the plain rows at these addresses, together."""
    totals = [ir.variable(ir.zero(_FLOATS8)) for _ in addresses]
    with ir.loop(0, blocks) as b:
        _prefetch_tile(ir, addresses[0], blocks, b, f.nbytes * len(addresses))
        readers = [f.sub_blocks(ir, address, b) for address in addresses]
        first = b * f.columns
        scale_cache = _ScaleCache(ir)
        without_d: list[Value] = []  # per row with integer scales: its sum over the block, not yet times d
        last = f.columns // 32 - 1
        for i in range(last + 1):
            column = first + 32 * i
            codes = ir.load(vector(32, I8), x + n * INT8_CODES + column)
            scales = ir.load(_FLOATS8, x + n * INT8_SCALES + column)
            for r, (reader, total) in enumerate(zip(readers, totals)):
                weight = next(reader)
                if integer := weight.integer_scales:
                    pairs = (ir.signed_pairs if integer.signed else ir.byte_pairs)(integer.codes, codes)
                    product = ir.multiply_pairs(pairs, integer.multipliers).real()
                    lower = scales * 2.0**-integer.shift
                    if i == 0:
                        without_d.append(product * lower)
                    else:
                        without_d[r] = ir.fma(product, lower, without_d[r])
                    if integer.added:
                        without_d[r] = ir.fma(integer.added, _scaled_sums(ir, f, x, n, column), without_d[r])
                    if i == last:
                        total.set(ir.fma(without_d[r], integer.d, total.get()))
                else:
                    product = _sums_of_four(ir, f, weight.codes, codes, x + n * INT8_SUMS + column).real()
                    total.set(ir.fma(product, scale_cache.load(weight.scale) * scales, total.get()))
                if weight.minimum:
                    _add_minimum(ir, total, weight.minimum, i, scaled_sums(x, n, column, f.scale_columns))
    for r, total in enumerate(totals):
        ir.store(ir.sum(total.get()), out + 4 * r)


def _scaled_sums(ir: IrBuilder, f: Format, x: Value, n: Value, column: Value) -> Value:
    """Scaled sums of the activations for eight scales, from a column on, in the order of IntegerScales.added."""
    sums = ir.load(_FLOATS8, scaled_sums(x, n, column, f.scale_columns))
    return ir.shuffle(sums, None, GROUPS) if f.scale_columns == 16 else sums


def _sums_of_four(ir: IrBuilder, f: Format, weights: Value, codes: Value, sums: Value) -> Value:
    """int32 sums of four neighbouring products (code - offset) * a. `sums`: the address of those of a alone."""
    if f.largest > 127 and not has_vnni(ir):
        return ir.pairs(ir.signed_pairs(weights - f.offset, codes))
    start = ir.load(_INTS8, sums) * -f.offset if f.offset else ir.zero(_INTS8)
    return ir.dot4(start, weights, codes, f.largest)


class _ScaleCache:
    """Scales of a block's sub-blocks. One that fills eight lanes is loaded from memory, to which its source vector is
    written once: that costs a load, of which there are few, not a shuffle, of which there are many.
    """

    def __init__(self, ir: IrBuilder):
        self.ir = ir
        self.stored: dict[int, tuple[Value, Value]] = {}  # sources of scales, and their addresses

    def load(self, scale: Value) -> Value:
        if not isinstance(scale, SpreadLanes) or len(scale.lanes_used) > 1:
            return scale
        key = id(scale.source)
        if key not in self.stored:
            self.stored[key] = scale.source, self.ir.in_memory(scale.source)
        return self.ir.splat(self.ir.load(F32, self.stored[key][1] + 4 * scale.lanes_used[0]), 8)


def _add_minimum(ir: IrBuilder, total: Variable, minimum: Value, sub_block: int, sums: Value) -> None:
    """Add minimum * scaled sums of the activations at an address; where minimums are lanes of a vector, 8 at once."""
    if isinstance(minimum, SpreadLanes):
        lane = sub_block * len(minimum.lanes_used) % 8
        if minimum.lanes_used[0] != lane:
            raise ValueError(f"sub-block {sub_block} spreads minimum {minimum.lanes_used[0]}, not {lane}: not in order")
        if lane == 0:
            total.set(ir.fma(minimum.source, ir.load(_FLOATS8, sums), total.get()))
    else:  # one that fills eight lanes
        total.set(ir.fma(minimum, ir.insert(ir.zero(_FLOATS8), 0, ir.load(F32, sums)), total.get()))


def _interleaved_rows(
    ir: IrBuilder, f: Format, groups: list[Value], blocks: Value, n: Value, x: Value, out: Value
) -> None:
    """Products of the groups of interleaved rows at these addresses, one lane each."""
    totals = [ir.variable(ir.zero(_FLOATS8)) for _ in groups]
    with ir.loop(0, blocks) as b:
        _prefetch_tile(ir, groups[0], blocks, b, f.nbytes * len(groups))
        readers = [f.sub_blocks(ir, group, b) for group in groups]
        for i in range(f.columns // 32):
            column = b * f.columns + 32 * i
            sums = _interleaved_sums(ir, f, ir.load(_INTS8, x + n * INT16_SUMS + column))
            start, scale = sums * -f.offset, ir.splat(ir.load(F32, x + n * INT16_SCALES + (column >> 3)), 8)
            for reader, total in zip(readers, totals):
                weight = next(reader)
                if has_vnni(ir) or f.largest <= _SMALL:
                    product = _byte_planes(ir, f, weight, x + n * INT16_CODES + column * 2, start)
                else:
                    product = _word_products(ir, weight, x + n * INT16_WORDS + column * 2, start)
                partial = ir.fma(product.real(), weight.scale * scale, total.get())
                total.set(ir.fma(sums.real() * scale, weight.minimum, partial) if weight.minimum else partial)
    for r, total in enumerate(totals):
        lanes = total.get()
        while lanes.lanes > f.rows:
            half = lanes.lanes // 2
            lanes = ir.part(lanes, 0, half) + ir.part(lanes, half, half)
        ir.store(lanes, out + 4 * f.rows * r)


def _byte_planes(ir: IrBuilder, f: Format, weight: InterleavedSubBlock, codes: Value, start: Value) -> Value:
    """start + the sums of code * a in int32, by bytes: with the high bytes of a, then with the low ones."""
    together = max(1, 32767 // (256 * f.largest))  # steps whose sums of two products fit in 16 bits
    product = ir.zero(_INTS8)
    for plane in (0, 32):
        fours = [_four_columns(ir, codes + plane, step) for step in weight.steps]
        if has_vnni(ir):
            for (weights, _, _), four in zip(weight.steps, fours):
                product = ir.dot4(product, weights, four, f.largest)
        else:
            pairs = [ir.byte_pairs(weights, four) for (weights, _, _), four in zip(weight.steps, fours)]
            for first in range(0, len(pairs), together):
                product = product + ir.pairs(functools.reduce(operator.add, pairs[first : first + together]))
        if plane == 0:
            product = (product << 8) + start
    return product


def _four_columns(ir: IrBuilder, codes: Value, step: tuple[Value, int, int]) -> Value:
    """The bytes of a step's four columns of activations, in all lanes of their rows."""
    _, first, second = step
    if first == second:  # a load fills all lanes
        return ir.splat(ir.load(I32, codes + first), 8).view(vector(32, I8))
    return ir.shuffle(ir.load(_INTS8, codes), None, [first // 4] * 4 + [second // 4] * 4).view(vector(32, I8))


def _word_products(ir: IrBuilder, weight: InterleavedSubBlock, words: Value, start: Value) -> Value:
    """The same by 16-bit integers: the first and third of four columns, then the second and fourth."""
    product = start
    for weights, first, second in weight.steps:
        codes = weights.view(_WORDS16)
        for parity, pair in enumerate((codes & 0xFF, codes >> 8)):
            if first == second:
                two = ir.splat(ir.load(I32, words + 2 * first + 4 * parity), 8)
            else:
                both = ir.join(*(ir.load(vector(4, I32), words + 2 * (column & -8)) for column in (first, second)))
                lanes = [4 * half + column % 8 // 2 + parity for half, column in enumerate((first, second))]
                two = ir.shuffle(both, None, [lanes[0]] * 4 + [lanes[1]] * 4)
            product = product + ir.multiply_pairs(pair, two.view(_WORDS16))
    return product


def _interleaved_sums(ir: IrBuilder, f: Format, fours: Value) -> Value:
    """Sums of activation codes over the columns of each lane, from sums of four: all 32 columns, or 16 and 16."""
    for distance in (1, 2, 4) if f.rows == 8 else (1, 2):
        fours = fours + ir.shuffle(fours, None, [lane ^ distance for lane in range(8)])
    return fours


@simd_intrinsic("void")
def float_product(
    ir: IrBuilder, ggml_type: int, weights: Value, n: Value, first: Value, last: Value, activations: Value, out: Value
) -> None:
    """Matrix-vector product of F32, F16 and BF16, with float32 activations; see the module."""
    width = 4 if FLOAT_TYPES[ggml_type] == "f32" else 2

    def rows_at(row: Value, count: int) -> None:
        start = weights + row * n * width
        totals = [[ir.variable(ir.zero(_FLOATS16)) for _ in range(2)] for _ in range(count)]
        with ir.loop(0, n, 32) as i:
            _prefetch_tile(ir, start, n >> 5, i >> 5, 32 * width * count)
            for half in range(2):
                x = ir.load(_FLOATS16, activations + (i + 16 * half) * 4)
                for r in range(count):
                    weight = load_floats(ir, ggml_type, start + (n * r + i + 16 * half) * width)
                    totals[r][half].set(ir.fma(weight, x, totals[r][half].get()))
        for r, (a, b) in enumerate(totals):
            ir.store(ir.sum(a.get() + b.get()), out + row * 4 + 4 * r)

    _for_each_group(ir, first, last, 1, rows_at)


@functools.cache
def product(ggml_type: int) -> Callback | None:
    """The compiled matrix-vector product of a type; None for types without a kernel."""
    if ggml_type in FLOAT_TYPES:

        @callback(SIGNATURE)
        def run(weights, n, first, last, activations, out):
            float_product(ggml_type, weights, n, first, last, activations, out)

        return run
    if ggml_type in FORMATS:

        @callback(SIGNATURE)
        def run(weights, n, first, last, activations, out):
            integer_product(ggml_type, weights, n, first, last, activations, out)

        return run
    return None
