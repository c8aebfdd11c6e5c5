"""Qwen4-Exp, which is planned only: tensors and caches from config.json, and that nothing else takes it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from quantkit import archs, types
from quantkit.archs.common.tensors import fill_name, split_name
from quantkit.errors import QuantkitError, UnknownNameError, UnsupportedError
from quantkit.pipelines.conversion.convert import convert_checkpoint
from quantkit.placement import kv_size
from quantkit.recipe import from_config

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
TINY = {
    "architectures": ["Qwen4ExpForCausalLM"], "model_type": "qwen4_exp_text", "vocab_size": 320, "hidden_size": 64,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "rope_parameters": ROPE | {"mrope_section": [2, 1, 1]},
    "layer_types": PERIOD, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 24,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "num_experts": 8, "num_experts_per_tok": 3,
    "moe_intermediate_size": 40, "shared_expert_intermediate_size": 48, "hc_count": 3, "hc_lowrank": 20,
    "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 32,
    "indexer_compress_ratio": 4, "ple_layer_ids": [2], "ple_embed_dim": 96, "ple_conv_kernel_size": 4,
    "ngram_size": 4, "heads_per_ngram": 2, "ngram_vocab_size_base": 50, "seed": 7, "output_gate_type": "sigmoid",
    "eos_token_id": 1, "bos_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip


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
    state, ngrams = 4 * (3 * (6144 + 2 * 2048) + 48 * 128 * 128), 4 * 9 * 4 * 2560
    attends = 1000 * (2 * (256 * 2 + 272) + 136)
    assert kv_size.of_layers(metadata, 1000, f16, q8_0)[:4] == [state, state + ngrams, state, attends]


def test_shapes_and_hashes_are_those_of_transformers() -> None:
    """Every tensor of the class, by the names of the rules; checkpoints join matrices of experts and of indexers."""
    import torch
    import transformers

    arch = archs.from_hf(TINY, plans=True)
    model = transformers.Qwen4ExpForCausalLM(transformers.Qwen4ExpTextConfig(**TINY))
    theirs = {name: tuple(p.shape) for name, p in model.named_parameters()}
    specs, metadata = from_config(archs.language_model(TINY))
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
    ],
)
def test_settings_that_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(QuantkitError, match=message):
        from_config(archs.language_model(TINY | change))


def test_without_ngrams() -> None:
    """No layer looks them up: neither a table nor keys."""
    specs, metadata = from_config(archs.language_model(TINY | {"ple_layer_ids": [], "eos_token_id": None}))
    assert not [t.name for t in specs if "ple_" in t.name or t.name.startswith("per_layer")]
    assert not [key for key in metadata if ".ple." in key]


def test_nothing_but_plans(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    with pytest.raises(UnsupportedError, match="is planned from its config"):
        convert_checkpoint(tmp_path, tmp_path / "m.gguf", "f32")
    with pytest.raises(UnknownNameError, match="qwen4exp"):
        archs.get("qwen4exp")
    with pytest.raises(UnsupportedError, match="--mtp keep"):
        from_config(archs.language_model(FLASH_NEXT), mtp="keep")
