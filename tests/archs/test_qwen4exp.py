"""Qwen4-Exp: keys and tensors, what is refused, streams, n-grams, indexers, states, layers by themselves, export."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quantkit
from quantkit import archs, types
from quantkit.archs.common import blocks
from quantkit.archs.common.tensors import fill_name, split_name
from quantkit.errors import DataError, FormatError, QuantkitError, UnsupportedError
from quantkit.evaluate.chunk_runs import evaluate_chunks
from quantkit.evaluate.layer_similarity import layer_similarity
from quantkit.evaluate.layers.layer_by_layer import chunks_layer_by_layer
from quantkit.evaluate.layers.tensor_errors import tensor_errors
from quantkit.evaluate.text import Chunks
from quantkit.formats import gguf
from quantkit.formats.safetensors import CheckpointSpec, CheckpointWriter, open_checkpoint
from quantkit.pipelines.conversion.convert import convert_checkpoint
from quantkit.pipelines.export import export_gguf
from quantkit.pipelines.prune import plan_prune
from quantkit.placement import kv_size
from quantkit.recipe import from_config
from quantkit.runtime.blocks import ngrams, pooled_indexer
from quantkit.runtime.blocks.spans import Span
from tests.archs.checkpoints import loaded, log_probabilities, tiny
from tests.archs.files import changed, written

ARCH = archs.get("qwen4exp")
TOKENS = np.random.default_rng(3).integers(2, 320, 200)
TOKENS[[20, 21, 90]] = 1  # the end token
PERIOD = ["linear_attention"] * 3 + ["full_attention"]
ROPE = {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]}
FLASH_NEXT = {  # Qwen3.8-Flash-Next
    "architectures": ["Qwen4ExpForConditionalGeneration"],
    "text_config": {
        "model_type": "qwen4_exp_text", "vocab_size": 248320, "hidden_size": 2560, "num_hidden_layers": 48,
        "num_attention_heads": 24, "num_key_value_heads": 2, "head_dim": 256, "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6, "rope_parameters": ROPE, "layer_types": PERIOD * 12, "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": 48, "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 640,
        "shared_expert_intermediate_size": 640, "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 128,
        "indexer_budget": 2048, "indexer_compress_ratio": 4, "ple_layer_ids": [2], "ple_embed_dim": 2560,
        "output_gate_type": "sigmoid", "eos_token_id": 248044, "mtp_num_hidden_layers": 1,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a checkpoint hf and the file m.gguf of it."""
    directory = tmp_path_factory.mktemp("qwen4exp")
    tiny(directory / "hf", arch="qwen4exp")
    convert_checkpoint(directory / "hf", directory / "m.gguf", "f32")
    return directory


def expected(directory: Path, tokens: np.ndarray) -> np.ndarray:
    """Log probabilities of transformers."""
    import torch

    with torch.no_grad():
        return log_probabilities(loaded(directory)(torch.tensor(tokens)[None]).logits[0].numpy())


def test_plan_of_the_published_config() -> None:
    """Tensors, elements and hashes are those of llama.cpp's files; caches of the three kinds of layers."""
    specs, metadata = from_config(archs.language_model(FLASH_NEXT))
    assert len(specs) == 1224
    assert sum(math.prod(t.shape) for t in specs) == 176_943_899_520
    assert {t.name: t.shape for t in specs}["per_layer_token_embd.weight"] == (320_001_536, 160)
    assert metadata["qwen4exp.ple.layer_multipliers"] == [23703573157769, 20109073645365, 8052911324071]
    assert metadata["qwen4exp.ple.head_offsets"][-1] == 300_001_275
    assert metadata["qwen4exp.ple.head_vocab_sizes"][-1] == 20_000_171
    f16, q8_0 = types.layout("f16"), types.layout("q8_0")
    state, lookup = 4 * (3 * (6144 + 2 * 2048) + 48 * 128 * 128), 4 * (9 * 4 * 2560 + 2)
    attends = 1000 * (2 * (256 * 2 + 272) + 136) + 4 * 252 * 128
    assert kv_size.of_layers(metadata, 1000, f16, q8_0)[:4] == [state, state + lookup, state, attends]


