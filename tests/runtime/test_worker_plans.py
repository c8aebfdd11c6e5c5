"""Compiled plans of a model on several devices: experts of single layers, runs of layers and the head on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantkit.archs.common import blocks
from quantkit.errors import DataError
from quantkit.formats import gguf
from quantkit.placement import workspace
from quantkit.runtime.blocks import experts, float_attention
from quantkit.runtime.compiled import experts_plan
from quantkit.runtime.compiled.experts_plan import ExpertsPlan
from quantkit.runtime.compiled.plan_base import ExpertOptions, ModelParts
from quantkit.runtime.loading import load
from quantkit.runtime.model import Model
from tests.archs.files import written
from tests.runtime.conftest import rewrite
from tests.runtime.test_model import edited, put
from tests.runtime.test_step import HALVES, TOKENS, by_steps, spread

# Shared experts and a router with a bias; biases of experts; latents without a gate; weighted inputs; ff of no vector.
MOES: dict[str, dict[str, Any]] = {
    "qwen3moe": {"moe_intermediate_size": 96},
    "deepseek2": {"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    "glm4moe": {"n_shared_experts": 2},
    "gpt-oss": {},
    "nemotron_h_moe": {},
    "llama4": {"num_experts_per_tok": 2},
}
LAYERS = {**MOES, "llama": {}, "gemma3": {}, "qwen35moe": {"num_hidden_layers": 5}, "lfm2": {}, "kimi-linear": {}}
SPLITS: dict[str, dict[str, Any]] = {
    "layers": {"devices": "cpu:0,cpu:1"},
    "half": {"devices": "cpu:0", "gpu_layers": 1},
    "experts": {"devices": "cpu:0", "override_tensor": "exps=CPU"},
}


def fast(path: Path, **options: Any) -> Model:
    return load(path, **{"numerics": "fast", "cache_type": "f32", "mla": 1} | options)


def layer_by_layer(monkeypatch: pytest.MonkeyPatch, path: Path, **options: Any) -> Model:
    """A split model that uses no plan."""
    model = fast(path, **options)
    assert model.split is not None
    for worker in model.split._workers.values():
        monkeypatch.setattr(type(worker), "compiles", False)
    return model


def parts_of(model: Model) -> list[blocks.Experts]:
    return [part for block in model.blocks for part in block.parts if isinstance(part, blocks.Experts)]


# ------------------------------------------------------------------------------------------ experts of single layers


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("arch", MOES)
def test_experts_are_those_of_the_plain_formula(arch: str, fused: bool, threads: int, tmp_path: Path) -> None:
    """One token, few and many, some with fewer experts than others, in the layers one after another."""
    model, rng = load(written(tmp_path / "m.gguf", arch, **MOES[arch])), np.random.default_rng(1)
    options = ExpertOptions(fused)
    plan = ExpertsPlan(ModelParts(model.weights, (), model.head, threads, model.attention, options), {})
    for tokens in (1, 2, 7, 1, 90):
        for part in parts_of(model):
            x = rng.standard_normal((tokens, part.latent or model.hparams.n_embd), np.float32)
            chosen = np.stack([rng.permutation(part.stacked)[: part.used] for _ in range(tokens)])
            chosen[::3, part.used - 1 :] = -1
            weights = rng.random(chosen.shape, np.float32) * (chosen >= 0)
            expected = experts.run(part, model.weights, x, chosen, weights, 1)
            assert spread(plan(part, x, chosen, weights), expected) < 1e-5


def test_a_token_without_experts_gets_nothing(tmp_path: Path) -> None:
    model = load(written(tmp_path / "m.gguf", "gpt-oss"))
    plan = ExpertsPlan(ModelParts(model.weights, (), model.head, 2, model.attention, ExpertOptions()), {})
    part = parts_of(model)[0]
    for tokens in (1, 4):
        x, chosen = np.ones((tokens, model.hparams.n_embd), np.float32), np.full((tokens, part.used), -1)
        assert not plan(part, x, chosen, np.zeros(chosen.shape, np.float32)).any()


@pytest.mark.parametrize("kind", ["f32", "q8_0"])
@pytest.mark.parametrize("arch", MOES)
def test_prepared_experts_give_the_same_bits(arch: str, kind: str, tmp_path: Path) -> None:
    """They read their arrays anew each time, count the same bytes, and see that plans were dropped."""
    path = rewrite(written(tmp_path / "m.gguf", arch, **MOES[arch]), tmp_path / "q.gguf", kind)
    model, rng = fast(path, threads=2, **SPLITS["experts"]), np.random.default_rng(2)
    assert model.split is not None
    worker, ledger = model.split._workers["CPU"], model.split.ledger
    calls = []
    for part in parts_of(model):
        n = part.latent or model.hparams.n_embd
        x, out = np.empty((1, n), np.float32), np.empty((1, n), np.float32)
        chosen, weights = np.empty((1, part.used), np.int32), np.empty((1, part.used), np.float32)
        calls.append((part, x, chosen, weights, out, worker.prepared_experts(part, x, chosen, weights, out)))
    for turn in range(3):
        for part, x, chosen, weights, out, call in calls:
            x[:], weights[:] = rng.standard_normal(x.shape), rng.random(weights.shape)
            chosen[0] = rng.permutation(part.stacked)[: part.used]
            ledger.clear()
            expected, read = worker.run_experts(part, x, chosen, weights), dict(ledger.weights)
            ledger.clear()
            call()
            np.testing.assert_array_equal(out, expected)
            assert dict(ledger.weights) == read
            assert ledger.seconds["CPU"].keys() == {"experts"}
        if turn == 1:
            worker.drop_cached([])
    chosen[0, -1] = part.stacked
    with pytest.raises(AssertionError, match="an expert that is none"):
        call()


def test_prepared_experts_without_a_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They run layer by layer, as where something observes them."""
    model = layer_by_layer(monkeypatch, written(tmp_path / "m.gguf", "qwen3moe"), **SPLITS["experts"])
    assert model.split is not None
    worker, part = model.split._workers["CPU"], parts_of(model)[0]
    x, out = np.ones((1, model.hparams.n_embd), np.float32), np.zeros((1, model.hparams.n_embd), np.float32)
    chosen, weights = np.arange(part.used)[None], np.full((1, part.used), 0.5, np.float32)
    worker.prepared_experts(part, x, chosen, weights, out)()
    np.testing.assert_array_equal(out, experts.run(part, model.weights, x, chosen, weights, 1))
    assert out.any()


