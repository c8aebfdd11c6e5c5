"""Measure a model's speed: prompts and generation at given depths (`bench`), while the KV cache fills (`sweep`), and
of several sequences at once (`batched`).

    tokens/s   prompt: tokens of one batch divided by its time, logits of the last token only
               generation: one token at a time
    GB/s       generation: bytes read per token (weights and filled cache) times tokens/s
    share      GB/s divided by the speed at which the same threads sum the model's bytes (`read_speed`). Generation is
               bound by memory bandwidth, or by the CPU cache for a small model

Times are medians over repetitions after a warm-up run, which compiles kernels and loads pages of the file. Token ids
are random, because the time does not depend on them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from quantkit.archs.common import blocks
from quantkit.codegen import jit, thread_pool
from quantkit.errors import DataError

if TYPE_CHECKING:
    from quantkit.runtime.kv.cache import Cache
    from quantkit.runtime.model import Model

_PIECE = 1 << 22  # bytes that a thread reads at a time


@dataclass(frozen=True)
class Case:
    """A test: `prompt` tokens in one batch, then `generate` tokens one by one, after `depth` tokens in the cache.

    `name` has llama-bench's form: pp512, tg128, pp512+tg128, followed by @ and the untimed tokens in the cache.
    """

    prompt: int
    generate: int
    depth: int = 0

    @property
    def name(self) -> str:
        """The test's name."""
        parts = [f"pp{self.prompt}"] * bool(self.prompt) + [f"tg{self.generate}"] * bool(self.generate)
        return "+".join(parts) + (f"@pp{self.depth}" if self.depth else "")

    @property
    def n_ctx(self) -> int:
        """Tokens of the cache that the test needs."""
        return self.depth + self.prompt + self.generate


