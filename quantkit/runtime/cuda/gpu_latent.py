"""Latent attention (archs.blocks.LatentAttention) on a GPU: `runtime/blocks/latent.py` with torch tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quantkit.archs.common import blocks
from quantkit.runtime.blocks import indexer, latent
from quantkit.runtime.blocks.spans import Span
from quantkit.runtime.cuda import gpu_attention
from quantkit.runtime.cuda.gpu_context import GpuContext
from quantkit.runtime.kv.cache import Cache

if TYPE_CHECKING:
    import torch

EXPANDED = 1 << 26  # elements of the keys and values that are made of latents at a time: 128 MiB of f16


class GpuHeadProjections(latent.HeadProjections):
    """The matrices between latents and heads on a GPU. Heads are multiplied as experts are: `Matrices.of_experts`."""

    def __init__(self, part: blocks.LatentAttention, worker: GpuContext):
        super().__init__(part, worker.weights, worker.threads)
        self._worker = worker

    def _heads(self, linear: blocks.Linear, rows: int, x: Any) -> Any:
        """float32[tokens, heads, rows] of x float32[tokens, heads, n], by the matrix of each head, scaled."""
        worker = self._worker
        matrices = worker.matrices(linear.weight, rows)  # of two dimensions: heads one after another
        torch, count = worker.gpu.torch, x.shape[1]
        ids = torch.arange(count, dtype=torch.int32, device=worker.gpu.torch_device).repeat(len(x), 1)
        y = matrices.of_experts(x.contiguous(), ids, worker.exact)
        return y * float(self.scales[linear.weight]) if linear.weight in self.scales else y

    def _decoded_heads(self) -> tuple[Any, Any]:
        """k float32[heads, nope, kv_lora] and v [heads, head_dim_v, kv_lora], decoded and scaled."""
        part = self.part
        if part.kv_b is not None:
            stacked = self._decoded(part.kv_b).view(part.heads, -1, part.kv_lora)
            return stacked[:, : part.nope], stacked[:, part.nope :]
        assert part.k_b is not None
        assert part.v_b is not None
        keys = self._decoded(part.k_b).view(part.heads, part.kv_lora, part.nope).transpose(1, 2)
        return keys, self._decoded(part.v_b).view(part.heads, -1, part.kv_lora)

    def _decoded(self, linear: blocks.Linear) -> Any:
        """float32 of all matrices of a tensor, one after another."""
        decoded = self._worker.matrices(linear.weight).all_decoded()
        return decoded * float(self.scales[linear.weight]) if linear.weight in self.scales else decoded

    @property
    def _has_pair(self) -> bool:
        return self.part.k_b is not None and self.part.v_b is not None

    def queries(self, q: Any) -> Any:
        """As `latent.HeadProjections.queries`, of tensors."""
        part, torch = self.part, self._worker.gpu.torch
        plain = q[:, :, : part.nope]
        if self._has_pair:
            assert part.k_b is not None
            projected = self._heads(part.k_b, part.kv_lora, plain)
        else:
            projected = torch.einsum("thn,hnl->thl", plain, self._decoded_heads()[0])
        return torch.cat([projected, q[:, :, part.nope :]], dim=2).reshape(len(q), -1)

    def values(self, attended: Any) -> Any:
        """As `latent.HeadProjections.values`, of tensors."""
        part, torch = self.part, self._worker.gpu.torch
        latents = attended.view(-1, part.heads, part.kv_lora)
        if self._has_pair:
            assert part.v_b is not None
            projected = self._heads(part.v_b, part.head_dim_v, latents)
        else:
            projected = torch.einsum("thl,hvl->thv", latents, self._decoded_heads()[1])
        return projected.reshape(len(latents), -1)

    def expanded(self, latents: Any, first: int, stop: int) -> Any:
        """As `latent.HeadProjections.expanded`, of tensors, in the type of the latents."""
        part, torch = self.part, self._worker.gpu.torch
        k, v = (x[first:stop].to(latents.dtype) for x in self._decoded_heads())
        c, rotated = latents[:, : part.kv_lora], latents[:, part.kv_lora :]
        keys = torch.einsum("tl,hnl->htn", c, k)
        return torch.cat([keys, rotated.expand(stop - first, -1, -1)], dim=2), torch.einsum("tl,hvl->htv", c, v)


def attention(
    worker: GpuContext, part: blocks.LatentAttention, layer: int, x: torch.Tensor, spans: list[Span]
) -> torch.Tensor:
    """What a latent attention block adds to x float32[tokens, n_embd]: `latent.attention`."""
    cat = worker.gpu.torch.cat
    q = y = worker.norm(part.norm, x)
    if part.q_a is not None and part.q_a_norm is not None:
        q = worker.norm(part.q_a_norm, worker.linear(part.q_a, y))
    if part.sparse:
        spans = indexer.select(worker, part, layer, y, q, spans)
    q = worker.linear(part.q, q).view(len(x), part.heads, part.head_dim_k)
    rotated = q[:, :, part.nope :].reshape(len(x), -1).contiguous()
    worker.apply_rope(rotated, part.rope, part.rope.dim, spans)
    q = cat([q[:, :, : part.nope], rotated.view(len(x), part.heads, -1)], dim=2)
    if part.temperature is not None:
        worker.scale_queries(q.view(len(x), -1), part.temperature, spans)
    if part.scaling is not None:
        worker.scale_heads(q.view(len(x), -1), part.scaling, spans)
    kv = worker.linear(part.kv_a, y)
    c = worker.norm(part.kv_a_norm, kv[:, : part.kv_lora].contiguous())
    r = kv[:, part.kv_lora :].contiguous()
    worker.apply_rope(r, part.rope, part.rope.dim, spans)
    y = worker.attend_latents(part, layer, q, cat([c, r], dim=1), spans)
    worker.check(f"attention of blk.{layer} over a cache of {spans[0].cache.cache_type}", y)
    result: torch.Tensor = worker.linear(part.out, y)
    return result


def attend(
    worker: GpuContext,
    projections: latent.HeadProjections,
    part: blocks.LatentAttention,
    layer: int,
    q: torch.Tensor,
    latents: torch.Tensor,
    spans: list[Span],
) -> torch.Tensor:
    """float32[tokens, heads * head_dim_v] of q [tokens, heads, head_dim_k] and latents [tokens, latent] after RoPE.

    With `mla` 2 and 3, prompts of `latent.EXPAND` tokens over a cache of floats are expanded, as `latent.attend` does,
    as long as they attend to all positions.
    """
    k: Any
    v: Any
    if not worker.mla:
        _observe(worker, part.kv_b, latents[:, : part.kv_lora])
        k, v = projections.expanded(latents, 0, part.heads)  # type: ignore[arg-type]  # tensors instead of arrays
        k, v = (x.transpose(0, 1).reshape(len(q), -1) for x in (k, v))
        heads = latent.full(part)
    else:
        _observe(worker, part.k_b, q[:, :, : part.nope])
        k, v, heads = latents, None, latent.absorbed(part)
    for span in spans:
        rows = slice(span.start, span.stop)
        worker.append_rows(k[rows], None if v is None else v[rows], span.cache, layer)
    attended: Any
    if not worker.mla:
        attended = worker.attend(heads, layer, q.reshape(len(q), -1), spans)
        result: torch.Tensor = attended
        return result
    if _expands(worker, projections, spans):
        parts = [_attend_expanded(worker, projections, layer, q[s.start : s.stop], s.cache) for s in spans]
        return parts[0] if len(parts) == 1 else worker.gpu.torch.cat(parts)
    attended = worker.attend(heads, layer, projections.queries(q), spans)  # type: ignore[arg-type]  # as above
    _observe(worker, part.v_b, attended.view(len(q), part.heads, -1))
    return projections.values(attended)  # type: ignore[return-value]  # as above


def _expands(worker: GpuContext, projections: latent.HeadProjections, spans: list[Span]) -> bool:
    """Whether keys and values are made of the latents: not for an observer of what the absorbed matrices get, nor
    where these are on another device, which would be sent all latents, nor where positions are selected."""
    return (
        worker.mla > 1 and not worker.observes and projections.is_local
        and all(s.selected is None for s in spans)
        and all(s.stop - s.start >= latent.EXPAND and s.cache.type.k in gpu_attention.TORCH_DTYPES for s in spans)
    )  # fmt: skip


def _attend_expanded(
    worker: GpuContext, projections: latent.HeadProjections, layer: int, q: torch.Tensor, cache: Cache
) -> torch.Tensor:
    """`attend` of one sequence by keys and values of all latents, some heads at a time, in the type of the cache."""
    part, library = projections.part, worker.gpu.torch
    first, count = cache.length, cache.length + len(q)
    latents: Any = cache.k[layer].view(getattr(library, gpu_attention.TORCH_DTYPES[cache.type.k]))[0, :count]
    step = max(1, EXPANDED // (2 * part.head_dim_k * count))
    attended = []
    for head in range(0, part.heads, step):
        k: Any
        v: Any
        k, v = projections.expanded(latents, head, min(head + step, part.heads))
        of_heads = q[:, head : head + step].transpose(0, 1)
        attended.append(gpu_attention.by_torch(worker, of_heads, k, v, first, None, part.scale))
    return attended[0] if len(attended) == 1 else library.cat(attended, dim=1)


def _observe(worker: GpuContext, linear: blocks.Linear | None, x: torch.Tensor) -> None:
    """Pass the observer the inputs of a matrix between latents and heads."""
    if worker.observes:
        latent.observe(worker, linear, worker.copy_to_cpu(x))
