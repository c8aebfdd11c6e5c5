"""`Worker`: the part of a split model that one device computes. This class computes on the CPU with numpy arrays.

An operation whose tensor is on another device is passed to that device's worker; its input and output are transfers,
which the ledger counts.

With `fast` numerics, neighbouring blocks that are wholly here, the experts of single blocks, and the head run as
compiled plans (`compiled/worker_plans.py`). What these do not support runs layer by layer, as does a model that is
observed.

Another kind of device is a subclass (`gpu_worker.CudaWorker`): it chooses its kind of arrays, implements their transfer
in `receive` and `to_host`, and overrides the operations of `block_runner.BlockRunner`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from quantkit.archs.common import blocks
from quantkit.placement.devices import Device
from quantkit.placement.offload import Offload
from quantkit.placement.rules import Placement
from quantkit.placement.sharding import Sharding
from quantkit.runtime.blocks import compressed_attention, experts, float_linear, indexer, latent
from quantkit.runtime.blocks.block_runner import BlockRunner
from quantkit.runtime.blocks.float_attention import AttentionOptions, Heads
from quantkit.runtime.blocks.spans import Span
from quantkit.runtime.kv.cache_type import CacheType
from quantkit.runtime.parallel.ledger import Ledger
from quantkit.runtime.parallel.split_checks import tensor_names

if TYPE_CHECKING:
    from quantkit.runtime.compiled.worker_plans import WorkerPlans


class Context(Protocol):
    """What a worker needs of the split model that it belongs to (`split.Split`).

    selector   the worker that has what the last indexer has selected
    """

    placement: Placement
    ledger: Ledger
    cuts: dict[str, Sharding]
    head: blocks.Head
    offload: Offload
    profile: bool
    selector: Worker | None

    def worker(self, device: Device) -> Worker:
        """The worker of a device."""

    def attends(self, layer: int, worker: Worker) -> Worker:
        """The worker that has the cache of a layer that `worker` runs."""

    def computes(self, layer: int, worker: Worker) -> Worker:
        """The worker that computes the parts of a layer, in a block that `worker` runs."""

    def spans_of(self, part: blocks.Part, layer: int, spans: list[Span]) -> list[Span]:
        """The spans with the caches that a part of a layer uses."""


class Worker(BlockRunner):
    """Computes parts of blocks on one device.

    torch_device   the torch.device of its arrays; None where they are numpy's

    Operations whose tensor is on another device run by that device's worker.
    """

    torch_device: Any = None
    hardware: str | None = None  # name of the GPU

    def __init__(self, device: Device, split: Context, owner: BlockRunner, threads: int):
        super().__init__(
            owner.path,
            owner.weights,
            numerics=owner.numerics,
            threads=threads,
            attention=owner.attention,
            mla=owner.mla,
            expert_reduction=owner.expert_reduction,
            fused_experts=owner.fused_experts,
            tripwire=owner.tripwire,
        )
        self.device, self._split = device, split
        self._timing = False
        self._compiled: WorkerPlans | None = None

    def sync(self, owner: BlockRunner) -> None:
        """Copy from the model what may change while it is open: observer, weights, reduction of experts."""
        if owner.weights is not self.weights or owner.expert_reduction != self.expert_reduction:
            self._compiled = None
        self.observer, self._checking = owner.observer, owner._checking
        self.expert_reduction, self.weights = owner.expert_reduction, owner.weights

    # ------------------------------------------------------------------------------------------------------- transfers

    def fetch(self, x: np.ndarray, source: Worker) -> np.ndarray:
        """x, which is on the device of `source`, on this device; counts the transfer."""
        if source is self:
            return x
        begin = time.perf_counter()
        copy = self.receive(x, source)
        ledger = self._split.ledger
        ledger.moved(source.device.name, self.device.name, copy.nbytes)
        ledger.spent(self.device.name, "transfer", time.perf_counter() - begin)
        return copy

    def receive(self, x: np.ndarray, source: Worker) -> np.ndarray:
        """A copy of x of another device on this one."""
        return source.to_host(x)

    def to_host(self, x: np.ndarray) -> np.ndarray:
        """A copy of x of this device in the host's memory."""
        return np.array(x)

    def _run_on(self, other: Worker, task: Callable[..., np.ndarray], *arrays: np.ndarray) -> np.ndarray:
        """Move arrays to another device, run `task` with them there, and move the result back."""
        return self.fetch(task(*(other.fetch(x, self) for x in arrays)), other)

    @contextlib.contextmanager
    def _timed(self, kind: str) -> Iterator[None]:
        """Context: count the time inside as this kind of work. Nested contexts are not counted twice."""
        if self._timing:
            yield
            return
        self._timing, begin = True, time.perf_counter()
        try:
            yield
        finally:
            self._timing = False
            self.synchronize()
            self._split.ledger.spent(self.device.name, kind, time.perf_counter() - begin)

    def bind_thread(self) -> None:
        """Called once on each thread, other than the main one, before it uses this device."""

    def synchronize(self) -> None:
        """Wait for the device where time is measured. The CPU computes synchronously: nothing to wait for."""

    def spare_bytes(self) -> int:
        """Bytes of a GPU's memory that are free once all its weights are there."""
        raise AssertionError(f"{self.device.name} is no GPU")

    def zeros(self, shape: tuple[int, ...], kind: str) -> Any:
        """An array of this device."""
        return np.zeros(shape, kind)

    def can_capture(self, block: blocks.Block) -> bool:
        """Whether neighbours like this block can run as a whole: all of it is computed here, by compiled plans."""
        return (
            self.numerics == "fast"
            and self.tripwire != "full"
            and self.has_caches_of(block)
            and all(self._of(name) is self for name in tensor_names(block))
            and self._plans.unsupported(block) is None
        )

    def has_caches_of(self, block: blocks.Block) -> bool:
        """Whether all keys and values that a block reads are here, those of an earlier layer too."""
        sources = [part.source for part in block.parts if isinstance(part, blocks.Attention)]
        layers = {block.layer, *block.layers, *(source for source in sources if source is not None)}
        return all(self._split.attends(layer, self) is self for layer in layers)

    def can_replay(self, layers: Sequence[blocks.Block], tokens: int, spans: Sequence[Span]) -> bool:
        """Whether these blocks, which `can_capture` allows, can run as a whole for so many tokens of these spans."""
        return self.compiles and not any(span.cache.one_layer for span in spans)

    def replay(
        self, layers: Sequence[blocks.Block], x: np.ndarray, spans: Sequence[Span], head: blocks.Head | None
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """float32[tokens, n_embd] that leaves such blocks, and the logits of a head where they were made along with
        it, which they are only of finite numbers."""
        return self._plans.run_blocks(layers, x, spans), None

    @property
    def compiles_head(self) -> bool:
        """Whether `project` can be called, where the output matrix is here."""
        return self.compiles and self._plans.unsupported_head is None

    def project(self, x: np.ndarray) -> np.ndarray:
        """Logits float32[1, vocab] of one row that leaves the last block, before the head's soft cap, by a plan."""
        with self._timed("products"):
            self._split.ledger.read(self.device.name, self.weights[self._split.head.output.weight].nbytes)
            return self._plans.project(x)

    @property
    def _plans(self) -> WorkerPlans:
        """The compiled plans of this device; each is built when it is first run."""
        if self._compiled is None:
            from quantkit.runtime.compiled import plan_base, worker_plans  # loads numba

            options = plan_base.ExpertOptions(self.fused_experts, self.expert_reduction)
            parts = plan_base.ModelParts(
                self.weights, (), self._split.head, self.threads, self.attention, options, self.mla
            )
            self._compiled = worker_plans.WorkerPlans(parts)
        return self._compiled

    @property
    def compiles(self) -> bool:
        """Whether what is here whole runs as compiled plans now: with `fast` numerics, unless it is observed."""
        return self.numerics == "fast" and self.observer is None and not self._checking

    def drop_cached(self, names: Iterable[str]) -> None:
        """As `BlockRunner.drop_cached`, and all compiled plans."""
        super().drop_cached(names)
        self._compiled = None

    def embed(self, head: blocks.Head, tokens: np.ndarray) -> np.ndarray:
        """float32[tokens, n_embd] that enters the first block, here or on the host."""
        return float_linear.embed(self.weights, head, tokens)

    def require_cache(self, kind: CacheType, heads: int, dim_k: int, dim_v: int) -> None:
        """UnsupportedError where this device cannot attend over such a cache; with dim_v 0 values are in the keys."""

    def require_compressed_cache(self, kind: CacheType, part: blocks.CompressedAttention) -> None:
        """UnsupportedError where this device cannot compute compressed attention over such a cache."""

    def require_index_cache(self, kind: CacheType, part: indexer.AnyIndexer) -> None:
        """UnsupportedError where this device cannot select positions by an indexer's keys in such a cache."""

    def _of(self, name: str) -> Worker:
        """The worker of the device that has a tensor."""
        return self._split.worker(self._split.placement[name])

    # ------------------------------------------------------------------------------------------------------ operations

    def linear(self, linear: blocks.Linear, x: np.ndarray) -> np.ndarray:
        """As `BlockRunner.linear`, on the device of the matrix."""
        other = self._of(linear.weight)
        if other is not self:
            return self._run_on(other, lambda x: other.linear(linear, x), x)
        with self._timed("products"):
            self._split.ledger.read(self.device.name, self.weights[linear.weight].nbytes)
            return super().linear(linear, x)

    def grouped(self, linear: blocks.Linear, x: np.ndarray, groups: int) -> np.ndarray:
        """As `BlockRunner.grouped`, on the device of the matrix."""
        other = self._of(linear.weight)
        if other is not self:
            return self._run_on(other, lambda x: other.grouped(linear, x, groups), x)
        with self._timed("products"):
            self._split.ledger.read(self.device.name, self.weights[linear.weight].nbytes)
            return super().grouped(linear, x, groups)

    def norm(self, norm: blocks.Norm | None, x: np.ndarray) -> np.ndarray:
        """As `BlockRunner.norm`, on the device of the norm's weight."""
        other = self._of(norm.weight) if norm is not None and norm.weight else self
        if other is not self:
            return self._run_on(other, lambda x: other.norm(norm, x), x)
        with self._timed("norms"):
            return super().norm(norm, x)

    def attend(
        self,
        heads: Heads,
        layer: int,
        q: np.ndarray,
        spans: list[Span],
        attention: AttentionOptions | None = None,
    ) -> np.ndarray:
        """As `BlockRunner.attend`; counts the time."""
        with self._timed("attention"):
            return super().attend(heads, layer, q, spans, attention)

    def append_and_attend(
        self,
        part: blocks.Attention,
        layer: int,
        q: np.ndarray,
        k: np.ndarray | None,
        v: np.ndarray | None,
        spans: list[Span],
    ) -> np.ndarray:
        """As `BlockRunner.append_and_attend`, on the device of the layer's cache."""
        other = self._split.attends(layer, self)
        if other is self:
            return super().append_and_attend(part, layer, q, k, v, spans)
        if k is None or v is None:
            return self._run_on(other, lambda q: other.append_and_attend(part, layer, q, None, None, spans), q)
        return self._run_on(other, lambda q, k, v: other.append_and_attend(part, layer, q, k, v, spans), q, k, v)

    def attend_latents(
        self, part: blocks.LatentAttention, layer: int, q: np.ndarray, latents: np.ndarray, spans: list[Span]
    ) -> np.ndarray:
        """As `BlockRunner.attend_latents`, on the device of the layer's cache."""
        other = self._split.attends(layer, self)
        if other is self:
            return super().attend_latents(part, layer, q, latents, spans)
        return self._run_on(other, lambda q, c: other.attend_latents(part, layer, q, c, spans), q, latents)

    def attend_compressed(
        self, part: blocks.CompressedAttention, layer: int, given: compressed_attention.Projected, spans: list[Span]
    ) -> np.ndarray:
        """As `BlockRunner.attend_compressed`, on the device of the layer's cache."""
        other = self._split.attends(layer, self)
        if other is self:
            with self._timed("attention"):
                return super().attend_compressed(part, layer, given, spans)
        moved = given.moved(lambda x: other.fetch(x, self))
        return self.fetch(other.attend_compressed(part, layer, moved, spans), other)

    def select_positions(self, part: indexer.AnyIndexer, layer: int, index: indexer.Index, spans: list[Span]) -> None:
        """As `BlockRunner.select_positions`, on the device of the layer's cache."""
        other = self._split.attends(layer, self)
        if other is self:
            super().select_positions(part, layer, index, spans)
            self._split.selector = self
            return
        fetched = indexer.Index(*(None if x is None else other.fetch(x, self) for x in index))
        other.select_positions(part, layer, fetched, spans)

    def selected(self, layer: int, spans: list[Span]) -> list[Span]:
        """As `BlockRunner.selected`, on the device of the layer's cache."""
        other, source = self._split.attends(layer, self), self._split.selector
        assert source is not None
        if source is not other:
            masks = source.selections_on_host(spans)
            other.selections = [None if mask is None else other.receive_selection(mask) for mask in masks]
            moved = sum(mask.nbytes for mask in masks if mask is not None)
            self._split.ledger.moved(source.device.name, other.device.name, moved)
            self._split.selector = other
        return BlockRunner.selected(other, layer, spans)

    def selections_on_host(self, spans: Sequence[Span]) -> list[np.ndarray | None]:
        """What the last indexer has selected, which is here: `selection_to_host` of all spans."""
        return [self.selection_to_host(s, span) for s, span in zip(self.selections, spans, strict=True)]

    def selection_to_host(self, selection: Any, span: Span) -> np.ndarray | None:
        """bool[tokens, positions] of what is selected for a span; None: all positions."""
        mask: np.ndarray | None = selection
        return mask

    def receive_selection(self, mask: np.ndarray) -> Any:
        """What attention on this device takes of bool[tokens, positions]."""
        return mask

    def head_projections(self, part: blocks.LatentAttention) -> latent.HeadProjections:
        """As `BlockRunner.head_projections`, on the device of the matrices."""
        return _RoutedHeadProjections(part, self)

    def local_head_projections(self, part: blocks.LatentAttention) -> latent.HeadProjections:
        """The matrices between latents and heads, used on this device."""
        return latent.HeadProjections(part, self.weights, self.threads)

    def run_part(self, part: blocks.Part, layer: int, x: np.ndarray, spans: list[Span]) -> np.ndarray:
        """As `BlockRunner.run_part`, on the device of the layer; counts the time of recurrent layers."""
        other, spans = self._split.computes(layer, self), self._split.spans_of(part, layer, spans)
        if other is not self:
            return self._run_on(other, lambda x: other.run_part(part, layer, x, spans), x)
        if not isinstance(part, blocks.RECURRENT):
            return super().run_part(part, layer, x, spans)
        begin, counted = time.perf_counter(), self._counted()
        out = super().run_part(part, layer, x, spans)
        uncounted = time.perf_counter() - begin - (self._counted() - counted)
        self._split.ledger.spent(self.device.name, "recurrent", max(0.0, uncounted))
        return out

    def _counted(self) -> float:
        """Seconds that the ledger has counted so far, on all devices that this worker uses."""
        return self._split.ledger.total()

    def run_experts(self, part: blocks.Experts, y: np.ndarray, chosen: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """As `BlockRunner.run_experts`: those with matrices on the device of these, those that give y here."""
        if not part.identity:
            return self.run_stacked(part, y, chosen, weights)
        chosen, share = experts.without_identity(part, chosen, weights)
        out: np.ndarray = self.run_stacked(part, y, chosen, weights) + share * y
        return out

    def run_stacked(self, part: blocks.Experts, y: np.ndarray, chosen: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """`run_experts` of experts that have matrices, on the device of these."""
        other, *others = (self._of(linear.weight) for linear in part.matrices)
        if any(worker is not other for worker in others):
            return self._experts_apart(part, y, chosen, weights)
        if other is not self:
            return self._run_on(other, lambda y, w: other.run_stacked(part, y, chosen, w), y, weights)
        with self._timed("experts"):
            self._count_experts(part, chosen)
            if self.compiles and self._plans.unsupported_experts(part) is None:
                return self._plans.experts(part, y, chosen, weights)
            return BlockRunner.run_experts(self, part, y, chosen, weights)

    def prepared_experts(
        self, part: blocks.Experts, y: np.ndarray, chosen: np.ndarray, weights: np.ndarray, out: np.ndarray
    ) -> Callable[[], None]:
        """`run_experts` of one token as a call without arguments: it reads the arrays when it is called, and writes
        `out`, like y. None of the experts, which are here, are left out."""
        tensors = [self.weights[linear.weight] for linear in part.matrices]
        prepared: tuple[WorkerPlans, Callable[[], int]] | None = None

        def call() -> None:
            nonlocal prepared
            if not self.compiles or self._plans.unsupported_experts(part) is not None:
                out[:] = self.run_experts(part, y, chosen, weights)
                return
            plans = self._plans
            if prepared is None or prepared[0] is not plans:
                prepared = plans, plans.experts.prepared(part, y, chosen, weights, out)
            begin = time.perf_counter()
            used = prepared[1]()
            read = sum(used * tensor.nbytes // tensor.shape[0] for tensor in tensors)
            self._split.ledger.read(self.device.name, read)
            self._split.ledger.spent(self.device.name, "experts", time.perf_counter() - begin)

        return call

    def rouse(self) -> None:
        """Wake the threads that run compiled plans, which are to wait for the next one without sleeping."""
        if self.compiles:
            from quantkit.runtime.kernels.cpu.thread_team import team  # loads numba

            team(self.threads).rouse()

    def _experts_apart(
        self, part: blocks.Experts, y: np.ndarray, chosen: np.ndarray, weights: np.ndarray
    ) -> np.ndarray:
        """`run_stacked` where the three matrices are on different devices: each product is computed on its matrix's."""

        def matrix(linear: blocks.Linear, number: int) -> experts.Product:
            other = self._of(linear.weight)
            product = other.expert_product(linear, number)

            def run(x: np.ndarray) -> np.ndarray:
                with other._timed("experts"):
                    return product(x)

            return run if other is self else lambda x: self._run_on(other, run, x)

        observe = None if self._checking else self.observer
        self._count_experts(part, chosen)
        return experts.run(part, self.weights, y, chosen, weights, self.threads, observe, matrix=matrix)

    def expert_product(self, linear: blocks.Linear, number: int) -> experts.Product:
        """The product with one expert's matrix, on this device."""
        return experts.linear_of(self.weights, self.threads, linear, number)

    def _count_experts(self, part: blocks.Experts, chosen: np.ndarray) -> None:
        used = len(np.unique(chosen[chosen >= 0]))
        for linear in part.matrices:
            tensor = self.weights[linear.weight]
            name = self._of(linear.weight).device.name
            self._split.ledger.read(name, used * tensor.nbytes // max(1, tensor.shape[0]))


class _RoutedHeadProjections(latent.HeadProjections):
    """The matrices between latents and heads, each used on the device that has it."""

    def __init__(self, part: blocks.LatentAttention, worker: Worker):
        super().__init__(part, worker.weights, worker.threads)
        self._worker = worker
        linears = part.kv_b, part.k_b, part.v_b
        self.is_local = all(worker._of(linear.weight) is worker for linear in linears if linear is not None)

    def _worker_of(self, absorbed: bool, matrix: blocks.Linear | None) -> Worker:
        """The worker that has the matrix that `of` reads; if it reads both k_b and v_b, k_b's: v_b is moved there."""
        part, weights = self.part, self._worker.weights
        pair = part.k_b is not None and part.v_b is not None
        if part.kv_b is not None and not (absorbed and pair):
            return self._worker._of(part.kv_b.weight)
        assert matrix is not None
        assert part.v_b is not None
        worker = self._worker._of(matrix.weight)
        holder = self._worker._of(part.v_b.weight)
        if not absorbed and holder is not worker:
            self._worker._split.ledger.moved(holder.device.name, worker.device.name, weights[part.v_b.weight].nbytes)
        return worker

    def _run(self, other: Worker, task: Callable[[latent.HeadProjections, np.ndarray], Any], x: np.ndarray) -> Any:
        """Run `task` on another device, with that device's matrices."""
        x = other.fetch(x, self._worker)
        with other._timed("latents"):
            return task(other.local_head_projections(self.part), x)

    def queries(self, q: np.ndarray) -> np.ndarray:
        other = self._worker_of(True, self.part.k_b)
        return self._worker.fetch(self._run(other, lambda projections, q: projections.queries(q), q), other)

    def values(self, attended: np.ndarray) -> np.ndarray:
        other = self._worker_of(True, self.part.v_b)
        return self._worker.fetch(self._run(other, lambda projections, x: projections.values(x), attended), other)

    def expanded(self, latents: np.ndarray, first: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        other = self._worker_of(False, self.part.k_b)
        k, v = self._run(other, lambda projections, c: projections.expanded(c, first, stop), latents)
        return self._worker.fetch(k, other), self._worker.fetch(v, other)
