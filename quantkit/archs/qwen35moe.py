"""qwen35moe: Qwen3.5 with routed experts and a shared one in place of every feed-forward; qwen35 otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from quantkit.archs.common import hybrid
from quantkit.archs.common.base import EMBEDDING_RULES, Config
from quantkit.archs.common.hybrid import HybridMoE
from quantkit.archs.common.qwen_mtp import MTP_RULES
from quantkit.archs.common.tensors import LazyTensor, TensorRule
from quantkit.archs.qwen35 import RECURRENT_RULES, Qwen35
from quantkit.errors import UnsupportedError
from quantkit.formats.gguf.metadata import Entries

_WITHOUT_DENSE_FFN = {key: value for key, value in Qwen35.EXAMPLE.items() if key != "intermediate_size"}


class Qwen35MoE(HybridMoE, Qwen35):
    """Qwen3.5 with experts."""

    name = "qwen35moe"
    hf: ClassVar[tuple[str, ...]] = ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration")
    model_type = "qwen3_5_moe_text"
    rules: ClassVar[tuple[TensorRule, ...]] = (
        *EMBEDDING_RULES,
        *hybrid.ATTENTION_RULES,
        *RECURRENT_RULES,
        *hybrid.FFN_NORM_RULES,
        *hybrid.MOE_RULES,
        *MTP_RULES,
        *hybrid.OUTPUT_RULES,
    )
    EXAMPLE: ClassVar[dict[str, Any]] = _WITHOUT_DENSE_FFN | {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64,
    }

    def metadata(self, config: Config) -> Entries:
        return super().metadata(dict(config) | {"norm_topk_prob": None})  # transformers always divides

    def config(self, metadata: Mapping[str, object], tensors: Mapping[str, LazyTensor]) -> dict[str, Any]:
        found = super().config(metadata, tensors)
        if not found.pop("norm_topk_prob"):
            raise UnsupportedError("qwen35moe.expert_weights_norm is false; transformers always divides the weights")
        return found
