"""step35: Step 3.5 Flash and Step 3.7 Flash, its text model. Two kinds of attention, experts with clamped SwiGLU.

Layers with a sliding window have more query heads than others, RoPE of whole heads with a base of their own, and no
scaling; the others rotate half of each head, with Llama 3's scaling. GGUF has attention.head_count for each layer, and
rope_freqs.weight has as many divisors as pairs in a whole head, of which the first count. "neox" RoPE, queries and keys
RMS-normed per head. The output of head h is multiplied by sigmoid(attn_gate(y)[h]).

The leading layers are dense, the others have routed experts that are selected by sigmoid scores plus a bias, and shared
ones. In layers with a limit L, silu(gate) is at most L and up within -L … L: swiglu_clamp_exp of routed experts,
swiglu_clamp_shexp of shared experts and dense layers; 0 is none. Checkpoints store norm weights minus 1, GGUF the
weights themselves. MTP layers are dropped.

A checkpoint has one tensor for all gates of experts (`moe.gate_proj`), one for ups and one for downs. Lists in the
config.json of published checkpoints go on over MTP layers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from quantkit.archs.common import experts, rope, windows
from quantkit.archs.common.base import EMBEDDING_RULES, OUTPUT_RULES, Config, Keys, need, refuse
from quantkit.archs.common.blocks import Attention, Experts, FeedForward, HParams, Rope
from quantkit.archs.common.decoder import Decoder, with_head_norms
from quantkit.archs.common.tensors import LazyTensor, TensorRule
from quantkit.archs.gemma3 import norm_rule
from quantkit.errors import FormatError, UnsupportedError
from quantkit.formats.gguf.metadata import Entries
from quantkit.inputs.settings import integer, mapping, real, sequence

_HEADS = "attention.head_count"
_LIMITS = (("swiglu_clamp_exp", "swiglu_limits"), ("swiglu_clamp_shexp", "swiglu_limits_shared"))
_PART = 0.5  # of a head that rotates in layers without a window: llama.cpp fixes it
_SLIDING, _FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True, kw_only=True)
class Step35HParams(HParams):
    """HParams with what differs between layers."""

    local_rope: Rope
    is_local: tuple[bool, ...]  # of each layer
    heads_of: tuple[int, ...]  # query heads of each layer
    limits: tuple[float | None, ...]  # of routed experts, of each layer
    limits_shared: tuple[float | None, ...]  # of shared experts and dense layers


class Step35(Decoder):
    """Step 3.5 Flash and Step 3.7 Flash."""

    name = "step35"
    hf: ClassVar[tuple[str, ...]] = ("Step3p7ForConditionalGeneration", "Step3p5ForCausalLM")
    model_type = "step3p5"
    rope_style = "neox"
    rotary_fraction = 1.0
    defaults: ClassVar[Mapping[str, object]] = {"head_dim": 128, "rms_norm_eps": 1e-5}
    size_overrides: ClassVar = {"inner": lambda sizes: sizes["heads"]}  # rows of attn_gate
    rules: ClassVar[tuple[TensorRule, ...]] = (
        *EMBEDDING_RULES,
        norm_rule("blk.N.attn_norm", "model.layers.N.input_layernorm"),
        TensorRule("blk.N.attn_q", "model.layers.N.self_attn.q_proj"),
        norm_rule("blk.N.attn_q_norm", "model.layers.N.self_attn.q_norm"),
        TensorRule("blk.N.attn_k", "model.layers.N.self_attn.k_proj"),
        norm_rule("blk.N.attn_k_norm", "model.layers.N.self_attn.k_norm"),
        TensorRule("blk.N.attn_v", "model.layers.N.self_attn.v_proj"),
        TensorRule("blk.N.attn_gate", "model.layers.N.self_attn.g_proj"),
        TensorRule("blk.N.attn_output", "model.layers.N.self_attn.o_proj"),
        norm_rule("blk.N.ffn_norm", "model.layers.N.post_attention_layernorm"),
        *experts.dense_rules(),
        experts.choice_rule("moe.router_bias"),
        TensorRule("blk.N.ffn_gate_inp", "model.layers.N.moe.gate", f32=True, layers=experts.has_experts),
        *(
            TensorRule(f"blk.N.ffn_{part}_exps", f"model.layers.N.moe.{part}_proj", layers=experts.has_experts)
            for part in ("gate", "up", "down")
        ),
        *experts.shared_rules("share_expert"),
        norm_rule("output_norm", "model.norm"),
        *(rule for rule in OUTPUT_RULES if rule.gguf == "output"),
    )
    EXAMPLE: ClassVar[dict[str, Any]] = {
        "architectures": ["Step3p7ForConditionalGeneration"],
        "model_type": "step3p5",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_sliding_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "sliding_window": 32,
        "layer_types": [_FULL, _SLIDING, _SLIDING, _FULL],
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "share_expert_dim": 64,
        "moe_router_scaling_factor": 3.0,
        "swiglu_limits": [None, None, 0.25, 0.25],
        "swiglu_limits_shared": [0.5, None, None, 0.25],
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            _FULL: {"rope_type": "llama3", "rope_theta": 5000000.0, "partial_rotary_factor": 0.5, "factor": 2.0,
                    "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
            _SLIDING: {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
        },
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
    }  # fmt: skip

    # ------------------------------------------------------------------------------------------------ checkpoint side

    def metadata(self, config: Config) -> Entries:
        a, given = self.name, _settings(config)
        local = [kind == _SLIDING for kind in given["layer_types"]]
        heads, local_heads = need(given, "num_attention_heads"), given["num_sliding_attention_heads"]
        entries = super().metadata(given) | experts.entries(a, given) | self.head_lengths(given)
        entries |= {
            f"{a}.{_HEADS}": ([local_heads if i else heads for i in local], "u32"),
            f"{a}.attention.head_count_kv": ([need(given, "num_key_value_heads")] * len(local), "u32"),
            f"{a}.attention.sliding_window": (need(given, "sliding_window"), "u32"),
            f"{a}.attention.sliding_window_pattern": (local, "bool"),
            f"{a}.rope.dimension_count": (self.head_dim(given), "u32"),
            f"{a}.rope.freq_base_swa": (float(given["local_rope_theta"]), "f32"),
            f"{a}.expert_gating_func": (experts.GATING_NUMBERS["sigmoid"], "u32"),
        }
        for ours, theirs in _LIMITS:
            entries[f"{a}.{ours}"] = (given[theirs], "f32")
        return entries

    def generated(self, config: Config) -> dict[str, np.ndarray]:
        parameters = _rope_parameters(config)[0]
        if parameters["rope_type"] != "llama3":
            return {}
        dim = self.head_dim(config)
        if dim % 4:
            raise FormatError(f"config.json: head_dim = {dim}; half of a head rotates by pairs, so 4 has to divide it")
        factors = np.ones(dim // 2, np.float32)
        factors[: int(_PART * dim) // 2] = rope.llama3_factors(parameters, int(_PART * dim))
        return {rope.FREQ_FACTORS: factors}

    def config(self, metadata: Mapping[str, object], tensors: Mapping[str, LazyTensor]) -> dict[str, Any]:
        raise UnsupportedError(
            f"{self.name} is not exported: transformers has no class of the language model alone, "
            f"{self.hf[0]} needs an image encoder"
        )

    # --------------------------------------------------------------------------------------------------- runtime side

    def hparams(self, metadata: Mapping[str, object], tensors: Collection[str] = ()) -> Step35HParams:
        return Step35HParams(**self.numbers(Keys(self.name, metadata), tensors))

    def numbers(self, keys: Keys, tensors: Collection[str]) -> dict[str, Any]:
        heads, layers = keys.per_layer(_HEADS, minimum=1), keys.number("block_count")
        local = windows.layers_of_keys(keys, 1)
        found = super().numbers(Keys(self.name, {**keys.metadata, f"{self.name}.{_HEADS}": max(heads)}), tensors)
        dim, whole = found["head_dim_k"], found["rope"]
        if whole.dim != dim:
            raise UnsupportedError(f"{self.name}.rope.dimension_count = {whole.dim}; known: {dim}, a whole head")
        known = [dim if i else int(_PART * dim) for i in local]
        dims = keys.per_layer("rope.dimension_count_per_layer", known, 1)
        bases = keys.get("rope.freq_base_per_layer", ())
        if dims != known or len(set(zip(local, bases))) > 2:
            raise UnsupportedError(
                f"{self.name}: RoPE dimensions {dims} or bases {bases!r:.80}; known are those of a whole head in "
                "layers with a sliding window, of half a head in the others, and one base of each kind"
            )
        by_kind = dict(zip(local, bases))
        return found | experts.numbers(keys, tensors, biased=True) | {
            "n_mtp_layers": 0,
            "heads_of": tuple(heads),
            "is_local": local,
            "rope": replace(whole, dim=int(_PART * dim), base=float(by_kind.get(False, whole.base)),
                            factor_count=dim // 2),
            "local_rope": replace(
                whole, base=float(by_kind.get(True) or keys.real("rope.freq_base_swa")), factors=None
            ),
            "limits": _limits(keys, "swiglu_clamp_exp", "swiglu_limits", layers),
            "limits_shared": _limits(keys, "swiglu_clamp_shexp", "swiglu_limits_shared", layers),
        }  # fmt: skip

    def attention(self, hp: HParams, i: int) -> Attention:
        assert isinstance(hp, Step35HParams)
        part, local = with_head_norms(super().attention(hp, i), hp, i), hp.is_local[i]
        return replace(
            part,
            heads=hp.heads_of[i],
            rope=hp.local_rope if local else hp.rope,
            window=hp.window if local else None,
            head_gate=hp.linear(f"blk.{i}.attn_gate"),
        )

    def feed_forward(self, hp: HParams, i: int) -> FeedForward | Experts:
        assert isinstance(hp, Step35HParams)
        part = experts.feed_forward(hp, i)
        if isinstance(part, FeedForward):
            return replace(part, limit=hp.limits_shared[i])
        shared = part.shared and replace(part.shared, limit=hp.limits_shared[i])
        return replace(part, limit=hp.limits[i], shared=shared)


def _limits(keys: Keys, ours: str, other: str, layers: int) -> tuple[float | None, ...]:
    """The limits of a key, or of the key with which ik_llama.cpp's converter writes them; None for 0."""
    value = keys.get(ours)
    value = keys.get(other, 0.0) if value is None else value
    found = list(value) if isinstance(value, (list, tuple)) else [value] * layers
    if len(found) < layers:
        raise FormatError(
            f"metadata key {keys.arch}.{ours} has {len(found)} entries, {keys.arch}.block_count is {layers}; it has to "
            "have one for each layer"
        )
    return tuple(float(limit) or None for limit in found[:layers])


