"""`CudaWorker`: computes parts of a model's blocks on a GPU, by the kernels of `kernels/cuda`.

A CudaWorker is a Worker whose arrays are torch tensors on its GPU: activations, vectors, keys and values, states of
recurrent layers, and packed weights, which are copied there when a layer first runs. It overrides the operations of
`block_runner.BlockRunner` with kernels. Numerics:

    exact   weights decoded to float32, tile by tile, and multiplied in float32
    fast    up to 8 tokens from packed weights with activations as bytes, more as bfloat16 (`kernels/cuda/device.py`)

In generation, a token runs through neighbouring layers as one CUDA graph where possible
(`runtime/cuda/cuda_graph.py`), but not where GPUs share layers (`runtime/parallel/rank.py`).

torch computes attention of prompts over f32, f16 and bf16 caches; `kernels/cuda` that of a few tokens or other caches.
Experts on the CPU run there while the GPU computes the shared ones. For large batches their matrices are copied to the
GPU, one expert at a time (placement/offload.py). Rows of embeddings are gathered on the CPU.

Missing hardware or kernels raise before anything is read: in `with_memory` where there is no GPU, in the constructor
for types of weights, in `require_cache` for caches.
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
from quantkit.placement.devices import CPU, Device
from quantkit.runtime.blocks import float_linear, latent
from quantkit.runtime.blocks.block_runner import BlockRunner
from quantkit.runtime.blocks.compressed_attention import Projected
from quantkit.runtime.blocks.float_attention import Heads
from quantkit.runtime.blocks.indexer import AnyIndexer, Index
from quantkit.runtime.blocks.spans import Span
from quantkit.runtime.cuda.gpu_context import RopeTable, Selection
from quantkit.runtime.cuda.gpu_experts import GpuExperts
from quantkit.runtime.kernels.cuda import device as cuda_device
from quantkit.runtime.kernels.cuda.dispatch import product
from quantkit.runtime.kv.cache_type import CacheType
from quantkit.runtime.parallel.ledger import Ledger
from quantkit.runtime.parallel.split_checks import tensor_names
from quantkit.runtime.parallel.worker import Context, Worker

if TYPE_CHECKING:
    import torch

    from quantkit.formats.gguf import Tensor
    from quantkit.placement.rules import Placement
    from quantkit.runtime.cuda.cuda_graph import CapturedEmbedding, CapturedStep
    from quantkit.runtime.kernels.cuda.device import Gpu, Matrices


@functools.cache
def gpu(index: int) -> Gpu:
    """GPU number `index`, opened once. UnsupportedError, with a message of one line, where there is none."""
    return cuda_device.Gpu(index)


def with_memory(device: Device) -> Device:
    """The device, with the free memory of its GPU as `memory` unless the user gave a size."""
    if device.gpu is None:
        return device
    opened = gpu(device.gpu)
    return replace(device, memory=opened.free_bytes()) if device.memory is None else device


class CudaWorker(Worker):
    """The worker of one GPU.

    gpu   launches its kernels and allocates its memory
    """

    def __init__(self, device: Device, split: Context, owner: BlockRunner, threads: int):
        super().__init__(device, split, owner, threads)
        assert device.gpu is not None
        self.gpu = gpu(device.gpu)
        self.torch_device, self.hardware = self.gpu.torch_device, self.gpu.name
        self.exact = self.numerics == "exact"
        self._matrices: dict[str, Matrices] = {}
        self._stacks: dict[tuple[str, ...], Matrices] = {}
        self._biases: dict[blocks.Linear, torch.Tensor | None] = {}
        self._gpu_experts = GpuExperts(self)
        self._ropes: dict[blocks.Rope, tuple[Any, torch.Tensor, torch.Tensor]] = {}
        self._last_positions: tuple[Any, Any] = None, None
        self._embedding: CapturedEmbedding | None = None
        self._next_positions: tuple[Any, Any] = None, None  # those of every layer's cache, as a rule
        self._captured_position: tuple[torch.Tensor, int] | None = None  # tensor, n_ctx
        self._steps: weakref.WeakKeyDictionary[Any, dict[int, CapturedStep | None]] = weakref.WeakKeyDictionary()
        self._require_kernels(split.placement)

    def _require_kernels(self, placement: Placement) -> None:
        """UnsupportedError for a tensor of this device, or one that it shares, of a type without kernels.

        Tables of experts, of integers, are looked up on the host.
        """
        for name, tensor in self.weights.items():
            shared = name in placement.sharded and self.device in placement.graph
            multiplied = len(tensor.shape) > 1 and tensor.type.name != "i32"
            if (shared or placement[name] == self.device) and multiplied and not product(tensor.type):
                raise UnsupportedError(
                    f"{self.path}: {name} is {tensor.type.name}, for which {self.device.name} has no kernels; keep "
                    f"such tensors on the CPU by a first rule -ot '^{re.escape(name)}$={CPU.name}'"
                    + (", and take -sm layer" if shared else "")
                )

    # ------------------------------------------------------------------------------------------------ arrays, transfers

    def receive(self, x: Any, source: Worker) -> Any:
        """A copy of x of another device on this GPU."""
        return x.to(self.gpu.torch_device) if isinstance(source, CudaWorker) else self.gpu.upload(x)

    def to_host(self, x: Any) -> np.ndarray:
        """A copy of x of this GPU in the host's memory."""
        result: np.ndarray = x.to("cpu", copy=True).numpy()
        return result

    def zeros(self, shape: tuple[int, ...], kind: str) -> torch.Tensor:
        """A tensor of this GPU; `kind` names its type."""
        return self.gpu.zeros(shape, kind)

    def bind_thread(self) -> None:
        """Make the GPU the calling thread's own."""
        self.gpu.bind_thread()

    def spare_bytes(self) -> int:
        """As `Worker.spare_bytes`; matrices come here when they are first used."""
        placement, held = self._split.placement, self._matrices
        missing = sum(
            tensor.nbytes
            for name, tensor in self.weights.items()
            if placement[name] == self.device and name not in held
        )
        return self.gpu.free_bytes() - missing

    def synchronize(self) -> None:
        """Wait for the GPU where time is measured."""
        if self._split.profile:
            self.gpu.synchronize()

    def vector(self, name: str) -> Any:
        """float32[n] on the GPU."""
        result: Any = self._vectors.get(name)
        if result is None:
            result = self._vectors[name] = self.gpu.array(float_linear.vector(self.weights[name]))  # type: ignore[assignment]
        return result

    def drop_cached(self, names: Any) -> None:
        """Drop copies of these tensors, and all captured steps."""
        names = list(names)
        super().drop_cached(names)
        self._forget(names)
        self._biases.clear()
        self._steps.clear()
        self._embedding = None

    def matrices(self, name: str, rows: int | None = None) -> Matrices:
        """The matrices of a tensor on the GPU; `rows` of each, where a tensor of two dimensions stacks several."""
        result = self._matrices.get(name)
        if result is None or (rows or result.rows) != result.rows:
            tensor = self.weights[name]
            data, (height, n) = tensor.data, tensor.shape[-2:]
            result = self._matrices[name] = self.gpu.matrices(data, tensor.type, rows or height, n)
        return result

    def stacked(self, names: tuple[str, ...]) -> Matrices:
        """The rows of tensors of one type and width, one after another, as one matrix. Each stays usable by itself."""
        if len(names) == 1:
            return self.matrices(names[0])
        result = self._stacks.get(names)
        if result is None:
            each = [self.matrices(name) for name in names]
            first, rows = each[0], [matrices.rows for matrices in each]
            data = self.gpu.torch.cat([matrices.data for matrices in each])
            result = cuda_device.Matrices(self.gpu, data, first.kind, sum(rows), first.n)
            self._forget(names)  # what held the tensors one by one
            self._stacks[names] = result
            for name, part, count in zip(names, data.split([m.data.numel() for m in each]), rows):
                self._matrices[name] = cuda_device.Matrices(self.gpu, part, first.kind, count, first.n)
            del each, first
            self.gpu.release_unused()  # no later tensor has the size of the single ones
        return result

    def _forget(self, names: Sequence[str]) -> None:
        """Drop what is on this GPU of these tensors' matrices."""
        for linear in [linear for linear in self._linears if linear.weight in names]:
            del self._linears[linear]
        for name in names:
            self._matrices.pop(name, None)
        for stack in [stack for stack in self._stacks if set(stack) & set(names)]:
            del self._stacks[stack]

    @property
    def host(self) -> Worker:
        """The CPU's worker."""
        return self._split.worker(CPU)

    @property
    def ledger(self) -> Ledger:
        """Counts time and bytes of the split model."""
        return self._split.ledger

    @property
    def observes(self) -> bool:
        """Whether there is an observer to call."""
        return self.observer is not None and not self._checking

    def copy_to_cpu(self, x: Any) -> np.ndarray:
        """A copy in the host's memory, counted as a transfer."""
        return self.host.fetch(x, self)

    def from_host(self, x: np.ndarray) -> Any:
        """As `copy_from_cpu`."""
        return self.copy_from_cpu(x)

    def copy_from_cpu(self, x: np.ndarray) -> Any:
        """A copy on this GPU, counted as a transfer."""
        return self.fetch(x, self.host)

    # ---------------------------------------------------------------------------------------------------- CUDA graphs

    def can_capture(self, block: blocks.Block) -> bool:
        """Whether one token of a block can be captured: all of it is computed here, but for routed experts on the CPU.

        See `cuda_graph.can_capture`.
        """

        from quantkit.runtime.cuda import cuda_graph

        latent_cache = self.mla > 0 or not any(isinstance(part, blocks.LatentAttention) for part in block.parts)
        on_host = {name for part in block.parts for name in self._names_on_host(block, part)}
        return (
            latent_cache
            and not block.hyper
            and self.tripwire != "full"
            and self.has_caches_of(block)
            and all(self._of(name) is self for name in tensor_names(block) if name not in on_host)
            and all(cuda_graph.can_capture(part, self.exact) for part in block.parts)
        )

    def _names_on_host(self, block: blocks.Block, part: blocks.Part) -> set[str]:
        """The matrices of a part that stay on the CPU while the rest of its block is captured."""

        from quantkit.runtime.cuda import gpu_decode

        left = isinstance(part, blocks.Experts) and gpu_decode.can_leave_to_host(part) and self.experts_on_host(part)
        if not (left and gpu_decode.is_taken_apart(block)):
            return set()
        assert isinstance(part, blocks.Experts)
        return {linear.weight for linear in part.matrices}

    def experts_on_host(self, part: blocks.Experts) -> bool:
        """Whether the CPU computes the routed experts of one token."""
        return self._holders(part) == {self.host} and not self._offloads(part, 1)

    def can_replay(self, layers: Sequence[blocks.Block], tokens: int, spans: Sequence[Span]) -> bool:
        """Whether one token can replay these blocks. The first one in a cache runs them by launches."""
        if tokens != 1 or self.observer is not None or self._checking or self.expert_reduction is not None:
            return False
        steps, first = self._steps.setdefault(spans[0].cache, {}), layers[0].layer
        if first not in steps:
            steps[first] = None
            return False
        return True

    def replay(
        self, layers: Sequence[blocks.Block], x: Any, spans: Sequence[Span], head: blocks.Head | None
    ) -> tuple[Any, np.ndarray | None]:
        """As `Worker.replay`, captured by the first call for a cache; with a head also its logits."""

        from quantkit.runtime.cuda.cuda_graph import CapturedStep

        cache = spans[0].cache
        steps, first = self._steps[cache], layers[0].layer
        step = steps[first]
        if step is None:
            step = steps[first] = CapturedStep(self, layers, x, cache, head)
        return step.replay(x, cache.length)

    def embed(self, head: blocks.Head, tokens: np.ndarray) -> Any:
        """As `Worker.embed`: the host gathers packed rows, and this GPU decodes them."""
        tensor = self.weights[head.embedding]
        if tensor.type.interleave > 1 or not product(tensor.type):
            return super().embed(head, tokens)
        packed = tensor.data.reshape(tensor.shape[0], -1)
        self.ledger.moved(CPU.name, self.device.name, len(tokens) * packed.shape[1])
        decode = functools.partial(self._decoded_rows, head, tensor)
        if len(tokens) > 1:
            return decode(self.gpu.upload(packed[tokens]).view(-1))
        if self._embedding is None:
            from quantkit.runtime.cuda.cuda_graph import CapturedEmbedding

            self._embedding = CapturedEmbedding(self.gpu, packed.shape[1], decode)
        return self._embedding.replay(packed[tokens[0]])

    def _decoded_rows(self, head: blocks.Head, tensor: Tensor, rows: torch.Tensor) -> torch.Tensor:
        """float32[tokens, n_embd] of packed rows of the embedding, which are on the GPU."""
        n = tensor.shape[1]
        count = rows.numel() // tensor.type.row_bytes(n)
        x = cuda_device.Matrices(self.gpu, rows, tensor.type, count, n).decoded(exact=True)
        if head.embedding_factor is not None:
            x *= self.vector(head.embedding_factor)[0]
        return x if head.embedding_scale == 1 else x * head.embedding_scale

    @property
    def compiles(self) -> bool:
        """Never: the plans of `runtime/compiled` are the CPU's."""
        return False

    @contextlib.contextmanager
    def reading_position(self, position: torch.Tensor, n_ctx: int) -> Iterator[None]:
        """Context: kernels read the position of the one token from int32[1] on the GPU; it stays below `n_ctx`."""
        self._captured_position = position, n_ctx
        try:
            yield
        finally:
            self._captured_position = None

    def held_matrices(self) -> list[Matrices]:
        """All matrices that are on the GPU."""
        return list(self._matrices.values())

    def rope_tables(self) -> list[Any]:
        """The RoPE tables on the GPU."""
        return list(self._ropes.values())

    # ------------------------------------------------------------------------------------- norms, activations and RoPE

    def rms_norm(self, x: Any, norm: blocks.Norm) -> Any:
        """As `BlockRunner.rms_norm`, by a kernel."""

        from quantkit.runtime.kernels.cuda import elementwise

        x = x.contiguous()
        out, n = self.gpu.torch.empty_like(x), x.shape[-1]
        weight = self.norm_weight(norm, n)
        self.gpu.launch(elementwise.rms_norm(), x.numel() // n, elementwise.norm_threads(n), x, weight, n,
                        np.float32(norm.eps), out)  # fmt: skip
        return out

    def norm_weight(self, norm: blocks.Norm, n: int) -> Any:
        """As `BlockRunner.norm_weight`, on the GPU."""
        weight = self.vector(norm.weight) if norm.weight else self.gpu.torch.ones(n, device=self.torch_device)
        return weight if norm.factor == 1 else weight * norm.factor

    def centre(self, x: Any) -> Any:
        """As `BlockRunner.centre`."""
        return x - x.mean(-1, keepdim=True)

    def activate(self, name: blocks.Activation, gate: Any, up: Any, limit: float | None = None) -> Any:
        """As `BlockRunner.activate`, by a kernel; reglu, relu2, xIELU and what is clamped by torch."""

        from quantkit.runtime.kernels.cuda import elementwise

        if isinstance(name, blocks.Xielu):
            below = (gate.clamp(max=name.limit).expm1() - gate) * name.negative
            return self.gpu.torch.where(gate > 0, name.positive * gate * gate, below) + name.linear * gate
        if name == "swiglu_clamped":
            assert limit is not None
            return self.gpu.torch.nn.functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
        if limit is not None:
            assert name == "swiglu"
            return self.gpu.torch.nn.functional.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)
        if name not in elementwise.ACTIVATIONS:  # reglu and relu2
            assert name in ("reglu", "relu2")
            return (gate.relu() if name == "reglu" else gate.relu().square()) * up
        gate, up = gate.contiguous(), up.contiguous()
        self.gpu.launch_each(elementwise.activate(name), gate.numel(), elementwise.THREADS, gate, up, gate.numel())
        return gate

    def gated(self, part: blocks.FeedForward, y: Any) -> Any:
        """As `BlockRunner.gated`; of many tokens the activations are made as bfloat16, as which they are multiplied."""

        from quantkit.runtime.kernels.cuda import elementwise

        name, width = part.activation, self.weights[part.down.weight].shape[-1]
        plain = part.gate != part.up and part.cutoff is None and part.limit is None and part.sub_norm is None
        known = isinstance(name, str) and name in elementwise.ACTIVATIONS and width % 8 == 0
        if not (plain and known and self._rounds([part.down], y)):
            return super().gated(part, y)
        up, gate = (x.contiguous() for x in self.linears([part.up, part.gate], y))
        out: Any = self.gpu.empty(*gate.shape, kind="bfloat16")
        kernel = elementwise.activate_rounded(name)
        self.gpu.launch_each(kernel, gate.numel() // 8, elementwise.THREADS, gate, up, gate.numel(),
                             out.view(self.gpu.torch.int32))  # fmt: skip
        return self.norm(part.post_norm, self.linear(part.down, out))

    def sigmoid(self, x: Any) -> Any:
        """1 / (1 + e^-x)."""
        return x.sigmoid()

    def without_gates(self, projected: Any, heads: int) -> Any:
        """As `float_ops.without_gates`."""
        pairs = projected.view(len(projected), heads, 2, -1)
        return pairs[:, :, 0].reshape(len(projected), -1).contiguous()

    def apply_gates(self, x: Any, projected: Any, dim: int) -> None:
        """As `float_ops.apply_gates`."""
        gates = projected.view(len(x), -1, 2, dim)[:, :, 1]
        x.mul_(gates.reshape(len(x), -1).sigmoid())

    def scale_queries(self, q: Any, temperature: blocks.Temperature, spans: list[Span]) -> None:
        """As `float_ops.scale_queries`."""
        positions = self._positions(spans)[0].double()
        steps = ((positions + temperature.offset) / temperature.length).floor()
        q.mul_((1 + temperature.beta * steps.log1p()).float()[:, None])

    def scale_heads(self, q: Any, scaling: blocks.HeadScaling, spans: list[Span]) -> None:
        """As `float_ops.scale_heads`."""
        logarithms = self._positions(spans)[0].double().log1p().float()
        factors = self.vector(scaling.scale) * logarithms[:, None] + self.vector(scaling.bias)
        q.view(len(q), factors.shape[1], -1).mul_(factors[:, :, None])

    def apply_rope(self, x: Any, rope: blocks.Rope, dim: int, spans: list[Span]) -> None:
        """As `BlockRunner.apply_rope`, by a kernel; tables and positions stay on the GPU."""

        from quantkit.runtime.kernels.cuda import elementwise

        if not rope.dim:
            return
        angles, heads = self.rope_table(rope, spans), x.shape[1] // dim
        positions, _ = self._positions(spans)
        self.gpu.launch_each(
            elementwise.rope(), len(x) * heads * angles.pairs, elementwise.THREADS, x, heads, dim, angles.pairs,
            angles.cos, angles.sin, positions, angles.step, angles.stride, len(x),
        )  # fmt: skip

    def rope_table(self, rope: blocks.Rope, spans: list[Span]) -> RopeTable:
        """The angles of RoPE for all positions of the spans' next tokens, on the GPU."""
        if not rope.dim:
            return RopeTable(self.gpu.empty(1), self.gpu.empty(1), 0, 1, 1)
        rope = rope.of_context(max(s.cache.n_ctx for s in spans))
        host = self._rope(rope, self._positions(spans)[1] + 1)
        tables = self._ropes.get(rope)
        if tables is None or tables[0] is not host:
            cos, sin = map(self.gpu.array, host)
            tables = self._ropes[rope] = host, cos, sin
        pairs = host[0].shape[1]
        return RopeTable(tables[1], tables[2], pairs, *((2, 1) if rope.style == "norm" else (1, pairs)))

    def _positions(self, spans: list[Span]) -> tuple[torch.Tensor, int]:
        """Positions int32[tokens] on the GPU, and the largest; cached, because every layer needs the same ones."""
        if self._captured_position is not None:
            return self._captured_position[0], self._captured_position[1] - 1
        key = tuple((span.cache.length, span.stop - span.start) for span in spans)
        if self._last_positions[0] != key:
            positions = np.concatenate([first + np.arange(count, dtype=np.int32) for first, count in key])
            self._last_positions = key, (self.gpu.array(positions), int(positions.max()))
        result: tuple[torch.Tensor, int] = self._last_positions[1]
        return result

    def next_positions(self, cache: Any, tokens: int) -> torch.Tensor:
        """int32[tokens] on the GPU: the positions that a cache's next tokens get."""
        if self._captured_position is not None:
            return self._captured_position[0]
        key = cache.length, tokens
        if self._next_positions[0] != key:
            stop, dtype = cache.length + tokens, self.gpu.torch.int32
            positions = self.gpu.torch.arange(cache.length, stop, dtype=dtype, device=self.gpu.torch_device)
            self._next_positions = key, positions
        result: torch.Tensor = self._next_positions[1]
        return result

    def position_bound(self, cache: Any, tokens: int) -> int:
        """All positions of a cache's next tokens are below this."""
        return int(cache.length) + tokens if self._captured_position is None else self._captured_position[1]

    def is_finite(self, y: Any) -> bool:
        """As `BlockRunner.is_finite`, of an array or a tensor. Waits for the GPU."""
        return super().is_finite(y) if isinstance(y, np.ndarray) else self.tripwire == "off" or bool(y.isfinite().all())

    def _require_finite(self, source: str, y: Any) -> None:
        if not self.is_finite(y):
            super()._require_finite(source, self.to_host(y))

    def observe(self, name: str, x: Any, *which: int) -> None:
        """As `BlockRunner.observe`; x is copied to the host for it."""
        if self.observes:
            super().observe(name, x if isinstance(x, np.ndarray) else self.copy_to_cpu(x), *which)

    # ------------------------------------------------------------------------------------------------------- products

    def _weight(self, linear: blocks.Linear) -> Any:
        result: Any = self._linears.get(linear)
        if result is None:
            if linear.rows is None:
                matrices = self.matrices(linear.weight)
            else:
                tensor = float_linear.matrix(self.weights, linear)
                matrices = self.gpu.matrices(tensor.data, tensor.type, *tensor.shape)
            result = self._linears[linear] = self._product(linear, matrices)
        return result

    def _product(self, linear: blocks.Linear, matrices: Matrices) -> Any:
        scale, bias = self.scale_and_bias(linear)

        def run(x: Any) -> Any:
            y = matrices(x.contiguous(), self.exact)
            y = y if scale == 1 else y * scale
            return y if bias is None else y + bias

        return run

    def scale_and_bias(self, linear: blocks.Linear) -> tuple[float, torch.Tensor | None]:
        """The number that products are multiplied by, and what is added to them then: float32[rows] or None."""
        if linear not in self._biases:
            bias = float_linear.bias(self.weights, linear)
            self._biases[linear] = None if bias is None else self.gpu.array(bias)
        return float_linear.scale(self.weights, linear), self._biases[linear]

    def linears(self, linears: Sequence[blocks.Linear], x: Any) -> list[Any]:
        """As `BlockRunner.linears`; many tokens are rounded to bfloat16 once."""
        if not self._rounds(linears, x):
            return super().linears(linears, x)
        rounded = x.bfloat16()
        return [self.linear(linear, rounded) for linear in linears]

    def _rounds(self, linears: Sequence[blocks.Linear], x: Any) -> bool:
        """Whether products of so many rows with these matrices are of bfloat16, and here."""
        here = all(self._of(linear.weight) is self for linear in linears)
        return here and not self.exact and not self.observes and len(x) > cuda_device.MAX_PACKED_VECTORS

    def grouped(self, linear: blocks.Linear, x: Any, groups: int) -> Any:
        """As `BlockRunner.grouped`; groups are multiplied as experts are: `Matrices.of_experts`."""
        if self._of(linear.weight) is not self:
            return super().grouped(linear, x, groups)
        with self._timed("products"):
            inputs = x.reshape(len(x), groups, -1)
            self.observe(linear.weight, inputs.reshape(-1, inputs.shape[2]))
            matrices = self.matrices(linear.weight, self.weights[linear.weight].shape[0] // groups)
            ids = self.gpu.torch.arange(groups, dtype=self.gpu.torch.int32, device=self.torch_device)
            y: Any = matrices.of_experts(inputs, ids.repeat(len(x), 1), self.exact).view(len(x), -1)
            scale, bias = self.scale_and_bias(linear)
            y = y if scale == 1 else y * scale
            y = y if bias is None else y + bias
            self.check(linear.weight, y)
            self.ledger.read(self.device.name, matrices.nbytes)
            return y

    # ------------------------------------------------------------------------------------------------------ attention

    def require_cache(self, kind: CacheType, heads: int, dim_k: int, dim_v: int) -> None:
        """UnsupportedError for caches without kernels; see `gpu_attention.require_cache`."""

        from quantkit.runtime.cuda import gpu_attention

        gpu_attention.require_cache(self.device.name, kind, dim_k, dim_v)

    def require_compressed_cache(self, kind: CacheType, part: blocks.CompressedAttention) -> None:
        """As `gpu_compressed.require_cache`."""

        from quantkit.runtime.cuda import gpu_compressed

        gpu_compressed.require_cache(self.device.name, kind, part)

    def require_index_cache(self, kind: CacheType, part: AnyIndexer) -> None:
        """As `gpu_indexer.require_cache`, or that of `gpu_block_indexer` for blocks of positions."""

        from quantkit.runtime.cuda import gpu_block_indexer, gpu_indexer

        if isinstance(part, (blocks.BlockIndexer, blocks.PooledIndexer)):
            gpu_block_indexer.require_cache(self.device.name, kind, part)
        else:
            gpu_indexer.require_cache(self.device.name, kind, part)

    def append_rows(self, k: Any, v: Any, cache: Any, layer: int) -> None:
        """As `gpu_attention.append_rows`."""

        from quantkit.runtime.cuda import gpu_attention

        gpu_attention.append_rows(self, k, v, cache, layer)

    def attend(self, heads: Heads, layer: int, q: Any, spans: list[Span], attention: Any = None) -> Any:
        """As `gpu_attention.attend`, of all spans."""

        from quantkit.runtime.cuda import gpu_attention

        with self._timed("attention"):
            parts = []
            for span in spans:
                given = self, heads, layer, q[span.start : span.stop], span.cache
                selected: Any = span.selected
                parts.append(
                    gpu_attention.attend(*given)
                    if selected is None
                    else gpu_attention.attend_selected(*given, selected)
                )
            return parts[0] if len(parts) == 1 else self.gpu.torch.cat(parts)

    # ------------------------------------------------------------------------------------------- other kinds of parts

    def delta_net(self, part: blocks.DeltaNet, layer: int, x: Any, spans: list[Span]) -> Any:
        """As `gpu_recurrent.delta_net`."""

        from quantkit.runtime.cuda import gpu_recurrent

        return gpu_recurrent.delta_net(self, part, layer, x, spans)

    def kimi_delta(self, part: blocks.KimiDelta, layer: int, x: Any, spans: list[Span]) -> Any:
        """As `gpu_recurrent.kimi_delta`."""

        from quantkit.runtime.cuda import gpu_recurrent

        return gpu_recurrent.kimi_delta(self, part, layer, x, spans)

    def mamba2(self, part: blocks.Mamba2, layer: int, x: Any, spans: list[Span]) -> Any:
        """As `gpu_mamba2.mamba2`."""

        from quantkit.runtime.cuda import gpu_mamba2

        return gpu_mamba2.mamba2(self, part, layer, x, spans)

    def short_conv(self, part: blocks.ShortConv, layer: int, x: Any, spans: list[Span]) -> Any:
        """As `gpu_recurrent.short_conv`."""

        from quantkit.runtime.cuda import gpu_recurrent

        return gpu_recurrent.short_conv(self, part, layer, x, spans)

    def latent_attention(self, part: blocks.LatentAttention, layer: int, x: Any, spans: list[Span]) -> Any:
        """As `gpu_latent.attention`."""

        from quantkit.runtime.cuda import gpu_latent

        return gpu_latent.attention(self, part, layer, x, spans)

    def select_positions(self, part: AnyIndexer, layer: int, index: Index, spans: list[Span]) -> None:
        """As `gpu_indexer.selections`, or those of `gpu_block_indexer` and `gpu_pooled_indexer`, on the device of the
        layer's cache."""

        from quantkit.runtime.cuda import gpu_block_indexer, gpu_indexer, gpu_pooled_indexer

        if self._split.attends(layer, self) is not self:
            super().select_positions(part, layer, index, spans)
            return
        if isinstance(part, blocks.BlockIndexer):
            self.selections = gpu_block_indexer.selections(self, part, layer, index, spans)
        elif isinstance(part, blocks.PooledIndexer):
            self.selections = gpu_pooled_indexer.selections(self, part, layer, index, spans)
        else:
            self.selections = gpu_indexer.selections(self, part, layer, index, spans)
        self._split.selector = self

    def selection_to_host(self, selection: Any, span: Span) -> np.ndarray | None:
        """As `Worker.selection_to_host`."""

        from quantkit.runtime.cuda import gpu_indexer

        if selection is None:
            return None
        positions, counts = (self.to_host(x) for x in selection)
        return gpu_indexer.to_mask(positions, counts, self.position_bound(span.cache, span.stop - span.start))

    def receive_selection(self, mask: np.ndarray) -> Any:
        """As `Worker.receive_selection`: a `gpu_context.Selection` on the GPU."""

        from quantkit.runtime.cuda import gpu_indexer

        return Selection(*(self.gpu.upload(x) for x in gpu_indexer.of_mask(mask)))

    def attend_latents(self, part: blocks.LatentAttention, layer: int, q: Any, latents: Any, spans: list[Span]) -> Any:
        """As `gpu_latent.attend`, on the device of the layer's cache."""

        from quantkit.runtime.cuda import gpu_latent

        if self._split.attends(layer, self) is not self:
            return super().attend_latents(part, layer, q, latents, spans)
        return gpu_latent.attend(self, self.head_projections(part), part, layer, q, latents, spans)

    def local_head_projections(self, part: blocks.LatentAttention) -> latent.HeadProjections:
        """Those of `gpu_latent`."""

        from quantkit.runtime.cuda import gpu_latent

        return gpu_latent.GpuHeadProjections(part, self)

    def attend_compressed(
        self, part: blocks.CompressedAttention, layer: int, given: Projected, spans: list[Span]
    ) -> Any:
        """As `gpu_compressed.attend`, on the device of the layer's cache."""

        from quantkit.runtime.cuda import gpu_compressed

        if self._split.attends(layer, self) is not self:
            return super().attend_compressed(part, layer, given, spans)
        with self._timed("attention"):
            return gpu_compressed.attend(self, part, layer, given, spans)

    def ngrams(self, part: blocks.NGrams, number: int, x: Any, spans: list[Span]) -> Any:
        """As `gpu_ngrams.ngrams`."""

        from quantkit.runtime.cuda import gpu_ngrams

        return gpu_ngrams.ngrams(self, part, number, x, spans)

    # -------------------------------------------------------------------------------------------------------- streams

    def spread(self, head: blocks.Head, x: Any) -> Any:
        """As `BlockRunner.spread`; see `gpu_altup`."""

        from quantkit.runtime.cuda import gpu_altup

        if isinstance(head.streams, blocks.AltUpHead):
            return gpu_altup.spread(self, head.streams, x)
        return x if head.streams is None else x.repeat(1, head.streams.streams)

    def collapse(self, head: blocks.Head, x: Any) -> Any:
        """As `BlockRunner.collapse`; see `gpu_altup` and `gpu_streams`."""

        from quantkit.runtime.cuda import gpu_altup, gpu_streams

        if isinstance(head.streams, blocks.AltUpHead):
            return gpu_altup.merge(self, head.streams, x)
        return x if head.streams is None else gpu_streams.collapse(self, head.streams, x)

    def run_altup(self, block: blocks.Block, x: Any, spans: list[Span]) -> Any:
        """As `gpu_altup.run`."""

        from quantkit.runtime.cuda import gpu_altup

        return gpu_altup.run(self, block, x, spans)

    def largest_gates(self, gate: Any, cutoff: float) -> Any:
        """As `BlockRunner.largest_gates`."""
        deviation, mean = self.gpu.torch.std_mean(gate, dim=1, correction=0, keepdim=True)
        return (gate - (mean + cutoff * deviation)).relu()

    def read_streams(self, connection: Any, x: Any) -> tuple[Any, Any]:
        """As `gpu_streams.read`."""

        from quantkit.runtime.cuda import gpu_streams

        return gpu_streams.read(self, connection, x)

    def write_streams(self, x: Any, made: Any, shares: Any) -> Any:
        """As `gpu_streams.write`."""

        from quantkit.runtime.cuda import gpu_streams

        return gpu_streams.write(self, x, made, shares)

    # -------------------------------------------------------------------------------------------------------- experts

    def route(self, part: blocks.Experts, logits: Any, given: np.ndarray | None = None) -> tuple[Any, Any]:
        """As `BlockRunner.route`; see `GpuExperts.route`."""
        return self._gpu_experts.route(part, logits, given)

    def _experts(self, part: blocks.Experts, x: Any, spans: list[Span]) -> Any:
        """As `BlockRunner._experts`; shared experts are launched on the GPU before the CPU computes the routed ones.

        Nothing else overlaps: the next layer needs the results of both.
        """
        in_order = self._checking or self.tripwire == "full" or self.observer is not None  # the order that errors name
        in_order = in_order or part.post_norm is not None
        routed_on_cpu = self._holders(part) == {self.host} and not self._offloads(part, len(x))
        if in_order or part.shared is None or not routed_on_cpu:
            return super()._experts(part, x, spans)
        y = self.norm(part.norm, x)
        chosen, weights = self.route(part, self.linear(part.router, y), self._experts_of_tokens(part, spans))
        ids = chosen if isinstance(chosen, np.ndarray) else self.copy_to_cpu(chosen)
        inputs = self.copy_to_cpu(self._through(part.latent_down, y)), self.copy_to_cpu(weights)
        shared = self._shared(part.shared, part.shared_gate, y)
        routed = self.copy_from_cpu(self.host.run_experts(part, inputs[0], ids, inputs[1]))
        return shared + self._through(part.latent_up, routed)

    def run_experts(self, part: blocks.Experts, y: Any, chosen: Any, weights: Any) -> Any:
        """As `Worker.run_experts`, where the CPU may have routed."""
        if part.identity and isinstance(chosen, np.ndarray):
            chosen = self.gpu.array(chosen.astype(np.int32))
        return super().run_experts(part, y, chosen, weights)

    def run_stacked(self, part: blocks.Experts, y: Any, chosen: Any, weights: Any) -> Any:
        """As `Worker.run_stacked`: here, offloaded here, or on the devices of their matrices."""
        holders = self._holders(part)
        if holders == {self}:
            with self._timed("experts"):
                return self._gpu_experts.run(part, y, chosen, weights)
        ids = chosen if isinstance(chosen, np.ndarray) else self.copy_to_cpu(chosen)
        if holders == {self.host} and self._offloads(part, len(y)):
            with self._timed("experts"):
                return self._gpu_experts.run_offloaded(part, y, ids, weights)
        if len(holders) == 1:
            return super().run_stacked(part, y, ids, weights)
        host = self.host  # computes each product where its matrix is
        return self._run_on(host, lambda y, w: host.run_stacked(part, y, ids, w), y, weights)

    def _holders(self, part: blocks.Experts) -> set[Worker]:
        """The workers that have the matrices of the experts."""
        return {self._of(linear.weight) for linear in part.matrices}

    def _offloads(self, part: blocks.Experts, tokens: int) -> bool:
        """Whether a batch's experts that stay on the CPU are computed here; see placement/offload.py.

        Not with an observer: the CPU calls it.
        """
        return not self.observes and self._split.offload.offloads_experts(tokens, part.count, part.used)

    def expert_product(self, linear: blocks.Linear, number: int) -> Any:
        """As `GpuExperts.product`."""
        return self._gpu_experts.product(linear, number)
