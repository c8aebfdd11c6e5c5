"""Recurrent layers: chunks against single steps, saved states, and operations of a model with recurrent layers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quantkit
from quantkit import archs, recipe, types
from quantkit.archs.common.blocks import DeltaNet, Linear, Norm, Recurrence
from quantkit.errors import DataError
from quantkit.evaluate import bench
from quantkit.formats import gguf
from quantkit.pipelines.quantize import quantize_with_plan
from quantkit.placement.kv_size import of_layers
from quantkit.runtime.blocks import recurrent
from quantkit.runtime.kv.cache import Cache
from tests.archs.files import written
from tests.other_cpus import CPUS, run_tests
from tests.other_cpus import test_that_this_is_the_path as test_that_this_is_the_path  # collected here too

TOKENS = np.random.default_rng(3).integers(2, 320, 150)


@pytest.mark.parametrize("isa", [name for name in CPUS if name != "avx512"])
@pytest.mark.full
def test_other_cpus(isa: str) -> None:
    run_tests(__file__, isa)


# ------------------------------------------------------------------------------------------------------------- the rule


def part_of(sizes: Recurrence, tiled: bool) -> DeltaNet:
    norm, linear = Norm("", 1e-6), Linear("")
    return DeltaNet(norm, linear, linear, None, linear, linear, "", "", "", norm, linear, sizes, tiled)


def plainly(part: DeltaNet, x: np.ndarray, g: np.ndarray, beta: np.ndarray, s: np.ndarray) -> np.ndarray:
    """The formulas of blocks.DeltaNet, in float64; `s` is changed."""
    sizes, out = part.sizes, np.empty((len(x), part.sizes.inner))
    q, k, v = np.split(x.astype(np.float64), [sizes.keys, 2 * sizes.keys], axis=1)
    for t in range(len(x)):
        for h in range(sizes.value_heads):
            key = h % sizes.key_heads if part.tiled else h * sizes.key_heads // sizes.value_heads
            at, to = (slice(i * n, (i + 1) * n) for i, n in ((key, sizes.head_dim_k), (h, sizes.head_dim_v)))
            s[h] *= np.exp(g[t, h])
            s[h] += np.outer(k[t, at], beta[t, h] * (v[t, to] - s[h].T @ k[t, at]))
            out[t, to] = s[h].T @ q[t, at]
    return out


@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize(
    ("key_heads", "value_heads", "dim_k", "dim_v", "tokens"),
    [(1, 1, 16, 16, 1), (2, 2, 24, 40, 2), (2, 4, 16, 8, 63), (3, 9, 8, 16, 64), (1, 4, 5, 7, 65), (4, 8, 16, 16, 131)],
)
def test_chunks_and_steps_follow_the_formula(
    key_heads: int, value_heads: int, dim_k: int, dim_v: int, tokens: int, tiled: bool
) -> None:
    rng = np.random.default_rng(tokens)
    sizes = Recurrence(4, key_heads, value_heads, dim_k, dim_v)
    part = part_of(sizes, tiled)
    x = rng.standard_normal((tokens, sizes.channels), np.float32)
    keys = x[:, sizes.keys : 2 * sizes.keys].reshape(tokens, -1, dim_k)
    keys /= np.linalg.norm(keys, axis=2, keepdims=True)
    g = -(rng.exponential(2, (tokens, value_heads)).astype(np.float32) ** 4)  # from none to all is forgotten
    beta = rng.random((tokens, value_heads), np.float32)
    first = rng.standard_normal((value_heads, dim_k, dim_v), np.float32)
    state = first.astype(np.float64)
    expected = plainly(part, x, g, beta, state)
    for chunk in (1, 7, 64, None):
        after, out = np.full_like(first, np.nan), np.full((tokens, sizes.inner), np.nan, np.float32)
        recurrent.attend(part, x, g, beta, first, after, out, 2, chunk)
        assert np.abs(out - expected).max() < 2e-5 * (1 + np.abs(expected).max())
        assert np.abs(after - state).max() < 2e-5 * (1 + np.abs(state).max())


# --------------------------------------------------------------------------------------------------------------- models


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(
        tmp_path_factory.mktemp("hybrid") / "m.gguf", "qwen35", num_hidden_layers=5, full_attention_interval=3
    )


def test_saved_sequences_that_do_not_fit_are_refused(hybrid: Path) -> None:
    model = quantkit.load(hybrid)
    cache = model.new_cache(len(TOKENS))
    model.forward(TOKENS[:70], cache)
    state = cache.save()
    with pytest.raises(DataError, match="a state of 70 tokens does not fit a cache of 69"):
        model.new_cache(69).restore(state)
    with pytest.raises(DataError, match="does not fit this one of f16"):
        model.new_cache(150, "f16").restore(state)
    with pytest.raises(DataError, match="cannot be saved"):
        model.layer_cache(8).save()


def test_attention_alone_is_saved_too(tiny: Path) -> None:
    model = quantkit.load(tiny, cache_type="q8_0")
    cache = model.new_cache(64)
    model.forward(TOKENS[:20], cache)
    state = cache.save()
    expected = model.forward(TOKENS[20:30], cache)
    other = model.new_cache(32)
    other.restore(state)
    assert np.array_equal(model.forward(TOKENS[20:30], other), expected)


def test_a_state_goes_back_to_the_mark_or_the_beginning_only(hybrid: Path) -> None:
    model = quantkit.load(hybrid)
    cache = model.new_cache(100)
    model.forward(TOKENS[:30], cache)
    cache.mark()
    expected = model.forward(TOKENS[30:40], cache)
    with pytest.raises(DataError, match=r"cannot truncate a cache of 40 tokens to 35: .* of 0 and the mark at 30"):
        cache.truncate(35)
    for _ in range(2):
        cache.truncate(30)
        assert np.array_equal(model.forward(TOKENS[30:40], cache), expected)
    cache.truncate(40)
    cache.truncate(0)
    assert np.abs(model.forward(TOKENS[:40], cache)[30:] - expected).max() < 1e-4
    with pytest.raises(DataError, match=r"only of 0; call mark\(\) or save\(\)"):
        cache.truncate(30)
    cache.clear()
    assert np.abs(model.forward(TOKENS[:40], cache)[30:] - expected).max() < 1e-4
    cache.length = 12
    with pytest.raises(DataError, match="state of recurrent layer 0 is that after 40 tokens, the cache holds 12"):
        model.forward(TOKENS[:1], cache)


def test_what_is_not_finite_is_named_and_the_states_stay(hybrid: Path) -> None:
    model = quantkit.load(hybrid)
    cache = model.new_cache(100)
    model.forward(TOKENS[:10], cache)
    name = "blk.3.ssm_out.weight"
    model._weight(Linear(name))
    good, poisoned = model._linears[Linear(name)].tensor, np.array(model.weights[name].dequantize())
    poisoned[5, 6] = np.nan

    class Bad:
        def __getattr__(self, attribute: str) -> Any:
            return getattr(good, attribute)

        def rows(self, start: int, stop: int) -> np.ndarray:
            return poisoned[start:stop].view(np.uint8)

        def dequantize(self) -> np.ndarray:
            return poisoned

    model.weights = {**model.weights, name: Bad()}
    model.drop_cached([name])
    with pytest.raises(DataError, match=r"blk\.3\.ssm_out\.weight made nan .* not finite in 1 row\(s\), first 5"):
        model.forward(TOKENS[10:20], cache)


@pytest.mark.parametrize("arch", ["qwen3next", "qwen35", "qwen35moe"])
def test_a_cache_is_as_large_as_foretold(arch: str, tmp_path: Path) -> None:
    path = written(tmp_path / "m.gguf", arch, num_hidden_layers=6)
    model, f16 = quantkit.load(path), types.layout("f16")
    for n_ctx in (1, 70):
        cache = model.new_cache(n_ctx, "f16")
        assert sum(of_layers(model.metadata, n_ctx, f16, f16)) == cache.nbytes
        assert cache.state_bytes == sum(model_state.nbytes for model_state in cache.states.values())
    assert sorted(cache.states) == [0, 1, 2, 4, 5]


def test_older_files_with_one_projection(tmp_path: Path) -> None:
    """ssm_in has of each key head query, key, the values and the gates of its value heads."""
    new = gguf.open(written(tmp_path / "new.gguf", "qwen3next"))
    sizes = archs.get("qwen3next").hparams(new.metadata, new.tensors.keys()).recurrence
    assert sizes is not None
    names = {f"blk.{i}.attn_qkv.weight": f"blk.{i}.attn_gate.weight" for i in range(3)}
    remaining = [t for t in new.tensors.values() if t.name not in names.values()]
    fused = {name: name.replace("attn_qkv", "ssm_in") for name in names}
    rows = sizes.channels + sizes.inner
    specs = [
        gguf.TensorSpec(fused.get(t.name, t.name), (rows, 64) if t.name in names else t.shape, t.type)
        for t in remaining
    ]
    with gguf.Writer(tmp_path / "old.gguf", new.metadata, specs) as writer:
        for t in remaining:
            x = t.dequantize()
            if t.name in names:
                q, k, v = np.split(x, [sizes.keys, 2 * sizes.keys])
                parts = [p.reshape(sizes.key_heads, -1, 64) for p in (q, k, v, new.tensors[names[t.name]].dequantize())]
                x = np.concatenate(parts, axis=1)
            writer.write(fused.get(t.name, t.name), np.ascontiguousarray(x).reshape(-1).view(np.uint8))
    expected, result = (quantkit.load(tmp_path / f"{name}.gguf").logits(TOKENS) for name in ("new", "old"))
    assert np.abs(result - expected).max() < 1e-4


@pytest.mark.parametrize("kind", ["Q8_0", pytest.param("IQ4_K", marks=pytest.mark.full)])
def test_quantized_files_run_in_both_numerics(kind: str, tmp_path: Path) -> None:
    """Benches and generation return to their first state."""
    wide = {"hidden_size": 256, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256,
            "num_experts_per_tok": 8}  # fmt: skip
    path = written(tmp_path / "m.gguf", "qwen35moe", **wide)
    source = gguf.open(path)
    quantize_with_plan(
        source, tmp_path / "q.gguf", recipe.plan(source.tensors.values(), kind, metadata=source.metadata)
    )
    model, fast = quantkit.load(tmp_path / "q.gguf"), quantkit.load(tmp_path / "q.gguf", numerics="fast")
    assert model.weights["blk.0.ssm_out.weight"].type.name.lower() == kind.lower()
    assert model.weights["blk.0.ssm_conv1d.weight"].type.name == "f32"
    assert fast.fallback_reason is None
    exact, rounded = model.logits(TOKENS[:40]), fast.logits(TOKENS[:40])
    assert np.abs(exact - rounded).max() < 0.5
    cache = fast.new_cache(40)
    steps = np.concatenate([fast.forward([token], cache) for token in TOKENS[:40]])
    assert np.abs(steps - exact).max() < 0.5
    rows = list(bench.sweep(fast, 24, 8, repeat=2, stride=2))
    assert [prompt.n_kv for prompt, _ in rows] == [0, 16]


def test_what_enters_each_matrix_is_observed(hybrid: Path) -> None:
    model = quantkit.load(hybrid)
    seen: dict[str, tuple[int, ...]] = {}
    model.observer = lambda name, x, *which: seen.__setitem__(name, x.shape)
    model.logits(TOKENS[:20])
    matrices = {
        name for name, tensor in model.weights.items()
        if len(tensor.shape) > 1 and name.startswith("blk.") and "conv1d" not in name
    }  # fmt: skip
    assert matrices == {name for name in seen if name.startswith("blk.")}
    assert all(seen[name] == (20, model.weights[name].shape[-1]) for name in matrices)


def test_a_model_of_recurrent_layers_only(tmp_path: Path) -> None:
    model = quantkit.load(written(tmp_path / "m.gguf", "qwen35", num_hidden_layers=2, linear_conv_kernel_dim=1))
    cache = model.new_cache(150)
    assert cache.nbytes == cache.state_bytes
    parts = [model.forward(part, cache) for part in np.split(TOKENS, (1, 70))]
    assert np.abs(np.concatenate(parts) - model.logits(TOKENS)).max() < 1e-4


def test_rows_of_positions_are_kept_by_layers_that_attend(hybrid: Path) -> None:
    model = quantkit.load(hybrid)
    hp = model.hparams
    cache = Cache(hp, 10, "f16")
    assert [len(rows[0]) for rows in cache.k] == [0, 0, 10, 0, 0]
    without = replace(hp, recurrent=frozenset(), recurrence=None)
    assert Cache(without, 10, "f16").state_bytes == 0
