"""deepseek4: DeepSeek V4. Hyper-connections, attention to compressed windows of tokens, experts by a token's number.

Every part of a layer reads and writes several residual streams (`blocks.HyperConnection`). Attention has one key for
all heads, which is the value too, a window, and entries that stand for 4 or 128 tokens each; with 4 an indexer selects
them (`blocks.CompressedAttention`). The first layers take the experts of a token from a table, the others select them;
scores are sqrt(softplus). The gate is at most swiglu_limit before the activation, up within -limit … limit, of shared
experts too.

Names and keys are those of llama.cpp, which has ratios of 0 (no entries), 4 and 128 alone. RoPE ("norm") rotates the
last elements of a head. Layers without entries have rope.freq_base and no scaling, the others
attention.compress_rope_freq_base with YaRN, whose cos and sin are not multiplied: files have no factor for that.
The fields of `config.json` that transformers writes and those of published checkpoints say the same:

    layer_types             compress_ratios: 0 sliding_attention, 4 compressed_sparse, 128 heavily_compressed
    mlp_layer_types         num_hash_layers
    rope_parameters         rope_theta and compress_rope_theta, rope_scaling

transformers saves attn.kv_norm as attn.norm, head.weight, and the others with `model.`; published checkpoints have no
prefix, embed.weight and hc_head_fn. Both are read. MTP layers are dropped.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from quantkit.archs.common import experts, rope
from quantkit.archs.common.base import EMBEDDING_RULES, OUTPUT_RULES, Config, Keys, need, refuse
from quantkit.archs.common.blocks import (
    Block,
    CompressedAttention,
    Compressor,
    EntryIndexer,
    EntrySizes,
    Experts,
    Head,
    HParams,
    HyperConnection,
    Norm,
    Rope,
    StreamHead,
)
from quantkit.archs.common.decoder import Decoder
from quantkit.archs.common.shapes import OVERLAPPING_RATE, Sizes
from quantkit.archs.common.tensors import LazyTensor, TensorRule
from quantkit.errors import FormatError, UnsupportedError
from quantkit.formats.gguf.metadata import Entries, shortest
from quantkit.inputs.settings import integer, mapping, real, sequence

_KINDS = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
_RATES = {kind: ratio for kind, ratio in _KINDS.items() if ratio}
_SQRT_SOFTPLUS = 4  # expert_gating_func
_ROPE_DIM = 64 / 512  # of a head, where config.json does not say it
_COMPRESS_BASE = 160000.0
_RATIOS, _HASHED = "attention.compress_ratios", "hash_layer_count"
_LIMITS = ("swiglu_clamp_exp", "swiglu_clamp_shexp")
_RENAMED = (
    (re.compile(r"^(model\.)?"), "model."),
    (re.compile(r"^model\.(?:head|lm_head)\.weight$"), "lm_head.weight"),
    (re.compile(r"^model\.embed\."), "model.embed_tokens."),
    (re.compile(r"^model\.hc_head_"), "model.hc_head.hc_"),
    (re.compile(r"\.attn\.norm\."), ".attn.kv_norm."),
)


@dataclass(frozen=True, kw_only=True)
class DeepSeek4HParams(HParams):
    """HParams with what differs between layers, and the sizes of streams, entries and indexers."""

    ratios: tuple[int, ...]  # tokens of an entry of each layer, 0 without
    n_hashed: int  # first layers whose experts a table gives
    compress_rope: Rope
    q_lora: int
    groups: int
    rank: int
    index_heads: int
    index_dim: int
    top_k: int
    streams: int
    sinkhorn: int
    stream_eps: float
    limits: tuple[float | None, ...]  # of routed experts, of each layer
    limits_shared: tuple[float | None, ...]

    def head_dims(self, layer: int) -> tuple[int, int]:
        """Elements that the cache holds of a token: its key, and `CompressedAttention.kept`."""
        ratio, dim = self.ratios[layer], self.head_dim_k
        if ratio == OVERLAPPING_RATE:
            return dim, 4 * (dim + self.index_dim)
        return dim, 2 * dim if ratio else 0

    def entry_sizes(self, layer: int) -> EntrySizes:
        ratio = self.ratios[layer]
        return EntrySizes(ratio, self.head_dim_k if ratio else 0, self.index_dim if ratio == OVERLAPPING_RATE else 0)


def _has_entries(hp: DeepSeek4HParams, layer: int) -> bool:
    return hp.ratios[layer] > 0


def _has_indexer(hp: DeepSeek4HParams, layer: int) -> bool:
    return hp.ratios[layer] == OVERLAPPING_RATE


def _is_hashed(hp: DeepSeek4HParams, layer: int) -> bool:
    return layer < hp.n_hashed


def _is_routed(hp: DeepSeek4HParams, layer: int) -> bool:
    return layer >= hp.n_hashed


def _rule(ours: str, theirs: str, layers: Callable[[Any, int], bool] | None = None, **given: Any) -> TensorRule:
    return TensorRule(f"blk.N.{ours}", f"model.layers.N.{theirs}", layers=layers, **given)


def _whole(ours: str, theirs: str, layers: Callable[[Any, int], bool] | None = None) -> TensorRule:
    """A rule of a float32 tensor whose checkpoint name is complete."""
    return _rule(f"{ours}.weight", theirs, layers, full_names=True, f32=True)


def _compressor_rules(ours: str, theirs: str, layers: Callable[[Any, int], bool]) -> tuple[TensorRule, ...]:
    return (
        _rule(f"{ours}_kv", f"{theirs}.wkv", layers),
        _rule(f"{ours}_gate", f"{theirs}.wgate", layers),
        _whole(f"{ours}_ape", f"{theirs}.ape", layers),
        _rule(f"{ours}_norm", f"{theirs}.norm", layers, f32=True),
    )


def _stream_rules(part: str) -> tuple[TensorRule, ...]:
    return tuple(_whole(f"hc_{part}_{name}", f"hc_{part}_{name}") for name in ("fn", "base", "scale"))


_EXPERTS = ("w1", "w3", "w2")  # gate, up, down


class DeepSeek4(Decoder):
    """DeepSeek V4."""

    name = "deepseek4"
    hf: ClassVar[tuple[str, ...]] = ("DeepseekV4ForCausalLM",)
    model_type = "deepseek_v4"
    rope_style = "norm"
    rotary_fraction = _ROPE_DIM
    biased: ClassVar[tuple[str, ...]] = ()
    rules: ClassVar[tuple[TensorRule, ...]] = (
        *EMBEDDING_RULES,
        *_stream_rules("attn"),
        _rule("attn_norm", "attn_norm", f32=True),
        _whole("attn_sinks", "attn.attn_sink"),
        _rule("attn_q_a", "attn.wq_a"),
        _rule("attn_q_a_norm", "attn.q_norm", f32=True),
        _rule("attn_q_b", "attn.wq_b"),
        _rule("attn_kv", "attn.wkv"),
        _rule("attn_kv_a_norm", "attn.kv_norm", f32=True),
        *_compressor_rules("attn_compressor", "attn.compressor", _has_entries),
        _rule("indexer.proj", "attn.indexer.weights_proj", _has_indexer),
        _rule("indexer.attn_q_b", "attn.indexer.wq_b", _has_indexer),
        *_compressor_rules("indexer_compressor", "attn.indexer.compressor", _has_indexer),
        _rule("attn_output_a", "attn.wo_a"),
        _rule("attn_output_b", "attn.wo_b"),
        *_stream_rules("ffn"),
        _rule("ffn_norm", "ffn_norm", f32=True),
        _rule("ffn_gate_inp", "ffn.gate", f32=True),
        _rule("ffn_gate_tid2eid.weight", "ffn.gate.tid2eid", _is_hashed, full_names=True, integers=True),
        _rule("exp_probs_b.bias", "ffn.gate.bias", _is_routed, full_names=True, f32=True),
        *(_rule(f"ffn_{ours}_exps", f"ffn.experts.E.{w}") for ours, w in zip(("gate", "up", "down"), _EXPERTS)),
        *(_rule(f"ffn_{ours}_shexp", f"ffn.shared_experts.{w}") for ours, w in zip(("gate", "up", "down"), _EXPERTS)),
        *(
            TensorRule(f"output_hc_{name}.weight", f"model.hc_head.hc_{name}", full_names=True, f32=True)
            for name in ("fn", "base", "scale")
        ),
        *OUTPUT_RULES,
    )
    shape_overrides: ClassVar[Mapping[str, str]] = {"attn_kv_a_norm": "key"}
    size_overrides: ClassVar[Mapping[str, Callable[[Sizes], int]]] = {}
    EXAMPLE: ClassVar[dict[str, Any]] = {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "vocab_size": 320,
        "hidden_size": 64,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "qk_rope_head_dim": 32,
        "q_lora_rank": 32,
        "o_groups": 2,
        "o_lora_rank": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_shared_experts": 1,
        "scoring_func": "sqrtsoftplus",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "compress_ratios": [0, 4, 128, 4],
        "compress_rope_theta": 160000.0,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
        },
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "num_hash_layers": 2,
        "swiglu_limit": 0.5,
        "sliding_window": 24,
        "index_n_heads": 8,
        "index_head_dim": 64,
        "index_topk": 16,
        "num_nextn_predict_layers": 0,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }

    # ------------------------------------------------------------------------------------------------ checkpoint side

    def canonical(self, name: str) -> str:
        for pattern, ours in _RENAMED:
            name = pattern.sub(ours, name, count=1)
        return name

    def dropped_tensors(self, config: Config, names: Collection[str]) -> dict[str, list[str]]:
        found = super().dropped_tensors(config, names)
        if own := [name for name in names if name.startswith("model.mtp.")]:
            found["MTP layers"] = own
        return found

    def rope_dim(self, config: Config) -> int:
        if (given := integer(config, "qk_rope_head_dim")) > 0:
            return given
        part = real(_rope_settings(config)[0], "partial_rotary_factor") or real(config, "partial_rotary_factor")
        return int(self.head_dim(config) * (part or _ROPE_DIM))

    def metadata(self, config: Config) -> Entries:
        a = self.name
        for key, accepted in (
            ("attention_bias", (False,)), ("mlp_bias", (False,)), ("tie_word_embeddings", (False,)),
            ("scoring_func", ("sqrtsoftplus",)), ("norm_topk_prob", (True,)), ("num_key_value_heads", (1,)),
            ("n_shared_experts", (1,)),
        ):  # fmt: skip
            refuse(config, key, accepted)
        main, compress = _rope_settings(config)
        refuse(main, "rope_type", ("default",))
        refuse(compress, "attention_factor", (1, 1.0))
        layers, ff = int(need(config, "num_hidden_layers")), need(config, "moe_intermediate_size")
        given = {"num_key_value_heads": 1, **config, "intermediate_size": ff, "rope_theta": main["rope_theta"]}
        entries = super().metadata(given | {"rope_scaling": None, "rope_parameters": None})
        entries |= rope.scaling_entries(a, {**compress, "attention_factor": None, "mscale": None})
        entries |= experts.entries(a, {"norm_topk_prob": True, **config, "mlp_layer_types": None}) | self.head_lengths(
            config
        )
        own: Entries = {
            "expert_gating_func": (_SQRT_SOFTPLUS, "u32"),
            "attention.q_lora_rank": (need(config, "q_lora_rank"), "u32"),
            "attention.output_lora_rank": (need(config, "o_lora_rank"), "u32"),
            "attention.output_group_count": (need(config, "o_groups"), "u32"),
            "attention.sliding_window": (need(config, "sliding_window"), "u32"),
            "attention.compress_rope_freq_base": (float(compress["rope_theta"]), "f32"),
            "attention.indexer.head_count": (need(config, "index_n_heads"), "u32"),
            "attention.indexer.key_length": (need(config, "index_head_dim"), "u32"),
            "attention.indexer.top_k": (need(config, "index_topk"), "u32"),
            "hyper_connection.count": (need(config, "hc_mult"), "u32"),
            "hyper_connection.sinkhorn_iterations": (need(config, "hc_sinkhorn_iters"), "u32"),
            "hyper_connection.epsilon": (float(need(config, "hc_eps")), "f32"),
            _RATIOS: (_ratios(config, layers), "u32"),
            _HASHED: (_hash_layers(config, layers), "u32"),
        }
        if limit := real(config, "swiglu_limit"):
            own["swiglu_clamp_exp"] = ([float(limit)] * layers, "f32")
        return entries | {f"{a}.{key}": entry for key, entry in own.items()}

    def config(self, metadata: Mapping[str, object], tensors: Mapping[str, LazyTensor]) -> dict[str, Any]:
        hp = self.hparams(metadata, tensors.keys())
        found = super().config(metadata, tensors) | experts.config(hp)
        for key in ("intermediate_size", "first_k_dense_replace", "n_group", "topk_group"):
            found.pop(key, None)
        limits = {*hp.limits, *hp.limits_shared}
        if len(limits) > 1:
            raise UnsupportedError(
                f"{self.name}.{_LIMITS[0]} and {_LIMITS[1]} differ ({limits}); {self.hf[0]} has one swiglu_limit"
            )
        limit = limits.pop()
        if limit is None:
            raise UnsupportedError(f"{self.name} without {_LIMITS[0]}: {self.hf[0]} has no model without swiglu_limit")
        return found | {
            "head_dim": hp.head_dim_k,
            "qk_rope_head_dim": hp.rope_dim,
            "q_lora_rank": hp.q_lora,
            "o_groups": hp.groups,
            "o_lora_rank": hp.rank,
            "scoring_func": "sqrtsoftplus",
            "compress_ratios": list(hp.ratios[: hp.n_main]),
            "compress_rope_theta": shortest(hp.compress_rope.base),
            "hc_mult": hp.streams,
            "hc_sinkhorn_iters": hp.sinkhorn,
            "hc_eps": shortest(hp.stream_eps),
            "num_hash_layers": hp.n_hashed,
            "swiglu_limit": shortest(limit),
            "sliding_window": hp.window,
            "index_n_heads": hp.index_heads,
            "index_head_dim": hp.index_dim,
            "index_topk": hp.top_k,
            "num_nextn_predict_layers": 0,
        }

    # --------------------------------------------------------------------------------------------------- runtime side

    def hparams(self, metadata: Mapping[str, object], tensors: Collection[str] = ()) -> DeepSeek4HParams:
        return DeepSeek4HParams(**self.numbers(Keys(self.name, metadata), tensors))

    def numbers(self, keys: Keys, tensors: Collection[str]) -> dict[str, Any]:
        gating = keys.number("expert_gating_func")
        if gating != _SQRT_SOFTPLUS:
            raise UnsupportedError(f"{self.name}.expert_gating_func = {gating}; known: {_SQRT_SOFTPLUS} (sqrtsoftplus)")
        ours = {  # llama.cpp's converter leaves out the first; the second is known
            f"{self.name}.feed_forward_length": keys.number("expert_feed_forward_length"),
            f"{self.name}.expert_gating_func": experts.GATING_NUMBERS["sigmoid"],
        }
        given = Keys(self.name, {**keys.metadata, **ours})
        found = super().numbers(given, tensors) | experts.numbers(given, tensors, biased=True)
        layers = found["n_layer"]
        window = found["window"]
        if window is None:
            raise FormatError(f"metadata key {self.name}.attention.sliding_window has to be 1 or more")
        base = keys.real("attention.compress_rope_freq_base")
        limits, shared = (_limits(keys, key, layers) for key in _LIMITS)
        return found | {
            "gating": "sqrtsoftplus",
            "rope": replace(found["rope"], scale=1.0, yarn=None),
            "compress_rope": _unscaled(replace(found["rope"], base=base)),
            "ratios": _known_ratios(keys, layers),
            "n_hashed": keys.number(_HASHED),
            "q_lora": keys.number("attention.q_lora_rank"),
            "groups": keys.number("attention.output_group_count"),
            "rank": keys.number("attention.output_lora_rank"),
            "index_heads": keys.number("attention.indexer.head_count"),
            "index_dim": keys.number("attention.indexer.key_length"),
            "top_k": keys.number("attention.indexer.top_k"),
            "streams": keys.number("hyper_connection.count"),
            "sinkhorn": keys.number("hyper_connection.sinkhorn_iterations"),
            "stream_eps": keys.real("hyper_connection.epsilon"),
            "limits": limits,
            "limits_shared": limits if keys.get(_LIMITS[1]) is None else shared,
        }

    def block(self, hp: HParams, i: int) -> Block:
        assert isinstance(hp, DeepSeek4HParams)
        hyper = tuple(_connection(hp, f"blk.{i}.hc_{part}") for part in ("attn", "ffn"))
        return Block(i, (self.compressed_attention(hp, i), self.routed(hp, i)), hyper=hyper)

    def compressed_attention(self, hp: DeepSeek4HParams, i: int) -> CompressedAttention:
        """The attention of layer `i`."""
        b = f"blk.{i}"
        compressor, indexer = None, None
        if _has_entries(hp, i):
            compressor = _compressor(hp, i, f"{b}.attn_compressor", hp.head_dim_k)
        if _has_indexer(hp, i):
            indexer = EntryIndexer(
                q_b=hp.linear(f"{b}.indexer.attn_q_b"),
                weights=hp.linear(f"{b}.indexer.proj"),
                compressor=_compressor(hp, i, f"{b}.indexer_compressor", hp.index_dim),
                heads=hp.index_heads,
                top_k=hp.top_k,
            )
        assert hp.window is not None
        return CompressedAttention(
            norm=hp.norm(f"{b}.attn_norm"),
            q_a=hp.linear(f"{b}.attn_q_a"),
            q_a_norm=hp.norm(f"{b}.attn_q_a_norm"),
            q_b=hp.linear(f"{b}.attn_q_b"),
            q_norm=Norm("", hp.norm_eps),
            kv=hp.linear(f"{b}.attn_kv"),
            kv_norm=hp.norm(f"{b}.attn_kv_a_norm"),
            sinks=f"{b}.attn_sinks.weight",
            out_a=hp.linear(f"{b}.attn_output_a"),
            out_b=hp.linear(f"{b}.attn_output_b"),
            compressor=compressor,
            indexer=indexer,
            heads=hp.n_head,
            dim=hp.head_dim_k,
            q_lora=hp.q_lora,
            window=hp.window,
            groups=hp.groups,
            rank=hp.rank,
            scale=hp.head_dim_k**-0.5,
            rope=hp.compress_rope if compressor else hp.rope,
        )

    def routed(self, hp: DeepSeek4HParams, i: int) -> Experts:
        """The experts of layer `i`."""
        part = experts.routed(hp, i)
        if _is_hashed(hp, i):
            part = replace(part, choice_bias=None, table=f"blk.{i}.ffn_gate_tid2eid.weight")
        shared = part.shared and replace(part.shared, **_clamped(hp.limits_shared[i]))
        return replace(part, **_clamped(hp.limits[i]), shared=shared)

    def head(self, hp: HParams) -> Head:
        assert isinstance(hp, DeepSeek4HParams)
        stem = "output_hc"
        streams = StreamHead(
            hp.linear(f"{stem}_fn"), f"{stem}_base.weight", f"{stem}_scale.weight", Norm("", hp.norm_eps), hp.streams,
            hp.stream_eps,
        )  # fmt: skip
        return replace(super().head(hp), streams=streams)


def _clamped(limit: float | None) -> dict[str, Any]:
    """The activation of a feed-forward with this limit."""
    return {} if limit is None else {"activation": "swiglu_clamped", "limit": limit}


def _connection(hp: DeepSeek4HParams, stem: str) -> HyperConnection:
    return HyperConnection(
        fn=hp.linear(f"{stem}_fn"),
        base=f"{stem}_base.weight",
        scale=f"{stem}_scale.weight",
        norm=Norm("", hp.norm_eps),
        streams=hp.streams,
        iterations=hp.sinkhorn,
        eps=hp.stream_eps,
    )


def _compressor(hp: DeepSeek4HParams, i: int, stem: str, dim: int) -> Compressor:
    return Compressor(
        kv=hp.linear(f"{stem}_kv"),
        gate=hp.linear(f"{stem}_gate"),
        ape=f"{stem}_ape.weight",
        norm=hp.norm(f"{stem}_norm"),
        dim=dim,
        rate=hp.ratios[i],
        overlapping=hp.ratios[i] == OVERLAPPING_RATE,
    )


def _unscaled(scaled: Rope) -> Rope:
    """RoPE with YaRN whose cos and sin are not multiplied."""
    if scaled.yarn is None:
        return scaled
    return replace(scaled, yarn=replace(scaled.yarn, attn_factor=1 / (1 + 0.1 * math.log(1 / scaled.scale))))


def _known_ratios(keys: Keys, layers: int) -> tuple[int, ...]:
    """The ratio of each layer. UnsupportedError for one that no layer has in llama.cpp."""
    given = keys.need(_RATIOS)
    found = list(given) if isinstance(given, (list, tuple)) else [given] * layers
    if len(found) < layers:
        raise FormatError(
            f"metadata key {keys.arch}.{_RATIOS} has {len(found)} entries, {keys.arch}.block_count is {layers}"
        )
    _check_ratios(f"{keys.arch}.{_RATIOS}", found)
    return tuple(int(ratio) for ratio in found[:layers])


def _check_ratios(source: str, ratios: Iterable[object]) -> None:
    if unknown := [ratio for ratio in ratios if type(ratio) is not int or ratio not in _KINDS.values()]:
        raise UnsupportedError(f"{source} has {unknown[0]!r}; known: {', '.join(map(str, _KINDS.values()))}")


def _limits(keys: Keys, key: str, layers: int) -> tuple[float | None, ...]:
    """The limit of each layer; None for 0."""
    given = keys.get(key, 0.0)
    found = list(given) if isinstance(given, (list, tuple)) else [given] * layers
    if len(found) < layers:
        raise FormatError(
            f"metadata key {keys.arch}.{key} has {len(found)} entries, {keys.arch}.block_count is {layers}"
        )
    return tuple(float(limit) or None for limit in found[:layers])


def _rope_settings(config: Config) -> tuple[dict[str, Any], dict[str, Any]]:
    """The RoPE of layers without entries and of those with them, from either form of config.json."""
    given = {**mapping(config, "rope_scaling"), **mapping(config, "rope_parameters")}
    main, compress = mapping(given, "main"), mapping(given, "compress")
    if not (main and compress):
        main, compress = {}, {k: v for k, v in given.items() if k not in ("main", "compress", "rope_theta")}
    found = []
    for settings, key, base in ((main, "rope_theta", 10000.0), (compress, "compress_rope_theta", _COMPRESS_BASE)):
        own = {"rope_theta": config.get(key) or base}
        own |= {name: value for name, value in settings.items() if value is not None}
        own["rope_type"] = own.pop("rope_type", None) or own.pop("type", None) or "default"
        found.append(own)
    return found[0], found[1]


def _ratios(config: Config, layers: int) -> list[int]:
    """The ratio of each layer, from layer_types or compress_ratios."""
    given = mapping(config, "compress_rates")
    old = {"compressed_sparse_attention": "compress_rate_csa", "heavily_compressed_attention": "compress_rate_hca"}
    for kind, ratio in _RATES.items():
        for source, value in ((f"compress_rates.{kind}", given.get(kind)), (old[kind], config.get(old[kind]))):
            if value is not None and value != ratio:
                raise UnsupportedError(
                    f"config.json: {source} = {value!r} is not supported by quantkit; known: {ratio}"
                )
    kinds, ratios = list(sequence(config, "layer_types")), list(sequence(config, "compress_ratios"))
    if kinds:
        if unknown := [kind for kind in kinds if kind not in _KINDS]:
            raise UnsupportedError(f"config.json: layer_types has {unknown[0]!r}; known: {', '.join(_KINDS)}")
        ratios = [_KINDS[str(kind)] for kind in kinds]
    if not ratios:
        raise FormatError("config.json has neither layer_types nor compress_ratios, which give each layer's attention")
    if len(ratios) < layers:
        raise FormatError(f"config.json: {len(ratios)} ratios or layer_types, num_hidden_layers = {layers}")
    _check_ratios("config.json: compress_ratios", ratios)
    return [int(str(ratio)) for ratio in ratios[:layers]]


def _hash_layers(config: Config, layers: int) -> int:
    """The first layers whose experts a table gives, from mlp_layer_types or num_hash_layers."""
    kinds = list(sequence(config, "mlp_layer_types"))
    if not kinds:
        return min(int(need(config, "num_hash_layers")), layers)
    count = kinds.count("hash_moe")
    if kinds[:layers] != ["hash_moe"] * count + ["moe"] * (layers - count):
        raise UnsupportedError(
            f"config.json: mlp_layer_types = {kinds!r:.80}; GGUF has a number of layers with hash_moe, which come "
            f"before all others, of num_hidden_layers = {layers}"
        )
    return count
