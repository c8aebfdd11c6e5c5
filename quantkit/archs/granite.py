"""granite and granitemoe: IBM Granite 3 and 4, dense and with experts. Llama with four constant factors.

    config.json            GGUF              factor of
    embedding_multiplier   embedding_scale   the embedding
    attention_multiplier   attention.scale   the scores, in place of head_dim^-0.5
    residual_multiplier    residual_scale    what attention and feed-forward add to the residual stream
    logits_scaling         logit_scale       the logits, which are divided by it

The rows of q and k are in the order of "norm" RoPE, as llama's. Experts are selected by their router logits; their
weights are the softmax over the selected ones. Checkpoints stack the matrices of experts: input_linear is
[experts, 2 ff, n_embd], of each expert the rows of gate, then of up. granitemoeshared adds a shared expert, whose
input_linear [2 ff, n_embd] is split in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from quantkit.archs.common import experts
from quantkit.archs.common.base import EMBEDDING_RULES, OUTPUT_RULES, SWIGLU_RULES, Config, Keys, need
from quantkit.archs.common.blocks import Attention, Experts, FeedForward, Head, HParams, Linear
from quantkit.archs.common.decoder import Decoder, all_or_none
from quantkit.archs.common.tensors import LazyTensor, Piece, Shape, TensorRule, Transform
from quantkit.archs.common.transforms import GatherRows
from quantkit.archs.llama import rope_order
from quantkit.errors import FormatError
from quantkit.formats.gguf.metadata import Entries, shortest
from quantkit.inputs.settings import integer, real

_FACTORS = {  # config.json -> GGUF
    "embedding_multiplier": "embedding_scale",
    "attention_multiplier": "attention.scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
_ATTENTION = (
    TensorRule("blk.N.attn_norm", "model.layers.N.input_layernorm", f32=True),
    TensorRule("blk.N.attn_q", "model.layers.N.self_attn.q_proj", rope_order, bias=True),
    TensorRule("blk.N.attn_k", "model.layers.N.self_attn.k_proj", rope_order, bias=True),
    TensorRule("blk.N.attn_v", "model.layers.N.self_attn.v_proj", bias=True),
    TensorRule("blk.N.attn_output", "model.layers.N.self_attn.o_proj", bias=True),
)


@dataclass(frozen=True, kw_only=True)
class GraniteHParams(HParams):
    """HParams with the four factors."""

    embedding_scale: float
    score_scale: float
    residual_scale: float
    logit_scale: float  # logits are divided by it


class Granite(Decoder):
    """Granite, dense."""

    name = "granite"
    hf: ClassVar[tuple[str, ...]] = ("GraniteForCausalLM",)
    model_type = "granite"
    rope_style = "norm"
    rules: ClassVar[tuple[TensorRule, ...]] = (*EMBEDDING_RULES, *_ATTENTION, *SWIGLU_RULES, *OUTPUT_RULES)
    EXAMPLE: ClassVar[dict[str, Any]] = {
        "architectures": ["GraniteForCausalLM"],
        "model_type": "granite",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.125,
        "residual_multiplier": 0.22,
        "logits_scaling": 4.0,
        "tie_word_embeddings": True,
    }

    def metadata(self, config: Config) -> Entries:
        entries = super().metadata(config)
        if config.get("head_dim"):
            entries |= self.head_lengths(config)
        entries[f"{self.name}.rope.dimension_count"] = (self.head_dim(config), "u32")
        for theirs, ours in _FACTORS.items():
            factor = 1.0 if config.get(theirs) is None else real(config, theirs)
            if factor <= 0:
                raise FormatError(f"config.json: {theirs} = {factor:g}; it has to be a number above 0")
            entries[f"{self.name}.{ours}"] = (factor, "f32")
        return entries

    def config(self, metadata: Mapping[str, object], tensors: Mapping[str, LazyTensor]) -> dict[str, Any]:
        hp = self.hparams(metadata, tensors.keys())
        found = super().config(metadata, tensors)
        if not hp.n_expert:
            found["mlp_bias"] = all_or_none(hp, ("ffn_gate", "ffn_up", "ffn_down"), self.hf[0])
        if hp.has_own_head_dim:
            found["head_dim"] = hp.head_dim_k
        factors = (hp.embedding_scale, hp.score_scale, hp.residual_scale, hp.logit_scale)
        return found | {theirs: shortest(factor) for theirs, factor in zip(_FACTORS, factors)}

    def hparams(self, metadata: Mapping[str, object], tensors: Collection[str] = ()) -> GraniteHParams:
        return GraniteHParams(**self.numbers(Keys(self.name, metadata), tensors))

    def numbers(self, keys: Keys, tensors: Collection[str]) -> dict[str, Any]:
        found = super().numbers(keys, tensors)
        return found | {
            "embedding_scale": keys.real("embedding_scale", 1.0) or 1.0,
            "score_scale": keys.real("attention.scale", 0.0) or found["head_dim_k"] ** -0.5,
            "residual_scale": keys.real("residual_scale", 1.0) or 1.0,
            "logit_scale": keys.real("logit_scale", 1.0) or 1.0,
        }

    def attention(self, hp: HParams, i: int) -> Attention:
        assert isinstance(hp, GraniteHParams)
        part = super().attention(hp, i)
        return replace(part, scale=hp.score_scale, out=_times(part.out, hp.residual_scale))

    def feed_forward(self, hp: HParams, i: int) -> FeedForward | Experts:
        assert isinstance(hp, GraniteHParams)
        part = hp.feed_forward(i)
        return replace(part, down=_times(part.down, hp.residual_scale))

    def head(self, hparams: HParams) -> Head:
        assert isinstance(hparams, GraniteHParams)
        head = super().head(hparams)
        return replace(
            head, output=_times(head.output, 1 / hparams.logit_scale), embedding_scale=hparams.embedding_scale
        )


def _times(linear: Linear, factor: float) -> Linear:
    return replace(linear, factor=factor)


def _half(first: int) -> Callable[[HParams], Transform]:
    """The transform of a shared expert's input_linear to gate (0) or up (1)."""
    return lambda hp: GatherRows([(0, first * hp.n_ff_shared, hp.n_ff_shared)])


