"""`MtpHead`: the MTP (multi-token prediction) layers of a model, which draft further tokens, layer by layer.

    head = MtpHead(model)                               the model's own layers
    head = MtpHead(model, gguf.open("mtp.gguf"))        those of another file, with its embedding and output
    hidden = model.hidden_sequences(tokens, slice(None))
    states = head.states(tokens, hidden, 3)             by step: float32[n_seq, starts, n_embd]
    logits = head.project(0, states[0][0])              of the first step, of sequence 0

`blocks.MtpLayer` says what a layer computes. Step s drafts from position t with the tokens up to t + s, and its logits
are those of token t + s + 1. Step 1 is one pass over a sequence, and so is each step with a layer of its own. A step
beyond the last layer repeats that layer on its own output, token by token: as when drafting, it attends to the keys of
all positions up to t, which the pass over the sequence made, and to those of the steps between. The layers have a KV
cache of their own. RoPE counts from the first pair of state and token; only distances matter.

The layers run on the CPU, in the model's numerics, wherever the model runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from quantkit import archs
from quantkit.archs.common import blocks
from quantkit.archs.common.base import Arch
from quantkit.archs.common.required_tensors import required_of_mtp
from quantkit.archs.common.tensors import split_name
from quantkit.archs.common.validate import REMEDY, check_mtp
from quantkit.codegen import blas
from quantkit.errors import DataError, FormatError, UnknownNameError, UnsupportedError
from quantkit.formats.gguf import Tensor
from quantkit.runtime.blocks import float_linear, latent
from quantkit.runtime.blocks.block_runner import BlockRunner
from quantkit.runtime.blocks.spans import Span
from quantkit.runtime.kv.cache import Cache
from quantkit.runtime.kv.cache_type import CacheType
from quantkit.runtime.model import SEQUENCE_TOKENS, Model, ModelFile

_SAME = ("n_embd", "n_vocab", "n_main")  # what a file of MTP layers shares with its trunk


class MtpHead:
    """The MTP layers of an open model, or of another file on top of it.

    layers   the blocks.MtpLayer that are run, in the order of steps
    path     what messages call the file of the layers
    """

    def __init__(self, model: Model, file: ModelFile | None = None):
        """DataError if `file` is of another model; UnsupportedError or FormatError where its layers cannot be run."""
        self.path = model.path if file is None else file.path
        metadata = model.metadata if file is None else file.metadata
        weights = dict(model.weights) | (_of_head(file) if file is not None else {})
        try:
            arch = archs.get(str(metadata.get("general.architecture")))
            self._hparams = arch.hparams(metadata, weights.keys())
        except (FormatError, UnsupportedError, UnknownNameError) as error:
            raise FormatError(f"{self.path}: {error}; {REMEDY}") from None
        if file is not None:
            _require_same(model, self._hparams, file)
        self.layers = _heads(arch, self._hparams, str(self.path))
        check_mtp(arch, self._hparams, weights, self.path, self.layers)
        _check_types(self._hparams, self.layers, weights, str(self.path))
        self._model = model
        self._runner = BlockRunner(
            self.path, weights, numerics=model.numerics, threads=model.threads, attention=model.attention,
            mla=model.mla, expert_reduction=model.expert_reduction,
            tripwire="off" if model.tripwire == "off" else "full",
        )  # fmt: skip

    @property
    def observer(self) -> Callable[..., None] | None:
        """As of a Model: called with what enters each weight matrix."""
        return self._runner.observer

    @observer.setter
    def observer(self, observer: Callable[..., None] | None) -> None:
        """Set the observer, which gets tokens weighed as the model weighs them."""
        self._runner.observer, self._runner.weighs_tokens = observer, self._model.weighs_tokens

    def layer(self, step: int) -> blocks.MtpLayer:
        """The layer of a step, from 0 on: the last one also of all further steps."""
        return self.layers[min(step, len(self.layers) - 1)]

    def project(self, step: int, states: np.ndarray) -> np.ndarray:
        """float32[k, vocab]: the logits of float32[k, n_embd] of a step, from 0 on."""
        with blas.single_threaded():
            return self._runner.linear(self.layer(step).output, states)

    def states(
        self, tokens: np.ndarray, hidden: np.ndarray, steps: int = 1, starts: slice | None = None
    ) -> list[np.ndarray]:
        """By step, float32[n_seq, starts, n_embd]: g of each sequence int[n_seq, len] from the positions `starts`.

        hidden   float32[n_seq, len, n_embd] before the model's last norm, as `hidden_sequences` gives it
        starts   positions t with t + steps < len; None: all of them

        DataError for sequences that are too short.
        """
        n_seq, length = tokens.shape
        last = length - steps
        if steps < 1 or last < 1:
            raise DataError(f"{self.path}: {steps} drafted tokens need sequences of more tokens; these have {length}")
        first, stop, _ = (starts or slice(None)).indices(last)
        together = max(1, SEQUENCE_TOKENS // length)
        parts = []
        with blas.single_threaded():
            for a in range(0, n_seq, together):
                parts.append(self._states(tokens[a : a + together], hidden[a : a + together], steps, first, stop))
        return [np.concatenate(of_step) for of_step in zip(*parts)]

    def observe_all(self, tokens: np.ndarray, hidden: np.ndarray) -> None:
        """Run every layer over all positions, so that the observer gets what enters its matrices, its output's too."""
        for step, states in enumerate(self.states(tokens, hidden, len(self.layers))):
            self._runner.observe(self.layer(step).output.weight, states.reshape(-1, states.shape[-1]))

    def _states(self, tokens: np.ndarray, hidden: np.ndarray, steps: int, first: int, stop: int) -> list[np.ndarray]:
        n_seq, _, n = hidden.shape
        g = self._model.norm(self._model.head.norm, hidden.reshape(-1, n)).reshape(hidden.shape)
        found: list[np.ndarray] = []
        caches: list[Cache] = []
        for step, layer in enumerate(self.layers[:steps]):  # each in one pass
            caches = [self._cache(layer, tokens.shape[1]) for _ in range(n_seq)]
            x = self._entering(layer, tokens[:, step + 1 :], g[:, :-1])
            g = self._run(layer, x, caches)
            found.append(g[:, first:stop])
        if steps > len(found):
            found += self._repeated(tokens, found[-1], caches, steps - len(found), range(first, stop))
        return found

    def _repeated(
        self, tokens: np.ndarray, g: np.ndarray, caches: list[Cache], steps: int, starts: range
    ) -> list[np.ndarray]:
        """Further steps with the last layer. The last start comes first: its keys overwrite those after it only."""
        layer, done = self.layers[-1], len(self.layers)
        found = [np.empty_like(g) for _ in range(steps)]
        for t in reversed(starts):
            state = g[:, t - starts.start, None]
            for step in range(steps):
                for cache in caches:
                    cache.length = t + 1 + step
                token = tokens[:, t + done + step + 1, None]
                state = self._run(layer, self._entering(layer, token, state), caches)
                found[step][:, t - starts.start] = state[:, 0]
        return found

    def _entering(self, layer: blocks.MtpLayer, tokens: np.ndarray, states: np.ndarray) -> np.ndarray:
        """float32[n_seq, k, n_embd] that enters the block, of tokens int[n_seq, k] and states float32[n_seq, k, n]."""
        run = self._runner
        e = float_linear.embed(run.weights, layer, np.ascontiguousarray(tokens, np.int64).reshape(-1))
        h = np.ascontiguousarray(states).reshape(e.shape)
        both = np.concatenate([run.norm(layer.enorm, e), run.norm(layer.hnorm, h)], axis=1)
        return run.linear(layer.projection, both).reshape(states.shape)

    def _run(self, layer: blocks.MtpLayer, x: np.ndarray, caches: list[Cache]) -> np.ndarray:
        """g float32[n_seq, k, n_embd] of the next k positions of each sequence."""
        k, n = x.shape[1:]
        spans = [Span(i * k, (i + 1) * k, cache) for i, cache in enumerate(caches)]
        y = self._runner.run_block(layer.block, x.reshape(-1, n), spans)
        return self._runner.norm(layer.norm, y).reshape(x.shape)

    def _cache(self, layer: blocks.MtpLayer, n_ctx: int) -> Cache:
        hp = replace(self._hparams, n_mtp_layers=0, recurrent=frozenset(), recurrence=None)
        return Cache(
            latent.cached(hp, [layer.block], self._runner.mla), n_ctx, CacheType.parse(self._model.cache_type),
            one_layer=True,
        )  # fmt: skip


