"""glm4: GLM-4-0414, dense. Norms come before and after attention and feed-forward.

Grouped-query attention with biases of q, k and v; RoPE rotates neighbouring elements of half of each head, the order of
checkpoints. ffn_up holds gate and up: the rows of gate, then of up, as checkpoints have them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quantkit.archs.common.base import EMBEDDING_RULES, OUTPUT_RULES, Config
from quantkit.archs.common.blocks import Attention, FeedForward, HParams
from quantkit.archs.common.decoder import Decoder
from quantkit.archs.common.fused import gate_up
from quantkit.archs.common.tensors import LazyTensor, TensorRule
from quantkit.formats.gguf.metadata import Entries
from quantkit.inputs.settings import integer

_HEAD_DIM = 128  # transformers' default


class Glm4(Decoder):
    """GLM-4-0414, dense."""

    name = "glm4"
    hf = ("Glm4ForCausalLM",)
    model_type = "glm4"
    rope_style = "norm"
    rotary_fraction = 0.5
    biased = ("attn_q", "attn_k", "attn_v")
    defaults = {"attention_bias": True}  # noqa: RUF012  data
    size_overrides = {"up_ff": lambda s: 2 * s["ff"]}  # noqa: RUF012  data
    rules = (
        *EMBEDDING_RULES,
        TensorRule("blk.N.attn_norm", "model.layers.N.input_layernorm", f32=True),
        TensorRule("blk.N.attn_q", "model.layers.N.self_attn.q_proj", bias=True),
        TensorRule("blk.N.attn_k", "model.layers.N.self_attn.k_proj", bias=True),
        TensorRule("blk.N.attn_v", "model.layers.N.self_attn.v_proj", bias=True),
        TensorRule("blk.N.attn_output", "model.layers.N.self_attn.o_proj"),
        TensorRule("blk.N.post_attention_norm", "model.layers.N.post_self_attn_layernorm", f32=True),
        TensorRule("blk.N.ffn_norm", "model.layers.N.post_attention_layernorm", f32=True),
        TensorRule("blk.N.ffn_up", "model.layers.N.mlp.gate_up_proj"),
        TensorRule("blk.N.ffn_down", "model.layers.N.mlp.down_proj"),
        TensorRule("blk.N.post_ffw_norm", "model.layers.N.post_mlp_layernorm", f32=True),
        *OUTPUT_RULES,
    )
    EXAMPLE = {  # noqa: RUF012  data
        "architectures": ["Glm4ForCausalLM"],
        "model_type": "glm4",
        "vocab_size": 320,
        "hidden_size": 128,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "partial_rotary_factor": 0.5,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1.5625e-7,
        "rope_theta": 10000.0,
        "attention_bias": True,
        "hidden_act": "silu",
        "pad_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": False,
    }

    def head_dim(self, config: Config) -> int:
        return integer(config, "head_dim") or _HEAD_DIM

    def metadata(self, config: Config) -> Entries:
        return super().metadata(config) | self.head_lengths(config)

    def config(self, metadata: Mapping[str, object], tensors: Mapping[str, LazyTensor]) -> dict[str, Any]:
        return super().config(metadata, tensors) | {"head_dim": self.hparams(metadata).head_dim_k}

    def attention(self, hp: HParams, i: int) -> Attention:
        return replace(super().attention(hp, i), post_norm=hp.norm(f"blk.{i}.post_attention_norm"))

    def feed_forward(self, hp: HParams, i: int) -> FeedForward:
        return replace(gate_up(hp, i), post_norm=hp.norm(f"blk.{i}.post_ffw_norm"))
