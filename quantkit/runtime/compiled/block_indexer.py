"""Selections of blocks for each KV head (archs.blocks.BlockIndexer) in both plans: kernels/cpu/block_indexer.py.

    one token    k, q | key to the cache, norms and RoPE | scores | selections |
    batch        k, q | keys to the caches, norms and RoPE | scores and selections |

The products are those of pooled_indexer.py.
"""

from __future__ import annotations

from quantkit.archs.common import blocks
from quantkit.placement import kernel_sizes
from quantkit.placement.kernel_sizes import BATCH_TOKENS, INDEX_BLOCK, INDEX_GROUP
from quantkit.runtime.compiled.plan_base import BatchOps, PlannedCaches, PlanOps, TokenOps
from quantkit.runtime.compiled.pooled_indexer import Selection, index_fields
from quantkit.runtime.kernels.cpu import block_indexer


def _parameters(
    ops: PlanOps, layer: int, part: blocks.BlockIndexer, rope: blocks.Rope, shape: PlannedCaches, tokens: int,
    position: int, q: int, k: int,
) -> block_indexer.BlockParameters:  # fmt: skip
    keys, keys_stride = ops.private_buffer("index rows", 4 * (INDEX_BLOCK + 4) * part.dim)
    products, products_stride = ops.private_buffer("index products", 4 * part.heads * INDEX_BLOCK)
    room = kernel_sizes.scored_blocks(shape.n_ctx, part.rate)
    ranks, ranks_stride = ops.private_buffer("index ranks", 4 * room)
    if tokens == 1:
        scores, scores_stride = ops.buffer("index scores", 4 * part.heads * room), 0
    else:
        scores, scores_stride = ops.private_buffer("index scores", 4 * part.heads * room * INDEX_GROUP)
    return block_indexer.BlockParameters(
        position=position,
        q=q,
        k=k,
        top_blocks=part.top_blocks,
        local_blocks=part.local_blocks,
        keys=keys,
        keys_stride=keys_stride,
        products=products,
        products_stride=products_stride,
        room=room,
        scores=scores,
        scores_stride=scores_stride,
        ranks=ranks,
        ranks_stride=ranks_stride,
        selection=ops.buffer("selection", tokens * part.heads * kernel_sizes.selection_bytes(part.top_blocks)),
        **index_fields(ops, layer, part, rope, shape),
    )


def _selection(part: blocks.BlockIndexer, address: int) -> Selection:
    nbytes = kernel_sizes.selection_bytes(part.top_blocks)
    return Selection(address, part.heads * nbytes, part.rate, nbytes, sees_rest=False)


def add_decode(
    ops: TokenOps, layer: int, part: blocks.BlockIndexer, rope: blocks.Rope, shape: PlannedCaches
) -> Selection:
    """Append the selections of one token."""
    q, k = ops.buffer("index q", 4 * part.heads * part.dim), ops.buffer("index key", 4 * part.dim)
    parameters = _parameters(ops, layer, part, rope, shape, 1, ops.position, q, k)
    for operation in (block_indexer.append_token, block_indexer.score_blocks, block_indexer.select_blocks):
        ops.add(operation, parameters, barrier=True)
    return _selection(part, parameters.selection)


def add_prefill(
    ops: BatchOps, layer: int, part: blocks.BlockIndexer, rope: blocks.Rope, shape: PlannedCaches
) -> Selection:
    """Append the selections of a batch."""
    q, k = ops.floats("index q", part.heads * part.dim), ops.floats("index key", part.dim)
    parameters = _parameters(ops, layer, part, rope, shape, BATCH_TOKENS, ops.state, q, k)
    for operation in (block_indexer.append_batch, block_indexer.select_batch_blocks):
        ops.add(operation, parameters, barrier=True)
    return _selection(part, parameters.selection)
