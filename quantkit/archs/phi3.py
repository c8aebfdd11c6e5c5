"""phi3: Phi-3, Phi-3.5 mini and Phi-4. "neox" RoPE, SwiGLU; attn_qkv holds q, k and v, ffn_up gate and up.

The rows of these tensors are those of q, then k, then v, and of gate, then of up, as checkpoints have them.

longrope: frequencies are divided by rope_factors_short.weight, or by rope_factors_long.weight where the context has
more positions than the original one. cos and sin are multiplied by rope.scaling.attn_factor,
sqrt(1 + ln(factor) / ln(original context)) with factor = max_position_embeddings / original context. transformers takes
the length of the sequence for the context; quantkit takes the size of the KV cache, as llama.cpp does.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from quantkit.archs.common.base import EMBEDDING_RULES, OUTPUT_RULES, Config, Keys, need, rope_parameters
from quantkit.archs.common.blocks import Attention, FeedForward, HParams
from quantkit.archs.common.decoder import Decoder
from quantkit.archs.common.fused import gate_up, with_qkv
from quantkit.archs.common.tensors import LazyTensor, TensorRule
from quantkit.errors import FormatError, UnsupportedError
from quantkit.formats.gguf.metadata import Entries, shortest
from quantkit.inputs.settings import integer, real, sequence

_FACTORS = {"long_factor": "rope_factors_long.weight", "short_factor": "rope_factors_short.weight"}
_LONG, _SHORT = _FACTORS.values()
_ORIGINAL = 4096  # transformers' default


class Phi3(Decoder):
    """Phi-3, Phi-3.5 mini and Phi-4."""

    name = "phi3"
    hf = ("Phi3ForCausalLM",)
    model_type = "phi3"
    rope_style = "neox"
    rotary_fraction = 1.0
    biased = ()
    size_overrides = {  # noqa: RUF012  data
        "qkv": lambda s: s["q"] + s["k"] + s["v"],
        "up_ff": lambda s: 2 * s["ff"],
    }
    rules = (
        *EMBEDDING_RULES,
        TensorRule("blk.N.attn_norm", "model.layers.N.input_layernorm", f32=True),
        TensorRule("blk.N.attn_qkv", "model.layers.N.self_attn.qkv_proj"),
        TensorRule("blk.N.attn_output", "model.layers.N.self_attn.o_proj"),
        TensorRule("blk.N.ffn_norm", "model.layers.N.post_attention_layernorm", f32=True),
        TensorRule("blk.N.ffn_up", "model.layers.N.mlp.gate_up_proj"),
        TensorRule("blk.N.ffn_down", "model.layers.N.mlp.down_proj"),
        *OUTPUT_RULES,
    )
    EXAMPLE = {  # noqa: RUF012  data
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "vocab_size": 320,
        "hidden_size": 128,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "rope_type": "longrope",
            "short_factor": [1 + i / 16 for i in range(16)],
            "long_factor": [1 + i / 2 for i in range(16)],
        },
        "partial_rotary_factor": 1.0,
        "sliding_window": 200,
        "hidden_act": "silu",
        "pad_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": False,
    }

    # ------------------------------------------------------------------------------------------------ checkpoint side

    def metadata(self, config: Config) -> Entries:
        a, parameters = self.name, _parameters(config)
        original = _original_context(config)
        default = {"rope_type": "default", "rope_theta": parameters["rope_theta"]}
        given = dict(config) | {"rope_scaling": None, "rope_parameters": default}
        entries = super().metadata(given) | {
            f"{a}.rope.dimension_count": (self.rope_dim(config), "u32"),
            f"{a}.rope.scaling.original_context_length": (original, "u32"),
            f"{a}.attention.sliding_window": (integer(config, "sliding_window") or 0, "u32"),
        }
        if parameters["rope_type"] == "longrope":
            usual = _attention_factor(need(config, "max_position_embeddings"), original)
            factor = real(parameters, "attention_factor") or usual
            entries[f"{a}.rope.scaling.attn_factor"] = (factor, "f32")
        return entries

    def generated(self, config: Config) -> dict[str, np.ndarray]:
        parameters = _parameters(config)
        if parameters["rope_type"] != "longrope":
            return {}
        found = {}
        for theirs, ours in _FACTORS.items():
            values = sequence(parameters, theirs)
            if len(values) != self.rope_dim(config) // 2 or not all(isinstance(v, (int, float)) for v in values):
                raise FormatError(
                    f"config.json: {theirs} of longrope has {len(values)} entries; it has to be "
                    f"{self.rope_dim(config) // 2} numbers, one for each pair of elements that get RoPE"
                )
            found[ours] = np.array(values, np.float32)
        return found

    def is_generated(self, name: str) -> bool:
        return name in (_LONG, _SHORT)

    def config(self, metadata: Mapping[str, object], tensors: Mapping[str, LazyTensor]) -> dict[str, Any]:
        hp, keys = self.hparams(metadata, tensors.keys()), Keys(self.name, metadata)
        found = super().config(metadata, tensors)
        del found["attention_bias"]
        found["sliding_window"] = hp.window
        if original := keys.number("rope.scaling.original_context_length", 0):
            found["original_max_position_embeddings"] = original
        if hp.rope.long_factors is not None:
            parameters: dict[str, Any] = {"type": "longrope"}
            if hp.rope.magnitude != np.float32(_attention_factor(hp.n_ctx_train, hp.rope.short_context)):
                parameters["attention_factor"] = shortest(hp.rope.magnitude)
            for theirs, ours in _FACTORS.items():
                parameters[theirs] = [shortest(x) for x in tensors[ours].dequantize()]
            found["rope_scaling"] = parameters
        return found

    # --------------------------------------------------------------------------------------------------- runtime side

    def numbers(self, keys: Keys, tensors: Collection[str]) -> dict[str, Any]:
        found = super().numbers(keys, tensors)
        there = [name for name in (_LONG, _SHORT) if name in tensors]
        if len(there) == 1:
            raise FormatError(f"there is {there[0]}, but not the factors of the other context")
        if not there:
            return found
        return found | {
            "rope": replace(
                found["rope"],
                factors=_SHORT,
                long_factors=_LONG,
                short_context=keys.number("rope.scaling.original_context_length", found["n_ctx_train"]),
                magnitude=keys.real("rope.scaling.attn_factor", 1.0),
            )
        }

    def attention(self, hp: HParams, i: int) -> Attention:
        return with_qkv(super().attention(hp, i), hp, i)

    def feed_forward(self, hp: HParams, i: int) -> FeedForward:
        return gate_up(hp, i)


def _parameters(config: Config) -> dict[str, Any]:
    """RoPE parameters. UnsupportedError for a scaling other than longrope, whose old names are su and yarn."""
    parameters = dict(rope_parameters(config))
    if parameters["rope_type"] in ("su", "yarn"):
        parameters["rope_type"] = "longrope"
    if parameters["rope_type"] not in ("default", "longrope"):
        raise UnsupportedError(f"config.json: phi3 with rope scaling {parameters['rope_type']!r}; known: longrope")
    return parameters


def _attention_factor(context: int, original: int) -> float:
    """The usual factor of cos and sin."""
    if original < 2:
        raise FormatError(f"the original context of longrope is {original}; it has to be 2 or more")
    return math.sqrt(1 + math.log(context / original) / math.log(original)) if context > original else 1.0


def _original_context(config: Config) -> int:
    stated = integer(config, "original_max_position_embeddings")
    return stated or integer(_parameters(config), "original_max_position_embeddings") or _ORIGINAL
