"""bitnet-b1.58 and bitnet: BitNet b1.58, with ternary matrices.

RMS norms also come before the attention's output projection and before the feed-forward's down projection. Gates are
squared ReLU (bitnet-b1.58: the 2B and later models) or SiLU (bitnet: the first models). RoPE is "neox", the order of
rows in checkpoints.

All weights of a matrix are -s, 0 or s, with one scale s for the matrix. GGUF files hold these values; IQ1_BN and IQ2_BN
store them in 1.6 and 2 bits with s in each row. Files of other converters, which hold -1, 0 and 1 and store s in a
tensor NAME.scale, run as well. Checkpoints have packed values, or floats that become ternary if config.json says so
(`formats/safetensors/quantized/bitnet.py`). The model's own code rounds activations to 8 bits; quantkit does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from quantkit.archs.common.base import (
    EMBEDDING_RULES,
    OUTPUT_RULES,
    SWIGLU_RULES,
    Config,
    refuse,
    rope_parameters,
)
from quantkit.archs.common.blocks import Attention, FeedForward, HParams
from quantkit.archs.common.decoder import Decoder
from quantkit.archs.common.tensors import LazyTensor, TensorRule
from quantkit.formats.gguf.metadata import Entries

_FIRST_NAMES = {".inner_attn_ln.": ".attn_sub_norm.", ".ffn_layernorm.": ".ffn_sub_norm."}


class BitNet(Decoder):
    """BitNet b1.58 with squared-ReLU gates."""

    name = "bitnet-b1.58"
    hf = ("BitNetForCausalLM", "BitnetForCausalLM")
    model_type = "bitnet"
    rope_style = "neox"
    defaults: ClassVar[dict[str, Any]] = {"rope_theta": 500000.0}
    gate: ClassVar[str] = "relu2"  # hidden_act
    activation: ClassVar[str] = "relu2"  # as blocks.FeedForward says it
    rules = (
        *EMBEDDING_RULES,
        TensorRule("blk.N.attn_norm", "model.layers.N.input_layernorm", f32=True),
        TensorRule("blk.N.attn_q", "model.layers.N.self_attn.q_proj"),
        TensorRule("blk.N.attn_k", "model.layers.N.self_attn.k_proj"),
        TensorRule("blk.N.attn_v", "model.layers.N.self_attn.v_proj"),
        TensorRule("blk.N.attn_sub_norm", "model.layers.N.self_attn.attn_sub_norm", f32=True),
        TensorRule("blk.N.attn_output", "model.layers.N.self_attn.o_proj"),
        *SWIGLU_RULES,
        TensorRule("blk.N.ffn_sub_norm", "model.layers.N.mlp.ffn_sub_norm", f32=True),
        *OUTPUT_RULES,
    )
    EXAMPLE: ClassVar[dict[str, Any]] = {
        "architectures": ["BitNetForCausalLM"],
        "model_type": "bitnet",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "hidden_act": "relu2",
        "tie_word_embeddings": True,
    }

    def accepts(self, config: Config) -> bool:
        return (config.get("hidden_act") in ("silu", "swish")) == (self.gate == "silu")

    def canonical(self, name: str) -> str:
        for first, now in _FIRST_NAMES.items():
            name = name.replace(first, now)
        return super().canonical(name)

    def metadata(self, config: Config) -> Entries:
        refuse(config, "hidden_act", (self.gate,))
        refuse(config, "attention_bias", (False,))
        refuse(rope_parameters(config), "rope_type", ("default",))
        scaling = f"{self.name}.rope.scaling"
        return super().metadata(dict(config) | {"hidden_act": None}) | {
            f"{self.name}.rope.dimension_count": (self.head_dim(config), "u32"),
            f"{scaling}.type": ("linear", "str"),
            f"{scaling}.factor": (1.0, "f32"),
        }

    def config(self, metadata: Mapping[str, object], tensors: Mapping[str, LazyTensor]) -> dict[str, Any]:
        found = super().config(metadata, tensors) | {"hidden_act": self.gate}
        found.pop("rope_scaling", None)
        return found

    def attention(self, hp: HParams, i: int) -> Attention:
        return replace(super().attention(hp, i), sub_norm=hp.norm(f"blk.{i}.attn_sub_norm"))

    def feed_forward(self, hp: HParams, i: int) -> FeedForward:
        return replace(hp.feed_forward(i), activation=self.activation, sub_norm=hp.norm(f"blk.{i}.ffn_sub_norm"))


class FirstBitNet(BitNet):
    """The first BitNets, with SiLU gates."""

    name = "bitnet"
    defaults: ClassVar[dict[str, Any]] = {}
    gate = "silu"
    activation = "swiglu"
    EXAMPLE: ClassVar[dict[str, Any]] = BitNet.EXAMPLE | {"hidden_act": "silu", "num_hidden_layers": 3}
