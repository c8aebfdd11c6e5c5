"""qwen2moe: Qwen1.5-MoE and Qwen2-57B-A14B. Qwen2's attention; routed experts and a gated shared expert in every layer.

The experts with the largest softmax probabilities are selected. Their weights are these probabilities; they are divided
by their sum only if `norm_topk_prob` in config.json and `qwen2moe.expert_weights_norm` in GGUF say so. Files of other
converters have no such key, and other runtimes never divide. Models with some dense layers are refused, because the
programs that read this format support none.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from quantkit.archs.common import experts
from quantkit.archs.common.base import EMBEDDING_RULES, OUTPUT_RULES, Config, Keys, refuse
from quantkit.archs.common.blocks import Experts, HParams
from quantkit.archs.common.tensors import LazyTensor, TensorRule
from quantkit.archs.common.transforms import RowToVector
from quantkit.archs.qwen2 import ATTENTION_RULES, Qwen2
from quantkit.formats.gguf.metadata import Entries


class Qwen2MoE(Qwen2):
    """Qwen1.5 and Qwen2 with experts in every layer."""

    name = "qwen2moe"
    hf: ClassVar[tuple[str, ...]] = ("Qwen2MoeForCausalLM",)
    model_type = "qwen2_moe"
    rules: ClassVar[tuple[TensorRule, ...]] = (
        *EMBEDDING_RULES,
        *ATTENTION_RULES,
        TensorRule("blk.N.ffn_norm", "model.layers.N.post_attention_layernorm", f32=True),
        *experts.routed_rules(),
        TensorRule("blk.N.ffn_gate_inp_shexp", "model.layers.N.mlp.shared_expert_gate",
             lambda hp: RowToVector(hp.n_embd), f32=True),
        *experts.shared_rules("mlp.shared_expert"),
        *OUTPUT_RULES,
    )  # fmt: skip
    EXAMPLE: ClassVar[dict[str, Any]] = Qwen2.EXAMPLE | {
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }

    def metadata(self, config: Config) -> Entries:
        refuse(config, "decoder_sparse_step", (1,))
        refuse(config, "mlp_only_layers", ([],))
        refuse(config, "qkv_bias", (True,))
        given = dict(config) | {"norm_topk_prob": bool(config.get("norm_topk_prob"))}
        return super().metadata(given) | experts.entries(self.name, given)

    def config(self, metadata: Mapping[str, object], tensors: Mapping[str, LazyTensor]) -> dict[str, Any]:
        hp = self.hparams(metadata, tensors.keys())
        return super().config(metadata, tensors) | {
            "num_experts": hp.n_expert,
            "num_experts_per_tok": hp.n_expert_used,
            "moe_intermediate_size": hp.n_ff_expert,
            "shared_expert_intermediate_size": hp.n_ff_shared,
            "norm_topk_prob": hp.normalises,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }

    def numbers(self, keys: Keys, tensors: Collection[str]) -> dict[str, Any]:
        found = super().numbers(keys, tensors)
        found |= experts.numbers(keys, tensors, ff=found["n_ff"])
        return found | {
            "normalises": keys.flag("expert_weights_norm", False),
            "n_ff_shared": found["n_ff_shared"] or found["n_ff"],
        }

    def feed_forward(self, hp: HParams, i: int) -> Experts:
        return replace(experts.routed(hp, i), shared_gate=f"blk.{i}.ffn_gate_inp_shexp.weight")
