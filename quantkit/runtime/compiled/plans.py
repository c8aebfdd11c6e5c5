"""A model for `fast` numerics: plans made once of its blocks, lists of operations that a thread team executes.

`Step` runs one token, `Prompt` a batch (kernels/cpu/thread_team.py, ops.py, batch.py). Per block, with waits where |
stands:

    Step      norm, q, k, v | attention | join, out, add | norm, gate, up, swiglu | down, add |
    Prompt    norm | q, k, v | rope, cache | attention | quantize | out, add | norm | gate, up | swiglu | down, add |

and with experts (kernels/cpu/expert_ops.py) in place of the feed-forward, a shared one before or after them as above:

    Step      norm, router | pick, gate, up, swiglu | down, add |
    Prompt    norm | router | choose | sort | gather | gate, up, swiglu | down, add |

Weights are read as they lie in the file. Activations are quantized before each product with a quantized matrix, as
kernels/cpu/activations.py says; products with F32, F16 and BF16 matrices keep them in float32.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from quantkit import types
from quantkit.archs.common import blocks
from quantkit.formats.gguf import Tensor
from quantkit.placement import kernel_sizes
from quantkit.placement.kernel_sizes import BATCH_TOKENS, activation_bytes
from quantkit.runtime.blocks import float_attention, float_linear, float_ops
from quantkit.runtime.blocks.experts import Reduction
from quantkit.runtime.blocks.float_attention import AttentionOptions
from quantkit.runtime.blocks.spans import Span
from quantkit.runtime.kernels import dispatch
from quantkit.runtime.kernels.cpu import attention, decode_ops, expert_ops, gemm, prefill_ops
from quantkit.runtime.kernels.cpu.kv_rows import Heads
from quantkit.runtime.kernels.cpu.thread_team import OpList
from quantkit.runtime.kv.cache import Cache
from quantkit.runtime.kv.cache_type import CacheType

_ROWS = 32  # shares of a matrix are multiples of so many rows: whole blocks of what is quantized next

Weights = Mapping[str, Tensor]


class Routing(NamedTuple):
    """How experts are run: `fused` as in `load`, and which are left out, see runtime/blocks/experts.py."""

    fused: bool = True
    reduction: Reduction | None = None


class _Plan:
    """What Step and Prompt share: how a plan is built of blocks, and the operations that look into a cache."""

    def __init__(
        self,
        weights: Weights,
        parts: Sequence[blocks.Block],
        head: blocks.Head,
        threads: int,
        how: AttentionOptions,
        routing: Routing,
    ):
        self._routing = routing
        self._weights = weights
        self._parts = parts
        self._head = head
        self._threads = threads
        self._how = how
        self._rope_tables: dict[blocks.Rope, tuple[np.ndarray, np.ndarray]] = {}
        self._caches: list[Cache] = []  # that the operations point to; none while they are pointed elsewhere
        self._is_built = False  # whether all operations are there, for caches of `_type`
        self._type: CacheType | None = None
        self._n_ctx = 0  # what plain attention has room for
        self.vocab, self.n_embd = weights[head.embedding].shape

    def _use(self, caches: list[Cache]) -> None:
        """Point the operations to other caches; build them first, or once more for caches of another type.

        An interrupt on the way leaves nothing that the next call takes for complete.
        """
        if len(caches) == len(self._caches) and all(a is b for a, b in zip(caches, self._caches)):
            return
        self._caches = []
        n_ctx = max(cache.n_ctx for cache in caches)
        wider = not self._how.flash and n_ctx > self._n_ctx
        if not self._is_built or caches[0].type != self._type or wider:
            self._is_built = False
            self._type, self._n_ctx = caches[0].type, n_ctx
            self._looking: list[tuple[int, blocks.Attention, tuple[str, ...], np.ndarray]] = []
            self._ops = OpList(self._threads)
            for block in self._parts:
                for part in block.parts:
                    if isinstance(part, blocks.Attention):
                        self._attention(block.layer, part)
                    elif isinstance(part, blocks.Experts):
                        self._experts(part)
                    elif isinstance(part, blocks.FeedForward):
                        self._feed_forward(part)
            self._finish(self._ops)
            self._is_built = True
        self._places = [
            np.array([(c.k[layer].ctypes.data, c.v[layer].ctypes.data, c.n_ctx) for c in caches], np.int64)
            for layer in range(len(caches[0].k))
        ]
        for layer, part, names, parameters in self._looking:
            cos, sin = self._tables(part.rope, n_ctx)
            place = self._places[layer].ctypes.data
            values = {
                "cos": cos.ctypes.data,
                "sin": sin.ctypes.data,
                "cache": place,
                "caches": place,
                "window": part.window or n_ctx,
            }
            for name in values.keys() & set(names):
                parameters[names.index(name)] = values[name]
        self._caches = caches

    def _heads(self, part: blocks.Attention) -> Heads:
        assert self._type is not None
        k, v = (types.get(name).ggml_type for name in (self._type.k, self._type.v))
        rotations = self._type.rotations(part.head_dim_k, part.head_dim_v)
        return Heads(part.heads // part.kv_heads, part.head_dim_k, part.head_dim_v, k, v, *rotations)

    def _span(self, flash: int) -> int:
        """Positions worked on at a time: so many with a streaming softmax, all for plain attention."""
        return (
            flash
            if self._how.flash
            else -(-self._n_ctx // float_attention.KEYS_TOGETHER) * float_attention.KEYS_TOGETHER
        )

    def _tables(self, rope: blocks.Rope, n_ctx: int) -> tuple[np.ndarray, np.ndarray]:
        held = self._rope_tables.get(rope)
        if held is None or len(held[0]) < n_ctx:
            factors = float_linear.vector(self._weights[rope.factors]) if rope.factors else None
            held = self._rope_tables[rope] = float_ops.rope_tables(rope, n_ctx, factors)
        return held

    def _look(self, layer: int, part: blocks.Attention, function: int, names: tuple[str, ...], **values: int) -> None:
        """Append an operation on a layer's cache."""
        self._looking.append((layer, part, names, self._ops.add(function, names, wait=True, **values)))

    def _vector(self, ops: OpList, name: str | None) -> int:
        """Address of a norm's weight or a bias; 0 for None."""
        return ops.keep(float_linear.vector(self._weights[name])).ctypes.data if name else 0

    def _rows(self, linear: blocks.Linear) -> int:
        return self._weights[linear.weight].shape[0]

    def _attention(self, layer: int, part: blocks.Attention) -> None:
        raise NotImplementedError

    def _feed_forward(self, part: blocks.FeedForward) -> None:
        raise NotImplementedError

    def _experts(self, part: blocks.Experts) -> None:
        raise NotImplementedError

    def _choice(self, part: blocks.Experts) -> dict[str, int]:
        """How the kernels are told which experts to take."""
        least, share = self._routing.reduction or (part.used, 0.0)
        return {
            "experts": part.count,
            "used": part.used,
            "least": least,
            "share": self._ops.constant(share),
            "normalise": int(part.normalise),
            "scale": self._ops.constant(part.scale),
            "bias": self._vector(self._ops, part.choice_bias),
            "sigmoid": int(part.gating == "sigmoid"),
            "groups": part.groups,
            "groups_used": part.groups_used,
        }

    def _product(self, tensor: Tensor) -> int:
        """Address of the product of its type with a vector."""
        kernel = dispatch.product(tensor.type)
        assert kernel is not None
        return kernel.address

    def _matrices(self, linear: blocks.Linear) -> tuple[Tensor, int, int]:
        """A stacked tensor, its address, and the bytes of an expert's matrix."""
        tensor = self._weights[linear.weight]
        data = self._ops.keep(tensor.data)
        return tensor, data.ctypes.data, data.nbytes // tensor.shape[0]

    def _finish(self, ops: OpList) -> None:
        """What comes after the blocks."""


