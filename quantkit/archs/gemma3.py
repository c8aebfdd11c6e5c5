"""gemma3: Gemma 3, its text model.

Embeddings are multiplied by sqrt(n_embd). RMS norms come before and after attention and feed-forward. Queries and keys
are RMS-normed per head before "neox" RoPE. Gates are GELU (tanh form). Every sixth layer attends to all tokens; the
others have a sliding window and their own RoPE base, without scaling.

Checkpoints store norm weights minus 1, GGUF the weights themselves. Scores are times query_pre_attn_scalar^-0.5;
attention.scale holds this factor if it is not head_dim^-0.5. Without the key, models of 62 layers (27B) use
(n_embd / n_head)^-0.5, as other runtimes do, because files of other converters lack the key.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from quantkit.archs.common.base import EMBEDDING_RULES, OUTPUT_RULES, Config, Keys, need, refuse
from quantkit.archs.common.blocks import Attention, FeedForward, Head, HParams, Rope
from quantkit.archs.common.decoder import Decoder, with_head_norms
from quantkit.archs.common.tensors import LazyTensor, TensorRule
from quantkit.archs.common.transforms import add
from quantkit.errors import FormatError, UnsupportedError
from quantkit.formats.gguf.metadata import Entries, shortest
from quantkit.inputs.settings import integer, mapping, real, sequence

_PATTERN, _LOCAL_BASE, _GLOBAL_BASE, _HEAD_DIM = 6, 10000.0, 1000000.0, 256
_LAYERS_27B = 62


def norm_rule(ours: str, theirs: str) -> TensorRule:
    """The rule of a norm whose weight the checkpoint stores minus 1."""
    return TensorRule(ours, theirs, lambda hp: add(1), f32=True)


@dataclass(frozen=True, kw_only=True)
class GemmaHParams(HParams):
    """HParams with the RoPE of local (sliding-window) layers, their pattern and the factor of the scores."""

    local_rope: Rope
    pattern: int  # the last of every `pattern` layers attends to all tokens
    score_scale: float

    def is_local(self, layer: int) -> bool:
        """Whether a layer has a sliding window."""
        return (layer + 1) % self.pattern != 0


class Gemma3(Decoder):
    """Gemma 3, its text model."""

    name = "gemma3"
    hf = ("Gemma3ForCausalLM",)
    model_type = "gemma3_text"
    rope_style = "neox"
    ties_by_default = True
    defaults = {  # noqa: RUF012  data; config.json of the smaller models omits these
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "sliding_window": 4096,
    }
    rules = (
        *EMBEDDING_RULES,
        norm_rule("blk.N.attn_norm", "model.layers.N.input_layernorm"),
        TensorRule("blk.N.attn_q", "model.layers.N.self_attn.q_proj", bias=True),
        norm_rule("blk.N.attn_q_norm", "model.layers.N.self_attn.q_norm"),
        TensorRule("blk.N.attn_k", "model.layers.N.self_attn.k_proj", bias=True),
        norm_rule("blk.N.attn_k_norm", "model.layers.N.self_attn.k_norm"),
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
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 7,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
        "sliding_window": 32,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "tie_word_embeddings": True,
    }

    # ------------------------------------------------------------------------------------------------ checkpoint side

    def head_dim(self, config: Config) -> int:
        return integer(config, "head_dim") or _HEAD_DIM

    def metadata(self, config: Config) -> Entries:
        a = self.name
        refuse(config, "hidden_activation", ("gelu_pytorch_tanh",))
        refuse(config, "use_bidirectional_attention", (False,))
        for key in ("attn_logit_softcapping", "final_logit_softcapping"):
            if config.get(key):
                raise UnsupportedError(f"config.json: {key} = {config[key]} is not supported by quantkit")
        whole, local = _ropes(config)
        given = dict(config) | {"hidden_act": None, "rope_scaling": None, "rope_parameters": whole}
        dim, heads = self.head_dim(config), need(config, "num_attention_heads")
        entries = super().metadata(given) | self.head_lengths(config)
        entries[f"{a}.attention.sliding_window"] = (need(config, "sliding_window"), "u32")
        scalar, layers = real(config, "query_pre_attn_scalar") or _HEAD_DIM, config["num_hidden_layers"]
        if scalar <= 0:
            raise FormatError(f"config.json: query_pre_attn_scalar = {scalar:g}; it has to be a number above 0")
        if scalar != (need(config, "hidden_size") / heads if layers == _LAYERS_27B else dim):
            entries[f"{a}.attention.scale"] = (scalar**-0.5, "f32")
        if local != _LOCAL_BASE:
            entries[f"{a}.rope.freq_base_swa"] = (local, "f32")
        if (pattern := _pattern(config)) != _PATTERN:
            entries[f"{a}.attention.sliding_window_pattern"] = (pattern, "u32")
        return entries

    def config(self, metadata: Mapping[str, object], tensors: Mapping[str, LazyTensor]) -> dict[str, Any]:
        hp = self.hparams(metadata, tensors.keys())
        found = super().config(metadata, tensors) | {
            "head_dim": hp.head_dim_k,
            "query_pre_attn_scalar": round(hp.score_scale**-2),
            "sliding_window": hp.window,
            "sliding_window_pattern": hp.pattern,
            "rope_local_base_freq": shortest(hp.local_rope.base),
            "hidden_activation": "gelu_pytorch_tanh",
        }
        del found["hidden_act"]
        return found

    # --------------------------------------------------------------------------------------------------- runtime side

    def hparams(self, metadata: Mapping[str, object], tensors: Collection[str] = ()) -> GemmaHParams:
        return GemmaHParams(**self.numbers(Keys(self.name, metadata), tensors))

    def numbers(self, keys: Keys, tensors: Collection[str]) -> dict[str, Any]:
        found = super().numbers(keys, tensors)
        base = keys.real("rope.freq_base_swa", _LOCAL_BASE)
        width = found["n_embd"] / found["n_head"] if found["n_layer"] == _LAYERS_27B else found["head_dim_k"]
        return found | {
            "window": keys.number("attention.sliding_window"),
            "local_rope": replace(found["rope"], base=base, scale=1.0, yarn=None),
            "pattern": keys.number("attention.sliding_window_pattern", _PATTERN),
            "score_scale": keys.real("attention.scale", width**-0.5),
        }

    def attention(self, hp: HParams, i: int) -> Attention:
        assert isinstance(hp, GemmaHParams)
        return replace(
            with_head_norms(super().attention(hp, i), hp, i),
            scale=hp.score_scale,
            rope=hp.local_rope if hp.is_local(i) else hp.rope,
            window=hp.window if hp.is_local(i) else None,
            post_norm=hp.norm(f"blk.{i}.post_attention_norm"),
        )

    def feed_forward(self, hp: HParams, i: int) -> FeedForward:
        return replace(hp.feed_forward(i), activation="geglu", post_norm=hp.norm(f"blk.{i}.post_ffw_norm"))

    def head(self, hparams: HParams) -> Head:
        return replace(super().head(hparams), embedding_scale=hparams.n_embd**0.5)


def _ropes(config: Config) -> tuple[dict[str, Any], float]:
    """RoPE parameters of global layers and the RoPE base of local layers, from any form of config.json."""
    given = mapping(config, "rope_parameters")
    refuse(given, "rope_type", ("default",))  # transformers takes what each kind of layers has
    whole: dict[str, Any] = {**mapping(given, "full_attention"), **mapping(config, "rope_scaling")}
    local = mapping(given, "sliding_attention")
    whole.setdefault("rope_theta", config.get("rope_theta") or _GLOBAL_BASE)
    whole["rope_type"] = whole.get("rope_type") or whole.pop("type", None) or "default"
    if whole["rope_type"] not in ("default", "linear"):
        raise UnsupportedError(f"config.json: gemma3 with rope scaling {whole['rope_type']!r}; known: linear")
    if local.get("rope_type", "default") != "default":
        raise UnsupportedError(f"config.json: gemma3 with rope scaling {local['rope_type']!r} in layers with a window")
    return whole, real(local, "rope_theta") or real(config, "rope_local_base_freq") or _LOCAL_BASE


def _pattern(config: Config) -> int:
    """n, if every n-th layer attends to all tokens. UnsupportedError if layer_types says otherwise."""
    layers = integer(config, "num_hidden_layers")
    pattern = integer(config, "sliding_window_pattern") or integer(config, "_sliding_window_pattern") or _PATTERN
    kinds = sequence(config, "layer_types")
    if not kinds:
        return pattern
    intervals: list[int] = [pattern, *range(1, layers + 2)]
    for interval in intervals:
        if list(kinds) == [f"{'sliding' if (i + 1) % interval else 'full'}_attention" for i in range(layers)]:
            return interval
    raise UnsupportedError("config.json: layer_types are not one full_attention after every so many sliding_attention")
