"""Mixture-of-experts feed-forward on a GPU: routing, products of the selected experts, and offloaded experts.

Offloaded experts stay in the host's memory. For a small batch the CPU computes them while the GPU computes the shared
ones. For a large batch their matrices are copied to the GPU, one expert at a time (placement/offload.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from quantkit.archs.common import blocks
from quantkit.formats.gguf import Tensor
from quantkit.placement.devices import CPU
from quantkit.runtime.blocks import experts, float_linear
from quantkit.runtime.cuda.gpu_context import GpuContext
from quantkit.runtime.kernels.cuda import device as cuda_device

if TYPE_CHECKING:
    import torch

    from quantkit.runtime.kernels.cuda.staging import Staging

Product = Callable[["torch.Tensor"], "torch.Tensor"]


def _half(linear: blocks.Linear, y: torch.Tensor) -> torch.Tensor:
    """The outputs of a matrix among those of the tensor that holds it, which may be gate and up in one."""
    if linear.half is None:
        return y
    rows = y.shape[-1] // 2
    return y[..., linear.half * rows : (linear.half + 1) * rows].contiguous()


def routes_on_gpu(part: blocks.Experts) -> bool:
    """Whether the kernel can route: not with too many experts or groups, another gating, or a table of tokens."""
    from quantkit.runtime.kernels.cuda import routing

    fits = part.count <= routing.MAX_EXPERTS and part.groups <= routing.WARP
    return fits and part.gating in ("softmax", "sigmoid") and not part.table


class GpuExperts:
    """The experts of all layers that one GPU computes. Buffers for offloaded experts are shared by the layers."""

    def __init__(self, worker: GpuContext):
        self._worker = worker
        self._staging: Staging | None = None

    def route(
        self, part: blocks.Experts, logits: torch.Tensor, given: np.ndarray | None = None
    ) -> tuple[torch.Tensor | np.ndarray, torch.Tensor]:
        """Selected experts [tokens, used] and their weights float32[tokens, used] of router logits [tokens, count].

        Experts are int32 on the GPU. Where the kernel cannot route (`routes_on_gpu`, `-ser`), the CPU does, and they
        are an int64 numpy array. `given` int64[tokens, used] are those that a table has.
        """
        from quantkit.runtime.kernels.cuda import routing

        worker, tokens, used = self._worker, len(logits), part.used
        if worker.expert_reduction is not None or not routes_on_gpu(part):
            bias = float_linear.vector(worker.weights[part.choice_bias]) if part.choice_bias else None
            chosen, weights = experts.route(part, worker.copy_to_cpu(logits), worker.expert_reduction, bias, given)
            return chosen, worker.copy_from_cpu(weights)
        ids, shares = worker.gpu.empty(tokens, used, kind="int32"), worker.gpu.empty(tokens, used)
        bias_or_empty = worker.vector(part.choice_bias) if part.choice_bias else worker.gpu.empty(1)
        kernel = routing.route(part.gating == "sigmoid", part.choice_bias is not None)
        worker.gpu.launch(kernel, tokens, routing.WARP, logits.contiguous(), bias_or_empty, part.count, part.groups,
                          part.groups_used, used, int(part.normalise), np.float32(part.scale), ids, shares)  # fmt: skip
        return ids, shares

    def run(
        self, part: blocks.Experts, y: torch.Tensor, chosen: torch.Tensor | np.ndarray, weights: torch.Tensor
    ) -> torch.Tensor:
        """float32[tokens, n_embd]: the weighted sum of the selected experts, whose matrices are on this GPU."""
        from quantkit.runtime.kernels.cuda import elementwise

        worker, gpu, (tokens, used) = self._worker, self._worker.gpu, chosen.shape
        ids = gpu.array(chosen.astype(np.int32)) if isinstance(chosen, np.ndarray) else chosen
        weights = weights.masked_fill(ids < 0, 0).contiguous()
        for linear in part.matrices:
            matrices = worker.matrices(linear.weight)
            max_experts = min(matrices.count, ids.numel())  # how many are the same, only the GPU knows
            worker.ledger.read(worker.device.name, max_experts * matrices.nbytes)
        y = y.contiguous()
        entering = [self._of_experts(linear, y, ids) for linear in part.matrices[:-1]]
        gate, up = _half(part.gate, entering[0]), _half(part.up, entering[-1])
        if part.weighs_inputs:
            gate, up = (product * weights[:, :, None] for product in (gate, up))
            weights = (ids >= 0).float()
        hidden = worker.activate(part.activation, gate, up, part.limit)
        self._observe(part, y, ids, hidden)
        outputs = self._of_experts(part.down, hidden, ids).contiguous()
        out: torch.Tensor = gpu.torch.empty((tokens, outputs.shape[2]), device=gpu.torch_device)
        gpu.launch_each(elementwise.mix(), out.numel(), elementwise.THREADS, outputs, weights, used, out.shape[1],
                        tokens, out)  # fmt: skip
        return out

    def run_offloaded(
        self, part: blocks.Experts, y: torch.Tensor, chosen: np.ndarray, weights: torch.Tensor
    ) -> torch.Tensor:
        """`run` with matrices in the host's memory: the next expert is copied while this one is computed.

        Only `Staging.send` waits for the GPU within the loop, so that the host stays ahead of it.
        """
        worker, gpu = self._worker, self._worker.gpu
        tensors = [worker.weights[linear.weight] for linear in part.matrices]
        sizes = [tensor.nbytes // tensor.shape[0] for tensor in tensors]
        order = np.argsort(chosen, axis=None, kind="stable")[np.count_nonzero(chosen < 0) :]  # slots, expert by expert
        numbers, counts = np.unique(chosen[chosen >= 0], return_counts=True)
        slots = gpu.array(order)
        tokens, shares = slots // chosen.shape[1], weights.reshape(-1)[slots][:, None]
        staging = self._staging_of(sizes)

        def send(index: int) -> None:
            begin = [int(numbers[index]) * tensor.shape[1] for tensor in tensors]
            staging.send(index, [t._rows(first, first + t.shape[1]) for t, first in zip(tensors, begin)])
            worker.ledger.moved(CPU.name, worker.device.name, sum(sizes))

        out: torch.Tensor = gpu.torch.zeros(len(y), tensors[-1].shape[1], device=gpu.torch_device)
        stop = 0
        for index, number in enumerate(numbers):
            if not index:
                send(0)
            start, stop = stop, stop + int(counts[index])
            *entering, down = (
                self._staged_product(linear, tensor, data, int(number))
                for linear, tensor, data in zip(part.matrices, tensors, staging.get(index))
            )
            inputs, share = y[tokens[start:stop]], shares[start:stop]
            if part.weighs_inputs:
                inputs, share = inputs * share, gpu.torch.ones_like(share)
            products = [product(inputs) for product in entering]
            gate, up = _half(part.gate, products[0]), _half(part.up, products[-1])
            output = down(worker.activate(part.activation, gate, up, part.limit))
            out.index_add_(0, tokens[start:stop], output * share)
            staging.done(index)
            if index + 1 < len(numbers):
                send(index + 1)
        return out

    def product(self, linear: blocks.Linear, number: int) -> Product:
        """The product with one expert's matrix, which is on this GPU."""
        worker = self._worker
        matrices, bias = worker.matrices(linear.weight), worker.vector(linear.bias) if linear.bias else None
        scale = self._scale(linear, number)

        def run(x: torch.Tensor) -> torch.Tensor:
            torch = worker.gpu.torch
            ids = torch.full((len(x), 1), number, dtype=torch.int32, device=worker.gpu.torch_device)
            y = matrices.of_experts(x.contiguous(), ids, worker.exact)[:, 0]
            y = y if scale is None else y * scale
            return _half(linear, y if bias is None else y + bias.view(matrices.count, -1)[number])

        return run

    def _staging_of(self, sizes: list[int]) -> Staging:
        """Buffers for matrices of these sizes in bytes."""
        from quantkit.runtime.kernels.cuda.staging import Staging, size_of

        if self._staging is None or self._staging.nbytes < size_of(sizes):
            self._staging = Staging(self._worker.gpu, size_of(sizes))
        return self._staging

    def _staged_product(self, linear: blocks.Linear, tensor: Tensor, data: torch.Tensor, number: int) -> Product:
        """The product with an expert's matrix, whose bytes uint8 are on the GPU."""
        worker = self._worker
        matrix = cuda_device.Matrices(worker.gpu, data, tensor.type, tensor.shape[1], tensor.shape[2])
        bias = worker.vector(linear.bias).view(tensor.shape[0], -1)[number] if linear.bias else None
        scale = self._scale(linear, number)

        def run(x: torch.Tensor) -> torch.Tensor:
            y = matrix(x.contiguous(), worker.exact)
            y = y if scale is None else y * scale
            return y if bias is None else y + bias

        return run

    def _scale(self, linear: blocks.Linear, number: int) -> torch.Tensor | None:
        """The number that products with an expert's matrix are multiplied by; None for 1."""
        return self._worker.vector(linear.scale)[number] if linear.scale else None

    def _of_experts(self, linear: blocks.Linear, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """float32[tokens, used, rows]."""
        matrices = self._worker.matrices(linear.weight)
        y = matrices.of_experts(x, ids, self._worker.exact)
        if linear.scale is not None:
            y = y * self._worker.vector(linear.scale)[ids.long()][..., None]
        return y if linear.bias is None else y + self._worker.vector(linear.bias).view(matrices.count, -1)[ids.long()]

    def _observe(self, part: blocks.Experts, y: torch.Tensor, ids: torch.Tensor, hidden: torch.Tensor) -> None:
        """Pass the observer the inputs of each expert's matrices."""
        worker = self._worker
        if not worker.observes:
            return
        chosen, x, inner = (worker.copy_to_cpu(a) for a in (ids, y, hidden))
        for number in np.unique(chosen[chosen >= 0]):
            token, rank = np.nonzero(chosen == number)
            for linear in part.matrices:
                entering = inner[token, rank] if linear is part.down else x[token]
                worker.observe(linear.weight, entering, int(number), part.stacked)
