"""`BlockRunner`: computes the parts of a model's blocks from its tensors, layer by layer in float32.

A `Model` is a BlockRunner. So is each worker of a model over several devices (`runtime/parallel/worker.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from quantkit.archs.common import blocks
from quantkit.codegen import jit
from quantkit.errors import DataError, UnsupportedError
from quantkit.formats.gguf import Tensor
from quantkit.runtime.blocks import (
    altup,
    block_indexer,
    compressed_attention,
    experts,
    float_attention,
    float_linear,
    float_ops,
    hyper_connections,
    indexer,
    kimi_delta,
    latent,
    layer_input,
    mamba2,
    ngrams,
    pooled_indexer,
    recurrent,
)
from quantkit.runtime.blocks.float_attention import AttentionOptions, Heads
from quantkit.runtime.blocks.spans import Span
from quantkit.runtime.blocks.token_weights import HeldInput, weighed
from quantkit.runtime.kv.cache import Cache
from quantkit.runtime.scale_check import describe_nonfinite

Observer = Callable[..., None]  # of (name, x), or (name, x, number, count) for one of several matrices


class BlockRunner:
    """The parts of blocks, computed over tensors by name.

    weights, numerics, threads, attention, mla, expert_reduction, fused_experts, tripwire   as a Model has them
    path       what errors call the file
    observer   called with (name, float32[tokens, n]) for what enters each weight matrix, and of experts with
               (name, float32[tokens, n], expert, experts); None by default
    weighs_tokens   the observer gets the inputs of queries, keys and values times the square root of the attention that
                    their tokens receive (`token_weights`); False by default. A model on several devices cannot
    output_observer   called with what leaves each expert, see `experts.run`; None by default. A model on several
               devices, and one that runs as compiled plans, does not call it
    """

    def __init__(
        self,
        path: Path,
        weights: Mapping[str, Tensor],
        *,
        numerics: str,
        threads: int,
        attention: AttentionOptions,
        mla: int,
        expert_reduction: experts.Reduction | None = None,
        fused_experts: bool = True,
        tripwire: str = "layer",
    ):
        self.path, self.weights = path, weights
        self.numerics, self.threads, self.attention, self.mla = numerics, threads, attention, mla
        self.expert_reduction, self.fused_experts, self.tripwire = expert_reduction, fused_experts, tripwire
        self.observer: Observer | None = None
        self.weighs_tokens = False
        self._held: HeldInput | None = None
        self.output_observer: experts.ObserveOutputs | None = None
        self._vectors: dict[str, np.ndarray] = {}
        self._linears: dict[blocks.Linear, float_linear.FloatLinear] = {}
        self._tables: dict[blocks.Rope, tuple[np.ndarray, np.ndarray]] = {}
        self._checking = False
        self.selections: list[Any] = []  # of the last block with an indexer, for each span

    def run_block(self, block: blocks.Block, x: np.ndarray, spans: list[Span]) -> np.ndarray:
        """float32[tokens, n_embd] that leaves a block."""
        if block.hyper:
            return hyper_connections.run(self, block, x, spans)
        if block.altup is not None:
            return self.run_altup(block, x, spans)
        out, deferred = x, []
        for layer, part in block.numbered_parts:
            added = self.run_part(part, layer, x if block.parallel else out, spans)
            if isinstance(part, blocks.Experts) and part.deferred:
                deferred.append(added)
            else:
                out = out + added
        for added in deferred:
            out = out + added
        return out if block.out_scale is None else out * self.vector(block.out_scale)

    def run_part(self, part: blocks.Part, layer: int, x: np.ndarray, spans: list[Span]) -> np.ndarray:
        """float32[tokens, n_embd] that a part of a block adds to x; of n-grams, what is added to all streams."""
        if isinstance(part, blocks.Attention):
            return self._attention(part, layer, x, spans)
        if isinstance(part, blocks.LatentAttention):
            return self.latent_attention(part, layer, x, spans)
        if isinstance(part, blocks.CompressedAttention):
            return compressed_attention.attention(self, part, layer, x, spans)
        if isinstance(part, blocks.DeltaNet):
            return self.delta_net(part, layer, x, spans)
        if isinstance(part, blocks.KimiDelta):
            return self.kimi_delta(part, layer, x, spans)
        if isinstance(part, blocks.Mamba2):
            return self.mamba2(part, layer, x, spans)
        if isinstance(part, blocks.ShortConv):
            return self.short_conv(part, layer, x, spans)
        if isinstance(part, blocks.LayerInput):
            return layer_input.layer_input(self, part, x, spans)
        if isinstance(part, blocks.NGrams):
            return self.ngrams(part, layer, x, spans)
        if isinstance(part, blocks.Experts):
            return self._experts(part, x, spans)
        if isinstance(part, blocks.Laurel):
            return altup.laurel(self, part, x)
        return self.gated(part, self.norm(part.norm, x))

    def _attention(self, part: blocks.Attention, layer: int, x: np.ndarray, spans: list[Span]) -> np.ndarray:
        y = self.norm(part.norm, x)
        own = part.source is None
        spans = self.hold(y, [part.q, part.k, part.v] if own else [part.q], spans)
        projected, *key_value = self.linears([part.q, part.k, part.v] if own and part.k != part.v else [part.q], y)
        k, v = self._keys_and_values(part, y, *key_value) if own else (None, None)
        gates = None if part.head_gate is None else self.linear(part.head_gate, y)
        if isinstance(part.indexer, blocks.PooledIndexer):
            spans = pooled_indexer.select(self, part.indexer, layer, y, spans)
        elif isinstance(part.indexer, blocks.BlockIndexer):
            spans = block_indexer.select(self, part.indexer, part.rope, layer, y, spans)
        q = self.without_gates(projected, part.heads) if part.gated else projected
        q = self._rotated(part, part.q_norm, q, spans)
        k = None if k is None else self._rotated(part, part.k_norm, k, spans)
        if part.temperature is not None:
            self.scale_queries(q, part.temperature, spans)
        y = self.append_and_attend(part, layer if part.source is None else part.source, q, k, v, spans)
        self.release(spans, part.heads)
        if part.gated:
            self.apply_gates(y, projected, part.head_dim_v)
        if gates is not None:
            y = (y.reshape(len(y), part.heads, -1) * self.sigmoid(gates)[:, :, None]).reshape(y.shape)
        self.check(f"attention of blk.{layer} over a cache of {spans[0].cache.cache_type}", y)
        return self.norm(part.post_norm, self.linear(part.out, self.norm(part.sub_norm, y)))

    def _keys_and_values(
        self, part: blocks.Attention, y: np.ndarray, *projected: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Keys float32[tokens, kv_heads * head_dim_k] before norm and RoPE, and values with their norm.

        `projected` are both before their norms; without, one product gives both.
        """
        k, v = projected or [self.linear(part.k, y)] * 2
        if part.v_norm is not None:
            v = self.norm(part.v_norm, v.reshape(-1, part.head_dim_v)).reshape(v.shape)
        return k, v

    def append_and_attend(
        self,
        part: blocks.Attention,
        layer: int,
        q: np.ndarray,
        k: np.ndarray | None,
        v: np.ndarray | None,
        spans: list[Span],
    ) -> np.ndarray:
        """float32[tokens, heads * head_dim_v] of queries, keys and values after rope.

        The caches get the latter two, as `layer`; without, they have them already.
        """
        if k is not None and v is not None:
            for span in spans:
                self.append_rows(k[span.start : span.stop], v[span.start : span.stop], span.cache, layer)
        return self.attend(Heads.of(part, self.vector(part.sinks) if part.sinks else None), layer, q, spans)

    def attend(
        self, heads: Heads, layer: int, q: np.ndarray, spans: list[Span], attention: AttentionOptions | None = None
    ) -> np.ndarray:
        """float32[tokens, heads * head_dim_v] of queries over what the caches hold."""
        return float_attention.attend(heads, layer, q, spans, self.threads, attention or self.attention)

    def attend_latents(
        self, part: blocks.LatentAttention, layer: int, q: np.ndarray, latents: np.ndarray, spans: list[Span]
    ) -> np.ndarray:
        """float32[tokens, heads * head_dim_v] of latent attention; see `latent.attend`."""
        return latent.attend(self, part, layer, q, latents, spans)

    def select_positions(self, part: indexer.AnyIndexer, layer: int, index: indexer.Index, spans: list[Span]) -> None:
        """Append an indexer's keys to the caches, and keep what it selects; see `indexer.selections`."""
        if isinstance(part, blocks.BlockIndexer):
            self.selections = block_indexer.selections(part, layer, index, spans, self.threads)
        elif isinstance(part, blocks.PooledIndexer):
            self.selections = pooled_indexer.selections(self, part, layer, index, spans)
        else:
            self.selections = indexer.selections(part, layer, index, spans, self.threads)

    def selected(self, layer: int, spans: list[Span]) -> list[Span]:
        """The spans with what the last indexer has selected."""
        return [span._replace(selected=selected) for span, selected in zip(spans, self.selections, strict=True)]

    def position_bound(self, cache: Cache, tokens: int) -> int:
        """All positions of a cache's next tokens are below this."""
        return cache.length + tokens

    def attend_compressed(
        self, part: blocks.CompressedAttention, layer: int, given: compressed_attention.Projected, spans: list[Span]
    ) -> np.ndarray:
        """float32[tokens, heads * dim]; see `compressed_attention.attend`."""
        return compressed_attention.attend(self, part, layer, given, spans)

    def head_projections(self, part: blocks.LatentAttention) -> latent.HeadProjections:
        """The matrices between latents and heads."""
        return latent.HeadProjections(part, self.weights, self.threads)

    def apply_rope(self, x: np.ndarray, rope: blocks.Rope, dim: int, spans: list[Span]) -> None:
        """Apply RoPE to heads of `dim` elements, in place."""
        if not rope.dim:
            return
        positions = np.concatenate([np.arange(s.stop - s.start) + s.cache.length for s in spans])
        rope = rope.of_context(max(s.cache.n_ctx for s in spans))
        tables = self._rope(rope, int(positions.max()) + 1)
        float_ops.apply_rope(x, rope.style, dim, tables, positions, self.threads)

    def gated(self, part: blocks.FeedForward, y: np.ndarray) -> np.ndarray:
        """The gated feed-forward of y, which is normed: down(act(gate y) * (up y))."""
        up, *gates = self.linears([part.up] if part.gate == part.up else [part.up, part.gate], y)
        gate = gates[0] if gates else up
        if part.cutoff is not None:
            gate = self.largest_gates(gate, part.cutoff)
        y = self.norm(part.sub_norm, self.activate(part.activation, gate, up, part.limit))
        return self.norm(part.post_norm, self.linear(part.down, y))

    def _experts(self, part: blocks.Experts, x: np.ndarray, spans: list[Span]) -> np.ndarray:
        y = self.norm(part.norm, x)
        entering = y if part.router_norm is None else self.norm(part.router_norm, x)
        chosen, weights = self.route(part, self.linear(part.router, entering), self._experts_of_tokens(part, spans))
        out = self.run_experts(part, self._through(part.latent_down, y), chosen, weights)
        self.check(part.down.weight, out)
        out = self.norm(part.routed_norm, self._through(part.latent_up, out))
        if part.shared is not None:
            y = y if part.shared.norm == part.norm else self.norm(part.shared.norm, x)
            out = out + self._shared(part.shared, part.shared_gate, y)
        return self.norm(part.post_norm, out)

    def _through(self, linear: blocks.Linear | None, x: np.ndarray) -> np.ndarray:
        return x if linear is None else self.linear(linear, x)

    def _shared(self, part: blocks.FeedForward, gate: str | None, y: np.ndarray) -> np.ndarray:
        """The shared expert of y, which is normed, times its gate's sigmoid if it has one."""
        out = self.gated(part, y)
        if gate is not None:
            self.observe(gate, y)
            out *= self.sigmoid(y @ self.vector(gate))[:, None]
            self.check(gate, out)
        return out

    def run_experts(self, part: blocks.Experts, y: np.ndarray, chosen: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """Like y, float32[tokens, n_embd] or latents: what the experts chosen for each token make of it, weighted and
        added up."""
        observe = None if self._checking else self.observer
        observe_outputs = None if self._checking else self.output_observer
        return experts.run(part, self.weights, y, chosen, weights, self.threads, observe, observe_outputs)

    # ------------------------------------------------------------ operations that a GPU's worker overrides with kernels

    def rms_norm(self, x: np.ndarray, norm: blocks.Norm) -> np.ndarray:
        """x / sqrt(mean(x^2) + eps) * weight, by rows of the weight's length."""
        return float_ops.rms_norm(x, self.norm_weight(norm, x.shape[-1]), norm.eps, self.threads)

    def centre(self, x: np.ndarray) -> np.ndarray:
        """x minus the mean of each row."""
        return float_ops.centre(x)

    def activate(
        self, name: blocks.Activation, gate: np.ndarray, up: np.ndarray, limit: float | None = None
    ) -> np.ndarray:
        """act(gate) * up, clamped at a limit; overwrites `gate`."""
        return float_ops.activate(name, gate, up, self.threads, limit)

    def sigmoid(self, x: np.ndarray) -> np.ndarray:
        """1 / (1 + e^-x)."""
        return float_ops.sigmoid(x)

    def without_gates(self, projected: np.ndarray, heads: int) -> np.ndarray:
        """The queries of a projection to queries and gates; see `float_ops.without_gates`."""
        return float_ops.without_gates(projected, heads)

    def apply_gates(self, x: np.ndarray, projected: np.ndarray, dim: int) -> None:
        """Multiply attention's output by sigmoids of its gates, in place; see `float_ops.apply_gates`."""
        float_ops.apply_gates(x, projected, dim, self.threads)

    def scale_queries(self, q: np.ndarray, temperature: blocks.Temperature, spans: list[Span]) -> None:
        """Scale queries by their position, in place; see `float_ops.scale_queries`."""
        float_ops.scale_queries(q, temperature, spans)

    def scale_heads(self, q: np.ndarray, scaling: blocks.HeadScaling, spans: list[Span]) -> None:
        """Scale queries by their position and head, in place; see `float_ops.scale_heads`."""
        float_ops.scale_heads(q, self.vector(scaling.scale), self.vector(scaling.bias), spans)

    def append_rows(self, k: np.ndarray, v: np.ndarray | None, cache: Cache, layer: int) -> None:
        """Append keys and values of a layer to a cache, at `cache.length`."""
        float_attention.append_rows(k, v, cache, layer)

    def route(
        self, part: blocks.Experts, logits: np.ndarray, given: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Experts and weights of each token; see `experts.route`."""
        bias = self.vector(part.choice_bias) if part.choice_bias else None
        return experts.route(part, logits, self.expert_reduction, bias, given)

    def from_host(self, x: np.ndarray) -> np.ndarray:
        """An array of the host on the device of this runner."""
        return x

    def run_altup(self, block: blocks.Block, x: np.ndarray, spans: list[Span]) -> np.ndarray:
        """What leaves a block of streams that AltUp mixes; see `altup.run`."""
        return altup.run(self, block, x, spans)

    def largest_gates(self, gate: np.ndarray, cutoff: float) -> np.ndarray:
        """Gates that are far above their mean; see `altup.largest_gates`."""
        return altup.largest_gates(gate, cutoff)

    def read_streams(
        self, connection: blocks.HyperConnection | blocks.StreamMixer, x: np.ndarray
    ) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
        """What a part of a block gets of several streams; see `hyper_connections.read`."""
        return hyper_connections.read(self, connection, x)

    def write_streams(self, x: np.ndarray, made: np.ndarray, shares: tuple[np.ndarray, ...]) -> np.ndarray:
        """The streams after that part; see `hyper_connections.write`."""
        return hyper_connections.write(x, made, shares)

    def spread(self, head: blocks.Head, x: np.ndarray) -> np.ndarray:
        """What enters the first block, of the embedding: streams, or x itself without."""
        if isinstance(head.streams, blocks.AltUpHead):
            return altup.spread(self, head.streams, x)
        return x if head.streams is None else hyper_connections.spread(head.streams, x)

    def collapse(self, head: blocks.Head, x: np.ndarray) -> np.ndarray:
        """What enters the last norm, of what leaves the last block: of streams, or x itself without."""
        if isinstance(head.streams, blocks.AltUpHead):
            return altup.merge(self, head.streams, x)
        return x if head.streams is None else hyper_connections.collapse(self, head.streams, x)

    def _experts_of_tokens(self, part: blocks.Experts, spans: list[Span]) -> np.ndarray | None:
        """int64[tokens, used]: the rows of the table of the spans' tokens; None where there is no table."""
        if not part.table:
            return None
        tokens = [span.tokens for span in spans if span.tokens is not None]
        if len(tokens) < len(spans):
            raise UnsupportedError(
                f"{self.path}: {part.table} gives experts by tokens, and this computes a layer without its tokens"
            )
        return experts.of_tokens(part, self.weights, np.concatenate(tokens))

    def latent_attention(
        self, part: blocks.LatentAttention, layer: int, x: np.ndarray, spans: list[Span]
    ) -> np.ndarray:
        """What a latent attention block adds; see `latent.attention`."""
        return latent.attention(self, part, layer, x, spans)

    def ngrams(self, part: blocks.NGrams, number: int, x: np.ndarray, spans: list[Span]) -> np.ndarray:
        """What embeddings of n-grams add to all streams; see `ngrams.ngrams`."""
        return ngrams.ngrams(self, part, number, x, spans)

    def delta_net(self, part: blocks.DeltaNet, layer: int, x: np.ndarray, spans: list[Span]) -> np.ndarray:
        """What a recurrent block adds; see `recurrent.delta_net`."""
        return recurrent.delta_net(self, part, layer, x, spans)

    def kimi_delta(self, part: blocks.KimiDelta, layer: int, x: np.ndarray, spans: list[Span]) -> np.ndarray:
        """What Kimi Delta Attention adds; see `kimi_delta.kimi_delta`."""
        return kimi_delta.kimi_delta(self, part, layer, x, spans)

    def mamba2(self, part: blocks.Mamba2, layer: int, x: np.ndarray, spans: list[Span]) -> np.ndarray:
        """What a Mamba-2 mixer adds; see `mamba2.mamba2`."""
        return mamba2.mamba2(self, part, layer, x, spans)

    def short_conv(self, part: blocks.ShortConv, layer: int, x: np.ndarray, spans: list[Span]) -> np.ndarray:
        """What a gated short convolution adds; see `recurrent.short_conv`."""
        return recurrent.short_conv(self, part, layer, x, spans)

    def is_finite(self, y: np.ndarray) -> bool:
        """Whether y has neither NaN nor Inf; True without looking with `--tripwire off`."""
        return self.tripwire == "off" or float_ops.is_finite(y)

    # ------------------------------------------------------------------------------------------------------------------

    def _rotated(
        self, part: blocks.Attention, norm: blocks.Norm | None, x: np.ndarray, spans: list[Span]
    ) -> np.ndarray:
        """Queries or keys float32[tokens, heads * dim] with RoPE and their norm, head by head or over all heads."""
        dim = x.shape[1] if part.norms_across_heads else part.head_dim_k
        if norm is not None and not part.norms_after_rope:
            x = self.norm(norm, x.reshape(-1, dim)).reshape(x.shape)
        self.apply_rope(x, part.rope, part.head_dim_k, spans)
        if norm is not None and part.norms_after_rope:
            x = self.norm(norm, x.reshape(-1, dim)).reshape(x.shape)
        return x

    def norm(self, norm: blocks.Norm | None, x: np.ndarray) -> np.ndarray:
        """`rms_norm` with the tensors that a block names, and the non-finite check; x itself without a norm."""
        if norm is None:
            return x
        y = self.rms_norm(self.centre(x) if norm.centred else x, norm)
        if norm.bias:
            y += self.vector(norm.bias)
        self.check(norm.weight or "a norm without a weight", y)
        return y

    def linear(self, linear: blocks.Linear, x: np.ndarray) -> np.ndarray:
        """float32[tokens, rows]: the product with a weight matrix, its bias and scale, and the non-finite check."""
        if linear.number is not None:
            self.observe(linear.weight, x, linear.number, self.weights[linear.weight].shape[0])
        elif linear.rows is None or linear.rows[0] == 0:  # once for all matrices in a tensor
            self.observe(linear.weight, x)
        y = self._weight(linear)(x)
        self.check(linear.weight, y)
        return y

    def linears(self, linears: Sequence[blocks.Linear], x: np.ndarray) -> list[np.ndarray]:
        """The products of x with several matrices."""
        return [self.linear(linear, x) for linear in linears]

    def grouped(self, linear: blocks.Linear, x: np.ndarray, groups: int) -> np.ndarray:
        """float32[tokens, groups * rank] of x float32[tokens, groups * n] and a matrix [groups * rank, n]: its rows
        are a matrix for each group."""
        inputs = x.reshape(len(x), groups, -1)
        self.observe(linear.weight, inputs.reshape(-1, inputs.shape[2]))
        rank = self.weights[linear.weight].shape[0] // groups
        parts = [replace(linear, rows=(i * rank, (i + 1) * rank)) for i in range(groups)]
        y = np.concatenate([self._weight(p)(np.ascontiguousarray(inputs[:, i])) for i, p in enumerate(parts)], axis=1)
        self.check(linear.weight, y)
        return y

    @property
    def observes(self) -> bool:
        """Whether inputs of matrices are passed to an observer."""
        return self.observer is not None and not self._checking

    def observe(self, name: str, x: np.ndarray, *which: int) -> None:
        """Pass the observer the inputs of a weight, or of its matrix `which`: (number, count)."""
        if self.observer is None or not self.observes:
            return
        if self._held is not None and self._held.takes(name, x):
            return
        self.observer(name, x, *which)

    def hold(self, x: np.ndarray, linears: Sequence[blocks.Linear], spans: list[Span]) -> list[Span]:
        """Let the observer wait for x, which enters `linears`, until `release`; spans that count attention.

        Without `weighs_tokens` nothing waits, and the spans are the same.
        """
        self._held = None
        if not (self.weighs_tokens and self.observes):
            return spans
        self._held = HeldInput(x, {linear.weight for linear in linears})
        return [span._replace(received=np.zeros(span.stop - span.start)) for span in spans]

    def release(self, spans: list[Span], heads: int) -> None:
        """Pass the observer what waits, weighed by the attention that `spans` have counted."""
        held, self._held = self._held, None
        if held is not None:
            x = weighed(held.x, spans, heads)
            for name in held.names:
                self.observe(name, x)

    def drop_cached(self, names: Iterable[str]) -> None:
        """Drop the vectors and products that are cached of these tensors."""
        for name in names:
            self._vectors.pop(name, None)
            for linear in [linear for linear in self._linears if name in (linear.weight, linear.bias, linear.scale)]:
                del self._linears[linear]

    def _weight(self, linear: blocks.Linear) -> float_linear.FloatLinear:
        result = self._linears.get(linear)
        if result is None:
            bias, scale = float_linear.bias(self.weights, linear), float_linear.scale(self.weights, linear)
            matrix = float_linear.matrix(self.weights, linear)
            result = self._linears[linear] = float_linear.FloatLinear(matrix, self.numerics, self.threads, bias, scale)
        return result

    def norm_weight(self, norm: blocks.Norm, n: int) -> np.ndarray:
        """float32[n] of a norm; ones where it has no weight."""
        if norm.factor != 1:
            scaled: np.ndarray = jit.readonly(self.vector(norm.weight) * np.float32(norm.factor))
            return scaled
        return self.vector(norm.weight) if norm.weight else jit.readonly(np.ones(n, np.float32))

    def vector(self, name: str) -> np.ndarray:
        """float32[n] of a norm's weight, a bias or another vector, decoded once."""
        result = self._vectors.get(name)
        if result is None:
            result = self._vectors[name] = float_linear.vector(self.weights[name])
        return result

    def rotations(self, rope: blocks.Rope, n_ctx: int) -> tuple[np.ndarray, np.ndarray]:
        """cos and sin, float32[n, rope.dim / 2], of at least `n_ctx` positions."""
        return self._rope(rope, n_ctx)

    def _rope(self, rope: blocks.Rope, n_ctx: int) -> tuple[np.ndarray, np.ndarray]:
        """cos and sin of at least `n_ctx` positions; see `float_ops.rope_tables`."""
        tables = self._tables.get(rope)
        if tables is None or len(tables[0]) < n_ctx:
            factors = float_linear.vector(self.weights[rope.factors])[: rope.dim // 2] if rope.factors else None
            tables = self._tables[rope] = float_ops.rope_tables(rope, 1 << (n_ctx - 1).bit_length(), factors)
        return tables

    def check(self, source: str, y: np.ndarray) -> None:
        """`_require_finite` during a diagnosis, or with `tripwire` "full"; otherwise one check a layer is enough."""
        if self._checking or self.tripwire == "full":
            self._require_finite(source, y)

    def _require_finite(self, source: str, y: np.ndarray) -> None:
        """DataError that names `source`, from which y float32[tokens, n] comes, if y has NaN or Inf."""
        if self.is_finite(y):
            return
        token, column = (int(i) for i in np.argwhere(~np.isfinite(y))[0])
        note = describe_nonfinite(self.weights.get(source))
        raise DataError(f"{self.path}: {source} made {y[token, column]} for token {token}, element {column}{note}")
