"""gemma2: Gemma 2.

Embeddings are multiplied by sqrt(n_embd). RMS norms come before and after attention and feed-forward; checkpoints store
their weights minus 1. "neox" RoPE. Gates are GELU (tanh form). Layers 0, 2, 4, … have a sliding window. Scores s become
c tanh(s / c) before softmax (attn_logit_softcapping), and logits likewise with another c (final_logit_softcapping).

Scores are times query_pre_attn_scalar^-0.5; attention.scale holds this factor if it is not head_dim^-0.5. Without the
key, models of 46 layers (27B) use (n_embd / n_head)^-0.5, as other runtimes do, because files of other converters lack
the key.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from quantkit.archs.common import windows
from quantkit.archs.common.base import EMBEDDING_RULES, OUTPUT_RULES, Config, Keys, need, refuse
from quantkit.archs.common.blocks import Attention, FeedForward, Head, HParams
from quantkit.archs.common.decoder import Decoder
from quantkit.archs.common.tensors import LazyTensor, TensorRule
from quantkit.archs.gemma3 import norm_rule
from quantkit.errors import FormatError, UnsupportedError
from quantkit.formats.gguf.metadata import Entries, shortest
from quantkit.inputs.settings import integer, real

_EVERY = 2  # every second layer attends to all tokens; all runtimes fix this number
_HEAD_DIM, _SCALAR, _WINDOW = 256, 256, 4096
_LAYERS_27B = 46
_CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}  # in config.json and in GGUF, and the default


@dataclass(frozen=True, kw_only=True)
class Gemma2HParams(HParams):
    """HParams with the factor of the scores and the two soft caps."""

    score_scale: float
    score_cap: float | None
    logit_cap: float | None


class Gemma2(Decoder):
    """Gemma 2."""

    name = "gemma2"
    hf = ("Gemma2ForCausalLM",)
    model_type = "gemma2"
    rope_style = "neox"
    ties_by_default = True
    defaults = {  # noqa: RUF012  data
        "sliding_window": _WINDOW,
        "rms_norm_eps": 1e-6,
    }
    rules = (
        *EMBEDDING_RULES,
        norm_rule("blk.N.attn_norm", "model.layers.N.input_layernorm"),
        TensorRule("blk.N.attn_q", "model.layers.N.self_attn.q_proj", bias=True),
        TensorRule("blk.N.attn_k", "model.layers.N.self_attn.k_proj", bias=True),
        TensorRule("blk.N.attn_v", "model.layers.N.self_attn.v_proj", bias=True),
        TensorRule("blk.N.attn_output", "model.layers.N.self_attn.o_proj", bias=True),
        norm_rule("blk.N.post_attention_norm", "model.layers.N.post_attention_layernorm"),
        norm_rule("blk.N.ffn_norm", "model.layers.N.pre_feedforward_layernorm"),
        TensorRule("blk.N.ffn_gate", "model.layers.N.mlp.gate_proj"),
        TensorRule("blk.N.ffn_up", "model.layers.N.mlp.up_proj"),
        TensorRule("blk.N.ffn_down", "model.layers.N.mlp.down_proj"),
        norm_rule("blk.N.post_ffw_norm", "model.layers.N.post_feedforward_layernorm"),
        norm_rule("output_norm", "model.norm"),
        *(rule for rule in OUTPUT_RULES if rule.gguf == "output"),
    )
    EXAMPLE = {  # noqa: RUF012  data
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
        "sliding_window": 32,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 3.0,
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "tie_word_embeddings": True,
    }

    # ------------------------------------------------------------------------------------------------ checkpoint side

    def head_dim(self, config: Config) -> int:
        return integer(config, "head_dim") or _HEAD_DIM

    def metadata(self, config: Config) -> Entries:
        refuse(config, "hidden_activation", ("gelu_pytorch_tanh",))
        refuse(config, "use_bidirectional_attention", (False,))
        layers, heads = need(config, "num_hidden_layers"), need(config, "num_attention_heads")
        if windows.layers_of_config(config, _EVERY) != _windowed(layers):
            raise UnsupportedError(
                f"config.json: layer_types differ from full_attention in every {_EVERY}nd layer, which {self.name} "
                "files cannot express"
            )
        entries = super().metadata(dict(config) | {"hidden_act": None}) | self.head_lengths(config)
        entries[f"{self.name}.attention.sliding_window"] = (integer(config, "sliding_window") or _WINDOW, "u32")
        scalar = real(config, "query_pre_attn_scalar") or _SCALAR
        if scalar <= 0:
            raise FormatError(f"config.json: query_pre_attn_scalar = {scalar:g}; it has to be a number above 0")
        if scalar != (need(config, "hidden_size") / heads if layers == _LAYERS_27B else self.head_dim(config)):
            entries[f"{self.name}.attention.scale"] = (scalar**-0.5, "f32")
        for key, usual in _CAPS.items():  # null in config.json, and 0 in GGUF, is no cap
            entries[f"{self.name}.{key}"] = (real(config, key) if key in config else usual, "f32")
        return entries

    def config(self, metadata: Mapping[str, object], tensors: Mapping[str, LazyTensor]) -> dict[str, Any]:
        hp = self.hparams(metadata, tensors.keys())
        found = super().config(metadata, tensors) | windows.config(_windowed(hp.n_layer)) | {
            "head_dim": hp.head_dim_k,
            "query_pre_attn_scalar": round(hp.score_scale**-2),
            "sliding_window": hp.window,
            "hidden_activation": "gelu_pytorch_tanh",
        }  # fmt: skip
        del found["hidden_act"]
        caps = (hp.score_cap, hp.logit_cap)
        return found | {key: None if cap is None else shortest(cap) for key, cap in zip(_CAPS, caps)}

    # --------------------------------------------------------------------------------------------------- runtime side

    def hparams(self, metadata: Mapping[str, object], tensors: Collection[str] = ()) -> Gemma2HParams:
        return Gemma2HParams(**self.numbers(Keys(self.name, metadata), tensors))

    def numbers(self, keys: Keys, tensors: Collection[str]) -> dict[str, Any]:
        found = super().numbers(keys, tensors)
        width = found["n_embd"] / found["n_head"] if found["n_layer"] == _LAYERS_27B else found["head_dim_k"]
        score_cap, logit_cap = (keys.real(key, usual) or None for key, usual in _CAPS.items())
        return found | {
            "window": keys.number("attention.sliding_window", _WINDOW),
            "score_scale": keys.real("attention.scale", width**-0.5),
            "score_cap": score_cap,
            "logit_cap": logit_cap,
        }

    def attention(self, hp: HParams, i: int) -> Attention:
        assert isinstance(hp, Gemma2HParams)
        return replace(
            super().attention(hp, i),
            scale=hp.score_scale,
            window=hp.window if _windowed(hp.n_layer)[i] else None,
            softcap=hp.score_cap,
            post_norm=hp.norm(f"blk.{i}.post_attention_norm"),
        )

    def feed_forward(self, hp: HParams, i: int) -> FeedForward:
        return replace(hp.feed_forward(i), activation="geglu", post_norm=hp.norm(f"blk.{i}.post_ffw_norm"))

    def head(self, hparams: HParams) -> Head:
        assert isinstance(hparams, Gemma2HParams)
        return replace(super().head(hparams), embedding_scale=hparams.n_embd**0.5, softcap=hparams.logit_cap)


def _windowed(layers: int) -> tuple[bool, ...]:
    return tuple((i + 1) % _EVERY != 0 for i in range(layers))
