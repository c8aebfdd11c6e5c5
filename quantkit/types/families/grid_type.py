"""`GridType`, the base class of iq2_xxs, iq2_xs, iq2_s, iq3_xxs and iq3_s.

    minimise  sum w (x - y)^2 over a block, w = q with an importance q, else variance_weight * v + x^2

with v the mean of x^2 over the block. `grid_points` has the grids and the formula of y. The search is written with SIMD
intrinsics in `types/native/grid_search.py`, which is imported when it first runs; `_pack` of each type stores the
fields that it finds.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from quantkit.types.base import QuantType
from quantkit.types.families.grid_points import Grid


class GridType(QuantType):
    """A type of grid points, signs and multipliers; a subclass sets the fields below and `_pack`."""

    block_size = 256
    uses_imatrix = True
    grid: ClassVar[Grid]
    sub_block: ClassVar[int]  # elements with a multiplier of their own
    divisor: ClassVar[int]
    even_signs: ClassVar[bool]  # 7 signs of 8 are stored
    variance_weight: ClassVar[float]  # weights of the search without importance: see the module

    @classmethod
    def _pack(cls, scales: np.ndarray, multipliers: np.ndarray, points: np.ndarray, signs: np.ndarray,
              out: np.ndarray) -> None:  # fmt: skip
        """Write the fields that the search found as blocks.

        scales uint16[blocks], bits of halves; multipliers uint8[blocks, 256 / sub_block], (m - 1) / 2; points
        uint16[blocks, groups], numbers of grid points; signs uint8[blocks, 32]; out uint8[blocks, block_bytes].
        """
        raise NotImplementedError

    @classmethod
    def encode_rows(cls, x: np.ndarray, importance: np.ndarray, effort: int, out: np.ndarray) -> None:
        from quantkit.types.native import grid_search as search

        blocks = x.size // 256
        groups = 256 // cls.grid.points.shape[1]
        scales, signs = np.empty(blocks, np.uint16), np.empty((blocks, 32), np.uint8)
        multipliers = np.empty((blocks, 256 // cls.sub_block), np.uint8)
        points = np.empty((blocks, groups), np.uint16)
        search.search(x, importance, effort, cls.grid.levels, cls.grid.halves, cls.grid.numbers, cls.divisor,
                      cls.even_signs, np.float32(cls.variance_weight), scales, multipliers, points, signs)  # fmt: skip
        cls._pack(scales, multipliers, points, signs, out.reshape(blocks, cls.block_bytes))
