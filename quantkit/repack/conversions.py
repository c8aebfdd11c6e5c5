"""Exact conversion of interleaved types that no row-by-row type matches bit for bit.

    IQ1_S_R4     IQ1_S   every block gets the row's scale: exact for any row of whole blocks of 256
    IQ1_M_R4     IQ1_M   where each block has multipliers that IQ1_M can hold, see below
    Q8_K_R8/R16  Q8_0    every block of 32 gets the scale of its 256: exact. Files cannot hold their base type, Q8_K,
                         which is a format of activations

Grid points and deltas mean the same in both types of a pair of IQ1 and are copied. In IQ1_M_R4 the columns 16 j .. + 15
are scaled by d m with d of the row and m = 0 .. 15, in IQ1_M by d m with d of a block of 256 and m odd. Products of
halves and such m are exact in float32. So a block keeps its values if its m are odd numbers times one power of two,
which then goes to its d. Where all m are 0, d becomes 0; an m of 0 beside others has no counterpart.

The inverse does not exist: IQ1_S and IQ1_M have a scale for each block.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from quantkit import types
from quantkit.codegen import jit, thread_pool
from quantkit.codegen.half import float_to_half, half_to_float
from quantkit.codegen.jit import kernel
from quantkit.errors import DataError
from quantkit.inputs import arguments
from quantkit.types import QuantType
from quantkit.types.families.interleave import Interleaved

_ROW_FORMS = {"iq1_s_r4": "iq1_s", "iq1_m_r4": "iq1_m", "q8_k_r8": "q8_0", "q8_k_r16": "q8_0"}

_R4_HEADER_BYTES, _IQ1_S_R4_BLOCK, _IQ1_M_R4_BLOCK = 8, 24, 28  # bytes of a group's scales, of its blocks of 32 columns
_IQ1_S_BLOCK, _IQ1_M_BLOCK = 50, 56  # bytes of a block of 256 columns
_LARGEST_HALF = np.float32(65504)


def row_form(t: QuantType) -> QuantType | None:
    """The row-by-row type that `t` is converted to; None where it is not."""
    name = _ROW_FORMS.get(t.name)
    return types.get(name) if name else None


def why_not(t: QuantType, data: np.ndarray, n: int, first_row: int = 0) -> str:
    """Why rows, uint8[rows, row bytes] in whole groups, have no exact form in `row_form(t)`; "" where they have.

    Rows are counted from `first_row` in the message.
    """
    form = row_form(t)
    assert form is not None
    if n % form.block_size:
        return f"{n} columns are not a multiple of {form.name}'s {form.block_size}"
    if t.name != "iq1_m_r4":
        return ""
    row, block = _first_inexact(jit.readonly(data), n)
    if row < 0:
        return ""
    location = f"row {first_row + row}, columns {256 * block} to {256 * block + 255}"
    return f"{form.name} cannot hold the multipliers of {location}"


def convert(t: QuantType, data: Any, n: int, *, threads: int | None = None) -> np.ndarray:
    """Rows of `row_form(t)` with the values of uint8[rows, row bytes], whole groups of `t`. DataError where inexact."""
    form = row_form(t)
    assert form is not None
    data = jit.readonly(arguments.encoded(data, t.name))
    if reason := why_not(t, data, n):
        raise DataError(f"{t.name}: {reason}")
    if isinstance(t, Interleaved):
        return _to_q8_0(t.deinterleave_rows(data, threads=threads))
    out = np.empty((len(data), form.row_bytes(n)), np.uint8)
    move = _to_iq1_s if t.name == "iq1_s_r4" else _to_iq1_m
    threads = threads if data.nbytes > 1 << 16 else 1
    thread_pool.over_rows(lambda a, b: move(data[a:b], out[a:b]), len(data), multiple=t.interleave, threads=threads)
    return out


def _to_q8_0(data: np.ndarray) -> np.ndarray:
    """Rows of Q8_K, whose scales are halves, as Q8_0."""
    blocks = data.reshape(len(data), -1, 296)
    out = np.empty((*blocks.shape[:2], 8, 34), np.uint8)
    halves = np.ascontiguousarray(blocks[..., :4]).view("<f4").astype("<f2")  # [rows, blocks, 1]
    out[..., :2] = halves[..., None].view(np.uint8)
    out[..., 2:] = blocks[..., 8:264].reshape(*blocks.shape[:2], 8, 32)
    return out.reshape(len(data), -1)


@kernel
def _to_iq1_s(data: np.ndarray, out: np.ndarray) -> None:
    for first in range(0, data.shape[0], 4):
        group = data[first : first + 4].reshape(-1)
        for k in range(4):
            for b in range(out.shape[1] // _IQ1_S_BLOCK):
                block = out[first + k, _IQ1_S_BLOCK * b : _IQ1_S_BLOCK * b + _IQ1_S_BLOCK]
                block[:2] = group[2 * k : 2 * k + 2]
                for s in range(8):
                    source = group[_R4_HEADER_BYTES + _IQ1_S_R4_BLOCK * (8 * b + s) :]
                    for g in range(4):
                        block[2 + 4 * s + g] = source[4 * g + k]
                    block[34 + 2 * s] = source[16 + 2 * k]
                    block[35 + 2 * s] = source[17 + 2 * k]


@kernel
def _half_of(group: np.ndarray, k: int) -> np.uint16:
    return np.uint16(group[2 * k]) | np.uint16(group[2 * k + 1]) << np.uint16(8)


@kernel
def _multiplier(group: np.ndarray, k: int, j: int) -> np.int64:
    """Multiplier of columns 16 j .. + 15 of row k."""
    return (np.int64(group[_R4_HEADER_BYTES + _IQ1_M_R4_BLOCK * (j // 2) + 24 + k]) >> 4 * (j % 2)) & 15


@kernel
def _common_power(group: np.ndarray, k: int, b: int) -> int | np.int64:
    """The power of two by which all multipliers of block b of row k are odd numbers; 16 where all are 0.

    0 where there is none, or where d times it is not a finite half.
    """
    first = _multiplier(group, k, 16 * b)
    power = first & -first if first else 16
    for j in range(16 * b, 16 * b + 16):
        m = _multiplier(group, k, j)
        if (m & -m if m else 16) != power:
            return 0
    if power > 1:  # for 1, d stays as it is, even Inf or NaN
        scaled = abs(half_to_float(_half_of(group, k)) * np.float32(1 if power == 16 else power))
        if not scaled <= _LARGEST_HALF:
            return 0
    return power


@kernel
def _is_zero(half: np.uint16) -> bool:
    result: bool = half & np.uint16(0x7FFF) == np.uint16(0)
    return result


@kernel
def _first_inexact(data: np.ndarray, n: int) -> tuple[int, int]:
    """Row and block that IQ1_M cannot hold, the first of its group of rows; -1, -1 where there is none."""
    for first in range(0, data.shape[0], 4):
        group = data[first : first + 4].reshape(-1)
        for k in range(4):
            for b in range(n // 256):
                if _common_power(group, k, b) == 0 and not _is_zero(_half_of(group, k)):
                    return first + k, b
    return -1, -1


@kernel
def _put_scales(group: np.ndarray, k: int, b: int, block: np.ndarray) -> None:
    """Write the scale and the numbers of the multipliers of a block that converts exactly."""
    half = _half_of(group, k)
    power = _common_power(group, k, b)
    if power == 16:
        half &= np.uint16(0x8000)  # a zero of the sign of d
    elif power > 1:
        half = float_to_half(half_to_float(half) * np.float32(power))
    for j in range(4):
        packed = (np.uint32(half) >> np.uint32(4 * j)) << np.uint32(12)
        for i in range(4):
            if power > 0 and power < 16:
                number = (_multiplier(group, k, 16 * b + 4 * j + i) // power) >> 1
                packed |= np.uint32(number) << np.uint32(3 * i)
        block[48 + 2 * j] = np.uint8(packed)
        block[49 + 2 * j] = np.uint8(packed >> np.uint32(8))


@kernel
def _to_iq1_m(data: np.ndarray, out: np.ndarray) -> None:
    for first in range(0, data.shape[0], 4):
        group = data[first : first + 4].reshape(-1)
        for k in range(4):
            for b in range(out.shape[1] // _IQ1_M_BLOCK):
                block = out[first + k, _IQ1_M_BLOCK * b : _IQ1_M_BLOCK * b + _IQ1_M_BLOCK]
                for s in range(8):
                    source = group[_R4_HEADER_BYTES + _IQ1_M_R4_BLOCK * (8 * b + s) :]
                    for g in range(4):
                        block[4 * s + g] = source[4 * g + k]
                    block[32 + 2 * s] = source[16 + k]
                    block[33 + 2 * s] = source[20 + k]
                _put_scales(group, k, b, block)
