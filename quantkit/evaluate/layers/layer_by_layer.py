"""Run a model over many chunks one layer at a time, for models larger than memory.

Every weight is read once, and its memory is released when its layer is done. So a BF16 model larger than memory can
write a base file or an importance matrix. Per-layer embeddings are looked up again for each layer. Between layers only
the hidden states of all chunks are stored, float32[chunks, n_ctx, state width], the keys and values that later layers
read (`shared_keys`), both in temporary files if they are large, and the positions that sparse attention has selected
for layers without an indexer. Chunks run in the same batches as in `chunk_runs.evaluate_chunks`, so the logits
are the same to the last bit; except for conversations, whose fill up to the longest is computed here.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from quantkit.archs.common import blocks
from quantkit.codegen import blas
from quantkit.errors import UnsupportedError
from quantkit.evaluate.chunk_runs import check_context
from quantkit.evaluate.layers.shared_keys import SharedKeys
from quantkit.evaluate.models import ChunkModel
from quantkit.evaluate.text import DEFAULT_BATCH
from quantkit.formats.atomic import require_space
from quantkit.formats.kld.scored_tokens import scored_rows
from quantkit.runtime.blocks.spans import Span
from quantkit.runtime.model import SEQUENCE_TOKENS
from quantkit.runtime.scale_check import layer_of

if TYPE_CHECKING:
    from quantkit.archs.common.blocks import Block
    from quantkit.runtime.blocks.block_runner import Observer
    from quantkit.runtime.kv.cache import Cache
    from quantkit.runtime.model import Model

IN_MEMORY = 1 << 28  # bytes of states of all chunks; larger ones go to files

# Of a batch: for each sequence, the positions that the last block with an indexer has selected.
Selections = list[np.ndarray | None]


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
    check_by_layer(model, n_ctx, model.numerics)
    batches = chunk_batches(n_chunk, n_ctx, n_batch, first)
    run = LayerRun(model, inputs, batches)
    for number, block in enumerate(model.blocks, 1):
        run.advance(block)
        run.release(block)
        on_layer(number, len(model.blocks))
    run.finish()
    for batch in batches:
        for index in range(batch.start, batch.stop):
            of_chunk = rows if rows is None or isinstance(rows, slice) else rows[index]
            yield index, model.project(run.hidden[index, scored_rows(n_ctx) if of_chunk is None else of_chunk])


def check_by_layer(model: ChunkModel, n_ctx: int, numerics: str) -> None:
    """DataError for chunks longer than the model's training context, UnsupportedError unless numerics are exact."""
    check_context(model, n_ctx)
    if numerics != "exact":
        raise UnsupportedError("--by-layer runs a model in exact numerics only; remove --numerics fast")


