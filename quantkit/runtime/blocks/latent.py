"""Multi-head latent attention (MLA), layer by layer in float32.

A cache holds a latent for each token, kv_lora + rope elements and no values (of sparse attention, the keys of the
indexer in their place), or with `mla` 0 the keys and values of all heads. `mla` selects how attention is computed, as
-mla of ik_llama.cpp:

    0   full heads: kv_b computes keys and values of each token, once
    1   absorbed: k_b projects queries to latents, attention runs over the latents, whose first kv_lora elements are
        the values too, and v_b projects the result back to heads
    2   prompts of EXPAND tokens or more are expanded: keys and values of all latents are computed, some heads at a
        time, and attended to; fewer tokens are absorbed, with plain attention
    3   as 2, but with flash attention throughout

The results differ only by rounding. The matrices between latents and heads are those of the file: absorbed attention
takes k_b and v_b, full and expanded attention kv_b. Where the file has only the other form, the numbers are read from
that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from quantkit import types
from quantkit.archs.common import blocks
from quantkit.codegen import thread_pool
from quantkit.errors import UnsupportedError
from quantkit.formats.gguf import Tensor
from quantkit.runtime.blocks import float_attention, float_linear, float_ops, indexer
from quantkit.runtime.blocks.float_attention import AttentionOptions, Heads
from quantkit.runtime.blocks.spans import Span
from quantkit.runtime.blocks.token_weights import weighed
from quantkit.runtime.kernels import kv_rounding
from quantkit.runtime.kv.cache import Cache, CacheShape
from quantkit.runtime.kv.cache_type import CacheType

EXPAND = 128
MODES = (0, 1, 2, 3)

Weights = Mapping[str, Tensor]


class Observed(Protocol):
    """What `observe` needs of a BlockRunner."""

    @property
    def weights(self) -> Weights:
        """Tensors by name."""

    def observe(self, name: str, x: np.ndarray, *which: int) -> None:
        """Call the observer, if there is one."""


class LatentRun(Observed, Protocol):
    """What this module needs of a BlockRunner."""

    threads: int
    attention: AttentionOptions
    mla: int

    @property
    def observes(self) -> bool:
        """Whether inputs of matrices are observed."""

    def linear(self, linear: blocks.Linear, x: np.ndarray) -> np.ndarray:
        """The product with a weight matrix."""

    def norm(self, norm: blocks.Norm, x: np.ndarray) -> np.ndarray:
        """RMS norm."""

    def apply_rope(self, x: np.ndarray, rope: blocks.Rope, dim: int, spans: list[Span]) -> None:
        """RoPE in place, of heads of `dim` elements."""

    def scale_queries(self, q: np.ndarray, temperature: blocks.Temperature, spans: list[Span]) -> None:
        """Scale queries by their position, in place."""

    def scale_heads(self, q: np.ndarray, scaling: blocks.HeadScaling, spans: list[Span]) -> None:
        """Scale queries by their position and head, in place."""

    def check(self, what: str, y: np.ndarray) -> None:
        """Non-finite check of `what`."""

    def hold(self, x: np.ndarray, linears: Sequence[blocks.Linear], spans: list[Span]) -> list[Span]:
        """As of a BlockRunner: the observer waits for x."""

    def release(self, spans: list[Span], heads: int) -> None:
        """As of a BlockRunner: the observer gets it."""

    def position_bound(self, cache: Cache, tokens: int) -> int:
        """All positions of a cache's next tokens are below this."""

    def select_positions(self, part: indexer.AnyIndexer, layer: int, index: indexer.Index, spans: list[Span]) -> None:
        """As of a BlockRunner: what an indexer selects is kept."""

    def selected(self, layer: int, spans: list[Span]) -> list[Span]:
        """The spans with what is kept."""

    def head_projections(self, part: blocks.LatentAttention) -> HeadProjections:
        """The matrices between latents and heads."""

    def attend(
        self, heads: Heads, layer: int, q: np.ndarray, spans: list[Span], attention: AttentionOptions | None = None
    ) -> np.ndarray:
        """Attention over what the caches hold."""

    def attend_latents(
        self, part: blocks.LatentAttention, layer: int, q: np.ndarray, latents: np.ndarray, spans: list[Span]
    ) -> np.ndarray:
        """`attend` of this module, on the device of the cache."""