def test_shapes_and_hashes_are_those_of_transformers() -> None:
    """Every tensor of the class, by the names of the rules; checkpoints join matrices of experts and of indexers."""
    import torch
    import transformers

    arch = archs.from_hf(ARCH.EXAMPLE)
    model = transformers.Qwen4ExpForCausalLM(transformers.Qwen4ExpTextConfig(**ARCH.EXAMPLE))
    theirs = {name: tuple(p.shape) for name, p in model.named_parameters()}
    specs, metadata = from_config(archs.language_model(ARCH.EXAMPLE))
    ours = {t.name: t.shape for t in specs}
    hashes = model.model.layers[1].ple.ple_embedding
    for key, buffer in (
        ("layer_multipliers", hashes.layer_multipliers),
        ("head_offsets", hashes.ngram_heads_offsets),
        ("head_vocab_sizes", hashes.ngram_heads_vocab_sizes),
    ):
        assert torch.equal(buffer, torch.tensor(metadata[f"qwen4exp.ple.{key}"]))
    joined: dict[str, int] = {}  # rows of the parts of a joined matrix
    for rule in arch.rules:
        full = rule.full_names
        for name in [n for n in ours if (fill(n) if full else split_name(n)[0]) == rule.gguf]:
            number = 1 if name.startswith("per_layer") else split_name(name)[1]
            there = fill_name(rule.names("hf")[0], number).replace("model.layers.N", f"model.layers.{number}")
            there = there.replace("experts.E.gate_proj.weight", "experts.gate_up_proj")
            there = there.replace("experts.E.up_proj.weight", "experts.gate_up_proj")
            there = there.replace("experts.E.down_proj.weight", "experts.down_proj")
            shape = ours.pop(name)
            if "gate_up" in there or "index_qk" in there:
                joined[there] = joined.get(there, 0) + shape[-2]
                assert (*shape[:-2], shape[-1]) == (*theirs[there][:-2], theirs[there][-1])
            else:
                assert math.prod(shape) == math.prod(theirs[there]), name
                assert shape == tuple(n for n in theirs.pop(there) if n != 1), name
    for name, rows in joined.items():
        assert theirs.pop(name)[-2] == rows
    assert not ours
    assert not theirs


def fill(name: str) -> str:
    """A name with N in place of the layer's number."""
    stem, _, suffix = split_name(name)
    return f"{stem}.{suffix}" if "." in name else name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"output_gate_type": "silu"}, "output_gate_type = 'silu'"),
        ({"output_gate_type": None}, "output_gate_type = 'silu'"),
        ({"norm_topk_prob": False}, "norm_topk_prob = False"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"indexer_kv_heads": 2}, "indexer_kv_heads = 2"),
        ({"indexer_budget": 30}, "indexer_budget = 30"),
        ({"indexer_n_heads": None}, "no 'indexer_n_heads'"),
        ({"ple_layer_ids": [2, 3]}, r"ple_layer_ids = \[2, 3\]"),
        ({"ple_layer_ids": [4]}, r"ple_layer_ids = \[4\]"),
        ({"ple_embed_dim": 95}, "ple_embed_dim = 95"),
        ({"eos_token_id": [1, 2]}, r"eos_token_id = \[1, 2\]"),
        ({"make_ngram_vocab_size_divisible_by": 64}, "make_ngram_vocab_size_divisible_by = 64"),
        ({"ngram_size": 1}, "ngram_size = 1"),
        (
            {"rope_parameters": ARCH.EXAMPLE["rope_parameters"] | {"mrope_section": [2, 2, 1]}},
            r"\[2, 2, 1\]; .* 4 pairs",
        ),
        ({"rope_parameters": ARCH.EXAMPLE["rope_parameters"] | {"mrope_section": [4]}}, r"mrope_section = \[4\]"),
        ({"rope_parameters": ARCH.EXAMPLE["rope_parameters"] | {"mrope_interleaved": False}}, "mrope_interleaved"),
    ],
)
def test_settings_that_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(QuantkitError, match=message):
        from_config(archs.language_model(ARCH.EXAMPLE | change))


