"""The key/value cache: what attention remembers of the tokens seen so far.

For each layer two arrays of encoded rows, keys after rope:

    k[layer]   uint8[n_head_kv, n_ctx, row bytes of head_dim_k]
    v[layer]   uint8[n_head_kv, n_ctx, row bytes of head_dim_v]

Of latent attention (runtime/latent.py) k has one row a token, its latent, and v none.

A row is one head's key or value in the K or V type, rounded as kernels/rounding.py says. Positions of a head stand one
after another, so that attention reads memory in order. With khad or vhad the rows were rotated before (`rotation`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quantkit import types
from quantkit.archs.blocks import HParams
from quantkit.errors import DataError, UnknownNameError, UnsupportedError
from quantkit.runtime.kernels.rounding import FLOATS, QUANTIZED, rotation_block

_NAMES = {name.lower(): name for name in FLOATS + QUANTIZED}


@dataclass(frozen=True)
class CacheType:
    """The types of keys and values, and whether each are rotated. Its text is read back by `parse`:

    "f16"                   both
    "q8_0/q4_0"             keys, values
    "q4_0/q4_0 khad vhad"   rotated
    """

    k: str
    v: str
    khad: bool = False
    vhad: bool = False

    def __post_init__(self) -> None:
        for side, name in (("k", self.k), ("v", self.v)):
            if name.lower() not in _NAMES:
                error = UnknownNameError("cache type", name, _NAMES.values())
                error.args = (f"{error}; caches can be {', '.join(_NAMES.values())}",) if error.near else error.args
                raise error
            object.__setattr__(self, side, _NAMES[name.lower()])

    def __str__(self) -> str:
        pair = self.k if self.k == self.v else f"{self.k}/{self.v}"
        return pair + " khad" * self.khad + " vhad" * self.vhad

    @classmethod
    def parse(cls, text: str) -> CacheType:
        """UnknownNameError on what is no type of cache."""
        pair, *marks = text.split() or [""]
        if unknown := set(marks) - {"khad", "vhad"}:
            raise UnknownNameError("mark of a cache type", unknown.pop(), ("khad", "vhad"))
        k, _, v = pair.partition("/")
        return cls(k, v or k, "khad" in marks, "vhad" in marks)

    def rotations(self, dim_k: int, dim_v: int) -> tuple[int, int]:
        """How many elements of a key and of a value are rotated together; 0: not rotated.

        UnsupportedError where these dimensions allow none, or do not fit the types.
        """
        found = []
        for side, name, dim, rotated in (("k", self.k, dim_k, self.khad), ("v", self.v, dim_v, self.vhad)):
            if name in QUANTIZED and dim % 32:
                raise UnsupportedError(
                    f"-ct{side} {name}: its blocks of 32 do not fit heads of {dim} elements; "
                    f"caches of this model can be {', '.join(FLOATS)}"
                )
            block = rotation_block(dim) if rotated and dim else 0
            if block is None:
                raise UnsupportedError(
                    f"-{side}had: heads of {dim} elements cannot be rotated: no power of two, nor a multiple of 64; "
                    f"leave -{side}had out"
                )
            found.append(block)
        return found[0], found[1]


class Cache:
    """Room for `n_ctx` tokens of one sequence, of which `length` are filled.

    type        CacheType
    rotations   of keys and of values: elements rotated together, 0 for none
    nbytes      of all arrays
    """

    def __init__(self, hparams: HParams, n_ctx: int, cache_type: str | CacheType, *, one_layer: bool = False):
        """`one_layer` makes all layers share one pair of arrays: enough for a sequence that is run once, as a whole."""
        self.type = cache_type if isinstance(cache_type, CacheType) else CacheType.parse(cache_type)
        if n_ctx < 1:
            raise DataError(f"a cache of {n_ctx} tokens holds nothing; take a context of at least 1")
        self.rotations = self.type.rotations(hparams.head_dim_k, hparams.head_dim_v)
        self.n_ctx = n_ctx
        self.length = 0
        layers = 1 if one_layer else hparams.n_layer
        sides = (self.type.k, hparams.head_dim_k), (self.type.v, hparams.head_dim_v)
        self.k, self.v = (
            [np.zeros((hparams.n_head_kv, n_ctx, types.layout(name).row_bytes(dim)), np.uint8) for _ in range(layers)]
            * (hparams.n_layer // layers)
            for name, dim in sides
        )
        self.nbytes = layers * (self.k[0].nbytes + self.v[0].nbytes)

    @property
    def cache_type(self) -> str:
        return str(self.type)

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