def is_latent(parts: Sequence[blocks.Block]) -> bool:
    """Whether a model has latent attention (MLA)."""
    return any(isinstance(part, blocks.LatentAttention) for block in parts for part in block.parts)


def cached(hparams: blocks.HParams, parts: Sequence[blocks.Block], mla: int) -> blocks.HParams:
    """The model's hyperparameters with the heads and dimensions of what its caches hold."""
    latents = [part for block in parts for part in block.parts if isinstance(part, blocks.LatentAttention)]
    if not latents:
        return hparams
    indexed = [part.indexer for part in latents if part.indexer is not None]
    if not mla:
        if indexed:
            raise UnsupportedError(
                f"-mla 0: the cache has values of all heads and no place for the keys of an indexer "
                f"({indexed[0].k.weight}); take -mla 1, 2 or 3"
            )
        return hparams
    found = replace(hparams, n_head_kv=1, head_dim_k=latents[0].latent, head_dim_v=indexed[0].dim if indexed else 0)
    if len({part.latent for part in latents}) == 1:
        return found
    rows = {i: p.latent for block in parts for i, p in block.numbered_parts if isinstance(p, blocks.LatentAttention)}
    most = max(rows.values())
    dims = tuple((rows.get(layer, most), found.head_dim_v) for layer in range(hparams.n_layer))
    return replace(found, head_dim_k=most, cached_dims_of=dims)


# --------------------------------------------------------------------------------------------- between latent and head


