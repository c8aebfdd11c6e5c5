"""`GridType`, the family of iq2_xxs, iq2_xs, iq2_s, iq3_xxs and iq3_s: what its members say of themselves, and how the
fields that the search finds reach their `_pack`.

`grid_points` has the grids. The search is written with SIMD intrinsics and stands in `types/native/grid_search.py`,
which is imported when it first runs.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from quantkit.types.base import QuantType
from quantkit.types.families.grid_points import Grid


class GridType(QuantType):
    """What the members say of themselves. `_pack` writes the fields that the search found as blocks."""

    block_size = 256
    uses_imatrix = True
    grid: ClassVar[Grid]
    sub_block: ClassVar[int]  # elements with a multiplier of their own
    divisor: ClassVar[int]
    even_signs: ClassVar[bool]  # 7 signs of 8 are stored
    alone: ClassVar[float]  # weights of the search without importance: alone * v + x^2, v the mean of x^2 in the block

    @classmethod
    def _pack(cls, scales: np.ndarray, multipliers: np.ndarray, points: np.ndarray, signs: np.ndarray,
              out: np.ndarray) -> None:  # fmt: skip
        """uint16[blocks] halves, uint8[blocks, 256 / sub_block] (m - 1) / 2, uint16[blocks, groups] numbers of grid
        points, uint8[blocks, 32] signs, as uint8[blocks, block_bytes]."""
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
                      cls.even_signs, np.float32(cls.alone), scales, multipliers, points, signs)  # fmt: skip
        cls._pack(scales, multipliers, points, signs, out.reshape(blocks, cls.block_bytes))