def _has_shared(hp: HParams, layer: int) -> bool:
    return hp.n_ff_shared > 0


_SHARED = "model.layers.N.shared_mlp"


class GraniteMoE(Granite):
    """Granite with experts."""

    name = "granitemoe"
    hf = ("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM")
    model_type = "granitemoe"
    rules = (
        *EMBEDDING_RULES,
        *_ATTENTION,
        TensorRule("blk.N.ffn_norm", "model.layers.N.post_attention_layernorm", f32=True),
        TensorRule("blk.N.ffn_gate_inp", "model.layers.N.block_sparse_moe.router.layer", f32=True),
        *experts.stacked_rules("block_sparse_moe", ("input_linear.weight", "output_linear.weight")),
        TensorRule("blk.N.ffn_gate_shexp", f"{_SHARED}.input_linear", _half(0), layers=_has_shared, to_gguf_only=True),
        TensorRule("blk.N.ffn_up_shexp", f"{_SHARED}.input_linear", _half(1), layers=_has_shared, to_gguf_only=True),
        TensorRule("blk.N.ffn_down_shexp", f"{_SHARED}.output_linear", layers=_has_shared),
        *OUTPUT_RULES,
    )
    EXAMPLE = Granite.EXAMPLE | {
        "architectures": ["GraniteMoeForCausalLM"],
        "model_type": "granitemoe",
        "intermediate_size": 32,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
    }

    def metadata(self, config: Config) -> Entries:
        given = dict(config) | {"moe_intermediate_size": need(config, "intermediate_size")}
        entries = super().metadata(config) | experts.entries(self.name, given)
        if shared := integer(config, "shared_intermediate_size"):
            entries[f"{self.name}.expert_shared_feed_forward_length"] = (shared, "u32")
        return entries

    def is_generated(self, name: str) -> bool:
        return super().is_generated(name) or ".ffn_gate_" in name.replace("_inp", "") or ".ffn_up_" in name

    def to_hf(self, hparams: HParams, shapes: Mapping[str, Shape]) -> list[Piece]:
        """As `Arch.to_hf`; gate and up are joined."""
        found = super().to_hf(hparams, shapes)
        blocks = {"exps": "block_sparse_moe"} | ({"shexp": "shared_mlp"} if hparams.n_ff_shared else {})
        for i in range(hparams.n_layer):
            for ours, theirs in blocks.items():
                name = f"model.layers.{i}.{theirs}.input_linear.weight"
                found.append(experts.joined(shapes, f"blk.{i}.ffn_gate_{ours}.weight", name))
        return found

    def config(self, metadata: Mapping[str, object], tensors: Mapping[str, LazyTensor]) -> dict[str, Any]:
        hp = self.hparams(metadata, tensors.keys())
        found = super().config(metadata, tensors) | {
            "intermediate_size": hp.n_ff_expert,
            "num_local_experts": hp.n_expert,
            "num_experts_per_tok": hp.n_expert_used,
        }
        if hp.n_ff_shared:
            shared = {"architectures": [self.hf[1]], "model_type": "granitemoeshared"}
            found |= shared | {"shared_intermediate_size": hp.n_ff_shared}
        return found

    def numbers(self, keys: Keys, tensors: Collection[str]) -> dict[str, Any]:
        found = super().numbers(keys, tensors)
        return found | experts.numbers(keys, tensors, ff=found["n_ff"])

    def feed_forward(self, hp: HParams, i: int) -> Experts:
        assert isinstance(hp, GraniteHParams)
        part = experts.routed(hp, i)
        shared = part.shared
        if shared is not None:
            shared = replace(shared, down=_times(shared.down, hp.residual_scale))
        return replace(part, scale=part.scale * hp.residual_scale, shared=shared)
