"""Attention over cached keys and values of heads, in both plans: from queries, keys and values to the heads' results.

one token   RoPE, append to the cache, attention | merge
batch       RoPE, append to the caches | attention |
"""

from __future__ import annotations

from typing import NamedTuple

from quantkit.placement import kernel_sizes
from quantkit.placement.kernel_sizes import activation_bytes
from quantkit.runtime.compiled.plan_base import Activations, BatchOps, PlannedCaches, TokenOps
from quantkit.runtime.compiled.pooled_indexer import Selection
from quantkit.runtime.kernels.cpu import decode_attention, prefill_attention, prefill_ops
from quantkit.runtime.kernels.cpu.kv_rows import KernelHeads


class Projected(NamedTuple):
    """Queries, keys and values of a token or a batch, and how they attend.

    q, k, v     addresses of float32[tokens, heads, dim], [tokens, kv_heads, dim]
    scale       of the scores
    layer_view  address of the layer's LayerView record
    rope        `rope_fields`
    gates       address of float32[tokens, heads, dim] by whose sigmoid a token's results are multiplied, or 0
    sinks       address of float32[heads], or 0
    head_gates  address of float32[heads] by whose sigmoid the results of a token's heads are multiplied, or 0
    softcap     c: scores s become c tanh(s / c) before softmax; or None
    selection   the blocks of positions that tokens attend to; None: all
    """

    heads: KernelHeads
    kv_heads: int
    q: int
    k: int
    v: int
    scale: float
    layer_view: int
    rope: dict[str, int]
    gates: int = 0
    sinks: int = 0
    softcap: float | None = None
    head_gates: int = 0
    selection: Selection | None = None

    @property
    def query_heads(self) -> int:
        """Number of query heads."""
        return self.kv_heads * self.heads.group


def attend_token(ops: TokenOps, shape: PlannedCaches, x: Projected) -> Activations:
    """Append attention of one token; each thread then has the results of all heads, quantized."""
    heads, span = x.heads, shape.span(ops.model.attending, kernel_sizes.DECODE_SPAN)
    nbytes = kernel_sizes.decode_attention_bytes(x.query_heads, heads.dim_k, heads.group, span)
    scratch, stride = ops.private_buffer("scratch", nbytes)
    partial = ops.buffer("partial", kernel_sizes.partial_bytes(ops.threads, x.query_heads, heads.dim_v))
    attention = decode_attention.AttentionParameters(
        position=ops.position,
        q=x.q,
        k=x.k,
        v=x.v,
        kv_heads=x.kv_heads,
        scale=ops.constant(x.scale),
        layer_view=x.layer_view,
        span=span,
        partial=partial,
        scratch=scratch,
        private_stride=stride,
        softcap=0 if x.softcap is None else ops.constant(x.softcap),
        **(x.selection.fields if x.selection else {}),
        **x.rope,
    )
    ops.add(decode_attention.attention(heads), attention, barrier=True)
    merged = Activations(*ops.private_buffer("merged", activation_bytes(x.query_heads * heads.dim_v)))
    merge = decode_attention.MergeParameters(
        partial=partial,
        heads=x.query_heads,
        dim=heads.dim_v,
        gates=x.gates,
        buffer=merged.address,
        private_stride=merged.stride,
        sinks=x.sinks,
        head_gates=x.head_gates,
    )
    ops.add(decode_attention.merge(heads.rotate_v), merge)
    return merged


def attend_batch(ops: BatchOps, shape: PlannedCaches, x: Projected, out: int) -> None:
    """Append attention of a batch: out float32[tokens, heads, dim_v]. Gates are not applied."""
    heads, span = x.heads, shape.span(ops.model.attending, kernel_sizes.KEY_BLOCK)
    rope = prefill_ops.RopeParameters(
        state=ops.state,
        q=x.q,
        k=x.k,
        v=x.v,
        kv_heads=x.kv_heads,
        scale=ops.constant(x.scale),
        layer_view=x.layer_view,
        **x.rope,
    )
    ops.add(prefill_ops.rope(heads), rope, barrier=True)
    rows = ops.model.attending.query_rows(heads.group, shape.n_ctx, ops.threads)
    tokens = max(1, min(kernel_sizes.PIECE_QUERIES, rows) // heads.group)
    nbytes = kernel_sizes.prefill_attention_bytes(heads.group, heads.dim_k, heads.dim_v, tokens, span)
    scratch, stride = ops.private_buffer("pieces", nbytes)
    attention = prefill_attention.AttentionParameters(
        state=ops.state,
        q=x.q,
        kv_heads=x.kv_heads,
        layer_view=x.layer_view,
        span=span,
        out=out,
        scratch=scratch,
        private_stride=stride,
        sinks=x.sinks,
        softcap=0 if x.softcap is None else ops.constant(x.softcap),
        selection_bytes=x.selection.nbytes if x.selection else 0,
        **(x.selection.fields if x.selection else {}),
    )
    ops.add(prefill_attention.attention(heads, tokens), attention, barrier=True)
