"""What a GPU computes of a model over several devices: the parts of blocks, by the kernels of `kernels/cuda`.

A CudaWorker is a Worker whose arrays are torch tensors on its GPU: activations, vectors, keys and values, states of
recurrent layers, and packed weights, which are copied there when a layer first runs. Its operations are those of
`block_runner.BlockRunner`, one by one; only what each array is, and which kernel makes it, differs. Numerics:

    exact   weights decoded to float32, tile by tile, and multiplied in float32
    fast    up to 8 tokens from packed weights with activations as bytes, more as bfloat16 (`kernels/cuda/device.py`)

A token after others goes through neighbouring layers as one CUDA graph where it can (`runtime/cuda/cuda_graph.py`),
but not where GPUs share layers (`runtime/parallel/rank.py`).

Prompts attend over caches of floats by torch, in the cache's type; a few tokens, and other caches, by `kernels/cuda`.
Experts on the CPU run there, while shared ones run here; for large batches they are copied here, one by one, and run
here (placement/offload.py).
Rows of embeddings are gathered on the CPU. What a GPU has no kernel for is refused before anything is read: by
`with_memory` where there is no GPU, by the constructor for types of weights, by `require_cache` for caches.
"""

from __future__ import annotations

import contextlib
import functools
import re
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from quantkit.archs.common import blocks
from quantkit.errors import UnsupportedError
from quantkit.formats.gguf import Tensor
from quantkit.placement.devices import CPU, Device
from quantkit.runtime.blocks import experts, float_linear, float_ops, latent
from quantkit.runtime.blocks.block_runner import BlockRunner
from quantkit.runtime.blocks.float_attention import Heads
from quantkit.runtime.blocks.spans import Span
from quantkit.runtime.kernels.cuda import device as cuda_device
from quantkit.runtime.kernels.cuda.dispatch import product
from quantkit.runtime.kv.cache_type import CacheType
from quantkit.runtime.parallel.worker import Context, Worker

if TYPE_CHECKING:
    import torch

    from quantkit.placement.rules import Placement
    from quantkit.runtime.cuda.cuda_graph import CapturedStep
    from quantkit.runtime.kernels.cuda.device import Gpu, Matrices
    from quantkit.runtime.kernels.cuda.staging import Staging

KEYS_OF_SHARE = 128  # of attention: a share of the keys is at least so long
BLOCKS = 512  # of attention: so many are enough for a GPU
OF_TORCH = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}  # caches that torch attends over


@functools.cache
def gpu(index: int) -> Gpu:
    """The GPU of a number, opened once. UnsupportedError, one line, where there is none."""
    return cuda_device.Gpu(index)


def with_memory(device: Device) -> Device:
    """A device; a GPU with the memory that is free there, unless its memory was said."""
    if device.gpu is None:
        return device
    found = gpu(device.gpu)
    return replace(device, memory=found.free_bytes()) if device.memory is None else device


