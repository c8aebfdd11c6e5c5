"""llama4: Llama 4, its text model.

Three of four layers have RoPE, which rotates neighbouring elements, the order of checkpoints; there a token attends to
those before it in its own chunk of 8192 positions. Every fourth layer has no RoPE and attends to all tokens; there the
query at position p is multiplied by 1 + 0.1 ln(1 + floor((p + 1) / 8192)). In layers with RoPE, queries and keys are
normed per head after it, without a weight, in models with fewer than 128 experts.

Every interleave_moe_layer_step-th layer has a shared expert and routed experts, selected by their router logits.
The sigmoid of the logit multiplies what enters an expert, not what leaves it. The other layers are dense. Checkpoints
store the matrices of routed experts transposed, with gate and up side by side: [experts, n_embd, 2 ff] and
[experts, ff, n_embd].

Other runtimes fix the numbers above. GGUF has the keys attention.sliding_window (the size of chunks),
attention.temperature_scale, attention.temperature_length and attention.head_norm only where a model has others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from quantkit.archs.common import experts
from quantkit.archs.common.base import EMBEDDING_RULES, OUTPUT_RULES, Config, Keys, need
from quantkit.archs.common.blocks import Attention, Experts, FeedForward, HParams, Norm, Temperature
from quantkit.archs.common.decoder import Decoder
from quantkit.archs.common.tensors import LazyTensor, Piece, Shape, TensorRule, Transform
from quantkit.archs.common.transforms import JoinTransposed, TransposedRows
from quantkit.errors import FormatError, UnsupportedError
from quantkit.formats.gguf.metadata import Entries, shortest
from quantkit.inputs.settings import integer, real, sequence

_EVERY = 4  # every fourth layer has no RoPE
_CHUNK, _SCALE, _LENGTH = 8192, 0.1, 8192
_EXPERTS_WITHOUT_NORM = 128
_FFN = "model.layers.N.feed_forward"


@dataclass(frozen=True, kw_only=True)
class Llama4HParams(HParams):
    """HParams with the layers that have experts, and how layers of both kinds attend."""

    moe_step: int  # every so many layers one has experts
    chunk: int
    temperature: Temperature
    head_norm: bool  # queries and keys are normed


def _has_experts(hp: HParams, layer: int) -> bool:
    assert isinstance(hp, Llama4HParams)
    return (layer + 1) % hp.moe_step == 0


def _is_dense(hp: HParams, layer: int) -> bool:
    return not _has_experts(hp, layer)


def _has_rope(layer: int) -> bool:
    return (layer + 1) % _EVERY != 0


def _half(first: int) -> Callable[[HParams], Transform]:
    """The transform of gate_up_proj to gate (0) or up (1)."""
    return lambda hp: TransposedRows(hp.n_embd, first * hp.n_ff_expert, hp.n_ff_expert)


class Llama4(Decoder):
    """Llama 4, its text model."""

    name = "llama4"
    hf = ("Llama4ForCausalLM",)
    model_type = "llama4_text"
    rope_style = "norm"
    defaults = {"rope_theta": 500000.0, "rms_norm_eps": 1e-5}  # noqa: RUF012  data
    size_overrides = {"sff": lambda s: s["eff"]}  # noqa: RUF012  data
    rules = (
        *EMBEDDING_RULES,
        TensorRule("blk.N.attn_norm", "model.layers.N.input_layernorm", f32=True),
        TensorRule("blk.N.attn_q", "model.layers.N.self_attn.q_proj", bias=True),
        TensorRule("blk.N.attn_k", "model.layers.N.self_attn.k_proj", bias=True),
        TensorRule("blk.N.attn_v", "model.layers.N.self_attn.v_proj", bias=True),
        TensorRule("blk.N.attn_output", "model.layers.N.self_attn.o_proj", bias=True),
        TensorRule("blk.N.ffn_norm", "model.layers.N.post_attention_layernorm", f32=True),
        TensorRule("blk.N.ffn_gate", f"{_FFN}.gate_proj", layers=_is_dense),
        TensorRule("blk.N.ffn_up", f"{_FFN}.up_proj", layers=_is_dense),
        TensorRule("blk.N.ffn_down", f"{_FFN}.down_proj", layers=_is_dense),
        TensorRule("blk.N.ffn_gate_inp", f"{_FFN}.router", f32=True, layers=_has_experts),
        *(
            TensorRule(f"blk.N.ffn_{ours}_exps.weight", f"{_FFN}.experts.gate_up_proj", _half(first),
                       layers=_has_experts, full_names=True, to_gguf_only=True)
            for first, ours in enumerate(("gate", "up"))
        ),
        TensorRule("blk.N.ffn_down_exps.weight", f"{_FFN}.experts.down_proj",
                   lambda hp: TransposedRows(hp.n_ff_expert, 0, hp.n_embd), layers=_has_experts, full_names=True),
        TensorRule("blk.N.ffn_gate_shexp", f"{_FFN}.shared_expert.gate_proj", layers=_has_experts),
        TensorRule("blk.N.ffn_up_shexp", f"{_FFN}.shared_expert.up_proj", layers=_has_experts),
        TensorRule("blk.N.ffn_down_shexp", f"{_FFN}.shared_expert.down_proj", layers=_has_experts),
        *OUTPUT_RULES,
    )  # fmt: skip
    EXAMPLE = {  # noqa: RUF012  data
        "architectures": ["Llama4ForCausalLM"],
        "model_type": "llama4_text",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 32,
        "intermediate_size_mlp": 96,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_local_experts": 8,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": 40,
        "floor_scale": 30,
        "attn_scale": 0.1,
        "use_qk_norm": True,
        "no_rope_layer_interval": 4,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
    }

    # ------------------------------------------------------------------------------------------------ checkpoint side

    def metadata(self, config: Config) -> Entries:
        a, layers = self.name, int(need(config, "num_hidden_layers"))
        step = integer(config, "interleave_moe_layer_step") or 1
        _require_layers(config, layers, step)
        dense = integer(config, "intermediate_size_mlp") or need(config, "intermediate_size")
        given = dict(config) | {"moe_intermediate_size": need(config, "intermediate_size"), "norm_topk_prob": None}
        entries = super().metadata(dict(config) | {"intermediate_size": dense}) | self.head_lengths(config)
        entries |= experts.entries(a, given) | {
            f"{a}.interleave_moe_layer_step": (step, "u32"),
            f"{a}.rope.dimension_count": (self.head_dim(config), "u32"),
        }
        scale = 0.0 if config.get("attn_temperature_tuning") in (False, 0) else real(config, "attn_scale") or _SCALE
        others: dict[str, tuple[Any, Any, str]] = {
            "attention.sliding_window": (integer(config, "attention_chunk_size"), _CHUNK, "u32"),
            "attention.temperature_scale": (scale, _SCALE, "f32"),
            "attention.temperature_length": (integer(config, "floor_scale") or _LENGTH, _LENGTH, "u32"),
            "attention.head_norm": (
                bool(config.get("use_qk_norm", True)), need(config, "num_local_experts") < _EXPERTS_WITHOUT_NORM, "bool"
            ),
        }  # fmt: skip
        return entries | {f"{a}.{key}": (value, kind) for key, (value, usual, kind) in others.items() if value != usual}

    def is_generated(self, name: str) -> bool:
        return super().is_generated(name) or ".ffn_gate_exps." in name or ".ffn_up_exps." in name

    def to_hf(self, hparams: HParams, shapes: Mapping[str, Shape]) -> list[Piece]:
        """As `Arch.to_hf`; gate and up are joined and transposed."""
        found = super().to_hf(hparams, shapes)
        for i in (i for i in range(hparams.n_layer) if _has_experts(hparams, i)):
            sources = tuple(f"blk.{i}.ffn_{ours}_exps.weight" for ours in ("gate", "up"))
            if absent := [name for name in sources if name not in shapes]:
                raise FormatError(f"this GGUF lacks {absent[0]}; a shard is missing or the file is incomplete")
            transform = JoinTransposed(hparams.n_embd, (hparams.n_ff_expert,) * 2)
            shape = transform.shape(*(shapes[source] for source in sources))
            name = f"model.layers.{i}.feed_forward.experts.gate_up_proj"
            found.append(Piece(name, shape, sources, transform, False))
        return found

    def config(self, metadata: Mapping[str, object], tensors: Mapping[str, LazyTensor]) -> dict[str, Any]:
        hp = self.hparams(metadata, tensors.keys())
        return super().config(metadata, tensors) | {
            "head_dim": hp.head_dim_k,
            "intermediate_size": hp.n_ff_expert,
            "intermediate_size_mlp": hp.n_ff,
            "num_local_experts": hp.n_expert,
            "num_experts_per_tok": hp.n_expert_used,
            "interleave_moe_layer_step": hp.moe_step,
            "attention_chunk_size": hp.chunk,
            "attn_temperature_tuning": hp.temperature.beta > 0,
            "attn_scale": shortest(hp.temperature.beta),
            "floor_scale": hp.temperature.length,
            "use_qk_norm": hp.head_norm,
            "no_rope_layer_interval": _EVERY,
        }

    # --------------------------------------------------------------------------------------------------- runtime side

    def hparams(self, metadata: Mapping[str, object], tensors: Collection[str] = ()) -> Llama4HParams:
        return Llama4HParams(**self.numbers(Keys(self.name, metadata), tensors))

    def numbers(self, keys: Keys, tensors: Collection[str]) -> dict[str, Any]:
        found = super().numbers(keys, tensors) | experts.numbers(keys, tensors)
        if keys.get("attention.sliding_window") == 0:
            raise UnsupportedError(
                "llama4.attention.sliding_window = 0: RoPE in all layers, without chunks, is not supported by quantkit"
            )
        return found | {
            "window": None,
            "gating": "sigmoid",
            "has_choice_bias": False,
            "normalises": False,
            "n_ff_shared": found["n_ff_expert"],
            "moe_step": keys.number("interleave_moe_layer_step"),
            "chunk": keys.number("attention.sliding_window", _CHUNK),
            "temperature": Temperature(
                keys.real("attention.temperature_scale", _SCALE),
                keys.number("attention.temperature_length", _LENGTH),
                1,
            ),
            "head_norm": keys.flag("attention.head_norm", found["n_expert"] < _EXPERTS_WITHOUT_NORM),
        }

    def attention(self, hp: HParams, i: int) -> Attention:
        assert isinstance(hp, Llama4HParams)
        part = super().attention(hp, i)
        if not _has_rope(i):
            return replace(part, rope=hp.rope.without_rotation(), temperature=hp.temperature)
        norm = Norm("", hp.norm_eps) if hp.head_norm else None
        return replace(part, chunk=hp.chunk, q_norm=norm, k_norm=norm, norms_after_rope=hp.head_norm)

    def feed_forward(self, hp: HParams, i: int) -> FeedForward | Experts:
        if _is_dense(hp, i):
            return hp.feed_forward(i)
        return replace(experts.routed(hp, i), weighs_inputs=True)


def _require_layers(config: Config, layers: int, step: int) -> None:
    """UnsupportedError for layers with RoPE, with experts or in chunks that files cannot express."""
    with_rope = [_has_rope(i) for i in range(layers)]
    stated = [bool(flag) for flag in sequence(config, "no_rope_layers")] or with_rope
    interval = integer(config, "no_rope_layer_interval") or _EVERY
    if stated != with_rope or interval != _EVERY:
        raise UnsupportedError(
            f"config.json: no_rope_layers differs from no RoPE in every {_EVERY}th layer, which llama4 files cannot "
            "express"
        )
    kinds = list(sequence(config, "layer_types"))
    if kinds and kinds != [("chunked" if rope else "full") + "_attention" for rope in with_rope]:
        raise UnsupportedError(
            "config.json: layer_types are not chunked_attention where there is RoPE, else full_attention"
        )
    moe = list(sequence(config, "moe_layers"))
    if moe and moe != list(range(step - 1, layers, step)):
        raise UnsupportedError(
            f"config.json: moe_layers are not every {step}th layer (interleave_moe_layer_step), which llama4 files "
            "cannot express"
        )
    if not integer(config, "attention_chunk_size"):
        raise UnsupportedError("config.json: llama4 without attention_chunk_size is not supported by quantkit")
