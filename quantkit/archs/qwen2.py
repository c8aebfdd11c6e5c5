"""qwen2: Qwen2 and Qwen2.5, dense. Grouped-query attention with biases of q, k and v, "neox" RoPE, SwiGLU.

Rows keep the checkpoint's order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from quantkit.archs.common.base import EMBEDDING_RULES, OUTPUT_RULES, SWIGLU_RULES, Config, refuse
from quantkit.archs.common.decoder import Decoder
from quantkit.archs.common.tensors import LazyTensor, TensorRule
from quantkit.errors import UnsupportedError
from quantkit.formats.gguf.metadata import Entries

_BIASED = ("attn_q", "attn_k", "attn_v")

ATTENTION_RULES = (
    TensorRule("blk.N.attn_norm", "model.layers.N.input_layernorm", f32=True),
    TensorRule("blk.N.attn_q", "model.layers.N.self_attn.q_proj", bias=True),
    TensorRule("blk.N.attn_k", "model.layers.N.self_attn.k_proj", bias=True),
    TensorRule("blk.N.attn_v", "model.layers.N.self_attn.v_proj", bias=True),
    TensorRule("blk.N.attn_output", "model.layers.N.self_attn.o_proj"),
)


class Qwen2(Decoder):
    """Qwen2 and Qwen2.5, dense."""

    name = "qwen2"
    hf: ClassVar[tuple[str, ...]] = ("Qwen2ForCausalLM",)
    model_type = "qwen2"
    rope_style = "neox"
    biased = _BIASED
    rules: ClassVar[tuple[TensorRule, ...]] = (
        *EMBEDDING_RULES,
        *ATTENTION_RULES,
        *SWIGLU_RULES,
        *OUTPUT_RULES,
    )
    EXAMPLE: ClassVar[dict[str, Any]] = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "use_sliding_window": False,
        "tie_word_embeddings": False,
    }

    def metadata(self, config: Config) -> Entries:
        refuse(config, "use_sliding_window", (False,))
        entries = super().metadata(config)
        if config.get("head_dim"):
            entries |= self.head_lengths(config)
        return entries

    def has_bias(self, rule: TensorRule, config: Config) -> bool:
        return rule.gguf.rpartition(".")[2] in _BIASED

    def config(self, metadata: Mapping[str, object], tensors: Mapping[str, LazyTensor]) -> dict[str, Any]:
        found = super().config(metadata, tensors)
        if not found.pop("attention_bias"):
            raise UnsupportedError(f"blk.0.attn_q.bias is not there; {self.hf[0]} of transformers always has biases")
        hp = self.hparams(metadata)
        return found | {"use_sliding_window": False} | ({"head_dim": hp.head_dim_k} if hp.has_own_head_dim else {})
