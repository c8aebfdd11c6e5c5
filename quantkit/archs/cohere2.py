"""cohere2: Command R7B and Command A. Attention and feed-forward are computed in parallel, from one LayerNorm.

Norms subtract the mean and have no bias. Three of four layers have a sliding window and RoPE, which rotates
neighbouring elements, the order of checkpoints; the others attend to all tokens and have no RoPE. Logits are multiplied
by logit_scale. The output matrix is the embedding.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from quantkit.archs.common import windows
from quantkit.archs.common.base import EMBEDDING_RULES, OUTPUT_RULES, Config, Keys, need
from quantkit.archs.common.blocks import Attention, Block, Head, HParams, Part
from quantkit.archs.common.decoder import Decoder
from quantkit.archs.common.tensors import LazyTensor, TensorRule
from quantkit.errors import FormatError, UnsupportedError
from quantkit.formats.gguf.metadata import Entries, shortest
from quantkit.inputs.settings import real

_EVERY = 4  # every fourth layer attends to all tokens; all runtimes fix this number
_LOGIT_SCALE = 0.0625


@dataclass(frozen=True, kw_only=True)
class Cohere2HParams(HParams):
    """HParams with the factor of the logits."""

    logit_scale: float


class Cohere2(Decoder):
    """Command R7B and Command A."""

    name = "cohere2"
    hf = ("Cohere2ForCausalLM",)
    model_type = "cohere2"
    rope_style = "norm"
    layer_norm_eps = "layer_norm_eps"
    ties_by_default = True
    defaults = {"layer_norm_eps": 1e-5}  # noqa: RUF012  data
    rules: ClassVar[tuple[TensorRule, ...]] = (
        *EMBEDDING_RULES,
        TensorRule("blk.N.attn_norm", "model.layers.N.input_layernorm", f32=True),
        TensorRule("blk.N.attn_q", "model.layers.N.self_attn.q_proj", bias=True),
        TensorRule("blk.N.attn_k", "model.layers.N.self_attn.k_proj", bias=True),
        TensorRule("blk.N.attn_v", "model.layers.N.self_attn.v_proj", bias=True),
        TensorRule("blk.N.attn_output", "model.layers.N.self_attn.o_proj", bias=True),
        TensorRule("blk.N.ffn_gate", "model.layers.N.mlp.gate_proj"),
        TensorRule("blk.N.ffn_up", "model.layers.N.mlp.up_proj"),
        TensorRule("blk.N.ffn_down", "model.layers.N.mlp.down_proj"),
        *OUTPUT_RULES,
    )
    EXAMPLE = {  # noqa: RUF012  data
        "architectures": ["Cohere2ForCausalLM"],
        "model_type": "cohere2",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "sliding_window": 32,
        "max_position_embeddings": 256,
        "layer_norm_eps": 1e-5,
        "rope_theta": 50000.0,
        "logit_scale": 0.25,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": True,
    }

    def metadata(self, config: Config) -> Entries:
        scale = real(config, "logit_scale") or _LOGIT_SCALE
        if scale <= 0:
            raise FormatError(f"config.json: logit_scale = {scale:g}; it has to be a number above 0")
        return super().metadata(config) | self.window_entries(config) | {
            f"{self.name}.attention.sliding_window": (need(config, "sliding_window"), "u32"),
            f"{self.name}.logit_scale": (scale, "f32"),
            f"{self.name}.rope.dimension_count": (self.head_dim(config), "u32"),
        }  # fmt: skip

    def window_entries(self, config: Config) -> Entries:
        """The GGUF keys that say which layers have a window: here none, as all runtimes fix the pattern."""
        if windows.layers_of_config(config, _EVERY) != _windowed(need(config, "num_hidden_layers")):
            raise UnsupportedError(
                f"config.json: layer_types differ from full_attention in every {_EVERY}th layer, which {self.name} "
                "files cannot express"
            )
        return {}

    def config(self, metadata: Mapping[str, object], tensors: Mapping[str, LazyTensor]) -> dict[str, Any]:
        hp = self.hparams(metadata, tensors.keys())
        return super().config(metadata, tensors) | windows.config(_windowed(hp.n_layer)) | {
            "sliding_window": hp.window,
            "logit_scale": shortest(hp.logit_scale),
        }  # fmt: skip

    def hparams(self, metadata: Mapping[str, object], tensors: Collection[str] = ()) -> Cohere2HParams:
        return Cohere2HParams(**self.numbers(Keys(self.name, metadata), tensors))

    def numbers(self, keys: Keys, tensors: Collection[str]) -> dict[str, Any]:
        return super().numbers(keys, tensors) | {"logit_scale": keys.real("logit_scale")}

    def block(self, hp: HParams, i: int) -> Block:
        return replace(super().block(hp, i), parallel=True)

    def attention(self, hp: HParams, i: int) -> Attention:
        part = super().attention(hp, i)
        window = hp.window if self.has_window(hp, i) else None
        return replace(part, window=window, rope=hp.rope if self.has_rope(hp, i) else hp.rope.without_rotation())

    def has_window(self, hp: HParams, i: int) -> bool:
        """Whether layer i attends to a sliding window, not to all tokens."""
        return _windowed(hp.n_layer)[i]

    def has_rope(self, hp: HParams, i: int) -> bool:
        """Whether layer i rotates queries and keys."""
        return self.has_window(hp, i)

    def feed_forward(self, hp: HParams, i: int) -> Part:
        return hp.feed_forward(i, "attn_norm")

    def head(self, hparams: HParams) -> Head:
        assert isinstance(hparams, Cohere2HParams)
        head = super().head(hparams)
        return replace(head, output=replace(head.output, factor=hparams.logit_scale))


def _windowed(layers: int) -> tuple[bool, ...]:
    return tuple((i + 1) % _EVERY != 0 for i in range(layers))
