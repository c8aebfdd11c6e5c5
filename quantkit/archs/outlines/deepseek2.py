"""deepseek2: DeepSeek V2, V3 and R1, Kimi K2. Latent attention (MLA), leading dense layers, routed and shared experts.

Keys and values are read from a latent of kv_lora_rank columns: attn_kv_b makes both, attn_k_b and attn_v_b are its two
halves arranged for the absorbed form. Files hold one or the other or, as ik_llama.cpp's converter writes them, all
three (`in_layout`). The extra layer that predicts the next token but one is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable

from quantkit.archs.base import Config, Entries, need, rope_parameters
from quantkit.archs.outlines.base import (
    DENSE,
    EXPERTS,
    SHARED,
    Outline,
    decoder_entries,
    expert_entries,
    is_dense,
)
from quantkit.archs.shapes import Listed, Sizes
from quantkit.errors import UnsupportedError

_GATING = {"softmax": 1, "sigmoid": 2}
_LEFT_OUT = {
    "all": (),  # ik_llama.cpp's converter
    "joint": ("attn_k_b", "attn_v_b"),  # older files
    "split": ("attn_kv_b",),  # upstream's converter
}


class DeepSeek2(Outline):
    name = "deepseek2"
    hf = ("DeepseekV3ForCausalLM", "DeepseekV2ForCausalLM")

    def metadata(self, config: Config) -> Entries:
        a = self.name
        entries = decoder_entries(a, config) | expert_entries(a, config)
        rope = need(config, "qk_rope_head_dim")
        entries |= {
            f"{a}.vocab_size": (need(config, "vocab_size"), "u32"),
            f"{a}.attention.key_length": (need(config, "qk_nope_head_dim") + rope, "u32"),
            f"{a}.attention.value_length": (need(config, "v_head_dim"), "u32"),
            f"{a}.attention.kv_lora_rank": (need(config, "kv_lora_rank"), "u32"),
            f"{a}.rope.dimension_count": (rope, "u32"),
            f"{a}.expert_gating_func": (_gating(config), "u32"),
        }
        if config.get("q_lora_rank"):
            entries[f"{a}.attention.q_lora_rank"] = (config["q_lora_rank"], "u32")
        scaling = rope_parameters(config)
        if scaling["rope_type"] == "yarn":
            entries |= {
                f"{a}.rope.scaling.type": ("yarn", "str"),
                f"{a}.rope.scaling.factor": (float(scaling["factor"]), "f32"),
                f"{a}.rope.scaling.original_context_length": (scaling["original_max_position_embeddings"], "u32"),
            }
            if "mscale_all_dim" in scaling:
                entries[f"{a}.rope.scaling.yarn_log_multiplier"] = (0.1 * scaling["mscale_all_dim"], "f32")
        return entries

    def layer(self, sizes: Sizes, i: int, config: Config) -> str:
        query = "attn_q_a attn_q_a_norm attn_q_b" if sizes.key("attention.q_lora_rank") else "attn_q"
        attention = f"attn_norm {query} attn_kv_a_mqa attn_kv_a_norm attn_kv_b attn_k_b attn_v_b attn_output ffn_norm"
        if is_dense(sizes, i):
            return f"{attention} {DENSE}"
        bias = "exp_probs_b.bias" if config.get("topk_method", _by_class(config, "greedy")) == "noaux_tc" else ""
        shared = SHARED if sizes.key("expert_shared_count") else ""
        return f"{attention} {bias} {EXPERTS} {shared}"


def _by_class(config: Config, before: str) -> str:
    """How experts are chosen where config.json does not say: V3's way, which transformers' class has built in."""
    return "noaux_tc" if "DeepseekV3ForCausalLM" in config.get("architectures", ()) else before


def _gating(config: Config) -> int:
    name = config.get("scoring_func") or ("sigmoid" if _by_class(config, "") else "softmax")
    if name not in _GATING:
        raise UnsupportedError(f"config.json: scoring_func = {name!r} is not known; known: {', '.join(_GATING)}")
    return _GATING[name]


def in_layout(tensors: Iterable[Listed], layout: str) -> list[Listed]:
    """Tensors as files of a layout have them: "all" of attn_kv_b, attn_k_b and attn_v_b, the "joint" one, "split"."""
    left_out = _LEFT_OUT[layout]
    return [t for t in tensors if not any(f".{stem}." in t.name for stem in left_out)]
