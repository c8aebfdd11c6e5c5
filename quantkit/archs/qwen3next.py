"""qwen3next: Qwen3-Next. Recurrent layers with attention in every fourth (`archs/common/hybrid.py`); routed and shared
experts.

Value heads keep the checkpoint's order: the value heads of a key head are adjacent. The checkpoint's in_proj_qkvz holds
for each key head its query, its key, and the values and gates of its value heads. GGUF has queries, keys and values as
attn_qkv and all gates as attn_gate; older files have the checkpoint's rows as ssm_in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from quantkit.archs.common import hybrid
from quantkit.archs.common.base import EMBEDDING_RULES
from quantkit.archs.common.blocks import DeltaNet, HParams
from quantkit.archs.common.hybrid import HybridMoE, RowRuns, recurrence_of, recurrent_rule
from quantkit.archs.common.qwen_mtp import MTP_RULES, QwenMtp
from quantkit.archs.common.tensors import COPY, Piece, Shape, TensorRule
from quantkit.archs.common.transforms import GatherRows

_FUSED = "in_proj_qkvz"


def _parts(hp: HParams) -> tuple[RowRuns, RowRuns]:
    """The rows of in_proj_qkvz that make attn_qkv, and those that make attn_gate."""
    sizes = recurrence_of(hp)
    dim, each = sizes.head_dim_k, sizes.inner // sizes.key_heads
    starts = [head * 2 * (dim + each) for head in range(sizes.key_heads)]
    qkv = [(0, start + at, n) for at, n in ((0, dim), (dim, dim), (2 * dim, each)) for start in starts]
    return qkv, [(0, start + 2 * dim + each, each) for start in starts]


def _joined(hp: HParams) -> RowRuns:
    """The rows of attn_qkv (source 0) and attn_gate (source 1) in the order of in_proj_qkvz."""
    sizes = recurrence_of(hp)
    dim, each = sizes.head_dim_k, sizes.inner // sizes.key_heads
    runs = []
    for head in range(sizes.key_heads):
        runs += [(0, head * dim, dim), (0, sizes.keys + head * dim, dim), (0, 2 * sizes.keys + head * each, each)]
        runs.append((1, head * each, each))
    return runs


class Qwen3Next(QwenMtp, HybridMoE):
    """Qwen3-Next."""

    name = "qwen3next"
    hf = ("Qwen3NextForCausalLM",)
    model_type = "qwen3_next"
    tiled = False
    rules: ClassVar[tuple[TensorRule, ...]] = (
        *EMBEDDING_RULES,
        *hybrid.ATTENTION_RULES,
        recurrent_rule("attn_qkv", _FUSED, lambda hp: GatherRows(_parts(hp)[0]), to_gguf_only=True),
        recurrent_rule("attn_gate", _FUSED, lambda hp: GatherRows(_parts(hp)[1]), to_gguf_only=True),
        *hybrid.recurrent_rules(),
        recurrent_rule("ssm_ba", "in_proj_ba"),
        recurrent_rule("ssm_out", "out_proj"),
        *hybrid.FFN_NORM_RULES,
        *hybrid.MOE_RULES,
        *MTP_RULES,
        *hybrid.OUTPUT_RULES,
    )
    EXAMPLE: ClassVar[dict[str, Any]] = {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "partial_rotary_factor": 0.25,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "full_attention_interval": 4,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
    }

    def is_generated(self, name: str) -> bool:
        return super().is_generated(name) or any(f".{part}." in name for part in ("attn_qkv", "attn_gate", "ssm_in"))

    def to_hf(self, hparams: HParams, shapes: Mapping[str, Shape]) -> list[Piece]:
        """As `Arch.to_hf`. attn_qkv and attn_gate are joined in in_proj_qkvz."""
        found = super().to_hf(hparams, shapes)
        for i in sorted(hparams.recurrent):
            fused = f"blk.{i}.ssm_in.weight"
            sources: tuple[str, ...] = (f"blk.{i}.attn_qkv.weight", f"blk.{i}.attn_gate.weight")
            transform, sources = (COPY, (fused,)) if fused in shapes else (GatherRows(_joined(hparams)), sources)
            hybrid.require_tensors(sources, shapes)
            shape = transform.shape(*(shapes[source] for source in sources))
            found.append(Piece(f"model.layers.{i}.linear_attn.{_FUSED}.weight", shape, sources, transform, False))
        return found

    def delta_net(self, hp: HParams, i: int) -> DeltaNet:
        part = replace(super().delta_net(hp, i), ba=hp.linear(f"blk.{i}.ssm_ba"), beta=None, alpha=None)
        if f"blk.{i}.ssm_in.weight" in hp.tensors:
            return replace(part, qkv=hp.linear(f"blk.{i}.ssm_in"), gate=None)
        return part