def _rope_values(part: blocks.Attention) -> dict[str, int]:
    """How the kernels are told which elements make a pair."""
    adjacent = part.rope.style == "norm"
    return {
        "rope_dim": part.rope.dim,
        "step": 2 if adjacent else 1,
        "pair": 1 if adjacent else part.rope.dim // 2,
        "kv_heads": part.kv_heads,
    }


class Step(_Plan):
    """One token: `step(token, cache) -> float32[vocab]`, the logits after it; the cache then holds it."""

    def __init__(
        self,
        weights: Weights,
        parts: Sequence[blocks.Block],
        head: blocks.Head,
        threads: int,
        how: AttentionOptions,
        routing: Routing,
    ):
        super().__init__(weights, parts, head, threads, how, routing)
        self._state = np.zeros(1, np.int64)
        self._x, self._logits = np.zeros(self.n_embd, np.float32), np.zeros(self.vocab, np.float32)

    def __call__(self, token: int, cache: Cache) -> np.ndarray:
        """A fresh array. The caller has seen to it that the cache has room."""
        self._use([cache])
        self._x[:] = float_linear.embed(self._weights[self._head.embedding], np.array([token]))[0]
        self._state[0] = cache.length
        self._ops.run()
        cache.length += 1
        return self._logits.copy()

    def project(self, x: np.ndarray) -> np.ndarray:
        """Logits float32[vocab] of float32[n_embd] that has passed the blocks."""
        self._x[:] = x
        self._tail.run()
        return self._logits.copy()

    @functools.cached_property
    def _tail(self) -> OpList:
        ops = OpList(self._threads)
        self._finish(ops)
        return ops

    def _finish(self, ops: OpList) -> None:
        normed = self._norm(ops, self._head.norm)
        self._matvec(ops, self._head.output, normed, self._logits.ctypes.data, wait=True)

    def _attention(self, layer: int, part: blocks.Attention) -> None:
        normed = self._norm(self._ops, part.norm)
        q, k, v = (self._ops.buffer(name, 4 * self._rows(getattr(part, name))) for name in "qkv")
        self._normed_heads(part, part.q, part.q_norm, normed, q)
        self._normed_heads(part, part.k, part.k_norm, normed, k)
        self._matvec(self._ops, part.v, normed, v, wait=True)
        heads, span = self._heads(part), self._span(kernel_sizes.CHUNK)
        nbytes = kernel_sizes.step_scratch_bytes(part.heads, part.head_dim_k, heads.group, span)
        scratch, stride = self._ops.private("scratch", nbytes)
        partial = self._ops.buffer("partial", 4 * self._threads * part.heads * (part.head_dim_v + 2))
        self._look(
            layer, part, attention.attention(heads).address, attention.PARAMETERS, state=self._state.ctypes.data,
            q=q, k=k, v=v, scale=self._ops.constant(part.scale), span=span, partial=partial, scratch=scratch,
            private_stride=stride, **_rope_values(part),
        )  # fmt: skip
        joined = self._private("joined", part.heads * part.head_dim_v)
        self._ops.add(
            attention.combine(heads.rotate_v).address, attention.COMBINE, partial=partial, heads=part.heads,
            dim=part.head_dim_v, buffer=joined[0], private_stride=joined[1],
        )  # fmt: skip
        self._matvec(self._ops, part.out, joined, self._ops.buffer("added", 4 * self.n_embd), residual=True, wait=True)

    def _normed_heads(
        self, part: blocks.Attention, linear: blocks.Linear, norm: blocks.Norm | None, given: tuple[int, int], out: int
    ) -> None:
        """Queries or keys, normed head by head where there is a norm: by the thread that made them."""
        if norm is None:
            self._matvec(self._ops, linear, given, out)
            return
        multiple = math.lcm(_ROWS, part.head_dim_k)
        self._matvec(self._ops, linear, given, out, multiple=multiple)
        self._ops.add(
            decode_ops.head_norm.address, decode_ops.HEAD_NORM, x=out, weight=self._vector(self._ops, norm.weight),
            rows=self._rows(linear), dim=part.head_dim_k, eps=self._ops.constant(norm.eps), multiple=multiple,
        )  # fmt: skip

    def _experts(self, part: blocks.Experts) -> None:
        laid, normed = self._ops, self._norm(self._ops, part.norm)
        if part.shared is not None:
            self._gated(part.shared, normed)
        logits = laid.buffer("router", 4 * part.count)
        group = self._weights[part.router.weight].type.interleave
        self._matvec(laid, part.router, normed, logits, wait=True, multiple=max(4, group))
        picked, stride = laid.private("picked", kernel_sizes.picked_bytes(part.count, part.used))
        laid.add(
            expert_ops.pick.address,
            expert_ops.PICK,
            False,
            logits=logits,
            picked=picked,
            private_stride=stride,
            **self._choice(part),
        )
        gate, gate_at, gate_bytes = self._matrices(part.gate)
        up, up_at, up_bytes = self._matrices(part.up)
        hidden_bytes = -(-activation_bytes(part.ff) // 64) * 64
        hidden = laid.buffer("experts", part.used * hidden_bytes)
        products = laid.buffer("products", 8 * part.used * part.ff)
        every = expert_ops.GATE | expert_ops.UP | expert_ops.ACTIVATE
        steps = (every,) if self._routing.fused else (expert_ops.GATE, expert_ops.UP, expert_ops.ACTIVATE)
        for step in steps:
            laid.add(
                expert_ops.up.address, expert_ops.STEPS, step == steps[-1], steps=step, gate_kernel=self._product(gate),
                gate=gate_at, gate_bytes=gate_bytes, up_kernel=self._product(up), up=up_at, up_bytes=up_bytes,
                n=self.n_embd, ff=part.ff, multiple=_ROWS, picked=picked, stride=stride, x=normed[0],
                x_stride=normed[1], products=products, hidden=hidden, hidden_bytes=hidden_bytes,
            )  # fmt: skip
        down, down_at, down_bytes = self._matrices(part.down)
        laid.add(
            expert_ops.down.address, expert_ops.DOWN, True, kernel=self._product(down), weights=down_at,
            bytes=down_bytes,
            n=part.ff, rows=self.n_embd, multiple=_ROWS, picked=picked, stride=stride, used=part.used, hidden=hidden,
            hidden_bytes=hidden_bytes, out=laid.buffer("added", 4 * self.n_embd), residual=self._x.ctypes.data,
        )  # fmt: skip

    def _feed_forward(self, part: blocks.FeedForward) -> None:
        self._gated(part, self._norm(self._ops, part.norm))

    def _gated(self, part: blocks.FeedForward, normed: tuple[int, int]) -> None:
        n_ff = self._rows(part.gate)
        gate, up = self._ops.buffer("gate", 4 * n_ff), self._ops.buffer("up", 4 * n_ff)
        self._matvec(self._ops, part.gate, normed, gate)
        self._matvec(self._ops, part.up, normed, up)
        hidden = self._ops.buffer("hidden", activation_bytes(n_ff))
        self._ops.add(
            decode_ops.swiglu.address,
            decode_ops.SWIGLU,
            wait=True,
            gate=gate,
            up=up,
            n=n_ff,
            multiple=_ROWS,
            buffer=hidden,
        )
        self._matvec(
            self._ops, part.down, (hidden, 0), self._ops.buffer("added", 4 * self.n_embd), residual=True, wait=True
        )

    def _private(self, name: str, n: int) -> tuple[int, int]:
        """One activation buffer a thread."""
        return self._ops.private(name, activation_bytes(n))

    def _norm(self, laid: OpList, norm: blocks.Norm) -> tuple[int, int]:
        """Append the norm of x; address and stride of the threads' buffers it ends in."""
        buffer, stride = laid.private("normed", activation_bytes(self.n_embd))
        laid.add(
            decode_ops.norm.address, decode_ops.NORM, x=self._x.ctypes.data, weight=self._vector(laid, norm.weight),
            n=self.n_embd,
            eps=laid.constant(norm.eps), buffer=buffer, private_stride=stride,
        )  # fmt: skip
        return buffer, stride

    def _matvec(
        self,
        laid: OpList,
        linear: blocks.Linear,
        buffer: tuple[int, int],
        out: int,
        residual: bool = False,
        wait: bool = False,
        multiple: int = _ROWS,
    ) -> None:
        tensor = self._weights[linear.weight]
        weights = laid.keep(tensor.data).ctypes.data
        laid.add(
            decode_ops.matvec.address, decode_ops.MATVEC, wait, kernel=self._product(tensor), weights=weights,
            n=tensor.shape[1],
            rows=tensor.shape[0], multiple=multiple, buffer=buffer[0], stride=buffer[1], out=out,
            bias=self._vector(laid, linear.bias), residual=self._x.ctypes.data if residual else 0,
        )  # fmt: skip


class Prompt(_Plan):
    """A batch: `prompt(tokens, spans) -> float32[tokens, n_embd]` before the output norm; the caches then hold them."""

    def __init__(
        self,
        weights: Weights,
        parts: Sequence[blocks.Block],
        head: blocks.Head,
        threads: int,
        how: AttentionOptions,
        routing: Routing,
    ):
        super().__init__(weights, parts, head, threads, how, routing)
        self._state = np.zeros(prefill_ops.TABLE // 8 + prefill_ops.SPAN // 8 * BATCH_TOKENS, np.int64)
        self._x = np.zeros((BATCH_TOKENS, self.n_embd), np.float32)

    def __call__(self, tokens: np.ndarray, spans: Sequence[Span]) -> np.ndarray:
        """At most BATCH_TOKENS tokens; a view that the next call overwrites. Caches of several spans have one type."""
        self._use([span.cache for span in spans])
        count = len(tokens)
        self._x[:count] = float_linear.embed(self._weights[self._head.embedding], tokens)
        table = [(span.start, span.stop - span.start, span.cache.length) for span in spans]
        state = np.array([count, 0, len(spans), *itertools.chain.from_iterable(table)], np.int64)
        self._state[: len(state)] = state
        self._ops.run()
        for span in spans:
            span.cache.length += span.stop - span.start
        return self._x[:count]

    @property
    def _counted(self) -> int:
        """Address of the number of tokens."""
        return self._state.ctypes.data + prefill_ops.TOKENS

    def _floats(self, name: str, n: int) -> int:
        return self._ops.buffer(name, 4 * BATCH_TOKENS * n)

    def _attention(self, layer: int, part: blocks.Attention) -> None:
        ops, state = self._ops, self._state.ctypes.data
        normed = self._norm(part.norm, (part.q, part.k, part.v))
        q, k, v = (self._floats(name, self._rows(getattr(part, name))) for name in "qkv")
        self._multiply(part.q, normed, q)
        self._multiply(part.k, normed, k)
        self._multiply(part.v, normed, v, wait=True)
        for norm, x, count in ((part.q_norm, q, part.heads), (part.k_norm, k, part.kv_heads)):
            if norm is not None:
                ops.add(
                    prefill_ops.head_norm.address, prefill_ops.HEAD_NORM, state=state, x=x, weight=self._vector(ops,
                    norm.weight), heads=count, dim=part.head_dim_k, eps=ops.constant(norm.eps),
                )  # fmt: skip
        heads, span = self._heads(part), self._span(kernel_sizes.KEYS)
        self._look(
            layer, part, prefill_ops.rope(heads).address, prefill_ops.ROPE, state=state, q=q, k=k, v=v,
            scale=ops.constant(part.scale), **_rope_values(part),
        )  # fmt: skip
        rows = self._how.query_rows(heads.group, self._n_ctx, self._threads)
        tokens = max(1, min(kernel_sizes.QUERIES, rows) // heads.group)
        scratch, stride = ops.private("pieces", prefill_ops.attention_scratch_bytes(heads, tokens, span))
        width = part.heads * part.head_dim_v
        out = self._floats("attended", width)
        self._look(
            layer, part, prefill_ops.attention(heads, tokens).address, prefill_ops.ATTENTION, state=state, q=q,
            kv_heads=part.kv_heads, span=span, out=out, scratch=scratch, private_stride=stride,
        )  # fmt: skip
        self._multiply(part.out, self._ready(out, width, (part.out,)), self._x.ctypes.data, add=1, wait=True)

    def _feed_forward(self, part: blocks.FeedForward) -> None:
        self._gated(part, self._norm(part.norm, (part.gate, part.up)))

    def _gated(self, part: blocks.FeedForward, normed: tuple[int, int]) -> None:
        n_ff = self._rows(part.gate)
        gate, up = self._floats("gate", n_ff), self._floats("up", n_ff)
        self._multiply(part.gate, normed, gate)
        self._multiply(part.up, normed, up, wait=True)
        self._ops.add(
            prefill_ops.swiglu.address,
            prefill_ops.SWIGLU,
            state=self._state.ctypes.data,
            gate=gate,
            up=up,
            n=n_ff,
            out=gate,
        )
        self._multiply(part.down, self._ready(gate, n_ff, (part.down,)), self._x.ctypes.data, add=1, wait=True)

    def _experts(self, part: blocks.Experts) -> None:
        laid, (x, tiles) = self._ops, self._norm(part.norm, (part.router,))
        logits = self._floats("router", part.count)
        self._multiply(part.router, (x, tiles), logits, wait=True)
        gate, up, down = (self._unit(linear) for linear in (part.gate, part.up, part.down))
        multiple = math.lcm(gate.tokens, up.tokens, down.tokens)
        most = kernel_sizes.most_entries(BATCH_TOKENS, part.count, part.used, multiple)
        plan = laid.buffer("plan", kernel_sizes.plan_bytes(BATCH_TOKENS, part.count, part.used, multiple))
        chosen = laid.buffer("chosen", 8 * BATCH_TOKENS * part.used)
        shares = self._floats("shares", part.used)
        laid.add(
            expert_ops.choose.address, expert_ops.CHOOSE, True, tokens=self._counted, logits=logits, chosen=chosen,
            weights=shares, **self._choice(part),
        )  # fmt: skip
        laid.add(
            expert_ops.sort.address, expert_ops.SORT, True, tokens=self._counted, x=x, n=self.n_embd,
            experts=part.count,
            used=part.used, chosen=chosen, weights=shares, plan=plan, most=most, multiple=multiple,
        )  # fmt: skip
        given = {
            False: (plan + kernel_sizes.rows_at(part.count, most), 8)
        }  # address, bytes of an entry; True: quantized
        if gate.quantized or up.quantized:
            size = kernel_sizes.RECORD * (self.n_embd // 32)
            given[True] = laid.buffer("gathered", most * size), size
        vectors = self._vectors("vectors", part.count, self.n_embd)
        laid.add(
            expert_ops.gather.address, expert_ops.GATHER, True, plan=plan, experts=part.count, most=most, n=self.n_embd,
            tiles=given.get(True, (0, 0))[0], tokens=kernel_sizes.TILE_TOKENS, vectors=vectors[0],
            vector_bytes=vectors[1],
        )  # fmt: skip
        size = kernel_sizes.RECORD * (part.ff // 32) if down.quantized else 4 * part.ff
        hidden, few = laid.buffer("activated", most * size), self._vectors("activated vectors", part.count, part.ff)
        target = {"hidden": hidden, "down_tokens": down.tokens if down.quantized else 0}
        target |= {"down_vectors": few[0], "down_vector_bytes": few[1]}
        self._activated(part, plan, most, given, vectors, target)
        laid.add(
            expert_ops.add.address, expert_ops.ADD, True, out=self._x.ctypes.data, weights=self._matrices(part.down)[1],
            most=most, quantized=int(down.quantized), **self._multiplied(part.down, plan, (hidden, size), few),
        )  # fmt: skip
        if part.shared is not None:  # what the norm made is still there, its tiles may be those of something else
            self._gated(part.shared, self._ready(x, self.n_embd, (part.shared.gate, part.shared.up)))

    def _vectors(self, name: str, count: int, n: int) -> tuple[int, int]:
        """Activations of experts with few tokens: address, and bytes of each."""
        size = -(-activation_bytes(n) // 64) * 64
        return self._ops.buffer(name, count * kernel_sizes.FEW * size), size

    def _activated(
        self,
        part: blocks.Experts,
        plan: int,
        most: int,
        given: dict[bool, tuple[int, int]],
        vectors: tuple[int, int],
        target: dict[str, int],
    ) -> None:
        """Append act(gate) * up of all entries: one operation, or three where gate and up differ in type."""
        laid = self._ops
        matrices = [self._matrices(linear) for linear in (part.gate, part.up)]
        inputs = [given[self._unit(linear).quantized] for linear in (part.gate, part.up)]
        if self._routing.fused and matrices[0][0].type is matrices[1][0].type:
            laid.add(
                expert_ops.fused.address, expert_ops.FUSED, True, gate=matrices[0][1], up=matrices[1][1], **target,
                **self._multiplied(part.gate, plan, inputs[0], vectors),
            )  # fmt: skip
            return
        products = [laid.buffer(f"product {i}", 4 * most * part.ff) for i in range(2)]
        for i, linear in enumerate((part.gate, part.up)):
            laid.add(
                expert_ops.multiply.address, expert_ops.MULTIPLY, i == 1, weights=matrices[i][1], out=products[i],
                counter=i,
                **self._multiplied(linear, plan, inputs[i], vectors),
            )  # fmt: skip
        laid.add(
            expert_ops.activate.address, expert_ops.ACTIVATION, True, plan=plan, experts=part.count, gate=products[0],
            up=products[1], ff=part.ff, **target,
        )  # fmt: skip

    def _unit(self, linear: blocks.Linear) -> expert_ops.Unit:
        kind = self._weights[linear.weight].type
        return expert_ops.unit(kind.ggml_type, dispatch.batch(kind).quantized)

    def _multiplied(
        self, linear: blocks.Linear, plan: int, given: tuple[int, int], vectors: tuple[int, int]
    ) -> dict[str, int]:
        """What products with experts of one matrix are told of it, and of what it is multiplied by."""
        (tensor, _, nbytes), unit = self._matrices(linear), self._unit(linear)
        count, rows, n = tensor.shape
        scratch, stride = self._ops.private("panels", unit.scratch_bytes(n))
        return {
            "plan": plan, "experts": count, "lay_out": unit.lay_out.address, "product": unit.product.address,
            "tokens": unit.tokens, "panel_bytes": unit.panel_bytes, "bytes": nbytes, "n": n, "rows": rows,
            "x": given[0], "entry_bytes": given[1], "scratch": scratch, "private_stride": stride,
            "kernel": self._product(tensor), "vectors": vectors[0], "vector_bytes": vectors[1],
        }  # fmt: skip

    def _norm(self, norm: blocks.Norm, readers: Sequence[blocks.Linear]) -> tuple[int, int]:
        out = self._floats("normed", self.n_embd)
        self._ops.add(
            prefill_ops.norm.address, prefill_ops.NORM, state=self._state.ctypes.data, x=self._x.ctypes.data,
            weight=self._vector(self._ops, norm.weight), n=self.n_embd, eps=self._ops.constant(norm.eps), out=out,
        )  # fmt: skip
        return self._ready(out, self.n_embd, readers)

    def _ready(self, x: int, n: int, readers: Sequence[blocks.Linear]) -> tuple[int, int]:
        """Make x what the readers multiply: addresses of float32 rows and, for those that take them, of tiles."""
        if not any(dispatch.batch(self._weights[linear.weight].type).quantized for linear in readers):
            self._ops.wait()
            return x, 0
        tiles = self._ops.buffer("tiles", kernel_sizes.tiles_bytes(n, BATCH_TOKENS))
        self._ops.add(
            gemm.quantize_tiles.address, gemm.QUANTIZE, wait=True, x=x, n=n, tokens=self._counted, tiles=tiles
        )
        return x, tiles

    def _multiply(
        self, linear: blocks.Linear, given: tuple[int, int], out: int, add: int = 0, wait: bool = False
    ) -> None:
        tensor = self._weights[linear.weight]
        rows, n = tensor.shape
        how = dispatch.batch(tensor.type)
        scratch, stride = self._ops.private("panels", how.scratch_bytes(n))
        self._ops.add(
            how.kernel(add).address, gemm.MULTIPLY, wait, weights=self._ops.keep(tensor.data).ctypes.data, n=n,
            rows=rows, tokens=self._counted, x=given[how.quantized], out=out, bias=self._vector(self._ops, linear.bias),
            scratch=scratch, private_stride=stride,
        )  # fmt: skip


class Fast:
    """Step and Prompt of one model, as `Model.forward` calls them."""

    def __init__(
        self,
        weights: Weights,
        parts: Sequence[blocks.Block],
        head: blocks.Head,
        threads: int,
        how: AttentionOptions,
        routing: Routing,
    ):
        self.step = Step(weights, parts, head, threads, how, routing)
        self.prompt = Prompt(weights, parts, head, threads, how, routing)

    @property
    def work_bytes(self) -> int:
        """Memory worked in so far, beside weights and caches; what placement/workspace.py predicts."""
        found = 0
        for laid in (self.step, self.prompt):
            tables = sum(t.nbytes for pair in laid._rope_tables.values() for t in pair)
            found += laid._ops.nbytes + laid._x.nbytes + laid._state.nbytes + tables
        return found + self.step._logits.nbytes

    def last(self, ids: np.ndarray, cache: Cache) -> np.ndarray:
        """float32[1, vocab]: logits after the last of int64[tokens], which the cache then holds."""
        if len(ids) == 1:
            return self.step(int(ids[0]), cache)[None]
        for x in self.hidden(ids, cache):
            last = x[-1]
        return self.step.project(last)[None]

    def hidden(self, ids: np.ndarray, cache: Cache) -> Iterator[np.ndarray]:
        """float32[tokens, n_embd] before the output norm, in batches, each valid until the next."""
        for start in range(0, len(ids), BATCH_TOKENS):
            part = ids[start : start + BATCH_TOKENS]
            yield self.prompt(part, [Span(0, len(part), cache)])
