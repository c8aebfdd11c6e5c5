"""`ShardedCache`: the KV cache of a model over several devices.

Each device has the keys, values and states of its layers, or of its heads of every layer. All devices truncate, mark,
save and restore together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from quantkit import types
from quantkit.archs.common.blocks import HParams, Recurrence, StateShapes
from quantkit.errors import DataError, UnsupportedError
from quantkit.inputs import arguments
from quantkit.runtime.kv.cache import Cache, CacheShape
from quantkit.runtime.kv.cache_type import CacheType
from quantkit.runtime.kv.saved_state import State, Zeros


@dataclass
class DeviceShare:
    """What a device has of a cache: key/value heads by attention layer, sizes of states by recurrent layer.

    zeros   makes its arrays
    index   elements of a key of an indexer of blocks, by layer
    states  shapes of the states of other parts, by their number
    """

    zeros: Zeros = np.zeros
    heads: dict[int, int] = field(default_factory=dict)
    index: dict[int, int] = field(default_factory=dict)
    recurrent: dict[int, Recurrence] = field(default_factory=dict)
    states: dict[int, StateShapes] = field(default_factory=dict)


def sharded_shape(hparams: HParams, shares: Mapping[str, DeviceShare]) -> CacheShape:
    """The shape of a cache over devices, each with what it holds."""
    devices = [
        (name, sorted(share.heads.items()), sorted(share.recurrent.items()), sorted(share.states.items()))
        for name, share in shares.items()
    ]
    return CacheShape.of(hparams, tuple(devices))


@dataclass(frozen=True)
class ShardedState:
    """A copy of the sequence in a ShardedCache: a State for each device, by its name."""

    parts: Mapping[str, State]

    @property
    def length(self) -> int:
        """Tokens of the sequence."""
        return max((part.length for part in self.parts.values()), default=0)

    @property
    def nbytes(self) -> int:
        """Bytes on all devices."""
        return sum(part.nbytes for part in self.parts.values())


class ShardedCache(Cache):
    """Room for `n_ctx` tokens of one sequence over several devices.

    parts    by name of device: a Cache of its layers and heads, with empty arrays for other layers
    k, v     empty, and so are `states`: all arrays are in `parts`
    """

    def __init__(
        self,
        shares: Mapping[str, DeviceShare],
        hparams: HParams,
        n_ctx: int,
        cache_type: CacheType,
        *,
        one_layer: bool = False,
    ):
        """See Cache."""
        self._describe(sharded_shape(hparams, shares), n_ctx, cache_type, one_layer)
        self.k, self.v, self.states = (), (), {}
        self.parts = {device: _DeviceCache(self, share, hparams) for device, share in shares.items()}
        self.state_bytes = sum(part.state_bytes for part in self.parts.values())
        self.nbytes = sum(part.nbytes for part in self.parts.values())

    def _forget_entries(self, length: int) -> None:
        for part in self.parts.values():
            part._forget_entries(length)

    def truncate(self, length: int) -> None:
        """As `Cache.truncate`, on all devices."""
        length = arguments.integer(length, "the length to truncate a cache to", 0, self.length)
        for part in self.parts.values():
            part.truncate(length)
        self.length = length

    def clear(self) -> None:
        """As `Cache.clear`, on all devices."""
        self.length = 0
        for part in self.parts.values():
            part.clear()

    def rows_of(self, layer: int) -> tuple[Any, Any]:
        """As `Cache.rows_of`, of a layer that one device has."""
        return next(part.rows_of(layer) for part in self.parts.values() if len(part.k[layer]))

    def mark(self) -> None:
        """As `Cache.mark`, on all devices."""
        for part in self.parts.values():
            part.mark()

    def save(self) -> ShardedState:  # type: ignore[override]
        """As `Cache.save`, on all devices."""
        return ShardedState({device: part.save() for device, part in self.parts.items()})

    def restore(self, state: State | ShardedState) -> None:
        """As `Cache.restore`; the state was saved under the same placement."""
        if not isinstance(state, (State, ShardedState)):
            raise DataError(f"restore takes what save() gave, not a {type(state).__name__}")
        saved = state.parts if isinstance(state, ShardedState) else {}
        if saved.keys() != self.parts.keys():
            raise DataError(
                f"a state of {state.length} tokens was saved from devices {', '.join(saved) or 'CPU alone'}, this "
                f"cache is on {', '.join(self.parts)}; both must be of one model under one placement"
            )
        self.clear()  # until all is there
        for device, part in self.parts.items():
            part.restore(saved[device])
        self.length = state.length


class _DeviceCache(Cache):
    """What one device has of a ShardedCache, whose length is that of all parts: it changes for all at once."""

    def __init__(self, owner: ShardedCache, share: DeviceShare, hparams: HParams):
        self._owner = owner
        self._describe(owner.shape, owner.n_ctx, owner.type, owner.one_layer)
        self._zeros = share.zeros
        arrays: dict[tuple[object, ...], tuple[np.ndarray, np.ndarray]] = {}
        rows, read_later = [], {hparams.kv_sources[i] for i in hparams.kv_shared}
        for layer in range(hparams.n_layer):
            count, dims = share.heads.get(layer, 0), self.shape.head_dims[layer]
            own = count and (not self.one_layer or layer in read_later)
            key = (count, dims, layer if own else -1)
            if key not in arrays:
                k, v = (
                    self._zeros((count, self.n_ctx, types.layout(name).row_bytes(dim)), "uint8")
                    for name, dim in zip((self.type.k, self.type.v), dims)
                )
                arrays[key] = k, v
            rows.append(arrays[key])
        self.k, self.v = tuple(k for k, _ in rows), tuple(v for _, v in rows)
        indexed: dict[tuple[int, int], np.ndarray] = {}
        if self.shape.index_dims:
            of_layers = [share.index.get(layer, 0) for layer in range(hparams.n_layer)]
            rows_of = [(dim, -1 if self.one_layer or not dim else layer) for layer, dim in enumerate(of_layers)]
            for dim, number in dict.fromkeys(rows_of):
                nbytes = types.layout(self.type.v).row_bytes(dim)
                indexed[dim, number] = self._zeros((min(dim, 1), self.n_ctx, nbytes), "uint8")
            self.index = tuple(indexed[each] for each in rows_of)
        if len({*share.recurrent.values()}) > 1:
            raise UnsupportedError(
                "--max-gpu gives a device other heads of each recurrent layer, which have one size of state here; "
                "leave it out, or take -sm layer"
            )
        recurrent = {i: sizes.state_shapes for i, sizes in sorted(share.recurrent.items())}
        self._make_states(recurrent | dict(sorted(share.states.items())), self._zeros)
        self.state_bytes = sum(x.nbytes for x in {id(x): x for x in self.states.values()}.values())
        self.nbytes = self.state_bytes + sum(k.nbytes + v.nbytes for k, v in arrays.values())
        self.nbytes += sum(x.nbytes for x in indexed.values())
        self._make_entries(hparams, sorted(share.heads), self._zeros)

    @property
    def length(self) -> int:
        return self._owner.length

    @length.setter
    def length(self, value: int) -> None:
        """The whole cache sets its own, once for all parts."""

    def _copy(self, x: Any) -> Any:
        return x.copy() if isinstance(x, np.ndarray) else x.clone()


def on_device(cache: Cache, device: str) -> Cache:
    """What a device has of a ShardedCache, or of the one that `cache` is a device's part of."""
    owner = cache._owner if isinstance(cache, _DeviceCache) else cache
    assert isinstance(owner, ShardedCache)
    return owner.parts[device]
