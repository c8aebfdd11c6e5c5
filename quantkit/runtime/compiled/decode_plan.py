"""The decode plan: one token through all blocks and the output head, as one operation list.

Operations per block, with barriers where | stands:

    attention       norm, q, k, v | attention | merge, out, add to x |
    latent          see latent.py
    compressed      see compressed.py
    per-layer       see layer_input.py; embeddings
    recurrent       see delta_net.py and mamba2.py
    feed-forward    norm, gate, up, activation | down, add to x |
    experts         norm, router | select, gate, up, activation | down, add to x | (norm, add | norm, add to x |)

With hyper-connections there are operations before and after each part; see hyper_connections.py. Of blocks with AltUp
see altup.py.
In parallel blocks both parts take one norm, of the layer's input.
With latents, experts have latent_down beside the router, and latent_up, add to x | after down.
A shared expert runs as a feed-forward before the routed ones, on the same norm. A norm of a block's result has a
barrier before and after it, as has a norm of queries and keys over all heads.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import NamedTuple

import numpy as np

from quantkit.archs.common import blocks
from quantkit.placement import kernel_sizes
from quantkit.placement.kernel_sizes import activation_bytes, whole_lines
from quantkit.runtime.blocks.spans import Span
from quantkit.runtime.compiled import (
    altup,
    block_indexer,
    compressed,
    delta_net,
    hyper_connections,
    kimi_delta,
    latent,
    layer_input,
    mamba2,
    ngrams,
    pooled_indexer,
    short_conv,
    stream_mixers,
)
from quantkit.runtime.compiled.cached_attention import Projected, attend_token
from quantkit.runtime.compiled.plan_base import (
    SPLIT_ROWS,
    Activations,
    Array,
    CompiledPlan,
    GivenExperts,
    ModelParts,
    PlannedCaches,
    PlanOps,
    TokenOps,
    rope_fields,
)
from quantkit.runtime.kernels.cpu import decode_experts, decode_norms, decode_ops, gates
from quantkit.runtime.kernels.cpu.altup import TokenGatesParameters, largest_gates_token
from quantkit.runtime.kernels.cpu.op_list import Buffers
from quantkit.runtime.kv.cache import Cache


class DecodePlan(CompiledPlan):
    """`plan(token, cache)` is float32[vocab], the logits after the token; the cache then holds the token."""

    def __init__(self, model: ModelParts):
        super().__init__(model)
        self._position = np.zeros(1, np.int64)
        self._head = HeadPlan(model)
        self._x, self._logits = self._head.x, self._head.logits
        self._rows = layer_input.LayerRows(model, 1)
        self._given = GivenExperts(model, 1)
        self._ngrams = ngrams.NGramRows(model, 1)

    def __call__(self, token: int, cache: Cache) -> Array:
        """A fresh array. The caller makes sure that the cache has room."""
        tokens = np.array([token])
        self._given.look_up(tokens)
        ops = self._point_to([cache])
        embedded = self.model.embed(tokens)
        self._x[:] = embedded[0]
        self._rows.look_up(tokens, embedded)
        self._ngrams.look_up(tokens, [Span(0, 1, cache)])
        self._position[0] = cache.length
        ops.run()
        cache.extend(1)
        return self._logits.copy()

    def project(self, x: Array) -> Array:
        """Logits float32[vocab] of a hidden state float32[n_embd] after the last block."""
        return self._head(x)

    def _build(self, shape: PlannedCaches) -> PlanOps:
        ops = DecodeOps(self.model, self._given, self._x, self._position)
        add_blocks(ops, self._rows, self._ngrams, shape)
        add_head(ops, self._logits)
        return ops

    @property
    def work_bytes(self) -> int:
        own = (
            self._head.own_bytes + self._position.nbytes + self._rows.nbytes + self._given.nbytes + self._ngrams.nbytes
        )
        return super().work_bytes + own


class HeadPlan:
    """`plan(x)` is float32[vocab], the logits of a hidden state float32[n_embd] after the last block.

    x, logits   arrays that its operations read and write
    buffers     working memory, shared with other lists that do not run at the same time; None: its own
    """

    def __init__(self, model: ModelParts, buffers: Buffers | None = None):
        self._model, self._buffers = model, buffers
        self.x, self.logits = np.zeros(model.n_embd, np.float32), np.zeros(model.vocab, np.float32)

    def __call__(self, x: Array) -> Array:
        """A fresh array."""
        self.x[:] = x
        self._ops.run()
        return self.logits.copy()

    @functools.cached_property
    def _ops(self) -> PlanOps:
        ops = DecodeOps(self._model, GivenExperts(self._model, 0), self.x, np.zeros(1, np.int64), self._buffers)
        add_head(ops, self.logits)
        return ops

    @property
    def own_bytes(self) -> int:
        """Bytes of working memory, beside the buffers."""
        return self.x.nbytes + self.logits.nbytes


class DecodeOps(TokenOps):
    """Operations on the residual stream x float32[n_embd] of one token."""

    def __init__(
        self, model: ModelParts, given: GivenExperts, x: Array, position: Array, buffers: Buffers | None = None
    ):
        super().__init__(model, given, buffers)
        self.x, self.position = self.keep(x).ctypes.data, self.keep(position).ctypes.data
        self.n_embd, self.entering = model.n_embd, self.x

    def norm(self, norm: blocks.Norm | None) -> Activations:
        """Append the norm of x, or x itself, as products take it."""
        return self.norm_of(norm, Activations(self.entering, 0), self.n_embd, "normed")

    def sub_norm(self, norm: blocks.Norm | None, x: Activations, n: int) -> Activations:
        """Append a norm of float32[n] before a product; x as it is without one."""
        return x if norm is None else self.norm_of(norm, x, n, "sub normed")

    def norm_of(self, norm: blocks.Norm | None, x: Activations, n: int, name: str) -> Activations:
        """Append the norm of float32[n], or x itself, quantized, in a buffer of that name for each thread."""
        buffer, stride = self.private_buffer(name, activation_bytes(n))
        parameters = decode_ops.NormParameters(
            x=x.address,
            weight=0 if norm is None else self.norm_weight(norm, n),
            n=n,
            eps=self.constant(norm.eps if norm else 0.0),
            buffer=buffer,
            private_stride=stride,
            x_stride=x.stride,
            centred=int(norm is not None and norm.centred),
            bias=self.vector(norm.bias) if norm else 0,
        )
        self.add(decode_ops.norm, parameters)
        return Activations(buffer, stride)

    def norm_rows(self, norm: blocks.Norm, x: int, n: int, out: int, *, add: bool = False) -> None:
        """Append out (+)= norm(x), float32[n], of what all threads computed."""
        assert not norm.centred, f"{norm.weight}: norms of shared vectors are RMS norms"
        parameters = decode_norms.NormRowsParameters(
            x=x,
            weight=self.vector(norm.weight),
            n=n,
            eps=self.constant(norm.eps),
            multiple=SPLIT_ROWS,
            out=out,
            add=int(add),
        )
        self.add(decode_norms.norm_rows, parameters)

    def matvec(
        self, linear: blocks.Linear, x: Activations, out: int, *, barrier: bool = False, claimed: bool = False,
        multiple: int = SPLIT_ROWS, residual: int = 0,
    ) -> None:  # fmt: skip
        """Append out = factor * (scale W x + bias); `residual`, if given, is the address of what that is added to.

        With `claimed` or `barrier` threads claim rows: a barrier must come before any is read. Otherwise a thread may
        read those of its share.
        """
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
            bias=self.bias(linear),
            residual=residual,
            scale=self.scale(linear),
            claims=self.claims() if claimed or barrier else 0,
        )
        self.add(decode_ops.matvec, parameters, barrier)

    def add_to_residual(self, linear: blocks.Linear, x: Activations, post_norm: blocks.Norm | None = None) -> None:
        """Append x += W x', the end of a block, or x += norm(W x')."""
        added = self.buffer("added", 4 * self.n_embd)
        self.matvec(linear, x, added, residual=0 if post_norm else self.x, barrier=True)
        if post_norm is not None:
            self.norm_rows(post_norm, added, self.n_embd, self.x, add=True)
            self.add_barrier()

    def group(self, linear: blocks.Linear) -> int:
        """Rows that are not split between threads, of a matrix with few rows."""
        return max(4, self.tensor(linear).type.interleave)

    @property
    def deferred(self) -> int:
        """Address of what experts add at the end of the block, float32[n_embd]."""
        return self.buffer("deferred", 4 * self.n_embd)

    def add_deferred(self) -> None:
        """Append x += what experts have deferred."""
        add = decode_norms.AddParameters(x=self.x, y=self.deferred, n=self.n_embd, multiple=SPLIT_ROWS)
        self.add(decode_norms.add, add, barrier=True)

    def scale_residual(self, name: str) -> None:
        """Append x *= a tensor float32[1]."""
        scale = decode_norms.ScaleParameters(x=self.x, n=self.n_embd, multiple=SPLIT_ROWS, factor=self.vector(name))
        self.add(decode_norms.scale, scale, barrier=True)


# --------------------------------------------------------------------------------------------------------------- blocks


def add_blocks(ops: DecodeOps, rows: layer_input.LayerRows, lookups: ngrams.NGramRows, shape: PlannedCaches) -> None:
    """Append the operations of all blocks of the model, with the rows of its per-layer embeddings and n-grams."""
    ops.keep(rows.rows)
    layer_input.add_projections(ops, layer_input.of_model(ops.model))
    head = ops.model.head.streams
    if isinstance(head, blocks.AltUpHead):
        _add_altup_blocks(ops, altup.TokenStreams(ops, head), rows, shape)
        return
    streams = _streams(ops)
    for block in ops.model.block_list:
        normed = ops.norm(block.parts[0].norm) if block.parallel else None
        for (layer, part), connection in itertools.zip_longest(block.numbered_parts, block.hyper):
            if isinstance(part, blocks.NGrams):
                assert streams is not None, f"{part.table}: n-grams are added to streams"
                ngrams.add_decode(ops, layer, part, lookups, streams.streams)
                continue
            if streams is not None:
                streams.read(connection)
            if isinstance(part, blocks.LayerInput):
                layer_input.add_decode(ops, part, rows.address(part))
            else:
                add_part(ops, layer, part, shape, normed)
            if streams is not None:
                streams.write()
        if any(isinstance(part, blocks.Experts) and part.deferred for part in block.parts):
            ops.add_deferred()
        if block.out_scale is not None:
            ops.scale_residual(block.out_scale)
    if streams is not None and head is not None:
        streams.end(head)


def _add_altup_blocks(
    ops: DecodeOps, streams: altup.TokenStreams, rows: layer_input.LayerRows, shape: PlannedCaches
) -> None:
    """As `add_blocks`, of blocks with AltUp."""
    for block in ops.model.block_list:
        laurel, attention, feed_forward, embedding = block.parts
        assert block.altup is not None
        assert isinstance(laurel, blocks.Laurel)
        assert isinstance(attention, blocks.Attention)
        assert isinstance(feed_forward, blocks.FeedForward)
        assert isinstance(embedding, blocks.LayerInput)
        streams.predict(block.altup)
        normed = ops.norm(laurel.norm)
        streams.project(laurel, normed)
        add_attention(ops, block.layer, attention, shape, normed)
        streams.add_laurel(laurel, normed)
        add_gated(ops, feed_forward, ops.norm(feed_forward.norm))
        streams.correct(block.altup)
        layer_input.add_decode(ops, embedding, rows.address(embedding))
        streams.add()
    streams.end()


def _streams(ops: DecodeOps) -> hyper_connections.TokenStreams | stream_mixers.TokenMixers | None:
    """The residual streams of hyper-connections, if there are several."""
    head = ops.model.head.streams
    if isinstance(head, blocks.StreamMixer):
        return stream_mixers.TokenMixers(ops, head)
    return hyper_connections.TokenStreams(ops, head.streams) if head else None


def add_part(
    ops: DecodeOps, layer: int, part: blocks.Part, shape: PlannedCaches, normed: Activations | None = None
) -> None:
    """Append the operations of a part of a block; `normed`, if given, is its input, whose norm is computed."""
    if isinstance(part, blocks.Attention):
        add_attention(ops, layer, part, shape, normed)
    elif isinstance(part, blocks.DeltaNet):
        delta_net.add_decode(ops, layer, part)
    elif isinstance(part, blocks.KimiDelta):
        kimi_delta.add_decode(ops, layer, part)
    elif isinstance(part, blocks.Mamba2):
        mamba2.add_decode(ops, layer, part)
    elif isinstance(part, blocks.ShortConv):
        short_conv.add_decode(ops, layer, part)
    elif isinstance(part, blocks.LatentAttention):
        latent.add_decode(ops, layer, part, shape)
    elif isinstance(part, blocks.CompressedAttention):
        compressed.add_decode(ops, layer, part, shape)
    elif isinstance(part, blocks.Experts):
        add_experts(ops, part, normed)
    elif isinstance(part, blocks.FeedForward):
        add_gated(ops, part, normed or ops.norm(part.norm))
    else:
        raise AssertionError(f"layer {layer}: the decode plan has no operations for {type(part).__name__}")


def add_head(ops: DecodeOps, logits: Array) -> None:
    """Append the output norm and the product that gives the logits."""
    head, out = ops.model.head, ops.keep(logits).ctypes.data
    ops.matvec(head.output, ops.norm(head.norm), out, barrier=head.softcap is None)
    if head.softcap is not None:
        cap = decode_norms.SoftCapParameters(
            x=out, n=ops.rows(head.output), multiple=SPLIT_ROWS, cap=ops.constant(head.softcap)
        )
        ops.add(decode_norms.soft_cap, cap, barrier=True)


def add_attention(
    ops: DecodeOps, layer: int, part: blocks.Attention, shape: PlannedCaches, normed: Activations | None = None
) -> None:
    """Append attention with its norm: projections, RoPE, cache, softmax, output; the result is added to x."""
    normed, view = normed or ops.norm(part.norm), ops.layer_view(layer, part)
    width = part.heads * part.head_dim_k
    q, k, v = (ops.buffer(name, 4 * n) for name, n in zip("qkv", (width, ops.rows(part.k), ops.rows(part.v))))
    gated = ops.buffer("queries and gates", 8 * width) if part.gated else 0
    query_gates = ops.buffer("query gates", 4 * width) if part.gated else 0
    ops.matvec(part.q, normed, gated or q, claimed=True)
    head_gates = 0
    if part.head_gate is not None:
        head_gates = ops.buffer("head gates", 4 * part.heads)
        ops.matvec(part.head_gate, normed, head_gates, multiple=ops.group(part.head_gate))
    if part.source is None:
        ops.matvec(part.k, normed, k, claimed=True)
        if part.v != part.k:
            ops.matvec(part.v, normed, v, claimed=True)
    if part.indexer is not None:
        pooled_indexer.add_decode_products(ops, part.indexer, normed)
    ops.add_barrier()
    if part.gated:
        _split_queries(ops, part, gated, q, query_gates)
    _add_head_operations(ops, part, part.q_norm, q, width, view)
    if part.source is None:
        _add_values(ops, part, k, v)
        _add_head_operations(ops, part, part.k_norm, k, ops.rows(part.k), view)
    else:
        k = v = 0
    ops.add_barrier()
    selection = None
    if isinstance(part.indexer, blocks.PooledIndexer):
        selection = pooled_indexer.add_decode(ops, layer, part.indexer, part.rope, shape)
    elif isinstance(part.indexer, blocks.BlockIndexer):
        selection = block_indexer.add_decode(ops, layer, part.indexer, part.rope, shape)
    if part.norms_across_heads:
        assert part.source is None, f"{part.q.weight}: norms over all heads, and keys of an earlier layer"
        q = _norm_across_heads(ops, part.q, part.q_norm, q, "q normed")
        k = _norm_across_heads(ops, part.k, part.k_norm, k, "k normed")
        ops.add_barrier()
    projected = Projected(
        shape.heads(part), part.kv_heads, q, k, v, part.scale, view,
        rope_fields(part, is_applied=part.norms_after_rope), query_gates, ops.vector(part.sinks),
        part.softcap, head_gates, selection,
    )  # fmt: skip
    merged = attend_token(ops, shape, projected)
    width = part.heads * part.head_dim_v
    ops.add_to_residual(part.out, ops.sub_norm(part.sub_norm, merged, width), part.post_norm)


def _split_queries(ops: DecodeOps, part: blocks.Attention, projected: int, q: int, query_gates: int) -> None:
    """Append the copies of queries and gates from the product that gives both."""
    dim = part.head_dim_k
    split = gates.SplitQueriesParameters(
        tokens=0,
        projected=projected,
        heads=part.heads,
        dim=dim,
        multiple=math.lcm(SPLIT_ROWS, dim) // dim,
        q=q,
        gates=query_gates,
    )
    ops.add(gates.split_queries, split)


def _add_values(ops: DecodeOps, part: blocks.Attention, k: int, v: int) -> None:
    """Append the norm of values, if they have one; of the keys before their norm, if those are the values."""
    are_keys = part.v == part.k
    assert not are_keys or part.v_norm is not None, f"{part.v.weight}: values that are keys have a norm of their own"
    if part.v_norm is not None:
        _add_head_norm(ops, part.v_norm, k if are_keys else v, ops.rows(part.v), part.head_dim_v, v)


def _add_head_operations(
    ops: DecodeOps, part: blocks.Attention, norm: blocks.Norm | None, x: int, rows: int, view: int
) -> None:
    """Append RoPE and the norm by heads of queries or keys, if they have them here. Each thread has its heads."""
    dim = part.head_dim_k
    if part.norms_after_rope:
        rope = decode_norms.RopeHeadsParameters(
            position=ops.position, x=x, rows=rows, dim=dim, multiple=math.lcm(SPLIT_ROWS, dim), layer_view=view,
            **rope_fields(part),
        )  # fmt: skip
        ops.add(decode_norms.rope_heads, rope)
    if norm is not None and not part.norms_across_heads:
        _add_head_norm(ops, norm, x, rows, dim, x)


def _add_head_norm(ops: DecodeOps, norm: blocks.Norm, x: int, rows: int, dim: int, out: int) -> None:
    """Append out = norm(x) by heads of `dim` elements; out may be x. Each thread has its heads."""
    parameters = decode_ops.HeadNormParameters(
        x=x,
        weight=ops.norm_weight(norm, dim),
        rows=rows,
        dim=dim,
        eps=ops.constant(norm.eps),
        multiple=math.lcm(SPLIT_ROWS, dim),
        out=out,
    )
    ops.add(decode_ops.head_norm, parameters)


def _norm_across_heads(ops: DecodeOps, linear: blocks.Linear, norm: blocks.Norm | None, x: int, name: str) -> int:
    """Append the norm of all queries or keys as one vector, in a buffer of its own; the address of the result."""
    if norm is None:
        return x
    rows = ops.rows(linear)
    out = ops.buffer(name, 4 * rows)
    ops.norm_rows(norm, x, rows, out)
    return out


def add_gated(
    ops: DecodeOps, part: blocks.FeedForward, normed: Activations, shared_gate: str | None = None, out: int = 0
) -> None:
    """Append a gated feed-forward, or a shared expert with its gate if it has one, whose norm is computed.

    The result is added to x, or, normed, written to `out` if that is given.
    """
    n_ff = ops.rows(part.gate)
    gate = up = ops.buffer("gate", 4 * n_ff)
    ops.matvec(part.gate, normed, gate, claimed=True)
    if part.up != part.gate:
        up = ops.buffer("up", 4 * n_ff)
        ops.matvec(part.up, normed, up, claimed=True)
    ops.add_barrier()
    if shared_gate is not None:
        gate_shared = gates.SharedGateParameters(
            x=normed.address,
            stride=normed.stride,
            weight=ops.vector(shared_gate),
            n=ops.n_embd,
            up=up,
            rows=n_ff,
            multiple=SPLIT_ROWS,
        )
        ops.add(gates.gate_shared, gate_shared)
    if part.cutoff is not None:
        every, gate = gate, ops.buffer("largest gates", 4 * n_ff)
        largest = TokenGatesParameters(every, n_ff, ops.constant(part.cutoff), SPLIT_ROWS, gate)
        ops.add(largest_gates_token, largest)
    hidden = Activations(ops.buffer("hidden", activation_bytes(n_ff)), 0)
    gated = decode_ops.GatedParameters(
        activation=ops.activation(part.activation, part.limit),
        gate=gate,
        up=up,
        n=n_ff,
        multiple=SPLIT_ROWS,
        buffer=hidden.address,
        numbers=ops.activation_numbers(part.activation),
    )
    ops.add(decode_ops.gated, gated, barrier=True)
    entering = ops.sub_norm(part.sub_norm, hidden, n_ff)
    if not out:
        ops.add_to_residual(part.down, entering, part.post_norm)
        return
    assert part.post_norm is not None, f"{part.down.weight}: a norm follows"
    added = ops.buffer("added", 4 * ops.n_embd)
    ops.matvec(part.down, entering, added, barrier=True)
    ops.norm_rows(part.post_norm, added, ops.n_embd, out)
    ops.add_barrier()


def add_experts(ops: DecodeOps, part: blocks.Experts, normed: Activations | None = None) -> None:
    """Append a mixture of experts with its norms, the shared expert first; the result is added to x.

    `normed`, if given, is the norm of its input.
    """
    n = 4 * ops.n_embd
    both, routed = (ops.buffer("both", n), ops.buffer("routed", n)) if part.post_norm else (0, ops.x)
    routed = ops.deferred if part.deferred else routed
    width = part.latent or ops.n_embd
    if part.shared is not None and part.shared.norm != part.norm:
        add_gated(ops, part.shared, ops.norm(part.shared.norm), part.shared_gate, both)
    normed = normed or ops.norm(part.norm)
    if part.shared is not None and part.shared.norm == part.norm:
        add_gated(ops, part.shared, normed, part.shared_gate, both)
    entering = normed
    if part.router_norm is not None:
        entering = ops.norm_of(part.router_norm, Activations(ops.entering, 0), ops.n_embd, "router normed")
    logits = ops.buffer("router", 4 * part.count)
    ops.matvec(part.router, entering, logits, barrier=part.latent_down is None, multiple=ops.group(part.router))
    if part.latent_down is not None:
        assert part.post_norm is None, f"{part.latent_down.weight}: latents and norms of experts"
        latents, routed = ops.buffer("latents", 4 * width), ops.buffer("routed latents", 4 * width)
        ops.matvec(part.latent_down, normed, latents, barrier=True)
        normed = ops.norm_of(None, Activations(latents, 0), width, "quantized latents")
    selected, stride = ops.private_buffer("selected", kernel_sizes.selected_experts_bytes(part.count, part.used))
    select = decode_experts.SelectParameters(
        logits=logits, routing=ops.routing(part), selected=selected, private_stride=stride
    )
    ops.add(decode_experts.select_experts, select)
    add_selected_experts(ops, part, normed, Selected(selected, stride), routed, fresh=routed != ops.x)
    if part.latent_up is not None:
        ops.add_to_residual(part.latent_up, ops.norm_of(None, Activations(routed, 0), width, "quantized latents"))
    if part.post_norm is not None:
        assert part.routed_norm is not None, f"{part.post_norm.weight}: the norms of Experts come together"
        ops.norm_rows(part.routed_norm, routed, ops.n_embd, both, add=True)
        ops.add_barrier()
        ops.norm_rows(part.post_norm, both, ops.n_embd, ops.x, add=True)
        ops.add_barrier()


class Selected(NamedTuple):
    """Where the token's experts and their weights are, as `decode_experts.select_experts` writes them.

    stride: bytes from one thread's copy to the next, 0 if all threads share it.
    """

    address: int
    stride: int


def add_selected_experts(
    ops: DecodeOps, part: blocks.Experts, x: Activations, selected: Selected, out: int, *, fresh: bool
) -> None:
    """Append out (+)= the weighted sum of the selected experts' outputs for x; `fresh`: out is overwritten.

    x and out have n_embd elements, or those of the latents of experts.
    """
    width = part.latent or ops.n_embd
    gate, up, down = (ops.experts_of(linear) for linear in (part.gate, part.up, part.down))
    hidden_bytes = whole_lines(activation_bytes(part.ff))
    hidden = ops.buffer("experts", part.used * hidden_bytes)
    gate_up = decode_experts.GateUpParameters(
        steps=0,
        activation=ops.activation(part.activation, part.limit),
        gate_product=ops.matvec_function(part.gate),
        gate=gate.address,
        gate_bytes=gate.expert_bytes,
        up_product=ops.matvec_function(part.up),
        up=0 if part.ungated else up.address,
        up_bytes=up.expert_bytes,
        n=width,
        ff=part.ff,
        multiple=SPLIT_ROWS,
        selected=selected.address,
        selected_stride=selected.stride,
        x=x.address,
        x_stride=x.stride,
        products=ops.buffer("products", 8 * part.used * part.ff),
        hidden=hidden,
        hidden_bytes=hidden_bytes,
        claims=0,
        gate_bias=ops.expert_biases(part.gate),
        gate_scales=ops.expert_scales(part.gate),
        up_bias=ops.expert_biases(part.up),
        up_scales=ops.expert_scales(part.up),
        weighted=part.used if part.weighs_inputs else 0,
    )
    steps = (decode_experts.GATE, decode_experts.UP, decode_experts.ACTIVATE)
    for step in (sum(steps),) if ops.model.expert_options.fused else steps:
        ops.add(decode_experts.gate_up, gate_up._replace(steps=step, claims=ops.claims()), barrier=True)
    down_parameters = decode_experts.DownParameters(
        product=ops.matvec_function(part.down),
        weights=down.address,
        expert_bytes=down.expert_bytes,
        n=part.ff,
        rows=width,
        multiple=SPLIT_ROWS,
        selected=selected.address,
        selected_stride=selected.stride,
        used=part.used,
        hidden=hidden,
        hidden_bytes=hidden_bytes,
        out=ops.buffer("added", 4 * width),
        residual=out,
        claims=ops.claims(),
        bias=ops.expert_biases(part.down),
        scales=ops.expert_scales(part.down),
        weighted=int(not part.weighs_inputs),
        fresh=int(fresh),
        identity_x=x.address if part.identity else 0,
        identity_stride=x.stride,
    )
    ops.add(decode_experts.down, down_parameters, barrier=True)
