"""gpt-oss: attention with biases, sinks and sliding windows; routed experts with biases.

Layers 0, 2, 4, … have a sliding window. The experts with the largest router logits are selected; their weights are the
softmax over these logits. The gate g is clamped to at most 7 and becomes g * sigmoid(1.702 g); the up projection is
clamped to -7 … 7, plus 1.

Checkpoints have gate and up of all experts as one tensor with alternating rows. In MXFP4, as published, it is
[experts, 2 ff, n_embd]; in 16 or 32 bits it is [experts, n_embd, 2 ff]. Down is [experts, n_embd, ff] or
[experts, ff, n_embd]. YaRN's ramp is not rounded to whole pairs of elements; other runtimes round it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from quantkit.archs.common import experts
from quantkit.archs.common.base import EMBEDDING_RULES, OUTPUT_RULES, Config, Keys, need, refuse, rope_parameters
from quantkit.archs.common.blocks import Attention, Experts, HParams
from quantkit.archs.common.decoder import Decoder
from quantkit.archs.common.tensors import LazyTensor, Piece, ReadRows, Shape, TensorRule, Transform
from quantkit.archs.common.transforms import ExpertRows
from quantkit.errors import FormatError, UnsupportedError
from quantkit.formats.gguf.metadata import Entries
from quantkit.inputs.settings import integer

_HEAD_DIM = 64
_ALPHA, _LIMIT = 1.702, 7.0
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip  transformers' default
_LAYOUT = "expert layout"  # entry that `to_gguf` adds to a config: "rows", or "columns" for transposed matrices
_EXPERTS = "model.layers.N.mlp.experts"


class AlternateColumns(Transform):
    """Every second element of each row, from `first` on: the gate or the up biases."""

    copies_rows = False

    def __init__(self, first: int):
        self.first = first

    def shape(self, *sources: Shape) -> Shape:
        return (*sources[0][:-1], sources[0][-1] // 2)

    def rows(self, sources: Sequence[ReadRows], start: int, stop: int) -> np.ndarray:
        return np.ascontiguousarray(sources[0](start, stop)[:, self.first :: 2])


class InterleaveGateUp(Transform):
    """Join gate and up of all experts in one tensor: matrices transposed (alternating columns), biases not."""

    copies_rows = False

    def __init__(self, ff: int, columns: int | None):
        self.ff, self.columns = ff, columns
        self.row_multiple = columns or 1

    def shape(self, *sources: Shape) -> Shape:
        return (sources[0][0], self.columns, 2 * self.ff) if self.columns else (sources[0][0], 2 * self.ff)

    def rows(self, sources: Sequence[ReadRows], start: int, stop: int) -> np.ndarray:
        tall = self.ff if self.columns else 1
        first, last = start // self.row_multiple, -(-stop // self.row_multiple)
        parts = []
        for expert in range(first, last):
            gate, up = (source(expert * tall, (expert + 1) * tall) for source in sources)
            both = np.empty((self.row_multiple, 2 * self.ff), np.float32)
            both[:, 0::2], both[:, 1::2] = (gate.T, up.T) if self.columns else (gate, up)
            parts.append(both)
        return np.concatenate(parts)[start - first * self.row_multiple : stop - first * self.row_multiple]


def _expert_rules(layout: str) -> tuple[TensorRule, ...]:
    rules = []
    for first, ours in enumerate(("gate", "up")):

        def half(hp: HParams, first: int = first) -> Transform:
            return ExpertRows(2 * hp.n_ff_expert, hp.n_embd, layout, first, 2)

        def bias(hp: HParams, first: int = first) -> Transform:
            return AlternateColumns(first)

        weight, bare = f"blk.N.ffn_{ours}_exps.weight", f"blk.N.ffn_{ours}_exps.bias"
        rules.append(TensorRule(weight, f"{_EXPERTS}.gate_up_proj", half, full_names=True, to_gguf_only=True))
        rules.append(
            TensorRule(bare, f"{_EXPERTS}.gate_up_proj_bias", bias, full_names=True, to_gguf_only=True, f32=True)
        )
    return (
        *rules,
        TensorRule("blk.N.ffn_down_exps.weight", f"{_EXPERTS}.down_proj",
             lambda hp: ExpertRows(hp.n_embd, hp.n_ff_expert, layout), full_names=True),
        TensorRule("blk.N.ffn_down_exps.bias", f"{_EXPERTS}.down_proj_bias", full_names=True, f32=True),
    )  # fmt: skip


_BEFORE = (
    *EMBEDDING_RULES,
    TensorRule("blk.N.attn_norm", "model.layers.N.input_layernorm", f32=True),
    TensorRule("blk.N.attn_q", "model.layers.N.self_attn.q_proj", bias=True),
    TensorRule("blk.N.attn_k", "model.layers.N.self_attn.k_proj", bias=True),
    TensorRule("blk.N.attn_v", "model.layers.N.self_attn.v_proj", bias=True),
    TensorRule("blk.N.attn_sinks.weight", "model.layers.N.self_attn.sinks", full_names=True, f32=True),
    TensorRule("blk.N.attn_output", "model.layers.N.self_attn.o_proj", bias=True),
    TensorRule("blk.N.post_attention_norm", "model.layers.N.post_attention_layernorm", f32=True),
    TensorRule("blk.N.ffn_gate_inp", "model.layers.N.mlp.router", bias=True, f32=True),
)


class GptOss(Decoder):
    """gpt-oss."""

    name = "gpt-oss"
    hf = ("GptOssForCausalLM",)
    model_type = "gpt_oss"
    rope_style = "neox"
    defaults = {"rope_theta": 150000.0}  # noqa: RUF012  data
    rules = (*_BEFORE, *_expert_rules("columns"), *OUTPUT_RULES)
    EXAMPLE = {  # noqa: RUF012  data
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "sliding_window": 32,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
        "hidden_act": "silu",
        "attention_bias": True,
        "tie_word_embeddings": False,
    }

    # ------------------------------------------------------------------------------------------------ checkpoint side

    def head_dim(self, config: Config) -> int:
        return integer(config, "head_dim") or _HEAD_DIM

    def metadata(self, config: Config) -> Entries:
        a, given = self.name, dict(config)
        refuse(config, "swiglu_alpha", (_ALPHA,))
        refuse(config, "swiglu_limit", (_LIMIT,))
        kinds, layers = config.get("layer_types"), need(config, "num_hidden_layers")
        if kinds and kinds != [("full" if i % 2 else "sliding") + "_attention" for i in range(layers)]:
            raise UnsupportedError("config.json: layer_types are not sliding_attention and full_attention in turn")
        parameters = dict(rope_parameters(config))
        if not config.get("rope_scaling") and not config.get("rope_parameters"):
            parameters |= _YARN
        rounded = parameters.pop("truncate", True) and parameters["rope_type"] == "yarn"
        given |= {"rope_scaling": None, "rope_parameters": parameters, "norm_topk_prob": None}
        given["moe_intermediate_size"] = need(config, "intermediate_size")
        entries = super().metadata(given) | experts.entries(a, given) | self.head_lengths(config)
        entries[f"{a}.attention.sliding_window"] = (need(config, "sliding_window"), "u32")
        if rounded:
            entries[f"{a}.rope.scaling.yarn_truncate"] = (True, "bool")
        return entries

    def has_bias(self, rule: TensorRule, config: Config) -> bool:
        return rule.gguf.endswith("ffn_gate_inp") or bool(config.get("attention_bias", True))

    def rules_of(self, config: Config) -> tuple[TensorRule, ...]:
        return (*_BEFORE, *_expert_rules(str(config.get(_LAYOUT, "columns"))), *OUTPUT_RULES)

    def to_gguf(self, config: Config, shapes: Mapping[str, Shape]) -> list[Piece]:
        """As `Arch.to_gguf`. The shapes of both expert tensors together tell whether they are transposed."""
        n_embd, ff = need(config, "hidden_size"), need(config, "intermediate_size")
        prefix = "model.layers.0.mlp.experts"
        stored = tuple(shapes.get(f"{prefix}.{name}", ())[1:] for name in ("gate_up_proj", "down_proj"))
        layout = "rows" if stored == ((2 * ff, n_embd), (n_embd, ff)) else "columns"
        return super().to_gguf(dict(config) | {_LAYOUT: layout}, shapes)

    def is_generated(self, name: str) -> bool:
        return ".ffn_gate_exps." in name or ".ffn_up_exps." in name

    def to_hf(self, hparams: HParams, shapes: Mapping[str, Shape]) -> list[Piece]:
        """As `Arch.to_hf`; gate and up are joined."""
        found = super().to_hf(hparams, shapes)
        for i in range(hparams.n_layer):
            for suffix, columns in (("weight", hparams.n_embd), ("bias", None)):
                sources = tuple(f"blk.{i}.ffn_{ours}_exps.{suffix}" for ours in ("gate", "up"))
                if absent := [name for name in sources if name not in shapes]:
                    raise FormatError(f"this GGUF lacks {absent[0]}; a shard is missing or the file is incomplete")
                transform = InterleaveGateUp(hparams.n_ff_expert, columns)
                name = f"model.layers.{i}.mlp.experts.gate_up_proj{'' if columns else '_bias'}"
                shape = transform.shape(*(shapes[source] for source in sources))
                found.append(Piece(name, shape, sources, transform, False))
        return found

    def config(self, metadata: Mapping[str, object], tensors: Mapping[str, LazyTensor]) -> dict[str, Any]:
        hp, keys = self.hparams(metadata, tensors.keys()), Keys(self.name, metadata)
        found = super().config(metadata, tensors) | {
            "head_dim": hp.head_dim_k,
            "intermediate_size": hp.n_ff_expert,
            "num_local_experts": hp.n_expert,
            "num_experts_per_tok": hp.n_expert_used,
            "sliding_window": hp.window,
        }
        if hp.rope.yarn is not None:
            found["rope_scaling"]["truncate"] = keys.flag("rope.scaling.yarn_truncate", False)
        elif "rope_scaling" not in found:
            found["rope_parameters"] = {"rope_type": "default", "rope_theta": found["rope_theta"]}
        return found

    # --------------------------------------------------------------------------------------------------- runtime side

    def numbers(self, keys: Keys, tensors: Collection[str]) -> dict[str, Any]:
        found = super().numbers(keys, tensors)
        scaled = found["rope"]
        if scaled.yarn is not None:
            rounded = keys.flag("rope.scaling.yarn_truncate", False)
            scaled = replace(scaled, yarn=replace(scaled.yarn, truncate=rounded))
        return found | experts.numbers(keys, tensors, ff=found["n_ff"]) | {"rope": scaled, "normalises": True}

    def attention(self, hp: HParams, i: int) -> Attention:
        return replace(
            super().attention(hp, i), window=None if i % 2 else hp.window, sinks=f"blk.{i}.attn_sinks.weight"
        )

    def feed_forward(self, hp: HParams, i: int) -> Experts:
        return replace(experts.routed(hp, i, "post_attention_norm"), activation="swiglu_oai")
