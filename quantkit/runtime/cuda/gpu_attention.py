"""Attention on a GPU: appending to its KV cache, and attending over it.

Prompts over f32, f16 and bf16 caches attend with torch, in the cache's type: torch's kernels use tensor cores. A few
tokens, and all other caches, use `kernels/cuda/attention.py`. In sparse attention both do so over rows that are
gathered for each token. Soft-capped scores, and attention in chunks of positions, are computed with torch, in float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from quantkit.errors import UnsupportedError
from quantkit.runtime.blocks.float_attention import Heads
from quantkit.runtime.cuda.gpu_context import GpuContext, Selection
from quantkit.runtime.kernels.cuda import attention, decode_attention
from quantkit.runtime.kernels.cuda import device as cuda_device
from quantkit.runtime.kv.cache import Cache
from quantkit.runtime.kv.cache_type import CacheType

if TYPE_CHECKING:
    import torch

MIN_KEYS = 128  # of one split of the keys
MAX_BLOCKS = attention.MAX_SPLITS  # thread blocks that keep a GPU busy; more splits of the keys are not faster
MAX_FLASH_DIM = 256  # of heads, in torch's flash attention: of its fast kernels, the one where queries share keys
GATHERED = 1 << 25  # elements of the keys that are gathered for some tokens of a prompt at a time: 64 MiB of f16
TORCH_DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}  # caches that torch attends over


def require_cache(device: str, kind: CacheType, dim_k: int, dim_v: int) -> None:
    """UnsupportedError where the kernels cannot attend over caches of this type and these head sizes.

    `dim_v` 0: the values are the first elements of the keys.
    """
    if any(kind.rotations(dim_k, dim_v)):
        raise UnsupportedError(
            f"{device}: caches on a GPU are not rotated in this version; leave -khad and -vhad out, or "
            "keep the cache on the CPU (-nkvo)"
        )
    attention.check((kind.k, kind.v if dim_v else kind.k), (dim_k, dim_v or dim_k))
    for name in (kind.k, kind.v) if dim_v else (kind.k,):
        attention.append(name)


def append_rows(worker: GpuContext, k: torch.Tensor | None, v: torch.Tensor | None, cache: Cache, layer: int) -> None:
    """Append keys and values float32[tokens, kv_heads * head_dim] to a layer of a cache on this GPU; not None."""
    sides: tuple[tuple[Any, Any, str], ...] = (k, cache.k[layer], cache.type.k), (v, cache.v[layer], cache.type.v)
    for x, rows, kind in sides:
        if x is not None:
            append_to(worker, x, rows, kind, cache)


def append_to(worker: GpuContext, x: torch.Tensor, rows: torch.Tensor, kind: str, cache: Cache) -> None:
    """Append float32[tokens, heads * dim] to rows uint8[heads, n_ctx, row bytes] of a cache, of the type `kind`."""
    (heads, n_ctx, row_bytes), tokens = rows.shape, len(x)
    dim = x.shape[1] // heads
    positions = worker.next_positions(cache, tokens)
    warps = tokens * heads * -(-dim // 32)
    worker.gpu.launch_each(attention.append(kind), 32 * warps, attention.THREADS, x.contiguous(), heads, dim, row_bytes,
                           n_ctx, positions, tokens, rows)  # fmt: skip


def attend(worker: GpuContext, heads: Heads, layer: int, q: torch.Tensor, cache: Cache) -> torch.Tensor:
    """float32[tokens, heads * head_dim_v] of queries float32[tokens, heads * head_dim_k] of one sequence.

    The cache holds the keys and values of these tokens already.
    """
    if heads.softcap is not None or heads.chunk is not None:
        return _attend_in_float32(worker, heads, layer, q, cache)
    plain = heads.sinks is None and not heads.values_in_keys
    if plain and len(q) > cuda_device.MAX_PACKED_VECTORS and {cache.type.k, cache.type.v} <= TORCH_DTYPES.keys():
        return _attend_with_torch(worker, heads, layer, q, cache)
    return _attend_by_kernels(worker, heads, q, _stored(worker, heads, layer, len(q), cache))


def attend_one(worker: GpuContext, heads: Heads, layer: int, q: torch.Tensor, cache: Cache) -> cuda_device.Activations:
    """As `attend` for one token, also as bytes: `head_dim_v` is a multiple of 32."""
    out = worker.gpu.activations(worker.gpu.empty(1, heads.heads * heads.head_dim_v))
    _attend_and_merge(worker, heads, q, _stored(worker, heads, layer, 1, cache), out, quantized=True)
    return out


def attend_selected(
    worker: GpuContext, heads: Heads, layer: int, q: torch.Tensor, cache: Cache, selection: Selection
) -> torch.Tensor:
    """As `attend`, to the positions that are selected for each token: their rows are gathered for each KV head."""
    if selection.positions.ndim == 2:  # the same for all KV heads
        of_heads = selection.positions[:, None].expand(-1, heads.kv_heads, -1)
        selection = selection._replace(positions=of_heads)
    kinds = cache.type.k, cache.type.k if heads.values_in_keys else cache.type.v
    if len(q) > cuda_device.MAX_PACKED_VECTORS and heads.sinks is None and TORCH_DTYPES.keys() >= {*kinds}:
        return _attend_selected_with_torch(worker, heads, layer, q, cache, selection)
    parts = []
    for token in range(len(q)):
        one = slice(token, token + 1)
        k, v = (x[0] for x in _gathered(heads, layer, cache, selection.positions[one]))
        keys = _Stored(k, v, kinds, selection.counts[one] - 1, k.shape[1])
        parts.append(_attend_by_kernels(worker, heads, q[one], keys))
    return parts[0] if len(parts) == 1 else worker.gpu.torch.cat(parts)


def _gathered(heads: Heads, layer: int, cache: Cache, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """uint8[tokens, kv heads, n, row bytes] of keys and of values, of positions int64[tokens, kv heads, n]."""
    sides: list[Any] = [cache.k[layer]] if heads.values_in_keys else [cache.k[layer], cache.v[layer]]
    found = []
    for rows in sides:
        of_tokens = rows.expand(len(positions), *rows.shape)
        found.append(of_tokens.gather(2, positions[..., None].expand(-1, -1, -1, rows.shape[-1])))
    return found[0], found[-1]


def _attend_selected_with_torch(
    worker: GpuContext, heads: Heads, layer: int, q: torch.Tensor, cache: Cache, selection: Selection
) -> torch.Tensor:
    """`attend_selected` of many tokens over a cache of floats: each token is a batch of its KV heads."""
    library, device, count = worker.gpu.torch, worker.gpu.torch_device, selection.positions.shape[-1]
    kinds = cache.type.k, cache.type.k if heads.values_in_keys else cache.type.v
    step = max(1, GATHERED // (count * heads.kv_heads * heads.head_dim_k))
    parts = []
    for first in range(0, len(q), step):
        some = slice(first, first + step)
        rows = _gathered(heads, layer, cache, selection.positions[some])
        k, v = (x.view(getattr(library, TORCH_DTYPES[kind])) for x, kind in zip(rows, kinds))
        seen = library.arange(count, device=device) < selection.counts[some, None]
        queries = q[some].view(len(k), heads.kv_heads, -1, heads.head_dim_k).to(k.dtype)
        attended: torch.Tensor = library.nn.functional.scaled_dot_product_attention(
            queries, k, v.to(k.dtype), attn_mask=seen[:, None, None], scale=heads.scale
        )
        parts.append(attended[..., : heads.head_dim_v].reshape(len(k), -1).float())
    return parts[0] if len(parts) == 1 else library.cat(parts)


class _Stored(NamedTuple):
    """Keys and values that kernels attend over, uint8[kv heads, n_ctx, row bytes] of the types `kinds`.

    positions   int32[tokens], of the queries
    bound       all positions are below this
    """

    k: torch.Tensor
    v: torch.Tensor
    kinds: tuple[str, str]
    positions: torch.Tensor
    bound: int


def _stored(worker: GpuContext, heads: Heads, layer: int, tokens: int, cache: Cache) -> _Stored:
    """What a cache holds of a layer, for its last `tokens` tokens."""
    k: Any = cache.k[layer]
    v: Any = k if heads.values_in_keys else cache.v[layer]
    kinds = cache.type.k, cache.type.k if heads.values_in_keys else cache.type.v
    return _Stored(k, v, kinds, worker.next_positions(cache, tokens), worker.position_bound(cache, tokens))


def _attend_by_kernels(worker: GpuContext, heads: Heads, q: torch.Tensor, stored: _Stored) -> torch.Tensor:
    """float32[tokens, heads * head_dim_v]."""
    out = worker.gpu.empty(len(q), heads.heads * heads.head_dim_v)
    unused = worker.gpu.empty(1, kind="int8"), *(worker.gpu.empty(1) for _ in range(2))
    _attend_and_merge(worker, heads, q, stored, cuda_device.Activations(out, *unused), quantized=False)
    return out


def _attend_and_merge(
    worker: GpuContext, heads: Heads, q: torch.Tensor, stored: _Stored, out: cuda_device.Activations, quantized: bool
) -> None:
    """Attention by kernels: splits of the keys, and their merge."""
    tokens, group, gpu = len(q), heads.heads // heads.kv_heads, worker.gpu
    k, v, kinds, positions, bound = stored
    rows, n_ctx = tokens * group, k.shape[1]
    key_count = min(bound, (heads.window or n_ctx) + tokens)
    tiles = -(-rows // attention.ROWS)
    splits = max(1, min(-(-key_count // MIN_KEYS), MAX_BLOCKS // (tiles * heads.kv_heads)))
    maximum, denominator = (gpu.empty(splits, heads.kv_heads, rows) for _ in range(2))
    acc = gpu.empty(splits, heads.kv_heads, rows, heads.head_dim_v)
    sizes, window, scale = (k.shape[2], v.shape[2], n_ctx), heads.window or n_ctx, np.float32(heads.scale)
    results = splits, maximum, denominator, acc
    dims = heads.head_dim_k, heads.head_dim_v
    if tokens == 1 and not heads.values_in_keys and decode_attention.suits(*kinds, dims, group):
        kernel = decode_attention.attend_one(*kinds, dims[0], group)
        threads = decode_attention.threads_of(group)
        gpu.launch(kernel, (splits, 1, heads.kv_heads), threads, q.contiguous(), k, v, *sizes, positions, window, scale,
                   *results)  # fmt: skip
    else:
        kernel = attention.attend(*kinds, *dims, heads.values_in_keys)
        gpu.launch(kernel, (splits, tiles, heads.kv_heads), attention.threads_of(dims[1]), q.contiguous(), k, v, *sizes,
                   heads.heads, group, tokens, positions, window, scale, *results)  # fmt: skip
    sinks = gpu.empty(1) if heads.sinks is None else heads.sinks
    merge = attention.merge(heads.sinks is not None, quantized)
    gpu.launch(merge, (rows, heads.kv_heads), attention.THREADS, maximum, denominator, acc, splits, heads.heads, group,
               tokens, heads.head_dim_v, sinks, *out)  # fmt: skip


def _attend_with_torch(worker: GpuContext, heads: Heads, layer: int, q: torch.Tensor, cache: Cache) -> torch.Tensor:
    """`attend` of many tokens over a cache of floats."""
    tokens, first = len(q), cache.length
    k, v = _keys_and_values(worker, layer, cache, first + tokens)
    v = v.to(k.dtype)
    by_heads = q.view(tokens, heads.heads, -1).transpose(0, 1)
    return by_torch(worker, by_heads, k[0], v[0], first, heads.window, heads.scale)


def by_torch(
    worker: GpuContext, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: int, window: int | None, scale: float
) -> torch.Tensor:
    """float32[tokens, heads * head_dim_v]: softmax attention by torch's kernels, in the type of the keys.

    q [heads, tokens, head_dim_k] of the positions from `first` on; k [kv heads, keys, head_dim_k] and v of all
    positions, each for a run of neighbouring heads of q. A token sees the `window` keys up to its own, None: all.
    """
    library, torch_device = worker.gpu.torch, worker.gpu.torch_device
    (heads, tokens, dim), (kv_heads, key_count, dim_v) = q.shape, v.shape
    mask, window = None, window or key_count
    if first or window < tokens:
        distance = library.arange(first, key_count, device=torch_device)[:, None] - library.arange(
            key_count, device=torch_device
        )
        mask = (distance >= 0) & (distance < window)
    if dim_v < dim:  # torch's fast kernels have one size for both
        v = library.nn.functional.pad(v, (0, dim - dim_v))
    flash = mask is None and k.element_size() == 2 and dim_v <= dim <= MAX_FLASH_DIM and dim % 8 == 0
    shared = flash and heads > kv_heads
    if heads > kv_heads and not shared:
        k, v = (x.repeat_interleave(heads // kv_heads, dim=0) for x in (k, v))
    attention = library.nn.functional.scaled_dot_product_attention
    attended = attention(
        q[None].to(k.dtype), k[None], v[None], attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=shared
    )
    result: torch.Tensor = attended[0, :, :, :dim_v].transpose(0, 1).reshape(tokens, -1).float()
    return result


def _attend_in_float32(worker: GpuContext, heads: Heads, layer: int, q: torch.Tensor, cache: Cache) -> torch.Tensor:
    """`attend` with soft-capped scores, or in chunks, over a cache of floats. UnsupportedError for other caches."""
    if not {cache.type.k, cache.type.v} <= TORCH_DTYPES.keys():
        raise UnsupportedError(
            f"{worker.device.name}: soft-capped or chunked attention over a {cache.type} cache has no kernel; take "
            "-ctk f16 -ctv f16"
        )
    library, tokens, first = worker.gpu.torch, len(q), cache.length
    key_count = first + tokens
    group = heads.heads // heads.kv_heads
    both = _keys_and_values(worker, layer, cache, key_count)
    k, v = (x[0].repeat_interleave(group, dim=0).float() for x in both)
    scores = q.view(tokens, heads.heads, -1).transpose(0, 1) @ k.transpose(1, 2) * heads.scale
    if heads.softcap is not None:
        scores = heads.softcap * library.tanh(scores / heads.softcap)
    positions = library.arange(key_count, device=worker.gpu.torch_device)
    distance = positions[first:, None] - positions
    visible = (distance >= 0) & (distance < (heads.window or key_count))
    if heads.chunk is not None:
        chunks = positions // heads.chunk
        visible &= chunks[first:, None] == chunks
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    result: torch.Tensor = (weights @ v).transpose(0, 1).reshape(tokens, -1)
    return result


def _keys_and_values(worker: GpuContext, layer: int, cache: Cache, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first `count` keys and values of a cache of floats, [1, kv heads, count, dim], as they are stored."""
    stored, library = ((cache.k[layer], cache.type.k), (cache.v[layer], cache.type.v)), worker.gpu.torch
    k, v = (x.view(getattr(library, TORCH_DTYPES[kind]))[None, :, :count] for x, kind in stored)
    return k, v
