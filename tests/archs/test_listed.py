"""The tensors of a model by its config.json alone, against what is converted and against transformers' own models."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from quantkit import archs
from quantkit.archs.common import base
from quantkit.archs.common.shapes import Sizes, expected_tensors
from quantkit.archs.deepseek2 import in_layout
from quantkit.errors import FormatError, UnsupportedError
from quantkit.pipelines.conversion.plan import plan_conversion
from quantkit.recipe import from_config, read_config
from tests.archs.checkpoints import tiny
from tests.recipe.configs import DEEPSEEK_V3, QWEN35_27B

LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((arch.name, {}) for arch in archs.all()),
    ("llama", {"tie_word_embeddings": True}),
    ("llama", {"head_dim": 32, "attention_bias": True, "mlp_bias": True}),
    ("llama", {"rope_parameters": LLAMA3, "num_attention_heads": 2, "num_key_value_heads": 1}),
    ("qwen3", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
]


@pytest.mark.parametrize(("arch", "changes"), VARIANTS)
def test_a_converted_checkpoint_has_these_tensors(tmp_path: Path, arch: str, changes: dict[str, Any]) -> None:
    tiny(tmp_path, "bfloat16", arch, **changes)
    specs, metadata = from_config(read_config(tmp_path))
    made = plan_conversion(tmp_path, "bf16")
    assert [(s.name, s.shape, s.type.name) for s in specs] == [(s.name, s.shape, s.type.name) for s in made.specs]
    of_tensors = {scalar.key for scalar in archs.get(arch).layer_scalars}  # config.json does not say them
    assert all(made.metadata.get(key, value) == value for key, value in metadata.items() if key not in of_tensors)
    assert of_tensors <= made.metadata.keys() & metadata.keys()


GLM = {
    "architectures": ["Glm4MoeForCausalLM"], "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "n_routed_experts": 6,
    "moe_intermediate_size": 48, "num_experts_per_tok": 2, "n_shared_experts": 2, "first_k_dense_replace": 1,
    "attention_bias": True, "use_qk_norm": True, "rms_norm_eps": 1e-5, "max_position_embeddings": 256,
    "rope_theta": 1e6, "num_nextn_predict_layers": 0,
}  # fmt: skip
DEEPSEEK = DEEPSEEK_V3 | {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 4, "n_routed_experts": 8, "moe_intermediate_size": 48, "num_experts_per_tok": 2,
    "n_shared_experts": 2, "first_k_dense_replace": 1, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8, "v_head_dim": 10, "num_nextn_predict_layers": 0, "n_group": 1, "topk_group": 1,
    "rope_scaling": None,
}  # fmt: skip
QWEN35 = QWEN35_27B["text_config"] | {
    "architectures": ["Qwen3_5ForCausalLM"], "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "linear_num_value_heads": 6, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
QWEN35_MOE = QWEN35 | {
    "architectures": ["Qwen3_5MoeForCausalLM"], "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 40,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "kind"),
    [(GLM, "Glm4Moe"), (DEEPSEEK, "DeepseekV3"), (DEEPSEEK | {"q_lora_rank": None}, "DeepseekV3"),
     (QWEN35, "Qwen3_5Text"), (QWEN35_MOE, "Qwen3_5MoeText"),
     (QWEN35_MOE | {"architectures": ["Qwen3NextForCausalLM"]}, "Qwen3Next"),
     (GLM | {"architectures": ["Qwen2ForCausalLM"], "head_dim": 16}, "Qwen2"),
     (GLM | {"architectures": ["MixtralForCausalLM"], "num_local_experts": 6, "attention_bias": False}, "Mixtral")],
)  # fmt: skip
def test_models_of_transformers_have_as_many_weights(config: dict[str, Any], kind: str) -> None:
    import torch
    import transformers

    given = {key: value for key, value in config.items() if key not in ("architectures", "quantization_config")}
    with torch.device("meta"):
        model = getattr(transformers, config["architectures"][0])(getattr(transformers, f"{kind}Config")(**given))
    stored = {**dict(model.named_parameters()), **{k: v for k, v in model.state_dict().items() if "bias" in k}}
    tensors = in_layout(archs.from_hf(config).tensors(config), "joint")
    assert len({t.name for t in tensors}) == len(tensors)
    assert sum(math.prod(t.shape) for t in tensors) == sum(x.numel() for x in stored.values())
    if kind == "Qwen3Next":  # two pairs of tensors are one each in its checkpoints
        return
    ours = sorted(math.prod(t.shape) for t in tensors if "exps" not in t.name)
    theirs = sorted(x.numel() for name, x in stored.items() if ".experts." not in name)
    assert ours == theirs


def test_every_class_is_of_one_architecture() -> None:
    """Where two have the class of a config, as the two BitNets do, only one accepts it."""
    for arch in archs.all():
        for config in (arch.EXAMPLE | {"architectures": [name]} for name in arch.hf):
            assert [other.name for other in archs.all() if other.accepts(config)
                    and config["architectures"][0] in other.hf] == [arch.name]  # fmt: skip


def test_what_is_missing_is_named() -> None:
    with pytest.raises(FormatError, match="kv_lora_rank"):
        archs.from_hf(DEEPSEEK).tensors({k: v for k, v in DEEPSEEK.items() if k != "kv_lora_rank"})
    with pytest.raises(FormatError, match=r"llama\.expert_count"):
        expected_tensors(["blk.0.ffn_up_exps.weight"], Sizes("llama", {"llama.embedding_length": 64}))
    with pytest.raises(UnsupportedError, match=r"blk\.0\.foo\.weight: the shape"):
        expected_tensors(["blk.0.foo.weight"], Sizes("llama", {}))
    with pytest.raises(UnsupportedError, match="Qwen9ForCausalLM is not an architecture quantkit converts"):
        archs.from_hf({"architectures": ["Qwen9ForCausalLM"]})
    kinds = ["linear_attention", "full_attention", "full_attention"]
    with pytest.raises(
        UnsupportedError,
        match=r"layer_types\[2\] = 'full_attention'; full_attention has to be the last of every 2",
    ):
        archs.from_hf(QWEN35).metadata({**QWEN35, "full_attention_interval": 2, "layer_types": kinds})


def test_an_example_of_another_architecture_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new architecture that inherits its parent's EXAMPLE would otherwise be tested as the parent."""

    class Made(type(archs.get("qwen3"))):  # type: ignore[misc]  # a class that is looked up
        hf = ("MadeForCausalLM",)
        model_type = "made"

    monkeypatch.setitem(base.registered(), "made", Made())
    with pytest.raises(
        AssertionError, match=r"EXAMPLE of made .* makes a Qwen3ForCausalLM, which is converted as qwen3"
    ):
        tiny(tmp_path, arch="made")
