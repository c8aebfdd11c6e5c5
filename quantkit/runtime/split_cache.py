"""Caches of models that are split: each device has keys and values of its layers, or of its heads of every layer."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from quantkit import types
from quantkit.archs.blocks import HParams
from quantkit.errors import DataError
from quantkit.runtime.cache import Cache, CacheType


class SplitCache(Cache):
    """Room for `n_ctx` tokens of one sequence over several devices; forgets and grows on all of them at once.

    parts    by name of device, what it has: a Cache of its layers and heads, with empty arrays for other layers
    k, v     are empty: nothing here is in one place
    """

    def __init__(
        self,
        heads: Mapping[str, Mapping[int, int]],
        hparams: HParams,
        n_ctx: int,
        cache_type: CacheType,
        *,
        one_layer: bool = False,
    ):
        """`heads`: of each device, of each layer that it has, how many key/value heads. See Cache for the rest."""
        self.type = cache_type
        if n_ctx < 1:
            raise DataError(f"a cache of {n_ctx} tokens holds nothing; take a context of at least 1")
        self.rotations = self.type.rotations(hparams.head_dim_k, hparams.head_dim_v)
        self.n_ctx = n_ctx
        self.length = 0
        self.one_layer = one_layer
        self.k, self.v = [], []
        self.parts = {device: _Part(self, mine, hparams, one_layer) for device, mine in heads.items()}
        self.nbytes = sum(part.nbytes for part in self.parts.values())

    def _all_rows(self) -> list[np.ndarray]:
        return [rows for part in self.parts.values() for rows in part._all_rows()]


class _Part(Cache):
    """What one device has of a SplitCache, whose length is its own."""

    def __init__(self, whole: SplitCache, heads: Mapping[int, int], hparams: HParams, one_layer: bool):
        self._whole = whole
        self.type, self.rotations, self.n_ctx = whole.type, whole.rotations, whole.n_ctx
        sides = (self.type.k, hparams.head_dim_k), (self.type.v, hparams.head_dim_v)
        made: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}
        self.k, self.v = [], []
        for layer in range(hparams.n_layer):
            count = heads.get(layer, 0)
            key = (count, -1 if one_layer or not count else layer)
            if key not in made:
                k, v = (
                    np.zeros((count, self.n_ctx, types.layout(name).row_bytes(dim)), np.uint8) for name, dim in sides
                )
                made[key] = k, v
            self.k.append(made[key][0])
            self.v.append(made[key][1])
        self.nbytes = sum(k.nbytes + v.nbytes for k, v in made.values())

    @property
    def length(self) -> int:
        return self._whole.length

    @length.setter
    def length(self, value: int) -> None:
        raise DataError(f"the length of a part is that of the whole cache, which is not set to {value} here")
