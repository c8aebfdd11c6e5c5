"""What several stages do with a model: load it on the GPU, time its prompts and tokens, and profile them."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.run import Figures, Run, Sizes
from benchmarks.gpu.trace import Trace, profiled
from quantkit.runtime.loading import load
from quantkit.runtime.model import Model

EXPERTS = "_exps=CPU"  # where the stages `hybrid` and `streamed` have them
# Of the median of tokens' logits. Roundings make 0.01. Without the last of eight experts it is 0.1 in DeepSeek's
# layers, but 0.016 in Qwen's, where the stage `hybrid` looks at the experts themselves.
EXPERTS_TOLERANCE = 0.05


def each_with_experts(
    run: Run, measure_model: Callable[[Run, str, str, Figures], None], line: Callable[[Figures], str]
) -> None:
    """Each model with experts, by shape and type, as an item of the stage."""
    for shape in run.sizes.with_experts:
        for kind in run.types_of_models(("q4_K",)):
            run.item(f"{shape}, {kind}", functools.partial(measure_model, run, shape, kind), line)


def n_ctx(sizes: Sizes) -> int:
    """Tokens of the caches of the models that are measured."""
    return max(sizes.prompt, sizes.context + 2 * sizes.generated) + 1


def on_gpu(run: Run, path: Path, **placement: Any) -> Model:
    """A model as the stages run it: fast numerics, an f16 cache."""
    device = f"cuda:{run.gpu.index}"
    return load(path, devices=device, numerics="fast", cache_type="f16", n_ctx=n_ctx(run.sizes), **placement)


def on_cpu(run: Run, path: Path) -> tuple[Model, Sizes, Any]:
    """The same model on the CPU alone, with the sizes and a cache: what `generate` and `prompt` take."""
    model = load(path, numerics="fast", cache_type="f16", n_ctx=n_ctx(run.sizes))
    return model, run.sizes, model.new_cache(n_ctx(run.sizes))


def generate(model: Model, sizes: Sizes, cache: Any) -> tuple[float, np.ndarray]:
    """Median seconds of a token after `sizes.context` tokens, and the logits of all steps.

    The first two steps, which capture CUDA graphs, are not timed. Tokens are random, the same in each call.
    """
    rng, times, logits = np.random.default_rng(4), [], []
    context = rng.integers(0, model.vocab_size, sizes.context)
    cache.clear()
    model.forward(context, cache, logits="last")
    for token in rng.integers(0, model.vocab_size, sizes.generated):
        begin = time.perf_counter()
        logits.append(model.forward([int(token)], cache, logits="last"))
        times.append(time.perf_counter() - begin)
    return statistics.median(times[2:]), np.concatenate(logits)


def prompt(model: Model, sizes: Sizes, cache: Any, repeat: int) -> tuple[float, np.ndarray]:
    """Median seconds of a prompt of `sizes.prompt` random tokens, after one to warm up, and its last logits.

    With 0 for `repeat`, of the first one alone.
    """
    tokens, times = np.random.default_rng(5).integers(0, model.vocab_size, sizes.prompt), []
    for _ in range(1 + repeat):
        cache.clear()
        begin = time.perf_counter()
        last = model.forward(tokens, cache, logits="last")
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:] or times), last


def prompt_logits(model: Model, sizes: Sizes, cache: Any) -> np.ndarray:
    """The logits of all tokens of the same prompt."""
    cache.clear()
    return model.forward(np.random.default_rng(5).integers(0, model.vocab_size, sizes.prompt), cache)


def traced_tokens(run: Run, model: Model, cache: Any, count: int) -> Trace:
    """The profile of some tokens after the context, which `generate` left in the cache."""
    cache.truncate(run.sizes.context)
    tokens = np.random.default_rng(6).integers(0, model.vocab_size, count)

    def task() -> None:
        for token in tokens:
            model.forward([int(token)], cache, logits="last")

    return profiled(run.gpu, task)


def traced_prompt(run: Run, model: Model, cache: Any) -> Trace:
    """The profile of a prompt in an empty cache."""
    tokens = np.random.default_rng(5).integers(0, model.vocab_size, run.sizes.prompt)
    cache.clear()
    return profiled(run.gpu, lambda: model.forward(tokens, cache, logits="last"))


def times(part: Figures) -> str:
    """Seconds of GPU and host in ms."""
    gpu = "-" if part["gpu"] is None else f"{1e3 * part['gpu']:.2f}"
    return f"GPU {gpu} ms, host {1e3 * part['host']:.2f} ms"
