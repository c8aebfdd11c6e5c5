"""Where a split model keeps its KV cache and recurrent states: which layers and heads each device has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from quantkit.archs.common import blocks
from quantkit.placement.devices import Device
from quantkit.placement.rules import Placement
from quantkit.runtime.kv.cache import CacheShape
from quantkit.runtime.kv.cache_type import CacheType
from quantkit.runtime.kv.sharded_cache import DeviceShare, ShardedCache, sharded_shape
from quantkit.runtime.parallel.rank import Rank
from quantkit.runtime.parallel.worker import Worker


class CacheLayout:
    """The caches of a split model: each device has those of its layers, or of its heads of every shared layer.

    parts     the model's blocks
    hparams   those of what its caches hold (`latent.cached`)
    mla       as the model has it
    workers   by name of device
    ranks     of `-sm graph`, else none
    """

    def __init__(
        self,
        parts: Sequence[blocks.Block],
        hparams: blocks.HParams,
        mla: int,
        placement: Placement,
        workers: dict[str, Worker],
        ranks: Sequence[Rank],
    ):
        self._parts, self._hparams, self._mla = parts, hparams, mla
        self._placement, self._workers, self._ranks = placement, workers, ranks
        self._layers = {
            number: block.layer
            for block in parts
            for number, part in block.numbered_parts
            if isinstance(part, blocks.NGrams)
        }

    def new(self, n_ctx: int, kind: CacheType, one_layer: bool = False) -> ShardedCache:
        """An empty cache of `n_ctx` tokens. UnsupportedError as `require`."""
        self.require(kind)
        return ShardedCache(self._device_shares(), self._hparams, n_ctx, kind, one_layer=one_layer)

    @property
    def shape(self) -> CacheShape:
        """The shape of the caches that `new` makes."""
        return sharded_shape(self._hparams, self._device_shares())

    def require(self, kind: CacheType) -> None:
        """UnsupportedError where a device has no kernel for its part of a cache of this type."""
        for _, worker, part in self._holders():
            if isinstance(part, blocks.Attention):
                worker.require_cache(kind, part.kv_heads, part.head_dim_k, part.head_dim_v)
                if part.indexer is not None:
                    worker.require_index_cache(kind, part.indexer)
            elif isinstance(part, blocks.LatentAttention) and self._mla:
                worker.require_cache(kind, 1, part.latent, 0)
                if part.indexer is not None:
                    worker.require_index_cache(kind, part.indexer)
            elif isinstance(part, blocks.LatentAttention):
                worker.require_cache(kind, part.heads, part.head_dim_k, part.head_dim_v)
            elif isinstance(part, blocks.CompressedAttention):
                worker.require_compressed_cache(kind, part)

    def device_of(self, block: blocks.Block) -> Device:
        """The device of a block's cache. States of recurrent layers are with their layer, also with `-nkvo`."""
        recurrent = any(isinstance(part, blocks.RECURRENT) for part in block.parts)
        return self._placement.of_activations(block.layer) if recurrent else self._placement.of_cache(block.layer)

    def device_of_part(self, part: blocks.Part, layer: int) -> Device:
        """`device_of` of one part, as which layer it is computed: a block may have parts of several layers.

        Attention to an earlier layer's keys is where that has its cache.
        """
        if isinstance(part, (*blocks.RECURRENT, blocks.NGrams)):
            return self._placement.of_activations(self.layer_of(layer))
        source = part.source if isinstance(part, blocks.Attention) else None
        return self._placement.of_cache(layer if source is None else source)

    def layer_of(self, number: int) -> int:
        """The layer whose device computes a part: its number, but for parts whose states have numbers of their own."""
        return self._layers.get(number, number)

    def _device_shares(self) -> dict[str, DeviceShare]:
        """What each device has of a cache."""
        workers = (*self._workers.values(), *self._ranks)
        shares = {worker.device.name: DeviceShare(worker.zeros) for worker in workers}
        for layer, worker, part in self._holders():
            share = shares[worker.device.name]
            if isinstance(part, blocks.Attention) and part.source is None:
                share.heads[layer] = part.kv_heads
                if part.indexer is not None:
                    share.index[layer] = part.indexer.dim
            elif isinstance(part, blocks.LatentAttention):
                share.heads[layer] = 1 if self._mla else part.heads
            elif isinstance(part, blocks.CompressedAttention):
                share.heads[layer] = 1
            elif isinstance(part, blocks.RECURRENT):
                share.recurrent[layer] = part.sizes
            elif isinstance(part, blocks.NGrams):
                share.states[layer] = self._hparams.further_states()[layer]
        return shares

    def _holders(self) -> Iterator[tuple[int, Worker, blocks.Part]]:
        """(layer, worker, part) of all parts with a cache or a state; of shared layers each rank's shard."""
        for block in self._parts:
            for layer, part in block.numbered_parts:
                if isinstance(part, (blocks.FeedForward, blocks.Experts)):
                    continue
                if layer not in self._placement.shares:
                    yield layer, self._workers[self.device_of_part(part, layer).name], part
                    continue
                for rank in self._ranks:
                    shard = rank.shard_of(part)
                    if shard is not None:
                        yield layer, rank, shard
