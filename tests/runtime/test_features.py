"""Features of single architectures in the compiled passes: against the layer-by-layer model, on random tiny files.

Biases of experts, sinks and scales are drawn so that leaving one out shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantkit import archs
from quantkit.archs.common import blocks
from quantkit.codegen.jit import kernel
from quantkit.formats import gguf
from quantkit.placement import kernel_sizes
from quantkit.recipe import from_config
from quantkit.runtime.blocks import float_ops
from quantkit.runtime.compiled.unsupported import unsupported_feature
from quantkit.runtime.kernels import reference
from quantkit.runtime.kernels.cpu import decode_norms, decode_ops
from quantkit.runtime.kernels.cpu.gated_activations import ACTIVATIONS, LIMITED, activation, xielu
from quantkit.runtime.kernels.cpu.op_list import OpList
from quantkit.runtime.loading import load
from quantkit.runtime.model import Model
from tests.archs.files import written
from tests.archs.test_kimi_linear import KIMI_LINEAR_48B
from tests.archs.test_longcat_flash import LONGCAT_FLASH
from tests.archs.test_mistral_large4 import MISTRAL_LARGE_4
from tests.archs.test_qwen4exp import FLASH_NEXT as QWEN4_FLASH_NEXT
from tests.recipe import configs
from tests.runtime.conftest import rewrite
from tests.runtime.test_step import TOKENS, by_steps, changed, spread
from tests.test_architectures import GEMMA_E, OTHERS

GPT_OSS_20B = {
    "architectures": ["GptOssForCausalLM"], "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880,
    "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
    "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "rope_theta": 150000.0, "attention_bias": True,
}  # fmt: skip
GEMMA3_27B = {
    "architectures": ["Gemma3ForCausalLM"], "vocab_size": 262208, "hidden_size": 5376, "intermediate_size": 21504,
    "num_hidden_layers": 62, "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128,
    "query_pre_attn_scalar": 168, "sliding_window": 1024, "max_position_embeddings": 131072, "rms_norm_eps": 1e-6,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}  # fmt: skip
GLM45_AIR = {
    "architectures": ["Glm4MoeForCausalLM"], "vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 10944,
    "num_hidden_layers": 46, "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128,
    "moe_intermediate_size": 1408, "n_routed_experts": 128, "num_experts_per_tok": 8, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "attention_bias": True, "num_nextn_predict_layers": 1, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072, "rope_theta": 1e6, "partial_rotary_factor": 0.5,
}  # fmt: skip
MINIMAX_M2 = {
    "architectures": ["MiniMaxM2ForCausalLM"], "vocab_size": 200064, "hidden_size": 3072, "intermediate_size": 1536,
    "num_hidden_layers": 62, "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128, "rotary_dim": 64,
    "num_local_experts": 256, "num_experts_per_tok": 8, "max_position_embeddings": 196608, "rms_norm_eps": 1e-6,
    "rope_theta": 5000000.0,
}  # fmt: skip
HUNYUAN_A13B = {
    "architectures": ["HunYuanMoEV1ForCausalLM"], "vocab_size": 128167, "hidden_size": 4096, "intermediate_size": 3072,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "num_experts": 64,
    "moe_topk": 8, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
}  # fmt: skip
BITNET_2B = {
    "architectures": ["BitNetForCausalLM"], "vocab_size": 128256, "hidden_size": 2560, "intermediate_size": 6912,
    "num_hidden_layers": 30, "num_attention_heads": 20, "num_key_value_heads": 5, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "relu2", "tie_word_embeddings": True,
}  # fmt: skip
FIRST_BITNET_3B = {  # heads of 100 elements
    "architectures": ["BitnetForCausalLM"], "vocab_size": 32002, "hidden_size": 3200, "intermediate_size": 8640,
    "num_hidden_layers": 26, "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
}  # fmt: skip
MINISTRAL3_8B = archs.get("mistral3").EXAMPLE | {
    "vocab_size": 131072, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 34,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
}  # fmt: skip
ERNIE_21B = {
    "architectures": ["Ernie4_5_MoeForCausalLM"], "vocab_size": 103424, "hidden_size": 2560, "intermediate_size": 12288,
    "num_hidden_layers": 28, "num_attention_heads": 20, "num_key_value_heads": 4, "head_dim": 128,
    "moe_intermediate_size": 1536, "moe_num_experts": 64, "moe_k": 6, "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1, "moe_layer_end_index": 27, "moe_layer_interval": 1, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": True,
}  # fmt: skip
DEEPSEEK_V32 = configs.DEEPSEEK_V3 | {
    "architectures": ["DeepseekV32ForCausalLM"], "index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048,
}  # fmt: skip
GLM_5 = DEEPSEEK_V32 | {
    "architectures": ["GlmMoeDsaForCausalLM"], "vocab_size": 154880, "hidden_size": 6144, "intermediate_size": 12288,
    "num_hidden_layers": 78, "num_attention_heads": 64, "num_key_value_heads": 64, "q_lora_rank": 2048,
    "v_head_dim": 256, "qk_nope_head_dim": 192, "index_n_heads": 32, "rms_norm_eps": 1e-5, "rope_scaling": None,
    "rope_theta": 1e6, "max_position_embeddings": 202752, "n_group": 1, "topk_group": 1,
    "quantization_config": None,
}  # fmt: skip
GLM_47_FLASH = {
    "architectures": ["Glm4MoeLiteForCausalLM"], "vocab_size": 154880, "hidden_size": 2048, "intermediate_size": 10240,
    "moe_intermediate_size": 1536, "num_hidden_layers": 47, "num_attention_heads": 20, "num_key_value_heads": 20,
    "n_shared_experts": 1, "n_routed_experts": 64, "num_experts_per_tok": 4, "routed_scaling_factor": 1.8,
    "kv_lora_rank": 512, "q_lora_rank": 768, "qk_rope_head_dim": 64, "v_head_dim": 256, "qk_nope_head_dim": 192,
    "first_k_dense_replace": 1, "norm_topk_prob": True, "max_position_embeddings": 202752, "rms_norm_eps": 1e-5,
    "rope_theta": 1e6, "num_nextn_predict_layers": 1,
}  # fmt: skip
MIMO_V2_FLASH = {  # as published
    "architectures": ["MiMoV2FlashForCausalLM"], "vocab_size": 152576, "hidden_size": 4096,
    "intermediate_size": 16384, "moe_intermediate_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 64,
    "num_key_value_heads": 4, "head_dim": 192, "v_head_dim": 128, "swa_num_attention_heads": 64,
    "swa_num_key_value_heads": 8, "swa_head_dim": 192, "swa_v_head_dim": 128, "n_routed_experts": 256,
    "num_experts_per_tok": 8, "routed_scaling_factor": None, "sliding_window": 128, "sliding_window_size": 128,
    "hybrid_layer_pattern": [int(i > 0 and (i + 1) % 6 > 0) for i in range(48)],
    "moe_layer_freq": [int(i > 0) for i in range(48)], "layernorm_epsilon": 1e-5, "rope_theta": 5e6,
    "swa_rope_theta": 1e4, "partial_rotary_factor": 0.334, "max_position_embeddings": 262144,
}  # fmt: skip
GEMMA4_26B = {
    "architectures": ["Gemma4ForConditionalGeneration"], "text_config": {
        "model_type": "gemma4_text", "vocab_size": 262144, "hidden_size": 2816, "intermediate_size": 2112,
        "moe_intermediate_size": 704, "num_hidden_layers": 30, "num_attention_heads": 16, "num_key_value_heads": 8,
        "num_global_key_value_heads": 2, "head_dim": 256, "global_head_dim": 512, "attention_k_eq_v": True,
        "enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "sliding_window": 1024,
        "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6, "final_logit_softcapping": 30.0, "use_bidirectional_attention": "vision",
    },
}  # fmt: skip
KINDS = ["full_attention", *["sliding_attention"] * 3] * 12
STEP_35_FLASH = {  # as published: lists go on over three MTP layers
    "architectures": ["Step3p5ForCausalLM"], "model_type": "step3p5", "vocab_size": 128896, "hidden_size": 4096,
    "intermediate_size": 11264, "num_hidden_layers": 45, "num_attention_heads": 64, "num_attention_groups": 8,
    "head_dim": 128, "moe_num_experts": 288, "moe_top_k": 8, "moe_intermediate_size": 1280, "share_expert_dim": 1280,
    "moe_layers_enum": ",".join(map(str, range(3, 45))), "moe_router_scaling_factor": 3.0, "norm_expert_weight": True,
    "attention_other_setting": {"attention_type": "sliding_attention", "num_attention_heads": 96,
                                "num_attention_groups": 8, "head_dim": 128},
    "layer_types": KINDS, "sliding_window": 512, "rope_theta": [5e6, 1e4, 1e4, 1e4] * 12,
    "partial_rotary_factors": [0.5, 1.0, 1.0, 1.0] * 12, "yarn_only_types": ["full_attention"],
    "rope_scaling": {"rope_type": "llama3", "factor": 2.0, "original_max_position_embeddings": 131072,
                     "low_freq_factor": 1.0, "high_freq_factor": 32.0},
    "swiglu_limits": [0.0] * 43 + [7, 7] + [0.0] * 3, "swiglu_limits_shared": [0.0] * 44 + [16] + [0.0] * 3,
    "num_nextn_predict_layers": 3, "max_position_embeddings": 262144, "rms_norm_eps": 1e-5,
}  # fmt: skip
LING_1T = {
    "architectures": ["BailingMoeV2ForCausalLM"], "model_type": "bailing_moe", "vocab_size": 157184,
    "hidden_size": 8192, "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "num_experts": 256, "num_experts_per_tok": 8,
    "num_shared_experts": 1, "first_k_dense_replace": 4, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5,
    "norm_topk_prob": True, "score_function": "sigmoid", "moe_router_enable_expert_bias": True, "use_qk_norm": True,
    "num_nextn_predict_layers": 0, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 600000.0,
    "partial_rotary_factor": 0.5, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
NEMOTRON_NANO_9B: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "vocab_size": 131072, "hidden_size": 4480,
    "intermediate_size": 15680, "num_hidden_layers": 56, "num_attention_heads": 40, "num_key_value_heads": 8,
    "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-", "head_dim": 128,
    "mamba_num_heads": 128, "mamba_head_dim": 80, "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4,
    "layer_norm_epsilon": 1e-5, "max_position_embeddings": 131072, "mlp_hidden_act": "relu2", "use_bias": False,
    "mamba_hidden_act": "silu", "use_conv_bias": True, "mamba_proj_bias": False, "tie_word_embeddings": False,
    "time_step_limit": [0.0, float("inf")], "time_step_min": 0.001, "time_step_max": 0.1, "sliding_window": None,
}  # fmt: skip
NEMOTRON_NANO_30B = NEMOTRON_NANO_9B | {
    "hidden_size": 2688, "intermediate_size": 1856, "num_hidden_layers": 52, "num_attention_heads": 32,
    "num_key_value_heads": 2, "mamba_num_heads": 64, "mamba_head_dim": 64, "max_position_embeddings": 262144,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", "n_routed_experts": 128,
    "num_experts_per_tok": 6, "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712,
    "n_shared_experts": 1, "routed_scaling_factor": 2.5, "norm_topk_prob": True, "n_group": 1, "topk_group": 1,
}  # fmt: skip
NEMOTRON_SUPER_120B = NEMOTRON_NANO_30B | {
    "hidden_size": 4096, "moe_latent_size": 1024, "n_routed_experts": 512, "num_experts_per_tok": 22,
    "moe_intermediate_size": 2688, "moe_shared_expert_intermediate_size": 5376, "mamba_num_heads": 128,
    "routed_scaling_factor": 5.0,
}  # fmt: skip
GEMMA3N_E4B = {
    "architectures": ["Gemma3nForConditionalGeneration"], "text_config": {"model_type": "gemma3n_text"},
}  # fmt: skip
FULL_SIZE: dict[str, dict[str, Any]] = {
    "deepseek32": DEEPSEEK_V32, "glm-dsa": GLM_5, "mimo2": MIMO_V2_FLASH,
    "gpt-oss": GPT_OSS_20B, "gemma3": GEMMA3_27B, "glm4moe": GLM45_AIR, "minimax-m2": MINIMAX_M2,
    "hunyuan-moe": HUNYUAN_A13B, "bitnet-b1.58": BITNET_2B, "bitnet": FIRST_BITNET_3B, "mistral3": MINISTRAL3_8B,
    "ernie4_5-moe": ERNIE_21B, "deepseek2": configs.DEEPSEEK_V3, "qwen3moe": configs.QWEN3_235B,
    "qwen35": configs.QWEN35_27B, "gemma4": GEMMA4_26B, "gemma3n": GEMMA3N_E4B, "step35": STEP_35_FLASH,
    "bailingmoe2": LING_1T, "nemotron_h": NEMOTRON_NANO_9B, "nemotron_h_moe": NEMOTRON_NANO_30B,
    "kimi-linear": KIMI_LINEAR_48B, "longcat-flash": LONGCAT_FLASH, "mistral-large4": MISTRAL_LARGE_4,
    "qwen4exp": QWEN4_FLASH_NEXT,
}  # fmt: skip


# ------------------------------------------------------------------------------------------- what has operations


def reason(config: dict[str, Any]) -> str | None:
    """Why a model of a config.json, its matrices in BF16, would run layer by layer."""
    specs, metadata = from_config(archs.language_model(config))
    arch = archs.from_hf(archs.language_model(config))
    weights = {spec.name: spec for spec in specs}
    hparams = arch.hparams(metadata, weights.keys())
    return unsupported_feature(weights, arch.blocks(hparams), arch.head(hparams))  # type: ignore[arg-type]  # no data


NAMES = [arch.name for arch in archs.all()]


@pytest.mark.parametrize("name", NAMES)
def test_every_architecture_is_compiled(name: str) -> None:
    assert reason(archs.get(name).EXAMPLE) is None


@pytest.mark.parametrize("name", FULL_SIZE)
def test_models_of_full_size_are_compiled(name: str) -> None:
    assert archs.from_hf(archs.language_model(FULL_SIZE[name])).name == name
    assert reason(FULL_SIZE[name]) is None


def test_published_configurations_are_read() -> None:
    assert reason(GLM_47_FLASH) is None
    assert reason(NEMOTRON_SUPER_120B) is None
    keys = {key: value for key, (value, _) in archs.get("mimo2").metadata(MIMO_V2_FLASH).items()}
    assert keys["mimo2.attention.head_count_kv"][:7] == [4, 8, 8, 8, 8, 4, 8]
    assert keys["mimo2.attention.sliding_window"] == 129
    assert keys["mimo2.rope.dimension_count"] == 64
    assert keys["mimo2.leading_dense_block_count"] == 1
    for config, weights in ((NEMOTRON_NANO_9B, 8.89e9), (NEMOTRON_NANO_30B, 31.58e9)):
        count = sum(math.prod(t.shape) for t in archs.from_hf(config).tensors(config))
        assert abs(count / weights - 1) < 1e-3
    keys = {key: value for key, (value, _) in archs.get("nemotron_h_moe").metadata(NEMOTRON_NANO_30B).items()}
    assert keys["nemotron_h_moe.attention.head_count_kv"][:8] == [0, 0, 0, 0, 0, 2, 0, 0]
    assert keys["nemotron_h_moe.feed_forward_length"][:8] == [0, 1856, 0, 1856, 0, 0, 1856, 0]
    assert keys["nemotron_h_moe.ssm.inner_size"] == 4096
    keys = {key: value for key, (value, _) in archs.get("step35").metadata(STEP_35_FLASH).items()}
    assert keys["step35.attention.head_count"][:5] == [64, 96, 96, 96, 64]
    assert keys["step35.swiglu_clamp_exp"] == [0.0] * 43 + [7.0, 7.0]
    assert (keys["step35.rope.freq_base"], keys["step35.rope.freq_base_swa"]) == (5e6, 1e4)
    assert keys["step35.leading_dense_block_count"] == 3


def test_heads_below_a_vector_run_layer_by_layer(tmp_path: Path) -> None:
    fast = load(written(tmp_path / "m.gguf", "qwen3", head_dim=8), numerics="fast")
    assert fast.fallback_reason == "heads of 8 and 8 elements: kernels need at least 16"


# ----------------------------------------------------------------------------------------- against the exact model


def pair(path: Path, **options: Any) -> tuple[Model, Model]:
    """The exact model and the compiled one, with a cache that rounds nothing."""
    exact, fast = load(path, cache_type="f32", **options), load(path, numerics="fast", cache_type="f32", **options)
    assert fast.fallback_reason is None
    return exact, fast


def check(path: Path, limit: float = 1e-5, **options: Any) -> None:
    """Prompts of several lengths and token by token, against the exact model."""
    exact, fast = pair(path, **options)
    expected = exact.logits(TOKENS)
    for count in (2, 7, 90):
        assert spread(fast.logits(TOKENS[:count]), expected[:count]) < limit
    assert spread(by_steps(fast, TOKENS), expected) < limit


def one_form(name: str) -> dict[str, Any]:
    """Options: random kv_b is not random k_b and v_b together, so latent attention reads only one of the two forms."""
    return {"mla": 1} if name in ("deepseek2", "mistral4") else {}


@pytest.mark.parametrize("name", NAMES)
def test_the_example_of_every_architecture(name: str, tmp_path: Path) -> None:
    check(written(tmp_path / "m.gguf", name), **one_form(name))


@pytest.mark.parametrize("name", NAMES)
def test_other_ratios_of_every_architecture(name: str, tmp_path: Path) -> None:
    whole = {"q_lora_rank": 96, "qk_nope_head_dim": 64} if name in ("deepseek2", "mistral4") else {}  # multiples of 32
    if name == "deepseek4":
        whole = {"q_lora_rank": 96, "o_lora_rank": 32}
    limit = 1e-4 if name == "gemma4" else 1e-5  # its scores are not scaled, so differences grow from layer to layer
    check(written(tmp_path / "m.gguf", name, **(OTHERS[name] | whole)), limit, **one_form(name))


SOME = ("gpt-oss", "gemma3", "gemma3n", "gemma4", "step35", "hunyuan-moe", "minimax-m2", "bitnet-b1.58", "mistral3",
        "cohere2", "cohere2_moe", "gemma2", "llama4", "nemotron", "nemotron_h", "nemotron_h_moe", "phi3", "apertus",
        "kimi-linear", "longcat-flash", "mistral-large4", "deepseek4")  # fmt: skip


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", SOME)
def test_any_number_of_threads(name: str, threads: int, tmp_path: Path) -> None:
    check(written(tmp_path / "m.gguf", name), threads=threads)


@pytest.mark.parametrize("name", SOME)
def test_sequences_of_their_own_lengths_go_on_together(name: str, tmp_path: Path) -> None:
    exact, fast = pair(written(tmp_path / "m.gguf", name))
    alone, caches, done = exact.logits(TOKENS), [fast.new_cache(room) for room in (90, 128, 95)], [0, 0, 0]
    for counts in ((1, 40, 17), (1, 1, 1), (50, 1, 2)):
        parts = [(TOKENS[d : d + n], cache) for d, n, cache in zip(done, counts, caches)]
        result, done = fast.forward_batch(parts), [d + n for d, n in zip(done, counts)]
        assert spread(result, alone[[d - 1 for d in done]]) < 1e-5


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    "change", [{}, {"attention_k_eq_v": True, "num_global_key_value_heads": 1}], ids=["E2B", "k=v"]
)
def test_per_layer_embeddings_and_keys_of_earlier_layers(change: dict[str, Any], threads: int, tmp_path: Path) -> None:
    path = written(tmp_path / "m.gguf", "gemma4", **(GEMMA_E | change))
    check(path, 1e-4, threads=threads)  # its scores are not scaled
    _, fast = pair(path, threads=threads)
    alone = by_steps(fast, TOKENS[:12])
    caches = [fast.new_cache(64) for _ in range(3)]
    done = [0, 0, 0]
    for counts in ((5, 1, 3), (1, 4, 1), (6, 1, 1)):  # several sequences, each with rows of its own tokens
        found = fast.forward_batch([(TOKENS[d : d + n], c) for d, n, c in zip(done, counts, caches)])
        done = [d + n for d, n in zip(done, counts)]
        assert spread(found, alone[[d - 1 for d in done]]) < 1e-4


@pytest.mark.parametrize(("kind", "limit"), [("q8_0", 0.3), ("f16", 1e-3)])
def test_per_layer_embeddings_of_quantized_weights(kind: str, limit: float, tmp_path: Path) -> None:
    check(rewrite(written(tmp_path / "m.gguf", "gemma4", **GEMMA_E), tmp_path / "q.gguf", kind), limit)


@pytest.mark.parametrize("name", ["gpt-oss", "gemma3", "gemma3n", "gemma4", "gemma2", "llama4"])
def test_plain_attention(name: str, tmp_path: Path) -> None:
    check(written(tmp_path / "m.gguf", name), flash_attention=False)


@pytest.mark.parametrize("name", ["llama", "gpt-oss"])
def test_heads_that_are_no_multiple_of_a_vector(name: str, tmp_path: Path) -> None:
    for dim, heads in ((24, 4), (40, 4)):
        sizes = {"head_dim": dim, "num_attention_heads": heads, "num_key_value_heads": 2}
        check(written(tmp_path / f"{dim}.gguf", name, **sizes))


# --------------------------------------------------------------------------------------------------- single features


def with_blocks(monkeypatch: pytest.MonkeyPatch, name: str, method: str, change: Callable[[Any, int], Any]) -> None:
    """Blocks that no architecture has yet: `change(part, layer)` of what an architecture's method gives."""
    kind = type(archs.get(name))
    given = getattr(kind, method)
    monkeypatch.setattr(kind, method, lambda self, hp, i: change(given(self, hp, i), i))


