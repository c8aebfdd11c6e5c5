"""glm4moe: GLM-4.5 and 4.6. Grouped queries with biases, leading dense layers, routed and shared experts.

Layers that predict further tokens are kept, as layers after the main ones.
"""

from __future__ import annotations

from quantkit.archs import experts
from quantkit.archs.base import Config, Entries, need, rope_parameters
from quantkit.archs.outlines.base import (
    DENSE,
    EXPERTS,
    SHARED,
    Outline,
    decoder_entries,
    extra_layers,
    is_dense,
)
from quantkit.archs.shapes import Sizes


class Glm4Moe(Outline):
    name = "glm4moe"
    hf = ("Glm4MoeForCausalLM",)

    def metadata(self, config: Config) -> Entries:
        a = self.name
        entries = decoder_entries(a, config) | experts.entries(a, config)
        turned = config.get("partial_rotary_factor") or rope_parameters(config).get("partial_rotary_factor") or 0.5
        head = config.get("head_dim") or need(config, "hidden_size") // need(config, "num_attention_heads")
        extra = extra_layers(config)
        return entries | {
            f"{a}.block_count": (need(config, "num_hidden_layers") + extra, "u32"),
            f"{a}.nextn_predict_layers": (extra, "u32"),
            f"{a}.rope.dimension_count": (int(head * turned), "u32"),
            f"{a}.expert_gating_func": (2, "u32"),
        }

    def layer(self, sizes: Sizes, i: int, config: Config) -> str:
        weights = "attn_norm attn_q attn_k attn_v attn_output post_attention_norm"
        biases = "attn_q.bias attn_k.bias attn_v.bias" if config.get("attention_bias") else ""
        norms = "attn_q_norm attn_k_norm" if config.get("use_qk_norm") else ""
        attention = f"{weights} {biases} {norms}"
        if is_dense(sizes, i):
            return f"{attention} {DENSE}"
        found = f"{attention} exp_probs_b.bias {EXPERTS} {SHARED}"
        if i < need(config, "num_hidden_layers"):
            return found
        parts = ("eh_proj", "embed_tokens", "enorm", "hnorm", "shared_head_head", "shared_head_norm")
        return f"{found} {' '.join(f'nextn.{part}' for part in parts)}"
