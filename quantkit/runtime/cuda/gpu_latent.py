"""Latent attention (archs.blocks.LatentAttention) on a GPU: `runtime/blocks/latent.py` with torch tensors."""

from __future__ import annotations

from typing import Any

from quantkit.archs.common import blocks
from quantkit.runtime.blocks import latent
from quantkit.runtime.cuda.gpu_context import GpuContext


class HeadProjections(latent.HeadProjections):
    """The matrices between latents and heads, head by head, on a GPU: a head is to them what an expert is to others."""

    def __init__(self, part: blocks.LatentAttention, worker: GpuContext):
        super().__init__(part, worker.weights, worker.threads)
        self._worker = worker

    def _heads(self, linear: blocks.Linear, rows: int, x: Any) -> Any:
        """float32[tokens, heads, rows] of x float32[tokens, heads, n], by the matrix of each head."""
        worker = self._worker
        matrices = worker.matrices(linear.weight, rows)  # of two dimensions: heads one after another
        torch, count = worker.gpu.torch, x.shape[1]
        ids = torch.arange(count, dtype=torch.int32, device=worker.gpu.place).repeat(len(x), 1)
        return matrices.of_experts(x.contiguous(), ids, worker.exact)

    def _both(self) -> tuple[Any, Any]:
        """k float32[heads, nope, kv_lora] and v [heads, head_dim_v, kv_lora], decoded."""
        part, worker = self.part, self._worker
        if part.kv_b is not None:
            whole = worker.matrices(part.kv_b.weight).decoded(exact=True).view(part.heads, -1, part.kv_lora)
            return whole[:, : part.nope], whole[:, part.nope :]
        assert part.k_b is not None
        assert part.v_b is not None
        k, v = (worker.matrices(linear.weight) for linear in (part.k_b, part.v_b))
        stack = worker.gpu.torch.cat
        k, v = (stack([m.decoded(matrix=i, exact=True) for i in range(m.count)]) for m in (k, v))
        return k.view(part.heads, part.kv_lora, part.nope).transpose(1, 2), v.view(part.heads, -1, part.kv_lora)

    @property
    def _pair(self) -> bool:
        return self.part.k_b is not None and self.part.v_b is not None

    def queries(self, q: Any) -> Any:
        part, torch = self.part, self._worker.gpu.torch
        plain = q[:, :, : part.nope]
        if self._pair:
            assert part.k_b is not None
            made = self._heads(part.k_b, part.kv_lora, plain)
        else:
            made = torch.einsum("thn,hnl->thl", plain, self._both()[0])
        return torch.cat([made, q[:, :, part.nope :]], dim=2).reshape(len(q), -1)

    def values(self, attended: Any) -> Any:
        part, torch = self.part, self._worker.gpu.torch
        latents = attended.view(-1, part.heads, part.kv_lora)
        if self._pair:
            assert part.v_b is not None
            made = self._heads(part.v_b, part.head_dim_v, latents)
        else:
            made = torch.einsum("thl,hvl->thv", latents, self._both()[1])
        return made.reshape(len(latents), -1)

    def expanded(self, latents: Any, first: int, stop: int) -> Any:
        part, torch = self.part, self._worker.gpu.torch
        k, v = (x[first:stop] for x in self._both())
        c, turned = latents[:, : part.kv_lora], latents[:, part.kv_lora :]
        keys = torch.einsum("tl,hnl->htn", c, k)
        return torch.cat([keys, turned.expand(stop - first, -1, -1)], dim=2), torch.einsum("tl,hvl->htv", c, v)