@pytest.mark.parametrize("batch", [512, 32])
@pytest.mark.parametrize("kind", ["f32", "q8_0", "q4_0", "iq4_nl"])
def test_experts_of_a_model_on_devices(kind: str, batch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every expert is used: with quantized activations near ties of two would be chosen apart."""
    monkeypatch.setattr(experts_plan, "BATCH_TOKENS", batch)
    source = written(tmp_path / "m.gguf", "qwen3moe", num_experts_per_tok=6)
    path = rewrite(source, tmp_path / "q.gguf", kind)
    expected = load(path, cache_type="f32").logits(TOKENS)
    model = fast(path, **SPLITS["experts"])
    limit = {"f32": 1e-5, "q8_0": 0.02}.get(kind, 0.03)
    assert spread(model.logits(TOKENS), expected) < (1e-5 if kind == "f32" else 0.02)
    assert spread(by_steps(model, TOKENS), expected) < limit


# -------------------------------------------------------------------------------------------------- models on devices


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("how", SPLITS)
@pytest.mark.parametrize("arch", LAYERS)
def test_split_models_give_the_exact_logits(arch: str, how: str, threads: int, tmp_path: Path) -> None:
    path = written(tmp_path / "m.gguf", arch, **LAYERS[arch])
    expected = load(path, cache_type="f32", mla=1).logits(TOKENS)
    model = fast(path, threads=threads, **SPLITS[how])
    assert spread(model.logits(TOKENS), expected) < 1e-4
    assert spread(by_steps(model, TOKENS), expected) < 1e-4


@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
@pytest.mark.parametrize("how", ["layers", "half"])
@pytest.mark.parametrize("arch", LAYERS)
def test_layers_on_cpus_give_the_bits_of_one_device(arch: str, how: str, kind: str, tmp_path: Path) -> None:
    path = rewrite(written(tmp_path / "m.gguf", arch, **LAYERS[arch]), tmp_path / "q.gguf", kind)
    one, model = fast(path), fast(path, **SPLITS[how])
    assert one.fallback_reason is None
    ours, theirs = one.new_cache(128), model.new_cache(128)
    for part in (TOKENS[:1], TOKENS[1:40], TOKENS[40:41], TOKENS[41:43], TOKENS[43:44], TOKENS[44:45]):
        expected, result = one.forward(part, ours, "last"), model.forward(part, theirs, "last")
        assert np.array_equal(result, expected)


def test_long_prompts_and_several_sequences(tmp_path: Path) -> None:
    """More tokens than a batch has, and sequences of their own lengths, which one pass takes together."""
    tokens = np.random.default_rng(5).integers(2, 320, 1100)
    for arch in ("qwen3moe", "qwen35moe"):
        path = written(tmp_path / "m.gguf", arch, max_position_embeddings=2048)
        expected, model = load(path, cache_type="f32").logits(tokens), fast(path, **SPLITS["half"])
        assert spread(model.logits(tokens), expected) < 1e-4
        caches, done = [model.new_cache(n) for n in (1100, 600, 700)], [0, 0, 0]
        for counts in ((1, 300, 5), (1, 1, 1), (700, 2, 600), (1, 1, 1)):
            parts = [(tokens[d : d + n], cache) for d, n, cache in zip(done, counts, caches)]
            done = [d + n for d, n in zip(done, counts)]
            assert spread(model.forward_batch(parts), expected[[d - 1 for d in done]]) < 1e-4
        saved = caches[1].save()
        again = model.forward(tokens[done[1] : done[1] + 5], caches[1])
        caches[1].restore(saved)
        assert np.array_equal(model.forward(tokens[done[1] : done[1] + 5], caches[1]), again)
        fresh = model.forward_sequences(tokens[:80].reshape(2, 40), slice(None))
        assert spread(fresh[0], expected[:40]) < 1e-4


@pytest.mark.parametrize("arch", ["qwen3moe", "deepseek2", "qwen35moe"])
def test_plans_are_what_runs(arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of what is compiled runs layer by layer, from the first token on."""

    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("layer by layer")

    path = written(tmp_path / "m.gguf", arch)
    monkeypatch.setattr(experts, "run", forbidden)
    fast(path, **SPLITS["experts"]).logits(TOKENS[:5])
    monkeypatch.setattr(experts, "route", forbidden)
    monkeypatch.setattr(float_attention, "attend", forbidden)
    for how in ("layers", "half"):
        model = fast(path, **SPLITS[how])
        cache = model.new_cache(8)
        model.forward(TOKENS[:3], cache)
        model.forward(TOKENS[3:4], cache)
        assert model.split is not None
        assert all(worker is not None for worker, _ in model.split.runs)


def test_what_is_not_compiled_runs_layer_by_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact numerics, every check, a block that is in two places, types and matrices without operations."""
    path = written(tmp_path / "m.gguf", "qwen3moe")

    def runs(**options: Any) -> list[bool]:
        split = fast(path, devices="cpu:0", **options).split
        assert split is not None
        return [worker is not None for worker, _ in split.runs]

    assert runs() == [True]
    assert runs(numerics="exact") == runs(tripwire="full") == runs(override_tensor="exps=CPU") == [False]
    assert runs(override_tensor="blk.1.attn_q=CPU") == [True, False]
    monkeypatch.setattr("quantkit.runtime.kernels.dispatch.product", lambda kind: None)
    assert runs() == [False]
    model = fast(path, **SPLITS["experts"])
    assert spread(model.logits(TOKENS), load(path, cache_type="f32").logits(TOKENS)) < HALVES


def test_layer_by_layer_and_plans_are_near(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = rewrite(written(tmp_path / "m.gguf", "glm4moe", num_experts_per_tok=8), tmp_path / "q.gguf", "q8_0")
    for how in SPLITS.values():
        compiled = by_steps(fast(path, **how), TOKENS)
        with monkeypatch.context() as patch:
            plain = by_steps(layer_by_layer(patch, path, **how), TOKENS)
        assert 0 < spread(compiled, plain) < 0.03


@pytest.mark.parametrize("how", SPLITS)
def test_observers_see_every_matrix(how: str, tmp_path: Path) -> None:
    path = written(tmp_path / "m.gguf", "qwen3moe")
    model, seen = fast(path, **SPLITS[how]), set()
    before = model.logits(TOKENS)
    model.observer = lambda name, x, *which: seen.add(name)
    assert spread(model.logits(TOKENS), before) < HALVES
    names = {name for name in model.weights if "blk" in name and "norm" not in name} | {"output.weight"}
    assert seen == names
    model.observer = None
    seen.clear()
    assert np.array_equal(model.logits(TOKENS), before)
    assert not seen


def test_a_reduction_of_experts(tmp_path: Path) -> None:
    path = written(tmp_path / "m.gguf", "qwen3moe", num_experts_per_tok=6)
    expected = load(path, cache_type="f32", expert_reduction=(2, 0.5)).logits(TOKENS)
    assert spread(load(path, cache_type="f32").logits(TOKENS), expected) > 0.01
    for how in SPLITS.values():
        assert spread(by_steps(fast(path, expert_reduction=(2, 0.5), **how), TOKENS), expected) < 1e-4


def test_replaced_tensors_are_read_again(tmp_path: Path) -> None:
    path = written(tmp_path / "m.gguf", "qwen3moe")
    changed = edited(path, tmp_path / "c.gguf", "blk.0.ffn_down_exps.weight", put(3, 5, 40.0))
    expected = load(changed, cache_type="f32").logits(TOKENS)
    for how in SPLITS.values():
        model = fast(path, **how)
        assert spread(model.logits(TOKENS), expected) > 1e-3
        model.weights = gguf.open(changed).tensors
        model.drop_cached(model.weights)
        assert spread(model.logits(TOKENS), expected) < 1e-4


@pytest.mark.parametrize("how", SPLITS)
@pytest.mark.parametrize("name", ["blk.1.ffn_down_exps.weight", "blk.0.attn_k.weight", "output.weight"])
def test_a_bad_tensor_is_named(name: str, how: str, tmp_path: Path) -> None:
    """By the first token, a prompt, and a token that comes after others."""
    source = written(tmp_path / "m.gguf", "qwen3moe", num_experts_per_tok=6)
    path = edited(source, tmp_path / "bad.gguf", name, put(3, 5, np.nan))
    for tokens in (TOKENS[:1], TOKENS[:5]):
        model = fast(path, **SPLITS[how])
        cache = model.new_cache(16)
        for _ in range(2):
            with pytest.raises(DataError, match=f"{name} made nan"):
                model.forward(tokens, cache)
            assert cache.length == 0


def test_a_state_beyond_float32_is_an_error(tmp_path: Path) -> None:
    """States change in place, so what is not finite is looked for from an empty cache."""
    model = fast(written(tmp_path / "m.gguf", "qwen35moe"), **SPLITS["half"])
    cache: Any = model.new_cache(64)
    model.forward(TOKENS[:5], cache)
    mark = cache.save()
    layer = min(cache.parts["CPU"].states)
    for tokens in (TOKENS[5:6], TOKENS[5:9]):
        cache.parts["CPU"].states[layer].heads[:] = np.inf
        with pytest.raises(DataError, match="a state of a recurrent layer is beyond float32"):
            model.forward(tokens, cache)
        cache.restore(mark)
        assert np.isfinite(model.forward(tokens, cache)).all()
        cache.restore(mark)


@pytest.mark.parametrize("how", SPLITS)
@pytest.mark.parametrize("arch", ["qwen3moe", "deepseek2"])
def test_placement_counts_the_memory_of_plans(arch: str, how: str, tmp_path: Path) -> None:
    """All lists of a device share their buffers; `device_bytes` is above what a prompt and a token take."""
    wide = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
    model = fast(written(tmp_path / "m.gguf", arch, **wide), threads=2, **SPLITS[how])
    cache = model.new_cache(64)
    model.forward(TOKENS[:40], cache)
    model.forward(TOKENS[40:41], cache)
    assert model.split is not None
    used, found = max(part.used for part in parts_of(model)), 0
    for name, worker in model.split._workers.items():
        shapes = {n: model.weights[n].shape for n, device in model.placement.devices.items() if device.name == name}
        if worker._compiled is not None:
            found += worker._compiled.work_bytes
            assert worker._compiled.work_bytes < workspace.device_bytes(shapes, used)
    assert found > 4 * 512 * 256  # x of a batch, at least
