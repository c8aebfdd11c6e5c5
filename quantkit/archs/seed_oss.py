"""seed_oss: Seed-OSS. Grouped-query attention with biases of q, k and v, "neox" RoPE, SwiGLU.

The norm before the feed-forward is stored as post_attention_norm. The output projection may have a bias of its own
(attention_out_bias). Rows keep the checkpoint's order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quantkit.archs.common.base import EMBEDDING_RULES, OUTPUT_RULES, SWIGLU_RULES, Config
from quantkit.archs.common.blocks import FeedForward, HParams
from quantkit.archs.common.decoder import Decoder, all_or_none
from quantkit.archs.common.tensors import LazyTensor, TensorRule
from quantkit.formats.gguf.metadata import Entries
from quantkit.inputs.settings import integer

_HEAD_DIM = 128  # transformers' default
_BIASED, _OUT, _FFN = ("attn_q", "attn_k", "attn_v"), ("attn_output",), ("ffn_gate", "ffn_up", "ffn_down")


class SeedOss(Decoder):
    """Seed-OSS."""

    name = "seed_oss"
    hf = ("SeedOssForCausalLM",)
    model_type = "seed_oss"
    rope_style = "neox"
    biased = _BIASED
    defaults = {"attention_bias": True}  # noqa: RUF012  data
    rules = (
        *EMBEDDING_RULES,
        TensorRule("blk.N.attn_norm", "model.layers.N.input_layernorm", f32=True),
        TensorRule("blk.N.attn_q", "model.layers.N.self_attn.q_proj", bias=True),
        TensorRule("blk.N.attn_k", "model.layers.N.self_attn.k_proj", bias=True),
        TensorRule("blk.N.attn_v", "model.layers.N.self_attn.v_proj", bias=True),
        TensorRule("blk.N.attn_output", "model.layers.N.self_attn.o_proj", bias=True),
        TensorRule("blk.N.post_attention_norm", "model.layers.N.post_attention_layernorm", f32=True),
        *SWIGLU_RULES[1:],
        *OUTPUT_RULES,
    )
    EXAMPLE = {  # noqa: RUF012  data
        "architectures": ["SeedOssForCausalLM"],
        "model_type": "seed_oss",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 256,
        "rope_theta": 10000000.0,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": True,
        "attention_out_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }

    def head_dim(self, config: Config) -> int:
        return integer(config, "head_dim") or _HEAD_DIM

    def metadata(self, config: Config) -> Entries:
        return super().metadata(config) | self.head_lengths(config)

    def has_bias(self, rule: TensorRule, config: Config) -> bool:
        if rule.gguf.endswith(".attn_output"):
            return bool(config.get("attention_out_bias"))
        return super().has_bias(rule, config)

    def config(self, metadata: Mapping[str, object], tensors: Mapping[str, LazyTensor]) -> dict[str, Any]:
        hp = self.hparams(metadata, tensors.keys())
        return super().config(metadata, tensors) | {
            "head_dim": hp.head_dim_k,
            "attention_out_bias": all_or_none(hp, _OUT, self.hf[0]),
            "mlp_bias": all_or_none(hp, _FFN, self.hf[0]),
        }

    def feed_forward(self, hp: HParams, i: int) -> FeedForward:
        return hp.feed_forward(i, "post_attention_norm")
