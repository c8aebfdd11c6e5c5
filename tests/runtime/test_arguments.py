"""What callers pass to a Model, its caches and its tokenizer is checked before native code gets an address."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantkit.errors import DataError, QuantkitError
from quantkit.formats import gguf
from quantkit.runtime.kv.cache import Cache
from quantkit.runtime.loading import load
from quantkit.runtime.model import Model
from tests.runtime.conftest import EMBD, VOCAB, random_model


@pytest.fixture(scope="module", params=["exact", "fast"])
def model(request: pytest.FixtureRequest, tiny: Path) -> Model:
    return load(tiny, numerics=request.param, threads=2)


@pytest.fixture(scope="module")
def other(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A model with one KV head where `tiny` has two: its caches are half as large."""
    file = gguf.open(tiny)
    metadata = file.metadata.copy()
    metadata.set("llama.attention.head_count_kv", 1, "u32")
    shapes = {
        name: (t.shape[0] // 2, *t.shape[1:]) if "attn_k." in name or "attn_v." in name else t.shape
        for name, t in file.tensors.items()
    }
    path = tmp_path_factory.mktemp("other") / "other.gguf"
    return load(random_model(path, metadata, shapes, np.random.default_rng(6)))


BAD_TOKENS: dict[str, Any] = {
    "a float": [1.7],
    "a bool": [True],
    "text": "abc",
    "None": None,
    "beyond 64 bits": [2**70],
    "unsigned": np.array([2**63 + 5], np.uint64),
    "negative": [-1],
    "not in the vocabulary": [VOCAB],
    "unequal lists": [[1], [2, 3]],
    "no list": 5,
    "none at all": [],
    "two dimensions": [[1, 2]],
}


@pytest.mark.parametrize("case", BAD_TOKENS)
def test_tokens_are_integers_of_the_vocabulary(model: Model, case: str) -> None:
    bad = BAD_TOKENS[case]
    cache = model.new_cache(64)
    calls: list[Callable[[], Any]] = [
        lambda: model.forward(bad, cache),
        lambda: model.logits(bad),
        lambda: model.forward_batch([([1], model.new_cache(8)), (bad, cache)]),
    ]
    if case != "text":
        calls.append(lambda: model.generate(bad, 4))
    if case != "two dimensions":
        calls.append(lambda: model.forward_sequences(bad if case == "no list" else [bad], slice(None)))
    for call in calls:
        with pytest.raises(DataError):
            call()
    assert cache.length == 0


def test_tokens_of_any_integer_type_are_the_same(model: Model) -> None:
    expected = model.logits([1, 2, 3])
    for tokens in ((1, 2, 3), np.array([1, 2, 3], ">i4"), np.array([1, 9, 2, 9, 3, 9], np.uint16)[::2]):
        np.testing.assert_array_equal(model.logits(tokens), expected)


@pytest.mark.parametrize("tokens", [[1], [1, 2, 3]])
def test_a_cache_of_another_model_is_refused(model: Model, other: Model, tokens: list[int]) -> None:
    foreign, own = other.new_cache(64, model.cache_type), model.new_cache(64)
    before = [x.copy() for x in (*foreign.k, *foreign.v)]
    for bad in (foreign, None, "cache", model.layer_cache(64)):
        with pytest.raises(DataError, match=r"cache"):
            model.forward(tokens, bad)  # type: ignore[arg-type]
        with pytest.raises(DataError, match=r"cache"):
            model.forward_batch([(tokens, own), (tokens, bad)])  # type: ignore[list-item]
    with pytest.raises(DataError, match="2 KV heads"):
        other.forward(tokens, own)
    assert own.length == foreign.length == 0
    assert all((x == y).all() for x, y in zip((*foreign.k, *foreign.v), before))


def test_a_cache_of_a_model_of_the_same_shape_is_taken(model: Model, tiny: Path) -> None:
    twin = load(tiny, numerics=model.numerics)
    np.testing.assert_array_equal(model.forward([1, 2], twin.new_cache(8)), model.logits([1, 2]))


def test_one_cache_cannot_hold_two_sequences_of_a_batch(model: Model) -> None:
    cache = model.new_cache(8)
    with pytest.raises(DataError, match="a cache of its own"):
        model.forward_batch([([1], cache), ([2], cache)])


@pytest.mark.parametrize("parts", [None, 5, [1], [([1],)], []])
def test_a_batch_is_pairs(model: Model, parts: Any) -> None:
    with pytest.raises(DataError, match="pairs"):
        model.forward_batch(parts)


@pytest.mark.parametrize("length", [-1, -1000000, 65, 10**9, 1.5, "3", None, True])
def test_the_length_of_a_cache_stays_within_it(model: Model, length: Any) -> None:
    cache = model.new_cache(64)
    model.forward([1, 2, 3], cache)
    with pytest.raises(DataError, match="the length"):
        cache.length = length
    with pytest.raises(DataError, match="truncate"):
        cache.truncate(length)
    assert cache.length == 3
    cache.length = np.int64(2)  # type: ignore[assignment]
    assert type(cache.length) is int


def test_what_native_code_has_the_address_of_is_not_replaced(model: Model) -> None:
    cache: Any = model.new_cache(8)
    with pytest.raises(AttributeError):
        cache.n_ctx = 10**6
    with pytest.raises(TypeError):
        cache.k[0] = cache.k[0][:, :1]


@pytest.mark.parametrize("n_ctx", [0, -5, 1.5, "8", True, 2**31 + 1, 10**18])
def test_a_context_is_a_sensible_number(model: Model, n_ctx: Any) -> None:
    with pytest.raises(DataError, match=r"context of a cache"):
        model.new_cache(n_ctx)
    with pytest.raises(DataError, match=r"context of a cache"):
        model.layer_cache(n_ctx)


def test_a_cache_larger_than_memory_is_an_error(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> np.ndarray:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("quantkit.runtime.kv.cache.np.zeros", refuse)
        with pytest.raises(DataError, match="2147483648 tokens takes about"):
            model.new_cache(2**31)


@pytest.mark.parametrize("cache_type", [7, b"f16", "zz"])
def test_a_cache_type_is_a_known_name(model: Model, cache_type: Any) -> None:
    with pytest.raises(QuantkitError, match="unknown cache type"):
        model.new_cache(8, cache_type)


def test_a_quantized_cache_is_refused_by_plain_attention(tiny: Path) -> None:
    cache = load(tiny).new_cache(8, "f32/q8_0")
    with pytest.raises(QuantkitError, match="needs flash attention"):
        load(tiny, flash_attention=False).forward([1], cache)


def test_only_whole_states_of_the_same_shape_are_restored(model: Model, other: Model) -> None:
    cache = model.new_cache(64)
    model.forward([1, 2, 3], cache)
    state, fresh = cache.save(), model.new_cache(64)
    bad: list[Any] = [
        None,
        cache,
        other.new_cache(64, model.cache_type).save(),
        dataclasses.replace(state, length=50),
        dataclasses.replace(state, length=-1),
        dataclasses.replace(state, k=state.k[:1]),
        dataclasses.replace(state, v=[x[:, :1] for x in state.v]),
        dataclasses.replace(state, k=state.k[:1], v=[*state.v, state.k[1]]),
    ]
    for each in bad:
        with pytest.raises(DataError, match=r"does not fit"):
            fresh.restore(each)
        assert fresh.length == 0
    fresh.restore(state)
    np.testing.assert_array_equal(model.forward([4], fresh), model.forward([4], cache))


@pytest.mark.parametrize("shape", [(2, 0), (2, EMBD - 1), (2, EMBD + 1), (2, 2 * EMBD), (EMBD,), (1, 2, EMBD)])
def test_project_takes_rows_of_the_model_only(model: Model, shape: tuple[int, ...]) -> None:
    with pytest.raises(DataError, match=rf"k, {EMBD}\]"):
        model.project(np.ones(shape, np.float32))


@pytest.mark.parametrize("hidden", [None, "x", np.ones((1, EMBD), complex), [[1.0], [1.0, 2.0]]])
def test_project_takes_real_numbers_only(model: Model, hidden: Any) -> None:
    with pytest.raises(DataError, match="hidden states"):
        model.project(hidden)


def test_project_takes_any_layout(model: Model, rng: np.random.Generator) -> None:
    x = rng.standard_normal((3, EMBD)).astype(np.float32)
    expected = model.project(x)
    for other in (x.astype(">f4"), x.astype(np.float64), np.asfortranarray(x), np.repeat(x, 2, 1)[:, ::2], x.tolist()):
        np.testing.assert_array_equal(model.project(other), expected)
    assert model.project(x[:0]).shape == (0, VOCAB)


@pytest.mark.parametrize("rows", [1, None, [0], (0, 1)])
def test_rows_of_sequences_are_a_slice(model: Model, rows: Any) -> None:
    with pytest.raises(DataError, match="slice"):
        model.forward_sequences(np.array([[1, 2]]), rows)


def test_a_slice_of_no_rows_gives_none(model: Model) -> None:
    assert model.forward_sequences(np.array([[1, 2]]), slice(2, 2)).shape == (1, 0, VOCAB)


@pytest.mark.parametrize("n_predict", [-2, 1.5, None, "4", True])
def test_the_number_of_tokens_to_predict_is_an_integer(model: Model, n_predict: Any) -> None:
    with pytest.raises(DataError, match="n_predict"):
        model.generate([1], n_predict)


@pytest.mark.parametrize(
    "options", [{"threads": -1}, {"threads": 1.5}, {"threads": 10**9}, {"n_ctx": -1}, {"n_ctx": 1.5}]
)
def test_options_of_load_are_checked(tiny: Path, options: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"threads|context"):
        load(tiny, **options)


def test_the_tokenizer_takes_text_and_ids_only(smollm2_q4_1: Path) -> None:
    tokenizer = load(smollm2_q4_1).tokenizer
    for text in (None, 5, ["a"]):
        with pytest.raises(DataError, match="the text is a"):
            tokenizer.encode(text)
    for token in (1.5, None, "a", -1, 10**9, True):
        with pytest.raises(DataError, match="token"):
            tokenizer.decode([token])


def test_caches_of_split_models_are_checked_too(tiny: Path) -> None:
    split = load(tiny, devices="cpu:0=2GiB,cpu:1", gpu_layers=1)
    cache, plain = split.new_cache(16), load(tiny)
    with pytest.raises(DataError, match="of another model"):
        plain.forward([1], cache)
    with pytest.raises(DataError, match="of another model"):
        split.forward([1], plain.new_cache(16))
    with pytest.raises(DataError, match="the length"):
        cache.length = -1
    with pytest.raises(DataError, match=r"does not fit|was saved from"):
        cache.restore(plain.new_cache(16).save())
    split.forward([1, 2], cache)
    assert isinstance(cache, Cache)
    assert cache.length == 2
