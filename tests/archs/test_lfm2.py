"""LFM2: checkpoints to GGUF and back, keys as llama.cpp writes them, and settings that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantkit import archs
from quantkit.archs.common import validate
from quantkit.errors import QuantkitError
from quantkit.formats import gguf
from quantkit.formats.safetensors import open_checkpoint
from quantkit.pipelines.conversion.convert import convert_checkpoint
from quantkit.pipelines.export import export_gguf
from quantkit.recipe import from_config, read_config
from tests.archs.checkpoints import tiny
from tests.archs.files import changed, written

TOKENS = np.random.default_rng(3).integers(2, 320, (1, 40))


@pytest.mark.parametrize("arch", ["lfm2", "lfm2moe"])
def test_checkpoints_come_back(tmp_path: Path, arch: str) -> None:
    import torch
    import transformers

    model = tiny(tmp_path / "hf", arch=arch, tie_word_embeddings=arch == "lfm2")
    convert_checkpoint(tmp_path / "hf", tmp_path / "m.gguf", "f32")
    export_gguf(tmp_path / "m.gguf", tmp_path / "back")
    before, after = (open_checkpoint(tmp_path / name).tensors for name in ("hf", "back"))
    assert {name: t.shape for name, t in before.items()} == {name: t.shape for name, t in after.items()}
    for name, tensor in before.items():
        assert np.array_equal(after[name].dequantize(), tensor.dequantize()), name
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.float32).eval()
    with torch.no_grad():
        logits = [m(torch.tensor(TOKENS)).logits.numpy() for m in (model, again)]
    assert np.abs(logits[0] - logits[1]).max() < 1e-4


def test_keys_and_tensors_are_those_of_llama_cpp() -> None:
    """Of LFM2-1.2B and LFM2-8B-A1B, reduced to the settings that decide."""
    dense = {
        "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "vocab_size": 65536, "hidden_size": 2048,
        "block_ff_dim": 12288, "block_auto_adjust_ff_dim": True, "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14], "conv_L_cache": 3, "conv_bias": False, "norm_eps": 1e-5,
        "max_position_embeddings": 128000, "rope_theta": 1000000.0, "tie_embedding": True,
    }  # fmt: skip
    keys = {key: value for key, (value, _) in archs.get("lfm2").metadata(dense).items()}
    kv_heads = [8 if i in dense["full_attn_idxs"] else 0 for i in range(16)]
    assert keys["lfm2.attention.head_count_kv"] == kv_heads
    assert (keys["lfm2.shortconv.l_cache"], keys["lfm2.feed_forward_length"]) == (3, 8192)
    tensors = {t.name: (t.shape, t.f32) for t in archs.get("lfm2").tensors(dense)}
    assert tensors["token_embd_norm.weight"] == ((2048,), True)
    assert tensors["blk.0.shortconv.in_proj.weight"] == ((6144, 2048), False)
    assert tensors["blk.0.shortconv.conv.weight"] == ((2048, 3), True)
    assert tensors["blk.15.shortconv.out_proj.weight"] == ((2048, 2048), False)
    assert tensors["blk.2.attn_k.weight"] == ((512, 2048), False)
    assert "blk.2.shortconv.conv.weight" not in tensors
    assert "output.weight" not in tensors
    example = archs.get("lfm2moe").EXAMPLE
    keys = {key: value for key, (value, _) in archs.get("lfm2moe").metadata(example).items()}
    assert (keys["lfm2moe.expert_gating_func"], keys["lfm2moe.leading_dense_block_count"]) == (2, 1)


@pytest.mark.parametrize(
    ("arch", "change", "message"),
    [
        ("lfm2", {"conv_bias": True}, "conv_bias = True"),
        ("lfm2", {"attention_bias": True}, "attention_bias"),
        ("lfm2", {"tie_embedding": False}, "tie_embedding"),
        ("lfm2", {"layer_types": ["conv", "mamba", "full_attention", "conv"]}, "mamba"),
        ("lfm2", {"layer_types": ["conv", ["conv"], "full_attention", "conv"]}, "layer_types"),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, "layer_types has 2 entries"),
        ("lfm2", {"layer_types": "conv"}, "layer_types"),
        ("lfm2", {"layer_types": ["conv"] * 4}, "head_count_kv"),
        ("lfm2", {"layer_types": None, "full_attn_idxs": [9]}, "full_attn_idxs has 9"),
        ("lfm2", {"layer_types": None, "full_attn_idxs": ["1"]}, "full_attn_idxs"),
        ("lfm2", {"layer_types": None, "full_attn_idxs": 2}, "full_attn_idxs"),
        ("lfm2", {"conv_L_cache": 1}, "conv_L_cache = 1"),
        ("lfm2", {"conv_L_cache": 10**9}, "conv_L_cache"),
        ("lfm2", {"conv_L_cache": "3"}, "conv_L_cache"),
        ("lfm2", {"block_auto_adjust_ff_dim": True, "block_multiple_of": 0}, "block_multiple_of = 0"),
        ("lfm2", {"block_auto_adjust_ff_dim": True, "block_multiple_of": -256}, "block_multiple_of"),
        ("lfm2", {"block_auto_adjust_ff_dim": True, "block_ffn_dim_multiplier": 1e300}, "block_ffn_dim_multiplier"),
        ("lfm2", {"block_auto_adjust_ff_dim": "no"}, "block_auto_adjust_ff_dim"),
        ("lfm2", {"block_ff_dim": -1}, "block_ff_dim"),
        ("lfm2moe", {"use_expert_bias": False}, "use_expert_bias"),
        ("lfm2moe", {"norm_topk_prob": False}, "norm_topk_prob"),
        ("lfm2moe", {"routed_scaling_factor": 2.0}, "routed_scaling_factor"),
        ("lfm2moe", {"num_dense_layers": -1}, "num_dense_layers"),
        ("lfm2moe", {"num_experts_per_tok": 9}, "expert_used_count"),
        ("lfm2moe", {"moe_intermediate_size": 0}, "expert_feed_forward_length"),
    ],
)  # fmt: skip
def test_what_cannot_be_expressed_is_refused(tmp_path: Path, arch: str, change: dict[str, Any], message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**archs.get(arch).EXAMPLE, **change}), encoding="utf-8")
    with pytest.raises(QuantkitError, match=message):
        from_config(read_config(tmp_path))


@pytest.mark.parametrize(
    ("key", "entry", "message"),
    [
        ("shortconv.l_cache", None, "shortconv.l_cache is missing"),
        ("shortconv.l_cache", (4, "u32"), "shortconv.conv"),
        ("shortconv.l_cache", (1, "u32"), "shortconv.l_cache = 1"),
        ("attention.head_count_kv", None, "head_count_kv is missing"),
        ("attention.head_count_kv", ([0, 0, 2], "u32"), "has 3 entries"),
        ("attention.head_count_kv", ([0, 1, 2, 0], "u32"), "head_count_kv"),
        ("attention.head_count_kv", ([0, 0, 0, 0], "u32"), "head_count_kv"),
        ("attention.head_count_kv", ([0, 2, 2, 0], "u32"), "blk.1.attn"),
    ],
)
def test_files_that_contradict_themselves_are_refused(
    tmp_path: Path, key: str, entry: tuple[Any, str] | None, message: str
) -> None:
    path = changed(written(tmp_path / "m.gguf", "lfm2"), tmp_path / "x.gguf", {f"lfm2.{key}": entry})
    file = gguf.open(path)
    with pytest.raises(QuantkitError, match=message):
        validate.describe(file.metadata, file.tensors, path)
