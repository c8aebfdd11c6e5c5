"""An importance matrix of MTP (multi-token prediction) layers: they run on the states that the trunk gives.

`DraftingModel` is the model with its MTP layers: each batch of chunks runs through the trunk and then, for all
positions, through the layers, whose inputs reach the same observer. Only tensors of the layers are observed there; the
output matrix, which they may share, has the inputs of the trunk alone. Of an output of their own, `shared_head_head`,
the input is observed without computing it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np

from quantkit.errors import QuantkitError
from quantkit.evaluate.models import ChunkModel, OnMessage, no_message

if TYPE_CHECKING:
    from quantkit.runtime.mtp import MtpHead
    from quantkit.tokenizers.tokenizer import Tokenizer


def with_mtp_layers(model: ChunkModel, on_message: OnMessage = no_message) -> ChunkModel:
    """The model with its MTP layers, or the model itself if it has none that run; a message says why they do not."""
    head = mtp_head(model, on_message)
    return model if head is None else DraftingModel(model, head)


def mtp_head(model: ChunkModel, on_message: OnMessage = no_message) -> MtpHead | None:
    """The MTP layers of a model; None if it has none that run, which a message explains."""
    if not getattr(getattr(model, "hparams", None), "n_mtp_layers", 0):
        return None
    from quantkit.runtime.mtp import MtpHead

    try:
        return MtpHead(model)  # type: ignore[arg-type]  # what has hparams is a Model
    except QuantkitError as error:
        on_message(f"warning: MTP layers are not measured: {error}")
        return None


class DraftingModel:
    """A ChunkModel whose MTP layers run too, for an observer."""

    def __init__(self, model: ChunkModel, head: MtpHead):
        self._model, self._head = model, head

    @property
    def observer(self) -> Callable[..., None] | None:
        """The observer of the trunk and of the layers."""
        return self._model.observer

    @observer.setter
    def observer(self, observer: Callable[..., None] | None) -> None:
        """Set the observer of both."""
        self._model.observer = observer
        self._head.observer = None if observer is None else of_layers(observer)

    @property
    def vocab_size(self) -> int:
        """Number of tokens of the vocabulary."""
        return self._model.vocab_size

    @property
    def n_ctx_train(self) -> int:
        """Tokens of the longest sequence that the model was trained with."""
        return self._model.n_ctx_train

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model's file."""
        return self._model.tokenizer

    def hidden_sequences(self, tokens: np.ndarray, rows: slice) -> np.ndarray:
        """As `Model.hidden_sequences`; the layers have run over all positions."""
        hidden = self._model.hidden_sequences(tokens, slice(None))
        self._head.observe_all(tokens, hidden)
        return hidden[:, rows]

    def project(self, x: np.ndarray) -> np.ndarray:
        """The trunk's logits."""
        return self._model.project(x)


def observe_batches(
    head: MtpHead, inputs: np.ndarray, hidden: np.ndarray, batches: Iterable[slice],
    observer_of: Callable[[slice], Callable[..., None]],
) -> None:  # fmt: skip
    """Run MTP layers over batches of chunks, as `DraftingModel` does, on the states that leave the trunk.

    inputs        int[chunks, n_ctx]
    hidden        float32[chunks, n_ctx, n_embd]
    observer_of   gives the observer of a batch
    """
    try:
        for batch in batches:
            head.observer = of_layers(observer_of(batch))
            head.observe_all(np.asarray(inputs[batch], np.int64), hidden[batch])
    finally:
        head.observer = None


def of_layers(observer: Callable[..., None]) -> Callable[..., None]:
    """An observer that gets the tensors of blocks only."""

    def observe(name: str, x: np.ndarray, *which: int) -> None:
        if name.startswith("blk."):
            observer(name, x, *which)

    return observe
