"""hunyuan-dense and hunyuan-moe: the dense Hunyuan models (0.5B to 7B), and Hunyuan A13B with experts.

Grouped-query attention; queries and keys are RMS-normed per head after "neox" RoPE. The feed-forward is SwiGLU; with
experts, every layer has routed experts and a shared one, each as wide as intermediate_size.

The "dynamic" RoPE scaling of its checkpoints only changes the base, to theta * alpha^(dim / (dim - 2)).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from quantkit.archs.common import experts
from quantkit.archs.common.base import (
    EMBEDDING_RULES,
    OUTPUT_RULES,
    SWIGLU_RULES,
    Config,
    Keys,
    need,
    rope_parameters,
)
from quantkit.archs.common.blocks import Attention, HParams, Part
from quantkit.archs.common.decoder import Decoder, with_head_norms
from quantkit.archs.common.tensors import LazyTensor, TensorRule
from quantkit.errors import UnsupportedError
from quantkit.formats.gguf.metadata import Entries
from quantkit.inputs.settings import integer

_ATTENTION = (
    TensorRule("blk.N.attn_norm", "model.layers.N.input_layernorm", f32=True),
    TensorRule("blk.N.attn_q", "model.layers.N.self_attn.q_proj", bias=True),
    TensorRule("blk.N.attn_q_norm", "model.layers.N.self_attn.query_layernorm", f32=True),
    TensorRule("blk.N.attn_k", "model.layers.N.self_attn.k_proj", bias=True),
    TensorRule("blk.N.attn_k_norm", "model.layers.N.self_attn.key_layernorm", f32=True),
    TensorRule("blk.N.attn_v", "model.layers.N.self_attn.v_proj", bias=True),
    TensorRule("blk.N.attn_output", "model.layers.N.self_attn.o_proj", bias=True),
)


class HunyuanDense(Decoder):
    """The dense Hunyuan models."""

    name = "hunyuan-dense"
    hf: ClassVar[tuple[str, ...]] = ("HunYuanDenseV1ForCausalLM",)
    model_type = "hunyuan_v1_dense"
    rope_style = "neox"
    rules: ClassVar[tuple[TensorRule, ...]] = (*EMBEDDING_RULES, *_ATTENTION, *SWIGLU_RULES, *OUTPUT_RULES)
    EXAMPLE: ClassVar[dict[str, Any]] = {
        "architectures": ["HunYuanDenseV1ForCausalLM"],
        "model_type": "hunyuan_v1_dense",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": True,
    }

    def metadata(self, config: Config) -> Entries:
        given, parameters = dict(config), dict(rope_parameters(config))
        alpha = parameters.pop("alpha", None)
        if parameters["rope_type"] == "dynamic" and alpha:
            dim = self.head_dim(config)
            parameters = {"rope_type": "default", "rope_theta": parameters["rope_theta"] * alpha ** (dim / (dim - 2))}
        given |= {"rope_parameters": parameters, "rope_scaling": None}
        return super().metadata(given) | self.head_lengths(config)

    def config(self, metadata: Mapping[str, object], tensors: Mapping[str, LazyTensor]) -> dict[str, Any]:
        hp = self.hparams(metadata, tensors.keys())
        return super().config(metadata, tensors) | {"head_dim": hp.head_dim_k}

    def attention(self, hp: HParams, i: int) -> Attention:
        return replace(with_head_norms(super().attention(hp, i), hp, i), norms_after_rope=True)


class HunyuanMoE(HunyuanDense):
    """Hunyuan A13B."""

    name = "hunyuan-moe"
    hf = ("HunYuanMoEV1ForCausalLM",)
    model_type = "hunyuan_v1_moe"
    rules = (
        *EMBEDDING_RULES,
        *_ATTENTION,
        TensorRule("blk.N.ffn_norm", "model.layers.N.post_attention_layernorm", f32=True),
        *experts.routed_rules(router="gate.wg"),
        *experts.shared_rules("mlp.shared_mlp"),
        *OUTPUT_RULES,
    )
    EXAMPLE = HunyuanDense.EXAMPLE | {
        "architectures": ["HunYuanMoEV1ForCausalLM"],
        "model_type": "hunyuan_v1_moe",
        "intermediate_size": 32,
        "num_experts": 8,
        "moe_topk": 3,
        "tie_word_embeddings": False,
    }

    def metadata(self, config: Config) -> Entries:
        width = _alike(config, "moe_intermediate_size") or need(config, "intermediate_size")
        shared = width * (_alike(config, "num_shared_expert") or 1)
        given = dict(config) | {
            "num_experts_per_tok": _alike(config, "moe_topk"),
            "moe_intermediate_size": width,
            "shared_expert_intermediate_size": shared,
            "norm_topk_prob": None,
        }
        return super().metadata(given) | experts.entries(self.name, given)

    def config(self, metadata: Mapping[str, object], tensors: Mapping[str, LazyTensor]) -> dict[str, Any]:
        hp = self.hparams(metadata, tensors.keys())
        if hp.n_ff_shared != hp.n_ff_expert:
            raise UnsupportedError(
                f"hunyuan-moe with experts of {hp.n_ff_expert} and a shared one of {hp.n_ff_shared} rows: "
                f"{self.hf[0]} of transformers has one intermediate_size for both"
            )
        return super().config(metadata, tensors) | {
            "intermediate_size": hp.n_ff_expert,
            "num_experts": hp.n_expert,
            "moe_topk": hp.n_expert_used,
        }

    def numbers(self, keys: Keys, tensors: Collection[str]) -> dict[str, Any]:
        return super().numbers(keys, tensors) | experts.numbers(keys, tensors)

    def feed_forward(self, hp: HParams, i: int) -> Part:
        return experts.feed_forward(hp, i)


def _alike(config: Config, key: str) -> int | None:
    """A count that config.json gives once or for each layer. UnsupportedError if layers differ."""
    value = config.get(key)
    if isinstance(value, list):
        if not value or any(each != value[0] for each in value):
            raise UnsupportedError(f"config.json: {key} = {value!r:.80} differs between layers")
        value = value[0]
    return None if value is None else integer({key: value}, key)