def whole_batches(n_chunk: int, n_ctx: int, n_batch: int, first: int = 0) -> list[slice]:
    """The chunks of each batch of `evaluate_chunks`."""
    per_batch = max(1, n_batch // n_ctx)
    return [slice(start, min(start + per_batch, n_chunk)) for start in range(first, n_chunk, per_batch)]


def chunk_batches(n_chunk: int, n_ctx: int, n_batch: int, first: int = 0) -> list[slice]:
    """The chunks that `evaluate_chunks` and `Model.hidden_sequences` multiply together."""
    together = max(1, SEQUENCE_TOKENS // n_ctx)
    return [
        slice(start, min(start + together, batch.stop))
        for batch in whole_batches(n_chunk, n_ctx, n_batch, first)
        for start in range(batch.start, batch.stop, together)
    ]


class LayerRun:
    """The hidden states of chunks, which run through a model one layer at a time.

    hidden   float32[n_chunk, n_ctx, state width]: the input of the next layer; not set for chunks that are in no batch
    shared   SharedKeys: what later layers read besides, of all chunks
    """

    def __init__(
        self,
        model: Model,
        inputs: np.ndarray,
        batches: list[slice],
        states: LayerStates | None = None,
        *,
        embed: bool = True,
    ):
        """Embed int[n_chunk, n_ctx], in `states` if given; without `embed` they are what some layers gave. `batches`
        are those of `chunk_batches`."""
        self._model, self._inputs, self._batches = model, inputs, batches
        self._selections: list[Selections] = [[] for _ in batches]
        n_ctx = inputs.shape[1]
        self._caches = [model.layer_cache(n_ctx) for _ in range(max((b.stop - b.start for b in batches), default=0))]
        self.hidden, shared = states or layer_states(model, *inputs.shape)
        self.shared = SharedKeys(model.blocks, shared)
        if not embed:
            return
        x = self.hidden
        with blas.single_threaded():
            for batch in batches:
                x[batch] = model.embed_checked(inputs[batch].reshape(-1)).reshape(x[batch].shape)
        _release(model, [model.head.embedding])

    def advance(
        self, block: Block, keep: bool = True, observer_of: Callable[[slice], Observer | None] | None = None
    ) -> None:
        """Run all chunks through the next block.

        keep          store its output as the input of the one after it
        observer_of   gives what observes the model while it runs a batch (`Model.observer`)
        """
        before = self._model.observer
        try:
            with blas.single_threaded():
                for batch, selections in zip(self._batches, self._selections):
                    if observer_of is not None:
                        self._model.observer = observer_of(batch)
                    states = self.hidden[batch]
                    own = selections if keep else list(selections)  # the block runs once more
                    output = run_sequences(
                        self._model, block, self._inputs[batch], states, self._caches, own, self.shared[batch]
                    )
                    if keep:
                        states[:] = output
        finally:
            self._model.observer = before

    def finish(self, observer_of: Callable[[slice], Observer | None] | None = None) -> None:
        """Turn what leaves the last block into float32[n_chunk, n_ctx, n_embd] before the output norm, in `hidden`.

        Only residual streams (hyper-connections, AltUp) differ.
        """
        model = self._model
        if model.head.streams is None:
            return
        before, shape = model.observer, (*self._inputs.shape, model.hparams.n_embd)
        merged = _zeros(shape, np.float32, _are_mapped(4 * int(np.prod(shape, dtype=np.int64)), "hidden states"))
        try:
            with blas.single_threaded():
                for batch in self._batches:
                    if observer_of is not None:
                        model.observer = observer_of(batch)
                    merged[batch] = merge_streams(model, self.hidden[batch])
        finally:
            model.observer = before
        self.hidden = merged

    @property
    def states(self) -> LayerStates:
        """What the next layers need, but for selections."""
        return LayerStates(self.hidden, self.shared.rows)

    @property
    def has_selections(self) -> bool:
        """Whether the next layers need more than `states`: the positions that a layer has selected."""
        return any(selected is not None for selections in self._selections for selected in selections)

    def release(self, block: Block) -> None:
        """Drop the memory of a block's weights."""
        release_block(self._model, block)


def run_sequences(
    model: Model,
    block: Block,
    tokens: np.ndarray,
    states: np.ndarray,
    caches: Sequence[Cache],
    selections: Selections,
    shared: SharedKeys,
) -> np.ndarray:
    """float32[n_seq, n_ctx, state width] that leaves a block, of fresh sequences. Callers hold
    `blas.single_threaded()`.

    tokens       int[n_seq, n_ctx]
    states       float32[n_seq, n_ctx, state width] that enters the block
    caches       of one layer, at least as many as sequences
    selections   those of the block before, of the same sequences; replaced by what later blocks need of this one
    shared       of the same sequences; gets keys and values of this block that others read
    """
    n_seq, n_ctx, width = states.shape
    ids = np.asarray(tokens, np.int64)
    spans = [Span(i * n_ctx, (i + 1) * n_ctx, cache, tokens=ids[i]) for i, cache in enumerate(caches[:n_seq])]
    model.set_selections(selections or [None] * n_seq)
    shared.before(block, caches)
    output = model.run_block_checked(block, states.reshape(-1, width), spans)
    shared.after(block, caches)
    layers = list(model.blocks)
    needed = needs_selections(layers[layers.index(block) + 1 :])
    selections[:] = model.last_selections(spans) if needed else []
    return output.reshape(states.shape)


def merge_streams(model: Model, states: np.ndarray) -> np.ndarray:
    """float32[n_seq, n_ctx, n_embd] before the output norm, of float32[n_seq, n_ctx, state width] that leave the last
    block."""
    n_seq, n_ctx, width = states.shape
    return model.merge_streams(states.reshape(-1, width)).reshape(n_seq, n_ctx, -1)


def needs_selections(following: Sequence[Block]) -> bool:
    """Whether the next sparse attention has no indexer, and attends to positions that a block before has selected."""
    parts = (part for block in following for part in block.parts)
    sparse = (part for part in parts if isinstance(part, blocks.LatentAttention) and part.sparse)
    return next((part.indexer is None for part in sparse), False)


def release_block(model: Model, block: Block) -> None:
    """Drop the memory of a block's weights."""
    _release(model, [name for name in model.weights if layer_of(name) == block.layer])


class LayerStates(NamedTuple):
    """What is stored between layers, of all chunks: float32[n_chunk, n_ctx, state width] hidden states, and the rows
    uint8[n_chunk, bytes] of `SharedKeys`."""

    hidden: np.ndarray
    shared: np.ndarray


def layer_states(model: Model, n_chunk: int, n_ctx: int) -> LayerStates:
    """States of zeros. Large ones are mapped to temporary files that go with them."""
    size = state_bytes(model, n_chunk * n_ctx)
    mapped = _are_mapped(sum(size), size.what)
    return LayerStates(
        _zeros((n_chunk, n_ctx, model.state_width), np.float32, mapped),
        _zeros((n_chunk, n_ctx * model.shared_key_bytes), np.uint8, mapped),
    )


class StateBytes(NamedTuple):
    """Bytes of what is stored between layers."""

    hidden: int
    shared: int

    @property
    def what(self) -> str:
        """What is stored, in words."""
        return "hidden states, keys and values" if self.shared else "hidden states"

    def __str__(self) -> str:
        shared = f", keys and values that later layers read {self.shared / 1e6:,.1f} MB" if self.shared else ""
        return f"hidden states {self.hidden / 1e6:,.1f} MB{shared}"

    @property
    def with_place(self) -> str:
        """Their sizes, and where `layer_states` puts them."""
        files = "temporary files" if self.shared else "a temporary file"
        return f"{self} in {'memory' if sum(self) <= IN_MEMORY else f'{files} in {tempfile.gettempdir()}'}"


def state_bytes(model: Model, tokens: int) -> StateBytes:
    """How large the states of that many tokens are."""
    return StateBytes(4 * tokens * model.state_width, tokens * model.shared_key_bytes)


def _are_mapped(nbytes: int, what: str) -> bool:
    """Whether arrays of so many bytes are mapped to temporary files. Raises QuantkitError if there is no room."""
    if nbytes > IN_MEMORY:
        # Writing to a mapped file on a full disk would end the process.
        require_space(Path(tempfile.gettempdir()), nbytes, f"the {what} of all chunks take", "; set TMPDIR")
    return nbytes > IN_MEMORY


def _zeros(shape: tuple[int, ...], dtype: type, mapped: bool) -> np.ndarray:
    """An array of zeros, in memory or mapped to a temporary file."""
    if not mapped or not np.prod(shape):
        return np.zeros(shape, dtype)
    with tempfile.TemporaryFile(prefix="quantkit-hidden-") as file:
        return np.memmap(file, dtype, "w+", shape=shape)


def _release(model: Model, names: list[str]) -> None:
    """Drop the memory of weights that are not needed any more."""
    model.drop_cached(names)
    for name in names:
        model.weights[name].release()
