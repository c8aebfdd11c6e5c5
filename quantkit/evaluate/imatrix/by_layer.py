"""Collect an importance matrix layer by layer, for models larger than memory: weights are read once.

The chunks of all texts run through a layer before the next (`layers.layer_by_layer`), and the collector of each text
observes its batches. A weight's sums are added in the order of chunks, as in a run of whole batches, so the matrix has
the same bits. Last come the MTP layers, and the output matrix where it is observed or the perplexity is computed.

After a layer the run is saved: the sums of the layers so far, and then the states that they gave. If the run
ends between the two, the layers after the saved states run again and are not measured again.
"""

from __future__ import annotations

import bisect
import itertools
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from quantkit.evaluate.imatrix.collect import CollectOptions, Collector
from quantkit.evaluate.imatrix.mtp import mtp_head, observe_batches
from quantkit.evaluate.imatrix.saved_run import SavedRun
from quantkit.evaluate.imatrix.second_moments import InputForm, sizes
from quantkit.evaluate.layers.layer_by_layer import (
    LayerRun,
    LayerStates,
    chunk_batches,
    layer_states,
    release_block,
    state_bytes,
    whole_batches,
)
from quantkit.evaluate.layers.saved_states import read_states, save_states, saved_layers
from quantkit.evaluate.models import OnLayer
from quantkit.evaluate.text import Chunks
from quantkit.runtime.scale_check import layer_of

if TYPE_CHECKING:
    from quantkit.formats.gguf import Tensor
    from quantkit.runtime.blocks.block_runner import Observer
    from quantkit.runtime.model import Model

_SAVING = 0.1  # of the time at most: sums and states may take gigabytes


class LayerSaves:
    """Saves a run by layer, and resumes it.

    saved    the run, whose `layers` are those with the sums of all chunks
    path     its file, OUTPUT.resume; `states` is the file of what the layers gave (`saved_states`)
    """

    def __init__(self, saved: SavedRun, path: Path, states: Path):
        self.saved, self.path, self.states = saved, path, states
        self._next = 0.0  # time of the next save

    def resumed(self, states: LayerStates) -> int:
        """The number of layers that need not run again; fills `states` with what they gave. 0 for damaged states."""
        layers = saved_layers(self.states, self.saved.run, states)
        if not 0 < layers <= self.saved.layers or not read_states(self.states, states):
            return 0
        return layers

    def after_layer(self, layers: int, states: LayerStates) -> None:
        """Note that a layer is measured. Save what there is, unless the last save is too near."""
        self.saved.layers = layers
        begin = time.monotonic()
        if begin < self._next:
            return
        self.saved.save(self.path)
        save_states(self.states, self.saved.run, layers, states)
        self._next = time.monotonic() + (1 / _SAVING - 1) * (time.monotonic() - begin)


class CollectByLayer:
    """A `CollectChunks` for all texts of a run. The first call runs the layers."""

    def __init__(self, model: Model, chunk_sets: Sequence[Chunks], saves: LayerSaves, on_layer: OnLayer):
        self._model, self._chunk_sets, self._saves, self._on_layer = model, chunk_sets, saves, on_layer
        self._starts = list(itertools.accumulate(map(len, chunk_sets), initial=0))  # the first chunk of each text
        self._hidden: np.ndarray | None = None  # what leaves the last layer

    def __call__(
        self, collector: Collector, chunks: Chunks, first: int, options: CollectOptions
    ) -> Generator[np.ndarray | None, None, None]:
        if first == len(chunks):
            return
        if self._hidden is None:
            self._hidden = self._run_layers(options.n_batch)
        of_text = [text.collector for text in self._saves.saved.texts].index(collector)
        before, self._model.observer = self._model.observer, collector.observe
        try:
            for index in range(first, len(chunks)):
                states = self._hidden[self._starts[of_text] + index, options.rows(chunks.n_ctx)]
                yield options.nll(self._model.project(states), chunks.tokens[index])
        finally:
            self._model.observer = before

    def _run_layers(self, n_batch: int) -> np.ndarray:
        """float32[chunks, n_ctx, n_embd] before the output norm, of all texts."""
        model, saves = self._model, self._saves
        inputs = np.concatenate([chunks.inputs for chunks in self._chunk_sets])
        states = layer_states(model, *inputs.shape)
        done = saves.resumed(states)
        run = LayerRun(model, inputs, self._of_texts(chunk_batches, n_batch), states, embed=not done)
        blocks = list(model.blocks)
        for number, block in enumerate(blocks[done:], done + 1):
            is_new = number > saves.saved.layers
            run.advance(block, observer_of=self._observer_of if is_new else None)
            run.release(block)
            if is_new and not run.has_selections:  # which are not saved
                saves.after_layer(number, run.states)
            self._on_layer(number, len(blocks))
        run.finish(self._observer_of)
        if (head := mtp_head(model)) is not None:
            observe_batches(head, inputs, run.hidden, self._of_texts(whole_batches, n_batch), self._observer_of)
            for layer in head.layers:
                release_block(model, layer.block)
        return run.hidden

    def _of_texts(self, batches: Callable[[int, int, int], list[slice]], n_batch: int) -> list[slice]:
        """The batches of all texts: none has chunks of two."""
        return [
            slice(start + batch.start, start + batch.stop)
            for start, chunks in zip(self._starts, self._chunk_sets)
            for batch in batches(len(chunks), chunks.n_ctx, n_batch)
        ]

    def _observer_of(self, batch: slice) -> Observer:
        return self._saves.saved.texts[bisect.bisect(self._starts, batch.start) - 1].collector.observe


def describe_memory(
    tensors: Iterable[Tensor], chunk_sets: Sequence[Chunks], model: Model, forms: Mapping[str, InputForm] | None,
    here: bool = True,
) -> str:  # fmt: skip
    """What a run takes in this process, or on workers: states between layers, weights, sums."""
    of_layer: dict[int, int] = {}
    tensors = list(tensors)
    weights = [tensor for tensor in tensors if layer_of(tensor.name) is not None]
    for tensor in weights:
        layer = layer_of(tensor.name) or 0
        of_layer[layer] = of_layer.get(layer, 0) + tensor.nbytes
    sums = sum(8 * int(np.prod(t.shape[:-2], dtype=np.int64)) * t.shape[-1] for t in weights if len(t.shape) > 1)
    if forms is not None:
        sums += sizes({tensor.name: tensor.shape for tensor in tensors if tensor.name in forms}, forms)[0]
    states = state_bytes(model, sum(chunks.inputs.size for chunks in chunk_sets))
    of_all = f"sums of all layers, up to {len(chunk_sets) * sums / 1e6:,.1f} MB"
    if not here:
        return f"layer by layer on workers: {states}; {of_all}, in this process too"
    largest = max(of_layer.values(), default=0)
    return f"layer by layer: {states.with_place}; weights of one layer, up to {largest / 1e6:,.1f} MB; {of_all}"
