"""`Entries`: what compressors make of the rows of a cache, kept beside it (`archs.common.blocks.CompressedAttention`).

An entry depends on the rows of its window alone, and with overlapping windows on those of the window before. So it is
made once, when its window is complete, and stays until the cache is truncated below the window's end. Entries are
float32 whatever the cache's type: they are made of rows that were rounded already. Saved states have none; they are
made again of a restored cache's rows.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from quantkit.archs.common.blocks import EntrySizes
from quantkit.placement.kernel_sizes import entry_rows


class Entries:
    """The entries of one sequence. Compiled plans make them; runs layer by layer compute their own.

    sizes    of each layer with compressed attention
    made     int64[1]: entries are there for the whole windows of the first so many tokens
    nbytes   of all arrays, which are allocated when a plan first asks for them
    """

    def __init__(self, sizes: Mapping[int, EntrySizes], n_ctx: int):
        self.sizes, self._n_ctx = sizes, n_ctx
        self.made = np.zeros(1, np.int64)
        self.nbytes = sum(4 * entry_rows(n_ctx, each.rate) * (each.dim + each.index_dim) for each in sizes.values())
        self._arrays: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def arrays(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """float32[rows, dim], float32[rows, index dim]: the entries of a layer and the keys of its indexer."""
        if layer not in self._arrays:
            sizes = self.sizes[layer]
            rows = entry_rows(self._n_ctx, sizes.rate)
            self._arrays[layer] = np.zeros((rows, sizes.dim), np.float32), np.zeros((rows, sizes.index_dim), np.float32)
        return self._arrays[layer]

    def truncate(self, length: int) -> None:
        """Forget the entries of windows that end after the first `length` tokens."""
        if length < self.made[0]:
            self.made[0] = length
