"""One token through a whole model in one compiled walk, for `fast` numerics.

A `Step` lays a model's blocks out once as a list of operations (kernels/cpu/ops.py, attention.py) on fixed buffers; a
token is then one call, in which all threads walk the list (kernels/cpu/walk.py). Per block, with waits where | stands:

    norm, q, k, v | attention | join, out, add | norm, gate, up, swiglu | down, add |

Weights are read as they lie in the file. Activations are quantized to 8 bits in blocks of 32 before each product with a
quantized matrix; products with F32, F16 and BF16 matrices keep them in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from quantkit.archs import blocks
from quantkit.files.gguf import Tensor
from quantkit.runtime import layers
from quantkit.runtime.cache import Cache
from quantkit.runtime.kernels import table
from quantkit.runtime.kernels.cpu import ops
from quantkit.runtime.kernels.cpu.activations import activation_bytes
from quantkit.runtime.kernels.cpu.attention import PARAMETERS as ATTENTION
from quantkit.runtime.kernels.cpu.attention import attention, scratch_bytes
from quantkit.runtime.kernels.cpu.walk import crew

_ROWS = 32  # shares of a matrix are multiples of so many rows: whole blocks of what is quantized next


def obstacle(weights: dict[str, Tensor], parts: Sequence[blocks.Block], head: blocks.Head) -> str | None:
    """Why these blocks cannot be laid out as a Step; None when they can."""
    linears = [head.output]
    for part in (part for block in parts for part in block.parts):
        if isinstance(part, blocks.Attention):
            linears += [part.q, part.k, part.v, part.out]
            if part.head_dim_k % 16 or part.head_dim_v % 16:
                return f"heads of {part.head_dim_k} and {part.head_dim_v} dimensions are not multiples of 16"
        else:
            linears += [part.gate, part.up, part.down]
            if part.activation != "swiglu":
                return f"no kernel for the activation {part.activation}"
    for linear in linears:
        tensor = weights[linear.weight]
        if table.product(tensor.type) is None:
            return f"no kernel for {tensor.type.name} ({linear.weight})"
        if tensor.shape[1] % 32:
            return f"rows of {tensor.shape[1]} columns are not a multiple of 32 ({linear.weight})"
    return None


class Step:
    """`step(token, cache) -> float32[vocab]`: logits after one more token, which the cache then holds.

    weights     the model's tensors by name; parts, head: its description
    n_ctx       positions to make rope tables for; they grow when a cache is larger
    """

    def __init__(self, weights: dict[str, Tensor], parts: Sequence[blocks.Block], head: blocks.Head, threads: int):
        self._weights = weights
        self._parts = parts
        self._embedding = weights[head.embedding]
        self._threads = threads
        self._ops: list[tuple[int, int, int]] = []
        self._alive: list[Any] = []  # what the operations point to
        self._attentions: list[tuple[int, blocks.Attention, np.ndarray]] = []
        self._state = np.zeros(1, np.int64)
        self._cache: Cache | None = None
        self._kind = ""
        self._buffers: dict[tuple[str, int], np.ndarray] = {}
        self._head = head

    # ------------------------------------------------------------------------------------------------------- running

    def __call__(self, token: int, cache: Cache) -> np.ndarray:
        """float32[vocab], a fresh array. The caller has seen to it that the cache has room."""
        if cache is not self._cache:
            self._use(cache)
        self._x[:] = layers.embed(self._embedding, np.array([token]))[0]
        self._state[0] = cache.length
        crew(self._threads).walk(self._list)
        cache.length += 1
        return self._logits.copy()

    def _use(self, cache: Cache) -> None:
        """Point the attention operations to another cache."""
        if cache.cache_type != self._kind:
            self._lay_out(cache.cache_type)
        for layer, part, parameters in self._attentions:
            cos, sin = self._tables(part.rope, cache.n_ctx)
            values = {
                "cos": cos.ctypes.data,
                "sin": sin.ctypes.data,
                "k_cache": cache.k[layer].ctypes.data,
                "v_cache": cache.v[layer].ctypes.data,
                "window": part.window or cache.n_ctx,
            }
            for name, value in values.items():
                parameters[ATTENTION.index(name)] = value
        self._cache = cache

    def _tables(self, rope: blocks.Rope, n_ctx: int) -> tuple[np.ndarray, np.ndarray]:
        held = self._rope_tables.get(rope)
        if held is None or len(held[0]) < n_ctx:
            factors = layers.vector(self._weights[rope.factors]) if rope.factors else None
            held = self._rope_tables[rope] = layers.rope_tables(rope, n_ctx, factors)
        return held

    # -------------------------------------------------------------------------------------------------- the operations

    def _lay_out(self, cache_type: str) -> None:
        self._ops, self._alive, self._attentions = [], [], []
        self._rope_tables: dict[blocks.Rope, tuple[np.ndarray, np.ndarray]] = {}
        self._kind = cache_type
        rows, n_embd = self._embedding.shape
        self._x, self._logits = self._floats(n_embd), self._floats(rows)
        for block in self._parts:
            for part in block.parts:
                if isinstance(part, blocks.Attention):
                    self._attention(block.layer, part)
                else:
                    self._feed_forward(part)
        normed = self._norm(self._head.norm)
        self._matvec(self._head.output, normed, self._logits, wait=True)
        self._list = np.array(self._ops, np.int64)

    def _attention(self, layer: int, part: blocks.Attention) -> None:
        normed = self._norm(part.norm)
        q, k, v = (self._floats(self._weights[linear.weight].shape[0]) for linear in (part.q, part.k, part.v))
        self._matvec(part.q, normed, q)
        self._matvec(part.k, normed, k)
        self._matvec(part.v, normed, v, wait=True)
        group = part.heads // part.kv_heads
        stride = -(-scratch_bytes(part.heads, part.head_dim_k, group) // 64) * 64
        partial = self._floats(self._threads * part.heads * (part.head_dim_v + 2))
        norm_style = part.rope.style == "norm"
        values = {
            "state": self._state.ctypes.data,
            "q": q.ctypes.data,
            "k": k.ctypes.data,
            "v": v.ctypes.data,
            "rope_dim": part.rope.dim,
            "step": 2 if norm_style else 1,
            "pair": 1 if norm_style else part.rope.dim // 2,
            "kv_heads": part.kv_heads,
            "scale": self._constant(part.scale),
            "partial": partial.ctypes.data,
            "scratch": self._buffer("attention", self._threads * stride).ctypes.data,
            "stride": stride,
        }
        kernel = attention(group, part.head_dim_k, part.head_dim_v, int(self._kind == "f16"))
        parameters = self._op(kernel.address, [values.get(name, 0) for name in ATTENTION], wait=True)
        self._attentions.append((layer, part, parameters))
        joined = self._private("joined", part.heads * part.head_dim_v)
        self._op(ops.combine.address, [partial.ctypes.data, part.heads, part.head_dim_v, *joined])
        self._matvec(part.out, joined, self._floats(len(self._x)), residual=True, wait=True)

    def _feed_forward(self, part: blocks.FeedForward) -> None:
        normed = self._norm(part.norm)
        n_ff = self._weights[part.gate.weight].shape[0]
        gate, up = self._buffer("gate", 4 * n_ff), self._buffer("up", 4 * n_ff)
        self._matvec(part.gate, normed, gate)
        self._matvec(part.up, normed, up)
        hidden = self._buffer("hidden", activation_bytes(n_ff)).ctypes.data
        self._op(ops.swiglu.address, [gate.ctypes.data, up.ctypes.data, n_ff, _ROWS, hidden], wait=True)
        self._matvec(part.down, (hidden, 0), self._floats(len(self._x)), residual=True, wait=True)

    def _norm(self, norm: blocks.Norm) -> tuple[int, int]:
        """Address and stride of the threads' buffers with the normed x."""
        weight = self._keep(layers.vector(self._weights[norm.weight]))
        normed = self._private("normed", len(self._x))
        self._op(
            ops.norm.address,
            [self._x.ctypes.data, weight.ctypes.data, len(self._x), self._constant(norm.eps), *normed],
        )
        return normed

    def _matvec(
        self,
        linear: blocks.Linear,
        buffer: tuple[int, int],
        out: np.ndarray,
        residual: bool = False,
        wait: bool = False,
    ) -> None:
        tensor = self._weights[linear.weight]
        rows, columns = tensor.shape
        kernel = table.product(tensor.type)
        assert kernel is not None
        bias = self._keep(layers.vector(self._weights[linear.bias])).ctypes.data if linear.bias else 0
        added = self._x.ctypes.data if residual else 0
        values = [kernel.address, self._keep(tensor.data).ctypes.data, columns, rows, _ROWS, *buffer, out.ctypes.data]
        self._op(ops.matvec.address, [*values, bias, added], wait)

    def _op(self, function: int, parameters: list[int], wait: bool = False) -> np.ndarray:
        held = self._keep(np.array(parameters, np.int64))
        self._ops.append((function, held.ctypes.data, int(wait)))
        return held

    # ------------------------------------------------------------------------------------------------------- memory

    def _keep(self, array: np.ndarray) -> np.ndarray:
        self._alive.append(array)
        return array

    def _floats(self, n: int) -> np.ndarray:
        return self._keep(np.zeros(n, np.float32))

    def _constant(self, value: float) -> int:
        return self._keep(np.array([value], np.float32)).ctypes.data

    def _buffer(self, name: str, nbytes: int) -> np.ndarray:
        """Working memory; operations of one name in different blocks share it."""
        key = (name, nbytes)
        if key not in self._buffers:
            self._buffers[key] = self._keep(np.zeros(nbytes, np.uint8))
        return self._buffers[key]

    def _private(self, name: str, n: int) -> tuple[int, int]:
        """Address and stride of one activation buffer a thread."""
        stride = -(-activation_bytes(n) // 64) * 64
        return self._buffer(name, self._threads * stride).ctypes.data, stride