@dataclass(frozen=True)
class MeasuredSpeed:
    """A row of a benchmark: seconds for `tokens` in each repetition (`samples`), after `n_kv` tokens in the cache."""

    test: str
    n_kv: int
    tokens: int
    samples: tuple[float, ...]
    bytes_read: int | None = None  # per token, of generation

    @property
    def seconds(self) -> float:
        """Median time, in seconds."""
        return statistics.median(self.samples)

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second, from the median time."""
        return self.tokens / self.seconds

    @property
    def deviation(self) -> float:
        """Sample standard deviation of tokens/s over the repetitions; 0 for a single one."""
        return statistics.stdev(self.tokens / s for s in self.samples) if len(self.samples) > 1 else 0.0

    @property
    def gb_per_second(self) -> float | None:
        """Memory traffic of generation, in 10^9 bytes/s; None for prompts."""
        return None if self.bytes_read is None else self.bytes_read * self.tokens_per_second / 1e9


@dataclass(frozen=True)
class BatchedCase:
    """A test of several sequences: `prompt` tokens each, then `generate` tokens each, one of all sequences at a time.

    `shared`: the prompt is computed once, for all sequences.
    """

    prompt: int
    generate: int
    sequences: int
    shared: bool = False

    @property
    def n_kv(self) -> int:
        """Tokens in the caches at the end, a shared prompt counted once, as in llama-batched-bench."""
        return self.prompt * (1 if self.shared else self.sequences) + self.generate * self.sequences


@dataclass(frozen=True)
class BatchedSpeed:
    """A row of `batched`: seconds of the prompts and of the generation of all sequences."""

    case: BatchedCase
    prompt_seconds: float
    generation_seconds: float

    @property
    def prompt_rate(self) -> float:
        """Prompt tokens per second, of all sequences."""
        prompts = 1 if self.case.shared else self.case.sequences
        return self.case.prompt * prompts / self.prompt_seconds

    @property
    def generation_rate(self) -> float:
        """Generated tokens per second, of all sequences."""
        return self.case.generate * self.case.sequences / self.generation_seconds

    @property
    def seconds(self) -> float:
        """Seconds of both."""
        return self.prompt_seconds + self.generation_seconds

    @property
    def rate(self) -> float:
        """Tokens per second, of prompts and generation together."""
        return self.case.n_kv / self.seconds


def bytes_per_token(model: Model, n_kv: int) -> int:
    """Bytes read to generate one token: all weights, one row of the embedding, the selected experts, the filled part of
    the KV cache, and the states of recurrent layers. With smart expert reduction (-ser) a lower bound: only the experts
    that always run are counted. Of experts some of which have no matrices, as many as tokens select on average if all
    are selected as often."""
    embedding = model.head.embedding
    output = model.head.output.weight
    weights = sum(t.nbytes for name, t in model.weights.items() if name != embedding or name == output)
    for part in (part for block in model.blocks for part in block.parts):
        if isinstance(part, blocks.Experts):
            stacked = sum(model.weights[linear.weight].nbytes for linear in part.matrices)
            used = model.expert_reduction[0] if model.expert_reduction else part.used
            weights -= stacked // part.stacked * max(0, part.stacked - used * part.stacked // part.count)
    if embedding != output:
        weights += model.weights[embedding].nbytes // model.vocab_size
    cache = model.new_cache(1)
    return weights + n_kv * (cache.nbytes - cache.state_bytes) + cache.state_bytes


@jit.kernel
def _sum(words: np.ndarray) -> np.uint64:
    total = np.uint64(0)
    for i in range(len(words)):
        total += words[i]
    return total


def read_speed(model: Model, repeat: int = 3) -> float:
    """Bytes/s at which the model's threads sum its weights with vector instructions; the best of `repeat` passes."""
    pieces = []
    for tensor in model.weights.values():
        data = tensor.data.reshape(-1)
        data = data[: data.size // 8 * 8].view(np.uint64)
        pieces += [data[i : i + _PIECE // 8] for i in range(0, len(data), _PIECE // 8)]

    def task(start: int, stop: int) -> None:
        for piece in pieces[start:stop]:
            _sum(jit.readonly(piece))

    seconds = []
    for _ in range(repeat + 1):
        begin = time.perf_counter()
        thread_pool.over_rows(task, len(pieces), threads=model.threads, pieces=16)
        seconds.append(time.perf_counter() - begin)
    return sum(piece.nbytes for piece in pieces) / min(seconds[1:])


def bench(
    model: Model,
    cases: Sequence[Case],
    repeat: int,
    *,
    warmup: bool = True,
    delay: float = 0.0,
    seed: int = 0,
    progress: Callable[[str, float], None] | None = None,
) -> Iterator[MeasuredSpeed]:
    """Time each case in turn: `repeat` samples, after `delay` seconds and an untimed run if `warmup` is set.

    `progress` is called after each run, warm-up included, with the test's name and its tokens/s.
    """
    longest = max(case.n_ctx for case in cases)
    tokens = np.random.default_rng(seed).integers(0, model.vocab_size, longest)
    cache = model.new_cache(longest)
    for case in cases:
        time.sleep(delay)
        if case.depth:
            _prompt(model, cache, tokens[: case.depth], 0)
            cache.mark()
        samples = []
        for _ in range(repeat + warmup):
            samples.append(_run(model, cache, case, tokens))
            if progress is not None:
                progress(case.name, (case.prompt + case.generate) / samples[-1])
        samples = samples[warmup:]
        read = None if case.prompt else bytes_per_token(model, case.depth + case.generate // 2)
        yield MeasuredSpeed(case.name, case.depth, case.prompt + case.generate, tuple(samples), read)


def sweep(
    model: Model,
    n_ctx: int,
    n_batch: int,
    *,
    n_generate: int = 0,
    repeat: int = 1,
    stride: int = 1,
    warmup: bool = True,
    warmup_batch: bool = False,
    seed: int = 0,
) -> Iterator[tuple[MeasuredSpeed, MeasuredSpeed]]:
    """Fill a cache of `n_ctx` tokens in batches of `n_batch`; time each batch, and generation at the same depth.

    n_generate     tokens to generate at each depth, by default n_batch / 4; the batch then overwrites them
    repeat         number of timed repetitions at each depth
    stride         time every stride-th batch; the others only fill the cache
    warmup         generate one token beforehand, untimed
    warmup_batch   warm up with a whole batch instead of one token
    """
    n_generate = n_generate or max(1, n_batch // 4)
    if n_batch + n_generate > n_ctx:
        raise DataError(
            f"a context of {n_ctx} tokens cannot hold a batch of {n_batch} and {n_generate} generated tokens; raise -c"
        )
    tokens = np.random.default_rng(seed).integers(0, model.vocab_size, max(n_batch, n_generate))
    cache = model.new_cache(n_ctx)
    if warmup:
        _generation(model, cache, tokens[:1], 0)
    if warmup_batch:
        _prompt(model, cache, tokens[:n_batch], 0)
    cache.truncate(0)
    for step, n_kv in enumerate(range(0, n_ctx - max(n_batch, n_generate) + 1, n_batch)):
        cache.mark()
        if step % stride:
            _prompt(model, cache, tokens[:n_batch], n_kv)
            continue
        generated = tuple(_generation(model, cache, tokens[:n_generate], n_kv) for _ in range(repeat))
        filled = tuple(_prompt(model, cache, tokens[:n_batch], n_kv) for _ in range(repeat))
        read = bytes_per_token(model, n_kv + n_generate // 2)
        yield (
            MeasuredSpeed(f"pp{n_batch}", n_kv, n_batch, filled),
            MeasuredSpeed(f"tg{n_generate}", n_kv, n_generate, generated, read),
        )


def batched(model: Model, cases: Sequence[BatchedCase], *, seed: int = 0) -> Iterator[BatchedSpeed]:
    """Time each case once, as llama-batched-bench does, after a short prompt and token that compile the kernels."""
    random = np.random.default_rng(seed)
    _batched(model, BatchedCase(min(16, min(case.prompt for case in cases)), 1, 2), random)
    for case in cases:
        yield _batched(model, case, random)


def _batched(model: Model, case: BatchedCase, random: np.random.Generator) -> BatchedSpeed:
    caches = [model.new_cache(case.prompt + case.generate) for _ in range(case.sequences)]
    prompts = random.integers(0, model.vocab_size, (case.sequences, case.prompt))
    first = 1 if case.shared else case.sequences
    begin = time.perf_counter()
    model.forward_batch(list(zip(prompts[:first], caches[:first])))
    prompted = time.perf_counter()
    if case.shared and case.sequences > 1:
        state = caches[0].save()
        for cache in caches[1:]:
            cache.restore(state)
    tokens = random.integers(0, model.vocab_size, (case.generate, case.sequences, 1))
    resumed = time.perf_counter()
    for step in tokens:
        model.forward_batch(list(zip(step, caches)))
    return BatchedSpeed(case, prompted - begin, time.perf_counter() - resumed)


def _run(model: Model, cache: Cache, case: Case, tokens: np.ndarray) -> float:
    """Seconds of a case. The first `depth` tokens of the cache stay."""
    seconds, at = 0.0, case.depth
    if case.prompt:
        seconds += _prompt(model, cache, tokens[at : at + case.prompt], at)
    if case.generate:
        at += case.prompt
        seconds += _generation(model, cache, tokens[at : at + case.generate], at)
    return seconds


def _prompt(model: Model, cache: Cache, tokens: np.ndarray, n_kv: int) -> float:
    cache.truncate(n_kv)
    begin = time.perf_counter()
    model.forward(tokens, cache, logits="last")
    return time.perf_counter() - begin


def _generation(model: Model, cache: Cache, tokens: np.ndarray, n_kv: int) -> float:
    cache.truncate(n_kv)
    begin = time.perf_counter()
    for token in tokens:
        model.forward([token], cache, logits="last")
    return time.perf_counter() - begin
