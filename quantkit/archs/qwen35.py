"""qwen35: Qwen3.5, its text model. Recurrent layers with attention in every fourth (`archs/common/hybrid.py`); SwiGLU.

GGUF tiles the value heads. With Hk key heads, Hv value heads and r = Hv / Hk, GGUF head t * Hk + g is checkpoint head
g * r + t, the t-th value head of key head g. This holds for the values in attn_qkv and in the convolution, the gates,
beta, alpha, a, dt, and the columns of ssm_out. In text, all sections of the multimodal RoPE have the same position, so
it is ordinary RoPE.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from quantkit.archs.common import hybrid
from quantkit.archs.common.base import EMBEDDING_RULES, SWIGLU_RULES, Config, Keys, rope_parameters
from quantkit.archs.common.blocks import HParams
from quantkit.archs.common.hybrid import Hybrid, conv_rows, head_runs, recurrence_of, recurrent_rule
from quantkit.archs.common.qwen_mtp import MTP_RULES, QwenMtp
from quantkit.archs.common.tensors import COPY, LazyTensor, TensorRule, Transform
from quantkit.archs.common.transforms import GatherRows, ShuffleColumns
from quantkit.formats.gguf.metadata import Entries
from quantkit.inputs.settings import sequence

MROPE_SECTIONS = [11, 11, 10]  # transformers' default


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


def is_tiled(hp: HParams) -> bool:
    """Whether the order of value heads differs between checkpoint and GGUF."""
    return recurrence_of(hp).value_heads != recurrence_of(hp).key_heads


class Qwen35(QwenMtp, Hybrid):
    """Qwen3.5, its text model."""

    name = "qwen35"
    hf: ClassVar[tuple[str, ...]] = ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration")
    model_type = "qwen3_5_text"
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
        sections = [*(sequence(rope_parameters(config), "mrope_section") or MROPE_SECTIONS), 0, 0, 0, 0][:4]
        return super().metadata(config) | {f"{self.name}.rope.dimension_sections": (sections, "i32")}

    def config(self, metadata: Mapping[str, object], tensors: Mapping[str, LazyTensor]) -> dict[str, Any]:
        found = super().config(metadata, tensors)
        sections = [int(n) for n in Keys(self.name, metadata).get("rope.dimension_sections", MROPE_SECTIONS)]
        parameters = {"rope_type": "default"} | found.pop("rope_scaling", {})
        parameters |= {key: found.pop(key) for key in ("rope_theta", "partial_rotary_factor")}
        return found | {"rope_parameters": parameters | {"mrope_section": sections[:3], "mrope_interleaved": True}}
