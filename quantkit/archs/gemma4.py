"""gemma4: Gemma 4, its text model: dense (31B), with experts (26B-A4B), with per-layer embeddings (E2B, E4B).

Embeddings are multiplied by sqrt(n_embd). RMS norms come before and after attention and feed-forward; files hold the
weights of norms as checkpoints do. Queries, keys and values are RMS-normed per head, values without a weight; scores
are not scaled. Some layers attend to all tokens, the others have a sliding window. The two kinds differ in:

    head size               attention.key_length       attention.key_length_swa
    KV heads                attention.head_count_kv, one number for each layer
    RoPE base, "neox"       rope.freq_base             rope.freq_base_swa
    RoPE dimensions         the first pairs of a head  all

In the first kind the other pairs have the divisor 1e30 in rope_freqs.weight, so that they do not rotate ("proportional"
RoPE). A layer without attn_v takes its keys, before norm and RoPE, for values. What leaves a layer is multiplied by
layer_output_scale. Logits x become c tanh(x / c) (final_logit_softcapping).

In layers with experts a dense feed-forward runs beside them, both GELU (tanh form), each with norms before and after:

    x + post_ffw_norm(post_ffw_norm_1(dense(ffn_norm(x))) + post_ffw_norm_2(experts(pre_ffw_norm_2(x))))

The router takes x, normed with the weight ffn_gate_inp.scale, and divides its products by sqrt(n_embd). The output of
an expert is multiplied by its number in ffn_down_exps.scale. Files have gate and up of experts in one tensor.

With per-layer embeddings a token has a vector for each layer, in rows of per_layer_token_embd, that enters the layer
after its feed-forward (`LayerInput`):

    hidden_size_per_layer_input   embedding_length_per_layer_input: elements of a vector, 0 without
    num_kv_shared_layers          attention.shared_kv_layers: so many layers at the end have no keys and values. They
                                  attend to those of the last layer of their kind that has, which in llama.cpp is the
                                  last or the last but one of the others; files of another order are refused
    use_double_wide_mlp           feed_forward_length, a list then: twice as much in these layers

Checkpoints may have attn_k, attn_v and attn_k_norm of these layers; nothing reads them, and conversion leaves them out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from quantkit.archs.common import experts, per_layer, rope, windows
from quantkit.archs.common.base import EMBEDDING_RULES, OUTPUT_RULES, Config, Keys, need, refuse
from quantkit.archs.common.blocks import (
    Attention,
    Block,
    Experts,
    FeedForward,
    Head,
    HParams,
    Linear,
    Norm,
    Part,
    Rope,
)
from quantkit.archs.common.decoder import Decoder, with_head_norms
from quantkit.archs.common.shapes import Sizes
from quantkit.archs.common.tensors import LazyTensor, Piece, Shape, TensorRule
from quantkit.errors import FormatError, UnsupportedError
from quantkit.formats.gguf.metadata import Entries, shortest
from quantkit.inputs.settings import integer, mapping, real

_EVERY = 6  # by default every sixth layer attends to all tokens
_GLOBAL_HEAD_DIM = 512
_BASE, _LOCAL_BASE, _PART = 1000000.0, 10000.0, 0.25
_STILL = 1e30  # divisor of the frequency of pairs that do not rotate
_LAYER_INPUT, _LAYER_VOCAB = 256, 262144  # what transformers takes where config.json says nothing


@dataclass(frozen=True, kw_only=True)
class Gemma4HParams(HParams):
    """HParams with what differs between layers with a sliding window and others."""

    local_rope: Rope
    is_local: tuple[bool, ...]  # of each layer
    logit_cap: float | None
    ff_of: tuple[int, ...]  # rows of gate and up in each layer
    n_layer_input: int  # elements of a token's embedding for a layer; 0 without


def _has_kv(hp: HParams, layer: int) -> bool:
    return layer not in hp.kv_shared


def _has_own_v(hp: Gemma4HParams, layer: int) -> bool:
    return hp.is_local[layer] and _has_kv(hp, layer)


def _has_layer_input(hp: Gemma4HParams, layer: int) -> bool:
    return hp.n_layer_input > 0


def _has_experts(hp: HParams, layer: int) -> bool:
    return hp.n_expert > 0


def _dim(sizes: Sizes) -> int:
    """Elements of a head in the layer of `sizes`."""
    local = sizes.metadata[f"{sizes.arch}.attention.sliding_window_pattern"]
    assert isinstance(local, list)
    assert sizes.layer is not None
    return sizes.need("attention.key_length_swa" if local[sizes.layer] else "attention.key_length")


def _of_experts(ours: str, theirs: str, *, f32: bool = False, to_gguf_only: bool = False) -> TensorRule:
    return TensorRule(f"blk.N.{ours}", f"model.layers.N.{theirs}", layers=_has_experts, full_names=True, f32=f32,
                      to_gguf_only=to_gguf_only)  # fmt: skip


_V = TensorRule("blk.N.attn_v", "model.layers.N.self_attn.v_proj", layers=_has_own_v)


_OF_ALL_LAYERS = (
    TensorRule("per_layer_token_embd", "model.embed_tokens_per_layer", required=False),
    TensorRule("per_layer_model_proj", "model.per_layer_model_projection", required=False),
    TensorRule("per_layer_proj_norm", "model.per_layer_projection_norm", required=False, f32=True),
)


class Gemma4(Decoder):
    """Gemma 4, its text model."""

    name = "gemma4"
    hf: ClassVar[tuple[str, ...]] = ("Gemma4ForCausalLM",)
    model_type = "gemma4_text"
    rope_style = "neox"
    ties_by_default = True
    size_overrides: ClassVar = {"key": _dim, "value": _dim}
    rules: ClassVar[tuple[TensorRule, ...]] = (
        *EMBEDDING_RULES,
        *_OF_ALL_LAYERS,
        TensorRule("blk.N.attn_norm", "model.layers.N.input_layernorm", f32=True),
        TensorRule("blk.N.attn_q", "model.layers.N.self_attn.q_proj"),
        TensorRule("blk.N.attn_q_norm", "model.layers.N.self_attn.q_norm", f32=True),
        TensorRule("blk.N.attn_k", "model.layers.N.self_attn.k_proj", layers=_has_kv),
        TensorRule("blk.N.attn_k_norm", "model.layers.N.self_attn.k_norm", f32=True, layers=_has_kv),
        _V,
        TensorRule("blk.N.attn_output", "model.layers.N.self_attn.o_proj"),
        TensorRule("blk.N.post_attention_norm", "model.layers.N.post_attention_layernorm", f32=True),
        TensorRule("blk.N.ffn_norm", "model.layers.N.pre_feedforward_layernorm", f32=True),
        TensorRule("blk.N.ffn_gate", "model.layers.N.mlp.gate_proj"),
        TensorRule("blk.N.ffn_up", "model.layers.N.mlp.up_proj"),
        TensorRule("blk.N.ffn_down", "model.layers.N.mlp.down_proj"),
        TensorRule("blk.N.post_ffw_norm", "model.layers.N.post_feedforward_layernorm", f32=True),
        _of_experts("ffn_gate_inp.weight", "router.proj.weight", f32=True),
        _of_experts("ffn_gate_inp.scale", "router.scale", f32=True),
        _of_experts("pre_ffw_norm_2.weight", "pre_feedforward_layernorm_2.weight", f32=True),
        _of_experts("ffn_gate_up_exps.weight", "experts.gate_up_proj", to_gguf_only=True),
        _of_experts("ffn_down_exps.weight", "experts.down_proj"),
        _of_experts("ffn_down_exps.scale", "router.per_expert_scale", f32=True),
        _of_experts("post_ffw_norm_1.weight", "post_feedforward_layernorm_1.weight", f32=True),
        _of_experts("post_ffw_norm_2.weight", "post_feedforward_layernorm_2.weight", f32=True),
        TensorRule("blk.N.inp_gate", "model.layers.N.per_layer_input_gate", layers=_has_layer_input),
        TensorRule("blk.N.proj", "model.layers.N.per_layer_projection", layers=_has_layer_input),
        TensorRule("blk.N.post_norm", "model.layers.N.post_per_layer_input_norm", f32=True, layers=_has_layer_input),
        TensorRule("blk.N.layer_output_scale.weight", "model.layers.N.layer_scalar", full_names=True, f32=True),
        *OUTPUT_RULES,
    )
    EXAMPLE: ClassVar[dict[str, Any]] = {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "global_head_dim": 64,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "sliding_window": 32,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "rope_theta": 1000000.0, "partial_rotary_factor": 0.25},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
        "final_logit_softcapping": 3.0,
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "tie_word_embeddings": True,
    }

    # ------------------------------------------------------------------------------------------------ checkpoint side

    def rules_of(self, config: Config) -> tuple[TensorRule, ...]:
        found = self.rules
        if not config.get("attention_k_eq_v"):
            found = tuple(replace(rule, layers=_has_kv) if rule is _V else rule for rule in found)
        if not _layer_input(config):
            return found
        return tuple(replace(rule, required=True) if rule in _OF_ALL_LAYERS else rule for rule in found)

    def dropped_tensors(self, config: Config, names: Collection[str]) -> dict[str, list[str]]:
        layers = int(need(config, "num_hidden_layers"))
        shared = range(max(0, layers - integer(config, "num_kv_shared_layers")), layers)
        stems = ("k_proj", "v_proj", "k_norm")
        unread = [f"model.layers.{i}.self_attn.{stem}.weight" for i in shared for stem in stems]
        found = [name for name in unread if name in names]
        return super().dropped_tensors(config, names) | (
            {"keys and values of layers that attend to those of earlier layers": found} if found else {}
        )

    def metadata(self, config: Config) -> Entries:
        a = self.name
        _refuse_unknown(config)
        local, (dim, kv_heads) = _local(config), _of_global_layers(config)
        parameters = _rope_parameters(config)
        given = dict(config) | {"hidden_act": None, "rope_scaling": None, "rope_parameters": None,
                                "rope_theta": parameters[0]["rope_theta"],
                                "num_experts_per_tok": config.get("top_k_experts")}  # fmt: skip
        local_dim, local_heads = need(config, "head_dim"), need(config, "num_key_value_heads")
        cap = real(config, "final_logit_softcapping")
        entries = super().metadata(given) | {
            f"{a}.attention.head_count_kv": ([local_heads if i else kv_heads for i in local], "u32"),
            f"{a}.attention.key_length": (dim, "u32"),
            f"{a}.attention.value_length": (dim, "u32"),
            f"{a}.attention.key_length_swa": (local_dim, "u32"),
            f"{a}.attention.value_length_swa": (local_dim, "u32"),
            f"{a}.attention.sliding_window": (need(config, "sliding_window"), "u32"),
            f"{a}.attention.sliding_window_pattern": (list(local), "bool"),
            f"{a}.attention.shared_kv_layers": (integer(config, "num_kv_shared_layers"), "u32"),
            f"{a}.embedding_length_per_layer_input": (_layer_input(config), "u32"),
            f"{a}.feed_forward_length": (_feed_forward_lengths(config), "u32"),
            f"{a}.rope.dimension_count": (dim, "u32"),
            f"{a}.rope.dimension_count_swa": (local_dim, "u32"),
            f"{a}.rope.freq_base_swa": (float(parameters[1]["rope_theta"]), "f32"),
            f"{a}.final_logit_softcapping": (cap, "f32"),  # null in config.json, and 0 in GGUF, is no cap
        }
        return entries | (experts.entries(a, given) if config.get("enable_moe_block") else {})

    def generated(self, config: Config) -> dict[str, np.ndarray]:
        pairs, part = _of_global_layers(config)[0] // 2, _rope_parameters(config)[0]["partial_rotary_factor"]
        rotating = np.arange(pairs) < int(part * 2 * pairs // 2)
        return {rope.FREQ_FACTORS: np.where(rotating, 1, _STILL).astype(np.float32)}

    def is_generated(self, name: str) -> bool:
        return super().is_generated(name) or name.endswith((".ffn_gate_exps.weight", ".ffn_up_exps.weight"))

    def to_hf(self, hparams: HParams, shapes: Mapping[str, Shape]) -> list[Piece]:
        """As `Arch.to_hf`; `shapes` have gate and up apart, which are joined."""
        layers = range(hparams.n_layer) if hparams.n_expert else ()
        names = ((f"blk.{i}.ffn_gate_exps.weight", f"model.layers.{i}.experts.gate_up_proj") for i in layers)
        return super().to_hf(hparams, shapes) + [experts.joined(shapes, gate, name) for gate, name in names]

    def config(self, metadata: Mapping[str, object], tensors: Mapping[str, LazyTensor]) -> dict[str, Any]:
        hp = self.hparams(metadata, tensors.keys())
        local = hp.is_local
        if local[-1]:
            raise UnsupportedError(
                f"{self.name}.attention.sliding_window_pattern says that the last layer has a window; in "
                f"transformers' {self.hf[0]} it has none"
            )
        windowed = local.index(True) if any(local) else 0
        whole = local.index(False)
        factors = tensors[rope.FREQ_FACTORS].dequantize()
        rotating = factors == 1
        if not np.array_equal(factors, np.where(np.arange(len(factors)) < rotating.sum(), 1, np.float32(_STILL))):
            raise UnsupportedError(f"{rope.FREQ_FACTORS} has other values than 1 and then {_STILL:g}")
        found: dict[str, Any] = {
            "architectures": [self.hf[0]],
            "model_type": self.model_type,
            "vocab_size": hp.n_vocab,
            "hidden_size": hp.n_embd,
            "intermediate_size": hp.ff_of[0],
            "use_double_wide_mlp": _is_double_wide(hp),
            "num_hidden_layers": hp.n_layer,
            "num_attention_heads": hp.n_head,
            "num_key_value_heads": hp.kv_heads_of[windowed],
            "head_dim": hp.head_dims_of[windowed],
            "global_head_dim": hp.head_dims_of[whole],
            "num_global_key_value_heads": hp.kv_heads_of[whole],
            "attention_k_eq_v": f"blk.{whole}.attn_v.weight" not in hp.tensors,
            "sliding_window": hp.window,
            "enable_moe_block": hp.n_expert > 0,
            "hidden_size_per_layer_input": hp.n_layer_input,
            "vocab_size_per_layer_input": hp.n_vocab,
            "num_kv_shared_layers": len(hp.kv_shared),
            "max_position_embeddings": hp.n_ctx_train,
            "rms_norm_eps": shortest(hp.norm_eps),
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "proportional",
                    "rope_theta": shortest(hp.rope.base),
                    "partial_rotary_factor": float(rotating.mean()),
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": shortest(hp.local_rope.base)},
            },
            "final_logit_softcapping": None if hp.logit_cap is None else shortest(hp.logit_cap),
            "hidden_activation": "gelu_pytorch_tanh",
            "attention_bias": False,
            "tie_word_embeddings": hp.tied,
        } | windows.config(local)
        if hp.n_expert:
            found |= {"num_experts": hp.n_expert, "top_k_experts": hp.n_expert_used,
                      "moe_intermediate_size": hp.n_ff_expert}  # fmt: skip
        return found

    # --------------------------------------------------------------------------------------------------- runtime side

    def hparams(self, metadata: Mapping[str, object], tensors: Collection[str] = ()) -> Gemma4HParams:
        return Gemma4HParams(**self.numbers(Keys(self.name, metadata), tensors))

    def numbers(self, keys: Keys, tensors: Collection[str]) -> dict[str, Any]:
        if tensors and rope.FREQ_FACTORS not in tensors:
            raise FormatError(
                f"tensor {rope.FREQ_FACTORS} is missing; it says which pairs of a head rotate in layers of all tokens"
            )
        local, key = windows.layers_of_keys(keys, _EVERY), f"{self.name}.attention.head_count_kv"
        heads = keys.per_layer("attention.head_count_kv", minimum=1)
        widths = keys.per_layer("feed_forward_length", minimum=1)
        single = {key: max(heads), f"{self.name}.feed_forward_length": max(widths)}
        found = super().numbers(Keys(self.name, {**keys.metadata, **single}), tensors)
        sources = windows.kv_sources(self.name, local, keys.number("attention.shared_kv_layers", 0))
        shared = [i for i, source in enumerate(sources) if source != i]
        dim, base = keys.number("attention.key_length_swa", found["head_dim_k"]), keys.real("rope.freq_base_swa")
        for length in ("", "_swa"):
            pair = [keys.number(f"attention.{side}_length{length}", 0) for side in ("key", "value")]
            if pair[0] != pair[1]:
                raise FormatError(
                    f"metadata keys {self.name}.attention.key_length{length} = {pair[0]} and value_length{length} = "
                    f"{pair[1]} differ; heads of {self.name} have one length"
                )
        return found | (experts.numbers(keys, tensors) if keys.number("expert_count", 0) else {}) | {
            "kv_heads_of": tuple(n if i not in shared else 0 for i, n in enumerate(heads)),
            "kv_sources": sources if shared else (),
            "unread": per_layer.unread_keys(shared),
            "ff_of": tuple(widths),
            "n_layer_input": keys.number("embedding_length_per_layer_input", 0),
            "head_dims_of": tuple(dim if i else found["head_dim_k"] for i in local),
            "window": keys.number("attention.sliding_window"),
            "local_rope": replace(
                found["rope"], dim=keys.number("rope.dimension_count_swa", dim), base=base, factors=None
            ),
            "is_local": local,
            "logit_cap": keys.real("final_logit_softcapping", 30.0) or None,
        }  # fmt: skip

    def block(self, hp: HParams, i: int) -> Block:
        assert isinstance(hp, Gemma4HParams)
        parts: list[Part] = [self.attention(hp, i), self.feed_forward(hp, i)]
        if hp.n_layer_input:
            parts.append(per_layer.layer_input(hp, i, hp.n_layer_input, self.head(hp)))
        return Block(i, tuple(parts), out_scale=f"blk.{i}.layer_output_scale.weight")

    def attention(self, hp: HParams, i: int) -> Attention:
        assert isinstance(hp, Gemma4HParams)
        if i in hp.kv_shared:
            source = hp.kv_sources[i]
            own = replace(
                with_head_norms(super().attention(hp, i), hp, i), post_norm=hp.norm(f"blk.{i}.post_attention_norm")
            )
            return per_layer.reading(own, self.attention(hp, source), source)
        part, local = with_head_norms(super().attention(hp, i), hp, i), hp.is_local[i]
        absent = bool(hp.tensors) and part.v.weight not in hp.tensors and not local
        return replace(
            part,
            v=part.k if absent else part.v,
            v_norm=Norm("", hp.norm_eps),
            kv_heads=hp.kv_heads_of[i],
            head_dim_k=hp.head_dims_of[i],
            head_dim_v=hp.head_dims_of[i],
            scale=1.0,
            rope=hp.local_rope if local else hp.rope,
            window=hp.window if local else None,
            post_norm=hp.norm(f"blk.{i}.post_attention_norm"),
        )

    def feed_forward(self, hp: HParams, i: int) -> FeedForward | Experts:
        blk = f"blk.{i}"
        assert isinstance(hp, Gemma4HParams)
        dense, last = replace(hp.feed_forward(i, ff=hp.ff_of[i]), activation="geglu"), hp.norm(f"{blk}.post_ffw_norm")
        if not hp.n_expert:
            return replace(dense, post_norm=last)
        return replace(
            experts.routed(hp, i, "pre_ffw_norm_2"),
            activation="geglu",
            router=Linear(f"{blk}.ffn_gate_inp.weight", factor=hp.n_embd**-0.5),
            router_norm=Norm(f"{blk}.ffn_gate_inp.scale", hp.norm_eps),
            routed_norm=hp.norm(f"{blk}.post_ffw_norm_2"),
            shared=replace(dense, post_norm=hp.norm(f"{blk}.post_ffw_norm_1")),
            post_norm=last,
        )

    def head(self, hparams: HParams) -> Head:
        assert isinstance(hparams, Gemma4HParams)
        return replace(super().head(hparams), embedding_scale=hparams.n_embd**0.5, softcap=hparams.logit_cap)


def _refuse_unknown(config: Config) -> None:
    """UnsupportedError for settings that this file does not handle."""
    rows = integer(config, "vocab_size_per_layer_input", _LAYER_VOCAB)
    if _layer_input(config) and rows != need(config, "vocab_size"):
        raise UnsupportedError(
            f"config.json: vocab_size_per_layer_input = {rows}, vocab_size = {config['vocab_size']}; every token needs "
            "a row of both embeddings, and files have as many of each"
        )
    refuse(config, "hidden_activation", ("gelu_pytorch_tanh",))
    refuse(config, "attention_bias", (False,))
    refuse(config, "use_bidirectional_attention", ("vision",))  # of image tokens, which the text model has none of


def _local(config: Config) -> tuple[bool, ...]:
    """Whether each layer has a sliding window. The last one never has, as in transformers."""
    return (*windows.layers_of_config(config, _EVERY)[:-1], False)


def _of_global_layers(config: Config) -> tuple[int, int]:
    """Head size and KV heads of layers without a window; transformers may give them layer by layer."""
    dim = integer(config, "global_head_dim") or _GLOBAL_HEAD_DIM
    heads = need(config, "num_key_value_heads")
    if config.get("attention_k_eq_v"):
        heads = integer(config, "num_global_key_value_heads") or heads
    layers = mapping(config, "per_layer_config")
    if not layers:
        return dim, heads
    whole = {str(i) for i, local in enumerate(_local(config)) if not local}
    settings = [mapping(layers, key) for key in layers]
    if {*layers} != whole or any(part != settings[0] for part in settings):
        raise UnsupportedError(
            f"config.json: per_layer_config = {layers!r:.80}; it has to give all layers of full_attention, and no "
            "others, one head_dim and num_key_value_heads"
        )
    if unknown := settings[0].keys() - {"head_dim", "num_key_value_heads"}:
        raise UnsupportedError(f"config.json: per_layer_config has {sorted(unknown)[0]}, which quantkit does not know")
    return (integer(settings[0], "head_dim") or need(config, "head_dim"),
            integer(settings[0], "num_key_value_heads") or need(config, "num_key_value_heads"))  # fmt: skip


def _rope_parameters(config: Config) -> tuple[dict[str, Any], dict[str, Any]]:
    """rope_theta and partial_rotary_factor of global layers, and rope_theta of those with a window."""
    given = mapping(config, "rope_parameters")
    whole, local = (mapping(given, kind) for kind in ("full_attention", "sliding_attention"))
    refuse(whole, "rope_type", ("proportional",))
    refuse(whole, "factor", (1,))
    refuse(local, "rope_type", ("default",))
    refuse(local, "partial_rotary_factor", (1,))
    part = real(whole, "partial_rotary_factor") or (1.0 if whole else _PART)
    if not 0 < part <= 1:
        raise FormatError(f"config.json: partial_rotary_factor = {part:g}; it has to be above 0, at most 1")
    return (
        {"rope_theta": real(whole, "rope_theta") or _BASE, "partial_rotary_factor": part},
        {"rope_theta": real(local, "rope_theta") or _LOCAL_BASE},
    )


def _layer_input(config: Config) -> int:
    """Elements of a token's embedding for a layer; 0 without."""
    return integer(config, "hidden_size_per_layer_input", _LAYER_INPUT)


def _feed_forward_lengths(config: Config) -> int | list[int]:
    """Rows of gate and up: of all layers, or of each where those without keys and values have twice as many."""
    need(config, "intermediate_size")
    width, layers, shared = (
        integer(config, key) for key in ("intermediate_size", "num_hidden_layers", "num_kv_shared_layers")
    )
    if not config.get("use_double_wide_mlp") or not shared:
        return width
    return [width * (2 if i >= layers - shared else 1) for i in range(layers)]


def _is_double_wide(hp: Gemma4HParams) -> bool:
    """Whether the layers without keys and values have feed-forwards of twice the size. UnsupportedError if layers
    differ in another way."""
    width = hp.ff_of[0]
    for double in (False, True):
        if hp.ff_of == tuple(width * (2 if double and i in hp.kv_shared else 1) for i in range(hp.n_layer)):
            return double
    raise UnsupportedError(
        f"{hp.arch}.feed_forward_length = {list(hp.ff_of)!r:.80}; in transformers' {Gemma4.hf[0]} layers without keys "
        "and values have as much as the others, or twice as much"
    )
