"""A config.json or a tensor that cannot be is named, with both numbers, before anything is written."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantkit import archs, recipe
from quantkit.archs.common import checked
from quantkit.errors import FormatError, UnsupportedError
from quantkit.pipelines.conversion.convert import convert_checkpoint
from tests.archs.checkpoints import tiny
from tests.archs.test_hybrid import rewritten
from tests.refusals import Refusals

LLAMA = archs.get("llama").EXAMPLE


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"num_hidden_layers": "2"}, "num_hidden_layers = '2'"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000; it has to be a whole number from 1 to 4096"),
        ({"num_attention_heads": 0}, "num_attention_heads = 0"),
        ({"hidden_size": 64.0}, "hidden_size = 64.0"),
        ({"vocab_size": True}, "vocab_size = True"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps = 'x'"),
        ({"rope_theta": float("nan")}, "rope_theta = nan"),
        ({"rope_parameters": "yarn"}, "rope_parameters = 'yarn'; it has to be an object or null"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, r"rope_scaling\.factor = '2'"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, r"rope_scaling\.factor = 0; it has to be a number above 0"),
        ({"rope_scaling": {"type": "linear", "factor": None}}, "rope_scaling of type linear has no 'factor'"),
        ({"rope_scaling": {"type": "llama3", "factor": None}}, "rope_scaling of type llama3 has no 'factor'"),
        ({"moe_intermediate_size": "x"}, "moe_intermediate_size = 'x'"),
        ({"intermediate_size": -96}, "intermediate_size = -96"),
        ({"num_key_value_heads": 3}, "num_attention_heads = 4 is not a multiple of num_key_value_heads = 3"),
        ({"quantization_config": ["fp8"]}, "quantization_config"),
        ({"architectures": "LlamaForCausalLM"}, "it has to be a list of class names"),
        ({"num_local_experts": 1 << 40}, "num_local_experts = 1099511627776"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps = 10+…; it has to be a number above 0, at most 0.1"),
        ({"rope_theta": []}, r"rope_theta = \[\]; it has to be"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings = 'no'; it has to be true or false"),
        ({"rope_scaling": {"rope_type": [], "factor": 4.0}}, r"rope_scaling\.rope_type = \[\]; it has to be a string"),
    ],
)
def test_a_setting_that_cannot_be(tmp_path: Path, change: dict[str, Any], match: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA | change))
    with pytest.raises(FormatError, match=match):
        recipe.from_config(recipe.read_config(path), str(path))
    if "has no" not in match:  # which is found when there are weights
        with pytest.raises(FormatError, match=rf"{tmp_path}.*{match}"):
            convert_checkpoint(tmp_path, tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("arch", "change", "match"),
    [
        ("qwen35", {"mtp_num_hidden_layers": 10**12}, "mtp_num_hidden_layers = 1000000000000; it has to be a whole"),
        ("glm4moe", {"num_mtp_layers": "x"}, "num_mtp_layers = 'x'; it has to be a whole number"),
        ("deepseek2", {"qk_nope_head_dim": [8]}, r"qk_nope_head_dim = \[8\]; it has to be a whole number"),
        ("gemma3", {"query_pre_attn_scalar": "x"}, "query_pre_attn_scalar = 'x'; it has to be a finite number"),
        ("gemma3", {"query_pre_attn_scalar": -5}, "query_pre_attn_scalar = -5; it has to be a number above 0"),
        ("gemma3", {"layer_types": 5}, "layer_types = 5; it has to be a list"),
        ("hunyuan-moe", {"moe_topk": "x"}, "moe_topk = 'x'; it has to be a whole number"),
        ("smollm3", {"no_rope_layers": 5}, "no_rope_layers = 5; it has to be a list"),
        ("smollm3", {"no_rope_layer_interval": "x"}, "no_rope_layer_interval = 'x'; it has to be a whole number"),
        ("qwen35", {"rope_parameters": {"mrope_section": 5}}, "mrope_section = 5; it has to be a list"),
        ("mistral3", {"rope_parameters": {"rope_type": "default", "llama_4_scaling_beta": "x"}},
         "llama_4_scaling_beta = 'x'; it has to be a finite number"),
        ("deepseek4", {"compress_ratios": [0.0, 4, 128, 4]}, "compress_ratios has 0.0"),
        ("deepseek4", {"num_attention_heads": 3}, "itself: .*head_count = 3 is not a multiple of output_group"),
        ("deepseek4", {"qk_rope_head_dim": 128}, "rope.dimension_count = 128, but a head's key has 64 elements"),
        ("qwen3next", {"layer_types": ["linear", "full_attention"]}, "layer_types.0. = 'linear'; known are"),
        ("minimax-m3", {"layer_types": ["full_attention", "x", "x"]}, "layer_types has 'x'; known are"),
        ("step35", {"swiglu_limits": ["", None, None, None]}, "swiglu_limits = ''; it has to be a finite number"),
        ("llama", {"rope_scaling": {"type": "llama3", "factor": 8.0, "low_freq_factor": 4, "high_freq_factor": 4}},
         "low_freq_factor 4, which has to be above 0 and below high_freq_factor 4"),
    ],
)  # fmt: skip
def test_a_setting_of_one_architecture_that_cannot_be(
    tmp_path: Path, arch: str, change: dict[str, Any], match: str
) -> None:
    """Settings without a line in the table of bounds are checked where they are read: no TypeError, no endless loop."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(archs.get(arch).EXAMPLE | change))
    with pytest.raises((FormatError, UnsupportedError), match=f"{path}: .*{match}"):
        recipe.from_config(recipe.read_config(path), str(path))


