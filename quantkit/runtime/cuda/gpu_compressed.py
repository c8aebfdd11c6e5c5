"""Compressed attention (archs.blocks.CompressedAttention) on a GPU: `blocks/compressed_attention.py` with torch.

Entries are made when their windows are complete, and kept on the GPU beside the cache (runtime/kv/entries.py). A prompt
attends in the type of its keys, if that has 16 bits; a few tokens, and exact numerics, in float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quantkit.archs.common import blocks
from quantkit.errors import UnsupportedError
from quantkit.placement.kernel_sizes import INDEX_ELEMENTS
from quantkit.runtime.blocks.compressed_attention import Projected
from quantkit.runtime.blocks.spans import Span
from quantkit.runtime.cuda import gpu_attention, gpu_indexer
from quantkit.runtime.cuda.gpu_attention import TORCH_DTYPES
from quantkit.runtime.cuda.gpu_context import GpuContext, RopeTable
from quantkit.runtime.kernels.cuda import device as cuda_device
from quantkit.runtime.kv.cache import Cache
from quantkit.runtime.kv.cache_type import CacheType

if TYPE_CHECKING:
    import torch


_TOKENS = 4096  # whose entries are made at a time; more are missing after `Cache.restore` only


def require_cache(device: str, kind: CacheType, part: blocks.CompressedAttention) -> None:
    """UnsupportedError where keys, and what compressors read, are not stored as floats."""
    if not {kind.k, kind.v} <= TORCH_DTYPES.keys() or any(kind.rotations(part.dim, part.kept)):
        raise UnsupportedError(
            f"{device}: compressed attention ({part.kv.weight}) reads a cache of f16, bf16 or f32 on a GPU, not of "
            f"{kind}; take -ctk f16 -ctv f16, or keep the cache on the CPU (-nkvo)"
        )


def attend(
    worker: GpuContext, part: blocks.CompressedAttention, layer: int, given: Projected, spans: list[Span]
) -> torch.Tensor:
    """float32[tokens, heads * dim]: what heads get, rotated back; the caches get the tokens' rows."""
    library, table = worker.gpu.torch, worker.rope_table(part.rope, spans)
    outputs = []
    for span in spans:
        rows, cache = slice(span.start, span.stop), span.cache
        positions = worker.next_positions(cache, span.stop - span.start)
        q, keys = (rotated(x[rows], table, positions) for x in (given.q, given.keys))
        kept = library.cat([x[rows] for x in given.read], dim=1) if given.read else None
        gpu_attention.append_rows(worker, keys, kept, cache, layer)
        made = _entries(worker, part, table, layer, cache, len(q))
        index = tuple(x[rows] for x in given.scored)
        chosen = _chosen(worker, part, table, layer, index, cache, positions)
        out = _attended(worker, part, q, _floats(worker, cache, layer, 0), made, chosen, cache.length)
        outputs.append(rotated(out, table, positions, back=True).view(len(q), -1))
    return outputs[0] if len(outputs) == 1 else library.cat(outputs)


def rotated(x: Any, table: RopeTable, positions: torch.Tensor, *, back: bool = False) -> torch.Tensor:
    """x float32[tokens, …, dim] with neighbouring elements of the last ones rotated, `back` by the negative angle."""
    cos, sin = (angles[positions] for angles in (table.cos, table.sin))
    if x.ndim == 3:
        cos, sin = cos[:, None], sin[:, None]
    sin = -sin if back else sin
    out: torch.Tensor = x.clone()
    first, second = (x[..., x.shape[-1] - 2 * table.pairs + i :: 2] for i in range(2))
    out[..., x.shape[-1] - 2 * table.pairs :: 2] = first * cos - second * sin
    out[..., x.shape[-1] - 2 * table.pairs + 1 :: 2] = first * sin + second * cos
    return out


def entries(
    worker: GpuContext, part: blocks.Compressor, table: RopeTable, kept: torch.Tensor, first: int
) -> torch.Tensor:
    """float32[windows, dim]: entries of the windows from `first` on, of float32[windows, rate, 2 * columns], which are
    kv(y) and gate(y) of their tokens. With overlapping windows there is one more in front: the one before `first`."""
    library, n = worker.gpu.torch, part.columns
    c, z = kept[..., :n], kept[..., n : 2 * n] + worker.vector(part.ape).view(part.rate, n)
    if part.overlapping:
        c, z = (library.cat([x[:-1, :, : part.dim], x[1:, :, part.dim :]], dim=1) for x in (c, z))
        if not first:
            z[0, : part.rate] = float("-inf")  # there is no window before
    mean = (z.softmax(1) * c).sum(1)
    starts = library.arange(first, first + len(mean), device=worker.gpu.torch_device) * part.rate
    return rotated(worker.norm(part.norm, mean), table, starts)


