"""Latent attention (archs.blocks.LatentAttention) on a GPU: `runtime/blocks/latent.py` with torch tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quantkit.archs.common import blocks
from quantkit.runtime.blocks import latent
from quantkit.runtime.blocks.spans import Span
from quantkit.runtime.cuda.gpu_context import GpuContext

if TYPE_CHECKING:
    import torch


class GpuHeadProjections(latent.HeadProjections):
    """The matrices between latents and heads on a GPU. Heads are multiplied as experts are: `Matrices.of_experts`."""

    def __init__(self, part: blocks.LatentAttention, worker: GpuContext):
        super().__init__(part, worker.weights, worker.threads)
        self._worker = worker

    def _heads(self, linear: blocks.Linear, rows: int, x: Any) -> Any:
        """float32[tokens, heads, rows] of x float32[tokens, heads, n], by the matrix of each head."""
        worker = self._worker
        matrices = worker.matrices(linear.weight, rows)  # of two dimensions: heads one after another
        torch, count = worker.gpu.torch, x.shape[1]
        ids = torch.arange(count, dtype=torch.int32, device=worker.gpu.torch_device).repeat(len(x), 1)
        return matrices.of_experts(x.contiguous(), ids, worker.exact)

    def _decoded_heads(self) -> tuple[Any, Any]:
        """k float32[heads, nope, kv_lora] and v [heads, head_dim_v, kv_lora], decoded."""
        part, worker = self.part, self._worker
        if part.kv_b is not None:
            stacked = worker.matrices(part.kv_b.weight).decoded(exact=True).view(part.heads, -1, part.kv_lora)
            return stacked[:, : part.nope], stacked[:, part.nope :]
        assert part.k_b is not None
        assert part.v_b is not None
        k, v = (worker.matrices(linear.weight) for linear in (part.k_b, part.v_b))
        stack = worker.gpu.torch.cat
        k, v = (stack([m.decoded(matrix=i, exact=True) for i in range(m.count)]) for m in (k, v))
        return k.view(part.heads, part.kv_lora, part.nope).transpose(1, 2), v.view(part.heads, -1, part.kv_lora)

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
        """As `latent.HeadProjections.expanded`, of tensors."""
        part, torch = self.part, self._worker.gpu.torch
        k, v = (x[first:stop] for x in self._decoded_heads())
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
    q = worker.linear(part.q, q).view(len(x), part.heads, part.head_dim_k)
    rotated = q[:, :, part.nope :].reshape(len(x), -1).contiguous()
    worker.apply_rope(rotated, part.rope, part.rope.dim, spans)
    q = cat([q[:, :, : part.nope], rotated.view(len(x), part.heads, -1)], dim=2)
    if part.temperature is not None:
        worker.scale_queries(q.view(len(x), -1), part.temperature, spans)
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

    All `mla` but 0 attend over latents, also for long prompts, where `latent.attend` makes keys and values of them.
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
    attended = worker.attend(heads, layer, projections.queries(q), spans)  # type: ignore[arg-type]  # as above
    _observe(worker, part.v_b, attended.view(len(q), part.heads, -1))
    return projections.values(attended)  # type: ignore[return-value]  # as above


def _observe(worker: GpuContext, linear: blocks.Linear | None, x: torch.Tensor) -> None:
    """Pass the observer the inputs of a matrix between latents and heads."""
    if worker.observes:
        latent.observe(worker, linear, worker.copy_to_cpu(x))
