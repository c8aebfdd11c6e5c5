"""`Split`: run a model's blocks on several devices, layer by layer, or in runs of neighbours on one device.

    -sm layer   each device runs a range of layers; the hidden state is moved from one to the next
    -sm graph   all devices run each layer, on the shards of its tensors that placement/sharding.py gives them. The
                partial results are added up after every part of a block (runtime/parallel/all_reduce.py), so that all
                devices have the hidden state
    -ot         a product, norm or expert is computed on the device of its tensor; its input and output are moved

A `Worker` (runtime/parallel/worker.py) computes on one device. `Split.ledger` counts time and bytes moved.

In -sm graph, tensors that rules put elsewhere can be the three matrices of a layer's experts, together on one device;
layers below -ngl run on the CPU, whole.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from quantkit.archs.common import blocks
from quantkit.errors import UnsupportedError
from quantkit.placement import sharding, workspace
from quantkit.placement.devices import CPU, Device
from quantkit.placement.offload import Offload
from quantkit.placement.rules import Placement
from quantkit.placement.sharding import Sharding
from quantkit.runtime.blocks.block_runner import BlockRunner
from quantkit.runtime.blocks.spans import Span
from quantkit.runtime.kv.sharded_cache import ShardedCache, on_device
from quantkit.runtime.parallel import split_checks
from quantkit.runtime.parallel.all_reduce import AllReduce
from quantkit.runtime.parallel.cache_layout import CacheLayout
from quantkit.runtime.parallel.ledger import Ledger
from quantkit.runtime.parallel.rank import Rank
from quantkit.runtime.parallel.worker import Context, Worker

MARGIN = 1 << 30  # bytes of a GPU that larger batches leave free
NewWorker = Callable[[Device, Context, BlockRunner, int], Worker]
NewRank = Callable[[int, Device, Context, BlockRunner, int], Rank]


class Split:
    """A model's blocks over the devices of a placement.

    owner      the model: weights by name, how to compute
    head       its embedding, final norm and output matrix
    caches     the CacheLayout: which device has which part of a cache
    ledger     time and bytes moved
    reduce     of -sm graph: the all-reduce data type; None otherwise
    offload    minimum batch size for GPUs to compute with experts that stay on the CPU
    profile    whether to wait for GPUs after each kind of work, so that the ledger has its time

    The caller injects the kinds of workers: `new_worker` and `new_rank`, as in `workers.py`.
    """

    def __init__(
        self,
        owner: BlockRunner,
        parts: Sequence[blocks.Block],
        head: blocks.Head,
        cached: blocks.HParams,
        placement: Placement,
        *,
        reduce: str = "f32",
        experts_by: str = "number",
        profile: bool = False,
        offload: Offload | None = None,
        new_worker: NewWorker,
        new_rank: NewRank,
    ):
        self.profile, self.offload = profile, offload or Offload()
        self.placement, self.ledger = placement, Ledger()
        self._owner, self._parts, self.head, self._cached = owner, parts, head, cached
        used = {device.name: device for device in (CPU, *placement.devices.values(), *placement.of_layer.values())}
        split_checks.require_scaled_here(parts, placement)
        self.cuts: dict[str, Sharding] = {}
        self._workers = {name: new_worker(device, self, owner, owner.threads) for name, device in used.items()}
        self.ranks: list[Rank] = []
        self._all_reduce: AllReduce | None = None
        if placement.graph:
            split_checks.require_shardable(parts, placement)
            by = experts_by
            self.cuts = sharding.of_model(
                parts, head, owner.weights, placement.sharded, placement.shares, by, cached.n_layer
            )
            threads = max(1, owner.threads // len(placement.graph))
            self.ranks = [new_rank(i, device, self, owner, threads) for i, device in enumerate(placement.graph)]
            self._all_reduce = AllReduce([rank.torch_device for rank in self.ranks], reduce)
            self._all_reduce.run_on_all(self._enter)
        self.caches = CacheLayout(parts, cached, owner.mla, placement, self._workers, self.ranks)
        self._last_output: tuple[np.ndarray | None, Worker] = (None, self._workers[CPU.name])
        self._copies: list[np.ndarray] = []  # what left the last block that is shared, on each rank
        self._logits: np.ndarray | None = None  # of `_last_output`, where its replay has made them
        self.selector: Worker | None = None
        self.runs = self._new_runs()

    def _new_runs(self) -> list[tuple[Worker | None, list[blocks.Block]]]:
        """All blocks in order, as runs of neighbours: (the worker that can run them as one, or None; the blocks)."""

        def who(block: blocks.Block) -> Worker | None:
            if block.layer in self.placement.shares:
                return None
            worker = self.worker(self.placement.of_activations(block.layer))
            return worker if worker.can_capture(block) else None

        found: list[tuple[Worker | None, list[blocks.Block]]] = []
        for group in _selecting_together(self._parts):
            holders = {who(block) for block in group}
            worker = holders.pop() if len(holders) == 1 else None
            if found and found[-1][0] is worker:
                found[-1][1].extend(group)
            else:
                found.append((worker, list(group)))
        return found

    def _enter(self, number: int) -> None:
        """Bind a rank's thread to all devices: it uses others too, where experts are elsewhere."""
        for worker in (*self._workers.values(), self.ranks[number]):
            worker.bind_thread()

    @property
    def reduce(self) -> str | None:
        """The data type of the all-reduce of `-sm graph`; None otherwise."""
        return self._all_reduce.kind if self._all_reduce else None

    def describe(self) -> dict[str, Any]:
        """What the figures of a benchmark depend on: split mode, devices, GPUs, offload, all-reduce."""
        placement = self.placement
        counts: dict[str, int] = {}
        for name, device in placement.devices.items():
            names = [d.name for d in placement.graph] if name in placement.sharded else [device.name]
            for each in names:
                counts[each] = counts.get(each, 0) + 1
        result: dict[str, Any] = {"split_mode": placement.mode, "devices": counts}
        workers = (*self._workers.values(), *self.ranks)
        if gpus := {each.device.name: each.hardware for each in workers if each.hardware}:
            result |= {"gpus": gpus, "offload_threshold": self.offload.threshold}
            result |= {"not_offloaded": sorted(self.offload.forbidden)} if self.offload.forbidden else {}
        if placement.graph:
            result |= {"reduce": self.reduce, "shares": [round(s, 4) for s in next(iter(placement.shares.values()))]}
        return result

    def worker(self, device: Device) -> Worker:
        """The worker of a device."""
        return self._workers[device.name]

    def attends(self, layer: int, worker: Worker) -> Worker:
        """The worker that has the keys and values of a layer that `worker` runs."""
        return worker if self.ranks else self.worker(self.placement.of_cache(layer))

    def computes(self, layer: int, worker: Worker) -> Worker:
        """The worker that computes the parts of a layer, in a block that `worker` runs."""
        return worker if self.ranks else self.worker(self.placement.of_activations(self.caches.layer_of(layer)))

    def spans_of(self, part: blocks.Part, layer: int, spans: list[Span]) -> list[Span]:
        """The spans with the caches that a part of a layer uses, of the spans that another device has."""
        if self.ranks:
            return spans
        device = self.caches.device_of_part(part, layer).name
        return [span._replace(cache=on_device(span.cache, device)) for span in spans]

    def drop_cached(self, names: Iterable[str]) -> None:
        """Drop what is cached of these tensors, after the owner replaced them."""
        names = list(names)
        for worker in self._workers.values():
            worker.drop_cached(names)
        for rank in self.ranks:
            rank.reload(self._owner, names)

    def has_room(self, tokens: int) -> bool:
        """Whether GPUs that run whole layers have the memory for so many tokens of a prompt at a time.

        It is what `workspace.device_bytes` estimates, and MARGIN, once all their weights are there.
        """
        gpus = [worker for worker in self._workers.values() if worker.hardware]
        if self.ranks or not gpus:
            return False
        used = max((part.used for block in self._parts for part in block.parts if isinstance(part, blocks.Experts)),
                   default=0)  # fmt: skip
        shapes = {name: tensor.shape for name, tensor in self._owner.weights.items()}
        needed = workspace.device_bytes(shapes, used, tokens) + MARGIN
        return all(worker.spare_bytes() >= needed for worker in gpus)

    # ---------------------------------------------------------------------------------------------------------- a pass

    def embedded(self, x: np.ndarray) -> np.ndarray:
        """Register the output of the embedding, whose placement says on which device it counts as being."""
        worker = self.worker(self.placement[self.head.embedding])
        self._last_output = x, worker if worker.device.runs_here else self._workers[CPU.name]  # rows are gathered here
        self.ledger.ran(len(x))
        return x

    def run(self, tokens: np.ndarray, spans: list[Span]) -> np.ndarray:
        """float32[tokens, n_embd] that enters the last norm, on its device, of int[tokens]. `is_finite` checks it.

        An element that is not finite on the way stays so until the end: each block adds to what enters it.
        """
        first = self._parts[0].layer
        shared = first in self.placement.shares
        worker = self._workers[CPU.name] if shared else self.worker(self.placement.of_activations(first))
        x = worker.spread(self.head, worker.embed(self.head, tokens))
        if isinstance(x, np.ndarray):
            self.embedded(x)
        else:
            self._last_output = x, worker
            self.ledger.ran(len(x))
        for replaying, run in self.runs:
            y = self._replay(replaying, run, x, spans)
            if y is None:
                for block in run:
                    x = self.run_block(block, x, spans)
            else:
                x = y
        return x if self.head.streams is None else self._collapse(x)

    def _collapse(self, x: np.ndarray) -> np.ndarray:
        """What enters the last norm, of the streams that leave the last block, on their device."""
        worker = self._last_output[1]
        out = worker.collapse(self.head, x)
        self._last_output = out, worker
        return out

    def run_block(self, block: blocks.Block, x: np.ndarray, spans: list[Span]) -> np.ndarray:
        """float32[tokens, n_embd] that leaves a block; the spans' caches are those of `new_cache`."""
        self._logits = None
        for worker in self._workers.values():
            worker.sync(self._owner)
        if block.layer in self.placement.shares:
            return self._run_sharded(block, x, spans)
        worker = self.worker(self.placement.of_activations(block.layer))
        begin, counted = time.perf_counter(), self.ledger.total()
        x = worker.fetch(x, self._source(x))
        out = worker.run_block(block, x, _of_device(spans, self.caches.device_of(block)))
        other = time.perf_counter() - begin - (self.ledger.total() - counted)
        self.ledger.spent(worker.device.name, "other", max(0.0, other))
        self._last_output = out, worker
        return out

    def last_selections(self, spans: list[Span]) -> list[np.ndarray | None]:
        """As `Model.last_selections`, from the device that has them."""
        return [None] * len(spans) if self.selector is None else self.selector.selections_on_host(spans)

    def set_selections(self, selections: list[np.ndarray | None]) -> None:
        """As `Model.set_selections`; the first device that needs them gets them from the host."""
        self.selector = self._workers[CPU.name]
        self.selector.selections = selections

    def _replay(
        self, worker: Worker | None, run: Sequence[blocks.Block], x: np.ndarray, spans: list[Span]
    ) -> np.ndarray | None:
        """The output of one of `runs` as a whole; None where its blocks have to run one by one."""
        if worker is None or self.profile:
            return None
        worker.sync(self._owner)
        own = _of_device(spans, worker.device)
        if not worker.can_replay(run, len(x), own):
            return None
        head = self.head if run is self.runs[-1][1] and self._projects(worker) else None
        out, self._logits = worker.replay(run, worker.fetch(x, self._source(x)), own, head)
        self._last_output = out, worker
        if self._logits is not None:
            self.ledger.moved(worker.device.name, CPU.name, self._logits.nbytes)
        return out

    def _projects(self, worker: Worker) -> bool:
        """Whether a device computes the logits of the last block's output alone."""
        names = self.head.output.weight, None if self.head.norm is None else self.head.norm.weight
        last = self.placement.of_activations(self._cached.n_layer)
        here = all(name is None or self.placement[name] == worker.device for name in names)
        return here and not self.cuts and self.head.streams is None and last == worker.device

    def host(self, x: np.ndarray) -> np.ndarray:
        """The output of a block in the host's memory; not copied if it is there already."""
        return x if isinstance(x, np.ndarray) else self._workers[CPU.name].fetch(x, self._last_output[1])

    def is_finite(self, x: np.ndarray) -> bool:
        """Whether the output of the last block is finite, checked on its device; logits came only with one that is."""
        return self._logits is not None or self._last_output[1].is_finite(x)

    def project(self, x: np.ndarray) -> np.ndarray:
        """Logits float32[k, vocab], on the host, of the output of the last block."""
        if self._logits is not None and x is self._last_output[0]:
            return self._logits
        for each in (*self._workers.values(), *self.ranks):
            each.sync(self._owner)
        host, head, last = self._workers[CPU.name], self.head, self._cached.n_layer
        source = self._source(x)
        cut = self.cuts.get(head.output.weight)
        if cut is not None:
            assert self._all_reduce is not None

            def task(rank: int) -> np.ndarray:
                rank_worker = self.ranks[rank]
                if not cut.width(rank):
                    return np.zeros((len(x), 0), np.float32)
                return host.fetch(
                    rank_worker.linear(head.output, rank_worker.norm(head.norm, rank_worker.fetch(x, source))),
                    rank_worker,
                )

            return np.concatenate(self._all_reduce.run_on_all(task), axis=1)
        holder = self.worker(self.placement[head.output.weight])
        if len(x) == 1 and holder.compiles_head:
            return host.fetch(holder.project(holder.fetch(x, source)), holder)
        worker = self.ranks[0] if last in self.placement.shares else self.worker(self.placement.of_activations(last))
        x = worker.fetch(x, source)
        return host.fetch(worker.linear(head.output, worker.norm(head.norm, x)), worker)

    def _source(self, x: np.ndarray) -> Worker:
        """The worker that has an array: of the last block for its output and rows of it, the host's for all others."""
        output, worker = self._last_output
        if not isinstance(x, np.ndarray):  # a tensor of a GPU
            return worker
        base = x if x.base is None else x.base
        return worker if output is not None and (x is output or base is output) else self._workers[CPU.name]

    def _run_sharded(self, block: blocks.Block, x: np.ndarray, spans: list[Span]) -> np.ndarray:
        """Run a block on all ranks at once; returns the first rank's output."""
        if self._owner.observer is not None and not self._owner._checking:
            raise UnsupportedError(
                f"{self._owner.path}: what enters whole matrices is observed (imatrix), and -sm graph cuts them; take "
                "-sm layer"
            )
        all_reduce = self._all_reduce
        assert all_reduce is not None
        for rank in self.ranks:
            rank.sync(self._owner)
        inputs = self._copies
        if not inputs or x is not inputs[0]:
            source = self._source(x)
            inputs = [rank.fetch(x, source) for rank in self.ranks]

        def task(number: int) -> np.ndarray:
            rank = self.ranks[number]
            result: np.ndarray = rank.run_sharded(block, inputs[number], _of_device(spans, rank.device), all_reduce)
            return result

        self._copies = all_reduce.run_on_all(task)
        self._last_output = self._copies[0], self.ranks[0]
        return self._copies[0]


def _selecting_together(parts: Iterable[blocks.Block]) -> Iterator[list[blocks.Block]]:
    """Neighbouring blocks that have to run in one way: one with an indexer and those that attend to what it selects.

    What a run selects as a whole is not kept for other blocks.
    """
    group: list[blocks.Block] = []
    for block in parts:
        latents = [part for part in block.parts if isinstance(part, blocks.LatentAttention)]
        if group and not any(part.sparse and part.indexer is None for part in latents):
            yield group
            group = []
        group.append(block)
    yield group


def _of_device(spans: Iterable[Span], device: Device) -> list[Span]:
    """The spans with the device's part of their caches."""
    device_spans = []
    for span in spans:
        assert isinstance(span.cache, ShardedCache)
        device_spans.append(Span(span.start, span.stop, span.cache.parts[device.name], tokens=span.tokens))
    return device_spans
