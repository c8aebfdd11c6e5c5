"""Attention of one token over a cache, the positions cut between the threads.

With query q of a head, keys k and values v of the positions it sees, out = softmax(q k^T * scale) v. Each thread works
on some of the positions, in chunks that stay in the first level of cache, with a streaming softmax: it keeps the
largest score so far (top), the sum of e^(score - top) and the sum of e^(score - top) * value, and multiplies both by
e^(old top - new top) when top grows. `ops.combine` joins the threads' results the same way.

Query heads that share a key/value head are done together, so a key or value is read once for all of them. The last
thread, whose share ends with the current position, first puts the token's own key and value in the cache.
"""

from __future__ import annotations

import functools

import numpy as np

from quantkit.jit import Callback, callback, kernel
from quantkit.runtime.kernels.cpu.ops import SIGNATURE
from quantkit.simd import F32, I16, Emit, Value, emitted, floats, load_float, load_int, vector

CHUNK = 64  # positions
PARAMETERS = ("state", "q", "k", "v", "cos", "sin", "rope_dim", "step", "pair", "k_cache", "v_cache", "kv_heads",
              "scale", "window", "partial", "scratch", "stride")  # fmt: skip
# state: int64[1], the position. step, pair: pair j of rope is elements j * step and j * step + pair.
# scale points to a float32. scratch, stride: of each thread, scratch_bytes(...).

_FLOATS16 = vector(16, F32)


def scratch_bytes(heads: int, dim_k: int, group: int) -> int:
    return 4 * (heads * dim_k + group * CHUNK + max(dim_k, 16))


