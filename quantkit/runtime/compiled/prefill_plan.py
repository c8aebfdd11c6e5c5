"""The prefill plan: a batch of tokens through all blocks, as one operation list.

Operations per block, with barriers where | stands:

    attention       norm | q, k, v | RoPE, append to the caches | attention | quantize | out, add to x |
    latent          see latent.py
    compressed      see compressed.py
    recurrent       see delta_net.py
    per-layer       see layer_input.py; embeddings
    feed-forward    norm | gate, up | activation | down, add to x |
    experts         norm | router | route | group | gather | gate, up, activation | down, add to x | (norms, add to x |)

With hyper-connections there are operations before and after each part; see hyper_connections.py. Of blocks with AltUp
see altup.py.
With latents, experts have latent_down beside the router, and latent_up, add to x | after down.
A shared expert runs as a feed-forward after the routed ones, on the same norm.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from quantkit.archs.common import blocks
from quantkit.placement import kernel_sizes
from quantkit.placement.kernel_sizes import BATCH_TOKENS, activation_bytes, whole_lines
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
from quantkit.runtime.compiled.cached_attention import Projected, attend_batch
from quantkit.runtime.compiled.plan_base import (
    Array,
    BatchOps,
    CompiledPlan,
    GivenExperts,
    ModelParts,
    PlannedCaches,
    PlanOps,
    ProductRows,
    rope_fields,
)
from quantkit.runtime.kernels import dispatch
from quantkit.runtime.kernels.cpu import gates, gemm, prefill_experts, prefill_norms, prefill_ops
from quantkit.runtime.kernels.cpu.altup import BatchGatesParameters, largest_gates_batch
from quantkit.runtime.kernels.cpu.expert_panels import ExpertKernels, expert_kernels
from quantkit.runtime.kernels.cpu.float_gemm import MultiplyParameters
from quantkit.runtime.kernels.cpu.op_list import Buffers
from quantkit.runtime.kernels.cpu.operation import StoredRecord
from quantkit.runtime.kv.cache import Cache


class PrefillPlan(CompiledPlan):
    """`plan(tokens, spans)` is float32[tokens, n_embd] before the output norm; the caches then hold the tokens."""

    def __init__(self, model: ModelParts):
        super().__init__(model)
        self._state = new_state(BATCH_TOKENS)
        self._x = np.zeros((BATCH_TOKENS, model.n_embd), np.float32)
        self._rows = layer_input.LayerRows(model, BATCH_TOKENS)
        self._given = GivenExperts(model, BATCH_TOKENS)
        self._ngrams = ngrams.NGramRows(model, BATCH_TOKENS)

    def __call__(self, tokens: Array, spans: Sequence[Span]) -> Array:
        """At most BATCH_TOKENS tokens; a view that the next call overwrites. All caches have one type."""
        self._given.look_up(tokens)
        ops = self._point_to([span.cache for span in spans])
        count = len(tokens)
        self._x[:count] = self.model.embed(tokens)
        self._rows.look_up(tokens, self._x[:count])
        self._ngrams.look_up(tokens, spans)
        write_state(self._state, count, spans, [span.cache.length for span in spans])
        ops.run()
        for span in spans:
            span.cache.extend(span.stop - span.start)
        return self._x[:count]

    def batches(self, ids: Array, cache: Cache) -> Iterator[Array]:
        """Run int64[tokens] in batches; yields each batch's hidden states, valid until the next one."""
        for start in range(0, len(ids), BATCH_TOKENS):
            part = ids[start : start + BATCH_TOKENS]
            yield self(part, [Span(0, len(part), cache)])

    def _build(self, shape: PlannedCaches) -> PlanOps:
        ops = PrefillOps(self.model, self._given, self._x, self._state)
        add_blocks(ops, self._rows, self._ngrams, shape)
        return ops

    @property
    def work_bytes(self) -> int:
        own = self._x.nbytes + self._state.nbytes + self._rows.nbytes + self._given.nbytes + self._ngrams.nbytes
        return super().work_bytes + own


