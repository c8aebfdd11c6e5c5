"""qwen3next: Qwen3-Next. The layers of qwen35moe, the two small projections of a recurrent layer in one (ssm_ba)."""

from __future__ import annotations

from quantkit.archs.base import Config
from quantkit.archs.outlines.qwen35 import Qwen35Moe
from quantkit.archs.shapes import Sizes


class Qwen3Next(Qwen35Moe):
    name = "qwen3next"
    hf = ("Qwen3NextForCausalLM",)

    def layer(self, sizes: Sizes, i: int, config: Config) -> str:
        return super().layer(sizes, i, config).replace("ssm_alpha ssm_beta", "ssm_ba")
