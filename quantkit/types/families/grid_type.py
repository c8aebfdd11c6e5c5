"""`GridType`, the base class of iq2_xxs, iq2_xs, iq2_s, iq3_xxs and iq3_s.

    minimise  sum w (x - y)^2 over a block, w = q with an importance q, else variance_weight * v + x^2

with v the mean of x^2 over the block. `grid_points` has the grids and the formula of y. The search is written with SIMD
intrinsics in `types/native/grid_search.py`, which is imported when it first runs; `_pack` of each type stores the
fields that it finds.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from quantkit.types.base import QuantType
from quantkit.types.families.grid_points import Grid

if TYPE_CHECKING:
    from quantkit.types.refine.vector_codes import VectorCodes


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

    @functools.cached_property
    def vector_codes(self) -> VectorCodes:
        """Where points and signs are in a block: what changes in it when one bit of one of them does."""
        from quantkit.types.refine.vector_codes import find_bits, make_codes

        count, size = self.grid.points.shape
        groups, bits = 256 // size, (count - 1).bit_length()
        points = np.zeros((groups * bits, groups), np.uint16)
        points[np.arange(groups * bits), np.arange(groups * bits) // bits] = 1 << np.arange(groups * bits) % bits
        signs = np.zeros((256, 32), np.uint8)
        signs[np.arange(256), np.arange(256) // 8] = 1 << np.arange(256) % 8
        plain, with_points, with_signs = (
            self._blocks(p, s) for p, s in ((points[:1] * 0, signs[:1] * 0), (points, None), (None, signs))
        )
        values = self.grid.points.astype(np.int8)[None]
        point_bits = find_bits(plain[0], with_points).reshape(groups, bits)
        return make_codes(0, self.block_bytes, values, point_bits, find_bits(plain[0], with_signs))

    def _blocks(self, points: np.ndarray | None, signs: np.ndarray | None) -> np.ndarray:
        """Blocks with these points or signs, all else 0."""
        count = len(points) if points is not None else len(signs if signs is not None else ())
        points = np.zeros((count, 256 // self.grid.points.shape[1]), np.uint16) if points is None else points
        signs = np.zeros((count, 32), np.uint8) if signs is None else signs
        out = np.zeros((count, self.block_bytes), np.uint8)
        zeros = np.zeros((count, 256 // self.sub_block), np.uint8)
        self._pack(np.zeros(count, np.uint16), zeros, points, signs, out)
        return out

    @classmethod
    def encode_rows(cls, x: np.ndarray, importance: np.ndarray, effort: int, out: np.ndarray) -> None:
        """Encode rows with the search of `types/native/grid_search.py`; see `QuantType.encode_rows`."""
        from quantkit.types.native import grid_search as search

        blocks = x.size // 256
        groups = 256 // cls.grid.points.shape[1]
        scales, signs = np.empty(blocks, np.uint16), np.empty((blocks, 32), np.uint8)
        multipliers = np.empty((blocks, 256 // cls.sub_block), np.uint8)
        points = np.empty((blocks, groups), np.uint16)
        search.search(x, importance, effort, cls.grid.levels, cls.grid.halves, cls.grid.numbers, cls.divisor,
                      cls.even_signs, np.float32(cls.variance_weight), scales, multipliers, points, signs)  # fmt: skip
        cls._pack(scales, multipliers, points, signs, out.reshape(blocks, cls.block_bytes))
