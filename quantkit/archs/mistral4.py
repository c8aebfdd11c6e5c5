"""mistral4: Mistral Small 4, its text model. DeepSeek V3's blocks with other experts and position-dependent queries.

Experts are selected by softmax scores, without a bias. The query at position p is multiplied by
1 + beta ln(1 + floor(p / n)), with n the original context of YaRN, as Ministral 3's; ik_llama.cpp leaves this factor
out, which is 1 up to position n - 1. Checkpoints stack the experts of a layer, gate and up in one tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from quantkit.archs.common import experts, rope
from quantkit.archs.common.base import Config, Keys, refuse, rope_parameters
from quantkit.archs.common.blocks import HParams, LatentAttention, Temperature
from quantkit.archs.common.tensors import LazyTensor, Piece, Shape, TensorRule
from quantkit.archs.deepseek2 import DeepSeek2, LatentHParams
from quantkit.formats.gguf.metadata import Entries


@dataclass(frozen=True, kw_only=True)
class Mistral4HParams(LatentHParams):
    """LatentHParams with the position-dependent query scaling."""

    temperature: Temperature | None = None


_ROPE = {  # transformers' default
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


class Mistral4(DeepSeek2):
    """Mistral Small 4, its text model."""

    name = "mistral4"
    hf: ClassVar[tuple[str, ...]] = ("Mistral4ForCausalLM",)
    model_type = "mistral4"
    rules: ClassVar[tuple[TensorRule, ...]] = (
        *(rule for rule in DeepSeek2.rules if ".experts.E." not in rule.hf),
        *experts.stacked_rules(),
    )
    defaults: ClassVar[dict[str, Any]] = {
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "first_k_dense_replace": 0,
        "routed_scaling_factor": 1.0,
    }
    EXAMPLE: ClassVar[dict[str, Any]] = {
        **{key: value for key, value in DeepSeek2.EXAMPLE.items() if key not in ("rope_theta", "rope_scaling")},
        "architectures": ["Mistral4ForCausalLM"],
        "model_type": "mistral4",
        "first_k_dense_replace": 0,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    }

    def metadata(self, config: Config) -> Entries:
        refuse(config, "n_group", (1,))  # transformers scores a group by its two best experts, files have no such key
        parameters = dict(rope_parameters(config, _ROPE))
        parameters.pop("partial_rotary_factor", None)  # qk_rope_head_dim says it
        entries = rope.temperature_entries(self.name, parameters)
        given = dict(config) | {"rope_scaling": None, "rope_parameters": parameters, "scoring_func": "softmax",
                                "topk_method": "greedy"}  # fmt: skip
        return super().metadata(given) | entries

    def is_generated(self, name: str) -> bool:
        return super().is_generated(name) or name.endswith((".ffn_gate_exps.weight", ".ffn_up_exps.weight"))

    def to_hf(self, hparams: HParams, shapes: Mapping[str, Shape]) -> list[Piece]:
        """As `Arch.to_hf`; gate and up are joined."""
        names = ((f"blk.{i}.ffn_gate_exps.weight", f"model.layers.{i}.mlp.experts.gate_up_proj")
                 for i in range(hparams.n_leading_dense, hparams.n_layer))  # fmt: skip
        return super().to_hf(hparams, shapes) + [experts.joined(shapes, gate, name) for gate, name in names]

    def config(self, metadata: Mapping[str, object], tensors: Mapping[str, LazyTensor]) -> dict[str, Any]:
        hp = self.hparams(metadata, tensors.keys())
        return rope.with_temperature(super().config(metadata, tensors), hp.temperature, hp.n_ctx_train)

    def class_settings(self, hp: HParams, metadata: Mapping[str, object]) -> dict[str, Any]:
        return {"architectures": [self.hf[0]], "model_type": self.model_type}

    def hparams(self, metadata: Mapping[str, object], tensors: Collection[str] = ()) -> Mistral4HParams:
        return Mistral4HParams(**self.numbers(Keys(self.name, metadata), tensors))

    def numbers(self, keys: Keys, tensors: Collection[str]) -> dict[str, Any]:
        return super().numbers(keys, tensors) | {"temperature": rope.temperature(keys)}

    def latent_attention(self, hp: LatentHParams, i: int) -> LatentAttention:
        assert isinstance(hp, Mistral4HParams)
        return replace(super().latent_attention(hp, i), temperature=hp.temperature)
