"""deepseek2: DeepSeek V2, V3 and R1, Kimi K2, GLM-4.7-Flash. Latent attention (MLA), leading dense layers, experts.

Keys and values are computed from a latent of kv_lora_rank columns and from RoPE elements that all heads share. A head
has `nope` + `rope` elements in its query and `v` in its value. With H heads, the tensors between latent and heads are

    attn_kv_b   [H * (nope + v), kv_lora]   as in checkpoints: for each head the rows of its key, then of its value
    attn_k_b    [H * kv_lora, nope]         the key rows of each head, transposed; also [H, kv_lora, nope]
    attn_v_b    [H * v, kv_lora]            the value rows of each head; also [H, v, kv_lora]

Files hold the first ("joint"), the other two ("split") or all three ("all": ik_llama.cpp's converter and quantkit).
llama.cpp's converter writes "split" with 3-D tensors; its head_count_kv, key_length and value_length are those of the
latent. RoPE rotates neighbouring elements, the order of checkpoints. YaRN's mscale multiplies the scores, not cos and
sin. The norms of the latents have their own epsilon, a constant in transformers. MTP layers are dropped by default,
because ik_llama.cpp does not load files that have them. GLM-4.7-Flash computes what DeepSeek V3 does; on export its
class is known by its tokenizer.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from quantkit.archs.common import experts, rope
from quantkit.archs.common import mtp as mtp_layers
from quantkit.archs.common.base import EMBEDDING_RULES, OUTPUT_RULES, Config, Keys, need, refuse, rope_parameters
from quantkit.archs.common.blocks import Block, HParams, LatentAttention, Norm, Part
from quantkit.archs.common.decoder import Decoder, all_or_none
from quantkit.archs.common.shapes import ExpectedTensor
from quantkit.archs.common.tensors import LazyTensor, Piece, ReadRows, Shape, TensorRule, Transform
from quantkit.errors import FormatError, UnsupportedError
from quantkit.formats.gguf.metadata import Entries, shortest
from quantkit.inputs.settings import integer, sequence

_LATENT_EPS = 1e-6
_GLM_TOKENIZERS = ("glm4", "chatglm-bpe")
_LEFT_OUT = {
    "all": (),
    "joint": ("attn_k_b", "attn_v_b"),
    "split": ("attn_kv_b",),
}


@dataclass(frozen=True, kw_only=True)
class LatentHParams(HParams):
    """HParams with the sizes of the latents. head_dim_k is nope + rope, head_dim_v is v, n_head_kv is n_head."""

    q_lora: int  # 0: queries have one matrix, without a latent
    kv_lora: int
    score_factor: float = 1.0  # YaRN's mscale squared

    @property
    def nope(self) -> int:
        """Elements of a head's query and key without RoPE."""
        return self.head_dim_k - self.rope.dim

    def of_layer(self, layer: int) -> LatentHParams:
        """The numbers of one layer: these, where all layers have the same."""
        return self


# --------------------------------------------------------------------------------------------- attn_kv_b and its halves


@dataclass(frozen=True)
class _HeadSizes:
    """Sizes of attn_kv_b and its halves."""

    heads: int
    nope: int
    v: int
    kv_lora: int

    @classmethod
    def of(cls, hp: LatentHParams) -> _HeadSizes:
        return cls(hp.n_head, hp.nope, hp.head_dim_v, hp.kv_lora)

    def check(self, shape: Shape) -> None:
        wanted = (self.heads * (self.nope + self.v), self.kv_lora)
        if shape != wanted:
            raise FormatError(
                f"kv_b_proj is {shape}; {self.heads} heads of {self.nope} + {self.v} elements over a latent of "
                f"{self.kv_lora} make it {wanted}"
            )


class KeyHalf(Transform):
    """Make attn_k_b from attn_kv_b: the key rows of each head, transposed."""

    copies_rows = False

    def __init__(self, sizes: _HeadSizes, *, stacked: bool = False):
        """`stacked`: of three dimensions, the heads first."""
        self.sizes, self.stacked = sizes, stacked
        self.row_multiple = sizes.kv_lora

    def shape(self, *sources: Shape) -> Shape:
        self.sizes.check(sources[0])
        shape = (self.sizes.heads, self.sizes.kv_lora, self.sizes.nope)
        return shape if self.stacked else (shape[0] * shape[1], shape[2])

    def rows(self, sources: Sequence[ReadRows], start: int, stop: int) -> np.ndarray:
        s = self.sizes
        first, last = start // s.kv_lora, -(-stop // s.kv_lora)
        begins = [head * (s.nope + s.v) for head in range(first, last)]
        found = np.concatenate([sources[0](begin, begin + s.nope).T for begin in begins])
        return np.ascontiguousarray(found[start - first * s.kv_lora : stop - first * s.kv_lora])


