"""olmoe: OLMoE. Grouped-query attention; queries and keys are RMS-normed over all heads together before "neox" RoPE.

Every layer has routed experts, each as wide as intermediate_size: softmax over all experts, then top-k selection. The
weights of the selected experts are divided by their sum only if `norm_topk_prob` says so. GGUF files of other
converters lack the key expert_weights_norm and expect no division.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from quantkit.archs.common import experts
from quantkit.archs.common.base import EMBEDDING_RULES, OUTPUT_RULES, Config, Keys, need, refuse
from quantkit.archs.common.blocks import Attention, HParams, Part
from quantkit.archs.common.decoder import Decoder, with_head_norms
from quantkit.archs.common.tensors import LazyTensor, TensorRule
from quantkit.formats.gguf.metadata import Entries


class Olmoe(Decoder):
    """OLMoE."""

    name = "olmoe"
    hf = ("OlmoeForCausalLM",)
    model_type = "olmoe"
    rope_style = "neox"
    size_overrides = {  # noqa: RUF012  data
        "q_norm": lambda s: s["q"],
        "k_norm": lambda s: s["k"],
        "eff": lambda s: s.key("expert_feed_forward_length") or s["ff"],
    }
    rules = (
        *EMBEDDING_RULES,
        TensorRule("blk.N.attn_norm", "model.layers.N.input_layernorm", f32=True),
        TensorRule("blk.N.attn_q", "model.layers.N.self_attn.q_proj", bias=True),
        TensorRule("blk.N.attn_q_norm", "model.layers.N.self_attn.q_norm", f32=True),
        TensorRule("blk.N.attn_k", "model.layers.N.self_attn.k_proj", bias=True),
        TensorRule("blk.N.attn_k_norm", "model.layers.N.self_attn.k_norm", f32=True),
        TensorRule("blk.N.attn_v", "model.layers.N.self_attn.v_proj", bias=True),
        TensorRule("blk.N.attn_output", "model.layers.N.self_attn.o_proj", bias=True),
        TensorRule("blk.N.ffn_norm", "model.layers.N.post_attention_layernorm", f32=True),
        *experts.routed_rules(),
        *OUTPUT_RULES,
    )
    EXAMPLE = {  # noqa: RUF012  data
        "architectures": ["OlmoeForCausalLM"],
        "model_type": "olmoe",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "norm_topk_prob": False,
        "max_position_embeddings": 256,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "attention_bias": False,
        "clip_qkv": None,
        "tie_word_embeddings": False,
    }

    def metadata(self, config: Config) -> Entries:
        refuse(config, "clip_qkv", ())
        given = dict(config) | {"moe_intermediate_size": need(config, "intermediate_size")}
        return super().metadata(config) | experts.entries(self.name, given) | {
            f"{self.name}.expert_weights_norm": (bool(config.get("norm_topk_prob")), "bool"),
        }  # fmt: skip

    def config(self, metadata: Mapping[str, object], tensors: Mapping[str, LazyTensor]) -> dict[str, Any]:
        hp = self.hparams(metadata, tensors.keys())
        return super().config(metadata, tensors) | {
            "intermediate_size": hp.n_ff_expert,
            "num_experts": hp.n_expert,
            "num_experts_per_tok": hp.n_expert_used,
            "norm_topk_prob": hp.normalises,
        }

    def numbers(self, keys: Keys, tensors: Collection[str]) -> dict[str, Any]:
        found = super().numbers(keys, tensors)
        found |= experts.numbers(keys, tensors, ff=found["n_ff"])
        return found | {"normalises": keys.flag("expert_weights_norm", False)}

    def attention(self, hp: HParams, i: int) -> Attention:
        return replace(with_head_norms(super().attention(hp, i), hp, i), norms_across_heads=True)

    def feed_forward(self, hp: HParams, i: int) -> Part:
        return experts.feed_forward(hp, i)
