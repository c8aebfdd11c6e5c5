"""The KL divergence of a model with one matrix alone in a coarse type, for each matrix.

Nothing before a matrix' layer changes, so a probe runs from that layer on: the hidden states that enter the layer are
kept while its matrices are probed, and so are keys and values of earlier layers that later ones read, and positions
that an indexer has selected for them. Every probe is computed in the same way whatever was measured before, so a
resumed run has the same numbers. Memory: these states of the text's tokens, and the model's log probabilities at the
scored ones.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from quantkit.codegen import blas, jit
from quantkit.errors import UnsupportedError
from quantkit.evaluate.chunk_runs import check_context
from quantkit.evaluate.layers.layer_by_layer import Selections, run_sequences
from quantkit.evaluate.layers.shared_keys import SharedKeys
from quantkit.evaluate.statistics import Sample
from quantkit.evaluate.text import Chunks
from quantkit.formats.gguf import Tensor
from quantkit.runtime.scale_check import layer_of
from quantkit.types import QuantType

if TYPE_CHECKING:
    from quantkit.archs.common.blocks import Block
    from quantkit.runtime.model import Model

_ROWS = 64  # of logits at a time


class Probed(NamedTuple):
    """Mean KL divergence in nats per token, and its standard error over passages (`statistics.Sample`)."""

    kld: float
    error: float


class _States(NamedTuple):
    """What enters a layer, of all chunks.

    hidden       float32[tokens, state width]
    shared       keys and values that later layers read
    selections   of each chunk, what the last indexer has selected
    """

    hidden: np.ndarray
    shared: SharedKeys
    selections: list[Selections]


class EncodedTensor(Tensor):
    """A tensor of a file in another type, in memory."""

    __slots__ = ()

    def __init__(self, tensor: Tensor, kind: QuantType, data: np.ndarray):
        super().__init__(tensor.name, tensor.shape, kind, data.nbytes, 0, tensor.path)
        self._file = jit.readonly(data.reshape(-1))


class Probes:
    """Runs probes of a model over chunks.

    replacement   called with a tensor; the tensor in the probe's type
    """

    def __init__(self, model: Model, chunks: Chunks, replacement: Callable[[Tensor], Tensor]):
        if model.numerics != "exact" or model.split is not None:
            raise UnsupportedError("sensitivity runs in exact numerics on the CPU, layer by layer")
        check_context(model, chunks.n_ctx)
        self._model, self._chunks, self._replacement = model, chunks, replacement
        rows = chunks.rows
        if not isinstance(rows, slice):
            raise UnsupportedError(
                "sensitivity scores the same positions of every chunk: give it text, no conversations"
            )
        self._rows, self._sample = rows, Sample.of(chunks.counts)
        self._base: np.ndarray | None = None

    def run(self, names: Sequence[str]) -> Iterator[tuple[str, Probed]]:
        """Yield (name, result) for matrices, layer by layer. One that the model does not use has a divergence of 0."""
        if not names:
            return
        model, layers = self._model, {block.layer for block in self._model.blocks}
        base = self._base_log_probabilities()
        outputs = [name for name in names if name == model.head.output.weight != model.head.embedding]
        inputs = [name for name in names if layer_of(name) is None and name not in outputs]
        for name in inputs:
            yield name, self._probe(name, lambda: self._finish(0, self._start()), base)
        states, layer_names = self._start(), [name for name in names if layer_of(name) in layers]
        last = max((layer_of(name) or 0 for name in layer_names), default=-1)
        for number, block in enumerate(model.blocks):
            if block.layer > last and not outputs:
                break
            for name in [name for name in names if layer_of(name) == block.layer]:
                yield name, self._probe(name, functools.partial(self._finish, number, states), base)
            states = self._block(block, states)
        for name in outputs:
            yield name, self._probe(name, functools.partial(self._finish, len(model.blocks), states), base)
        for name in names:
            if layer_of(name) is not None and layer_of(name) not in layers:
                yield name, Probed(0.0, 0.0)

    def _probe(self, name: str, states: Callable[[], np.ndarray], base: np.ndarray) -> Probed:
        """The divergence with one tensor replaced; `states` gives what leaves the last layer then."""
        model = self._model
        replaced = {name: self._replacement(model.weights[name])}
        weights = model.weights
        try:
            model.weights = {**weights, **replaced}
            model.drop_cached(replaced)
            values = np.concatenate([
                _divergence(base[start : start + len(logits)], logits)
                for start, logits in self._logits(states())
            ])  # fmt: skip
        finally:
            model.weights = weights
            model.drop_cached(replaced)
        found = self._sample.mean(values)
        error = found.error if np.isfinite(found.error) else abs(found.value)
        return Probed(max(found.value, 0.0), error)

    def _start(self) -> _States:
        """What enters the first layer."""
        inputs = np.asarray(self._chunks.inputs, np.int64)
        hidden = self._model.embed_checked(inputs.reshape(-1))
        return _States(hidden, SharedKeys.of(self._model, *inputs.shape), [[] for _ in inputs])

    def _block(self, block: Block, states: _States) -> _States:
        """What leaves a block; what others read of it is written into `shared` and `selections`."""
        length, inputs = self._chunks.n_ctx, self._chunks.inputs
        x = states.hidden.reshape(len(inputs), length, -1)
        found = np.empty_like(x)
        with blas.single_threaded():
            for chunk, selections in enumerate(states.selections):  # one bounds the memory of attention and experts
                one, caches = slice(chunk, chunk + 1), [self._model.layer_cache(length)]
                found[one] = run_sequences(
                    self._model, block, inputs[one], x[one], caches, selections, states.shared[one]
                )
        return states._replace(hidden=found.reshape(states.hidden.shape))

    def _finish(self, first: int, states: _States) -> np.ndarray:
        """What leaves the last layer, of what enters layer `first`."""
        states = _States(states.hidden, states.shared.copy(), [list(s) for s in states.selections])
        for block in self._model.blocks[first:]:
            states = self._block(block, states)
        return states.hidden

    def _logits(self, x: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (first scored position, float32[rows, n_vocab]) of states of all positions."""
        states = x.reshape(len(self._chunks), self._chunks.n_ctx, -1)[:, self._rows].reshape(-1, x.shape[1])
        for start in range(0, len(states), _ROWS):
            yield start, self._model.project(self._model.merge_streams(states[start : start + _ROWS]))

    def _base_log_probabilities(self) -> np.ndarray:
        """float32[scored positions, n_vocab] of the model itself."""
        if self._base is None:
            parts = [_log_softmax(logits) for _, logits in self._logits(self._finish(0, self._start()))]
            self._base = np.concatenate([part.astype(np.float32) for part in parts])
        return self._base


def _log_softmax(x: np.ndarray) -> np.ndarray:
    """float64[rows, n] of float32[rows, n], over the columns."""
    shifted = x.astype(np.float64) - x.max(axis=1, keepdims=True)
    found: np.ndarray = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return found


def _divergence(base: np.ndarray, logits: np.ndarray) -> np.ndarray:
    """float64[rows]: KL divergence of float32[rows, n] logits from float32[rows, n] log probabilities."""
    p = base.astype(np.float64)
    found: np.ndarray = (np.exp(p) * (p - _log_softmax(logits))).sum(axis=1)
    return found
