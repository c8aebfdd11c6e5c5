"""One token through blocks on a GPU by few launches: steps between products are fused (`kernels/cuda/fused.py`).

The hidden state goes from part to part as a sum of two, x and what the last part adds; the next norm adds them up. What
enters products is there as bytes once for all of them, and neighbouring matrices of one type are multiplied as one.
Parts that the kernels do not know run as with any number of tokens.

    part            launches
    attention       add_norm, q k v, rope_append, attend, merge, out
    feed-forward    add_norm, gate up, activate, down
    experts on      add_norm, router, route, copies of what they get to the host; meanwhile shared experts, or the rest
    the CPU         of the block where it adds them at its end; a copy of what they make
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from quantkit.archs.common import blocks
from quantkit.placement.devices import CPU
from quantkit.runtime.blocks.float_attention import Heads
from quantkit.runtime.blocks.spans import Span
from quantkit.runtime.cuda import gpu_attention
from quantkit.runtime.cuda.gpu_context import GpuContext
from quantkit.runtime.kernels.cuda import attention, elementwise, fused
from quantkit.runtime.kernels.cuda.device import Activations

if TYPE_CHECKING:
    import torch


class Decoder:
    """One token of one cache through blocks.

    x         the hidden state so far, [1, n_embd], less what `added` holds
    deferred  what experts add at the end of the block
    """

    def __init__(self, worker: GpuContext, x: torch.Tensor, span: Span):
        self._worker, self._gpu, self._span = worker, worker.gpu, span
        self.x: torch.Tensor = x
        self.added: torch.Tensor | None = None
        self.deferred: torch.Tensor | None = None

    def run_block(self, block: blocks.Block) -> None:
        """Add a block that is not taken apart."""
        self.x, self.added = self._worker.run_block(block, self.sum(), [self._span]), None

    def run_part(self, layer: int, part: blocks.Part) -> None:
        """Add a part of a block."""
        if isinstance(part, blocks.Attention) and self._knows_attention(part):
            self.added = self._attention(part, layer, self._normed(part.norm))
        elif isinstance(part, blocks.FeedForward) and self._knows_feed_forward(part):
            self.added = self._feed_forward(part, self._normed(part.norm))
        else:
            self._add(part, self._worker.run_part(part, layer, self.sum(), [self._span]))

    def end_block(self) -> None:
        """Add what experts have deferred."""
        if self.deferred is not None:
            self.x, self.added, self.deferred = self.sum(), self.deferred, None

    def _add(self, part: blocks.Part, out: torch.Tensor) -> None:
        """Add what a part makes of `sum`, now or at the end of the block."""
        if isinstance(part, blocks.Experts) and part.deferred:
            self.deferred = out
        else:
            self.added = out

    def send(self, experts: HostExperts) -> None:
        """Route, and copy to the host what the experts there get."""
        worker, part = self._worker, experts.part
        experts.y = y = self._normed(part.norm)
        chosen, weights = worker.route(part, worker.linear(part.router, y.x))
        experts.send(y.x, chosen, weights)

    def run_shared(self, experts: HostExperts) -> None:
        """The shared experts of what `send` has normed."""
        worker, part, y = self._worker, experts.part, experts.y
        assert part.shared is not None
        known = self._knows_feed_forward(part.shared)
        out = self._feed_forward(part.shared, y) if known else worker.gated(part.shared, y.x)
        gate = part.shared_gate
        experts.shared = out if gate is None else out * worker.sigmoid(y.x @ worker.vector(gate))[:, None]

    def receive(self, experts: HostExperts) -> None:
        """Add what the experts on the host made, and the shared ones."""
        out = experts.received()
        out = out if experts.shared is None else out + experts.shared
        self._add(experts.part, self._worker.norm(experts.part.post_norm, out))

    def sum(self) -> torch.Tensor:
        """The hidden state float32[1, n_embd]; afterwards nothing is left to be added."""
        if self.added is not None:
            self.x, self.added = self.x + self.added, None
        return self.x

    def logits(self, head: blocks.Head) -> torch.Tensor:
        """float32[1, vocab]."""
        if is_plain(head.norm) and self._worker.weights[head.output.weight].shape[1] % 32 == 0:
            return self._products([head.output], self._normed(head.norm))[0]
        result: torch.Tensor = self._worker.linear(head.output, self._worker.norm(head.norm, self.sum()))
        return result

    # ----------------------------------------------------------------------------------------------- what kernels know

    def _knows_attention(self, part: blocks.Attention) -> bool:
        """Whether `_attention` can run a part."""
        kind, norms = self._span.cache.type, (part.q_norm, part.k_norm)
        normed = all(map(is_plain, norms)) and part.q_norm.eps == part.k_norm.eps  # type: ignore[union-attr]
        heads = norms == (None, None) or (normed and not part.norms_across_heads and not part.norms_after_rope)
        others = (part.v_norm, part.sub_norm, part.head_gate, part.temperature, part.source, part.indexer)
        whole = all(linear.rows is None for linear in (part.q, part.k, part.v, part.out))
        return (
            is_plain(part.norm) and heads and whole and not part.gated and part.v != part.k
            and all(other is None for other in others)
            and part.head_dim_v % 32 == 0 and self._columns(part.q) % 32 == 0
            and {kind.k, kind.v} <= set(attention.WRITTEN)
        )  # fmt: skip

    def _knows_feed_forward(self, part: blocks.FeedForward) -> bool:
        """Whether `_feed_forward` can run a part."""
        matrices = part.gate, part.up, part.down
        return (
            is_plain(part.norm) and part.sub_norm is None and part.limit is None
            and part.activation in elementwise.ACTIVATIONS and part.gate != part.up
            and all(linear.rows is None and self._columns(linear) % 32 == 0 for linear in matrices)
        )  # fmt: skip

    def _columns(self, linear: blocks.Linear) -> int:
        return int(self._worker.weights[linear.weight].shape[-1])

    # ------------------------------------------------------------------------------------------------------- the parts

    def _attention(self, part: blocks.Attention, layer: int, y: Activations) -> torch.Tensor:
        worker, gpu, cache = self._worker, self._gpu, self._span.cache
        q, k, v = self._products([part.q, part.k, part.v], y)
        rope = worker.rope_table(part.rope, [self._span])
        position = worker.next_positions(cache, 1)
        keys, values = cache.k[layer], cache.v[layer]
        normed = part.q_norm is not None
        weights = [worker.norm_weight(n, part.head_dim_k) if n else gpu.empty(1) for n in (part.q_norm, part.k_norm)]
        kernel = fused.rope_append(cache.type.k, cache.type.v, part.head_dim_k, part.head_dim_v, normed)
        gpu.launch(
            kernel, part.heads + 2 * part.kv_heads, fused.WARP, q, k, v, *weights,
            np.float32(part.q_norm.eps if part.q_norm else 0), part.heads, rope.pairs, rope.cos, rope.sin, position,
            rope.step, rope.stride, keys.shape[1], keys.shape[2], values.shape[2], keys, values,
        )  # fmt: skip
        heads = Heads.of(part, worker.vector(part.sinks) if part.sinks else None)  # type: ignore[arg-type]
        attended = gpu_attention.attend_one(worker, heads, layer, q, cache)
        return self._added(part.out, part.post_norm, attended)

    def _feed_forward(self, part: blocks.FeedForward, y: Activations) -> torch.Tensor:
        gate, up = self._products([part.gate, part.up], y)
        hidden = self._gpu.activations(gate)
        count = gate.numel()
        self._gpu.launch_each(fused.activate(part.activation), count, fused.THREADS, gate, up, count, *hidden.as_bytes)
        return self._added(part.down, part.post_norm, hidden)

    def _added(self, linear: blocks.Linear, post_norm: blocks.Norm | None, a: Activations) -> torch.Tensor:
        """What a part adds: its last product, and a norm of that."""
        (out,) = self._products([linear], a)
        return out if post_norm is None else self._worker.norm(post_norm, out)

    def _normed(self, norm: blocks.Norm | None) -> Activations:
        """The norm of x + added, of which x becomes the sum."""
        assert norm is not None
        worker, gpu, n = self._worker, self._gpu, self.x.shape[-1]
        total, y = gpu.empty(1, n), gpu.activations(gpu.empty(1, n))
        added = self.x if self.added is None else self.added
        kernel, threads = fused.add_norm(fused.norm_loads(n)), fused.norm_threads(n)
        gpu.launch(kernel, 1, threads, self.x.contiguous(), added.contiguous(), int(self.added is not None),
                   worker.norm_weight(norm, n), n, np.float32(norm.eps), total, y.x, y.codes.view(gpu.torch.int32),
                   y.scales, y.sums)  # fmt: skip
        self.x, self.added = total, None
        return y

    def _products(self, linears: Sequence[blocks.Linear], a: Activations) -> list[torch.Tensor]:
        """float32[1, rows] of each matrix with one vector. Neighbours of one type are one product."""
        worker, weights = self._worker, self._worker.weights
        heights = [weights[linear.weight].shape[0] for linear in linears]
        out, at = self._gpu.empty(1, sum(heights)), 0
        for _, group in itertools.groupby(linears, lambda linear: weights[linear.weight].type.name):
            matrices = worker.stacked(tuple(linear.weight for linear in group))
            matrices.multiply(a, out[:, at : at + matrices.rows])
            at += matrices.rows
        results = []
        for linear, y in zip(linears, self._gpu.torch.split(out, heights, dim=1)):
            scale, bias = worker.scale_and_bias(linear)
            y = y if scale == 1 else y * scale
            results.append(y if bias is None else y + bias)
        return results


class HostExperts:
    """The routed experts of a block on the CPU: memory of the host, which the GPU reads and writes by itself.

    y         what enters the experts, on the GPU
    shared    float32[1, n_embd] of the shared experts there; None without
    entering  the same, the numbers of the experts and their weights, on the host
    out       float32[1, n_embd] on the host
    """

    y: Activations
    shared: torch.Tensor | None = None

    def __init__(self, worker: GpuContext, part: blocks.Experts, n_embd: int):
        self.part, self._worker = part, worker
        gpu, used = worker.gpu, part.used
        sizes = n_embd, used, used, n_embd
        memory = [gpu.pinned(4 * n).view(gpu.torch.float32).view(1, n) for n in sizes]
        self._sent, self._made = (memory[0], memory[1].view(gpu.torch.int32), memory[2]), memory[3]
        self._results = gpu.empty(1, n_embd)
        x, chosen, weights = self.entering = tuple(tensor.numpy() for tensor in self._sent)
        self.out: np.ndarray = self._made.numpy()
        self._nbytes = sum(array.nbytes for array in self.entering)
        self._compute = worker.host.prepared_experts(part, x, chosen, weights, self.out)

    def send(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> None:
        """Copy them to the host, when the GPU comes to it."""
        for host, there in zip(self._sent, (x, chosen, weights)):
            host.copy_(there, non_blocking=True)

    def run(self) -> None:
        """Compute on the host what was sent; the copies have ended."""
        self._compute()
        ledger, device = self._worker.ledger, self._worker.device.name
        ledger.moved(device, CPU.name, self._nbytes)
        ledger.moved(CPU.name, device, self.out.nbytes)

    def received(self) -> torch.Tensor:
        """Copy the results to the GPU, when it comes to it: float32[1, n_embd]."""
        self._results.copy_(self._made, non_blocking=True)
        return self._results


def is_taken_apart(block: blocks.Block) -> bool:
    """Whether the parts of a block run one after another, each with the sum of those before it, or but for one part
    that is added at the end."""
    deferred = [part for part in block.parts if isinstance(part, blocks.Experts) and part.deferred]
    return not (block.parallel or block.out_scale is not None or block.hyper or len(deferred) > 1)


def can_leave_to_host(part: blocks.Experts) -> bool:
    """Whether the GPU can compute a block whose routed experts are on the CPU, without anything else there."""
    shared = part.shared is None or part.shared.norm == part.norm
    others = (part.router_norm, part.routed_norm, part.latent_down, part.latent_up, part.table)
    return shared and is_plain(part.norm) and all(other is None for other in others)


def is_plain(norm: blocks.Norm | None) -> bool:
    """Whether `fused.add_norm` computes a norm."""
    return norm is not None and norm.weight != "" and not norm.centred and norm.bias is None
