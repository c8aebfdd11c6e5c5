"""llama with experts: Mixtral. An expert is as wide as a dense feed-forward, and no key of its own says so."""

from __future__ import annotations

from quantkit.archs.base import Config, Entries, need
from quantkit.archs.outlines.base import EXPERTS, Outline, decoder_entries
from quantkit.archs.shapes import Sizes


class Mixtral(Outline):
    name = "llama"
    hf = ("MixtralForCausalLM",)
    own_sizes = {"eff": lambda s: s["ff"]}  # noqa: RUF012  data

    def metadata(self, config: Config) -> Entries:
        return decoder_entries(self.name, config) | {
            "llama.vocab_size": (need(config, "vocab_size"), "u32"),
            "llama.expert_count": (need(config, "num_local_experts"), "u32"),
            "llama.expert_used_count": (need(config, "num_experts_per_tok"), "u32"),
        }

    def layer(self, sizes: Sizes, i: int, config: Config) -> str:
        return f"attn_norm attn_q attn_k attn_v attn_output ffn_norm {EXPERTS}"
