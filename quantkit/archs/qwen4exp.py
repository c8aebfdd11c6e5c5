"""qwen4exp: Qwen4-Exp (Qwen3.8-Flash-Next), its text model.

Layers mix tokens and have experts as those of qwen35moe (archs/qwen35moe.py). What differs:

- A token has several residual streams. In place of a layer's norms, a mixer of low rank (hc_attn, hc_ffn) makes the
  input of each part of them, and says how much of its output each stream gets. A last one (output_hc) is before the
  output matrix; there is no output_norm.
- Layers with attention have an indexer, whose keys are in the cache and which selects blocks of tokens.
- A layer looks up n-grams of tokens in a table, by hashes (PLE). Checkpoints have the table in shards of its rows.

    hc_count, hc_lowrank           hyper_connection.count, hyper_connection.low_rank
    indexer_n_heads                attention.indexer.head_count
    indexer_head_dim               attention.indexer.key_length
    indexer_budget                 attention.indexer.top_k: tokens
    indexer_compress_ratio         attention.compress_ratios, of each layer; 0 in recurrent ones
    ple_layer_ids                  ple.layers, which count from 0 and not from 1
    ngram_size, heads_per_ngram    ple.ngram_size, ple.heads_per_ngram: hashes of 2 to ngram_size tokens each
    ple_conv_kernel_size           ple.conv_kernel
    ple_embed_dim                  embedding_length_per_layer_input, of one hash
    eos_token_id                   ple.eos_token_id: n-grams do not go beyond it
    seed                           ple.layer_multipliers, in checkpoints too
    ngram_vocab_size_base          ple.head_vocab_sizes and ple.head_offsets, in checkpoints too: the primes from it on

The experts' activation and the gate of recurrent layers have no key: llama.cpp knows SwiGLU and a sigmoid. In text, all
sections of the multimodal RoPE have the same position, so it is ordinary RoPE.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from quantkit.archs.common import hybrid, ngrams
from quantkit.archs.common.base import EMBEDDING_RULES, Config, Keys, need, refuse, rope_parameters
from quantkit.archs.common.blocks import (
    TABLE_MULTIPLE,
    Attention,
    Block,
    DeltaNet,
    EntrySizes,
    Head,
    HParams,
    NGrams,
    Part,
    PooledIndexer,
    StateShapes,
    StreamMixer,
)
from quantkit.archs.common.experts import routed
from quantkit.archs.common.hybrid import HybridMoE, is_attention, norm_rule, require_tensors
from quantkit.archs.common.ngrams import EMBEDDING, NGramNumbers
from quantkit.archs.common.shapes import Sizes
from quantkit.archs.common.tensors import LazyTensor, Piece, Shape, TensorRule, Transform, fill_name
from quantkit.archs.common.transforms import GatherRows, SqueezeMiddle
from quantkit.archs.qwen35 import MROPE_SECTIONS, RECURRENT_RULES
from quantkit.errors import FormatError, UnsupportedError
from quantkit.formats.gguf.metadata import Entries
from quantkit.formats.safetensors import CheckpointTensor
from quantkit.inputs.settings import sequence

_BUFFERS = re.compile(
    rf"\.{EMBEDDING}\.(layer_multipliers|ngram_heads_vocab_sizes|ngram_heads_offsets)$"
)  # they follow from config.json
_OF_BUFFER = {
    "layer_multipliers": "layer_multipliers",
    "ngram_heads_vocab_sizes": "head_vocab_sizes",
    "ngram_heads_offsets": "head_offsets",
}


@dataclass(frozen=True, kw_only=True)
class Qwen4ExpHParams(HParams):
    """HParams with the streams, the indexers and the layers that look up n-grams."""

    streams: int
    low_rank: int
    index_heads: int
    index_dim: int
    index_rate: int
    index_top_k: int
    ngrams: NGramNumbers

    def block_index_dim(self, layer: int) -> int:
        return 0 if layer in self.recurrent else self.index_dim

    def entry_sizes(self, layer: int) -> EntrySizes | None:
        return None if layer in self.recurrent else EntrySizes(self.index_rate, 0, self.index_dim)

    def further_states(self) -> dict[int, StateShapes]:
        shapes = self.ngrams.state_shapes(self.streams * self.n_embd)
        return {self.n_layer + i: shapes for i in range(len(self.ngrams.layers))}


def _has_ngrams(hp: Qwen4ExpHParams, layer: int) -> bool:
    return layer in hp.ngrams.layers


def _mixer_rules(ours: str, theirs: str, inject: bool = True) -> tuple[TensorRule, ...]:
    """The tensors of a mixer of streams; `inject`: it says what the streams get of an output."""
    return (
        norm_rule(f"{ours}_norm", f"{theirs}.hc_norm"),
        TensorRule(f"{ours}_down", f"{theirs}.input_mix_weight_down"),
        TensorRule(f"{ours}_up", f"{theirs}.input_mix_weight_up"),
        *((TensorRule(f"{ours}_inject", f"{theirs}.block_inject_weight"),) if inject else ()),
    )


def _index_rows(part: str) -> Callable[[Qwen4ExpHParams], Transform]:
    """The rows of the queries or of the key in the indexer's matrix."""

    def transform(hp: Qwen4ExpHParams) -> Transform:
        queries = hp.index_heads * hp.index_dim
        return GatherRows([(0, 0, queries) if part == "q" else (0, queries, hp.index_dim)])

    return transform


