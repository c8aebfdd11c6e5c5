"""The compiled passes, one token and prompts, against the layer-by-layer model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from quantkit import types
from quantkit.errors import DataError
from quantkit.formats import gguf
from quantkit.runtime.compiled import prefill_plan
from quantkit.runtime.loading import load
from quantkit.runtime.model import Model
from tests.runtime.conftest import FF, KV_HEADS, LAYERS, rewrite

TOKENS = np.random.default_rng(4).integers(0, 320, 90)
# Random weights of little structure: rounding activations to 8 bits, four by four, changes the logits by about half a
# percent of their spread; to 16 bits, as in batches, no more than a cache of halves does.
ROUNDED, HALVES = 0.02, 1e-3


def spread(result: np.ndarray, expected: np.ndarray) -> float:
    """Root mean square of the difference, divided by the standard deviation of the expected values."""
    return float(np.sqrt(np.mean((result - expected) ** 2)) / np.std(expected))


def by_steps(model: Model, tokens: np.ndarray, cache_type: str | None = None) -> np.ndarray:
    """Logits after each token, run one at a time."""
    cache = model.new_cache(128, cache_type)
    return np.concatenate([model.forward([token], cache) for token in tokens])


def changed(source: Path, target: Path, metadata: dict[str, tuple], extra: dict[str, np.ndarray]) -> Path:
    """A copy of a model of F32 tensors with other metadata, and other or more tensors."""
    file = gguf.open(source)
    values = {name: tensor.dequantize() for name, tensor in file.tensors.items()} | extra
    copied = file.metadata.copy()
    for key, (value, kind) in metadata.items():
        copied.set(key, value, kind)
    kinds = {name: types.layout("i32" if value.dtype == np.int32 else "f32") for name, value in values.items()}
    specs = [gguf.TensorSpec(name, value.shape, kinds[name]) for name, value in values.items()]
    with gguf.Writer(target, copied, specs) as writer:
        for name, value in values.items():
            writer.write(name, np.ascontiguousarray(value.reshape(-1, value.shape[-1])).view(np.uint8))
    return target


@pytest.fixture(scope="session")
def odd(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With biases, a sliding window shorter than the text, and rope frequency factors."""
    rng = np.random.default_rng(8)
    dim = 64
    extra = {}
    for i in range(LAYERS):
        rows = {"attn_q": 256, "attn_k": KV_HEADS * dim, "attn_v": KV_HEADS * dim, "attn_output": 256}
        for name, n in (rows | {"ffn_gate": FF, "ffn_up": FF, "ffn_down": 256}).items():
            extra[f"blk.{i}.{name}.bias"] = rng.standard_normal(n).astype(np.float32) * np.float32(0.1)
    extra["rope_freqs.weight"] = np.linspace(1, 4, dim // 2).astype(np.float32)
    window = {"llama.attention.sliding_window": (21, "u32")}
    return changed(tiny, tmp_path_factory.mktemp("odd") / "odd.gguf", window, extra)


@pytest.mark.parametrize("cache_type", ["f32", "f16"])
@pytest.mark.parametrize("name", ["tiny", "odd"])
def test_float_weights_agree_with_the_exact_model(name: str, cache_type: str, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(name)
    expected = load(path, cache_type=cache_type).logits(TOKENS)
    fast = load(path, numerics="fast", cache_type=cache_type)
    assert fast.fallback_reason is None
    bound = 1e-5 if cache_type == "f32" else 1e-3  # a rounding that falls the other way in the cache of halves
    assert spread(by_steps(fast, TOKENS), expected) < bound
    assert spread(fast.logits(TOKENS), expected) < bound


@pytest.mark.parametrize("cache_type", ["q8_0", "q5_0/q8_KV khad vhad"])
def test_quantized_caches_agree_with_the_exact_model(cache_type: str, tiny: Path) -> None:
    expected = load(tiny, cache_type=cache_type).logits(TOKENS)
    fast = load(tiny, numerics="fast", cache_type=cache_type)
    assert fast.fallback_reason is None
    assert spread(by_steps(fast, TOKENS), expected) < 5e-3  # now and then a code falls the other way
    assert spread(fast.logits(TOKENS), expected) < 5e-3
    assert spread(expected, load(tiny).logits(TOKENS)) < 0.1


def test_plain_attention_is_flash_attention(odd: Path) -> None:
    expected = load(odd, cache_type="f32").logits(TOKENS)
    for numerics in ("exact", "fast"):
        plain = load(odd, numerics=numerics, cache_type="f32", flash_attention=False, attention_mib=1)
        assert spread(plain.logits(TOKENS), expected) < 1e-5
        assert spread(by_steps(plain, TOKENS[:30]), expected[:30]) < 1e-5
        longer = plain.new_cache(300)  # the plan is built again for this length
        assert spread(plain.forward(TOKENS, longer), expected) < 1e-5


@pytest.mark.parametrize("numerics", ["exact", "fast"])
def test_sequences_of_their_own_lengths_go_on_together(
    numerics: str, odd: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their logits are those they get alone, in one batch or, with more tokens than fit, in several."""
    model = load(odd, numerics=numerics, cache_type="f32")
    alone = model.logits(TOKENS)
    for limit in (512, 20):
        monkeypatch.setattr("quantkit.runtime.model.TOGETHER_TOKENS", limit)
        caches = [model.new_cache(room) for room in (90, 128, 95)]
        done = [0, 0, 0]
        for counts in ((1, 40, 17), (1, 1, 1), (50, 1, 2)):
            parts = [(TOKENS[d : d + n], cache) for d, n, cache in zip(done, counts, caches)]
            result = model.forward_batch(parts)
            done = [d + n for d, n in zip(done, counts)]
            assert [cache.length for cache in caches] == done
            assert spread(result, alone[[d - 1 for d in done]]) < 1e-5
    with pytest.raises(DataError, match="a cache of its own"):
        model.forward_batch([([1], caches[0]), ([2], caches[0])])
    with pytest.raises(DataError, match="one type"):
        model.forward_batch([([1], caches[0]), ([2], model.new_cache(8, "f16"))])


@pytest.mark.parametrize("kind", ["q4_0", "q5_1", "q8_0", "q6_K", "iq4_k", "f16"])
def test_quantized_weights_are_near_the_exact_model(kind: str, tiny: Path, tmp_path: Path) -> None:
    path = rewrite(tiny, tmp_path / "q.gguf", kind)
    expected = load(path, cache_type="f16").logits(TOKENS)
    fast = load(path, numerics="fast")
    assert fast.fallback_reason is None
    assert spread(by_steps(fast, TOKENS), expected) < (HALVES if kind == "f16" else ROUNDED)
    assert spread(fast.logits(TOKENS), expected) < HALVES


def test_interleaved_weights_give_what_their_base_gives(tiny: Path, tmp_path: Path) -> None:
    plain, interleaved = (load(rewrite(tiny, tmp_path / k, k), numerics="fast") for k in ("q8_0", "q8_0_r8"))
    assert {t.type.name for t in interleaved.weights.values()} == {"q8_0_r8", "f32"}
    assert spread(interleaved.logits(TOKENS), plain.logits(TOKENS)) < HALVES
    assert spread(by_steps(interleaved, TOKENS[:20]), by_steps(plain, TOKENS[:20])) < ROUNDED


def test_sequences_run_as_prompts_do(odd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Perplexity judges what `forward` runs: also in sequences longer than a batch, and more than fit in one."""
    model = load(odd, numerics="fast")
    chunks = TOKENS.reshape(3, 30)
    alone = np.stack([model.logits(chunk) for chunk in chunks])
    monkeypatch.setattr(model, "_run", None)  # what goes layer by layer
    for limit in (512, 70, 20):
        monkeypatch.setattr("quantkit.runtime.model.TOGETHER_TOKENS", limit)
        assert spread(model.forward_sequences(chunks, slice(None)), alone) < 1e-3
        assert spread(model.forward_sequences(chunks, slice(25, 29)), alone[:, 25:29]) < 1e-3


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_any_number_of_threads(threads: int, odd: Path) -> None:
    expected = load(odd, cache_type="f32").logits(TOKENS)
    fast = load(odd, numerics="fast", cache_type="f32", threads=threads)
    assert spread(by_steps(fast, TOKENS[:30]), expected[:30]) < 1e-5
    assert spread(fast.logits(TOKENS), expected) < 1e-5


def test_pieces_of_a_text_in_any_order_of_kinds(odd: Path) -> None:
    """Prompts, single tokens and prompts again continue one cache; another cache in between does not disturb it."""
    expected = load(odd, cache_type="f32").logits(TOKENS)
    fast = load(odd, numerics="fast", cache_type="f32")
    cache, other = fast.new_cache(100), fast.new_cache(128)
    rows = []
    for first, last in ((0, 7), (7, 8), (8, 9), (9, 47), (47, 48), (48, 90)):
        rows.append(fast.forward(TOKENS[first:last], cache))
        assert cache.length == last
        fast.forward(TOKENS[::-1][: last - first], other)
    assert spread(np.concatenate(rows), expected) < 1e-5


def test_last_logits_are_the_last_of_all(tiny: Path) -> None:
    fast = load(tiny, numerics="fast")
    all_, last = fast.logits(TOKENS), fast.forward(TOKENS, fast.new_cache(), logits="last")
    assert last.shape == (1, 320)
    assert spread(last, all_[-1:]) < 1e-5


def test_prompts_longer_than_a_batch(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_plan, "BATCH_TOKENS", 32)
    expected = load(tiny, cache_type="f32").logits(TOKENS)
    fast = load(tiny, numerics="fast", cache_type="f32")
    assert spread(fast.logits(TOKENS), expected) < 1e-5
    assert spread(fast.forward(TOKENS, fast.new_cache(), logits="last"), expected[-1:]) < 1e-5


def test_a_type_without_kernel_runs_layer_by_layer_and_says_so(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quantkit.runtime.kernels.dispatch.product", lambda kind: None)
    fast = load(tiny, numerics="fast")
    assert fast.fallback_reason is not None
    assert "no kernel for f32" in fast.fallback_reason
    assert spread(fast.logits(TOKENS[:5]), load(tiny, cache_type="f16").logits(TOKENS[:5])) < 1e-3


@pytest.mark.parametrize("tokens", [[3], [3, 4, 5]])
def test_the_tripwire_names_the_tensor(tokens: list[int], tiny: Path, tmp_path: Path) -> None:
    down = gguf.open(tiny).tensors["blk.1.ffn_down.weight"].dequantize().copy()
    down[5, 7] = np.nan
    path = changed(tiny, tmp_path / "bad.gguf", {}, {"blk.1.ffn_down.weight": down})
    with pytest.raises(DataError, match=r"blk\.1\.ffn_down\.weight"):
        load(path, numerics="fast").forward(tokens, load(path).new_cache(16))


def test_the_real_model(smollm2_q4_1: Path) -> None:
    """SmolLM2: what quantized activations cost, in prompts and in single tokens, is small."""

    def log_softmax(x: np.ndarray) -> np.ndarray:
        x = x.astype(np.float64) - x.max(1, keepdims=True)
        return x - np.log(np.exp(x).sum(1, keepdims=True))

    exact, fast = load(smollm2_q4_1, n_ctx=128), load(smollm2_q4_1, numerics="fast", n_ctx=128)
    text = "The capital of France is Paris, which lies on the Seine. The capital of Italy is Rome, on the Tiber."
    tokens = exact.tokenizer.encode(text)
    expected = log_softmax(exact.logits(tokens))
    for result in (fast.logits(tokens), by_steps(fast, np.array(tokens))):
        divergence = (np.exp(expected) * (expected - log_softmax(result))).sum(1).mean()
        assert divergence < 0.01
        assert (result.argmax(1) == expected.argmax(1)).mean() > 0.9
