"""Hyper-connections, layer by layer in float32: residual streams that parts of blocks read and write.

`archs.common.blocks.HyperConnection`, `StreamHead` and `StreamMixer` have the formulas. Streams are float32[tokens,
n * n_embd], one after another.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import numpy as np

from quantkit.archs.common import blocks
from quantkit.runtime.blocks.float_ops import ignore_nonfinite, sigmoid
from quantkit.runtime.blocks.spans import Span


class NormRun(Protocol):
    """What norms of streams need of a BlockRunner."""

    def norm(self, norm: blocks.Norm, x: np.ndarray) -> np.ndarray:
        """RMS norm."""

    def vector(self, name: str) -> np.ndarray:
        """A vector by its name."""


class HyperRun(NormRun, Protocol):
    """What this module needs of a BlockRunner."""

    def linear(self, linear: blocks.Linear, x: np.ndarray) -> np.ndarray:
        """The product with a weight matrix."""


class StreamsRun(HyperRun, Protocol):
    """What `run` needs of a BlockRunner."""

    def read_streams(
        self, connection: blocks.HyperConnection | blocks.StreamMixer, x: np.ndarray
    ) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
        """`read`."""

    def write_streams(self, x: np.ndarray, made: np.ndarray, shares: tuple[np.ndarray, ...]) -> np.ndarray:
        """`write`."""

    def run_part(self, part: blocks.Part, layer: int, x: np.ndarray, spans: list[Span]) -> np.ndarray:
        """What a part of a block makes of x float32[tokens, n_embd]."""


def run(runner: StreamsRun, block: blocks.Block, x: np.ndarray, spans: list[Span]) -> np.ndarray:
    """The streams float32[tokens, n * n_embd] that leave a block."""
    for (layer, part), connection in zip(block.numbered_parts, block.hyper, strict=True):
        if connection is None:
            x = x + runner.run_part(part, layer, x, spans)
            continue
        entering, shares = runner.read_streams(connection, x)
        x = runner.write_streams(x, runner.run_part(part, layer, entering, spans), shares)
    return x


def read(
    runner: HyperRun, connection: blocks.HyperConnection | blocks.StreamMixer, x: np.ndarray
) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
    """float32[tokens, n_embd] that a part gets of streams, and what `write` needs.

    That is what each stream gets of the part's output, float32[tokens, n], and of a HyperConnection C, which mixes the
    streams.
    """
    if isinstance(connection, blocks.StreamMixer):
        mixed, shares = mix(runner, connection, x)
        return mixed, (shares,)
    pre, post, mixing = weights(runner, connection, x)
    return _weighted(pre, x.reshape(len(x), connection.streams, -1)), (post, mixing)


def write(x: np.ndarray, made: np.ndarray, shares: tuple[np.ndarray, ...]) -> np.ndarray:
    """The streams after a part has made float32[tokens, n_embd] of what it read, like x."""
    post, *mixing = shares
    streams = x.reshape(len(x), post.shape[1], -1)
    with ignore_nonfinite():
        streams = mixing[0].transpose(0, 2, 1) @ streams if mixing else streams
        written: np.ndarray = (streams + post[:, :, None] * made[:, None]).reshape(x.shape)
    return written


def weights(runner: HyperRun, part: blocks.HyperConnection, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What a part reads, float32[tokens, n], and writes, float32[tokens, n], and C, float32[tokens, n, n]."""
    n = part.streams
    scale, base = runner.vector(part.scale), runner.vector(part.base)
    logits = runner.linear(part.fn, runner.norm(part.norm, x))
    with ignore_nonfinite():
        logits = logits * np.repeat(scale, (n, n, n * n)) + base
        pre, post, comb = logits[:, :n], logits[:, n : 2 * n], logits[:, 2 * n :].reshape(-1, n, n)
        return sigmoid(pre) + np.float32(part.eps), 2 * sigmoid(post), doubly_stochastic(comb, part)


def doubly_stochastic(logits: np.ndarray, part: blocks.HyperConnection) -> np.ndarray:
    """float32[tokens, n, n] whose rows and columns sum to about 1 (Sinkhorn and Knopp), of logits of the same shape."""
    eps = np.float32(part.eps)
    c: np.ndarray = np.exp(logits - logits.max(2, keepdims=True))
    c = c / c.sum(2, keepdims=True) + eps
    c /= c.sum(1, keepdims=True) + eps
    for _ in range(part.iterations - 1):
        c /= c.sum(2, keepdims=True) + eps
        c /= c.sum(1, keepdims=True) + eps
    return c


def mix(runner: HyperRun, part: blocks.StreamMixer, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What a part reads, float32[tokens, n_embd], and what streams get of its output, float32[tokens, n].

    Without `inject` the latter has no columns.
    """
    normed = norm_streams(runner, part.norm, x, part.streams)
    low = runner.linear(part.down, normed)
    with ignore_nonfinite():
        gates = sigmoid(runner.linear(part.up, low * sigmoid(low)))
        mixed = (gates * normed).reshape(len(x), part.streams, -1).mean(1)
        shares = x[:, :0] if part.inject is None else 2 * sigmoid(runner.linear(part.inject, normed))
    return np.ascontiguousarray(mixed), shares


def norm_streams(runner: NormRun, norm: blocks.Norm, x: np.ndarray, streams: int) -> np.ndarray:
    """The RMS norm of each stream of float32[tokens, streams * n_embd], with a weight float32[streams * n_embd]."""
    normed = runner.norm(replace(norm, weight=""), x.reshape(len(x) * streams, -1)).reshape(x.shape)
    with ignore_nonfinite():
        weighted: np.ndarray = normed * runner.vector(norm.weight)
    return weighted


def spread(head: blocks.StreamHead | blocks.StreamMixer, x: np.ndarray) -> np.ndarray:
    """The streams that enter the first block: the embedding float32[tokens, n_embd], n times."""
    return np.tile(x, (1, head.streams))


def collapse(runner: HyperRun, head: blocks.StreamHead | blocks.StreamMixer, x: np.ndarray) -> np.ndarray:
    """float32[tokens, n_embd] that the last norm or the output matrix gets, of streams float32[tokens, n * n_embd]."""
    if isinstance(head, blocks.StreamMixer):
        return mix(runner, head, x)[0]
    logits = runner.linear(head.fn, runner.norm(head.norm, x))
    with ignore_nonfinite():
        read = sigmoid(logits * runner.vector(head.scale) + runner.vector(head.base)) + np.float32(head.eps)
    return _weighted(read, x.reshape(len(x), head.streams, -1))


def _weighted(read: np.ndarray, streams: np.ndarray) -> np.ndarray:
    """float32[tokens, n_embd]: the sum of streams float32[tokens, n, n_embd] times `read` float32[tokens, n]."""
    with ignore_nonfinite():
        return np.ascontiguousarray((read[:, None] @ streams)[:, 0])
