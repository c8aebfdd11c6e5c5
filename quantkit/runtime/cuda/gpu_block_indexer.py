"""Which blocks of positions each token attends to on a GPU, for each KV head (archs.blocks.BlockIndexer), with torch.

Scores are those of `runtime/blocks/block_indexer.py`, in float32, over keys of floats. The positions of the selected
blocks are in order, so that those after a token's own come last. In a CUDA graph all blocks of the cache are scored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from quantkit.archs.common import blocks
from quantkit.errors import UnsupportedError
from quantkit.placement.kernel_sizes import INDEX_ELEMENTS
from quantkit.runtime.blocks.indexer import Index
from quantkit.runtime.blocks.spans import Span
from quantkit.runtime.cuda import gpu_attention, gpu_indexer
from quantkit.runtime.cuda.gpu_attention import TORCH_DTYPES
from quantkit.runtime.cuda.gpu_context import GpuContext, Selection
from quantkit.runtime.kv.cache_type import CacheType

if TYPE_CHECKING:
    import torch


def require_cache(device: str, kind: CacheType, part: blocks.BlockIndexer | blocks.PooledIndexer) -> None:
    """UnsupportedError where the indexer's keys, which have the type of values, are not floats.

    They are never rotated, on the CPU neither.
    """
    if kind.v not in TORCH_DTYPES:
        raise UnsupportedError(
            f"{device}: an indexer of blocks ({part.k.weight}) reads keys in f16, bf16 or f32 on a GPU, not in "
            f"{kind.v}; take -ctv f16, or keep the cache on the CPU (-nkvo)"
        )
    if isinstance(part, blocks.BlockIndexer) and part.local_blocks < 1:
        raise UnsupportedError(
            f"{device}: an indexer that may leave out a token's own block ({part.k.weight}) runs on the CPU in this "
            "version; keep the cache there (-nkvo)"
        )


def selections(
    worker: GpuContext, part: blocks.BlockIndexer, layer: int, index: Index, spans: Sequence[Span]
) -> list[Selection | None]:
    """What each span's tokens attend to, None: all up to their own. The caches get the keys."""
    found: list[Selection | None] = []
    for span in spans:
        rows, tokens, cache = slice(span.start, span.stop), span.stop - span.start, span.cache
        keys: Any = cache.index[layer]
        gpu_attention.append_to(worker, index.keys[rows], keys, cache.type.v, cache)
        bound = worker.position_bound(cache, tokens)
        if bound <= part.rate * part.top_blocks:
            found.append(None)
            continue
        floats = keys.view(getattr(worker.gpu.torch, TORCH_DTYPES[cache.type.v]))[0, :bound]
        positions, q = worker.next_positions(cache, tokens), index.q[rows].view(tokens, part.heads, part.dim)
        parts = []
        for first in range(0, tokens, step := max(1, INDEX_ELEMENTS // (part.heads * bound))):
            some = slice(first, first + step)
            parts.append(positions_of_blocks(worker, part, q[some], floats, positions[some]))
        chosen = parts[0] if len(parts) == 1 else worker.gpu.torch.cat(parts)
        own = positions // part.rate
        counts = own.clamp(max=part.top_blocks - 1) * part.rate + positions % part.rate + 1
        found.append(Selection(chosen, counts))
    return found


def positions_of_blocks(
    worker: GpuContext, part: blocks.BlockIndexer, q: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """int64[tokens, heads, top_blocks * rate], in order, of q float32[tokens, heads, dim], keys [bound, dim]."""
    library, where = worker.gpu.torch, worker.gpu.torch_device
    tokens, heads, _ = q.shape
    scored, own = scores(worker, q, keys, positions, part.rate), positions // part.rate
    count = scored.shape[2]
    distance = own[:, None] - library.arange(count, device=where)
    local = (distance >= 0) & (distance < part.local_blocks)
    scored = scored.masked_fill(local[:, None], float("inf")).view(tokens * heads, count)
    blocks_of = gpu_indexer.largest(worker, scored, own.repeat_interleave(heads), part.top_blocks)
    blocks_of = blocks_of.sort(dim=1).values.view(tokens, heads, -1, 1)
    inside = library.arange(part.rate, device=where)
    found: torch.Tensor = (blocks_of * part.rate + inside).clamp(max=len(keys) - 1).view(tokens, heads, -1)
    return found


def scores(worker: GpuContext, q: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor, rate: int) -> torch.Tensor:
    """float32[tokens, heads, blocks], as `block_indexer.scores`; keys [n, dim] of floats, positions int32[tokens]."""
    library, (tokens, heads, dim) = worker.gpu.torch, q.shape
    count = -(-len(keys) // rate)
    products = (q.reshape(-1, dim) @ keys.float().T).view(tokens, heads, -1)
    later = library.arange(len(keys), device=worker.gpu.torch_device) > positions[:, None]
    products = products.masked_fill(later[:, None], float("-inf"))
    padded = library.nn.functional.pad(products, (0, count * rate - len(keys)), value=float("-inf"))
    best: torch.Tensor = padded.view(tokens, heads, count, rate).amax(3)
    return best