def _indexer_rules() -> tuple[TensorRule, ...]:
    """Checkpoints have one matrix: the rows of all queries, then those of the key."""
    stem = "model.layers.N.self_attn.indexer"
    return (
        *(
            TensorRule(
                f"blk.N.indexer.{x}_proj",
                f"{stem}.index_qk_proj",
                _index_rows(x),
                layers=is_attention,
                to_gguf_only=True,
            )
            for x in "qk"
        ),
        *(norm_rule(f"blk.N.indexer.{x}_norm", f"{stem}.{x}_layernorm", layers=is_attention) for x in "qk"),
    )


def _ngram_rules() -> tuple[TensorRule, ...]:
    stem = "model.layers.N.ple"
    return (
        TensorRule("blk.N.ple_key", f"{stem}.key_proj", layers=_has_ngrams),
        TensorRule("blk.N.ple_value", f"{stem}.value_proj", layers=_has_ngrams),
        *(norm_rule(f"blk.N.ple_norm_{x}", f"{stem}.norm_{x}", layers=_has_ngrams) for x in ("key", "query", "conv")),
        TensorRule("blk.N.ple_conv1d", f"{stem}.conv1d", lambda hp: SqueezeMiddle(), layers=_has_ngrams, f32=True),
    )


_TABLE = TensorRule("per_layer_token_embd", f"model.layers.N.{EMBEDDING}.ngram_embedding", layers=_has_ngrams,
                    to_gguf_only=True)  # fmt: skip


