"""mimo2: MiMo-V2-Flash. Layers with a sliding window have twice the KV heads, sinks and a RoPE base of their own.

Heads have more elements in keys than in values; "neox" RoPE of part of each head. Values are multiplied by
attention.value_scale. The leading layers are dense, the others have routed experts that are selected by sigmoid scores
plus a bias; there are no shared ones. GGUF has head_count_kv and sliding_window_pattern (1: a window) for each layer.
MTP layers (`model.mtp.` in checkpoints) are dropped.

The window counts the token itself. config.json of the published checkpoints has `sliding_window_size`, which does not;
llama.cpp's converter writes that number, so its files see one position less than transformers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from quantkit.archs.common import experts
from quantkit.archs.common.base import EMBEDDING_RULES, OUTPUT_RULES, Config, Keys, need, refuse
from quantkit.archs.common.blocks import Attention, HParams, Part, Rope
from quantkit.archs.common.decoder import Decoder
from quantkit.archs.common.tensors import LazyTensor, TensorRule
from quantkit.errors import FormatError, UnsupportedError
from quantkit.formats.gguf.metadata import Entries, shortest
from quantkit.inputs.settings import integer, mapping, real, sequence

_FRACTION = 0.334  # transformers' defaults
_BASE, _LOCAL_BASE = 5000000.0, 10000.0
_EVERY = 6


@dataclass(frozen=True, kw_only=True)
class MiMoHParams(HParams):
    """HParams with what differs between layers with a sliding window and others."""

    local_rope: Rope
    is_local: tuple[bool, ...]  # of each layer
    value_scale: float


def _is_local(hp: MiMoHParams, layer: int) -> bool:
    return hp.is_local[layer]


class MiMo2(Decoder):
    """MiMo-V2-Flash."""

    name = "mimo2"
    hf: ClassVar[tuple[str, ...]] = ("MiMoV2FlashForCausalLM",)
    model_type = "mimo_v2_flash"
    rope_style = "neox"
    rotary_fraction = _FRACTION
    biased: ClassVar[tuple[str, ...]] = ("attn_q", "attn_k", "attn_v")
    rules: ClassVar[tuple[TensorRule, ...]] = (
        *EMBEDDING_RULES,
        TensorRule("blk.N.attn_norm", "model.layers.N.input_layernorm", f32=True),
        TensorRule("blk.N.attn_q", "model.layers.N.self_attn.q_proj"),
        TensorRule("blk.N.attn_k", "model.layers.N.self_attn.k_proj"),
        TensorRule("blk.N.attn_v", "model.layers.N.self_attn.v_proj"),
        TensorRule("blk.N.attn_sinks.weight", "model.layers.N.self_attn.attention_sink_bias", layers=_is_local,
             full_names=True, f32=True),
        TensorRule("blk.N.attn_output", "model.layers.N.self_attn.o_proj"),
        TensorRule("blk.N.ffn_norm", "model.layers.N.post_attention_layernorm", f32=True),
        *experts.dense_rules(),
        experts.choice_rule(),
        *experts.routed_rules(),
        *OUTPUT_RULES,
    )  # fmt: skip
    EXAMPLE: ClassVar[dict[str, Any]] = {
        "architectures": ["MiMoV2FlashForCausalLM"],
        "model_type": "mimo_v2_flash",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "v_head_dim": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "sliding_window": 33,
        "attention_value_scale": 0.707,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 5000000.0, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        },
        "attention_bias": False,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }

    # ------------------------------------------------------------------------------------------------ checkpoint side

    def canonical(self, name: str) -> str:
        return super().canonical(name).replace(".self_attn.sinks", ".self_attn.attention_sink_bias")

    def metadata(self, config: Config) -> Entries:
        a, given = self.name, _settings(config)
        local = [kind == "sliding_attention" for kind in given["layer_types"]]
        heads = need(given, "num_key_value_heads")
        entries = super().metadata(given) | experts.entries(a, given)
        return entries | {
            f"{a}.attention.key_length": (self.head_dim(given), "u32"),
            f"{a}.attention.value_length": (need(given, "v_head_dim"), "u32"),
            f"{a}.attention.head_count_kv": ([heads * 2 if i else heads for i in local], "u32"),
            f"{a}.attention.sliding_window": (given["sliding_window"], "u32"),
            f"{a}.attention.sliding_window_pattern": ([int(i) for i in local], "u32"),
            f"{a}.attention.value_scale": (float(given["attention_value_scale"]), "f32"),
            f"{a}.rope.freq_base_swa": (float(given["local_rope_theta"]), "f32"),
            f"{a}.expert_gating_func": (experts.GATING_NUMBERS["sigmoid"], "u32"),
        }

    def config(self, metadata: Mapping[str, object], tensors: Mapping[str, LazyTensor]) -> dict[str, Any]:
        hp = self.hparams(metadata, tensors.keys())
        found = {
            "architectures": [self.hf[0]],
            "model_type": self.model_type,
            "vocab_size": hp.n_vocab,
            "hidden_size": hp.n_embd,
            "intermediate_size": hp.n_ff,
            "num_hidden_layers": hp.n_main,
            "num_attention_heads": hp.n_head,
            "num_key_value_heads": hp.n_head_kv // 2 if any(hp.is_local) else hp.n_head_kv,
            "head_dim": hp.head_dim_k,
            "v_head_dim": hp.head_dim_v,
            "sliding_window": hp.window,
            "layer_types": [f"{'sliding' if local else 'full'}_attention" for local in hp.is_local],
            "mlp_layer_types": experts.mlp_layer_types(hp),
            "attention_value_scale": shortest(hp.value_scale),
            "max_position_embeddings": hp.n_ctx_train,
            "rms_norm_eps": shortest(hp.norm_eps),
            "attention_bias": False,
            "hidden_act": "silu",
            "tie_word_embeddings": hp.tied,
        }
        part = hp.rope.dim / hp.head_dim_k
        parameters = {
            kind: {"rope_type": "default", "rope_theta": shortest(rope.base), "partial_rotary_factor": part}
            for kind, rope in (("full_attention", hp.rope), ("sliding_attention", hp.local_rope))
        }
        routed = {key: value for key, value in experts.config(hp).items() if key not in _NOT_HERE}
        return found | routed | {"rope_parameters": parameters}

    # --------------------------------------------------------------------------------------------------- runtime side

    def hparams(self, metadata: Mapping[str, object], tensors: Collection[str] = ()) -> MiMoHParams:
        return MiMoHParams(**self.numbers(Keys(self.name, metadata), tensors))

    def numbers(self, keys: Keys, tensors: Collection[str]) -> dict[str, Any]:
        key = f"{self.name}.attention.head_count_kv"
        heads = keys.per_layer("attention.head_count_kv")
        local = [bool(i) for i in keys.per_layer("attention.sliding_window_pattern")]
        found = super().numbers(Keys(self.name, {**keys.metadata, key: max(heads)}), tensors)
        wrong = [i for i, count in enumerate(heads) if not count or found["n_head"] % count]
        if wrong:
            raise FormatError(
                f"metadata key {key}[{wrong[0]}] = {heads[wrong[0]]}; it has to divide {self.name}.attention.head_count"
                f" = {found['n_head']}"
            )
        base = keys.real("rope.freq_base_swa", found["rope"].base)
        return found | experts.numbers(keys, tensors, biased=True) | {
            "kv_heads_of": tuple(heads),
            "is_local": tuple(local),
            "local_rope": replace(found["rope"], base=base),
            "value_scale": keys.real("attention.value_scale", 1.0),
        }  # fmt: skip

    def attention(self, hp: HParams, i: int) -> Attention:
        assert isinstance(hp, MiMoHParams)
        part, local = super().attention(hp, i), hp.is_local[i]
        return replace(
            part,
            v=replace(part.v, factor=hp.value_scale),
            kv_heads=hp.kv_heads_of[i],
            rope=hp.local_rope if local else hp.rope,
            window=hp.window if local else None,
            sinks=f"blk.{i}.attn_sinks.weight" if local else None,
        )

    def feed_forward(self, hp: HParams, i: int) -> Part:
        return experts.feed_forward(hp, i)


_NOT_HERE = ("n_shared_experts", "first_k_dense_replace")


def _settings(config: Config) -> dict[str, Any]:
    """config.json as transformers 5 writes it, from that and from the form of the published checkpoints."""
    refuse(config, "attention_bias", (False,))
    refuse(config, "add_full_attention_sink_bias", (False,))
    refuse(config, "add_swa_attention_sink_bias", (True,))
    refuse(config, "attention_projection_layout", ("split",))
    layers, given = int(need(config, "num_hidden_layers")), dict(config)
    for theirs, ours in (("swa_head_dim", "head_dim"), ("swa_v_head_dim", "v_head_dim"),
                         ("swa_num_attention_heads", "num_attention_heads")):  # fmt: skip
        refuse(config, theirs, (need(config, ours),))
    refuse(config, "swa_num_key_value_heads", (2 * need(config, "num_key_value_heads"),))
    given["layer_types"] = _kinds(config, layers)
    given["mlp_layer_types"] = _feed_forwards(config, layers)
    given["rms_norm_eps"] = config.get("rms_norm_eps") or need(config, "layernorm_epsilon")
    given["routed_scaling_factor"] = real(config, "routed_scaling_factor") or 1.0
    given.setdefault("norm_topk_prob", True)
    if (size := integer(config, "sliding_window_size")) > 0:
        given["sliding_window"] = size + 1
    need(given, "sliding_window")
    scale = config.get("attention_value_scale", 0.707 if "rope_parameters" in config else None)
    given["attention_value_scale"] = 1.0 if scale is None else scale
    parameters = mapping(config, "rope_parameters")
    whole, local = (mapping(parameters, kind) for kind in ("full_attention", "sliding_attention"))
    for part in (whole, local):
        refuse(part, "rope_type", ("default",))
        refuse(part, "partial_rotary_factor", (whole.get("partial_rotary_factor"),))
    refuse(mapping(config, "rope_scaling"), "rope_type", ("default",))
    given |= {"rope_parameters": None, "rope_scaling": None, "first_k_dense_replace": None, "n_shared_experts": None}
    given["rope_theta"] = real(whole, "rope_theta") or real(config, "rope_theta") or _BASE
    given["local_rope_theta"] = real(local, "rope_theta") or real(config, "swa_rope_theta") or _LOCAL_BASE
    given["partial_rotary_factor"] = (
        real(whole, "partial_rotary_factor") or real(config, "partial_rotary_factor") or _FRACTION
    )
    return given


def _kinds(config: Config, layers: int) -> Sequence[object]:
    kinds = list(sequence(config, "layer_types"))
    if not kinds:
        pattern = sequence(config, "hybrid_layer_pattern") or [i > 0 and (i + 1) % _EVERY for i in range(layers)]
        kinds = [f"{'sliding' if local else 'full'}_attention" for local in pattern]
    if len(kinds) < layers or any(kind not in ("full_attention", "sliding_attention") for kind in kinds):
        raise UnsupportedError(
            f"config.json: layer_types = {kinds!r:.80}; each of {layers} layers has to be full_attention or "
            "sliding_attention"
        )
    return kinds[:layers]


def _feed_forwards(config: Config, layers: int) -> list[str]:
    if kinds := sequence(config, "mlp_layer_types"):
        return [str(kind) for kind in kinds]
    routed = config.get("moe_layer_freq")
    if isinstance(routed, (list, tuple)):
        return ["sparse" if i else "dense" for i in routed]
    return ["dense", *["sparse"] * (layers - 1)]
