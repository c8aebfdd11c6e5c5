"""Rounding by second moments: moving the scale, or the minimum, of each sub-block while codes stay.

    element of a sub-block    y = T u + rest        T one of the values that the format can store (`scale_bits`)
    change of T by t          changes the error e^T H e by  2 t (u . r) + t^2 (u^T H u),   r = e H

The error is a parabola of T. Its minimum lies between two values; the better one is taken where the error falls.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from quantkit.codegen.jit import readonly, subkernel
from quantkit.types.families.scale_bits import SubBlockNumber, read_numbers, write_numbers
from quantkit.types.refine.panel_rows import add_scaled, combine, dot


class Decoder(Protocol):
    """What is asked of a type here."""

    def dequantize(
        self, data: np.ndarray, n: int, *, threads: int | None = None, products: bool = False
    ) -> np.ndarray: ...


class Numbers(NamedTuple):
    """A number of all sub-blocks of some rows; `size` is 0 where the type has none.

    places      int64[rows, sub-blocks]: the place of each in `values`
    values      float32[n], rising
    directions  float32[rows, n]: u of each element
    """

    size: int
    places: np.ndarray
    values: np.ndarray
    directions: np.ndarray


# Its values cannot be written, as those of types cannot: kernels are compiled once for types with and without minima.
NONE = Numbers(0, np.zeros((0, 0), np.int64), readonly(np.zeros(1, np.float32)), np.zeros((0, 0), np.float32))


def read(kind: Decoder, number: SubBlockNumber | None, data: np.ndarray, decoded: np.ndarray) -> Numbers:
    """A number in data uint8[rows, row bytes] with its directions; decoded: float32[rows, n] of `data`."""
    if number is None:
        return NONE
    rows, n = decoded.shape
    codes = np.empty((rows, n // number.size), np.int64)
    read_numbers(data, number, codes)
    places = number.places[codes]
    values = number.values[places]
    other = np.clip(np.searchsorted(number.values, 2 * values), 0, len(number.values) - 1)
    half = np.clip(np.searchsorted(number.values, values / 2), 0, len(number.values) - 1)
    other = np.where(other == places, half, other)
    other = np.where(other == places, np.where(places == 0, len(number.values) - 1, 0), other)
    moved = data.copy()
    write_numbers(number.codes[other], number, moved)
    change = kind.dequantize(moved, n, threads=1, products=True) - decoded
    steps = np.repeat(number.values[other] - values, number.size, axis=1)
    return Numbers(number.size, places, number.values, change / steps)


@subkernel
def first_place(values: np.ndarray, start: int, target: np.float32) -> int:
    """The first place whose value is not below `target`, from a place near it; len(values) if there is none."""
    low = high = start  # values[low - 1] < target <= values[high]
    reach = 1
    while high < len(values) and values[high] < target:
        low, high, reach = high + 1, min(high + reach, len(values)), 2 * reach
    reach = 1
    while low > 0 and not values[low - 1] < target:
        high, low, reach = low - 1, max(low - reach, 0), 2 * reach
    while low < high:
        middle = (low + high) // 2
        if values[middle] < target:
            low = middle + 1
        else:
            high = middle
    return low


@subkernel
def move_numbers(
    g: np.ndarray,
    h: np.ndarray,
    e: np.ndarray,
    unit: np.ndarray,
    directions: np.ndarray,
    places: np.ndarray,
    values: np.ndarray,
    size: int,
    scales_unit: bool,
    product: np.ndarray,
) -> int:
    """Move the numbers of a row's sub-blocks in a panel; how many moved.

    g float32[PANEL], the gradient r; h float32[PANEL, PANEL], H of the panel; e, unit, directions float32[columns];
    places int64[sub-blocks]; product float32[PANEL]: work space. `scales_unit`: a scale, which must not be
    0; unit float32[columns], or empty, grows with it.
    """
    moved = 0
    for i in range(len(places)):
        value, first = values[places[i]], i * size
        if scales_unit and value == 0:
            continue
        u = directions[first:].ctypes.data
        combine(u, h[first:].ctypes.data, size, product.ctypes.data)
        slope, curve = dot(u, g[first:].ctypes.data, size), dot(u, product[first:].ctypes.data, size)
        if not curve > 0:
            continue
        at = first_place(values, places[i], value - slope / curve)
        best, gain = places[i], np.float32(0)
        for place in (at - 1, at):
            if 0 <= place < len(values) and (values[place] != 0 or not scales_unit):
                t = values[place] - value
                change = t * (np.float32(2) * slope + t * curve)
                if change < gain and change < np.float32(-1e-5) * (t * t * curve):
                    best, gain = place, change
        if best == places[i]:
            continue
        t = values[best] - value
        add_scaled(t, product.ctypes.data, g.ctypes.data)
        for j in range(first, first + size):
            e[j] += t * directions[j]
            if j < len(unit):
                unit[j] *= values[best] / value
        places[i] = best
        moved += 1
    return moved
