"""Alternating updates (AltUp), LAuReL and activation sparsity of Gemma 3n, layer by layer in float32.

`archs.common.blocks.AltUp`, `AltUpHead`, `Laurel` and `FeedForward` have the formulas. Streams are
float32[tokens, n * n_embd], one after another.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from quantkit.archs.common import blocks
from quantkit.runtime.blocks.float_ops import ignore_nonfinite
from quantkit.runtime.blocks.spans import Span

HALF_ROOT = 2**-0.5  # of the sum of a layer's input, its attention and Laurel


class AltUpRun(Protocol):
    """What this module needs of a BlockRunner."""

    def linear(self, linear: blocks.Linear, x: np.ndarray) -> np.ndarray:
        """The product with a weight matrix."""

    def norm(self, norm: blocks.Norm, x: np.ndarray) -> np.ndarray:
        """RMS norm."""

    def vector(self, name: str) -> np.ndarray:
        """The values of a tensor, as a vector."""

    def run_part(self, part: blocks.Part, layer: int, x: np.ndarray, spans: list[Span]) -> np.ndarray:
        """What a part of a block makes of x float32[tokens, n_embd]."""


def run(runner: AltUpRun, block: blocks.Block, x: np.ndarray, spans: list[Span]) -> np.ndarray:
    """The streams float32[tokens, n * n_embd] that leave a block."""
    part = block.altup
    assert part is not None
    laurel, attention, feed_forward, layer_input = block.parts
    predicted = predict(runner, part, x.reshape(len(x), part.streams, -1))
    first = np.ascontiguousarray(predicted[:, 0])
    z = first + runner.run_part(attention, block.layer, first, spans)
    z = (z + runner.run_part(laurel, block.layer, first, spans)) * np.float32(HALF_ROOT)
    z = z + runner.run_part(feed_forward, block.layer, z, spans)
    streams = correct(runner, part, predicted, z)
    with ignore_nonfinite():
        entering = streams[:, 0] * runner.vector(part.correct_scale)
    streams[:, 1:] += runner.run_part(layer_input, block.layer, entering, spans)[:, None]
    return streams.reshape(x.shape)


def predict(runner: AltUpRun, part: blocks.AltUp, streams: np.ndarray) -> np.ndarray:
    """p float32[tokens, n, n_embd] of streams of this shape."""
    n = part.streams
    routed = _routed(runner, part, np.ascontiguousarray(streams[:, 0]))
    with ignore_nonfinite():
        mixing = (routed @ runner.vector(part.predict).reshape(n * n, n).T).reshape(-1, n, n)
        result: np.ndarray = streams + mixing @ streams
    return result


def correct(runner: AltUpRun, part: blocks.AltUp, predicted: np.ndarray, z: np.ndarray) -> np.ndarray:
    """Streams float32[tokens, n, n_embd] of p, of this shape, and z float32[tokens, n_embd]."""
    n = part.streams
    routed = _routed(runner, part, z)
    with ignore_nonfinite():
        shares = 1 + routed @ runner.vector(part.correct).reshape(n, n).T
        result: np.ndarray = predicted + shares[:, :, None] * (z - predicted[:, 0])[:, None]
    return result


def _routed(runner: AltUpRun, part: blocks.AltUp, x: np.ndarray) -> np.ndarray:
    """m(x) float32[tokens, n]."""
    result: np.ndarray = np.tanh(runner.linear(part.router, runner.norm(part.router_norm, x)))
    return result


def laurel(runner: AltUpRun, part: blocks.Laurel, x: np.ndarray) -> np.ndarray:
    """What LAuReL adds to x float32[tokens, n_embd]."""
    y = runner.norm(part.norm, x)
    result: np.ndarray = y + runner.norm(part.post_norm, runner.linear(part.right, runner.linear(part.left, y)))
    return result


def largest_gates(gate: np.ndarray, cutoff: float) -> np.ndarray:
    """float32[tokens, n]: gates less `cutoff` standard deviations above their mean, at least 0."""
    with ignore_nonfinite():
        mean = gate.mean(1, keepdims=True, dtype=np.float64)
        threshold = (mean + cutoff * np.sqrt(np.square(gate - mean).mean(1, keepdims=True))).astype(np.float32)
        result: np.ndarray = np.maximum(gate - threshold, np.float32(0))
    return result


def spread(runner: AltUpRun, head: blocks.AltUpHead, x: np.ndarray) -> np.ndarray:
    """The streams float32[tokens, n * n_embd] that enter the first block, of the embedding float32[tokens, n_embd]."""
    size = _root_mean_square(x)
    others = [_of_size(runner.linear(linear, x), size, head.least) for linear in head.project]
    return np.concatenate([x, *others], axis=1)


def merge(runner: AltUpRun, head: blocks.AltUpHead, x: np.ndarray) -> np.ndarray:
    """float32[tokens, n_embd] that enters the last norm, of streams float32[tokens, n * n_embd]."""
    first, *others = np.split(x, head.streams, axis=1)
    size, total = _root_mean_square(first), first.copy()
    for linear, stream in zip(head.merge, others):
        total += _of_size(runner.linear(linear, np.ascontiguousarray(stream)), size, head.least)
    return total / np.float32(head.streams)


def _root_mean_square(x: np.ndarray) -> np.ndarray:
    """float32[tokens, 1]."""
    with ignore_nonfinite():
        result: np.ndarray = np.sqrt(np.square(x, dtype=np.float64).mean(1, keepdims=True)).astype(np.float32)
    return result


def _of_size(x: np.ndarray, size: np.ndarray, least: float) -> np.ndarray:
    """x float32[tokens, n] with the root mean square `size` float32[tokens, 1]."""
    with ignore_nonfinite():
        result: np.ndarray = x * (size / np.maximum(_root_mean_square(x), np.float32(least)))
    return result