@pytest.mark.parametrize(
    ("name", "cut", "found", "wanted"),
    [
        ("model.layers.1.mlp.down_proj.weight", lambda x: x[:-1], r"\(63, 96\)", r"\(64, 96\)"),
        ("model.layers.0.self_attn.o_proj.weight", lambda x: x.reshape(-1), r"\(4096,\)", r"\(64, 64\)"),
        ("model.layers.0.self_attn.v_proj.weight", lambda x: x.reshape(2, 16, 64), r"\(2, 16, 64\)", r"\(32, 64\)"),
        ("model.norm.weight", lambda x: x[:-2], r"\(62,\)", r"\(64,\)"),
        ("model.embed_tokens.weight", lambda x: x[:-2], r"\(318, 64\)", r"\(320, 64\)"),
    ],
)
def test_a_shape_that_config_does_not_say(
    tmp_path: Path, name: str, cut: Callable[[Any], Any], found: str, wanted: str
) -> None:
    """The file, the tensor, its shape and the one it should have; nothing is left behind."""
    from safetensors import torch as stored

    tiny(tmp_path / "hf")
    file = tmp_path / "hf" / "model.safetensors"
    tensors = stored.load_file(file)
    stored.save_file(tensors | {name: cut(tensors[name]).clone()}, file, metadata={"format": "pt"})
    with pytest.raises(
        FormatError, match=rf"model\.safetensors: tensor {name} has shape {found}.*config\.json requires {wanted}"
    ):
        convert_checkpoint(tmp_path / "hf", tmp_path / "m.gguf", "f16")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


