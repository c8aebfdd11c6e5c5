"""The model as a whole, on a tiny random one whose rows fit every type."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import quantkit
from quantkit import types
from quantkit.errors import DataError, FormatError, UnknownNameError, UnsupportedError
from quantkit.formats import gguf
from quantkit.runtime import model as model_module
from quantkit.runtime.loading import load
from quantkit.runtime.model import Model
from quantkit.types import base
from tests.runtime.conftest import rewrite

TOKENS = np.random.default_rng(2).integers(0, 320, 48)


def naive_logits(path: Path, tokens: np.ndarray) -> np.ndarray:
    """float64[len, vocab]: a llama in numpy, token mixing by complex numbers, one head at a time."""
    file = gguf.open(path)
    w = {name: tensor.dequantize().astype(np.float64) for name, tensor in file.tensors.items()}
    for name, tensor in file.tensors.items():
        if len(tensor.shape) == 2 and name != "token_embd.weight":  # where the products of a type use other values
            w[name] = tensor.type.dequantize(tensor.rows(0, tensor.n_rows), tensor.shape[1], products=True).astype(
                np.float64
            )
    meta = file.metadata
    heads, kv_heads = meta["llama.attention.head_count"], meta["llama.attention.head_count_kv"]
    x = w["token_embd.weight"][tokens]
    dim = x.shape[1] // heads
    turns = np.exp(1j * np.arange(len(tokens))[:, None] * 10000.0 ** (-np.arange(0, dim, 2) / dim))

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x**2).mean(1, keepdims=True) + 1e-5) * w[name]

    def rope(x: np.ndarray) -> np.ndarray:
        z = (x[:, ::2] + 1j * x[:, 1::2]) * turns
        return np.stack([z.real, z.imag], 2).reshape(x.shape)

    mask = np.triu(np.full((len(tokens), len(tokens)), -np.inf), 1)
    for i in range(meta["llama.block_count"]):
        y = norm(x, f"blk.{i}.attn_norm.weight")
        q, k, v = (y @ w[f"blk.{i}.attn_{name}.weight"].T for name in "qkv")
        mixed = []
        for h in range(heads):
            own, shared = slice(h * dim, (h + 1) * dim), slice(h * kv_heads // heads * dim, None)
            scores = rope(q[:, own]) @ rope(k[:, shared][:, :dim]).T / np.sqrt(dim) + mask
            weights = np.exp(scores - scores.max(1, keepdims=True))
            mixed.append(weights / weights.sum(1, keepdims=True) @ v[:, shared][:, :dim])
        x = x + np.concatenate(mixed, 1) @ w[f"blk.{i}.attn_output.weight"].T
        y = norm(x, f"blk.{i}.ffn_norm.weight")
        gate, up = (y @ w[f"blk.{i}.ffn_{name}.weight"].T for name in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[f"blk.{i}.ffn_down.weight"].T
    return norm(x, "output_norm.weight") @ w["output.weight"].T


def assert_close(result: np.ndarray, expected: np.ndarray, tolerance: float = 1e-5) -> None:
    """Within `tolerance` of the logits' spread."""
    np.testing.assert_allclose(result, expected, atol=tolerance * float(np.std(expected)), rtol=0)


# ------------------------------------------------------------------------------------------------------------ one truth


def test_logits_are_those_of_the_formulas(tiny: Path) -> None:
    assert_close(quantkit.load(tiny).logits(TOKENS), naive_logits(tiny, TOKENS))


@pytest.mark.parametrize("name", [t.name for t in types.all() if t.encode_rows is not None])
def test_every_type_runs_interleaved_or_not(name: str, tiny: Path, tmp_path: Path) -> None:
    path = rewrite(tiny, tmp_path / "model.gguf", name)
    assert gguf.open(path).tensors["blk.1.ffn_down.weight"].type.name == name
    model = load(path)
    assert_close(model.logits(TOKENS), naive_logits(path, TOKENS))
    assert_close(model.logits(TOKENS[:3]), naive_logits(path, TOKENS[:3]))  # the way of small batches


@pytest.mark.parametrize("threads", [2, 3, 5])
def test_threads_change_nothing(threads: int, tiny: Path) -> None:
    tokens = np.random.default_rng(3).integers(0, 320, 300)  # several tiles
    one, several = load(tiny, threads=1), load(tiny, threads=threads)
    np.testing.assert_array_equal(several.logits(tokens), one.logits(tokens))
    np.testing.assert_array_equal(several.logits(tokens[:3]), one.logits(tokens[:3]))


# ----------------------------------------------------------------------------------------------- many ways to the truth


@pytest.mark.parametrize("cache_type", ["f32", "f16"])
def test_prompt_and_token_by_token_agree(tiny: Path, cache_type: str) -> None:
    model = load(tiny, cache_type=cache_type)
    whole = model.logits(TOKENS)
    cache = model.new_cache(len(TOKENS))
    single = np.concatenate([model.forward([token], cache) for token in TOKENS])
    assert_close(single, whole, 1e-5 if cache_type == "f32" else 2e-3)  # a key near a tie of halves may round apart
    assert cache.length == len(TOKENS)


