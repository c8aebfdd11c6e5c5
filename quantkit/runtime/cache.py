"""The key/value cache: what attention remembers of the tokens seen so far.

For each layer two C-contiguous arrays, one row a position; keys are stored after rope:

    k[layer]   [n_ctx, n_head_kv * head_dim_k]   uint16 (the bits of halves; numba has no float16) or float32
    v[layer]   [n_ctx, n_head_kv * head_dim_v]
"""

from __future__ import annotations

import numpy as np

from quantkit.archs.blocks import HParams
from quantkit.errors import DataError, UnknownNameError

_DTYPES = {"f16": np.uint16, "f32": np.float32}


class Cache:
    """Room for `n_ctx` tokens of one sequence, of which `length` are filled."""

    def __init__(self, hparams: HParams, n_ctx: int, cache_type: str, *, one_layer: bool = False):
        """`one_layer` makes all layers share one pair of arrays: enough for a sequence that is run once, as a whole."""
        if cache_type not in _DTYPES:
            raise UnknownNameError("cache type", cache_type, _DTYPES)
        if n_ctx < 1:
            raise DataError(f"a cache of {n_ctx} tokens holds nothing; take a context of at least 1")
        self.cache_type = cache_type
        self.n_ctx = n_ctx
        self.length = 0
        layers = 1 if one_layer else hparams.n_layer
        self.k = self._arrays(layers, hparams.n_head_kv * hparams.head_dim_k) * (hparams.n_layer // layers)
        self.v = self._arrays(layers, hparams.n_head_kv * hparams.head_dim_v) * (hparams.n_layer // layers)
        self.nbytes = layers * (self.k[0].nbytes + self.v[0].nbytes)

    def _arrays(self, layers: int, width: int) -> list[np.ndarray]:
        return [np.zeros((self.n_ctx, width), _DTYPES[self.cache_type]) for _ in range(layers)]

    def reserve(self, tokens: int) -> None:
        """DataError unless there is room for so many more tokens."""
        if self.length + tokens > self.n_ctx:
            raise DataError(
                f"the cache holds {self.length} of {self.n_ctx} tokens, {tokens} more do not fit; "
                "make it larger (-c) or the text shorter"
            )

    def truncate(self, length: int) -> None:
        """Forget all tokens after the first `length`."""
        if not 0 <= length <= self.length:
            raise DataError(f"cannot truncate a cache of {self.length} tokens to {length}")
        self.length = length

    def clear(self) -> None:
        self.length = 0
