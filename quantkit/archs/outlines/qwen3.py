"""qwen3: Qwen3 dense. Grouped queries, a norm on each head's queries and keys."""

from __future__ import annotations

from quantkit.archs.base import Config, Entries
from quantkit.archs.outlines.base import DENSE, Outline, decoder_entries
from quantkit.archs.shapes import Sizes

ATTENTION = "attn_norm attn_q attn_q_norm attn_k attn_k_norm attn_v attn_output ffn_norm"


class Qwen3(Outline):
    name = "qwen3"
    hf = ("Qwen3ForCausalLM",)

    def metadata(self, config: Config) -> Entries:
        return decoder_entries(self.name, config)

    def layer(self, sizes: Sizes, i: int, config: Config) -> str:
        return f"{ATTENTION} {DENSE}"
