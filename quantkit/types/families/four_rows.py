"""`FourRows`, the base class of IQ1_S_R4 and IQ1_M_R4: groups of four rows that are no other type's rows interleaved.

    group   4 x f16 d, then blocks of 32 columns of the four rows

Second moments move the codes of rows one by one, so rows are taken apart for them and put together again:

    row apart   f16 d, then blocks of 32 columns: the bytes of the group's block that are of this row
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np

from quantkit.types.base import QuantType

if TYPE_CHECKING:
    from quantkit.types.refine import Moments


class FourRows(QuantType):
    """A subclass states `places`, which bytes of a group's block are of each row, int64[4, block bytes].

    Its `vector_codes` are those of rows apart.
    """

    block_size, row_meta_bytes, interleave = 32, 2, 4
    uses_imatrix = True
    places: ClassVar[np.ndarray]

    def rows_apart(self, data: np.ndarray) -> np.ndarray:
        """Groups, uint8[rows, row bytes], as rows apart of the same shape."""
        groups = data.reshape(len(data) // 4, -1)
        blocks = groups[:, 8:].reshape(len(groups), -1, 4 * self.block_bytes)[:, :, self.places]
        headers = groups[:, :8].reshape(len(groups), 4, 2)
        rows = np.concatenate([headers, blocks.transpose(0, 2, 1, 3).reshape(len(groups), 4, -1)], axis=2)
        return np.ascontiguousarray(rows).reshape(data.shape)

    def rows_together(self, rows: np.ndarray) -> np.ndarray:
        """Undoes `rows_apart`."""
        apart = rows.reshape(len(rows) // 4, 4, -1)
        blocks = apart[:, :, 2:].reshape(len(apart), 4, -1, self.block_bytes).transpose(0, 2, 1, 3)
        groups = np.empty((len(apart), 4 * rows.shape[1]), np.uint8)
        groups[:, :8] = apart[:, :, :2].reshape(len(apart), 8)
        groups[:, 8:].reshape(len(apart), -1, 4 * self.block_bytes)[:, :, self.places] = blocks
        return groups.reshape(rows.shape)

    def refine_rows(self, x: np.ndarray, data: np.ndarray, moments: Moments, effort: int) -> None:
        from quantkit.types.refine import vector_codes  # not loaded without: it needs numba

        rows = self.rows_apart(data)
        assert self.vector_codes is not None  # all subclasses have them
        scales = vector_codes.SCALES[effort]
        vector_codes.refine(_RowsApart(self), self.vector_codes, None, x, rows, moments, scales)
        data[...] = self.rows_together(rows)


class _RowsApart:
    """Decodes rows apart."""

    def __init__(self, kind: FourRows):
        self._kind = kind

    def dequantize(self, data: np.ndarray, n: int, *, threads: int | None = None, products: bool = False) -> np.ndarray:
        return self._kind.dequantize(self._kind.rows_together(data), n, threads=threads, products=products)
