"""The reference wheel's libllama through ctypes: the oracle for logits.

with Llama(path) as llama:
    llama.logits(tokens)      float32[len(tokens), n_vocab] of a fresh sequence
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantkit import types

C: Any = pytest.importorskip("ik_llama_cpp._ctypes_api", reason="reference wheel ik-llama-cpp-python is not installed")

_LOG = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)


@_LOG
def _quiet(level: int, text: bytes, data: Any) -> None:
    """The library says a lot on stderr, none of which a test reads."""


class Llama:
    """A model of the reference on the CPU, with one context."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        n_ctx: int = 1024,
        threads: int = 2,
        *,
        cache_types: tuple[str, str] | None = None,
        hadamard: tuple[bool, bool] = (False, False),
        grouped_experts: bool = False,
    ):
        """`cache_types` and `hadamard` of keys and of values; with cache types, flash attention is on.

        `grouped_experts` is its option -ger, which it heeds for bailingmoe2.
        """
        C._lib.llama_log_set(_quiet, None)
        C.llama_backend_init()
        model = C.llama_model_default_params()
        model.n_gpu_layers = 0
        self._model = C.llama_model_load_from_file(str(Path(path)).encode(), model)
        assert self._model, f"the reference does not load {path}"
        context = C.llama_context_default_params()
        context.n_ctx = context.n_batch = n_ctx
        context.n_ubatch = 512
        context.n_threads = context.n_threads_batch = threads
        context.grouped_expert_routing = grouped_experts
        if cache_types is not None:
            context.type_k, context.type_v = (types.layout(name).ggml_type for name in cache_types)
            context.flash_attn = True
            context.k_cache_hadamard, context.v_cache_hadamard = hadamard
        self._context = C.llama_init_from_model(self._model, context)
        assert self._context, f"the reference makes no context of {n_ctx} tokens for {path}"
        self.n_vocab = C.llama_vocab_n_tokens(C.llama_model_get_vocab(self._model))

    def __enter__(self) -> Llama:
        return self

    def __exit__(self, *args: object) -> None:
        C.llama_free(self._context)
        C.llama_free_model(self._model)

    def logits(self, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
        """float32[len(tokens), n_vocab] of a fresh sequence."""
        C.llama_kv_cache_clear(self._context)
        return self._decoded(tokens, 0)

    def by_steps(self, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
        """The same, a token at a time."""
        C.llama_kv_cache_clear(self._context)
        return np.concatenate([self._decoded([token], i) for i, token in enumerate(tokens)])

    def _decoded(self, tokens: Sequence[int] | np.ndarray, position: int) -> np.ndarray:
        batch = C.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i] = int(token), position + i
            batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, 0, 1
        status = C.llama_decode(self._context, batch)
        assert status == 0, f"llama_decode returned {status}"
        rows = [C.llama_get_logits_ith(self._context, i) for i in range(len(tokens))]
        found = np.stack([np.ctypeslib.as_array(row, (self.n_vocab,)) for row in rows])
        C.llama_batch_free(batch)
        return found