def _settings(config: Config) -> dict[str, Any]:
    """config.json as transformers 5 writes it, from that and from the form of the published checkpoints."""
    for key in ("attention_bias", "mlp_bias"):
        refuse(config, key, (False,))
    given, layers = dict(config), int(need(config, "num_hidden_layers"))
    for theirs, ours in (("num_attention_groups", "num_key_value_heads"), ("moe_num_experts", "n_routed_experts"),
                         ("moe_top_k", "num_experts_per_tok")):  # fmt: skip
        given[ours] = config.get(theirs, config.get(ours))
    other = mapping(config, "attention_other_setting")
    refuse(other, "num_attention_groups", (given["num_key_value_heads"],))
    refuse(other, "head_dim", (config.get("head_dim"),))
    heads = need(config, "num_attention_heads")
    own = integer(config, "num_sliding_attention_heads") or integer(other, "num_attention_heads") or heads
    refuse(config, "query_pre_attn_scalar", (need(config, "head_dim"),))
    kinds = _of_layers(config, "layer_types", layers) or [_FULL] * layers
    windowed = windows.layers_of_config({**config, "layer_types": kinds}, 1)
    given |= windows.config(windowed)
    given["num_sliding_attention_heads"] = _heads(config, own, windowed)
    given["mlp_layer_types"] = _feed_forwards(config, layers)
    given["n_shared_experts"] = None
    given["shared_expert_intermediate_size"] = config.get("share_expert_dims") or need(config, "share_expert_dim")
    given["routed_scaling_factor"] = real(config, "moe_router_scaling_factor") or 1.0
    refuse(config, "norm_expert_weight", (True,))
    given["norm_topk_prob"] = True
    for _, theirs in _LIMITS:
        limits = _of_layers(config, theirs, layers) or [0] * layers
        given[theirs] = [real({theirs: limit}, theirs) for limit in limits]
    whole, local = _rope_parameters(config)
    return given | {"rope_parameters": None, "rope_scaling": None, "rope_theta": whole["rope_theta"],
                    "partial_rotary_factor": None, "local_rope_theta": local["rope_theta"]}  # fmt: skip