def test_without_ngrams(tmp_path: Path) -> None:
    """No layer looks them up: neither a table nor keys, there and back."""
    model = tiny(tmp_path / "hf", arch="qwen4exp", ple_layer_ids=[])
    convert_checkpoint(tmp_path / "hf", tmp_path / "m.gguf", "f32")
    file = gguf.open(tmp_path / "m.gguf")
    assert not [name for name in file.tensors if "ple_" in name or name.startswith("per_layer")]
    assert not [key for key in file.metadata if ".ple." in key]
    wanted = expected(tmp_path / "hf", TOKENS)
    assert np.abs(log_probabilities(quantkit.load(tmp_path / "m.gguf").logits(TOKENS)) - wanted).max() < 1e-4
    export_gguf(tmp_path / "m.gguf", tmp_path / "back")
    assert np.abs(expected(tmp_path / "back", TOKENS) - wanted).max() < 1e-4
    assert model.config.ple_layer_ids == []


# ---------------------------------------------------------------------------------------------------- against the model


def test_pieces_of_a_prompt(files: Path) -> None:
    """In one piece, in pieces and token by token: all as in transformers, to which end tokens within n-grams belong."""
    wanted, model = expected(files / "hf", TOKENS), quantkit.load(files / "m.gguf")
    for ends in ([200], [1, 2, 9, 22, 91, 95, 200], list(range(1, 201))):
        cache = model.new_cache(200)
        found = [model.forward(TOKENS[a:b], cache) for a, b in zip([0, *ends], ends)]
        assert np.abs(log_probabilities(np.concatenate(found)) - wanted).max() < 1e-4


def test_rows_of_ngrams_are_those_of_transformers(files: Path) -> None:
    """With end tokens next to each other, at the beginning and at the end."""
    import torch

    model = loaded(files / "hf")
    lookup = model.model.layers[1].ple.ple_embedding
    part = quantkit.load(files / "m.gguf").blocks[1].parts[0]
    assert isinstance(part, blocks.NGrams)
    found: list[Any] = []
    lookup.ngram_embedding.register_forward_hook(lambda module, given, out: found.append(given[0]))
    for tokens in ([1, 5, 6, 1, 1, 7, 8, 9, 1], [5], [2, 3, 1], TOKENS.tolist()):
        lookup(torch.tensor([tokens]), None)
        history = np.array([part.end] * (part.longest - 1) + tokens)
        np.testing.assert_array_equal(ngrams.rows_of(part, history), found.pop()[0].numpy())


def test_states_are_saved_marked_and_continued(files: Path) -> None:
    """The last tokens and inputs of n-grams, keys of indexers and the states of recurrent layers come back."""
    model = quantkit.load(files / "m.gguf")
    wanted, cache = model.logits(TOKENS), model.new_cache(200)
    model.forward(TOKENS[:91], cache)
    saved = cache.save()
    cache.mark()
    model.forward(TOKENS[91:120], cache)
    cache.truncate(91)
    assert np.abs(model.forward(TOKENS[91:], cache) - wanted[91:]).max() < 1e-4
    other = model.new_cache(220)
    other.restore(saved)
    assert np.abs(model.forward(TOKENS[91:], other) - wanted[91:]).max() < 1e-4
    with pytest.raises(DataError, match="recurrent layers have no state"):
        other.truncate(100)
    other.clear()
    assert np.abs(model.forward(TOKENS[:50], other) - wanted[:50]).max() < 1e-4
    assert saved.nbytes < cache.nbytes
    without = quantkit.load(
        changed(files / "m.gguf", files / "few.gguf", {"qwen4exp.attention.indexer.top_k": (8, "u32")})
    )
    without.new_cache(200).restore(saved)  # of the same shape


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
def test_the_predicted_cache_is_the_one_that_is_there(files: Path, kind: str) -> None:
    model = quantkit.load(files / "m.gguf", cache_type=kind)
    found, layout = model.new_cache(123), types.layout(kind)
    assert sum(kv_size.of_layers(model.metadata, 123, layout, layout)) == found.nbytes
    assert np.abs(log_probabilities(model.logits(TOKENS)[:30]) - expected(files / "hf", TOKENS)[:30]).max() < 0.3


