"""A model over many chunks, one layer after another: every weight is read once, and let go of when its layer is done.

For models larger than memory, a BF16 checkpoint that is to be the base of a KL divergence for one. What is kept of all
chunks is what leaves a layer, float32[chunks, n_ctx, n_embd]; where that is large, in a file without a name. Chunks go
through a layer in the same batches as otherwise, so the logits are the same to the last bit.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from quantkit.errors import UnsupportedError
from quantkit.evaluate.perplexity import check_context
from quantkit.evaluate.text import DEFAULT_BATCH
from quantkit.formats.kld.base_file import scored_rows
from quantkit.formats.mapping import release
from quantkit.runtime import blas
from quantkit.runtime.blocks.spans import Span
from quantkit.runtime.model import SEQUENCE_TOKENS
from quantkit.runtime.scale_check import layer_of

IN_MEMORY = 1 << 28  # bytes of hidden states; more go to a file


def streamed_chunks(
    model: Any,
    inputs: np.ndarray,
    n_batch: int = DEFAULT_BATCH,
    rows: slice | None = None,
    first: int = 0,
    on_layer: Callable[[int, int], None] = lambda done, layers: None,
) -> Iterator[tuple[int, np.ndarray]]:
    """What `perplexity.evaluate_chunks` yields, in that order; `on_layer(done, layers)` is called after each layer.

    UnsupportedError where numerics are not exact: the fast ones lay out the whole model.
    """
    n_chunk, n_ctx = inputs.shape
    check_context(model, n_ctx)
    if model.numerics != "exact":
        raise UnsupportedError("layer by layer a model is run in exact numerics; leave --numerics fast out")
    batches = _batches(n_chunk, n_ctx, n_batch, first)
    hidden = _through_all(model, inputs, batches, on_layer)
    for batch in batches:
        for index in range(batch.start, batch.stop):
            yield index, model.project(hidden[index, rows or scored_rows(n_ctx)])


def _batches(n_chunk: int, n_ctx: int, n_batch: int, first: int) -> list[slice]:
    """Chunks that `evaluate_chunks` and `Model.hidden_sequences` multiply together."""
    together, most = max(1, n_batch // n_ctx), max(1, SEQUENCE_TOKENS // n_ctx)
    return [
        slice(a, min(a + most, start + together, n_chunk))
        for start in range(first, n_chunk, together)
        for a in range(start, min(start + together, n_chunk), most)
    ]


def _through_all(
    model: Any, inputs: np.ndarray, batches: list[slice], on_layer: Callable[[int, int], None]
) -> np.ndarray:
    """float32[n_chunk, n_ctx, n_embd] before the output norm; what is in no batch is not set."""
    n_ctx = inputs.shape[1]
    x = _room((*inputs.shape, model.hparams.n_embd))
    caches = [model.layer_cache(n_ctx) for _ in range(max((b.stop - b.start for b in batches), default=0))]
    with blas.single_threaded():
        for batch in batches:
            x[batch] = model.embed_checked(inputs[batch].reshape(-1)).reshape(x[batch].shape)
        _let_go(model, [model.head.embedding])
        for number, block in enumerate(model.blocks, 1):
            for batch in batches:
                here = x[batch]
                spans = [Span(i * n_ctx, (i + 1) * n_ctx, cache) for i, cache in enumerate(caches[: len(here)])]
                here[:] = model.run_block_checked(block, here.reshape(-1, here.shape[2]), spans).reshape(here.shape)
            _let_go(model, [name for name in model.weights if layer_of(name) == block.layer])
            on_layer(number, len(model.blocks))
    return x


def _room(shape: tuple[int, ...]) -> np.ndarray:
    """float32 of a shape, not set; of a file that goes with it where it is large."""
    if 4 * int(np.prod(shape, dtype=np.int64)) <= IN_MEMORY:
        return np.empty(shape, np.float32)
    with tempfile.TemporaryFile(prefix="quantkit-hidden-") as file:
        return np.memmap(file, np.float32, "w+", shape=shape)


def _let_go(model: Any, names: list[str]) -> None:
    model.drop_cached(names)
    for name in names:
        release(model.weights[name].data)