def new_state(sequences: int) -> Array:
    """Memory for the record of a batch of up to so many sequences."""
    return np.zeros((prefill_ops.STATE_BYTES + prefill_ops.SPAN_BYTES * sequences) // 8, np.int64)


def write_state(state: Array, tokens: int, spans: Sequence[Span], lengths: Sequence[int]) -> None:
    """Write the record of a batch; `lengths` are the tokens before it, of the sequence of each span."""
    records = [prefill_ops.SpanState(s.start, s.stop - s.start, length) for s, length in zip(spans, lengths)]
    header = prefill_ops.BatchState(tokens=tokens, next_piece=0, spans=len(spans))
    values = [*header, *itertools.chain.from_iterable(records)]
    state[: len(values)] = values


class PrefillOps(BatchOps):
    """Operations on the residual streams x float32[BATCH_TOKENS, n_embd] of a batch."""

    def __init__(self, model: ModelParts, given: GivenExperts, x: Array, state: Array, buffers: Buffers | None = None):
        super().__init__(model, given, buffers)
        self.x, self.state = self.keep(x).ctypes.data, self.keep(state).ctypes.data
        self.token_count = self.state + prefill_ops.TOKENS  # address of the number of tokens
        self.n_embd, self.entering = model.n_embd, self.x

    def floats(self, name: str, n: int) -> int:
        """Address of a buffer float32[BATCH_TOKENS, n]."""
        return self.buffer(name, 4 * BATCH_TOKENS * n)

    def is_quantized(self, linear: blocks.Linear) -> bool:
        """Whether products with a matrix read tiles."""
        return dispatch.batch(self.tensor(linear).type).quantized

    def norm(self, norm: blocks.Norm | None, readers: Sequence[blocks.Linear]) -> ProductRows:
        """Append the norm of x, or x itself, as the matrices `readers` multiply it."""
        if norm is None:
            return self.quantize(self.entering, self.n_embd, readers)
        out = self.floats("normed", self.n_embd)
        self.norm_of(norm, self.entering, self.n_embd, out)
        return self.quantize(out, self.n_embd, readers)

    def sub_norm(self, norm: blocks.Norm | None, x: int, n: int) -> None:
        """Append a norm of x float32[tokens, n] before a product, in place; nothing without one."""
        if norm is not None:
            self.norm_of(norm, x, n, x)

    def norm_of(self, norm: blocks.Norm, x: int, n: int, out: int) -> None:
        """Append out = norm(x), float32[tokens, n]; out may be x."""
        parameters = prefill_ops.NormParameters(
            state=self.state,
            x=x,
            weight=self.norm_weight(norm, n),
            n=n,
            eps=self.constant(norm.eps),
            out=out,
            centred=int(norm.centred),
            bias=self.vector(norm.bias),
        )
        self.add(prefill_ops.norm, parameters)

    def quantize(self, x: int, n: int, readers: Sequence[blocks.Linear]) -> ProductRows:
        """Append a barrier, and before it the quantization of x float32[tokens, n] if a reader multiplies tiles."""
        if not any(map(self.is_quantized, readers)):
            self.add_barrier()
            return ProductRows(x, 0)
        tiles = self.buffer("tiles", kernel_sizes.tiles_bytes(n, BATCH_TOKENS))
        parameters = gemm.QuantizeParameters(x=x, n=n, tokens=self.token_count, tiles=tiles)
        self.add(gemm.quantize_tiles, parameters, barrier=True)
        return ProductRows(x, tiles)

    def multiply(
        self, linear: blocks.Linear, x: ProductRows, out: int, *, add: bool = False, barrier: bool = False
    ) -> None:
        """Append out (+)= factor * (scale W x + bias). A barrier must come before the result is read or added to."""
        assert not (add and linear.is_scaled), f"{linear.weight}: a scaled product cannot be added to what is there"
        rows, n = self.tensor(linear).shape
        batch = dispatch.batch(self.tensor(linear).type)
        scratch, stride = self.private_buffer("panels", batch.scratch_bytes(n))
        parameters = MultiplyParameters(
            weights=self.data(linear),
            n=n,
            rows=rows,
            tokens=self.token_count,
            x=x.tiles if batch.quantized else x.floats,
            out=out,
            bias=self.bias(linear),
            scratch=scratch,
            private_stride=stride,
            claims=self.claims(),
            scale=self.scale(linear),
        )
        self.add(batch.kernel(int(add)), parameters, barrier)

    def add_to_residual(self, linear: blocks.Linear, x: ProductRows, post_norm: blocks.Norm | None = None) -> None:
        """Append x += W x', the end of a block, or x += norm(W x')."""
        if post_norm is None and not linear.is_scaled:
            self.multiply(linear, x, self.x, add=True, barrier=True)
            return
        assert post_norm is None or not (post_norm.centred or post_norm.bias), f"{linear.weight}: RMS norms follow"
        added = self.floats("added", self.n_embd)
        self.multiply(linear, x, added, barrier=True)
        self.add_normed(post_norm, added, self.x)

    def add_normed(self, norm: blocks.Norm | None, y: int, x: int) -> None:
        """Append x += norm(y), or x += y without a norm; y is overwritten."""
        weight, eps = (self.vector(norm.weight), self.constant(norm.eps)) if norm else (0, 0)
        parameters = prefill_norms.AddParameters(state=self.state, y=y, weight=weight, n=self.n_embd, eps=eps, x=x)
        self.add(prefill_norms.add, parameters, barrier=True)

    @property
    def deferred(self) -> int:
        """Address of what experts add at the end of the block, float32[tokens, n_embd]."""
        return self.floats("deferred", self.n_embd)

    def scale_residual(self, name: str) -> None:
        """Append x *= a tensor float32[1]."""
        scale = prefill_norms.ScaleParameters(state=self.state, x=self.x, n=self.n_embd, factor=self.vector(name))
        self.add(prefill_norms.scale, scale, barrier=True)


# --------------------------------------------------------------------------------------------------------------- blocks


def add_blocks(ops: PrefillOps, rows: layer_input.LayerRows, lookups: ngrams.NGramRows, shape: PlannedCaches) -> None:
    """Append the operations of all blocks of the model, with the rows of its per-layer embeddings and n-grams."""
    ops.keep(rows.rows)
    embedded = int(ops.keep(rows.x).ctypes.data)
    head = ops.model.head.streams
    if isinstance(head, blocks.AltUpHead):
        _add_altup_blocks(ops, altup.BatchStreams(ops, head), embedded, rows, shape)
        return
    streams = _streams(ops)
    for block in ops.model.block_list:
        normed = ops.norm(block.parts[0].norm, ()).floats if block.parallel else 0
        for (layer, part), connection in itertools.zip_longest(block.numbered_parts, block.hyper):
            if isinstance(part, blocks.NGrams):
                assert streams is not None, f"{part.table}: n-grams are added to streams"
                ngrams.add_prefill(ops, layer, part, lookups, streams.streams)
                continue
            if streams is not None:
                streams.read(connection)
            if isinstance(part, blocks.LayerInput):
                layer_input.add_prefill(ops, part, embedded, rows.address(part))
            else:
                add_part(ops, layer, part, shape, normed)
            if streams is not None:
                streams.write()
        if any(isinstance(part, blocks.Experts) and part.deferred for part in block.parts):
            ops.add_normed(None, ops.deferred, ops.x)
        if block.out_scale is not None:
            ops.scale_residual(block.out_scale)
    if streams is not None and head is not None:
        streams.end(head)


def _add_altup_blocks(
    ops: PrefillOps, streams: altup.BatchStreams, embedded: int, rows: layer_input.LayerRows, shape: PlannedCaches
) -> None:
    """As `add_blocks`, of blocks with AltUp; `embedded` is the address of the embedding."""
    for block in ops.model.block_list:
        laurel, attention, feed_forward, embedding = block.parts
        assert block.altup is not None
        assert isinstance(laurel, blocks.Laurel)
        assert isinstance(attention, blocks.Attention)
        assert isinstance(feed_forward, blocks.FeedForward)
        assert isinstance(embedding, blocks.LayerInput)
        streams.predict(block.altup)
        normed = ops.norm(laurel.norm, (laurel.left,))
        streams.project(laurel, normed)
        add_attention(ops, block.layer, attention, shape, normed.floats)
        streams.add_laurel(laurel, normed)
        add_gated(ops, feed_forward, ops.norm(feed_forward.norm, (feed_forward.gate, feed_forward.up)))
        streams.correct(block.altup)
        layer_input.add_prefill(ops, embedding, embedded, rows.address(embedding))
        streams.add()
    streams.end()


def _streams(ops: PrefillOps) -> hyper_connections.BatchStreams | stream_mixers.BatchMixers | None:
    """The residual streams of hyper-connections, if there are several."""
    head = ops.model.head.streams
    if isinstance(head, blocks.StreamMixer):
        return stream_mixers.BatchMixers(ops, head)
    return hyper_connections.BatchStreams(ops, head.streams) if head else None


def add_part(ops: PrefillOps, layer: int, part: blocks.Part, shape: PlannedCaches, normed: int = 0) -> None:
    """Append the operations of a part of a block; `normed`, if given, is the address of its input's norm."""
    if isinstance(part, blocks.Attention):
        add_attention(ops, layer, part, shape, normed)
    elif isinstance(part, blocks.DeltaNet):
        delta_net.add_prefill(ops, layer, part)
    elif isinstance(part, blocks.KimiDelta):
        kimi_delta.add_prefill(ops, layer, part)
    elif isinstance(part, blocks.Mamba2):
        mamba2.add_prefill(ops, layer, part)
    elif isinstance(part, blocks.ShortConv):
        short_conv.add_prefill(ops, layer, part)
    elif isinstance(part, blocks.LatentAttention):
        latent.add_prefill(ops, layer, part, shape)
    elif isinstance(part, blocks.CompressedAttention):
        compressed.add_prefill(ops, layer, part, shape)
    elif isinstance(part, blocks.Experts):
        add_experts(ops, part, normed)
    elif isinstance(part, blocks.FeedForward):
        add_gated(ops, part, _normed(ops, part.norm, normed, (part.gate, part.up)))
    else:
        raise AssertionError(f"layer {layer}: the prefill plan has no operations for {type(part).__name__}")


def _normed(ops: PrefillOps, norm: blocks.Norm | None, normed: int, readers: Sequence[blocks.Linear]) -> ProductRows:
    """The norm of x for these matrices: computed here, or at `normed` already."""
    return ops.quantize(normed, ops.n_embd, readers) if normed else ops.norm(norm, readers)


def add_attention(
    ops: PrefillOps, layer: int, part: blocks.Attention, shape: PlannedCaches, normed_at: int = 0
) -> None:
    """Append attention with its norm: projections, RoPE, caches, softmax, output; the result is added to x."""
    head_gates = ops.floats("head gates", part.heads) if part.head_gate is not None else 0
    own = (part.k, part.v) if part.source is None else ()
    indexer = part.indexer
    of_indexer = (indexer.q, indexer.k) if indexer is not None else ()
    readers = (part.q, *own, *((part.head_gate,) if part.head_gate is not None else ()), *of_indexer)
    normed = _normed(ops, part.norm, normed_at, readers)
    width_q = part.heads * part.head_dim_k
    q, k, v = (ops.floats(name, n) for name, n in zip("qkv", (width_q, ops.rows(part.k), ops.rows(part.v))))
    projected, query_gates = q, 0
    if part.gated:
        projected, query_gates = ops.floats("queries and gates", 2 * width_q), ops.floats("query gates", width_q)
    ops.multiply(part.q, normed, projected)
    if part.head_gate is not None:
        ops.multiply(part.head_gate, normed, head_gates)
    if indexer is not None:
        pooled_indexer.add_prefill_products(ops, indexer, normed)
    if part.source is None:
        ops.multiply(part.k, normed, k, barrier=part.v == part.k)
        if part.v != part.k:
            ops.multiply(part.v, normed, v, barrier=True)
        if part.v_norm is not None:
            _add_norm_by_heads(ops, part.v_norm, k if part.v == part.k else v, part.kv_heads, part.head_dim_v, v)
    else:
        k = v = 0
        ops.add_barrier()
    selection = None
    if isinstance(indexer, blocks.PooledIndexer):
        selection = pooled_indexer.add_prefill(ops, layer, indexer, part.rope, shape)
    elif isinstance(indexer, blocks.BlockIndexer):
        selection = block_indexer.add_prefill(ops, layer, indexer, part.rope, shape)
    if part.gated:
        split = gates.SplitQueriesParameters(
            tokens=ops.token_count,
            projected=projected,
            heads=part.heads,
            dim=part.head_dim_k,
            multiple=1,
            q=q,
            gates=query_gates,
        )
        ops.add(gates.split_batch_queries, split)
    view = ops.layer_view(layer, part)
    _add_head_norm(ops, part, part.q_norm, q, part.heads, view)
    if part.source is None:
        _add_head_norm(ops, part, part.k_norm, k, part.kv_heads, view)
    width = part.heads * part.head_dim_v
    out = ops.floats("attended", width)
    attending = Projected(
        shape.heads(part), part.kv_heads, q, k, v, part.scale, view,
        rope_fields(part, is_applied=part.norms_after_rope), sinks=ops.vector(part.sinks),
        softcap=part.softcap, selection=selection,
    )  # fmt: skip
    attend_batch(ops, shape, attending, out)
    if part.gated:
        ops.add(
            gates.apply_gates, gates.ApplyGatesParameters(tokens=ops.token_count, x=out, gates=query_gates, n=width)
        )
    if part.head_gate is not None:
        by_head = gates.ApplyHeadGatesParameters(
            tokens=ops.token_count, x=out, gates=head_gates, heads=part.heads, dim=part.head_dim_v
        )
        ops.add(gates.apply_head_gates, by_head)
    ops.sub_norm(part.sub_norm, out, width)
    ops.add_to_residual(part.out, ops.quantize(out, width, (part.out,)), part.post_norm)


def _add_head_norm(
    ops: PrefillOps, part: blocks.Attention, norm: blocks.Norm | None, x: int, heads: int, view: int
) -> None:
    """Append the norm of queries or keys if there is one, by heads or over all; RoPE first if it comes first."""
    if part.norms_after_rope:
        rope = prefill_norms.RopeHeadsParameters(
            state=ops.state, x=x, heads=heads, dim=part.head_dim_k, layer_view=view, **rope_fields(part)
        )
        ops.add(prefill_norms.rope_heads, rope)
    if norm is None:
        return
    together = heads if part.norms_across_heads else 1
    _add_norm_by_heads(ops, norm, x, heads // together, part.head_dim_k * together, x)


def _add_norm_by_heads(ops: PrefillOps, norm: blocks.Norm, x: int, heads: int, dim: int, out: int) -> None:
    """Append out = norm(x) for each of `heads` heads of `dim` elements; out may be x."""
    parameters = prefill_ops.HeadNormParameters(
        state=ops.state,
        x=x,
        weight=ops.norm_weight(norm, dim),
        heads=heads,
        dim=dim,
        eps=ops.constant(norm.eps),
        out=out,
    )
    ops.add(prefill_ops.head_norm, parameters)


def add_gated(
    ops: PrefillOps, part: blocks.FeedForward, normed: ProductRows, shared_gate: str | None = None, out: int = 0
) -> None:
    """Append a gated feed-forward, or a shared expert with its gate if it has one, whose norm is computed.

    The result is added to x, or, normed, written to `out` if that is given.
    """
    n_ff = ops.rows(part.gate)
    gate = up = ops.floats("gate", n_ff)
    ops.multiply(part.gate, normed, gate, barrier=part.up == part.gate)
    if part.up != part.gate:
        up = ops.floats("up", n_ff)
        ops.multiply(part.up, normed, up, barrier=True)
    if shared_gate is not None:
        gate_shared = gates.BatchSharedGateParameters(
            tokens=ops.token_count, x=normed.floats, weight=ops.vector(shared_gate), n=ops.n_embd, up=up, rows=n_ff
        )
        ops.add(gates.gate_batch_shared, gate_shared)
    if part.cutoff is not None:
        largest = BatchGatesParameters(ops.state, gate, n_ff, ops.constant(part.cutoff))
        ops.add(largest_gates_batch, largest)  # of the thread's own tokens, as the next one
    gated = prefill_ops.GatedParameters(
        state=ops.state, activation=ops.activation(part.activation, part.limit), gate=gate, up=up, n=n_ff, out=gate,
        numbers=ops.activation_numbers(part.activation),
    )  # fmt: skip
    ops.add(prefill_ops.gated, gated)
    ops.sub_norm(part.sub_norm, gate, n_ff)
    entering = ops.quantize(gate, n_ff, (part.down,))
    if not out:
        ops.add_to_residual(part.down, entering, part.post_norm)
        return
    assert part.post_norm is not None, f"{part.down.weight}: a norm follows"
    ops.multiply(part.down, entering, out, barrier=True)
    ops.norm_of(part.post_norm, out, ops.n_embd, out)


# -------------------------------------------------------------------------------------------------------------- experts


class Entries(NamedTuple):
    """Input of products of experts: one entry per token of an expert, see kernels/cpu/prefill_experts.py."""

    x: int  # tiles, or addresses of float32 rows
    entry_bytes: int
    vectors: int  # activation buffers of experts with few tokens
    vector_bytes: int


class Selected(NamedTuple):
    """Addresses of the tokens' experts int64[tokens, used], -1 where there are fewer, and their weights float32."""

    experts: int
    weights: int


class Assignment(NamedTuple):
    """Where `group_tokens` writes which tokens each expert gets, and how many entries there are at most."""

    address: int
    max_entries: int


def _add_routing(ops: PrefillOps, part: blocks.Experts, normed: ProductRows, inputs: int, out: int) -> Selected:
    """Append the router and the choice of experts for tokens, rows of `inputs`.

    Rows of experts that give their input are added to `out`.
    """
    logits, entering = ops.floats("router", part.count), normed
    if part.router_norm is not None:
        rows = ops.floats("router normed", ops.n_embd)
        ops.norm_of(part.router_norm, ops.entering, ops.n_embd, rows)
        entering = ops.quantize(rows, ops.n_embd, (part.router,))
    ops.multiply(part.router, entering, logits, barrier=True)
    selected = ops.buffer("selected", 8 * BATCH_TOKENS * part.used)
    weights = ops.floats("expert weights", part.used)
    route = prefill_experts.RouteParameters(
        tokens=ops.token_count,
        logits=logits,
        routing=ops.routing(part),
        selected=selected,
        weights=weights,
        x=inputs if part.identity else 0,
        out=out,
        n=part.latent or ops.n_embd,
    )
    ops.add(prefill_experts.route_batch, route, barrier=True)
    return Selected(selected, weights)


def _add_assignment(
    ops: PrefillOps, part: blocks.Experts, inputs: int, selected: Selected, multiple: int
) -> Assignment:
    """Append the assignment of tokens, rows of `inputs`, to their experts."""
    entries = kernel_sizes.max_entries(BATCH_TOKENS, part.stacked, part.used, multiple)
    nbytes = kernel_sizes.assignment_bytes(BATCH_TOKENS, part.stacked, part.used, multiple)
    assignment = ops.buffer("assignment", nbytes)
    group = prefill_experts.GroupParameters(
        tokens=ops.token_count,
        x=inputs,
        n=part.latent or ops.n_embd,
        experts=part.stacked,
        used=part.used,
        selected=selected.experts,
        weights=selected.weights,
        assignment=assignment,
        max_entries=entries,
        multiple=multiple,
    )
    ops.add(prefill_experts.group_tokens, group, barrier=True)
    return Assignment(assignment, entries)


def add_experts(ops: PrefillOps, part: blocks.Experts, normed_at: int = 0) -> None:
    """Append a mixture of experts with its norms, the shared expert last; the result is added to x.

    `normed_at`, if given, is the address of the norm of its input.
    """
    first = (part.router if part.router_norm is None else None, part.latent_down)
    normed = _normed(ops, part.norm, normed_at, [linear for linear in first if linear is not None])
    both, routed = (ops.floats(name, ops.n_embd) for name in ("both", "routed")) if part.post_norm else (0, ops.x)
    routed = ops.deferred if part.deferred else routed
    width, entering = part.latent or ops.n_embd, normed.floats
    if part.latent_down is not None:
        assert part.post_norm is None, f"{part.latent_down.weight}: latents and norms of experts"
        entering, routed = (ops.floats(name, width) for name in ("latents", "routed latents"))
        ops.multiply(part.latent_down, normed, entering)  # a barrier follows the router
    if routed != ops.x:
        clear = prefill_norms.ClearParameters(state=ops.state, x=routed, n=width)
        ops.add(prefill_norms.clear, clear)  # barriers follow before anything is added
    selected = _add_routing(ops, part, normed, entering, routed)
    add_selected_experts(ops, part, entering, selected, routed)
    if part.latent_up is not None:
        ops.add_to_residual(part.latent_up, ops.quantize(routed, width, (part.latent_up,)))
    if part.shared is not None:
        readers = part.shared.gate, part.shared.up
        if part.shared.norm == part.norm:  # it is still there, but its tiles may have been overwritten
            normed = ops.quantize(normed.floats, ops.n_embd, readers)
        else:
            normed = ops.norm(part.shared.norm, readers)
        add_gated(ops, part.shared, normed, part.shared_gate, both)
    if part.post_norm is not None:
        assert part.routed_norm is not None, f"{part.post_norm.weight}: the norms of Experts come together"
        ops.add_normed(part.routed_norm, routed, both)
        ops.add_normed(part.post_norm, both, ops.x)


def add_selected_experts(ops: PrefillOps, part: blocks.Experts, x: int, selected: Selected, out: int) -> None:
    """Append out += the weighted sum of the selected experts' outputs for x: float32[tokens, n_embd], or latents."""
    width = part.latent or ops.n_embd
    gate, up, down = (_kernels(ops, linear) for linear in (part.gate, part.up, part.down))
    multiple = math.lcm(gate.tokens, up.tokens, down.tokens)
    assignment, entries = _add_assignment(ops, part, x, selected, multiple)
    vectors = _vectors(ops, "vectors", part.stacked, width)
    rows = Entries(assignment + kernel_sizes.row_addresses_offset(part.stacked, entries), 8, *vectors)
    tile_bytes = kernel_sizes.RECORD_BYTES * (width // 32)  # of one entry
    tiles = ops.buffer("gathered", entries * tile_bytes) if gate.quantized or up.quantized else 0
    gather = prefill_experts.GatherParameters(
        assignment=assignment,
        experts=part.stacked,
        max_entries=entries,
        n=width,
        tiles=tiles,
        tile_tokens=kernel_sizes.TILE_TOKENS,
        vectors=rows.vectors,
        vector_bytes=rows.vector_bytes,
    )
    ops.add(prefill_experts.gather, gather, barrier=True)
    quantized = rows._replace(x=tiles, entry_bytes=tile_bytes)
    hidden_bytes = kernel_sizes.RECORD_BYTES * (part.ff // 32) if down.quantized else 4 * part.ff
    hidden = Entries(
        ops.buffer("activated", entries * hidden_bytes),
        hidden_bytes,
        *_vectors(ops, "activated vectors", part.stacked, part.ff),
    )
    target = prefill_experts.HiddenBuffers(
        hidden=hidden.x,
        tile_tokens=down.tokens if down.quantized else 0,
        vectors=hidden.vectors,
        vector_bytes=hidden.vector_bytes,
    )
    inputs = (quantized if gate.quantized else rows, quantized if up.quantized else rows)
    _add_gate_up(ops, part, assignment, entries, inputs, ops.record(target))
    add_down = prefill_experts.AddDownParameters(
        matrix=_expert_matrix(ops, part.down, assignment, hidden),
        weights=ops.experts_of(part.down).address,
        out=out,
        max_entries=entries,
        quantized=int(down.quantized),
        bias=ops.expert_biases(part.down),
        scales=ops.expert_scales(part.down),
        weighted=int(not part.weighs_inputs),
    )
    ops.add(prefill_experts.add_down, add_down, barrier=True)


def _add_gate_up(
    ops: PrefillOps, part: blocks.Experts, assignment: int, entries: int, inputs: tuple[Entries, Entries],
    target: StoredRecord,
) -> None:  # fmt: skip
    """Append act(gate) * up of all entries: one operation, or three where gate and up differ in type.

    Without a gate the products with up stand for both.
    """
    gate, up = ops.experts_of(part.gate), ops.experts_of(part.up)
    if ops.model.expert_options.fused and gate.tensor.type is up.tensor.type:
        gate_up = prefill_experts.GateUpParameters(
            matrix=_expert_matrix(ops, part.gate, assignment, inputs[0]),
            gate=gate.address,
            up=0 if part.ungated else up.address,
            hidden=target.address,
            activation=ops.activation(part.activation, part.limit),
            gate_bias=ops.expert_biases(part.gate),
            gate_scales=ops.expert_scales(part.gate),
            up_bias=ops.expert_biases(part.up),
            up_scales=ops.expert_scales(part.up),
            weighted=entries if part.weighs_inputs else 0,
        )
        ops.add(prefill_experts.gate_up, gate_up, barrier=True)
        return
    linears = (part.gate,) if part.ungated else (part.gate, part.up)
    products = [ops.buffer(f"product {i}", 4 * entries * part.ff) for i in range(len(linears))]
    counters = (prefill_experts.NEXT_GATE, prefill_experts.NEXT_UP)
    for linear, x, out, counter in zip(linears, inputs, products, counters):
        multiply = prefill_experts.MultiplyParameters(
            matrix=_expert_matrix(ops, linear, assignment, x),
            weights=ops.experts_of(linear).address,
            out=out,
            counter=counter,
            bias=ops.expert_biases(linear),
            scales=ops.expert_scales(linear),
        )
        ops.add(prefill_experts.multiply, multiply)
    ops.add_barrier()
    activate = prefill_experts.ActivateParameters(
        assignment=assignment, gate=products[0], up=products[-1], ff=part.ff, hidden=target.address,
        activation=ops.activation(part.activation, part.limit), experts=part.stacked,
        weighted=entries if part.weighs_inputs else 0,
    )  # fmt: skip
    ops.add(prefill_experts.activate, activate, barrier=True)


def _expert_matrix(ops: PrefillOps, linear: blocks.Linear, assignment: int, x: Entries) -> int:
    """Address of the ExpertMatrix record of a product with all experts."""
    matrices, kernels = ops.experts_of(linear), _kernels(ops, linear)
    count, _, n = matrices.tensor.shape
    scratch, stride = ops.private_buffer("panels", kernels.scratch_bytes(n))
    record = prefill_experts.ExpertMatrix(
        assignment=assignment,
        experts=count,
        unpack=kernels.unpack.address,
        product=kernels.product.address,
        tile_tokens=kernels.tokens,
        panel_bytes=kernels.panel_bytes,
        expert_bytes=matrices.expert_bytes,
        row_bytes=matrices.row_bytes,
        n=n,
        rows=matrices.rows,
        x=x.x,
        entry_bytes=x.entry_bytes,
        scratch=scratch,
        private_stride=stride,
        matvec=ops.matvec_function(linear),
        vectors=x.vectors,
        vector_bytes=x.vector_bytes,
    )
    return ops.record(record).address


def _kernels(ops: PrefillOps, linear: blocks.Linear) -> ExpertKernels:
    return expert_kernels(ops.tensor(linear).type.ggml_type, ops.is_quantized(linear))


def _vectors(ops: PrefillOps, name: str, count: int, n: int) -> tuple[int, int]:
    """Activation buffers of experts with few tokens: address, and bytes of each."""
    nbytes = whole_lines(activation_bytes(n))
    return ops.buffer(name, count * kernel_sizes.FEW_TOKENS * nbytes), nbytes
