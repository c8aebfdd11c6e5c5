"""Run a model part by part (embedding, blocks, output), and run each part again with replaced tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from quantkit.archs.common.blocks import AltUpHead, NGrams
from quantkit.codegen import blas
from quantkit.evaluate.layers.layer_by_layer import Selections, run_sequences
from quantkit.evaluate.layers.shared_keys import SharedKeys
from quantkit.formats.gguf import Tensor
from quantkit.runtime.scale_check import layer_of

if TYPE_CHECKING:
    from quantkit.archs.common.blocks import Block
    from quantkit.runtime.model import Model

Run = Callable[[np.ndarray, bool], np.ndarray]  # of the input, and whether all weights are the model's own


class Part:
    """A part of a model and its input. `layer` is None for embedding and output; `weights` are tensor names."""

    def __init__(self, layer: int | None, weights: list[str], model: Model, run: Run, x: np.ndarray):
        self.layer, self.weights = layer, weights
        self._model, self._run, self._x = model, run, x
        self._output: np.ndarray | None = None

    def run(self, replacements: dict[str, Tensor]) -> np.ndarray:
        """The output float32[tokens, n] of the part, with `replacements` in place of the model's tensors."""
        if not replacements and self._output is not None:
            return self._output
        weights = self._model.weights
        try:
            self._model.weights = {**weights, **replacements}
            self._model.drop_cached(replacements)
            with blas.single_threaded():
                output = self._run(self._x, not replacements)
        finally:
            self._model.weights = weights
            self._model.drop_cached(replacements)
        if not replacements:
            self._output = output
        return output


def parts(model: Model, tokens: np.ndarray) -> Iterator[Part]:
    """Yield the parts for new sequences int[n_seq, len]. A part's input is the output of the part before it, computed
    with the model's own weights."""
    ids = np.asarray(tokens, np.int64)
    head, x, shared = model.head, np.empty((0, 0), np.float32), SharedKeys.of(model, *ids.shape)
    selections: Selections = []
    names: dict[int | None, list[str]] = {}
    for name in model.weights:
        names.setdefault(layer_of(name), []).append(name)
    streams = head.streams
    spread = [linear.weight for linear in streams.project] if isinstance(streams, AltUpHead) else []
    first, last = [head.embedding, *dict.fromkeys(spread)], [head.output.weight]
    if streams is not None:
        last = [*dict.fromkeys(m.weight for m in streams.matrices if m.weight not in spread), *last]
    last += [] if head.norm is None else [head.norm.weight]
    steps: list[tuple[int | None, list[str], Run]] = [(None, first, lambda *_: model.embed(ids.reshape(-1)))]
    for block in model.blocks:
        tables = [part.table for part in block.parts if isinstance(part, NGrams)]
        steps.append((block.layer, names[block.layer] + tables, _block_runner(model, block, ids, shared, selections)))
    steps += [(None, last, lambda x, _: model.project(model.merge_streams(x)))]
    for layer, weights, run in steps:
        part = Part(layer, weights, model, run, x)
        yield part
        x = part.run({})


def _block_runner(model: Model, block: Block, ids: np.ndarray, shared: SharedKeys, selections: Selections) -> Run:
    def run(x: np.ndarray, is_own: bool) -> np.ndarray:
        caches = [model.layer_cache(ids.shape[1]) for _ in ids]
        states = x.reshape(*ids.shape, -1)
        kept = (selections, shared) if is_own else (list(selections), shared.copy())
        return run_sequences(model, block, ids, states, caches, *kept).reshape(x.shape)

    return run