def _of_layers(config: Config, key: str, layers: int) -> list[Any]:
    """The entries of a list for each layer, without those of MTP layers; [] if config.json has none."""
    found = list(sequence(config, key))
    if found and len(found) < layers:
        raise FormatError(f"config.json: {key} has {len(found)} entries, num_hidden_layers is {layers}")
    return found[:layers]


def _heads(config: Config, heads: int, local: Sequence[bool]) -> int:
    """Query heads of layers with a window, also where transformers gives them layer by layer."""
    for key, part in mapping(config, "per_layer_config").items():
        if part != {"num_attention_heads": heads} or not (
            key.isdecimal() and int(key) < len(local) and local[int(key)]
        ):
            raise UnsupportedError(
                f"config.json: per_layer_config has {part!r:.80} for layer {key}; known is num_attention_heads = "
                f"{heads} of layers of {_SLIDING}"
            )
    return heads


def _feed_forwards(config: Config, layers: int) -> list[str]:
    """mlp_layer_types, or what `moe_layers_enum` says."""
    if kinds := _of_layers(config, "mlp_layer_types", layers):
        return kinds
    stated = config.get("moe_layers_enum")
    if stated is None:
        return ["dense"] * min(3, layers) + ["sparse"] * max(0, layers - 3)
    items = stated.split(",") if isinstance(stated, str) else list(sequence(config, "moe_layers_enum"))
    try:
        sparse = {int(str(item)) for item in items if str(item).strip()}
    except ValueError:
        raise FormatError(f"config.json: moe_layers_enum = {stated!r:.80}; it has to be a list of layers") from None
    return ["sparse" if i in sparse else "dense" for i in range(layers)]


