"""hy_v3: Hunyuan 3 (Hy3) and Hy-MT2. Qwen3's attention; leading dense layers, then routed and shared experts.

Experts are selected by sigmoid scores plus a bias, as DeepSeek V3's; the weights of the selected ones are divided by
their sum and multiplied by router_scaling_factor. MTP layers are kept in files, after the main layers; they are not
run. Files that name the architecture "hy-v3", made before llama.cpp took it up, are not read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from quantkit.archs.common import experts
from quantkit.archs.common import mtp as mtp_layers
from quantkit.archs.common.base import EMBEDDING_RULES, OUTPUT_RULES, Config, Keys, need, refuse
from quantkit.archs.common.blocks import HParams, Part
from quantkit.archs.common.tensors import LazyTensor, TensorRule
from quantkit.archs.qwen3 import ATTENTION_RULES, Qwen3
from quantkit.formats.gguf.metadata import Entries
from quantkit.inputs.settings import sequence

_BASE = 11158840.0  # transformers' default of rope_theta
# Names that transformers gives to tensors of published checkpoints.
_NAMES = {
    ".mlp.gate.weight": ".mlp.router.gate.weight",
    ".mlp.e_score_correction_bias": ".mlp.expert_bias",
    ".mlp.shared_experts.": ".mlp.shared_mlp.",
}


class HyV3(Qwen3):
    """Hunyuan 3 and Hy-MT2."""

    name = "hy_v3"
    hf: ClassVar[tuple[str, ...]] = ("HYV3ForCausalLM",)
    model_type = "hy_v3"
    mtp = "keep"
    rules: ClassVar[tuple[TensorRule, ...]] = (
        *EMBEDDING_RULES,
        *ATTENTION_RULES,
        TensorRule("blk.N.ffn_norm", "model.layers.N.post_attention_layernorm", f32=True),
        *experts.dense_rules(),
        experts.choice_rule("mlp.expert_bias"),
        *experts.routed_rules(router="router.gate"),
        *experts.shared_rules("mlp.shared_mlp"),
        *mtp_layers.rules({"shared_head.norm": "final_layernorm"}),
        *OUTPUT_RULES,
    )
    EXAMPLE: ClassVar[dict[str, Any]] = Qwen3.EXAMPLE | {
        "architectures": ["HYV3ForCausalLM"],
        "model_type": "hy_v3",
        "num_hidden_layers": 3,
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "num_shared_experts": 1,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "router_scaling_factor": 2.826,
    }

    def canonical(self, name: str) -> str:
        found = super().canonical(name)
        for theirs, published in _NAMES.items():
            found = found.replace(theirs, published)
        return found

    def metadata(self, config: Config) -> Entries:
        refuse(config, "mlp_bias", (False,))
        for switch in ("qk_norm", "route_norm", "moe_router_use_sigmoid", "moe_router_enable_expert_bias"):
            refuse(config, switch, (True,))
        given = {"rope_theta": _BASE, "n_shared_experts": need(config, "num_shared_experts")} | dict(config)
        given |= {"norm_topk_prob": True, "routed_scaling_factor": need(config, "router_scaling_factor")}
        if not sequence(config, "mlp_layer_types"):
            given.setdefault("first_k_dense_replace", 1)
        return super().metadata(given) | experts.entries(self.name, given) | {
            f"{self.name}.expert_gating_func": (experts.GATING_NUMBERS["sigmoid"], "u32")
        }  # fmt: skip

    def config(self, metadata: Mapping[str, object], tensors: Mapping[str, LazyTensor]) -> dict[str, Any]:
        hp = self.hparams(metadata, tensors.keys())
        routed = experts.config(hp)
        return super().config(metadata, tensors) | {
            "moe_intermediate_size": routed["moe_intermediate_size"],
            "num_experts": routed["n_routed_experts"],
            "num_experts_per_tok": routed["num_experts_per_tok"],
            "num_shared_experts": routed["n_shared_experts"],
            "router_scaling_factor": routed["routed_scaling_factor"],
            "mlp_layer_types": experts.mlp_layer_types(hp),
            "num_nextn_predict_layers": hp.n_mtp_layers,
        }

    def numbers(self, keys: Keys, tensors: Collection[str]) -> dict[str, Any]:
        return super().numbers(keys, tensors) | experts.numbers(keys, tensors)

    def feed_forward(self, hp: HParams, i: int) -> Part:
        return experts.feed_forward(hp, i)
