"""nemotron: Nemotron 3 8B, Nemotron-4 and Minitron. LayerNorms, and a feed-forward without a gate.

Norms subtract the mean and have biases; checkpoints store their weights minus 1. Grouped-query attention with "neox"
RoPE of half of each head. The feed-forward is down(max(up(y), 0)^2).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quantkit.archs.common.base import EMBEDDING_RULES, OUTPUT_RULES, Config, refuse
from quantkit.archs.common.blocks import FeedForward, HParams
from quantkit.archs.common.decoder import Decoder, all_or_none
from quantkit.archs.common.tensors import LazyTensor, TensorRule
from quantkit.archs.common.transforms import add
from quantkit.formats.gguf.metadata import Entries


def _norm_rules(ours: str, theirs: str) -> tuple[TensorRule, ...]:
    return (
        TensorRule(f"{ours}.weight", f"{theirs}.weight", lambda hp: add(1), full_names=True, f32=True),
        TensorRule(f"{ours}.bias", f"{theirs}.bias", full_names=True, f32=True),
    )


class Nemotron(Decoder):
    """Nemotron 3 8B, Nemotron-4 and Minitron."""

    name = "nemotron"
    hf = ("NemotronForCausalLM",)
    model_type = "nemotron"
    rope_style = "neox"
    rotary_fraction = 0.5
    layer_norm_eps = "norm_eps"
    defaults = {"norm_eps": 1e-5}  # noqa: RUF012  data
    rules = (
        *EMBEDDING_RULES,
        *_norm_rules("blk.N.attn_norm", "model.layers.N.input_layernorm"),
        TensorRule("blk.N.attn_q", "model.layers.N.self_attn.q_proj", bias=True),
        TensorRule("blk.N.attn_k", "model.layers.N.self_attn.k_proj", bias=True),
        TensorRule("blk.N.attn_v", "model.layers.N.self_attn.v_proj", bias=True),
        TensorRule("blk.N.attn_output", "model.layers.N.self_attn.o_proj", bias=True),
        *_norm_rules("blk.N.ffn_norm", "model.layers.N.post_attention_layernorm"),
        TensorRule("blk.N.ffn_up", "model.layers.N.mlp.up_proj", bias=True),
        TensorRule("blk.N.ffn_down", "model.layers.N.mlp.down_proj", bias=True),
        *_norm_rules("output_norm", "model.norm"),
        *(rule for rule in OUTPUT_RULES if rule.gguf == "output"),
    )
    EXAMPLE = {  # noqa: RUF012  data
        "architectures": ["NemotronForCausalLM"],
        "model_type": "nemotron",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "partial_rotary_factor": 0.5,
        "max_position_embeddings": 256,
        "norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "relu2",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }

    def metadata(self, config: Config) -> Entries:
        refuse(config, "hidden_act", ("relu2",))
        entries = super().metadata(dict(config) | {"hidden_act": None})
        return entries | (self.head_lengths(config) if config.get("head_dim") else {})

    def config(self, metadata: Mapping[str, object], tensors: Mapping[str, LazyTensor]) -> dict[str, Any]:
        hp = self.hparams(metadata, tensors.keys())
        return super().config(metadata, tensors) | {
            "head_dim": hp.head_dim_k,
            "hidden_act": "relu2",
            "mlp_bias": all_or_none(hp, ("ffn_up", "ffn_down"), self.hf[0]),
        }

    def feed_forward(self, hp: HParams, i: int) -> FeedForward:
        up, down = (hp.linear(f"blk.{i}.ffn_{name}") for name in ("up", "down"))
        return FeedForward(hp.norm(f"blk.{i}.ffn_norm"), up, up, down, activation="reglu")
