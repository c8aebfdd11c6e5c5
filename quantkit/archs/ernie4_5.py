"""ernie4_5 and ernie4_5-moe: ERNIE 4.5, dense and with experts.

Grouped-query attention. RoPE rotates neighbouring elements, the order of checkpoints. The feed-forward is SwiGLU; with
experts, the leading layers are dense, and the others have shared experts and routed experts selected by softmax scores
plus a bias.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from quantkit.archs.common import experts
from quantkit.archs.common.base import EMBEDDING_RULES, OUTPUT_RULES, SWIGLU_RULES, Config, Keys, need, refuse
from quantkit.archs.common.blocks import HParams, Part
from quantkit.archs.common.decoder import Decoder
from quantkit.archs.common.tensors import LazyTensor, TensorRule
from quantkit.archs.common.transforms import RowToVector
from quantkit.formats.gguf.metadata import Entries

_ATTENTION = (
    TensorRule("blk.N.attn_norm", "model.layers.N.input_layernorm", f32=True),
    TensorRule("blk.N.attn_q", "model.layers.N.self_attn.q_proj", bias=True),
    TensorRule("blk.N.attn_k", "model.layers.N.self_attn.k_proj", bias=True),
    TensorRule("blk.N.attn_v", "model.layers.N.self_attn.v_proj", bias=True),
    TensorRule("blk.N.attn_output", "model.layers.N.self_attn.o_proj", bias=True),
)


class Ernie45(Decoder):
    """ERNIE 4.5, dense."""

    name = "ernie4_5"
    hf: ClassVar[tuple[str, ...]] = ("Ernie4_5ForCausalLM",)
    model_type = "ernie4_5"
    rope_style = "norm"
    ties_by_default = True
    defaults: ClassVar[dict[str, Any]] = {"rope_theta": 500000.0}
    rules: ClassVar[tuple[TensorRule, ...]] = (*EMBEDDING_RULES, *_ATTENTION, *SWIGLU_RULES, *OUTPUT_RULES)
    EXAMPLE: ClassVar[dict[str, Any]] = {
        "architectures": ["Ernie4_5ForCausalLM"],
        "model_type": "ernie4_5",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "use_bias": False,
        "tie_word_embeddings": True,
    }

    def metadata(self, config: Config) -> Entries:
        return super().metadata(config) | self.head_lengths(config)

    def has_bias(self, rule: TensorRule, config: Config) -> bool:
        return bool(config.get("use_bias"))

    def config(self, metadata: Mapping[str, object], tensors: Mapping[str, LazyTensor]) -> dict[str, Any]:
        found = super().config(metadata, tensors)
        return found | {"head_dim": self.hparams(metadata).head_dim_k, "use_bias": found.pop("attention_bias")}


class Ernie45MoE(Ernie45):
    """ERNIE 4.5 with experts."""

    name = "ernie4_5-moe"
    hf = ("Ernie4_5_MoeForCausalLM",)
    model_type = "ernie4_5_moe"
    rules = (
        *EMBEDDING_RULES,
        *_ATTENTION,
        TensorRule("blk.N.ffn_norm", "model.layers.N.post_attention_layernorm", f32=True),
        *experts.dense_rules(),
        experts.choice_rule("mlp.moe_statics.e_score_correction_bias", lambda hp: RowToVector(hp.n_expert)),
        *experts.routed_rules(),
        *experts.shared_rules(),
        *OUTPUT_RULES,
    )
    EXAMPLE = Ernie45.EXAMPLE | {
        "architectures": ["Ernie4_5_MoeForCausalLM"],
        "model_type": "ernie4_5_moe",
        "num_hidden_layers": 3,
        "moe_intermediate_size": 32,
        "moe_num_experts": 8,
        "moe_k": 3,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": 2,
        "moe_layer_interval": 1,
    }

    def metadata(self, config: Config) -> Entries:
        last = need(config, "num_hidden_layers") - 1
        refuse(config, "use_bias", (False,))
        refuse(config, "moe_layer_interval", (1,))
        refuse(config, "moe_norm_min", (1e-12,))  # weights of experts are divided by their sum, or by this if larger
        refuse(config, "moe_layer_end_index", (-1, last))
        given = dict(config) | {
            "num_experts": need(config, "moe_num_experts"),
            "num_experts_per_tok": need(config, "moe_k"),
            "n_shared_experts": config.get("moe_num_shared_experts") or 0,
            "shared_expert_intermediate_size": (config.get("moe_num_shared_experts") or 0)
            * need(config, "moe_intermediate_size"),
            "first_k_dense_replace": config.get("moe_layer_start_index") or 0,
        }
        return super().metadata(config) | experts.entries(self.name, given) | {
            f"{self.name}.expert_gating_func": (experts.GATING_NUMBERS["softmax"], "u32"),
            f"{self.name}.interleave_moe_layer_step": (1, "u32"),
        }  # fmt: skip

    def config(self, metadata: Mapping[str, object], tensors: Mapping[str, LazyTensor]) -> dict[str, Any]:
        hp = self.hparams(metadata, tensors.keys())
        return super().config(metadata, tensors) | {
            "moe_intermediate_size": hp.n_ff_expert,
            "moe_num_experts": hp.n_expert,
            "moe_k": hp.n_expert_used,
            "moe_num_shared_experts": hp.n_ff_shared // hp.n_ff_expert,
            "moe_layer_start_index": hp.n_leading_dense,
            "moe_layer_end_index": hp.n_layer - 1,
            "moe_layer_interval": 1,
        }

    def numbers(self, keys: Keys, tensors: Collection[str]) -> dict[str, Any]:
        return super().numbers(keys, tensors) | experts.numbers(keys, tensors, biased=True)

    def feed_forward(self, hp: HParams, i: int) -> Part:
        return experts.feed_forward(hp, i)
