"""The decode plan: one token through all blocks and the output head, as one operation list.

Operations per block, with barriers where | stands:

    attention       norm, q, k, v | attention | merge, out, add to x |
    latent          see latent.py
    feed-forward    norm, gate, up, SwiGLU | down, add to x |
    experts         norm, router | select, gate, up, SwiGLU | down, add to x |

A shared expert runs as a feed-forward before the routed ones, on the same norm.
"""

from __future__ import annotations

import functools
import math

import numpy as np

from quantkit.archs.common import blocks
from quantkit.placement import kernel_sizes
from quantkit.placement.kernel_sizes import activation_bytes, whole_lines
from quantkit.runtime.compiled import latent
from quantkit.runtime.compiled.plan_base import (
    SPLIT_ROWS,
    Activations,
    Array,
    CompiledPlan,
    ModelParts,
    PlannedCaches,
    PlanOps,
    TokenOps,
    rope_fields,
)
from quantkit.runtime.kernels.cpu import decode_attention, decode_experts, decode_ops
from quantkit.runtime.kv.cache import Cache


class DecodePlan(CompiledPlan):
    """`plan(token, cache)` is float32[vocab], the logits after the token; the cache then holds the token."""

    def __init__(self, model: ModelParts):
        super().__init__(model)
        self._position = np.zeros(1, np.int64)
        self._x, self._logits = np.zeros(model.n_embd, np.float32), np.zeros(model.vocab, np.float32)

    def __call__(self, token: int, cache: Cache) -> Array:
        """A fresh array. The caller makes sure that the cache has room."""
        ops = self._point_to([cache])
        self._x[:] = self.model.embed(np.array([token]))[0]
        self._position[0] = cache.length
        ops.run()
        cache.length += 1
        return self._logits.copy()

    def project(self, x: Array) -> Array:
        """Logits float32[vocab] of a hidden state float32[n_embd] after the last block."""
        self._x[:] = x
        self._head_ops.run()
        return self._logits.copy()

    def _build(self, shape: PlannedCaches) -> PlanOps:
        ops = DecodeOps(self.model, self._x, self._position)
        for block in self.model.block_list:
            for part in block.parts:
                add_part(ops, block.layer, part, shape)
        add_head(ops, self._logits)
        return ops

    @functools.cached_property
    def _head_ops(self) -> PlanOps:
        ops = DecodeOps(self.model, self._x, self._position)
        add_head(ops, self._logits)
        return ops

    @property
    def work_bytes(self) -> int:
        return super().work_bytes + self._x.nbytes + self._position.nbytes + self._logits.nbytes


class DecodeOps(TokenOps):
    """Operations on the residual stream x float32[n_embd] of one token."""

    def __init__(self, model: ModelParts, x: Array, position: Array):
        super().__init__(model)
        self.x, self.position = self.keep(x).ctypes.data, self.keep(position).ctypes.data
        self.n_embd = model.n_embd

    def norm(self, norm: blocks.Norm) -> Activations:
        """Append the norm of x."""
        buffer, stride = self.private_buffer("normed", activation_bytes(self.n_embd))
        parameters = decode_ops.NormParameters(
            x=self.x,
            weight=self.vector(norm.weight),
            n=self.n_embd,
            eps=self.constant(norm.eps),
            buffer=buffer,
            private_stride=stride,
        )
        self.add(decode_ops.norm, parameters)
        return Activations(buffer, stride)

    def matvec(
        self, linear: blocks.Linear, x: Activations, out: int, *, barrier: bool = False, multiple: int = SPLIT_ROWS,
        residual: int = 0,
    ) -> None:  # fmt: skip
        """Append out = W x (+ bias); `residual`, if given, is the address of what the result is added to."""
        rows, n = self.tensor(linear).shape
        parameters = decode_ops.MatvecParameters(
            product=self.matvec_function(linear),
            weights=self.data(linear),
            n=n,
            rows=rows,
            multiple=multiple,
            buffer=x.address,
            stride=x.stride,
            out=out,
            bias=self.vector(linear.bias),
            residual=residual,
        )
        self.add(decode_ops.matvec, parameters, barrier)

    def add_to_residual(self, linear: blocks.Linear, x: Activations) -> None:
        """Append x += W x', the end of a block."""
        self.matvec(linear, x, self.buffer("added", 4 * self.n_embd), residual=self.x, barrier=True)


# --------------------------------------------------------------------------------------------------------------- blocks


def add_part(ops: DecodeOps, layer: int, part: blocks.Part, shape: PlannedCaches) -> None:
    """Append the operations of a part of a block."""
    if isinstance(part, blocks.Attention):
        add_attention(ops, layer, part, shape)
    elif isinstance(part, blocks.LatentAttention):
        latent.add_decode(ops, layer, part, shape)
    elif isinstance(part, blocks.Experts):
        add_experts(ops, part)
    elif isinstance(part, blocks.FeedForward):
        add_gated(ops, part, ops.norm(part.norm))
    else:
        raise AssertionError(f"layer {layer}: the decode plan has no operations for {type(part).__name__}")


def add_head(ops: DecodeOps, logits: Array) -> None:
    """Append the output norm and the product that gives the logits."""
    head = ops.model.head
    ops.matvec(head.output, ops.norm(head.norm), ops.keep(logits).ctypes.data, barrier=True)