def _rope_parameters(config: Config) -> tuple[dict[str, Any], dict[str, Any]]:
    """RoPE of layers that attend to all tokens, and of those with a window, from any form of config.json."""
    given, layers = mapping(config, "rope_parameters"), int(need(config, "num_hidden_layers"))
    whole, local = (dict(mapping(given, kind)) for kind in (_FULL, _SLIDING))
    kinds = _of_layers(config, "layer_types", layers) or [_FULL] * layers
    thetas, parts = config.get("rope_theta"), config.get("partial_rotary_factors")
    for kind, part in ((_FULL, whole), (_SLIDING, local)):
        if kind in kinds and not part:
            at = kinds.index(kind)
            part["rope_theta"] = thetas[at] if isinstance(thetas, list) and at < len(thetas) else thetas
            if isinstance(parts, list) and at < len(parts):
                part["partial_rotary_factor"] = parts[at]
            if kind == _FULL:
                part |= mapping(config, "rope_scaling")
        part["rope_type"] = part.get("rope_type") or part.pop("type", None) or "default"
        part["rope_theta"] = real(part, "rope_theta") or 10000.0
    if _FULL in kinds:
        refuse({"partial_rotary_factor": 1.0, **whole}, "partial_rotary_factor", (_PART,))
    refuse(whole, "rope_type", ("default", "llama3"))
    refuse(local, "rope_type", ("default",))
    refuse(local, "partial_rotary_factor", (1,))
    return whole, local