@kernel
def rope_into(x, out, dim, cos, sin, rope_dim, step, pair, scale):
    """out = x turned by the angles of a position (cos, sin float32[rope_dim / 2]), times scale; float32[dim]."""
    for i in range(rope_dim, dim):
        out[i] = x[i] * scale
    for j in range(rope_dim // 2):
        a, b = x[j * step], x[j * step + pair]
        out[j * step] = (a * cos[j] - b * sin[j]) * scale
        out[j * step + pair] = (a * sin[j] + b * cos[j]) * scale


@emitted("void")
def keep(e: Emit, x: Value, n: Value, half: int, row: Value) -> None:
    """Write n floats to a cache's row, as halves or floats; n a multiple of 16."""
    with e.loop(0, n, 16) as i:
        v = e.load(_FLOATS16, x + i * 4)
        e.store(e.float_to_half(v) if half else v, row + i * (2 if half else 4))


def _row(e: Emit, address: Value, half: int) -> Value:
    """16 elements of a cache's row."""
    return e.half_to_float(e.load(vector(16, I16), address)) if half else e.load(_FLOATS16, address)


@emitted("void")
def chunk_scores(
    e: Emit, q: Value, keys: Value, stride: Value, count: Value, group: int, dim: int, half: int, scores: Value
) -> None:
    """scores[g, i] = q[g] . key i, for `group` queries float32[dim] and `count` rows, `stride` bytes apart."""
    width = 2 if half else 4

    def positions(i, many):
        sums: dict[tuple[int, int], Value] = {}
        for c in range(0, dim, 16):
            queries = [e.load(_FLOATS16, q + 4 * (g * dim + c)) for g in range(group)]
            for r in range(many):
                key = _row(e, keys + (i + r) * stride + c * width, half)
                for g, query in enumerate(queries):
                    sums[g, r] = e.fma(query, key, sums[g, r]) if c else query * key
        for g in range(group):
            four = [sums[g, r] for r in range(many)]
            e.store(e.sum4(*four) if many == 4 else e.sum(four[0]), scores + i * 4 + 4 * CHUNK * g)

    middle = count & -4
    with e.loop(0, middle, 4) as i:
        positions(i, 4)
    with e.loop(middle, count) as i:
        positions(i, 1)


@emitted("void")
def chunk_softmax(e: Emit, scores: Value, count: Value, group: int, dim: int, out: Value) -> None:
    """Replace scores by e^(score - top) and rescale out float32[group, dim + 2] where top grows."""
    lowest = e.constant(F32, -1e30)
    for g in range(group):
        mine, result = scores + 4 * CHUNK * g, out + 4 * g * (dim + 2)
        with e.loop(count, (count + 15) & -16) as i:  # what the vectors read beyond the end counts for nothing
            e.store(lowest, mine + i * 4)
        old = e.load(F32, result + 4 * dim)
        top = e.variable(e.splat(old, 16))
        with e.loop(0, count, 16) as i:
            top.set(e.max(top.get(), e.load(_FLOATS16, mine + i * 4)))
        new = e.largest(top.get())
        shrink = e.exp(e.splat(old - new, 16))
        total = e.variable(e.zero(_FLOATS16))
        with e.loop(0, count, 16) as i:
            weights = e.exp(e.load(_FLOATS16, mine + i * 4) - e.splat(new, 16))
            e.store(weights, mine + i * 4)
            total.set(total.get() + weights)
        for c in range(0, dim, 16):
            e.store(e.load(_FLOATS16, result + 4 * c) * shrink, result + 4 * c)
        e.store(new, result + 4 * dim)
        before = e.load(F32, result + 4 * dim + 4) * shrink.lane(0)
        e.store(before + e.sum(total.get()), result + 4 * dim + 4)


@emitted("void")
def chunk_values(
    e: Emit, weights: Value, values: Value, stride: Value, count: Value, group: int, dim: int, half: int, out: Value
) -> None:
    """out[g] += sum over i of weights[g, i] * value i."""
    width = 2 if half else 4
    together = max(1, 16 // (dim // 16))
    for start in range(0, group, together):
        heads = range(start, min(group, start + together))
        places = [(g, c, out + 4 * (g * (dim + 2) + c)) for g in heads for c in range(0, dim, 16)]
        totals = {(g, c): e.variable(e.load(_FLOATS16, address)) for g, c, address in places}
        with e.loop(0, count) as i:
            row = values + i * stride
            for c in range(0, dim, 16):
                value = _row(e, row + c * width, half)
                for g in heads:
                    weight = e.splat(e.load(F32, weights + i * 4 + 4 * CHUNK * g), 16)
                    totals[g, c].set(e.fma(weight, value, totals[g, c].get()))
        for g, c, address in places:
            e.store(totals[g, c].get(), address)


@functools.cache
def attention(group: int, dim_k: int, dim_v: int, half: int) -> Callback:
    """The operation for models with `group` query heads a key/value head and heads of these dimensions.

    `half`: the cache holds halves (1) or floats (0). Dimensions are multiples of 16.
    """
    width = 2 if half else 4

    @callback(SIGNATURE)
    def run(p, thread, threads):
        position, kv_heads = load_int(load_int(p)), load_int(p + 88)
        rope_dim, step, pair = load_int(p + 48), load_int(p + 56), load_int(p + 64)
        cos = floats(load_int(p + 32) + position * rope_dim * 2, rope_dim // 2)
        sin = floats(load_int(p + 40) + position * rope_dim * 2, rope_dim // 2)
        scale, window = load_float(load_int(p + 96)), load_int(p + 104)
        heads = kv_heads * group
        queries = load_int(p + 120) + thread * load_int(p + 128)
        scores = queries + heads * dim_k * 4
        turned = scores + group * CHUNK * 4
        k_stride, v_stride = kv_heads * dim_k * width, kv_heads * dim_v * width
        k_cache, v_cache = load_int(p + 72), load_int(p + 80)
        for head in range(heads):
            x, y = floats(load_int(p + 8) + head * dim_k * 4, dim_k), floats(queries + head * dim_k * 4, dim_k)
            rope_into(x, y, dim_k, cos, sin, rope_dim, step, pair, scale)
        if thread == threads - 1:
            for head in range(kv_heads):
                x, y = floats(load_int(p + 16) + head * dim_k * 4, dim_k), floats(turned, dim_k)
                rope_into(x, y, dim_k, cos, sin, rope_dim, step, pair, np.float32(1))
                keep(turned, dim_k, half, k_cache + position * k_stride + head * dim_k * width)
            keep(load_int(p + 24), kv_heads * dim_v, half, v_cache + position * v_stride)
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
            for at in range(begin, end, CHUNK):
                many = min(CHUNK, end - at)
                keys = k_cache + at * k_stride + head * dim_k * width
                values = v_cache + at * v_stride + head * dim_v * width
                mine = queries + head * group * dim_k * 4
                chunk_scores(mine, keys, k_stride, many, group, dim_k, half, scores)
                chunk_softmax(scores, many, group, dim_v, result)
                chunk_values(scores, values, v_stride, many, group, dim_v, half, result)

    return run
