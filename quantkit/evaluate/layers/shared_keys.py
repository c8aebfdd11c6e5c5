"""Keys and values that later layers read, kept while a model runs one layer at a time.

In Gemma 3n and in Gemma 4 E2B and E4B the last layers attend to the keys and values of earlier ones
(`Attention.source`). A cache for one layer at a time has them for one sequence; between layers they are kept here:

    uint8[n_seq, bytes]   of each sequence, for each layer that others read: its keys and then its values, as caches
                          hold them
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from quantkit.archs.common import blocks

if TYPE_CHECKING:
    from quantkit.archs.common.blocks import Block
    from quantkit.runtime.kv.cache import Cache
    from quantkit.runtime.model import Model


class SharedKeys:
    """The kept keys and values of some sequences.

    rows   uint8[n_seq, n_ctx * model.shared_key_bytes]; no columns where no layer reads those of another
    """

    def __init__(self, blocks: Sequence[Block], rows: np.ndarray):
        self._blocks, self.rows = blocks, rows
        self._sources = sorted({source for block in blocks for source in read_by(block)})

    @classmethod
    def of(cls, model: Model, n_seq: int, n_ctx: int) -> SharedKeys:
        """Room for those of `n_seq` sequences, in memory."""
        return cls(model.blocks, np.zeros((n_seq, n_ctx * model.shared_key_bytes), np.uint8))

    def __getitem__(self, sequences: slice) -> SharedKeys:
        """Those of some of the sequences: the same memory."""
        return SharedKeys(self._blocks, self.rows[sequences])

    def copy(self) -> SharedKeys:
        """The same in memory of its own."""
        return SharedKeys(self._blocks, self.rows.copy())

    def before(self, block: Block, caches: Sequence[Cache]) -> None:
        """Give the caches of all sequences what the block reads."""
        self._exchange(read_by(block), caches, to_caches=True)

    def after(self, block: Block, caches: Sequence[Cache]) -> None:
        """Keep what the block has put into the caches, if other blocks read it."""
        self._exchange({layer for layer, _ in block.numbered_parts}, caches, to_caches=False)

    def _exchange(self, layers: set[int], caches: Sequence[Cache], to_caches: bool) -> None:
        if not layers.isdisjoint(self._sources):
            for row, cache in zip(self.rows, caches):
                for kept, cached in self._pairs(row, cache, layers):
                    if not isinstance(cached, np.ndarray):  # a tensor of a GPU
                        if to_caches:
                            cached.copy_(cached.new_tensor(kept))
                        else:
                            kept[...] = cached.cpu().numpy()
                        continue
                    into, values = (cached, kept) if to_caches else (kept, cached)
                    into[...] = values

    def _pairs(self, row: np.ndarray, cache: Cache, layers: set[int]) -> Iterator[tuple[np.ndarray, Any]]:
        """Kept keys or values, and the cache's, of those of `layers` that others read."""
        start = 0
        for layer in self._sources:
            for cached in cache.rows_of(layer):
                if layer in layers:
                    yield row[start : start + cached.nbytes].reshape(tuple(cached.shape)), cached
                start += cached.nbytes


def read_by(block: Block) -> set[int]:
    """The layers whose keys and values a block reads instead of its own."""
    return {part.source for part in block.parts if isinstance(part, blocks.Attention) and part.source is not None}


def needs_shared_keys(done: Sequence[Block], following: Sequence[Block]) -> bool:
    """Whether one of the blocks that follow reads keys and values of one that is done."""
    layers = {block.layer for block in done}
    return any(not layers.isdisjoint(read_by(block)) for block in following)
