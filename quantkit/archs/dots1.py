"""dots1: dots.llm1. Qwen3's attention; leading dense layers, then routed and shared experts.

Experts are selected by sigmoid scores plus a bias, as DeepSeek V3's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from quantkit.archs.common import experts
from quantkit.archs.common.base import EMBEDDING_RULES, OUTPUT_RULES, Config, Keys
from quantkit.archs.common.blocks import HParams, Part
from quantkit.archs.common.tensors import LazyTensor, TensorRule
from quantkit.archs.qwen3 import ATTENTION_RULES, Qwen3
from quantkit.errors import UnsupportedError
from quantkit.formats.gguf.metadata import Entries
from quantkit.inputs.settings import sequence


class Dots1(Qwen3):
    """dots.llm1."""

    name = "dots1"
    hf: ClassVar[tuple[str, ...]] = ("Dots1ForCausalLM",)
    model_type = "dots1"
    rules: ClassVar[tuple[TensorRule, ...]] = (
        *EMBEDDING_RULES,
        *ATTENTION_RULES,
        TensorRule("blk.N.ffn_norm", "model.layers.N.post_attention_layernorm", f32=True),
        *experts.RULES,
        *OUTPUT_RULES,
    )
    EXAMPLE: ClassVar[dict[str, Any]] = Qwen3.EXAMPLE | {
        "architectures": ["Dots1ForCausalLM"],
        "model_type": "dots1",
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "scoring_func": "noaux_tc",
        "n_group": 1,
        "topk_group": 1,
    }

    def metadata(self, config: Config) -> Entries:
        kinds = sequence(config, "layer_types")
        if any(kind != "full_attention" for kind in kinds):
            raise UnsupportedError(
                f"config.json: layer_types = {kinds!r:.80}; dots1 files have no key for layers with a window"
            )
        given = {"n_shared_experts": 0, "first_k_dense_replace": 0, "norm_topk_prob": False} | dict(config)
        return super().metadata(given) | experts.entries(self.name, given) | {
            f"{self.name}.expert_gating_func": (experts.GATING_NUMBERS["sigmoid"], "u32")
        }  # fmt: skip

    def config(self, metadata: Mapping[str, object], tensors: Mapping[str, LazyTensor]) -> dict[str, Any]:
        hp = self.hparams(metadata, tensors.keys())
        return super().config(metadata, tensors) | experts.config(hp)

    def numbers(self, keys: Keys, tensors: Collection[str]) -> dict[str, Any]:
        return super().numbers(keys, tensors) | experts.numbers(keys, tensors)

    def feed_forward(self, hp: HParams, i: int) -> Part:
        return experts.feed_forward(hp, i)
