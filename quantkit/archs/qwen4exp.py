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

import functools
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from quantkit.archs.common import hybrid
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
from quantkit.archs.common.shapes import Sizes
from quantkit.archs.common.tensors import LazyTensor, Piece, Shape, Stack, TensorRule, Transform, fill_name
from quantkit.archs.common.transforms import GatherRows, SqueezeMiddle
from quantkit.archs.qwen35 import MROPE_SECTIONS, RECURRENT_RULES
from quantkit.errors import FormatError, UnsupportedError
from quantkit.formats.gguf.metadata import Entries
from quantkit.formats.safetensors import CheckpointTensor
from quantkit.inputs.settings import integer, sequence

_MASK64, _GAMMA = (1 << 64) - 1, 0x9E3779B97F4A7C15  # of splitmix64
_SEEDS = 1 << 16  # export looks for a seed below it
_MAX_VOCAB = 1 << 24  # float32 states hold tokens
_EMBEDDING = "ple.ple_embedding"
_SHARD = re.compile(rf"(.*\.{_EMBEDDING}\.ngram_embedding)\.shard_([0-9]+)(\.weight)")
_BUFFERS = re.compile(
    rf"\.{_EMBEDDING}\.(layer_multipliers|ngram_heads_vocab_sizes|ngram_heads_offsets)$"
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
    ngram_layers: tuple[int, ...]
    ngram_kernel: int
    ngram_width: int
    ngram_end: int
    multipliers: tuple[int, ...]
    ngram_sizes: tuple[int, ...]
    ngram_offsets: tuple[int, ...]

    def block_index_dim(self, layer: int) -> int:
        return 0 if layer in self.recurrent else self.index_dim

    def entry_sizes(self, layer: int) -> EntrySizes | None:
        return None if layer in self.recurrent else EntrySizes(self.index_rate, 0, self.index_dim)

    def further_states(self) -> dict[int, StateShapes]:
        """The last inputs of the convolution of n-grams, and the last tokens, each plus 1; 0 for none."""
        longest = len(self.multipliers)
        shapes = StateShapes(((self.ngram_kernel - 1) * longest, self.streams * self.n_embd), (1, 1, longest - 1))
        return {self.n_layer + i: shapes for i in range(len(self.ngram_layers))}


def _has_ngrams(hp: Qwen4ExpHParams, layer: int) -> bool:
    return layer in hp.ngram_layers


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


class _Joined(Stack):
    """The rows of several sources, which have as many, one below the other."""

    def shape(self, *sources: Shape) -> Shape:
        return (len(sources) * sources[0][0], sources[0][1])


_TABLE = TensorRule("per_layer_token_embd", f"model.layers.N.{_EMBEDDING}.ngram_embedding", layers=_has_ngrams,
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
        "ngram_rows": lambda s: _rows(s),
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
            raise UnsupportedError(f"--mtp {policy}: this version does not plan the MTP layers of {self.name}")
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
        joined, shards = _join_shards(shapes)
        found = super().to_gguf(config, joined)
        tables = [piece for piece in found if piece.name == f"{_TABLE.gguf}.weight"]
        others = [piece for piece in found if piece not in tables]
        if shards:
            tables = [
                replace(piece, sources=shards, transform=_joined([shapes[x][0] for x in shards])) for piece in tables
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
        for i in hparams.ngram_layers:
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
            **_ngrams(config, [(i + 1) % every != 0 for i in range(layers)]),
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
        return found | _ngram_config(hp, metadata) | {
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
        return found | _ngram_numbers(keys, found) | {
            "streams": keys.number("hyper_connection.count"),
            "low_rank": keys.number("hyper_connection.low_rank"),
            "index_heads": keys.number("attention.indexer.head_count"),
            "index_dim": dim,
            "index_rate": rate,
            "index_top_k": top_k,
        }  # fmt: skip

    def block(self, hp: HParams, i: int) -> Block:
        assert isinstance(hp, Qwen4ExpHParams)
        parts: tuple[Part, ...] = (self.mixer(hp, i), self.feed_forward(hp, i))
        mixers = tuple(_mixer(hp, f"blk.{i}.hc_{part}") for part in ("attn", "ffn"))
        if i not in hp.ngram_layers:
            return Block(i, parts, hyper=mixers)
        state = hp.n_layer + hp.ngram_layers.index(i)
        return Block(i, (_lookup(hp, i), *parts), hyper=(None, *mixers), layers=(state, i, i))

    def delta_net(self, hp: HParams, i: int) -> DeltaNet:
        return replace(super().delta_net(hp, i), norm=None, gating="sigmoid")

    def attention(self, hp: HParams, i: int) -> Attention:
        assert isinstance(hp, Qwen4ExpHParams)
        stem = f"blk.{i}.indexer"
        indexer = PooledIndexer(
            q=hp.linear(f"{stem}.q_proj"),
            k=hp.linear(f"{stem}.k_proj"),
            q_norm=hp.norm(f"{stem}.q_norm"),
            k_norm=hp.norm(f"{stem}.k_norm"),
            heads=hp.index_heads,
            dim=hp.index_dim,
            rate=hp.index_rate,
            top_blocks=hp.index_top_k // hp.index_rate,
        )
        return replace(super().attention(hp, i), norm=None, indexer=indexer)

    def feed_forward(self, hp: HParams, i: int) -> Part:
        part = routed(hp, i)
        shared = part.shared and replace(part.shared, norm=None)
        return replace(part, norm=None, shared=shared, shared_gate=f"blk.{i}.ffn_gate_inp_shexp.weight")

    def head(self, hp: HParams) -> Head:
        assert isinstance(hp, Qwen4ExpHParams)
        return replace(super().head(hp), norm=None, streams=_mixer(hp, "output_hc", inject=False))


def _join_shards(shapes: Mapping[str, Shape]) -> tuple[dict[str, Shape], tuple[str, ...]]:
    """The shapes with one table in place of its shards, and the shards in order. FormatError unless they fit."""
    numbered = {int(found[2]): name for name in shapes if (found := _SHARD.fullmatch(name))}
    if not numbered:
        return dict(shapes), ()
    shards = tuple(name for _, name in sorted(numbered.items()))
    if sorted(numbered) != list(range(len(shards))):
        raise FormatError(f"{len(shards)} shards of the table of n-grams, the last one is {shards[-1]}; one is missing")
    first, *_, last = [shapes[name] for name in (shards[0], *shards)]
    for name in shards:
        if len(shapes[name]) != 2 or shapes[name][1] != first[1] or (shapes[name] != first and name != shards[-1]):
            raise FormatError(f"tensor {name} is {shapes[name]}, {shards[0]} {first}; shards have the same rows")
    found = _SHARD.fullmatch(shards[0])
    assert found is not None
    others = {name: shape for name, shape in shapes.items() if name not in numbered.values()}
    return others | {f"{found[1]}{found[3]}": ((len(shards) - 1) * first[0] + last[0], first[1])}, shards


def _joined(rows: Sequence[int]) -> Transform:
    """The transform that joins shards of so many rows."""
    if len({*rows}) == 1:
        return _Joined(rows[0])
    return GatherRows((i, 0, count) for i, count in enumerate(rows))


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
        width=hp.ngram_width,
        key=hp.linear(f"{stem}_key"),
        value=hp.linear(f"{stem}_value"),
        key_norm=hp.norm(f"{stem}_norm_key"),
        query_norm=hp.norm(f"{stem}_norm_query"),
        conv_norm=hp.norm(f"{stem}_norm_conv"),
        conv=f"{stem}_conv1d.weight",
        kernel=hp.ngram_kernel,
        streams=hp.streams,
        multipliers=hp.multipliers,
        sizes=hp.ngram_sizes,
        offsets=hp.ngram_offsets,
        end=hp.ngram_end,
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


def _ngrams(config: Config, recurs: list[bool]) -> Entries:
    """The keys of the n-grams, given which layers are recurrent; none where no layer looks them up."""
    given = sequence(config, "ple_layer_ids")
    if not given:
        return {}
    number = given[0]
    if len(given) > 1 or type(number) is not int or not 1 <= number <= len(recurs) or not recurs[number - 1]:
        raise UnsupportedError(
            f"config.json: ple_layer_ids = {given!r:.80}; one recurrent layer of {len(recurs)} may have n-grams, as in "
            "llama.cpp"
        )
    size, each = integer(config, "ngram_size"), integer(config, "heads_per_ngram")
    heads, width = (size - 1) * each, integer(config, "ple_embed_dim") or int(need(config, "hidden_size"))
    if width % heads:
        raise FormatError(f"config.json: ple_embed_dim = {width} is not a multiple of the {heads} hashes of a token")
    ends = need(config, "eos_token_id")
    ends = ends if isinstance(ends, list) else [ends]
    if len(ends) != 1 or type(ends[0]) is not int or ends[0] < 0:
        raise UnsupportedError(
            f"config.json: eos_token_id = {ends!r:.80}; of several, transformers resets n-grams at the first, "
            "llama.cpp at the last"
        )
    primes = _primes(integer(config, "ngram_vocab_size_base"), heads)
    return {
        "ple.layers": ([number - 1], "u32"),
        "ple.ngram_size": (size, "u32"),
        "ple.heads_per_ngram": (each, "u32"),
        "ple.conv_kernel": (need(config, "ple_conv_kernel_size"), "u32"),
        "ple.eos_token_id": (ends[0], "u32"),
        "embedding_length_per_layer_input": (width // heads, "u32"),
        "ple.layer_multipliers": (_multipliers(need(config, "vocab_size"), size, integer(config, "seed")), "u64"),
        "ple.head_offsets": ([sum(primes[:i]) for i in range(heads)], "u64"),
        "ple.head_vocab_sizes": (list(primes), "u64"),
    }


def _ngram_numbers(keys: Keys, found: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of HParams of n-grams."""
    layers = tuple(keys.get("ple.layers", []))
    if not layers:
        fields = ("ngram_kernel", "ngram_width", "ngram_end")
        return dict.fromkeys(fields, 0) | dict.fromkeys(
            ("ngram_layers", "multipliers", "ngram_sizes", "ngram_offsets"), ()
        )
    size, each = keys.number("ple.ngram_size"), keys.number("ple.heads_per_ngram")
    lists = [tuple(keys.need(f"ple.{key}")) for key in ("layer_multipliers", "head_vocab_sizes", "head_offsets")]
    hashes = (size - 1) * each
    if [len(each) for each in lists] != [size, hashes, hashes]:
        raise FormatError(
            f"{keys.arch}.ple.layer_multipliers, head_vocab_sizes and head_offsets have "
            f"{', '.join(str(len(entries)) for entries in lists)} entries; ngram_size and heads_per_ngram make it "
            f"{size}, {hashes} and {hashes}"
        )
    multipliers, sizes, offsets = lists
    if len(layers) > 1 or layers[0] not in found["recurrent"]:
        raise UnsupportedError(
            f"{keys.arch}.ple.layers = {layers}; one recurrent layer may have n-grams, as in llama.cpp"
        )
    vocab, end = found["n_vocab"], keys.number("ple.eos_token_id")
    if max(vocab, end + 1) >= _MAX_VOCAB or max(multipliers) * max(vocab, end + 1) >= 1 << 63:
        raise UnsupportedError(
            f"{keys.arch}: hashes of a vocabulary of {vocab} with ple.layer_multipliers up to {max(multipliers)} do "
            "not fit 63 bits, or a token not 24"
        )
    if list(offsets) != [sum(sizes[:i]) for i in range(hashes)]:
        raise FormatError(f"{keys.arch}.ple.head_offsets are not the sums of {keys.arch}.ple.head_vocab_sizes before")
    return {
        "ngram_layers": layers,
        "ngram_kernel": keys.number("ple.conv_kernel"),
        "ngram_width": keys.number("embedding_length_per_layer_input"),
        "ngram_end": end,
        "multipliers": multipliers,
        "ngram_sizes": sizes,
        "ngram_offsets": offsets,
    }


def _ngram_config(hp: Qwen4ExpHParams, metadata: Mapping[str, object]) -> dict[str, Any]:
    """The settings of n-grams in config.json. UnsupportedError where transformers would compute other hashes."""
    if not hp.ngram_layers:
        return {"ple_layer_ids": []}
    if metadata.get("tokenizer.ggml.eos_token_id", hp.ngram_end) != hp.ngram_end:
        raise UnsupportedError(
            f"{hp.arch}.ple.eos_token_id = {hp.ngram_end}, tokenizer.ggml.eos_token_id = "
            f"{metadata['tokenizer.ggml.eos_token_id']}; config.json has one number for both"
        )
    count, size = len(hp.ngram_sizes), len(hp.multipliers)
    seed = next((n for n in range(_SEEDS) if _multipliers(hp.n_vocab, size, n) == list(hp.multipliers)), None)
    if seed is None or hp.ngram_sizes != _primes(hp.ngram_sizes[0], count):
        raise UnsupportedError(
            f"{hp.arch}.ple.layer_multipliers and head_vocab_sizes follow from no seed below {_SEEDS} and no first "
            "prime, which config.json has in their place"
        )
    return {
        "ple_layer_ids": [i + 1 for i in hp.ngram_layers],
        "ple_embed_dim": hp.ngram_width * count,
        "ple_conv_kernel_size": hp.ngram_kernel,
        "ngram_size": size,
        "heads_per_ngram": count // (size - 1),
        "ngram_vocab_size_base": hp.ngram_sizes[0],
        "split_ngram_parts": TABLE_MULTIPLE,
        "seed": seed,
        "eos_token_id": hp.ngram_end,
    }


def _rows(sizes: Sizes) -> int:
    """Rows of the table of all hashes."""
    vocabularies = sizes.metadata[f"{sizes.arch}.ple.head_vocab_sizes"]
    assert isinstance(vocabularies, list)
    return -(-int(sum(vocabularies)) // TABLE_MULTIPLE) * TABLE_MULTIPLE


@functools.cache
def _primes(start: int, count: int) -> tuple[int, ...]:
    """The first `count` primes from `start` on."""
    found: list[int] = []
    n = max(2, start)
    while len(found) < count:
        if n == 2 or (n % 2 and all(n % d for d in range(3, math.isqrt(n) + 1, 2))):
            found.append(n)
        n += 1
    return tuple(found)


def _multipliers(vocab: int, count: int, seed: int) -> list[int]:
    """Odd factors of a token's number, of each place in an n-gram, from splitmix64; products are below 2^63."""
    bound = max(1, ((1 << 63) - 1) // vocab // 2)
    return [2 * (_splitmix64(seed + _GAMMA * (i + 1)) % bound) + 1 for i in range(count)]


def _splitmix64(state: int) -> int:
    x = (state + _GAMMA) & _MASK64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK64
    return x ^ (x >> 31)
