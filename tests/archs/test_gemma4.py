"""Gemma 4 E2B and E4B: per-layer embeddings, and layers that read keys and values of earlier ones."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quantkit
from quantkit import archs, types
from quantkit.archs.common import validate
from quantkit.archs.common.blocks import Attention, LayerInput
from quantkit.errors import QuantkitError
from quantkit.formats import gguf
from quantkit.formats.safetensors import open_checkpoint
from quantkit.pipelines.conversion.convert import convert_checkpoint
from quantkit.pipelines.export import export_gguf
from quantkit.placement import kv_size, rules
from quantkit.recipe import from_config
from quantkit.runtime.blocks import float_linear
from quantkit.runtime.blocks.layer_input import of_tokens
from tests.archs.checkpoints import tiny
from tests.archs.files import written
from tests.runtime.test_step import changed
from tests.test_architectures import GEMMA_E

TOKENS = np.random.default_rng(3).integers(2, 320, (2, 60))
_KINDS = ["sliding_attention"] * 4 + ["full_attention"]
E2B = {
    "model_type": "gemma4_text", "architectures": ["Gemma4ForCausalLM"], "vocab_size": 262144,
    "vocab_size_per_layer_input": 262144, "hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 35,
    "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256, "global_head_dim": 512,
    "attention_k_eq_v": False, "enable_moe_block": False, "hidden_size_per_layer_input": 256,
    "num_kv_shared_layers": 20, "use_double_wide_mlp": True, "sliding_window": 512, "layer_types": _KINDS * 7,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
}  # fmt: skip
E4B = E2B | {
    "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 42, "num_key_value_heads": 2,
    "num_kv_shared_layers": 18, "use_double_wide_mlp": False,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 7,
}  # fmt: skip


@pytest.mark.parametrize("change", [{}, {"use_double_wide_mlp": False, "tie_word_embeddings": False}])
def test_checkpoints_come_back(tmp_path: Path, change: dict[str, Any]) -> None:
    import torch
    import transformers

    model = tiny(tmp_path / "hf", arch="gemma4", **(GEMMA_E | change))
    convert_checkpoint(tmp_path / "hf", tmp_path / "m.gguf", "f32")
    export_gguf(tmp_path / "m.gguf", tmp_path / "back")
    before, after = open_checkpoint(tmp_path / "hf").tensors, open_checkpoint(tmp_path / "back").tensors
    assert {name: t.shape for name, t in before.items()} == {name: t.shape for name, t in after.items()}
    for name, tensor in before.items():
        assert np.array_equal(after[name].dequantize(), tensor.dequantize()), name
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.float32).eval()
    with torch.no_grad():
        first, second = (m(torch.tensor(TOKENS)).logits.numpy() for m in (model, again))
    assert np.array_equal(first, second)


def test_keys_and_values_that_nothing_reads(tmp_path: Path) -> None:
    """Checkpoints and files of llama.cpp may have them: conversion leaves them out, and a file with them runs."""
    import torch
    from safetensors.torch import load_file, save_file

    tiny(tmp_path / "hf", arch="gemma4", **GEMMA_E)
    convert_checkpoint(tmp_path / "hf", tmp_path / "m.gguf", "f32")
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    for layer in range(4, 8):
        dim = 32 if layer < 7 else 64
        for name, shape in (("k_proj", (2 * dim, 96)), ("v_proj", (2 * dim, 96)), ("k_norm", (dim,))):
            tensors[f"model.layers.{layer}.self_attn.{name}.weight"] = torch.randn(shape)
    save_file(tensors, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    convert_checkpoint(tmp_path / "hf", tmp_path / "same.gguf", "f32")
    assert (tmp_path / "same.gguf").read_bytes() == (tmp_path / "m.gguf").read_bytes()
    extra = {"blk.7.attn_k.weight": np.ones((128, 96), np.float32), "blk.7.attn_k_norm.weight": np.ones(64, np.float32)}
    path = changed(tmp_path / "m.gguf", tmp_path / "more.gguf", {}, extra)
    ours, more = quantkit.load(tmp_path / "m.gguf"), quantkit.load(path)
    assert np.array_equal(ours.logits(TOKENS[0]), more.logits(TOKENS[0]))
    unused = changed(tmp_path / "m.gguf", tmp_path / "odd.gguf", {}, {"blk.7.attn_x.weight": np.ones(64, np.float32)})
    file = gguf.open(unused)
    assert any("attn_x.weight is not used" in line for line in validate.problems(file.metadata, file.tensors))


def test_layers_of_one_shape_keep_their_keys_apart(tmp_path: Path) -> None:
    """Heads of both kinds alike: sequences that run at once share arrays between layers, but not those read later."""
    path = written(tmp_path / "m.gguf", "gemma4", **(GEMMA_E | {"global_head_dim": 32}))
    model = quantkit.load(path)
    cache = model.new_cache(60)
    steps = np.concatenate([model.forward(TOKENS[0, :7], cache), *(model.forward([t], cache) for t in TOKENS[0, 7:])])
    assert np.abs(model.forward_sequences(TOKENS, slice(None))[0] - steps).max() < 1e-4


def test_what_a_layer_gets_of_a_token(tmp_path: Path) -> None:
    """The plain form against the formula, in float64."""
    model = quantkit.load(written(tmp_path / "m.gguf", "gemma4", **GEMMA_E))
    part = model.blocks[3].parts[2]
    assert isinstance(part, LayerInput)
    w = {name: tensor.dequantize().astype(np.float64) for name, tensor in model.weights.items()}
    tokens = np.array([5, 300, 5])
    e = w["token_embd.weight"][tokens] * 96**0.5
    projected = e @ w["per_layer_model_proj.weight"][96:128].T * 96**-0.5
    normed = projected / np.sqrt((projected**2).mean(1, keepdims=True) + 1e-6) * w["per_layer_proj_norm.weight"]
    expected = (normed + w["per_layer_token_embd.weight"][tokens, 96:128] * 32**0.5) * 2**-0.5
    assert np.abs(of_tokens(model, part, tokens) - expected).max() < 1e-5
    rows = float_linear.embedding_rows(model.weights["per_layer_token_embd.weight"], tokens)
    assert np.array_equal(rows, w["per_layer_token_embd.weight"][tokens].astype(np.float32))


def test_which_keys_the_last_layers_read(tmp_path: Path) -> None:
    hp = archs.get("gemma4").hparams(gguf.open(written(tmp_path / "m.gguf", "gemma4", **GEMMA_E)).metadata)
    assert hp.kv_sources == (0, 1, 2, 3, 2, 2, 2, 3)
    parts = [block.parts[0] for block in archs.get("gemma4").blocks(hp)]
    assert all(isinstance(part, Attention) for part in parts)
    assert [part.source for part in parts if isinstance(part, Attention)] == [None] * 4 + [2, 2, 2, 3]
    assert hp.kv_heads_of == (2, 2, 2, 2, 0, 0, 0, 0)


@pytest.mark.parametrize(
    ("config", "count", "billions", "table", "kv"),
    [(E2B, 541, 4.62857, 2.34881, 12 * 512 + 3 * 1024), (E4B, 666, 7.46301, 2.81857, 20 * 1024 + 4 * 2048)],
    ids=["E2B", "E4B"],
)
def test_plans_from_config_json(config: dict[str, Any], count: int, billions: float, table: float, kv: int) -> None:
    """Tensors with exact sizes, a cache of the layers with keys, and the table on the CPU whatever -ngl says."""
    specs, metadata = from_config(config)
    elements = {t.name: math.prod(t.shape) for t in specs}
    assert len(specs) == count
    assert abs(sum(elements.values()) / 1e9 - billions) < 1e-5
    assert abs(elements["per_layer_token_embd.weight"] / 1e9 - table) < 1e-5
    f16 = types.layout("f16")
    assert sum(kv_size.of_layers(metadata, 1000, f16, f16)) == 1000 * kv * 2
    infos = {t.name: t for t in specs}
    placed = rules.place_by_flags(infos, rules.parse_flags("-ngl 99"), metadata)
    assert placed["per_layer_token_embd.weight"].name == placed["token_embd.weight"].name == "CPU"
    assert placed["blk.3.inp_gate.weight"].name == "CUDA0"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size_per_layer_input": 300}, "vocab_size_per_layer_input = 300, vocab_size = 320"),
        ({"num_kv_shared_layers": 5}, "shared_kv_layers = 5 of 8 layers"),
        ({"num_kv_shared_layers": 7}, "shared_kv_layers = 7 of 8 layers"),
        ({"num_kv_shared_layers": 8}, "shared_kv_layers = 8 of 8 layers"),
        ({"num_kv_shared_layers": -1}, r"shared_kv_layers = -1"),
    ],
)
def test_settings_that_are_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = archs.get("gemma4").EXAMPLE | GEMMA_E | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(QuantkitError, match=message):
        from_config(config)