@pytest.mark.parametrize(
    ("arch", "name", "more"),
    [
        ("granitemoe", "model.layers.1.block_sparse_moe.input_linear.weight", 0),  # an expert more
        ("granitemoe", "model.layers.1.block_sparse_moe.input_linear.weight", 1),  # rows of each expert
        ("llama4", "model.layers.1.feed_forward.experts.gate_up_proj", 2),
        ("minimax-m3", "model.layers.2.mlp.experts.gate_up_proj", 0),
        ("qwen35", "model.layers.2.linear_attn.in_proj_qkv.weight", 0),
        ("ernie4_5-moe", "model.layers.1.mlp.moe_statics.e_score_correction_bias", 0),
    ],
)
def test_a_tensor_is_taken_whole_or_refused(tmp_path: Path, arch: str, name: str, more: int) -> None:
    """A stack of more experts, or of larger ones, than config.json says is not cut to what it says."""
    tiny(tmp_path / "hf", arch=arch)

    def longer(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        x = tensors[name]
        return tensors | {name: np.concatenate([x, np.take(x, [0], more)], more)}

    made = rewritten(tmp_path / "hf", tmp_path / "longer", longer)
    with pytest.raises(FormatError, match=rf"model\.safetensors: tensor {name} has shape .* belongs to another model"):
        convert_checkpoint(made, tmp_path / "m.gguf", "f32")


@pytest.mark.parametrize(("arch", "part"), [("qwen2", "q_proj.bias"), ("glm4moe", "v_proj.bias"),
                                            ("gpt-oss", "router.bias"), ("seed_oss", "k_proj.bias")])  # fmt: skip
def test_biases_that_no_layer_has_are_missed(tmp_path: Path, arch: str, part: str) -> None:
    tiny(tmp_path / "hf", arch=arch)
    made = rewritten(
        tmp_path / "hf", tmp_path / "cut", lambda tensors: {n: x for n, x in tensors.items() if not n.endswith(part)}
    )
    with pytest.raises(FormatError, match=rf"cut: this checkpoint lacks \d bias.* of a {arch} model .*bias"):
        convert_checkpoint(made, tmp_path / "m.gguf", "f32")


def test_the_part_of_a_head_that_rotates() -> None:
    """rope_parameters come first, as in transformers; 0 is no number for "not given"."""
    glm = archs.get("glm4")
    config = {**glm.EXAMPLE, "partial_rotary_factor": 1.0, "rope_parameters": {"partial_rotary_factor": 0.25}}
    assert glm.metadata(config)["glm4.rope.dimension_count"] == (glm.EXAMPLE["head_dim"] // 4, "u32")
    with pytest.raises(FormatError, match="partial_rotary_factor = 0; it has to be a number above 0, at most 1"):
        checked.check_config(glm.EXAMPLE | {"partial_rotary_factor": 0})


def test_a_bound_holds_after_rounding_to_float32() -> None:
    """What `convert` takes from config.json, it reads again in the file."""
    checked.check_config({"rms_norm_eps": 0.1, "rope_theta": 1e30})
    rounded = {"attention.layer_norm_rms_epsilon": 0.1, "rope.freq_base": 1e30}
    checked.check_keys("llama", {f"llama.{key}": float(np.float32(value)) for key, value in rounded.items()})
    with pytest.raises(FormatError, match="rms_norm_eps"):
        checked.check_config({"rms_norm_eps": 0.1001})


WRONG = (0, 1, 7, -1, 1 << 31, 0.5, float("nan"), "x", True, [], [0], [1], [[1]], ["x"], [None] * 4, {}, {"0": 5}, None)


def _with(config: dict[str, Any], value: object) -> Iterator[dict[str, Any]]:
    """The config with each setting replaced by a value, also those of rope_parameters and of each kind of layers."""
    for key, given in config.items():
        yield config | {key: value}
        if isinstance(given, dict):
            yield from (config | {key: inner} for inner in _with(given, value))


@pytest.mark.parametrize("name", [arch.name for arch in archs.all()])
def test_settings_of_other_types_end_in_errors_of_ours(name: str) -> None:
    def read(config: dict[str, Any]) -> None:
        given = archs.language_model(config)
        arch = archs.from_hf(given)
        arch.metadata(given)
        arch.generated(given)
        arch.tensors(given)

    tried = Refusals()
    with warnings.catch_warnings(action="ignore"):
        for value in WRONG:
            for config in _with(archs.get(name).EXAMPLE, value):
                tried.call(read, config)
    tried.check_both()
