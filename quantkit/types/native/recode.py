"""Floats of one format as those of another, sixteen at a time, by C functions that need no numba (`machine`).

    recode("bf16", "f16", data)                          each value alone
    rescale("f8_e4m3", "bf16", codes, scales, …)         codes of 8 bits times the scales of their blocks
    send, send_rescaled                                  the same, written to a file while they are in the cache

Values pass through float32, which holds all of them; a product is rounded there once. They are then rounded to the
nearest, of two equally near ones to the even one. Both tell whether all of them fit: what is made of NaN, Inf and
what is too large for the format is of no use.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from quantkit.codegen.ir_builder import IrBuilder
from quantkit.codegen.ir_values import F32, I8, I16, I32, Value, Variable, vector
from quantkit.codegen.native import Function, function
from quantkit.types.native.writing import SLICE_BYTES, pwrite_address, write

LANES = 16
SLICE = SLICE_BYTES // 2  # elements
ITEM_BYTES = {"f32": 4, "f16": 2, "bf16": 2, "f8_e4m3": 1, "f8_e5m2": 1}
TARGETS = ("f32", "f16", "bf16")
_TOO_LARGE = {"f32": 0x7F800000, "f16": 0x477FF000, "bf16": 0x7F7F8000}  # bits of the least float32 that becomes Inf
_BYTES, _HALVES, _WORDS, _FLOATS = (vector(LANES, kind) for kind in (I8, I16, I32, F32))


def _load(ir: IrBuilder, source: str, address: Value) -> Value:
    """The float32 values of sixteen floats."""
    if source == "f32":
        return ir.load(_FLOATS, address)
    if source == "bf16":
        return (ir.load(_HALVES, address).unsigned(I32) << 16).view(_FLOATS)
    return ir.half_to_float(ir.load(_HALVES, address))


_UNIT = {"f8_e4m3": 256.0, "f8_e5m2": 1.0}  # what `_load_codes` gives is to be multiplied by


def _load_codes(ir: IrBuilder, source: str, address: Value, largest: Variable) -> Value:
    """The float32 values of sixteen codes of 8 bits, in _UNITs; `largest` keeps the largest of E4M3 without sign.

    Halves have one bit of exponent more than E4M3 and the bias 15, not 7. By way of them subnormals cost no more than
    others. Its two NaNs come out as numbers: they are the codes whose bits but the sign's are all set.
    """
    codes = ir.load(_BYTES, address).unsigned(I16)
    if source == "f8_e5m2":  # the upper byte of a half
        return ir.half_to_float(codes << 8)
    magnitude = codes & 0x7F
    _raise(ir, largest, magnitude)
    return ir.half_to_float((codes & 0x80) << 8 | magnitude << 7)


def _raise(ir: IrBuilder, most: Variable, v: Value) -> None:
    """Keep the larger, lane by lane."""
    most.set(ir.choose(ir.less(most.get(), v), v, most.get()))


def _look(ir: IrBuilder, x: Value, most: Variable) -> Value:
    """The bits of float32; `most` keeps the largest of magnitudes: those of NaN are above Inf's."""
    bits = x.view(_WORDS)
    _raise(ir, most, bits & 0x7FFFFFFF)
    return bits


def _store(ir: IrBuilder, target: str, x: Value, address: Value, most: Variable) -> None:
    """Round and store what was looked at."""
    bits = _look(ir, x, most)
    if target == "f16":
        x = ir.float_to_half(x)
    elif target == "bf16":
        x = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).narrow(I16)
    ir.store(x, address)


def _named(name: str, body: Callable) -> Function:
    """A native function of this name. Cache files are told apart by it: these bodies share their source lines."""
    body.__name__ = body.__qualname__ = name
    return function(body)


@functools.cache
def _recoding(source: str, target: str) -> Function:
    def body(ir, x, out, count, largest):  # a multiple of LANES
        most = ir.variable(ir.zero(_WORDS))
        with ir.loop(0, count, LANES) as i:
            _store(ir, target, _load(ir, source, x + i * ITEM_BYTES[source]), out + i * ITEM_BYTES[target], most)
        ir.store(most.get(), largest)

    return _named(f"{source}_to_{target}", body)


def _scaled_rows(
    ir: IrBuilder, source: str, target: str, rows: tuple[Value, Value], given: _Given, most: Variable
) -> None:
    """Rows `rows[0]` to `rows[1]` - 1 of the codes, the first of them at `out`."""
    n, begin, largest = given.n, rows[0], ir.variable(ir.zero(_HALVES))
    with ir.loop(*rows) as row, ir.loop(0, given.blocks) as block:
        line = (given.begin + row) / given.high
        scale = ir.splat(ir.load(F32, given.scales + (line * given.blocks + block) * 4) * _UNIT[source], LANES)
        first = block * given.wide
        with ir.loop(row * n + first, row * n + _least(ir, first + given.wide, n), LANES) as i:
            x = _load_codes(ir, source, given.codes + i * ITEM_BYTES[source], largest) * scale
            _store(ir, target, x, given.out + (i - begin * n) * ITEM_BYTES[target], most)
    is_nan = ir.builder.icmp_signed("==", largest.get().ir, ir.constant(_HALVES, 0x7F).ir)
    most.set(Value(ir, ir.builder.select(is_nan, ir.constant(_WORDS, 0x7FFFFFFF).ir, most.get().ir)))


class _Given(NamedTuple):
    """Codes [rows, n], of which row i is row begin + i below the first line of scales; each line has `blocks`."""

    codes: Value
    out: Value
    begin: Value
    n: Value
    high: Value
    wide: Value
    scales: Value
    blocks: Value


