"""CUDA graphs: the launches of one token through neighbouring layers, captured once and replayed.

Decoding takes about fifteen launches a layer, and a launch takes the host longer than the GPU. A `CapturedStep` replays
all of them at once. What differs between tokens is read from tensors of the GPU: the activations that enter, and the
position. Everything else is as it was at capture. So a layer can be captured only if none of it is computed on the CPU
or depends on a number that the host computes: see `can_capture`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from quantkit.archs.common import blocks
from quantkit.runtime.blocks.spans import Span
from quantkit.runtime.cuda import gpu_decode
from quantkit.runtime.cuda.gpu_context import GpuContext
from quantkit.runtime.cuda.gpu_experts import routes_on_gpu
from quantkit.runtime.kv.cache import Cache

if TYPE_CHECKING:
    import numpy as np
    import torch


def can_capture(part: blocks.Part, exact: bool) -> bool:
    """Whether a block whose tensors and cache are on the GPU can be captured.

    Not captured are: recurrent layers, whose two states swap; queries that are scaled by factors computed on the host;
    soft-capped scores and chunks of positions, which torch computes; and experts whose tokens are grouped on the host,
    which float32 products and routing on the CPU need.
    """
    if isinstance(part, blocks.Attention):
        return part.temperature is None and part.softcap is None and part.chunk is None
    if isinstance(part, blocks.LatentAttention):
        return not exact and part.temperature is None
    if isinstance(part, blocks.Experts):
        return not exact and routes_on_gpu(part)
    return isinstance(part, blocks.FeedForward)


def _fast(
    worker: GpuContext, layers: Sequence[blocks.Block], x: torch.Tensor, span: Span, head: blocks.Head | None
) -> tuple[torch.Tensor, Any]:
    """What leaves the blocks, and the logits of a head, by fused kernels."""
    decoder = gpu_decode.Decoder(worker, x, span)
    for block in layers:
        decoder.run(block)
    logits = None if head is None else decoder.logits(head)
    return decoder.sum(), logits


def _exact(
    worker: GpuContext, layers: Sequence[blocks.Block], x: torch.Tensor, span: Span, head: blocks.Head | None
) -> tuple[torch.Tensor, Any]:
    """As `_fast`, by the operations of exact numerics."""
    for block in layers:
        x = worker.run_block(block, x, [span])
    return x, None if head is None else worker.linear(head.output, worker.norm(head.norm, x))


class CapturedStep:
    """One token through blocks whose tensors and cache are on one GPU, and through the head where one is given.

    The cache must outlive this object.
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
        self._x = x.clone()
        self._position = gpu.torch.full((1,), cache.length, dtype=gpu.torch.int32, device=gpu.torch_device)
        self._logits: torch.Tensor | None = None  # in the host's memory
        if head is not None:
            vocab = worker.weights[head.output.weight].shape[0]
            self._logits = gpu.pinned(4 * vocab).view(gpu.torch.float32).view(1, vocab)
        run = _exact if worker.exact else _fast

        def step() -> None:
            self._out, logits = run(worker, layers, self._x, Span(0, 1, cache), head)
            if self._logits is not None:
                self._logits.copy_(logits, non_blocking=True)

        with worker.reading_position(self._position, cache.n_ctx):
            self._graph = gpu.capture(step)
        self._rope_tables = worker.rope_tables()  # a reference: a longer context replaces the worker's tables

    def replay(self, x: torch.Tensor, position: int) -> tuple[Any, np.ndarray | None]:
        """float32[1, n_embd] that leaves the blocks, valid until the next replay; and float32[1, vocab] of a head."""
        self._x.copy_(x)
        self._position.fill_(position)
        self._graph.replay()
        if self._logits is None:
            return self._out, None
        self._gpu.synchronize()
        return self._out, self._logits.numpy().copy()
