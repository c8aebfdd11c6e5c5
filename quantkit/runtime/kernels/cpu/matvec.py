"""Weights times one vector: for each type a C function over rows first .. last - 1,

    void(weights, n, first, last, activations, out)     out[row] = sum over j of y[row, j] * x[j]

with all arguments int64 (addresses are integers), `activations` a buffer of activations.py with codes filled, n a
multiple of the type's block and of 32, and `out` float32 of which [first, last) is written. For an interleaved type
`first` and `last` are multiples of its rows.

The plain formula, for a block of 32 with weights scale * (code - offset) + floor and activations s * a:

    s * scale * (sum code * a  -  offset * sum a)  +  floor * s * sum a

for each four of its columns with fine activations; for all 32 with wide ones (interleaved rows), where the first sum
is 256 * sum code * high + sum code * low.

The bracket is exact in int32. Scales that are small integers times a number d of the block stay integers with it: the
sum of s * multiplier * bracket over the block is multiplied by d once.

The kernels are bound by memory, so what counts is that each byte of the weights is read once, in order, and that what
is done to it fits in the time it takes to arrive.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from quantkit.codegen.callbacks import Callback, callback
from quantkit.codegen.simd import F32, I8, I32, IrBuilder, Value, Variable, simd_intrinsic, vector
from quantkit.runtime.kernels.cpu.activations import (
    FINE,
    FINE_SCALES,
    FINE_SUMS,
    WIDE,
    WIDE_SCALES,
    WIDE_SUMS,
    fine_floors,
)
from quantkit.runtime.kernels.cpu.dequantize import FLOAT_TYPES, load_floats
from quantkit.runtime.kernels.cpu.formats.base import Format, Picked
from quantkit.runtime.kernels.cpu.formats.registry import FORMATS

SIGNATURE = "void(int64, int64, int64, int64, int64, int64)"
ROWS = 4  # in flight: one load of the activations serves them all, and four sums hide the latency of one

_INTS8, _FLOATS8, _FLOATS16 = vector(8, I32), vector(8, F32), vector(16, F32)


@simd_intrinsic("void")
def integer_product(
    ir: IrBuilder, ggml_type: int, weights: Value, n: Value, first: Value, last: Value, activations: Value, out: Value
) -> None:
    f = FORMATS[ggml_type]
    blocks = n >> (f.columns.bit_length() - 1)
    if f.rows > 1:
        with ir.loop(first, last, f.rows) as row:
            group = weights + f.group_bytes(blocks) * (row >> (f.rows.bit_length() - 1))
            _lane_rows(ir, f, group, blocks, n, activations, out + row * 4)
        return

    def rows_at(row: Value, count: int) -> None:
        size = f.group_bytes(blocks)
        addresses = [weights + size * (row + r) for r in range(count)]
        _rows(ir, f, addresses, blocks, n, activations, out + row * 4)

    _in_steps(ir, first, last, rows_at)


def _ask_ahead(ir: IrBuilder, start: Value, steps: Value, step: Value, nbytes: int) -> None:
    """Prefetch, while a tile of `steps` steps of `nbytes` is read, the tile after the next, at the same pace.

    The hardware follows one stream well, but rows in flight are several short ones: this made reading 1.1 to 3 times
    faster, as rows crossed more pages.
    """
    ahead = start + steps * (2 * nbytes) + step * nbytes
    for line in range(0, nbytes, 64):
        ir.prefetch(ahead + line)


def _in_steps(ir: IrBuilder, first: Value, last: Value, rows_at: Callable[[Value, int], None]) -> None:
    """`rows_at(row, ROWS)` as far as that goes, the rest with `rows_at(row, 1)`."""
    middle = last - ((last - first) & (ROWS - 1))
    with ir.loop(first, middle, ROWS) as row:
        rows_at(row, ROWS)
    with ir.loop(middle, last, 1) as row:
        rows_at(row, 1)


def _rows(ir: IrBuilder, f: Format, addresses: list[Value], blocks: Value, n: Value, x: Value, out: Value) -> None:
    totals = [ir.variable(ir.zero(_FLOATS8)) for _ in addresses]
    with ir.loop(0, blocks) as b:
        _ask_ahead(ir, addresses[0], blocks, b, f.nbytes * len(addresses))
        readers = [f.units(ir, address, b) for address in addresses]
        first = b * f.columns
        kept = _Scales(ir)
        inner: list[Value] = []  # of each row with small scales: its units without what the block has in common
        last = f.columns // 32 - 1
        for unit in range(last + 1):
            at = first + 32 * unit
            codes, scales = ir.load(vector(32, I8), x + n * FINE + at), ir.load(_FLOATS8, x + n * FINE_SCALES + at)
            start = ir.load(_INTS8, x + n * FINE_SUMS + at) * -f.offset if f.offset else ir.zero(_INTS8)
            for r, (reader, total) in enumerate(zip(readers, totals)):
                weight = next(reader)
                if small := weight.small:
                    product = ir.multiply_pairs(ir.byte_pairs(small.codes, codes), small.words).real()
                    lower = scales * 2.0**-small.up
                    if unit == 0:
                        inner.append(product * lower)
                    else:
                        inner[r] = ir.fma(product, lower, inner[r])
                    if unit == last:
                        total.set(ir.fma(inner[r], small.d, total.get()))
                else:
                    product = ir.dot4(start, weight.codes, codes, f.largest).real()
                    total.set(ir.fma(product, kept.scale(weight.scale) * scales, total.get()))
                if weight.floor:
                    _add_floor(ir, total, weight.floor, unit, fine_floors(x, n, at, f.group))
    for r, total in enumerate(totals):
        ir.store(ir.sum(total.get()), out + 4 * r)


class _Scales:
    """Scales of a block's units. One that fills eight lanes comes from memory where it was picked from a vector: that
    costs a load, of which there are few, not a shuffle, of which there are many.
    """

    def __init__(self, ir: IrBuilder):
        self.ir = ir
        self.kept: dict[int, tuple[Value, Value]] = {}  # what scales were picked from, and its address

    def scale(self, scale: Value) -> Value:
        if not isinstance(scale, Picked) or len(scale.which) > 1:
            return scale
        key = id(scale.scales)
        if key not in self.kept:
            self.kept[key] = scale.scales, self.ir.in_memory(scale.scales)
        return self.ir.splat(self.ir.load(F32, self.kept[key][1] + 4 * scale.which[0]), 8)


def _add_floor(ir: IrBuilder, total: Variable, floor: Value, unit: int, floors: Value) -> None:
    """Add floor times the activations' floors of the unit, at an address; of floors picked from eight, all at once."""
    if isinstance(floor, Picked):
        lane = unit * len(floor.which) % 8
        if floor.which[0] != lane:
            raise ValueError(f"unit {unit} picks floors from {floor.which[0]}, not from {lane} on: they are in order")
        if lane == 0:
            total.set(ir.fma(floor.scales, ir.load(_FLOATS8, floors), total.get()))
    else:  # one that fills eight lanes
        total.set(ir.fma(floor, ir.insert(ir.zero(_FLOATS8), 0, ir.load(F32, floors)), total.get()))


