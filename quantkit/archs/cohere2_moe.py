"""cohere2_moe: Command A with experts. cohere2 with RMS norms, and with routed experts after some dense layers.

The gating is the sigmoid of each expert, or (GGUF's expert_gating_func 3) a softmax over the selected ones. Layers with
a sliding window have RoPE, and so have the leading dense layers, which attend to all tokens; the other layers that do
have none. attention.sliding_window_pattern has a flag for each layer. There are no shared experts.

Keys and names are those of ik_llama.cpp; llama.cpp does not know the architecture.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from quantkit.archs.cohere2 import Cohere2, Cohere2HParams
from quantkit.archs.common import experts, windows
from quantkit.archs.common.base import EMBEDDING_RULES, OUTPUT_RULES, Config, Keys, need, refuse
from quantkit.archs.common.blocks import HParams, Part
from quantkit.archs.common.tensors import LazyTensor, TensorRule
from quantkit.errors import UnsupportedError
from quantkit.formats.gguf.metadata import Entries
from quantkit.inputs.settings import integer, sequence

_EVERY = 4  # by default every fourth layer after the dense ones attends to all tokens
_GATING = {"sigmoid": 2, "softmax": 3}  # expert_selection_fn -> GGUF's expert_gating_func


@dataclass(frozen=True, kw_only=True)
class Cohere2MoeHParams(Cohere2HParams):
    """HParams with the layers that have a sliding window."""

    windowed: tuple[bool, ...]


class Cohere2Moe(Cohere2):
    """Command A with experts."""

    name = "cohere2_moe"
    hf = ("Cohere2MoeForCausalLM",)
    model_type = "cohere2_moe"
    layer_norm_eps = ""  # RMS norms
    defaults = {}  # noqa: RUF012  data
    rules = (
        *EMBEDDING_RULES,
        TensorRule("blk.N.attn_norm", "model.layers.N.input_layernorm", f32=True),
        TensorRule("blk.N.attn_q", "model.layers.N.self_attn.q_proj", bias=True),
        TensorRule("blk.N.attn_k", "model.layers.N.self_attn.k_proj", bias=True),
        TensorRule("blk.N.attn_v", "model.layers.N.self_attn.v_proj", bias=True),
        TensorRule("blk.N.attn_output", "model.layers.N.self_attn.o_proj", bias=True),
        *experts.dense_rules(),
        *experts.routed_rules(),
        *OUTPUT_RULES,
    )
    EXAMPLE = {  # noqa: RUF012  data
        "architectures": ["Cohere2MoeForCausalLM"],
        "model_type": "cohere2_moe",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 32,
        "prefix_dense_intermediate_size": 96,
        "num_hidden_layers": 6,
        "mlp_layer_types": ["dense", *["sparse"] * 5],
        "layer_types": ["full_attention", *["sliding_attention"] * 3, "full_attention", "sliding_attention"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "num_shared_experts": 0,
        "expert_selection_fn": "sigmoid",
        "norm_topk_prob": True,
        "sliding_window": 32,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 50000.0,
        "logit_scale": 0.25,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": True,
    }

    def metadata(self, config: Config) -> Entries:
        refuse(config, "num_shared_experts", (0,))
        gating = config.get("expert_selection_fn") or "softmax"
        if not isinstance(gating, str) or gating not in _GATING:
            raise UnsupportedError(f"config.json: expert_selection_fn = {gating!r:.80}; known: {', '.join(_GATING)}")
        dense, width = _leading_dense(config), need(config, "intermediate_size")
        given = dict(config) | {
            "first_k_dense_replace": dense,
            "moe_intermediate_size": width,
            "norm_topk_prob": gating == "softmax" or config.get("norm_topk_prob") is not False,
        }
        ff = need(config, "prefix_dense_intermediate_size") if dense else width
        return super().metadata(dict(config) | {"intermediate_size": ff}) | experts.entries(self.name, given) | {
            f"{self.name}.expert_gating_func": (_GATING[gating], "u32"),
        } | self.head_lengths(config)  # fmt: skip

    def window_entries(self, config: Config) -> Entries:
        windowed = _windowed_layers(config)
        every = integer(config, "prefix_dense_sliding_window_pattern", 1)
        if every != 1 and not all(windowed[: _leading_dense(config)]):
            raise UnsupportedError(
                f"config.json: prefix_dense_sliding_window_pattern = {every}: dense layers that attend to all tokens "
                f"have no RoPE then, which {self.name} files cannot express"
            )
        return {f"{self.name}.attention.sliding_window_pattern": (list(windowed), "bool")}

    def config(self, metadata: Mapping[str, object], tensors: Mapping[str, LazyTensor]) -> dict[str, Any]:
        hp = self.hparams(metadata, tensors.keys())
        return super().config(metadata, tensors) | windows.config(hp.windowed) | {
            "intermediate_size": hp.n_ff_expert,
            "prefix_dense_intermediate_size": hp.n_ff,
            "mlp_layer_types": experts.mlp_layer_types(hp),
            "head_dim": hp.head_dim_k,
            "num_experts": hp.n_expert,
            "num_experts_per_tok": hp.n_expert_used,
            "expert_selection_fn": hp.gating,
            "norm_topk_prob": hp.normalises,
        }  # fmt: skip

    def hparams(self, metadata: Mapping[str, object], tensors: Collection[str] = ()) -> Cohere2MoeHParams:
        return Cohere2MoeHParams(**self.numbers(Keys(self.name, metadata), tensors))

    def numbers(self, keys: Keys, tensors: Collection[str]) -> dict[str, Any]:
        found = super().numbers(keys, tensors) | experts.numbers(keys, tensors, biased=False)
        gating = keys.number("expert_gating_func", _GATING["sigmoid"])
        if gating not in _GATING.values():
            raise UnsupportedError(f"{self.name}.expert_gating_func = {gating}; known: 2 (sigmoid), 3 (softmax)")
        return found | {
            "gating": "sigmoid" if gating == _GATING["sigmoid"] else "softmax",
            "windowed": windows.layers_of_keys(keys, _EVERY),
        }

    def has_window(self, hp: HParams, i: int) -> bool:
        assert isinstance(hp, Cohere2MoeHParams)
        return hp.windowed[i]

    def has_rope(self, hp: HParams, i: int) -> bool:
        return self.has_window(hp, i) or experts.is_dense(hp, i)

    def feed_forward(self, hp: HParams, i: int) -> Part:
        return experts.feed_forward(hp, i, "attn_norm")


def _leading_dense(config: Config) -> int:
    """The number of leading dense layers, from either setting of config.json."""
    found = experts.leading_dense(config)
    return integer(config, "first_k_dense_replace") if found is None else found


def _windowed_layers(config: Config) -> tuple[bool, ...]:
    """Whether each layer has a window. The layers of first_k_dense_replace and the others are counted apart."""
    if sequence(config, "layer_types"):
        return windows.layers_of_config(config, _EVERY)
    dense = integer(config, "first_k_dense_replace")
    first = integer(config, "prefix_dense_sliding_window_pattern", 1) or 1
    every = integer(config, "sliding_window_pattern", _EVERY) or _EVERY
    layers = range(int(need(config, "num_hidden_layers")))
    return tuple((i + 1) % first != 0 if i < dense else (i - dense + 1) % every != 0 for i in layers)
