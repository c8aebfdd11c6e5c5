"""bailingmoe2: Ling 2.0 and Ring 2.0 (mini, flash, 1T).

attn_qkv holds q, k and v; queries and keys are RMS-normed per head before "neox" RoPE of part of each head. The leading
layers are dense; the others have a shared expert and routed experts in groups, selected by sigmoid scores plus a bias.
MTP layers are dropped: their last norm has a name for which files have no place beside `nextn`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from quantkit.archs.common import experts
from quantkit.archs.common.base import OUTPUT_RULES, Config, Keys, need, refuse
from quantkit.archs.common.blocks import Attention, HParams, Part
from quantkit.archs.common.decoder import Decoder, with_head_norms
from quantkit.archs.common.fused import with_qkv
from quantkit.archs.common.tensors import LazyTensor, TensorRule
from quantkit.errors import UnsupportedError
from quantkit.formats.gguf.metadata import Entries
from quantkit.inputs.settings import integer

_NAMES = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}  # in experts.config, and here


class BailingMoe2(Decoder):
    """Ling 2.0 and Ring 2.0."""

    name = "bailingmoe2"
    hf: ClassVar[tuple[str, ...]] = ("BailingMoeV2ForCausalLM",)
    model_type = "bailing_moe"
    rope_style = "neox"
    rotary_fraction = 0.5
    size_overrides: ClassVar = {"qkv": lambda s: s["q"] + s["k"] + s["v"]}
    rules: ClassVar[tuple[TensorRule, ...]] = (
        TensorRule("token_embd", "model.word_embeddings"),
        TensorRule("blk.N.attn_norm", "model.layers.N.input_layernorm", f32=True),
        TensorRule("blk.N.attn_qkv", "model.layers.N.attention.query_key_value"),
        TensorRule("blk.N.attn_q_norm", "model.layers.N.attention.query_layernorm", f32=True),
        TensorRule("blk.N.attn_k_norm", "model.layers.N.attention.key_layernorm", f32=True),
        TensorRule("blk.N.attn_output", "model.layers.N.attention.dense"),
        TensorRule("blk.N.ffn_norm", "model.layers.N.post_attention_layernorm", f32=True),
        *experts.dense_rules(),
        experts.choice_rule("mlp.gate.expert_bias"),
        *experts.routed_rules(),
        *experts.shared_rules(),
        *OUTPUT_RULES,
    )
    EXAMPLE: ClassVar[dict[str, Any]] = {
        "architectures": ["BailingMoeV2ForCausalLM"],
        "model_type": "bailing_moe",
        "vocab_size": 320,
        "hidden_size": 128,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "partial_rotary_factor": 0.5,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "n_group": 4,
        "topk_group": 2,
        "score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "use_qk_norm": True,
        "use_qkv_bias": False,
        "use_bias": False,
        "num_nextn_predict_layers": 0,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 600000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }

    # ------------------------------------------------------------------------------------------------ checkpoint side

    def metadata(self, config: Config) -> Entries:
        a = self.name
        for key, accepted in (("score_function", "sigmoid"), ("use_qk_norm", True), ("use_qkv_bias", False),
                              ("use_bias", False), ("moe_router_enable_expert_bias", True)):  # fmt: skip
            refuse(config, key, (accepted,))
        refuse(config, "num_shared_experts", (1,))
        ff = integer(config, "moe_shared_expert_intermediate_size") or need(config, "moe_intermediate_size")
        given = dict(config) | {"n_shared_experts": 1, "shared_expert_intermediate_size": ff}
        return super().metadata(given) | experts.entries(a, given) | self.head_lengths(given) | {
            f"{a}.expert_gating_func": (experts.GATING_NUMBERS["sigmoid"], "u32"),
            f"{a}.expert_group_count": (integer(config, "n_group") or 1, "u32"),  # required by ik_llama.cpp
            f"{a}.expert_group_used_count": (integer(config, "topk_group") or 1, "u32"),
        }  # fmt: skip

    def config(self, metadata: Mapping[str, object], tensors: Mapping[str, LazyTensor]) -> dict[str, Any]:
        hp = self.hparams(metadata, tensors.keys())
        found = super().config(metadata, tensors)
        del found["attention_bias"]
        return found | {_NAMES.get(key, key): value for key, value in experts.config(hp).items()} | {
            "head_dim": hp.head_dim_k,
            "num_shared_experts": 1,
            "moe_shared_expert_intermediate_size": hp.n_ff_shared,
            "score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "use_qk_norm": True,
            "use_qkv_bias": False,
            "use_bias": False,
        }  # fmt: skip

    # --------------------------------------------------------------------------------------------------- runtime side

    def numbers(self, keys: Keys, tensors: Collection[str]) -> dict[str, Any]:
        if keys.number("nextn_predict_layers", 0):
            raise UnsupportedError(
                f"{self.name}.nextn_predict_layers = {keys.number('nextn_predict_layers')}: MTP layers of this "
                "architecture are not supported; convert the checkpoint, which leaves them out"
            )
        return super().numbers(keys, tensors) | experts.numbers(keys, tensors, biased=True)

    def attention(self, hp: HParams, i: int) -> Attention:
        return with_qkv(with_head_norms(super().attention(hp, i), hp, i), hp, i)

    def feed_forward(self, hp: HParams, i: int) -> Part:
        return experts.feed_forward(hp, i)
