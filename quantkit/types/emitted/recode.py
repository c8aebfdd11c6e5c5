"""Floats of one format as those of another, sixteen at a time, by C functions that need no numba (`machine`).

    recode("bf16", "f16", data)                          each value alone
    rescale("f8_e4m3", "bf16", codes, scales, …)         codes of 8 bits times the scales of their blocks

Values pass through float32, which holds all of them; a product is rounded there once. They are then rounded to the
nearest, of two equally near ones to the even one. Both tell whether all of them fit: what is made of NaN, Inf and
what is too large for the format is of no use.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from quantkit.emit import Emit
from quantkit.machine import Function, function
from quantkit.simd_values import F32, I8, I16, I32, Value, Variable, vector

LANES = 16
ITEM_BYTES = {"f32": 4, "f16": 2, "bf16": 2, "f8_e4m3": 1, "f8_e5m2": 1}
TARGETS = ("f32", "f16", "bf16")
_TOO_LARGE = {"f32": 0x7F800000, "f16": 0x477FF000, "bf16": 0x7F7F8000}  # bits of the least float32 that becomes Inf
_BYTES, _HALVES, _WORDS, _FLOATS = (vector(LANES, kind) for kind in (I8, I16, I32, F32))


def _load(e: Emit, source: str, address: Value) -> Value:
    """The float32 values of sixteen of a format.

    Halves have one bit of exponent more than E4M3 and the bias 15, not 7. By way of them subnormals cost no more than
    others.
    """
    if source == "f32":
        return e.load(_FLOATS, address)
    if source == "bf16":
        return (e.load(_HALVES, address).unsigned(I32) << 16).view(_FLOATS)
    if source == "f16":
        return e.half_to_float(e.load(_HALVES, address))
    codes = e.load(_BYTES, address).unsigned(I16)
    if source == "f8_e5m2":  # the upper byte of a half
        return e.half_to_float(codes << 8)
    x = e.half_to_float((codes & 0x80) << 8 | (codes & 0x7F) << 7) * 256.0
    is_nan = e.builder.icmp_signed("==", (codes & 0x7F).ir, e.constant(_HALVES, 0x7F).ir)
    return Value(e, e.builder.select(is_nan, e.constant(_FLOATS, float("nan")).ir, x.ir))


def _store(e: Emit, target: str, x: Value, address: Value, most: Variable) -> None:
    """Round and store; `most` keeps the largest magnitudes before that, as bits: those of NaN are above Inf's."""
    bits = x.view(_WORDS)
    magnitude = bits & 0x7FFFFFFF
    is_more = e.builder.icmp_signed(">", magnitude.ir, most.get().ir)
    most.set(Value(e, e.builder.select(is_more, magnitude.ir, most.get().ir)))
    if target == "f16":
        x = e.float_to_half(x)
    elif target == "bf16":
        x = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).narrow(I16)
    e.store(x, address)


def _named(name: str, body: Callable) -> Function:
    """Object code is kept by the name of a function, and these come from the same lines."""
    body.__name__ = body.__qualname__ = name
    return function(body)


@functools.cache
def _recoding(source: str, target: str) -> Function:
    def body(e, x, out, count, largest):  # a multiple of LANES
        most = e.variable(e.zero(_WORDS))
        with e.loop(0, count, LANES) as i:
            _store(e, target, _load(e, source, x + i * ITEM_BYTES[source]), out + i * ITEM_BYTES[target], most)
        e.store(most.get(), largest)

    return _named(f"{source}_to_{target}", body)


@functools.cache
def _rescaling(source: str, target: str) -> Function:
    def body(e, codes, out, begin, rows, n, high, wide, scales, blocks, largest):
        """Row i of the codes is row begin + i below the first line of scales, of which each has `blocks`."""
        most = e.variable(e.zero(_WORDS))
        with e.loop(0, rows) as row, e.loop(0, blocks) as block:
            scale = e.splat(e.load(F32, scales + ((begin + row) / high * blocks + block) * 4), LANES)
            first = block * wide
            last = e.choose(Value(e, e.builder.icmp_signed("<", (first + wide).ir, n.ir)), first + wide, n)
            with e.loop(row * n + first, row * n + last, LANES) as i:
                x = _load(e, source, codes + i * ITEM_BYTES[source]) * scale
                _store(e, target, x, out + i * ITEM_BYTES[target], most)
        e.store(most.get(), largest)

    return _named(f"{source}_scaled_to_{target}", body)


def recode(source: str, target: str, data: np.ndarray) -> tuple[np.ndarray, bool]:
    """uint8[rows, bytes] of one format as another, and whether all fit. Their number must be a multiple of LANES."""
    data = np.ascontiguousarray(data)
    size, largest = ITEM_BYTES[source], np.empty(LANES, np.int32)
    out = np.empty((data.shape[0], data.shape[1] // size * ITEM_BYTES[target]), np.uint8)
    _recoding(source, target)(data.ctypes.data, out.ctypes.data, data.size // size, largest.ctypes.data)
    return out, bool(largest.max() < _TOO_LARGE[target])


def rescale(
    source: str, target: str, codes: np.ndarray, scales: np.ndarray, block: tuple[int, int], begin: int, out: np.ndarray
) -> bool:
    """Fill out uint8[rows, bytes] with uint8 codes[rows, n], each times the scale of its block of rows and columns.

    Whether all products fit. scales float32[lines, ceil(n / block[1])]; the codes begin `begin` rows below where the
    first line does. All arrays are contiguous; `n` and block[1] must be multiples of LANES.
    """
    (rows, n), blocks, largest = codes.shape, scales.shape[1], np.empty(LANES, np.int32)
    where = codes.ctypes.data, out.ctypes.data, scales.ctypes.data, largest.ctypes.data
    _rescaling(source, target)(*where[:2], begin, rows, n, *block, where[2], blocks, where[3])
    return bool(largest.max() < _TOO_LARGE[target])
