"""qwen3: Qwen3, dense. Grouped-query attention; queries and keys RMS-normed per head before "neox" RoPE; SwiGLU.

The head size is a setting of its own, 128 by default. Rows keep the checkpoint's order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from quantkit.archs.common.base import EMBEDDING_RULES, OUTPUT_RULES, SWIGLU_RULES, Config, refuse
from quantkit.archs.common.blocks import Attention, HParams
from quantkit.archs.common.decoder import Decoder, with_head_norms
from quantkit.archs.common.tensors import LazyTensor, TensorRule
from quantkit.formats.gguf.metadata import Entries
from quantkit.inputs.settings import integer

_HEAD_DIM = 128  # transformers' default

ATTENTION_RULES = (
    TensorRule("blk.N.attn_norm", "model.layers.N.input_layernorm", f32=True),
    TensorRule("blk.N.attn_q", "model.layers.N.self_attn.q_proj", bias=True),
    TensorRule("blk.N.attn_q_norm", "model.layers.N.self_attn.q_norm", f32=True),
    TensorRule("blk.N.attn_k", "model.layers.N.self_attn.k_proj", bias=True),
    TensorRule("blk.N.attn_k_norm", "model.layers.N.self_attn.k_norm", f32=True),
    TensorRule("blk.N.attn_v", "model.layers.N.self_attn.v_proj", bias=True),
    TensorRule("blk.N.attn_output", "model.layers.N.self_attn.o_proj", bias=True),
)


class Qwen3(Decoder):
    """Qwen3, dense."""

    name = "qwen3"
    hf: ClassVar[tuple[str, ...]] = ("Qwen3ForCausalLM",)
    model_type = "qwen3"
    rope_style = "neox"
    rules: ClassVar[tuple[TensorRule, ...]] = (*EMBEDDING_RULES, *ATTENTION_RULES, *SWIGLU_RULES, *OUTPUT_RULES)
    EXAMPLE: ClassVar[dict[str, Any]] = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 256,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
    }

    def head_dim(self, config: Config) -> int:
        return integer(config, "head_dim") or _HEAD_DIM

    def metadata(self, config: Config) -> Entries:
        refuse(config, "use_sliding_window", (False,))
        return super().metadata(config) | self.head_lengths(config)

    def config(self, metadata: Mapping[str, object], tensors: Mapping[str, LazyTensor]) -> dict[str, Any]:
        return super().config(metadata, tensors) | {"head_dim": self.hparams(metadata).head_dim_k}

    def attention(self, hp: HParams, i: int) -> Attention:
        return with_head_norms(super().attention(hp, i), hp, i)