def test_a_norm_over_all_heads_after_rope(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_blocks(monkeypatch, "minimax-m2", "attention", lambda part, i: replace(part, norms_after_rope=True))
    check(written(tmp_path / "m.gguf", "minimax-m2"))


def test_rope_apart_from_attention_without_a_norm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_blocks(monkeypatch, "llama", "attention", lambda part, i: replace(part, norms_after_rope=True))
    check(written(tmp_path / "m.gguf", "llama"))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_of_experts(name: str, fused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_blocks(monkeypatch, "qwen3moe", "feed_forward", lambda part, i: replace(part, activation=name))
    check(written(tmp_path / "m.gguf", "qwen3moe"), fused_experts=fused)


def test_norms_of_a_shared_expert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its activation too. The norms have weights of another norm: n_embd elements, as the shared expert's rows here."""

    def changed_part(part: Any, i: int) -> Any:
        if not isinstance(part, blocks.Experts):
            return part
        assert part.shared is not None
        norm = blocks.Norm(f"blk.{i}.attn_norm.weight", 1e-5)
        return replace(part, shared=replace(part.shared, post_norm=norm, sub_norm=norm, activation="relu2"))

    with_blocks(monkeypatch, "glm4moe", "feed_forward", changed_part)
    check(written(tmp_path / "m.gguf", "glm4moe", n_shared_experts=2, moe_intermediate_size=32))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("used", [1, 8])
def test_biases_of_experts(used: int, fused: bool, tmp_path: Path) -> None:
    """With one expert of eight, most have few tokens; with all, none has."""
    path = written(tmp_path / "m.gguf", "gpt-oss", num_experts_per_tok=used)
    check(path, fused_experts=fused)
    names = [f"blk.0.ffn_{part}_exps.bias" for part in ("gate", "up", "down")]
    expected, file = load(path).logits(TOKENS), gguf.open(path)
    for name in names:
        without = changed(path, tmp_path / "w.gguf", {}, {name: 0 * file.tensors[name].dequantize()})
        assert spread(load(without, numerics="fast").logits(TOKENS), expected) > 0.01


@pytest.mark.parametrize("kind", ["q8_0", "f16"])
@pytest.mark.parametrize(
    "name", ["gpt-oss", "gemma3", "gemma3n", "gemma4", "bitnet-b1.58", "bitnet", "cohere2", "phi3"]
)
def test_quantized_weights(name: str, kind: str, tmp_path: Path) -> None:
    # all experts, so that rounding changes no choice
    options = {"gpt-oss": {"num_experts_per_tok": 8}, "gemma4": {"top_k_experts": 8}}.get(name, {})
    path = rewrite(written(tmp_path / "m.gguf", name, **options), tmp_path / "q.gguf", kind)
    check(path, 1e-3 if kind == "f16" else 0.1 if name == "gemma4" else 0.03)


@pytest.mark.parametrize("kind", ["f32", "q8_0"])
def test_scaled_products(kind: str, tmp_path: Path) -> None:
    """NAME.scale of every matrix, and a bias that is not scaled beside one."""
    source = written(tmp_path / "m.gguf", "bitnet-b1.58")
    names = [f"blk.{i}.{part}" for i in range(2) for part in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate",
                                                              "ffn_up", "ffn_down")]  # fmt: skip
    extra = {f"{name}.scale": np.array([0.5 + i / 4], np.float32) for i, name in enumerate(names)}
    extra |= {f"blk.{i}.attn_output.bias": np.linspace(-1, 1, 64).astype(np.float32) for i in range(2)}
    extra |= {f"blk.{i}.attn_q.bias": np.linspace(-2, 1, 64).astype(np.float32) for i in range(2)}
    path = changed(source, tmp_path / "scaled.gguf", {}, extra)
    check(rewrite(path, tmp_path / "q.gguf", kind), 0.03 if kind == "q8_0" else 1e-5)
    assert spread(load(path).logits(TOKENS), load(source).logits(TOKENS)) > 0.1


def run_activation(kind: blocks.Activation, gate: np.ndarray, up: np.ndarray, limit: float | None = None) -> np.ndarray:
    """act(gate) * up as the operation of a decode plan computes it, from the functions that plans take."""
    ops = OpList(1)
    is_xielu = isinstance(kind, blocks.Xielu)
    numbers = ops.keep(kind.numbers).ctypes.data if is_xielu else 0
    function = xielu if is_xielu else activation(kind, limit)
    nbytes = kernel_sizes.activation_bytes(gate.size)
    parameters = decode_ops.GatedParameters(
        activation=function.address, gate=ops.keep(gate).ctypes.data, up=ops.keep(up).ctypes.data, n=gate.size,
        multiple=32, buffer=ops.buffer("hidden", nbytes), numbers=numbers,
    )  # fmt: skip
    ops.add(decode_ops.gated, parameters)
    ops.run()
    return ops._buffers["hidden", nbytes].view(np.float32)[: gate.size].reshape(gate.shape).copy()


@pytest.mark.parametrize(
    ("name", "limit"), [*((name, None) for name in ACTIVATIONS), ("swiglu", 2.5), ("swiglu_clamped", 2.5)]
)
def test_activations_are_the_plain_ones(name: str, limit: float | None, rng: np.random.Generator) -> None:
    gate, up = rng.standard_normal((2, 5, 64), np.float32) * 8
    gate[0, :4], up[1, :2] = [-1e9, 1e9, 300, -300], [100, -100]
    gate[2, 3], up[3, 5] = np.nan, np.nan
    expected = float_ops.activate(name, gate.copy(), up, 1, limit)
    out = run_activation(name, gate, up, limit)
    np.testing.assert_allclose(out, expected, rtol=2e-6)
    assert np.isnan(out[[2, 3], [3, 5]]).all()


@pytest.mark.parametrize("kind", [blocks.Xielu(0.8, 0.9, 0.5, -1e-6), blocks.Xielu(1.3, 0.6, 0.4, -0.3)])
def test_xielu(kind: blocks.Xielu, rng: np.random.Generator) -> None:
    """The plain kernel against float64, the operation against it; numbers near 0, where e^x - 1 would be inexact."""
    x = (rng.standard_normal((5, 64)) * 10.0 ** rng.uniform(-7, 1, (5, 64))).astype(np.float32)
    x[0, :6] = [0, -0.0, -100, 100, -1e4, 1e4]
    x[2, 3] = np.nan
    z, (p, n, b, e) = x.astype(np.float64), kind.numbers.astype(np.float64)
    expected = np.where(z > 0, p * z * z + b * z, n * (np.expm1(np.minimum(z, e)) - z) + b * z)
    plain = float_ops.activate(kind, x.copy(), x, 1)
    np.testing.assert_allclose(plain, expected, rtol=3e-6, atol=3e-7 * -e)
    np.testing.assert_allclose(run_activation(kind, x, x), plain, rtol=2e-6, atol=3e-7 * -e)
    assert np.isnan(plain[2, 3])


def test_expm1_is_exact_everywhere() -> None:
    """Within 3 units in the last place, over all exponents."""
    x = np.concatenate([sign * np.geomspace(1e-30, 87, 100_000) for sign in (-1, 1)]).astype(np.float32)
    out = np.empty_like(x)
    expm1_of(x, out)
    exact = np.expm1(x.astype(np.float64))
    assert np.abs((out - exact) / np.spacing(np.abs(exact).astype(np.float32))).max() < 3
    special = np.array([0, -200, -np.inf, np.nan], np.float32)
    out = np.empty_like(special)
    expm1_of(special, out)
    np.testing.assert_array_equal(out, np.array([0, -1, -1, np.nan], np.float32))


@kernel
def expm1_of(x, out):
    for i in range(len(x)):
        out[i] = reference.expm1(x[i])


def test_xielu_of_experts_runs_layer_by_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    xielu = blocks.Xielu(0.8, 0.9, 0.5, -1e-6)
    with_blocks(monkeypatch, "qwen3moe", "feed_forward", lambda part, i: replace(part, activation=xielu))
    path = written(tmp_path / "m.gguf", "qwen3moe")
    exact, fast = (load(path, numerics=kind, cache_type="f32") for kind in ("exact", "fast"))
    assert fast.fallback_reason == "no operation computes xIELU of experts (blk.0.ffn_up_exps.weight)"
    assert spread(fast.logits(TOKENS), exact.logits(TOKENS)) < 1e-4


def test_activations_are_those_that_blocks_name() -> None:
    assert ACTIVATIONS.keys() == float_ops.ACTIVATIONS.keys()
    for arch in map(archs.get, NAMES):
        specs, metadata = from_config(arch.EXAMPLE)
        hparams = arch.hparams(metadata, {spec.name for spec in specs})
        for part in (part for block in arch.blocks(hparams) for part in block.parts):
            if isinstance(part, (blocks.FeedForward, blocks.Experts)):
                names = ACTIVATIONS if part.limit is None else LIMITED
                assert isinstance(part.activation, blocks.Xielu) or part.activation in names
                assert part.gate == part.up or not isinstance(part.activation, blocks.Xielu)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("used", [1, 8])
def test_experts_whose_inputs_are_weighted(used: int, fused: bool, tmp_path: Path) -> None:
    check(written(tmp_path / "m.gguf", "llama4", num_experts_per_tok=used), fused_experts=fused)


def test_soft_caps(rng: np.random.Generator) -> None:
    """The plain kernel against numpy, the operation against it; of logits far beyond the cap too."""
    x = rng.standard_normal((3, 77), np.float32) * 50
    x[0, :3], x[1, 1] = [1e9, -1e9, 0], np.nan
    expected = 30 * np.tanh(x.astype(np.float64) / 30)
    plain, ops = x.copy(), OpList(1)
    float_ops.soft_cap(plain, 30, 1)
    np.testing.assert_allclose(plain, expected, rtol=1e-5, atol=1e-5)
    parameters = decode_norms.SoftCapParameters(
        x=ops.keep(x).ctypes.data, n=x.size, multiple=32, cap=ops.constant(30.0)
    )
    ops.add(decode_norms.soft_cap, parameters)
    ops.run()
    np.testing.assert_allclose(x, plain, rtol=2e-6)
    assert np.isnan(plain[1, 1])


@pytest.mark.parametrize("n", [1, 31, 33, 100])
def test_layer_norms(n: int, rng: np.random.Generator) -> None:
    x, weight, bias = rng.standard_normal((3, n), np.float32) + 3
    out, wide = np.zeros(n, np.float32), x.astype(np.float64)
    expected = (wide - wide.mean()) / np.sqrt(wide.var() + 1e-3) * weight
    for address, added in ((0, 0), (bias.ctypes.data, bias)):
        decode_ops.norm_into(x.ctypes.data, weight.ctypes.data, n, np.float32(1e-3), 1, address, out.ctypes.data)
        np.testing.assert_allclose(out, expected + added, rtol=1e-4, atol=1e-4)


def test_matrices_in_one_tensor(tmp_path: Path) -> None:
    """Interleaved rows too. An observer sees what enters a tensor once. Rows of one group cannot be taken apart."""
    path = written(tmp_path / "m.gguf", "phi3")
    check(rewrite(path, tmp_path / "r8.gguf", "q8_0_r8"), 0.03)
    model, seen = load(path), list[str]()
    model.observer = lambda name, x, *_: seen.append(name)
    model.logits(TOKENS[:5])
    assert sorted(seen) == sorted({name for name in model.weights if name.endswith(("attn_qkv.weight", "ffn_up.weight",
        "attn_output.weight", "ffn_down.weight"))} | {"output.weight"})  # fmt: skip
    odd = rewrite(written(tmp_path / "odd.gguf", "phi3", intermediate_size=100), tmp_path / "o.gguf", "q8_0_r8")
    assert "no whole groups of 8" in str(load(odd, numerics="fast").fallback_reason)


def test_factors_of_long_contexts(tmp_path: Path) -> None:
    """The size of the cache decides, in both numerics: tokens of a short sequence in a large cache differ."""
    path = written(tmp_path / "m.gguf", "phi3", original_max_position_embeddings=100)
    exact, fast = pair(path)
    results = []
    for n_ctx in (100, 101):
        expected, found = (model.forward(TOKENS[:50], model.new_cache(n_ctx)) for model in (exact, fast))
        assert spread(found, expected) < 1e-5
        results.append(expected)
    assert spread(*results) > 0.01
