"""Convert floats of one format to another, sixteen at a time, by native functions (`codegen.native`, without numba).

    recode("bf16", "f16", data)                          values alone
    rescale("f8_e4m3", "bf16", codes, scales, …)         codes of 8 bits times the scales of their blocks
    write_recoded, write_rescaled                        the same, written to a file while they are in the cache

Values are computed in float32, which represents all of them; a product is rounded there once. The result is rounded to
nearest, ties to even. All four return whether all values fit; if not (NaN, Inf, too large), the output is undefined.
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
_TOO_LARGE = {"f32": 0x7F800000, "f16": 0x477FF000, "bf16": 0x7F7F8000}  # bits of the first float32 that becomes Inf
_BYTES, _HALVES, _WORDS, _FLOATS = (vector(LANES, kind) for kind in (I8, I16, I32, F32))


def _load(ir: IrBuilder, source: str, address: Value) -> Value:
    """Load sixteen floats as float32."""
    if source == "f32":
        return ir.load(_FLOATS, address)
    if source == "bf16":
        return (ir.load(_HALVES, address).unsigned(I32) << 16).view(_FLOATS)
    return ir.half_to_float(ir.load(_HALVES, address))


_UNIT = {"f8_e4m3": 256.0, "f8_e5m2": 1.0}  # multiply what `_load_codes` gives by this


def _load_codes(ir: IrBuilder, source: str, address: Value, largest: Variable) -> Value:
    """Load sixteen 8-bit floats as float32, in units of _UNIT; `largest` becomes the largest E4M3 code without sign.

    They are converted by way of halves, which have one more bit of exponent than E4M3 and the bias 15 instead of 7, so
    that subnormals cost no more than others. The two NaNs of E4M3, all bits set but the sign, come out as numbers.
    """
    codes = ir.load(_BYTES, address).unsigned(I16)
    if source == "f8_e5m2":  # the upper byte of a half
        return ir.half_to_float(codes << 8)
    magnitude = codes & 0x7F
    _update_maximum(ir, largest, magnitude)
    return ir.half_to_float((codes & 0x80) << 8 | magnitude << 7)


def _update_maximum(ir: IrBuilder, max_bits: Variable, v: Value) -> None:
    """Keep the larger, lane by lane."""
    max_bits.set(ir.choose(ir.less(max_bits.get(), v), v, max_bits.get()))


def _track_magnitude(ir: IrBuilder, x: Value, max_bits: Variable) -> Value:
    """The bits of float32; `max_bits` becomes the largest magnitude's bits, where numbers < Inf < NaN."""
    bits = x.view(_WORDS)
    _update_maximum(ir, max_bits, bits & 0x7FFFFFFF)
    return bits


def _store(ir: IrBuilder, target: str, x: Value, address: Value, max_bits: Variable) -> None:
    """Round sixteen float32 to a format and store them; `max_bits` as in `_track_magnitude`."""
    bits = _track_magnitude(ir, x, max_bits)
    if target == "f16":
        x = ir.float_to_half(x)
    elif target == "bf16":
        x = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).narrow(I16)
    ir.store(x, address)


def _named(name: str, body: Callable) -> Function:
    """A native function of this name: the cache key includes it, and these bodies share their source lines."""
    body.__name__ = body.__qualname__ = name
    return function(body)


@functools.cache
def _recoding(source: str, target: str) -> Function:
    def body(ir, x, out, count, largest):  # a multiple of LANES
        max_bits = ir.variable(ir.zero(_WORDS))
        with ir.loop(0, count, LANES) as i:
            _store(ir, target, _load(ir, source, x + i * ITEM_BYTES[source]), out + i * ITEM_BYTES[target], max_bits)
        ir.store(max_bits.get(), largest)

    return _named(f"{source}_to_{target}", body)


def _scaled_rows(
    ir: IrBuilder, source: str, target: str, rows: tuple[Value, Value], scaled: _ScaledCodes, max_bits: Variable
) -> None:
    """Convert rows `rows[0]` to `rows[1]` - 1 of the codes; the first of them goes to `out`."""
    n, begin, largest = scaled.n, rows[0], ir.variable(ir.zero(_HALVES))
    with ir.loop(*rows) as row, ir.loop(0, scaled.blocks) as block:
        scale_row = (scaled.begin + row) / scaled.high
        scale = ir.splat(ir.load(F32, scaled.scales + (scale_row * scaled.blocks + block) * 4) * _UNIT[source], LANES)
        first = block * scaled.wide
        with ir.loop(row * n + first, row * n + _minimum(ir, first + scaled.wide, n), LANES) as i:
            x = _load_codes(ir, source, scaled.codes + i * ITEM_BYTES[source], largest) * scale
            _store(ir, target, x, scaled.out + (i - begin * n) * ITEM_BYTES[target], max_bits)
    is_nan = ir.builder.icmp_signed("==", largest.get().ir, ir.constant(_HALVES, 0x7F).ir)
    max_bits.set(Value(ir, ir.builder.select(is_nan, ir.constant(_WORDS, 0x7FFFFFFF).ir, max_bits.get().ir)))


class _ScaledCodes(NamedTuple):
    """Codes [rows, n] and the scales of their blocks; row i is row `begin` + i of the matrix."""

    codes: Value
    out: Value
    begin: Value
    n: Value
    high: Value  # rows of a block
    wide: Value  # columns of a block
    scales: Value
    blocks: Value  # side by side


def _minimum(ir: IrBuilder, a: Value, b: Value) -> Value:
    return ir.choose(ir.less(a, b), a, b)