def add_attention(ops: DecodeOps, layer: int, part: blocks.Attention, shape: PlannedCaches) -> None:
    """Append attention with its norm: projections, RoPE, cache, softmax, output; the result is added to x."""
    normed = ops.norm(part.norm)
    q, k, v = (ops.buffer(name, 4 * ops.rows(getattr(part, name))) for name in "qkv")
    _add_heads(ops, part, part.q, part.q_norm, normed, q)
    _add_heads(ops, part, part.k, part.k_norm, normed, k)
    ops.matvec(part.v, normed, v, barrier=True)
    heads, span = shape.heads(part), shape.span(ops.model.attending, kernel_sizes.DECODE_SPAN)
    nbytes = kernel_sizes.decode_attention_bytes(part.heads, part.head_dim_k, heads.group, span)
    scratch, stride = ops.private_buffer("scratch", nbytes)
    partial = ops.buffer("partial", 4 * ops.threads * part.heads * (part.head_dim_v + 2))
    attention = decode_attention.AttentionParameters(
        position=ops.position,
        q=q,
        k=k,
        v=v,
        kv_heads=part.kv_heads,
        scale=ops.constant(part.scale),
        layer_view=ops.layer_view(layer, part),
        span=span,
        partial=partial,
        scratch=scratch,
        private_stride=stride,
        **rope_fields(part),
    )
    ops.add(decode_attention.attention(heads), attention, barrier=True)
    merged = Activations(*ops.private_buffer("merged", activation_bytes(part.heads * part.head_dim_v)))
    merge = decode_attention.MergeParameters(
        partial=partial,
        heads=part.heads,
        dim=part.head_dim_v,
        buffer=merged.address,
        private_stride=merged.stride,
    )
    ops.add(decode_attention.merge(heads.rotate_v), merge)
    ops.add_to_residual(part.out, merged)


def _add_heads(
    ops: DecodeOps, part: blocks.Attention, linear: blocks.Linear, norm: blocks.Norm | None, x: Activations, out: int
) -> None:
    """Append queries or keys, and their norm by heads if there is one. Each thread normalizes the heads it computed."""
    if norm is None:
        ops.matvec(linear, x, out)
        return
    multiple = math.lcm(SPLIT_ROWS, part.head_dim_k)
    ops.matvec(linear, x, out, multiple=multiple)
    parameters = decode_ops.HeadNormParameters(
        x=out,
        weight=ops.vector(norm.weight),
        rows=ops.rows(linear),
        dim=part.head_dim_k,
        eps=ops.constant(norm.eps),
        multiple=multiple,
    )
    ops.add(decode_ops.head_norm, parameters)


def add_gated(ops: DecodeOps, part: blocks.FeedForward, normed: Activations) -> None:
    """Append a gated feed-forward, or a shared expert, whose norm is computed."""
    n_ff = ops.rows(part.gate)
    gate, up = ops.buffer("gate", 4 * n_ff), ops.buffer("up", 4 * n_ff)
    ops.matvec(part.gate, normed, gate)
    ops.matvec(part.up, normed, up)
    hidden = Activations(ops.buffer("hidden", activation_bytes(n_ff)), 0)
    swiglu = decode_ops.SwigluParameters(gate=gate, up=up, n=n_ff, multiple=SPLIT_ROWS, buffer=hidden.address)
    ops.add(decode_ops.swiglu, swiglu, barrier=True)
    ops.add_to_residual(part.down, hidden)


def add_experts(ops: DecodeOps, part: blocks.Experts) -> None:
    """Append a mixture of experts with its norm, the shared expert first; the result is added to x."""
    normed = ops.norm(part.norm)
    if part.shared is not None:
        add_gated(ops, part.shared, normed)
    logits = ops.buffer("router", 4 * part.count)
    interleave = ops.tensor(part.router).type.interleave
    ops.matvec(part.router, normed, logits, barrier=True, multiple=max(4, interleave))
    selected, selected_stride = ops.private_buffer(
        "selected", kernel_sizes.selected_experts_bytes(part.count, part.used)
    )
    select = decode_experts.SelectParameters(
        logits=logits, routing=ops.routing(part), selected=selected, private_stride=selected_stride
    )
    ops.add(decode_experts.select_experts, select)
    gate, up, down = (ops.experts_of(linear) for linear in (part.gate, part.up, part.down))
    hidden_bytes = whole_lines(activation_bytes(part.ff))
    hidden = ops.buffer("experts", part.used * hidden_bytes)
    gate_up = decode_experts.GateUpParameters(
        steps=0,
        gate_product=ops.matvec_function(part.gate),
        gate=gate.address,
        gate_bytes=gate.expert_bytes,
        up_product=ops.matvec_function(part.up),
        up=up.address,
        up_bytes=up.expert_bytes,
        n=ops.n_embd,
        ff=part.ff,
        multiple=SPLIT_ROWS,
        selected=selected,
        selected_stride=selected_stride,
        x=normed.address,
        x_stride=normed.stride,
        products=ops.buffer("products", 8 * part.used * part.ff),
        hidden=hidden,
        hidden_bytes=hidden_bytes,
    )
    steps = (decode_experts.GATE, decode_experts.UP, decode_experts.ACTIVATE)
    for step in (sum(steps),) if ops.model.expert_options.fused else steps:
        ops.add(decode_experts.gate_up, gate_up._replace(steps=step))
    ops.add_barrier()
    down_parameters = decode_experts.DownParameters(
        product=ops.matvec_function(part.down),
        weights=down.address,
        expert_bytes=down.expert_bytes,
        n=part.ff,
        rows=ops.n_embd,
        multiple=SPLIT_ROWS,
        selected=selected,
        selected_stride=selected_stride,
        used=part.used,
        hidden=hidden,
        hidden_bytes=hidden_bytes,
        out=ops.buffer("added", 4 * ops.n_embd),
        residual=ops.x,
    )
    ops.add(decode_experts.down, down_parameters, barrier=True)
