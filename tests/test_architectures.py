"""Every architecture on tiny random checkpoints, float32: logits of transformers, and of the reference.

Each has a second configuration of other ratios beside its EXAMPLE, and what its config.json can switch.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quantkit
from quantkit import archs, recipe
from quantkit.archs.common.blocks import LatentAttention
from quantkit.errors import DataError, UnsupportedError
from quantkit.formats import gguf
from quantkit.pipelines.conversion.convert import convert_checkpoint
from quantkit.pipelines.conversion.plan import plan_conversion
from quantkit.pipelines.quantize import quantize_with_plan
from tests.archs.checkpoints import GEMMA_E, log_probabilities, tiny

TOKENS = np.random.default_rng(3).integers(2, 320, (2, 256))
HYBRID = {
    "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 1, "head_dim": 64, "num_hidden_layers": 5,
    "intermediate_size": 160,
}  # fmt: skip
GLM_FLASH = {
    "architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite", "rope_scaling": None,
    "rope_theta": 1e6, "rms_norm_eps": 1e-5, "routed_scaling_factor": 1.8, "num_hidden_layers": 4,
    "mlp_layer_types": ["dense", "dense", "sparse", "sparse"], "first_k_dense_replace": None,
}  # fmt: skip
OTHERS: dict[str, dict[str, Any]] = {
    "apertus": {
        "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 1, "num_hidden_layers": 3, "head_dim": 32,
        "intermediate_size": 160, "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "deepseek4": {
        "hidden_size": 96, "num_attention_heads": 6, "num_hidden_layers": 3, "head_dim": 32, "qk_rope_head_dim": 16,
        "q_lora_rank": 48, "o_groups": 3, "o_lora_rank": 16, "n_routed_experts": 12, "num_experts_per_tok": 5,
        "compress_ratios": [4, 0, 128], "hc_mult": 2, "hc_sinkhorn_iters": 3, "num_hash_layers": 1,
        "rope_scaling": None, "sliding_window": 40, "index_n_heads": 12, "index_head_dim": 32, "index_topk": 30,
        "swiglu_limit": 10.0, "routed_scaling_factor": 2.5,
    },
    "deepseek32": {
        "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 6, "num_hidden_layers": 2,
        "q_lora_rank": 96, "kv_lora_rank": 32, "qk_nope_head_dim": 64, "qk_rope_head_dim": 16, "v_head_dim": 32,
        "n_routed_experts": 12, "num_experts_per_tok": 4, "n_shared_experts": 2, "index_n_heads": 12,
        "index_head_dim": 32, "index_topk": 40, "rope_scaling": None,
    },
    "dots1": {
        "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 6, "num_hidden_layers": 4, "head_dim": 64,
        "n_routed_experts": 12, "num_experts_per_tok": 4, "n_shared_experts": 2, "first_k_dense_replace": 2,
        "norm_topk_prob": False, "routed_scaling_factor": 1.0,
    },
    "glm-dsa": {
        "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 6, "num_hidden_layers": 3,
        "q_lora_rank": 96, "kv_lora_rank": 32, "qk_nope_head_dim": 64, "qk_rope_head_dim": 16, "v_head_dim": 64,
        "n_routed_experts": 12, "num_experts_per_tok": 4, "n_shared_experts": 2, "index_n_heads": 12,
        "index_head_dim": 32, "index_topk": 40, "indexer_types": None, "first_k_dense_replace": 2,
    },
    "deepseek2": {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "hidden_size": 96,
        "num_attention_heads": 6, "num_key_value_heads": 6, "num_hidden_layers": 5, "q_lora_rank": 80,
        "kv_lora_rank": 32, "qk_nope_head_dim": 48, "qk_rope_head_dim": 16, "v_head_dim": 32, "n_routed_experts": 12,
        "num_experts_per_tok": 4, "n_shared_experts": 2, "first_k_dense_replace": 2, "routed_scaling_factor": 1.0,
        "norm_topk_prob": False, "scoring_func": "softmax", "topk_method": "greedy",
        "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "mscale": 0.707,
                         "mscale_all_dim": 0.707, "beta_fast": 32.0, "beta_slow": 1.0},
    },
    "llama": {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3, "num_hidden_layers": 3},
    "gemma3": {
        "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 1, "num_hidden_layers": 13, "head_dim": 16,
        "query_pre_attn_scalar": 16, "sliding_window": 20, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "gpt-oss": {
        "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 1, "num_hidden_layers": 3, "head_dim": 16,
        "num_local_experts": 12, "num_experts_per_tok": 5, "intermediate_size": 32, "sliding_window": 50,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "mimo2": {
        "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3, "num_hidden_layers": 3, "head_dim": 32,
        "v_head_dim": 64, "n_routed_experts": 12, "num_experts_per_tok": 5, "sliding_window": 20,
        "attention_value_scale": 0.5, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "mlp_layer_types": ["dense", "dense", "sparse"],
    },
    "minimax-m2": {
        "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 1, "num_hidden_layers": 3, "head_dim": 64,
        "rotary_dim": 64, "num_local_experts": 12, "num_experts_per_tok": 5, "intermediate_size": 64,
    },
    "minimax-m3": {
        "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 1, "num_hidden_layers": 4, "head_dim": 64,
        "rotary_dim": 32, "num_local_experts": 12, "num_experts_per_tok": 5, "shared_intermediate_size": 32,
        "mlp_layer_types": ["dense", "dense", "sparse", "sparse"], "layer_types": ["full_attention"] * 4,
    },
    "hunyuan-moe": {
        "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 1, "num_hidden_layers": 3, "head_dim": 64,
        "num_experts": 12, "moe_topk": 5, "intermediate_size": 64, "tie_word_embeddings": True,
        "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0},
    },
    "hunyuan-dense": {
        "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 1, "num_hidden_layers": 3, "head_dim": 64,
        "intermediate_size": 160, "tie_word_embeddings": False, "attention_bias": True,
        "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0},
    },
    "hy_v3": {
        "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 1, "num_hidden_layers": 4, "head_dim": 64,
        "num_experts": 12, "num_experts_per_tok": 4, "num_shared_experts": 2, "tie_word_embeddings": True,
        "mlp_layer_types": ["dense", "dense", "sparse", "sparse"], "router_scaling_factor": 1.0,
    },
    "olmoe": {
        "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3, "num_hidden_layers": 3,
        "num_experts": 12, "num_experts_per_tok": 5, "intermediate_size": 64, "norm_topk_prob": True,
    },
    "seed_oss": {
        "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 1, "num_hidden_layers": 3, "head_dim": 64,
        "intermediate_size": 160, "tie_word_embeddings": True,
    },
    "granite": {
        "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 1, "num_hidden_layers": 3,
        "intermediate_size": 160, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False,
        "logits_scaling": 8.0, "residual_multiplier": 1.0,
    },
    "granitemoe": {
        "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 1, "num_hidden_layers": 3,
        "intermediate_size": 64, "num_local_experts": 12, "num_experts_per_tok": 5, "tie_word_embeddings": False,
        "residual_multiplier": 1.0,
    },
    "olmo2": {
        "architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3",
        "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3, "num_hidden_layers": 5,
        "intermediate_size": 160, "sliding_window": 40, "tie_word_embeddings": True,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32.0,
                         "beta_slow": 1.0},
    },
    "exaone4": {
        "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 1, "num_hidden_layers": 3,
        "intermediate_size": 160, "sliding_window": None, "head_dim": 64, "tie_word_embeddings": True,
        "sliding_window_pattern": None, "layer_types": ["full_attention"] * 3,
    },
    "cohere2": {
        "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 1, "num_hidden_layers": 9,
        "intermediate_size": 160, "sliding_window": 20,
    },
    "cohere2_moe": {
        "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 1, "num_hidden_layers": 9, "head_dim": 32,
        "num_experts": 12, "num_experts_per_tok": 5, "intermediate_size": 64, "prefix_dense_intermediate_size": 160,
        "sliding_window": 20, "layer_types": None, "mlp_layer_types": None, "first_k_dense_replace": 2,
        "expert_selection_fn": "softmax",
    },
    "gemma2": {
        "num_attention_heads": 4, "num_key_value_heads": 1, "num_hidden_layers": 26, "head_dim": 64,
        "sliding_window": 300, "query_pre_attn_scalar": 64, "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3n": {
        "vocab_size": 330, "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 1,
        "num_hidden_layers": 7, "intermediate_size": 96, "hidden_size_per_layer_input": 64, "num_kv_shared_layers": 4,
        "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.95, 0.0, 0.1, 0.0], "sliding_window": 20,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention",
                        "full_attention", "sliding_attention", "full_attention"],
        "final_logit_softcapping": 30.0,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 100000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
        },
    },
    "gemma4": {
        "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3, "num_hidden_layers": 7, "head_dim": 32,
        "global_head_dim": 96, "num_global_key_value_heads": None, "attention_k_eq_v": False, "sliding_window": 20,
        "layer_types": None, "enable_moe_block": False, "num_experts": None, "top_k_experts": None,
        "moe_intermediate_size": None, "final_logit_softcapping": None, "tie_word_embeddings": False,
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "rope_theta": 100000.0, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
        },
    },
    "bailingmoe2": {
        "hidden_size": 192, "num_attention_heads": 6, "num_key_value_heads": 1, "num_hidden_layers": 4,
        "num_experts": 12, "num_experts_per_tok": 5, "first_k_dense_replace": 2, "n_group": 1, "topk_group": 1,
        "partial_rotary_factor": 1.0, "moe_intermediate_size": 64, "routed_scaling_factor": 1.0,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64,
                         "beta_fast": 32.0, "beta_slow": 1.0},
    },
    "step35": {
        "hidden_size": 96, "num_attention_heads": 6, "num_sliding_attention_heads": 12, "num_key_value_heads": 3,
        "num_hidden_layers": 5, "head_dim": 32, "sliding_window": 20, "n_routed_experts": 12, "num_experts_per_tok": 5,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention",
                        "sliding_attention"],
        "mlp_layer_types": ["dense", "dense", "sparse", "sparse", "sparse"], "swiglu_limits": None,
        "swiglu_limits_shared": [None, None, None, 0.5, 0.5],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 100000.0, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 1.0},
        },
    },
    "glm4": {
        "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 1, "num_hidden_layers": 3, "head_dim": 16,
        "intermediate_size": 160, "attention_bias": False, "tie_word_embeddings": True, "partial_rotary_factor": 1.0,
    },
    "phi3": {
        "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 1, "num_hidden_layers": 3,
        "intermediate_size": 160, "sliding_window": None, "rope_scaling": None, "partial_rotary_factor": 0.5,
    },
    "llama4": {
        "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 1, "num_hidden_layers": 4, "head_dim": 64,
        "intermediate_size": 64, "intermediate_size_mlp": 160, "num_local_experts": 12, "num_experts_per_tok": 3,
        "interleave_moe_layer_step": 1, "attention_chunk_size": 100, "use_qk_norm": False,
    },
    "nemotron_h": {
        "hidden_size": 96, "intermediate_size": 160, "num_attention_heads": 6, "num_key_value_heads": 1, "head_dim": 64,
        "layers_block_type": ["mlp", "full_attention", "linear_attention", "linear_attention", "mlp", "full_attention",
                              "linear_attention"],
        "mamba_num_heads": 12, "mamba_head_dim": 24, "ssm_state_size": 40, "n_groups": 3, "conv_kernel": 3,
        "attention_bias": True, "mlp_bias": True,
    },
    "nemotron_h_moe": {
        "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16,
        "layers_block_type": ["moe", "linear_attention", "moe", "full_attention", "linear_attention"],
        "mamba_num_heads": 6, "mamba_head_dim": 32, "ssm_state_size": 16, "n_groups": 1, "conv_kernel": 2,
        "n_routed_experts": 12, "num_experts_per_tok": 5, "moe_intermediate_size": 64, "norm_topk_prob": False,
        "moe_shared_expert_intermediate_size": 96, "n_shared_experts": 2, "n_group": 4, "topk_group": 2,
        "routed_scaling_factor": 1.0, "moe_latent_size": 32,
    },
    "nemotron": {
        "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 1, "num_hidden_layers": 3, "head_dim": 32,
        "intermediate_size": 160, "attention_bias": True, "mlp_bias": True,
    },
    "ernie4_5": {
        "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 1, "num_hidden_layers": 3, "head_dim": 64,
        "intermediate_size": 160, "tie_word_embeddings": False,
    },
    "ernie4_5-moe": {
        "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 1, "num_hidden_layers": 5,
        "head_dim": 16, "moe_num_experts": 12, "moe_k": 5, "moe_num_shared_experts": 0, "moe_layer_start_index": 2,
        "moe_layer_end_index": 4, "moe_intermediate_size": 64, "tie_word_embeddings": False,
    },
    "bitnet-b1.58": {
        "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 1, "num_hidden_layers": 3,
        "intermediate_size": 160, "tie_word_embeddings": False,
    },
    "bitnet": {"hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 3, "intermediate_size": 128},
    "mistral4": {
        "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 6, "num_hidden_layers": 4,
        "q_lora_rank": 96, "kv_lora_rank": 32, "qk_nope_head_dim": 64, "qk_rope_head_dim": 16, "v_head_dim": 32,
        "n_routed_experts": 12, "num_experts_per_tok": 4, "n_shared_experts": 2, "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.5,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0,
                            "original_max_position_embeddings": 50, "mscale": 1.0, "mscale_all_dim": 1.0,
                            "llama_4_scaling_beta": 0.3},
    },
    "longcat-flash": {
        "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 6, "num_layers": 3, "q_lora_rank": 64,
        "kv_lora_rank": 32, "qk_nope_head_dim": 64, "qk_rope_head_dim": 16, "head_dim": 16, "v_head_dim": 32,
        "n_routed_experts": 12, "zero_expert_num": 4, "moe_topk": 5, "expert_ffn_hidden_size": 64,
        "routed_scaling_factor": 1.0,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 1.0,
                         "mscale_all_dim": 1.0, "beta_fast": 32.0, "beta_slow": 1.0},
    },
    "mistral-large4": {
        "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 6, "num_hidden_layers": 4,
        "kv_lora_rank": 32, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 32, "n_routed_experts": 12,
        "num_experts_per_tok": 4, "n_shared_experts": 2, "first_k_dense_replace": 2, "mlp_layer_types": None,
        "index_topk": 120, "index_n_heads": 16, "indexer_types": None, "no_rope_layers": None, "attention_bias": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "final_logit_softcapping": 30.0,
    },
    "mistral3": {
        "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 1, "num_hidden_layers": 3, "head_dim": 16,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32.0,
                            "beta_slow": 1.0, "original_max_position_embeddings": 50, "mscale": 1.0,
                            "mscale_all_dim": 0.5, "llama_4_scaling_beta": 0.3},
    },
    "smollm3": {
        "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3, "num_hidden_layers": 9,
        "tie_word_embeddings": False,
    },
    "glm4moe": {
        "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 1, "num_hidden_layers": 4,
        "partial_rotary_factor": 0.25, "head_dim": 64, "n_routed_experts": 12, "num_experts_per_tok": 4,
        "n_shared_experts": 2, "first_k_dense_replace": 2, "use_qk_norm": True,
    },
    "kimi-linear": {
        "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 6, "num_hidden_layers": 6,
        "kv_lora_rank": 32, "qk_nope_head_dim": 64, "qk_rope_head_dim": 16, "v_head_dim": 64, "num_experts": 12,
        "num_experts_per_token": 4, "num_shared_experts": 2, "moe_renormalize": False, "routed_scaling_factor": 1.0,
        "num_expert_group": 4, "topk_group": 2, "first_k_dense_replace": 2, "linear_attn_config": {},
        "linear_head_dim": 96, "linear_num_heads": 6, "linear_conv_kernel_dim": 3,
        "layer_types": ["full_attention", *["linear_attention"] * 3, "full_attention", "linear_attention"],
    },
    "lfm2": {
        "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 1, "num_hidden_layers": 5,
        "intermediate_size": 240, "block_auto_adjust_ff_dim": True, "block_ffn_dim_multiplier": 1.3,
        "block_multiple_of": 32, "layer_types": None, "full_attn_idxs": [0, 3], "conv_L_cache": 5,
        "tie_word_embeddings": False,
    },
    "lfm2moe": {
        "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3, "num_hidden_layers": 5,
        "layer_types": ["full_attention", "conv", "full_attention", "conv", "conv"], "num_dense_layers": 2,
        "num_experts": 12, "num_experts_per_tok": 5, "moe_intermediate_size": 64, "conv_L_cache": 2,
    },
    "qwen2": {
        "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 1, "num_hidden_layers": 3,
        "intermediate_size": 160, "tie_word_embeddings": True,
    },
    "qwen3": {
        "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 1, "num_hidden_layers": 3, "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "qwen2moe": {
        "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 1, "num_hidden_layers": 3,
        "num_experts": 9, "num_experts_per_tok": 4, "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 96, "tie_word_embeddings": True,
    },
    "qwen3vl": {
        "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 1, "num_hidden_layers": 3, "head_dim": 64,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "mrope_section": [12, 10, 10],
                            "mrope_interleaved": True},
    },
    "qwen3vlmoe": {
        "hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 3, "num_hidden_layers": 3, "head_dim": 64,
        "num_experts": 9, "num_experts_per_tok": 4, "moe_intermediate_size": 64, "intermediate_size": 160,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [12, 10, 10],
                            "mrope_interleaved": True},
    },
    "qwen3next": HYBRID | {
        "linear_num_value_heads": 6, "num_experts": 12, "num_experts_per_tok": 5, "moe_intermediate_size": 64,
        "norm_topk_prob": True, "shared_expert_intermediate_size": 32, "rope_theta": 1e6, "partial_rotary_factor": 0.5,
    },
    "qwen35": HYBRID | {
        "linear_num_key_heads": 3, "linear_num_value_heads": 9, "linear_conv_kernel_dim": 3,
        "tie_word_embeddings": True,
    },
    "qwen35moe": HYBRID | {
        "linear_num_key_heads": 4, "linear_num_value_heads": 4, "num_experts": 12, "num_experts_per_tok": 5,
        "moe_intermediate_size": 64, "shared_expert_intermediate_size": 32,
    },
    "qwen4exp": {
        "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 1, "head_dim": 64, "num_hidden_layers": 5,
        "full_attention_interval": 2, "linear_num_key_heads": 3, "linear_num_value_heads": 9, "hc_count": 2,
        "hc_lowrank": 64, "num_experts": 12, "num_experts_per_tok": 5, "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 32, "linear_conv_kernel_dim": 3, "indexer_n_heads": 12,
        "indexer_head_dim": 64, "indexer_budget": 60, "indexer_compress_ratio": 6, "ple_layer_ids": [3],
        "ple_conv_kernel_size": 3, "ngram_size": 4, "heads_per_ngram": 2, "ngram_vocab_size_base": 90,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25,
                            "mrope_section": [4, 2, 2]},
    },
    "qwen3moe": {
        "hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 3, "num_hidden_layers": 3, "head_dim": 64,
        "num_experts": 9, "num_experts_per_tok": 4, "moe_intermediate_size": 64, "intermediate_size": 160,
    },
}  # fmt: skip


MIXTRAL = {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 3,
}  # fmt: skip
# Architectures that wheel 0.1.5 does not know, or computes in another way whatever the configuration; see `in_wheel`.
NOT_IN_WHEEL = frozenset((
    "apertus", "cohere2_moe", "deepseek32", "deepseek4", "exaone4", "gemma3n", "glm-dsa", "granitemoe", "hunyuan-dense",
    "hy_v3", "kimi-linear", "lfm2", "lfm2moe", "llama4", "longcat-flash", "minimax-m3", "mistral-large4", "nemotron",
    "nemotron_h", "nemotron_h_moe", "olmo2", "olmoe", "qwen4exp",
))  # fmt: skip


def in_wheel(arch: str, config: Any) -> bool:
    """Whether wheel 0.1.5 computes a model as transformers does.

    granite               what enters attention and feed-forward is multiplied by residual_multiplier as well; biases of
                          attention are not added
    granitemoe            experts are added to their normed input, as those of Mixtral
    gemma2                it ends the process unless there are 26, 42 or 46 layers
    gemma4                with heads of 64 elements in layers with a window it ends the process. Scores are not scaled,
                          so its f16 cache moves logits by up to 0.2, and every expert has to be used
    glm-dsa               it ends the process
    llama4                it fixes the sizes of chunks and of position-dependent query scaling
    """
    if arch == "gemma2":
        return bool(config.num_hidden_layers == 26)
    if arch == "gemma4":
        return bool(config.enable_moe_block and config.top_k_experts == config.num_experts)
    if arch == "granite" and config.attention_bias:
        return False
    return arch not in NOT_IN_WHEEL and getattr(config, "residual_multiplier", 1.0) == 1.0


EVERY = [
    *((arch.name, {}) for arch in archs.all()),
    *OTHERS.items(),
    ("deepseek2", GLM_FLASH),
    ("gemma4", {"top_k_experts": 8}),
    ("gemma4", GEMMA_E),
]


@pytest.mark.parametrize(("arch", "change"), EVERY)
def test_logits_of_transformers_and_the_reference(tmp_path: Path, arch: str, change: dict[str, Any]) -> None:
    import torch

    model = tiny(tmp_path / "hf", arch=arch, **change)
    convert_checkpoint(tmp_path / "hf", tmp_path / "m.gguf", "f32")
    with torch.no_grad():
        wanted = log_probabilities(model(torch.tensor(TOKENS)).logits.numpy())
    ours = quantkit.load(tmp_path / "m.gguf")
    for sequence, expected in zip(TOKENS, wanted):
        assert np.abs(log_probabilities(ours.logits(sequence)) - expected).max() < 2e-3
    cache = ours.new_cache(256)
    single = np.concatenate([ours.forward([token], cache) for token in TOKENS[0]])
    assert np.abs(log_probabilities(single) - wanted[0]).max() < 2e-3
    together = ours.forward_sequences(TOKENS, slice(None))
    assert np.abs(log_probabilities(together) - wanted).max() < 2e-3
    if not in_wheel(arch, model.config):
        return
    libllama = pytest.importorskip("tests.conformance.libllama")
    grouped = ours.hparams.n_expert_groups > 1
    with libllama.Llama(tmp_path / "m.gguf", n_ctx=256, threads=1, grouped_experts=grouped) as llama:
        theirs = log_probabilities(llama.logits(TOKENS[0]))
    if arch in ("hunyuan-moe", "gpt-oss", "mimo2", "mistral3", "mistral4"):
        wanted[0] = log_probabilities(as_the_reference(ours).logits(TOKENS[0]))
    worst = np.abs(theirs - wanted[0]).max(1)  # its cache is f16, after which a near tie of experts may turn
    if arch == "mistral3":
        worst = worst[:31]
    share = (
        0.8 if arch in ("gemma4", "mistral4", "step35") else 0.98 if ours.hparams.n_expert else 1
    )  # ties are nearest without sigmoid
    assert np.quantile(worst, share) < 0.05


def as_the_reference(model: Any) -> Any:
    """The model with what wheel 0.1.5 does otherwise than transformers.

    hunyuan-moe   norms queries and keys before rope
    gpt-oss       rounds the ramp of YaRN to whole pairs
    mimo2         has no scale of values
    mistral4      has no position-dependent query scaling
    mistral3      multiplies YaRN's cos and sin by 1 + 0.1 ln(factor) once more; and takes the temperature of position
                  p + 1 at p, so that logits differ from where it first changes
    """
    model.drop_cached(list(model.weights))
    model.blocks = [replace(block, parts=(_as_there(block.parts[0]), *block.parts[1:])) for block in model.blocks]
    return model


def _as_there(part: Any) -> Any:
    if isinstance(part, LatentAttention):
        return replace(part, temperature=None)
    rope = part.rope if part.rope.yarn is None else replace(part.rope, yarn=replace(part.rope.yarn, truncate=True))
    if part.temperature is not None:
        more = 1 - 0.1 * np.log(rope.scale)
        rope = replace(rope, yarn=replace(rope.yarn, attn_factor=rope.yarn.attn_factor * more))
    return replace(part, rope=rope, norms_after_rope=False, v=replace(part.v, factor=1.0))


SMALL_STATES = {"linear_key_head_dim": 32, "linear_value_head_dim": 48, "linear_num_key_heads": 2}
GROUPS = {"n_group": 4, "topk_group": 2}
V2 = OTHERS["deepseek2"]


@pytest.mark.parametrize(
    ("arch", "change"),
    [("qwen3", {"attention_bias": True}), ("qwen3moe", {"norm_topk_prob": False}), ("deepseek2", GROUPS),
     ("apertus", {"attention_bias": True, "head_dim": 64}),
     ("smollm3", {"attention_bias": True, "mlp_bias": True}),
     ("cohere2", {"attention_bias": True, "tie_word_embeddings": False}),
     ("cohere2_moe", {"attention_bias": True, "tie_word_embeddings": False, "norm_topk_prob": False}),
     ("cohere2_moe", {"layer_types": None, "sliding_window_pattern": 3, "mlp_layer_types": ["sparse"] * 6}),
     ("seed_oss", {"attention_out_bias": True, "mlp_bias": True}),
     ("granitemoe", {"architectures": ["GraniteMoeSharedForCausalLM"], "model_type": "granitemoeshared",
                     "shared_intermediate_size": 48}),
     ("gemma2", {"query_pre_attn_scalar": 50, "attn_logit_softcapping": None, "final_logit_softcapping": None}),
     ("phi3", {"original_max_position_embeddings": 64, "tie_word_embeddings": True}),
     ("llama", MIXTRAL), ("llama", OTHERS["llama"] | MIXTRAL | {"head_dim": 32, "num_experts_per_tok": 1}),
     ("qwen3next", SMALL_STATES | {"linear_num_value_heads": 8, "norm_topk_prob": False, "attention_bias": True}),
     ("qwen35", SMALL_STATES | {"linear_num_value_heads": 4, "full_attention_interval": 2, "num_hidden_layers": 3}),
     ("qwen35", SMALL_STATES | {"linear_num_value_heads": 2, "linear_conv_kernel_dim": 2, "attention_bias": True}),
     ("qwen35moe", SMALL_STATES | {"linear_num_value_heads": 8, "linear_conv_kernel_dim": 6}),
     ("gpt-oss", {"head_dim": 64, "tie_word_embeddings": True}), ("gpt-oss", {"hidden_size": 128}),
     ("gemma3", {"query_pre_attn_scalar": 50, "sliding_window_pattern": 2, "rope_local_base_freq": 5000.0}),
     ("gemma3", {"tie_word_embeddings": False, "attention_bias": True}),
     ("glm4moe", GROUPS | {"attention_bias": False, "tie_word_embeddings": True}),
     ("deepseek2", V2 | GROUPS | {"topk_method": "group_limited_greedy", "num_hidden_layers": 3}),
     ("qwen2moe", {"norm_topk_prob": True}), ("dots1", GROUPS | {"attention_bias": True, "num_key_value_heads": 2}),
     ("deepseek2", V2 | {"q_lora_rank": None, "num_hidden_layers": 3, "attention_bias": True})],
)  # fmt: skip
def test_what_the_reference_does_not_know(tmp_path: Path, arch: str, change: dict[str, Any]) -> None:
    """Wheel 0.1.5 does not load qwen3 nor smollm3 with biases, and always divides the weights of qwen3moe by their sum.

    Of deepseek2 it chooses among all experts whatever the groups, and takes queries without a latent for 26, 27 or 48
    layers only. It wants biases of glm4moe, output.weight of gpt-oss; with heads of 64 its windows are not those of
    transformers. It knows no scale, pattern or second base of gemma3, wants output.weight of phi3, and loads neither
    biases of cohere2, nor of seed_oss's output projection. Of Mixtral see the next test. Heads of recurrent layers it
    computes with 64 or 128 elements only: of 16, 32 or 96 its logits have nothing to do with those of transformers,
    without a word, and keys must be as long as values.
    """
    import torch

    model = tiny(tmp_path / "hf", arch=arch, **change)
    convert_checkpoint(tmp_path / "hf", tmp_path / "m.gguf", "f32")
    with torch.no_grad():
        wanted = log_probabilities(model(torch.tensor(TOKENS[:1])).logits.numpy()[0])
    assert np.abs(log_probabilities(quantkit.load(tmp_path / "m.gguf").logits(TOKENS[0])) - wanted).max() < 2e-3


def test_a_ternary_model_in_two_bits(tmp_path: Path) -> None:
    """A BitNet that is ternary when it runs: IQ2_BN holds its values, with its scale or with one of its own."""
    tiny(tmp_path / "hf", arch="bitnet-b1.58", intermediate_size=128)
    path = tmp_path / "hf" / "config.json"
    settings = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "online"}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": settings}))
    convert_checkpoint(tmp_path / "hf", tmp_path / "m.gguf", "f32")
    source = gguf.open(tmp_path / "m.gguf")
    x = source.tensors["blk.1.ffn_down.weight"].dequantize()
    assert len(np.unique(np.abs(x))) == 2
    rules = recipe.parse("blk.*(attn_(q|k|v|output)|ffn_(gate|up|down))=iq2_bn,.*=f32")
    quantize_with_plan(
        source, tmp_path / "q.gguf", recipe.plan(source.tensors.values(), "IQ2_BN", rules, metadata=source.metadata)
    )
    made = gguf.open(tmp_path / "q.gguf")
    assert made.tensors["blk.1.ffn_down.weight"].type.name == "iq2_bn"
    np.testing.assert_array_equal(made.tensors["blk.1.ffn_down.weight"].dequantize(), x)
    wanted = quantkit.load(tmp_path / "m.gguf").logits(TOKENS[0][:30])
    assert np.abs(quantkit.load(tmp_path / "q.gguf").logits(TOKENS[0][:30]) - wanted).max() < 1e-3
    scales = {f"{name.removesuffix('weight')}scale": float(np.abs(t.dequantize()).max())
              for name, t in source.tensors.items() if "attn_q." in name or "ffn_up." in name}  # fmt: skip
    specs = [gguf.TensorSpec(t.name, t.shape, t.type) for t in source.tensors.values()]
    specs += [gguf.TensorSpec(name, (1,), "f32") for name in scales]
    with gguf.Writer(tmp_path / "s.gguf", source.metadata, specs) as writer:
        for name, t in source.tensors.items():
            factor = scales.get(f"{name.removesuffix('weight')}scale", 1.0)
            writer.write(name, np.rint(t.dequantize() / factor).view(np.uint8) if factor != 1 else t.data)
        for name, scale in scales.items():
            writer.write(name, np.array([scale], "<f4").view(np.uint8))
    assert np.abs(quantkit.load(tmp_path / "s.gguf").logits(TOKENS[0][:30]) - wanted).max() < 1e-3


def test_mixtral_in_the_reference(tmp_path: Path) -> None:
    """Wheel 0.1.5 adds what Mixtral's experts make to their normed input, where the model adds it to the input itself.

    Shown on a file whose attention adds nothing, computed here both ways.
    """
    libllama = pytest.importorskip("tests.conformance.libllama")
    tiny(tmp_path / "hf", arch="llama", **MIXTRAL | {"num_experts_per_tok": 8})
    convert_checkpoint(tmp_path / "hf", tmp_path / "whole.gguf", "f32")
    source, tokens = gguf.open(tmp_path / "whole.gguf"), TOKENS[0][:8]
    w = {name: t.dequantize() * ("attn_output" not in name) for name, t in source.tensors.items()}
    with gguf.Writer(
        tmp_path / "m.gguf",
        source.metadata,
        [gguf.TensorSpec(t.name, t.shape, t.type) for t in source.tensors.values()],
    ) as writer:
        for name, x in w.items():
            writer.write(name, np.ascontiguousarray(x, "<f4").reshape(-1).view(np.uint8))

    def normed(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt(np.square(x).mean(1, keepdims=True) + 1e-5) * w[f"{name}.weight"]

    def logits(to_normed: bool) -> np.ndarray:
        x = w["token_embd.weight"][tokens]
        for i in range(2):
            y = normed(x, f"blk.{i}.ffn_norm")
            gate, up = (np.einsum("efn,tn->etf", w[f"blk.{i}.ffn_{part}_exps.weight"], y) for part in ("gate", "up"))
            made = np.einsum("enf,etf->etn", w[f"blk.{i}.ffn_down_exps.weight"], gate / (1 + np.exp(-gate)) * up)
            share = np.exp(log_probabilities(y @ w[f"blk.{i}.ffn_gate_inp.weight"].T))
            x = (y if to_normed else x) + np.einsum("te,etn->tn", share, made)
        return log_probabilities(normed(x, "output_norm") @ w["output.weight"].T)

    assert np.abs(log_probabilities(quantkit.load(tmp_path / "m.gguf").logits(tokens)) - logits(False)).max() < 1e-3
    with libllama.Llama(tmp_path / "m.gguf", n_ctx=64, threads=1) as llama:
        theirs = log_probabilities(llama.logits(tokens))
    assert np.abs(theirs - logits(True)).max() < 0.01
    assert np.abs(theirs - logits(False)).max() > 0.5


def test_shared_experts_in_the_compiled_passes(tmp_path: Path) -> None:
    """Prompt and steps of `fast` numerics: all experts used, so that rounding turns no choice."""
    tiny(tmp_path / "hf", arch="glm4moe", num_experts_per_tok=8, n_shared_experts=2)
    convert_checkpoint(tmp_path / "hf", tmp_path / "m.gguf", "q8_0")
    wanted = log_probabilities(quantkit.load(tmp_path / "m.gguf").logits(TOKENS[0][:40]))
    model = quantkit.load(tmp_path / "m.gguf", numerics="fast")
    assert model.fallback_reason is None
    cache = model.new_cache(40)
    steps = np.concatenate([model.forward([token], cache) for token in TOKENS[0][:40]])
    for found, most in ((model.logits(TOKENS[0][:40]), 0.01), (steps, 0.05)):  # activations of 16 bits, and of 8
        assert np.abs(log_probabilities(found) - wanted).max() < most


def test_experts_as_gpt_oss_ships_them(tmp_path: Path) -> None:
    """MXFP4 blocks and scales become the type's own blocks, with the same values; biases and the rest stay."""
    import torch
    from safetensors import torch as stored

    model = tiny(tmp_path / "hf", arch="gpt-oss")
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
    rng, tensors = np.random.default_rng(1), stored.load_file(tmp_path / "hf" / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, n, rows = tensors.pop(name).shape
        codes = rng.integers(0, 256, (experts, rows, n // 32, 16)).astype(np.uint8)
        scales = rng.integers(120, 126, codes.shape[:3]).astype(np.uint8)
        x = np.stack([values[codes & 15], values[codes >> 4]], -1).reshape(*codes.shape[:3], 32)
        x *= np.exp2(scales.astype(np.float32) - 127)[..., None]
        with torch.no_grad():
            model.state_dict()[name].copy_(torch.tensor(x.reshape(experts, rows, n)).transpose(1, 2))
        tensors |= {f"{name}_blocks": torch.tensor(codes), f"{name}_scales": torch.tensor(scales)}
    stored.save_file(tensors, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "hf" / "config.json").read_text()) | {
        "quantization_config": {"quant_method": "mxfp4"}
    }
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    convert_checkpoint(tmp_path / "hf", tmp_path / "m.gguf", "f32")
    ours = quantkit.load(tmp_path / "m.gguf")
    assert ours.weights["blk.1.ffn_up_exps.weight"].type.name == "mxfp4"
    with torch.no_grad():
        wanted = log_probabilities(model(torch.tensor(TOKENS[:1])).logits.numpy()[0])
    assert np.abs(log_probabilities(ours.logits(TOKENS[0])) - wanted).max() < 2e-3


@pytest.mark.parametrize("layout", ["all", "joint", "split"])
def test_latents_absorbed_or_not_give_the_same(tmp_path: Path, layout: str) -> None:
    """-mla 0 to 3 of each layout of a file, prompt and step by step: only what is cached differs."""
    tiny(tmp_path / "hf", arch="deepseek2")
    convert_checkpoint(tmp_path / "hf", tmp_path / "all.gguf", "f32")
    path = in_layout(tmp_path / "all.gguf", layout)
    wanted = quantkit.load(tmp_path / "all.gguf", mla=0).logits(TOKENS[0])
    for mla in (0, 1, 2, 3):
        model = quantkit.load(path, mla=mla)
        cache = model.new_cache(256)
        assert cache.nbytes == 256 * 3 * 4 * (96 if mla else 4 * (64 + 32))
        parts = [model.forward(part, cache) for part in (TOKENS[0][:140], TOKENS[0][140:141], TOKENS[0][141:])]
        assert np.abs(np.concatenate(parts) - wanted).max() < 1e-3
        assert np.abs(quantkit.load(path, mla=mla, attention_mib=1).logits(TOKENS[0]) - wanted).max() < 1e-3
        rounded = log_probabilities(quantkit.load(path, mla=mla, cache_type="q8_0").logits(TOKENS[0]))
        assert np.abs(np.exp(rounded) - np.exp(log_probabilities(wanted))).mean() < 1e-3
    with pytest.raises(UnsupportedError, match="heads of 96 elements cannot be rotated"):
        quantkit.load(path, cache_type="q8_0 khad")


def in_layout(path: Path, layout: str) -> Path:
    """The file without what a layout does not have; "split" with upstream's keys and shapes."""
    source, out = gguf.open(path), path.with_name(f"{layout}.gguf")
    kept = [t for t in source.tensors.values() if t.name.split(".")[-2] not in LEFT_OUT[layout]]
    metadata = gguf.Metadata()
    for key in source.metadata:
        metadata.set(key, source.metadata[key], source.metadata.kind(key))
    specs = []
    for t in kept:
        stacked = layout == "split" and t.name.split(".")[-2] in ("attn_k_b", "attn_v_b")
        specs.append(gguf.TensorSpec(t.name, (4, t.shape[0] // 4, t.shape[1]) if stacked else t.shape, t.type))
    if layout == "split":
        sizes = {"head_count_kv": 1, "key_length": 96, "value_length": 64, "key_length_mla": 64, "value_length_mla": 32}
        for key, value in sizes.items():
            metadata.set(f"deepseek2.attention.{key}", value, "u32")
    with gguf.Writer(out, metadata, specs) as writer:
        for t in kept:
            writer.write(t.name, t.data)
    return out


LEFT_OUT = {"all": (), "joint": ("attn_k_b", "attn_v_b"), "split": ("attn_kv_b",)}


@pytest.mark.parametrize("kind", ["Q8_0", "IQ4_K", "Q4_K_M"])
def test_quantized_experts_run_in_the_reference(tmp_path: Path, kind: str) -> None:
    """Converted, quantized, and run by both: only the reference's own rounding of activations is between them."""
    libllama = pytest.importorskip("tests.conformance.libllama")
    wide = {"hidden_size": 256, "moe_intermediate_size": 256, "num_experts": 8, "num_experts_per_tok": 8}
    tiny(tmp_path / "hf", arch="qwen3moe", **wide)
    convert_checkpoint(tmp_path / "hf", tmp_path / "m.gguf", "f32")
    source = gguf.open(tmp_path / "m.gguf")
    plan = recipe.plan(source.tensors.values(), kind, metadata=source.metadata)
    quantize_with_plan(source, tmp_path / "q.gguf", plan)
    ours = quantkit.load(tmp_path / "q.gguf")
    types = {name: tensor.type.name for name, tensor in ours.weights.items()}
    assert types["blk.0.ffn_up_exps.weight"].lower() == kind.lower().removesuffix("_m")
    wanted = log_probabilities(ours.logits(TOKENS[0][:64]))
    with libllama.Llama(tmp_path / "q.gguf", n_ctx=64, threads=1) as llama:
        theirs = log_probabilities(llama.logits(TOKENS[0][:64]))
    divergence = (np.exp(wanted) * (wanted - theirs)).sum(1).mean()
    assert divergence < 2e-3
    assert np.abs(theirs - wanted).max() < 0.5


def test_a_value_that_is_not_finite_is_named_by_its_expert(tmp_path: Path) -> None:
    import torch

    model = tiny(tmp_path / "hf", arch="qwen3moe")
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj[3, 5, 7] = torch.nan
    model.save_pretrained(tmp_path / "hf")
    with pytest.raises(DataError, match=r"experts\.3\.down_proj\.weight: .*row 5, column 7 is nan"):
        convert_checkpoint(tmp_path / "hf", tmp_path / "m.gguf", "q8_0")
    assert not (tmp_path / "m.gguf").exists()


def test_experts_are_stacked_piece_by_piece(tmp_path: Path) -> None:
    """No job of a conversion makes more than an expert, whatever their number."""
    tiny(tmp_path / "hf", arch="qwen3moe", num_experts=24)
    found: list[tuple[str, int, int]] = []

    class Pieces:
        def put(self, name: str, start: int, data: np.ndarray) -> None:
            found.append((name, start, data.nbytes))

        def put_direct(self, name: str, start: int, nbytes: int, send: object) -> bool:
            found.append((name, start, nbytes))
            return True

    for task in plan_conversion(tmp_path / "hf", "f32").tasks(Pieces()):  # type: ignore[arg-type]
        task()
    stacked = [part[1:] for part in found if part[0] == "blk.1.ffn_up_exps.weight"]
    assert stacked == [(i * 32 * 64 * 4, 32 * 64 * 4) for i in range(24)]
