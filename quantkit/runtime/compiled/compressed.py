"""Compressed attention (archs.blocks.CompressedAttention) in both plans: compressed_attention.py of kernels/cpu.

Operations, with barriers where | stands; those of entries and of the indexer only where the layer has them:

    one token   norm, q_a, kv, what compressors and the indexer read | norm of q_a, q_b, queries of the indexer, norms,
                RoPE, append to the cache | entries | scores | selection | attention | out_a of each group |
                out_b, add to x |
    batch       norm | the same products | norm of q_a | q_b, queries of the indexer | norms, RoPE, append to the
                caches | entries | scores and selections | attention | of each group: quantize | out_a | then join the
                groups, quantize | out_b, add to x |
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from quantkit import types
from quantkit.archs.common import blocks
from quantkit.placement import kernel_sizes
from quantkit.placement.kernel_sizes import BATCH_TOKENS, INDEX_BLOCK, INDEX_GROUP, activation_bytes, whole_lines
from quantkit.runtime.compiled.plan_base import SPLIT_ROWS, Activations, BatchOps, PlannedCaches, PlanOps, TokenOps
from quantkit.runtime.kernels.cpu import compressed_attention, entries, entry_indexer
from quantkit.runtime.kernels.cpu.entries import Rows, row_reader, row_writer
from quantkit.runtime.kernels.cpu.indexer import IndexSizes


class _Layer(NamedTuple):
    """What the operations of a layer share: addresses of its Sizes and its LayerView; tokens of a batch, or 1."""

    part: blocks.CompressedAttention
    sizes: int
    view: int
    tokens: int
    position: int  # of an int64, or of a BatchState


class _Projected(NamedTuple):
    """Addresses of what products give, float32[tokens, …]; `read` are the parts of a row of v, and their elements."""

    q: int
    k: int
    read: list[tuple[int, int]]
    index_q: int
    index_weights: int


def _layer(
    ops: PlanOps, layer: int, part: blocks.CompressedAttention, shape: PlannedCaches, tokens: int, position: int
) -> _Layer:
    """Its records; functions are compiled for the rows of the caches."""
    rotations = shape.type.rotations(part.dim, part.kept)
    k, v = (
        Rows(dim, types.get(name).ggml_type, rotation)
        for dim, name, rotation in zip((part.dim, part.kept), (shape.type.k, shape.type.v), rotations)
    )
    has_entries = part.compressor is not None
    record = entries.Sizes(
        heads=part.heads,
        dim=part.dim,
        rope=part.rope.dim,
        window=part.window,
        rate=part.compressor.rate if part.compressor else 0,
        kept=part.kept,
        k_bytes=k.nbytes,
        v_bytes=v.nbytes if has_entries else 0,
        write_k=row_writer(k).address,
        read_k=row_reader(k).address,
        write_v=row_writer(v).address if has_entries else 0,
        read_v=row_reader(v).address if has_entries else 0,
    )
    return _Layer(part, ops.record(record).address, ops.layer_view(layer, part), tokens, position)


def _add_append(ops: PlanOps, x: _Layer, projected: _Projected, multiple: int, index_multiple: int) -> None:
    """Append what makes queries ready and appends rows to the caches."""
    part = x.part
    scale = np.full(part.dim, part.scale, np.float32)
    scratch, stride = ops.private_buffer("kept row", 4 * max(part.kept, part.dim))
    parameters = entries.AppendParameters(
        sizes=x.sizes,
        position=x.position,
        layer_view=x.view,
        q=projected.q,
        q_weight=ops.keep(scale).ctypes.data,
        q_eps=ops.constant(part.q_norm.eps),
        k=projected.k,
        k_weight=ops.norm_weight(part.kv_norm, part.dim),
        k_eps=ops.constant(part.kv_norm.eps),
        parts=ops.keep(np.array(projected.read, np.int64)).ctypes.data,
        part_count=len(projected.read),
        index_q=projected.index_q,
        index_heads=part.indexer.heads if part.indexer else 0,
        index_dim=part.indexer.dim if part.indexer else 0,
        multiple=multiple,
        index_multiple=index_multiple,
        scratch=scratch,
        private_stride=stride,
    )
    ops.add(entries.append_token if x.tokens == 1 else entries.append_batch, parameters, barrier=True)


def _add_entries(ops: PlanOps, x: _Layer) -> None:
    """Append the making of entries, and of the indexer's keys."""
    part = x.part
    if part.compressor is None:
        return
    c = part.compressor
    scratch, stride = ops.private_buffer(
        "windows", kernel_sizes.compressor_bytes(c.rate, part.kept, part.widest, c.overlapping)
    )
    parameters = entries.EntriesParameters(
        sizes=x.sizes,
        position=x.position,
        layer_view=x.view,
        compressor=_compressor(ops, c, 0),
        of_index=_compressor(ops, part.indexer.compressor, 2 * c.columns) if part.indexer else 0,
        scratch=scratch,
        private_stride=stride,
    )
    ops.add(entries.make_entries if x.tokens == 1 else entries.make_batch_entries, parameters, barrier=True)


