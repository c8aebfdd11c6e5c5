"""qwen35 and qwen35moe: Qwen3.5. Three layers of four are recurrent (gated delta rule), every fourth attends.

An attending layer's attn_q makes query and gate; a recurrent layer's attn_qkv is three segments (queries, keys, values)
that pass the convolution together. The vision part is no part of the language model's file. Layers that predict further
tokens are dropped.
"""

from __future__ import annotations

from typing import ClassVar

from quantkit.archs import experts
from quantkit.archs.base import Config, Entries, need, rope_parameters
from quantkit.archs.outlines.base import DENSE, EXPERTS, SHARED, Outline, decoder_entries
from quantkit.archs.shapes import Sizes
from quantkit.errors import UnsupportedError

_ATTENTION = "attn_norm attn_q attn_q_norm attn_k attn_k_norm attn_v attn_output post_attention_norm"
_RECURRENT = (
    "attn_norm attn_qkv attn_gate ssm_conv1d ssm_a ssm_dt.bias ssm_alpha ssm_beta ssm_norm ssm_out post_attention_norm"
)


class Qwen35(Outline):
    name = "qwen35"
    hf: ClassVar[tuple[str, ...]] = ("Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM")
    own_sizes = {"q": lambda s: 2 * s["heads"] * s["key"]}  # noqa: RUF012  data

    def metadata(self, config: Config) -> Entries:
        a = self.name
        parameters = rope_parameters(config)
        turned = config.get("partial_rotary_factor") or parameters.get("partial_rotary_factor") or 0.25
        sections = [*parameters.get("mrope_section", ()), 0, 0, 0, 0][:4]
        ranks = need(config, "linear_num_value_heads")
        entries = decoder_entries(a, config) | {
            f"{a}.rope.dimension_count": (int(need(config, "head_dim") * turned), "u32"),
            f"{a}.ssm.conv_kernel": (need(config, "linear_conv_kernel_dim"), "u32"),
            f"{a}.ssm.state_size": (need(config, "linear_key_head_dim"), "u32"),
            f"{a}.ssm.group_count": (need(config, "linear_num_key_heads"), "u32"),
            f"{a}.ssm.time_step_rank": (ranks, "u32"),
            f"{a}.ssm.inner_size": (ranks * need(config, "linear_value_head_dim"), "u32"),
            f"{a}.full_attention_interval": (_interval(config), "u32"),
        }
        if any(sections):
            entries[f"{a}.rope.dimension_sections"] = (sections, "i32")
        return entries

    def layer(self, sizes: Sizes, i: int, config: Config) -> str:
        attends = (i + 1) % sizes.need("full_attention_interval") == 0
        return f"{_ATTENTION if attends else _RECURRENT} {self.feed_forward(sizes)}"

    def feed_forward(self, sizes: Sizes) -> str:
        return DENSE


class Qwen35Moe(Qwen35):
    name = "qwen35moe"
    hf: ClassVar[tuple[str, ...]] = ("Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeForCausalLM")

    def metadata(self, config: Config) -> Entries:
        return super().metadata(config) | experts.entries(self.name, config)

    def feed_forward(self, sizes: Sizes) -> str:
        return f"{EXPERTS} ffn_gate_inp_shexp {SHARED}"


def _interval(config: Config) -> int:
    """Every so many-th layer attends; newer configs list the layers' kinds instead."""
    interval = config.get("full_attention_interval") or 0
    kinds = config.get("layer_types")
    if not kinds:
        return interval or 4
    interval = interval or kinds.index("full_attention") + 1 if "full_attention" in kinds else len(kinds) + 1
    for i, kind in enumerate(kinds):
        if (kind == "full_attention") != ((i + 1) % interval == 0):
            raise UnsupportedError(f"config.json: layer_types[{i}] = {kind!r} where every {interval}th layer attends")
    return interval