def test_selected_blocks(files: Path) -> None:
    """By loops over tokens, blocks and heads: the largest scores of whole blocks, and what comes after them."""
    model, rng = quantkit.load(files / "m.gguf"), np.random.default_rng(4)
    part = model.blocks[3].parts[0]
    assert isinstance(part, blocks.Attention)
    indexer = part.indexer
    assert isinstance(indexer, blocks.PooledIndexer)
    y = rng.standard_normal((75, 64)).astype(np.float32)
    w = {name: model.weights[f"blk.3.indexer.{name}.weight"].dequantize().astype(np.float64)
         for name in ("q_proj", "k_proj", "q_norm", "k_norm")}  # fmt: skip

    def rotated(x: np.ndarray, weight: np.ndarray, position: int) -> np.ndarray:
        x = x / np.sqrt(np.square(x).mean() + 1e-6) * weight
        angles = position * 10000.0 ** (-np.arange(4) / 4)
        a, b = x[:4].copy(), x[4:8].copy()
        return np.concatenate([a * np.cos(angles) - b * np.sin(angles), a * np.sin(angles) + b * np.cos(angles), x[8:]])

    expected = np.zeros((75, 75), bool)
    for p in range(75):
        whole = (p + 1) // 4
        keys = [rotated((y[4 * i : 4 * i + 4] @ w["k_proj"].T).mean(0), w["k_norm"], 4 * i) for i in range(whole)]
        heads = [rotated(x, w["q_norm"], p) for x in (w["q_proj"] @ y[p]).reshape(8, 32)]
        scores = [sum(max(0.0, float(q @ key)) for q in heads) for key in keys]
        for i in np.argsort(scores)[-8:]:
            expected[p, 4 * i : 4 * i + 4] = True
        expected[p, 4 * whole : p + 1] = True
    cache = model.new_cache(75)
    first = pooled_indexer.select(model, indexer, 3, y[:34], [Span(0, 34, cache)])
    assert first[0].selected is None
    cache.states.clear()  # of other layers, which are not run
    cache.length = 34
    then = pooled_indexer.select(model, indexer, 3, y[34:], [Span(0, 41, cache)])
    assert then[0].selected is not None
    np.testing.assert_array_equal(then[0].selected, expected[34:])


def test_layers_by_themselves(files: Path, tmp_path: Path) -> None:
    """Commands that run one layer at a time give it all streams, and to n-grams the tokens."""
    model, inputs = quantkit.load(files / "m.gguf"), TOKENS[:192].reshape(2, 96)
    for (i, whole), (j, by_layer) in zip(evaluate_chunks(model, inputs), chunks_layer_by_layer(model, inputs)):
        assert i == j
        np.testing.assert_array_equal(whole, by_layer)
    quantkit.quantize(files / "m.gguf", tmp_path / "q.gguf", "Q8_0")
    errors = {error.name: error for error in tensor_errors(model, gguf.open(tmp_path / "q.gguf"), inputs)}
    for name in ("token_embd.weight", "blk.0.hc_attn_down.weight", "blk.1.ple_key.weight", "blk.3.attn_q.weight",
                 "output_hc_up.weight", "per_layer_token_embd.weight", "output.weight"):  # fmt: skip
        assert 0 < errors[name].error < 0.1, name
    similar = layer_similarity(model, Chunks(inputs, inputs, "tokens"))
    assert len(similar) == 4
    assert all(0 < value < 1 for value in similar)