def _compressor(ops: PlanOps, part: blocks.Compressor, offset: int) -> int:
    """Address of the CompressorFields record."""
    record = entries.CompressorFields(
        dim=part.dim,
        overlapping=int(part.overlapping),
        offset=offset,
        ape=ops.vector(part.ape),
        weight=ops.norm_weight(part.norm, part.dim),
        eps=ops.constant(part.norm.eps),
    )
    return ops.record(record).address


def _selection(ops: PlanOps, x: _Layer) -> int:
    """Address of the records of what tokens select; 0 without an indexer."""
    return ops.buffer("selection", x.tokens * _selection_bytes(x.part)) if x.part.indexer else 0


def _selection_bytes(part: blocks.CompressedAttention) -> int:
    return kernel_sizes.selection_bytes(part.indexer.top_k) if part.indexer else 0


def _add_selection(ops: PlanOps, x: _Layer, q: int, weights: int, shape: PlannedCaches) -> None:
    """Append the choice of entries, if the layer has an indexer."""
    part = x.part.indexer
    if part is None:
        return
    rate = part.compressor.rate
    room = kernel_sizes.scored_entries(shape.n_ctx, part.compressor.rate)
    ranks, ranks_stride = ops.private_buffer("index ranks", 4 * room)
    products, stride = ops.private_buffer("index products", 4 * part.heads * INDEX_BLOCK)
    if x.tokens == 1:
        scores, scores_stride = ops.buffer("index scores", 4 * room), 0
    else:
        scores, scores_stride = ops.private_buffer("index scores", 4 * room * INDEX_GROUP)
    sizes = IndexSizes(
        heads=part.heads, dim=part.dim, rope=0, pair_step=2, pair_stride=1, top_k=part.top_k, row_bytes=4 * part.dim,
        score_scale=ops.constant((part.heads * part.dim) ** -0.5),
    )  # fmt: skip
    parameters = entry_indexer.ScoreParameters(
        sizes=ops.record(sizes).address,
        rate=rate,
        position=x.position,
        layer_view=x.view,
        q=q,
        weights=weights,
        room=room,
        scores=scores,
        scores_stride=scores_stride,
        selection=_selection(ops, x),
        ranks=ranks,
        ranks_stride=ranks_stride,
        products=products,
        private_stride=stride,
    )
    if x.tokens > 1:
        ops.add(entry_indexer.select_batch_entries, parameters, barrier=True)
        return
    ops.add(entry_indexer.score_entries, parameters, barrier=True)
    ops.add(entry_indexer.select_entries, parameters, barrier=True)


