"""gemma3n: Gemma 3n (E2B, E4B), its text model.

Beside what Gemma 4's E2B has (archs/gemma4.py: norms, attention, per-layer embeddings), a token has several residual
streams (blocks.AltUp), of which the first runs through a layer, and a product of low rank is added beside attention
(blocks.Laurel). Feed-forwards of some layers keep only their largest gates (blocks.FeedForward.cutoff).

    altup_num_inputs               altup.num_inputs: streams; all but one are projected from the embedding
    altup_active_idx               altup.active_idx: 0
    activation_sparsity_pattern    activation_sparsity_scale, of each layer: the quantile of a normal distribution
    num_kv_shared_layers           attention.shared_kv_layers
    hidden_size_per_layer_input    embedding_length_per_layer_input
    intermediate_size              feed_forward_length: one number, or one of each layer
    vocab_size_per_layer_input     rows of the checkpoint's embed_tokens_per_layer. A token beyond them has row 0, as in
                                   transformers, and files have as many rows as tokens. llama.cpp's converter writes 0
                                   there; before it cut both embeddings to the fewer tokens

llama.cpp reads attn_k, attn_v and attn_k_norm of all layers: conversion keeps those of layers that share others' keys
where a checkpoint has them. Files have prediction and correction coefficients in float32. llama.cpp reads neither
shared_kv_layers nor activation_sparsity_scale: all layers but the first 20 share keys, the first 10 are sparse, as in
E2B and E4B. It divides the variance of n gates by n - 1, not n.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any, ClassVar

from quantkit.archs.common import per_layer, windows
from quantkit.archs.common.base import EMBEDDING_RULES, OUTPUT_RULES, Config, Keys, need, refuse
from quantkit.archs.common.blocks import (
    AltUp,
    AltUpHead,
    Attention,
    Block,
    FeedForward,
    Head,
    HParams,
    Laurel,
    Linear,
    Norm,
    Rope,
)
from quantkit.archs.common.decoder import Decoder, with_head_norms
from quantkit.archs.common.shapes import ExpectedTensor
from quantkit.archs.common.tensors import LazyTensor, Piece, Shape, Stack, TensorRule, Unstack
from quantkit.archs.common.transforms import RepeatFirstRow
from quantkit.errors import FormatError, UnsupportedError
from quantkit.formats.gguf.metadata import Entries, shortest
from quantkit.inputs.settings import integer, mapping, real, sequence

_EVERY = 5  # by default every fifth layer attends to all tokens
_ALTUP_INPUTS, _LAUREL_RANK = 4, 64  # llama.cpp has no others
_SPARSE, _SPARSITY = 10, 0.95  # layers that are sparse by default, and how much of their gates is left out
_LEAST_SQUARE = 1e-5  # of a projected stream: what transformers takes for a smaller mean square
_BASE, _LOCAL_BASE = 1000000.0, 10000.0
_STACKS = {"altup_proj": "model.altup_projections", "altup_unembd_proj": "model.altup_unembed_projections"}
_TABLE = TensorRule("per_layer_token_embd", "model.embed_tokens_per_layer")


@dataclass(frozen=True, kw_only=True)
class Gemma3nHParams(HParams):
    """HParams with what differs between layers, and the number of streams."""

    local_rope: Rope
    is_local: tuple[bool, ...]  # of each layer
    logit_cap: float
    ff_of: tuple[int, ...]  # rows of gate and up in each layer
    cutoffs: tuple[float | None, ...]  # of gates, in each layer
    n_layer_input: int  # elements of a token's embedding for a layer
    streams: int


def _has_kv(hp: HParams, layer: int) -> bool:
    return layer not in hp.kv_shared


def _in_layers(
    *pairs: tuple[str, str],
    f32: bool = False,
    full_names: bool = False,
    layers: Callable[[Any, int], bool] | None = None,
) -> tuple[TensorRule, ...]:
    """Rules of tensors of every layer, from their names in a layer on both sides."""
    return tuple(
        TensorRule(f"blk.N.{ours}", f"model.layers.N.{theirs}", f32=f32, full_names=full_names, layers=layers)
        for ours, theirs in pairs
    )


class Gemma3n(Decoder):
    """Gemma 3n, its text model."""

    name = "gemma3n"
    hf: ClassVar[tuple[str, ...]] = ("Gemma3nForCausalLM",)
    model_type = "gemma3n_text"
    rope_style = "neox"
    ties_by_default = True
    defaults: ClassVar[dict[str, Any]] = {  # those of transformers
        "vocab_size": 262400,
        "hidden_size": 2048,
        "intermediate_size": 16384,
        "num_hidden_layers": 35,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "sliding_window": 512,
        "final_logit_softcapping": 30.0,
        "vocab_size_per_layer_input": 262144,
        "hidden_size_per_layer_input": 256,
        "altup_active_idx": 0,
        "altup_num_inputs": _ALTUP_INPUTS,
        "num_kv_shared_layers": 15,
        "laurel_rank": _LAUREL_RANK,
    }
    size_overrides: ClassVar = {
        "altup_others": lambda s: s["altup"] - 1,
        "laurel": lambda s: _LAUREL_RANK,
    }
    rules: ClassVar[tuple[TensorRule, ...]] = (
        *EMBEDDING_RULES,
        _TABLE,
        TensorRule("per_layer_model_proj", "model.per_layer_model_projection"),
        TensorRule("per_layer_proj_norm", "model.per_layer_projection_norm", f32=True),
        *(TensorRule(ours, theirs) for ours, theirs in _STACKS.items()),  # to_gguf stacks what a checkpoint has apart
        *_in_layers(("attn_k_norm", "self_attn.k_norm"), f32=True, layers=_has_kv),
        *_in_layers(("attn_k", "self_attn.k_proj"), ("attn_v", "self_attn.v_proj"), layers=_has_kv),
        *_in_layers(
            ("attn_norm", "input_layernorm"), ("attn_q_norm", "self_attn.q_norm"),
            ("post_attention_norm", "post_attention_layernorm"), ("ffn_norm", "pre_feedforward_layernorm"),
            ("post_ffw_norm", "post_feedforward_layernorm"), ("post_norm", "post_per_layer_input_norm"),
            ("altup_router_norm", "altup.router_norm"), ("laurel_post_norm", "laurel.post_laurel_norm"),
            ("altup_predict_coef", "altup.prediction_coefs"), ("altup_correct_coef", "altup.correction_coefs"),
            f32=True,
        ),
        *_in_layers(
            ("attn_q", "self_attn.q_proj"), ("attn_output", "self_attn.o_proj"), ("ffn_gate", "mlp.gate_proj"),
            ("ffn_up", "mlp.up_proj"), ("ffn_down", "mlp.down_proj"), ("inp_gate", "per_layer_input_gate"),
            ("proj", "per_layer_projection"), ("altup_router", "altup.modality_router"),
            ("laurel_l", "laurel.linear_left"), ("laurel_r", "laurel.linear_right"),
        ),
        *_in_layers(("altup_correct_scale.weight", "altup.correct_output_scale"), f32=True, full_names=True),
        *OUTPUT_RULES,
    )  # fmt: skip

    EXAMPLE: ClassVar[dict[str, Any]] = {
        "architectures": ["Gemma3nForCausalLM"],
        "model_type": "gemma3n_text",
        "vocab_size": 320,
        "vocab_size_per_layer_input": 320,
        "hidden_size": 64,
        "intermediate_size": [96, 96, 160, 96],
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_size_per_layer_input": 32,
        "num_kv_shared_layers": 0,
        "altup_num_inputs": _ALTUP_INPUTS,
        "altup_active_idx": 0,
        "altup_correct_scale": True,
        "laurel_rank": _LAUREL_RANK,
        "activation_sparsity_pattern": [0.9, 0.0, 0.5, 0.0],
        "sliding_window": 32,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": _BASE},
            "sliding_attention": {"rope_type": "default", "rope_theta": _LOCAL_BASE},
        },
        "final_logit_softcapping": 3.0,
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "tie_word_embeddings": True,
    }

    # ------------------------------------------------------------------------------------------------ checkpoint side

    def rules_of(self, config: Config) -> tuple[TensorRule, ...]:
        rows, vocab = _whole(config, "vocab_size_per_layer_input"), _whole(config, "vocab_size")
        if rows == vocab:
            return self.rules
        padded = replace(_TABLE, transform=lambda hp: RepeatFirstRow(rows, vocab))
        return tuple(padded if rule is _TABLE else rule for rule in self.rules)

    def tensors(self, config: Config) -> list[ExpectedTensor]:
        """As `Arch.tensors`, with keys and values of all layers, as published checkpoints have them."""
        return super().tensors({**config, "num_kv_shared_layers": 0})

    def to_gguf(self, config: Config, shapes: Mapping[str, Shape]) -> list[Piece]:
        stored, rest = {self.canonical(name): name for name in shapes}, dict(shapes)
        stacks: dict[str, tuple[str, ...]] = {}
        for ours, theirs in _STACKS.items():
            names = [f"{theirs}.{i}.weight" for i in range(_ALTUP_INPUTS - 1)]
            if absent := [name for name in names if name not in stored]:
                raise FormatError(f"this checkpoint lacks {absent[0]}; a shard is missing or the file is incomplete")
            stacks[f"{ours}.weight"] = tuple(stored[name] for name in names)
            first, *others = (rest.pop(stored[name]) for name in names)
            if len(first) != 2 or any(other != first for other in others):
                raise FormatError(
                    f"tensors {names[0]} … are {first}, {others[0]} …; they must be matrices of one shape"
                )
            rest[f"{theirs}.weight"] = (len(names), *first)
        found = super().to_gguf(config, rest)
        for i, piece in enumerate(found):
            if sources := stacks.get(piece.name):
                found[i] = replace(piece, sources=sources, transform=Stack(piece.shape[1]))
        return found

    def to_hf(self, hparams: HParams, shapes: Mapping[str, Shape]) -> list[Piece]:
        found: list[Piece] = []
        stacked = {f"{theirs}.weight" for theirs in _STACKS.values()}
        for piece in super().to_hf(hparams, shapes):
            if piece.name not in stacked:
                found.append(piece)
                continue
            count, *shape = piece.shape
            stem = piece.name.removesuffix(".weight")
            found += [
                replace(piece, name=f"{stem}.{i}.weight", shape=tuple(shape), transform=Unstack(i, shape[0]))
                for i in range(count)
            ]
        return found

    def metadata(self, config: Config) -> Entries:
        a = self.name
        refuse(config, "hidden_activation", ("gelu_pytorch_tanh",))
        refuse(config, "attention_bias", (False,))
        refuse(config, "altup_correct_scale", (True,))
        refuse(config, "altup_num_inputs", (_ALTUP_INPUTS,))
        refuse(config, "altup_active_idx", (0,))
        refuse(config, "laurel_rank", (_LAUREL_RANK,))
        vocab, rows = (_whole(config, key) for key in ("vocab_size", "vocab_size_per_layer_input"))
        if rows > vocab:
            raise UnsupportedError(
                f"config.json: vocab_size_per_layer_input = {rows}, vocab_size = {vocab}; a token with a row of the "
                "first and none of the second cannot be read"
            )
        layers = _whole(config, "num_hidden_layers")
        shared = _whole(config, "num_kv_shared_layers")
        if shared >= layers:
            raise FormatError(f"config.json: num_kv_shared_layers = {shared} of {layers} layers; one has to have keys")
        parameters = mapping(config, "rope_parameters")
        refuse(parameters, "rope_type", ("default",))  # transformers takes what each kind of layers has
        whole, local = (mapping(parameters, kind) for kind in ("full_attention", "sliding_attention"))
        for part in (whole, local):
            refuse(part, "rope_type", ("default",))
        refuse(config, "rope_scaling", ())
        base = real(whole, "rope_theta") or real(config, "rope_theta") or _BASE
        local_base = real(local, "rope_theta") or real(config, "rope_local_base_freq") or _LOCAL_BASE
        widths = _widths(config, layers)
        given = dict(config) | {"rope_parameters": None, "rope_theta": base, "intermediate_size": max(widths)}
        return super().metadata(given) | self.head_lengths(config) | {
            f"{a}.feed_forward_length": (widths if len(set(widths)) > 1 else widths[0], "u32"),
            f"{a}.attention.sliding_window": (_whole(config, "sliding_window"), "u32"),
            f"{a}.attention.sliding_window_pattern": (list(windows.layers_of_config(config, _EVERY)), "bool"),
            f"{a}.attention.shared_kv_layers": (shared, "u32"),
            f"{a}.embedding_length_per_layer_input": (_whole(config, "hidden_size_per_layer_input"), "u32"),
            f"{a}.altup.num_inputs": (_whole(config, "altup_num_inputs"), "u32"),
            f"{a}.altup.active_idx": (_whole(config, "altup_active_idx"), "u32"),
            f"{a}.activation_sparsity_scale": (_scales(config, layers), "f32"),
            f"{a}.rope.freq_base_swa": (local_base, "f32"),
            f"{a}.final_logit_softcapping": (real(config, "final_logit_softcapping"), "f32"),
        }  # fmt: skip

    def config(self, metadata: Mapping[str, object], tensors: Mapping[str, LazyTensor]) -> dict[str, Any]:
        hp = self.hparams(metadata, tensors.keys())
        found: dict[str, Any] = {
            "architectures": [self.hf[0]],
            "model_type": self.model_type,
            "vocab_size": hp.n_vocab,
            "vocab_size_per_layer_input": hp.n_vocab,
            "hidden_size": hp.n_embd,
            "intermediate_size": list(hp.ff_of),
            "num_hidden_layers": hp.n_layer,
            "num_attention_heads": hp.n_head,
            "num_key_value_heads": hp.n_head_kv,
            "head_dim": hp.head_dim_k,
            "hidden_size_per_layer_input": hp.n_layer_input,
            "num_kv_shared_layers": len(hp.kv_shared),
            "altup_num_inputs": hp.streams,
            "altup_active_idx": 0,
            "altup_correct_scale": True,
            "laurel_rank": _LAUREL_RANK,
            "activation_sparsity_pattern": [_share(cutoff) for cutoff in hp.cutoffs],
            "sliding_window": hp.window,
            "max_position_embeddings": hp.n_ctx_train,
            "rms_norm_eps": shortest(hp.norm_eps),
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": shortest(hp.rope.base)},
                "sliding_attention": {"rope_type": "default", "rope_theta": shortest(hp.local_rope.base)},
            },
            "final_logit_softcapping": shortest(hp.logit_cap),
            "hidden_activation": "gelu_pytorch_tanh",
            "attention_bias": False,
            "tie_word_embeddings": hp.tied,
        }
        return found | windows.config(hp.is_local)

    # --------------------------------------------------------------------------------------------------- runtime side

    def hparams(self, metadata: Mapping[str, object], tensors: Collection[str] = ()) -> Gemma3nHParams:
        return Gemma3nHParams(**self.numbers(Keys(self.name, metadata), tensors))

    def numbers(self, keys: Keys, tensors: Collection[str]) -> dict[str, Any]:
        key = f"{self.name}.feed_forward_length"
        widths = keys.per_layer("feed_forward_length", minimum=1)
        found = super().numbers(Keys(self.name, {**keys.metadata, key: max(widths)}), tensors)
        if found["head_dim_k"] != found["head_dim_v"]:
            raise FormatError(
                f"metadata keys {self.name}.attention.key_length = {found['head_dim_k']} and value_length = "
                f"{found['head_dim_v']} differ; heads of {self.name} have one length"
            )
        if active := keys.number("altup.active_idx", 0):
            raise UnsupportedError(f"{self.name}.altup.active_idx = {active}; only the first stream can be active")
        if not (cap := keys.real("final_logit_softcapping", 30.0)):
            raise UnsupportedError(f"{self.name}.final_logit_softcapping = 0; logits of {self.hf[0]} have a soft cap")
        local, heads = windows.layers_of_keys(keys, _EVERY), found["n_head_kv"]
        sources = windows.kv_sources(self.name, local, keys.number("attention.shared_kv_layers", 0))
        shared = [i for i, source in enumerate(sources) if source != i]
        return found | {
            "kv_heads_of": tuple(0 if i in shared else heads for i in range(len(sources))) if shared else (),
            "kv_sources": sources if shared else (),
            "unread": per_layer.unread_keys(shared),
            "ff_of": tuple(widths),
            "cutoffs": _cutoffs(keys, found["n_layer"]),
            "n_layer_input": keys.number("embedding_length_per_layer_input"),
            "streams": keys.number("altup.num_inputs", _ALTUP_INPUTS),
            "window": keys.number("attention.sliding_window"),
            "local_rope": replace(found["rope"], base=keys.real("rope.freq_base_swa", _LOCAL_BASE)),
            "is_local": local,
            "logit_cap": cap,
        }

    def block(self, hp: HParams, i: int) -> Block:
        assert isinstance(hp, Gemma3nHParams)
        blk, attention = f"blk.{i}", self.attention(hp, i)
        assert attention.norm is not None
        laurel = Laurel(
            norm=attention.norm,
            left=hp.linear(f"{blk}.laurel_l"),
            right=hp.linear(f"{blk}.laurel_r"),
            post_norm=hp.norm(f"{blk}.laurel_post_norm"),
            rank=_LAUREL_RANK,
        )
        altup = AltUp(
            router=replace(hp.linear(f"{blk}.altup_router"), factor=1 / hp.n_embd),
            router_norm=hp.norm(f"{blk}.altup_router_norm"),
            predict=f"{blk}.altup_predict_coef.weight",
            correct=f"{blk}.altup_correct_coef.weight",
            correct_scale=f"{blk}.altup_correct_scale.weight",
            streams=hp.streams,
        )
        layer_input = per_layer.layer_input(hp, i, hp.n_layer_input, self.head(hp))
        return Block(i, (laurel, attention, self.feed_forward(hp, i), layer_input), altup=altup)

    def attention(self, hp: HParams, i: int) -> Attention:
        assert isinstance(hp, Gemma3nHParams)
        local = hp.is_local[i]
        part = replace(
            with_head_norms(super().attention(hp, i), hp, i),
            v_norm=Norm("", hp.norm_eps),
            scale=1.0,
            rope=hp.local_rope if local else hp.rope,
            window=hp.window if local else None,
            post_norm=hp.norm(f"blk.{i}.post_attention_norm"),
        )
        if i not in hp.kv_shared:
            return part
        return per_layer.reading(part, self.attention(hp, hp.kv_sources[i]), hp.kv_sources[i])

    def feed_forward(self, hp: HParams, i: int) -> FeedForward:
        assert isinstance(hp, Gemma3nHParams)
        part = hp.feed_forward(i, ff=hp.ff_of[i])
        return replace(part, activation="geglu", post_norm=hp.norm(f"blk.{i}.post_ffw_norm"), cutoff=hp.cutoffs[i])

    def head(self, hparams: HParams) -> Head:
        assert isinstance(hparams, Gemma3nHParams)
        project, merge = (
            tuple(Linear(f"{stem}.weight", number=i) for i in range(hparams.streams - 1)) for stem in _STACKS
        )
        streams = AltUpHead(project, merge, hparams.streams, _LEAST_SQUARE**0.5)
        head = super().head(hparams)
        return replace(head, embedding_scale=hparams.n_embd**0.5, softcap=hparams.logit_cap, streams=streams)


def _whole(config: Config, key: str) -> int:
    """A whole number of config.json that has to be there."""
    need(config, key)
    return integer(config, key)


def _widths(config: Config, layers: int) -> list[int]:
    """Rows of gate and up in each layer."""
    if not isinstance(config.get("intermediate_size"), (list, tuple)):
        return [_whole(config, "intermediate_size")] * layers
    given = sequence(config, "intermediate_size")
    widths = [n for n in given if type(n) is int and n > 0]
    if len(given) != layers or len(widths) != layers:
        raise FormatError(f"config.json: intermediate_size = {given!r:.80}; {layers} whole numbers are needed")
    return widths


def _scales(config: Config, layers: int) -> list[float]:
    """Standard deviations above the mean from which on gates are kept, of each layer; -inf where all are."""
    pattern = config.get("activation_sparsity_pattern")
    if pattern is None:
        sparse = _SPARSE if layers > _SPARSE else 0
        pattern = [_SPARSITY] * sparse + [0.0] * (layers - sparse)
    if not isinstance(pattern, (list, tuple)) or len(pattern) != layers:
        raise FormatError(f"config.json: activation_sparsity_pattern = {pattern!r:.80}; {layers} numbers are needed")
    if any(not isinstance(share, (int, float)) or not 0 <= share < 1 for share in pattern):
        raise FormatError(f"config.json: activation_sparsity_pattern = {pattern!r:.80}; shares are from 0 to below 1")
    return [NormalDist().inv_cdf(share) if share else -float("inf") for share in pattern]


def _cutoffs(keys: Keys, layers: int) -> tuple[float | None, ...]:
    """Standard deviations above the mean from which on gates are kept, of each layer; None where all are."""
    scales = keys.need("activation_sparsity_scale")
    if len(scales) != layers:
        raise FormatError(
            f"metadata key {keys.arch}.activation_sparsity_scale has {len(scales)} entries, {keys.arch}.block_count is "
            f"{layers}; it has to have one for each layer"
        )
    return tuple(None if scale == -math.inf else float(scale) for scale in scales)


def _share(cutoff: float | None) -> float:
    """The share of gates that a cutoff leaves out, as config.json has it: the inverse of `_scales`."""
    return 0.0 if cutoff is None else round(NormalDist().cdf(cutoff), 6)
