"""qwen35: Qwen3.5, its text model. Recurrent layers with attention in every fourth (`archs/common/hybrid.py`); SwiGLU.

GGUF tiles the value heads. With Hk key heads, Hv value heads and r = Hv / Hk, GGUF head t * Hk + g is checkpoint head
g * r + t, the t-th value head of key head g. This holds for the values in attn_qkv and in the convolution, the gates,
beta, alpha, a, dt, and the columns of ssm_out. In text, all sections of the multimodal RoPE have the same position, so
it is ordinary RoPE.

MTP layers (`mtp.` in checkpoints) have attention. If they are kept, GGUF numbers them after the main layers; tensors
outside their blocks belong to the first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from quantkit.archs.common import hybrid
from quantkit.archs.common.base import EMBEDDING_RULES, SWIGLU_RULES, Config, Keys, rope_parameters
from quantkit.archs.common.blocks import HParams
from quantkit.archs.common.hybrid import Hybrid, conv_rows, head_runs, recurrence_of, recurrent_rule
from quantkit.archs.common.tensors import COPY, LazyTensor, Piece, Shape, TensorRule, Transform
from quantkit.archs.common.transforms import GatherRows, ShuffleColumns
from quantkit.formats.gguf.metadata import Entries
from quantkit.inputs.settings import integer, sequence

_SECTIONS = [11, 11, 10]  # transformers' default


def tiled(hp: HParams) -> list[int]:
    """The checkpoint's value heads in the order of the GGUF."""
    sizes = recurrence_of(hp)
    each = sizes.value_heads // sizes.key_heads
    return [group * each + t for t in range(each) for group in range(sizes.key_heads)]


def _rows(hp: HParams) -> Transform:
    """The transform of a matrix with one row for each value head."""
    return GatherRows(head_runs(tiled(hp), 1))


def _columns(hp: HParams) -> Transform:
    dim = recurrence_of(hp).head_dim_v
    return ShuffleColumns(head * dim + i for head in tiled(hp) for i in range(dim))


RECURRENT_RULES = (
    recurrent_rule("attn_qkv", "in_proj_qkv", lambda hp: GatherRows(conv_rows(hp, tiled(hp)))),
    recurrent_rule("attn_gate", "in_proj_z", lambda hp: GatherRows(head_runs(tiled(hp), recurrence_of(hp).head_dim_v))),
    *hybrid.recurrent_rules(tiled),
    recurrent_rule("ssm_beta", "in_proj_b", _rows),
    recurrent_rule("ssm_alpha", "in_proj_a", _rows),
    recurrent_rule("ssm_out", "out_proj", lambda hp: _columns(hp) if is_tiled(hp) else COPY),
)


def _is_first_mtp_layer(hp: HParams, layer: int) -> bool:
    return layer == hp.n_main


_MTP_NAMES = {
    "fc": "eh_proj",
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "norm": "shared_head.norm",
}
MTP_RULES = (
    TensorRule("blk.N.nextn.eh_proj", "model.layers.N.eh_proj", layers=_is_first_mtp_layer),
    *(
        hybrid.norm_rule(f"blk.N.nextn.{name.replace('.', '_')}", f"model.layers.N.{name}", layers=_is_first_mtp_layer)
        for name in list(_MTP_NAMES.values())[1:]
    ),
)


def numbered_name(name: str, n_main: int) -> str:
    """The numbered layer name of a checkpoint's `model.mtp.…` tensor; other names are returned unchanged."""
    start, _, rest = name.partition("model.mtp.")
    if start or not rest:
        return name
    if found := re.match(r"layers\.(\d+)\.", rest):
        return f"model.layers.{n_main + int(found[1])}.{rest[found.end() :]}"
    stem, _, suffix = rest.rpartition(".")
    return f"model.layers.{n_main}.{_MTP_NAMES[stem]}.{suffix}" if stem in _MTP_NAMES else name


def checkpoint_name(name: str, n_main: int) -> str:
    """The inverse of `numbered_name`, without the leading `model.`, as checkpoints have it."""
    found = re.match(r"model\.layers\.(\d+)\.", name)
    if not found or int(found[1]) < n_main:
        return name
    stem, _, suffix = name[found.end() :].rpartition(".")
    theirs = next(
        (mine for mine, ours in _MTP_NAMES.items() if ours == stem), f"layers.{int(found[1]) - n_main}.{stem}"
    )
    return f"mtp.{theirs}.{suffix}"


def is_tiled(hp: HParams) -> bool:
    """Whether the order of value heads differs between checkpoint and GGUF."""
    return recurrence_of(hp).value_heads != recurrence_of(hp).key_heads


class Qwen35(Hybrid):
    """Qwen3.5, its text model."""

    name = "qwen35"
    hf: ClassVar[tuple[str, ...]] = ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration")
    model_type = "qwen3_5_text"
    mtp = "drop"
    tiled = True
    rules: ClassVar[tuple[TensorRule, ...]] = (
        *EMBEDDING_RULES,
        *hybrid.ATTENTION_RULES,
        *RECURRENT_RULES,
        *hybrid.FFN_NORM_RULES,
        *SWIGLU_RULES[1:],
        *MTP_RULES,
        *hybrid.OUTPUT_RULES,
    )
    EXAMPLE: ClassVar[dict[str, Any]] = {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
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
        "attention_bias": False,
        "tie_word_embeddings": False,
    }

    def metadata(self, config: Config) -> Entries:
        sections = [*(sequence(rope_parameters(config), "mrope_section") or _SECTIONS), 0, 0, 0, 0][:4]
        return super().metadata(config) | {f"{self.name}.rope.dimension_sections": (sections, "i32")}

    def to_gguf(self, config: Config, shapes: Mapping[str, Shape]) -> list[Piece]:
        """As `Arch.to_gguf`, with MTP layers numbered."""
        if not self.n_mtp_layers(config):
            return super().to_gguf(config, shapes)
        given = {numbered_name(self.canonical(name), integer(config, "num_hidden_layers")): name for name in shapes}
        found = super().to_gguf(config, {ours: shapes[theirs] for ours, theirs in given.items()})
        return [replace(piece, sources=tuple(given[source] for source in piece.sources)) for piece in found]

    def to_hf(self, hparams: HParams, shapes: Mapping[str, Shape]) -> list[Piece]:
        return [
            replace(piece, name=checkpoint_name(piece.name, hparams.n_main)) for piece in super().to_hf(hparams, shapes)
        ]

    def config(self, metadata: Mapping[str, object], tensors: Mapping[str, LazyTensor]) -> dict[str, Any]:
        found = super().config(metadata, tensors)
        if extra := found.pop("num_nextn_predict_layers", 0):
            found["mtp_num_hidden_layers"] = extra
        sections = [int(n) for n in Keys(self.name, metadata).get("rope.dimension_sections", _SECTIONS)]
        parameters = {"rope_type": "default"} | found.pop("rope_scaling", {})
        parameters |= {key: found.pop(key) for key in ("rope_theta", "partial_rotary_factor")}
        return found | {"rope_parameters": parameters | {"mrope_section": sections[:3], "mrope_interleaved": True}}
