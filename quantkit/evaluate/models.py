"""What evaluation needs of a model, and how a model is opened for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from quantkit.runtime.kv.cache_type import CacheType
    from quantkit.runtime.model import Model
    from quantkit.tokenizers.tokenizer import Tokenizer

OnLayer = Callable[[int, int], None]  # called with the number of layers that are done, and of all
OnMessage = Callable[[str], None]  # called with messages for the user: steps, resumed chunks, warnings


class ChunkModel(Protocol):
    """A model that gives logits for chunks of tokens; `runtime.model.Model` is one."""

    observer: Callable[..., None] | None

    @property
    def vocab_size(self) -> int:
        """Number of tokens of the vocabulary."""

    @property
    def n_ctx_train(self) -> int:
        """Tokens of the longest sequence that the model was trained with."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model's file."""

    def hidden_sequences(self, tokens: np.ndarray, rows: slice) -> np.ndarray:
        """float32[n_seq, k, n_embd]: the states at the positions `rows` of fresh sequences int[n_seq, len]."""

    def project(self, x: np.ndarray) -> np.ndarray:
        """float32[k, n_vocab]: the logits of float32[k, n_embd] states."""


class OpenModel(Protocol):
    """Opens a GGUF file as a model.

    numerics     "exact" or "fast"
    threads      None: the CPUs that this process may use
    n_ctx        tokens of the longest sequence
    cache_type   type of the KV cache; None: the opener's default
    repack       interleave rows at load; None: the opener's default
    tokenizer    the file's tokenizer, if it has been built already
    """

    def __call__(
        self,
        path: Path,
        *,
        numerics: str,
        threads: int | None,
        n_ctx: int | None,
        cache_type: CacheType | None = None,
        repack: bool | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> Model: ...


def open_model(
    path: Path,
    *,
    numerics: str,
    threads: int | None,
    n_ctx: int | None,
    cache_type: CacheType | None = None,
    repack: bool | None = None,
    tokenizer: Tokenizer | None = None,
) -> Model:
    """Open a model on the CPU with `runtime.loading.load` and its defaults."""
    from quantkit.runtime import loading

    return loading.load(
        path, numerics=numerics, threads=threads, n_ctx=n_ctx, cache_type=cache_type, repack=bool(repack),
        tokenizer=tokenizer,
    )  # fmt: skip


def no_message(line: str) -> None:
    """The default of `on_message`: drop the line."""


def layer_messages(on_message: OnMessage) -> OnLayer:
    """Give each layer of a run by layer a message."""
    return lambda done, layers: on_message(f"layer {done} of {layers}")
