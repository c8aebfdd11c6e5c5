"""exaone4: EXAONE 4. Norms come after attention and feed-forward, not before.

Grouped-query attention; queries and keys are RMS-normed per head before "neox" RoPE; SwiGLU. The 32B model has a
sliding window in three of four layers; the others attend to all tokens and have no RoPE. Files without the key
attention.sliding_window have no windows, and RoPE in all layers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from quantkit.archs.common import windows
from quantkit.archs.common.base import EMBEDDING_RULES, OUTPUT_RULES, Config, Keys
from quantkit.archs.common.blocks import Attention, FeedForward, HParams
from quantkit.archs.common.decoder import Decoder, with_head_norms
from quantkit.archs.common.tensors import LazyTensor, TensorRule
from quantkit.errors import UnsupportedError
from quantkit.formats.gguf.metadata import Entries
from quantkit.inputs.settings import integer

_EVERY = 4  # every fourth layer attends to all tokens
_WINDOW = 4096  # where config.json has no sliding_window; null is none


@dataclass(frozen=True, kw_only=True)
class Exaone4HParams(HParams):
    """HParams with the layers that have a sliding window."""

    windowed: tuple[bool, ...]


class Exaone4(Decoder):
    """EXAONE 4."""

    name = "exaone4"
    hf = ("Exaone4ForCausalLM",)
    model_type = "exaone4"
    rope_style = "neox"
    rules = (
        *EMBEDDING_RULES,
        TensorRule("blk.N.attn_q", "model.layers.N.self_attn.q_proj"),
        TensorRule("blk.N.attn_q_norm", "model.layers.N.self_attn.q_norm", f32=True),
        TensorRule("blk.N.attn_k", "model.layers.N.self_attn.k_proj"),
        TensorRule("blk.N.attn_k_norm", "model.layers.N.self_attn.k_norm", f32=True),
        TensorRule("blk.N.attn_v", "model.layers.N.self_attn.v_proj"),
        TensorRule("blk.N.attn_output", "model.layers.N.self_attn.o_proj"),
        TensorRule("blk.N.post_attention_norm", "model.layers.N.post_attention_layernorm", f32=True),
        TensorRule("blk.N.ffn_gate", "model.layers.N.mlp.gate_proj"),
        TensorRule("blk.N.ffn_up", "model.layers.N.mlp.up_proj"),
        TensorRule("blk.N.ffn_down", "model.layers.N.mlp.down_proj"),
        TensorRule("blk.N.post_ffw_norm", "model.layers.N.post_feedforward_layernorm", f32=True),
        *OUTPUT_RULES,
    )
    EXAMPLE = {  # noqa: RUF012  data
        "architectures": ["Exaone4ForCausalLM"],
        "model_type": "exaone4",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "sliding_window": 32,
        "sliding_window_pattern": 4,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }

    def metadata(self, config: Config) -> Entries:
        entries = super().metadata(config)
        if config.get("head_dim"):
            entries |= self.head_lengths(config)
        if window := integer({"sliding_window": _WINDOW, **config}, "sliding_window"):
            windowed = windows.layers_of_config(dict(config) | _numbered_pattern(config), _EVERY)
            entries[f"{self.name}.attention.sliding_window"] = (window, "u32")
            entries[f"{self.name}.attention.sliding_window_pattern"] = (list(windowed), "bool")
        return entries

    def config(self, metadata: Mapping[str, object], tensors: Mapping[str, LazyTensor]) -> dict[str, Any]:
        hp, found = self.hparams(metadata, tensors.keys()), super().config(metadata, tensors)
        del found["attention_bias"]
        if hp.has_own_head_dim:
            found["head_dim"] = hp.head_dim_k
        return found | windows.config(hp.windowed) | {"sliding_window": hp.window}

    def hparams(self, metadata: Mapping[str, object], tensors: Collection[str] = ()) -> Exaone4HParams:
        return Exaone4HParams(**self.numbers(Keys(self.name, metadata), tensors))

    def numbers(self, keys: Keys, tensors: Collection[str]) -> dict[str, Any]:
        found = super().numbers(keys, tensors)
        none = (False,) * found["n_layer"]
        return found | {"windowed": windows.layers_of_keys(keys, _EVERY) if found["window"] else none}

    def attention(self, hp: HParams, i: int) -> Attention:
        assert isinstance(hp, Exaone4HParams)
        part = replace(
            with_head_norms(super().attention(hp, i), hp, i),
            norm=None,
            post_norm=hp.norm(f"blk.{i}.post_attention_norm"),
        )
        if hp.window is None or hp.windowed[i]:
            return part
        return replace(part, window=None, rope=hp.rope.without_rotation())

    def feed_forward(self, hp: HParams, i: int) -> FeedForward:
        return replace(hp.feed_forward(i), norm=None, post_norm=hp.norm(f"blk.{i}.post_ffw_norm"))


def _numbered_pattern(config: Config) -> dict[str, int]:
    """sliding_window_pattern as a number: config.json may spell it "LLLG", one letter for each of so many layers."""
    pattern = config.get("sliding_window_pattern")
    if not isinstance(pattern, str):
        return {}
    if not pattern or pattern != "L" * (len(pattern) - 1) + "G":
        raise UnsupportedError(f"config.json: sliding_window_pattern = {pattern!r:.40}; known are L, … and a last G")
    return {"sliding_window_pattern": len(pattern)}
