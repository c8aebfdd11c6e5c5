"""qwen3moe: Qwen3 with routed experts in every layer: softmax over all experts, then top-k selection.

The weights of the selected experts are divided by their sum if `norm_topk_prob` in config.json (false by default) and
`qwen3moe.expert_weights_norm` in GGUF say so. The GGUF default is true: llama.cpp and ik_llama.cpp write no such key
and always divide. Models with some dense layers (`mlp_only_layers`, `decoder_sparse_step`) are refused, because
the programs that read this format support none.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from quantkit.archs.common import experts
from quantkit.archs.common.base import EMBEDDING_RULES, OUTPUT_RULES, Config, Keys, need, refuse
from quantkit.archs.common.blocks import HParams, Part
from quantkit.archs.common.tensors import LazyTensor, TensorRule
from quantkit.archs.qwen3 import ATTENTION_RULES, Qwen3
from quantkit.formats.gguf.metadata import Entries


class Qwen3MoE(Qwen3):
    """Qwen3 with experts in every layer."""

    name = "qwen3moe"
    hf: ClassVar[tuple[str, ...]] = ("Qwen3MoeForCausalLM",)
    model_type = "qwen3_moe"
    rules: ClassVar[tuple[TensorRule, ...]] = (
        *EMBEDDING_RULES,
        *ATTENTION_RULES,
        TensorRule("blk.N.ffn_norm", "model.layers.N.post_attention_layernorm", f32=True),
        TensorRule("blk.N.ffn_gate_inp", "model.layers.N.mlp.gate", f32=True),
        TensorRule("blk.N.ffn_gate_exps", "model.layers.N.mlp.experts.E.gate_proj"),
        TensorRule("blk.N.ffn_up_exps", "model.layers.N.mlp.experts.E.up_proj"),
        TensorRule("blk.N.ffn_down_exps", "model.layers.N.mlp.experts.E.down_proj"),
        *OUTPUT_RULES,
    )
    EXAMPLE: ClassVar[dict[str, Any]] = Qwen3.EXAMPLE | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }

    def metadata(self, config: Config) -> Entries:
        refuse(config, "decoder_sparse_step", (1,))
        refuse(config, "mlp_only_layers", ([],))
        experts = config.get("num_local_experts") or need(config, "num_experts")  # transformers 5 writes the former
        return super().metadata(config) | {
            f"{self.name}.expert_count": (experts, "u32"),
            f"{self.name}.expert_used_count": (need(config, "num_experts_per_tok"), "u32"),
            f"{self.name}.expert_feed_forward_length": (need(config, "moe_intermediate_size"), "u32"),
            f"{self.name}.expert_weights_norm": (bool(config.get("norm_topk_prob", False)), "bool"),
        }

    def config(self, metadata: Mapping[str, object], tensors: Mapping[str, LazyTensor]) -> dict[str, Any]:
        hp = self.hparams(metadata)
        return super().config(metadata, tensors) | {
            "num_experts": hp.n_expert,
            "num_experts_per_tok": hp.n_expert_used,
            "moe_intermediate_size": hp.n_ff_expert,
            "norm_topk_prob": hp.normalises,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }

    def numbers(self, keys: Keys, tensors: Collection[str]) -> dict[str, Any]:
        return super().numbers(keys, tensors) | experts.numbers(keys, tensors)

    def feed_forward(self, hp: HParams, i: int) -> Part:
        return experts.feed_forward(hp, i)
