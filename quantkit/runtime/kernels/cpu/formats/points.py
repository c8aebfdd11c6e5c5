"""Look up grid points by index: for grids.py, grids_r4.py and iq1.py.

A point is one load of 4 or 8 bytes. Its index is a load as well: from the block or, where it has to be computed, from
memory to which many indices were written at once. Extracting lanes would take longer, and gathers are slow on many
CPUs. Vectors have at most 256 bits: wider ones take a port from all vector instructions around them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from quantkit.codegen.simd import I16, I32, I64, IntType, IrBuilder, Value, vector
from quantkit.runtime.kernels.cpu.formats.base import BYTES32
from quantkit.types.families.grid_points import grid


class Table(NamedTuple):
    """Grid points as integers of 32 or 64 bits; the first column's code is the lowest byte."""

    points: list[int]
    element: IntType


def table(codes: np.ndarray) -> Table:
    """Table of uint8[points, 8 or 4]."""
    wide = codes.shape[1] == 8
    return Table(codes.view(np.uint64 if wide else np.uint32)[:, 0].tolist(), I64 if wide else I32)


def grid_table(name: str, offset: int) -> Table:
    """Table of the magnitudes of a type's grid, plus the offset."""
    return table(grid(name).points.astype(np.uint8) + np.uint8(offset))


def indices_in_memory(ir: IrBuilder, indices: Iterable[Value]) -> Callable[[int], Value]:
    """Write vectors of 16 indices (16-bit words) to memory; returns index number -> address."""
    starts = [ir.in_memory(part) for part in indices]
    return lambda i: starts[i // 16] + 2 * (i % 16)


def codes_of(
    ir: IrBuilder, points: Table, index_address: Callable[[int], Value], numbers: Iterable[int], kind: IntType = I16
) -> Value:
    """32 bytes: side by side the grid points whose indices, integers of type `kind`, are at at(place)."""
    start, size = ir.table(points.points, points.element), points.element.width // 8
    joined = ir.zero(vector(32 // size, points.element))
    for i, number in enumerate(numbers):
        joined = ir.insert(
            joined, i, ir.load(points.element, start + ir.load(kind, index_address(number)).unsigned(I64) * size)
        )
    return joined.view(BYTES32)
