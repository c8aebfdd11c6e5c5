"""glm4moe: GLM-4.5 and 4.6.

Grouped-query attention with biases and "neox" RoPE of part of each head. The leading layers are dense; the others have
a shared expert and routed experts selected by sigmoid scores plus a bias. The largest models RMS-norm queries and keys.

MTP layers are kept in files, after the main layers. From GLM-4.6 on they share the model's embedding and output.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from quantkit.archs.common import experts
from quantkit.archs.common import mtp as mtp_layers
from quantkit.archs.common.base import EMBEDDING_RULES, OUTPUT_RULES, Config, Keys
from quantkit.archs.common.blocks import Attention, HParams, Part
from quantkit.archs.common.decoder import Decoder, with_head_norms
from quantkit.archs.common.tensors import LazyTensor, TensorRule
from quantkit.formats.gguf.metadata import Entries


class Glm4Moe(Decoder):
    """GLM-4.5 and 4.6."""

    name = "glm4moe"
    hf = ("Glm4MoeForCausalLM",)
    model_type = "glm4_moe"
    rope_style = "neox"
    mtp = "keep"
    rotary_fraction = 0.5
    biased = ("attn_q", "attn_k", "attn_v")
    rules = (
        *EMBEDDING_RULES,
        TensorRule("blk.N.attn_norm", "model.layers.N.input_layernorm", f32=True),
        TensorRule("blk.N.attn_q", "model.layers.N.self_attn.q_proj", bias=True),
        TensorRule("blk.N.attn_q_norm", "model.layers.N.self_attn.q_norm", f32=True, required=False),
        TensorRule("blk.N.attn_k", "model.layers.N.self_attn.k_proj", bias=True),
        TensorRule("blk.N.attn_k_norm", "model.layers.N.self_attn.k_norm", f32=True, required=False),
        TensorRule("blk.N.attn_v", "model.layers.N.self_attn.v_proj", bias=True),
        TensorRule("blk.N.attn_output", "model.layers.N.self_attn.o_proj"),
        TensorRule("blk.N.post_attention_norm", "model.layers.N.post_attention_layernorm", f32=True),
        *experts.RULES,
        *mtp_layers.RULES,
        *OUTPUT_RULES,
    )
    EXAMPLE = {  # noqa: RUF012  data
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "partial_rotary_factor": 0.5,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.5,
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "use_qk_norm": False,
        "num_nextn_predict_layers": 0,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "attention_bias": True,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }

    def metadata(self, config: Config) -> Entries:
        a = self.name
        return super().metadata(config) | experts.entries(a, config) | self.head_lengths(config) | {
            f"{a}.nextn_predict_layers": (self.n_mtp_layers(config), "u32"),
            f"{a}.expert_gating_func": (experts.GATING_NUMBERS["sigmoid"], "u32"),
        }  # fmt: skip

    def rules_of(self, config: Config) -> tuple[TensorRule, ...]:
        normed = bool(config.get("use_qk_norm"))
        optional = ("blk.N.attn_q_norm", "blk.N.attn_k_norm")
        return tuple(replace(rule, required=normed) if rule.gguf in optional else rule for rule in self.rules)

    def config(self, metadata: Mapping[str, object], tensors: Mapping[str, LazyTensor]) -> dict[str, Any]:
        hp = self.hparams(metadata, tensors.keys())
        return super().config(metadata, tensors) | experts.config(hp) | {
            "head_dim": hp.head_dim_k,
            "use_qk_norm": _has_head_norms(hp, 0),
        }  # fmt: skip

    def numbers(self, keys: Keys, tensors: Collection[str]) -> dict[str, Any]:
        return super().numbers(keys, tensors) | experts.numbers(keys, tensors)

    def attention(self, hp: HParams, i: int) -> Attention:
        part = super().attention(hp, i)
        return with_head_norms(part, hp, i) if _has_head_norms(hp, i) else part

    def feed_forward(self, hp: HParams, i: int) -> Part:
        return experts.feed_forward(hp, i, "post_attention_norm")


def _has_head_norms(hp: HParams, i: int) -> bool:
    return f"blk.{i}.attn_q_norm.weight" in hp.tensors