def _lane_rows(ir: IrBuilder, f: Format, group: Value, blocks: Value, n: Value, x: Value, out: Value) -> None:
    """A group of interleaved rows, one a lane."""
    total = ir.variable(ir.zero(_FLOATS8))
    with ir.loop(0, blocks) as b:
        _ask_ahead(ir, group, blocks, b, f.nbytes)
        for unit, weight in enumerate(f.units(ir, group, b)):
            at = b * f.columns + 32 * unit
            sums = _lane_sums(ir, f, ir.load(_INTS8, x + n * WIDE_SUMS + at))
            product = ir.zero(_INTS8)
            for plane in (0, 32):
                codes = x + n * WIDE + at * 2 + plane
                for weights, left, right in weight.steps:
                    if left == right:  # a load fills all lanes
                        four = ir.splat(ir.load(I32, codes + left), 8)
                    else:
                        four = ir.shuffle(ir.load(_INTS8, codes), None, [left // 4] * 4 + [right // 4] * 4)
                    product = ir.dot4(product, weights, four.view(vector(32, I8)), f.largest)
                if plane == 0:
                    product = (product << 8) + sums * -f.offset
            scale = ir.splat(ir.load(F32, x + n * WIDE_SCALES + (at >> 3)), 8)
            partial = ir.fma(product.real(), weight.scale * scale, total.get())
            total.set(ir.fma(sums.real() * scale, weight.floor, partial) if weight.floor else partial)
    lanes = total.get()
    while lanes.lanes > f.rows:
        half = lanes.lanes // 2
        lanes = ir.part(lanes, 0, half) + ir.part(lanes, half, half)
    ir.store(lanes, out)


def _lane_sums(ir: IrBuilder, f: Format, fours: Value) -> Value:
    """Of the sums of four activation codes, what each lane sees: all 32 columns, or 16 and 16."""
    for distance in (1, 2, 4) if f.rows == 8 else (1, 2):
        fours = fours + ir.shuffle(fours, None, [lane ^ distance for lane in range(8)])
    return fours


@simd_intrinsic("void")
def float_product(
    ir: IrBuilder, ggml_type: int, weights: Value, n: Value, first: Value, last: Value, activations: Value, out: Value
) -> None:
    width = 4 if FLOAT_TYPES[ggml_type] == "f32" else 2

    def rows_at(row: Value, count: int) -> None:
        start = weights + row * n * width
        totals = [[ir.variable(ir.zero(_FLOATS16)) for _ in range(2)] for _ in range(count)]
        with ir.loop(0, n, 32) as i:
            _ask_ahead(ir, start, n >> 5, i >> 5, 32 * width * count)
            for half in range(2):
                x = ir.load(_FLOATS16, activations + (i + 16 * half) * 4)
                for r in range(count):
                    weight = load_floats(ir, ggml_type, start + (n * r + i + 16 * half) * width)
                    totals[r][half].set(ir.fma(weight, x, totals[r][half].get()))
        for r, (a, b) in enumerate(totals):
            ir.store(ir.sum(a.get() + b.get()), out + row * 4 + 4 * r)

    _in_steps(ir, first, last, rows_at)


@functools.cache
def product(ggml_type: int) -> Callback | None:
    """The compiled function of a type; None for types without one."""
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
