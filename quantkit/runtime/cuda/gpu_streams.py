"""Residual streams (archs.blocks.Connection) on a GPU: `runtime/blocks/hyper_connections.py` with torch.

A kernel makes the numbers that the streams of a HyperConnection are read, written and mixed with.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from quantkit.archs.common import blocks
from quantkit.runtime.cuda.gpu_context import GpuContext

if TYPE_CHECKING:
    import torch


def read(worker: GpuContext, connection: blocks.Connection, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """float32[tokens, n_embd] that a part gets of streams x, and what `write` needs.

    That is post [tokens, n], and of a HyperConnection the transpose of C [tokens, n, n].
    """
    from quantkit.runtime.kernels.cuda import streams

    if isinstance(connection, blocks.StreamMixer):
        mixed, shares = mix(worker, connection, x)
        return mixed, (shares,)
    assert isinstance(connection, blocks.HyperConnection)
    gpu, n, tokens = worker.gpu, connection.streams, len(x)
    logits = worker.linear(connection.fn, worker.norm(connection.norm, x)).contiguous()
    pre, post, mixing = gpu.empty(tokens, 1, n), gpu.empty(tokens, n), gpu.empty(tokens, n, n)
    gpu.launch_each(
        streams.hyper_weights(n), tokens, streams.THREADS, logits, worker.vector(connection.scale),
        worker.vector(connection.base), np.float32(connection.eps), connection.iterations, tokens, pre, post, mixing,
    )  # fmt: skip
    return (pre @ x.view(tokens, n, -1))[:, 0], (post, mixing)


def write(worker: GpuContext, x: torch.Tensor, made: torch.Tensor, shares: Any) -> torch.Tensor:
    """The streams after a part has made float32[tokens, n_embd] of what it read, like x."""
    post, *mixing = shares
    streams, given = x.view(len(x), post.shape[1], -1), post[:, :, None] * made[:, None]
    written: torch.Tensor = worker.gpu.torch.baddbmm(given, mixing[0], streams) if mixing else streams + given
    return written.view(x.shape)


def mix(worker: GpuContext, part: blocks.StreamMixer, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What a part reads, float32[tokens, n_embd], and what streams get of its output, float32[tokens, n]."""
    normed = norm_streams(worker, part.norm, x, part.streams)
    low = worker.linear(part.down, normed)
    gates = worker.sigmoid(worker.linear(part.up, low * worker.sigmoid(low)))
    mixed = (gates * normed).view(len(x), part.streams, -1).mean(1)
    return mixed, x[:, :0] if part.inject is None else 2 * worker.sigmoid(worker.linear(part.inject, normed))


def norm_streams(worker: GpuContext, norm: blocks.Norm, x: torch.Tensor, streams: int) -> torch.Tensor:
    """The RMS norm of each stream of float32[tokens, streams * n_embd], with a weight float32[streams * n_embd]."""
    normed: torch.Tensor = worker.norm(replace(norm, weight=""), x.reshape(len(x) * streams, -1)).view(x.shape)
    return normed * worker.vector(norm.weight)


def collapse(worker: GpuContext, head: blocks.StreamHead | blocks.StreamMixer, x: torch.Tensor) -> torch.Tensor:
    """float32[tokens, n_embd] that enters the last norm, or the output matrix, of streams x."""
    if isinstance(head, blocks.StreamMixer):
        return mix(worker, head, x)[0]
    logits = worker.linear(head.fn, worker.norm(head.norm, x))
    shares = worker.sigmoid(logits * worker.vector(head.scale) + worker.vector(head.base)) + head.eps
    collapsed: torch.Tensor = shares[:, None] @ x.view(len(x), head.streams, -1)
    return collapsed[:, 0]
