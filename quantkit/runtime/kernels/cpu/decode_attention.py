"""Attention of one token over a KV cache, with the positions split between threads (split-KV).

For a query q of a head and the keys k and values v it sees, out = softmax(q k^T * scale) v. Each thread works on its
share of the positions, `span` at a time, with an online softmax. Per query head it keeps

    float32[dim_v]   sum of e^(score - maximum) * value, padded to whole vectors
    float32          running maximum of the scores
    float32          denominator: sum of e^(score - maximum)

and rescales the sums by e^(old maximum - new maximum) when the maximum grows. With a span of DECODE_SPAN positions all
of it stays in the L1 cache. With a span of the whole cache it is plain attention, where all scores are there before the
softmax. `merge` combines the threads' partial results by the same rule. A sink is one more score of a head there, whose
value is 0.

Query heads that share a key/value head are computed together, so a key or value is read once for all of them (from L1
once for every MAX_HEADS_AT_ONCE, or four with AVX2) and becomes floats in registers. The last thread, whose share ends
with the current position, first appends the token's own key and value to the cache. With a rotated K cache the queries
are rotated too; with a rotated V cache the result is rotated back.

The kernel is bound by multiply-adds: the inner loops have one for each query head and 16 elements of a row, from
registers. With AVX-512 all cache types except those of five and six bits take the same time as long as the cache fits
the CPU's caches; with AVX2 quantized values are bound by decoding them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from quantkit.codegen.callbacks import Callback, callback
from quantkit.codegen.jit import kernel
from quantkit.codegen.simd import F32, IrBuilder, Value, floats, load_float, load_int, simd_intrinsic, vector
from quantkit.placement.kernel_sizes import whole_vectors
from quantkit.runtime.kernels.cpu.activations import quantize
from quantkit.runtime.kernels.cpu.dequantize import FLOAT_TYPES
from quantkit.runtime.kernels.cpu.gates import multiply_sigmoid
from quantkit.runtime.kernels.cpu.kv_rows import KernelHeads, LayerCache, LayerView, rotate, row_floats, store_row
from quantkit.runtime.kernels.cpu.operation import OPERATION, load_record
from quantkit.runtime.kernels.cpu.selection import hide_blocks, sees_blocks
from quantkit.runtime.kernels.reference import exp

MAX_HEADS_AT_ONCE = 8  # query heads for which a key or value is read once; four positions of them fill 32 registers
_MASKED = -1e30  # below any score
_FLOATS16 = vector(16, F32)


@kernel
def apply_rope(x, out, dim, cos, sin, rope_dim, pair_step, pair_stride, scale):
    """out = x rotated by the angles of a position, times scale; float32[dim], cos and sin float32[rope_dim / 2].

    Pair j is elements j * pair_step and j * pair_step + pair_stride.
    """
    for i in range(rope_dim, dim):
        out[i] = x[i] * scale
    for j in range(rope_dim // 2):
        a, b = x[j * pair_step], x[j * pair_step + pair_stride]
        out[j * pair_step] = (a * cos[j] - b * sin[j]) * scale
        out[j * pair_step + pair_stride] = (a * sin[j] + b * cos[j]) * scale


@simd_intrinsic("void")
def span_scores(
    ir: IrBuilder,
    q: Value,
    keys: Value,
    stride: int,
    count: Value,
    group: int,
    dim: int,
    kind: int,
    scores: Value,
    row: Value,
) -> None:
    """scores[g, i] = q[g] . key i, for `group` queries float32[dim] and `count` keys of ggml type `kind`.

    Queries are padded to whole vectors. In bytes: `stride` from key to key, `row` from the scores of a query to those
    of the next.
    """

    width = whole_vectors(dim)

    def sums_of(i: Value, keys_at_once: int, heads: range) -> dict[tuple[int, int], Value]:
        """Sums of 16 lanes for each head and key."""
        sums: dict[tuple[int, int], Value] = {}
        for rows in zip(*(row_floats(ir, kind, keys + (i + r) * stride, 0, dim) for r in range(keys_at_once))):
            c = rows[0][0]
            for g in heads:
                query = ir.load(_FLOATS16, q + 4 * (g * width + c))
                for r, (_, key) in enumerate(rows):
                    sums[g, r] = ir.fma(query, key, sums[g, r]) if c else query * key
        return sums

    middle = count & -4  # those after it are summed in another order, whatever the CPU
    for heads, keys_at_once in _score_tiles(ir.isa, group):
        with ir.loop(0, middle, keys_at_once) as i:
            sums = list(sums_of(i, keys_at_once, heads).items())
            for four in (sums[k : k + 4] for k in range(0, len(sums), 4)):
                totals = ir.sum4(*(four[k % len(four)][1] for k in range(4)))
                for lane in range(0, len(four), keys_at_once):
                    g, r = four[lane][0]
                    ir.store(ir.part(totals, lane, keys_at_once), scores + (i + r) * 4 + row * g)
        with ir.loop(middle, count) as i:
            for (g, _), total in sums_of(i, 1, heads).items():
                ir.store(ir.sum(total), scores + i * 4 + row * g)


def _score_tiles(isa: str, group: int) -> Iterator[tuple[range, int]]:
    """(heads, keys) multiplied at a time, so that their sums fit the registers: 32 of 16 lanes, or 16 of eight."""
    most = MAX_HEADS_AT_ONCE if isa.startswith("avx512") else 4
    for start in range(0, group, most):
        heads = range(start, min(group, start + most))
        yield heads, 4 if most > 4 else {1: 4, 2: 2, 3: 2, 4: 1}[len(heads)]


@simd_intrinsic("void")
def cap_scores(ir: IrBuilder, scores: Value, row: Value, count: Value, group: Value, cap: float) -> None:
    """scores[g, i] become cap * tanh(scores[g, i] / cap), whole vectors of them; `row` as for `span_scores`."""
    limit = ir.splat(cap, 16)  # type: ignore[arg-type]  # float is what kernels pass
    with ir.loop(0, group) as g, ir.loop(0, count, 16) as i:
        address = scores + row * g + i * 4
        e = ir.exp(ir.load(_FLOATS16, address) * (ir.constant(_FLOATS16, 2.0) / limit))
        ir.store(limit - limit * 2.0 / (e + 1.0), address)


@simd_intrinsic("void")
def span_softmax(ir: IrBuilder, scores: Value, row: Value, count: Value, group: int, dim: int, out: Value) -> None:
    """Online-softmax update: scores become e^(score - maximum); out float32[group, dim + 2] is rescaled to match.

    out holds per head the weighted sum, the running maximum and the denominator.
    """
    masked = ir.constant(F32, _MASKED)
    for g in range(group):
        head_scores, result = scores + row * g, out + 4 * g * (dim + 2)
        with ir.loop(count, (count + 15) & -16) as i:  # pad to whole vectors
            ir.store(masked, head_scores + i * 4)
        old = ir.load(F32, result + 4 * dim)
        maximum = ir.variable(ir.splat(old, 16))
        with ir.loop(0, count, 16) as i:
            maximum.set(ir.max(maximum.get(), ir.load(_FLOATS16, head_scores + i * 4)))
        new = ir.largest(maximum.get())
        rescale = ir.exp(ir.splat(old - new, 16))
        denominator = ir.variable(ir.zero(_FLOATS16))
        with ir.loop(0, count, 16) as i:
            weights = ir.exp(ir.load(_FLOATS16, head_scores + i * 4) - ir.splat(new, 16))
            ir.store(weights, head_scores + i * 4)
            denominator.set(denominator.get() + weights)
        for c in range(0, dim, 16):
            ir.store(ir.load(_FLOATS16, result + 4 * c) * rescale, result + 4 * c)
        ir.store(new, result + 4 * dim)
        before = ir.load(F32, result + 4 * dim + 4) * rescale.lane(0)
        ir.store(before + ir.sum(denominator.get()), result + 4 * dim + 4)


@simd_intrinsic("void")
def span_values(
    ir: IrBuilder, weights: Value, row: Value, values: Value, stride: int, count: Value, group: int, dim: int,
    kind: int, out: Value,
) -> None:  # fmt: skip
    """out[g] += sum over i of weights[g, i] * value i. As many columns at a time as sums of all heads fit registers.

    out is float32[group, dim + 2] with dim rounded up to whole vectors, as for `span_softmax`.
    """
    width = whole_vectors(dim)
    for heads, columns in _value_tiles(ir.isa, group, kind):
        for first in range(0, dim, columns):
            stop = min(dim, first + columns)
            targets = [(g, c, out + 4 * (g * (width + 2) + c)) for g in heads for c in range(first, stop, 16)]
            sums = {(g, c): ir.variable(ir.load(_FLOATS16, address)) for g, c, address in targets}
            with ir.loop(0, count) as i:
                for c, value in row_floats(ir, kind, values + i * stride, first, stop):
                    for g in heads:
                        weight = ir.splat(ir.load(F32, weights + i * 4 + row * g), 16)
                        sums[g, c].set(ir.fma(weight, value, sums[g, c].get()))
            for g, c, address in targets:
                ir.store(sums[g, c].get(), address)


def _value_tiles(isa: str, group: int, kind: int) -> Iterator[tuple[range, int]]:
    """(heads, columns) added up at a time, as in `_score_tiles`. Quantized values take longer to decode than to add, so
    that it pays to decode them once, with sums in memory where registers are few."""
    few = not isa.startswith("avx512") and kind in FLOAT_TYPES
    most, columns, least = (4, 64, 16) if few else (MAX_HEADS_AT_ONCE, 256, 32)
    for start in range(0, group, most):
        heads = range(start, min(group, start + most))
        yield heads, columns // len(heads) // least * least


class AttentionParameters(NamedTuple):
    """Parameters of `attention`."""

    position: int  # address of an int64: the token's position
    q: int  # float32[heads, dim_k]
    k: int  # float32[kv_heads, dim_k], overwritten; 0: the cache has the token's key and value already
    v: int  # float32[kv_heads, dim_v], overwritten
    rope_dim: int
    pair_step: int  # RoPE pair j is elements j * pair_step and j * pair_step + pair_stride
    pair_stride: int
    kv_heads: int
    scale: int  # address of a float32
    layer_view: int  # address of a LayerView of one cache
    span: int  # positions per online-softmax step, a multiple of 16
    partial: int  # float32[threads, heads, dim_v + 2], dim_v rounded up to whole vectors
    scratch: int  # kernel_sizes.decode_attention_bytes per thread
    private_stride: int
    softcap: int = 0  # address of a float32 that scores are capped by, or 0
    selection: int = 0  # address of the record of selected blocks, or 0: all positions are seen
    rate: int = 1  # positions of a block
    head_bytes: int = 0  # from the record of a KV head to that of the next; 0: one for all
    sees_rest: int = 1  # whether positions after the last whole block are seen always


@functools.cache
def attention(shape: KernelHeads) -> Callback:
    """The operation that appends k and v to the cache and writes the thread's share of attention to `partial`."""
    group, dim_k, dim_v, k_type, v_type, rotate_k, rotate_v = shape
    k_bytes, v_bytes, padded_k, padded_v = shape.k_bytes, shape.v_bytes, shape.padded_k, shape.padded_v

    @callback(OPERATION)
    def run(parameters, thread, threads):
        p = load_record(AttentionParameters, parameters)
        view = load_record(LayerView, p.layer_view)
        cache = load_record(LayerCache, view.caches)
        position, rope_dim, pair_step, pair_stride = load_int(p.position), p.rope_dim, p.pair_step, p.pair_stride
        cos = floats(view.cos + position * rope_dim * 2, rope_dim // 2)
        sin = floats(view.sin + position * rope_dim * 2, rope_dim // 2)
        scale, span = load_float(p.scale), p.span
        if view.query_factors != 0:
            scale *= load_float(view.query_factors + position * 4)
        heads = p.kv_heads * group
        queries = p.scratch + thread * p.private_stride
        scores = queries + heads * padded_k * 4
        for head in range(heads):
            x, y = floats(p.q + head * dim_k * 4, dim_k), floats(queries + head * padded_k * 4, padded_k)
            apply_rope(x, y, dim_k, cos, sin, rope_dim, pair_step, pair_stride, scale)
            y[dim_k:] = 0
        rotate(queries, heads * dim_k, rotate_k)
        if thread == threads - 1 and p.k != 0:
            for head in range(p.kv_heads):
                x = floats(p.k + head * dim_k * 4, dim_k)
                apply_rope(x, x, dim_k, cos, sin, rope_dim, pair_step, pair_stride, np.float32(1))
            rotate(p.k, p.kv_heads * dim_k, rotate_k)
            rotate(p.v, p.kv_heads * dim_v, rotate_v)
            for head in range(p.kv_heads):
                row = head * cache.n_ctx + position
                store_row(k_type, p.k + head * dim_k * 4, dim_k, cache.k + row * k_bytes)
                store_row(v_type, p.v + head * dim_v * 4, dim_v, cache.v + row * v_bytes)
        first = max(0, position + 1 - view.window) if view.chunk == 0 else position // view.chunk * view.chunk
        count = position + 1 - first
        begin, end = first + count * thread // threads, first + count * (thread + 1) // threads
        whole = (position + 1) // p.rate * p.rate if p.sees_rest != 0 else position + 1
        partial = p.partial + thread * heads * (padded_v + 2) * 4
        out = floats(partial, heads * (padded_v + 2))
        for head in range(heads):
            out[head * (padded_v + 2) : (head + 1) * (padded_v + 2)] = 0
            out[head * (padded_v + 2) + padded_v] = _MASKED
        for head in range(p.kv_heads):
            result = partial + head * group * (padded_v + 2) * 4
            head_queries, record = queries + head * group * padded_k * 4, p.selection + head * p.head_bytes
            for start in range(begin, end, span):
                count_of_positions, row = min(span, end - start), head * cache.n_ctx + start
                stop = start + count_of_positions
                if p.selection != 0 and not sees_blocks(record, p.rate, whole, start, stop):
                    continue
                keys, values = cache.k + row * k_bytes, cache.v + row * v_bytes
                span_scores(head_queries, keys, k_bytes, count_of_positions, group, dim_k, k_type, scores, span * 4)
                if p.softcap != 0:
                    cap_scores(scores, span * 4, count_of_positions, group, load_float(p.softcap))
                if p.selection != 0:
                    for g in range(group):
                        hide_blocks(record, p.rate, whole, start, stop, scores + g * span * 4)
                span_softmax(scores, span * 4, count_of_positions, group, padded_v, result)
                span_values(scores, span * 4, values, v_bytes, count_of_positions, group, dim_v, v_type, result)

    return run


class MergeParameters(NamedTuple):
    """Parameters of `merge`."""

    partial: int  # float32[threads, heads, dim + 2] with dim in whole vectors, from `attention`
    heads: int
    dim: int
    gates: int  # float32[heads, dim]: the output is multiplied by sigmoid(gates); or 0
    buffer: int  # activation buffer
    private_stride: int
    sinks: int = 0  # float32[heads]: an extra score of each head, or 0
    head_gates: int = 0  # float32[heads]: the output of a head is multiplied by sigmoid of its gate; or 0


@functools.cache
def merge(rotation: int) -> Callback:
    """The split-KV merge: every thread writes the whole attention output, quantized, to its activation buffer.

    `rotation` elements are rotated back together; 0 for a V cache that is not rotated.
    """

    @callback(OPERATION)
    def run(parameters, thread, threads):
        p = load_record(MergeParameters, parameters)
        heads, dim = p.heads, p.dim
        padded = -(-dim // 16) * 16
        width = padded + 2
        partial = floats(p.partial, threads * heads * width)
        buffer = p.buffer + thread * p.private_stride
        y = floats(buffer, heads * dim)
        for head in range(heads):
            maximum = np.float32(_MASKED) if p.sinks == 0 else load_float(p.sinks + head * 4)
            sink = maximum
            for t in range(threads):
                maximum = max(maximum, partial[(t * heads + head) * width + padded])
            denominator = np.float32(0) if p.sinks == 0 else exp(sink - maximum)
            out = y[head * dim : head * dim + dim]
            out[:] = np.float32(0)
            for t in range(threads):
                part = partial[(t * heads + head) * width : (t * heads + head + 1) * width]
                rescale = exp(part[padded] - maximum)
                denominator += rescale * part[padded + 1]
                for i in range(dim):
                    out[i] += rescale * part[i]
            factor = np.float32(1) / denominator
            if p.head_gates != 0:  # before rotation, which is linear and within a head
                factor /= np.float32(1) + exp(-load_float(p.head_gates + head * 4))
            for i in range(dim):
                out[i] *= factor
        rotate(buffer, heads * dim, rotation)
        if p.gates != 0:
            multiply_sigmoid(buffer, p.gates, heads * dim)
        quantize(buffer, heads * dim)

    return run