class ValueHalf(Transform):
    """Make attn_v_b from attn_kv_b: the value rows of each head."""

    def __init__(self, sizes: _HeadSizes, *, stacked: bool = False):
        """`stacked`: of three dimensions, the heads first."""
        self.sizes, self.stacked = sizes, stacked
        self.row_multiple = sizes.v

    def shape(self, *sources: Shape) -> Shape:
        self.sizes.check(sources[0])
        shape = (self.sizes.heads, self.sizes.v, self.sizes.kv_lora)
        return shape if self.stacked else (shape[0] * shape[1], shape[2])

    def rows(self, sources: Sequence[ReadRows], start: int, stop: int) -> np.ndarray:
        s = self.sizes
        first, last = start // s.v, -(-stop // s.v)
        begins = [head * (s.nope + s.v) + s.nope for head in range(first, last)]
        found = np.concatenate([sources[0](begin, begin + s.v) for begin in begins])
        return found[start - first * s.v : stop - first * s.v]


class JoinHalves(Transform):
    """Make attn_kv_b from attn_k_b and attn_v_b, which may be 2-D or 3-D."""

    copies_rows = False

    def __init__(self, sizes: _HeadSizes):
        self.sizes = sizes
        self.row_multiple = sizes.nope + sizes.v

    def shape(self, *sources: Shape) -> Shape:
        return (self.sizes.heads * self.row_multiple, self.sizes.kv_lora)

    def rows(self, sources: Sequence[ReadRows], start: int, stop: int) -> np.ndarray:
        s, (keys, values) = self.sizes, sources
        first, last = start // self.row_multiple, -(-stop // self.row_multiple)
        parts = []
        for head in range(first, last):
            parts.append(keys(head * s.kv_lora, (head + 1) * s.kv_lora).reshape(s.kv_lora, s.nope).T)
            parts.append(values(head * s.v, (head + 1) * s.v).reshape(s.v, s.kv_lora))
        return np.concatenate(parts)[start - first * self.row_multiple : stop - first * self.row_multiple]


def in_layout(tensors: Iterable[ExpectedTensor], layout: str) -> list[ExpectedTensor]:
    """The tensors that a file of a layout ("all", "joint" or "split", see the top of this file) has."""
    left_out = _LEFT_OUT[layout]
    return [t for t in tensors if not any(f".{stem}." in t.name for stem in left_out)]


# ---------------------------------------------------------------------------------------------------- the architecture


def _has_direct_q(hp: LatentHParams, layer: int) -> bool:
    return not hp.q_lora


def _has_low_rank_q(hp: LatentHParams, layer: int) -> bool:
    return bool(hp.q_lora)


def half_rules(*, stacked: bool = False) -> tuple[TensorRule, ...]:
    """The rules of attn_k_b and attn_v_b, which are made from the checkpoint's kv_b_proj."""
    halves: tuple[tuple[str, type[KeyHalf | ValueHalf]], ...] = (("k", KeyHalf), ("v", ValueHalf))

    def rule(part: str, half: type[KeyHalf | ValueHalf]) -> TensorRule:
        return TensorRule(
            f"blk.N.attn_{part}_b",
            "model.layers.N.self_attn.kv_b_proj",
            transform_of=lambda hp, layer: half(_HeadSizes.of(hp.of_layer(layer)), stacked=stacked),
            to_gguf_only=True,
        )

    return tuple(rule(part, half) for part, half in halves)


def split_rules(rules: Iterable[TensorRule]) -> tuple[TensorRule, ...]:
    """The rules of files with attn_k_b and attn_v_b, of three dimensions, and without attn_kv_b."""
    halves = {rule.gguf: rule for rule in half_rules(stacked=True)}
    return tuple(
        replace(halves[rule.gguf], hf=rule.hf, layers=rule.layers) if rule.gguf in halves else rule
        for rule in rules
        if rule.gguf != "blk.N.attn_kv_b"
    )