class CudaWorker(Worker):
    """What one GPU computes.

    gpu   the kernels' host side
    """

    def __init__(self, device: Device, split: Context, owner: BlockRunner, threads: int):
        super().__init__(device, split, owner, threads)
        assert device.gpu is not None
        self.gpu = gpu(device.gpu)
        self.place, self.hardware = self.gpu.place, self.gpu.name
        self.exact = self.numerics == "exact"
        self._matrices: dict[str, Matrices] = {}
        self._staging: Staging | None = None
        self._ropes: dict[blocks.Rope, tuple[Any, torch.Tensor, torch.Tensor]] = {}
        self._at: tuple[Any, Any] = None, None
        self._captured_position: tuple[torch.Tensor, int] | None = None  # tensor, n_ctx
        self._steps: weakref.WeakKeyDictionary[Any, dict[int, CapturedStep | None]] = weakref.WeakKeyDictionary()
        self._require_kernels(split.placement)

    def _require_kernels(self, placement: Placement) -> None:
        """UnsupportedError for a tensor of this device, or one that it shares, of a type without kernels."""
        for name, tensor in self.weights.items():
            shared = name in placement.sliced and self.device in placement.graph
            if (shared or placement[name] == self.device) and len(tensor.shape) > 1 and not product(tensor.type):
                raise UnsupportedError(
                    f"{self.path}: {name} is {tensor.type.name}, for which {self.device.name} has no kernels; keep "
                    f"such tensors on the CPU by a first rule -ot '^{re.escape(name)}$={CPU.name}'"
                    + (", and take -sm layer" if shared else "")
                )

    # ------------------------------------------------------------------------------------------------ arrays, transfers

    def receive(self, x: Any, source: Worker) -> Any:
        return x.to(self.gpu.place) if isinstance(source, CudaWorker) else self.gpu.array(x)

    def to_host(self, x: Any) -> np.ndarray:
        found: np.ndarray = x.to("cpu", copy=True).numpy()
        return found

    def zeros(self, shape: tuple[int, ...], kind: str) -> torch.Tensor:
        return self.gpu.zeros(shape, kind)

    def bind_thread(self) -> None:
        self.gpu.bind_thread()

    def synchronize(self) -> None:
        if self._split.profile:
            self.gpu.synchronize()

    def vector(self, name: str) -> Any:
        """float32[n] on the GPU."""
        found: Any = self._vectors.get(name)
        if found is None:
            found = self._vectors[name] = self.gpu.array(float_linear.vector(self.weights[name]))  # type: ignore[assignment]
        return found

    def drop_cached(self, names: Any) -> None:
        names = list(names)
        super().drop_cached(names)
        for name in names:
            self._matrices.pop(name, None)
        self._steps.clear()

    def matrices(self, name: str, rows: int | None = None) -> Matrices:
        """A tensor of two dimensions, or three, on the GPU; of so many rows each where its shape does not say."""
        found = self._matrices.get(name)
        if found is None or (rows or found.rows) != found.rows:
            tensor = self.weights[name]
            data, (height, n) = tensor.data, tensor.shape[-2:]
            found = self._matrices[name] = self.gpu.matrices(data, tensor.type, rows or height, n)
        return found

    @property
    def _host(self) -> Worker:
        return self._split.worker(CPU)

    def _launch(self, kernel: Any, count: int, threads: int, *arguments: Any) -> None:
        """A kernel that has a thread for each of `count` elements."""
        self.gpu.launch(kernel, -(-count // threads), threads, *arguments)

    # --------------------------------------------------------------------------------------- steps that are replayed

    def can_capture(self, block: blocks.Block) -> bool:
        from quantkit.runtime.cuda import cuda_graph

        latent_cache = self.mla > 0 or not any(isinstance(part, blocks.LatentAttention) for part in block.parts)
        return (
            latent_cache
            and self.tripwire != "full"
            and self._split.attends(block.layer, self) is self
            and all(self._of(name) is self for name in self._split.names(block))
            and all(cuda_graph.can_capture(part, self.exact) for part in block.parts)
        )

    def can_replay(self, layers: Sequence[blocks.Block], cache: Any) -> bool:
        if self.observer is not None or self._checking or self.expert_reduction is not None:
            return False
        steps, first = self._steps.setdefault(cache, {}), layers[0].layer
        if first not in steps:
            steps[first] = None
            return False
        return True

    def replay(self, layers: Sequence[blocks.Block], x: Any, cache: Any) -> Any:
        from quantkit.runtime.cuda.cuda_graph import CapturedStep

        steps, first = self._steps[cache], layers[0].layer
        step = steps[first]
        if step is None:
            step = steps[first] = CapturedStep(self, layers, x, cache)
        return step.replay(x, cache.length)

    @contextlib.contextmanager
    def reading_position(self, position: torch.Tensor, n_ctx: int) -> Iterator[None]:
        """Work on one token whose position is read from memory, below n_ctx."""
        self._captured_position = position, n_ctx
        try:
            yield
        finally:
            self._captured_position = None

    def rope_tables(self) -> list[Any]:
        """What rope reads."""
        return list(self._ropes.values())

    # ------------------------------------------------------------------------------------------- what stands in between

    def rms_norm(self, x: Any, norm: blocks.Norm) -> Any:
        from quantkit.runtime.kernels.cuda import elementwise

        x, weight = x.contiguous(), self.vector(norm.weight)
        out, n = self.gpu.torch.empty_like(x), x.shape[-1]
        self.gpu.launch(elementwise.rms_norm(), x.numel() // n, elementwise.THREADS, x, weight, n,
                        np.float32(norm.eps), out)  # fmt: skip
        return out

    def activate(self, name: str, gate: Any, up: Any) -> Any:
        from quantkit.runtime.kernels.cuda import elementwise

        if name not in elementwise.ACTIVATIONS:  # relu2
            assert name == "relu2"
            return gate.relu().square() * up
        gate, up = gate.contiguous(), up.contiguous()
        self._launch(elementwise.activate(name), gate.numel(), elementwise.THREADS, gate, up, gate.numel())
        return gate

    def sigmoid(self, x: Any) -> Any:
        return x.sigmoid()

    def without_gates(self, projected: Any, heads: int) -> Any:
        both = projected.view(len(projected), heads, 2, -1)
        return both[:, :, 0].reshape(len(projected), -1).contiguous()

    def apply_gates(self, x: Any, projected: Any, dim: int) -> None:
        gates = projected.view(len(x), -1, 2, dim)[:, :, 1]
        x.mul_(gates.reshape(len(x), -1).sigmoid())

    def scale_queries(self, q: Any, temperature: tuple[float, int], spans: list[Span]) -> None:
        factors = np.ones((len(q), 1), np.float32)
        float_ops.scale_queries(factors, *temperature, spans)
        q.mul_(self.gpu.array(factors))

    def apply_rope(self, x: Any, rope: blocks.Rope, dim: int, spans: list[Span]) -> None:
        from quantkit.runtime.kernels.cuda import elementwise

        positions, most = self._positions(spans)
        host = self._rope(rope, most + 1)
        held = self._ropes.get(rope)
        if held is None or held[0] is not host:
            cos, sin = map(self.gpu.array, host)
            held = self._ropes[rope] = host, cos, sin
        pairs, heads = host[0].shape[1], x.shape[1] // dim
        step, stride = (2, 1) if rope.style == "norm" else (1, pairs)
        self._launch(elementwise.rope(), len(x) * heads * pairs, elementwise.THREADS, x, heads, dim, pairs, held[1],
                     held[2], positions, step, stride, len(x))  # fmt: skip

    def _positions(self, spans: list[Span]) -> tuple[torch.Tensor, int]:
        """int32[tokens] on the GPU, and the most they can be; the same ones are asked for in every layer."""
        if self._captured_position is not None:
            return self._captured_position[0], self._captured_position[1] - 1
        of = tuple((span.cache.length, span.stop - span.start) for span in spans)
        if self._at[0] != of:
            found = np.concatenate([first + np.arange(count, dtype=np.int32) for first, count in of])
            self._at = of, (self.gpu.array(found), int(found.max()))
        at: tuple[torch.Tensor, int] = self._at[1]
        return at

    def _places(self, cache: Any, tokens: int) -> torch.Tensor:
        """The positions of tokens that a cache gets next."""
        if self._captured_position is not None:
            return self._captured_position[0]
        torch = self.gpu.torch
        return torch.arange(cache.length, cache.length + tokens, dtype=torch.int32, device=self.gpu.place)

    def is_finite(self, y: Any) -> bool:
        return super().is_finite(y) if isinstance(y, np.ndarray) else self.tripwire == "off" or bool(y.isfinite().all())

    def _require_finite(self, what: str, y: Any) -> None:
        if not self.is_finite(y):
            super()._require_finite(what, self.to_host(y))

    def observe(self, name: str, x: Any, *which: int) -> None:
        if self.observer is not None and not self._checking:
            super().observe(name, x if isinstance(x, np.ndarray) else self._host.fetch(x, self), *which)

    # ------------------------------------------------------------------------------------------------------- products

    def _weight(self, linear: blocks.Linear) -> Any:
        found: Any = self._linears.get(linear.weight)
        if found is None:
            found = self._linears[linear.weight] = self._product(linear, self.matrices(linear.weight))
        return found

    def _product(self, linear: blocks.Linear, matrices: Matrices) -> Any:
        bias = self.vector(linear.bias) if linear.bias else None
        scale = float(float_linear.vector(self.weights[linear.scale])[0]) if linear.scale else 1.0

        def run(x: Any) -> Any:
            y = matrices(x.contiguous(), self.exact)
            y = y if scale == 1 else y * scale
            return y if bias is None else y + bias

        return run

    # ------------------------------------------------------------------------------------------------------ attention

    def require_cache(self, kind: CacheType, heads: int, dim_k: int, dim_v: int) -> None:
        from quantkit.runtime.kernels.cuda import attention

        if any(kind.rotations(dim_k, dim_v)):
            raise UnsupportedError(
                f"{self.device.name}: caches on a GPU are not rotated in this version; leave -khad and -vhad out, or "
                "keep the cache on the CPU (-nkvo)"
            )
        attention.check((kind.k, kind.v if dim_v else kind.k), (dim_k, dim_v or dim_k))
        for name in (kind.k, kind.v) if dim_v else (kind.k,):
            attention.remember(name)

    def append_rows(self, k: Any, v: Any, cache: Any, layer: int) -> None:
        from quantkit.runtime.kernels.cuda import attention

        kinds = (cache.type.k, cache.type.v)
        for x, into, kind in zip((k, v), (cache.k[layer], cache.v[layer]), kinds):
            if x is None:
                continue
            (heads, n_ctx, row_bytes), tokens = into.shape, len(x)
            dim = x.shape[1] // heads
            positions = self._places(cache, tokens)
            warps = tokens * heads * -(-dim // 32)
            self._launch(attention.remember(kind), 32 * warps, attention.THREADS, x.contiguous(), heads, dim,
                         row_bytes, n_ctx, positions, tokens, into)  # fmt: skip

    def attend(self, heads: Heads, layer: int, q: Any, spans: list[Span], attention: Any = None) -> Any:
        with self._timed("attention"):
            parts = [self._attended(heads, layer, q[span.start : span.stop], span.cache) for span in spans]
            return parts[0] if len(parts) == 1 else self.gpu.torch.cat(parts)

    def _attended(self, part: Heads, layer: int, q: Any, cache: Any) -> Any:
        """float32[tokens, heads * head_dim_v] of one sequence."""
        from quantkit.runtime.kernels.cuda import attention

        plain = part.sinks is None and not part.values_in_keys
        if plain and len(q) > cuda_device.FEW and {cache.type.k, cache.type.v} <= OF_TORCH.keys():
            return self._attended_by_torch(part, layer, q, cache)
        tokens, group, gpu = len(q), part.heads // part.kv_heads, self.gpu
        k, v = cache.k[layer], cache.k[layer] if part.values_in_keys else cache.v[layer]
        v_kind = cache.type.k if part.values_in_keys else cache.type.v
        kernel = attention.attend(cache.type.k, v_kind, part.head_dim_k, part.head_dim_v, part.values_in_keys)
        most = cache.length + tokens if self._captured_position is None else self._captured_position[1]
        rows, seen = tokens * group, min(most, (part.window or cache.n_ctx) + tokens)
        tiles = -(-rows // attention.ROWS)
        shares = max(1, min(-(-seen // KEYS_OF_SHARE), BLOCKS // (tiles * part.kv_heads)))
        positions = self._places(cache, tokens)
        top, total = (gpu.empty(shares, part.kv_heads, rows) for _ in range(2))
        acc = gpu.empty(shares, part.kv_heads, rows, part.head_dim_v)
        gpu.launch(
            kernel, (shares, tiles, part.kv_heads), attention.threads_of(part.head_dim_v), q.contiguous(), k, v,
            k.shape[2], v.shape[2], k.shape[1], part.heads, group, tokens, positions, part.window or cache.n_ctx,
            np.float32(part.scale), shares, top, total, acc,
        )  # fmt: skip
        out = gpu.empty(tokens, part.heads * part.head_dim_v)
        sinks = gpu.empty(1) if part.sinks is None else part.sinks
        gpu.launch(attention.combine(part.sinks is not None), (rows, part.kv_heads), attention.THREADS, top, total,
                   acc, shares, part.heads, group, tokens, part.head_dim_v, sinks, out)  # fmt: skip
        return out

    def _attended_by_torch(self, part: Heads, layer: int, q: Any, cache: Any) -> Any:
        """The same of many tokens over a cache of floats: torch's kernels use tensor cores."""
        torch, tokens, first = self.gpu.torch, len(q), cache.length
        seen, group = first + tokens, part.heads // part.kv_heads
        stored = (cache.k[layer], cache.type.k), (cache.v[layer], cache.type.v)
        k, v = (x.view(getattr(torch, OF_TORCH[kind]))[None, :, :seen] for x, kind in stored)
        k, v = (x.to(k.dtype).repeat_interleave(group, dim=1) for x in (k, v))
        q = q.view(tokens, part.heads, -1).transpose(0, 1)[None].to(k.dtype)
        mask, window = None, part.window or seen
        if first or window < tokens:
            behind = torch.arange(first, seen, device=self.gpu.place)[:, None]
            behind = behind - torch.arange(seen, device=self.gpu.place)
            mask = (behind >= 0) & (behind < window)
        attention = torch.nn.functional.scaled_dot_product_attention
        found = attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=part.scale)
        return found[0].transpose(0, 1).reshape(tokens, -1).float()

    # ------------------------------------------------------------------------------------------- other kinds of parts

    def delta_net(self, part: blocks.DeltaNet, layer: int, x: Any, spans: list[Span]) -> Any:
        from quantkit.runtime.cuda import gpu_recurrent

        return gpu_recurrent.delta_net(self, part, layer, x, spans)

    def latent_attention(self, part: blocks.LatentAttention, layer: int, x: Any, spans: list[Span]) -> Any:
        """`latent.attention` of tensors."""
        cat = self.gpu.torch.cat
        q = y = self.norm(part.norm, x)
        if part.q_a is not None and part.q_a_norm is not None:
            q = self.norm(part.q_a_norm, self.linear(part.q_a, y))
        heads: Any = self.linear(part.q, q)
        q = heads.view(len(x), part.heads, part.head_dim_k)
        turned = q[:, :, part.nope :].reshape(len(x), -1).contiguous()
        self.apply_rope(turned, part.rope, part.rope.dim, spans)
        q = cat([q[:, :, : part.nope], turned.view(len(x), part.heads, -1)], dim=2)
        kv: Any = self.linear(part.kv_a, y)
        c = self.norm(part.kv_a_norm, kv[:, : part.kv_lora].contiguous())
        r = kv[:, part.kv_lora :].contiguous()
        self.apply_rope(r, part.rope, part.rope.dim, spans)
        y = self.attend_latents(part, layer, q, cat([c, r], dim=1), spans)
        self.check(f"attention of blk.{layer} over a cache of {spans[0].cache.cache_type}", y)
        return self.linear(part.out, y)

    def attend_latents(self, part: blocks.LatentAttention, layer: int, q: Any, latents: Any, spans: list[Span]) -> Any:
        """All `mla` but 0 attend over latents; long prompts too, which `latent.attend` expands."""
        if self._split.attends(layer, self) is not self:
            return super().attend_latents(part, layer, q, latents, spans)
        projections = self.head_projections(part)
        if not self.mla:
            self._tell(part.kv_b, latents[:, : part.kv_lora])
            made: Any = projections.expanded(latents, 0, part.heads)
            k, v = (x.transpose(0, 1).reshape(len(q), -1) for x in made)
            heads = latent.full(part)
        else:
            self._tell(part.k_b, q[:, :, : part.nope])
            k, v, heads = latents, None, latent.absorbed(part)
        for span in spans:
            rows = slice(span.start, span.stop)
            self.append_rows(k[rows], None if v is None else v[rows], span.cache, layer)
        if not self.mla:
            return self.attend(heads, layer, q.reshape(len(q), -1), spans)
        found = self.attend(heads, layer, projections.queries(q), spans)
        self._tell(part.v_b, found.view(len(q), part.heads, -1))
        return projections.values(found)

    def _tell(self, linear: blocks.Linear | None, x: Any) -> None:
        """Tell the observer what enters a matrix between latents and heads."""
        if self.observer is not None and not self._checking:
            latent.observe(self, linear, self._host.fetch(x, self))

    def local_head_projections(self, part: blocks.LatentAttention) -> latent.HeadProjections:
        from quantkit.runtime.cuda import gpu_latent

        return gpu_latent.HeadProjections(part, self)

    # -------------------------------------------------------------------------------------------------------- experts

    def route(self, part: blocks.Experts, logits: Any) -> tuple[Any, Any]:
        """As `BlockRunner.route`; where the kernel cannot, on the CPU: many experts, or some left out (-ser)."""
        from quantkit.runtime.kernels.cuda import routing

        tokens, used = len(logits), part.used
        if self.expert_reduction is not None or part.count > routing.MOST or part.groups > routing.WARP:
            bias = float_linear.vector(self.weights[part.choice_bias]) if part.choice_bias else None
            chosen, shares = experts.route(part, self._host.fetch(logits, self), self.expert_reduction, bias)
            return chosen, self.fetch(shares, self._host)
        ids, weights = self.gpu.empty(tokens, used, kind="int32"), self.gpu.empty(tokens, used)
        given = self.vector(part.choice_bias) if part.choice_bias else self.gpu.empty(1)
        kernel = routing.route(part.gating == "sigmoid", part.choice_bias is not None)
        self.gpu.launch(kernel, tokens, routing.WARP, logits.contiguous(), given, part.count, part.groups,
                        part.groups_used, used, int(part.normalise), np.float32(part.scale), ids, weights)  # fmt: skip
        return ids, weights

    def _experts(self, part: blocks.Experts, x: Any) -> Any:
        """As `BlockRunner._experts`; shared experts are launched here before the CPU computes the routed ones.

        More does not overlap: the next layer needs what both make.
        """
        host = self._host
        here = self._checking or self.tripwire == "full" or self.observer is not None  # in the order that errors name
        holders = {self._of(linear.weight) for linear in (part.gate, part.up, part.down)}
        if here or part.shared is None or holders != {host} or self._streams(part, len(x)):
            return super()._experts(part, x)
        y = self.norm(part.norm, x)
        chosen, weights = self.route(part, self.linear(part.router, y))
        ids = chosen if isinstance(chosen, np.ndarray) else host.fetch(chosen, self)
        given = host.fetch(y, self), host.fetch(weights, self)
        shared = self._shared(part.shared, part.shared_gate, y)
        return shared + self.fetch(host.run_experts(part, given[0], ids, given[1]), host)

    def run_experts(self, part: blocks.Experts, y: Any, chosen: Any, weights: Any) -> Any:
        holders = {self._of(linear.weight) for linear in (part.gate, part.up, part.down)}
        if holders == {self}:
            with self._timed("experts"):
                return self._run_experts(part, y, chosen, weights)
        ids = chosen if isinstance(chosen, np.ndarray) else self._host.fetch(chosen, self)
        if holders == {self._host} and self._streams(part, len(y)):
            with self._timed("experts"):
                return self._streamed(part, y, ids, weights)
        if len(holders) == 1:
            return super().run_experts(part, y, ids, weights)
        host = self._host  # which has the products done where their matrices are
        return self._run_on(host, lambda y, w: host.run_experts(part, y, ids, w), y, weights)

    def _run_experts(self, part: blocks.Experts, y: Any, chosen: Any, weights: Any) -> Any:
        from quantkit.runtime.kernels.cuda import elementwise

        torch, (tokens, used) = self.gpu.torch, chosen.shape
        ids = self.gpu.array(chosen.astype(np.int32)) if isinstance(chosen, np.ndarray) else chosen
        weights = weights.masked_fill(ids < 0, 0).contiguous()
        for linear in (part.gate, part.up, part.down):
            matrices = self.matrices(linear.weight)
            most = min(matrices.count, ids.numel())  # which of them are the same, only the GPU knows
            self._split.ledger.read(self.device.name, most * matrices.nbytes)
        y = y.contiguous()
        gate, up = (self._of_experts(linear, y, ids) for linear in (part.gate, part.up))
        hidden = self.activate(part.activation, gate, up)
        self._tell_experts(part, y, ids, hidden)
        made = self._of_experts(part.down, hidden, ids).contiguous()
        out = torch.empty((tokens, made.shape[2]), device=self.gpu.place)
        self._launch(elementwise.mix(), out.numel(), elementwise.THREADS, made, weights, used, out.shape[1], tokens,
                     out)  # fmt: skip
        return out

    def _streams(self, part: blocks.Experts, tokens: int) -> bool:
        """Whether experts that stay on the CPU are copied here for a batch; see placement/offload.py."""
        seen = self.observer is not None and not self._checking  # which the CPU tells of
        return not seen and self._split.offload.offloads_experts(tokens, part.count, part.used)

    def _streamed(self, part: blocks.Experts, y: Any, chosen: np.ndarray, weights: Any) -> Any:
        """`_run_experts` of matrices on the CPU, expert by expert: the next one travels while one is computed with.

        Nothing within the loop waits for the GPU but `Staging.send`, so that the host is ahead of it.
        """
        torch, linears = self.gpu.torch, (part.gate, part.up, part.down)
        tensors = [self.weights[linear.weight] for linear in linears]
        sizes = [tensor.nbytes // tensor.shape[0] for tensor in tensors]
        order = np.argsort(chosen, axis=None, kind="stable")[np.count_nonzero(chosen < 0) :]  # slots, expert by expert
        numbers, counts = np.unique(chosen[chosen >= 0], return_counts=True)
        slots = self.gpu.array(order)
        tokens, shares = slots // chosen.shape[1], weights.reshape(-1)[slots][:, None]
        staging, ledger = self._room(sizes), self._split.ledger

        def send(turn: int) -> None:
            begin = [int(numbers[turn]) * tensor.shape[1] for tensor in tensors]
            staging.send(turn, [t._rows(first, first + t.shape[1]) for t, first in zip(tensors, begin)])
            ledger.moved(CPU.name, self.device.name, sum(sizes))

        out = torch.zeros(len(y), tensors[2].shape[1], device=self.gpu.place)
        stop = 0
        for turn, number in enumerate(numbers):
            if not turn:
                send(0)
            start, stop = stop, stop + int(counts[turn])
            gate, up, down = (
                self._one(linear, tensor, data, int(number))
                for linear, tensor, data in zip(linears, tensors, staging.get(turn))
            )
            given = y[tokens[start:stop]]
            made = down(self.activate(part.activation, gate(given), up(given)))
            out.index_add_(0, tokens[start:stop], made * shares[start:stop])
            staging.done(turn)
            if turn + 1 < len(numbers):
                send(turn + 1)
        return out

    def _room(self, sizes: list[int]) -> Staging:
        """What experts pass through, for all layers."""
        from quantkit.runtime.kernels.cuda.staging import Staging, size_of

        if self._staging is None or self._staging.nbytes < size_of(sizes):
            self._staging = Staging(self.gpu, size_of(sizes))
        return self._staging

    def _one(self, linear: blocks.Linear, tensor: Tensor, data: Any, number: int) -> Any:
        """The product with an expert's matrix of these bytes."""
        matrix = cuda_device.Matrices(self.gpu, data, tensor.type, tensor.shape[1], tensor.shape[2])
        bias = self.vector(linear.bias).view(tensor.shape[0], -1)[number] if linear.bias else None

        def run(x: Any) -> Any:
            y = matrix(x.contiguous(), self.exact)
            return y if bias is None else y + bias

        return run

    def _of_experts(self, linear: blocks.Linear, x: Any, ids: Any) -> Any:
        """float32[tokens, used, rows]."""
        matrices = self.matrices(linear.weight)
        y = matrices.of_experts(x, ids, self.exact)
        return y if linear.bias is None else y + self.vector(linear.bias).view(matrices.count, -1)[ids.long()]

    def _tell_experts(self, part: blocks.Experts, y: Any, ids: Any, hidden: Any) -> None:
        """Tell the observer what enters each expert's matrices."""
        if self.observer is None or self._checking:
            return
        chosen, x, inner = (self._host.fetch(a, self) for a in (ids, y, hidden))
        for number in np.unique(chosen[chosen >= 0]):
            token, rank = np.nonzero(chosen == number)
            for linear, entering in ((part.gate, x[token]), (part.up, x[token]), (part.down, inner[token, rank])):
                self.observer(linear.weight, entering, int(number), part.count)

    def expert_product(self, linear: blocks.Linear, number: int) -> Any:
        whole, bias = self.matrices(linear.weight), self.vector(linear.bias) if linear.bias else None

        def run(x: Any) -> Any:
            ids = self.gpu.torch.full((len(x), 1), number, dtype=self.gpu.torch.int32, device=self.gpu.place)
            y = whole.of_experts(x.contiguous(), ids, self.exact)[:, 0]
            return y if bias is None else y + bias.view(whole.count, -1)[number]

        return run
