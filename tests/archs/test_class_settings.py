"""Settings whose meaning is the class's: its defaults where config.json omits them, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quantkit
from quantkit.archs.common.checked import check_config
from quantkit.errors import FormatError, UnsupportedError
from quantkit.pipelines.conversion.convert import convert_checkpoint
from tests.archs.checkpoints import loaded, log_probabilities, tiny

TOKENS = np.random.default_rng(4).integers(2, 320, 128)
GROUPED = {"n_routed_experts": 16, "n_group": 8, "topk_group": 4, "num_experts_per_tok": 4}
GLM_FLASH = {"architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite", "rope_scaling": None}


def without(directory: Path, arch: str, keys: tuple[str, ...], **config: Any) -> Path:
    """A checkpoint whose config.json lacks these keys."""
    tiny(directory, arch=arch, **config)
    path = directory / "config.json"
    stated = json.loads(path.read_text())
    for key in keys:
        del stated.get("text_config", stated)[key]
    path.write_text(json.dumps(stated))
    return directory


@pytest.mark.parametrize(
    ("arch", "keys", "config"),
    [
        ("deepseek2", ("routed_scaling_factor", "n_group", "topk_group"), GROUPED),
        ("deepseek2", ("routed_scaling_factor",), GLM_FLASH),
        ("deepseek32", ("routed_scaling_factor", "n_group", "topk_group"), GROUPED),
        ("glm-dsa", ("routed_scaling_factor",), {}),
        ("cohere2_moe", ("layer_types",), {}),
        ("exaone4", ("sliding_window",), {}),
        ("kimi-linear", ("routed_scaling_factor",), {}),
        ("longcat-flash", ("routed_scaling_factor",), {}),
        ("minimax-m3", ("routed_scaling_factor", "rotary_dim"), {}),
        ("mistral3", ("rope_parameters",), {}),
        ("mistral4", ("rope_parameters",), {}),
    ],
)  # fmt: skip
def test_logits_are_those_of_transformers(
    tmp_path: Path, arch: str, keys: tuple[str, ...], config: dict[str, Any]
) -> None:
    import torch

    checkpoint = without(tmp_path / "hf", arch, keys, **config)
    with torch.no_grad():
        wanted = log_probabilities(loaded(checkpoint).eval()(torch.tensor(TOKENS[None])).logits.numpy()[0])
    convert_checkpoint(checkpoint, tmp_path / "m.gguf", "f32")
    assert np.abs(log_probabilities(quantkit.load(tmp_path / "m.gguf").logits(TOKENS)) - wanted).max() < 2e-3


LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
WHOLE = {"rope_type": "default", "rope_theta": 10000.0}
V2 = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "scoring_func": "softmax",
    "topk_method": "greedy",
}  # fmt: skip


@pytest.mark.parametrize(
    ("arch", "config", "said"),
    [
        # whole heads rotate in layers without a window, where files mean half of them
        ("step35", {"rope_parameters": {"full_attention": WHOLE, "sliding_attention": WHOLE}},
         r"partial_rotary_factor = 1\.0 .*accepted: 0\.5"),
        ("deepseek2", V2 | {"norm_topk_prob": True}, r"norm_topk_prob = True .*accepted: False"),
        ("gemma3", {"rope_parameters": LLAMA3}, r"rope_type = 'llama3' .*accepted: 'default'"),
        ("gemma3n", {"rope_parameters": LLAMA3}, r"rope_type = 'llama3' .*accepted: 'default'"),
        ("mistral-large4", {"rope_parameters": LLAMA3}, r"rope_type = 'llama3' .*accepted: 'default', 'linear'"),
        ("ernie4_5-moe", {"moe_norm_min": 0.5}, r"moe_norm_min = 0\.5 .*accepted: 1e-12"),
    ],
)  # fmt: skip
def test_what_files_cannot_say_is_refused(tmp_path: Path, arch: str, config: dict[str, Any], said: str) -> None:
    tiny(tmp_path / "hf", arch=arch, **config)
    with pytest.raises(UnsupportedError, match=said):
        convert_checkpoint(tmp_path / "hf", tmp_path / "m.gguf", "f32")


def test_two_settings_of_the_rotated_part_have_to_agree(tmp_path: Path) -> None:
    tiny(tmp_path / "hf", arch="minimax-m3", rotary_dim=32)
    with pytest.raises(FormatError, match=r"rotary_dim = 32, and partial_rotary_factor = 0\.5 .* is 16"):
        convert_checkpoint(tmp_path / "hf", tmp_path / "m.gguf", "f32")


def test_biases_that_config_does_not_state_are_refused(tmp_path: Path) -> None:
    """transformers ignores them; with attention_bias they count."""
    without(tmp_path / "hf", "glm4moe", ("attention_bias",))
    with pytest.raises(FormatError, match=r"has 9 bias.*blk\.0\.attn_q\.bias.* set attention_bias"):
        convert_checkpoint(tmp_path / "hf", tmp_path / "m.gguf", "f32")


@pytest.mark.parametrize("key", ["routed_scaling_factor", "moe_router_scaling_factor"])
def test_experts_scaled_by_zero_are_refused(key: str) -> None:
    """It was taken for no scale."""
    with pytest.raises(FormatError, match=key):
        check_config({key: 0.0})
    check_config({key: 2.5})
