"""minimax-m3: MiniMax M3, its text model. Leading dense layers; routed and shared experts; attention to blocks of keys.

Queries and keys are RMS-normed per head before "neox" RoPE of part of each head. Feed-forwards clamp the gate to at
most 7 and the up projection to -7 … 7, as gpt-oss does. Experts are selected by sigmoid scores plus a bias. Checkpoints
store norm weights minus 1, GGUF the weights themselves.

In layers with experts, an indexer selects blocks of positions for each token and KV head (`blocks.BlockIndexer`).

Published checkpoints have a matrix for gate, up and down of each expert (`block_sparse_moe.experts.E.w1`, w3, w2). What
transformers saves joins gate and up of dense layers and shared experts, and stacks the experts; it is what is exported.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from quantkit.archs.common import experts
from quantkit.archs.common.base import EMBEDDING_RULES, OUTPUT_RULES, Config, Keys, need, refuse, rope_parameters
from quantkit.archs.common.blocks import Attention, BlockIndexer, HParams, Part
from quantkit.archs.common.decoder import Decoder, with_head_norms
from quantkit.archs.common.tensors import LazyTensor, Piece, Shape, TensorRule, Transform
from quantkit.archs.common.transforms import GatherRows, add
from quantkit.errors import FormatError, UnsupportedError
from quantkit.formats.gguf.metadata import Entries
from quantkit.inputs.settings import integer, mapping, real, sequence

_ROTARY = 64  # elements of a head that get RoPE, where config.json does not say
_FUSED = "fused"  # entry that `to_gguf` adds to a config: gate and up are one tensor
_ALPHA, _LIMIT = 1.702, 7.0
_SPARSE = {"index_n_heads": "sparse_num_index_heads", "index_head_dim": "sparse_index_dim",
           "index_block_size": "sparse_block_size", "index_topk_blocks": "sparse_topk_blocks",
           "index_local_blocks": "sparse_local_block"}  # fmt: skip
_KEYS = {"index_n_heads": "head_count", "index_head_dim": "key_length", "index_topk_blocks": "top_k",
         "index_block_size": "block_size", "index_local_blocks": "local_blocks"}  # fmt: skip
_HUB = (
    (".block_sparse_moe.e_score_correction_bias", ".mlp.gate.e_score_correction_bias"),
    (".block_sparse_moe.", ".mlp."),
    (".self_attn.index_", ".self_attn.indexer."),
)


@dataclass(frozen=True, kw_only=True)
class MiniMaxM3HParams(HParams):
    """HParams with the sizes of the indexers; `index_heads` 0: no layer has one."""

    index_heads: int
    index_dim: int
    top_blocks: int
    block: int
    local_blocks: int

    def block_index_dim(self, layer: int) -> int:
        return self.index_dim if _has_indexer(self, layer) else 0


def _norm(ours: str, theirs: str, layers: Callable[[Any, int], bool] | None = None) -> TensorRule:
    return TensorRule(ours, f"model.{theirs}", lambda hp: add(1), f32=True, layers=layers)


def _has_indexer(hp: MiniMaxM3HParams, layer: int) -> bool:
    return layer >= hp.n_leading_dense and hp.index_heads > 0


def _joined(ff: str) -> Callable[[Any], list[tuple[int, int, int]]]:
    """Runs of rows of a joined tensor: all of gate (source 0), then all of up (source 1)."""
    return lambda hp: [(source, 0, getattr(hp, ff)) for source in (0, 1)]


def _stacked(hp: HParams) -> list[tuple[int, int, int]]:
    """The same of all experts."""
    ff = hp.n_ff_expert
    return [(source, expert * ff, ff) for expert in range(hp.n_expert) for source in (0, 1)]


# GGUF suffix -> checkpoint tensor with gate and up, layers, runs of rows of gate and up
_GROUPS: tuple[tuple[str, str, Callable[[Any, int], bool], Callable[[Any], list[tuple[int, int, int]]]], ...] = (
    ("", "mlp.gate_up_proj.weight", experts.is_dense, _joined("n_ff")),
    ("_exps", "mlp.experts.gate_up_proj", experts.has_experts, _stacked),
    ("_shexp", "mlp.shared_experts.gate_up_proj.weight", experts.has_experts, _joined("n_ff_shared")),
)


def _half(runs: Callable[[Any], list[tuple[int, int, int]]], source: int, stacked: bool) -> Callable[[Any], Transform]:
    def transform(hp: HParams) -> Transform:
        at, found = 0, []
        for which, _, count in runs(hp):
            if which == source:
                found.append((0, at, count))
            at += count
        return GatherRows(found, (hp.n_expert, hp.n_ff_expert) if stacked else None)

    return transform


def _fused_rules() -> tuple[TensorRule, ...]:
    found = []
    for suffix, theirs, layers, runs in _GROUPS:
        stacked = suffix == "_exps"
        for source, ours in enumerate(("gate", "up")):
            found.append(
                TensorRule(
                    f"blk.N.ffn_{ours}{suffix}.weight",
                    f"model.layers.N.{theirs}",
                    _half(runs, source, stacked),
                    layers=layers,
                    full_names=True,
                    to_gguf_only=True,
                )
            )
        down = f"model.layers.N.{theirs.replace('gate_up', 'down')}"
        found.append(TensorRule(f"blk.N.ffn_down{suffix}.weight", down, layers=layers, full_names=True))
    return (*found[:3], _ROUTER, *found[3:])


_ROUTER = TensorRule("blk.N.ffn_gate_inp", "model.layers.N.mlp.gate", f32=True, layers=experts.has_experts)
_BEFORE = (
    *EMBEDDING_RULES,
    _norm("blk.N.attn_norm", "layers.N.input_layernorm"),
    TensorRule("blk.N.attn_q", "model.layers.N.self_attn.q_proj"),
    _norm("blk.N.attn_q_norm", "layers.N.self_attn.q_norm"),
    TensorRule("blk.N.attn_k", "model.layers.N.self_attn.k_proj"),
    _norm("blk.N.attn_k_norm", "layers.N.self_attn.k_norm"),
    TensorRule("blk.N.attn_v", "model.layers.N.self_attn.v_proj"),
    TensorRule("blk.N.attn_output", "model.layers.N.self_attn.o_proj"),
    TensorRule("blk.N.indexer.q_proj", "model.layers.N.self_attn.indexer.q_proj", layers=_has_indexer),
    TensorRule("blk.N.indexer.k_proj", "model.layers.N.self_attn.indexer.k_proj", layers=_has_indexer),
    _norm("blk.N.indexer.q_norm", "layers.N.self_attn.indexer.q_norm", _has_indexer),
    _norm("blk.N.indexer.k_norm", "layers.N.self_attn.indexer.k_norm", _has_indexer),
    _norm("blk.N.ffn_norm", "layers.N.post_attention_layernorm"),
    experts.choice_rule(),
)
_AFTER = (_norm("output_norm", "norm"), *(rule for rule in OUTPUT_RULES if rule.gguf == "output"))


class MiniMaxM3(Decoder):
    """MiniMax M3, its text model."""

    name = "minimax-m3"
    hf: ClassVar[tuple[str, ...]] = ("MiniMaxM3VLForCausalLM", "MiniMaxM3SparseForConditionalGeneration")
    model_type = "minimax_m3_vl_text"
    rope_style = "neox"
    rotary_fraction = 1.0
    defaults: ClassVar[Mapping[str, object]] = {
        "rope_theta": 5000000.0,
        "head_dim": 128,
        "routed_scaling_factor": 2.0,
    }
    rules: ClassVar[tuple[TensorRule, ...]] = (*_BEFORE, *_fused_rules(), *_AFTER)
    EXAMPLE: ClassVar[dict[str, Any]] = {
        "architectures": ["MiniMaxM3VLForCausalLM"],
        "model_type": "minimax_m3_vl_text",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 32,
        "dense_intermediate_size": 96,
        "shared_intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rotary_dim": 16,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "routed_scaling_factor": 2.0,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
        "index_n_heads": 2,
        "index_head_dim": 32,
        "index_block_size": 16,
        "index_topk_blocks": 3,
        "index_local_blocks": 1,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000000.0, "partial_rotary_factor": 0.5},
        "hidden_act": "silu",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": False,
    }

    # ------------------------------------------------------------------------------------------------ checkpoint side

    def rope_dim(self, config: Config) -> int:
        """Elements of a head that get RoPE. transformers reads the fraction, the published code rotary_dim."""
        whole = self.head_dim(config)
        part = real(rope_parameters(config), "partial_rotary_factor") or real(config, "partial_rotary_factor")
        stated = integer(config, "rotary_dim")
        if part and stated and int(whole * part) != stated:
            raise FormatError(
                f"config.json: rotary_dim = {stated}, and partial_rotary_factor = {part:g} of heads of {whole} is "
                f"{int(whole * part)}; they have to agree"
            )
        return int(whole * part) if part else stated or _ROTARY

    def canonical(self, name: str) -> str:
        name = super().canonical(name)
        for theirs, ours in _HUB:
            name = name.replace(theirs, ours)
        return name

    def rules_of(self, config: Config) -> tuple[TensorRule, ...]:
        if config.get(_FUSED):
            return self.rules
        return (*_BEFORE, *experts.dense_rules(), *experts.routed_rules("mlp", experts.MIXTRAL),
                *experts.shared_rules(), *_AFTER)  # fmt: skip

    def to_gguf(self, config: Config, shapes: Mapping[str, Shape]) -> list[Piece]:
        """As `Arch.to_gguf`; the names tell whether gate and up are joined."""
        return super().to_gguf(dict(config) | {_FUSED: any("gate_up_proj" in name for name in shapes)}, shapes)

    def is_generated(self, name: str) -> bool:
        return any(f".ffn_{ours}{suffix}." in name for ours in ("gate", "up") for suffix, *_ in _GROUPS)

    def to_hf(self, hparams: HParams, shapes: Mapping[str, Shape]) -> list[Piece]:
        """As `Arch.to_hf`; gate and up are joined."""
        found = super().to_hf(hparams, shapes)
        for i in range(hparams.n_layer):
            for suffix, theirs, layers, runs in _GROUPS:
                if not layers(hparams, i):
                    continue
                sources = tuple(f"blk.{i}.ffn_{ours}{suffix}.weight" for ours in ("gate", "up"))
                if absent := [name for name in sources if name not in shapes]:
                    raise FormatError(f"this GGUF lacks {absent[0]}; a shard is missing or the file is incomplete")
                lead = (hparams.n_expert, 2 * hparams.n_ff_expert) if suffix == "_exps" else None
                transform = GatherRows(runs(hparams), lead)
                shape = transform.shape(*(shapes[source] for source in sources))
                found.append(Piece(f"model.layers.{i}.{theirs}", shape, sources, transform, False))
        return found

    def metadata(self, config: Config) -> Entries:
        a, given = self.name, _settings(config)
        entries = super().metadata(given) | experts.entries(a, given) | self.head_lengths(given)
        entries[f"{a}.expert_gating_func"] = (experts.GATING_NUMBERS["sigmoid"], "u32")
        if any("sparse" in str(kind) for kind in given["layer_types"]):
            for theirs, ours in _KEYS.items():
                entries[f"{a}.attention.indexer.{ours}"] = (need(given, theirs), "u32")
        return entries

    def config(self, metadata: Mapping[str, object], tensors: Mapping[str, LazyTensor]) -> dict[str, Any]:
        hp = self.hparams(metadata, tensors.keys())
        dense, kind = hp.n_leading_dense, "minimax_m3_sparse" if hp.index_heads else "full_attention"
        found = super().config(metadata, tensors)
        parameters = {"rope_type": "default", "rope_theta": found.pop("rope_theta"),
                      "partial_rotary_factor": found.pop("partial_rotary_factor")}  # fmt: skip
        del found["attention_bias"]
        indexer = {"index_n_heads": hp.index_heads, "index_head_dim": hp.index_dim, "index_block_size": hp.block,
                   "index_topk_blocks": hp.top_blocks, "index_local_blocks": hp.local_blocks}  # fmt: skip
        return found | (indexer if hp.index_heads else {}) | {
            "head_dim": hp.head_dim_k,
            "rotary_dim": hp.rope_dim,
            "intermediate_size": hp.n_ff_expert,
            "dense_intermediate_size": hp.n_ff,
            "shared_intermediate_size": hp.n_ff_shared,
            "num_local_experts": hp.n_expert,
            "num_experts_per_tok": hp.n_expert_used,
            "routed_scaling_factor": hp.expert_scale,
            "mlp_layer_types": ["dense"] * dense + ["sparse"] * (hp.n_main - dense),
            "layer_types": ["full_attention"] * dense + [kind] * (hp.n_main - dense),
            "rope_parameters": parameters,
        }  # fmt: skip

    # --------------------------------------------------------------------------------------------------- runtime side

    def hparams(self, metadata: Mapping[str, object], tensors: Collection[str] = ()) -> MiniMaxM3HParams:
        return MiniMaxM3HParams(**self.numbers(Keys(self.name, metadata), tensors))

    def numbers(self, keys: Keys, tensors: Collection[str]) -> dict[str, Any]:
        found = super().numbers(keys, tensors) | experts.numbers(keys, tensors)
        # Files of ik_llama.cpp's users may have the keys without the tensors, which it does not read.
        has_indexer = not tensors or any(".indexer." in name for name in tensors)
        return found | {
            "index_heads": keys.number("attention.indexer.head_count", 0) if has_indexer else 0,
            "index_dim": keys.number("attention.indexer.key_length", 0),
            "top_blocks": keys.number("attention.indexer.top_k", 0),
            "block": keys.number("attention.indexer.block_size", 0),
            "local_blocks": keys.number("attention.indexer.local_blocks", 0),
        }

    def attention(self, hp: HParams, i: int) -> Attention:
        assert isinstance(hp, MiniMaxM3HParams)
        part = with_head_norms(super().attention(hp, i), hp, i)
        if not _has_indexer(hp, i):
            return part
        if min(hp.block, hp.top_blocks) < 1:  # no such key
            raise FormatError(
                f"metadata keys {self.name}.attention.indexer.block_size and top_k are {hp.block} and {hp.top_blocks}; "
                "a file with indexers has both, from 1 on"
            )
        if hp.index_heads != hp.n_head_kv or hp.rope_dim > hp.index_dim:
            raise UnsupportedError(
                f"blk.{i}: an indexer of {hp.index_heads} heads of {hp.index_dim} elements, for {hp.n_head_kv} KV "
                f"heads and RoPE of {hp.rope_dim} elements; known are as many heads, no shorter than RoPE"
            )
        stem = f"blk.{i}.indexer"
        indexer = BlockIndexer(
            q=hp.linear(f"{stem}.q_proj"),
            k=hp.linear(f"{stem}.k_proj"),
            q_norm=hp.norm(f"{stem}.q_norm"),
            k_norm=hp.norm(f"{stem}.k_norm"),
            heads=hp.index_heads,
            dim=hp.index_dim,
            rate=hp.block,
            top_blocks=hp.top_blocks,
            local_blocks=hp.local_blocks,
        )
        return replace(part, indexer=indexer)

    def feed_forward(self, hp: HParams, i: int) -> Part:
        part = replace(experts.feed_forward(hp, i), activation="swiglu_oai")
        shared = getattr(part, "shared", None)
        return part if shared is None else replace(part, shared=replace(shared, activation="swiglu_oai"))


def _settings(config: Config) -> dict[str, Any]:
    """config.json as transformers 5 writes it, from that and from the form of the published checkpoints."""
    refuse(config, "hidden_act", ("silu", "swigluoai"))
    refuse(config, "swiglu_alpha", (_ALPHA,))
    refuse(config, "swiglu_limit", (_LIMIT,))
    refuse(config, "attention_bias", (False,))
    refuse(rope_parameters(config), "rope_type", ("default",))
    layers, sparse, given = (
        int(need(config, "num_hidden_layers")),
        mapping(config, "sparse_attention_config"),
        dict(config),
    )
    given |= {ours: sparse[theirs] for ours, theirs in _SPARSE.items() if theirs in sparse}
    routed = config.get("moe_layer_freq")
    if not sequence(config, "mlp_layer_types"):
        listed = routed if isinstance(routed, (list, tuple)) else [1] * layers
        given["mlp_layer_types"] = ["sparse" if i else "dense" for i in listed]
    kinds = list(sequence(config, "layer_types"))
    if not kinds:
        selects = sequence(sparse, "sparse_attention_freq") or [0] * layers
        kinds = ["minimax_m3_sparse" if i else "full_attention" for i in selects]
    if unknown := [kind for kind in kinds if kind not in ("full_attention", "minimax_m3_sparse")]:
        raise UnsupportedError(
            f"config.json: layer_types has {unknown[0]!r:.80}; known are full_attention and minimax_m3_sparse"
        )
    selecting = [i for i, kind in enumerate(kinds[:layers]) if kind == "minimax_m3_sparse"]
    with_experts = [i for i, kind in enumerate(sequence(given, "mlp_layer_types")) if kind == "sparse"]
    if selecting and selecting != with_experts:
        raise UnsupportedError(
            f"config.json: layer_types = {kinds!r:.80}; files have an indexer in the layers with experts, "
            f"{with_experts}"
        )
    width, shared = integer(config, "intermediate_size"), integer(config, "shared_intermediate_size")
    if width < 1 or shared % width:
        raise UnsupportedError(
            f"config.json: shared_intermediate_size = {shared} is not a multiple of intermediate_size = {width}; files "
            "have a number of shared experts"
        )
    return given | {
        "layer_types": kinds,
        "hidden_act": "silu",
        "moe_intermediate_size": width,
        "intermediate_size": need(config, "dense_intermediate_size"),
        "n_shared_experts": shared // width,
        "norm_topk_prob": True,
    }
