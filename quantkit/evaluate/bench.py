"""How fast a model runs: prompts and generation, at an empty cache (`bench`) and as it fills (`sweep`).

    tokens/s   prompt: tokens of one batch over its time, logits of the last only; generation: one token at a time
    GB/s       generation: bytes read for a token, weights and filled cache, times tokens/s. Beside what the memory
               can deliver it tells how much there is left to gain.

Times are medians over repeats, after one that does not count (kernels compile, pages of the file come in).
Token ids are random: what is computed does not depend on them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from quantkit.archs import blocks
from quantkit.errors import DataError


@dataclass(frozen=True)
class Speed:
    """A row of a bench: `tokens` run in `seconds` (median) with `n_kv` in the cache before them."""

    test: str  # "pp512", "tg128"
    n_kv: int
    tokens: int
    seconds: float
    bytes_read: int | None = None  # per token

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def gb_per_second(self) -> float | None:
        return None if self.bytes_read is None else self.bytes_read * self.tokens_per_second / 1e9


def bytes_per_token(model: Any, n_kv: int) -> int:
    """What generating a token reads: every weight once, of the embedding one row, of experts those that are used, of
    the cache what is filled."""
    embedding = model.head.embedding
    output = model.head.output.weight
    weights = sum(t.nbytes for name, t in model.weights.items() if name != embedding or name == output)
    for part in (part for block in model.blocks for part in block.parts):
        if isinstance(part, blocks.Experts):
            stacked = sum(model.weights[linear.weight].nbytes for linear in (part.gate, part.up, part.down))
            weights -= stacked // part.count * (part.count - part.used)
    if embedding != output:
        weights += model.weights[embedding].nbytes // model.vocab_size
    cache = model.new_cache(1)
    return weights + n_kv * cache.nbytes


def bench(model: Any, n_prompt: int, n_generate: int, repeat: int, seed: int = 0) -> list[Speed]:
    """Speed of a prompt of `n_prompt` tokens, and of `n_generate` tokens, each from an empty cache; 0: left out."""
    tokens = np.random.default_rng(seed).integers(0, model.vocab_size, max(n_prompt, n_generate))
    cache = model.new_cache(max(n_prompt, n_generate))
    found = []
    if n_prompt:
        seconds = [_prompt(model, cache, tokens[:n_prompt], 0) for _ in range(repeat + 1)][1:]
        found.append(Speed(f"pp{n_prompt}", 0, n_prompt, statistics.median(seconds)))
    if n_generate:
        seconds = [_generation(model, cache, tokens[:n_generate], 0) for _ in range(repeat + 1)][1:]
        read = bytes_per_token(model, n_generate // 2)
        found.append(Speed(f"tg{n_generate}", 0, n_generate, statistics.median(seconds), read))
    return found


def sweep(model: Any, n_ctx: int, n_batch: int, seed: int = 0) -> Iterator[tuple[Speed, Speed]]:
    """While a cache of `n_ctx` fills in steps of `n_batch`: the speed of each, and of n_batch / 4 tokens before it."""
    n_generate = max(1, n_batch // 4)
    if n_batch + n_generate > n_ctx:
        raise DataError(f"a context of {n_ctx} has no room for a batch of {n_batch} and {n_generate} tokens after it")
    tokens = np.random.default_rng(seed).integers(0, model.vocab_size, n_batch)
    cache = model.new_cache(n_ctx)
    _prompt(model, cache, tokens, 0)
    _generation(model, cache, tokens[:1], 0)
    for n_kv in range(0, n_ctx - n_batch - n_generate + 1, n_batch):
        generated = _generation(model, cache, tokens[:n_generate], n_kv)
        filled = _prompt(model, cache, tokens, n_kv)
        read = bytes_per_token(model, n_kv + n_generate // 2)
        yield (
            Speed(f"pp{n_batch}", n_kv, n_batch, filled),
            Speed(f"tg{n_generate}", n_kv, n_generate, generated, read),
        )


def _prompt(model: Any, cache: Any, tokens: np.ndarray, n_kv: int) -> float:
    cache.length = n_kv
    begin = time.perf_counter()
    model.forward(tokens, cache, logits="last")
    return time.perf_counter() - begin


def _generation(model: Any, cache: Any, tokens: np.ndarray, n_kv: int) -> float:
    cache.length = n_kv
    begin = time.perf_counter()
    for token in tokens:
        model.forward([token], cache, logits="last")
    return time.perf_counter() - begin