@functools.cache
def _rescaling(source: str, target: str) -> Function:
    def body(ir, codes, out, begin, n, high, wide, scales, blocks, rows, largest):
        max_bits = ir.variable(ir.zero(_WORDS))
        scaled = _ScaledCodes(codes, out, begin, n, high, wide, scales, blocks)
        _scaled_rows(ir, source, target, (ir.integer(0), rows), scaled, max_bits)
        ir.store(max_bits.get(), largest)

    return _named(f"{source}_scaled_to_{target}", body)


@functools.cache
def _writing(source: str, target: str) -> Function:
    def body(ir, pwrite, file, offset, x, scratch, count, largest, missed):
        max_bits, missing = ir.variable(ir.zero(_WORDS)), ir.variable(ir.integer(0))
        width = ITEM_BYTES[target]
        with ir.loop(0, count, SLICE) as first:
            last = _minimum(ir, first + SLICE, count)
            with ir.loop(first, last, LANES) as i:
                bits = _load(ir, source, x + i * ITEM_BYTES[source])
                if source == target:
                    _track_magnitude(ir, bits, max_bits)
                else:
                    _store(ir, target, bits, scratch + (i - first) * width, max_bits)
            encoded = x + first * width if source == target else scratch
            write(ir, (pwrite, file), encoded, (last - first) * width, offset + first * width, missing)
        ir.store(max_bits.get(), largest)
        ir.store(missing.get(), missed)

    return _named(f"{source}_sent_as_{target}", body)


@functools.cache
def _writing_rescaled(source: str, target: str) -> Function:
    def body(
        ir, pwrite, file, offset, codes, scratch, begin, n, high, wide, scales, blocks, rows, slices, largest, missed
    ):
        max_bits, missing = ir.variable(ir.zero(_WORDS)), ir.variable(ir.integer(0))
        scaled = _ScaledCodes(codes, scratch, begin, n, high, wide, scales, blocks)
        with ir.loop(0, slices) as number:
            first, last = rows * number / slices, rows * (number + 1) / slices
            _scaled_rows(ir, source, target, (first, last), scaled, max_bits)
            width = n * ITEM_BYTES[target]
            write(ir, (pwrite, file), scratch, (last - first) * width, offset + first * width, missing)
        ir.store(max_bits.get(), largest)
        ir.store(missing.get(), missed)

    return _named(f"{source}_scaled_sent_as_{target}", body)


def recode(source: str, target: str, data: np.ndarray) -> tuple[np.ndarray, bool]:
    """Convert uint8[rows, bytes], a multiple of LANES values. Returns the new bytes, and whether all values fit."""
    data = np.ascontiguousarray(data)
    size, largest = ITEM_BYTES[source], np.empty(LANES, np.int32)
    out = np.empty((data.shape[0], data.shape[1] // size * ITEM_BYTES[target]), np.uint8)
    _recoding(source, target)(data.ctypes.data, out.ctypes.data, data.size // size, largest.ctypes.data)
    return out, bool(largest.max() < _TOO_LARGE[target])


def rescale(
    source: str, target: str, codes: np.ndarray, scales: np.ndarray, block: tuple[int, ...], begin: int, out: np.ndarray
) -> bool:
    """Fill out uint8[rows, bytes] with uint8 codes[rows, n], each times the scale of its block of rows and columns.

    Returns whether all products fit; False with E4M3 and scales of 2^120 or more, which are multiplied by 256 here.
    scales float32[rows of blocks, ceil(n / block[1])]; the codes are those from row `begin` of the matrix on. All
    arrays are contiguous; `n` and block[1] must be multiples of LANES.
    """
    (rows, n), largest = codes.shape, np.empty(LANES, np.int32)
    addresses = codes.ctypes.data, out.ctypes.data, begin, n, *block, scales.ctypes.data, scales.shape[1]
    _rescaling(source, target)(*addresses, rows, largest.ctypes.data)
    return bool(largest.max() < _TOO_LARGE[target])


def write_recoded(source: str, target: str, data: np.ndarray, descriptor: int, offset: int) -> bool:
    """Write what `recode` gives for contiguous bytes to a file at an offset.

    False where not all values fit or not all bytes were written; the content of the file is then undefined.
    """
    if not (pwrite := pwrite_address()):
        return False
    count, largest, missing = data.size // ITEM_BYTES[source], np.empty(LANES, np.int32), np.empty(1, np.int64)
    scratch = np.empty(0 if source == target else SLICE * ITEM_BYTES[target], np.uint8)
    addresses = data.ctypes.data, scratch.ctypes.data, count, largest.ctypes.data, missing.ctypes.data
    _writing(source, target)(pwrite, descriptor, offset, *addresses)
    return bool(largest.max() < _TOO_LARGE[target] and not missing[0])


def write_rescaled(
    source: str,
    target: str,
    codes: np.ndarray,
    scales: np.ndarray,
    block: tuple[int, ...],
    begin: int,
    descriptor: int,
    offset: int,
) -> bool:
    """Write what `rescale` gives to a file at an offset; returns as `write_recoded`."""
    if not (pwrite := pwrite_address()):
        return False
    (rows, n), largest, missing = codes.shape, np.empty(LANES, np.int32), np.empty(1, np.int64)
    slices = -(-rows * n // SLICE)
    scratch = np.empty(-(-rows // slices) * n * ITEM_BYTES[target], np.uint8)
    addresses = codes.ctypes.data, scratch.ctypes.data, begin, n, *block, scales.ctypes.data, scales.shape[1]
    _writing_rescaled(source, target)(
        pwrite, descriptor, offset, *addresses, rows, slices, largest.ctypes.data, missing.ctypes.data
    )
    return bool(largest.max() < _TOO_LARGE[target] and not missing[0])