def _least(ir: IrBuilder, a: Value, b: Value) -> Value:
    return ir.choose(ir.less(a, b), a, b)


@functools.cache
def _rescaling(source: str, target: str) -> Function:
    def body(ir, codes, out, begin, n, high, wide, scales, blocks, rows, largest):
        most = ir.variable(ir.zero(_WORDS))
        given = _Given(codes, out, begin, n, high, wide, scales, blocks)
        _scaled_rows(ir, source, target, (ir.integer(0), rows), given, most)
        ir.store(most.get(), largest)

    return _named(f"{source}_scaled_to_{target}", body)


@functools.cache
def _sending(source: str, target: str) -> Function:
    def body(ir, pwrite, file, offset, x, scratch, count, largest, missed):
        most, missing = ir.variable(ir.zero(_WORDS)), ir.variable(ir.integer(0))
        width = ITEM_BYTES[target]
        with ir.loop(0, count, SLICE) as first:
            last = _least(ir, first + SLICE, count)
            with ir.loop(first, last, LANES) as i:
                bits = _load(ir, source, x + i * ITEM_BYTES[source])
                if source == target:
                    _look(ir, bits, most)
                else:
                    _store(ir, target, bits, scratch + (i - first) * width, most)
            made = x + first * width if source == target else scratch
            write(ir, (pwrite, file), made, (last - first) * width, offset + first * width, missing)
        ir.store(most.get(), largest)
        ir.store(missing.get(), missed)

    return _named(f"{source}_sent_as_{target}", body)


@functools.cache
def _sending_rescaled(source: str, target: str) -> Function:
    def body(
        ir, pwrite, file, offset, codes, scratch, begin, n, high, wide, scales, blocks, rows, slices, largest, missed
    ):
        most, missing = ir.variable(ir.zero(_WORDS)), ir.variable(ir.integer(0))
        given = _Given(codes, scratch, begin, n, high, wide, scales, blocks)
        with ir.loop(0, slices) as number:
            first, last = rows * number / slices, rows * (number + 1) / slices
            _scaled_rows(ir, source, target, (first, last), given, most)
            width = n * ITEM_BYTES[target]
            write(ir, (pwrite, file), scratch, (last - first) * width, offset + first * width, missing)
        ir.store(most.get(), largest)
        ir.store(missing.get(), missed)

    return _named(f"{source}_scaled_sent_as_{target}", body)


def recode(source: str, target: str, data: np.ndarray) -> tuple[np.ndarray, bool]:
    """uint8[rows, bytes] of one format as another, and whether all fit. Their number must be a multiple of LANES."""
    data = np.ascontiguousarray(data)
    size, largest = ITEM_BYTES[source], np.empty(LANES, np.int32)
    out = np.empty((data.shape[0], data.shape[1] // size * ITEM_BYTES[target]), np.uint8)
    _recoding(source, target)(data.ctypes.data, out.ctypes.data, data.size // size, largest.ctypes.data)
    return out, bool(largest.max() < _TOO_LARGE[target])


def rescale(
    source: str, target: str, codes: np.ndarray, scales: np.ndarray, block: tuple[int, ...], begin: int, out: np.ndarray
) -> bool:
    """Fill out uint8[rows, bytes] with uint8 codes[rows, n], each times the scale of its block of rows and columns.

    Whether all products fit; never with E4M3 and scales of 2^120 or more, which are multiplied by 256 here.
    scales float32[lines, ceil(n / block[1])]; the codes begin `begin` rows below where the first line does. All arrays
    are contiguous; `n` and block[1] must be multiples of LANES.
    """
    (rows, n), largest = codes.shape, np.empty(LANES, np.int32)
    at = codes.ctypes.data, out.ctypes.data, begin, n, *block, scales.ctypes.data, scales.shape[1]
    _rescaling(source, target)(*at, rows, largest.ctypes.data)
    return bool(largest.max() < _TOO_LARGE[target])


def send(source: str, target: str, data: np.ndarray, descriptor: int, offset: int) -> bool:
    """Write what `recode` gives for contiguous bytes to a file at an offset. False where not all fit, or not all was
    written: what is there then is of no use."""
    if not (pwrite := pwrite_address()):
        return False
    count, largest, missing = data.size // ITEM_BYTES[source], np.empty(LANES, np.int32), np.empty(1, np.int64)
    scratch = np.empty(0 if source == target else SLICE * ITEM_BYTES[target], np.uint8)
    where = data.ctypes.data, scratch.ctypes.data, count, largest.ctypes.data, missing.ctypes.data
    _sending(source, target)(pwrite, descriptor, offset, *where)
    return bool(largest.max() < _TOO_LARGE[target] and not missing[0])


def send_rescaled(
    source: str,
    target: str,
    codes: np.ndarray,
    scales: np.ndarray,
    block: tuple[int, ...],
    begin: int,
    descriptor: int,
    offset: int,
) -> bool:
    """The same with what `rescale` gives."""
    if not (pwrite := pwrite_address()):
        return False
    (rows, n), largest, missing = codes.shape, np.empty(LANES, np.int32), np.empty(1, np.int64)
    slices = -(-rows * n // SLICE)
    scratch = np.empty(-(-rows // slices) * n * ITEM_BYTES[target], np.uint8)
    at = codes.ctypes.data, scratch.ctypes.data, begin, n, *block, scales.ctypes.data, scales.shape[1]
    _sending_rescaled(source, target)(
        pwrite, descriptor, offset, *at, rows, slices, largest.ctypes.data, missing.ctypes.data
    )
    return bool(largest.max() < _TOO_LARGE[target] and not missing[0])
