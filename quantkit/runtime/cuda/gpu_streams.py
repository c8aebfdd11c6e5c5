"""Residual streams (archs.blocks.HyperConnection, StreamHead) on a GPU: `blocks/hyper_connections.py` with torch.

A kernel makes the numbers that streams are read, written and mixed with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from quantkit.archs.common import blocks
from quantkit.errors import UnsupportedError
from quantkit.runtime.cuda.gpu_context import GpuContext

if TYPE_CHECKING:
    import torch


def read(worker: GpuContext, connection: blocks.Connection, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """float32[tokens, n_embd] that a part gets of streams x, and what `write` needs: post [tokens, n], the transpose of
    C [tokens, n, n]. UnsupportedError for other connections than a HyperConnection."""
    from quantkit.runtime.kernels.cuda import streams

    if not isinstance(connection, blocks.HyperConnection):
        raise UnsupportedError(
            f"{worker.device.name}: streams that are mixed by gates of low rank "
            f"({connection.matrices[0].weight}) run on the CPU in this version"
        )
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
    post, mixing = shares
    streams = x.view(len(x), post.shape[1], -1)
    written: torch.Tensor = worker.gpu.torch.baddbmm(post[:, :, None] * made[:, None], mixing, streams)
    return written.view(x.shape)


def collapse(worker: GpuContext, head: blocks.StreamHead, x: torch.Tensor) -> torch.Tensor:
    """float32[tokens, n_embd] that enters the last norm, of streams x."""
    logits = worker.linear(head.fn, worker.norm(head.norm, x))
    shares = worker.sigmoid(logits * worker.vector(head.scale) + worker.vector(head.base)) + head.eps
    collapsed: torch.Tensor = shares[:, None] @ x.view(len(x), head.streams, -1)
    return collapsed[:, 0]