def test_inputs_of_all_matrices_are_observed(files: Path) -> None:
    """Importance matrices cover streams, n-grams and indexers, whose queries a short text does not need."""
    model = quantkit.load(files / "m.gguf")
    seen: set[str] = set()
    model.observer = lambda name, x, *which: seen.add(name)
    model.logits(TOKENS[:10])
    matrices = {name for name, t in model.weights.items() if len(t.shape) > 1 and "conv1d" not in name}
    assert matrices - seen == {"token_embd.weight", "per_layer_token_embd.weight"}


def test_compiled_plans_against_transformers(files: Path) -> None:
    """A prompt, and tokens one by one after a prompt."""
    wanted, model = expected(files / "hf", TOKENS), quantkit.load(files / "m.gguf", numerics="fast", cache_type="f32")
    assert model.fallback_reason is None
    assert np.abs(log_probabilities(model.logits(TOKENS)) - wanted).max() < 1e-4
    cache = model.new_cache(200)
    model.forward(TOKENS[:90], cache)
    steps = np.concatenate([model.forward([token], cache) for token in TOKENS[90:]])
    assert np.abs(log_probabilities(steps) - wanted[90:]).max() < 1e-4


def test_layers_and_experts_are_pruned(tmp_path: Path) -> None:
    """Whole periods without the layer of n-grams, which is found under its new number; lists of other things stay."""
    path = written(tmp_path / "m.gguf", "qwen4exp", num_hidden_layers=6, full_attention_interval=2, ple_layer_ids=[3])
    keep = {layer: [0, 2, 3, 5] for layer in range(6)}
    plan_prune(gguf.open(path), keep, [0, 1]).write(tmp_path / "p.gguf")
    file = gguf.open(tmp_path / "p.gguf")
    assert file.metadata["qwen4exp.ple.layers"] == [0]
    assert file.metadata["qwen4exp.attention.compress_ratios"] == [0, 4, 0, 4]
    assert len(file.metadata["qwen4exp.ple.head_offsets"]) == 6
    assert np.isfinite(quantkit.load(tmp_path / "p.gguf").logits(TOKENS[:40])).all()
    with pytest.raises(UnsupportedError, match=r"blk\.2 looks up n-grams in a table of its own"):
        plan_prune(gguf.open(path), None, [2, 3])


@pytest.mark.parametrize(
    "how",
    [
        {"profile": True},
        {"devices": "cpu:0=1GiB,cpu:1=1GiB", "tensor_split": (1, 1), "numerics": "fast"},
        {"devices": "cpu:0=1GiB", "gpu_layers": 2, "override_tensor": "ple_|hc_ffn|indexer=CPU"},
        {"devices": "cpu:0=1GiB", "kv_on_cpu": True, "override_tensor": "exps=CPU"},
    ],
)
def test_several_devices(files: Path, how: dict[str, Any]) -> None:
    """States of n-grams are with their layer, keys of indexers with the cache."""
    whole = quantkit.load(files / "m.gguf", cache_type="f32").logits(TOKENS[:120])
    model = quantkit.load(files / "m.gguf", cache_type="f32", **how)
    cache = model.new_cache(120)
    assert cache.nbytes == quantkit.load(files / "m.gguf", cache_type="f32").new_cache(120).nbytes
    found = [model.forward(TOKENS[start:stop], cache) for start, stop in ((0, 70), (70, 71), (71, 72))]
    state = cache.save()
    model.forward(TOKENS[:9], cache)
    cache.restore(state)
    found.append(model.forward(TOKENS[72:120], cache))
    assert np.abs(log_probabilities(np.concatenate(found)) - log_probabilities(whole)).max() < 1e-3


# ---------------------------------------------------------------------------------------------------------- checkpoints


