"""qwen4exp: Qwen4-Exp (Qwen3.8-Flash-Next), its text model, planned only: tensors, sizes and caches, from config.json.

Layers mix tokens and have experts as those of qwen35moe (archs/qwen35moe.py). What differs:

- A token has several residual streams. In place of a layer's norms, a mixer of low rank (hc_attn, hc_ffn) makes the
  input of each part of them, and says how much of its output each stream gets. A last one (output_hc) is before the
  output matrix; there is no output_norm.
- Layers with attention have an indexer, whose keys are in the cache and which selects blocks of tokens.
- A layer looks up n-grams of tokens in a table, by hashes (PLE).

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

The experts' activation and the gate of recurrent layers have no key: llama.cpp knows SwiGLU and a sigmoid.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from quantkit.archs.common import hybrid
from quantkit.archs.common.base import EMBEDDING_RULES, Config, Keys, need, refuse, rope_parameters
from quantkit.archs.common.blocks import HParams
from quantkit.archs.common.hybrid import HybridMoE, is_attention, norm_rule
from quantkit.archs.common.shapes import Sizes
from quantkit.archs.common.tensors import LazyTensor, TensorRule
from quantkit.archs.qwen35 import MROPE_SECTIONS, RECURRENT_RULES
from quantkit.errors import FormatError, UnsupportedError
from quantkit.formats.gguf.metadata import Entries
from quantkit.inputs.settings import integer, sequence

_ROWS_MULTIPLE = 128  # of the table; files have no key for it
_MASK64, _GAMMA = (1 << 64) - 1, 0x9E3779B97F4A7C15  # of splitmix64


@dataclass(frozen=True, kw_only=True)
class Qwen4ExpHParams(HParams):
    """HParams with the layers that look up n-grams."""

    ngram_layers: tuple[int, ...]


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


def _indexer_rules() -> tuple[TensorRule, ...]:
    """Checkpoints have one matrix: the rows of all queries, then those of the key."""
    stem = "model.layers.N.self_attn.indexer"
    return (
        *(TensorRule(f"blk.N.indexer.{x}_proj", f"{stem}.index_qk_proj", layers=is_attention) for x in "qk"),
        *(norm_rule(f"blk.N.indexer.{x}_norm", f"{stem}.{x}_layernorm", layers=is_attention) for x in "qk"),
    )


def _ngram_rules() -> tuple[TensorRule, ...]:
    stem = "model.layers.N.ple"
    return (
        TensorRule("blk.N.ple_key", f"{stem}.key_proj", layers=_has_ngrams),
        TensorRule("blk.N.ple_value", f"{stem}.value_proj", layers=_has_ngrams),
        *(norm_rule(f"blk.N.ple_norm_{x}", f"{stem}.norm_{x}", layers=_has_ngrams) for x in ("key", "query", "conv")),
        TensorRule("blk.N.ple_conv1d", f"{stem}.conv1d", layers=_has_ngrams, f32=True),
    )


_TABLE = TensorRule("per_layer_token_embd", "model.layers.N.ple.ple_embedding.ngram_embedding")  # shards in checkpoints


class Qwen4Exp(HybridMoE):
    """Qwen4-Exp, its text model."""

    name = "qwen4exp"
    hf: ClassVar[tuple[str, ...]] = ("Qwen4ExpForCausalLM", "Qwen4ExpForConditionalGeneration")
    model_type = "qwen4_exp_text"
    tiled = True
    plans_only = True
    defaults: ClassVar[dict[str, Any]] = {  # those of transformers
        "hidden_act": "silu",
        "hc_count": 4,
        "hc_lowrank": 320,
        "ple_conv_kernel_size": 4,
        "ngram_size": 3,
        "heads_per_ngram": 8,
        "ngram_vocab_size_base": 20_000_000,
        "make_ngram_vocab_size_divisible_by": _ROWS_MULTIPLE,
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

    def rules_of(self, config: Config) -> tuple[TensorRule, ...]:
        found = super().rules_of(config)
        return found if sequence(config, "ple_layer_ids") else tuple(rule for rule in found if rule is not _TABLE)

    def with_mtp(self, config: Config, policy: str, names: Collection[str] | None = None) -> dict[str, Any]:
        if policy in ("keep", "only"):
            raise UnsupportedError(f"--mtp {policy}: this version does not plan the MTP layers of {self.name}")
        return super().with_mtp(config, policy, names)

    def metadata(self, config: Config) -> Entries:
        for key, accepted in (
            ("attention_bias", (False,)), ("norm_topk_prob", (True,)), ("indexer_kv_heads", (1,)),
            ("make_ngram_vocab_size_divisible_by", (_ROWS_MULTIPLE,)),
        ):  # fmt: skip
            refuse(config, key, accepted)
        gate = config.get("output_gate_type") or config.get("hidden_act")
        if gate != "sigmoid":
            raise UnsupportedError(f"config.json: output_gate_type = {gate!r}; llama.cpp has no key for it: 'sigmoid'")
        kinds = ["full_attention" if kind == "indexed_attention" else kind for kind in sequence(config, "layer_types")]
        sections = [*(sequence(rope_parameters(config), "mrope_section") or MROPE_SECTIONS), 0, 0, 0, 0][:4]
        found = super().metadata({**config, "layer_types": kinds, "norm_topk_prob": None})
        every, layers = found[f"{self.name}.full_attention_interval"][0], int(need(config, "num_hidden_layers"))
        own: Entries = {
            "rope.dimension_sections": (sections, "i32"),
            "hyper_connection.count": (need(config, "hc_count"), "u32"),
            "hyper_connection.low_rank": (need(config, "hc_lowrank"), "u32"),
            **_indexer(config, [(i + 1) % every == 0 for i in range(layers)]),
            **_ngrams(config, [(i + 1) % every != 0 for i in range(layers)]),
        }
        return found | {f"{self.name}.{key}": entry for key, entry in own.items()}

    def config(self, metadata: Mapping[str, object], tensors: Mapping[str, LazyTensor]) -> dict[str, Any]:
        raise UnsupportedError(f"{self.name} is planned only: this version does not export it")

    def hparams(self, metadata: Mapping[str, object], tensors: Collection[str] = ()) -> Qwen4ExpHParams:
        return Qwen4ExpHParams(**self.numbers(Keys(self.name, metadata), tensors))

    def numbers(self, keys: Keys, tensors: Collection[str]) -> dict[str, Any]:
        return super().numbers(keys, tensors) | {"ngram_layers": tuple(keys.get("ple.layers", []))}


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


def _rows(sizes: Sizes) -> int:
    """Rows of the table of all hashes."""
    vocabularies = sizes.metadata[f"{sizes.arch}.ple.head_vocab_sizes"]
    assert isinstance(vocabularies, list)
    return -(-int(sum(vocabularies)) // _ROWS_MULTIPLE) * _ROWS_MULTIPLE


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
