"""A device of -sm graph (tensor parallel): its shards of the tensors that are split, and the other tensors whole.

A `Rank` computes its shard of each part of a block (`shard_of`) on a thread of its own, and adds the partial result to
those of the other ranks (runtime/parallel/all_reduce.py). On a GPU it is a `gpu_rank.CudaRank`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from quantkit.archs.common import blocks
from quantkit.formats.gguf import Tensor
from quantkit.placement.devices import Device
from quantkit.runtime.blocks.block_runner import BlockRunner
from quantkit.runtime.blocks.spans import Span
from quantkit.runtime.parallel import tensor_shards
from quantkit.runtime.parallel.all_reduce import AllReduce
from quantkit.runtime.parallel.worker import Context, Worker


class Rank(Worker):
    """The worker of one of the devices that share layers.

    rank   its number among them
    """

    def __init__(self, rank: int, device: Device, split: Context, owner: BlockRunner, threads: int):
        super().__init__(device, split, owner, threads)
        self.rank = rank
        self.weights = self._sharded(owner, owner.weights)

    def sync(self, owner: BlockRunner) -> None:
        """As `Worker.sync`; weights are this rank's shards, and nothing is observed."""
        self._checking, self.expert_reduction = owner._checking, owner.expert_reduction

    def _sharded(self, owner: BlockRunner, names: Iterable[str]) -> dict[str, Tensor]:
        """The owner's tensors; of those that are split, this device's shard."""
        tensors = {name: owner.weights[name] for name in names}
        for name in tensors.keys() & self._split.cuts.keys():
            cut = self._split.cuts[name]
            tensors[name] = tensor_shards.ranges(tensors[name], cut.axis, cut.ranges(self.rank))
        return tensors

    def reload(self, owner: BlockRunner, names: Iterable[str]) -> None:
        """Take these tensors from the owner again."""
        names = list(names)
        self.drop_cached(names)
        self.weights = {**self.weights, **self._sharded(owner, names)}
        self.drop_cached(names)

    def _of(self, name: str) -> Worker:
        return self if name in self._split.placement.sharded else super()._of(name)

    @property
    def compiles(self) -> bool:
        """Never: the ranks run at the same time, and compiled lists one after another."""
        return False

    def _counted(self) -> float:
        return self._split.ledger.total(self.device.name)  # the others run at the same time

    def _experts(self, part: blocks.Experts, x: Any, spans: list[Span]) -> Any:
        if self.rank == 0 or part.down.weight in self._split.placement.sharded:
            return super()._experts(part, x, spans)
        if part.shared is None:  # elsewhere, once for all
            return self.zeros(tuple(x.shape), "float32")
        return self._shared(part.shared, part.shared_gate, self.norm(part.norm, x))

    def run_experts(self, part: blocks.Experts, y: Any, chosen: Any, weights: Any) -> Any:
        """As `Worker.run_experts`, of the experts or columns of this rank."""
        cut = self._split.cuts.get(part.down.weight)
        if cut is None:
            return super().run_experts(part, y, chosen, weights)
        ((first, stop),) = cut.ranges(self.rank)
        if first == stop:
            return self.zeros(tuple(y.shape), "float32")
        if cut.axis == 0:  # by number: those of others are left out
            chosen = chosen - first
            chosen[(chosen < 0) | (chosen >= stop - first)] = -1
        return super().run_experts(part, y, chosen, weights)

    def shard_of(self, part: blocks.Part) -> blocks.Part | None:
        """This device's shard of a part, without the norm that follows the all-reduce; None where it has no share."""
        cuts = self._split.cuts

        def width(linear: blocks.Linear) -> int:
            return cuts[linear.weight].width(self.rank)

        def last(linear: blocks.Linear) -> blocks.Linear:  # biases of what is added up count once
            return linear if self.rank == 0 else replace(linear, bias=None)

        if isinstance(part, blocks.Attention):
            kv_heads = width(part.k) // part.head_dim_k
            heads = kv_heads * (part.heads // part.kv_heads)
            shard = replace(part, heads=heads, kv_heads=kv_heads, out=last(part.out), post_norm=None)
            return shard if heads else None
        if isinstance(part, blocks.LatentAttention):
            heads = width(part.q) // part.head_dim_k
            return replace(part, heads=heads, out=last(part.out)) if heads else None
        if isinstance(part, blocks.DeltaNet):
            each = part.sizes.value_heads // part.sizes.key_heads
            heads = width(part.out) // (each * part.sizes.head_dim_v)
            sizes = replace(part.sizes, key_heads=heads, value_heads=each * heads)
            return replace(part, sizes=sizes, out=last(part.out)) if heads else None
        if isinstance(part, blocks.FeedForward):
            return replace(part, down=last(part.down), post_norm=None) if width(part.gate) else None
        assert isinstance(part, blocks.Experts)
        shared = None if part.shared is None else self.shard_of(part.shared)
        assert shared is None or isinstance(shared, blocks.FeedForward)
        cut = cuts.get(part.down.weight)
        down = last(part.down) if cut is not None and cut.axis == 2 else part.down
        return replace(part, shared=shared, down=down)

    def run_sharded(self, block: blocks.Block, x: Any, spans: list[Span], all_reduce: AllReduce) -> Any:
        """Run this device's shard of a block on its thread. Returns the block's output, the same on all ranks."""
        ledger, name = self._split.ledger, self.device.name
        start, counted = time.perf_counter(), ledger.total(name)
        for part in block.parts:
            shard = self.shard_of(part)
            partial = (
                self.zeros(tuple(x.shape), "float32") if shard is None else self.run_part(shard, block.layer, x, spans)
            )
            begin = time.perf_counter()
            total = all_reduce.sum(self.rank, partial)
            self.synchronize()
            ledger.spent(name, "waiting", time.perf_counter() - begin)
            x = x + self.norm(getattr(part, "post_norm", None), total)
        if block.out_scale is not None:
            x = x * self.vector(block.out_scale)
        ledger.spent(name, "other", max(0.0, time.perf_counter() - start - (ledger.total(name) - counted)))
        return x
