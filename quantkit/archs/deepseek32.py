"""deepseek32: DeepSeek V3.2. deepseek2 with sparse attention: an indexer in each layer selects what a token attends to.

The indexer's RoPE rotates elements half a rotation apart ("neox"), that of attention neighbouring ones. Its keys pass a
LayerNorm with an epsilon of its own, a constant in transformers. Other implementations rotate its queries and keys by a
Hadamard matrix, which changes no score, and round them to 8 bits.

Files have the layout "split" (see deepseek2.py) alone, with the keys that llama.cpp writes for it: key_length and
value_length are those of the latent, key_length_mla and value_length_mla those of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from quantkit.archs.common import experts
from quantkit.archs.common import mtp as mtp_layers
from quantkit.archs.common.base import EMBEDDING_RULES, OUTPUT_RULES, Config, Keys, need
from quantkit.archs.common.blocks import HParams, Indexer, LatentAttention, Norm
from quantkit.archs.common.shapes import ExpectedTensor, Sizes
from quantkit.archs.common.tensors import LazyTensor, Shape, TensorRule
from quantkit.archs.deepseek2 import ATTENTION_RULES, DeepSeek2, LatentHParams, split_rules
from quantkit.formats.gguf.metadata import Entries

_KEY_EPS = 1e-6
_NAMES = {"k_norm": "k_norm", "proj": "weights_proj", "attn_k": "wk", "attn_q_b": "wq_b"}
_WITHOUT = ("num_nextn_predict_layers", "scoring_func", "topk_method")


@dataclass(frozen=True, kw_only=True)
class SparseHParams(LatentHParams):
    """LatentHParams with the sizes of the indexers and the layers that have one."""

    index_heads: int
    index_dim: int
    top_k: int
    has_indexer: tuple[bool, ...]  # of each layer


def has_indexer_in(hp: SparseHParams, layer: int) -> bool:
    """Whether a layer has an indexer."""
    return hp.has_indexer[layer]


INDEXER_RULES = tuple(
    TensorRule(
        f"blk.N.indexer.{ours}",
        f"model.layers.N.self_attn.indexer.{theirs}",
        bias=ours == "k_norm",
        f32=ours == "k_norm",
        layers=has_indexer_in,
    )
    for ours, theirs in _NAMES.items()
)


class DeepSeek32(DeepSeek2):
    """DeepSeek V3.2."""

    name = "deepseek32"
    hf: ClassVar[tuple[str, ...]] = ("DeepseekV32ForCausalLM",)
    model_type = "deepseek_v32"
    defaults: ClassVar[dict[str, Any]] = {"routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4}
    index_rope_style: ClassVar[str] = "neox"
    rules: ClassVar[tuple[TensorRule, ...]] = (
        *EMBEDDING_RULES,
        *ATTENTION_RULES,
        *INDEXER_RULES,
        *experts.RULES,
        *mtp_layers.RULES,
        *OUTPUT_RULES,
    )
    EXAMPLE: ClassVar[dict[str, Any]] = {k: v for k, v in DeepSeek2.EXAMPLE.items() if k not in _WITHOUT} | {
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "index_n_heads": 16,
        "index_head_dim": 64,
        "index_topk": 48,
    }

    size_overrides: ClassVar[Mapping[str, Callable[[Sizes], int]]] = {
        "key": lambda s: s.need("attention.key_length_mla"),
        "value": lambda s: s.need("attention.value_length_mla"),
    }

    # ------------------------------------------------------------------------------------------------ checkpoint side

    def rules_of(self, config: Config) -> tuple[TensorRule, ...]:
        return split_rules(self.rules)

    def tensors(self, config: Config) -> list[ExpectedTensor]:
        found = super().tensors(config)
        shapes = self._stacked(config, {t.name: t.shape for t in found})
        return [replace(t, shape=shapes[t.name]) for t in found]

    def shapes(self, config: Config, names: Iterable[str]) -> dict[str, Shape]:
        return self._stacked(config, super().shapes(config, names))

    def _stacked(self, config: Config, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
        """The shapes with attn_k_b and attn_v_b of three dimensions."""
        heads = int(need(config, "num_attention_heads"))
        return {
            name: (heads, shape[0] // heads, shape[1]) if self.is_generated(name) else shape
            for name, shape in shapes.items()
        }

    def metadata(self, config: Config) -> Entries:
        a = self.name
        entries, prefix = super().metadata(config), f"{a}.attention.indexer"
        latent, rope = need(config, "kv_lora_rank"), entries[f"{a}.rope.dimension_count"][0]
        for ours, columns in (("key_length", latent + rope), ("value_length", latent)):
            entries[f"{a}.attention.{ours}_mla"] = entries[f"{a}.attention.{ours}"]
            entries[f"{a}.attention.{ours}"] = (columns, "u32")
        return entries | {
            f"{a}.attention.head_count_kv": (1, "u32"),
            f"{prefix}.head_count": (need(config, "index_n_heads"), "u32"),
            f"{prefix}.key_length": (need(config, "index_head_dim"), "u32"),
            f"{prefix}.top_k": (need(config, "index_topk"), "u32"),
        }

    def has_bias(self, rule: TensorRule, config: Config) -> bool:
        return rule.gguf == "blk.N.indexer.k_norm" or super().has_bias(rule, config)

    def config(self, metadata: Mapping[str, object], tensors: Mapping[str, LazyTensor]) -> dict[str, Any]:
        hp = self.hparams(metadata, tensors.keys())
        return super().config(metadata, tensors) | {
            "index_n_heads": hp.index_heads,
            "index_head_dim": hp.index_dim,
            "index_topk": hp.top_k,
        }

    def class_settings(self, hp: HParams, metadata: Mapping[str, object]) -> dict[str, Any]:
        return {
            "architectures": [self.hf[0]],
            "model_type": self.model_type,
            "mlp_layer_types": experts.mlp_layer_types(hp),
            "scoring_func": hp.gating,
            "topk_method": "noaux_tc",
        }

    # --------------------------------------------------------------------------------------------------- runtime side

    def hparams(self, metadata: Mapping[str, object], tensors: Collection[str] = ()) -> SparseHParams:
        return SparseHParams(**self.numbers(Keys(self.name, metadata), tensors))

    def numbers(self, keys: Keys, tensors: Collection[str]) -> dict[str, Any]:
        found = super().numbers(keys, tensors)
        return found | {
            "index_heads": keys.number("attention.indexer.head_count"),
            "index_dim": keys.number("attention.indexer.key_length"),
            "top_k": keys.number("attention.indexer.top_k"),
            "has_indexer": (True,) * found["n_layer"],
        }

    def latent_attention(self, hp: LatentHParams, i: int) -> LatentAttention:
        assert isinstance(hp, SparseHParams)
        stem = f"blk.{i}.indexer"
        indexer = Indexer(
            q_b=hp.linear(f"{stem}.attn_q_b"),
            k=hp.linear(f"{stem}.attn_k"),
            k_norm=Norm(f"{stem}.k_norm.weight", _KEY_EPS, centred=True, bias=f"{stem}.k_norm.bias"),
            weights=hp.linear(f"{stem}.proj"),
            heads=hp.index_heads,
            dim=hp.index_dim,
            top_k=hp.top_k,
            rope=replace(hp.rope, style=self.index_rope_style),
        )
        return replace(super().latent_attention(hp, i), sparse=True, indexer=indexer if hp.has_indexer[i] else None)
