"""mistral3: Ministral 3, its text model. Llama with YaRN and position-dependent query scaling.

The query at position p is multiplied by 1 + beta ln(1 + floor(p / n)), with n the original context of YaRN. This keeps
attention sharp in long contexts. GGUF stores beta as attention.temperature_scale.

The rows of q and k are in the order of "norm" RoPE, as llama's. rope.scaling.yarn_log_multiplier is mscale_all_dim:
YaRN's factor of cos and sin is m(mscale) / m(mscale_all_dim) with m(x) = 1 + 0.1 x ln(factor). Mistral Small 3 has the
architecture llama.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from quantkit.archs.common import rope
from quantkit.archs.common.base import (
    EMBEDDING_RULES,
    OUTPUT_RULES,
    SWIGLU_RULES,
    Config,
    Keys,
    refuse,
    rope_parameters,
)
from quantkit.archs.common.blocks import Attention, HParams, Temperature
from quantkit.archs.common.decoder import Decoder
from quantkit.archs.common.tensors import LazyTensor, TensorRule
from quantkit.archs.llama import rope_order
from quantkit.errors import UnsupportedError
from quantkit.formats.gguf.metadata import Entries, shortest

_MSCALE = ("mscale", "mscale_all_dim")


@dataclass(frozen=True, kw_only=True)
class Mistral3HParams(HParams):
    """HParams with the position-dependent query scaling."""

    temperature: Temperature | None = None


_ROPE = {  # transformers' default
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


class Mistral3(Decoder):
    """Ministral 3, its text model."""

    name = "mistral3"
    hf = ("Ministral3ForCausalLM",)
    model_type = "ministral3"
    rope_style = "norm"
    defaults = {  # noqa: RUF012  data
        "vocab_size": 131072,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 262144,
        "head_dim": 128,
        "tie_word_embeddings": False,
    }
    rules = (
        *EMBEDDING_RULES,
        TensorRule("blk.N.attn_norm", "model.layers.N.input_layernorm", f32=True),
        TensorRule("blk.N.attn_q", "model.layers.N.self_attn.q_proj", rope_order),
        TensorRule("blk.N.attn_k", "model.layers.N.self_attn.k_proj", rope_order),
        TensorRule("blk.N.attn_v", "model.layers.N.self_attn.v_proj"),
        TensorRule("blk.N.attn_output", "model.layers.N.self_attn.o_proj"),
        *SWIGLU_RULES,
        *OUTPUT_RULES,
    )
    EXAMPLE = {  # noqa: RUF012  data
        "architectures": ["Ministral3ForCausalLM"],
        "model_type": "ministral3",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1000000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 32,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }

    def metadata(self, config: Config) -> Entries:
        a = self.name
        refuse(config, "sliding_window", ())
        parameters = dict(rope_parameters(config, _ROPE))
        temperature = rope.temperature_entries(a, parameters)
        scales = [parameters.pop(name, None) for name in _MSCALE]
        if parameters.get("attention_factor") is not None:  # it takes precedence over mscale
            scales = [None, None]
        entries = super().metadata(dict(config) | {"rope_scaling": None, "rope_parameters": parameters})
        entries |= temperature | self.head_lengths(config)
        entries[f"{a}.rope.dimension_count"] = (self.head_dim(config), "u32")
        if any(scales) and parameters["rope_type"] == "yarn":
            if not all(scales) or scales[0] not in (1, scales[1]):
                raise UnsupportedError(
                    f"config.json: yarn with mscale {scales[0]} and mscale_all_dim {scales[1]}; {a} files say the "
                    "second number, the first has to be 1"
                )
            factor = 1.0 if scales[0] == scales[1] else scales[1]
            entries[f"{a}.rope.scaling.yarn_log_multiplier"] = (float(factor), "f32")
        return entries

    def config(self, metadata: Mapping[str, object], tensors: Mapping[str, LazyTensor]) -> dict[str, Any]:
        hp, keys = self.hparams(metadata, tensors.keys()), Keys(self.name, metadata)
        assert isinstance(hp, Mistral3HParams)
        found = super().config(metadata, tensors) | {"head_dim": hp.head_dim_k}
        found = rope.with_temperature(found, hp.temperature, hp.n_ctx_train)
        if multiplier := keys.get("rope.scaling.yarn_log_multiplier"):
            found["rope_parameters"] |= {"mscale": 1.0, "mscale_all_dim": shortest(multiplier)}
        return found

    def hparams(self, metadata: Mapping[str, object], tensors: Collection[str] = ()) -> Mistral3HParams:
        return Mistral3HParams(**self.numbers(Keys(self.name, metadata), tensors))

    def numbers(self, keys: Keys, tensors: Collection[str]) -> dict[str, Any]:
        found = super().numbers(keys, tensors)
        scaled, multiplier = found["rope"], keys.real("rope.scaling.yarn_log_multiplier", 0.0)
        if scaled.yarn is not None and multiplier:
            logarithm = math.log(1 / scaled.scale)
            found["rope"] = replace(
                scaled, yarn=replace(scaled.yarn, attn_factor=1 / (1 + 0.1 * multiplier * logarithm))
            )
        return found | {"temperature": rope.temperature(keys)}

    def attention(self, hp: HParams, i: int) -> Attention:
        assert isinstance(hp, Mistral3HParams)
        return replace(super().attention(hp, i), temperature=hp.temperature)
