"""olmo2: OLMo 2 and OLMo 3. Norms come after attention and feed-forward, not before.

Queries and keys are RMS-normed over all heads together before "neox" RoPE; SwiGLU. OLMo 3 has a sliding window in three
of four layers, where RoPE is not scaled; the others have YaRN.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from quantkit.archs.common import windows
from quantkit.archs.common.base import EMBEDDING_RULES, OUTPUT_RULES, SWIGLU_RULES, Config, Keys, need
from quantkit.archs.common.blocks import Attention, FeedForward, HParams
from quantkit.archs.common.decoder import Decoder, with_head_norms
from quantkit.archs.common.tensors import LazyTensor, TensorRule
from quantkit.errors import UnsupportedError
from quantkit.formats.gguf.metadata import Entries
from quantkit.inputs.settings import mapping

_EVERY = 4  # of OLMo 3: every fourth layer attends to all tokens
_THETA = 500000.0  # of OLMo 3


@dataclass(frozen=True, kw_only=True)
class Olmo2HParams(HParams):
    """HParams with the layers that have a sliding window."""

    windowed: tuple[bool, ...]


class Olmo2(Decoder):
    """OLMo 2 and OLMo 3."""

    name = "olmo2"
    hf = ("Olmo2ForCausalLM", "Olmo3ForCausalLM")
    model_type = "olmo2"
    rope_style = "neox"
    size_overrides = {"q_norm": lambda s: s["q"], "k_norm": lambda s: s["k"]}  # noqa: RUF012  data
    rules = (
        *EMBEDDING_RULES,
        TensorRule("blk.N.attn_q", "model.layers.N.self_attn.q_proj", bias=True),
        TensorRule("blk.N.attn_q_norm", "model.layers.N.self_attn.q_norm", f32=True),
        TensorRule("blk.N.attn_k", "model.layers.N.self_attn.k_proj", bias=True),
        TensorRule("blk.N.attn_k_norm", "model.layers.N.self_attn.k_norm", f32=True),
        TensorRule("blk.N.attn_v", "model.layers.N.self_attn.v_proj", bias=True),
        TensorRule("blk.N.attn_output", "model.layers.N.self_attn.o_proj", bias=True),
        TensorRule("blk.N.post_attention_norm", "model.layers.N.post_attention_layernorm", f32=True),
        *SWIGLU_RULES[1:],
        TensorRule("blk.N.post_ffw_norm", "model.layers.N.post_feedforward_layernorm", f32=True),
        *OUTPUT_RULES,
    )
    EXAMPLE = {  # noqa: RUF012  data
        "architectures": ["Olmo2ForCausalLM"],
        "model_type": "olmo2",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
    }

    def metadata(self, config: Config) -> Entries:
        if not _is_olmo3(config):
            return super().metadata(config)
        given = dict(config) | {"rope_scaling": None, "rope_parameters": _global_rope(config)}
        windowed = windows.layers_of_config(config, _EVERY)
        return super().metadata(given) | {
            f"{self.name}.attention.sliding_window": (need(config, "sliding_window"), "u32"),
            f"{self.name}.attention.sliding_window_pattern": (list(windowed), "bool"),
        }

    def config(self, metadata: Mapping[str, object], tensors: Mapping[str, LazyTensor]) -> dict[str, Any]:
        hp, found = self.hparams(metadata, tensors.keys()), super().config(metadata, tensors)
        if hp.window is None:
            return found
        theta, scaling = found.pop("rope_theta"), found.pop("rope_scaling", {})
        whole = {"rope_type": "default"} | scaling | {"rope_theta": theta}
        local = {"rope_type": "default", "rope_theta": theta}
        return found | windows.config(hp.windowed) | {
            "architectures": [self.hf[1]],
            "model_type": "olmo3",
            "sliding_window": hp.window,
            "rope_parameters": {"full_attention": whole, "sliding_attention": local},
        }  # fmt: skip

    def hparams(self, metadata: Mapping[str, object], tensors: Collection[str] = ()) -> Olmo2HParams:
        return Olmo2HParams(**self.numbers(Keys(self.name, metadata), tensors))

    def numbers(self, keys: Keys, tensors: Collection[str]) -> dict[str, Any]:
        found = super().numbers(keys, tensors)
        none = (False,) * found["n_layer"]
        return found | {"windowed": windows.layers_of_keys(keys, _EVERY) if found["window"] else none}

    def attention(self, hp: HParams, i: int) -> Attention:
        assert isinstance(hp, Olmo2HParams)
        part = replace(
            with_head_norms(super().attention(hp, i), hp, i),
            norm=None,
            norms_across_heads=True,
            post_norm=hp.norm(f"blk.{i}.post_attention_norm"),
        )
        if not hp.windowed[i]:
            return replace(part, window=None)
        return replace(part, rope=replace(hp.rope, scale=1.0, yarn=None))

    def feed_forward(self, hp: HParams, i: int) -> FeedForward:
        return replace(hp.feed_forward(i), norm=None, post_norm=hp.norm(f"blk.{i}.post_ffw_norm"))


def _is_olmo3(config: Config) -> bool:
    return config.get("architectures") == ["Olmo3ForCausalLM"]


def _global_rope(config: Config) -> dict[str, Any]:
    """RoPE parameters of layers that attend to all tokens. UnsupportedError if the others' base differs, or scales."""
    given = mapping(config, "rope_parameters")
    by_kind = "full_attention" in given or "sliding_attention" in given
    whole = {**(mapping(given, "full_attention") if by_kind else given), **mapping(config, "rope_scaling")}
    local = mapping(given, "sliding_attention")
    whole.setdefault("rope_theta", config.get("rope_theta") or _THETA)
    if (
        local.get("rope_type", "default") != "default"
        or local.get("rope_theta", whole["rope_theta"]) != (whole["rope_theta"])
    ):
        raise UnsupportedError(
            f"config.json: rope_parameters of sliding_attention are {dict(local)}; olmo2 files express the base of "
            f"full_attention, {whole['rope_theta']:g}, without scaling"
        )
    return whole
