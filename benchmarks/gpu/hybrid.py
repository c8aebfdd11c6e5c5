"""Stage `hybrid`: layers of models with experts, the routed experts on the CPU and the rest on the GPU: one token.

The layers have the shapes of DeepSeek V3 (latent attention, a shared expert) and of Qwen3 30B-A3B. Seconds of a token:

    step             all of it, after `context` tokens; tg is its inverse
    cpu              the CPU's part alone: the routed experts of all layers, with the inputs of some tokens
    rest             a step in which the experts' results are given: the GPU's part, its launches and the transfers
    of_longer_part   step over the longer one of cpu and rest (aim 1.15 at most)
    token            seconds of the GPU, and of the host without its waiting for the GPU, from torch's profiler; the
                     experts are part of the host's
    cpu_tg           tokens/s of the CPU alone
    error            of the logits against the CPU's, the median of the tokens
    experts_error    the largest of what the step's experts made in one token, from the plain formulas: routing in
                     float32 of what the GPU sent, and decoded weights. An expert left out or mistaken is found here
                     even if only some tokens use it
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.gpu.run import Figures, Run, error, median_error, seconds
from benchmarks.gpu.running import (
    EXPERTS,
    EXPERTS_TOLERANCE,
    each_with_experts,
    generate,
    n_ctx,
    on_cpu,
    on_gpu,
    times,
    traced_tokens,
)
from benchmarks.records import Column, Table
from quantkit.errors import QuantkitError
from quantkit.runtime.blocks import experts, float_linear
from quantkit.runtime.cuda.gpu_decode import HostExperts
from quantkit.runtime.model import Model

ONE_TOLERANCE = 0.02  # of a layer's experts: 0.006 by bytes of activations, 0.03 to 0.12 without the last of eight

TABLE = Table(
    "gpu_hybrid",
    "How fast are models with experts on the CPU and the rest on a GPU?",
    (
        Column("model"),
        Column("tg", "generation, tokens/s", ".1f"),
        Column("cpu_tg", "CPU alone, tokens/s", ".1f"),
        Column("step_ms", "step, ms", ".2f"),
        Column("cpu_ms", "experts, ms", ".2f"),
        Column("rest_ms", "GPU and transfers, ms", ".2f"),
        Column("of_longer_part", "step of the longer part", ".2f"),
    ),
    "A few layers with random weights, after 512 tokens. The step of one token, the CPU's experts alone, all but these "
    "alone; the step over the longer one of the two.",
)


def measure(run: Run) -> None:
    """Each shape in each type."""
    each_with_experts(run, measure_model, line)


def rows(figures: Figures) -> list[Figures]:
    """One row for each model."""
    return [
        {"model": name, "tg": got["tg"], "cpu_tg": got["cpu_tg"], "of_longer_part": got["of_longer_part"]}
        | {f"{part}_ms": 1e3 * got[part] for part in ("step", "cpu", "rest")}
        for name, got in figures.items() if "failed" not in got
    ]  # fmt: skip


def line(got: Figures) -> str:
    """The times in words."""
    parts = ", ".join(f"{part} {1e3 * got[part]:.2f}" for part in ("step", "cpu", "rest"))
    return (
        f"TG {got['tg']:.1f} tokens/s, CPU alone {got['cpu_tg']:.1f}; ms: {parts}; step of the longer part "
        f"{got['of_longer_part']:.2f} (aim 1.15); {times(got['token'])}; logits {got['error']:.1e} from the CPU's, "
        f"experts {got['experts_error']:.1e} from the plain formulas'"
    )


def measure_model(run: Run, shape: str, kind: str, got: Figures) -> None:
    """All times of one model; what was measured is saved before what may fail."""
    path, sizes = run.file(shape, kind), run.sizes
    model = on_gpu(run, path, override_tensor=EXPERTS)
    cache = model.new_cache(n_ctx(sizes))
    step, logits = generate(model, sizes, cache)
    got |= {"step": step, "tg": 1 / step}
    run.save()
    got |= parts(run, model, cache)
    got["of_longer_part"] = step / max(got["cpu"], got["rest"])
    run.save()
    got["token"] = traced_tokens(run, model, cache, sizes.traced).figures(sizes.traced)
    per_token, expected = generate(*on_cpu(run, path))
    got |= {"cpu_tg": 1 / per_token, "error": median_error(logits, expected)}
    got["right"] = got["error"] < EXPERTS_TOLERANCE and got["experts_error"] < ONE_TOLERANCE


def parts(run: Run, model: Model, cache: Any) -> Figures:
    """Seconds of a token's parts: cpu, rest; and the error of its experts.

    Each part alone repeats what some tokens did. QuantkitError where the step no longer computes its experts by
    `HostExperts.run`.
    """
    count = run.sizes.recorded
    calls = recorded(lambda: tokens(run, model, cache, count))
    if not calls:
        raise QuantkitError("no layer computed experts by HostExperts")

    def compute() -> None:
        for call in calls:
            call.enter()
            call.experts.run()

    cpu = seconds(run.gpu, compute, run.sizes.repeat) / count
    given = iter(calls * 2)  # for a token to warm up as well
    with mock.patch.object(HostExperts, "run", lambda experts: np.copyto(experts.out, next(given).out)):
        tokens(run, model, cache, 1)
        begin = time.perf_counter()
        tokens(run, model, cache, count)
        rest = (time.perf_counter() - begin) / count
    return {"cpu": cpu, "rest": rest, "experts_error": max(call.error(model) for call in calls[: len(calls) // count])}


def tokens(run: Run, model: Model, cache: Any, count: int) -> None:
    """Generate the same tokens each time, after the context."""
    cache.truncate(run.sizes.context)
    for token in np.random.default_rng(7).integers(0, model.vocab_size, count):
        model.forward([int(token)], cache, logits="last")


@dataclass(frozen=True)
class Call:
    """What a layer's experts on the CPU got from the GPU in one token, and what they made: copies."""

    experts: HostExperts
    entering: tuple[np.ndarray, ...]
    out: np.ndarray

    def enter(self) -> None:
        """Let the experts get it once more."""
        for target, values in zip(self.experts.entering, self.entering):
            np.copyto(target, values)

    def error(self, model: Model) -> float:
        """Of `out`, from the plain formulas: the router's product, the choice, the sum of the experts."""
        part, x = self.experts.part, self.entering[0]
        logits = x @ model.weights[part.router.weight].dequantize().T
        bias = float_linear.vector(model.weights[part.choice_bias]) if part.choice_bias else None
        chosen, weights = experts.route(part, logits, bias=bias)
        return error(self.out, experts.run(part, model.weights, x, chosen, weights, model.threads))


def recorded(task: Callable[[], None]) -> list[Call]:
    """The calls of the CPU's experts."""
    calls: list[Call] = []
    original = HostExperts.run

    def run(host: HostExperts) -> None:
        entering = tuple(map(np.array, host.entering))
        original(host)
        calls.append(Call(host, entering, np.array(host.out)))

    with mock.patch.object(HostExperts, "run", run):
        task()
    return calls
