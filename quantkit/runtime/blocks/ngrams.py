"""Embeddings of n-grams (archs.blocks.NGrams), layer by layer in float32.

The state of a sequence has the last inputs of the convolution, and the last tokens in float32, each plus 1: 0 stands
for none, as before the first token.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from quantkit.archs.common import blocks
from quantkit.errors import DataError
from quantkit.runtime.blocks import float_linear, hyper_connections, recurrent
from quantkit.runtime.blocks.float_linear import Weights
from quantkit.runtime.blocks.float_ops import ignore_nonfinite, sigmoid
from quantkit.runtime.blocks.spans import Span

LEAST = 1e-6  # of the scores whose roots are taken


class NGramRun(Protocol):
    """What this module needs of a BlockRunner."""

    weights: Weights
    threads: int

    def linear(self, linear: blocks.Linear, x: np.ndarray) -> np.ndarray:
        """The product with a weight matrix."""

    def norm(self, norm: blocks.Norm, x: np.ndarray) -> np.ndarray:
        """RMS norm."""

    def vector(self, name: str) -> np.ndarray:
        """A vector by its name."""

    def check(self, what: str, y: np.ndarray) -> None:
        """Non-finite check of `what`."""


def ngrams(run: NGramRun, part: blocks.NGrams, number: int, x: np.ndarray, spans: list[Span]) -> np.ndarray:
    """What is added to streams x float32[tokens, streams * n_embd]; advances the states `number` of the spans' caches.

    DataError where spans do not have their tokens.
    """
    states, hashes = [], []
    for span in spans:
        if span.tokens is None:
            raise DataError(f"{part.table}: rows of it are looked up by tokens, and only states are given")
        before, after = span.cache.advance(number, span.stop - span.start)
        history = np.concatenate([last_tokens(part, before.heads), span.tokens])
        after.heads[0, 0] = history[len(history) - part.longest + 1 :] + 1
        states.append((before, after))
        hashes.append(rows_of(part, history))
    embedded = looked_up(run.weights, part, np.concatenate(hashes))
    gated = _gated(run, part, embedded, x)
    entering = hyper_connections.norm_streams(run, part.conv_norm, gated, part.streams)
    taps, none = dilated(part, run.vector(part.conv)), np.zeros(gated.shape[1], np.float32)
    for span, (before, after) in zip(spans, states):
        rows = slice(span.start, span.stop)
        gated[rows] += recurrent.convolved(entering[rows], before, after, taps, none, run.threads)
    run.check(f"convolution of {part.conv}", gated)
    return gated


def last_tokens(part: blocks.NGrams, kept: np.ndarray) -> np.ndarray:
    """int64[longest - 1]: the tokens of a state's float32[1, 1, longest - 1]; `end` where there is none."""
    tokens = kept.reshape(-1).astype(np.int64) - 1
    return np.where(tokens < 0, part.end, tokens)


def rows_of(part: blocks.NGrams, history: np.ndarray) -> np.ndarray:
    """int64[tokens, hashes]: rows of the table, of int64[longest - 1 + tokens], the tokens and those before them."""
    count, each = len(history) - part.longest + 1, len(part.sizes) // (part.longest - 1)
    ends = np.zeros(count, bool)
    mixed, found = np.zeros(count, np.int64), []
    for back, multiplier in enumerate(part.multipliers):
        tokens = history[part.longest - 1 - back : len(history) - back]
        tokens = np.where(ends, part.end, tokens)
        ends = (ends | (tokens == part.end)) if back else ends
        mixed = mixed ^ (tokens * np.int64(multiplier))
        if back:
            found.append(np.repeat(mixed[:, None], each, axis=1))
    rows: np.ndarray = np.concatenate(found, axis=1) % np.array(part.sizes) + np.array(part.offsets)
    return rows


def looked_up(weights: Weights, part: blocks.NGrams, rows: np.ndarray) -> np.ndarray:
    """float32[tokens, hashes * width] of int64[tokens, hashes]."""
    return float_linear.embedding_rows(weights[part.table], rows.reshape(-1)).reshape(len(rows), -1)


def _gated(run: NGramRun, part: blocks.NGrams, embedded: np.ndarray, x: np.ndarray) -> np.ndarray:
    """v of `blocks.NGrams`, float32[tokens, streams * n_embd]."""
    keys = hyper_connections.norm_streams(run, part.key_norm, run.linear(part.key, embedded), part.streams)
    queries = hyper_connections.norm_streams(run, part.query_norm, x, part.streams)
    value = run.linear(part.value, embedded)
    with ignore_nonfinite():
        scores = (keys * queries).reshape(len(x), part.streams, -1).sum(2) * np.float32(value.shape[1] ** -0.5)
        gates = sigmoid(np.sign(scores) * np.sqrt(np.maximum(np.abs(scores), np.float32(LEAST))))
        gated: np.ndarray = (gates[:, :, None] * value[:, None]).reshape(x.shape)
    return gated


def dilated(part: blocks.NGrams, conv: np.ndarray) -> np.ndarray:
    """float32[past + 1, channels]: the taps of the convolution, zeros between them."""
    taps = conv.reshape(-1, part.kernel)
    found = np.zeros((part.past + 1, len(taps)), np.float32)
    found[:: part.longest] = taps.T
    return found
