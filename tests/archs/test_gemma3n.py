"""Gemma 3n: several residual streams, shared keys, sparse gates; what plans and files have of it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quantkit
from quantkit import archs, types
from quantkit.archs.common.blocks import Attention
from quantkit.archs.common.tensors import fill_name, split_name
from quantkit.errors import FormatError, QuantkitError, UnsupportedError
from quantkit.evaluate.chunk_runs import evaluate_chunks
from quantkit.evaluate.layers.layer_by_layer import chunks_layer_by_layer
from quantkit.formats import gguf
from quantkit.formats.safetensors import open_checkpoint
from quantkit.pipelines.conversion.convert import convert_checkpoint
from quantkit.pipelines.export import export_gguf
from quantkit.pipelines.prune import plan_prune
from quantkit.placement import kv_size
from quantkit.recipe import from_config
from tests.archs.checkpoints import GEMMA_E, log_probabilities, tiny
from tests.archs.files import changed as with_keys
from tests.archs.files import written
from tests.runtime.test_step import changed
from tests.test_architectures import OTHERS

TOKENS = np.random.default_rng(3).integers(2, 320, (2, 60))
SHARED = OTHERS["gemma3n"]
EXAMPLE: dict[str, Any] = archs.get("gemma3n").EXAMPLE
E4B = {"architectures": ["Gemma3nForConditionalGeneration"], "text_config": {"model_type": "gemma3n_text"}}
E2B = {
    "architectures": ["Gemma3nForConditionalGeneration"],
    "text_config": {
        "model_type": "gemma3n_text", "num_hidden_layers": 30, "num_kv_shared_layers": 10,
        "intermediate_size": [8192] * 30,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "count", "elements", "layers"), [(E4B, 847, 6868990448, 20), (E2B, 727, 4458122848, 20)]
)
def test_plans_from_config_json(config: dict[str, Any], count: int, elements: int, layers: int) -> None:
    """As many tensors and elements as files of llama.cpp's converter; a cache of the layers that share no other's."""
    specs, metadata = from_config(archs.language_model(config))
    assert len(specs) == count
    assert abs(sum(math.prod(t.shape) for t in specs) - elements) < 5000
    f16 = types.layout("f16")
    sizes = kv_size.of_layers(metadata, 1000, f16, f16)
    assert sizes == [1000 * 2 * 2 * 256 * 2] * layers + [0] * (len(sizes) - layers)
    scales = metadata["gemma3n.activation_sparsity_scale"]
    assert scales[:10] == pytest.approx([1.6448536] * 10)
    assert scales[10:] == [-math.inf] * (len(sizes) - 10)


def test_shapes_are_those_of_transformers() -> None:
    """Every tensor of the class, by the names of the rules; projections of the streams are stacked."""
    import torch
    import transformers

    arch = archs.get("gemma3n")
    with torch.device("meta"):
        model = transformers.Gemma3nForCausalLM(transformers.Gemma3nTextConfig(**EXAMPLE))
    theirs = {name: tuple(p.shape) for name, p in model.named_parameters() if name != "lm_head.weight"}
    ours = {t.name: t.shape for t in from_config(EXAMPLE)[0]}
    for rule in arch.rules:
        for name in [name for name in ours if (split_name(name)[0] if not rule.full_names else "") == rule.gguf] + (
            [fill_name(rule.gguf, i) for i in range(4)] if rule.full_names else []
        ):
            there = fill_name(rule.names("hf")[0], split_name(name)[1])
            if rule.gguf in ("altup_proj", "altup_unembd_proj"):
                parts = [theirs.pop(there.replace(".weight", f".{i}.weight")) for i in range(3)]
                assert ours.pop(name) == (3, *parts[0])
            else:
                assert ours.pop(name) == theirs.pop(there), name
    assert not ours
    assert not theirs


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"altup_num_inputs": 3}, "altup_num_inputs = 3"),
        ({"altup_active_idx": 1}, "altup_active_idx = 1"),
        ({"laurel_rank": 32}, "laurel_rank = 32"),
        ({"altup_correct_scale": False}, "altup_correct_scale = False"),
        ({"vocab_size_per_layer_input": 400}, "vocab_size_per_layer_input = 400, vocab_size = 320"),
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers = 4 of 4 layers"),
        ({"num_kv_shared_layers": 1}, "shared_kv_layers = 1 of 4 layers"),
        ({"intermediate_size": [64, 96]}, r"intermediate_size = \[64, 96\]"),
        ({"activation_sparsity_pattern": [0.5]}, r"activation_sparsity_pattern = \[0.5\]"),
        ({"activation_sparsity_pattern": [0.5, 1.0, 0, 0]}, "shares are from 0 to below 1"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"final_logit_softcapping": None}, "final_logit_softcapping = 0"),
    ],
)
def test_settings_that_are_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    """Also those whose file would not run."""
    config = EXAMPLE | change
    with pytest.raises(QuantkitError, match=message):
        archs.get("gemma3n").hparams({key: value for key, (value, _) in archs.get("gemma3n").metadata(config).items()})


@pytest.mark.parametrize("change", [{}, {"tie_word_embeddings": False}, SHARED], ids=["example", "untied", "shared"])
def test_checkpoints_come_back(tmp_path: Path, change: dict[str, Any]) -> None:
    """Where the per-layer embedding has fewer rows than tokens, it comes back with row 0 for each of the others."""
    import torch
    import transformers

    model = tiny(tmp_path / "hf", arch="gemma3n", **change)
    convert_checkpoint(tmp_path / "hf", tmp_path / "m.gguf", "f32")
    export_gguf(tmp_path / "m.gguf", tmp_path / "back")
    before, after = open_checkpoint(tmp_path / "hf").tensors, open_checkpoint(tmp_path / "back").tensors
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        found = after[name].dequantize()
        assert np.array_equal(found[: tensor.shape[0]], tensor.dequantize()), name
        assert (found[tensor.shape[0] :] == found[:1]).all()
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.float32).eval()
    tokens = np.concatenate([TOKENS[0], np.arange(310, model.config.vocab_size)])[None]
    with torch.no_grad():
        first, second = (m(torch.tensor(tokens)).logits.numpy() for m in (model, again))
    assert np.array_equal(first, second)
    assert again.config.activation_sparsity_pattern == model.config.activation_sparsity_pattern
    ours = quantkit.load(tmp_path / "m.gguf")
    assert np.abs(log_probabilities(ours.logits(tokens[0])) - log_probabilities(first[0])).max() < 5e-4


@pytest.mark.parametrize(("change", "limit"), [({}, 1e-4), (SHARED, 5e-4)], ids=["example", "shared"])
def test_logits_are_those_of_transformers(change: dict[str, Any], limit: float, tmp_path: Path) -> None:
    """Scores are not scaled, so that what transformers' RoPE angles lose in float32 shows in the larger model."""
    import torch

    model = tiny(tmp_path / "hf", arch="gemma3n", **change)
    convert_checkpoint(tmp_path / "hf", tmp_path / "m.gguf", "f32")
    with torch.no_grad():
        wanted = log_probabilities(model(torch.tensor(TOKENS)).logits.numpy())
    ours = quantkit.load(tmp_path / "m.gguf")
    together = ours.forward_sequences(TOKENS, slice(None))
    assert np.abs(log_probabilities(together) - wanted).max() < limit
    cache = ours.new_cache(60)
    steps = np.concatenate([ours.forward([token], cache) for token in TOKENS[0]])
    assert np.abs(log_probabilities(steps) - wanted[0]).max() < limit


