"""Selections of blocks (archs.blocks.PooledIndexer) in both plans: kernels/cpu/pooled_indexer.py, entry_indexer.py.

    one token    k, q | key to the cache, norm and RoPE of queries | keys of blocks | scores | selection |
    batch        k, q | keys to the caches, norm and RoPE of queries | keys of blocks | scores and selections |

Attention then hides the blocks that a token's selection leaves out, and skips steps without a visible position.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from quantkit import types
from quantkit.archs.common import blocks
from quantkit.placement import kernel_sizes
from quantkit.placement.kernel_sizes import BATCH_TOKENS, INDEX_BLOCK, INDEX_GROUP
from quantkit.runtime.compiled.plan_base import Activations, BatchOps, PlannedCaches, PlanOps, ProductRows, TokenOps
from quantkit.runtime.kernels.cpu import entry_indexer, pooled_indexer
from quantkit.runtime.kernels.cpu.entries import Rows, row_reader, row_writer
from quantkit.runtime.kernels.cpu.indexer import IndexSizes


class Selection(NamedTuple):
    """Where the selections of tokens are: the address of the records, bytes of a token's, and positions of a block.

    head_bytes   of the record of a KV head; 0: one record for all heads
    sees_rest    whether positions after the last whole block are seen always
    """

    address: int
    nbytes: int
    rate: int
    head_bytes: int = 0
    sees_rest: bool = True

    @property
    def fields(self) -> dict[str, int]:
        """Parameters of attention."""
        return {
            "selection": self.address,
            "rate": self.rate,
            "head_bytes": self.head_bytes,
            "sees_rest": self.sees_rest,
        }


def index_fields(
    ops: PlanOps, layer: int, part: blocks.PooledIndexer | blocks.BlockIndexer, rope: blocks.Rope, shape: PlannedCaches
) -> dict[str, int]:
    """Parameters that operations of all indexers of blocks have: sizes, norms, RoPE and rows of the cache."""
    rows, adjacent = Rows(part.dim, types.get(shape.type.v).ggml_type, 0), rope.style == "norm"
    return {
        "layer_view": ops.index_view(layer, rope),
        "heads": part.heads,
        "dim": part.dim,
        "rate": part.rate,
        "rope_dim": rope.dim,
        "pair_step": 2 if adjacent else 1,
        "pair_stride": 1 if adjacent else rope.dim // 2,
        "q_weight": ops.norm_weight(part.q_norm, part.dim),
        "k_weight": ops.norm_weight(part.k_norm, part.dim),
        "q_eps": ops.constant(part.q_norm.eps),
        "k_eps": ops.constant(part.k_norm.eps),
        "row_bytes": rows.nbytes,
        "write": row_writer(rows).address,
        "read": row_reader(rows).address,
    }


def _add(
    ops: PlanOps, layer: int, part: blocks.PooledIndexer, rope: blocks.Rope, shape: PlannedCaches, tokens: int,
    position: int, q: int, k: int,
) -> Selection:  # fmt: skip
    fields = index_fields(ops, layer, part, rope, shape)
    scratch, stride = ops.private_buffer("index rows", 4 * part.rate * part.dim)
    parameters = pooled_indexer.IndexParameters(
        position=position, q=q, k=k, scratch=scratch, private_stride=stride, **fields
    )
    one, view = tokens == 1, parameters.layer_view
    ops.add(pooled_indexer.append_token if one else pooled_indexer.append_batch, parameters, barrier=True)
    ops.add(pooled_indexer.make_keys if one else pooled_indexer.make_batch_keys, parameters, barrier=True)
    return _add_selection(ops, part, shape, tokens, position, view, q)


def _add_selection(
    ops: PlanOps, part: blocks.PooledIndexer, shape: PlannedCaches, tokens: int, position: int, view: int, q: int
) -> Selection:
    room = kernel_sizes.scored_entries(shape.n_ctx, part.rate)
    ranks, ranks_stride = ops.private_buffer("index ranks", 4 * room)
    products, stride = ops.private_buffer("index products", 4 * part.heads * INDEX_BLOCK)
    if tokens == 1:
        scores, scores_stride = ops.buffer("index scores", 4 * room), 0
    else:
        scores, scores_stride = ops.private_buffer("index scores", 4 * room * INDEX_GROUP)
    nbytes = kernel_sizes.selection_bytes(part.top_blocks)
    found = Selection(ops.buffer("selection", tokens * nbytes), nbytes, part.rate)
    sizes = IndexSizes(
        heads=part.heads, dim=part.dim, rope=0, pair_step=2, pair_stride=1, top_k=part.top_blocks,
        row_bytes=4 * part.dim, score_scale=ops.constant(1.0),
    )  # fmt: skip
    parameters = entry_indexer.ScoreParameters(
        sizes=ops.record(sizes).address,
        rate=part.rate,
        position=position,
        layer_view=view,
        q=q,
        weights=ops.keep(np.ones(tokens * part.heads, np.float32)).ctypes.data,
        room=room,
        scores=scores,
        scores_stride=scores_stride,
        selection=found.address,
        ranks=ranks,
        ranks_stride=ranks_stride,
        products=products,
        private_stride=stride,
    )
    if tokens > 1:
        ops.add(entry_indexer.select_batch_entries, parameters, barrier=True)
        return found
    ops.add(entry_indexer.score_entries, parameters, barrier=True)
    ops.add(entry_indexer.select_entries, parameters, barrier=True)
    return found


def add_decode_products(ops: TokenOps, part: blocks.PooledIndexer | blocks.BlockIndexer, normed: Activations) -> None:
    """Append the products with the normed input of the attention; a barrier follows."""
    ops.matvec(part.k, normed, ops.buffer("index key", 4 * part.dim))
    ops.matvec(part.q, normed, ops.buffer("index q", 4 * part.heads * part.dim))


def add_decode(
    ops: TokenOps, layer: int, part: blocks.PooledIndexer, rope: blocks.Rope, shape: PlannedCaches
) -> Selection:
    """Append the selection of one token."""
    q, k = ops.buffer("index q", 4 * part.heads * part.dim), ops.buffer("index key", 4 * part.dim)
    return _add(ops, layer, part, rope, shape, 1, ops.position, q, k)


def add_prefill_products(ops: BatchOps, part: blocks.PooledIndexer | blocks.BlockIndexer, normed: ProductRows) -> None:
    """As `add_decode_products`."""
    ops.multiply(part.k, normed, ops.floats("index key", part.dim))
    ops.multiply(part.q, normed, ops.floats("index q", part.heads * part.dim))


def add_prefill(
    ops: BatchOps, layer: int, part: blocks.PooledIndexer, rope: blocks.Rope, shape: PlannedCaches
) -> Selection:
    """Append the selections of a batch."""
    q, k = ops.floats("index q", part.heads * part.dim), ops.floats("index key", part.dim)
    return _add(ops, layer, part, rope, shape, BATCH_TOKENS, ops.state, q, k)
