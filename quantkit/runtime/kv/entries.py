"""`Entries`: what compressors make of the rows of a cache, kept beside it (`archs.common.blocks.CompressedAttention`).

An entry depends on the rows of its window alone, and with overlapping windows on those of the window before. So it is
made once, when its window is complete, and stays until the cache is truncated below the window's end. Entries are
float32 whatever the cache's type: they are made of rows that were rounded already. Saved states have none; they are
made again of a restored cache's rows.

Compiled plans make those of all layers in one pass. A GPU makes those of each layer by itself.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from quantkit.archs.common.blocks import EntrySizes
from quantkit.placement.kernel_sizes import entry_rows
from quantkit.runtime.kv.saved_state import Zeros


class Entries:
    """The entries of one sequence on one device. Runs layer by layer on the CPU compute their own.

    sizes    of each layer with compressed attention
    made     int64[1]: compiled plans have made the entries of the whole windows of the first so many tokens
    nbytes   of all arrays, which are allocated when they are first asked for
    """

    def __init__(self, sizes: Mapping[int, EntrySizes], n_ctx: int, zeros: Zeros = np.zeros):
        self.sizes, self._n_ctx, self._zeros = sizes, n_ctx, zeros
        self.made = np.zeros(1, np.int64)
        self.nbytes = sum(4 * entry_rows(n_ctx, each.rate) * (each.dim + each.index_dim) for each in sizes.values())
        self._arrays: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._made_of: dict[int, int] = {}  # as `made`, of a layer

    def arrays(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """float32[rows, dim], float32[rows, index dim]: the entries of a layer and the keys of its indexer."""
        if layer not in self._arrays:
            sizes = self.sizes[layer]
            rows = entry_rows(self._n_ctx, sizes.rate)
            self._arrays[layer] = (
                self._zeros((rows, sizes.dim), "float32"),
                self._zeros((rows, sizes.index_dim), "float32"),
            )
        return self._arrays[layer]

    def extend(self, layer: int, before: int, after: int) -> range:
        """The windows whose entries a layer has to make, as it comes to hold `after` tokens instead of `before`."""
        rate, made = self.sizes[layer].rate, min(self._made_of.get(layer, 0), before)
        self._made_of[layer] = after
        return range(made // rate, after // rate)

    def truncate(self, length: int) -> None:
        """Forget the entries of windows that end after the first `length` tokens."""
        self.made[0] = min(length, self.made[0])
        self._made_of = {layer: min(length, made) for layer, made in self._made_of.items()}
