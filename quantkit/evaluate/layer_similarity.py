"""Measure how much each layer changes its input: the cosine similarity of a layer's input and output.

    s_l = mean over tokens of x_l . x_(l+1) / (|x_l| |x_(l+1)|)

x_l is the residual stream before layer l. A layer whose similarity is low changes it most, so it needs more bits. Sums
are float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from quantkit.errors import DataError, UnsupportedError
from quantkit.evaluate.chunk_runs import check_context
from quantkit.evaluate.layers.layer_by_layer import IN_MEMORY, LayerRun, chunk_batches
from quantkit.evaluate.text import DEFAULT_BATCH, Chunks

if TYPE_CHECKING:
    from quantkit.runtime.model import Model


def layer_similarity(
    model: Model, chunks: Chunks, n_batch: int = DEFAULT_BATCH, on_chunk: Callable[[int], None] | None = None
) -> list[float]:
    """The similarity s_l of each layer over all tokens of `chunks`; `on_chunk(chunks done)` is called now and then.

    Needs exact numerics on the CPU, which UnsupportedError says. DataError where a hidden state is not finite.
    """
    if model.numerics != "exact" or model.split is not None:
        raise UnsupportedError(f"{model.path}: layer similarity is measured on the CPU with exact numerics")
    check_context(model, chunks.n_ctx)
    sums = np.zeros(len(model.blocks))
    of_token = 8 * model.state_width + model.shared_key_bytes  # hidden states of two layers
    together = max(1, min(n_batch // chunks.n_ctx, IN_MEMORY // (chunks.n_ctx * of_token)))
    for first in range(0, len(chunks), together):
        inputs = chunks.inputs[first : first + together]
        run = LayerRun(model, inputs, chunk_batches(len(inputs), chunks.n_ctx, n_batch))
        for number, block in enumerate(model.blocks):
            before = run.hidden.copy()
            run.advance(block)
            sums[number] += _cosines(before, run.hidden).sum()
        if on_chunk is not None:
            on_chunk(first + len(inputs))
    found = sums / chunks.inputs.size
    if not np.isfinite(found).all():
        raise DataError(f"{model.path}: layer {int(np.argmin(np.isfinite(found)))}: NaN or Inf in its input or output")
    return [float(value) for value in found]


def _cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """float64: the cosine of each pair of vectors along the last axis; 0 where one of them is zero."""
    products, left, right = (np.einsum("...i,...i->...", x, y, dtype=np.float64) for x, y in ((a, b), (a, a), (b, b)))
    lengths = np.sqrt(left * right)
    return np.asarray(products / np.where(lengths == 0, 1, lengths))
