"""Run a model over many chunks one layer at a time, for models larger than memory.

Every weight is read once, and its memory is released when its layer is done. So a BF16 model larger than memory can
write a base file. Between layers only the hidden states of all chunks are stored, float32[chunks, n_ctx, n_embd], in a
temporary file if they are large. Chunks run in the same batches as in `chunk_runs.evaluate_chunks`, so the logits are
the same to the last bit; except for conversations, whose fill up to the longest is computed here.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from quantkit.codegen import blas
from quantkit.errors import UnsupportedError
from quantkit.evaluate.chunk_runs import check_context
from quantkit.evaluate.text import DEFAULT_BATCH
from quantkit.formats.kld.scored_tokens import scored_rows
from quantkit.runtime.blocks.spans import Span
from quantkit.runtime.model import SEQUENCE_TOKENS
from quantkit.runtime.scale_check import layer_of

if TYPE_CHECKING:
    from quantkit.archs.common.blocks import Block
    from quantkit.runtime.model import Model

IN_MEMORY = 1 << 28  # bytes of hidden states; larger ones go to a file


def chunks_layer_by_layer(
    model: Model,
    inputs: np.ndarray,
    n_batch: int = DEFAULT_BATCH,
    rows: slice | Sequence[np.ndarray] | None = None,
    first: int = 0,
    on_layer: Callable[[int, int], None] = lambda done, layers: None,
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (index, float32[k, n_vocab] logits) for chunks, as `chunk_runs.evaluate_chunks` does, layer by layer.

    `on_layer(done, layers)` is called after each layer. Raises UnsupportedError unless numerics are exact, because fast
    numerics plan the whole model at once.
    """
    n_chunk, n_ctx = inputs.shape
    check_context(model, n_ctx)
    if model.numerics != "exact":
        raise UnsupportedError("--by-layer runs a model in exact numerics only; remove --numerics fast")
    batches = chunk_batches(n_chunk, n_ctx, n_batch, first)
    run = LayerRun(model, inputs, batches)
    for number, block in enumerate(model.blocks, 1):
        run.advance(block)
        run.release(block)
        on_layer(number, len(model.blocks))
    for batch in batches:
        for index in range(batch.start, batch.stop):
            of_chunk = rows if rows is None or isinstance(rows, slice) else rows[index]
            yield index, model.project(run.hidden[index, scored_rows(n_ctx) if of_chunk is None else of_chunk])


def chunk_batches(n_chunk: int, n_ctx: int, n_batch: int, first: int = 0) -> list[slice]:
    """The chunks that `evaluate_chunks` and `Model.hidden_sequences` multiply together."""
    per_batch, per_sequence_batch = max(1, n_batch // n_ctx), max(1, SEQUENCE_TOKENS // n_ctx)
    return [
        slice(a, min(a + per_sequence_batch, start + per_batch, n_chunk))
        for start in range(first, n_chunk, per_batch)
        for a in range(start, min(start + per_batch, n_chunk), per_sequence_batch)
    ]


class LayerRun:
    """The hidden states of chunks, which run through a model one layer at a time.

    hidden   float32[n_chunk, n_ctx, n_embd]: the input of the next layer; not set for chunks that are in no batch
    """

    def __init__(self, model: Model, inputs: np.ndarray, batches: list[slice]):
        """Embed int[n_chunk, n_ctx]. `batches` are those of `chunk_batches`."""
        self._model, self._batches = model, batches
        n_ctx = inputs.shape[1]
        x = self.hidden = _hidden_states((*inputs.shape, model.hparams.n_embd))
        self._caches = [model.layer_cache(n_ctx) for _ in range(max((b.stop - b.start for b in batches), default=0))]
        with blas.single_threaded():
            for batch in batches:
                x[batch] = model.embed_checked(inputs[batch].reshape(-1)).reshape(x[batch].shape)
        _release(model, [model.head.embedding])

    def advance(self, block: Block, keep: bool = True) -> None:
        """Run all chunks through the next block. `keep`: store its output as the input of the one after it."""
        n_ctx = self.hidden.shape[1]
        with blas.single_threaded():
            for batch in self._batches:
                states = self.hidden[batch]
                spans = [Span(i * n_ctx, (i + 1) * n_ctx, cache) for i, cache in enumerate(self._caches[: len(states)])]
                output = self._model.run_block_checked(block, states.reshape(-1, states.shape[2]), spans)
                if keep:
                    states[:] = output.reshape(states.shape)

    def release(self, block: Block) -> None:
        """Drop the memory of a block's weights."""
        release_block(self._model, block)


def release_block(model: Model, block: Block) -> None:
    """Drop the memory of a block's weights."""
    _release(model, [name for name in model.weights if layer_of(name) == block.layer])


def _hidden_states(shape: tuple[int, ...]) -> np.ndarray:
    """An uninitialized float32 array; a large one is mapped to a temporary file that goes with it."""
    if 4 * int(np.prod(shape, dtype=np.int64)) <= IN_MEMORY:
        return np.empty(shape, np.float32)
    with tempfile.TemporaryFile(prefix="quantkit-hidden-") as file:
        return np.memmap(file, np.float32, "w+", shape=shape)


def _release(model: Model, names: list[str]) -> None:
    """Drop the memory of weights that are not needed any more."""
    model.drop_cached(names)
    for name in names:
        model.weights[name].release()
