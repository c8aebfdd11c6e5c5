"""Which blocks of positions each token attends to on a GPU (archs.blocks.PooledIndexer), with torch, in float32.

The keys of blocks are made when these are whole, and kept on the GPU beside the cache (runtime/kv/entries.py). Scores
are those of `runtime/blocks/pooled_indexer.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from quantkit.archs.common import blocks
from quantkit.placement.kernel_sizes import INDEX_ELEMENTS
from quantkit.runtime.blocks.indexer import Index
from quantkit.runtime.blocks.spans import Span
from quantkit.runtime.cuda import gpu_attention, gpu_indexer
from quantkit.runtime.cuda.gpu_attention import TORCH_DTYPES
from quantkit.runtime.cuda.gpu_context import GpuContext, Selection

if TYPE_CHECKING:
    import torch


def selections(
    worker: GpuContext, part: blocks.PooledIndexer, layer: int, index: Index, spans: Sequence[Span]
) -> list[Selection | None]:
    """What each span's tokens attend to, None: all up to their own. The caches get the keys."""
    found: list[Selection | None] = []
    for span in spans:
        rows, tokens, cache = slice(span.start, span.stop), span.stop - span.start, span.cache
        keys: Any = cache.index[layer]
        gpu_attention.append_to(worker, index.keys[rows], keys, cache.type.v, cache)
        assert cache.entries is not None
        stored: Any = cache.entries.arrays(layer)[1]
        whole = cache.entries.extend(layer, cache.length, cache.length + tokens)
        if whole:
            kept = keys.view(getattr(worker.gpu.torch, TORCH_DTYPES[cache.type.v]))[0]
            kept = kept[whole.start * part.rate : whole.stop * part.rate].float()
            stored[whole.start : whole.stop] = block_keys(worker, part, kept, whole.start, [span])
        count = (cache.length + tokens) // part.rate
        if count <= part.top_blocks:
            found.append(None)
            continue
        positions, q = worker.next_positions(cache, tokens), index.q[rows].view(tokens, part.heads, part.dim)
        parts = []
        for first in range(0, tokens, step := max(1, INDEX_ELEMENTS // (part.heads * count))):
            some = slice(first, first + step)
            scored = scores(q[some], stored[:count])
            parts.append(positions_of(worker, part, scored, positions[some]))
        visible = (positions + 1) // part.rate
        counts = visible.clamp(max=part.top_blocks) * part.rate + positions + 1 - visible * part.rate
        chosen = parts[0] if len(parts) == 1 else worker.gpu.torch.cat(parts)
        found.append(Selection(chosen.clamp(max=cache.length + tokens - 1), counts.int()))
    return found


def positions_of(
    worker: GpuContext, part: blocks.PooledIndexer, scored: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """int64[tokens, (top_blocks + 1) * rate]: what is selected by scores float32[tokens, blocks].

    That is the positions of selected blocks, in order, then those after the last whole one; all positions, where no
    more blocks are whole than are selected.
    """
    library, where = worker.gpu.torch, worker.gpu.torch_device
    visible = ((positions + 1) // part.rate).long()
    best = gpu_indexer.largest(worker, scored, visible - 1, part.top_blocks).sort(dim=1).values
    numbers = library.cat([best, visible[:, None]], dim=1)
    in_order = library.arange(part.top_blocks + 1, device=where)
    numbers = library.where(visible[:, None] <= part.top_blocks, in_order, numbers)
    inside = library.arange(part.rate, device=where)
    found: torch.Tensor = (numbers[:, :, None] * part.rate + inside).view(len(positions), -1)
    return found


def scores(q: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """float32[tokens, blocks] of q float32[tokens, heads, dim], keys float32[blocks, dim]."""
    tokens, heads, dim = q.shape
    return (q.reshape(-1, dim) @ keys.T).relu_().view(tokens, heads, -1).sum(1)


def block_keys(
    worker: GpuContext, part: blocks.PooledIndexer, kept: torch.Tensor, first: int, spans: list[Span]
) -> torch.Tensor:
    """float32[blocks, dim]: the keys of whole blocks from number `first` on, of k(y) float32[blocks * rate, dim]."""
    from quantkit.runtime.kernels.cuda import elementwise

    keys: torch.Tensor = worker.norm(part.k_norm, kept.view(-1, part.rate, part.dim).mean(1))
    library, angles = worker.gpu.torch, worker.rope_table(part.rope, spans)
    starts = library.arange(first, first + len(keys), dtype=library.int32, device=worker.gpu.torch_device) * part.rate
    worker.gpu.launch_each(
        elementwise.rope(), len(keys) * angles.pairs, elementwise.THREADS, keys, 1, part.dim, angles.pairs, angles.cos,
        angles.sin, starts, angles.step, angles.stride, len(keys),
    )  # fmt: skip
    return keys
