"""Embeddings of n-grams (archs.blocks.NGrams) on a GPU: `runtime/blocks/ngrams.py` with torch.

The host hashes tokens and gathers the rows of the table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from quantkit.archs.common import blocks
from quantkit.errors import DataError
from quantkit.runtime.blocks import ngrams as plain
from quantkit.runtime.blocks.spans import Span
from quantkit.runtime.cuda import gpu_recurrent
from quantkit.runtime.cuda.gpu_context import GpuContext
from quantkit.runtime.cuda.gpu_streams import norm_streams

if TYPE_CHECKING:
    import torch


def ngrams(worker: GpuContext, part: blocks.NGrams, number: int, x: Any, spans: list[Span]) -> torch.Tensor:
    """What is added to streams x float32[tokens, streams * n_embd]; advances the states `number` of the spans' caches.

    DataError where spans do not have their tokens.
    """
    library = worker.gpu.torch
    states, hashes = [], []
    for span in spans:
        if span.tokens is None:
            raise DataError(f"{part.table}: rows of it are looked up by tokens, and only states are given")
        before, after = span.cache.advance(number, span.stop - span.start)
        last: Any = before.heads
        history = np.concatenate([plain.last_tokens(part, worker.copy_to_cpu(last)), span.tokens])
        kept = (history[len(history) - part.longest + 1 :] + 1).astype(np.float32)
        after.heads[0, 0] = worker.copy_from_cpu(kept)
        states.append((before, after))
        hashes.append(plain.rows_of(part, history))
    embedded = worker.copy_from_cpu(plain.looked_up(worker.weights, part, np.concatenate(hashes)))
    out = gated(worker, part, embedded, x)
    entering = norm_streams(worker, part.conv_norm, out, part.streams)
    taps = worker.vector(part.conv).view(-1, part.kernel)
    dilated = taps.new_zeros(len(taps), part.past + 1)
    dilated[:, :: part.longest] = taps
    convolved = [
        gpu_recurrent.convolved(entering[span.start : span.stop], before, after, dilated, library)
        for span, (before, after) in zip(spans, states)
    ]
    added: torch.Tensor = out + library.nn.functional.silu(library.cat(convolved))
    worker.check(f"convolution of {part.conv}", added)
    return added


def gated(worker: GpuContext, part: blocks.NGrams, embedded: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """v of `blocks.NGrams`, float32[tokens, streams * n_embd]."""
    keys = norm_streams(worker, part.key_norm, worker.linear(part.key, embedded), part.streams)
    queries, value = norm_streams(worker, part.query_norm, x, part.streams), worker.linear(part.value, embedded)
    products = (keys * queries).view(len(x), part.streams, -1).sum(2) * value.shape[1] ** -0.5
    gates = worker.sigmoid(products.sign() * products.abs().clamp(min=plain.LEAST).sqrt())
    found: torch.Tensor = (gates[:, :, None] * value[:, None]).view(x.shape)
    return found
