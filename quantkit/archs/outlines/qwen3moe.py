"""qwen3moe: Qwen3 with experts in every layer, as 30B-A3B and 235B-A22B."""

from __future__ import annotations

from quantkit.archs.base import Config, Entries, refuse
from quantkit.archs.outlines.base import EXPERTS, Outline, decoder_entries, expert_entries
from quantkit.archs.outlines.qwen3 import ATTENTION
from quantkit.archs.shapes import Sizes


class Qwen3Moe(Outline):
    name = "qwen3moe"
    hf = ("Qwen3MoeForCausalLM",)

    def metadata(self, config: Config) -> Entries:
        refuse(config, "decoder_sparse_step", (1,))
        refuse(config, "mlp_only_layers", ([],))
        return decoder_entries(self.name, config) | expert_entries(self.name, config)

    def layer(self, sizes: Sizes, i: int, config: Config) -> str:
        return f"{ATTENTION} {EXPERTS}"
