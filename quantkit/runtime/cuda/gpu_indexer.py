"""Sparse attention on a GPU: which positions each token attends to (`archs.common.blocks.Indexer`).

Scores are those of `runtime/blocks/indexer.py`, in float32: of prompts over keys of floats by torch, of a few tokens
and over other keys by `kernels/cuda/indexer.py`. The positions that are selected are those that the CPU selects of the
same scores, equal ones too. A selection is a list of positions for each token. The rows of the cache that it names are
gathered, and attended to (`gpu_attention.attend_selected`).

In a CUDA graph the position of the one token is not known to the host: all positions of the cache are ranked, and those
after its own come last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from quantkit.archs.common import blocks
from quantkit.errors import UnsupportedError
from quantkit.placement.kernel_sizes import INDEX_ELEMENTS
from quantkit.runtime.blocks.indexer import Index
from quantkit.runtime.blocks.spans import Span
from quantkit.runtime.cuda.gpu_attention import TORCH_DTYPES
from quantkit.runtime.cuda.gpu_context import GpuContext, Selection
from quantkit.runtime.kernels.cuda import attention, device, indexer
from quantkit.runtime.kv.cache_type import CacheType

if TYPE_CHECKING:
    import torch


def require_cache(device: str, kind: CacheType, part: blocks.Indexer) -> None:
    """UnsupportedError where there is no kernel for the indexer's keys, which have the type of values."""
    if kind.vhad:
        raise UnsupportedError(
            f"{device}: an indexer's keys are not rotated on a GPU in this version; leave -vhad out, or keep the cache "
            "on the CPU (-nkvo)"
        )
    attention.check((kind.v, kind.v), (part.dim, part.dim))
    attention.append(kind.v)


def selections(
    worker: GpuContext, part: blocks.Indexer, layer: int, index: Index, spans: Sequence[Span]
) -> list[Selection | None]:
    """What each span's tokens attend to, None: all up to their own. The caches get the keys."""
    found: list[Selection | None] = []
    for span in spans:
        rows, tokens, cache = slice(span.start, span.stop), span.stop - span.start, span.cache
        worker.append_rows(None, index.keys[rows], cache, layer)
        bound = worker.position_bound(cache, tokens)
        if bound <= part.top_k:
            found.append(None)
            continue
        keys: Any = cache.v[layer]
        floats = None  # the keys as torch reads them, for prompts
        if tokens > device.MAX_PACKED_VECTORS and cache.type.v in TORCH_DTYPES:
            floats = keys.view(getattr(worker.gpu.torch, TORCH_DTYPES[cache.type.v]))[0, :bound]
        positions = worker.next_positions(cache, tokens)
        q, weights = index.q[rows].view(tokens, part.heads, part.dim), index.weights[rows]
        chosen = []
        for first in range(0, tokens, step := max(1, INDEX_ELEMENTS // bound)):
            some = slice(first, first + step)
            given = q[some], weights[some]
            if floats is not None:
                scored = scores(worker, *given, floats)
            else:
                scored = scores_by_kernel(worker, part.top_k, *given, cache.type.v, keys, positions[some], bound)
            chosen.append(largest(worker, scored, positions[some], part.top_k))
        joined = chosen[0] if len(chosen) == 1 else worker.gpu.torch.cat(chosen)
        found.append(Selection(joined, (positions + 1).clamp(max=part.top_k)))
    return found


def scores(worker: GpuContext, q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """float32[tokens, positions] of q [tokens, heads, dim], weights [tokens, heads], keys [positions, dim]."""
    tokens, heads, dim = q.shape
    out = worker.gpu.empty(tokens, len(keys))
    step = max(1, INDEX_ELEMENTS // (tokens * heads))
    weights = weights.view(tokens, 1, heads)
    for first in range(0, len(keys), step):
        products = q.reshape(-1, dim) @ keys[first : first + step].float().T
        out[:, first : first + step] = (weights @ products.relu_().view(tokens, heads, -1))[:, 0]
    return out.mul_((heads * dim) ** -0.5)


def scores_by_kernel(
    worker: GpuContext, top_k: int, q: torch.Tensor, weights: torch.Tensor, kind: str, keys: torch.Tensor,
    positions: torch.Tensor, bound: int,
) -> torch.Tensor:  # fmt: skip
    """float32[tokens, bound]: `scores` up to each token's own position, of keys uint8[1, n_ctx, row bytes] of a type.

    Zeros for tokens with up to `top_k` positions; positions int32[tokens].
    """
    tokens, heads, dim = q.shape
    out, scale = worker.gpu.empty(tokens, bound), np.float32((heads * dim) ** -0.5)
    grid = -(-bound // indexer.KEYS), tokens
    worker.gpu.launch(indexer.scores(kind, dim), grid, indexer.THREADS, q.contiguous(), weights.contiguous(), keys,
                      keys.shape[2], heads, positions, top_k, scale, bound, out)  # fmt: skip
    return out


def largest(worker: GpuContext, scored: torch.Tensor, positions: torch.Tensor, count: int) -> torch.Tensor:
    """int64[tokens, count]: the positions with the largest scores, largest first, those after a token's own last.

    Of equal scores the earlier position comes first. A score's bits are made an integer of the same order; the position
    is below it, in an integer of 64 bits.
    """
    library, n = worker.gpu.torch, scored.shape[1]
    place = library.arange(n, device=worker.gpu.torch_device)
    bits = (scored + 0.0).view(library.int32)  # -0 is 0
    ordered = library.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    ranked = (ordered << 32) + (n - 1 - place)
    ranked.masked_fill_(place > positions[:, None], library.iinfo(library.int64).min)
    result: torch.Tensor = ranked.topk(count, dim=1).indices
    return result


def to_mask(positions: np.ndarray, counts: np.ndarray, count: int) -> np.ndarray:
    """bool[tokens, count] of a `Selection`, in the host's memory, as are its arrays."""
    mask = np.zeros((len(positions), count), bool)
    np.put_along_axis(mask, positions, np.arange(positions.shape[1]) < counts[:, None], axis=1)
    return mask


def of_mask(mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The arrays of a `Selection` of bool[tokens, positions].

    The host makes them: the mask of a long prompt, sorted on a GPU, would take gigabytes there.
    """
    counts = mask.sum(1, dtype=np.int32)
    positions = np.empty((len(mask), counts.max()), np.int64)
    for seen, row, count in zip(mask, positions, counts):
        row[:count] = np.flatnonzero(seen)
        row[count:] = np.flatnonzero(~seen)[: len(row) - count]
    return positions, counts
