"""Models whose layers have states beside a KV cache: compiled plans, splits of a text, and saved sequences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantkit import recipe
from quantkit.formats import gguf
from quantkit.pipelines.quantize import quantize_with_plan
from quantkit.runtime.loading import load
from quantkit.runtime.model import Model
from tests.archs.files import written
from tests.other_cpus import CPUS, run_tests
from tests.other_cpus import test_that_this_is_the_path as test_that_this_is_the_path  # collected here too
from tests.runtime.test_delta_net import ODD as ODD_DELTA_NET
from tests.runtime.test_mamba2 import ODD as ODD_MAMBA2
from tests.runtime.test_step import spread

TOKENS = np.random.default_rng(3).integers(2, 320, 150)
ARCHS: dict[str, dict[str, Any]] = {  # with changes of their EXAMPLE
    "lfm2": {},
    "lfm2moe": {},
    "kimi-linear": {},
    "qwen35": {"num_hidden_layers": 5, "full_attention_interval": 3},
    "qwen4exp": {"indexer_budget": 16},
}
# With quantized activations every expert is used: near ties of two would be selected apart.
ALL_EXPERTS = {
    "lfm2moe": {"num_experts_per_tok": 8}, "kimi-linear": {"num_experts_per_token": 8},
    "qwen4exp": {"num_experts_per_tok": 8, "indexer_budget": 256},
}  # fmt: skip


@pytest.mark.parametrize("isa", [name for name in CPUS if name != "avx512"])
@pytest.mark.full
def test_other_cpus(isa: str) -> None:
    run_tests(__file__, isa)


@pytest.mark.parametrize(("arch", "kind"), [
    ("lfm2", "f32"), ("lfm2", "q8_0"), ("lfm2", "q4_0"), ("lfm2moe", "f32"), ("lfm2moe", "q8_0"),
    ("kimi-linear", "f32"), ("kimi-linear", "q8_0"), ("kimi-linear", "q4_0"), ("qwen4exp", "q8_0"),
])  # fmt: skip
@pytest.mark.parametrize("threads", [1, 2])
def test_plans_agree_with_layer_by_layer(arch: str, tmp_path: Path, kind: str, threads: int) -> None:
    path = written(tmp_path / "m.gguf", arch, **({} if kind == "f32" else ALL_EXPERTS.get(arch, {})))
    if kind != "f32":
        file = gguf.open(path)
        plan = recipe.plan(file.tensors.values(), kind, metadata=file.metadata)
        quantize_with_plan(file, tmp_path / "q.gguf", plan)
        path = tmp_path / "q.gguf"
    exact = load(path, cache_type="f32")
    fast = load(path, numerics="fast", cache_type="f32", threads=threads)
    assert fast.fallback_reason is None
    expected, cache = exact.logits(TOKENS), fast.new_cache(len(TOKENS))
    prompt = np.abs(fast.logits(TOKENS) - expected)
    steps = np.abs(np.concatenate([fast.forward([token], cache) for token in TOKENS]) - expected)
    if kind == "f32":
        assert max(prompt.max(), steps.max()) < 1e-4
    else:  # a prompt's activations have 16 bits, a token's 8
        assert prompt.max() < 0.01
        assert steps.mean() < (0.05 if arch == "kimi-linear" else 0.03)


@pytest.fixture(scope="module", params=ARCHS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("states") / "m.gguf", request.param, **ARCHS[request.param])


@pytest.mark.parametrize("numerics", ["exact", "fast"])
def test_any_split_and_several_sequences_give_the_same(path: Path, numerics: Any) -> None:
    model = load(path, numerics=numerics, cache_type="f32")
    whole = model.logits(TOKENS)
    for bounds in ((1, 2, 3, 4), (64, 65), (7, 100, 101, 149)):
        cache = model.new_cache(len(TOKENS))
        parts = [model.forward(part, cache) for part in np.split(TOKENS, bounds)]
        assert np.abs(np.concatenate(parts) - whole).max() < 1e-4
    one, other = model.new_cache(200), model.new_cache(200)
    model.forward(TOKENS[:11], other)
    both = model.forward_batch([(TOKENS, one), (TOKENS[11:60], other)])
    assert np.abs(both - whole[[-1, 59]]).max() < 1e-4
    together = model.forward_sequences(np.stack([TOKENS[:60], TOKENS[60:120]]), slice(59, 60))
    assert np.abs(together[0, 0] - whole[59]).max() < 1e-4


@pytest.mark.parametrize("numerics", ["exact", "fast"])
def test_a_sequence_is_saved_and_restored_anywhere(path: Path, numerics: Any) -> None:
    model = load(path, numerics=numerics, cache_type="f32")
    whole, cache, saved = model.logits(TOKENS), model.new_cache(len(TOKENS)), []
    for start, stop in ((0, 1), (1, 64), (64, 70), (70, 150)):
        saved.append((start, cache.save()))
        model.forward(TOKENS[start:stop], cache)
    for into in (cache, model.new_cache(len(TOKENS) + 1)):  # the same, and a larger one
        for start, state in reversed(saved):
            into.restore(state)
            assert (into.length, state.length) == (start, start)
            assert np.abs(model.forward(TOKENS[start : start + 9], into) - whole[start : start + 9]).max() < 1e-4
    assert saved[0][1].nbytes < saved[-1][1].nbytes


# ------------------------------------------------------------------------------------------- sizes that fill no vector

LONG = np.random.default_rng(3).integers(2, 320, 210)
ODD = {"qwen35": ODD_DELTA_NET, "nemotron_h": ODD_MAMBA2}


@pytest.fixture(scope="module", params=ODD)
def odd(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("odd") / "m.gguf", request.param, **ODD[request.param])


def models(path: Path) -> tuple[Model, Model]:
    """Exact and fast."""
    fast = load(path, numerics="fast", cache_type="f32")
    assert fast.fallback_reason is None
    return load(path, cache_type="f32"), fast


def test_several_sequences_in_a_batch(odd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exact, fast = models(odd)
    whole = exact.logits(LONG)
    for limit in (512, 40):  # in one batch, or in several
        monkeypatch.setattr("quantkit.runtime.model.TOGETHER_TOKENS", limit)
        caches, done = [fast.new_cache(room) for room in (210, 220, 215)], [0, 0, 0]
        for counts in ((1, 70, 5), (1, 1, 1), (64, 2, 9), (1, 1, 1)):
            parts = [(LONG[d : d + n], cache) for d, n, cache in zip(done, counts, caches)]
            done = [d + n for d, n in zip(done, counts)]
            assert spread(fast.forward_batch(parts), whole[[d - 1 for d in done]]) < 2e-5
    fresh = fast.forward_sequences(LONG.reshape(3, 70), slice(60, 70))
    assert spread(fresh, exact.forward_sequences(LONG.reshape(3, 70), slice(60, 70))) < 2e-5


def test_layer_by_layer_and_the_plans_continue_each_other(odd: Path) -> None:
    """Layer by layer exchanges the arrays of states, so the plans have to look where they are."""
    exact, fast = models(odd)
    whole, cache, rows = exact.logits(LONG), fast.new_cache(len(LONG)), []
    for i, part in enumerate(np.split(LONG, (10, 11, 12, 50, 51, 120, 121))):
        fast.observer = (lambda *_: None) if i % 2 else None
        rows.append(fast.forward(part, cache))
    assert spread(np.concatenate(rows), whole) < 2e-5
