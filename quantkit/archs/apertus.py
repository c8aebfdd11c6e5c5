"""apertus: Apertus 8B and 70B (Swiss AI). Grouped-query attention with norms of queries and keys per head, "neox" RoPE
with Llama 3.1's scaling; the feed-forward is down(xIELU(up(y))), without a gate.

Norms are named attention_layernorm and feedforward_layernorm. A layer's xIELU has four numbers, which a checkpoint
stores as tensors and a GGUF file in keys without the architecture's name, as the checkpoint has them:

    model.layers.N.mlp.act_fn.alpha_p    xielu.alpha_p     Xielu.positive is softplus(alpha_p)
    model.layers.N.mlp.act_fn.alpha_n    xielu.alpha_n     Xielu.negative is beta + softplus(alpha_n)
    model.layers.N.mlp.act_fn.beta       xielu.beta
    model.layers.N.mlp.act_fn.eps        xielu.eps         Xielu.limit

transformers takes Llama 3.1's scaling if config.json says nothing about RoPE.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from quantkit.archs.common import layer_scalars
from quantkit.archs.common.base import EMBEDDING_RULES, OUTPUT_RULES, Config, Keys, refuse
from quantkit.archs.common.blocks import Attention, FeedForward, HParams, Xielu
from quantkit.archs.common.checked import Real
from quantkit.archs.common.decoder import Decoder, with_head_norms
from quantkit.archs.common.layer_scalars import LayerScalar
from quantkit.archs.common.tensors import LazyTensor, TensorRule
from quantkit.errors import UnsupportedError
from quantkit.formats.gguf.metadata import Entries
from quantkit.inputs.settings import mapping

_THETA = 12000000.0
_ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 8192}  # fmt: skip
_ACCEPTED: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("hidden_act", ("xielu",)), ("mlp_bias", (False,)), ("qk_norm", (True,)), ("post_norm", (False,)),
)  # fmt: skip
_BOUND = Real(-1e3, 1e3)


def _inverse_softplus(x: float) -> float:
    return float(np.log(np.expm1(x)))


# Those of transformers before training: softplus(alpha_p) = beta + softplus(alpha_n) = 0.8
_SCALARS = tuple(
    LayerScalar(f"xielu.{name}", f"model.layers.N.mlp.act_fn.{name}", shape, initial, _BOUND)
    for name, shape, initial in (
        ("alpha_p", (1,), _inverse_softplus(0.8)), ("alpha_n", (1,), _inverse_softplus(0.3)), ("beta", (), 0.5),
        ("eps", (), -1e-6),
    )
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ApertusHParams(HParams):
    """Hyperparameters, with the activation of each layer."""

    activations: tuple[Xielu, ...]


class Apertus(Decoder):
    """Apertus 8B and 70B."""

    name = "apertus"
    hf = ("ApertusForCausalLM",)
    model_type = "apertus"
    rope_style = "neox"
    defaults: ClassVar[Mapping[str, object]] = {"rms_norm_eps": 1e-5}
    layer_scalars = _SCALARS
    rules = (
        *EMBEDDING_RULES,
        TensorRule("blk.N.attn_norm", "model.layers.N.attention_layernorm", f32=True),
        TensorRule("blk.N.attn_q", "model.layers.N.self_attn.q_proj", bias=True),
        TensorRule("blk.N.attn_q_norm", "model.layers.N.self_attn.q_norm", f32=True),
        TensorRule("blk.N.attn_k", "model.layers.N.self_attn.k_proj", bias=True),
        TensorRule("blk.N.attn_k_norm", "model.layers.N.self_attn.k_norm", f32=True),
        TensorRule("blk.N.attn_v", "model.layers.N.self_attn.v_proj", bias=True),
        TensorRule("blk.N.attn_output", "model.layers.N.self_attn.o_proj", bias=True),
        TensorRule("blk.N.ffn_norm", "model.layers.N.feedforward_layernorm", f32=True),
        TensorRule("blk.N.ffn_up", "model.layers.N.mlp.up_proj"),
        TensorRule("blk.N.ffn_down", "model.layers.N.mlp.down_proj"),
        *OUTPUT_RULES,
    )
    EXAMPLE: ClassVar[dict[str, Any]] = {
        "architectures": ["ApertusForCausalLM"],
        "model_type": "apertus",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
                            "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
        "hidden_act": "xielu",
        "attention_bias": False,
        "tie_word_embeddings": False,
    }  # fmt: skip

    # ------------------------------------------------------------------------------------------------ checkpoint side

    def metadata(self, config: Config) -> Entries:
        for key, accepted in _ACCEPTED:
            refuse(config, key, accepted)
        given = _with_rope(config)
        entries = super().metadata({**given, "hidden_act": None})
        entries[f"{self.name}.rope.dimension_count"] = (self.head_dim(given), "u32")
        if config.get("head_dim"):
            entries |= self.head_lengths(given)
        layers, _ = entries[f"{self.name}.block_count"]
        return entries | layer_scalars.initial(_SCALARS, layers)

    def generated(self, config: Config) -> dict[str, np.ndarray]:
        return super().generated(_with_rope(config))

    def config(self, metadata: Mapping[str, object], tensors: Mapping[str, LazyTensor]) -> dict[str, Any]:
        hp, found = self.hparams(metadata, tensors.keys()), super().config(metadata, tensors)
        found.setdefault("rope_scaling", {"rope_type": "default"})  # without it transformers takes llama3
        if hp.has_own_head_dim:
            found["head_dim"] = hp.head_dim_k
        return found | {"hidden_act": "xielu", "qk_norm": True, "post_norm": False, "mlp_bias": False}

    # --------------------------------------------------------------------------------------------------- runtime side

    def hparams(self, metadata: Mapping[str, object], tensors: Collection[str] = ()) -> HParams:
        found = self.numbers(Keys(self.name, metadata), tensors)
        columns = (scalar.values(metadata, found["n_layer"]) for scalar in _SCALARS)
        return ApertusHParams(**found, activations=tuple(_xielu(*numbers) for numbers in zip(*columns)))

    def attention(self, hp: HParams, i: int) -> Attention:
        return with_head_norms(super().attention(hp, i), hp, i)

    def feed_forward(self, hp: HParams, i: int) -> FeedForward:
        assert isinstance(hp, ApertusHParams)
        up, down = (hp.linear(f"blk.{i}.ffn_{name}") for name in ("up", "down"))
        return FeedForward(hp.norm(f"blk.{i}.ffn_norm"), up, up, down, activation=hp.activations[i])


def _xielu(alpha_p: float, alpha_n: float, beta: float, eps: float) -> Xielu:
    """The activation of a layer, computed in float64."""
    positive, negative = (float(np.logaddexp(0, alpha)) for alpha in (alpha_p, alpha_n))
    return Xielu(positive, beta + negative, beta, eps)


def _with_rope(config: Config) -> Config:
    """The config.json with what transformers assumes about RoPE. UnsupportedError where its versions differ."""
    if config.get("rope_parameters") is not None or mapping(config, "rope_scaling"):
        return {**config, "rope_theta": config.get("rope_theta") or _THETA}
    theta = config.get("rope_theta")
    if theta not in (None, _THETA):
        raise UnsupportedError(
            f"config.json: rope_theta = {theta!r:.80} without rope_scaling: transformers 5 ignores it, 4 does not; add "
            'rope_scaling, {"rope_type": "default"} for none'
        )
    return {**config, "rope_parameters": {**_ROPE, "rope_theta": _THETA}}
