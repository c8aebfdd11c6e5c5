"""lfm2moe: LFM2 with experts (LFM2-8B-A1B). lfm2 with routed experts after some dense layers.

The gating is the sigmoid of each expert; expert_bias is added to select experts, not in their weights, which are
divided by their sum. llama.cpp fixes all of this, so other settings are refused.

    config.json            GGUF
    num_dense_layers       lfm2moe.leading_dense_block_count
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from quantkit.archs.common import experts
from quantkit.archs.common.base import EMBEDDING_RULES, Config, Keys, need, refuse
from quantkit.archs.common.tensors import LazyTensor, TensorRule
from quantkit.archs.lfm2 import DENSE_RULES, MIXER_RULES, OUTPUT_RULES, Lfm2
from quantkit.formats.gguf.metadata import Entries


class Lfm2MoE(Lfm2):
    """LFM2 with experts."""

    name = "lfm2moe"
    hf = ("Lfm2MoeForCausalLM",)
    model_type = "lfm2_moe"
    defaults: ClassVar[Mapping[str, object]] = {**Lfm2.defaults, "num_dense_layers": 2}
    rules: ClassVar[tuple[TensorRule, ...]] = (
        *EMBEDDING_RULES,
        *MIXER_RULES,
        *DENSE_RULES,
        experts.choice_rule("feed_forward.expert_bias"),
        *experts.routed_rules("feed_forward", experts.MIXTRAL),
        *OUTPUT_RULES,
    )
    EXAMPLE: ClassVar[dict[str, Any]] = {
        **{key: value for key, value in Lfm2.EXAMPLE.items() if not key.startswith("block_")},
        "architectures": ["Lfm2MoeForCausalLM"],
        "model_type": "lfm2_moe",
        "num_dense_layers": 1,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "use_expert_bias": True,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    }

    def feed_forward_length(self, config: Config) -> int:
        return self.intermediate_size(config)

    def metadata(self, config: Config) -> Entries:
        for key in ("use_expert_bias", "norm_topk_prob"):
            refuse(config, key, (True,))
        refuse(config, "routed_scaling_factor", (1.0,))
        given = {**config, "first_k_dense_replace": need(config, "num_dense_layers"), "norm_topk_prob": None}
        gating = (experts.GATING_NUMBERS["sigmoid"], "u32")
        found = super().metadata(config) | experts.entries(self.name, given | {"routed_scaling_factor": None})
        return found | {f"{self.name}.expert_gating_func": gating}

    def config(self, metadata: Mapping[str, object], tensors: Mapping[str, LazyTensor]) -> dict[str, Any]:
        hp, found = self.hparams(metadata, tensors.keys()), super().config(metadata, tensors)
        del found["block_auto_adjust_ff_dim"]
        return found | {
            "num_dense_layers": hp.n_leading_dense,
            "num_experts": hp.n_expert,
            "num_experts_per_tok": hp.n_expert_used,
            "moe_intermediate_size": hp.n_ff_expert,
            "use_expert_bias": hp.has_choice_bias,
            "norm_topk_prob": hp.normalises,
            "routed_scaling_factor": hp.expert_scale,
        }

    def numbers(self, keys: Keys, tensors: Collection[str]) -> dict[str, Any]:
        return super().numbers(keys, tensors) | experts.numbers(keys, tensors, biased=True)
