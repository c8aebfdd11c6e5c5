"""Gemma 3n, which is planned only: tensors and caches from config.json, and that nothing else takes it."""

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

E4B = {"architectures": ["Gemma3nForConditionalGeneration"], "text_config": {"model_type": "gemma3n_text"}}
E2B = {
    "architectures": ["Gemma3nForConditionalGeneration"],
    "text_config": {
        "model_type": "gemma3n_text", "num_hidden_layers": 30, "num_kv_shared_layers": 10,
        "intermediate_size": [8192] * 30,
    },
}  # fmt: skip
TINY = {
    "architectures": ["Gemma3nForCausalLM"], "model_type": "gemma3n_text", "vocab_size": 320, "hidden_size": 96,
    "vocab_size_per_layer_input": 320, "intermediate_size": [64, 96, 64, 64], "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "hidden_size_per_layer_input": 32,
    "num_kv_shared_layers": 0, "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "count", "elements", "layers"), [(E4B, 847, 6866172400, 20), (E2B, 727, 4455632480, 20)]
)
def test_plans_from_config_json(config: dict[str, Any], count: int, elements: int, layers: int) -> None:
    """As many tensors and elements as llama.cpp's files have; a cache of the layers that share no other's."""
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
    """Every tensor of the class, by the names of the rules; projections of the states are stacked."""
    import torch
    import transformers

    arch = archs.from_hf(TINY, plans=True)
    with torch.device("meta"):
        model = transformers.Gemma3nForCausalLM(transformers.Gemma3nTextConfig(**TINY))
    theirs = {name: tuple(p.shape) for name, p in model.named_parameters() if name != "lm_head.weight"}
    ours = {t.name: t.shape for t in from_config(archs.language_model(TINY))[0]}
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
        ({"laurel_rank": 32}, "laurel_rank = 32"),
        ({"altup_correct_scale": False}, "altup_correct_scale = False"),
        ({"vocab_size_per_layer_input": 400}, "vocab_size_per_layer_input = 400, vocab_size = 320"),
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers = 4 of 4 layers"),
        ({"intermediate_size": [64, 96]}, r"intermediate_size = \[64, 96\]"),
        ({"activation_sparsity_pattern": [0.5]}, r"activation_sparsity_pattern = \[0.5\]"),
        ({"activation_sparsity_pattern": [0.5, 1.0, 0, 0]}, "shares are from 0 to below 1"),
        ({"attention_bias": True}, "attention_bias = True"),
    ],
)
def test_settings_that_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(QuantkitError, match=message):
        from_config(archs.language_model(TINY | change))


def test_nothing_but_plans(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    with pytest.raises(UnsupportedError, match="is planned from its config"):
        convert_checkpoint(tmp_path, tmp_path / "m.gguf", "f32")
    with pytest.raises(UnknownNameError, match="gemma3n"):
        archs.get("gemma3n")
    assert "gemma3n" not in {arch.name for arch in archs.all()}
