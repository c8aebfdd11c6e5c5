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
from quantkit.runtime.cuda.gpu_context import GpuContext
from quantkit.runtime.cuda.gpu_experts import routes_on_gpu
from quantkit.runtime.kv.cache import Cache

if TYPE_CHECKING:
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


class CapturedStep:
    """One token through blocks whose tensors and cache are on one GPU. The cache must outlive this object."""

    def __init__(self, worker: GpuContext, layers: Sequence[blocks.Block], x: torch.Tensor, cache: Cache):
        gpu = worker.gpu
        self._x, self._position = (
            x.clone(),
            gpu.torch.full((1,), cache.length, dtype=gpu.torch.int32, device=gpu.torch_device),
        )
        spans = [Span(0, 1, cache)]

        def step() -> None:
            self._out = self._x
            for block in layers:
                self._out = worker.run_block(block, self._out, spans)

        with worker.reading_position(self._position, cache.n_ctx):
            self._graph = gpu.capture(step)
        self._rope_tables = worker.rope_tables()  # a reference: a longer context replaces the worker's tables

    def replay(self, x: torch.Tensor, position: int) -> Any:
        """float32[1, n_embd] that leaves the blocks, valid until the next replay."""
        self._x.copy_(x)
        self._position.fill_(position)
        self._graph.replay()
        return self._out