def _entries(
    worker: GpuContext, part: blocks.CompressedAttention, table: RopeTable, layer: int, cache: Cache, tokens: int
) -> torch.Tensor | None:
    """float32[windows, dim]: the entries of all whole windows, after those that `tokens` tokens complete are made."""
    if part.compressor is None or cache.entries is None:
        return None
    length, rate = cache.length + tokens, part.compressor.rate
    stored: Any = cache.entries.arrays(layer)
    windows = cache.entries.extend(layer, cache.length, length)
    step = max(1, _TOKENS // rate)
    for first in range(windows.start, windows.stop, step):
        stop, at = min(first + step, windows.stop), 0
        kept = _windows(worker, part.compressor, _floats(worker, cache, layer, 1), first, stop)
        for each, into in zip(part.compressors, stored):
            into[first:stop] = entries(worker, each, table, kept[..., at:], first)
            at += 2 * each.columns
    made: torch.Tensor = stored[0][: length // rate]
    return made


def _windows(worker: GpuContext, part: blocks.Compressor, rows: torch.Tensor, first: int, stop: int) -> torch.Tensor:
    """float32[windows, rate, kept] of rows [n_ctx, kept], as `entries` takes them."""
    before = first - int(part.overlapping)
    kept = rows[max(before, 0) * part.rate : stop * part.rate].float()
    if before < 0:  # a window of no token, which entries leave out
        kept = worker.gpu.torch.nn.functional.pad(kept, (0, 0, part.rate, 0))
    return kept.view(stop - before, part.rate, -1)


def _chosen(
    worker: GpuContext,
    part: blocks.CompressedAttention,
    table: RopeTable,
    layer: int,
    index: tuple[Any, ...],
    cache: Cache,
    positions: torch.Tensor,
) -> torch.Tensor | None:
    """bool[tokens, windows]: the entries that each token attends to."""
    if part.compressor is None or cache.entries is None:
        return None
    library, rate = worker.gpu.torch, part.compressor.rate
    count = (cache.length + len(positions)) // rate
    visible = (positions + 1) // rate
    seen: torch.Tensor = library.arange(count, device=worker.gpu.torch_device) < visible[:, None]
    if part.indexer is None or count <= part.indexer.top_k:
        return seen
    stored: Any = cache.entries.arrays(layer)
    q = rotated(index[0].view(len(positions), part.indexer.heads, -1), table, positions)
    chosen = library.zeros_like(seen)
    for first in range(0, len(q), step := max(1, INDEX_ELEMENTS // count)):
        some = slice(first, first + step)
        scored = gpu_indexer.scores(worker, q[some], index[1][some].contiguous(), stored[1][:count])
        best = gpu_indexer.largest(worker, scored, visible[some] - 1, part.indexer.top_k)
        chosen[some] = chosen[some].scatter(1, best, value=True)
    seen &= chosen
    return seen


def _attended(
    worker: GpuContext,
    part: blocks.CompressedAttention,
    q: torch.Tensor,
    keys: torch.Tensor,
    made: torch.Tensor | None,
    chosen: torch.Tensor | None,
    first: int,
) -> torch.Tensor:
    """float32[tokens, heads, dim] of q at the positions from `first` on, some tokens at a time.

    keys [n_ctx, dim] are those of all positions, made [windows, dim] the entries, chosen bool[tokens, windows].
    """
    library, tokens = worker.gpu.torch, len(q)
    halves = not worker.exact and tokens > cuda_device.MAX_PACKED_VECTORS
    dtype = keys.dtype if halves else library.float32
    made = None if made is None else made.to(dtype)
    step = max(1, INDEX_ELEMENTS // (part.heads * (2 * part.window + (0 if made is None else len(made)))))
    step = min(step, part.window)
    parts = []
    positions = library.arange(first + tokens, device=worker.gpu.torch_device)
    for start in range(0, tokens, step):
        stop = min(tokens, start + step)
        places = slice(max(0, first + start - part.window + 1), first + stop)
        own, place = positions[first + start : first + stop, None], positions[places]
        near, seen = keys[places].to(dtype), (place <= own) & (place > own - part.window)
        if made is not None and chosen is not None:
            near, seen = library.cat([near, made]), library.cat([seen, chosen[start:stop]], dim=1)
        parts.append(softmax_of_seen(worker, part, q[start:stop].to(dtype), near, seen))
    return parts[0] if len(parts) == 1 else library.cat(parts)


def softmax_of_seen(
    worker: GpuContext, part: blocks.CompressedAttention, q: torch.Tensor, keys: torch.Tensor, seen: torch.Tensor
) -> torch.Tensor:
    """As `compressed_attention.softmax_of_seen`: q [tokens, heads, dim], keys [n, dim], seen bool[tokens, n]."""
    library, (tokens, heads, dim) = worker.gpu.torch, q.shape
    scores = (q.reshape(-1, dim) @ keys.T).float().view(tokens, heads, -1) * part.scale
    sinks = worker.vector(part.sinks).view(1, heads, 1).expand(tokens, heads, 1)
    scores = library.cat([scores.masked_fill(~seen[:, None], float("-inf")), sinks], dim=2)
    shares = scores.softmax(2)[..., :-1].to(q.dtype)
    attended: torch.Tensor = (shares.reshape(tokens * heads, -1) @ keys).float()
    return attended.view(tokens, heads, dim)


def _floats(worker: GpuContext, cache: Cache, layer: int, side: int) -> torch.Tensor:
    """[n_ctx, dim]: keys of a cache (side 0) or what compressors read (1), as they are stored."""
    kind, rows = ((cache.type.k, cache.k), (cache.type.v, cache.v))[side]
    stored: Any = rows[layer]
    found: torch.Tensor = stored.view(getattr(worker.gpu.torch, TORCH_DTYPES[kind]))[0]
    return found
