"""CUDA graphs: the launches of one token through neighbouring layers, captured once and replayed.

Decoding takes about ten launches a layer, and a launch takes the host longer than the GPU. A `CapturedStep` replays
all of them at once, but for experts on the CPU, which compute between two graphs. What differs between tokens is read
from tensors of the GPU: the activations that enter, and the position. Everything else is as it was at capture. So a
layer can be captured only if nothing else of it is computed on the CPU or depends on a number that the host computes:
see `can_capture`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from quantkit.archs.common import blocks
from quantkit.runtime.blocks.spans import Span
from quantkit.runtime.cuda import gpu_decode
from quantkit.runtime.cuda.gpu_context import GpuContext
from quantkit.runtime.cuda.gpu_decode import Decoder, HostExperts
from quantkit.runtime.cuda.gpu_experts import routes_on_gpu
from quantkit.runtime.kv.cache import Cache

if TYPE_CHECKING:
    import numpy as np
    import torch

    from quantkit.runtime.kernels.cuda.device import Gpu

Step = Callable[[], None]


def can_capture(part: blocks.Part, exact: bool) -> bool:
    """Whether a block whose tensors and cache are on the GPU can be captured.

    Not captured are: recurrent layers, whose two states swap; soft-capped scores and chunks of positions, which torch
    computes; blocks of positions, whose keys are made when they are whole; and experts whose tokens are grouped on the
    host, which float32 products and routing on the CPU need.
    """
    if isinstance(part, blocks.Attention):
        return part.softcap is None and part.chunk is None and not isinstance(part.indexer, blocks.PooledIndexer)
    if isinstance(part, blocks.LatentAttention):
        return not exact
    if isinstance(part, blocks.Experts):
        return not exact and routes_on_gpu(part)
    return isinstance(part, blocks.FeedForward)


class CapturedEmbedding:
    """The embedding of one token: its packed row goes to memory of the host, from where a graph decodes it on the GPU.

    decode   gives float32[1, n_embd] of such a row, uint8 on the GPU
    """

    def __init__(self, gpu: Gpu, row_bytes: int, decode: Callable[[torch.Tensor], torch.Tensor]):
        self._gpu, self._sent = gpu, gpu.event()
        self._row, self._there = gpu.pinned(row_bytes), gpu.zeros((row_bytes,), "uint8")  # as long as the graph
        self._row.zero_()

        def step() -> None:
            self._there.copy_(self._row, non_blocking=True)
            self._out = decode(self._there)

        self._graph = gpu.capture(step)

    def replay(self, row: np.ndarray) -> torch.Tensor:
        """float32[1, n_embd] of a row uint8[row bytes]; valid until the next replay."""
        self._sent.synchronize()  # the last row has been read
        self._row.numpy()[:] = row
        self._graph.replay()
        self._gpu.record(self._sent)
        return self._out


class CapturedStep:
    """One token through blocks whose tensors and cache are on one GPU, and through the head where one is given.

    Where routed experts are on the CPU there is a graph for what comes before them, one for what the GPU computes
    meanwhile, and one for what follows. Meanwhile it computes the shared experts; also the rest of the block, where the
    experts are added at its end. The cache must outlive this object.
    """

    def __init__(
        self,
        worker: GpuContext,
        layers: Sequence[blocks.Block],
        x: torch.Tensor,
        cache: Cache,
        head: blocks.Head | None = None,
    ):
        gpu = self._gpu = worker.gpu
        self._worker = worker
        self._x, self._sent = x.clone(), gpu.event()
        self._position = gpu.torch.full((1,), cache.length, dtype=gpu.torch.int32, device=gpu.torch_device)
        self._pool = gpu.graph_pool()
        self._logits: torch.Tensor | None = None  # in the host's memory, as is whether what they are made of is finite
        if head is not None:
            vocab = worker.weights[head.output.weight].shape[0]
            self._logits = gpu.pinned(4 * vocab).view(gpu.torch.float32).view(1, vocab)
            self._finite = gpu.pinned(1).view(gpu.torch.bool)
        self._stages: list[Callable[[], None]] = []
        with worker.reading_position(self._position, cache.n_ctx):
            if worker.exact:
                self._capture(lambda: self._run_exact(layers, Span(0, 1, cache), head))
            else:
                self._capture_fast(layers, Decoder(worker, self._x, Span(0, 1, cache)), head)
        # References: a longer context replaces the worker's tables, and stacks of matrices the single ones.
        self._kept = worker.rope_tables(), worker.held_matrices()

    def replay(self, x: torch.Tensor, position: int) -> tuple[Any, np.ndarray | None]:
        """float32[1, n_embd] that leaves the blocks, valid until the next replay; and float32[1, vocab] of a head.

        No logits where what leaves the blocks is not finite.
        """
        self._x.copy_(x)
        self._position.fill_(position)
        for stage in self._stages:
            stage()
        if self._logits is None:
            return self._out, None
        self._gpu.synchronize()
        return self._out, self._logits.numpy().copy() if self._finite else None

    def _capture(self, step: Callable[[], Any]) -> None:
        """A stage that replays what `step` launches."""
        self._add(self._gpu.capture(step, self._pool).replay)

    def _add(self, stage: Callable[[], None]) -> None:
        """A stage, which runs at once: the capture of the next one needs its results."""
        self._stages.append(stage)
        stage()

    def _run_exact(self, layers: Sequence[blocks.Block], span: Span, head: blocks.Head | None) -> None:
        worker, self._out = self._worker, self._x
        for block in layers:
            self._out = worker.run_block(block, self._out, [span])
        if head is not None:
            self._keep_logits(worker.linear(head.output, worker.norm(head.norm, self._out)))

    def _keep_logits(self, logits: Any) -> None:
        """Copy them to the host."""
        assert self._logits is not None
        self._logits.copy_(logits, non_blocking=True)
        self._finite.copy_(self._out.isfinite().all(), non_blocking=True)

    def _capture_fast(self, layers: Sequence[blocks.Block], decoder: Decoder, head: blocks.Head | None) -> None:
        """All stages, of fused kernels."""
        pending: list[Step] = []
        for block in layers:
            if gpu_decode.is_taken_apart(block):
                pending = self._capture_parts(block, decoder, pending)
            else:
                pending.append(functools.partial(decoder.run_block, block))

        def finish() -> None:
            logits = None if head is None else decoder.logits(head)
            self._out = decoder.sum()
            if head is not None:
                self._keep_logits(logits)

        self._capture_each(decoder, [*pending, finish])

    def _capture_parts(self, block: blocks.Block, decoder: Decoder, pending: list[Step]) -> list[Step]:
        """The stages of a block up to its last experts on the CPU, after `pending`; the steps that are left."""
        deferred: list[HostExperts] = []
        for layer, part in block.numbered_parts:
            if not (isinstance(part, blocks.Experts) and self._worker.experts_on_host(part)):
                pending.append(functools.partial(decoder.run_part, layer, part))
                continue
            experts = HostExperts(self._worker, part, self._x.shape[1])
            self._add(self._worker.host.rouse)  # while the GPU computes
            self._capture_each(decoder, [*pending, functools.partial(decoder.send, experts)])
            self._add(functools.partial(self._gpu.record, self._sent))
            pending = [] if part.shared is None else [functools.partial(decoder.run_shared, experts)]
            if part.deferred:
                deferred.append(experts)
            else:
                pending = self._capture_beside(experts, decoder, pending)
        for experts in deferred:
            pending = self._capture_beside(experts, decoder, pending)
        return [*pending, decoder.end_block]

    def _capture_beside(self, experts: HostExperts, decoder: Decoder, pending: list[Step]) -> list[Step]:
        """The stages of experts on the CPU, to which `send` went, and of what the GPU computes meanwhile."""
        if pending:
            self._capture_each(decoder, pending)
        self._add(functools.partial(self._compute, experts))
        return [functools.partial(decoder.receive, experts)]

    def _compute(self, experts: HostExperts) -> None:
        """The CPU's part, as soon as it has what the GPU sends."""
        self._sent.synchronize()
        experts.run()

    def _capture_each(self, decoder: Decoder, steps: Sequence[Step]) -> None:
        """A stage of several steps, each of which starts from what the one before has left in the decoder.

        A capture runs it several times. Each time its first layers attend to what an earlier stage has selected, not to
        what the last layers of this one have.
        """
        worker = self._worker
        before = decoder.x, decoder.added, decoder.deferred, worker.selections

        def stage() -> None:
            decoder.x, decoder.added, decoder.deferred, worker.selections = before
            for step in steps:
                step()

        self._capture(stage)
