"""A model over several devices: who computes what, and what moves between them. Layer by layer.

    -sm layer   each device runs a range of layers; the hidden state moves from one to the next
    -sm graph   all devices run each layer, on the parts of its tensors that runtime/cuts.py gives them; what they make
                is added up after every part of a block (runtime/reduce.py), so that all have the hidden state
    -ot         a product, norm or expert whose tensor is elsewhere is computed there; what enters and leaves it moves

A `Worker` is what a device computes; a device of another kind is one more subclass of it (`cuda_worker.CudaWorker`),
which keeps its arrays where it wants and says in `receive` and `give` how they come and go. `Split.ledger` counts time
and bytes moved.

In -sm graph, tensors that rules put elsewhere can be the three matrices of a layer's experts, together on one device;
layers below -ngl run on the CPU, whole.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from quantkit.archs import blocks
from quantkit.errors import UnsupportedError
from quantkit.runtime import cuts, experts, latent, layers, slices
from quantkit.runtime.cache import CacheType
from quantkit.runtime.cuts import Cut
from quantkit.runtime.devices import CPU, Device
from quantkit.runtime.layers import Span
from quantkit.runtime.ledger import Ledger
from quantkit.runtime.parts import Parts
from quantkit.runtime.placement import Placement
from quantkit.runtime.reduce import Reduce
from quantkit.runtime.split_cache import Held, SplitCache


class Worker(Parts):
    """What one device computes: parts of blocks, over the tensors that are there.

    Operations whose tensor is on another device are handed to that one's worker.
    """

    def __init__(self, device: Device, split: Split, owner: Parts, threads: int):
        super().__init__(
            owner.path,
            owner.weights,
            numerics=owner.numerics,
            threads=threads,
            how=owner.how,
            mla=owner.mla,
            expert_reduction=owner.expert_reduction,
            tripwire=owner.tripwire,
        )
        self.device, self._split = device, split
        self._timing = False

    def follow(self, owner: Parts) -> None:
        """Take over what may change while a model is open."""
        self.observer, self._checking = owner.observer, owner._checking
        self.expert_reduction, self.weights = owner.expert_reduction, owner.weights

    # ------------------------------------------------------------------------------------------------------- transfers

    def take(self, x: np.ndarray, source: Worker) -> np.ndarray:
        """x of another device, here."""
        if source is self:
            return x
        begin = time.perf_counter()
        here = self.receive(x, source)
        ledger = self._split.ledger
        ledger.moved(source.device.name, self.device.name, here.nbytes)
        ledger.spent(self.device.name, "transfer", time.perf_counter() - begin)
        return here

    def receive(self, x: np.ndarray, source: Worker) -> np.ndarray:
        """A copy of x of another device on this one."""
        return source.give(x)

    def give(self, x: np.ndarray) -> np.ndarray:
        """A copy of x of this device in the host's memory."""
        return np.array(x)

    def _there(self, other: Worker, task: Callable[..., np.ndarray], *given: np.ndarray) -> np.ndarray:
        """What `task` of arrays gives that are moved to another device for it, brought back."""
        return self.take(task(*(other.take(x, self) for x in given)), other)

    @contextlib.contextmanager
    def _timed(self, kind: str) -> Iterator[None]:
        """Count what is done inside as this kind of work; what is within that again is not counted twice."""
        if self._timing:
            yield
            return
        self._timing, begin = True, time.perf_counter()
        try:
            yield
        finally:
            self._timing = False
            self.settle()
            self._split.ledger.spent(self.device.name, kind, time.perf_counter() - begin)

    def settle(self) -> None:
        """Wait for what was begun, where time is to be told of a device that goes on by itself."""

    def zeros(self, shape: tuple[int, ...], kind: str) -> Any:
        """An array of this device."""
        return np.zeros(shape, kind)

    def require_cache(self, kind: CacheType, heads: int, dim_k: int, dim_v: int) -> None:
        """UnsupportedError where this device cannot attend over such a cache; dim_v 0: values are the keys' beginning."""

    def _of(self, name: str) -> Worker:
        """The worker of the device that has a tensor."""
        return self._split.worker(self._split.placement[name])

    # ------------------------------------------------------------------------------------------------------ operations

    def linear(self, linear: blocks.Linear, x: np.ndarray) -> np.ndarray:
        other = self._of(linear.weight)
        if other is not self:
            return self._there(other, lambda x: other.linear(linear, x), x)
        with self._timed("products"):
            self._split.ledger.read(self.device.name, self.weights[linear.weight].nbytes)
            return super().linear(linear, x)

    def norm(self, norm: blocks.Norm, x: np.ndarray) -> np.ndarray:
        other = self._of(norm.weight)
        if other is not self:
            return self._there(other, lambda x: other.norm(norm, x), x)
        with self._timed("norms"):
            return super().norm(norm, x)

    def attend(
        self,
        heads: layers.Heads,
        layer: int,
        q: np.ndarray,
        spans: list[Span],
        how: layers.Attending | None = None,
    ) -> np.ndarray:
        with self._timed("attention"):
            return super().attend(heads, layer, q, spans, how)

    def remember_and_attend(
        self, part: blocks.Attention, layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray, spans: list[Span]
    ) -> np.ndarray:
        other = self._split.attends(layer, self)
        if other is self:
            return super().remember_and_attend(part, layer, q, k, v, spans)
        return self._there(other, lambda q, k, v: other.remember_and_attend(part, layer, q, k, v, spans), q, k, v)

    def attend_latents(
        self, part: blocks.LatentAttention, layer: int, q: np.ndarray, latents: np.ndarray, spans: list[Span]
    ) -> np.ndarray:
        other = self._split.attends(layer, self)
        if other is self:
            return super().attend_latents(part, layer, q, latents, spans)
        return self._there(other, lambda q, c: other.attend_latents(part, layer, q, c, spans), q, latents)

    def between(self, part: blocks.LatentAttention) -> latent.Between:
        return _Between(part, self)

    def own_between(self, part: blocks.LatentAttention) -> latent.Between:
        """The same, computed on this device."""
        return latent.Between(part, self.weights, self.threads)

    def run_part(self, part: blocks.Part, layer: int, x: np.ndarray, spans: list[Span]) -> np.ndarray:
        if not isinstance(part, blocks.DeltaNet):
            return super().run_part(part, layer, x, spans)
        begin, counted = time.perf_counter(), self._counted()
        out = super().run_part(part, layer, x, spans)
        rest = time.perf_counter() - begin - (self._counted() - counted)
        self._split.ledger.spent(self.device.name, "recurrent", max(0.0, rest))
        return out

    def _counted(self) -> float:
        """Seconds that are counted already, of all that this worker's parts are made by."""
        return self._split.ledger.total()

    def run_experts(self, part: blocks.Experts, y: np.ndarray, chosen: np.ndarray, weights: np.ndarray) -> np.ndarray:
        other, *others = (self._of(linear.weight) for linear in (part.gate, part.up, part.down))
        if any(worker is not other for worker in others):
            return self._experts_apart(part, y, chosen, weights)
        if other is not self:
            return self._there(other, lambda y, w: other.run_experts(part, y, chosen, w), y, weights)
        with self._timed("experts"):
            self._count_experts(part, chosen)
            return super().run_experts(part, y, chosen, weights)

    def _experts_apart(
        self, part: blocks.Experts, y: np.ndarray, chosen: np.ndarray, weights: np.ndarray
    ) -> np.ndarray:
        """The three matrices of an expert are not on one device: each product is where its matrix is."""

        def matrix(linear: blocks.Linear, number: int) -> experts.Product:
            other = self._of(linear.weight)
            product = other.expert_product(linear, number)

            def run(x: np.ndarray) -> np.ndarray:
                with other._timed("experts"):
                    return product(x)

            return run if other is self else lambda x: self._there(other, run, x)

        observe = None if self._checking else self.observer
        self._count_experts(part, chosen)
        return experts.run(part, self.weights, y, chosen, weights, self.threads, observe, matrix)

    def expert_product(self, linear: blocks.Linear, number: int) -> experts.Product:
        """The product with one expert's matrix, on this device."""
        return experts.linear_of(self.weights, self.threads, linear, number)

    def _count_experts(self, part: blocks.Experts, chosen: np.ndarray) -> None:
        used = len(np.unique(chosen[chosen >= 0]))
        for linear in (part.gate, part.up, part.down):
            tensor = self.weights[linear.weight]
            name = self._of(linear.weight).device.name
            self._split.ledger.read(name, used * tensor.nbytes // max(1, tensor.shape[0]))


class _Between(latent.Between):
    """The matrices between latents and heads, each used on the device that has it."""

    def __init__(self, part: blocks.LatentAttention, worker: Worker):
        super().__init__(part, worker.weights, worker.threads)
        self._worker = worker

    def _at(self, absorbed: bool, own: blocks.Linear | None) -> Worker:
        """Who has the matrix that `of` reads; where it reads k_b and v_b, who has k_b, and v_b is brought there."""
        part, weights = self.part, self._worker.weights
        pair = part.k_b is not None and part.v_b is not None
        if part.kv_b is not None and not (absorbed and pair):
            return self._worker._of(part.kv_b.weight)
        assert own is not None
        assert part.v_b is not None
        found = self._worker._of(own.weight)
        holder = self._worker._of(part.v_b.weight)
        if not absorbed and holder is not found:
            self._worker._split.ledger.moved(holder.device.name, found.device.name, weights[part.v_b.weight].nbytes)
        return found

    def _run(self, other: Worker, task: Callable[[latent.Between, np.ndarray], Any], x: np.ndarray) -> Any:
        """`task` with plain matrices on another device."""
        x = other.take(x, self._worker)
        with other._timed("latents"):
            return task(other.own_between(self.part), x)

    def queries(self, q: np.ndarray) -> np.ndarray:
        other = self._at(True, self.part.k_b)
        return self._worker.take(self._run(other, lambda between, q: between.queries(q), q), other)

    def values(self, attended: np.ndarray) -> np.ndarray:
        other = self._at(True, self.part.v_b)
        return self._worker.take(self._run(other, lambda between, x: between.values(x), attended), other)

    def expanded(self, latents: np.ndarray, first: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        other = self._at(False, self.part.k_b)
        k, v = self._run(other, lambda between, c: between.expanded(c, first, stop), latents)
        return self._worker.take(k, other), self._worker.take(v, other)


class Rank(Worker):
    """A device of -sm graph: its parts of the tensors that are cut, and whole ones of the rest."""

    def __init__(self, rank: int, device: Device, split: Split, owner: Parts, threads: int):
        super().__init__(device, split, owner, threads)
        self.rank = rank
        self.weights = dict(owner.weights)
        self._slice(owner, split.cuts)

    def follow(self, owner: Parts) -> None:
        self._checking, self.expert_reduction = owner._checking, owner.expert_reduction

    def _slice(self, owner: Parts, names: Iterable[str]) -> None:
        for name in names:
            cut = self._split.cuts[name]
            self.weights[name] = slices.ranges(owner.weights[name], cut.axis, cut.ranges(self.rank))  # type: ignore[index]

    def renew(self, owner: Parts, names: Iterable[str]) -> None:
        """Take these tensors from the owner again."""
        names = list(names)
        self.weights = {**self.weights, **{name: owner.weights[name] for name in names}}
        self._slice(owner, [name for name in names if name in self._split.cuts])
        self.forget(names)

    def _of(self, name: str) -> Worker:
        return self if name in self._split.placement.sliced else super()._of(name)

    def _counted(self) -> float:
        return self._split.ledger.total(self.device.name)  # the others run at the same time

    def run_experts(self, part: blocks.Experts, y: np.ndarray, chosen: np.ndarray, weights: np.ndarray) -> np.ndarray:
        if part.down.weight not in self._split.placement.sliced:  # elsewhere, once for all
            return super().run_experts(part, y, chosen, weights) if self.rank == 0 else np.zeros_like(y)
        cut = self._split.cuts[part.down.weight]
        ((first, stop),) = cut.ranges(self.rank)
        if first == stop:
            return np.zeros_like(y)
        if cut.axis == 0:  # by number: those of others are left out
            chosen = np.where((chosen >= first) & (chosen < stop), chosen - first, -1)
        return super().run_experts(part, y, chosen, weights)

    def mine(self, part: blocks.Part) -> blocks.Part | None:
        """A part as this device computes it, without what comes after adding up; None where it has nothing of it."""
        of = self._split.cuts

        def width(linear: blocks.Linear) -> int:
            return of[linear.weight].width(self.rank)

        def last(linear: blocks.Linear) -> blocks.Linear:  # biases of what is added up count once
            return linear if self.rank == 0 else replace(linear, bias=None)

        if isinstance(part, blocks.Attention):
            kv_heads = width(part.k) // part.head_dim_k
            heads = kv_heads * (part.heads // part.kv_heads)
            found = replace(part, heads=heads, kv_heads=kv_heads, out=last(part.out), post_norm=None)
            return found if heads else None
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
        shared = None if part.shared is None else self.mine(part.shared)
        assert shared is None or isinstance(shared, blocks.FeedForward)
        cut = of.get(part.down.weight)
        down = last(part.down) if cut is not None and cut.axis == 2 else part.down
        return replace(part, shared=shared, down=down)


class Split:
    """A model's blocks over the devices of a placement.

    owner      the model: weights by name, how to compute
    ledger     time and bytes moved
    reduce     of -sm graph: the type sums over devices travel in; None otherwise
    profile    whether GPUs are waited for, so that each kind of work has the time it took
    """

    def __init__(
        self,
        owner: Parts,
        parts: Sequence[blocks.Block],
        head: blocks.Head,
        cached: blocks.HParams,
        placement: Placement,
        *,
        reduce: str = "f32",
        experts_by: str = "number",
        profile: bool = False,
    ):
        self.profile = profile
        self.placement, self.ledger = placement, Ledger()
        self._owner, self._parts, self._head, self._cached = owner, parts, head, cached
        used = {device.name: device for device in (CPU, *placement.devices.values(), *placement.of_layer.values())}
        if any(device.gpu is not None for device in placement.graph):
            raise UnsupportedError(
                "-sm graph: this version shares layers among virtual devices (cpu:0, cpu:1, …) only; with GPUs take "
                "-sm layer, or -sm none"
            )
        _require_known(parts)
        self.cuts: dict[str, Cut] = {}
        self._workers = {name: self._new_worker(device) for name, device in used.items()}
        self.ranks: list[Rank] = []
        self._adding: Reduce | None = None
        if placement.graph:
            self._require_cuttable()
            by = experts_by
            self.cuts = cuts.of_model(
                parts, head, owner.weights, placement.sliced, placement.shares, by, cached.n_layer
            )
            threads = max(1, owner.threads // len(placement.graph))
            self.ranks = [Rank(i, device, self, owner, threads) for i, device in enumerate(placement.graph)]
            self._adding = Reduce(len(self.ranks), reduce)
        self._held: tuple[np.ndarray | None, Worker] = (None, self._workers[CPU.name])

    def _new_worker(self, device: Device) -> Worker:
        if device.gpu is None:
            return Worker(device, self, self._owner, self._owner.threads)
        from quantkit.runtime.cuda_worker import CudaWorker

        return CudaWorker(device, self, self._owner)

    @property
    def reduce(self) -> str | None:
        return self._adding.kind if self._adding else None

    def describe(self) -> dict[str, Any]:
        """What a figure of a run depends on."""
        placement = self.placement
        counts: dict[str, int] = {}
        for name, device in placement.devices.items():
            names = [d.name for d in placement.graph] if name in placement.sliced else [device.name]
            for each in names:
                counts[each] = counts.get(each, 0) + 1
        found: dict[str, Any] = {"split_mode": placement.mode, "devices": counts}
        if gpus := {name: worker.gpu.name for name, worker in self._workers.items() if hasattr(worker, "gpu")}:
            found["gpus"] = gpus
        if placement.graph:
            found |= {"reduce": self.reduce, "shares": [round(s, 4) for s in next(iter(placement.shares.values()))]}
        return found

    def worker(self, device: Device) -> Worker:
        return self._workers[device.name]

    def attends(self, layer: int, worker: Worker) -> Worker:
        """Who has the keys and values of a layer that a worker runs."""
        return worker if self.ranks else self.worker(self.placement.of_cache(layer))

    def new_cache(self, n_ctx: int, kind: CacheType, one_layer: bool = False) -> SplitCache:
        """An empty cache: of each device its layers, or its heads of every layer that is shared."""
        self.require_cache(kind)
        workers = (*self._workers.values(), *self.ranks)
        held = {worker.device.name: Held(worker.zeros) for worker in workers}
        for block in self._parts:
            for part in block.parts:
                if isinstance(part, (blocks.FeedForward, blocks.Experts)):
                    continue
                if block.layer not in self.placement.shares:
                    self._hold(held[self._cache_device(block).name], block.layer, part)
                for rank in self.ranks if block.layer in self.placement.shares else ():
                    mine = rank.mine(part)
                    if mine is not None:
                        self._hold(held[rank.device.name], block.layer, mine)
        return SplitCache(held, self._cached, n_ctx, kind, one_layer=one_layer)

    def require_cache(self, kind: CacheType) -> None:
        """UnsupportedError where a device has no kernel for its part of such a cache."""
        for block in self._parts:
            if block.layer in self.placement.shares:
                continue
            worker = self.worker(self._cache_device(block))
            for part in block.parts:
                if isinstance(part, blocks.Attention):
                    worker.require_cache(kind, part.kv_heads, part.head_dim_k, part.head_dim_v)
                elif isinstance(part, blocks.LatentAttention) and self._owner.mla:
                    worker.require_cache(kind, 1, part.latent, 0)
                elif isinstance(part, blocks.LatentAttention):
                    worker.require_cache(kind, part.heads, part.head_dim_k, part.head_dim_v)

    def _hold(self, held: Held, layer: int, part: blocks.Part) -> None:
        if isinstance(part, blocks.Attention):
            held.heads[layer] = part.kv_heads
        elif isinstance(part, blocks.LatentAttention):
            held.heads[layer] = 1 if self._owner.mla else part.heads
        elif isinstance(part, blocks.DeltaNet):
            held.recurrent[layer] = part.sizes

    def _cache_device(self, block: blocks.Block) -> Device:
        """Where what a layer remembers is; states of recurrent layers are with their layer, -nkvo or not."""
        recurrent = any(isinstance(part, blocks.DeltaNet) for part in block.parts)
        return self.placement.home(block.layer) if recurrent else self.placement.of_cache(block.layer)

    def forget(self, names: Iterable[str]) -> None:
        """Drop what was made of these tensors: the owner has others."""
        names = list(names)
        for worker in self._workers.values():
            worker.forget(names)
        for rank in self.ranks:
            rank.renew(self._owner, names)

    # ---------------------------------------------------------------------------------------------------------- a pass

    def embedded(self, x: np.ndarray) -> np.ndarray:
        """What the embedding made; where, says its placement."""
        worker = self.worker(self.placement[self._head.embedding])
        self._held = x, worker if worker.device.runs_here else self._workers[CPU.name]  # rows are gathered here
        self.ledger.ran(len(x))
        return x

    def run_block(self, block: blocks.Block, x: np.ndarray, spans: list[Span]) -> np.ndarray:
        """float32[tokens, n_embd] that leaves a block; the spans' caches are those of `new_cache`."""
        for worker in self._workers.values():
            worker.follow(self._owner)
        if block.layer in self.placement.shares:
            out = self._run_shared(block, x, spans)
            self._held = out, self.ranks[0]
            return out
        worker = self.worker(self.placement.home(block.layer))
        begin, counted = time.perf_counter(), self.ledger.total()
        x = worker.take(x, self._source(x))
        out = worker.run_block(block, x, _of_device(spans, self._cache_device(block)))
        other = time.perf_counter() - begin - (self.ledger.total() - counted)
        self.ledger.spent(worker.device.name, "other", max(0.0, other))
        self._held = out, worker
        return out

    def host(self, x: np.ndarray) -> np.ndarray:
        """What left a block, in the host's memory: as it is where it is there already."""
        return x if isinstance(x, np.ndarray) else self._workers[CPU.name].take(x, self._held[1])

    def is_finite(self, x: np.ndarray) -> bool:
        """Of what left a block, where it is."""
        return self._held[1].is_finite(x)

    def project(self, x: np.ndarray) -> np.ndarray:
        """float32[k, vocab], on the host, of what the last block made."""
        host, head, last = self._workers[CPU.name], self._head, self._cached.n_layer
        source = self._source(x)
        cut = self.cuts.get(head.output.weight)
        if cut is not None:
            assert self._adding is not None

            def task(rank: int) -> np.ndarray:
                mine = self.ranks[rank]
                return mine.linear(head.output, mine.norm(head.norm, mine.take(x, source)))

            return np.concatenate([host.take(y, r) for y, r in zip(self._adding.each(task), self.ranks)], axis=1)
        worker = self.ranks[0] if last in self.placement.shares else self.worker(self.placement.home(last))
        x = worker.take(x, source)
        return host.take(worker.linear(head.output, worker.norm(head.norm, x)), worker)

    def _source(self, x: np.ndarray) -> Worker:
        """Where an array is: what left the last block is there, all others are the host's."""
        held, worker = self._held
        base = getattr(x, "base", None)
        base = x if base is None else base
        return worker if held is not None and (x is held or base is held) else self._workers[CPU.name]

    def _run_shared(self, block: blocks.Block, x: np.ndarray, spans: list[Span]) -> np.ndarray:
        """A block on all ranks at once; what is given back is the first one's."""
        if self._owner.observer is not None and not self._owner._checking:
            raise UnsupportedError(
                f"{self._owner.path}: what enters whole matrices is observed (imatrix), and -sm graph cuts them; take "
                "-sm layer"
            )
        assert self._adding is not None
        adding, source = self._adding, self._source(x)
        for rank in self.ranks:
            rank.follow(self._owner)
        given = [x if isinstance(source, Rank) else rank.take(x, source) for rank in self.ranks]

        def task(number: int) -> np.ndarray:
            rank, ledger = self.ranks[number], self.ledger
            name, begin = rank.device.name, time.perf_counter()
            counted = ledger.total(name)
            out = _run_rank(rank, block, given[number], _of_device(spans, rank.device), adding, ledger)
            ledger.spent(name, "other", max(0.0, time.perf_counter() - begin - (ledger.total(name) - counted)))
            return out

        return adding.each(task)[0]

    def _require_cuttable(self) -> None:
        """UnsupportedError for rules that -sm graph cannot follow."""
        placement = self.placement
        if placement.kv_on_cpu:
            raise UnsupportedError(
                "-nkvo: with -sm graph each device has the keys and values of its heads; drop one of them"
            )
        experts_of = {
            linear.weight: part
            for block in self._parts
            for part in block.parts
            if isinstance(part, blocks.Experts)
            for linear in (part.gate, part.up, part.down)
        }
        for block in self._parts:
            for name in _names(block) if block.layer in placement.shares else ():
                if name not in placement.devices or name in placement.sliced:
                    continue
                part = experts_of.get(name)
                three = (part.gate.weight, part.up.weight, part.down.weight) if part else ()
                if not part or len({placement[n].name for n in three}) > 1 or any(n in placement.sliced for n in three):
                    raise UnsupportedError(
                        f"{placement.reasons.get(name, '-ot')}: {name} would go to {placement[name].name}; with "
                        "-sm graph only the three matrices of a layer's experts can go elsewhere, together; take -sm "
                        "layer for others"
                    )


def _run_rank(
    rank: Rank, block: blocks.Block, x: np.ndarray, spans: list[Span], adding: Reduce, ledger: Ledger
) -> np.ndarray:
    """A block on one device. One that fails still adds nothings until all know of it, so that none waits."""
    failure: Exception | None = None
    for part in block.parts:
        partial = np.zeros_like(x)
        try:
            mine = rank.mine(part) if failure is None else None
            if mine is not None:
                partial = rank.run_part(mine, block.layer, x, spans)
        except Exception as error:
            failure = error
        begin = time.perf_counter()
        total = adding.add(rank.rank, partial, failure is not None)
        ledger.spent(rank.device.name, "waiting", time.perf_counter() - begin)
        if failure is not None:
            raise failure
        if total is None:
            return x  # another one raises
        try:
            post = getattr(part, "post_norm", None)
            x = x + (total if post is None else rank.norm(post, total))
        except Exception as error:
            failure = error
    if failure is not None:
        raise failure
    return x


def _of_device(spans: Iterable[Span], device: Device) -> list[Span]:
    """Spans whose caches are what a device has of them."""
    found = []
    for span in spans:
        assert isinstance(span.cache, SplitCache)
        found.append(Span(span.start, span.stop, span.cache.parts[device.name]))
    return found


def _names(block: blocks.Block) -> Iterator[str]:
    """Tensors that the parts of a block name."""
    pending: list[Any] = list(block.parts)
    while pending:
        part = pending.pop()
        for value in vars(part).values():
            if isinstance(value, (blocks.Linear, blocks.Norm)):
                yield value.weight
            elif isinstance(value, blocks.FeedForward):
                pending.append(value)


def _require_known(parts: Sequence[blocks.Block]) -> None:
    known = (blocks.Attention, blocks.LatentAttention, blocks.DeltaNet, blocks.FeedForward, blocks.Experts)
    for block in parts:
        for part in block.parts:
            if not isinstance(part, known):
                raise UnsupportedError(
                    f"blk.{block.layer}: {type(part).__name__} layers run on one device in this version; leave out "
                    "--devices, -sm and rules for other devices"
                )


def required(placement: Placement, profile: bool) -> bool:
    """Whether a model is run by a Split: something is not on the CPU, or its time is to be told."""
    return profile or not placement.is_plain