def _of_head(file: ModelFile) -> dict[str, Tensor]:
    """The tensors of a file of MTP layers that take the place of the model's: those of no block, and the layers'."""
    main = _main_layers(file)
    return {name: t for name, t in file.tensors.items() if not name.startswith("blk.") or _layer(name) >= main}


def _layer(name: str) -> int:
    return split_name(name)[1] or 0


def _main_layers(file: ModelFile) -> int:
    arch = file.metadata.get("general.architecture")
    count, further = (file.metadata.get(f"{arch}.{key}") for key in ("block_count", "nextn_predict_layers"))
    if not isinstance(count, int) or not isinstance(further, int):
        raise FormatError(f"{file.path}: the metadata has no {arch}.nextn_predict_layers: it has no MTP layers")
    return count - further


def _heads(arch: Arch, hp: blocks.HParams, path: str) -> list[blocks.MtpLayer]:
    if not hp.n_mtp_layers:
        raise UnsupportedError(
            f"{path}: the file has no MTP layers; `convert --mtp keep` keeps those of a checkpoint, and --head takes "
            "those of another file"
        )
    try:
        return arch.mtp_heads(hp)
    except UnsupportedError as error:
        raise UnsupportedError(f"{path}: {error}") from None


def _require_same(model: Model, hp: blocks.HParams, file: ModelFile) -> None:
    own = model.hparams
    if own.arch != hp.arch:
        raise DataError(f"{file.path}: MTP layers of {hp.arch}, the model {model.path} is {own.arch}")
    for name in _SAME:
        if getattr(own, name) != getattr(hp, name):
            raise DataError(
                f"{file.path}: MTP layers of a model with {name} = {getattr(hp, name)}, {model.path} has "
                f"{getattr(own, name)}; take the file that was written with it"
            )


def _check_types(hp: blocks.HParams, layers: list[blocks.MtpLayer], weights: dict[str, Tensor], path: str) -> None:
    for name, _ in required_of_mtp(hp, layers, weights):
        if not weights[name].type.has_codec:
            raise UnsupportedError(f"{path}: tensor {name}: quantkit cannot decode {weights[name].type.name} yet")
