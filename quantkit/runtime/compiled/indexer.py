"""Sparse attention's selection of positions (archs.blocks.Indexer) in both plans: kernels/cpu/indexer.py.

    one token    k, weights | q_b | key to the cache, RoPE | scores | selection |
    batch        k, weights | q_b | keys to the caches, RoPE | scores and selections |

One buffer holds the selections of the last block with an indexer, for it and the blocks after it that have none.
"""

from __future__ import annotations

import math

from quantkit import types
from quantkit.archs.common import blocks
from quantkit.placement import kernel_sizes
from quantkit.placement.kernel_sizes import BATCH_TOKENS, INDEX_GROUP
from quantkit.runtime.compiled.plan_base import (
    SPLIT_ROWS,
    Activations,
    BatchOps,
    ModelParts,
    PlannedCaches,
    PlanOps,
    ProductRows,
    TokenOps,
)
from quantkit.runtime.kernels.cpu import indexer, latent_rows
from quantkit.runtime.kernels.cpu.latent_rows import LatentRows


def top_k(model: ModelParts) -> int:
    """The positions that a token attends to, at most: one number for all blocks."""
    parts = (part for block in model.block_list for part in block.parts)
    return next(p.indexer.top_k for p in parts if isinstance(p, blocks.LatentAttention) and p.indexer is not None)


def selection(ops: PlanOps, model: ModelParts, tokens: int) -> int:
    """Address of the selections of some tokens."""
    return ops.buffer("selection", tokens * kernel_sizes.selection_bytes(top_k(model)))


def _rows(part: blocks.Indexer, shape: PlannedCaches) -> LatentRows:
    """The rows of the V cache."""
    _, rotation = shape.type.rotations(part.dim, part.dim)
    return LatentRows(part.dim, 0, types.get(shape.type.v).ggml_type, rotation)


def _sizes(ops: PlanOps, part: blocks.Indexer, rows: LatentRows) -> int:
    """Address of the IndexSizes record."""
    adjacent = part.rope.style == "norm"
    record = indexer.IndexSizes(
        heads=part.heads,
        dim=part.dim,
        rope=part.rope.dim,
        pair_step=2 if adjacent else 1,
        pair_stride=1 if adjacent else part.rope.dim // 2,
        top_k=part.top_k,
        row_bytes=rows.nbytes,
        score_scale=ops.constant((part.heads * part.dim) ** -0.5),
    )
    return ops.record(record).address


def _key_parameters(
    ops: PlanOps, part: blocks.Indexer, sizes: int, position: int, view: int, k: int, q: int, rows: LatentRows,
    multiple: int,
) -> indexer.KeyParameters:  # fmt: skip
    return indexer.KeyParameters(
        sizes=sizes,
        position=position,
        layer_view=view,
        k=k,
        weight=ops.vector(part.k_norm.weight),
        bias=ops.vector(part.k_norm.bias),
        eps=ops.constant(part.k_norm.eps),
        write=latent_rows.latent_writer(rows).address,
        q=q,
        rotate=latent_rows.rotator(rows.rotation).address if rows.rotation else 0,
        multiple=multiple,
        **ops.head_scaling(part.scaling),
    )


def _score_parameters(
    ops: PlanOps, part: blocks.Indexer, sizes: int, position: int, view: int, q: int, weights: int, rows: LatentRows,
    n_ctx: int, tokens: int,
) -> indexer.ScoreParameters:  # fmt: skip
    n_ctx = max(n_ctx, part.top_k)
    ranks, ranks_stride = ops.private_buffer("index ranks", 4 * n_ctx)
    scratch, stride = ops.private_buffer("index block", kernel_sizes.index_block_bytes(part.heads, part.dim))
    if tokens == 1:
        scores, scores_stride = ops.buffer("index scores", 4 * n_ctx), 0
    else:
        scores, scores_stride = ops.private_buffer("index scores", 4 * n_ctx * INDEX_GROUP)
    return indexer.ScoreParameters(
        sizes=sizes,
        position=position,
        layer_view=view,
        read=latent_rows.latent_reader(rows).address,
        q=q,
        weights=weights,
        scores=scores,
        n_ctx=n_ctx,
        selection=selection(ops, ops.model, tokens),
        ranks=ranks,
        ranks_stride=ranks_stride,
        scratch=scratch,
        private_stride=stride,
        scores_stride=scores_stride,
    )


# ------------------------------------------------------------------------------------------------------------ one token


def add_decode_keys(ops: TokenOps, part: blocks.Indexer, normed: Activations) -> None:
    """Append the products with the block's normed input."""
    ops.matvec(part.k, normed, ops.buffer("index key", 4 * part.dim))
    multiple = max(4, ops.tensor(part.weights).type.interleave)
    ops.matvec(part.weights, normed, ops.buffer("index weights", 4 * part.heads), multiple=multiple)


def add_decode(ops: TokenOps, layer: int, part: blocks.Indexer, latent: Activations, shape: PlannedCaches) -> None:
    """Append the selection, from the queries' latent on; `add_decode_keys` and a barrier come before."""
    k, weights = ops.buffer("index key", 4 * part.dim), ops.buffer("index weights", 4 * part.heads)
    q, multiple = ops.buffer("index q", 4 * part.heads * part.dim), math.lcm(SPLIT_ROWS, part.dim)
    rows, view = _rows(part, shape), ops.layer_view(layer, part)
    sizes = _sizes(ops, part, rows)
    ops.matvec(part.q_b, latent, q, multiple=multiple)
    keys = _key_parameters(ops, part, sizes, ops.position, view, k, q, rows, multiple)
    ops.add(indexer.index_token, keys, barrier=True)
    scores = _score_parameters(ops, part, sizes, ops.position, view, q, weights, rows, shape.n_ctx, 1)
    ops.add(indexer.score_positions, scores, barrier=True)
    ops.add(indexer.select_positions, scores, barrier=True)


# -------------------------------------------------------------------------------------------------------------- batches


def add_prefill_keys(ops: BatchOps, part: blocks.Indexer, normed: ProductRows) -> None:
    """Append the products with the block's normed input."""
    ops.multiply(part.k, normed, ops.floats("index key", part.dim))
    ops.multiply(part.weights, normed, ops.floats("index weights", part.heads))


def add_prefill(ops: BatchOps, layer: int, part: blocks.Indexer, latent: ProductRows, shape: PlannedCaches) -> None:
    """Append the selections, from the queries' latents on; `add_prefill_keys` and a barrier come before."""
    k, weights = ops.floats("index key", part.dim), ops.floats("index weights", part.heads)
    q, rows, view = ops.floats("index q", part.heads * part.dim), _rows(part, shape), ops.layer_view(layer, part)
    sizes = _sizes(ops, part, rows)
    ops.multiply(part.q_b, latent, q, barrier=True)
    ops.add(indexer.index_batch, _key_parameters(ops, part, sizes, ops.state, view, k, q, rows, 0), barrier=True)
    scores = _score_parameters(ops, part, sizes, ops.state, view, q, weights, rows, shape.n_ctx, BATCH_TOKENS)
    ops.add(indexer.select_batch, scores, barrier=True)
