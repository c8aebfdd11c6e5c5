"""minimax-m2: MiniMax M2.

Grouped-query attention; queries and keys are RMS-normed over all heads together. "neox" RoPE of part of each head.
Every layer has routed experts, selected by sigmoid scores plus a bias.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from quantkit.archs.common import experts
from quantkit.archs.common.base import EMBEDDING_RULES, OUTPUT_RULES, Config, Keys, need
from quantkit.archs.common.blocks import Attention, HParams, Part
from quantkit.archs.common.decoder import Decoder, with_head_norms
from quantkit.archs.common.tensors import LazyTensor, TensorRule
from quantkit.formats.gguf.metadata import Entries
from quantkit.inputs.settings import integer


class MiniMaxM2(Decoder):
    """MiniMax M2."""

    name = "minimax-m2"
    hf = ("MiniMaxM2ForCausalLM",)
    model_type = "minimax_m2"
    rope_style = "neox"
    rotary_fraction = 1.0
    defaults = {"rope_theta": 5000000.0}  # noqa: RUF012  data
    size_overrides = {"q_norm": lambda s: s["q"], "k_norm": lambda s: s["k"]}  # noqa: RUF012  data
    rules = (
        *EMBEDDING_RULES,
        TensorRule("blk.N.attn_norm", "model.layers.N.input_layernorm", f32=True),
        TensorRule("blk.N.attn_q", "model.layers.N.self_attn.q_proj"),
        TensorRule("blk.N.attn_q_norm", "model.layers.N.self_attn.q_norm", f32=True),
        TensorRule("blk.N.attn_k", "model.layers.N.self_attn.k_proj"),
        TensorRule("blk.N.attn_k_norm", "model.layers.N.self_attn.k_norm", f32=True),
        TensorRule("blk.N.attn_v", "model.layers.N.self_attn.v_proj"),
        TensorRule("blk.N.attn_output", "model.layers.N.self_attn.o_proj"),
        TensorRule("blk.N.ffn_norm", "model.layers.N.post_attention_layernorm", f32=True),
        experts.choice_rule("block_sparse_moe.e_score_correction_bias"),
        *experts.routed_rules("block_sparse_moe", experts.MIXTRAL),
        *OUTPUT_RULES,
    )
    EXAMPLE = {  # noqa: RUF012  data
        "architectures": ["MiniMaxM2ForCausalLM"],
        "model_type": "minimax_m2",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rotary_dim": 16,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5000000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }

    def rope_dim(self, config: Config) -> int:
        return integer(config, "rotary_dim") or super().rope_dim(config)

    def metadata(self, config: Config) -> Entries:
        given = dict(config) | {"moe_intermediate_size": need(config, "intermediate_size")}
        return super().metadata(config) | experts.entries(self.name, given) | self.head_lengths(config) | {
            f"{self.name}.expert_gating_func": (experts.GATING_NUMBERS["sigmoid"], "u32")
        }  # fmt: skip

    def config(self, metadata: Mapping[str, object], tensors: Mapping[str, LazyTensor]) -> dict[str, Any]:
        hp = self.hparams(metadata, tensors.keys())
        found = super().config(metadata, tensors) | {
            "head_dim": hp.head_dim_k,
            "rotary_dim": hp.rope_dim,
            "intermediate_size": hp.n_ff_expert,
            "num_local_experts": hp.n_expert,
            "num_experts_per_tok": hp.n_expert_used,
        }
        del found["attention_bias"], found["partial_rotary_factor"]
        return found

    def numbers(self, keys: Keys, tensors: Collection[str]) -> dict[str, Any]:
        return super().numbers(keys, tensors) | experts.numbers(keys, tensors)

    def attention(self, hp: HParams, i: int) -> Attention:
        return replace(with_head_norms(super().attention(hp, i), hp, i), norms_across_heads=True)

    def feed_forward(self, hp: HParams, i: int) -> Part:
        return experts.feed_forward(hp, i)
