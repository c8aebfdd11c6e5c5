"""A model that is a function of its tokens: what the protocol's tests look through."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np


class FakeTokenizer:
    """One token a letter; BOS is 0."""

    def __init__(self, adds_bos: bool = False):
        self.adds_bos = adds_bos
        self.bos_id = 0
        self.eos_ids = ()

    def encode(self, text: str, bos: bool | None = None, special: bool = False) -> list[int]:
        assert bos is None
        return [0] * self.adds_bos + [1 + ord(letter) % 30 for letter in text]


class FakeModel:
    """Logits are a fixed random table's rows, by token, plus its position; two weights are observed."""

    def __init__(self, seed: int = 1, vocab: int = 31, adds_bos: bool = False, noise: float = 0.0):
        rng = np.random.default_rng(seed)
        self.table = (rng.standard_normal((vocab, vocab)) * 2).astype(np.float32)
        self.table += (np.random.default_rng(seed + 1).standard_normal(self.table.shape) * noise).astype(np.float32)
        self.vocab_size = vocab
        self.n_ctx_train = 64
        self.tokenizer = FakeTokenizer(adds_bos)
        self.observer: Callable[[str, np.ndarray], None] | None = None
        self.calls: list[np.ndarray] = []
        # conditions of a run
        self.numerics, self.cache_type, self.threads, self.has_latents = "exact", "f32", 1, False
        self.attention = SimpleNamespace(flash=True)
        self.repacked = self.expert_reduction = self.split = self.fallback_reason = None

    def hidden_sequences(self, tokens: np.ndarray, rows: slice) -> np.ndarray:
        assert tokens.ndim == 2
        self.calls.append(tokens.copy())
        hidden = self.table[tokens] + 0.01 * np.arange(tokens.shape[1], dtype=np.float32)[None, :, None]
        if self.observer:
            flat = hidden.reshape(-1, self.vocab_size)
            self.observer("blk.0.ffn_up.weight", flat[:, :8])
            self.observer("blk.0.ffn_down.weight", flat)
        return hidden[:, rows]

    def project(self, hidden: np.ndarray) -> np.ndarray:
        if self.observer:
            self.observer("output.weight", hidden[:, :4])
        return np.ascontiguousarray(hidden)