def test_a_published_checkpoint(tmp_path: Path) -> None:
    """Names of the multimodal class, keys and values of all layers: those that nothing reads are kept for llama.cpp."""
    import torch
    from safetensors.torch import load_file, save_file

    tiny(tmp_path / "hf", "bfloat16", "gemma3n", **SHARED)
    convert_checkpoint(tmp_path / "hf", tmp_path / "m.gguf", "bf16")
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    for layer in range(3, 7):
        for name, shape in (("k_proj", (32, 96)), ("v_proj", (32, 96)), ("k_norm", (32,))):
            tensors[f"model.layers.{layer}.self_attn.{name}.weight"] = torch.randn(shape).bfloat16()
    tensors = {name.replace("model.", "model.language_model.", 1): x for name, x in tensors.items()}
    tensors |= {
        f"model.{name}.w": torch.ones(2) for name in ("vision_tower", "audio_tower", "embed_vision", "embed_audio")
    }
    save_file(tensors, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    text = json.loads((tmp_path / "hf" / "config.json").read_text())
    config = {"architectures": ["Gemma3nForConditionalGeneration"], "model_type": "gemma3n", "text_config": text}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    convert_checkpoint(tmp_path / "hf", tmp_path / "all.gguf", "bf16")
    file, without = gguf.open(tmp_path / "all.gguf"), gguf.open(tmp_path / "m.gguf")
    assert len(file.tensors.keys() - without.tensors.keys()) == 12
    assert {t.name for t in from_config(archs.language_model(config))[0]} == file.tensors.keys()
    kinds = {name: file.tensors[name].type.name for name in ("altup_proj.weight", "blk.1.altup_predict_coef.weight",
                                                             "blk.1.altup_router.weight")}  # fmt: skip
    assert list(kinds.values()) == ["bf16", "f32", "bf16"]
    ours, more = quantkit.load(tmp_path / "m.gguf"), quantkit.load(tmp_path / "all.gguf")
    assert np.array_equal(ours.logits(TOKENS[0]), more.logits(TOKENS[0]))


def test_projections_that_are_missing_or_odd(tmp_path: Path) -> None:
    arch = archs.get("gemma3n")
    tiny(tmp_path, arch="gemma3n")
    shapes = {name: t.shape for name, t in open_checkpoint(tmp_path).tensors.items()}
    one = "model.altup_unembed_projections.1.weight"
    with pytest.raises(FormatError, match=f"lacks {one}"):
        arch.to_gguf(EXAMPLE, {name: shape for name, shape in shapes.items() if name != one})
    with pytest.raises(FormatError, match="must be matrices of one shape"):
        arch.to_gguf(EXAMPLE, shapes | {one: (64, 32)})
    with pytest.raises(UnsupportedError, match=r"not known to gemma3n.*altup_projections\.3"):
        arch.to_gguf(EXAMPLE, shapes | {"model.altup_projections.3.weight": (64, 64)})


def test_files_of_older_converters(tmp_path: Path) -> None:
    """A count of shared layers that is a float, no second RoPE base, no soft cap: what they stand for."""
    path = written(
        tmp_path / "m.gguf", "gemma3n", **(SHARED | {"final_logit_softcapping": 30.0, "rope_parameters": {}})
    )
    keys = {"gemma3n.attention.shared_kv_layers": (4.0, "f32"), "gemma3n.rope.freq_base_swa": None,
            "gemma3n.final_logit_softcapping": None}  # fmt: skip
    old = with_keys(path, tmp_path / "old.gguf", keys)
    assert np.array_equal(quantkit.load(old).logits(TOKENS[0]), quantkit.load(path).logits(TOKENS[0]))
    for entry, message in (((3.5, "f32"), "shared_kv_layers = 3.5; it has to be a whole number"),
                           ((5.0, "f32"), "shared_kv_layers = 5 of 7")):  # fmt: skip
        wrong = with_keys(path, tmp_path / "wrong.gguf", {"gemma3n.attention.shared_kv_layers": entry})
        with pytest.raises(QuantkitError, match=message):
            quantkit.load(wrong)


@pytest.mark.parametrize(
    ("key", "entry", "message"),
    [
        ("altup.active_idx", (1, "u32"), r"altup\.active_idx = 1; only the first stream"),
        ("altup.num_inputs", (3, "u32"), r"altup_proj\.weight has shape \(3, 64, 64\), the metadata say \(2, 64, 64\)"),
        ("activation_sparsity_scale", ([1.0] * 3, "f32"), "has 3 entries, gemma3n.block_count is 4"),
        ("activation_sparsity_scale", ([1.0, math.nan, 1.0, 1.0], "f32"), "activation_sparsity_scale = "),
        ("activation_sparsity_scale", None, "activation_sparsity_scale is missing"),
        ("attention.value_length", (64, "u32"), "heads of gemma3n have one length"),
    ],
)
def test_keys_that_are_refused(key: str, entry: Any, message: str, tmp_path: Path) -> None:
    path = with_keys(written(tmp_path / "m.gguf", "gemma3n"), tmp_path / "odd.gguf", {f"gemma3n.{key}": entry})
    with pytest.raises(QuantkitError, match=message):
        quantkit.load(path)


def test_which_keys_the_last_layers_read(tmp_path: Path) -> None:
    hp = archs.get("gemma3n").hparams(gguf.open(written(tmp_path / "m.gguf", "gemma3n", **SHARED)).metadata)
    assert hp.kv_sources == (0, 1, 2, 1, 2, 1, 2)
    parts = [block.parts[1] for block in archs.get("gemma3n").blocks(hp)]
    assert [part.source for part in parts if isinstance(part, Attention)] == [None] * 3 + [1, 2, 1, 2]
    assert hp.kv_heads_of == (1, 1, 1, 0, 0, 0, 0)


def test_gates_that_are_kept(tmp_path: Path) -> None:
    """With a scale of 8 standard deviations the feed-forward adds the norm of 0; with -inf all gates are kept."""
    path = written(tmp_path / "m.gguf", "gemma3n")
    key = "gemma3n.activation_sparsity_scale"
    none = with_keys(path, tmp_path / "none.gguf", {key: ([50.0] * 4, "f32")})
    whole = with_keys(path, tmp_path / "all.gguf", {key: ([-math.inf] * 4, "f32")})
    zeros = {f"blk.{i}.ffn_down.weight": np.zeros((64, n), np.float32) for i, n in enumerate([96, 96, 160, 96])}
    expected = quantkit.load(changed(whole, tmp_path / "zero.gguf", {}, zeros)).logits(TOKENS[0])
    assert np.array_equal(quantkit.load(none).logits(TOKENS[0]), expected)
    assert np.abs(quantkit.load(whole).logits(TOKENS[0]) - quantkit.load(path).logits(TOKENS[0])).max() > 0.1


@pytest.mark.parametrize(("name", "change"), [("gemma3n", {}), ("gemma4", GEMMA_E)])
def test_layers_whose_embeddings_are_side_by_side_are_not_pruned(name: str, change: Any, tmp_path: Path) -> None:
    file = gguf.open(written(tmp_path / "m.gguf", name, **change))
    with pytest.raises(UnsupportedError, match=r"per_layer_token_embd\.weight has the embeddings of all layers"):
        plan_prune(file, drop_layers=[1])


@pytest.mark.parametrize(
    "how",
    [
        {"profile": True},
        {"devices": "cpu:0=1GiB,cpu:1=1GiB", "tensor_split": (1, 1), "numerics": "fast"},
        {"devices": "cpu:0=1GiB", "gpu_layers": 2},
        {"devices": "cpu:0=1GiB", "kv_on_cpu": True, "override_tensor": "altup|laurel|inp_gate=CPU"},
    ],
)
@pytest.mark.parametrize(("name", "change"), [("gemma3n", SHARED), ("gemma4", GEMMA_E)])
def test_several_devices(name: str, change: Any, how: dict[str, Any], tmp_path: Path) -> None:
    """Layers on one device attend to keys that another has; tokens and streams go from one to the next."""
    path = written(tmp_path / "m.gguf", name, **change)
    tokens = TOKENS[0]
    whole = quantkit.load(path, cache_type="f32").logits(tokens)
    model = quantkit.load(path, cache_type="f32", **how)
    cache = model.new_cache(len(tokens))
    assert cache.nbytes == quantkit.load(path, cache_type="f32").new_cache(len(tokens)).nbytes
    found = [model.forward(tokens[start:stop], cache) for start, stop in ((0, 20), (20, 21), (21, len(tokens)))]
    assert np.abs(log_probabilities(np.concatenate(found)) - log_probabilities(whole)).max() < 1e-3
    if "numerics" not in how:
        wanted = dict(evaluate_chunks(quantkit.load(path, cache_type="f32"), TOKENS))
        for index, logits in chunks_layer_by_layer(model, TOKENS):
            assert np.abs(logits - wanted[index]).max() < 1e-3
