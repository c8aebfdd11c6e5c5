"""The launches of one token's way through layers of a GPU, recorded once and replayed: a CUDA graph.

A step of decoding is some fifteen launches a layer, each of which takes the host longer than the GPU. A `Recorded` has
them as one. What differs between tokens is read from its tensors: the activations that enter and the position. What is
not memory of the GPU is what it was when the step was recorded, so that layers go in only if nothing of them is
computed on the CPU or depends on a number of the host: see `records`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quantkit.archs.common import blocks
from quantkit.runtime.blocks.layers import Span
from quantkit.runtime.cuda.gpu_context import GpuContext
from quantkit.runtime.kernels.cuda import routing


def records(part: blocks.Part, exact: bool) -> bool:
    """Whether a part, whose tensors and cache are on the GPU, can be recorded.

    Not so states of recurrent layers, which change places; factors of queries that the host makes of positions; and
    groups of tokens by expert, whose sizes the host asks for: products in float32, and choices that the CPU makes.
    """
    if isinstance(part, blocks.Attention):
        return part.temperature is None
    if isinstance(part, blocks.LatentAttention):
        return not exact
    if isinstance(part, blocks.Experts):
        return not exact and part.count <= routing.MOST and part.groups <= routing.WARP
    return isinstance(part, blocks.FeedForward)


class Recorded:
    """One token through blocks whose tensors and cache a worker has. The cache must outlive this."""

    def __init__(self, worker: GpuContext, layers: Sequence[blocks.Block], x: Any, cache: Any):
        gpu = worker.gpu
        self._x, self._position = x.clone(), gpu.torch.full((1,), cache.length, dtype=gpu.torch.int32, device=gpu.place)
        spans = [Span(0, 1, cache)]

        def step() -> None:
            self._out = self._x
            for block in layers:
                self._out = worker.run_block(block, self._out, spans)

        with worker.at(self._position, cache.n_ctx):
            self._graph = gpu.capture(step)
        self._kept = worker.tables()  # of rope, which a longer context would replace

    def replay(self, x: Any, position: int) -> Any:
        """float32[1, n_embd] that leaves the blocks, valid until the next replay."""
        self._x.copy_(x)
        self._position.fill_(position)
        self._graph.replay()
        return self._out