def rewritten(source: Path, target: Path, change: dict[str, tuple[str, np.ndarray] | None], **config: Any) -> Path:
    """A checkpoint with other tensors, (dtype, values) or None, and settings of config.json."""
    target.mkdir()
    for path in source.iterdir():
        if path.suffix != ".safetensors":
            (target / path.name).write_bytes(path.read_bytes())
    kept = {n: t for n, t in open_checkpoint(source).tensors.items() if n not in change}
    new = {name: entry for name, entry in change.items() if entry is not None}
    specs = [CheckpointSpec(n, t.shape, t.dtype) for n, t in kept.items()]
    specs += [CheckpointSpec(n, x.shape, dtype) for n, (dtype, x) in new.items()]
    with CheckpointWriter(target, specs) as writer:
        for name, tensor in kept.items():
            writer.write(name, tensor.raw())
        for name, (_, x) in new.items():
            writer.write(name, np.ascontiguousarray(x).reshape(-1).view(np.uint8))
    given = json.loads((target / "config.json").read_text()) | config
    (target / "config.json").write_text(json.dumps(given))
    return target


STEM = "model.layers.1.ple.ple_embedding"


def test_the_table_in_one_piece_or_in_shards(files: Path, tmp_path: Path) -> None:
    """Shards are joined in the order of their numbers; the last one may have fewer rows; none may be missing."""
    tensors, made = open_checkpoint(files / "hf").tensors, gguf.open(files / "m.gguf")
    shards = sorted((n for n in tensors if ".shard_" in n), key=lambda n: int(n.split("shard_")[1].split(".")[0]))
    assert len(shards) == 128
    table = np.concatenate([tensors[name].dequantize() for name in shards])
    np.testing.assert_array_equal(made.tensors["per_layer_token_embd.weight"].dequantize(), table)
    without: dict[str, Any] = dict.fromkeys(shards)
    others: list[dict[str, Any]] = [
        {f"{STEM}.ngram_embedding.weight": ("F32", table)},
        {f"{STEM}.ngram_embedding.shard_{i}.weight": ("F32", table[i * 150 : (i + 1) * 150]) for i in range(3)},
    ]
    for i, given in enumerate(others):
        hf = rewritten(files / "hf", tmp_path / f"hf{i}", without | given)
        convert_checkpoint(hf, tmp_path / f"{i}.gguf", "f32")
        found = gguf.open(tmp_path / f"{i}.gguf")
        assert list(found.tensors) == list(made.tensors)
        np.testing.assert_array_equal(found.tensors["per_layer_token_embd.weight"].dequantize(), table)
    hf = rewritten(files / "hf", tmp_path / "hole", {shards[5]: None})
    with pytest.raises(FormatError, match=r"127 shards of the table of n-grams, the last one is .*shard_127"):
        convert_checkpoint(hf, tmp_path / "hole.gguf", "f32")
    hf = rewritten(files / "hf", tmp_path / "odd", {shards[5]: ("F32", table[:1])})
    with pytest.raises(FormatError, match="shards have the same rows"):
        convert_checkpoint(hf, tmp_path / "odd.gguf", "f32")


def test_the_form_of_published_checkpoints(files: Path, tmp_path: Path) -> None:
    """Names of a language model in a multimodal one, with image encoder and MTP layers; the file is the same."""
    (target := tmp_path / "hf").mkdir()
    for path in (files / "hf").iterdir():
        if path.suffix != ".safetensors":
            (target / path.name).write_bytes(path.read_bytes())
    text = json.loads((files / "hf" / "config.json").read_text())
    del text["architectures"]
    outer = {"architectures": ["Qwen4ExpForConditionalGeneration"], "model_type": "qwen4_exp",
             "text_config": text | {"mtp_num_hidden_layers": 1}, "tie_word_embeddings": False}  # fmt: skip
    (target / "config.json").write_text(json.dumps(outer))
    stored = open_checkpoint(files / "hf").tensors
    names = {n: n.replace("model.", "model.language_model.", 1) for n in stored}
    extra = ["model.visual.patch_embed.proj.weight", "mtp.fc.weight"]
    specs = [CheckpointSpec(names[n], t.shape, t.dtype) for n, t in stored.items()]
    with CheckpointWriter(target, specs + [CheckpointSpec(name, (64,), "F32") for name in extra]) as writer:
        for name, tensor in stored.items():
            writer.write(names[name], tensor.raw())
        for name in extra:
            writer.write(name, np.zeros(256, np.uint8))
    convert_checkpoint(target, tmp_path / "m.gguf", "f32")
    ours, theirs = gguf.open(tmp_path / "m.gguf"), gguf.open(files / "m.gguf")
    assert list(ours.tensors) == list(theirs.tensors)
    assert all(np.array_equal(t.data, theirs.tensors[name].data) for name, t in ours.tensors.items())