ATTENTION_RULES = (
    TensorRule("blk.N.attn_norm", "model.layers.N.input_layernorm", f32=True),
    TensorRule("blk.N.attn_q", "model.layers.N.self_attn.q_proj", layers=_has_direct_q),
    TensorRule("blk.N.attn_q_a", "model.layers.N.self_attn.q_a_proj", layers=_has_low_rank_q, bias=True),
    TensorRule("blk.N.attn_q_a_norm", "model.layers.N.self_attn.q_a_layernorm", layers=_has_low_rank_q, f32=True),
    TensorRule("blk.N.attn_q_b", "model.layers.N.self_attn.q_b_proj", layers=_has_low_rank_q),
    TensorRule("blk.N.attn_kv_a_mqa", "model.layers.N.self_attn.kv_a_proj_with_mqa", bias=True),
    TensorRule("blk.N.attn_kv_a_norm", "model.layers.N.self_attn.kv_a_layernorm", f32=True),
    TensorRule("blk.N.attn_kv_b", "model.layers.N.self_attn.kv_b_proj"),
    *half_rules(),
    TensorRule("blk.N.attn_output", "model.layers.N.self_attn.o_proj", bias=True),
    TensorRule("blk.N.ffn_norm", "model.layers.N.post_attention_layernorm", f32=True),
)