class HeadProjections:
    """The matrices between latents and heads of one layer, decoded head by head.

    is_local   whether the device that attends has all of them
    """

    is_local = True

    def __init__(self, part: blocks.LatentAttention, weights: Weights, threads: int):
        self.part, self.threads = part, threads
        matrices = part.kv_b, part.k_b, part.v_b
        self.kv_b, self.k_b, self.v_b = (weights[linear.weight] if linear is not None else None for linear in matrices)
        self.scales = {
            linear.weight: np.float32(float_linear.scale(weights, linear))
            for linear in matrices
            if linear is not None and linear.is_scaled
        }

    def of(self, head: int, absorbed: bool) -> tuple[np.ndarray, np.ndarray]:
        """k_h float32[nope, kv_lora] and v_h float32[head_dim_v, kv_lora]."""
        part = self.part
        if self.kv_b is not None and not (absorbed and self.k_b is not None and self.v_b is not None):
            k_and_v = self._rows(self.kv_b, head, part.nope + part.head_dim_v)
            return k_and_v[: part.nope], k_and_v[part.nope :]
        assert self.k_b is not None
        assert self.v_b is not None
        return self._rows(self.k_b, head, part.kv_lora).T, self._rows(self.v_b, head, part.head_dim_v)

    def _rows(self, tensor: Tensor, head: int, count: int) -> np.ndarray:
        """float32[count, columns]: the rows of a head, scaled."""
        rows = _rows(tensor, head, count)
        return rows * self.scales[tensor.name] if tensor.name in self.scales else rows

    def queries(self, q: np.ndarray) -> np.ndarray:
        """float32[tokens, heads * latent] of q float32[tokens, heads, head_dim_k], after rope."""
        part = self.part
        out = np.empty((len(q), part.heads, part.latent), np.float32)
        out[:, :, part.kv_lora :] = q[:, :, part.nope :]

        def project_head(head: int) -> None:
            np.matmul(q[:, head, : part.nope], self.of(head, True)[0], out=out[:, head, : part.kv_lora])

        self._each(project_head)
        return out.reshape(len(q), -1)

    def values(self, attended: np.ndarray) -> np.ndarray:
        """float32[tokens, heads * head_dim_v] of what heads attended to, float32[tokens, heads * kv_lora]."""
        part = self.part
        latents = attended.reshape(-1, part.heads, part.kv_lora)
        out = np.empty((len(latents), part.heads, part.head_dim_v), np.float32)

        def project_head(head: int) -> None:
            np.matmul(latents[:, head], self.of(head, True)[1].T, out=out[:, head])

        self._each(project_head)
        return out.reshape(len(latents), -1)

    def expanded(self, latents: np.ndarray, first: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Keys float32[heads, positions, head_dim_k] and values of heads first … stop of float32[positions, latent]."""
        part = self.part
        k = np.empty((stop - first, len(latents), part.head_dim_k), np.float32)
        v = np.empty((stop - first, len(latents), part.head_dim_v), np.float32)
        c = latents[:, : part.kv_lora]
        k[:, :, part.nope :] = latents[None, :, part.kv_lora :]

        def project_head(number: int) -> None:
            key, value = self.of(first + number, False)
            np.matmul(c, key.T, out=k[number, :, : part.nope])
            np.matmul(c, value.T, out=v[number])

        self._each(project_head, stop - first)
        return k, v

    def _each(self, project_head: Callable[[int], None], count: int | None = None) -> None:
        def task(begin: int, end: int) -> None:
            with float_ops.ignore_nonfinite():
                for head in range(begin, end):
                    project_head(head)

        thread_pool.over_rows(task, self.part.heads if count is None else count, threads=self.threads)


def _rows(tensor: Tensor, head: int, count: int) -> np.ndarray:
    """float32[count, columns]: the rows of a head, of two dimensions or three."""
    columns = tensor.shape[-1]
    group = tensor.type.interleave
    first, stop = head * count, (head + 1) * count
    begin, end = first // group * group, -(-stop // group) * group  # of interleaved rows, whole groups
    rows = tensor.type.dequantize(tensor.rows(begin, end), columns, threads=1)
    return rows[first - begin : stop - begin]


# ----------------------------------------------------------------------------------------------------------- attending


class _Expanded(Cache):
    """Keys and values float32[heads, positions, dim] of one layer, `before` of the positions before the batch."""

    def __init__(self, k: np.ndarray, v: np.ndarray, before: int):
        self._describe(
            CacheShape(1, len(k), ((k.shape[2], v.shape[2]),), frozenset(), None), k.shape[1], CacheType("f32", "f32")
        )
        self.k, self.v = (k.view(np.uint8),), (v.view(np.uint8),)
        self.length, self.nbytes = before, k.nbytes + v.nbytes


def attend_expanded(
    run: LatentRun, part: blocks.LatentAttention, projections: HeadProjections, layer: int, q: np.ndarray, span: Span
) -> np.ndarray:
    """float32[tokens, heads * head_dim_v] of q float32[tokens, heads, head_dim_k] of one span; its latents are cached.

    Expands as many heads at a time as fit `run.attention.work_mib`.
    """
    length = span.cache.length + span.stop - span.start
    rows = span.cache.k[layer][0, :length]
    kind, block = span.cache.type.k, span.cache.rotations[layer][0]
    latents = types.get(kind).dequantize(rows, part.latent, threads=run.threads)
    if block:
        latents = kv_rounding.rotate(latents, block)  # its own inverse
    heads_at_once = part.heads
    if run.attention.work_mib:
        bytes_per_head = 4 * length * (part.head_dim_k + part.head_dim_v)
        heads_at_once = max(1, min(heads_at_once, (run.attention.work_mib << 20) // bytes_per_head))
    parts = []
    for first in range(0, part.heads, heads_at_once):
        stop = min(part.heads, first + heads_at_once)
        keys = _Expanded(*projections.expanded(latents, first, stop), span.cache.length)
        head_queries = np.ascontiguousarray(q[:, first:stop]).reshape(len(q), -1)
        heads = Heads(stop - first, stop - first, part.head_dim_k, part.head_dim_v, part.scale)
        parts.append(run.attend(heads, 0, head_queries, [Span(0, len(q), keys, span.selected, span.received)]))
    return np.concatenate(parts, axis=1)


def absorbed(part: blocks.LatentAttention) -> Heads:
    """The heads of absorbed attention: all query heads share one latent per token."""
    return Heads(part.heads, 1, part.latent, part.kv_lora, part.scale, values_in_keys=True)


def full(part: blocks.LatentAttention) -> Heads:
    """The heads of attention over keys and values of every head."""
    return Heads(part.heads, part.heads, part.head_dim_k, part.head_dim_v, part.scale)


# ------------------------------------------------------------------------------------------------------------ the part


def attention(run: LatentRun, part: blocks.LatentAttention, layer: int, x: np.ndarray, spans: list[Span]) -> np.ndarray:
    """What a latent attention block adds to x float32[tokens, n_embd]."""
    y = run.norm(part.norm, x)
    spans = run.hold(y, [part.q if part.q_a is None else part.q_a, part.kv_a], spans)
    u = y
    if part.q_a is not None and part.q_a_norm is not None:
        u = run.norm(part.q_a_norm, run.linear(part.q_a, y))
    if part.sparse:
        spans = indexer.select(run, part, layer, y, u, spans)
    q = run.linear(part.q, u).reshape(len(x), part.heads, part.head_dim_k)
    rotated = np.ascontiguousarray(q[:, :, part.nope :]).reshape(len(x), -1)
    run.apply_rope(rotated, part.rope, part.rope.dim, spans)
    q[:, :, part.nope :] = rotated.reshape(len(x), part.heads, -1)
    if part.temperature is not None:
        run.scale_queries(q.reshape(len(x), -1), part.temperature, spans)
    if part.scaling is not None:
        run.scale_heads(q.reshape(len(x), -1), part.scaling, spans)
    kv = run.linear(part.kv_a, y)
    c = run.norm(part.kv_a_norm, np.ascontiguousarray(kv[:, : part.kv_lora]))
    r = np.ascontiguousarray(kv[:, part.kv_lora :])
    run.apply_rope(r, part.rope, part.rope.dim, spans)
    y = run.attend_latents(part, layer, q, np.concatenate([c, r], axis=1), spans)
    run.release(spans, part.heads)
    run.check(f"attention of blk.{layer} over a cache of {spans[0].cache.cache_type}", y)
    return run.linear(part.out, y)


def attend(
    run: LatentRun, part: blocks.LatentAttention, layer: int, q: np.ndarray, latents: np.ndarray, spans: list[Span]
) -> np.ndarray:
    """float32[tokens, heads * head_dim_v] of queries and latents after rope, as `mla` says."""
    projections = run.head_projections(part)
    if not run.mla:
        k, v = (x.transpose(1, 0, 2).reshape(len(q), -1) for x in projections.expanded(latents, 0, part.heads))
        for span in spans:
            float_attention.append_rows(k[span.start : span.stop], v[span.start : span.stop], span.cache, layer)
        y = run.attend(full(part), layer, q.reshape(len(q), -1), spans)
        observe(run, part.kv_b, weighed(latents[:, : part.kv_lora], spans, part.heads))
        return y
    for span in spans:
        float_attention.append_rows(latents[span.start : span.stop], None, span.cache, layer)
    out = np.empty((len(q), part.heads * part.head_dim_v), np.float32)
    absorbed_spans = []
    for span in spans:
        if run.mla > 1 and run.attention.flash and span.stop - span.start >= EXPAND:
            rows = slice(span.start, span.stop)
            out[rows] = attend_expanded(run, part, projections, layer, q[rows], span)
            observe(run, part.kv_b, weighed(latents[rows, : part.kv_lora], [span], part.heads))
        else:
            absorbed_spans.append(span)
    attention = replace(run.attention, flash=False) if run.mla == 2 else run.attention
    for span in absorbed_spans:
        rows = slice(span.start, span.stop)
        span_queries = np.ascontiguousarray(q[rows])
        observe(run, part.k_b, span_queries[:, :, : part.nope])
        attended = run.attend(
            absorbed(part),
            layer,
            projections.queries(span_queries),
            [Span(0, len(span_queries), span.cache, span.selected, span.received)],
            attention,
        )
        observe(run, part.v_b, attended.reshape(len(span_queries), part.heads, -1))
        out[rows] = projections.values(attended)
    return out


def observe(run: Observed, linear: blocks.Linear | None, x: np.ndarray) -> None:
    """Call the observer with the input, float32[tokens, n] or [tokens, heads, n], of a matrix of latent attention."""
    if linear is None:
        return
    if x.ndim == 3 and len(run.weights[linear.weight].shape) == 3:
        for head in range(x.shape[1]):
            run.observe(linear.weight, np.ascontiguousarray(x[:, head]), head, x.shape[1])
    else:
        run.observe(linear.weight, np.ascontiguousarray(x).reshape(-1, x.shape[-1]))