def test_numbers_of_hashes_in_a_checkpoint_are_those_of_its_config(files: Path, tmp_path: Path) -> None:
    multipliers = np.frombuffer(open_checkpoint(files / "hf").tensors[f"{STEM}.layer_multipliers"].raw(), "<i8")
    assert multipliers.tolist() == gguf.open(files / "m.gguf").metadata["qwen4exp.ple.layer_multipliers"]
    hf = rewritten(files / "hf", tmp_path / "hf", {f"{STEM}.layer_multipliers": ("I64", multipliers + 2)})
    with pytest.raises(UnsupportedError, match=r"layer_multipliers has other numbers"):
        convert_checkpoint(hf, tmp_path / "m.gguf", "f32")


def test_an_export_computes_the_same_in_transformers(files: Path, tmp_path: Path) -> None:
    export_gguf(files / "m.gguf", tmp_path / "back")
    saved = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (saved["seed"], saved["ple_layer_ids"], saved["eos_token_id"]) == (7, [2], 1)
    assert np.abs(expected(tmp_path / "back", TOKENS) - expected(files / "hf", TOKENS)).max() < 1e-4
    convert_checkpoint(tmp_path / "back", tmp_path / "again.gguf", "f32")
    first, again = gguf.open(files / "m.gguf"), gguf.open(tmp_path / "again.gguf")
    keys = [key for key in first.metadata if key.startswith("qwen4exp.")]
    assert [first.metadata[key] for key in keys] == [again.metadata[key] for key in keys]
    for name, tensor in first.tensors.items():
        np.testing.assert_allclose(tensor.dequantize(), again.tensors[name].dequantize(), atol=1e-6)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("ple.layer_multipliers", ([3, 5, 7], "u64"), "no seed below"),
        ("ple.eos_token_id", (2, "u32"), r"ple\.eos_token_id = 2, tokenizer"),
    ],
)
def test_exports_that_are_refused(files: Path, tmp_path: Path, key: str, value: Any, message: str) -> None:
    path = changed(files / "m.gguf", tmp_path / "m.gguf", {f"qwen4exp.{key}": value})
    with pytest.raises(UnsupportedError, match=message):
        export_gguf(path, tmp_path / "back")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("ple.layer_multipliers", ([3, 5], "u64"), "have 2, 6, 6 entries; .* make it 3, 6 and 6"),
        ("ple.layer_multipliers", ([3, 5, 1 << 62], "u64"), "do not fit 63 bits"),
        ("ple.head_offsets", ([0, 1, 2, 3, 4, 5], "u64"), "head_offsets are not the sums"),
        ("ple.layers", ([3], "u32"), "one recurrent layer may have n-grams"),
        ("attention.indexer.top_k", (30, "u32"), "top_k = 30 is not a multiple"),
        ("attention.compress_ratios", ([4, 4, 4, 4], "u32"), "compress_ratios = .*recurrent ones 0"),
        ("attention.indexer.key_length", (4, "u32"), "an indexer's key has 4 elements"),
    ],
)
def test_files_that_are_refused(files: Path, tmp_path: Path, key: str, value: Any, message: str) -> None:
    path = changed(files / "m.gguf", tmp_path / "m.gguf", {f"qwen4exp.{key}": value})
    with pytest.raises(QuantkitError, match=message):
        quantkit.load(path)


def test_mtp_layers_are_not_kept() -> None:
    with pytest.raises(UnsupportedError, match="--mtp keep"):
        from_config(archs.language_model(FLASH_NEXT), mtp="keep")
