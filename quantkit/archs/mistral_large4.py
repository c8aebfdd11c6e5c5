"""mistral-large4: Mistral Large 4, its text model. GLM-5's blocks with direct queries, and layers without RoPE.

Beside glm-dsa (sparse latent attention, where `"shared"` layers take the selection of the last layer with an indexer):

    queries         one matrix, without a latent; indexers project a LayerNorm of the block's normed input
    scaling         queries of head h at position p are times s_h ln(p + 1) + b_h, in attention and in indexers, each
                    with its own s and b ("scalable softmax", `blocks.HeadScaling`)
    RoPE            the frequencies are times e^alpha, a learned vector of the model. In layers whose no_rope_layers is
                    0, all elements of a head come from the latent, and the cache holds the latent alone
    experts         softmax scores without a bias, as mistral4; logits have a soft cap

Layers that attend to the cache of another one (kv_source_layers) are refused. Of multimodal checkpoints the text model
is converted, without image encoder and draft head. transformers has no class of the text model alone: export writes the
multimodal class, whose image encoder transformers then makes anew.

llama.cpp does not know the architecture; keys and names follow those that it has for glm-dsa and step35. Own ones:

    rope_freqs.weight               e^-alpha, divisors of frequencies as llama 3's
    rope.dimension_count_per_layer  0 in layers without RoPE
    attn_ssmax, indexer.ssmax       .weight is s, .bias is b
    indexer.norm                    the LayerNorm before indexer.attn_q_b
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from quantkit.archs.common import experts
from quantkit.archs.common.base import Config, Keys, need, refuse, rope_parameters
from quantkit.archs.common.blocks import Block, Head, HeadScaling, HParams, LatentAttention, Norm
from quantkit.archs.common.rope import FREQ_FACTORS
from quantkit.archs.common.shapes import Sizes
from quantkit.archs.common.tensors import LazyTensor, Piece, Shape, TensorRule
from quantkit.archs.common.transforms import Elementwise
from quantkit.archs.deepseek2 import half_rules
from quantkit.archs.deepseek32 import SparseHParams, has_indexer_in
from quantkit.archs.glm_dsa import GlmDsa
from quantkit.errors import FormatError, UnsupportedError
from quantkit.formats.gguf.metadata import Entries, shortest
from quantkit.inputs.settings import integer, real, sequence

_NORM_EPS = 1e-6  # of the indexers' LayerNorms, a constant in transformers
_NO_ROPE_INTERVAL = 4  # transformers' default
_PER_LAYER = "rope.dimension_count_per_layer"
_SOFTCAP = "final_logit_softcapping"
_LAYER = "model.layers.N"


@dataclass(frozen=True, kw_only=True)
class MistralLarge4HParams(SparseHParams):
    """SparseHParams with the layers that have RoPE, and the soft cap of logits."""

    rotated: tuple[bool, ...]  # of each layer
    logit_cap: float

    def of_layer(self, layer: int) -> MistralLarge4HParams:
        return self if self.rotated[layer] else replace(self, rope=self.rope.without_rotation())


def _divisors(hp: HParams) -> Elementwise:
    """alpha <-> e^-alpha."""
    return Elementwise(lambda x: np.exp(-x), lambda x: -np.log(x))


def _attention_rules() -> tuple[TensorRule, ...]:
    a = f"{_LAYER}.attention"
    halves = (replace(rule, hf=f"{a}.wkv_b") for rule in half_rules())
    return (
        TensorRule("blk.N.attn_norm", f"{_LAYER}.attention_norm", f32=True),
        TensorRule("blk.N.attn_q", f"{a}.wq"),
        TensorRule("blk.N.attn_ssmax.weight", f"{a}.ssmax_scaling.s", full_names=True, f32=True),
        TensorRule("blk.N.attn_ssmax.bias", f"{a}.ssmax_scaling.b", full_names=True, f32=True),
        TensorRule("blk.N.attn_kv_a_mqa", f"{a}.wkv_a_with_mqa", bias=True),
        TensorRule("blk.N.attn_kv_a_norm", f"{a}.kv_a_norm", f32=True),
        TensorRule("blk.N.attn_kv_b", f"{a}.wkv_b"),
        *halves,
        TensorRule("blk.N.attn_output", f"{a}.wo", bias=True),
        TensorRule("blk.N.ffn_norm", f"{_LAYER}.ffn_norm", f32=True),
    )


def _indexer_rules() -> tuple[TensorRule, ...]:
    ours, theirs = "blk.N.indexer", f"{_LAYER}.attention.indexer"
    return (
        TensorRule(f"{ours}.norm", f"{theirs}.q_input_norm", bias=True, f32=True, layers=has_indexer_in),
        TensorRule(f"{ours}.attn_q_b", f"{theirs}.wq_b", layers=has_indexer_in),
        TensorRule(
            f"{ours}.ssmax.weight", f"{theirs}.ssmax_scaling.s", full_names=True, f32=True, layers=has_indexer_in
        ),
        TensorRule(f"{ours}.ssmax.bias", f"{theirs}.ssmax_scaling.b", full_names=True, f32=True, layers=has_indexer_in),
        TensorRule(f"{ours}.k_norm", f"{theirs}.k_norm", bias=True, f32=True, layers=has_indexer_in),
        TensorRule(f"{ours}.proj", f"{theirs}.weights_proj", layers=has_indexer_in),
        TensorRule(f"{ours}.attn_k", f"{theirs}.wk", layers=has_indexer_in),
    )


def _mlp_rules() -> tuple[TensorRule, ...]:
    """The rules of feed-forwards, with the names of Mistral's own checkpoints: w1 is gate, w3 up, w2 down."""
    theirs = dict(zip(experts.GATED, experts.MIXTRAL))

    def renamed(rule: TensorRule, block: str) -> TensorRule:
        stem, _, last = rule.hf.rpartition(".")
        return replace(rule, hf=f"{stem.replace(block, 'feed_forward' if block == 'mlp' else block)}.{theirs[last]}")

    router, *routed = experts.routed_rules("experts", experts.MIXTRAL)
    return (
        *(renamed(rule, "mlp") for rule in experts.dense_rules()),
        replace(router, hf=f"{_LAYER}.gate"),
        *(replace(rule, hf=rule.hf.replace("experts.experts", "experts")) for rule in routed),
        *(renamed(rule, "shared_experts") for rule in experts.shared_rules("shared_experts")),
    )