def test_a_prompt_in_pieces_agrees(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(tiny)
    whole = model.logits(TOKENS)
    cache = model.new_cache(64)
    parts = [model.forward(part, cache) for part in np.split(TOKENS, [1, 20, 30])]
    assert_close(np.concatenate(parts), whole)
    monkeypatch.setattr(model_module, "BATCH_TOKENS", 7)
    assert_close(model.logits(TOKENS), whole)
    assert_close(model.forward(TOKENS, model.new_cache(48), "last"), whole[-1:])


def test_truncating_the_cache_takes_tokens_back(tiny: Path) -> None:
    model = load(tiny)
    cache = model.new_cache(64)
    model.forward(TOKENS, cache)
    cache.truncate(10)
    assert_close(model.forward(TOKENS[10:20], cache), model.logits(TOKENS[:20])[10:])
    cache.clear()
    assert_close(model.forward(TOKENS[:5], cache), model.logits(TOKENS[:5]))


@pytest.mark.parametrize("cache_type", ["f32", "f16"])
def test_sequences_together_are_each_alone(tiny: Path, cache_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(tiny, cache_type=cache_type)
    chunks = TOKENS.reshape(4, 12)
    alone = np.stack([model.logits(chunk) for chunk in chunks])
    assert_close(model.forward_sequences(chunks, slice(5, 11)), alone[:, 5:11])
    monkeypatch.setattr(model_module, "SEQUENCE_TOKENS", 30)  # two at a time
    assert_close(model.forward_sequences(chunks, slice(None)), alone)
    hidden = model.hidden_sequences(chunks, slice(11, 12))
    assert_close(model.project(hidden[:, 0]), alone[:, 11])


def test_the_cache_type_of_sequences_can_be_chosen(tiny: Path) -> None:
    model, chunk = load(tiny, cache_type="f32"), TOKENS.reshape(1, -1)
    halves = model.forward_sequences(chunk, slice(None), cache_type="f16")
    assert_close(halves[0], load(tiny, cache_type="f16").logits(TOKENS))
    assert np.abs(halves - model.forward_sequences(chunk, slice(None))).max() > 0


def test_the_default_cache_follows_the_numerics(tiny: Path) -> None:
    assert load(tiny).new_cache(4).cache_type == "f32"
    assert load(tiny, numerics="fast").new_cache(4).cache_type == "f16"


# -------------------------------------------------------------------------------------------------------- the observer


def test_the_observer_sees_what_enters_every_matrix(tiny: Path) -> None:
    model, seen = load(tiny), {}
    model.observer = lambda name, x: seen.setdefault(name, x)
    chunks = TOKENS.reshape(2, 24)
    model.forward_sequences(chunks, slice(20, 24))
    matrices = {n for n, t in model.weights.items() if len(t.shape) == 2 and n != "token_embd.weight"}
    assert set(seen) == matrices
    assert seen["blk.0.attn_q.weight"] is seen["blk.0.attn_k.weight"] is seen["blk.0.attn_v.weight"]
    assert seen["blk.1.ffn_down.weight"].shape == (48, 512)
    assert seen["output.weight"].shape == (8, 256)
    x = model.weights["token_embd.weight"].dequantize()[chunks.reshape(-1)]
    y = x / np.sqrt((x**2).mean(1, keepdims=True) + 1e-5) * model.weights["blk.0.attn_norm.weight"].dequantize()
    assert_close(seen["blk.0.attn_q.weight"], y)


# -------------------------------------------------------------------------------------------------------- what is wrong


def edited(source: Path, target: Path, name: str, edit: object) -> Path:
    """`source` with float32 rows of one tensor changed by `edit(rows)`."""
    file = gguf.open(source)
    specs = [gguf.TensorSpec(t.name, t.shape, t.type) for t in file.tensors.values()]
    with gguf.Writer(target, file.metadata, specs) as writer:
        for tensor in file.tensors.values():
            rows = np.array(tensor.data)
            if tensor.name == name:
                edit(rows.view(np.float32))  # type: ignore[operator]
            writer.write(tensor.name, rows)
    return target


def put(row: int, column: int, value: float) -> object:
    def edit(rows: np.ndarray) -> None:
        rows[row, column] = value

    return edit


@pytest.mark.parametrize(
    "name", ["blk.1.ffn_up.weight", "blk.0.attn_k.weight", "blk.1.ffn_norm.weight", "output.weight"]
)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_the_tripwire_names_the_tensor_that_holds_nan(name: str, value: float, tiny: Path, tmp_path: Path) -> None:
    row = 0 if "norm" in name else 3
    path = edited(tiny, tmp_path / "bad.gguf", name, put(row, 5, value))
    with pytest.raises(DataError, match=rf"{name} made (nan|-?inf).*not finite in 1 row\(s\), first {row}"):
        load(path).logits(TOKENS)


def test_the_tripwire_knows_overflow_from_bad_weights(tiny: Path, tmp_path: Path) -> None:
    def enlarge(rows: np.ndarray) -> None:
        rows *= np.float32(1e38)

    path = edited(tiny, tmp_path / "big.gguf", "blk.1.ffn_down.weight", enlarge)
    with pytest.raises(DataError, match=r"blk.1.ffn_down.weight made .*the tensor is finite"):
        load(path).logits(TOKENS)


def test_keys_beyond_half_precision_are_the_caches_fault(tiny: Path, tmp_path: Path) -> None:
    def enlarge(rows: np.ndarray) -> None:
        rows *= np.float32(1e5)

    path = edited(tiny, tmp_path / "keys.gguf", "blk.0.attn_v.weight", enlarge)
    assert np.isfinite(load(path, cache_type="f32").logits(TOKENS)).all()
    with pytest.raises(DataError, match=r"attention of blk.0 over a cache of f16"):
        load(path, cache_type="f16").logits(TOKENS)


def rebuilt(source: Path, target: Path, drop: str = "", **metadata: object) -> Path:
    file = gguf.open(source)
    values = file.metadata.copy()
    for key, value in metadata.items():
        values[f"llama.{key}"] = value
    remaining = [t for t in file.tensors.values() if t.name != drop]
    with gguf.Writer(target, values, [gguf.TensorSpec(t.name, t.shape, t.type) for t in remaining]) as writer:
        for tensor in remaining:
            writer.write(tensor.name, tensor.data)
    return target


def test_an_incomplete_file_is_refused_by_name(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"blk.1.attn_v.weight is missing"):
        load(rebuilt(tiny, tmp_path / "a.gguf", drop="blk.1.attn_v.weight"))
    with pytest.raises(
        FormatError, match=r"blk.0.ffn_gate.weight has shape \(512, 256\), the metadata say \(640, 256\)"
    ):
        load(rebuilt(tiny, tmp_path / "b.gguf", feed_forward_length=640))


def test_bad_calls_say_what_is_wrong(tiny: Path) -> None:
    model = load(tiny)
    with pytest.raises(DataError, match="tokens of a vocabulary of 320: 320 is not from 0 to 319"):
        model.logits([1, 320])
    with pytest.raises(DataError, match="-1 is not from 0 to 319"):
        model.logits([-1])
    with pytest.raises(DataError, match="at least one"):
        model.forward([], model.new_cache(4))
    with pytest.raises(DataError, match="holds 0 of 4 tokens, 5 more do not fit"):
        model.forward([1] * 5, model.new_cache(4))
    with pytest.raises(DataError, match="cannot truncate"):
        model.new_cache(4).truncate(1)
    with pytest.raises(UnknownNameError, match="numerics"):
        load(tiny, numerics="exakt")
    with pytest.raises(UnknownNameError, match="cache type"):
        model.new_cache(4, "q8")
    with pytest.raises(UnsupportedError, match="valid devices: CPU"):
        load(tiny, gpu_layers=1)


def test_a_type_without_codec_is_refused_by_tensor(tiny: Path, tmp_path: Path) -> None:
    unknown = next(t for t in base.layouts() if not t.has_codec and t.interleave == 1 and 256 % t.block_size == 0)
    file = gguf.open(tiny)
    specs = [
        gguf.TensorSpec(t.name, t.shape, unknown if t.name == "blk.0.attn_q.weight" else t.type)
        for t in file.tensors.values()
    ]
    path = tmp_path / "unknown.gguf"
    with gguf.Writer(path, file.metadata, specs) as writer:
        for spec, tensor in zip(specs, file.tensors.values()):
            data = tensor.data if spec.type is tensor.type else np.zeros((spec.n_rows, spec.row_bytes), np.uint8)
            writer.write(tensor.name, data)
    with pytest.raises(UnsupportedError, match=rf"blk.0.attn_q.weight: quantkit cannot decode {unknown.name}"):
        load(path)


def test_biases_are_added(tiny: Path, tmp_path: Path) -> None:
    file = gguf.open(tiny)
    bias = np.linspace(-1, 1, 256, dtype=np.float32)
    specs = [gguf.TensorSpec(t.name, t.shape, t.type) for t in file.tensors.values()]
    specs += [gguf.TensorSpec(f"blk.{i}.attn_output.bias", (256,), types.get("f32")) for i in range(2)]
    path = tmp_path / "bias.gguf"
    with gguf.Writer(path, file.metadata, specs) as writer:
        for tensor in file.tensors.values():
            writer.write(tensor.name, tensor.data)
        for i in range(2):
            writer.write(f"blk.{i}.attn_output.bias", bias.view(np.uint8).reshape(1, -1))
    seen: list[dict[str, np.ndarray]] = []
    for source in (tiny, path):
        model, inputs = load(source), {}
        model.observer = lambda name, x, inputs=inputs: inputs.setdefault(name, x)
        model.logits(TOKENS)
        seen.append(inputs)
    name = "blk.0.attn_output.weight"
    np.testing.assert_array_equal(seen[0][name], seen[1][name])
    model = load(path)
    assert isinstance(model, Model)
    with_bias = model._weight(model.blocks[0].parts[0].out)(seen[0][name])  # type: ignore[union-attr]
    assert_close(with_bias, seen[0][name] @ model.weights[name].dequantize().T + bias)
