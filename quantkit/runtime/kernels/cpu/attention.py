"""Attention of one token over a cache, the positions cut between the threads.

With query q of a head, keys k and values v of the positions it sees, out = softmax(q k^T * scale) v. Each thread works
on some of the positions, `span` at a time, with a streaming softmax: it keeps the largest score so far (top), the sum
of e^(score - top) and the sum of e^(score - top) * value, and multiplies both by e^(old top - new top) when top grows.
With CHUNK positions at a time all of it stays in the first level of cache; with a span of the whole cache it is plain
attention, whose scores are all there before the softmax. `combine` joins the threads' results the same way.

Query heads that share a key/value head are done together, so a key or value is read once for all of them (from the
first level of cache once for every TOGETHER) and becomes floats in registers. The last thread, whose share ends with
the current position, first puts the token's own key and value in the cache. With rotated keys the queries are rotated
too, with rotated values the result is rotated back.

The bound is that of the multiply-adds: the inner loops are one for each query head and 16 elements of a row, from
registers, and all types of rows but five and six bits take the same time where the cache is not in slower memory.
"""

from __future__ import annotations

import functools

import numpy as np

from quantkit.codegen.callbacks import Callback, callback
from quantkit.codegen.jit import kernel
from quantkit.codegen.simd import F32, IrBuilder, Value, floats, load_float, load_int, simd_intrinsic, vector
from quantkit.runtime.kernels.cpu.activations import quantize
from quantkit.runtime.kernels.cpu.decode_ops import SIGNATURE
from quantkit.runtime.kernels.cpu.kv_rows import Heads, keep, rotate, row_floats
from quantkit.runtime.kernels.reference import exp

TOGETHER = 8  # query heads for which a key or value is read once; four positions of them fill the registers
PARAMETERS = ("state", "q", "k", "v", "cos", "sin", "rope_dim", "step", "pair", "cache", "kv_heads", "scale", "window",
              "span", "partial", "scratch", "private_stride")  # fmt: skip
# state: int64[1], the position. k and v are overwritten. step, pair: pair j of rope is elements j * step and
# j * step + pair. cache: int64[3], addresses of keys and of values, and the positions there is room for.
# scale points to a float32. span: a multiple of 16. scratch, private_stride: of each thread, scratch_bytes(...).

_FLOATS16 = vector(16, F32)