class Qwen4Exp(HybridMoE):
    """Qwen4-Exp, its text model."""

    name = "qwen4exp"
    hf: ClassVar[tuple[str, ...]] = ("Qwen4ExpForCausalLM", "Qwen4ExpForConditionalGeneration")
    model_type = "qwen4_exp_text"
    tiled = True
    defaults: ClassVar[dict[str, Any]] = {  # those of transformers
        "hidden_act": "silu",
        "hc_count": 4,
        "hc_lowrank": 320,
        "ple_conv_kernel_size": 4,
        "ngram_size": 3,
        "heads_per_ngram": 8,
        "ngram_vocab_size_base": 20_000_000,
        "make_ngram_vocab_size_divisible_by": TABLE_MULTIPLE,
        "seed": 1234,
        "norm_topk_prob": True,
    }
    rules: ClassVar[tuple[TensorRule, ...]] = (
        *EMBEDDING_RULES,
        _TABLE,
        *_mixer_rules("blk.N.hc_attn", "model.layers.N.attn_hyper_connection"),
        *hybrid.ATTENTION_RULES[1:],
        *_indexer_rules(),
        *RECURRENT_RULES,
        *_ngram_rules(),
        *_mixer_rules("blk.N.hc_ffn", "model.layers.N.mlp_hyper_connection"),
        *hybrid.MOE_RULES,
        *_mixer_rules("output_hc", "model.hyper_connection_mixer", inject=False),
        *hybrid.OUTPUT_RULES[1:],
    )
    shape_overrides: ClassVar[Mapping[str, str]] = {"per_layer_token_embd.weight": "ngram_rows layer_input"}
    size_overrides: ClassVar[dict[str, Callable[[Sizes], int]]] = {
        **HybridMoE.size_overrides,
        "ngram_rows": ngrams.table_rows,
    }

    EXAMPLE: ClassVar[dict[str, Any]] = {
        "architectures": ["Qwen4ExpForCausalLM"],
        "model_type": "qwen4_exp_text",
        "vocab_size": 320,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "full_attention_interval": 4,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64,
        "hc_count": 3,
        "hc_lowrank": 32,
        "indexer_n_heads": 8,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 32,
        "indexer_budget": 32,
        "indexer_compress_ratio": 4,
        "ple_layer_ids": [2],
        "ple_embed_dim": 192,
        "ple_conv_kernel_size": 4,
        "ngram_size": 3,
        "heads_per_ngram": 3,
        "ngram_vocab_size_base": 50,
        "split_ngram_parts": 128,
        "seed": 7,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
        "hidden_act": "silu",
        "output_gate_type": "sigmoid",
        "attention_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": False,
    }

    # ------------------------------------------------------------------------------------------------ checkpoint side

    def rules_of(self, config: Config) -> tuple[TensorRule, ...]:
        found = super().rules_of(config)
        return found if sequence(config, "ple_layer_ids") else tuple(rule for rule in found if rule is not _TABLE)

    def with_mtp(self, config: Config, policy: str, names: Collection[str] | None = None) -> dict[str, Any]:
        if policy in ("keep", "only"):
            raise UnsupportedError(f"--mtp {policy}: this version does not convert the MTP layers of {self.name}")
        return super().with_mtp(config, policy, names)

    def dropped_tensors(self, config: Config, names: Collection[str]) -> dict[str, list[str]]:
        found = super().dropped_tensors(config, names)
        if buffers := [name for name in names if _BUFFERS.search(name)]:
            found["numbers of hashes, which are keys"] = buffers
        return found

    def scalar_keys(self, config: Config, tensors: Mapping[str, LazyTensor]) -> Entries:
        """None; but UnsupportedError where the numbers of hashes are not those that follow from config.json."""
        keys = self.metadata(config)
        for name, tensor in tensors.items():
            if (found := _BUFFERS.search(name)) is None:
                continue
            expected = keys[f"{self.name}.ple.{_OF_BUFFER[found[1]]}"][0]
            if not isinstance(tensor, CheckpointTensor) or tensor.dtype != "I64":
                raise UnsupportedError(f"tensor {name} has to be int64")
            if tensor.raw().view("<i8").tolist() != expected:
                raise UnsupportedError(f"tensor {name} has other numbers than follow from config.json: {expected}")
        return {}

    def to_gguf(self, config: Config, shapes: Mapping[str, Shape]) -> list[Piece]:
        """As `Arch.to_gguf`; the shards of the table are joined, and it comes after the embedding."""
        joined, shards = ngrams.join_shards(shapes)
        found = super().to_gguf(config, joined)
        tables = [piece for piece in found if piece.name == f"{_TABLE.gguf}.weight"]
        others = [piece for piece in found if piece not in tables]
        if shards:
            tables = [
                replace(piece, sources=shards, transform=ngrams.joined([shapes[x][0] for x in shards]))
                for piece in tables
            ]
        return [*others[:1], *tables, *others[1:]]

    def is_generated(self, name: str) -> bool:
        return name == f"{_TABLE.gguf}.weight" or name.endswith((".indexer.q_proj.weight", ".indexer.k_proj.weight"))

    def to_hf(self, hparams: HParams, shapes: Mapping[str, Shape]) -> list[Piece]:
        """As `Arch.to_hf`; queries and key of indexers are joined, the table is split into shards."""
        assert isinstance(hparams, Qwen4ExpHParams)
        found = super().to_hf(hparams, shapes)
        for i in (i for i in range(hparams.n_layer) if is_attention(hparams, i)):
            q, k = (f"blk.{i}.indexer.{x}_proj.weight" for x in "qk")
            require_tensors((q, k), shapes)
            transform = GatherRows([(0, 0, shapes[q][0]), (1, 0, shapes[k][0])])
            name = f"model.layers.{i}.self_attn.indexer.index_qk_proj.weight"
            found.append(Piece(name, transform.shape(shapes[q], shapes[k]), (q, k), transform, False))
        table = f"{_TABLE.gguf}.weight"
        for i in hparams.ngrams.layers:
            require_tensors((table,), shapes)
            rows, width = shapes[table][0] // TABLE_MULTIPLE, shapes[table][1]
            stem = fill_name(_TABLE.hf, i)
            found += [
                Piece(f"{stem}.shard_{n}.weight", (rows, width), (table,), GatherRows([(0, n * rows, rows)]), False)
                for n in range(TABLE_MULTIPLE)
            ]
        return found

    def metadata(self, config: Config) -> Entries:
        for key, accepted in (
            ("attention_bias", (False,)), ("norm_topk_prob", (True,)), ("indexer_kv_heads", (1,)),
            ("make_ngram_vocab_size_divisible_by", (TABLE_MULTIPLE,)),
        ):  # fmt: skip
            refuse(config, key, accepted)
        gate = config.get("output_gate_type") or config.get("hidden_act")
        if gate != "sigmoid":
            raise UnsupportedError(f"config.json: output_gate_type = {gate!r}; llama.cpp has no key for it: 'sigmoid'")
        kinds = ["full_attention" if kind == "indexed_attention" else kind for kind in sequence(config, "layer_types")]
        found = super().metadata({**config, "layer_types": kinds, "norm_topk_prob": None})
        every, layers = found[f"{self.name}.full_attention_interval"][0], int(need(config, "num_hidden_layers"))
        own: Entries = {
            "rope.dimension_sections": (_sections(config, self.rope_dim(config)), "i32"),
            "hyper_connection.count": (need(config, "hc_count"), "u32"),
            "hyper_connection.low_rank": (need(config, "hc_lowrank"), "u32"),
            **_indexer(config, [(i + 1) % every == 0 for i in range(layers)]),
            **ngrams.entries(config, [(i + 1) % every != 0 for i in range(layers)]),
        }
        return found | {f"{self.name}.{key}": entry for key, entry in own.items()}

    def config(self, metadata: Mapping[str, object], tensors: Mapping[str, LazyTensor]) -> dict[str, Any]:
        hp, keys = self.hparams(metadata, tensors.keys()), Keys(self.name, metadata)
        found = super().config(metadata, tensors)
        if not found.pop("norm_topk_prob"):
            raise UnsupportedError(f"{self.name}.expert_weights_norm is false; transformers always divides the weights")
        sections = [int(n) for n in keys.get("rope.dimension_sections", MROPE_SECTIONS)]
        parameters = {"rope_type": "default"} | found.pop("rope_scaling", {})
        parameters |= {key: found.pop(key) for key in ("rope_theta", "partial_rotary_factor")}
        return found | ngrams.settings(self.name, hp.n_vocab, hp.ngrams, metadata) | {
            "rope_parameters": parameters | {"mrope_section": sections[:3], "mrope_interleaved": True},
            "norm_topk_prob": True,
            "hc_count": hp.streams,
            "hc_lowrank": hp.low_rank,
            "indexer_n_heads": hp.index_heads,
            "indexer_kv_heads": 1,
            "indexer_head_dim": hp.index_dim,
            "indexer_budget": hp.index_top_k,
            "indexer_compress_ratio": hp.index_rate,
            "output_gate_type": "sigmoid",
        }  # fmt: skip

    # --------------------------------------------------------------------------------------------------- runtime side

    def hparams(self, metadata: Mapping[str, object], tensors: Collection[str] = ()) -> Qwen4ExpHParams:
        return Qwen4ExpHParams(**self.numbers(Keys(self.name, metadata), tensors))

    def numbers(self, keys: Keys, tensors: Collection[str]) -> dict[str, Any]:
        found = super().numbers(keys, tensors)
        rate, top_k = _rate(keys, found["recurrent"]), keys.number("attention.indexer.top_k")
        dim = keys.number("attention.indexer.key_length")
        if top_k % rate:
            raise FormatError(
                f"{self.name}.attention.indexer.top_k = {top_k} is not a multiple of {self.name}."
                f"attention.compress_ratios = {rate}"
            )
        if found["rope"].dim > dim:
            raise FormatError(
                f"{self.name}.rope.dimension_count = {found['rope'].dim}, but an indexer's key has {dim} elements"
            )
        return found  | {
            "streams": keys.number("hyper_connection.count"),
            "low_rank": keys.number("hyper_connection.low_rank"),
            "index_heads": keys.number("attention.indexer.head_count"),
            "index_dim": dim,
            "index_rate": rate,
            "index_top_k": top_k,
            "ngrams": ngrams.numbers(keys, found["n_vocab"], found["recurrent"]),
        }  # fmt: skip

    def block(self, hp: HParams, i: int) -> Block:
        assert isinstance(hp, Qwen4ExpHParams)
        parts: tuple[Part, ...] = (self.mixer(hp, i), self.feed_forward(hp, i))
        mixers = tuple(_mixer(hp, f"blk.{i}.hc_{part}") for part in ("attn", "ffn"))
        if i not in hp.ngrams.layers:
            return Block(i, parts, hyper=mixers)
        state = hp.n_layer + hp.ngrams.layers.index(i)
        return Block(i, (_lookup(hp, i), *parts), hyper=(None, *mixers), layers=(state, i, i))

    def delta_net(self, hp: HParams, i: int) -> DeltaNet:
        return replace(super().delta_net(hp, i), norm=None, gating="sigmoid")

    def attention(self, hp: HParams, i: int) -> Attention:
        assert isinstance(hp, Qwen4ExpHParams)
        stem, part = f"blk.{i}.indexer", super().attention(hp, i)
        indexer = PooledIndexer(
            q=hp.linear(f"{stem}.q_proj"),
            k=hp.linear(f"{stem}.k_proj"),
            q_norm=hp.norm(f"{stem}.q_norm"),
            k_norm=hp.norm(f"{stem}.k_norm"),
            rope=part.rope,
            heads=hp.index_heads,
            dim=hp.index_dim,
            rate=hp.index_rate,
            top_blocks=hp.index_top_k // hp.index_rate,
        )
        return replace(part, norm=None, indexer=indexer)

    def feed_forward(self, hp: HParams, i: int) -> Part:
        part = routed(hp, i)
        shared = part.shared and replace(part.shared, norm=None)
        return replace(part, norm=None, shared=shared, shared_gate=f"blk.{i}.ffn_gate_inp_shexp.weight")

    def head(self, hp: HParams) -> Head:
        assert isinstance(hp, Qwen4ExpHParams)
        return replace(super().head(hp), norm=None, streams=_mixer(hp, "output_hc", inject=False))


