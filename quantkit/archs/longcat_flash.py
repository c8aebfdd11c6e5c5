"""longcat-flash: LongCat-Flash. Layers of two latent attentions, two dense feed-forwards, and experts on a shortcut.

Of a layer with input x, every attention and feed-forward with a norm of its own:

    r = x + attention 0,  m = experts of norm(r),  y = r + feed-forward 0,  z = y + attention 1
    result                z + feed-forward 1 + m

The router scores n_routed_experts + zero_expert_num experts by softmax with a choice bias. The zero experts have no
matrices: they give their input, norm(r). Queries are times (n_embd / q_lora)^0.5 and latents, after their norm, times
(n_embd / kv_lora)^0.5. MTP layers are dropped.

A layer is two blocks of a file, 2i and 2i + 1, each with an attention and a feed-forward; the first one has the
experts. llama.cpp does not know the architecture (ggml-org/llama.cpp#19182 is open). A fork writes files so, with the
tensor names and keys of deepseek2 in the layout "split", and expert_zero_count; these are used here.
LongCat-Flash-Lite, whose embeddings add those of n-grams, is another class.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from quantkit.archs.common import experts, wrapper
from quantkit.archs.common.base import EMBEDDING_RULES, OUTPUT_RULES, Config, Keys, need, refuse
from quantkit.archs.common.blocks import Block, HParams, LatentAttention
from quantkit.archs.common.shapes import Sizes
from quantkit.archs.common.tensors import LazyTensor, Piece, Shape, TensorRule
from quantkit.archs.deepseek2 import ATTENTION_RULES, DeepSeek2, LatentHParams, split_rules
from quantkit.errors import FormatError
from quantkit.formats.gguf.metadata import Entries
from quantkit.inputs.settings import integer

_OF_DEEPSEEK = {  # config.json key here -> there
    "ffn_hidden_size": "intermediate_size",
    "expert_ffn_hidden_size": "moe_intermediate_size",
    "moe_topk": "num_experts_per_tok",
}
_ZERO = "expert_zero_count"
_HALF = re.compile(r"^model\.layers\.(\d+)\.(self_attn|mlps|input_layernorm|post_attention_layernorm)\.([01])\.(.+)$")
_SHORTCUT = re.compile(r"^model\.layers\.(\d+)\.mlp\.(.+)$")
_OF_BLOCK = re.compile(r"^model\.layers\.(\d+)\.(self_attn|mlps|input_layernorm|post_attention_layernorm|moe)\.(.+)$")
_EXPERT = re.compile(r"^model\.layers\.\d+\.moe\.experts\.(\d+)\.")


@dataclass(frozen=True, kw_only=True)
class LongcatHParams(LatentHParams):
    """LatentHParams with the number of experts that give their input, which n_expert does not count."""

    n_expert_zero: int


def _has_experts(hp: HParams, layer: int) -> bool:
    return layer % 2 == 0


def _feed_forward_rules() -> Iterable[TensorRule]:
    for rule in experts.dense_rules():
        yield replace(rule, hf=rule.hf.replace(".mlp.", ".mlps."), layers=None)
    choice = experts.choice_rule("moe.router.e_score_correction_bias")
    for rule in (choice, *experts.routed_rules("moe", router="router.classifier")):
        yield replace(rule, layers=_has_experts)


class LongcatFlash(DeepSeek2):
    """LongCat-Flash."""

    name = "longcat-flash"
    hf: ClassVar[tuple[str, ...]] = ("LongcatFlashForCausalLM",)
    model_type = "longcat_flash"
    mtp = ""
    rules: ClassVar[tuple[TensorRule, ...]] = (
        *EMBEDDING_RULES,
        *(rule for rule in ATTENTION_RULES if rule.gguf != "blk.N.attn_q"),
        *_feed_forward_rules(),
        *OUTPUT_RULES,
    )
    defaults: ClassVar[dict[str, Any]] = {"rope_theta": 10000000.0, "routed_scaling_factor": 6.0}
    size_overrides: ClassVar[Mapping[str, Callable[[Sizes], int]]] = {
        "key": lambda s: s.need("attention.key_length_mla"),
        "value": lambda s: s.need("attention.value_length_mla"),
        "routed_and_zero": lambda s: s["experts"] + (s.key(_ZERO) or 0),
    }
    shape_overrides: ClassVar[Mapping[str, str]] = {
        "attn_k_b": "heads kv_lora nope",
        "attn_v_b": "heads value kv_lora",
        "ffn_gate_inp": "routed_and_zero embd",
        "exp_probs_b": "routed_and_zero",
    }
    EXAMPLE: ClassVar[dict[str, Any]] = {
        "architectures": ["LongcatFlashForCausalLM"],
        "model_type": "longcat_flash",
        "vocab_size": 320,
        "hidden_size": 64,
        "ffn_hidden_size": 96,
        "expert_ffn_hidden_size": 32,
        "num_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 96,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 32,
        "head_dim": 32,
        "v_head_dim": 32,
        "n_routed_experts": 6,
        "zero_expert_num": 3,
        "moe_topk": 3,
        "routed_scaling_factor": 2.5,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }

    # ------------------------------------------------------------------------------------------------ checkpoint side

    def canonical(self, name: str) -> str:
        """A checkpoint's name with the number of a block in place of those of layer and half."""
        name = super().canonical(name)
        if match := _HALF.match(name):
            layer, what, half, rest = match.groups()
            return f"model.layers.{2 * int(layer) + int(half)}.{what}.{rest}"
        if match := _SHORTCUT.match(name):
            return f"model.layers.{2 * int(match[1])}.moe.{match[2]}"
        return name

    def dropped_tensors(self, config: Config, names: Collection[str]) -> dict[str, list[str]]:
        """As `Arch.dropped_tensors`. transformers saves gate and up of zero experts, which nothing reads."""
        count = integer(config, "n_routed_experts")
        found = {
            "MTP layers": [name for name in names if name.startswith("model.mtp.")],
            "matrices of zero experts": [n for n in names if (m := _EXPERT.match(n)) and int(m[1]) >= count],
        }
        return wrapper.encoder_tensors(names) | {what: tensors for what, tensors in found.items() if tensors}

    def rules_of(self, config: Config) -> tuple[TensorRule, ...]:
        return split_rules(self.rules)

    def metadata(self, config: Config) -> Entries:
        a = self.name
        for key, accepted in (
            ("router_bias", (False,)), ("zero_expert_type", ("identity",)), ("attention_method", ("MLA",)),
            ("mla_scale_q_lora", (True,)), ("mla_scale_kv_lora", (True,)), ("norm_topk_prob", (False,)),
            ("num_key_value_heads", (need(config, "num_attention_heads"),)),
            ("num_hidden_layers", (need(config, "num_layers"), 2 * need(config, "num_layers"))),
        ):  # fmt: skip
            refuse(config, key, accepted)
        need(config, "q_lora_rank")
        dims = integer(config, "qk_nope_head_dim") + integer(config, "qk_rope_head_dim")
        refuse(config, "qk_head_dim", (dims,))
        given = {_OF_DEEPSEEK.get(key, key): value for key, value in config.items()}
        entries = super().metadata(given | {
            "num_hidden_layers": 2 * need(config, "num_layers"), "scoring_func": "softmax", "topk_method": "greedy",
            "norm_topk_prob": False, "head_dim": None,
        })  # fmt: skip
        latent = need(config, "kv_lora_rank")
        return entries | {
            f"{a}.attention.head_count_kv": (1, "u32"),
            f"{a}.attention.key_length": (latent + entries[f"{a}.rope.dimension_count"][0], "u32"),
            f"{a}.attention.value_length": (latent, "u32"),
            f"{a}.attention.key_length_mla": entries[f"{a}.attention.key_length"],
            f"{a}.attention.value_length_mla": entries[f"{a}.attention.value_length"],
            f"{a}.{_ZERO}": (integer(config, "zero_expert_num"), "u32"),
        }

    def to_hf(self, hparams: HParams, shapes: Mapping[str, Shape]) -> list[Piece]:
        """As `Arch.to_hf`, with the numbers of layers and halves in place of those of blocks."""
        return [replace(piece, name=_of_layer(piece.name)) for piece in super().to_hf(hparams, shapes)]

    def config(self, metadata: Mapping[str, object], tensors: Mapping[str, LazyTensor]) -> dict[str, Any]:
        hp, found = self.hparams(metadata, tensors.keys()), super().config(metadata, tensors)
        for key in ("num_hidden_layers", "num_nextn_predict_layers", "n_shared_experts", "first_k_dense_replace",
                    "norm_topk_prob", "n_group", "topk_group", "scoring_func", "topk_method"):  # fmt: skip
            found.pop(key, None)
        parameters = found.pop("rope_scaling", {"rope_type": "default"}) | {"rope_theta": found.pop("rope_theta")}
        ours = {theirs: key for key, theirs in _OF_DEEPSEEK.items()}
        return {ours.get(key, key): value for key, value in found.items()} | {
            "num_layers": hp.n_layer // 2,
            "head_dim": hp.rope.dim,
            "zero_expert_num": hp.n_expert_zero,
            "rope_parameters": parameters,
        }

    def class_settings(self, hp: HParams, metadata: Mapping[str, object]) -> dict[str, Any]:
        return {"architectures": [self.hf[0]], "model_type": self.model_type}

    # --------------------------------------------------------------------------------------------------- runtime side

    def hparams(self, metadata: Mapping[str, object], tensors: Collection[str] = ()) -> LongcatHParams:
        return LongcatHParams(**self.numbers(Keys(self.name, metadata), tensors))

    def numbers(self, keys: Keys, tensors: Collection[str]) -> dict[str, Any]:
        if keys.number("block_count") % 2:
            raise FormatError(
                f"metadata key {self.name}.block_count = {keys.number('block_count')}; a layer is two blocks, so it "
                "has to be even"
            )
        for key in ("attention.key_length_mla", "attention.value_length_mla"):
            keys.need(key)
        for key in ("attention.q_lora_rank", "attention.kv_lora_rank"):
            if keys.number(key) < 1:
                raise FormatError(
                    f"metadata key {self.name}.{key} = {keys.number(key)}; queries and keys are computed from latents, "
                    "so it has to be 1 or more"
                )
        found = super().numbers(keys, tensors)
        return found | {"has_choice_bias": True, "n_expert_zero": keys.number(_ZERO, 0)}

    def blocks(self, hparams: HParams) -> list[Block]:
        """What the layers compute: each is a block that spans two blocks of the file."""
        return [self.block(hparams, i) for i in range(0, hparams.n_main, 2)]

    def block(self, hp: HParams, i: int) -> Block:
        """The layer that blocks `i` and i + 1 of the file make."""
        assert isinstance(hp, LongcatHParams)
        routed = replace(
            experts.routed(hp, i),
            count=hp.n_expert + hp.n_expert_zero,
            identity=hp.n_expert_zero,
            deferred=True,
        )
        parts = (
            self.latent_attention(hp, i),
            routed,
            hp.feed_forward(i),
            self.latent_attention(hp, i + 1),
            hp.feed_forward(i + 1),
        )
        return Block(i, parts, layers=(i, i, i, i + 1, i + 1))

    def latent_attention(self, hp: LatentHParams, i: int) -> LatentAttention:
        part = super().latent_attention(hp, i)
        return replace(
            part,
            kv_a_norm=replace(part.kv_a_norm, factor=(hp.n_embd / hp.kv_lora) ** 0.5),
            scale=part.scale * (hp.n_embd / hp.q_lora) ** 0.5,
        )


def _of_layer(name: str) -> str:
    """The checkpoint's name of a tensor of a block, the inverse of `LongcatFlash.canonical`."""
    if not (match := _OF_BLOCK.match(name)):
        return name
    block, what, rest = int(match[1]), match[2], match[3]
    return f"model.layers.{block // 2}." + (f"mlp.{rest}" if what == "moe" else f"{what}.{block % 2}.{rest}")
