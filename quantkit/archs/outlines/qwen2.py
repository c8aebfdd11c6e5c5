"""qwen2: Qwen2 and Qwen2.5 dense. Grouped queries whose projections of queries, keys and values have biases."""

from __future__ import annotations

from quantkit.archs.base import Config, Entries
from quantkit.archs.outlines.base import DENSE, Outline, decoder_entries
from quantkit.archs.shapes import Sizes


class Qwen2(Outline):
    name = "qwen2"
    hf = ("Qwen2ForCausalLM",)

    def metadata(self, config: Config) -> Entries:
        return decoder_entries(self.name, config)

    def layer(self, sizes: Sizes, i: int, config: Config) -> str:
        biased = " ".join(f"attn_{part} attn_{part}.bias" for part in "qkv")
        return f"attn_norm {biased} attn_output ffn_norm {DENSE}"
