"""Latent attention (archs.blocks.LatentAttention) in both plans: kernels/cpu/latent_attention.py.

Operations, with barriers where | stands; q_a and its norm only where the block has them:

    one token           norm, q_a, kv_a | norm of q_a, q, absorb k_b | attention | merge, v_b | out, add to x |
    one token, mla 0    norm, q_a, kv_a | norm of q_a, q, norm of c, kv_b | attention | merge, out, add to x |
    batch               norm | q_a, kv_a | norm of q_a | q | RoPE, append to the caches | attention | quantize | out,
                        add to x |
    with an indexer     its operations (indexer.py), after the norm of its queries' input if there is one, come before
                        the projection of q
    batch, mla 0        norm | q_a, kv_a | norm of q_a | q | RoPE | kv_b | append to the caches | attention | quantize |
                        out, add to x |

`mla` is that of blocks/latent.py. Single tokens are absorbed. Of batches, 1 absorbs all, 2 expands sequences of 128
tokens or more and absorbs others with plain attention, 3 takes the form with fewer multiply-adds for each sequence.
Expanded keys and values exist for one block of positions and one head per thread, so -amb bounds plain attention only.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

from quantkit import types
from quantkit.archs.common import blocks
from quantkit.placement import kernel_sizes
from quantkit.placement.kernel_sizes import BATCH_TOKENS, activation_bytes, whole_tiles
from quantkit.runtime.compiled import indexer
from quantkit.runtime.compiled.cached_attention import Projected, attend_batch, attend_token
from quantkit.runtime.compiled.plan_base import (
    SPLIT_ROWS,
    Activations,
    BatchOps,
    PlannedCaches,
    PlanOps,
    TokenOps,
    rope_fields,
)
from quantkit.runtime.kernels.cpu import (
    latent_attention,
    latent_batch,
    latent_rows,
)
from quantkit.runtime.kernels.cpu.kv_rows import KernelHeads
from quantkit.runtime.kernels.cpu.latent_rows import HeadMatrices, LatentRows, Sizes


class _Matrices(NamedTuple):
    """The matrices between latents and heads, as in `HeadMatrices`."""

    keys: blocks.Linear
    values: blocks.Linear
    keys_transposed: bool
    record: HeadMatrices


def _matrices(ops: PlanOps, part: blocks.LatentAttention, *, absorbed: bool) -> _Matrices:
    """Where k_h and v_h are read: k_b and v_b if `absorbed` or there is no kv_b, else kv_b."""
    if part.kv_b is not None and not (absorbed and part.k_b is not None and part.v_b is not None):
        head_bytes = ops.tensor(part.kv_b).data.nbytes // part.heads
        start = ops.data(part.kv_b)
        row_bytes = head_bytes // (part.nope + part.head_dim_v)
        record = HeadMatrices(start, head_bytes, 0, start + part.nope * row_bytes, head_bytes)
        return _Matrices(part.kv_b, part.kv_b, False, record)
    assert part.k_b is not None
    assert part.v_b is not None
    key_bytes, value_bytes = (ops.tensor(linear).data.nbytes // part.heads for linear in (part.k_b, part.v_b))
    record = HeadMatrices(ops.data(part.k_b), key_bytes, 1, ops.data(part.v_b), value_bytes)
    return _Matrices(part.k_b, part.v_b, True, record)


def _ggml_type(ops: PlanOps, linear: blocks.Linear) -> int:
    return ops.tensor(linear).type.ggml_type


def _sizes(ops: PlanOps, part: blocks.LatentAttention) -> int:
    """Address of the Sizes record."""
    fields = rope_fields(part)
    record = Sizes(
        heads=part.heads,
        nope=part.nope,
        rope=part.rope.dim,
        kv_lora=part.kv_lora,
        dim_v=part.head_dim_v,
        pair_step=fields["pair_step"],
        pair_stride=fields["pair_stride"],
    )
    return ops.record(record).address


def _rows(part: blocks.LatentAttention, shape: PlannedCaches) -> LatentRows:
    """The rows of the cache."""
    rotation, _ = shape.type.rotations(part.latent, 0)
    return LatentRows(part.latent, part.kv_lora, types.get(shape.type.k).ggml_type, rotation)


def _rotator(rows: LatentRows) -> int:
    """Address of the function that rotates like the cache; 0 if it is not rotated."""
    return latent_rows.rotator(rows.rotation).address if rows.rotation else 0


def _full_heads(
    part: blocks.LatentAttention, shape: PlannedCaches, q: int, k: int, v: int, view: int
) -> Projected:  # fmt: skip
    """The heads of `mla` 0, whose keys and values are cached, with RoPE applied."""
    k_type, v_type = (types.get(name).ggml_type for name in (shape.type.k, shape.type.v))
    rotations = shape.type.rotations(part.head_dim_k, part.head_dim_v)
    heads = KernelHeads(1, part.head_dim_k, part.head_dim_v, k_type, v_type, *rotations)
    return Projected(heads, part.heads, q, k, v, part.scale, view, rope_fields(part, is_applied=True))


def _scratch_bytes(ops: PlanOps, part: blocks.LatentAttention, matrices: _Matrices) -> int:
    rows = latent_rows.rows_at_a_time(_ggml_type(ops, matrices.keys))
    return kernel_sizes.latent_scratch_bytes(part.nope, part.kv_lora, rows)


# ------------------------------------------------------------------------------------------------------------ one token


def add_decode(ops: TokenOps, layer: int, part: blocks.LatentAttention, shape: PlannedCaches) -> None:
    """Append latent attention of one token with its norm; the result is added to x."""
    normed = ops.norm(part.norm)
    kv, q = ops.buffer("latent", 4 * part.latent), ops.buffer("q", 4 * part.heads * part.head_dim_k)
    multiple = math.lcm(SPLIT_ROWS, part.head_dim_k)
    if part.indexer is not None:
        indexer.add_decode_keys(ops, part.indexer, normed)
    is_last = part.q_a is None and (not ops.model.mla or part.indexer is not None)
    ops.matvec(part.kv_a, normed, kv, barrier=is_last)
    if part.q_a is not None and part.q_a_norm is not None:
        query_latent = ops.buffer("query latent", 4 * part.q_lora)
        ops.matvec(part.q_a, normed, query_latent, barrier=True)
        normed = ops.norm_of(part.q_a_norm, Activations(query_latent, 0), part.q_lora, "query latent normed")
    if part.indexer is not None:
        entering = normed
        if part.indexer.q_norm is not None:
            n = part.q_lora or ops.n_embd
            entering = ops.norm_of(part.indexer.q_norm, normed, n, "index query normed")
        indexer.add_decode(ops, layer, part.indexer, entering, shape)
    ops.matvec(part.q, normed, q, multiple=multiple)
    view = ops.layer_view(layer, part)
    add = _add_absorbed if ops.model.mla else _add_full
    add(ops, part, shape, q, kv, multiple, view)


def _add_absorbed(
    ops: TokenOps, part: blocks.LatentAttention, shape: PlannedCaches, q: int, kv: int, multiple: int, view: int
) -> None:
    """Append attention over latents, from queries to the residual stream."""
    matrices, rows, sizes = _matrices(ops, part, absorbed=True), _rows(part, shape), _sizes(ops, part)
    record = ops.record(matrices.record).address
    scratch, stride = ops.private_buffer("latent scratch", _scratch_bytes(ops, part, matrices))
    key_type = _ggml_type(ops, matrices.keys)
    queries = ops.buffer("latent queries", 4 * part.heads * part.latent)
    absorb = latent_attention.QueriesParameters(
        position=ops.position,
        sizes=sizes,
        matrices=record,
        product=ops.matvec_function(matrices.keys)
        if matrices.keys_transposed
        else latent_rows.transposed_product(key_type).address,
        q=q,
        multiple=multiple,
        scale=ops.constant(part.scale),
        layer_view=view,
        rotate=_rotator(rows),
        out=queries,
        scratch=scratch,
        private_stride=stride,
        **ops.head_scaling(part.scaling),
    )
    ops.add(latent_attention.absorbed_queries, absorb, barrier=True)
    attending = replace(ops.model.attending, flash=not ops.model.attends_plainly)
    span = shape.span(attending, kernel_sizes.LATENT_BLOCK)
    partial = ops.buffer("partial", 4 * ops.threads * part.heads * (part.kv_lora + 2))
    decoded, decoded_stride = ops.private_buffer(
        "latents", kernel_sizes.latent_decode_bytes(part.heads, part.latent, span)
    )
    attention = latent_attention.AttentionParameters(
        position=ops.position,
        sizes=sizes,
        queries=queries,
        kv=kv,
        weight=ops.norm_weight(part.kv_a_norm, part.kv_lora),
        eps=ops.constant(part.kv_a_norm.eps),
        layer_view=view,
        span=span,
        partial=partial,
        scratch=decoded,
        private_stride=decoded_stride,
        selection=indexer.selection(ops, ops.model, 1) if part.sparse else 0,
    )
    ops.add(latent_attention.attention(rows), attention, barrier=True)
    merged = ops.buffer("attended", activation_bytes(part.heads * part.head_dim_v))
    merge = latent_attention.MergeParameters(
        partial=partial,
        sizes=sizes,
        matrices=record,
        product=ops.matvec_function(matrices.values),
        rotate=_rotator(rows),
        out=merged,
        scratch=scratch,
        private_stride=stride,
    )
    ops.add(latent_attention.merge_values, merge, barrier=True)
    ops.add_to_residual(part.out, Activations(merged, 0))


def _add_full(
    ops: TokenOps, part: blocks.LatentAttention, shape: PlannedCaches, q: int, kv: int, multiple: int, view: int
) -> None:
    """Append attention over keys and values of all heads (`mla` 0), from queries to the residual stream."""
    matrices = _matrices(ops, part, absorbed=False)
    c = ops.norm_of(part.kv_a_norm, Activations(kv, 0), part.kv_lora, "latent normed")
    k, v = (ops.buffer(name, 4 * part.heads * n) for name, n in (("k", part.head_dim_k), ("v", part.head_dim_v)))
    scratch, stride = ops.private_buffer("latent scratch", _scratch_bytes(ops, part, matrices))
    full = latent_attention.FullHeadsParameters(
        position=ops.position,
        sizes=_sizes(ops, part),
        matrices=ops.record(matrices.record).address,
        key_product=latent_rows.transposed_product(_ggml_type(ops, matrices.keys)).address
        if matrices.keys_transposed
        else ops.matvec_function(matrices.keys),
        value_product=ops.matvec_function(matrices.values),
        q=q,
        multiple=multiple,
        c=c.address,
        c_stride=c.stride,
        kv=kv,
        layer_view=view,
        k=k,
        v=v,
        scratch=scratch,
        private_stride=stride,
    )
    ops.add(latent_attention.full_heads, full, barrier=True)
    attending = _full_heads(part, shape, q, k, v, view)
    ops.add_to_residual(part.out, attend_token(ops, shape, attending))


# -------------------------------------------------------------------------------------------------------------- batches


def add_prefill(ops: BatchOps, layer: int, part: blocks.LatentAttention, shape: PlannedCaches) -> None:
    """Append latent attention of a batch with its norm; the result is added to x."""
    readers = [part.kv_a, part.q if part.q_a is None else part.q_a]
    if part.indexer is not None:
        readers += [part.indexer.k, part.indexer.weights, part.indexer.q_b]
    normed = ops.norm(part.norm, readers)
    kv, q = _tiled(ops, "latent", part.latent), _tiled(ops, "latent q", part.heads * part.head_dim_k)
    ops.multiply(part.kv_a, normed, kv)
    if part.indexer is not None:
        indexer.add_prefill_keys(ops, part.indexer, normed)
    if part.q_a is not None and part.q_a_norm is not None:
        query_latent = ops.floats("query latent", part.q_lora)
        ops.multiply(part.q_a, normed, query_latent, barrier=True)
        ops.norm_of(part.q_a_norm, query_latent, part.q_lora, query_latent)
        readers = [part.q] if part.indexer is None else [part.q, part.indexer.q_b]
        normed = ops.quantize(query_latent, part.q_lora, readers)
    if part.indexer is not None:
        entering, n = normed, part.q_lora or ops.n_embd
        if part.indexer.q_norm is not None:
            out = ops.floats("index query normed", n)
            ops.norm_of(part.indexer.q_norm, normed.floats, n, out)
            ops.add_barrier()  # all products with what the tiles hold are done
            entering = ops.quantize(out, n, [part.indexer.q_b])
        indexer.add_prefill(ops, layer, part.indexer, entering, shape)
        if part.indexer.q_norm is not None:
            normed = ops.quantize(normed.floats, n, [part.q])
    ops.multiply(part.q, normed, q, barrier=True)
    view, rows, sizes = ops.layer_view(layer, part), _rows(part, shape), _sizes(ops, part)
    is_cached = ops.model.mla > 0
    latents = latent_batch.LatentsParameters(
        state=ops.state,
        sizes=sizes,
        q=q,
        kv=kv,
        weight=ops.norm_weight(part.kv_a_norm, part.kv_lora),
        eps=ops.constant(part.kv_a_norm.eps),
        scale=ops.constant(part.scale if is_cached else 1.0),
        layer_view=view,
        write=latent_rows.latent_writer(rows).address if is_cached else 0,
        row_bytes=rows.nbytes if is_cached else 0,
        **ops.head_scaling(part.scaling),
    )
    ops.add(latent_batch.latents, latents, barrier=True)
    width = part.heads * part.head_dim_v
    out = ops.floats("attended", width)
    if is_cached:
        _add_batch_latents(ops, part, shape, rows, sizes, q, view, out)
    else:
        _add_batch_heads(ops, part, shape, sizes, q, kv, view, out)
    ops.add_to_residual(part.out, ops.quantize(out, width, (part.out,)))


def _tiled(ops: BatchOps, name: str, n: int) -> int:
    """Address of a buffer float32[tokens, n] of whole tiles."""
    return ops.buffer(name, 4 * whole_tiles(BATCH_TOKENS) * n)


def _add_batch_latents(
    ops: BatchOps, part: blocks.LatentAttention, shape: PlannedCaches, rows: LatentRows, sizes: int, q: int,
    view: int, out: int,
) -> None:  # fmt: skip
    """Append attention of a batch over latents, absorbed or expanded."""
    model = ops.model
    attending = replace(model.attending, flash=not model.attends_plainly)
    step = shape.span(attending, kernel_sizes.KEY_BLOCK)
    query_rows = min(kernel_sizes.PIECE_QUERIES, attending.query_rows(1, shape.n_ctx, ops.threads))
    floats = kernel_sizes.latent_prefill_floats(
        part.nope, part.rope.dim, part.kv_lora, part.head_dim_v, query_rows, step
    )
    scratch, stride = ops.private_buffer("pieces", 4 * sum(floats))
    forms = {2: latent_batch.FROM_TOKENS, 3: latent_batch.BY_COST} if model.attending.flash else {}
    attention = latent_batch.BatchAttentionParameters(
        state=ops.state,
        sizes=sizes,
        absorbed=_read_matrices(ops, _matrices(ops, part, absorbed=True)),
        expanded=_read_matrices(ops, _matrices(ops, part, absorbed=False)),
        read_latents=latent_rows.latent_reader(rows).address,
        rotate=_rotator(rows),
        row_bytes=rows.nbytes,
        q=q,
        layer_view=view,
        form=forms.get(model.mla, latent_batch.ABSORBED),
        rows=query_rows,
        step=step,
        out=out,
        latents_floats=floats[0],
        matrices_floats=floats[1],
        scratch=scratch,
        private_stride=stride,
        selection=indexer.selection(ops, model, BATCH_TOKENS) if part.sparse else 0,
        selection_bytes=kernel_sizes.selection_bytes(indexer.top_k(model)) if part.sparse else 0,
    )
    ops.add(latent_batch.batch_attention, attention, barrier=True)


def _read_matrices(ops: BatchOps, matrices: _Matrices) -> int:
    """Address of the ReadMatrices record."""
    keys, values = _ggml_type(ops, matrices.keys), _ggml_type(ops, matrices.values)
    record = latent_batch.ReadMatrices(
        matrices=ops.record(matrices.record).address,
        read_keys=latent_rows.matrix_reader(keys, matrices.keys_transposed).address,
        read_values=latent_rows.matrix_reader(values, True).address,
    )
    return ops.record(record).address


def _add_batch_heads(
    ops: BatchOps, part: blocks.LatentAttention, shape: PlannedCaches, sizes: int, q: int, kv: int, view: int,
    out: int,
) -> None:  # fmt: skip
    """Append attention of a batch over keys and values of all heads (`mla` 0)."""
    matrices = _matrices(ops, part, absorbed=False)
    key_type, value_type = _ggml_type(ops, matrices.keys), _ggml_type(ops, matrices.values)
    k = _tiled(ops, "latent k", part.heads * part.head_dim_k)
    v = _tiled(ops, "latent v", part.heads * part.head_dim_v)
    scratch, stride = ops.private_buffer("matrices", 8 * max(part.nope, part.head_dim_v) * part.kv_lora)
    expand = latent_batch.BatchHeadsParameters(
        state=ops.state,
        sizes=sizes,
        matrices=ops.record(matrices.record).address,
        read_keys=latent_rows.matrix_reader(key_type, not matrices.keys_transposed).address,
        read_values=latent_rows.matrix_reader(value_type, True).address,
        kv=kv,
        k=k,
        v=v,
        scratch=scratch,
        private_stride=stride,
    )
    ops.add(latent_batch.full_batch_heads, expand, barrier=True)
    attend_batch(ops, shape, _full_heads(part, shape, q, k, v, view), out)