class DeepSeek2(Decoder):
    """DeepSeek V2, V3 and R1, Kimi K2, GLM-4.7-Flash."""

    name = "deepseek2"
    hf: ClassVar[tuple[str, ...]] = ("DeepseekV3ForCausalLM", "DeepseekV2ForCausalLM", "Glm4MoeLiteForCausalLM")
    model_type = "deepseek_v3"
    defaults_of: ClassVar[Mapping[str, Mapping[str, object]]] = {  # those of transformers
        "DeepseekV3ForCausalLM": {"routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4},
        "Glm4MoeLiteForCausalLM": {"routed_scaling_factor": 1.8},
    }
    rope_style = "norm"
    mtp = "drop"
    rules: ClassVar[tuple[TensorRule, ...]] = (
        *EMBEDDING_RULES,
        *ATTENTION_RULES,
        *experts.RULES,
        *mtp_layers.RULES,
        *OUTPUT_RULES,
    )
    EXAMPLE: ClassVar[dict[str, Any]] = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 32,
        "v_head_dim": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "n_group": 1,
        "topk_group": 1,
        "num_nextn_predict_layers": 0,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
        },
        "attention_bias": False,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }

    # ------------------------------------------------------------------------------------------------ checkpoint side

    def metadata(self, config: Config) -> Entries:
        a, gating = self.name, _gating(config)
        refuse(config, "mlp_bias", (False,))
        refuse(config, "rope_interleave", (True,))
        refuse(config, "moe_layer_freq", (1,))
        parameters = dict(rope_parameters(config))
        scales = {name: parameters.pop(name, None) for name in ("mscale", "mscale_all_dim")}
        refuse(parameters, "attention_factor", (1, 1.0))
        parameters["attention_factor"] = None
        entries = super().metadata(dict(config) | {"rope_scaling": None, "rope_parameters": parameters})
        entries |= experts.entries(a, config)
        rope_dim = integer(config, "qk_rope_head_dim") or need(config, "qk_rope_head_dim")
        nope = integer(config, "qk_nope_head_dim") or need(config, "qk_nope_head_dim")
        entries |= {
            f"{a}.attention.key_length": (nope + rope_dim, "u32"),
            f"{a}.attention.value_length": (need(config, "v_head_dim"), "u32"),
            f"{a}.attention.kv_lora_rank": (need(config, "kv_lora_rank"), "u32"),
            f"{a}.rope.dimension_count": (rope_dim, "u32"),
            f"{a}.expert_gating_func": (experts.GATING_NUMBERS[gating], "u32"),
        }
        entries.setdefault(f"{a}.expert_weights_norm", (gating == "sigmoid", "bool"))  # transformers' default
        if config.get("q_lora_rank"):
            entries[f"{a}.attention.q_lora_rank"] = (config["q_lora_rank"], "u32")
        return entries | self.yarn_entries(scales) if parameters["rope_type"] == "yarn" else entries

    def yarn_entries(self, scales: Mapping[str, Any]) -> Entries:
        """The GGUF keys of YaRN's `mscale` and `mscale_all_dim`, whose values are None where config.json has none."""
        if not scales["mscale_all_dim"] or scales["mscale"] != scales["mscale_all_dim"]:
            raise UnsupportedError(
                f"config.json: yarn with mscale {scales['mscale']} and mscale_all_dim {scales['mscale_all_dim']}; "
                f"{self.name} files say one number, which both have to be"
            )
        return {f"{self.name}.rope.scaling.yarn_log_multiplier": (0.1 * scales["mscale_all_dim"], "f32")}

    def yarn_config(self, keys: Keys) -> dict[str, Any]:
        """The settings of config.json's rope_scaling that `yarn_entries` stores."""
        scale = shortest(10 * keys.real("rope.scaling.yarn_log_multiplier"))
        return {"mscale": scale, "mscale_all_dim": scale}

    def is_generated(self, name: str) -> bool:
        return name.endswith((".attn_k_b.weight", ".attn_v_b.weight"))

    def to_hf(self, hparams: HParams, shapes: Mapping[str, Shape]) -> list[Piece]:
        """As `Arch.to_hf`. The kv_b_proj of a "split" file is joined from its halves."""
        assert isinstance(hparams, LatentHParams)
        halves, transforms = {}, {}
        for i in range(hparams.n_layer):
            joint, keys, values = (f"blk.{i}.attn_{part}_b.weight" for part in ("kv", "k", "v"))
            if joint not in shapes and keys in shapes and values in shapes:
                halves[joint] = (keys, values)
                transforms[joint] = JoinHalves(_HeadSizes.of(hparams.of_layer(i)))
        found = super().to_hf(hparams, {**shapes, **{name: made.shape() for name, made in transforms.items()}})
        return [
            replace(piece, sources=halves[piece.sources[0]], transform=transforms[piece.sources[0]])
            if piece.sources[0] in halves
            else piece
            for piece in found
        ]

    def config(self, metadata: Mapping[str, object], tensors: Mapping[str, LazyTensor]) -> dict[str, Any]:
        hp, keys = self.hparams(metadata, tensors.keys()), Keys(self.name, metadata)
        found = self.class_settings(hp, metadata)
        biased = ("attn_q_a", "attn_kv_a_mqa", "attn_output") if hp.q_lora else ("attn_kv_a_mqa", "attn_output")
        found |= experts.config(hp) | {
            "vocab_size": hp.n_vocab,
            "hidden_size": hp.n_embd,
            "intermediate_size": hp.n_ff,
            "num_hidden_layers": hp.n_main,
            "num_attention_heads": hp.n_head,
            "num_key_value_heads": hp.n_head,
            "q_lora_rank": hp.q_lora or None,
            "kv_lora_rank": hp.kv_lora,
            "qk_nope_head_dim": hp.nope,
            "qk_rope_head_dim": hp.rope.dim,
            "v_head_dim": hp.head_dim_v,
            "num_nextn_predict_layers": hp.n_mtp_layers,
            "max_position_embeddings": hp.n_ctx_train,
            "rms_norm_eps": shortest(hp.norm_eps),
            "rope_theta": shortest(hp.rope.base),
            "attention_bias": all_or_none(hp, biased, self.hf[0]),
            "hidden_act": "silu",
            "tie_word_embeddings": hp.tied,
        }
        if scaling := rope.scaling_parameters(keys):
            if scaling["rope_type"] == "yarn":
                scaling |= self.yarn_config(keys)
            found["rope_scaling"] = scaling
        return found

    def class_settings(self, hp: HParams, metadata: Mapping[str, object]) -> dict[str, Any]:
        """The settings of config.json that differ between the classes that share the file format."""
        if hp.gating == "softmax":
            method = "group_limited_greedy" if hp.n_expert_groups > 1 else "greedy"
            return {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "scoring_func": "softmax",
                    "topk_method": method}  # fmt: skip
        sigmoid = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
        if metadata.get("tokenizer.ggml.pre") in _GLM_TOKENIZERS:
            return {"architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite",
                    "mlp_layer_types": experts.mlp_layer_types(hp)} | sigmoid  # fmt: skip
        return {"architectures": [self.hf[0]], "model_type": self.model_type} | sigmoid

    # --------------------------------------------------------------------------------------------------- runtime side

    def hparams(self, metadata: Mapping[str, object], tensors: Collection[str] = ()) -> LatentHParams:
        return LatentHParams(**self.numbers(Keys(self.name, metadata), tensors))

    def numbers(self, keys: Keys, tensors: Collection[str]) -> dict[str, Any]:
        found = super().numbers(keys, tensors) | experts.numbers(keys, tensors)
        heads = found["n_head"]
        scaled, factor = found["rope"], 1.0
        if scaled.yarn is not None:
            logarithm = math.log(1 / scaled.scale)
            factor = (1 + keys.real("rope.scaling.yarn_log_multiplier", 0.0) * logarithm) ** 2
            scaled = replace(scaled, yarn=replace(scaled.yarn, attn_factor=1 / (1 + 0.1 * logarithm)))
        return found | {
            "n_head_kv": heads,
            "head_dim_k": keys.number("attention.key_length_mla", 0) or found["head_dim_k"],
            "head_dim_v": keys.number("attention.value_length_mla", 0) or found["head_dim_v"],
            "q_lora": keys.number("attention.q_lora_rank", 0),
            "kv_lora": keys.number("attention.kv_lora_rank"),
            "rope": scaled,
            "score_factor": factor,
            "normalises": keys.flag("expert_weights_norm", False),
        }

    def block(self, hp: HParams, i: int) -> Block:
        assert isinstance(hp, LatentHParams)
        return Block(i, (self.latent_attention(hp, i), self.feed_forward(hp, i)))

    def latent_attention(self, hp: LatentHParams, i: int) -> LatentAttention:
        """The attention of layer `i`, with the tensors that its file's layout has."""
        blk = f"blk.{i}"
        there = {part: hp.linear(f"{blk}.attn_{part}_b") for part in ("kv", "k", "v")}
        present = {part: linear for part, linear in there.items() if linear.weight in hp.tensors}
        if "kv" not in present and present.keys() != {"k", "v"}:
            raise FormatError(f"tensor {blk}.attn_kv_b.weight is missing, and so are {blk}.attn_k_b and attn_v_b")
        return LatentAttention(
            norm=hp.norm(f"{blk}.attn_norm"),
            q_a=hp.linear(f"{blk}.attn_q_a") if hp.q_lora else None,
            q_a_norm=Norm(f"{blk}.attn_q_a_norm.weight", _LATENT_EPS) if hp.q_lora else None,
            q=hp.linear(f"{blk}.attn_q_b" if hp.q_lora else f"{blk}.attn_q"),
            kv_a=hp.linear(f"{blk}.attn_kv_a_mqa"),
            kv_a_norm=Norm(f"{blk}.attn_kv_a_norm.weight", _LATENT_EPS),
            kv_b=present.get("kv"),
            k_b=present.get("k"),
            v_b=present.get("v"),
            out=hp.linear(f"{blk}.attn_output"),
            heads=hp.n_head,
            q_lora=hp.q_lora,
            kv_lora=hp.kv_lora,
            nope=hp.nope,
            head_dim_v=hp.head_dim_v,
            scale=hp.head_dim_k**-0.5 * hp.score_factor,
            rope=hp.rope,
        )

    def feed_forward(self, hp: HParams, i: int) -> Part:
        return experts.feed_forward(hp, i)


def _gating(config: Config) -> str:
    """How experts are scored, "softmax" or "sigmoid"; transformers' classes differ in their default."""
    third = "DeepseekV2ForCausalLM" not in sequence(config, "architectures")
    scoring = str(config.get("scoring_func") or ("sigmoid" if third else "softmax"))
    method = config.get("topk_method") or ("noaux_tc" if third else "greedy")
    if scoring not in experts.GATING_NUMBERS:
        raise UnsupportedError(
            f"config.json: scoring_func = {scoring!r} is not known; known: {', '.join(experts.GATING_NUMBERS)}"
        )
    known = {"sigmoid": ("noaux_tc",), "softmax": ("greedy", "group_limited_greedy")}[scoring]
    if method not in known:
        raise UnsupportedError(
            f"config.json: topk_method = {method!r} with scoring_func {scoring!r}; known: {', '.join(known)}"
        )
    if not third:  # transformers ignores norm_topk_prob; DeepSeek's own code does not scale experts then
        refuse(config, "norm_topk_prob", (False,))
    if method == "greedy" and integer(config, "n_group") > 1:
        raise UnsupportedError(
            f"config.json: topk_method greedy chooses among all experts, n_group is {config['n_group']}"
        )
    return scoring