def _add_attention(ops: PlanOps, x: _Layer, q: int, out: int, group_bytes: int, shape: PlannedCaches) -> None:
    """Append attention: out gets the results of each group of heads."""
    part = x.part
    tokens = kernel_sizes.compressed_piece_tokens(part.heads)
    if x.tokens == 1:
        nbytes = kernel_sizes.compressed_decode_bytes(-(-part.heads // ops.threads), part.dim)
    else:
        nbytes = kernel_sizes.compressed_piece_bytes(part.heads, part.dim)
    scratch, stride = ops.private_buffer("pieces", nbytes)
    union = (0, 0)
    if x.tokens > 1 and part.indexer is not None:
        room = kernel_sizes.scored_entries(shape.n_ctx, part.indexer.compressor.rate)
        union = ops.private_buffer("selected by any", 8 * room)
    parameters = compressed_attention.AttentionParameters(
        sizes=x.sizes,
        position=x.position,
        layer_view=x.view,
        q=q,
        sinks=ops.vector(part.sinks),
        selection=_selection(ops, x),
        selection_bytes=_selection_bytes(part),
        groups=part.groups,
        out=out,
        group_bytes=group_bytes,
        tokens=tokens,
        union=union[0],
        union_stride=union[1],
        scratch=scratch,
        private_stride=stride,
    )
    attend = compressed_attention.attend_token if x.tokens == 1 else compressed_attention.attend_batch
    ops.add(attend, parameters, barrier=True)


# ------------------------------------------------------------------------------------------------------------ one token


def add_decode(ops: TokenOps, layer: int, part: blocks.CompressedAttention, shape: PlannedCaches) -> None:
    """Append compressed attention of one token with its norm; the result is added to x."""
    x, indexer = _layer(ops, layer, part, shape, 1, ops.position), part.indexer
    multiple = math.lcm(SPLIT_ROWS, part.dim)
    index_multiple = math.lcm(SPLIT_ROWS, indexer.dim) if indexer else 0
    projected, entering = _project_token(ops, part)
    ops.matvec(part.q_b, entering, projected.q, multiple=multiple)
    if indexer is not None:
        ops.matvec(indexer.q_b, entering, projected.index_q, multiple=index_multiple)
    _add_append(ops, x, projected, multiple, index_multiple)
    _add_entries(ops, x)
    _add_selection(ops, x, projected.index_q, projected.index_weights, shape)
    group_bytes = whole_lines(activation_bytes(part.heads // part.groups * part.dim))
    out = ops.buffer("group results", part.groups * group_bytes)
    _add_attention(ops, x, projected.q, out, group_bytes, shape)
    rank = ops.buffer("group outputs", 4 * part.groups * part.rank)
    for i, linear in enumerate(part.group_matrices):
        ops.matvec(linear, Activations(out + i * group_bytes, 0), rank + 4 * i * part.rank)
    ops.add_barrier()
    joined = ops.norm_of(None, Activations(rank, 0), part.groups * part.rank, "joined")
    ops.add_to_residual(part.out_b, joined)


def _project_token(ops: TokenOps, part: blocks.CompressedAttention) -> tuple[_Projected, Activations]:
    """Append the norm, its products, and the norm that q_b and the indexer read."""
    normed, indexer = ops.norm(part.norm), part.indexer
    q, k = ops.buffer("q", 4 * part.heads * part.dim), ops.buffer("k", 4 * part.dim)
    latent, read = ops.buffer("query latent", 4 * part.q_lora), []
    ops.matvec(part.q_a, normed, latent)
    ops.matvec(part.kv, normed, k)
    at = ops.buffer("kept", 4 * part.kept)
    for compressor in part.compressors:
        for linear in (compressor.kv, compressor.gate):
            ops.matvec(linear, normed, at)
            read.append((at, compressor.columns))
            at += 4 * compressor.columns
    index_q = weights = 0
    if indexer is not None:
        index_q = ops.buffer("index q", 4 * indexer.heads * indexer.dim)
        weights = ops.buffer("index weights", 4 * indexer.heads)
        ops.matvec(indexer.weights, normed, weights, multiple=max(4, ops.tensor(indexer.weights).type.interleave))
    ops.add_barrier()
    entering = ops.norm_of(part.q_a_norm, Activations(latent, 0), part.q_lora, "query latent normed")
    return _Projected(q, k, read, index_q, weights), entering


# -------------------------------------------------------------------------------------------------------------- batches


def add_prefill(ops: BatchOps, layer: int, part: blocks.CompressedAttention, shape: PlannedCaches) -> None:
    """Append compressed attention of a batch with its norm; the result is added to x."""
    x = _layer(ops, layer, part, shape, BATCH_TOKENS, ops.state)
    projected = _project_batch(ops, part)
    _add_append(ops, x, projected, 0, 0)
    _add_entries(ops, x)
    _add_selection(ops, x, projected.index_q, projected.index_weights, shape)
    width = part.heads // part.groups * part.dim
    out, group_bytes = ops.floats("attended", part.groups * width), 4 * BATCH_TOKENS * width
    _add_attention(ops, x, projected.q, out, group_bytes, shape)
    rank, rank_bytes = ops.floats("group outputs", part.groups * part.rank), 4 * BATCH_TOKENS * part.rank
    for i, linear in enumerate(part.group_matrices):
        rows = ops.quantize(out + i * group_bytes, width, (linear,))
        ops.multiply(linear, rows, rank + i * rank_bytes, barrier=True)
    joined = ops.floats("joined", part.groups * part.rank)
    join = compressed_attention.JoinParameters(
        state=ops.state, x=rank, groups=part.groups, group_bytes=rank_bytes, n=part.rank, out=joined
    )
    ops.add(compressed_attention.join_groups, join)
    ops.add_to_residual(part.out_b, ops.quantize(joined, part.groups * part.rank, (part.out_b,)))


def _project_batch(ops: BatchOps, part: blocks.CompressedAttention) -> _Projected:
    """Append all products before attention, with their norms."""
    indexer, read = part.indexer, []
    of_compressors = [linear for compressor in part.compressors for linear in (compressor.kv, compressor.gate)]
    of_indexer = [] if indexer is None else [indexer.weights]
    normed = ops.norm(part.norm, [part.q_a, part.kv, *of_compressors, *of_indexer])
    rows = BATCH_TOKENS * part.heads + kernel_sizes.FLOAT_TILE_TOKENS  # a tile of queries may end after the last one
    q, k, latent = (
        ops.buffer("q", 4 * rows * part.dim),
        ops.floats("k", part.dim),
        ops.floats("query latent", part.q_lora),
    )
    ops.multiply(part.q_a, normed, latent)
    ops.multiply(part.kv, normed, k)
    for i, linear in enumerate(of_compressors):
        columns = ops.rows(linear)
        read.append((ops.floats(f"compressor {i}", columns), columns))
        ops.multiply(linear, normed, read[-1][0])
    index_q = weights = 0
    if indexer is not None:
        index_q, weights = (
            ops.floats("index q", indexer.heads * indexer.dim),
            ops.floats("index weights", indexer.heads),
        )
        ops.multiply(indexer.weights, normed, weights)
    ops.add_barrier()
    ops.norm_of(part.q_a_norm, latent, part.q_lora, latent)
    entering = ops.quantize(latent, part.q_lora, [part.q_b] if indexer is None else [part.q_b, indexer.q_b])
    ops.multiply(part.q_b, entering, q)
    if indexer is not None:
        ops.multiply(indexer.q_b, entering, index_q)
    ops.add_barrier()
    return _Projected(q, k, read, index_q, weights)