class MistralLarge4(GlmDsa):
    """Mistral Large 4, its text model."""

    name = "mistral-large4"
    hf: ClassVar[tuple[str, ...]] = ("MistralLarge4ForConditionalGeneration",)
    model_type = "mistral_large4_text"
    mtp = ""
    rules: ClassVar[tuple[TensorRule, ...]] = (
        TensorRule(FREQ_FACTORS, "model.lerope.alpha", _divisors, full_names=True, f32=True),
        TensorRule("token_embd", "model.tok_embeddings"),
        *_attention_rules(),
        *_indexer_rules(),
        *_mlp_rules(),
        TensorRule("output_norm", "model.norm", f32=True),
        TensorRule("output", "lm_head", required=False),
    )
    defaults: ClassVar[dict[str, Any]] = {
        "vocab_size": 204800, "hidden_size": 6144, "intermediate_size": 24576, "moe_intermediate_size": 6144,
        "num_hidden_layers": 72, "num_attention_heads": 64, "num_key_value_heads": 64, "n_shared_experts": 1,
        "n_routed_experts": 128, "num_experts_per_tok": 4, "routed_scaling_factor": 1.0, "first_k_dense_replace": 1,
        "kv_lora_rank": 512, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "max_position_embeddings": 1048576, "rms_norm_eps": 1e-5, "index_topk": 2048, "index_head_dim": 128,
        "index_n_heads": 32, _SOFTCAP: 30.0,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2048.0, "beta_fast": 32.0,
                            "beta_slow": 1.0, "original_max_position_embeddings": 512, "attention_factor": 1.0},
    }  # fmt: skip
    size_overrides: ClassVar[Mapping[str, Callable[[Sizes], int]]] = {
        **GlmDsa.size_overrides,
        "rope": lambda s: s.key(_PER_LAYER) or 0,
        "q_lora": lambda s: s["embd"],  # of indexers: what their queries are made of
        "pairs": lambda s: s.need("rope.dimension_count") // 2,
    }
    shape_overrides: ClassVar[Mapping[str, str]] = {FREQ_FACTORS: "pairs"}
    EXAMPLE: ClassVar[dict[str, Any]] = {
        "architectures": ["MistralLarge4ForConditionalGeneration"],
        "model_type": "mistral_large4_text",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.5,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 32,
        "v_head_dim": 32,
        "index_n_heads": 16,
        "index_head_dim": 64,
        "index_topk": 48,
        "indexer_types": ["full", "full", "shared", "full", "shared"],
        "no_rope_layers": [1, 0, 1, 0, 1],
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "final_logit_softcapping": 5.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "attention_factor": 1.0,
        },
        "attention_bias": False,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }

    # ------------------------------------------------------------------------------------------------ checkpoint side

    def canonical(self, name: str) -> str:
        return "lm_head.weight" if name == "output.weight" else super().canonical(name)

    def has_bias(self, rule: TensorRule, config: Config) -> bool:
        return rule.gguf == "blk.N.indexer.norm" or super().has_bias(rule, config)

    def metadata(self, config: Config) -> Entries:
        a, layers = self.name, int(need(config, "num_hidden_layers"))
        for key in ("q_lora_rank", "mlp_bias", "index_share_for_mtp_iteration"):
            refuse(config, key, (False,))
        refuse(config, "n_group", (1,))  # transformers scores a group by its two best experts, files have no such key
        refuse(config, "norm_topk_prob", (True,))
        sources = list(sequence(config, "kv_source_layers"))
        if sources and sources != list(range(layers)):
            raise UnsupportedError(
                f"config.json: kv_source_layers = {sources!r:.80}; quantkit supports models whose {layers} layers each "
                "have a cache of their own"
            )
        parameters = rope_parameters(config)
        refuse(parameters, "rope_type", ("default", "linear", "yarn"))  # the factors of llama3 are learned here
        if parameters["rope_type"] == "yarn" and parameters.get("attention_factor") not in (1, 1.0):
            raise UnsupportedError(
                f"config.json: rope_parameters.attention_factor = {parameters.get('attention_factor')!r} with yarn is "
                "not supported by quantkit; accepted: 1.0"
            )
        given = dict(config) | {"rope_scaling": None, "scoring_func": "softmax", "topk_method": "greedy",
                                "norm_topk_prob": True}  # fmt: skip
        entries = super().metadata(given)
        dim = entries[f"{a}.rope.dimension_count"][0]
        entries.setdefault(f"{a}.attention.indexer.types", ([True] * layers, "bool"))
        entries[f"{a}.{_PER_LAYER}"] = ([dim if rotated else 0 for rotated in _rotated(config)], "u32")
        if not real(config, _SOFTCAP):
            raise UnsupportedError(f"config.json: {_SOFTCAP} = {config.get(_SOFTCAP)!r}; it has to be above 0")
        return entries | {f"{a}.{_SOFTCAP}": (real(config, _SOFTCAP), "f32")}

    def yarn_entries(self, scales: Mapping[str, Any]) -> Entries:
        for name in scales:
            refuse(scales, name, ())
        return {}

    def yarn_config(self, keys: Keys) -> dict[str, Any]:
        return {"attention_factor": 1.0}

    def to_hf(self, hparams: HParams, shapes: Mapping[str, Shape]) -> list[Piece]:
        """As `Arch.to_hf`, with the names of Mistral's own checkpoints, which transformers reads and writes."""
        names = {"lm_head.weight": "output.weight"}
        found = super().to_hf(hparams, shapes)
        return [replace(p, name=names.get(p.name, p.name.removeprefix("model."))) for p in found]

    def config(self, metadata: Mapping[str, object], tensors: Mapping[str, LazyTensor]) -> dict[str, Any]:
        hp = self.hparams(metadata, tensors.keys())
        text = super().config(metadata, tensors)
        for key in ("architectures", "q_lora_rank", "num_nextn_predict_layers", "norm_topk_prob", "scoring_func",
                    "topk_method"):  # fmt: skip
            text.pop(key, None)
        parameters = text.pop("rope_scaling", {"rope_type": "default"}) | {"rope_theta": text.pop("rope_theta")}
        text |= {"rope_parameters": parameters, "no_rope_layers": [int(rotated) for rotated in hp.rotated],
                 _SOFTCAP: shortest(hp.logit_cap)}  # fmt: skip
        return {"architectures": [self.hf[0]], "model_type": "mistral_large4", "text_config": text,
                "tie_word_embeddings": text["tie_word_embeddings"]}  # fmt: skip

    # --------------------------------------------------------------------------------------------------- runtime side

    def hparams(self, metadata: Mapping[str, object], tensors: Collection[str] = ()) -> MistralLarge4HParams:
        return MistralLarge4HParams(**self.numbers(Keys(self.name, metadata), tensors))

    def numbers(self, keys: Keys, tensors: Collection[str]) -> dict[str, Any]:
        found = super().numbers(keys, tensors)
        dims, dim = keys.per_layer(_PER_LAYER), found["rope"].dim
        if not set(dims) <= {0, dim}:
            raise UnsupportedError(
                f"{self.name}.{_PER_LAYER} = {dims!r:.80}; known: 0 and rope.dimension_count = {dim}"
            )
        return found | {
            "rotated": tuple(entry > 0 for entry in dims),
            "logit_cap": keys.real(_SOFTCAP),
        }

    def block(self, hp: HParams, i: int) -> Block:
        assert isinstance(hp, MistralLarge4HParams)
        return Block(i, (self.latent_attention(hp.of_layer(i), i), self.feed_forward(hp, i)))

    def latent_attention(self, hp: HParams, i: int) -> LatentAttention:
        assert isinstance(hp, MistralLarge4HParams)
        part, stem = super().latent_attention(hp, i), f"blk.{i}.indexer"
        indexer = part.indexer and replace(
            part.indexer,
            q_norm=Norm(f"{stem}.norm.weight", _NORM_EPS, centred=True, bias=f"{stem}.norm.bias"),
            scaling=HeadScaling(f"{stem}.ssmax.weight", f"{stem}.ssmax.bias"),
        )
        return replace(
            part,
            kv_a_norm=hp.norm(f"blk.{i}.attn_kv_a_norm"),
            scaling=HeadScaling(f"blk.{i}.attn_ssmax.weight", f"blk.{i}.attn_ssmax.bias"),
            indexer=indexer,
        )

    def head(self, hparams: HParams) -> Head:
        assert isinstance(hparams, MistralLarge4HParams)
        return replace(super().head(hparams), softcap=hparams.logit_cap)


def _rotated(config: Config) -> list[bool]:
    """Whether each layer has RoPE."""
    layers = int(need(config, "num_hidden_layers"))
    interval = integer(config, "no_rope_layer_interval") or _NO_ROPE_INTERVAL
    stated = list(sequence(config, "no_rope_layers")) or [int((i + 1) % interval != 0) for i in range(layers)]
    if len(stated) < layers or any(flag not in (0, 1) for flag in stated):
        raise FormatError(
            f"config.json: no_rope_layers = {stated!r:.80}; it has to have 1 (RoPE) or 0 for each of {layers} layers "
            "(num_hidden_layers)"
        )
    return [bool(flag) for flag in stated[:layers]]