def _mixer(hp: Qwen4ExpHParams, stem: str, inject: bool = True) -> StreamMixer:
    part = 1 / hp.streams
    return StreamMixer(
        norm=hp.norm(f"{stem}_norm"),
        down=replace(hp.linear(f"{stem}_down"), factor=part),
        up=hp.linear(f"{stem}_up"),
        inject=replace(hp.linear(f"{stem}_inject"), factor=part) if inject else None,
        streams=hp.streams,
        rank=hp.low_rank,
    )


def _lookup(hp: Qwen4ExpHParams, i: int) -> NGrams:
    """The n-grams of layer `i`."""
    stem = f"blk.{i}.ple"
    return NGrams(
        table=f"{_TABLE.gguf}.weight",
        width=hp.ngrams.width,
        key=hp.linear(f"{stem}_key"),
        value=hp.linear(f"{stem}_value"),
        key_norm=hp.norm(f"{stem}_norm_key"),
        query_norm=hp.norm(f"{stem}_norm_query"),
        conv_norm=hp.norm(f"{stem}_norm_conv"),
        conv=f"{stem}_conv1d.weight",
        kernel=hp.ngrams.kernel,
        streams=hp.streams,
        multipliers=hp.ngrams.multipliers,
        sizes=hp.ngrams.sizes,
        offsets=hp.ngrams.offsets,
        end=hp.ngrams.end,
    )