@kernel
def rope_into(x, out, dim, cos, sin, rope_dim, step, pair, scale):
    """out = x turned by the angles of a position (cos, sin float32[rope_dim / 2]), times scale; float32[dim]."""
    for i in range(rope_dim, dim):
        out[i] = x[i] * scale
    for j in range(rope_dim // 2):
        a, b = x[j * step], x[j * step + pair]
        out[j * step] = (a * cos[j] - b * sin[j]) * scale
        out[j * step + pair] = (a * sin[j] + b * cos[j]) * scale


@simd_intrinsic("void")
def chunk_scores(
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

    Bytes: `stride` from key to key, `row` from the scores of a query to the next one's.
    """

    def positions(i, many, heads):
        sums: dict[tuple[int, int], Value] = {}
        for keyed in zip(*(row_floats(ir, kind, keys + (i + r) * stride, 0, dim) for r in range(many))):
            c = keyed[0][0]
            queries = {g: ir.load(_FLOATS16, q + 4 * (g * dim + c)) for g in heads}
            for r, (_, key) in enumerate(keyed):
                for g, query in queries.items():
                    sums[g, r] = ir.fma(query, key, sums[g, r]) if c else query * key
        for g in heads:
            four = [sums[g, r] for r in range(many)]
            ir.store(ir.sum4(*four) if many == 4 else ir.sum(four[0]), scores + i * 4 + row * g)

    middle = count & -4
    for start in range(0, group, TOGETHER):
        heads = range(start, min(group, start + TOGETHER))
        with ir.loop(0, middle, 4) as i:
            positions(i, 4, heads)
        with ir.loop(middle, count) as i:
            positions(i, 1, heads)


@simd_intrinsic("void")
def chunk_softmax(ir: IrBuilder, scores: Value, row: Value, count: Value, group: int, dim: int, out: Value) -> None:
    """Replace scores by e^(score - top) and rescale out float32[group, dim + 2] where top grows."""
    lowest = ir.constant(F32, -1e30)
    for g in range(group):
        mine, result = scores + row * g, out + 4 * g * (dim + 2)
        with ir.loop(count, (count + 15) & -16) as i:  # what the vectors read beyond the end counts for nothing
            ir.store(lowest, mine + i * 4)
        old = ir.load(F32, result + 4 * dim)
        top = ir.variable(ir.splat(old, 16))
        with ir.loop(0, count, 16) as i:
            top.set(ir.max(top.get(), ir.load(_FLOATS16, mine + i * 4)))
        new = ir.largest(top.get())
        shrink = ir.exp(ir.splat(old - new, 16))
        total = ir.variable(ir.zero(_FLOATS16))
        with ir.loop(0, count, 16) as i:
            weights = ir.exp(ir.load(_FLOATS16, mine + i * 4) - ir.splat(new, 16))
            ir.store(weights, mine + i * 4)
            total.set(total.get() + weights)
        for c in range(0, dim, 16):
            ir.store(ir.load(_FLOATS16, result + 4 * c) * shrink, result + 4 * c)
        ir.store(new, result + 4 * dim)
        before = ir.load(F32, result + 4 * dim + 4) * shrink.lane(0)
        ir.store(before + ir.sum(total.get()), result + 4 * dim + 4)


@simd_intrinsic("void")
def chunk_values(
    ir: IrBuilder, weights: Value, row: Value, values: Value, stride: int, count: Value, group: int, dim: int,
    kind: int, out: Value,
) -> None:  # fmt: skip
    """out[g] += sum over i of weights[g, i] * value i. Of all heads as many columns at a time as sums fit registers."""
    together = min(group, TOGETHER)
    columns = 32 * max(1, 8 // together)
    for start in range(0, group, together):
        heads = range(start, min(group, start + together))
        for first in range(0, dim, columns):
            stop = min(dim, first + columns)
            places = [(g, c, out + 4 * (g * (dim + 2) + c)) for g in heads for c in range(first, stop, 16)]
            totals = {(g, c): ir.variable(ir.load(_FLOATS16, address)) for g, c, address in places}
            with ir.loop(0, count) as i:
                for c, value in row_floats(ir, kind, values + i * stride, first, stop):
                    for g in heads:
                        weight = ir.splat(ir.load(F32, weights + i * 4 + row * g), 16)
                        totals[g, c].set(ir.fma(weight, value, totals[g, c].get()))
            for g, c, address in places:
                ir.store(totals[g, c].get(), address)


@functools.cache
def attention(shape: Heads) -> Callback:
    """The operation for heads of this shape."""
    group, dim_k, dim_v, k_type, v_type, rotate_k, rotate_v = shape
    k_bytes, v_bytes = shape.k_bytes, shape.v_bytes

    @callback(SIGNATURE)
    def run(p, thread, threads):
        position, kv_heads = load_int(load_int(p)), load_int(p + 80)
        rope_dim, step, pair = load_int(p + 48), load_int(p + 56), load_int(p + 64)
        cos = floats(load_int(p + 32) + position * rope_dim * 2, rope_dim // 2)
        sin = floats(load_int(p + 40) + position * rope_dim * 2, rope_dim // 2)
        k_cache, v_cache, n_ctx = (
            load_int(load_int(p + 72)),
            load_int(load_int(p + 72) + 8),
            load_int(load_int(p + 72) + 16),
        )
        scale, window, span = load_float(load_int(p + 88)), load_int(p + 96), load_int(p + 104)
        heads = kv_heads * group
        queries = load_int(p + 120) + thread * load_int(p + 128)
        scores = queries + heads * dim_k * 4
        for head in range(heads):
            x, y = floats(load_int(p + 8) + head * dim_k * 4, dim_k), floats(queries + head * dim_k * 4, dim_k)
            rope_into(x, y, dim_k, cos, sin, rope_dim, step, pair, scale)
        rotate(queries, heads * dim_k, rotate_k)
        if thread == threads - 1:
            k, v = load_int(p + 16), load_int(p + 24)
            for head in range(kv_heads):
                x = floats(k + head * dim_k * 4, dim_k)
                rope_into(x, x, dim_k, cos, sin, rope_dim, step, pair, np.float32(1))
            rotate(k, kv_heads * dim_k, rotate_k)
            rotate(v, kv_heads * dim_v, rotate_v)
            for head in range(kv_heads):
                at = head * n_ctx + position
                keep(k_type, k + head * dim_k * 4, dim_k, k_cache + at * k_bytes)
                keep(v_type, v + head * dim_v * 4, dim_v, v_cache + at * v_bytes)
        first = max(0, position + 1 - window)
        count = position + 1 - first
        begin, end = first + count * thread // threads, first + count * (thread + 1) // threads
        partial = load_int(p + 112) + thread * heads * (dim_v + 2) * 4
        out = floats(partial, heads * (dim_v + 2))
        for head in range(heads):
            out[head * (dim_v + 2) : (head + 1) * (dim_v + 2)] = 0
            out[head * (dim_v + 2) + dim_v] = -1e30
        for head in range(kv_heads):
            result = partial + head * group * (dim_v + 2) * 4
            mine = queries + head * group * dim_k * 4
            for at in range(begin, end, span):
                many = min(span, end - at)
                keys, values = k_cache + (head * n_ctx + at) * k_bytes, v_cache + (head * n_ctx + at) * v_bytes
                chunk_scores(mine, keys, k_bytes, many, group, dim_k, k_type, scores, span * 4)
                chunk_softmax(scores, span * 4, many, group, dim_v, result)
                chunk_values(scores, span * 4, values, v_bytes, many, group, dim_v, v_type, result)

    return run


COMBINE = ("partial", "heads", "dim", "buffer", "private_stride")


@functools.cache
def combine(block: int) -> Callback:
    """The operation that joins what the threads made of their positions; `block` rotates it back, 0: it was not."""

    @callback(SIGNATURE)
    def run(p, thread, threads):
        """buffer = attention, quantized; by every thread for itself.

        partial: for each thread float32[heads, dim + 2]: the sums of e^(score - top) * value, then top and the sum of
        e^(score - top).
        """
        heads, dim = load_int(p + 8), load_int(p + 16)
        width = dim + 2
        partial = floats(load_int(p), threads * heads * width)
        buffer = load_int(p + 24) + thread * load_int(p + 32)
        y = floats(buffer, heads * dim)
        for head in range(heads):
            top = np.float32(-1e30)
            for t in range(threads):
                top = max(top, partial[(t * heads + head) * width + dim])
            total = np.float32(0)
            out = y[head * dim : head * dim + dim]
            out[:] = np.float32(0)
            for t in range(threads):
                part = partial[(t * heads + head) * width : (t * heads + head + 1) * width]
                share = exp(part[dim] - top)
                total += share * part[dim + 1]
                for i in range(dim):
                    out[i] += share * part[i]
            inverse = np.float32(1) / total
            for i in range(dim):
                out[i] *= inverse
        rotate(buffer, heads * dim, block)
        quantize(buffer, heads * dim)

    return run
