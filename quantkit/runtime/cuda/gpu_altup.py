"""Residual streams that AltUp mixes (archs.blocks.AltUp, AltUpHead) on a GPU: `runtime/blocks/altup.py` with torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quantkit.archs.common import blocks
from quantkit.runtime.blocks.altup import HALF_ROOT
from quantkit.runtime.blocks.spans import Span
from quantkit.runtime.cuda.gpu_context import GpuContext

if TYPE_CHECKING:
    import torch


def run(worker: GpuContext, block: blocks.Block, x: torch.Tensor, spans: list[Span]) -> torch.Tensor:
    """The streams float32[tokens, n * n_embd] that leave a block."""
    part, layer = block.altup, block.layer
    assert part is not None
    laurel, attention, feed_forward, layer_input = block.parts
    predicted = predict(worker, part, x.view(len(x), part.streams, -1))
    first = predicted[:, 0].contiguous()
    z = first + worker.run_part(attention, layer, first, spans)
    z = (z + worker.run_part(laurel, layer, first, spans)) * HALF_ROOT
    z = z + worker.run_part(feed_forward, layer, z, spans)
    streams = correct(worker, part, predicted, z)
    entering = streams[:, 0] * worker.vector(part.correct_scale)
    streams[:, 1:] += worker.run_part(layer_input, layer, entering, spans)[:, None]
    return streams.view(x.shape)


def predict(worker: GpuContext, part: blocks.AltUp, streams: torch.Tensor) -> torch.Tensor:
    """p float32[tokens, n, n_embd] of streams of this shape."""
    n = part.streams
    mixing = _routed(worker, part, streams[:, 0]) @ worker.vector(part.predict).view(n * n, n).T
    predicted: torch.Tensor = streams + mixing.view(-1, n, n) @ streams
    return predicted


def correct(worker: GpuContext, part: blocks.AltUp, predicted: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """Streams float32[tokens, n, n_embd] of p, of this shape, and z float32[tokens, n_embd]."""
    shares = 1 + _routed(worker, part, z) @ worker.vector(part.correct).view(part.streams, part.streams).T
    corrected: torch.Tensor = predicted + shares[:, :, None] * (z - predicted[:, 0])[:, None]
    return corrected


def _routed(worker: GpuContext, part: blocks.AltUp, x: torch.Tensor) -> Any:
    """m(x) float32[tokens, n]."""
    return worker.linear(part.router, worker.norm(part.router_norm, x)).tanh()


def spread(worker: GpuContext, head: blocks.AltUpHead, x: torch.Tensor) -> torch.Tensor:
    """The streams float32[tokens, n * n_embd] that enter the first block, of the embedding float32[tokens, n_embd]."""
    size = _root_mean_square(x)
    others = [_of_size(worker.linear(linear, x), size, head.least) for linear in head.project]
    streams: torch.Tensor = worker.gpu.torch.cat([x, *others], dim=1)
    return streams


def merge(worker: GpuContext, head: blocks.AltUpHead, x: torch.Tensor) -> torch.Tensor:
    """float32[tokens, n_embd] that enters the last norm, of streams float32[tokens, n * n_embd]."""
    first, *others = x.chunk(head.streams, dim=1)
    size, total = _root_mean_square(first), first.clone()
    for linear, stream in zip(head.merge, others):
        total += _of_size(worker.linear(linear, stream), size, head.least)
    return total / head.streams


def _root_mean_square(x: torch.Tensor) -> torch.Tensor:
    """float32[tokens, 1]."""
    return x.square().mean(1, keepdim=True).sqrt()


def _of_size(x: Any, size: torch.Tensor, least: float) -> torch.Tensor:
    """x float32[tokens, n] with the root mean square `size` float32[tokens, 1]."""
    found: torch.Tensor = x * (size / _root_mean_square(x).clamp(min=least))
    return found