def _sections(config: Config, rope_dim: int) -> list[int]:
    """rope.dimension_sections. FormatError where config.json's do not cover the pairs that RoPE rotates."""
    parameters = rope_parameters(config)
    refuse(parameters, "mrope_interleaved", (True,))
    given = sequence(parameters, "mrope_section")
    if not given:
        return [*MROPE_SECTIONS, 0]
    sections = [n for n in given if type(n) is int and n >= 0]
    if len(given) != 3 or len(sections) != 3 or sum(sections) != rope_dim // 2:
        raise FormatError(
            f"config.json: rope_parameters.mrope_section = {given!r:.80}; it has to be three whole numbers, of "
            f"{rope_dim // 2} pairs together"
        )
    return [*sections, 0]


def _rate(keys: Keys, recurrent: Collection[int]) -> int:
    """Positions of a block. FormatError unless all layers with attention have the same number, and no others have."""
    given = keys.per_layer("attention.compress_ratios")
    rates = {ratio for i, ratio in enumerate(given) if i not in recurrent}
    if len(rates) > 1 or 0 in rates or any(given[i] for i in recurrent):
        raise FormatError(
            f"metadata key {keys.arch}.attention.compress_ratios = {given!r:.80}; layers with attention have one "
            "number, recurrent ones 0"
        )
    return next(iter(rates), 1)


def _indexer(config: Config, attends: list[bool]) -> Entries:
    """The keys of the indexers, given which layers attend."""
    budget, ratio = need(config, "indexer_budget"), need(config, "indexer_compress_ratio")
    if budget % ratio:
        raise FormatError(
            f"config.json: indexer_budget = {budget} is not a multiple of indexer_compress_ratio = {ratio}"
        )
    return {
        "attention.indexer.head_count": (need(config, "indexer_n_heads"), "u32"),
        "attention.indexer.key_length": (need(config, "indexer_head_dim"), "u32"),
        "attention.indexer.top_k": (budget, "u32"),
        "attention.compress_ratios": ([ratio if here else 0 for here in attends], "u32"),
    }
